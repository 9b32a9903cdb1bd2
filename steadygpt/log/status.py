"""status.json in a run's checkpoint folder: the state of the run, and how it ended."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, read_json

STATUS = "status.json"
# fmt: off
Status = TypedDict("Status", {  # noqa: UP013 (a line for each type); times are in Unix seconds
    "status": str, "reason": str, "doing": str, "run_name": str, "logdir": str, "mirror": str, "device": str,
    "host": str, "resume": str, "summary": list[str], "mean_load": dict[str, float],
    "pid": Count, "ranks": Count, "step": Count, "max_steps": Count, "tokens_per_step": Count,
    "checkpoint_bytes": Count, "loss": float, "val_loss": float, "val_bpb": float, "hellaswag_acc_norm": float,
    "tokens_per_second": float, "step_ms": float, "mfu": float, "elapsed_s": float, "eta_s": float, "cost": float,
    "cost_to_go": float, "updated_at": float, "mirrored_at": float,
}, total=False)
# fmt: on


def read_status(folder: Path) -> Status:
    """Return what status.json says, {} if there is none or its content does not fit."""
    with suppress(OSError, UserError):
        return read_json(folder / STATUS, Status, "")
    return {}


def write_status(folder: Path, facts: Mapping[str, Any], durable: bool) -> None:
    """Replace status.json.

    Args:
        durable: wait until it is on the disk.
    """
    path = folder / STATUS
    content = f"{json.dumps({**facts, 'updated_at': time.time()}, indent=2)}\n".encode()
    try:
        replace_file(path, lambda file: file.write(content), durable)
    except OSError:  # a full disk has no room for a second file
        with open(path, "r+b") as file:
            file.write(content)
            file.truncate()
