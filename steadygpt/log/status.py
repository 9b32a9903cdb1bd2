"""What other programs read of a run: status.json, its state, in the checkpoint folder; and the names of its logs."""

from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from steadygpt.base.options import UserError
from steadygpt.base.text import labelled
from steadygpt.base.typed import Count, read_json

STATUS, LOG, METRICS = "status.json", "log.txt", "metrics.jsonl"
RUN = labelled("run", "")  # begins log.txt, before the run's name
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


def run_of(logdir: Path) -> str:
    """Return the name of the run that a log.txt belongs to, "" if there is none."""
    try:
        with open(logdir / LOG, encoding="utf-8", errors="replace") as file:
            return file.readline().strip().removeprefix(RUN)
    except FileNotFoundError:
        return ""
