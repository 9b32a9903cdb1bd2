"""The learning rate, the names under which a step is saved, and the length of a run in its records."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from conftest import load, run_here, tiny_without
from ground import launches, run_content, start_from, with_options
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from model import GPT
from optim import SCHEDULES, learning_rate
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.run.schedule import names_of_save, with_steps
from steadygpt.start.settle import notes_of_rates

FOUR_ROWS = TrainConfig(context_length=16, total_batch_size=64, max_steps=9, warmup_steps=0, checkpoint_freq=4)


@pytest.mark.parametrize(("schedule", "rates"), [
    ("cosine", [1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]),
    ("wsd", [1.0, 1.0, 1.0, 0.6, 0.2]),
    ("constant", [1.0] * 5),
])  # fmt: skip
def test_the_learning_rate_rises_in_a_line_and_falls_as_the_schedule_says(schedule, rates):
    config = replace(FOUR_ROWS, schedule=schedule, max_lr=1.0, min_lr=0.2, warmup_steps=4, max_steps=12, cooldown=1 / 3)
    found = [learning_rate(config, step) for step in range(13)]
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4::2] == pytest.approx(rates)


def test_a_step_that_ends_an_epoch_the_stable_part_or_a_number_of_steps_has_their_names():
    config = replace(FOUR_ROWS, schedule="wsd", cooldown=1 / 3)
    names = {step: names_of_save(config, 12, TrainState(step, 4 * step)) for step in range(9)}
    assert {step: found for step, found in names.items() if found} == {
        3: ["epoch_00001.pt"], 4: ["rolling_step_000004.pt"], 6: ["epoch_00002.pt", "stable.pt"],
        8: ["rolling_step_000008.pt"],
    }  # fmt: skip


def test_no_epoch_ends_before_the_first_step_of_two_epochs():
    assert [names_of_save(FOUR_ROWS, 2, TrainState(step, 4 * step)) for step in range(2)] == [[], ["epoch_00002.pt"]]


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3))
def test_each_epoch_names_the_first_step_that_has_seen_all_of_it(rows_per_epoch, rows_per_step, first_row):
    """Rows of an epoch need not be a multiple of a step's."""
    config = replace(FOUR_ROWS, total_batch_size=16 * rows_per_step, checkpoint_freq=0)
    for step in range(1, 60):
        rows = first_row + step * rows_per_step
        expected = rows // rows_per_epoch
        names = [f"epoch_{expected:05d}.pt"] if expected > (rows - rows_per_step) // rows_per_epoch else []
        assert names_of_save(config, rows_per_epoch, TrainState(step, rows)) == names


@settings(max_examples=40)
@given(
    st.sampled_from([*SCHEDULES]), st.floats(0, 1), st.integers(0, 20), st.sampled_from(["steps", "epochs"]),
    st.integers(1, 40), st.floats(0.1, 3),
)  # fmt: skip
def test_only_a_resume_that_changes_the_learning_rate_says_so(schedule, cooldown, warmup, length, count, factor):
    config = TrainConfig(
        context_length=16, total_batch_size=64, schedule=schedule, cooldown=cooldown, warmup_steps=warmup,
        max_steps=50 + count if length == "steps" else 0, num_epochs=count,
    )  # fmt: skip
    rows_per_epoch = 400
    settled = with_steps(config, rows_per_epoch, step=0, rows=0)
    other = replace(settled, max_steps=max(warmup + 1, round(factor * settled.max_steps)))
    checkpoint = with_options(run_content(0), **asdict(config))
    for step in range(0, settled.max_steps + 1, 1 + settled.max_steps // 20):
        start = start_from(checkpoint | {"step": step, "rows_consumed": 4 * step})
        lines = [line for line in notes_of_rates(settled, start, rows_per_epoch) if line.startswith("lr ")]
        assert not lines, (step, lines)
        before, now = (learning_rate(planned, step) for planned in (settled, other))
        said = [line.split()[1] for line in notes_of_rates(other, start, rows_per_epoch) if line.startswith("lr ")]
        expected = []
        if not 0.9 * before <= now <= 1.1 * before:
            expected = ["rises" if now > before else "falls"]
        assert said == expected


def test_the_number_of_steps_that_the_epochs_give_is_recorded(workdir):
    assert run_here("--max_steps", "0", "--num_epochs", "1") == 0
    assert launches("checkpoints")[0]["settings"]["max_steps"] == load("checkpoints/latest.pt")["step"] > 0


@given(
    st.floats(0.1, 50), st.integers(1, 3), st.integers(1, 9), st.integers(0, 30), st.integers(0, 100),
    st.sampled_from([64, 257]),
)  # fmt: skip
def test_tokens_per_parameter_end_with_the_first_step_that_reaches_them(ratio, layers, rows, step, before, vocab_size):
    """Whatever the batch was in the steps before."""
    config = TrainConfig(
        num_layers=layers, num_heads=1, embd_size=8, context_length=16, vocab_size=vocab_size,
        total_batch_size=16 * rows, tokens_per_parameter=ratio, warmup_steps=0,
    )  # fmt: skip
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config.shape(vocab_size), initialize=False).parameters())
    padding = (config.padded_vocab_size - vocab_size) * 8  # of the table, which no token uses
    expected = ratio * (parameters - padding)
    steps = with_steps(config, 400, step, before).max_steps
    tokens = (before + (steps - step) * rows) * 16
    assert tokens >= expected * (1 - 1e-12)
    assert steps == step or tokens - 16 * rows < expected


def test_a_run_of_tokens_per_parameter_stops_resumes_and_goes_on_beyond(workdir):
    flags = [*tiny_without("max_steps"), "--data_dir", "data"]
    assert train.main([*flags, "--tokens_per_parameter", "0.02"]) == 0
    length = load("checkpoints/latest.pt")["step"]
    assert launches("checkpoints")[0]["settings"]["max_steps"] == length > 2
    assert train.main(["--resume", "latest", "--tokens_per_parameter", "0.03"]) == 0
    assert load("checkpoints/latest.pt")["step"] == pytest.approx(1.5 * length, abs=1)
    assert train.main(["--resume", "latest", "--max_steps", str(2 * length)]) == 0
    assert load("checkpoints/latest.pt")["step"] == 2 * length
    assert load("checkpoints/latest.pt")["options"]["tokens_per_parameter"] == 0
