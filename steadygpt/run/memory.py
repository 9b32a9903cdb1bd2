"""The memory that a run needs, and what fits: the rows of a micro-step, advice after an out-of-memory error."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from model import GPT
from steadygpt.base.options import RankError, UserError
from steadygpt.base.text import bytes_text, counted, labelled
from steadygpt.checkpoint.files import LATEST
from steadygpt.config import TrainConfig
from steadygpt.machine.attention import SHORT_ROW
from steadygpt.machine.device import device_name, is_out_of_memory, memory_bytes
from steadygpt.machine.ranks import Ranks

STATIC, SUMS, COPY = "weights, gradients and optimizer", "sums of gradients", "copy for checkpoints"
# The share of the memory up to which an estimate is taken to fit. On a CPU a process keeps freed memory in fragments
# and uses up to 1.6 times the estimate (python -m benchmarks.memory --keep_freed).
FITS = {"cuda": 0.9, "mps": 0.9, "cpu": 0.6}


def checkpoint_bytes(model: GPT, optimizer: str, page_locked: bool = False) -> int:
    """Return the bytes of the weights and of the optimizer's state: two moments of AdamW or one of Muon, in fp32.

    Args:
        page_locked: count memory in which PyTorch rounds each tensor up to a power of two.
    """
    total = 0
    for role, parameters in model.parameters_by_role().items():
        for parameter in parameters.values():
            size, tensors = 4 * parameter.numel(), 2 if (role, optimizer) == ("matrix", "muon") else 3
            total += tensors * (2 ** (size - 1).bit_length() if page_locked else size)
    return total


def estimate_memory(config: TrainConfig, model: GPT, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the peak of the bytes that a rank needs on its device and in host memory, by use.

    benchmarks/memory.py compares the estimate with measured peaks.
    """
    device, world_size = ranks.device.type, ranks.world_size
    fsdp, bf16, compiled = config.sharding == "fsdp", config.precision == "bf16", config.compiles(device)
    tokens, each = config.mini_batch_size * config.context_length, 4 if config.precision == "fp32" else 2  # bytes
    N, in_blocks = sum(map(torch.numel, model.parameters())), sum(map(torch.numel, model.h.parameters()))
    C, P, shards = config.embd_size, model.config.padded_vocab_size, config.shards(world_size)
    memory = dict[str, float]()
    host: dict[str, float] = {COPY: checkpoint_bytes(model, config.optimizer, page_locked=device == "cuda")}
    (host if config.cpu_offload else memory)[STATIC] = (checkpoint_bytes(model, config.optimizer) + 4 * N) / shards
    if config.deterministic:  # of subtrees; and what the processes exchange
        subtrees = max(1, config.virtual_ranks() // world_size).bit_length() - 1
        memory[SUMS] = 4 * N * (subtrees + (world_size > 1))
    if fsdp:  # root parameters stay gathered; two blocks at a time (current, prefetched)
        memory["gathered weights"] = 4 * (N - in_blocks) + (2 if bf16 else 4) * 2 * in_blocks / config.num_layers
        if config.grad_accum_steps(world_size) > 1:  # the last micro-step replaces them by shards, perhaps elsewhere
            elsewhere = config.cpu_offload and device != "cpu"
            memory["unsharded gradients"] = 4 * N - (0 if elsewhere else 4 * N / shards)
    if each == 2 and not compiled:  # in eager code, autocast caches its copies
        memory["16-bit weights"] = 2 * (P * C + (0 if fsdp and bf16 else in_blocks))

    # A block keeps for backward: the inputs of the norms in fp32; their outputs, q, k, v and attention's output;
    # rotated, normed and repeated heads; the MLP's hidden layer before and after the activation.
    queries, keys = config.head_size * config.num_heads, config.head_size * config.kv_heads
    heads = (queries + keys) * (2 + 1.5 * bool(config.rotary_pct)) + 2 * queries * (queries > keys)
    hidden = model.config.mlp_size * (4 if config.activation == "swiglu" else 2)
    block = 4 * C * (1 if config.parallel_residual else 2) + each * (2 * C + heads + hidden)
    block += (each + 4) * (queries + keys) * config.qk_norm
    # Attention's matrix (B, num_heads, T, T) is only kept on a CPU, with dropout or in attention_in_blocks.
    if device == "cpu" and (config.dropout or (each == 2 and config.context_length <= SHORT_ROW)):
        block += config.num_heads * config.context_length * (12 if config.dropout else 4)
    # Gradients of the residual stream in fp32, and of the hidden layer before and after the activation.
    backward = 8 * C + each * 2 * model.config.mlp_size
    if config.activation_checkpointing:  # of all blocks only the inputs, and one block is recomputed
        block, backward = 4 * C, block + backward
    memory["activations"] = config.num_layers * tokens * block

    # Logits and their gradient; in eager mode also the gradient in fp32 before it is rounded; a soft cap computes tanh
    # in fp32. With chunks, the head's gradient exists too: the sum so far; then also the chunk's and the new sum.
    of_logit = 2 * each if compiled else 12 if config.logit_softcap else 8
    logits: float = tokens * P * of_logit
    if 0 < config.loss_chunk_size < tokens:
        head = P * C * (4 if compiled else each)  # compiled, autocast's copy of the head is outside
        logits = max(config.loss_chunk_size * P * of_logit + head, 3 * head)
    # The logits are gone when the backward pass reaches the blocks.
    memory["logits" if logits > tokens * backward else "backward of one block"] = max(logits, tokens * backward)
    return memory, host


def needed_bytes(config: TrainConfig, model: GPT, ranks: Ranks) -> float:
    """Return the sum of estimate_memory: on a GPU without the host's part, elsewhere with it."""
    on_device, host = estimate_memory(config, model, ranks)
    return sum(on_device.values()) + (0 if ranks.device.type == "cuda" else sum(host.values()))


def memory_advice(config: TrainConfig, model: GPT, ranks: Ranks) -> str:
    """Return the needed and the available memory and the flags that save some, the cheapest first, for an error."""
    memory, needed = memory_bytes(ranks.device), bytes_text(needed_bytes(config, model, ranks))
    fewer = max((rows for rows in config.possible_rows(ranks.world_size) if rows < config.mini_batch_size), default=0)
    savers = [f"--mini_batch_size {fewer}"] * bool(fewer)
    savers += ["--activation_checkpointing"] * (not config.activation_checkpointing)
    savers += [f"--loss_chunk_size {min(2048, config.context_length // 2)}"] * (not config.loss_chunk_size)
    savers += ["--sharding fsdp"] * (config.sharding == "ddp" and not config.deterministic)
    return (
        f"{counted(config.mini_batch_size, 'row')} of {config.context_length:,} tokens: about {needed} (estimated); "
        f"the limit is {bytes_text(FITS[ranks.device.type] * memory)} of the {bytes_text(memory)} of "
        f"{device_name(ranks.device)}. Try, in this order, {', '.join([*savers, 'a smaller model'])}"
    )


@contextmanager
def out_of_memory_explained(config: TrainConfig, model: GPT, ranks: Ranks):
    """Raise a RankError with advice in place of an out-of-memory error. `model` is on the meta device."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        saved = Path(config.checkpoint_dir, LATEST).exists()
        intact = f". The checkpoints in {config.checkpoint_dir} are intact: add --resume latest" * saved
        raise RankError(f"out of memory on rank {ranks.rank}: {memory_advice(config, model, ranks)}{intact}") from error


def with_fitting_rows(config: TrainConfig, model: GPT, memory: int, ranks: Ranks) -> tuple[TrainConfig, str]:
    """Replace --mini_batch_size auto by a number of rows that fits on every rank, and describe it in a line.

    Args:
        memory: bytes of the rank that has least.
    """
    if config.mini_batch_size:
        return config, ""
    possible, limit = config.possible_rows(ranks.world_size), FITS[ranks.device.type] * memory
    of_rows = {rows: replace(config, mini_batch_size=rows) for rows in possible}
    rows = max((rows for rows in possible if needed_bytes(of_rows[rows], model, ranks) <= limit), default=0)
    config = of_rows[rows or possible[0]]
    if not rows:
        raise UserError(f"--mini_batch_size auto: {memory_advice(config, model, ranks)}")
    text = f"{rows} per micro-step, chosen by --mini_batch_size auto: {bytes_text(needed_bytes(config, model, ranks))}"
    limit_text = f"{bytes_text(limit)} of {bytes_text(memory)}"
    return config, labelled("rows", f"{text} (estimated); the limit is {limit_text}")
