"""Comparison of the steps that a resumed run repeats with their records in metrics.jsonl."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.text import counted, printable
from steadygpt.checkpoint.files import LaunchRecord
from steadygpt.log.metrics import Record, launches_from, without_nan
from steadygpt.log.runlog import RunLog

NUMBERS = ("loss", "grad_norm", "lr")  # of a record that are compared
# Tolerated differences of repeated steps if identical launches may compute different bits: fewer steps after the
# checkpoint than this -> relative difference of the loss, and of the gradient norm. The limits have some room above the
# largest differences that `python -m benchmarks.repeated_steps` has measured. Training amplifies differences, so later
# gradient norms have no limit.
USUAL = {1: (1e-3, 1e-2), 10: (5e-3, 0.3), math.inf: (0.1, math.inf)}
CAUSES = "causes are in docs/checkpoints.md, Repeated steps"


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which settings differ between two launches, such as "ranks 2 -> 1"; "" if none does."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)


def usual_differences(steps: int) -> dict[str, float]:
    """Return the tolerated relative difference of each metric, `steps` steps after a checkpoint."""
    loss, grad_norm = next(bounds for limit, bounds in USUAL.items() if steps < limit)
    return {"loss": loss, "grad_norm": grad_norm}  # a learning rate is always the same


@dataclass
class Repeats:
    """The comparison of the steps that a resumed run repeats, up to the first difference that is not tolerated.

    If identical launches compute the same bits, no difference is tolerated.
    """

    step: int  # at which the run has resumed
    records: dict[int, Record] = field(default_factory=dict)  # by step, not compared yet
    reason: str = ""  # why the steps after these records are not compared
    is_exact: bool = True  # identical launches compute the same bits
    compared: int = 0  # steps
    last_step: int = 0  # the last one compared
    largest: float = 0.0  # relative difference of a number so far
    largest_of_loss: float = 0.0
    first_difference: str = ""  # text about the first difference that is not tolerated

    @classmethod
    def read(
        cls, path: Path, offset: int, step: int, parent: LaunchRecord, settings: Mapping[str, Any], is_exact: bool
    ) -> "Repeats":
        """Read from a metrics.jsonl the records of the steps that a run repeats after a checkpoint.

        Args:
            offset: of the record after the checkpoint, in bytes.
            parent: the launch that wrote the checkpoint; the records at the offset are its own.
            settings: of this launch; only launches with the same settings can be compared.
        """
        repeats = cls(step, is_exact=is_exact)
        descended = {parent["id"]}  # launches that continue from the steps of the checkpoint
        for launch, records in launches_from(path, offset, parent):
            if launch["parent"] in descended and launch["step"] >= step:
                descended.add(launch["id"])
            records = [record for record in records if (record["step"] or 0) >= step and "loss" in record]
            if not records:
                continue
            if launch["id"] not in descended:
                repeats.reason = "their records do not descend from this checkpoint"
                break
            changes = difference(launch["settings"], settings)
            if changes:
                repeats.reason = printable(changes)
                break
            first = int(records[0]["step"] or 0)
            kept = {number: record for number, record in repeats.records.items() if number < first}
            repeats.records = kept | {int(record["step"] or 0): record for record in records}
        return repeats

    def add(self, step: int, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step with its record, if there is one."""
        record = self.records.pop(step, None)
        if record is None or self.first_difference:
            return
        self.compared += 1
        self.last_step = step
        measured = without_nan(measured)  # as in the record
        bounds = {} if self.is_exact else usual_differences(step - self.step)
        for name in NUMBERS:
            before = record.get(name)
            now = measured.get(name)
            if before == now:
                continue
            old = before or 0.0  # a number that is not finite counts as 0
            new = now or 0.0
            relative = abs(new - old) / (max(abs(new), abs(old)) or 1.0)
            bound = bounds.get(name, 0.0)
            is_one_finite = (before is None) != (now is None)
            if self.is_exact or is_one_finite or relative > bound:
                text = f"repeated step {step:,} has {name} {json.dumps(now)}, but had {json.dumps(before)} before"
                if bound and not (self.is_exact or is_one_finite):
                    text += f", more than the {bound:g} (relative) that are usual without --deterministic"
                self.first_difference = text
                return
            self.largest = max(self.largest, relative)
            if name == "loss":
                self.largest_of_loss = max(self.largest_of_loss, relative)

    def result(self) -> str:
        """Return a text about which steps were compared and how closely they agree; "" if there are none."""
        parts = []
        if self.first_difference:
            return self.first_difference
        if self.compared:
            steps = self.last_step - self.step + 1
            repeated = f"repeated {counted(steps, 'step')}"
            if self.compared < steps:
                repeated += f" ({self.compared:,} logged)"
            if self.largest:
                parts.append(f"{repeated}, losses within {self.largest_of_loss:.1g} of those before")
            else:
                parts.append(f"{repeated}, bit for bit the same losses")
        if self.reason:
            which = "later" if self.compared else "repeated"
            parts.append(f"{which} steps are not compared: {self.reason}")
        return "; ".join(parts)


def compare_step(repeats: Repeats, log: RunLog, step: int, measured: Mapping[str, float | None]) -> None:
    """Compare a step, and report after the last repeated one."""
    repeats.add(step, measured)
    if repeats.first_difference or not repeats.records:
        report(repeats, log)


def report(repeats: Repeats, log: RunLog) -> None:
    """Log the result once and stop comparing, also in a run that ends before the last repeated step."""
    result = repeats.result()
    is_different = bool(repeats.first_difference)
    repeats.records = {}
    repeats.reason = ""
    repeats.compared = 0
    repeats.first_difference = ""
    if not result:
        return
    line = f"resumed at step {repeats.step:,}: {result}"
    log.note(resume=line)  # for status.json
    if is_different:
        log.warn(f"{line}; {CAUSES}", event="resume differs")
    else:
        log.say(line)
