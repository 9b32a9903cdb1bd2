"""What a run will do, before anything is built: data, steps, precision, memory, disk."""

import math
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from steadygpt.device import choose_precision, device_name
from steadygpt.distributed import Ranks
from steadygpt.runlog import git_commit
from steadygpt.saves import interval_text

if TYPE_CHECKING:
    from config import TrainConfig
    from dataloader import Data
    from model import GPT
    from train import Schedule


def estimate_memory(
    config: "TrainConfig", model: "GPT", precision: str, compiled: bool, shards: int
) -> dict[str, float]:
    """Estimate the bytes that a rank needs, by use; benchmarks/memory.py compares them with measured peaks.

    Args:
        model: of the run, on the meta device.
        shards: ranks that share weights and optimizer state; 1 under DDP.
    """
    tokens, C, layers = config.mini_batch_size * config.context_length, config.embd_size, config.num_layers
    each = 4 if precision == "fp32" else 2
    # What a block keeps for backward, counted in model.py: the inputs of both LayerNorms in fp32; their outputs, q, k,
    # v and attention's output twice; the MLP's hidden layer before and after GELU. (The attention matrix is never
    # stored.) With recomputation: this for one block, and the fp32 inputs of all.
    block = tokens * (8 * C + each * (7 * C + 2 * model.config.mlp_size))
    blocks = layers * tokens * 4 * C + block if config.activation_checkpointing else layers * block
    # Eager cross-entropy holds its fp32 output and two gradients at once; compiled, the logits and their gradient.
    chunked = 0 < config.loss_chunk_size < tokens
    logits = (config.loss_chunk_size if chunked else tokens) * model.config.vocab_size
    return {
        "weights, gradients and Adam": 16 * model.num_parameters() / shards,
        "activations": blocks,
        "logits": logits * (2 * each if compiled and not chunked else 12),
    }


def describe(
    config: "TrainConfig", data: "Data", schedule: "Schedule", ranks: Ranks, model: "GPT", val_rows: int
) -> list[str]:
    """Return the plan of a run, as lines. `model` is on the meta device; val_rows are those of each validation."""
    N, T, B = model.num_parameters(), config.context_length, config.mini_batch_size
    precision = choose_precision(config.precision, ranks.device)
    shards = config.shards(ranks.world_size)
    memory = estimate_memory(config, model, precision, config.compiles(ranks.device.type), shards)
    checkpoint = 12 * N
    folder = Path(config.checkpoint_dir)
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    files = config.keep_checkpoints + 3 + math.ceil(schedule.epochs(schedule.max_steps * schedule.rows_per_step))
    commit = git_commit()
    lines = [
        f"version      {f'commit {commit[:12]}{commit[40:]}, ' * bool(commit)}torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        f"model        {N / 1e6:,.2f} M parameters: {config.num_layers} layers, {config.num_heads} heads, "
        f"{config.embd_size} wide, context {T:,}, vocabulary {data.vocab_size:,} ({data.tokenizer})",
        f"data         {sum(shard.num_tokens for shard in data.train_shards):,} training tokens in "
        f"{len(data.train_shards)} shard{'s' * (len(data.train_shards) > 1)} of {config.data_dir}; "
        f"{val_rows * T:,} validation tokens",
        f"steps        {schedule.max_steps:,} of {config.total_batch_size:,} tokens = {B} rows x {T:,} tokens x "
        f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)} x "
        f"{config.grad_accum_steps(ranks.world_size)} micro-steps; "
        f"{schedule.rows_per_epoch / schedule.rows_per_step:,.1f} steps an epoch, "
        f"{schedule.epochs(schedule.max_steps * schedule.rows_per_step):.2f} epochs; "
        f"{schedule.warmup_steps:,} steps of warm-up",
        f"device       {ranks.world_size} x {device_name(ranks.device)}, {precision}, {config.sharding}",
        f"memory       about {sum(memory.values()) / 1e9:.2f} GB a rank: "
        + ", ".join(f"{what} {size / 1e9:.2f}" for what, size in memory.items()),
        f"checkpoints  {checkpoint / 1e9:.2f} GB each, at most {files} in {folder}: {files * checkpoint / 1e9:.1f} GB; "
        f"{free / 1e9:.1f} GB free" + (" -- NOT ENOUGH" if files * checkpoint > free else ""),
    ]
    if config.checkpoint_minutes:
        lines.append(f"             {interval_text(60 * config.checkpoint_minutes, checkpoint)}")
    return lines
