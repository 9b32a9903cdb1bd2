"""--deterministic: the order of its sums, and what it depends on; faults/test_equal.py compares runs."""

import random

import pytest
import torch
from conftest import load, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.machine.gradient_sum import GradientSum
from steadygpt.machine.ranks import Ranks

FOUR = ("--deterministic", "--mini_batch_size", "1", "--eval_freq", "4", "--eval_tokens", "112")  # 4 micro-batches
PARAMETERS = [3, 1, 5]  # an odd size, so that slices are padded


def tree_sum(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Sum along a binary tree, by its definition."""
    middle = len(leaves) // 2
    return tree_sum(leaves[:middle]) + tree_sum(leaves[middle:]) if middle else leaves[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 4, 8]))
def test_gradients_are_summed_along_a_binary_tree(seed, count):
    generator = torch.Generator().manual_seed(seed)
    scales = [10.0 ** random.Random(number).randint(-6, 6) for number in range(count)]
    leaves = [torch.randn(sum(PARAMETERS), generator=generator) * scale for scale in scales]  # of the virtual ranks
    parameters = [nn.Parameter(torch.zeros(size)) for size in PARAMETERS]
    gradient_sum = GradientSum(parameters, Ranks(torch.device("cpu")))
    for _ in range(2):
        for parameter in parameters:
            parameter.grad.zero_()
        for number, gradient in enumerate(leaves):
            for parameter, part in zip(parameters, gradient.split(PARAMETERS), strict=True):
                parameter.grad += part  # as backward does
            gradient_sum.end_virtual_rank(number, count)
    assert torch.equal(torch.cat([parameter.grad for parameter in parameters]), tree_sum(leaves))


def refused(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        run_here(*flags)
    return str(caught.value)


def test_what_the_sums_depend_on_stays_fixed(workdir, capsys):
    assert run_here(*FOUR, "--mini_batch_size", "3", "--max_steps", "4") == 0  # 2 rows divide a step, and 2 processes
    assert (
        "same bits    on 1 or 2 processes of 1 thread each, because a step has 2 micro-batches\n"
        in capsys.readouterr().out
    )
    resume = ("--eval_freq", "4", "--resume", "latest")
    assert "--deterministic is False, but" in refused(*resume, "--deterministic", "off", "--allow_changes")
    assert "--mini_batch_size is 1, but the checkpoint was trained with 2" in refused(
        *resume, "--mini_batch_size", "1", "--allow_changes"
    )
    assert refused(*resume, "--mini_batch_size", "3", "--total_batch_size", "128", "--allow_changes") == (
        "--deterministic: --total_batch_size 128 fits 1, 2 or 4 processes, but the run began with one that fits "
        "2; drop the flag"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert run_here(*resume, "--mini_batch_size", "3", "--dry_run") == 0
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert run_here(*resume, "--mini_batch_size", "3", "--max_steps", "8") == 0  # as it was begun
    assert f"threads      {threads + 1} -> {threads}, as before" in capsys.readouterr().out
    assert load("checkpoints/latest.pt")["launches"][-1]["threads"] == threads


def test_virtual_ranks_are_a_power_of_two_that_divides_the_micro_batches():
    for micro_batches, count in {1: 1, 3: 1, 2: 2, 6: 2, 12: 4, 40: 8, 64: 8}.items():
        config = TrainConfig(total_batch_size=64 * micro_batches, mini_batch_size=4, context_length=16)
        assert config.virtual_ranks() == count
