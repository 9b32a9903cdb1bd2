"""The memory that a run needs, and what fits: the rows of a micro-step, advice after an out-of-memory error."""

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT
from optim import state_shapes
from steadygpt.base.options import RankError, UserError
from steadygpt.base.text import bytes_text, counted, labelled
from steadygpt.checkpoint.files import LATEST
from steadygpt.config import GPTConfig, TrainConfig
from steadygpt.machine.device import autocast, device_name, is_out_of_memory, memory_bytes
from steadygpt.machine.loss import mean_terms
from steadygpt.machine.ranks import Ranks

STATIC, SUMS, COPY = "weights, gradients and optimizer", "sums of gradients", "copy for checkpoints"
# The share of the memory up to which an estimate is taken to fit. On a CPU a process keeps freed memory in fragments
# and uses up to 1.6 times the estimate (python -m benchmarks.memory --keep_freed).
FITS = {"cuda": 0.9, "mps": 0.9, "cpu": 0.6}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
SUMS_AND_RELU = (torch.ops.aten.add.Tensor, torch.ops.aten.relu.default)


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, as long as these exist.

    Args:
        known: tensors that are not counted.
        is_compiled: count what compiled code keeps and fuses: sums, such as the residual stream, and what products and
            attention read or return. It computes again what lies between them. (H100 peaks in benchmarks/RESULTS.md)
    """

    def __init__(self, known: Iterable[Tensor], is_compiled: bool):
        super().__init__()
        self.is_compiled, self.now, self.peak, self.first_peak = is_compiled, 0, 0, 0
        self.counted = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = operator(*args, **(kwargs or {})), operator.overloadpacket.__name__
        if name in PRODUCTS or name.startswith("_scaled_dot_product"):
            self._count((found, args) if self.is_compiled else found)
        elif not self.is_compiled or operator in SUMS_AND_RELU:
            self._count(found)
        elif operator == torch.ops.aten._to_copy.default and found.itemsize > args[0].itemsize:
            weakref.finalize(found.untyped_storage(), id, args[0].untyped_storage())  # keep what compiled code keeps
        # With content, PyTorch sums gradients in place if they are no views, as casts are none.
        if torch.is_grad_enabled() or operator != SUMS_AND_RELU[0] or args[0]._is_view():
            self.peak = max(self.peak, self.now)
        return found

    def watch(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep the peak up to the end of a block's backward pass as `first_peak`."""

        def end(_: Tensor) -> None:
            self.first_peak, self.peak = self.peak, self.now

        args[0].register_hook(end)

    def _count(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.counted:
                self.counted.add(storage)
                weakref.finalize(storage, self._add, -storage.nbytes())
                self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.now += size


def micro_step_bytes(config: TrainConfig, shape: GPTConfig, device: torch.device) -> tuple[int, int]:
    """Count the bytes that forward and backward of a micro-step need: of all blocks, and of the rest at the peak.

    Two blocks and three are computed with tensors of a CPU that have no content.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

    # All blocks' activations are there until the last block's backward pass has ended.
    peaks, cpu = [], torch.device("cpu")
    kernels: Callable[[], AbstractContextManager] = nullcontext
    is_compiled = config.compiles(device.type)
    if device.type != "cpu":  # whose attention keeps no matrix (B, num_heads, T, T); a CPU's does with these two
        shape, kernels = replace(shape, dropout=0.0), partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    for layers in (2, 3):
        with FakeTensorMode(), cpu, kernels():
            model = GPT(replace(shape, num_layers=layers), config, initialize=False)
            if config.is_fsdp and config.precision == "bf16":  # which gathers the blocks in bf16
                for parameter in model.h.parameters():
                    parameter.data = parameter.bfloat16()
            known: list[Tensor] = []
            for parameter in model.parameters():
                parameter.grad = gradient = torch.empty_like(parameter)
                known += parameter, gradient
            rows = torch.zeros(config.mini_batch_size, config.context_length + 1, dtype=torch.int64)
            with Allocated(known, is_compiled) as allocated:
                model.h[-1].register_forward_pre_hook(allocated.watch)
                with autocast(cpu, config.precision):
                    loss_terms = model(rows[:, :-1], rows[:, 1:])
                mean_terms(loss_terms).sum().backward()
        peaks.append((allocated.first_peak, allocated.peak))
    (two, _), (three, later) = peaks
    blocks = (three - two) * shape.num_layers
    return blocks, max(3 * two - 2 * three, later - blocks)


def checkpoint_bytes(model: GPT, optimizer: str, page_locked: bool = False) -> int:
    """Return the bytes of the weights and of the optimizer's state.

    Args:
        page_locked: count memory in which PyTorch rounds each tensor up to a power of two.
    """
    shapes = [*state_shapes(model.config, optimizer).values(), *(p.shape for p in model.parameters())]
    sizes = [4 * math.prod(shape) for shape in shapes]
    return sum(2 ** (size - 1).bit_length() if page_locked else size for size in sizes)


def estimate_memory(config: TrainConfig, model: GPT, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the peak of the bytes that a rank needs on its device and in host memory, by use.

    benchmarks/memory.py compares the estimate with measured peaks.
    """
    device, world_size, shards = ranks.device, ranks.world_size, config.shards(ranks.world_size)
    N, in_blocks = sum(map(torch.numel, model.parameters())), sum(map(torch.numel, model.h.parameters()))
    memory, saved = dict[str, float](), checkpoint_bytes(model, config.optimizer)
    host: dict[str, float] = {COPY: checkpoint_bytes(model, config.optimizer, page_locked=device.type == "cuda")}
    memory[STATIC] = (saved + 4 * N) / shards
    if config.deterministic:  # of subtrees; and what the processes exchange
        subtrees = max(1, config.virtual_ranks() // world_size).bit_length() - 1
        memory[SUMS] = 4 * N * (subtrees + (world_size > 1))
    if config.is_fsdp:  # root parameters stay gathered; two blocks at a time (current, prefetched)
        each = 2 if config.precision == "bf16" else 4
        memory["gathered weights"] = 4 * (N - in_blocks) + each * 2 * in_blocks / config.num_layers
        if config.grad_accum_steps(world_size) > 1:  # the last micro-step replaces them by shards
            memory["unsharded gradients"] = 4 * N - 4 * N / shards
    memory["activations"], memory["logits and temporary tensors"] = micro_step_bytes(config, model.config, device)
    return memory, host


def needed_bytes(config: TrainConfig, model: GPT, ranks: Ranks) -> float:
    """Return the sum of estimate_memory: on a GPU without the host's part, elsewhere with it."""
    on_device, host = estimate_memory(config, model, ranks)
    return sum(on_device.values()) + (0 if ranks.device.type == "cuda" else sum(host.values()))


def memory_advice(config: TrainConfig, model: GPT, ranks: Ranks) -> str:
    """Return the needed and the available memory and the flags that save some, the cheapest first, for an error."""
    memory = memory_bytes(ranks.device)
    needed = bytes_text(needed_bytes(config, model, ranks))
    savers = []
    fewer = [rows for rows in config.possible_rows(ranks.world_size) if rows < config.mini_batch_size]
    if fewer:
        savers.append(f"--mini_batch_size {fewer[-1]}")
    if not config.activation_checkpointing:
        savers.append("--activation_checkpointing")
    if not config.loss_chunk_size:
        savers.append(f"--loss_chunk_size {min(2048, config.context_length // 2)}")
    if not config.is_fsdp and not config.deterministic:
        savers.append("--sharding fsdp")
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
        advice = memory_advice(config, model, ranks)
        if Path(config.checkpoint_dir, LATEST).exists():
            advice += f". The checkpoints in {config.checkpoint_dir} are intact: add --resume latest"
        raise RankError(f"out of memory on rank {ranks.rank}: {advice}") from error


def with_fitting_rows(config: TrainConfig, model: GPT, memory: int, ranks: Ranks) -> tuple[TrainConfig, str]:
    """Replace --mini_batch_size auto by a number of rows that fits on every rank, and describe it in a line.

    Args:
        memory: bytes of the rank that has least.
    """
    if config.mini_batch_size:
        return config, ""
    possible, limit = config.possible_rows(ranks.world_size), FITS[ranks.device.type] * memory
    with_rows = [replace(config, mini_batch_size=rows) for rows in possible]
    fitting = bisect_right(with_rows, limit, key=lambda config: needed_bytes(config, model, ranks))
    if not fitting:
        raise UserError(f"--mini_batch_size auto: {memory_advice(with_rows[0], model, ranks)}")
    config = with_rows[fitting - 1]
    text = f"{config.mini_batch_size} per micro-step, chosen by --mini_batch_size auto"
    needed, limit_text = bytes_text(needed_bytes(config, model, ranks)), f"{bytes_text(limit)} of {bytes_text(memory)}"
    return config, labelled("rows", f"{text}: {needed} (estimated); the limit is {limit_text}")
