"""Tests of steadygpt/prepare/validation.py: the pieces for validation are a fair sample of a corpus."""

import bisect
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.prepare.validation import ValidationSample

SHARE = 1 / 40
# Kinds of corpora: the sizes of n pieces, in bytes. Those of a web corpus are about lognormal.
CORPORA = {
    "web": lambda rng, n: [1 + int(rng.lognormvariate(8, 1.5)) for _ in range(n)],
    "heavy tail": lambda rng, n: [min(10**6, int(100 * rng.paretovariate(1.1))) for _ in range(n)],
    "short first": lambda rng, n: sorted(1 + int(rng.lognormvariate(8, 1)) for _ in range(n)),
    "long first": lambda rng, n: sorted((1 + int(rng.lognormvariate(8, 1)) for _ in range(n)), reverse=True),
    "long and short in turn": lambda rng, n: [(100, 10_000)[i % 2] + rng.randrange(90) for i in range(n)],
    "books between notes": lambda rng, n: [50_000 if i % 100 == 0 else 100 + rng.randrange(90) for i in range(n)],
    "one document": lambda rng, n: [30_000 + rng.randrange(4000) for _ in range(n)],
}


def ranks_of_sample(sizes: list[int]) -> list[float]:
    """Return of each chosen piece the share of the pieces that are shorter, from -0.5 to 0.5; 0 is the median."""
    in_order = sorted(sizes)
    ranks = []
    for size, is_chosen in zip(sizes, ValidationSample(SHARE).choose(sizes), strict=True):
        if is_chosen:
            middle = (bisect.bisect_left(in_order, size) + bisect.bisect_right(in_order, size)) / 2
            ranks.append(middle / len(sizes) - 0.5)
    return ranks


@pytest.mark.parametrize("kind", CORPORA)
def test_sizes_in_the_sample_are_distributed_as_in_the_corpus(kind):
    rng = random.Random(kind)
    ranks: list[float] = []
    for _ in range(60):
        ranks += ranks_of_sample(CORPORA[kind](rng, rng.choice([400, 1000, 3000])))
    assert 2 * len(ranks) > 40 * 60
    error = 1 / math.sqrt(12 * len(ranks))  # of the mean of so many uniform numbers
    assert abs(sum(ranks) / len(ranks)) < 3 * error
    for part in (-0.4, -0.25, 0, 0.25, 0.4):  # the tails, too
        below = sum(rank < part for rank in ranks) / len(ranks)
        assert abs(below - (part + 0.5)) < 4 * math.sqrt(0.25 / len(ranks)), part


@given(st.lists(st.integers(0, 10**6), max_size=500), st.sampled_from([0, 0.01, 1 / 40, 0.3, 0.5]))
@settings(max_examples=200)
def test_the_share_in_bytes_is_met_within_one_piece_all_along(sizes, share):
    """So the sample is spread over the corpus."""
    sample = ValidationSample(share)
    for number, size in enumerate(sizes, start=1):
        sample.choose([size])
        assert abs(share * sum(sizes[:number]) - sample.chosen_bytes) <= max(sizes[:number])
    assert share or not sample.chosen_bytes


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=300), st.integers(0, 300))
def test_whether_a_piece_is_chosen_does_not_depend_on_its_size(sizes, number):
    number %= len(sizes)
    before, longer = ValidationSample(SHARE), ValidationSample(SHARE)
    assert before.choose(sizes)[number] == longer.choose([*sizes[:number], 10**9, *sizes[number + 1 :]])[number]


def test_a_source_of_a_few_pieces_has_a_sample():
    """A single document of more than 16 kB is cut into about 400 pieces; 40 short documents are as many pieces."""
    for count in (40, 100, 400):
        assert any(ValidationSample(SHARE).choose([50] * count))
