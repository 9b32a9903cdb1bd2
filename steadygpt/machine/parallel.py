"""One model on several ranks: replicas of DDP, shards of FSDP2; whole tensors on the host, and back.

A parameter may be whole, replicated by DDP, or a DTensor that FSDP shards over the ranks. On the host it is always
whole, so a checkpoint does not depend on how it was trained.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadygpt.machine.ranks import Ranks


def gradient_sync(forward: nn.Module, last: bool):
    """Return a context for forward and backward that averages gradients over the ranks in the last micro-step only."""
    if isinstance(forward, DistributedDataParallel):
        return nullcontext() if last else forward.no_sync()
    set_sync = getattr(getattr(forward, "_orig_mod", forward), "set_requires_gradient_sync", None)
    if set_sync:  # FSDP's
        set_sync(last)
    return nullcontext()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether FSDP shards a tensor, without importing DTensor, which takes a second."""
    return hasattr(tensor, "to_local")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP shards over the ranks; return any other as it is."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def local_parts(sharded: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's shard of the first tensor, and the same part of the second, which is whole on every rank.

    Both tensors are returned as they are if the first is not sharded.
    """
    if not is_sharded(sharded):
        return sharded, whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    part = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return sharded.to_local(), part.to_local()


def shard_model(model: nn.Module, blocks: Iterable[nn.Module], ranks: Ranks, shards: int, precision: str) -> None:
    """Shard parameters, gradients and optimizer state over the ranks, block by block, in place (FSDP2).

    Args:
        model: on the meta device; its parameters are undefined afterwards.
        shards: ranks that share one copy of the state. Each group of this many consecutive ranks holds a whole copy.
        precision: with bf16, the blocks' parameters are gathered in bf16; gradients are summed in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if not dist.is_initialized():  # FSDP needs a process group also for one process
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    shape = (shards,) if shards == ranks.world_size else (ranks.world_size // shards, shards)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*blocks, model):
        policy = half if precision == "bf16" and module is not model else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "answer_scores")  # also gathers the parameters
    model.to_empty(device=ranks.device)


def replicate(forward: nn.Module, ranks: Ranks) -> nn.Module:
    """Return a module whose gradients are averaged over the ranks (DDP)."""
    for parameter in forward.parameters():  # DDP moves gradients that exist into its buckets; new ones stay outside
        parameter.grad = torch.zeros_like(parameter)
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    # torch.compile cuts its graphs at the buckets: 124 M into 5, or into 14 with buckets of 25 MB, the default.
    replica = DistributedDataParallel(forward, device_ids=devices, bucket_cap_mb=100, gradient_as_bucket_view=True)
    # The rotary table is the same on every rank. An attribute, because torch 2.13 warns of the argument's name.
    replica.broadcast_buffers = False
    return replica


def settle_buckets(forward: nn.Module, device: torch.device, shape: tuple[int, int], autocast: AbstractContextManager):
    """Compute the gradients of a micro-batch of zeros, after which DDP does not rearrange its buckets again.

    DDP rearranges its buckets once in a process, after the first gradients, and the order in which it sums gradients of
    three ranks or more follows from their places in the buckets. Without this, the first step of a resumed run would
    sum in a different order than the same step of an uninterrupted run.

    Args:
        shape: of a micro-batch of the run, (B, T), so that torch.compile compiles nothing extra.
    """
    if not isinstance(forward, DistributedDataParallel):
        return
    B, T = shape
    rows = torch.zeros(B, T + 1, dtype=torch.int64, device=device)
    with autocast:
        terms = forward(rows[:, :-1], rows[:, 1:])  # slices, like those of BatchLoader
    torch.stack(list(terms.values())).mean().backward()
    forward.zero_grad(set_to_none=False)


# ---------------------------------------------------------------------------------------------------------------------
# between the ranks and the host memory of rank 0


def fill(model: nn.Module, weight: Callable[[str], Tensor], ranks: Ranks) -> None:
    """Set each parameter of the bare model, in order, to weight(name), which only rank 0 calls."""
    for name, parameter in model.named_parameters():
        _copy_from_main(weight(name) if ranks.is_main else None, parameter.detach(), ranks)


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict, ranks: Ranks) -> None:
    """Load the optimizer state of a checkpoint; options such as weight decay keep their values.

    Args:
        saved: the checkpoint's "optimizer", needed on rank 0 only.
    """
    saved_shapes = {}
    for name, state in saved.items():
        saved_shapes[name] = {kind: tensor.shape for kind, tensor in state.items()}
    shapes = ranks.broadcast(saved_shapes)
    for name, parameter in model.named_parameters():
        for kind, shape in shapes.get(name, {}).items():
            # A moment is sharded like its parameter; the number of steps is a scalar.
            like = parameter.detach() if shape == parameter.shape else torch.empty(shape, device=parameter.device)
            target = torch.empty_like(like, dtype=torch.float32)
            optimizer.state[parameter][kind] = target
            _copy_from_main(saved[name][kind] if ranks.is_main else None, target, ranks)


def _copy_from_main(source: Tensor | None, target: Tensor, ranks: Ranks) -> None:
    """Copy rank 0's `source` into `target` on every rank, or each rank's shard of it.

    Args:
        source: a whole tensor; None on ranks other than 0, which receive it.
    """
    if source is None:
        whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
    elif ranks.world_size > 1:
        whole = source.to(ranks.device, target.dtype).contiguous()  # a broadcast sends memory as it is laid out
    else:
        whole = source
    if ranks.world_size > 1:
        dist.broadcast(whole, src=0)
    local_target, local_source = local_parts(target, whole)
    local_target.copy_(local_source)


class HostCopy:
    """Copies weights and optimizer state to rank 0's host memory.

    Each copy reuses the host memory, which is page-locked on CUDA. So a copy is valid until the next one begins.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        """Copy the state of the bare model and its optimizer. All ranks call this, because FSDP gathers.

        Returns: {"model": ..., "optimizer": ...} by parameter name; tensors are None on ranks other than 0.
        """
        reshard = getattr(model, "reshard", None)
        if reshard:  # after an evaluation, the weights of FSDP's root are still gathered
            reshard()
        weights: dict[nn.Parameter, Tensor | None] = {}
        state: dict[str, dict[str, Tensor | None]] = {}
        for name, parameter in model.named_parameters():
            weights[parameter] = self._copy(name, "weight", parameter.detach())
            kinds = optimizer.state.get(parameter)
            if kinds:
                state[name] = {kind: self._copy(name, kind, tensor) for kind, tensor in kinds.items()}
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        every_name = model.named_parameters(remove_duplicate=False)  # a tied head is one tensor under two names
        return {"model": {name: weights[parameter] for name, parameter in every_name}, "optimizer": state}

    def _copy(self, name: str, kind: str, tensor: Tensor) -> Tensor | None:
        whole = full_tensor(tensor)
        if not self.ranks.is_main:
            return None
        on_cuda = self.ranks.device.type == "cuda"
        if (name, kind) not in self.buffers:
            self.buffers[name, kind] = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=on_cuda)
        return self.buffers[name, kind].copy_(whole, non_blocking=on_cuda)
