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
    """The learning rate of each step of a run, and the steps at which epochs and the cool-down leave a checkpoint."""

    config: TrainConfig  # settled, with max_steps and warmup_steps
    rows_per_epoch: int = 0  # of the data, or of --steps_per_epoch; 0 for a mixture, or before the data is prepared

    @property
    def decay(self) -> Decay:
        return SCHEDULES[self.config.schedule]

    @cached_property
    def decay_start(self) -> int:
        """The step from which the learning rate falls."""
        steps = self.config.max_steps
        share = self.config.cooldown if self.decay.cools_down else self.decay.part  # of the steps
        return max(self.config.warmup_steps, steps - round(share * steps))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step. It rises linearly to max_lr, then falls to min_lr as --schedule says."""
        config = self.config
        if step < config.warmup_steps:
            return config.max_lr * (step + 1) / config.warmup_steps
        start = self.decay_start
        progress = min(1.0, max(0, step - start) / max(1, config.max_steps - start))
        left = self.decay.left(progress)
        return config.min_lr + left * (config.max_lr - config.min_lr)

    def epochs(self, rows: int) -> float:
        """Convert consumed rows to epochs; 0 if the length of an epoch is not known."""
        return rows / (self.rows_per_epoch or math.inf)

    def tiers(self, step: int, rows: int) -> list[str]:
        """Return the names, besides latest.pt, of the checkpoint after `step` steps, which consumed `rows` rows."""
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
        if not config.max_steps and self.rows_per_epoch:  # its number of epochs decided its length
            max_steps = config.last_step(launch["step"], launch["row"], self.rows_per_epoch)
            config = replace(config, max_steps=max_steps)
        return Schedule(config)


def with_steps(config: TrainConfig, rows_per_epoch: int, history: History) -> TrainConfig:
    """Settle how many steps a run takes, and how many of them warm up.

    Args:
        rows_per_epoch: 0 for a mixture, or after a change of the data, because such a run has no epochs.
    """
    if not (config.max_steps or config.num_epochs * config.steps_per_epoch or rows_per_epoch):
        raise UserError("a mixture of data has no epochs; set the length of the run with --max_steps")
    step = history.step
    max_steps = config.last_step(step, history.rows_consumed, rows_per_epoch)
    if step > max_steps:
        raise UserError(f"the checkpoint is at step {step:,}, past the run's {max_steps:,}; give a larger --max_steps")
    warmup_steps = config.warmup_steps
    if "warmup_steps" not in history.decisions and history.set_by.get("warmup_steps") != "flag":
        warmup_steps = min(warmup_steps, max_steps // 10)  # a preset may be meant for a longer run
    if warmup_steps >= max(1, max_steps):
        message = f"--warmup_steps {warmup_steps} is not shorter than the run of {max_steps} steps"
        raise UserError(f"{message}; try --warmup_steps {max_steps // 10}")
    config = replace(config, max_steps=max_steps, warmup_steps=warmup_steps)
    if config.resume == "stable" and Schedule(config).decay.cools_down and config.cooldown < 1:
        decay_start = Schedule(config).decay_start
        if step > decay_start:
            enough = math.ceil(step / (1 - config.cooldown))
            raise UserError(
                f"--resume stable is at step {step:,}, but a run of {max_steps:,} steps cools down from step "
                f"{decay_start:,} on; give at least --max_steps {enough}"
            )
    return config
