"""A thousand flipped bits at random places: all are found, the right rank is named, and nothing else is."""

import random
import re
from pathlib import Path

import pytest
import torch
from conftest import MODERN, in_ranks, load, run_here
from ground import verified

from model import GPT, GPTConfig
from optim import make_optimizer
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import named_tensors
from steadygpt.config import TrainConfig
from steadygpt.machine.digests import Corrupted, compare_replicas
from steadygpt.machine.ranks import Ranks, joined

pytestmark = pytest.mark.storm
FLIPS = 250  # of each kind
FLIPPED = Path("flipped.pt")
SHAPE = GPTConfig(vocab_size=257, context_length=8, num_layers=2, num_heads=2, embd_size=16)
TOKENS = torch.arange(16).view(2, 8)


def flip(tensor: torch.Tensor, rng: random.Random) -> None:
    """Flip one bit; with the same `rng`, back."""
    bits = tensor.view(-1).view(torch.int32)
    bits[rng.randrange(len(bits))] ^= torch.tensor(1, dtype=torch.int32) << rng.randrange(31)


def said(call) -> str:
    """Return the line of a corruption, "" if there is none."""
    try:
        call()
    except Corrupted as corrupted:
        return str(corrupted)
    return ""


def trained(ranks: Ranks, optimizer: str) -> tuple[GPT, torch.optim.Optimizer]:
    """Return a model and an optimizer with state, the same on each rank."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    model(TOKENS, TOKENS)["loss"].mean().backward()
    made = make_optimizer(model, TrainConfig(precision="fp32", optimizer=optimizer), ranks)
    made.step()
    return model, made


def flips_of_replicas(optimizer: str) -> None:
    with joined("cpu") as ranks:
        model, made = trained(ranks, optimizer)
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            tensors |= {f"{name}.{kind}": tensor for kind, tensor in made.state[parameter].items()}
        rng = random.Random(0)  # the same on all ranks
        for number in range(FLIPS):
            wrong, name = rng.randrange(ranks.world_size), rng.choice(sorted(tensors))
            for is_back in (False, True):
                if ranks.rank == wrong:
                    flip(tensors[name], random.Random(number))
                found = said(lambda: compare_replicas(model, made, ranks, 1))
                named = "rank 0 and 1" if ranks.world_size == 2 else f"rank {wrong}"
                assert found == ("" if is_back else f"{named}: {name} not as on other ranks"), (number, found)


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "muon"), (4, "adamw")])
def test_random_flips_of_weights_and_state_are_named(ranks, optimizer, record_property):
    in_ranks(ranks, flips_of_replicas, optimizer)
    record_property("bits of weights and state", FLIPS)


def test_random_flips_in_files_with_valid_checksums_are_found(workdir, record_property):
    assert run_here(*MODERN, "--max_steps", "4") == 0
    content, rng = load("checkpoints/latest.pt"), random.Random(2)
    tensors = named_tensors(content)
    for number in range(FLIPS):
        name = rng.choice(sorted(tensors))
        for is_back in (False, True):
            flip(tensors[name], random.Random(number))
            torch.save(content, FLIPPED)
            if not is_back:
                with pytest.raises(UserError, match=re.escape(f"corrupt ({name} ")):
                    verified(FLIPPED)
    assert verified(FLIPPED)["step"] == 4
    record_property("bits in files", FLIPS)
