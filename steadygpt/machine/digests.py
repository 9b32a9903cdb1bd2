"""Digests of the bits of tensors, by which replicas, copies and files are compared."""

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygpt.base.options import UserError
from steadygpt.base.text import some
from steadygpt.machine.parallel import is_sharded, local_part
from steadygpt.machine.ranks import Ranks

AT_ONCE = 2**24  # numbers, of which there are copies


def digest(tensor: Tensor) -> Tensor:
    """Return a digest of a tensor of fp32 numbers, an int64 scalar on its device.

    Each number's bits are mixed, one to one, and added up exactly. So the digests of parts add up to that of the whole
    in any order, and one number that changes always shows.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).view(torch.int32).split(AT_ONCE):
        bits = part * 0x2545F491
        bits ^= (bits >> 15) & 0x1FFFF  # without the copies of the sign
        bits *= 0x3C6EF373
        total += bits.sum(dtype=torch.int64)
    return total


def combined(digests: Mapping[str, int]) -> int:
    """Return one digest, of 32 bits, of all tensors whose digests these are."""
    return zlib.crc32(repr(sorted(digests.items())).encode())


class Corrupted(UserError):
    """Weights, state or results that should be the same differ. `advice` says what that means for the saves."""

    def __init__(self, found: str, advice: str):
        super().__init__(found)
        self.advice = f"a memory or a chip is wrong. {advice} without that machine"


def compare_replicas(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, shards: int, repairs: bool = False
) -> tuple[dict[str, int], str]:
    """Return the digests of the whole weights and state, by name, and in words what differed and is now repaired.

    Args:
        shards: ranks that share one replica; each group of so many consecutive ranks has one.
        repairs: copies what differs from a rank whose state is that of most.

    Raises: Corrupted on all ranks, if something differs and is not repaired.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter].items()
        tensors |= {name: parameter.detach()} | {f"{name}.{kind}": tensor for kind, tensor in state}
    own = torch.stack([_own_digest(t, ranks.rank % shards == 0).to(ranks.device) for t in tensors.values()])
    found = ranks.concatenated(own[None]).view(-1, shards, len(own)).cpu()  # replica, shard, tensor
    odd, differed = in_minority(found), ""
    if odd.any():
        where, which = odd.any(2).flatten().nonzero().flatten().tolist(), odd.any(0).any(0).tolist()
        names = [name for name, is_odd in zip(tensors, which, strict=True) if is_odd]
        differed = f"rank {' and '.join(map(str, where))}: {', '.join(some(names, 'tensor'))} not as on other ranks"
        good = {*range(ranks.world_size)}.difference(where)
        if not (repairs and good and shards == 1):
            raise Corrupted(differed, "Nothing of this is saved; resume with --resume latest")
        for name in names:
            dist.broadcast(tensors[name], min(good))
            found[:, :, list(tensors).index(name)] = found[min(good), 0, list(tensors).index(name)]
    return dict(zip(tensors, found[0].sum(0).tolist(), strict=True)), differed


def _own_digest(tensor: Tensor, is_first: bool) -> Tensor:
    """Return the digest of this rank's part; that of a tensor that is not sharded belongs to the first rank."""
    return digest(local_part(tensor)) * (is_first or is_sharded(tensor))


def in_minority(found: Tensor) -> Tensor:
    """Return which digests (replicas, ...) are not those of most replicas, in the same shape; of two, both."""
    equal = (found[:, None] == found[None]).sum(1)
    return equal * 2 <= len(found) if len(found) > 1 else torch.zeros_like(found, dtype=torch.bool)


def check_digests(tensors: Mapping[str, Tensor], expected: Mapping[str, int]) -> None:
    """Check that tensors have the digests that they had in training."""
    for name, tensor in tensors.items():
        if name in expected and int(digest(tensor)) != expected[name]:
            raise UserError(f"{name} is not what it was in training: memory, a disk or a network has changed it")
