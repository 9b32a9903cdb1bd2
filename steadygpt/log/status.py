"""status.json: the state of a run, in the folder of its checkpoints, for other programs."""

from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, read_json

STATUS, LOG = "status.json", "log.txt"
# fmt: off
Status = TypedDict("Status", {  # noqa: UP013 (a line for each type); times are in Unix seconds
    "status": str, "reason": str, "doing": str, "run_name": str, "run_id": str, "mirror": str, "device": str,
    "logdirs": list[str], "host": str, "resume": str, "summary": list[str], "warnings": list[str],
    "load": dict[str, float], "mean_load": dict[str, float], "pid": Count, "ranks": Count, "step": Count,
    "max_steps": Count, "tokens_per_step": Count, "checkpoint_bytes": Count, "loss": float, "val_loss": float,
    "val_bpb": float, "lr": float, "grad_norm": float, "memory_gb": float, "epoch": float,
    "hellaswag_acc_norm": float, "tokens_per_second": float, "step_ms": float, "mfu": float, "elapsed_s": float,
    "eta_s": float, "cost": float, "cost_to_go": float, "updated_at": float, "mirrored_at": float,
}, total=False)
# fmt: on


def read_status(folder: Path) -> Status:
    """Return what status.json says, {} if there is none or its content does not fit."""
    with suppress(OSError, UserError):
        return read_json(folder / STATUS, Status, "")
    return {}
