"""Steps that a resumed run repeats, compared with their records in the log."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.durable import lines_from_end
from steadygpt.base.options import UserError
from steadygpt.base.text import counted, printable
from steadygpt.base.typed import parse_json
from steadygpt.log.runlog import Metrics, RunLog
from steadygpt.run.starts import difference

NUMBERS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}  # of a record that are compared
ADVICE = (
    "Memory, disk or GPU may have failed, the code may have changed, or a kernel is not deterministic; training "
    "continues. See docs/checkpoints.md, Repeated steps"
)


def repeated_records(
    path: Path, step: int, course: str, now: Mapping[str, Any] | None = None
) -> tuple[dict[int, dict[str, Any]], str]:
    """Read the records in a metrics.jsonl of the steps that a run repeats from a checkpoint on.

    Args:
        step: of the checkpoint.
        course: of the checkpoint, see course_of().
        now: what determines a step of this start, by name: only records of such starts are read. None: those of any.

    Returns: step -> record, up to the first one that cannot be compared; and why not, "" if all can.
    """
    found: dict[int, dict[str, Any]] = {}
    start: dict[str, Any] = {}  # that has made the records
    for record in _records(path, step):
        if "start" in record:
            start = record
            if record["step"] >= step:  # this start had resumed from the records above, or from the same checkpoint
                # Of the weights at this line of the log; "" once they do not descend from the checkpoint.
                course = record.get("course", "") if record.get("parent") == course else ""
        elif "loss" in record:
            if not start:
                return found, f"{path.name} does not say which start wrote their records"
            if start.get("course") != course:
                return found, "their records do not descend from this checkpoint"
            if now is not None and (differs := difference(start["start"], now)):
                return found, printable(differs)
            found[record["step"]] = {name: record.get(name) for name in NUMBERS}
    return found, ""


def _records(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the records from a step on, and the starts that have made them; broken lines are skipped."""
    records: list[dict[str, Any]] = []
    is_past = False  # lines of earlier steps have begun
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in lines_from_end(file):
            is_start = b'"start": {' in line
            if (is_past and not is_start) or not (match := Metrics.step_of.match(line)):
                continue
            is_past |= int(match[1]) < step
            if is_start or (not is_past and b'"loss": ' in line):
                with suppress(UserError):
                    kind = dict[str, Any] if is_start else dict[str, float | None]
                    records.append(parse_json(line, kind, path, ""))
            if is_past and (not records or "start" in records[-1]):  # of the first record, the start is known
                break
    return records[::-1]


@dataclass
class Repeats:
    """Compares the steps that a resumed run repeats; does nothing on ranks other than 0, which have no records."""

    log: RunLog
    step: int = 0  # where the run has resumed
    records: dict[int, dict[str, Any]] = field(default_factory=dict)  # to compare, by step
    reason: str = ""  # why further ones are not compared
    is_exact: bool = True  # equal starts compute the same bits
    compared: int = 0
    largest: float = 0.0  # relative difference so far

    def __post_init__(self):
        self.last = max(self.records, default=self.step)

    def add(self, step: int, **measured: float) -> None:
        """Compare the measurements of a step, and report after the last repeated one."""
        if record := self.records.get(step):
            self.compared += 1
            for name, noun in NUMBERS.items():
                before, now = record[name], measured[name] if math.isfinite(measured[name]) else None  # as in JSON
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
