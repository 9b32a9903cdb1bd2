"""Results of steps, and steps with skipped updates: a non-finite loss or gradient, or a loss spike.

A GPU runs behind the host. The GPU decides which updates to skip, and the host reads the results a step later.
"""

import math
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.amp import GradScaler

from steadygpt.base.text import counted
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import PEAK_FLOPS, Moment, device_name, peak_memory_bytes
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

    def __call__(self, loss: Tensor, grad_norm: Tensor, scaler: GradScaler) -> tuple[Tensor, dict[str, Tensor]]:
        """Judge a step by its loss and gradient norm, scalars that are the same on every rank.

        Args:
            scaler: already updated for this step; enabled with fp16 only.

        Returns: 1.0 if the update is skipped, else 0.0; and the fields of StepResult that the device knows.
        """
        finite = loss.isfinite() & grad_norm.isfinite()
        bad = ~finite
        if scaler.is_enabled():  # an overflow in fp16 is not bad while a lower scale may help
            # Not get_scale(), which waits for the GPU.
            bad = bad & ~(loss.isfinite() & (scaler.scale(torch.ones_like(loss)) >= 1))
        z = (loss - self.recent.mean()) / self.recent.std(correction=0).clamp(min=1e-6)  # NaN until all are known
        spike = z > self.spike_z
        # The host may read about the last bad step late. Until then all updates are skipped, so that the weights stay
        # those of the step before the bad ones.
        halted = self.bad_steps >= self.max_bad_steps
        skipped = halted | ~finite | (spike & self.skip_spikes)
        self.bad_steps = torch.where(halted, self.bad_steps, (self.bad_steps + 1) * bad)
        self.recent = torch.where(finite, torch.cat([self.recent[1:], loss[None]]), self.recent)
        found = {"loss": loss, "grad_norm": grad_norm, "loss_z": z, "finite": finite, "spike": spike, "bad": bad}
        return skipped.float(), found | {"updated": ~skipped}


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step and whether its update was applied, the same on every rank."""

    step: int  # updates before this one
    rows: range  # of the run
    lr: float
    loss: float  # mean over all tokens, before the update
    grad_norm: float  # before clipping
    loss_z: float  # NaN until SPIKE_WINDOW losses are known
    finite: bool  # loss and gradient norm
    spike: bool  # loss_z is above --spike_z
    bad: bool  # loss or gradient is not finite, and fp16 is not the reason
    updated: bool  # False: weights and optimizer are unchanged

    def warning(self, checkpoint_dir: str) -> str:
        """Return a warning about the step; "" if there is none."""
        skipped = "" if self.updated else "; its update was skipped"
        if not self.finite:
            reason = "" if self.bad else ", too large for fp16: the loss scale is lowered"
            return f"step {self.step}: loss {self.loss}, gradient norm {self.grad_norm}{reason}{skipped}"
        look = f"python look.py --checkpoint_dir {shlex.quote(checkpoint_dir)} --step {self.step} --by loss"
        above = f"{self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} before{skipped}"
        return f"step {self.step}: loss {self.loss:.4f} is {above}; to see its rows: {look}" * self.spike


def pending(step: int, rows: range, lr: float, found: dict[str, Tensor]) -> Callable[[], StepResult]:
    """Start copying the other fields, scalars on the device, to the host; return a function that waits for them."""
    numbers = torch.stack([number.float() for number in found.values()])
    cuda = numbers.device.type == "cuda"
    on_host = numbers.to("cpu", non_blocking=cuda)
    copied = torch.cuda.current_stream().record_event() if cuda else None

    def result() -> StepResult:
        if copied:
            copied.synchronize()
        known = zip(found.items(), on_host, strict=True)
        return StepResult(step, rows, lr, **{name: number.to(of.dtype).item() for (name, of), number in known})

    return result


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
    digests: dict[int, int] = field(default_factory=dict)  # of weights and optimizer state, by step, where known
    # Of this start:
    steps: int = 0
    skipped: int = 0  # updates
    rows: int = 0
    seconds: float = 0.0  # of the steps, without evaluations
    first_rows: int = 0  # of the first step, which compiles and warms up, so its speed is not typical
    first_s: float = 0.0
    first_ended: Moment = field(init=False)
    begun: Moment = field(init=False)  # the next step
    waiting: deque[tuple[Moment, Callable[[], StepResult]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave the time until now, such as an evaluation's, out of the next step's."""
        self.begun = Moment(self.ranks.device)

    def add(self, result: Callable[[], StepResult]) -> None:
        """Take a pending result, and read those before it; raises as read_all() does."""
        self.waiting.append((Moment(self.ranks.device), result))
        self.read_all(self.delay)

    def read_all(self, but: int = 0) -> None:
        """Read all results but the last `but`, log them and update the state.

        Raises: Diverged after too many bad steps, none of which has changed the weights.
        """
        while len(self.waiting) > but:
            ended, result = self.waiting.popleft()
            self._read(result(), ended)

    def _read(self, result: StepResult, ended: Moment) -> None:
        state, is_first = self.state, not self.steps
        step_s, self.begun = ended.since(self.begun), ended
        row, count = result.rows.stop, len(result.rows)
        self.steps += 1
        self.rows += count
        self.skipped += not result.updated
        self.seconds += step_s
        if is_first:
            self.first_rows, self.first_s, self.first_ended = count, step_s, ended
        row_s = step_s / count if is_first else ended.since(self.first_ended) / (self.rows - self.first_rows)
        left_s = row_s * (self.config.row_after(self.config.max_steps - result.step - 1, row) - row)
        speed, elapsed_s = count * self.config.context_length / step_s, state.total_s()
        numbers = {
            "loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm,
            "loss_z": result.loss_z if math.isfinite(result.loss_z) else None,
            "step_ms": step_s * 1000, "steps_per_second": 1 / step_s, "tokens_per_second": speed,
            "mfu": self.mfu(speed), "cost": self.cost(elapsed_s),
            "memory_gb": peak_memory_bytes(self.ranks.device) / 1e9, "epoch": self.schedule.epochs(row),
            "digest": self.digests.pop(result.step, None),
        }  # fmt: skip
        cost_left = None if is_first else self.cost(left_s)
        facts = {"elapsed_s": round(elapsed_s), "cost_to_go": cost_left, "tokens": row * self.config.context_length}
        self.log.step(result.step, numbers, left_s, is_first, **facts)
        self.repeats.add(result.step, numbers)
        if warning := result.warning(self.config.checkpoint_dir):
            self.log.warn(warning, event="bad steps" if result.bad else "spike" if result.spike else "")
        state.bad_steps = state.bad_steps + 1 if result.bad else 0
        if result.finite:
            state.loss = result.loss
            state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
        if state.bad_steps >= self.config.max_bad_steps > 0:
            bad_steps, state.bad_steps = state.bad_steps, 0
            self.waiting.clear()
            for _ in range(bad_steps):
                row = self.config.step_to(row).start
            raise Diverged(bad_steps, result.step + 1 - bad_steps, row)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the devices' peak FLOP/s that a speed needs (PaLM, Chowdhery et al. 2022, appendix B)."""
        peak = PEAK_FLOPS.get(device_name(self.ranks.device))
        return tokens_per_second * self.flops_per_token / (peak * self.ranks.world_size) if peak else None

    def cost(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for some time, or None without --gpu_hour_cost."""
        return seconds / 3600 * self.ranks.world_size * self.config.gpu_hour_cost if self.config.gpu_hour_cost else None


class Diverged(Exception):
    """Too many consecutive bad steps, on all ranks together; `step` and `row` are those of the first one."""

    def __init__(self, bad_steps: int, step: int, row: int):
        super().__init__(f"{counted(bad_steps, 'consecutive step')} with a non-finite loss or gradient")
        self.step, self.row = step, row

    def advice(self, config: TrainConfig) -> str:
        """Return how to continue, with flags that can be copied."""
        max_lr = config.max_lr / 2
        lower = f"--allow_changes --max_lr {max_lr:g} --min_lr {min(config.min_lr, max_lr):g}"
        return (
            f"stopping after {self}, with the weights of step {self.step}, before them. "
            f"Resume with --resume latest {lower}{' or --precision fp32' * (config.precision != 'fp32')}, or skip "
            "these tokens with a larger --max_bad_steps. If the next steps are bad too, the weights were damaged "
            "earlier: try --resume best, or an older file from ./list_checkpoints.sh"
        )
