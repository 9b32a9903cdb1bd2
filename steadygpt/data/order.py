"""The order of rows: pseudo-random permutations, and which source of a mixture gives each row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from steadygpt.base.options import UserError

# Rows of a block. Each source of a mixture gives a whole number of them, and a loader locates one block at a time.
BLOCK_ROWS = 4096

ROUNDS = 10  # of the Feistel network; with 6, some orders of five elements are twice as likely as others


def scramble(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: int | np.ndarray) -> np.ndarray:
    """Hash the parts, in this order, to uint64: an array of the shape of array parts, (1,) if all are numbers."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = scramble(key + np.uint64(0x9E3779B97F4A7C15) + np.asarray(part).astype(np.uint64))
    return key


def permute(i: np.ndarray, n: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """Map each i (int64) by the pseudo-random permutation of range(n) that the key selects, in O(1) per element.

    Each element may have its own n, at most 2**53, and its own key.

    The permutation is a Feistel network over the next power of 4, repeated until the result is below n (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"). Unlike NumPy's shuffles, it needs no table and never changes
    between releases.

    All orders of a few elements are equally likely (tests/test_dataloader.py). A Feistel network gives only even
    permutations, so half of the keys first swap the elements 0 and 1.
    """
    bits = np.frexp(np.asarray(n) - 1)[1]  # of n - 1
    end = np.asarray(n).astype(np.uint64)
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
    """A part of a run with one mixture; sources are named by their digests, so they may be renamed or reordered.

    Blocks of BLOCK_ROWS rows are counted from the first row of the phase. Each source gives a fixed number of rows of
    each block, at places drawn for the block, from its own stream in order. The next phase continues the stream.
    """

    number: int  # 0 for the first phase of the run
    first_row: int  # its position in the run
    shares: dict[str, int]  # source -> its rows in a block
    rows_used_before: dict[str, int]  # source -> rows it gave before this phase; includes sources that now give none

    def order(self, block: int, seed: int) -> np.ndarray:
        """Return the source of each row of a block, as an index into the sorted sources, (BLOCK_ROWS,) int64."""
        ends = np.cumsum([share for _, share in sorted(self.shares.items())])
        # The last part of this key makes it differ from the keys of shards and rows.
        slots = permute(np.arange(BLOCK_ROWS), BLOCK_ROWS, key_of(seed, self.number, block, BLOCK_ROWS))
        return np.searchsorted(ends, slots, side="right")

    def rows_used_before_block(self, block: int) -> dict[str, int]:
        """Return how many rows each source has given before a block."""
        rows_used = dict(self.rows_used_before)
        for source, share in self.shares.items():
            rows_used[source] = rows_used.get(source, 0) + block * share
        return rows_used

    def rows_used_at(self, row: int, seed: int) -> dict[str, int]:
        """Return how many rows each source has given once the run has consumed `row` rows, in O(1)."""
        block, within = divmod(row - self.first_row, BLOCK_ROWS)
        rows_used = self.rows_used_before_block(block)
        sources = sorted(self.shares)
        for i in self.order(block, seed)[:within].tolist():
            rows_used[sources[i]] += 1
        return rows_used


def shares_of(sources: Mapping[str, Sequence[str]], weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return how many of BLOCK_ROWS rows each source gives, by digest.

    Args:
        sources: name -> (folder, digest).
        weights: by name.
    """
    names: dict[str, str] = {}
    for name, (_, digest) in sources.items():
        if digest in names:
            raise UserError(
                f"--mix: {names[digest]} and {name} have the same shards; give one of them the sum of the weights"
            )
        names[digest] = name
        least = (sum(weights.values()) - weights[name]) / (BLOCK_ROWS - 1)
        if weights[name] < least:
            # The error shows three digits of it, rounded up.
            unit = Fraction(10) ** (math.floor(math.log10(least)) - 2)
            raise UserError(
                f"--mix: the weight of {name} is {float(weights[name]):g}, less than one row in {BLOCK_ROWS:,}; "
                f"expected at least {float(math.ceil(least / unit) * unit):g}"
            )
    return shares_of_block({digest: weights[name] for digest, name in names.items()})


def shares_of_block(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return how many of BLOCK_ROWS rows each source gives, by the largest-remainder method."""
    exact = {source: BLOCK_ROWS * weight / sum(weights.values()) for source, weight in sorted(weights.items())}
    shares = {source: math.floor(number) for source, number in exact.items()}
    by_remainder = sorted(shares, key=lambda source: shares[source] - exact[source])  # the largest first
    for source in by_remainder[: BLOCK_ROWS - sum(shares.values())]:
        shares[source] += 1
    return shares
