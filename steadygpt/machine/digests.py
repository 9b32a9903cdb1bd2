"""Digests of the bits of tensors, by which replicas, copies and files are compared."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from steadygpt.base.options import UserError
from steadygpt.base.text import some
from steadygpt.machine.parallel import is_sharded, local_part
from steadygpt.machine.ranks import Ranks

BLOCK_NUMBERS = 2**24  # numbers that are digested at once, in copies of them


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of a tensor of fp32 numbers, an int64 scalar on its device.

    A one-to-one function mixes the bits of each number, and the results are added up exactly. So the digests of parts
    add up, in any order, to the digest of the whole, and a change of one number always changes the digest.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.detach().reshape(-1).view(torch.int32).split(BLOCK_NUMBERS):
        bits = block * 0x2545F491
        bits ^= (bits >> 15) & 0x1FFFF  # without the copies of the sign bit that the shift adds
        bits *= 0x3C6EF373
        total += bits.sum(dtype=torch.int64)
    return total


def combined(digests: Mapping[str, int]) -> int:
    """Return one digest of 32 bits for all tensors with these digests."""
    return zlib.crc32(repr(sorted(digests.items())).encode())


class Corrupted(UserError):
    """Weights or optimizer state that should be the same on several ranks differ."""


def compare_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, shards: int) -> dict[str, int]:
    """Compare the replicas of weights and optimizer state; return the digests of each whole tensor, by name.

    Args:
        shards: ranks that share one replica; each group of this many consecutive ranks has one.

    Raises: Corrupted on all ranks, which names the ranks and tensors that differ.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter].items()
        tensors |= {name: parameter.detach()} | {f"{name}.{kind}": tensor for kind, tensor in state}
    is_first = ranks.rank % shards == 0
    own = torch.stack([_own_digest(tensor, is_first).to(ranks.device) for tensor in tensors.values()])
    digests = ranks.concatenated(own[None]).view(-1, shards, len(own)).cpu()  # (replicas, shards, tensors)
    odd = in_minority(digests)
    if odd.any():
        odd_ranks = odd.any(2).flatten().nonzero().flatten().tolist()
        is_odd = odd.any(0).any(0).tolist()
        names = [name for name, differs in zip(tensors, is_odd, strict=True) if differs]
        where = " and ".join(str(rank) for rank in odd_ranks)
        raise Corrupted(f"rank {where}: {', '.join(some(names, 'tensor'))} not as on other ranks")
    return dict(zip(tensors, digests[0].sum(0).tolist(), strict=True))


def _own_digest(tensor: Tensor, is_first: bool) -> Tensor:
    """Return the digest of this rank's part of a tensor. A tensor that is not sharded is the first rank's part."""
    own = digest(local_part(tensor))
    if is_first or is_sharded(tensor):
        return own
    return torch.zeros_like(own)


def in_minority(digests: Tensor) -> Tensor:
    """Return which digests (replicas, ...) differ from those of most replicas, in the same shape.

    If two replicas differ, both are in the minority.
    """
    if len(digests) == 1:
        return torch.zeros_like(digests, dtype=torch.bool)
    num_equal = (digests[:, None] == digests[None]).sum(1)
    return num_equal * 2 <= len(digests)


def check_digests(tensors: Mapping[str, Tensor], expected: Mapping[str, int]) -> None:
    """Check that tensors have the digests that they had in training."""
    for name, tensor in tensors.items():
        if name in expected and int(digest(tensor)) != expected[name]:
            raise UserError(f"{name} is not what it was in training: memory, a disk or a network has changed it")
