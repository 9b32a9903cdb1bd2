"""Steps that are not to be learned from: a loss or gradient that is no number, and losses far above the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

SPIKE_WINDOW = 128  # losses that a spike is measured against


def loss_z(recent: Sequence[float], loss: float) -> float | None:
    """How many standard deviations a loss lies above the mean of the recent ones; None while those are too few."""
    if len(recent) < SPIKE_WINDOW or not math.isfinite(loss):
        return None
    mean = fmean(recent)
    deviation = math.dist(recent, [mean] * len(recent)) / math.sqrt(len(recent))
    return (loss - mean) / max(deviation, 1e-6)


@dataclass(frozen=True)
class StepResult:
    """What a step measured and what became of it, the same on every rank."""

    loss: float  # mean of all tokens, before the update
    grad_norm: float  # before clipping
    loss_z: float | None
    spike: bool  # loss_z is above --spike_z
    updated: bool  # False: weights and optimizer are as before
    loss_scale: float | None = None  # fp16's, after a step that was not updated

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def bad(self) -> bool:
        """Not finite; but fp16's overflows are no bad steps as long as lowering the loss scale may help."""
        return not self.finite and not (math.isfinite(self.loss) and self.loss_scale and self.loss_scale >= 1)

    def warning(self, recent: Sequence[float]) -> str:
        """What is wrong with it, against the losses before; "" for a step like any other."""
        if self.bad:
            said = f"loss {self.loss}, gradient norm {self.grad_norm}"
        elif not self.finite:
            said = f"gradients too large for fp16, loss scale now {self.loss_scale:,.0f}"
        elif self.spike:
            said = (
                f"loss {self.loss:.4f} is {self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} "
                f"before, {fmean(recent):.4f}"
            )
        else:
            return ""
        return said if self.updated else f"{said}; its update was skipped"
