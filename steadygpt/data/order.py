"""The order of rows: pseudo-random permutations, and which source of a mixture gives each row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from steadygpt.base.options import UserError

BLOCK_ROWS = 4096  # of them each source of a mixture gives a whole number; a loader locates as many at a time

ROUNDS = 10  # of the permutation; with 6, some orders of five elements are twice as likely as others


def scramble(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int | np.ndarray) -> np.ndarray:
    """Hash the parts, in this order, to uint64; arrays give an array of their shape, numbers alone (1,)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = scramble(key + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part).astype(np.uint64))
    return key


def permute(i: np.ndarray, n: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """Apply the pseudo-random permutation of range(n) that the key selects to i (int64), in O(1) per element.

    Each element may have an n, at most 2**53, and a key of its own.

    A Feistel network over the next power of 4, repeated until the result is below n (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains"). Unlike NumPy's shuffles, it needs no table and never changes between releases.

    All orders of a few elements are equally likely (tests/test_dataloader.py). As the permutations of a Feistel network
    are even, half of the keys first swap the elements 0 and 1.
    """
    bits, end = np.frexp(np.asarray(n) - 1)[1], np.asarray(n).astype(np.uint64)  # bits of n - 1
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    round_keys = [scramble(key + np.uint64(r)) for r in range(ROUNDS)]
    is_swapped = scramble(key + np.uint64(ROUNDS)) & np.uint64(1)
    x = i.astype(np.uint64)
    x = np.where((x < 2) & (end > 1), x ^ is_swapped, x)
    outside = np.ones(x.shape, bool)
    while outside.any():
        left, right = x >> half, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (scramble(right + round_key) & mask)
        x = np.where(outside, (left << half) | right, x)
        outside = x >= end
    return x.astype(np.int64)


@dataclass(frozen=True)
class Phase:
    """A stretch of a run with one mixture. Sources go by their identities, so names and the order of a list are free.

    Of BLOCK_ROWS rows, counted from the first row of the phase, each source gives a fixed number, at places that are
    drawn for each block. Each source gives the rows of its own stream in their order, and the phases continue it.
    """

    number: int  # 0 for the first of the run
    first_row: int  # of the run
    shares: Mapping[str, int]  # source -> its rows in a block
    given: Mapping[str, int]  # source -> the rows it gave before this phase, also of those that now give none

    def order(self, block: int, seed: int) -> np.ndarray:
        """Return which source, as an index of the sorted ones, gives each row of a block, (BLOCK_ROWS,) int64."""
        ends = np.cumsum([share for _, share in sorted(self.shares.items())])
        # The last part tells this key from those of shards and rows.
        slots = permute(np.arange(BLOCK_ROWS), BLOCK_ROWS, key_of(seed, self.number, block, BLOCK_ROWS))
        return np.searchsorted(ends, slots, side="right")

    def given_before(self, block: int) -> dict[str, int]:
        """Return how many rows each source has given before a block."""
        return {**self.given, **{name: self.given.get(name, 0) + block * n for name, n in self.shares.items()}}

    def given_at(self, row: int, seed: int) -> dict[str, int]:
        """Return how many rows each source has given once the run has consumed `row` rows, in O(1)."""
        block, within = divmod(row - self.first_row, BLOCK_ROWS)
        given, names = self.given_before(block), sorted(self.shares)
        for i in self.order(block, seed)[:within].tolist():
            given[names[i]] += 1
        return given


def shares_of(sources: Mapping[str, Sequence[str]], weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return how many of BLOCK_ROWS rows each source gives, by identity.

    Args:
        sources: name -> (folder, identity).
        weights: by name.
    """
    names: dict[str, str] = {}
    for name, (_, identity) in sources.items():
        if (other := names.setdefault(identity, name)) != name:
            raise UserError(f"--mix: {other} and {name} have the same shards; give one of them the sum of the weights")
        least = (sum(weights.values()) - weights[name]) / (BLOCK_ROWS - 1)
        if weights[name] < least:
            # Three digits, rounded up.
            unit = Fraction(10) ** (math.floor(math.log10(least)) - 2)
            raise UserError(
                f"--mix: the weight of {name} is {float(weights[name]):g}, less than one row in {BLOCK_ROWS:,}; "
                f"expected at least {float(math.ceil(least / unit) * unit):g}"
            )
    return shares_of_block({identity: weights[name] for identity, name in names.items()})


def shares_of_block(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return how many of BLOCK_ROWS rows each source gives, by the largest remainder."""
    exact = {source: BLOCK_ROWS * weight / sum(weights.values()) for source, weight in sorted(weights.items())}
    shares = {source: math.floor(number) for source, number in exact.items()}
    rest = sorted(shares, key=lambda source: shares[source] - exact[source])[: BLOCK_ROWS - sum(shares.values())]
    return {source: share + (source in rest) for source, share in shares.items()}
