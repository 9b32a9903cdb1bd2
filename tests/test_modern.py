"""The recipe of --config modern in runs: ranks, FSDP, resume, its schedule and stable.pt."""

import os

import pytest
import torch
from conftest import FSDP, MODERN, assert_same_state, load, metrics, run_here
from test_train import assert_close, fails, folders, run_forked

from steadygpt.config import TrainConfig
from steadygpt.run.schedule import Schedule


def run_modern(*flags: str) -> None:
    assert run_here(*MODERN, *flags) == 0


# ---------------------------------------------------------------------------------------------------------------------
# ranks and resume


@pytest.mark.parametrize(("processes", "flags"), [
    (3, ("--total_batch_size", "96", "--deterministic", "off")),
    (2, (*FSDP, "--cpu_offload")),
    (4, (*FSDP, "--mini_batch_size", "1", "--shard_size", "2")),
], ids=["ddp", "fsdp with offload", "2 copies on 2 ranks"])  # fmt: skip
def test_several_ranks_compute_and_save_the_same_as_one(workdir, processes, flags):
    one_process = ("--sharding", "ddp", "--cpu_offload", "off", "--shard_size", "0")
    run_modern("--eval_freq", "4", *flags, *one_process, *folders("one"))
    run_forked(*MODERN, "--eval_freq", "4", *flags, *folders("two"), processes=processes)
    assert_close("one", "two")
    expected, found = (load(f"{name}/latest.pt")["optimizer"] for name in ("one", "two"))
    for name, state in expected.items():
        for kind, tensor in state.items():
            assert torch.allclose(tensor, found[name][kind], atol=1e-5), (name, kind)
    assert run_here(*one_process, "--max_steps", "9", "--allow_changes", *folders("two"), "--resume", "latest") == 0


@pytest.mark.parametrize(
    "flags", [(), ("--precision", "bf16"), ("--norm", "rmsnorm_no_weight", "--activation", "relu2")]
)
def test_a_resumed_run_equals_one_without_a_break(workdir, flags):
    run_modern(*flags, *folders("whole"))
    run_modern(*flags, "--checkpoint_freq", "3", *folders("resumed"))
    os.unlink("resumed/latest.pt")
    assert run_here(*flags, *folders("resumed"), "--resume", "resumed/rolling_step_000003.pt") == 0
    assert_same_state(load("whole/latest.pt"), load("resumed/latest.pt"))


def test_fsdp_shards_are_resumed_on_another_number_of_ranks(workdir):
    run_modern(*folders("one"))
    run_forked(*MODERN, *FSDP, "--checkpoint_freq", "3", *folders("two"), processes=2)
    middle = "two/rolling_step_000003.pt"
    run_forked("--resume", middle, "--mini_batch_size", "1", *folders("two"), processes=4)
    one, other = load("one/latest.pt"), load("two/latest.pt")
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-5) for name in one["model"])


# ---------------------------------------------------------------------------------------------------------------------
# schedule


def rates(schedule: str, steps: int = 10, **options) -> list[float]:
    config = TrainConfig(schedule=schedule, max_lr=1.0, min_lr=0.0, warmup_steps=2, max_steps=steps, **options)
    return [round(Schedule(config).learning_rate(step), 3) for step in range(steps + 1)]


def test_learning_rates_of_each_schedule():
    assert rates("wsd") == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert rates("cosine") == [0.5, 1, 1, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038, 0]
    assert rates("wsd", cooldown=0.0)[:10] == rates("constant")[:10]
    assert rates("wsd", cooldown=1.0) == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]
    schedule = Schedule(TrainConfig(schedule="wsd", max_lr=1.0, min_lr=0.1, warmup_steps=0, max_steps=10))
    assert schedule.learning_rate(50) == pytest.approx(0.1)  # after the end
    assert schedule.decay_start == 6


def test_a_run_extended_from_stable_equals_a_longer_run(workdir, capsys):
    run_modern("--max_steps", "8", "--cooldown", "0.5", *folders("a"))
    assert load("a/stable.pt")["step"] == 4
    run_modern("--max_steps", "12", "--cooldown", "0.5", *folders("long"))
    assert run_here("--resume", "stable", "--max_steps", "12", *folders("a")) == 0
    assert_same_state(load("long/latest.pt"), load("a/latest.pt"))
    assert load("a/stable.pt")["step"] == 6
    assert metrics("logs-a", "lr") == metrics("logs-long", "lr")


def test_a_cooled_down_run_is_continued_from_stable_or_with_a_note(workdir, capsys):
    run_modern("--dry_run")
    assert (
        "cool-down    starts at step 5; stable.pt is saved just before. To train longer: --resume stable --max_steps N"
        in capsys.readouterr().out
    )
    run_modern(*folders("a"))
    assert "--optimizer is 'adamw', but the checkpoint was trained with 'muon'" in fails(
        "--resume", "latest", "--optimizer", "adamw", *folders("a")
    )
    assert (
        "--resume stable is at step 5, but a run of 6 steps cools down from step 4 on; give at least --max_steps 9"
        in fails("--resume", "stable", "--max_steps", "6", *folders("a"))
    )
    assert run_here("--resume", "latest", "--max_steps", "20", *folders("a")) == 0
    said = capsys.readouterr().out
    assert "lr           rises from" in said and "; --resume stable continues" in said
    assert run_here("--resume", "stable", "--max_steps", "20", *folders("a")) == 0
    assert "lr           rises from" not in capsys.readouterr().out


def test_a_schedule_without_a_cool_down_has_no_stable_checkpoint(workdir, capsys):
    run_modern("--schedule", "cosine", "--checkpoint_freq", "6", *folders("a"))
    assert "a/stable.pt: no such checkpoint" in fails("--resume", "stable", *folders("a"))
    later = ("--resume", "a/rolling_step_000006.pt", "--schedule", "wsd", "--allow_changes", "--dry_run")
    capsys.readouterr()
    assert run_here(*later, *folders("a")) == 0  # wsd's stable part would have ended before step 6
    said = capsys.readouterr().out
    assert "lr           rises from" in said and "stable" not in said


def test_muon_needs_a_learning_rate(workdir):
    assert "--optimizer muon needs a --max_lr above 0" in fails(*MODERN, "--max_lr", "0")
