"""Steps that a resumed run repeats, compared with their records in the log."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.text import counted, printable
from steadygpt.log.metrics import Record, segments, without_nan
from steadygpt.log.runlog import RunLog
from steadygpt.run.starts import difference

NUMBERS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}  # of a record that are compared
ADVICE = (
    "Memory, disk or GPU may have failed, the code may have changed, or a kernel is not deterministic; training "
    "continues. See docs/checkpoints.md, Repeated steps"
)


def repeated_records(
    path: Path, step: int, parent: str, how: Mapping[str, Any] | None = None
) -> tuple[dict[int, Record], str]:
    """Read the records in a metrics.jsonl of the steps that a run repeats from a checkpoint on.

    Args:
        step: of the checkpoint.
        parent: id of the start that wrote it; "" for a replay from the first step.
        how: what determines a step of this start, by name: only records of such starts are read. None: those of any.

    Returns: step -> record, up to the first one that cannot be compared; and why not, "" if all can.
    """
    starts = []
    for start, records in segments(path, step, "loss"):
        starts.append((start, records))
        if start["id"] == parent or start["start"] < step:  # which repeats whatever came before
            break
    found: dict[int, Record] = {}
    descended = {parent}  # starts, as far as they have the checkpoint's steps before them
    for start, records in reversed(starts):
        if start["parent"] in descended and start["start"] >= step:
            descended.add(start["id"])
        if records and start["id"] not in descended:
            return found, "their records do not descend from this checkpoint"
        if records and how is not None and (differs := difference(start["how"], how)):
            return found, printable(differs)
        found |= {int(record["step"] or 0): {name: record.get(name) for name in NUMBERS} for record in records}
    return found, ""


@dataclass
class Repeats:
    """Compares the steps that a resumed run repeats; does nothing on ranks other than 0, which have no records."""

    log: RunLog
    step: int = 0  # where the run has resumed
    records: dict[int, Record] = field(default_factory=dict)  # to compare, by step
    reason: str = ""  # why further ones are not compared
    is_exact: bool = True  # equal starts compute the same bits
    compared: int = 0
    largest: float = 0.0  # relative difference so far

    def __post_init__(self):
        self.last = max(self.records, default=self.step)

    def add(self, step: int, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step, and report after the last repeated one."""
        if record := self.records.get(step):
            self.compared += 1
            measured = without_nan(measured)  # as in the record
            for name, noun in NUMBERS.items():
                before, now = record[name], measured[name]
                if before == now:
                    continue
                if self.is_exact:
                    old, new = ("NaN or infinity" if number is None else repr(number) for number in (before, now))
                    self._end(f"repeated step {step:,} has {noun} {new}, but had {old} before", ADVICE)
                    return
                if before is None or now is None:
                    self.largest = math.inf
                else:
                    self.largest = max(self.largest, abs(before - now) / max(abs(before), abs(now)))
        if step >= self.last:
            self.report()

    def report(self) -> None:
        """Log the result, also of a run that ends before the last repeated step."""
        total, same = len(self.records), "losses, gradient norms and learning rates"
        if self.reason and not total:
            self._end(f"repeated steps are not compared: {self.reason}")
        elif self.compared and total:
            kind = "step" if total == self.last - self.step + 1 else "logged step"
            count = f"{self.compared:,} of " * (self.compared < total) + counted(total, kind)
            result = f"bit for bit the same {same}"
            if self.largest:
                result = (
                    f"{same} within {self.largest:.1g} of those before (relative), as is usual without --deterministic"
                )
            later = f"; later ones are not compared: {self.reason}" if self.reason else ""
            self._end(f"repeated {count}, {result}{later}")

    def _end(self, result: str, advice: str = "") -> None:
        """Report the result, as a warning if there is advice, and compare no more."""
        self.records, self.reason = {}, ""
        line = f"resumed at step {self.step:,}: {result}"
        self.log.note(resume=line)
        if advice:
            self.log.warn(f"{line}. {advice}", event="resume differs")
        else:
            self.log.say(line)
