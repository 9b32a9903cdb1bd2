"""Results of steps, and steps with skipped updates: a non-finite loss or gradient, or a loss spike.

A GPU runs behind the host. The GPU decides which updates to skip, and the host reads the results a step later.
"""

import math
import shlex
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from steadygpt.base.text import counted
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import PEAK_FLOPS, device_name, peak_memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.run.repeats import Repeats
from steadygpt.run.schedule import Schedule

SPIKE_WINDOW = 128  # losses that a spike is compared with


class Judge:
    """Decides on the device which updates are skipped.

    Args:
        recent_losses: the finite losses of the last steps.
        bad_steps: consecutive ones so far.
    """

    def __init__(self, config: TrainConfig, device: torch.device, recent_losses: Sequence[float], bad_steps: int):
        self.max_bad_steps = config.max_bad_steps or math.inf
        self.spike_z, self.skip_spikes = config.spike_z or math.inf, config.skip_spikes
        self.recent = torch.full((SPIKE_WINDOW,), math.nan, device=device)  # NaN: not known yet
        if known := recent_losses[-SPIKE_WINDOW:]:
            self.recent[-len(known) :] = torch.tensor(known)
        self.bad_steps = torch.full((), float(bad_steps), device=device)

    def __call__(
        self, loss: Tensor, grad_norm: Tensor, scaler: torch.amp.GradScaler
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Judge a step by its loss and gradient norm, scalars that are the same on every rank.

        Args:
            scaler: already updated for this step; enabled with fp16 only.

        Returns: 1.0 if the update is skipped, else 0.0; and the fields of StepResult that the device knows.
        """
        finite = loss.isfinite() & grad_norm.isfinite()
        # Not get_scale(), which waits for the GPU.
        loss_scale = scaler.scale(torch.ones_like(loss)) if scaler.is_enabled() else None
        # An overflow in fp16 is not bad while a lower scale may help.
        bad = ~finite if loss_scale is None else ~finite & ~(loss.isfinite() & (loss_scale >= 1))
        z = (loss - self.recent.mean()) / self.recent.std(correction=0).clamp(min=1e-6)  # NaN until all are known
        spike = z > self.spike_z
        # The host may read about the last bad step late. Until then all updates are skipped, so that the weights stay
        # those of the step before the bad ones.
        halted = self.bad_steps >= self.max_bad_steps
        skipped = halted | ~finite | (spike & self.skip_spikes)
        self.bad_steps = torch.where(halted, self.bad_steps, (self.bad_steps + 1) * bad)
        self.recent = torch.where(finite, torch.cat([self.recent[1:], loss[None]]), self.recent)
        found = {"loss": loss, "grad_norm": grad_norm, "loss_z": z, "spike": spike, "bad": bad, "updated": ~skipped}
        return skipped.float(), found if loss_scale is None else found | {"loss_scale": loss_scale}


class Pending:
    """A StepResult on its way to the host; `found` has its other fields, scalars on the device."""

    def __init__(self, step: int, rows: int, lr: float, found: dict[str, Tensor]):
        self.step, self.rows, self.lr = step, rows, lr
        self.kinds = {name: bool if tensor.dtype == torch.bool else float for name, tensor in found.items()}
        numbers = torch.stack([tensor.float() for tensor in found.values()])
        cuda = numbers.device.type == "cuda"
        self.numbers = numbers.to("cpu", non_blocking=cuda)
        self.copied = torch.cuda.current_stream().record_event() if cuda else None

    def result(self) -> "StepResult":
        """Wait for the numbers."""
        if self.copied:
            self.copied.synchronize()
        numbers = zip(self.kinds.items(), self.numbers.tolist(), strict=True)
        found: dict[str, Any] = {name: kind(number) for (name, kind), number in numbers}
        return StepResult(self.step, self.rows, self.lr, **found)


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step and whether its update was applied, the same on every rank."""

    step: int  # updates before this one
    rows: int  # consumed after it
    lr: float
    loss: float  # mean over all tokens, before the update
    grad_norm: float  # before clipping
    loss_z: float  # NaN until SPIKE_WINDOW losses are known
    spike: bool  # loss_z is above --spike_z
    bad: bool  # loss or gradient is not finite, and fp16 is not the reason
    updated: bool  # False: weights and optimizer are unchanged
    loss_scale: float | None = None  # of fp16, for the next step

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def warning(self, recent: Sequence[float], checkpoint_dir: str) -> str:
        """Return a warning about the step, compared with the losses before it; "" if there is none."""
        advice = ""
        if self.bad:
            found = f"loss {self.loss}, gradient norm {self.grad_norm}"
        elif not self.finite:
            found = f"gradients too large for fp16, loss scale now {self.loss_scale:,.0f}"
        elif self.spike:
            found = (
                f"loss {self.loss:.4f} is {self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} "
                f"before, {fmean(recent):.4f}"
            )
            folder = shlex.quote(checkpoint_dir)
            advice = f"; to see its rows: python look.py --checkpoint_dir {folder} --step {self.step} --by loss"
        else:
            return ""
        return f"step {self.step}: {found}" + ("" if self.updated else "; its update was skipped") + advice


@dataclass
class Totals:
    """Sums over the steps of this start."""

    steps: int = 0
    seconds: float = 0.0  # without evaluations
    first_s: float = 0.0  # of that, the first step, which compiles
    not_finite: int = 0  # skipped because of the loss or a gradient
    spikes: int = 0
    skipped: int = 0  # updates, for any reason

    def add(self, result: StepResult, step_s: float) -> None:
        self.first_s = self.first_s if self.steps else step_s
        self.steps += 1
        self.seconds += step_s
        self.not_finite += not result.finite
        self.spikes += result.spike
        self.skipped += not result.updated

    def steps_per_second(self) -> float | None:
        """Return the speed, without the first step if there are more; None before it."""
        if self.steps > 1:
            return (self.steps - 1) / (self.seconds - self.first_s)
        return 1 / self.seconds if self.steps else None


@dataclass
class Results:
    """Reads what steps measured, logs it, and updates the state that follows from it."""

    config: TrainConfig
    ranks: Ranks
    schedule: Schedule
    state: TrainState  # of the loop
    log: RunLog
    flops_per_token: float  # for MFU
    delay: int  # steps whose results are read later, so that a GPU need not wait for the host
    repeats: Repeats  # compares the steps that a resumed run repeats

    def __post_init__(self):
        self.waiting: deque[Pending] = deque()
        before = self.state.bad_steps  # where the last good step has ended
        self.good = self.state.step - before, self.state.rows_consumed - before * self.schedule.rows_per_step
        self.totals = Totals()
        self.first_ended_s = 0.0  # when the first step of this start ended
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time until now, such as an evaluation's, out of the next step's."""
        self.clock_s = time.perf_counter()

    def add(self, pending: Pending) -> None:
        """Take the results of a step, and read those before it; raises as read_all() does."""
        self.waiting.append(pending)
        self.read_all(self.delay)

    def read_all(self, but: int = 0) -> None:
        """Read all results but the last `but`, log them and update the state.

        Raises: Diverged after too many bad steps, none of which has changed the weights.
        """
        while len(self.waiting) > but:
            self._read(self.waiting.popleft().result())

    def _read(self, result: StepResult) -> None:
        state, now_s = self.state, time.perf_counter()
        step_s, self.clock_s = now_s - self.clock_s, now_s
        self.totals.add(result, step_s)
        is_first = self.totals.steps == 1  # which compiles and warms up, so its speed is not typical
        self.first_ended_s = now_s if is_first else self.first_ended_s
        mean_s = step_s if is_first else (now_s - self.first_ended_s) / (self.totals.steps - 1)  # with evaluations
        left_s = mean_s * (self.config.max_steps - result.step - 1)
        speed, elapsed_s = self.config.total_batch_size / step_s, state.total_s()
        numbers = {
            "loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm,
            "loss_z": result.loss_z if math.isfinite(result.loss_z) else None,
            "step_ms": step_s * 1000, "steps_per_second": 1 / step_s, "tokens_per_second": speed,
            "mfu": self.mfu(speed), "cost": self.cost(elapsed_s),
            "memory_gb": peak_memory_bytes(self.ranks.device) / 1e9, "epoch": self.schedule.epochs(result.rows),
        }  # fmt: skip
        cost_left = None if is_first else self.cost(left_s)
        self.log.step(result.step, numbers, left_s, is_first, elapsed_s=round(elapsed_s), cost_to_go=cost_left)
        self.repeats.add(result.step, numbers)
        if warning := result.warning(state.recent_losses, self.config.checkpoint_dir):
            self.log.warn(warning, event="bad steps" if result.bad else "spike" if result.spike else "")
        state.bad_steps = state.bad_steps + 1 if result.bad else 0
        self.good = self.good if result.bad else (result.step + 1, result.rows)
        if result.finite:
            state.loss = result.loss
            state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
        if state.bad_steps >= self.config.max_bad_steps > 0:
            bad_steps, state.bad_steps = state.bad_steps, 0
            self.waiting.clear()
            raise Diverged(bad_steps, *self.good)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the devices' peak FLOP/s that a speed needs (PaLM, Chowdhery et al. 2022, appendix B)."""
        peak = PEAK_FLOPS.get(device_name(self.ranks.device))
        return tokens_per_second * self.flops_per_token / (peak * self.ranks.world_size) if peak else None

    def cost(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for some time, or None without --gpu_hour_cost."""
        return seconds / 3600 * self.ranks.world_size * self.config.gpu_hour_cost if self.config.gpu_hour_cost else None


class Diverged(Exception):
    """Too many consecutive bad steps, on all ranks together; `step` and `rows` are those before them."""

    def __init__(self, bad_steps: int, step: int, rows: int):
        super().__init__(f"{bad_steps} bad steps after step {step}")
        self.bad_steps, self.step, self.rows = bad_steps, step, rows

    def advice(self, config: TrainConfig) -> str:
        """Return how to continue, with flags that can be copied."""
        max_lr = config.max_lr / 2
        lower = f"--allow_changes --max_lr {max_lr:g} --min_lr {min(config.min_lr, max_lr):g}"
        return (
            f"stopping after {counted(self.bad_steps, 'bad step')}, with the weights of step {self.step}, before them. "
            f"Resume with --resume latest {lower}{' or --precision fp32' * (config.precision != 'fp32')}, or skip "
            "these tokens with a larger --max_bad_steps. If the next steps are bad too, the weights were damaged "
            "earlier: try --resume best, or an older file from ./list_checkpoints.sh"
        )
