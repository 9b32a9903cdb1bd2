"""What must not cost more as a run grows, in counts: open files, reads of checkpoints, rows of a validation."""

import os
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import torch
from conftest import REPO, write_data

import dataloader
from dataloader import Order, RowStream
from evaluation import validation_rows
from steadygpt.base.text import some
from steadygpt.config import TrainConfig
from steadygpt.data import shards
from steadygpt.data.shards import Shard, ShardSet
from steadygpt.machine.device import seed


def test_more_shards_than_a_process_may_open_give_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "most_mapped", lambda: 8)
    mapped = lru_cache(8)(Shard.map)
    monkeypatch.setattr(shards, "_mapped", lambda: mapped)
    write_data(tmp_path, num_tokens=[40] * 101)
    found_shards = ShardSet.find("data", str(tmp_path), "train").shards
    open_before = len(os.listdir("/proc/self/fd"))
    found = RowStream(found_shards, 16, Order(seed=3, shuffle_shards=True, shuffle_rows=True)).read(0, 400)
    assert len(os.listdir("/proc/self/fd")) <= open_before + 8
    of_each = [shard.tokens().copy() for shard in found_shards]
    rows = {}
    for number, tokens in enumerate(of_each):
        rows |= {tuple(tokens[first : first + 17].tolist()): number for first in range(24)}
    assert sorted(rows[tuple(row)] for row in found[:200].tolist()) == sorted([*range(100)] * 2)


def test_a_process_raises_its_limit_of_open_files():
    code = "import resource; from steadygpt.data.shards import most_mapped; "
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most_mapped(), "
    code += "*resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -Sn 100; {sys.executable} -c '{code}'"], capture_output=True, text=True, cwd=REPO
    )
    imported, mapped, soft, hard = map(int, done.stdout.split())
    assert (imported, soft, mapped) == (100, min(hard, 2**16), soft // 2)


def test_seeding_two_generators_draws_what_torch_manual_seed_does():
    torch.manual_seed(12345)
    expected = torch.rand(9)
    seed(torch.device("cpu"), 12345)
    assert torch.equal(torch.rand(9), expected)


def test_validation_sets_share_the_tokens_of_a_validation():
    config = TrainConfig(context_length=10, eval_tokens=1000)
    large, small = SimpleNamespace(rows_per_epoch=10**6), SimpleNamespace(rows_per_epoch=3)
    assert [validation_rows(config, large, sets) for sets in (1, 4, 200)] == [100, 25, 1]
    assert validation_rows(config, small, 4) == 3


def test_of_many_sources_eight_are_named():
    assert some(["a", "b"], "source") == ["a", "b"]
    assert some([str(i) for i in range(200)], "source")[6:] == ["6", "7", "and 192 more sources"]
    assert some([str(i) for i in range(9)], "source")[8:] == ["and 1 more source"]
