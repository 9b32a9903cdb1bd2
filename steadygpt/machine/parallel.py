"""One model on several ranks: replicas of DDP, shards of FSDP2, whole tensors from either."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygpt.machine.ranks import Ranks


def gradient_sync(forward: nn.Module, last: bool):
    """Average gradients over the ranks in the last micro-step only; a context for forward and backward."""
    if isinstance(forward, DistributedDataParallel):
        return nullcontext() if last else forward.no_sync()
    set_sync = getattr(getattr(forward, "_orig_mod", forward), "set_requires_gradient_sync", None)
    if set_sync:  # FSDP's
        set_sync(last)
    return nullcontext()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether FSDP shards a tensor: whether it is a DTensor, whose module takes a second to import."""
    return hasattr(tensor, "to_local")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that FSDP shards over the ranks; return any other as it is."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def own_part(sharded: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's shard of the first tensor, and the same part of the second, which is whole on every rank.

    Both tensors are returned as they are if the first is not sharded.
    """
    if not is_sharded(sharded):
        return sharded, whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    part = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return sharded.to_local(), part.to_local()


def shard(model: nn.Module, blocks: Iterable[nn.Module], ranks: Ranks, shards: int, precision: str) -> None:
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

    DDP rearranges its buckets once in a process, after the first gradients, and the order in which it sums those of
    three ranks or more follows from their places in the buckets. Without this, the first step of a resumed run would
    sum in another order than the same step of an uninterrupted run.

    Args:
        shape: of a micro-batch, (B, T), so that torch.compile compiles what it needs anyway.
    """
    if not isinstance(forward, DistributedDataParallel):
        return
    B, T = shape
    rows = torch.zeros(B, T + 1, dtype=torch.int64, device=device)
    with autocast:
        terms = forward(rows[:, :-1], rows[:, 1:])  # slices, like those of BatchLoader
    torch.stack(list(terms.values())).mean().backward()
    forward.zero_grad(set_to_none=False)
