"""What a step measured, and steps whose update should be skipped: no finite loss or gradient, or a loss spike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config import TrainConfig

SPIKE_WINDOW = 128  # losses that a spike is compared with


def loss_z(recent: Sequence[float], loss: float) -> float | None:
    """Return how many standard deviations a loss lies above the mean of the recent ones; None if these are too few."""
    if len(recent) < SPIKE_WINDOW or not math.isfinite(loss):
        return None
    mean = fmean(recent)
    deviation = math.dist(recent, [mean] * len(recent)) / math.sqrt(len(recent))
    return (loss - mean) / max(deviation, 1e-6)


@dataclass(frozen=True)
class StepResult:
    """What a step measured and whether it was learned from, the same on every rank."""

    step: int  # updates before this one
    lr: float
    loss: float  # mean over all tokens, before the update
    grad_norm: float  # before clipping
    loss_z: float | None
    spike: bool  # loss_z is above --spike_z
    updated: bool  # False: weights and optimizer are unchanged
    loss_scale: float | None = None  # of fp16, after a skipped update

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def bad(self) -> bool:
        """Whether loss or gradient is not finite; an overflow in fp16 is not bad while a lower scale may help."""
        return not self.finite and not (math.isfinite(self.loss) and self.loss_scale and self.loss_scale >= 1)

    def warning(self, recent: Sequence[float]) -> str:
        """Return what is wrong with the step, compared with the losses before it; "" if nothing is."""
        if self.bad:
            found = f"loss {self.loss}, gradient norm {self.grad_norm}"
        elif not self.finite:
            found = f"gradients too large for fp16, loss scale now {self.loss_scale:,.0f}"
        elif self.spike:
            found = (
                f"loss {self.loss:.4f} is {self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} "
                f"before, {fmean(recent):.4f}"
            )
        else:
            return ""
        return f"step {self.step}: {found}" + ("" if self.updated else "; its update was skipped")


class Diverged(Exception):
    """Too many consecutive bad steps; the run is back at the step before them, on all ranks together."""

    def __init__(self, bad_steps: int, step: int):
        super().__init__(f"{bad_steps} bad steps after step {step}")
        self.bad_steps, self.step = bad_steps, step

    def advice(self, config: "TrainConfig", precision: str) -> str:
        """Return how to continue, with flags that can be copied."""
        max_lr = config.max_lr / 2
        lower = f"--allow_changes --max_lr {max_lr:g} --min_lr {min(config.min_lr, max_lr):g}"
        return (
            f"stopping after {self.bad_steps} bad steps, at step {self.step} before them. Resume with --resume latest "
            f"{lower}{' or --precision fp32' * (precision != 'fp32')}, or skip these tokens with a larger "
            "--max_bad_steps. If that fails at once, the weights were damaged earlier: try --resume best, or an older "
            "file of ./list_checkpoints.sh"
        )
