"""The length of a run in steps, rows and epochs, and its learning rate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from steadygpt.base.options import UserError
from steadygpt.base.text import labelled
from steadygpt.checkpoint.files import EPOCH, ROLLING, STABLE, Launch, config_of
from steadygpt.choices import SCHEDULES, Decay
from steadygpt.config import TrainConfig
from steadygpt.run.history import History


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step of a run, and what ends with it."""

    config: TrainConfig  # settled: max_steps and warmup_steps are those of the run
    rows_per_epoch: int = 0  # of the data, or of --steps_per_epoch; 0: not prepared yet, or a mixture

    @property
    def decay(self) -> Decay:
        return SCHEDULES[self.config.schedule]

    @cached_property
    def decay_start(self) -> int:
        """The step from which the learning rate falls."""
        steps = self.config.max_steps
        part = self.config.cooldown if self.decay.cools_down else self.decay.part
        return max(self.config.warmup_steps, steps - round(part * steps))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step: it rises linearly to max_lr, and falls to min_lr as `schedule` says."""
        config = self.config
        if step < config.warmup_steps:
            return config.max_lr * (step + 1) / config.warmup_steps
        start = self.decay_start
        progress = min(1.0, max(0, step - start) / max(1, config.max_steps - start))
        left = self.decay.left(progress)
        return config.min_lr + left * (config.max_lr - config.min_lr)

    def epochs(self, rows: int) -> float:
        """Convert consumed rows to epochs; 0 if their length is not known."""
        return rows / (self.rows_per_epoch or math.inf)

    def tiers(self, step: int, rows: int) -> list[str]:
        """Return the names, besides latest.pt, of the checkpoint after `step` updates and `rows` consumed rows."""
        names = []
        freq = self.config.checkpoint_freq
        if step and freq and step % freq == 0:
            names.append(ROLLING.format(step))
        epoch = int(self.epochs(rows))
        if step and epoch > int(self.epochs(rows - self.config.rows_per_step)):
            names.append(EPOCH.format(epoch))
        if self.decay.cools_down and step == self.decay_start:
            names.append(STABLE)
        return names

    def notes(self, checkpoint: Mapping[str, Any] | None) -> list[str]:
        """Return lines for the plan: where the cool-down begins, and how a resume changes the learning rate."""
        notes = []
        step = checkpoint["step"] if checkpoint else 0
        if self.decay.cools_down and self.decay_start > step:
            text = f"starts at step {self.decay_start:,}; {STABLE} is saved just before"
            notes.append(labelled("cool-down", f"{text}. To train longer: --resume stable --max_steps N"))
        if checkpoint and step >= max(1, self.config.warmup_steps):
            planned = self._of_launch(checkpoint["launches"][-1])
            before = planned.learning_rate(step)
            now = self.learning_rate(step)
            if now > 1.1 * before:
                advice = "; --resume stable continues from before the decay" if planned.decay.cools_down else ""
                notes.append(labelled("lr", f"rises from {before:.2e} to {now:.2e}{advice}"))
            elif now < 0.9 * before:
                notes.append(labelled("lr", f"falls from {before:.2e} to {now:.2e} at once"))
        return notes

    def _of_launch(self, launch: Launch) -> "Schedule":
        """Return the schedule that a launch had planned."""
        config = config_of(launch)
        if not config.max_steps and self.rows_per_epoch:  # its epochs decided
            max_steps = config.last_step(launch["step"], launch["row"], self.rows_per_epoch)
            config = replace(config, max_steps=max_steps)
        return Schedule(config)


def with_steps(config: TrainConfig, rows_per_epoch: int, history: History) -> TrainConfig:
    """Settle how many steps a run takes, and how many of them warm up.

    Args:
        rows_per_epoch: 0 of a mixture, or after a change of the data: the run has no epochs.
    """
    if not (config.max_steps or config.num_epochs * config.steps_per_epoch or rows_per_epoch):
        raise UserError("a mixture of data has no epochs; set the length of the run with --max_steps")
    step = history.step
    max_steps = config.last_step(step, history.rows_consumed, rows_per_epoch)
    if step > max_steps:
        raise UserError(f"the checkpoint is at step {step:,}, past the run's {max_steps:,}; give a larger --max_steps")
    warmup_steps = config.warmup_steps
    if "warmup_steps" not in history.decisions and history.given.get("warmup_steps") != "flag":
        warmup_steps = min(warmup_steps, max_steps // 10)  # a preset's may be for a longer run
    if warmup_steps >= max(1, max_steps):
        found = f"--warmup_steps {warmup_steps} is not shorter than the run of {max_steps} steps"
        raise UserError(f"{found}; try --warmup_steps {max_steps // 10}")
    config = replace(config, max_steps=max_steps, warmup_steps=warmup_steps)
    if config.resume == "stable" and Schedule(config).decay.cools_down and config.cooldown < 1:
        start = Schedule(config).decay_start
        if step > start:
            found = (
                f"--resume stable is at step {step:,}, but a run of {max_steps:,} steps cools down from step {start:,}"
            )
            raise UserError(f"{found} on; give at least --max_steps {math.ceil(step / (1 - config.cooldown))}")
    return config
