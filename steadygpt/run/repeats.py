"""Steps that a resumed run repeats, compared with their records in the log."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.text import counted, printable
from steadygpt.log.metrics import Record, segments, without_nan
from steadygpt.log.runlog import RunLog
from steadygpt.run.starts import difference

NUMBERS = ("loss", "grad_norm", "lr", "digest")  # of a record that are compared


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
        found |= {int(record["step"] or 0): record for record in records}
    return found, ""


@dataclass
class Repeats:
    """Compares the steps that a resumed run repeats; does nothing on ranks other than 0, which have no records."""

    log: RunLog
    step: int = 0  # where the run has resumed
    records: dict[int, Record] = field(default_factory=dict)  # that are not compared yet, by step
    reason: str = ""  # why further ones are not compared
    is_exact: bool = True  # equal starts compute the same bits
    compared: int = 0
    largest: float = 0.0  # relative difference so far
    differs: bool = False  # although it is exact

    def add(self, step: int, measured: Mapping[str, float | None]) -> None:
        """Compare the measurements of a step, and report after the last repeated one."""
        if record := self.records.pop(step, None):
            self.compared += 1
            measured = without_nan(measured)  # as in the record
            for name in NUMBERS:
                before, now = record.get(name), measured.get(name)
                if name == "digest" and (None in (before, now) or not self.is_exact):  # some steps have none
                    continue
                if before != now and self.is_exact:
                    numbers = f"{name} {json.dumps(now)}, but had {json.dumps(before)} before"
                    line = self._ended(f"repeated step {step:,} has {numbers}")
                    causes = "causes are in docs/checkpoints.md, Repeated steps"
                    self.differs = True
                    self.log.warn(f"{line}; {causes}", event="resume differs")
                    return
                old, new = before or 0.0, now or 0.0  # a number that is not finite counts as 0
                self.largest = max(self.largest, abs(new - old) / (max(abs(new), abs(old)) or 1.0))
        if not self.records:
            self.report()

    def report(self) -> None:
        """Log the result, also of a run that ends before the last repeated step."""
        parts, same = [], "losses, gradient norms and learning rates"
        if self.compared:
            within = f"{same} within {self.largest:.1g} of those before (relative), as is usual without --deterministic"
            result = within if self.largest else f"bit for bit the same {same}"
            parts.append(f"repeated {counted(self.compared, 'step')}, {result}")
        if self.reason:
            parts.append(f"{'later' if self.compared else 'repeated'} steps are not compared: {self.reason}")
        if parts:
            self.log.say(self._ended("; ".join(parts)))

    def _ended(self, result: str) -> str:
        """Compare no more; keep the result for status.json, and return it as a line for the log."""
        self.records, self.compared, self.reason = {}, 0, ""
        line = f"resumed at step {self.step:,}: {result}"
        self.log.note(resume=line)
        return line
