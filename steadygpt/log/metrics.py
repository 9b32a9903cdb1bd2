"""The files in which a run describes itself to other programs: metrics.jsonl and status.json.

Each launch of a run appends a segment to metrics.jsonl: a LaunchLine, then a record of numbers for each measurement.
A run that resumes at step s measures the steps from s on again. So from s on, its records replace those of the launches
before.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from steadygpt.base.durable import fsync
from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, parse_json, read_json

METRICS, STATUS, LOG = "metrics.jsonl", "status.json", "log.txt"
LOGS = (LOG, METRICS)  # which a run only appends to
LINE = re.compile(rb'\{"step": (\d{1,18}), (?:"time": [\d.]+, "first_step": (\d{1,18}), )?')  # beginning of any line
Record = dict[str, float | None]  # "step", "time" and what was measured; None: NaN or infinity, which JSON lacks


class LaunchLine(TypedDict):
    """The line with which a launch begins its segment of metrics.jsonl."""

    step: Count
    first_step: Count  # the same: the first step
    run: str  # id of the run
    id: str  # of the launch
    parent: str  # id of the launch that wrote the checkpoint; "" for a new run
    how: dict[str, Any]  # what determines a step besides the checkpoint, by name
    wandb: str  # id of the run in Weights & Biases, "" if it is not online


# fmt: off
Status = TypedDict("Status", {  # noqa: UP013 (a line for each type); times are in Unix seconds
    "status": str, "reason": str, "doing": str, "run_name": str, "mirror": str, "device": str,
    "host": str, "resume": str, "summary": list[str], "warnings": list[str],
    "load": dict[str, float], "pid": Count, "ranks": Count, "step": Count, "max_steps": Count,
    "tokens": Count, "eta_s": float, "checkpoint_bytes": Count, "loss": float, "val_loss": float, "val_bpb": float,
    "best_val_loss": float, "hellaswag_acc_norm": float,
    "lr": float, "grad_norm": float, "memory_gb": float, "epoch": float, "tokens_per_second": float, "step_ms": float,
    "mfu": float, "elapsed_s": float, "cost": float, "cost_to_go": float, "updated_at": float, "mirrored_at": float,
}, total=False)
# fmt: on


class LineFile:
    """A file that lines are appended to."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path.open("a+b")
        size = self.file.seek(0, os.SEEK_END)
        if size:
            self.file.seek(size - 1)
            if self.file.read() != b"\n":  # a power cut or a full disk has broken the last line
                self.file.write(b"\n")
        self.close = self.file.close

    def write(self, line: str) -> None:
        self.file.write(f"{line}\n".encode())
        self.file.flush()

    def flush(self) -> None:
        """Make the lines durable."""
        self.file.flush()
        fsync(self.file.fileno())

    def is_replaced(self) -> bool:
        """Return whether the path no longer leads to this file: it was removed, or rotated."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return True


class Metrics(LineFile):
    """metrics.jsonl: a line of JSON for each record."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record."""
        self.write(json.dumps({"step": step, "time": round(time.time(), 3), **without_nan(values)}))


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None in place of NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def segments(path: Path, first_step: float = 0, key: str = "step") -> Iterator[tuple[LaunchLine, list[Record]]]:
    """Yield the launches in a metrics.jsonl, the last one first, each with the records that no later launch repeats.

    Broken lines are skipped, and so are records before `first_step` or without `key`.
    """
    records: list[Record] = []
    end: float = math.inf  # the step at which later launches begin
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in reversed(file.readlines()):
            match = LINE.match(line)
            if not match:
                continue
            with suppress(UserError):
                if match[2]:
                    launch = parse_json(line, LaunchLine, path, "")
                    yield launch, records[::-1]
                    records = []
                    end = min(end, launch["first_step"])
                elif first_step <= int(match[1]) < end and b'"%s": ' % key.encode() in line:
                    records.append(parse_json(line, Record, path, ""))


def launches_from(
    path: Path, offset: int, launch: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], list[Record]]]:
    """Yield the launches in a metrics.jsonl from an offset on, each with its records, in the order of the file.

    Args:
        launch: the one whose records are at the offset.
    """
    records: list[Record] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        for line in file:
            match = LINE.match(line)
            if not match:
                continue
            with suppress(UserError):  # a power cut has broken the line
                if match[2]:
                    next_launch = parse_json(line, LaunchLine, path, "")
                    yield launch, records
                    launch = next_launch
                    records = []
                else:
                    records.append(parse_json(line, Record, path, ""))
    yield launch, records


def read_records(path: Path, key: str = "step") -> list[Record]:
    """Return the records of a metrics.jsonl that have a key and that no later launch repeats, from the first on."""
    records = []
    for _, segment in reversed([*segments(path, key=key)]):
        records += segment
    return records


def read_status(folder: Path) -> Status:
    """Return what status.json says, {} if there is none or its content does not fit."""
    with suppress(OSError, UserError):
        return read_json(folder / STATUS, Status, "")
    return {}
