"""Ranks that should have the same weights: their comparison at each save, and runs in which a bit flips."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import FSDP, folders, load
from harness import Run, assert_equals_reference, run_to_end
from injected import flip_bit
from torch import nn

from steadygpt.machine import parallel
from steadygpt.machine.parallel import Corrupted, compare_replicas
from steadygpt.machine.ranks import Ranks

FLAGS = tuple("--max_steps 12 --checkpoint_freq 4 --steps_per_epoch 99".split())


@pytest.mark.parametrize(("sums", "shards", "named"), [
    ([5], 1, ""), ([5, 5], 1, ""), ([5, 6], 1, "0 and 1"), ([5, 5, 6], 1, "2"), ([6, 5, 5, 5], 1, "0"),
    ([5, 5, 6, 6], 1, "0 and 1 and 2 and 3"), ([4, 5, 6], 1, "0 and 1 and 2"),
    ([4, 5], 2, ""), ([4, 5, 4, 5], 2, ""), ([4, 5, 4, 6], 2, "1 and 3"), ([4, 5, 4, 5, 7, 5], 2, "4"),
])  # fmt: skip
def test_the_ranks_that_are_not_as_most_are_named(monkeypatch, sums, shards, named):
    monkeypatch.setattr(Ranks, "concatenated", lambda ranks, own: torch.tensor(sums))
    ranks = Ranks(torch.device("cpu"), 0, len(sums))
    if not named:
        compare_replicas(nn.Linear(2, 2), ranks, shards)
        return
    with pytest.raises(Corrupted, match=f"^rank {named}: weights not as on other ranks$"):
        compare_replicas(nn.Linear(2, 2), ranks, shards)


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, float("nan")])
def test_each_bit_of_a_weight_changes_the_sum(monkeypatch, number):
    sums = set()
    monkeypatch.setattr(Ranks, "concatenated", lambda ranks, own: sums.add(int(own)) or own.expand(2))
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, number)
    for bit in range(32):
        flip = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
        model.weight.detach().view(torch.int32)[1, 2] ^= flip
        compare_replicas(model, Ranks(torch.device("cpu"), 0, 2), 1)
        model.weight.detach().view(torch.int32)[1, 2] ^= flip
    compare_replicas(model, Ranks(torch.device("cpu"), 0, 2), 1)
    assert len(sums) == 33


@pytest.mark.parametrize(("ranks", "where", "named", "recipe"), [
    pytest.param(3, (1, "wte.weight", ""), "rank 1", (), id="weight"),
    pytest.param(2, (1, "h.1.mlp.c_fc.bias", ""), "rank 0 and 1", (), id="one of two", marks=pytest.mark.storm),
    pytest.param(3, (0, "h.0.attn.c_attn.weight", "exp_avg"), "rank 0", (), id="moment", marks=pytest.mark.storm),
    pytest.param(4, (3, "h.0.ln_1.weight", ""), "rank 1 and 3", (*FSDP, "--shard_size", "2"), id="hybrid",
                 marks=pytest.mark.storm),
])  # fmt: skip
def test_a_flipped_bit_of_a_replica_is_named_and_not_saved(workdir, ranks, where, named, recipe):
    """The saves are before steps 4, 8 and 12, and the bit flips after step 6, so a moment changes step 7."""
    flags = (*FLAGS, *recipe, "--total_batch_size", str(64 * ranks), *folders("run"))
    run = Run(*flags, ranks=ranks, faults=[partial(flip_bit, 6, *where)])
    assert set(run.wait()) == {1}, run.text()
    assert f"\nwarning: step 8: {named}: weights not as on other ranks; a memory" in run.text()
    assert "Traceback" not in run.text()
    assert load("run/latest.pt")["step"] == 4
    assert json.loads(Path("run/status.json").read_text())["status"] == "failed"
    run_to_end(*flags, "--resume", "latest", ranks=ranks)
    run_to_end(*flags, *folders("reference"), ranks=ranks)
    assert_equals_reference("run")


def test_buckets_are_settled_without_a_trace():
    """A model that is not DDP's has no buckets."""
    model = nn.Linear(2, 2)
    parallel.settle_buckets(model, torch.device("cpu"), (1, 2), torch.no_grad())
    assert model.weight.grad is None
