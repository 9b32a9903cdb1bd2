"""Steps that are computed twice: a comparison with their records in the log."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.text import counted, printable
from steadygpt.log.metrics import LaunchLine, Record, segments, without_nan
from steadygpt.log.runlog import RunLog
from steadygpt.run.launches import difference

NUMBERS = ("loss", "grad_norm", "lr")  # of a record that are compared
# The usual differences of repeated steps where equal launches need not compute the same bits: steps after the
# checkpoint, fewer than this -> relative difference of a loss, and of a gradient norm. The limits have some room above
# the largest differences that `python -m benchmarks.repeated_steps` has measured. Training amplifies differences, so
# later gradient norms have no limit.
USUAL = {1: (1e-3, 1e-2), 10: (5e-3, 0.3), math.inf: (0.1, math.inf)}
CAUSES = "causes are in docs/checkpoints.md, Repeated steps"


def repeated_records(path: Path, step: int, parent: str, settings: Mapping[str, Any]) -> tuple[dict[int, Record], str]:
    """Read from a metrics.jsonl the records of the steps that a run repeats after a checkpoint.

    Args:
        step: of the checkpoint.
        parent: id of the launch that wrote the checkpoint.
        settings: "how" of this launch, see note_of_launch(); only launches with the same settings can be compared.

    Returns: step -> record, up to the first one that cannot be compared; and why it cannot, "" if all can.
    """
    launches: list[tuple[LaunchLine, list[Record]]] = []
    for launch, records in segments(path, step, "loss"):
        launches.append((launch, records))
        if launch["id"] == parent or launch["first_step"] < step:  # earlier launches have no such records
            break
    comparable: dict[int, Record] = {}
    descended = {parent}  # ids of the launches that continue from the steps of the checkpoint
    for launch, records in reversed(launches):
        if launch["parent"] in descended and launch["first_step"] >= step:
            descended.add(launch["id"])
        if not records:
            continue
        if launch["id"] not in descended:
            return comparable, "their records do not descend from this checkpoint"
        changes = difference(launch["how"], settings)
        if changes:
            return comparable, printable(changes)
        for record in records:
            comparable[int(record["step"] or 0)] = record
    return comparable, ""


def usual_differences(steps: int) -> dict[str, float]:
    """Return the relative differences that are usual so many steps after a checkpoint, by number of a record."""
    loss, grad_norm = next(bounds for limit, bounds in USUAL.items() if steps < limit)
    return {"loss": loss, "grad_norm": grad_norm}  # a learning rate is always the same


@dataclass
class Comparison:
    """Compares steps with their records, up to the first one that differs by more than is usual.

    Where equal launches compute the same bits, no difference is usual.
    """

    first_step: int  # that of the checkpoint
    is_exact: bool = True  # equal launches compute the same bits
    steps: int = 0  # compared so far
    last_step: int = 0  # the last one compared
    largest_differences: dict[str, float] = field(default_factory=dict)  # relative, so far, by number of a record
    first_difference: str = ""  # in words, the first step and number that differ by more than is usual

    def add(self, step: int, recorded: Record, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step with its record."""
        if self.first_difference:
            return
        self.steps += 1
        self.last_step = step
        measured = without_nan(measured)  # as in the record
        bounds = {} if self.is_exact else usual_differences(step - self.first_step)
        for name in NUMBERS:
            before = recorded.get(name)
            now = measured.get(name)
            if before == now:
                continue
            old = before or 0.0  # a number that is not finite counts as 0
            new = now or 0.0
            relative_difference = abs(new - old) / (max(abs(new), abs(old)) or 1.0)
            bound = bounds.get(name, 0.0)
            is_one_finite = (before is None) != (now is None)
            if self.is_exact or is_one_finite or relative_difference > bound:
                text = f"repeated step {step:,} has {name} {json.dumps(now)}, but had {json.dumps(before)} before"
                if bound and not (self.is_exact or is_one_finite):
                    text += f", more than the {bound:g} (relative) that are usual without --deterministic"
                self.first_difference = text
                return
            largest = self.largest_differences.get(name, 0.0)
            self.largest_differences[name] = max(largest, relative_difference)

    def result(self) -> str:
        """Return in words which steps were compared and how closely they agree; "" if none was compared."""
        if self.first_difference or not self.steps:
            return self.first_difference
        steps = self.last_step - self.first_step + 1
        repeated = f"repeated {counted(steps, 'step')}"
        if self.steps < steps:
            repeated += f" ({self.steps:,} logged)"
        if not self.largest_differences:
            return f"{repeated}, bit for bit the same losses"
        largest = self.largest_differences.get("loss", 0)
        return f"{repeated}, losses within {largest:.1g} of those before"


@dataclass
class Repeats:
    """Compares the steps that a resumed run repeats; does nothing on ranks other than 0, which have no records."""

    log: RunLog
    step: int = 0  # at which the run has resumed
    records: dict[int, Record] = field(default_factory=dict)  # by step, those that are not compared yet
    reason: str = ""  # why the steps after these records are not compared
    is_exact: bool = True  # equal launches compute the same bits

    def __post_init__(self) -> None:
        self.comparison = Comparison(self.step, self.is_exact)

    def add(self, step: int, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step, and report after the last repeated one."""
        record = self.records.pop(step, None)
        if record:
            self.comparison.add(step, record, measured)
        if self.comparison.first_difference or not self.records:
            self.report()

    def report(self) -> None:
        """Log the result once and stop comparing, also in a run that ends before the last repeated step."""
        comparison = self.comparison
        reason = self.reason
        self.comparison = Comparison(self.step, self.is_exact)
        self.records = {}
        self.reason = ""
        parts = []
        if comparison.steps:
            parts.append(comparison.result())
        if reason and not comparison.first_difference:
            which = "later" if comparison.steps else "repeated"
            parts.append(f"{which} steps are not compared: {reason}")
        if not parts:
            return
        line = f"resumed at step {self.step:,}: {'; '.join(parts)}"
        self.log.note(resume=line)  # for status.json
        if comparison.first_difference:
            self.log.warn(f"{line}; {CAUSES}", event="resume differs")
        else:
            self.log.say(line)
