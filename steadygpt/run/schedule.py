"""The length of a run in steps, rows and epochs, and its learning rate."""

import math
from dataclasses import dataclass, replace

from steadygpt.base.options import UserError
from steadygpt.base.text import labelled
from steadygpt.checkpoint.files import EPOCH, ROLLING, STABLE
from steadygpt.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """The length of a run, and what ends with each of its steps."""

    rows_per_step: int
    rows_per_epoch: int  # of the data, or of --steps_per_epoch; 0: not prepared yet, or a mixture
    max_steps: int
    warmup_steps: int
    stable_steps: int | None  # after which the cool-down begins, if there is one
    checkpoint_freq: int = 0  # steps between rolling checkpoints; 0: none

    def epochs(self, rows: int) -> float:
        """Convert consumed rows to epochs; 0 if their length is not known."""
        return rows / (self.rows_per_epoch or math.inf)

    def tiers(self, step: int, rows: int) -> list[str]:
        """Return the names, besides latest.pt, of the checkpoint after `step` updates and `rows` consumed rows."""
        names = []
        if step and self.checkpoint_freq and step % self.checkpoint_freq == 0:
            names.append(ROLLING.format(step))
        if step and int(self.epochs(rows)) > int(self.epochs(rows - self.rows_per_step)):
            names.append(EPOCH.format(int(self.epochs(rows))))
        if step == self.stable_steps:
            names.append(STABLE)
        return names


def decay_start(config: TrainConfig, max_steps: int) -> int:
    """Return the step from which the learning rate falls."""
    cooldown = round(config.cooldown * max_steps)
    starts = {"cosine": config.warmup_steps, "wsd": max(config.warmup_steps, max_steps - cooldown)}
    return starts.get(config.schedule, max_steps)


def learning_rate(config: TrainConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of a step: it rises linearly to max_lr, and falls to min_lr as `schedule` says.

    cosine: along half a cosine (Loshchilov and Hutter 2017). wsd: stable, then along a line (Hu et al. 2024).
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    start = decay_start(config, max_steps)
    progress = min(1.0, max(0, step - start) / max(1, max_steps - start))
    share = 1 - progress if config.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + share * (config.max_lr - config.min_lr)


def notes_of_decay(config: TrainConfig, schedule: Schedule, checkpoint: dict | None) -> list[str]:
    """Return lines for the plan: where the cool-down begins, and how a resume raises the learning rate."""
    notes, step = [], checkpoint["step"] if checkpoint else 0
    if (schedule.stable_steps or 0) > step:
        text = f"starts at step {schedule.stable_steps:,}; {STABLE} is saved just before"
        notes.append(labelled("cool-down", f"{text}. To train longer: --resume stable --max_steps N"))
    if checkpoint and step >= max(1, config.warmup_steps):
        before, now = checkpoint["lr"], learning_rate(config, step, schedule.max_steps)
        if now > 1.1 * before:
            had_cooldown = checkpoint["starts"][-1]["options"]["schedule"] == "wsd"
            advice = "; --resume stable continues from before the decay" * had_cooldown
            notes.append(labelled("lr", f"rises from {before:.2e} to {now:.2e}{advice}"))
    return notes


def make_schedule(
    config: TrainConfig, rows_per_epoch: int | None, world_size: int, step: int = 0, rows: int = 0,
    strict_warmup: bool = True,
) -> Schedule:  # fmt: skip
    """Return the schedule of a run that is at `step` and has consumed `rows`; the batch size may have changed since.

    Args:
        rows_per_epoch: None of a mixture, or after a change of the data: the run has no epochs.
        strict_warmup: False caps the warm-up at a tenth of the run.
    """
    config.check_together()
    config.shards(world_size)
    rows_per_step = config.total_batch_size // config.context_length
    max_steps = config.max_steps or config.num_epochs * config.steps_per_epoch
    if not max_steps and rows_per_epoch is None:
        raise UserError("a mixture of data has no epochs; set the length of the run with --max_steps")
    if not max_steps:  # enough for the remaining rows
        max_steps = step + max(0, math.ceil((config.num_epochs * (rows_per_epoch or 0) - rows) / rows_per_step))
    if step > max_steps:
        raise UserError(f"the checkpoint is at step {step:,}, past the run's {max_steps:,}; give a larger --max_steps")
    warmup_steps = config.warmup_steps if strict_warmup else min(config.warmup_steps, max_steps // 10)
    if warmup_steps >= max(1, max_steps):
        raise UserError(
            f"--warmup_steps {warmup_steps} is not shorter than the run of {max_steps} steps; "
            f"try --warmup_steps {max_steps // 10}"
        )
    stable_steps = None
    if config.schedule == "wsd":
        stable_steps = decay_start(replace(config, warmup_steps=warmup_steps), max_steps)
        if config.resume == "stable" and step > stable_steps and config.cooldown < 1:
            raise UserError(
                f"--resume stable is at step {step:,}, but a run of {max_steps:,} steps cools down from step "
                f"{stable_steps:,} on; give at least --max_steps {math.ceil(step / (1 - config.cooldown))}"
            )
    epoch = 0 if rows_per_epoch is None else config.steps_per_epoch * rows_per_step or rows_per_epoch
    return Schedule(rows_per_step, epoch, max_steps, warmup_steps, stable_steps, config.checkpoint_freq)
