"""--mini_batch_size auto: the search, the step that is tried out, and the number in the checkpoint."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import load, run_here
from hypothesis import given, settings
from hypothesis import strategies as st

from config import TrainConfig, parse_args
from model import GPT
from steadygpt import fit
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks
from steadygpt.plan import FITS, needed_bytes

CPU = torch.device("cpu")
CONFIG = parse_args(
    "--mini_batch_size auto --total_batch_size 192 --context_length 16 --num_layers 2 --num_heads 2 --embd_size 16 "
    "--precision fp32".split()
)[0]  # 12 rows: 1, 2, 3, 4, 6 or 12 at once
with torch.device("meta"):
    SKETCH = GPT(CONFIG.shape(257))


# ---------------------------------------------------------------------------------------------------------------------
# the search


def search(candidates: list[int], first: int, peak_of, limit: int, static: int, capacity: int):
    """Return the number found and those that were probed; above `capacity` bytes the device is out of memory."""
    probed = []

    def probe(rows: int) -> int | None:
        probed.append(rows)
        return peak_of(rows) if peak_of(rows) <= capacity else None

    return fit.most_rows(candidates, first, probe, limit, static), probed


def test_a_good_guess_takes_one_probe_and_a_bad_one_two_or_three():
    powers = [1, 2, 4, 8, 16, 32, 64]
    gb = {"limit": 75, "static": 2, "capacity": 80}
    assert search(powers, 32, lambda rows: 2 + 2 * rows, **gb) == (32, [32])
    assert search(powers, 4, lambda rows: 2 + 2 * rows, **gb) == (32, [4, 32])
    assert search(powers, 64, lambda rows: 2 + 2 * rows, **gb) == (32, [64, 32])
    assert search(powers, 32, lambda rows: 3 + 2 * rows**1.1, **gb) == (
        16,
        [32, 16],
    )  # fits on the GPU, but above the limit
    assert search(powers, 1, lambda rows: 100, **gb) == (0, [1])


divisors = st.integers(1, 5000).map(lambda n: [b for b in range(1, n + 1) if n % b == 0])


@given(divisors, st.data(), st.integers(0, 1000), st.integers(1, 500), st.integers(0, 10**6), st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_the_search_finds_the_largest_that_fits(candidates, data, static, bytes_a_row, limit, reserve):
    first = data.draw(st.sampled_from(candidates))

    def peak(rows: int) -> int:
        return static + bytes_a_row * rows

    found, probed = search(candidates, first, peak, limit, static, limit + reserve)
    assert found == max((rows for rows in candidates if peak(rows) <= limit), default=0)
    assert len(set(probed)) == len(probed)
    assert not found or found in probed


@given(divisors, st.data(), st.integers(0, 1000), st.integers(0, 10**4))
@settings(max_examples=300, deadline=None)
def test_the_search_ends_with_a_probed_number_for_any_growing_peaks(candidates, data, static, limit):
    first = data.draw(st.sampled_from(candidates))
    peaks = sorted(data.draw(st.lists(st.integers(0, 10**4), min_size=len(candidates), max_size=len(candidates))))
    peak_of = dict(zip(candidates, peaks, strict=True)).__getitem__
    found, probed = search(candidates, first, peak_of, limit, static, limit + 100)
    assert len(set(probed)) == len(probed)
    assert found == max((rows for rows in probed if peak_of(rows) <= limit), default=0)
    assert found or peak_of(candidates[0]) > limit


# ---------------------------------------------------------------------------------------------------------------------
# from the plan, and on a GPU


def needed(rows: int, world_size: int = 1, **changes) -> float:
    config = dataclasses.replace(CONFIG, mini_batch_size=rows, **changes)
    return needed_bytes(config, SKETCH, CPU, world_size)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_the_plan_decides_on_a_cpu(monkeypatch, rows):
    monkeypatch.setattr(fit, "memory_bytes", lambda device: needed(rows) / FITS["cpu"] + 1)
    config, (line,) = fit.with_fitting_rows(CONFIG, SKETCH, Ranks(CPU))
    assert config == dataclasses.replace(CONFIG, mini_batch_size=rows)
    assert line == f"mini_batch_size auto: {rows} rows need 0.00 GB (estimated); the limit is 0.00 of 0.00 GB"


def test_the_smallest_of_the_ranks_numbers_is_taken(monkeypatch):
    monkeypatch.setattr(fit, "memory_bytes", lambda device: needed(6, 2) / FITS["cpu"] + 1)
    monkeypatch.setattr(Ranks, "max", lambda self, number: max(number, -2))  # the other rank has found 2
    config, (line,) = fit.with_fitting_rows(CONFIG, SKETCH, Ranks(CPU, world_size=2))
    assert config.mini_batch_size == 2
    assert line.startswith("mini_batch_size auto: 2 rows need ")
    monkeypatch.setattr(Ranks, "max", lambda self, number: max(number, 0))  # or none
    with pytest.raises(UserError, match="--mini_batch_size auto: 1 row of 16 tokens: about"):
        fit.with_fitting_rows(CONFIG, SKETCH, Ranks(CPU, world_size=2))


def test_no_number_fits_or_splits_a_step():
    with pytest.raises(UserError, match=r"192 is not a multiple of .* 5 processes = 80 tokens.* 160 or 240 would work"):
        fit.with_fitting_rows(CONFIG, SKETCH, Ranks(CPU, world_size=5))


@pytest.mark.parametrize("flags", [{}, {"activation_checkpointing": True, "loss_chunk_size": 8}, {"compile": "on"}])
def test_a_step_is_tried_out_on_a_gpu(monkeypatch, flags):
    """The GPU is this CPU; its allocator pretends that it has room for 3 rows."""
    steps = []
    gpu = SimpleNamespace(type="cuda")

    def take_step(config, rows, device, sketch, take=fit.take_step):
        take(dataclasses.replace(config, compile="off"), rows, CPU, sketch)
        steps.append(rows)
        if rows > 4:
            raise torch.OutOfMemoryError if rows > 6 else RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(fit, "take_step", take_step)
    monkeypatch.setattr(fit, "memory_bytes", lambda device: 10_000_000)
    for name, value in {
        "mem_get_info": (9_500_000, 10_000_000), "memory_reserved": 100_000, "empty_cache": None,
        "reset_peak_memory_stats": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: steps[-1] * 2_500_000)
    config, (line,) = fit.with_fitting_rows(dataclasses.replace(CONFIG, **flags), SKETCH, Ranks(gpu))
    # 94 % of 10 MB, less 0.4 MB that others hold, is 9 MB: enough for 3 rows
    assert config.mini_batch_size == 3
    assert steps[-1] == 3
    assert steps[0] == 12
    assert line == "mini_batch_size auto: 3 rows need 0.01 GB (measured); the limit is 0.01 of 0.01 GB"
    assert len(steps) <= 4


# ---------------------------------------------------------------------------------------------------------------------
# runs


def test_the_number_is_stored_and_a_resume_takes_it(workdir, monkeypatch, capsys):
    auto = ("--mini_batch_size", "auto", "--checkpoint_dir", "a", "--logdir", "a")
    monkeypatch.setattr(fit, "memory_bytes", lambda device: 10**9)
    assert run_here(*auto) == 0
    assert (
        "mini_batch_size auto: 4 rows need 0.00 GB (estimated); the limit is 0.60 of 1.00 GB\n"
        in capsys.readouterr().out
    )
    assert load("a/latest.pt")["train_config"]["mini_batch_size"] == 4
    assert type(load("a/latest.pt")["train_config"]["mini_batch_size"]) is int
    import train

    resume = ("--data_dir", "data", "--device", "cpu", "--resume", "--checkpoint_dir", "a", "--logdir", "a")
    assert train.main([*resume, "--max_steps", "9"]) == 0
    assert "mini_batch_size" not in capsys.readouterr().out
    assert load("a/latest.pt")["train_config"]["mini_batch_size"] == 4
    with pytest.raises(UserError, match="--total_batch_size 63 is not a multiple of"):
        run_here(*auto, "--total_batch_size", "63")


def test_auto_is_a_word_of_flags_and_toml(tmp_path):
    (tmp_path / "mine.toml").write_text('mini_batch_size = "auto"\n')
    config = parse_args(["--config", str(tmp_path / "mine.toml")])[0]
    assert (config.mini_batch_size, repr(config.mini_batch_size)) == (0, "auto")
    (tmp_path / "mine.toml").write_text('mini_batch_size = "all"\n')
    with pytest.raises(UserError, match=r"mini_batch_size is 'all' \(str\); expected int or auto"):
        parse_args(["--config", str(tmp_path / "mine.toml")])
    assert TrainConfig(mini_batch_size=config.mini_batch_size).grad_accum_steps(1) == 0
