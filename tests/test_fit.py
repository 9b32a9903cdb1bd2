"""--mini_batch_size auto: the estimate, the steps that are tried out, and the number in the checkpoint."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import load, run_here

from config import parse_args
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
@pytest.mark.parametrize(("room", "tried"), [(12, [12]), (4, [12, 6, 3]), (0, [12, 6, 3, 1])])
def test_a_step_is_tried_out_on_a_gpu_and_halved_after_a_lack_of_memory(monkeypatch, flags, room, tried):
    """The GPU is this CPU, with room for so many rows."""
    steps, fractions = [], []

    def take_step(config, rows, device, sketch, take=fit.take_step):
        take(dataclasses.replace(config, compile="off"), rows, CPU, sketch)
        steps.append(rows)
        if rows > room:
            raise torch.OutOfMemoryError if rows > 6 else RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(fit, "take_step", take_step)
    monkeypatch.setattr(fit, "memory_bytes", lambda device: 10_000_000)
    monkeypatch.setattr("steadygpt.plan.memory_bytes", lambda device: 10_000_000)
    monkeypatch.setattr("steadygpt.plan.device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu, config = Ranks(SimpleNamespace(type="cuda")), dataclasses.replace(CONFIG, **flags)
    if room:
        found, (line,) = fit.with_fitting_rows(config, SKETCH, gpu)
        assert found.mini_batch_size == tried[-1]
        assert re.fullmatch(
            rf"mini_batch_size auto: {tried[-1]} rows need .* GB \(estimated, and tried out\); .*", line
        )
    else:
        with pytest.raises(UserError, match="--mini_batch_size auto: 1 row of 16 tokens: about"):
            fit.with_fitting_rows(config, SKETCH, gpu)
    assert steps == tried
    assert fractions == [0.9, 1.0] * len(tried)


def test_the_number_is_stored_and_a_resume_takes_it(workdir, monkeypatch, capsys):
    auto = ("--mini_batch_size", "auto", "--checkpoint_dir", "a", "--logdir", "a")
    monkeypatch.setattr(fit, "memory_bytes", lambda device: 10**9)
    assert run_here(*auto) == 0
    assert (
        "mini_batch_size auto: 4 rows need 0.00 GB (estimated); the limit is 0.60 of 1.00 GB\n"
        in capsys.readouterr().out
    )
    assert load("a/latest.pt")["train_config"]["mini_batch_size"] == 4
    import train

    resume = ("--data_dir", "data", "--device", "cpu", "--resume", "--checkpoint_dir", "a", "--logdir", "a")
    assert train.main([*resume, "--max_steps", "9"]) == 0
    assert "mini_batch_size" not in capsys.readouterr().out
    assert load("a/latest.pt")["train_config"]["mini_batch_size"] == 4
    with pytest.raises(UserError, match="--total_batch_size 63 is not a multiple of"):
        run_here(*auto, "--total_batch_size", "63")
