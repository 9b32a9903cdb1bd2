"""Memory of a run: estimates, the micro-batch size that fits, advice after an out-of-memory error."""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig, sketch_of
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, labelled
from steadygpt.checkpoint.files import checkpoint_bytes
from steadygpt.config import TrainConfig
from steadygpt.machine.device import autocast, device_name, memory_bytes
from steadygpt.machine.loss import mean_terms
from steadygpt.machine.ranks import Ranks

# Uses of memory, as the plan names them.
STATIC = "weights, gradients and optimizer"
COPY = "copy for checkpoints"
# An estimate fits if it is at most this fraction of the memory. On a CPU, a process keeps freed memory in fragments and
# uses up to 1.6 times the estimate (python -m benchmarks.memory --keep_freed).
FITS = {"cuda": 0.9, "mps": 0.9, "cpu": 0.6}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
SUMS_AND_RELU = (torch.ops.aten.add.Tensor, torch.ops.aten.relu.default)


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, while these exist.

    Args:
        not_counted: tensors that exist before.
        is_compiled: count what compiled code keeps in memory: sums, such as the residual stream, and the inputs and
            outputs of products and attention. It recomputes all else (H100 peaks in benchmarks/RESULTS.md).
    """

    def __init__(self, not_counted: Iterable[Tensor], is_compiled: bool):
        super().__init__()
        self.is_compiled = is_compiled
        self.now = 0  # bytes
        self.peak = 0
        self.first_peak = 0
        self.counted = weakref.WeakSet(tensor.untyped_storage() for tensor in not_counted)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        if name in PRODUCTS or name.startswith("_scaled_dot_product"):
            self._count(result)
            if self.is_compiled:
                self._count(args)
        elif not self.is_compiled or operator in SUMS_AND_RELU:
            self._count(result)
        elif operator == torch.ops.aten._to_copy.default and result.itemsize > args[0].itemsize:
            # Compiled code keeps the narrow tensor while the wide one is needed.
            weakref.finalize(result.untyped_storage(), id, args[0].untyped_storage())
        # Backward sums real tensors in place, unless they are views; casts are not views.
        is_sum_in_place = operator == SUMS_AND_RELU[0] and not torch.is_grad_enabled() and not args[0]._is_view()
        if not is_sum_in_place:
            self.peak = max(self.peak, self.now)
        return result

    def watch(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep the peak up to the end of a block's backward pass as `first_peak`."""

        def end(_: Tensor) -> None:
            self.first_peak = self.peak
            self.peak = self.now

        args[0].register_hook(end)

    def _count(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self.counted:
                self.counted.add(storage)
                weakref.finalize(storage, self._add, -storage.nbytes())
                self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.now += size


def micro_step_bytes(config: TrainConfig, shape: GPTConfig, device: torch.device) -> tuple[int, int]:
    """Return the bytes of a micro-step at its peak: those of all blocks, and the rest.

    They follow, for each kind of layer, from the peaks of models of two and of three blocks, computed with fake CPU
    tensors.
    """
    blocks = 0
    rests = []
    for kind, layers in Counter(shape.resolved().layer_pattern).items():
        (first_peak_of_two, _), (first_peak_of_three, later_peak) = (
            peaks_of_blocks(config, replace(shape, layer_pattern=kind, num_layers=count), device) for count in (2, 3)
        )
        block = first_peak_of_three - first_peak_of_two
        # The activations of all blocks exist until the last block's backward pass ends.
        blocks += block * layers
        rests.append((first_peak_of_two - 2 * block, later_peak))
    return blocks, max(max(rest, later_peak - blocks) for rest, later_peak in rests)


def peaks_of_blocks(config: TrainConfig, shape: GPTConfig, device: torch.device) -> tuple[int, int]:
    """Return the bytes at the peak of a micro-step until the last block's backward pass ends, and after it."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

    cpu = torch.device("cpu")
    kernels: Callable[[], AbstractContextManager] = nullcontext
    is_compiled = config.compiles(device.type)
    if device.type != "cpu":
        # Attention on a GPU keeps no matrix (B, num_heads, T, T). Of the CPU kernels that are counted in its place,
        # only FlashAttention without dropout keeps none.
        shape = replace(shape, dropout=0.0)
        kernels = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    with FakeTensorMode(), cpu, kernels():
        model = GPT(shape, config, initialize=False)
        if config.is_fsdp and config.precision == "bf16":  # which gathers the blocks in bf16
            for parameter in model.h.parameters():
                parameter.data = parameter.bfloat16()
        static: list[Tensor] = []
        for parameter in model.parameters():
            gradient = torch.empty_like(parameter)
            parameter.grad = gradient
            static += (parameter, gradient)
        rows = torch.zeros(config.mini_batch_size, config.context_length + 1, dtype=torch.int64)
        with Allocated(static, is_compiled) as allocated:
            model.h[-1].register_forward_pre_hook(allocated.watch)
            with autocast(cpu, config.precision):
                loss_terms = model(rows[:, :-1], rows[:, 1:])
            mean_terms(loss_terms).sum().backward()
    return allocated.first_peak, allocated.peak


def estimate_memory(config: TrainConfig, model: GPT, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """Estimate the peak bytes of a rank on its device and in host memory, by use.

    benchmarks/memory.py compares the estimate with measured peaks.
    """
    device = ranks.device
    world_size = ranks.world_size
    shards = config.ranks_per_copy(world_size)
    N = sum(map(torch.numel, model.parameters()))
    in_blocks = sum(map(torch.numel, model.h.parameters()))
    host: dict[str, float] = {COPY: checkpoint_bytes(model, config.optimizer, page_locked=device.type == "cuda")}
    memory: dict[str, float] = {STATIC: (checkpoint_bytes(model, config.optimizer) + 4 * N) / shards}
    if config.is_fsdp:  # root parameters stay gathered; two blocks at a time (current, prefetched)
        element_bytes = 2 if config.precision == "bf16" else 4
        memory["gathered weights"] = 4 * (N - in_blocks) + element_bytes * 2 * in_blocks / config.num_layers
        if config.grad_accum_steps(world_size) > 1:  # the last micro-step replaces them by shards
            memory["unsharded gradients"] = 4 * N - 4 * N / shards
    memory["activations"], memory["logits and temporary tensors"] = micro_step_bytes(config, model.config, device)
    return memory, host


def needed_bytes(config: TrainConfig, model: GPT, ranks: Ranks) -> float:
    """Return the sum of estimate_memory(), on a GPU without host memory."""
    on_device, host = estimate_memory(config, model, ranks)
    needed = sum(on_device.values())
    if ranks.device.type != "cuda":
        needed += sum(host.values())
    return needed


def memory_advice(config: TrainConfig, ranks: Ranks) -> str:
    """Return a text for an error: needed and available memory, and flags that save memory, the cheapest first."""
    memory = memory_bytes(ranks.device)
    needed = bytes_text(needed_bytes(config, sketch_of(config.shape(config.vocab_size)), ranks))
    savers = []
    fewer = [rows for rows in config.possible_rows(ranks.world_size) if rows < config.mini_batch_size]
    if fewer:
        savers.append(f"--mini_batch_size {fewer[-1]}")
    if not config.activation_checkpointing:
        savers.append("--activation_checkpointing")
    if not config.loss_chunk_size:
        savers.append(f"--loss_chunk_size {min(2048, config.context_length // 2)}")
    if not config.is_fsdp:
        savers.append("--sharding fsdp")
    return (
        f"{counted(config.mini_batch_size, 'row')} of {config.context_length:,} tokens: about {needed} (estimated); "
        f"the limit is {bytes_text(FITS[ranks.device.type] * memory)} of the {bytes_text(memory)} of "
        f"{device_name(ranks.device)}. Try, in this order, {', '.join([*savers, 'a smaller model'])}"
    )


def with_fitting_rows(config: TrainConfig, memory: int, ranks: Ranks) -> tuple[TrainConfig, str]:
    """Replace --mini_batch_size auto by a number of rows that fits on every rank, and describe it in a line.

    Args:
        memory: bytes of the rank that has least.
    """
    model = sketch_of(config.shape(config.vocab_size))
    limit = FITS[ranks.device.type] * memory
    with_rows = [replace(config, mini_batch_size=rows) for rows in config.possible_rows(ranks.world_size)]
    fitting = bisect_right(with_rows, limit, key=lambda config: needed_bytes(config, model, ranks))
    if not fitting:
        raise UserError(f"--mini_batch_size auto: {memory_advice(with_rows[0], ranks)}")
    config = with_rows[fitting - 1]
    text = f"{config.mini_batch_size} per micro-step, chosen by --mini_batch_size auto"
    needed = bytes_text(needed_bytes(config, model, ranks))
    limit_text = f"{bytes_text(limit)} of {bytes_text(memory)}"
    return config, labelled("rows", f"{text}: {needed} (estimated); the limit is {limit_text}")
