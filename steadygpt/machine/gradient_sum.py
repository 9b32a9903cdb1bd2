"""The sum of a step's gradients in one fixed order, on any number of processes: the same bits on 1, 2, 4 and 8."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from steadygpt.machine.ranks import Ranks, all_gather


class GradientSum:
    """Gradients that accumulate within a virtual rank, and are then summed over all of them along a binary tree.

    Floating-point sums depend on their order, and the tree does not depend on the number of processes. Each process
    sums a subtree. Then the processes exchange slices of these sums, and each process sums its slices along the rest of
    the tree. They send as many bytes as in a ring all-reduce.

    Args:
        parameters: in fp32, on the device; their gradients become views of one flat tensor, at first 0.
        ranks: their number is a power of two.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks):
        self.ranks = ranks
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(size + -size % ranks.world_size, device=ranks.device)
        self.sums: list[torch.Tensor] = []  # of finished subtrees, the largest first
        parts = self.flat[:size].split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def end_virtual_rank(self, number: int, count: int) -> None:
        """Add the gradients of a virtual rank to the sum; after the last one, sum over all processes.

        Args:
            number: the number of the virtual rank on this process, from 0.
            count: the number of virtual ranks of this process, a power of two.
        """
        finished = number + 1
        while finished % 2 == 0:
            self.flat += self.sums.pop()
            finished //= 2
        if number + 1 < count:
            self.sums.append(self.flat.clone())
            self.flat.zero_()
        elif self.ranks.world_size > 1:
            self._sum_over_processes()

    def _sum_over_processes(self) -> None:
        slices = torch.empty_like(self.flat)
        dist.all_to_all_single(slices, self.flat)  # now: this process's slice of each process's sum, in their order
        sums = list(slices.chunk(self.ranks.world_size))
        while len(sums) > 1:
            sums = [left.add_(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        all_gather(self.flat, sums[0])
