"""Hundreds of flipped bits at random places: all are found, the right rank is named, and nothing else is."""

import random

import pytest
import torch
from conftest import in_ranks

from model import GPT, GPTConfig
from steadygpt.machine.parallel import Corrupted, compare_replicas
from steadygpt.machine.ranks import Ranks, joined

pytestmark = pytest.mark.storm
FLIPS = 250  # of each number of ranks
SHAPE = GPTConfig(vocab_size=257, context_length=8, num_layers=2, num_heads=2, embd_size=16)


def flip(tensor: torch.Tensor, rng: random.Random) -> None:
    """Flip one bit; with the same `rng`, back."""
    bits = tensor.view(-1).view(torch.int32)
    bits[rng.randrange(len(bits))] ^= torch.tensor(1, dtype=torch.int32) << rng.randrange(31)


def found_in(model: GPT, ranks: Ranks) -> str:
    """Return the line of a corruption, "" if there is none."""
    try:
        compare_replicas(model, ranks, 1)
    except Corrupted as corrupted:
        return str(corrupted)
    return ""


def flips_of_replicas() -> None:
    with joined("cpu") as ranks:
        torch.manual_seed(0)
        model = GPT(SHAPE)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        rng = random.Random(0)  # the same on all ranks
        for number in range(FLIPS):
            wrong = rng.randrange(ranks.world_size)
            name = rng.choice(sorted(weights))
            for is_back in (False, True):
                if ranks.rank == wrong:
                    flip(weights[name], random.Random(number))
                named = "rank 0 and 1" if ranks.world_size == 2 else f"rank {wrong}"
                expected = "" if is_back else f"{named}: weights not as on other ranks"
                assert found_in(model, ranks) == expected, (number, name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_flips_of_weights_are_named(ranks, record_property):
    in_ranks(ranks, flips_of_replicas)
    record_property("bits of weights", FLIPS)
