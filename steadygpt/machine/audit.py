"""Work that ranks do again and compare, so that a chip that computes wrongly is found and named."""

import math

import torch
from torch import Tensor, nn

from steadygpt.machine.digests import Corrupted, digest
from steadygpt.machine.parallel import local_part
from steadygpt.machine.ranks import Ranks

TRIALS = 3  # audits of a start that set the bound where equal work may give other bits
# The bound: so many times the largest difference of the trials, at least, and at most, also of the trials themselves.
MARGIN, LEAST, MOST = 10, 1e-6, 0.05


class Audits:
    """Compares what a rank computes for a micro-batch with what it computes again, and with what its neighbour does.

    Args:
        is_exact: equal work gives equal bits. Elsewhere, the differences in the first audits set a bound.
        is_sharded: a gradient is a sum over the ranks (FSDP), so its bits depend on who computed which micro-batch.
    """

    def __init__(self, ranks: Ranks, is_exact: bool, is_sharded: bool):
        self.ranks, self.is_exact, self.is_sharded = ranks, is_exact, is_sharded
        self.trials: list[float] = []  # the largest relative difference of each
        self.passed: int | None = None  # step of the last audit without a difference

    def result(self, loss: Tensor, model: nn.Module) -> Tensor:
        """Return what is compared of a loss and the gradients: digests (int64), or the loss and the norms (fp64)."""
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        if self.is_exact:
            return torch.stack([digest(numbers).to(loss.device) for numbers in (loss, *gradients)])
        return torch.stack([loss, *(gradient.norm().to(loss.device) for gradient in gradients)]).double()

    def compare(self, step: int, own: Tensor, again: Tensor, of_next: Tensor) -> str:
        """Compare this rank's two results for its micro-batch of a step, and its result for that of the next rank.

        Returns: in words the bound that was found, "" in other audits.
        Raises: Corrupted on all ranks, which names those that computed wrongly.
        """
        found = self.ranks.concatenated(torch.stack([own, again, of_next])[None])  # (rank, 3, results)
        first, second, by_previous = found[:, 0], found[:, 1], found[:, 2].roll(1, dims=0)
        if self.is_sharded:
            by_previous = torch.cat([by_previous[:, :1], first[:, 1:]], dim=1)
        changing, disputed = self._difference(first, second), self._difference(first, by_previous)
        changes, differs = changing > self.bound(), disputed > self.bound()
        if changes.any():
            self._refuse(changes, "when computed again")
        if differs.any():
            # A chip that is always wrong disagrees with both neighbours. Of two ranks, each could be the one.
            both = differs & differs.roll(-1) if len(differs) > 2 else differs
            self._refuse(both if both.any() else differs | differs.roll(-1), "than on the next rank")
        self.passed = step
        if self.is_exact or len(self.trials) == TRIALS:
            return ""
        self.trials.append(max(changing.max().item(), disputed.max().item()))
        said = f"results may differ by {self.bound():.1g} (relative), {MARGIN} times what they did so far"
        return f"audit {TRIALS}: {said}" * (len(self.trials) == TRIALS)

    def bound(self) -> float:
        if self.is_exact:
            return 0
        return min(MOST, max(LEAST, MARGIN * max(self.trials))) if len(self.trials) == TRIALS else MOST

    def _difference(self, a: Tensor, b: Tensor) -> Tensor:
        """Return how much the results of each rank differ, (ranks,): the largest share, or 1 where a bit does."""
        if self.is_exact:
            return (a != b).any(1).double()
        a, b = (numbers.nan_to_num(0, 0, 0) for numbers in (a, b))  # both are, where fp16 overflows
        size = a.abs() + 1e-6 * a.abs().amax(1, keepdim=True)  # of numbers near 0, only rounding is left
        return ((a - b).abs() / size.clamp(min=math.ulp(0))).amax(1)

    def _refuse(self, wrong: Tensor, where: str) -> None:
        ranks = " and ".join(map(str, wrong.nonzero().flatten().tolist()))
        since = "Saves" if self.passed is None else f"Saves after step {self.passed:,}"
        advice = f"{since} may hold its errors; resume from one before them (./list_checkpoints.sh)"
        raise Corrupted(f"rank {ranks}: another result for the same micro-batch {where}", advice)
