"""The files of a run that other programs read: metrics.jsonl, status.json and run.json.

Each launch of a run appends a segment to metrics.jsonl: a LaunchLine, then a record of numbers for each measurement.
A run that resumes at step s measures step s and later steps again, so its records replace earlier ones from s on.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from steadygpt.base.durable import fsync, leads_to, replace_file
from steadygpt.base.options import UserError
from steadygpt.base.text import MAX_NAME, printable
from steadygpt.base.typed import Count, Id, Number, parse_json, read_json

METRICS, STATUS, LOG = "metrics.jsonl", "status.json", "log.txt"
LOGS = (LOG, METRICS)  # which a run only appends to
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# "step", "time" and what was measured; None: NaN or infinity, which JSON lacks
Record = dict[str, Integer | Number | None]


class LaunchLine(TypedDict):
    """The line with which a launch begins its segment of metrics.jsonl."""

    step: Count
    first_step: Count  # the same; marks a LaunchLine
    run: str  # id of the run
    id: str  # of the launch
    parent: str  # id of the launch that wrote the checkpoint; "" for a new run
    settings: dict[str, Any]  # what determines a step besides the checkpoint, by name


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
        return not leads_to(self.path, self.file)


def line_of(step: int, values: Mapping[str, Any]) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps({"step": step, "time": round(time.time(), 3), **without_nan(values)})


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None in place of NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def launches_from(
    path: Path, offset: int = 0, launch: Mapping[str, Any] | None = None
) -> Iterator[tuple[Mapping[str, Any], list[Record]]]:
    """Yield each launch with its records from a metrics.jsonl, in order, from an offset on; skip broken lines.

    Args:
        launch: the one whose records are at the offset; None if a LaunchLine is there.
    """
    records: list[Record] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        for line in file:
            with suppress(UserError):  # a power cut has broken the line
                if b'"first_step": ' in line:
                    next_launch = parse_json(line, LaunchLine, path, "")
                    if launch:
                        yield launch, records
                    launch = next_launch
                    records = []
                    continue
                record = parse_json(line, Record, path, "")
                if record.get("step") is not None:
                    records.append(record)
    if launch:
        yield launch, records


def read_records(path: Path, key: str = "step") -> list[Record]:
    """Return the records of a metrics.jsonl that have a key, without those that a later launch replaces."""
    records: list[Record] = []
    for launch, segment in launches_from(path):
        earlier = [record for record in records if (record["step"] or 0) < launch["first_step"]]
        records = earlier + [record for record in segment if key in record]
    return records


def write_status(folder: Path, facts: Mapping[str, Any], durable: bool) -> None:
    """Replace status.json."""
    path = folder / STATUS
    content = f"{json.dumps({**facts, 'updated_at': time.time()}, indent=2)}\n".encode()
    try:
        replace_file(path, lambda file: file.write(content), durable)
    except OSError:  # a full disk has no room for a second file
        with path.open("r+b") as file:
            file.write(content)
            file.truncate()


def read_status(folder: Path) -> Status:
    """Return status.json, {} if it is missing or invalid."""
    with suppress(OSError, UserError):
        return read_json(folder / STATUS, Status, "")
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# run.json: the identity of a run. A copy of its folder is another run, as long as the original exists

RUN = "run.json"


class RunFile(TypedDict):
    """The content of run.json."""

    id: Id
    name: str
    folder: str  # its real path at the last launch
    mirror: str  # of the last launch, or ""; only for a note, because no file may decide where a run writes
    wandb: bool  # whether the last launch used Weights & Biases, for the same note


@dataclass(frozen=True)
class RunIdentity:
    """A run, by default a new one."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    name: str = ""  # "": the name of the folder
    mirror: str = ""
    wandb: bool = False
    copied_from: str = ""  # the folder that this one is a copy of; "" if it is no copy


def read_run(folder: Path) -> RunIdentity:
    """Return the run in a folder: a new one if the folder has no run.json, or is a copy of another existing folder."""
    try:
        record = read_json(folder / RUN, RunFile, "remove it; the run then gets a new id")
    except FileNotFoundError:
        return RunIdentity()
    original = Path(record["folder"])
    if os.path.realpath(folder) != record["folder"] and _id_in(original) == record["id"]:
        return RunIdentity(copied_from=printable(record["folder"])[:1000])
    return RunIdentity(record["id"], printable(record["name"])[:MAX_NAME], record["mirror"], record["wandb"])


def _id_in(folder: Path) -> str:
    """Return the id of the run in a folder; "" if there is none, or it cannot be read."""
    try:
        return read_json(folder / RUN, RunFile, "")["id"]
    except (OSError, UserError, ValueError):
        return ""


def write_run(folder: Path, run_id: str, name: str, mirror: str, wandb: bool) -> None:
    """Write run.json."""
    record: RunFile = {
        "id": run_id,
        "name": name,
        "folder": os.path.realpath(folder),
        "mirror": mirror,
        "wandb": wandb,
    }
    replace_file(folder / RUN, lambda file: file.write(f"{json.dumps(record, indent=2)}\n".encode()))
