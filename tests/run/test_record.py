"""The record of steps: when a run has diverged, and the time that is left."""

import math
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.run import step as steps
from steadygpt.run.run import Meter
from steadygpt.run.step import Diverged, StepResult, count_step, judge, log_step, restart_clock

CPU = Ranks(torch.device("cpu"))


def run_of(config: TrainConfig, state: TrainState, log: object = None) -> SimpleNamespace:
    """Return what the functions of steadygpt/run/step.py use of a run."""
    with torch.device("meta"):
        model = GPT(config.shape(257), config, initialize=False)
    return SimpleNamespace(
        config=config, ranks=CPU, state=state, log=log, model=model, meter=Meter(), repeats=None,
        rows_per_epoch=32, requests=SimpleNamespace(),
    )  # fmt: skip


def judged(run: SimpleNamespace, loss: float) -> StepResult:
    """Judge the next step, which has this loss."""
    state = run.state
    return judge(run.config, state.recent_losses, state.step, 1e-3, None, {"loss": loss, "grad_norm": 1.0})


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=12), st.integers(0, 4), st.integers(0, 3), st.integers(1, 5))
def test_a_run_diverges_at_max_bad_steps_and_goes_back_to_the_first_of_them(good, max_bad_steps, bad_steps, rows):
    config = TrainConfig(context_length=16, total_batch_size=16 * rows, max_steps=99, max_bad_steps=max_bad_steps)
    state = TrainState(step=10, rows_consumed=10 * rows, bad_steps=bad_steps)
    run = run_of(config, state)
    for number, is_good in enumerate(good):
        step = 10 + number
        bad_steps = 0 if is_good else bad_steps + 1
        result = judged(run, 2.0 if is_good else math.nan)
        if bad_steps >= max_bad_steps > 0:
            with pytest.raises(Diverged) as diverged:
                count_step(run, result)
            first_bad = step + 1 - bad_steps
            assert (diverged.value.step, state.step, state.rows_consumed) == (first_bad, first_bad, rows * first_bad)
            assert state.bad_steps == 0
            return
        count_step(run, result)
        assert (state.step, state.rows_consumed, state.bad_steps) == (step + 1, rows * (step + 1), bad_steps)
    assert len(state.recent_losses) == sum(good)


def test_the_scores_of_the_weights_before_a_step_are_not_those_after_it():
    state = TrainState(scores={"val_loss": 3.0}, validated_on="rows")
    run = run_of(TrainConfig(), state)
    count_step(run, judged(run, 2.0))
    assert (state.scores, state.validated_on) == ({}, "")


def times_left(monkeypatch, seconds: list[float]) -> dict[int, float]:
    """Return the time that each of the first steps of 1000 shows as left, with an evaluation of 2 s after every 25."""
    left = dict[int, float]()
    log = SimpleNamespace(step=lambda step, numbers, metrics, left_s, *_, **facts: left.update({step: left_s}))
    now_s = 0.0
    monkeypatch.setattr("steadygpt.run.step.time.perf_counter", lambda: now_s)
    run = run_of(TrainConfig(context_length=16, total_batch_size=64, max_steps=1000), TrainState(), log)
    run.meter.step_start_s = 0.0
    for step, step_s in enumerate(seconds):
        now_s += step_s
        result = judged(run, 2.0)
        log_step(run, result)
        count_step(run, result)
        if step % 25 == 24:
            now_s += 2
            restart_clock(run)
    return left


@pytest.mark.parametrize("seed", range(20))
def test_a_suspended_process_does_not_change_the_time_left(monkeypatch, seed):
    """One step of 20 s to 3 h at a random place."""
    random = Random(seed)
    seconds = [30, *(random.uniform(0.09, 0.11) for _ in range(199))]  # the first one compiles
    seconds[random.randrange(60, 160)] += random.choice([20, 600, 10_000])
    left = times_left(monkeypatch, seconds)
    for step in range(50, 200):
        assert left[step] == pytest.approx((999 - step) * (0.1 + 2 / 25), rel=0.35), step


@pytest.mark.parametrize("factor", [0.1, 0.5, 3, 20])
def test_the_time_left_follows_a_machine_that_becomes_faster_or_slower(monkeypatch, factor):
    seconds = [0.5] * 200 + [0.5 * factor] * 200
    left = times_left(monkeypatch, seconds)
    for step in range(260, 400):  # more than half of the last 100 steps are new
        assert left[step] == pytest.approx((999 - step) * (0.5 * factor + 2 / 25), rel=0.1), step


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_speed_cost_and_mfu_are_those_of_all_ranks(monkeypatch, processes):
    """MFU is the share of the peak of all devices (PaLM, appendix B)."""
    now_s = 0.0
    logged: dict[str, float] = {}
    log = SimpleNamespace(step=lambda step, numbers, *_, **facts: logged.update(numbers))
    config = TrainConfig(context_length=16, total_batch_size=1024, max_steps=9, gpu_hour_cost=3.0)
    run = run_of(config, TrainState(elapsed_s=7200.0), log)
    run.ranks = Ranks(torch.device("cpu"), world_size=processes)
    monkeypatch.setattr(steps, "PEAK_FLOPS", {"a device": 1e12})
    monkeypatch.setattr(steps, "device_name", lambda device: "a device")
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr("steadygpt.checkpoint.files.process_age_s", lambda: 0.0)
    run.meter.step_start_s = 0.0
    now_s = 0.25
    log_step(run, judged(run, 2.0))
    assert (logged["step_ms"], logged["tokens_per_second"]) == (250, 4096)
    assert logged["mfu"] == pytest.approx(4096 * run.model.flops_per_token() / (processes * 1e12))
    assert logged["cost"] == pytest.approx(2 * processes * 3.0)
