"""--batch_ramp: the rows of each step, on other ranks, after a resume and in a replay."""

from conftest import load, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import folders

import replay
import train
from look import find_step
from steadygpt.config import TrainConfig
from steadygpt.run import starts
from steadygpt.run.schedule import Schedule

RAMP = "32:128,48:256"  # 2 rows a step up to row 8, then 3 up to row 16, then 4
FIRST_ROWS = [0, 2, 4, 6, 8, 11, 14, 17, 21, 25, 29]  # of 8 full steps, 32 rows


def config(**changes) -> TrainConfig:
    return TrainConfig(context_length=16, total_batch_size=64, warmup_steps=0, max_steps=11, **changes)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), max_size=4), st.integers(0, 500), st.integers(0, 300)
)
def test_steps_follow_one_another(stages, row, steps):
    sizes, ends = sorted({size for size, _ in stages}), sorted({end for _, end in stages})
    ramp = ",".join(f"{16 * size}:{end}" for size, end in zip(sizes, ends, strict=False))
    found, end = TrainConfig(context_length=16, total_batch_size=160, batch_ramp=ramp), row
    for _ in range(steps):
        step = found.step_at(end)
        assert step.start == end and found.step_to(step.stop) == step
        end = step.stop
    assert found.row_after(steps, row) == end
    assert found.steps_between(row, end) == steps


def test_a_ramp_has_smaller_steps_the_run_as_many_tokens_as_without_and_a_replay_the_same(workdir, capsys, monkeypatch):
    found = config(batch_ramp=RAMP)
    assert [found.row_after(step) for step in range(11)] == FIRST_ROWS
    for module in (starts, replay):
        monkeypatch.setattr(module, "git_commit", lambda: "c0ffee")
    flags = ("--batch_ramp", RAMP, "--mini_batch_size", "1", "--dropout", "0.1", "--checkpoint_freq", "2")
    assert run_here(*flags, *folders("a")) == 0
    assert load("a/latest.pt")["step"] == 11 and load("a/latest.pt")["rows_consumed"] == 33  # whole steps
    plan = capsys.readouterr().out
    assert "11, each of 32 up to token 128, then 48 up to token 256, then 64 tokens (1 row x " in plan
    for step, first in enumerate(FIRST_ROWS):
        assert find_step(load("a/latest.pt"), "a", step)[1] == range(first, [*FIRST_ROWS, 33][step + 1])
    assert replay.main(["--steps", "2:10", "--checkpoint_dir", "a", "--device", "cpu"]) == 0


def test_the_cool_down_is_a_part_of_the_tokens():
    schedule = Schedule(config(batch_ramp=RAMP, schedule="wsd", cooldown=0.5))
    assert schedule.decay_start == 7  # the first step from row 16 on
    assert Schedule(config(schedule="wsd", cooldown=0.5)).decay_start == 11 - 6


def test_a_ramp_that_a_resume_adds_keeps_the_tokens_of_the_run(workdir, capsys):
    assert run_here("--mini_batch_size", "1", "--max_steps", "1", "--warmup_steps", "0") == 0
    ramp = ("--resume", "latest", "--allow_changes", "--max_steps", "8", "--batch_ramp", "32:192")
    capsys.readouterr()
    assert train.main([*ramp, "--data_dir", "data", "--device", "cpu"]) == 0
    assert "tokens       512, " in capsys.readouterr().out
    saved = load("checkpoints/latest.pt")
    assert (saved["step"], saved["rows_consumed"]) == (1 + 4 + 5, 32)  # 4 rows, 4 steps of 2, 5 of 4


def test_a_divergence_in_a_ramp_goes_back_to_the_step_before_it(workdir):
    flags = ("--batch_ramp", RAMP, "--mini_batch_size", "1", "--max_lr", "1e30", "--min_lr", "0", "--warmup_steps", "0")
    assert run_here(*flags, "--max_bad_steps", "3", "--grad_clip", "0", *folders("a")) == 1
    saved = load("a/latest.pt")
    assert saved["rows_consumed"] == FIRST_ROWS[saved["step"]]
