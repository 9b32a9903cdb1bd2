"""The record of each step: time, speed, cost, the state that follows from its loss."""

import math
import statistics
import time

from steadygpt.machine.device import PEAK_FLOPS, device_name, peak_memory_bytes
from steadygpt.run.judge import SPIKE_WINDOW, Diverged, StepResult
from steadygpt.run.repeats import compare_step
from steadygpt.run.run import Run
from steadygpt.run.schedule import epochs

INTERRUPTED = 10  # times the usual time of a step: a process that was suspended meanwhile, not training


def restart_clock(run: Run) -> None:
    """Begin the time of the next step now, so that it leaves out an evaluation before it."""
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
    if result.updated:  # otherwise the scores are still those of the weights
        state.scores = {}
        state.validated_on = ""
    run.is_best = False
    if result.finite:
        state.loss = result.loss
        state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
    state.bad_steps = state.bad_steps + 1 if result.bad else 0
    if state.bad_steps >= run.config.max_bad_steps > 0:
        bad_steps = state.bad_steps
        state.bad_steps = 0
        state.step -= bad_steps  # where the weights still are
        state.rows_consumed -= bad_steps * run.config.rows_per_step
        raise Diverged(bad_steps, state.step)


def mfu(run: Run, tokens_per_second: float) -> float | None:
    """Return the share of the devices' peak FLOP/s that a speed takes (PaLM, Chowdhery et al. 2022, appendix B)."""
    peak = PEAK_FLOPS.get(device_name(run.ranks.device))
    if peak is None:
        return None
    return tokens_per_second * run.model.flops_per_token() / (peak * run.ranks.world_size)


def cost(run: Run, seconds: float) -> float | None:
    """Return the cost of all GPUs for so many seconds, or None without --gpu_hour_cost."""
    if not run.config.gpu_hour_cost:
        return None
    return seconds / 3600 * run.ranks.world_size * run.config.gpu_hour_cost
