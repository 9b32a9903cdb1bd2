"""The length of a run, and the names of its saves at each step."""

import math
from dataclasses import replace

from model import sketch_of
from optim import cooldown_start
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import EPOCH, ROLLING, STABLE, TrainState
from steadygpt.config import TrainConfig

WARMUP_STEPS = 715  # of --warmup_steps -1, in a run that is long enough (Brown et al. 2020: 375 M tokens)


def epochs(rows: int, rows_per_epoch: int) -> float:
    """Convert consumed rows to epochs; 0 if the length of an epoch is not known."""
    return rows / rows_per_epoch if rows_per_epoch else 0.0


def names_of_save(config: TrainConfig, rows_per_epoch: int, state: TrainState) -> list[str]:
    """Return the names, besides latest.pt, of the checkpoint of a state."""
    names = []
    step = state.step
    rows = state.rows_consumed
    freq = config.checkpoint_freq
    if step and freq and step % freq == 0:
        names.append(ROLLING.format(step))
    epoch = int(epochs(rows, rows_per_epoch))
    if step and epoch > int(epochs(rows - config.rows_per_step, rows_per_epoch)):
        names.append(EPOCH.format(epoch))
    if config.cools_down and step == cooldown_start(config) and not state.cooled_down:
        names.append(STABLE)
    return names


def with_steps(config: TrainConfig, rows_per_epoch: int, step: int, rows: int) -> TrainConfig:
    """Return the configuration with the run's number of steps and of warm-up steps filled in.

    Args:
        rows_per_epoch: 0 for a mixture, or after a change of the data, because such a run has no epochs.
        step, rows: where the run is now; its batch size may have changed since it began.
    """
    max_steps = config.max_steps or config.num_epochs * config.steps_per_epoch
    if config.tokens_per_parameter:
        parameters = sketch_of(config.shape(config.vocab_size)).num_parameters()
        tokens_left = config.tokens_per_parameter * parameters - rows * config.context_length
        max_steps = step + math.ceil(max(0, tokens_left) / config.total_batch_size)
    elif not max_steps:
        if not rows_per_epoch:
            raise UserError("a mixture of data has no epochs; set the length of the run with --max_steps")
        rows_left = max(0, config.num_epochs * rows_per_epoch - rows)
        max_steps = step + math.ceil(rows_left / config.rows_per_step)
    if step > max_steps:
        raise UserError(f"the checkpoint is at step {step:,}, past the run's {max_steps:,}; give a larger --max_steps")
    warmup_steps = config.warmup_steps
    if warmup_steps < 0:
        warmup_steps = min(WARMUP_STEPS, max_steps // 10)
    if warmup_steps >= max(1, max_steps):
        message = f"--warmup_steps {warmup_steps} is not shorter than the run of {max_steps} steps"
        raise UserError(f"{message}; try --warmup_steps {max_steps // 10}")
    config = replace(config, max_steps=max_steps, warmup_steps=warmup_steps)
    if config.resume == "stable" and config.cools_down and config.cooldown < 1:
        start = cooldown_start(config)
        if step > start:
            enough = math.ceil(step / (1 - config.cooldown))
            raise UserError(
                f"--resume stable is at step {step:,}, but a run of {max_steps:,} steps cools down from step "
                f"{start:,} on; give at least --max_steps {enough}"
            )
    return config
