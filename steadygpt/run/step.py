"""Measurements of a step: whether its update is applied, its log line, and the counts after it."""

import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from optim import cooldown_start
from steadygpt.base.text import command, counted, run_flags
from steadygpt.config import TrainConfig
from steadygpt.machine.device import PEAK_FLOPS, device_name, peak_memory_bytes
from steadygpt.run.repeats import compare_step
from steadygpt.run.run import Run
from steadygpt.run.schedule import epochs

SPIKE_WINDOW = 128  # earlier losses that a spike is compared with
SMALLEST_STD = 1e-6  # of these losses
INTERRUPTED = 10  # a step that takes this many times the usual time: the process was suspended


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
        look = f"{command('inspect_data.py')} --checkpoint_dir {shlex.quote(checkpoint_dir)} --step {self.step}"
        distance = f"{self.loss_z:.1f} standard deviations above the mean of the {SPIKE_WINDOW} before"
        return f"step {self.step}: loss {self.loss:.4f} is {distance}{skipped}; to see its rows: {look}"


def judge(
    config: TrainConfig,
    recent_losses: Sequence[float],
    step: int,
    lr: float,
    loss_scale: float | None,
    numbers: Mapping[str, float],
) -> StepResult:
    """Decide whether a step's update is applied, by its loss and gradient norm, which are the same on every rank.

    Args:
        recent_losses: the finite losses of the steps before, oldest first; only the last SPIKE_WINDOW matter.
        loss_scale: of fp16, already updated for this step; None with other precisions.
        numbers: measurements of the step by name, among them "loss" and "grad_norm".
    """
    metrics = dict(numbers)
    loss = metrics.pop("loss")
    grad_norm = metrics.pop("grad_norm")
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
            f"{command('list_checkpoints.sh')}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# the record


def restart_clock(run: Run) -> None:
    """Start timing the next step now, so that its time excludes an evaluation before it."""
    meter = run.meter
    now_s = time.perf_counter()
    if meter.steps:
        meter.between_steps_s += now_s - meter.step_start_s
    meter.step_start_s = now_s


def log_step(run: Run, result: StepResult) -> None:
    """Log what a step measured, compare it with the record of an earlier launch, and warn of what is unusual."""
    config = run.config
    rows = run.state.rows_consumed + config.rows_per_step
    step_s, left_s = measure_step(run, result)
    speed = config.total_batch_size / step_s
    elapsed_s = run.state.total_s()
    numbers = {
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "loss_z": result.loss_z if math.isfinite(result.loss_z) else None,
        "step_ms": step_s * 1000,
        "steps_per_second": 1 / step_s,
        "tokens_per_second": speed,
        "mfu": mfu(run, speed),
        "cost": cost(run, elapsed_s),
        "memory_gb": peak_memory_bytes(run.ranks.device) / 1e9,
        "epoch": epochs(rows, run.rows_per_epoch),
    }
    used_twice = {"step", "time", *numbers} & result.metrics.keys()
    if used_twice:
        raise ValueError(
            f"{min(used_twice)}: a term of the loss or a metric has a name that the log uses itself; rename it"
        )
    is_first = run.meter.steps == 1
    facts = {
        "elapsed_s": round(elapsed_s),
        "cost_to_go": None if is_first else cost(run, left_s),
        "tokens": rows * config.context_length,
    }
    run.log.step(result.step, numbers, result.metrics, left_s, is_first, **facts)
    if run.repeats:
        compare_step(run.repeats, run.log, result.step, numbers)
    warning = result.warning(config.checkpoint_dir)
    if warning:
        event = ""
        if result.bad:
            event = "bad steps"
        elif result.spike:
            event = "spike"
        run.log.warn(warning, event=event)


def measure_step(run: Run, result: StepResult) -> tuple[float, float]:
    """Add a step to the run's meter; return the seconds that it took, and those that are left."""
    meter = run.meter
    count = run.config.rows_per_step
    now_s = time.perf_counter()
    step_s = now_s - meter.step_start_s
    meter.step_start_s = now_s
    meter.steps += 1
    meter.rows += count
    if not result.updated:
        meter.skipped += 1
    if meter.steps == 1:
        meter.first_rows = count
        meter.first_s = step_s
        row_s = step_s / count
    else:
        meter.row_seconds.append(step_s / count)
        # The median is robust: neither a suspended process nor a slow read changes the ETA.
        row_s = statistics.median(meter.row_seconds) + meter.between_steps_s / meter.rows
        usual_s = statistics.median(meter.row_seconds) * count
    is_interrupted = meter.steps > 2 and step_s > INTERRUPTED * usual_s + 1
    meter.seconds += usual_s if is_interrupted else step_s
    run.requests.step_s = step_s
    return step_s, row_s * count * (run.config.max_steps - result.step - 1)


def count_step(run: Run, result: StepResult) -> None:
    """Count a step.

    Raises: Diverged after too many bad steps, none of which has changed the weights.
    """
    state = run.state
    state.step += 1
    state.rows_consumed += run.config.rows_per_step
    if result.updated:  # otherwise the scores still belong to the weights
        state.scores = {}
        state.validated_on = ""
        state.cooled_down |= run.config.cools_down and result.step >= cooldown_start(run.config)
    if result.finite:
        state.loss = result.loss
        state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
    state.bad_steps = state.bad_steps + 1 if result.bad else 0
    if state.bad_steps >= run.config.max_bad_steps > 0:
        bad_steps = state.bad_steps
        state.bad_steps = 0
        state.step -= bad_steps  # back to the step of the weights
        state.rows_consumed -= bad_steps * run.config.rows_per_step
        raise Diverged(bad_steps, state.step)


def mfu(run: Run, tokens_per_second: float) -> float | None:
    """Return the share of the devices' peak FLOP/s that a speed takes (PaLM, Chowdhery et al. 2022, appendix B)."""
    peak = PEAK_FLOPS.get(device_name(run.ranks.device))
    if peak is None:
        return None
    return tokens_per_second * run.model.flops_per_token() / (peak * run.ranks.world_size)


def cost(run: Run, seconds: float) -> float | None:
    """Return the cost of `seconds` on all ranks; None without --gpu_hour_cost."""
    if not run.config.gpu_hour_cost:
        return None
    return seconds / 3600 * run.ranks.world_size * run.config.gpu_hour_cost
