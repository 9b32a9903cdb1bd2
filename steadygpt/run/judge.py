"""The judgement of a step by its loss and gradient norm: whether its update is applied, and when a run has diverged."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from steadygpt.base.text import counted, run_flags
from steadygpt.config import TrainConfig

SPIKE_WINDOW = 128  # earlier losses, with which a spike is compared
SMALLEST_STD = 1e-6  # of these losses


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step and whether its update was applied, the same on every rank."""

    step: int  # the number of steps before this one
    lr: float
    loss: float  # mean over all tokens, before the update
    grad_norm: float  # before clipping
    loss_z: float  # NaN until SPIKE_WINDOW losses are known
    finite: bool  # loss and gradient norm
    spike: bool  # loss_z is above --spike_z
    bad: bool  # loss or gradient is not finite, and fp16 is not the reason
    updated: bool  # False: weights and optimizer are unchanged
    metrics: Mapping[str, float] = field(default_factory=dict)  # further measurements, over all ranks

    def warning(self, checkpoint_dir: str) -> str:
        """Return a warning about the step; "" if there is none."""
        skipped = "" if self.updated else "; its update was skipped"
        if not self.finite:
            reason = "" if self.bad else ", too large for fp16: the loss scale is lowered"
            return f"step {self.step}: loss {self.loss}, gradient norm {self.grad_norm}{reason}{skipped}"
        if not self.spike:
            return ""
        look = f"python look.py --checkpoint_dir {shlex.quote(checkpoint_dir)} --step {self.step}"
        distance = f"{self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} before"
        return f"step {self.step}: loss {self.loss:.4f} is {distance}{skipped}; to see its rows: {look}"


def judge(
    config: TrainConfig,
    recent_losses: Sequence[float],
    step: int,
    lr: float,
    loss_scale: float | None,
    *,
    loss: float,
    grad_norm: float,
    **metrics: float,
) -> StepResult:
    """Decide whether a step's update is applied, by its loss and gradient norm, which are the same on every rank.

    Args:
        recent_losses: the finite losses of the steps before, oldest first; only the last SPIKE_WINDOW matter.
        loss_scale: the one of fp16, already updated for this step; None with other precisions.
        metrics: further measurements.
    """
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    bad = not finite
    if bad and loss_scale is not None and math.isfinite(loss) and loss_scale >= 1:
        bad = False  # the gradient overflowed in fp16, and a lower loss scale may help
    loss_z = math.nan
    window = recent_losses[-SPIKE_WINDOW:]
    if len(window) == SPIKE_WINDOW:
        mean = fmean(window)
        std = math.sqrt(fmean((earlier_loss - mean) ** 2 for earlier_loss in window))
        loss_z = (loss - mean) / max(std, SMALLEST_STD)
    spike = config.spike_z > 0 and loss_z > config.spike_z
    updated = finite and not (spike and config.skip_spikes)
    return StepResult(step, lr, loss, grad_norm, loss_z, finite, spike, bad, updated, metrics)


class Diverged(Exception):
    """Too many consecutive bad steps, on all ranks together; `step` is the first one."""

    def __init__(self, bad_steps: int, step: int):
        super().__init__(f"{counted(bad_steps, 'consecutive step')} with a non-finite loss or gradient")
        self.step = step

    def advice(self, config: TrainConfig) -> str:
        """Return how to continue, with flags that can be copied."""
        max_lr = config.max_lr / 2
        flags = f"--allow_changes --max_lr {max_lr:g} --min_lr {min(config.min_lr, max_lr):g}"
        if config.precision != "fp32":
            flags += " or --precision fp32"
        folder = run_flags(config.checkpoint_dir)
        return (
            f"stopping after {self}, with the weights of step {self.step}, before them. Resume with "
            f"--resume latest{folder} {flags}, or skip these tokens with a larger --max_bad_steps. If the next steps "
            "are bad too, the weights were damaged earlier: try --resume best, or an older file from "
            "./list_checkpoints.sh"
        )
