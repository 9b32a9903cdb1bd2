"""What a run will do, before anything is built: data, steps, precision, memory, disk, time."""

import math
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from steadygpt.base.disk import existing
from steadygpt.checkpoint.files import git_commit
from steadygpt.checkpoint.saves import interval_text
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import AUTOCAST, device_name
from steadygpt.machine.ranks import Ranks
from steadygpt.run.forecast import forecast
from steadygpt.run.memory import checkpoint_bytes, estimate_memory
from steadygpt.run.schedule import Schedule
from steadygpt.run.start import Start

if TYPE_CHECKING:
    from dataloader import Data, RowStream
    from model import GPT
    from steadygpt.config import TrainConfig


@dataclass(frozen=True)
class Plan:
    """A run before it is built."""

    start: Start
    data: "Data"
    schedule: Schedule
    sketch: "GPT"  # on the meta device
    ranks: Ranks
    precision_elsewhere: str  # that the forecast assumes for well-known GPUs

    def lines(self) -> list[str]:
        """Return the plan in words."""
        config, data = self.start.config, self.data
        lines = describe(config, data, self.schedule, self.ranks, self.sketch, validation_rows(config, data.val))
        return [*lines, *self.start.notes]

    def forecast(self, step_s: float | None = None) -> list[str]:
        """Return what the run will take, as further lines.

        Args:
            step_s: measured seconds of a step, if known.
        """
        config, val_rows = self.start.config, validation_rows(self.start.config, self.data.val)
        step, elsewhere = self.start.step or 0, self.precision_elsewhere
        return forecast(config, self.schedule, self.ranks, self.sketch, step, val_rows, step_s, elsewhere)


def validation_rows(config: "TrainConfig", val: "RowStream | None") -> int:
    """Return the number of rows of a validation: eval_tokens, or all rows if there are fewer."""
    wanted = max(1, config.eval_tokens // config.context_length)
    return min(wanted, val.rows_per_epoch or wanted) if val else 0


def describe(
    config: "TrainConfig", data: "Data", schedule: Schedule, ranks: Ranks, model: "GPT", val_rows: int
) -> list[str]:
    """Return the plan of a run, as lines. `model` is on the meta device; val_rows are those of each validation."""
    T, world_size, micro_steps = config.context_length, ranks.world_size, config.grad_accum_steps(ranks.world_size)
    memory, host = estimate_memory(config, model, ranks)
    epochs = schedule.epochs(schedule.max_steps * schedule.rows_per_step)
    commit, shards, checkpoint = git_commit(), data.train_shards, checkpoint_bytes(model, config.optimizer)
    emulated = ", emulated slowly" * (config.precision == "fp8" and ranks.device.type != "cuda")
    dtype = AUTOCAST.get(config.precision, torch.float32)
    kernel = kernel_name((1, config.num_heads, T, model.config.head_size), dtype, ranks.device, config.dropout)
    training = f"no shards in {config.data_dir} yet; planned with the vocabulary of --tokenizer {data.tokenizer}"
    if shards:
        tokens = sum(shard.num_tokens for shard in shards)
        training = f"{tokens:,} training tokens in {len(shards)} shard{'s' * (len(shards) > 1)} of {config.data_dir}"

    def uses(memory: dict[str, float], where: str) -> str:
        parts = ", ".join(f"{what} {size / 1e9:.2f}" for what, size in memory.items())
        return f"about {sum(memory.values()) / 1e9:.2f} GB {where}: {parts}"

    lines = [
        f"version      {f'commit {commit[:12]}{commit[40:]}, ' * bool(commit)}torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        f"model        {model.num_parameters() / 1e6:,.2f} M parameters: {config.num_layers} layers, "
        f"{config.num_heads} heads, {config.embd_size} wide, context {T:,}, "
        f"vocabulary {data.vocab_size:,} ({data.tokenizer})",
        f"data         {training}; {val_rows * T:,} validation tokens",
        f"steps        {schedule.max_steps:,} of {config.total_batch_size:,} tokens = {config.mini_batch_size} rows x "
        f"{T:,} tokens x {world_size} rank{'s' * (world_size > 1)} x {micro_steps} "
        f"micro-step{'s' * (micro_steps > 1)}; "
        + (f"{schedule.rows_per_epoch / schedule.rows_per_step:,.1f} steps an epoch, " if shards else "")
        + (f"{epochs:,.2f} epochs; " if epochs else "")
        + f"{schedule.warmup_steps:,} steps of warm-up",
        f"device       {world_size} x {device_name(ranks.device)}, {config.precision}{emulated}, "
        f"{config.sharding}{f', attention by {kernel}' * bool(kernel)}",
        f"memory       {uses(memory, 'a rank')}",
        f"host memory  {uses(host, 'on rank 0')} (rank 0 only)",
        f"checkpoints  {_checkpoints_text(config, checkpoint, math.ceil(epochs))}",
    ]
    if config.mirror:
        lines.append(f"mirror       {config.mirror}")
    if config.checkpoint_minutes:
        lines.append(f"             {interval_text(60 * config.checkpoint_minutes, checkpoint)}")
    return lines


def _checkpoints_text(config: "TrainConfig", size: int, epochs: int) -> str:
    """Return what the checkpoints of a run take, and the flag that lets them fit on the disk.

    Args:
        size: bytes of a checkpoint.
        epochs: of the run; 0: not known.
    """
    folder = Path(config.checkpoint_dir)
    free = shutil.disk_usage(existing(folder)).free
    others = config.keep_checkpoints + 3 + bool(config.mirror)  # one stays until it is uploaded
    files = others + min(filter(None, (epochs, config.keep_epochs)), default=0)
    more = "" if epochs or config.keep_epochs else " and one for each epoch, whose length is not known,"
    text = f"{size / 1e9:.2f} GB each, at most {files:,}{more} in {folder}: {files * size / 1e9:,.1f} GB; "
    text += f"{free / 1e9:,.1f} GB free"
    if files * size <= free:
        return text
    if (fits := int(0.9 * free / size) - others) > 0:  # other files grow too
        return f"{text} -- NOT ENOUGH; --keep_epochs {fits} keeps the newest of {epochs:,} epochs"
    return f"{text} -- NOT ENOUGH; try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
