"""Schedules, and stable.pt: a checkpoint of before the cool-down."""

import pytest
from conftest import MODERN, run_here
from test_train import fails, folders

from steadygpt.config import TrainConfig
from steadygpt.run.schedule import Schedule


def run_modern(*flags: str) -> None:
    assert run_here(*MODERN, *flags) == 0


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
