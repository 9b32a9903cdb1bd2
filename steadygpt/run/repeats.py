"""Steps that are computed twice: a comparison with their records in the log."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.options import UserError
from steadygpt.base.text import counted, printable
from steadygpt.log.metrics import LaunchLine, Record, segments, without_nan
from steadygpt.log.runlog import RunLog
from steadygpt.run.launches import difference

NUMBERS = ("loss", "grad_norm", "lr", "digest")  # of a record that are compared
# Where bits are not promised: steps after the checkpoint -> relative difference of a loss that is usual, and of a
# gradient norm. The largest that `python -m benchmarks.repeated_steps` has measured, with room; later gradient norms
# differ by anything, because training amplifies differences.
USUAL = {1: (1e-3, 1e-2), 10: (5e-3, 0.3), math.inf: (0.1, math.inf)}
CAUSES = "causes are in docs/checkpoints.md, Repeated steps"


def repeated_records(path: Path, step: int, parent: str, how: Mapping[str, Any]) -> tuple[dict[int, Record], str]:
    """Read the records in a metrics.jsonl of the steps that a run repeats from a checkpoint on.

    Args:
        step: of the checkpoint.
        parent: id of the launch that wrote it.
        how: what determines a step of this launch, by name: only records of such launches are read.

    Returns: step -> record, up to the first one that cannot be compared; and why not, "" if all can.
    """
    launches: list[tuple[LaunchLine, list[Record]]] = []
    for launch, records in segments(path, step, "loss"):
        launches.append((launch, records))
        if launch["id"] == parent or launch["first_step"] < step:  # which repeats whatever came before
            break
    comparable: dict[int, Record] = {}
    descended = {parent}  # launches, as far as they have the checkpoint's steps before them
    for launch, records in reversed(launches):
        if launch["parent"] in descended and launch["first_step"] >= step:
            descended.add(launch["id"])
        if not records:
            continue
        if launch["id"] not in descended:
            return comparable, "their records do not descend from this checkpoint"
        changes = difference(launch["how"], how)
        if changes:
            return comparable, printable(changes)
        for record in records:
            comparable[int(record["step"] or 0)] = record
    return comparable, ""


def recorded_steps(path: Path, first: int, last: int) -> tuple[LaunchLine, dict[int, Record]]:
    """Return the launch in a metrics.jsonl that took two steps, and its records that no later launch repeats."""
    for launch, records in segments(path, key="loss"):  # the newest launch first
        if launch["first_step"] > first or not records:
            continue
        record_of_step = {int(record["step"] or 0): record for record in records}
        if last in record_of_step:
            return launch, record_of_step
        recorded = f"has records of steps {min(record_of_step):,} to {max(record_of_step):,}, not of step {last:,}"
        raise UserError(
            f"{path}: the launch at step {launch['first_step']:,} {recorded}; choose recorded steps of one launch"
        )
    raise UserError(f"{path}: no record of step {first:,}; choose other steps, or restore the logs")


def usual(steps: int) -> dict[str, float]:
    """Return the relative differences of numbers that are usual so many steps after a checkpoint."""
    loss, grad_norm = next(bounds for limit, bounds in USUAL.items() if steps < limit)
    return {"loss": loss, "grad_norm": grad_norm}  # a learning rate is always the same


@dataclass
class Comparison:
    """Compares steps with their records, up to the first one that differs by more than is usual.

    Where equal launches compute the same bits, no difference is usual.
    """

    first: int  # step of the checkpoint that the steps come from
    is_exact: bool = True  # equal launches compute the same bits
    steps: int = 0  # compared so far
    last: int = 0  # the last one of them
    largest: dict[str, float] = field(default_factory=dict)  # relative difference so far, by number
    differs: str = ""  # the first step and number that differ by more than is usual

    def add(self, step: int, recorded: Record, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step with its record."""
        if self.differs:
            return
        self.steps += 1
        self.last = step
        measured = without_nan(measured)  # as in the record
        bounds = {} if self.is_exact else usual(step - self.first)
        for name in NUMBERS:
            before = recorded.get(name)
            now = measured.get(name)
            if name == "digest" and (before is None or now is None or not self.is_exact):  # some steps have none
                continue
            if before == now:
                continue
            old = before or 0.0  # a number that is not finite counts as 0
            new = now or 0.0
            difference = abs(new - old) / (max(abs(new), abs(old)) or 1.0)
            bound = bounds.get(name, 0.0)
            is_other_kind = (before is None) != (now is None)  # one of them is not finite
            if self.is_exact or is_other_kind or difference > bound:
                numbers = f"{json.dumps(now)}, but had {json.dumps(before)} before"
                self.differs = f"repeated step {step:,} has {name} {numbers}"
                if bound and not (self.is_exact or is_other_kind):
                    self.differs += f", more than the {bound:g} (relative) that are usual without --deterministic"
                return
            self.largest[name] = max(self.largest.get(name, 0.0), difference)

    def result(self) -> str:
        """Return what was compared, and whether it is bit for bit the same; "" if nothing was."""
        if self.differs or not self.steps:
            return self.differs
        steps = self.last - self.first + 1
        repeated = f"repeated {counted(steps, 'step')}"
        if self.steps < steps:
            repeated += f", {self.steps:,} of them recorded"
        if not self.largest:
            return f"{repeated}, bit for bit the same losses, gradient norms and learning rates"
        losses = f"losses within {self.largest.get('loss', 0):.1g}"
        norms = f"gradient norms within {self.largest.get('grad_norm', 0):.1g}"
        return f"{repeated}, {losses} and {norms} of those before (relative)"


@dataclass
class Repeats:
    """Compares the steps that a resumed run repeats; does nothing on ranks other than 0, which have no records."""

    log: RunLog
    step: int = 0  # where the run has resumed
    records: dict[int, Record] = field(default_factory=dict)  # that are not compared yet, by step
    reason: str = ""  # why further ones are not compared
    is_exact: bool = True  # equal launches compute the same bits

    def __post_init__(self) -> None:
        self.comparison = Comparison(self.step, self.is_exact)

    def add(self, step: int, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step, and report after the last repeated one."""
        record = self.records.pop(step, None)
        if record:
            self.comparison.add(step, record, measured)
        if self.comparison.differs or not self.records:
            self.report()

    def report(self) -> None:
        """Log the result once, also of a run that ends before the last repeated step, and compare no more."""
        comparison = self.comparison
        reason = self.reason
        self.comparison = Comparison(self.step, self.is_exact)
        self.records = {}
        self.reason = ""
        parts = []
        if comparison.steps:
            result = comparison.result()
            if comparison.largest and not comparison.differs:
                result += ", as is usual without --deterministic"
            parts.append(result)
        if reason and not comparison.differs:
            which = "later" if comparison.steps else "repeated"
            parts.append(f"{which} steps are not compared: {reason}")
        if not parts:
            return
        line = f"resumed at step {self.step:,}: {'; '.join(parts)}"
        self.log.note(resume=line)  # for status.json
        if comparison.differs:
            self.log.warn(f"{line}; {CAUSES}", event="resume differs")
        else:
            self.log.say(line)
