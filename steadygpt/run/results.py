"""Results of steps: the decision to skip an update, the record of each step, and the detection of divergence."""

import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from steadygpt.base.text import counted
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import PEAK_FLOPS, device_name, peak_memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.run.repeats import Repeats
from steadygpt.run.schedule import Schedule

SPIKE_WINDOW = 128  # earlier losses, with which a spike is compared
SMALLEST_STD = 1e-6  # of these losses
ETA_STEPS = 100  # the last steps, from whose time the time left is estimated


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step and whether its update was applied, the same on every rank."""

    step: int  # the number of steps before this one
    rows: range  # of the run
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
    *,
    step: int,
    rows: range,
    lr: float,
    loss: float,
    grad_norm: float,
    loss_scale: float | None,
    metrics: Mapping[str, float] = {},
) -> StepResult:
    """Decide whether a step's update is applied, by its loss and gradient norm, which are the same on every rank.

    Args:
        recent_losses: the finite losses of the steps before, oldest first; only the last SPIKE_WINDOW matter.
        loss_scale: the one of fp16, already updated for this step; None with other precisions.
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
    return StepResult(step, rows, lr, loss, grad_norm, loss_z, finite, spike, bad, updated, metrics)


@dataclass
class Results:
    """Logs the results of steps, and updates the state that follows from them."""

    config: TrainConfig
    ranks: Ranks
    schedule: Schedule
    state: TrainState  # of the loop
    log: RunLog
    flops_per_token: float  # for MFU
    repeats: Repeats  # compares the steps that a resumed run repeats
    # Since the process started:
    steps: int = 0
    skipped: int = 0  # updates
    rows: int = 0
    seconds: float = 0.0  # of the steps, without evaluations
    first_rows: int = 0  # of the first step, which compiles and warms up, so its speed is not typical
    first_s: float = 0.0  # seconds of the first step
    row_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))  # per row, in the last steps
    between_steps_s: float = 0.0  # spent between steps, such as in evaluations
    step_start_s: float = field(default_factory=time.perf_counter)  # the clock when the current step began

    def restart_clock(self) -> None:
        """Begin the time of the next step now, so that it leaves out an evaluation before it."""
        now_s = time.perf_counter()
        if self.steps:
            self.between_steps_s += now_s - self.step_start_s
        self.step_start_s = now_s

    def add(self, result: StepResult) -> None:
        """Log a step's result and update the state.

        Raises: Diverged after too many bad steps, none of which has changed the weights.
        """
        state = self.state
        row = result.rows.stop
        count = len(result.rows)
        now_s = time.perf_counter()
        step_s = now_s - self.step_start_s
        self.step_start_s = now_s
        self.steps += 1
        self.rows += count
        self.seconds += step_s
        if not result.updated:
            self.skipped += 1
        is_first = self.steps == 1
        if is_first:
            self.first_rows = count
            self.first_s = step_s
            row_s = step_s / count
        else:
            self.row_seconds.append(step_s / count)
            # The median is robust: neither a suspended process nor a slow read changes the ETA.
            row_s = statistics.median(self.row_seconds) + self.between_steps_s / self.rows
        left_s = row_s * self.config.rows_per_step * (self.config.max_steps - result.step - 1)
        speed = count * self.config.context_length / step_s
        elapsed_s = state.total_s()
        numbers = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "loss_z": result.loss_z if math.isfinite(result.loss_z) else None,
            "step_ms": step_s * 1000,
            "steps_per_second": 1 / step_s,
            "tokens_per_second": speed,
            "mfu": self.mfu(speed),
            "cost": self.cost(elapsed_s),
            "memory_gb": peak_memory_bytes(self.ranks.device) / 1e9,
            "epoch": self.schedule.epochs(row),
        }
        used_twice = {"step", "time", *numbers} & result.metrics.keys()
        if used_twice:
            names = ", ".join(sorted(used_twice))
            raise ValueError(
                f"{names}: a term of the loss, or a metric, with a name that the log uses itself; rename it"
            )
        cost_left = None if is_first else self.cost(left_s)
        tokens = row * self.config.context_length
        totals = {"elapsed_s": round(elapsed_s), "cost_to_go": cost_left, "tokens": tokens}
        self.log.step(result.step, numbers, result.metrics, left_s, is_first, **totals)
        self.repeats.add(result.step, numbers)
        self._warn(result)
        if result.finite:
            state.loss = result.loss
            state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
        state.bad_steps = state.bad_steps + 1 if result.bad else 0
        if state.bad_steps >= self.config.max_bad_steps > 0:
            bad_steps = state.bad_steps
            state.bad_steps = 0
            first_row = row - bad_steps * self.config.rows_per_step
            raise Diverged(bad_steps, result.step + 1 - bad_steps, first_row)

    def _warn(self, result: StepResult) -> None:
        warning = result.warning(self.config.checkpoint_dir)
        if not warning:
            return
        event = ""
        if result.bad:
            event = "bad steps"
        elif result.spike:
            event = "spike"
        self.log.warn(warning, event=event)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the devices' peak FLOP/s that a speed takes (PaLM, Chowdhery et al. 2022, appendix B)."""
        peak = PEAK_FLOPS.get(device_name(self.ranks.device))
        if peak is None:
            return None
        return tokens_per_second * self.flops_per_token / (peak * self.ranks.world_size)

    def cost(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for so many seconds, or None without --gpu_hour_cost."""
        if not self.config.gpu_hour_cost:
            return None
        return seconds / 3600 * self.ranks.world_size * self.config.gpu_hour_cost


class Diverged(Exception):
    """Too many consecutive bad steps, on all ranks together; `step` and `row` are those of the first one."""

    def __init__(self, bad_steps: int, step: int, row: int):
        super().__init__(f"{counted(bad_steps, 'consecutive step')} with a non-finite loss or gradient")
        self.step = step
        self.row = row

    def advice(self, config: TrainConfig) -> str:
        """Return how to continue, with flags that can be copied."""
        max_lr = config.max_lr / 2
        flags = f"--allow_changes --max_lr {max_lr:g} --min_lr {min(config.min_lr, max_lr):g}"
        if config.precision != "fp32":
            flags += " or --precision fp32"
        folder = ""
        if config.checkpoint_dir != "checkpoints":
            folder = f" --checkpoint_dir {shlex.quote(config.checkpoint_dir)}"
        return (
            f"stopping after {self}, with the weights of step {self.step}, before them. Resume with "
            f"--resume latest{folder} {flags}, or skip these tokens with a larger --max_bad_steps. If the next steps "
            "are bad too, the weights were damaged earlier: try --resume best, or an older file from "
            "./list_checkpoints.sh"
        )
