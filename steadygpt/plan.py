"""What a run will do, before anything is built: data, steps, precision, memory, disk; and what fits in memory."""

import dataclasses
import math
import platform
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from steadygpt.attention import SHORT_ROW, kernel_name
from steadygpt.checkpoint import LATEST, git_commit
from steadygpt.cli import RankError, options_of
from steadygpt.device import AUTOCAST, device_name, is_out_of_memory, memory_bytes
from steadygpt.disk import existing
from steadygpt.distributed import Ranks
from steadygpt.optim import checkpoint_bytes
from steadygpt.saves import interval_text
from steadygpt.uploads import WAITING

STATIC, COPY = "weights, gradients and optimizer", "copy for checkpoints"
# The share of the memory up to which an estimate is taken to fit. On a CPU a process keeps freed memory in fragments
# and holds up to 1.6 times the estimate (python -m benchmarks.memory --keep_freed).
FITS = {"cuda": 0.9, "mps": 0.9, "cpu": 0.6}

if TYPE_CHECKING:
    from config import TrainConfig
    from dataloader import Data
    from model import GPT
    from train import Schedule


def estimate_memory(
    config: "TrainConfig", model: "GPT", device: torch.device, world_size: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the peak of the bytes that a rank needs on its device and in host memory, by use.

    benchmarks/memory.py compares the estimate with measured peaks.

    Args:
        model: of the run, on the meta device.
    """
    memory, host = static(config, model, device, world_size), {}
    if config.cpu_offload:
        host[STATIC] = memory.pop(STATIC)
    memory["activations"], backward = activations(config, model, device)
    of_logits = logits(config, model, device)  # which are gone when the backward pass reaches the blocks
    memory["logits" if of_logits > backward else "a block's backward"] = max(of_logits, backward)
    host[COPY] = checkpoint_bytes(model, config.optimizer, page_locked=device.type == "cuda")
    return memory, host


def static(config: "TrainConfig", model: "GPT", device: torch.device, world_size: int) -> dict[str, float]:
    """Return the bytes of what has the size of weights, by use; they do not depend on the rows."""
    N, in_blocks = (sum(p.numel() for p in module.parameters()) for module in (model, model.h))
    fsdp, shards, bf16 = config.sharding == "fsdp", config.shards(world_size), config.precision == "bf16"
    uses = {STATIC: (checkpoint_bytes(model, config.optimizer) + 4 * N) / shards}
    if fsdp:  # root parameters stay gathered; two blocks at a time (current, prefetched)
        uses["gathered weights"] = 4 * (N - in_blocks) + (2 if bf16 else 4) * 2 * in_blocks / config.num_layers
        if config.grad_accum_steps(world_size) > 1:  # the last micro-step replaces them by shards, perhaps elsewhere
            elsewhere = config.cpu_offload and device.type != "cpu"
            uses["unsharded gradients"] = 4 * N - (0 if elsewhere else 4 * N / shards)
    if config.precision != "fp32" and not config.compiles(device.type):  # in eager code, autocast caches its copies
        head = model.config.padded_vocab_size * config.embd_size
        uses["16-bit weights"] = 2 * (head + (0 if fsdp and bf16 else in_blocks))
    return uses


def activations(config: "TrainConfig", model: "GPT", device: torch.device) -> tuple[float, float]:
    """Return the bytes that the blocks keep for backward, and those that the backward pass of a block adds.

    They are counted in model.py: the inputs of the norms in fp32; their outputs, q, k, v and attention's output;
    rotated, normed and repeated heads; the MLP's hidden layer before and after the activation.
    """
    C, tokens, mlp = config.embd_size, config.mini_batch_size * config.context_length, model.config.mlp_size
    each = 4 if config.precision == "fp32" else 2  # bytes of a number
    inputs = 4 * C * (1 if config.parallel_residual else 2)
    queries, keys = (config.head_size * heads for heads in (config.num_heads, config.kv_heads))
    heads = (queries + keys) * (2 + 1.5 * bool(config.rotary_pct)) + 2 * queries * (queries > keys)
    hidden = mlp * (4 if config.activation == "swiglu" else 2)
    block: float = tokens * (inputs + each * (2 * C + heads + hidden) + (each + 4) * (queries + keys) * config.qk_norm)
    # Attention's matrix (B, num_heads, T, T) is only kept on a CPU, with dropout or in attention_in_blocks.
    if device.type == "cpu" and (config.dropout or (each == 2 and config.context_length <= SHORT_ROW)):
        block += tokens * config.num_heads * config.context_length * (12 if config.dropout else 4)
    # Gradients of the residual stream in fp32, and of the hidden layer before and after the activation.
    backward: float = tokens * (8 * C + each * 2 * mlp)
    if config.activation_checkpointing:  # of all blocks only the inputs, and one block is recomputed
        return config.num_layers * tokens * 4 * C, block + backward
    return config.num_layers * block, backward


def logits(config: "TrainConfig", model: "GPT", device: torch.device) -> float:
    """Return the bytes of the logits and their gradient.

    In eager mode also of the gradient in fp32 before it is rounded; a soft cap computes tanh in fp32. With chunks, the
    head's gradient exists too: the sum so far; then also the chunk's and the new sum.
    """
    P, tokens = model.config.padded_vocab_size, config.mini_batch_size * config.context_length
    each, compiled = 4 if config.precision == "fp32" else 2, config.compiles(device.type)
    of_logit = 2 * each if compiled else 12 if config.logit_softcap else 8
    if not 0 < config.loss_chunk_size < tokens:
        return tokens * P * of_logit
    head = P * config.embd_size * (4 if compiled else each)  # compiled, autocast's copy of the head is outside
    return max(config.loss_chunk_size * P * of_logit + head, 3 * head)


def needed_bytes(config: "TrainConfig", model: "GPT", device: torch.device, world_size: int) -> float:
    """Return the sum of estimate_memory: on a GPU without the host's part, elsewhere with it."""
    on_device, host = estimate_memory(config, model, device, world_size)
    return sum(on_device.values()) + (0 if device.type == "cuda" else sum(host.values()))


def largest_fitting(
    config: "TrainConfig", model: "GPT", device: torch.device, world_size: int, limit: float
) -> "TrainConfig | None":
    """Return the configuration with as many rows as need at most `limit` bytes: up to mini_batch_size, or with auto
    up to all rows of a step. None if one row needs more.
    """
    for rows in reversed(config.possible_rows(world_size)):
        changed = dataclasses.replace(config, mini_batch_size=rows)
        if rows <= (config.mini_batch_size or rows) and needed_bytes(changed, model, device, world_size) <= limit:
            return changed
    return None


def what_would_fit(
    config: "TrainConfig", model: "GPT", device: torch.device, world_size: int, limit: float
) -> "TrainConfig | None":
    """Return a configuration that needs less memory than `config` and at most `limit` bytes, or None.

    Changes are added one by one: fewer rows, recomputed blocks, a loss in chunks, FSDP, weights in host memory.
    """
    # The estimate may be too low, so a configuration that needs as much as this one is no advice.
    limit = min(limit, 0.99 * needed_bytes(config, model, device, world_size))
    changes: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": True},
        {"loss_chunk_size": config.loss_chunk_size or min(2048, config.context_length // 2)},
        {"sharding": "fsdp"} if world_size > 1 else {},
        {"sharding": "fsdp", "cpu_offload": True} if device.type == "cuda" else {},
    ]
    for change in changes:
        config = dataclasses.replace(config, **change)
        if found := largest_fitting(config, model, device, world_size, limit):
            return found
    return None


def memory_advice(config: "TrainConfig", model: "GPT", ranks: Ranks, first_flag: str = "") -> str:
    """Return what a run needs, what there is, and the flags that make it fit, as the end of an error message."""

    def gb(config: "TrainConfig") -> str:
        return f"about {needed_bytes(config, model, ranks.device, ranks.world_size) / 1e9:.1f} GB"

    memory, rows = memory_bytes(ranks.device), config.mini_batch_size
    limit = FITS[ranks.device.type] * memory
    found = what_would_fit(config, model, ranks.device, ranks.world_size, limit)
    text = (
        f"{f'{rows} rows' if rows > 1 else '1 row'} of {config.context_length:,} tokens: {gb(config)} (estimated); the "
        f"limit is {limit / 1e9:.1f} of the {memory / 1e9:.1f} GB of {device_name(ranks.device)}. "
    )
    if not found:
        return text + "No option makes this model fit; try a smaller one or a device with more memory."
    changed = {name: value for name in options_of(config) if (value := getattr(found, name)) != getattr(config, name)}
    flags = [f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items()]
    return f"{text}Try {' '.join([*first_flag.split(), *flags])} ({gb(found)})."


@contextmanager
def out_of_memory_explained(config: "TrainConfig", model: "GPT", ranks: Ranks):
    """Raise a RankError with advice in place of an error for lack of memory. `model` is on the meta device."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        saved = Path(config.checkpoint_dir, LATEST).exists()
        text = memory_advice(config, model, ranks, "--resume latest" * saved)
        text += f" The checkpoints in {config.checkpoint_dir} are intact." * saved
        raise RankError(f"out of memory on rank {ranks.rank}: {text}") from error


def describe(
    config: "TrainConfig", data: "Data", schedule: "Schedule", ranks: Ranks, model: "GPT", val_rows: int
) -> list[str]:
    """Return the plan of a run, as lines. `model` is on the meta device; val_rows are those of each validation."""
    N, T, B = model.num_parameters(), config.context_length, config.mini_batch_size
    memory, host = estimate_memory(config, model, ranks.device, ranks.world_size)
    micro_steps, checkpoint = config.grad_accum_steps(ranks.world_size), checkpoint_bytes(model, config.optimizer)
    rows_per_step, commit = schedule.rows_per_step, git_commit()
    epochs = schedule.epochs(schedule.max_steps * rows_per_step)
    emulated = ", emulated slowly" * (config.precision == "fp8" and ranks.device.type != "cuda")
    dtype = AUTOCAST.get(config.precision, torch.float32)
    kernel = kernel_name((1, config.num_heads, T, model.config.head_size), dtype, ranks.device, config.dropout)
    lines = [
        f"version      {f'commit {commit[:12]}{commit[40:]}, ' * bool(commit)}torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        f"model        {N / 1e6:,.2f} M parameters: {config.num_layers} layers, {config.num_heads} heads, "
        f"{config.embd_size} wide, context {T:,}, vocabulary {data.vocab_size:,} ({data.tokenizer})",
        f"data         {_data_text(config, data)}; {val_rows * T:,} validation tokens",
        f"steps        {schedule.max_steps:,} of {config.total_batch_size:,} tokens = {B} rows x {T:,} tokens x "
        f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)} x "
        f"{micro_steps} micro-step{'s' * (micro_steps > 1)}; "
        + (f"{schedule.rows_per_epoch / rows_per_step:,.1f} steps an epoch, " if data.train_shards else "")
        + (f"{epochs:,.2f} epochs; " if epochs else "")
        + f"{schedule.warmup_steps:,} steps of warm-up",
        f"device       {ranks.world_size} x {device_name(ranks.device)}, {config.precision}{emulated}, "
        f"{config.sharding}{f', attention by {kernel}' * bool(kernel)}",
        f"memory       {_memory_text(memory, 'a rank')}",
        f"host memory  {_memory_text(host, 'on rank 0')} (rank 0 only)",
        f"checkpoints  {_checkpoints_text(config, checkpoint, math.ceil(epochs))}",
    ]
    if config.mirror:
        lines.append(f"mirror       {config.mirror}")
    if config.checkpoint_minutes:
        lines.append(f"             {interval_text(60 * config.checkpoint_minutes, checkpoint)}")
    return lines


def _data_text(config: "TrainConfig", data: "Data") -> str:
    count = len(data.train_shards)
    if not count:
        return f"no shards in {config.data_dir} yet; planned with the vocabulary of --tokenizer {data.tokenizer}"
    tokens = sum(shard.num_tokens for shard in data.train_shards)
    return f"{tokens:,} training tokens in {count} shard{'s' * (count > 1)} of {config.data_dir}"


def _checkpoints_text(config: "TrainConfig", size: int, epochs: int) -> str:
    """Return what the checkpoints of a run take, and the flag that lets them fit on the disk.

    Args:
        size: bytes of a checkpoint.
        epochs: of the run; 0: not known.
    """
    folder = Path(config.checkpoint_dir)
    free = shutil.disk_usage(existing(folder)).free
    others = config.keep_checkpoints + 3 + (WAITING + 1) * bool(config.mirror)  # these stay until they are uploaded
    files = others + min(filter(None, (epochs, config.keep_epochs)), default=0)
    more = "" if epochs or config.keep_epochs else " and one for each epoch, whose length is not known,"
    text = f"{size / 1e9:.2f} GB each, at most {files:,}{more} in {folder}: {files * size / 1e9:,.1f} GB; "
    text += f"{free / 1e9:,.1f} GB free"
    if files * size <= free:
        return text
    if (fits := int(0.9 * free / size) - others) > 0:  # other files grow too
        return f"{text} -- NOT ENOUGH; --keep_epochs {fits} keeps the newest of {epochs:,} epochs"
    return f"{text} -- NOT ENOUGH; try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"


def _memory_text(uses: dict[str, float], where: str) -> str:
    parts = ", ".join(f"{what} {size / 1e9:.2f}" for what, size in uses.items())
    return f"about {sum(uses.values()) / 1e9:.2f} GB {where}: {parts}"
