"""Which updates are skipped, what warns, and when a run has diverged."""

import math
from random import Random
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch
from conftest import write_data
from ground import batches_of, built, model_of, optimizer_of, take_step
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.run.repeats import Repeats
from steadygpt.run.results import SPIKE_WINDOW, Diverged, Results, StepResult, judge
from steadygpt.run.schedule import Schedule

CPU = torch.device("cpu")


def judged(loss: float, recent_losses: list[float], loss_scale: float | None = None, **config) -> StepResult:
    """Judge a step with this loss; with a loss scale below 2**16, its gradient norm is infinite."""
    grad_norm = math.inf if loss_scale and loss_scale < 2**16 else 1.0
    return judge(
        TrainConfig(**config), recent_losses, step=0, rows=range(4), lr=1e-3, loss=loss, grad_norm=grad_norm,
        loss_scale=loss_scale,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 10, width=32))
def test_loss_z_counts_standard_deviations_above_the_mean(seed, loss):
    random = Random(seed)
    recent = [random.uniform(1, 10) for _ in range(SPIKE_WINDOW)]
    expected = (loss - fmean(recent)) / pstdev(recent)
    assert judged(loss, recent).loss_z == pytest.approx(expected, rel=1e-9)
    assert judged(loss, [1e9, *recent]).loss_z == pytest.approx(expected, rel=1e-9)  # only the last ones count


def test_spikes_are_found_once_enough_losses_are_known():
    steady = [2.0 + 0.1 * (i % 2) for i in range(SPIKE_WINDOW)]
    unknown = judged(9.0, steady[1:])
    assert (math.isnan(unknown.loss_z), unknown.spike, unknown.updated) == (True, False, True)
    for config, expected in (
        ({}, (True, True)),
        ({"skip_spikes": True}, (True, False)),
        ({"spike_z": 0.0}, (False, True)),
    ):
        result = judged(9.0, steady, **config)
        assert (result.spike, result.updated) == expected


def test_the_warning_of_a_spike_names_the_command_that_shows_its_rows():
    steady = [2.0 + 0.1 * (i % 2) for i in range(SPIKE_WINDOW)]
    spike = judged(9.0, steady, skip_spikes=True)
    command = "python look.py --checkpoint_dir 'my run' --step 0"
    assert spike.warning("my run").endswith(f"; its update was skipped; to see its rows: {command}")
    assert judged(math.nan, steady).warning("my run").endswith("; its update was skipped")
    assert judged(2.0, steady).warning("my run") == ""


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(0, 4), st.integers(0, 3), st.integers(1, 5))
def test_a_run_diverges_at_max_bad_steps_and_goes_back_to_the_first_of_them(good, max_bad_steps, bad_steps, rows):
    config = TrainConfig(
        context_length=16, total_batch_size=16 * rows, max_steps=99, max_bad_steps=max_bad_steps, device="cpu"
    )
    log = SimpleNamespace(step=lambda *args, **facts: None, warn=lambda *args, **event: None)
    state = TrainState(step=10, rows_consumed=10 * rows, bad_steps=bad_steps)
    results = Results(config, Ranks(CPU), Schedule(config, 32), state, log, 1.0, Repeats(log))
    for number, is_good in enumerate(good):
        step, first_row = 10 + number, rows * (10 + number)
        loss = 2.0 if is_good else math.nan
        bad_steps = 0 if is_good else bad_steps + 1
        result = judge(
            config, state.recent_losses, step=step, rows=range(first_row, first_row + rows), lr=1e-3, loss=loss,
            grad_norm=1.0, loss_scale=None,
        )  # fmt: skip
        if bad_steps >= max_bad_steps > 0:
            with pytest.raises(Diverged) as diverged:
                results.add(result)
            assert (diverged.value.step, diverged.value.row) == (
                step + 1 - bad_steps,
                first_row + rows - rows * bad_steps,
            )
            assert state.bad_steps == 0
            return
        results.add(result)
        assert state.bad_steps == bad_steps
    assert len(state.recent_losses) == sum(good)


@pytest.mark.parametrize("seed", range(20))
def test_a_suspended_process_does_not_change_the_time_left(monkeypatch, seed):
    """Steps of 0.09 to 0.11 s, an evaluation of 2 s after every 25, and one step of 20 s to 3 h at a random place."""
    random = Random(seed)
    config = TrainConfig(context_length=16, total_batch_size=64, max_steps=1000, device="cpu")
    left = dict[int, float]()
    log = SimpleNamespace(step=lambda step, numbers, metrics, left_s, *_, **facts: left.update({step: left_s}))
    now_s = 0.0
    monkeypatch.setattr("steadygpt.run.results.time.perf_counter", lambda: now_s)
    results = Results(config, Ranks(CPU), Schedule(config, 32), TrainState(), log, 1.0, Repeats(log))
    suspended_at = random.randrange(60, 160)
    for step in range(200):
        now_s += 30 if step == 0 else random.uniform(0.09, 0.11)  # the first one compiles
        if step == suspended_at:
            now_s += random.choice([20, 600, 10_000])
        result = judge(
            config, [], step=step, rows=range(4 * step, 4 * step + 4), lr=1e-3, loss=2.0, grad_norm=1.0, loss_scale=None
        )
        results.add(result)
        if step % 25 == 24:
            now_s += 2
            results.restart_clock()
    for step in range(50, 200):
        assert left[step] == pytest.approx((999 - step) * (0.1 + 2 / 25), rel=0.35), step


@pytest.mark.parametrize(("config", "advice"), [
    (TrainConfig(max_lr=1e-3, min_lr=1e-4, precision="fp32"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0001, or skip"),
    (TrainConfig(max_lr=1e-3, min_lr=8e-4, precision="bf16"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0005 or --precision fp32, or skip"),
])  # fmt: skip
def test_the_advice_after_a_divergence_halves_the_learning_rate(config, advice):
    assert advice in Diverged(3, step=4, row=16).advice(config)


def test_an_overflow_in_fp16_is_bad_when_no_lower_scale_is_left():
    results = [judged(2.0, [], scale) for scale in (2.0**16, 2.0**15, 1.0, 0.5)]
    assert [(r.bad, r.updated) for r in results] == [(False, True), (False, False), (False, False), (True, False)]
    assert "fp16" in results[1].warning("run") and "fp16" not in results[3].warning("run")
    assert judged(math.nan, [], 2.0**15).bad  # a lower scale does not help a loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_with_a_nan_changes_nothing_but_the_loss_scale(optimizer, precision, tmp_path):
    data = str(write_data(tmp_path / "data"))
    flags = ("--optimizer", optimizer, "--muon_beta2", "0.9", "--precision", precision)
    run = built("--data_dir", data, *flags)
    batches, model, optimizer = batches_of(run), model_of(run), optimizer_of(run)
    assert take_step(run, batches).updated  # the first step allocates the optimizer's state

    def tensors() -> list[torch.Tensor]:
        weights = [*model.parameters()]
        return [t.detach().clone() for t in (*weights, *(t for w in weights for t in optimizer.state[w].values()))]

    before = tensors()
    hook = model.h[0].mlp.c_fc.weight.register_hook(lambda gradient: gradient * math.nan)
    result = take_step(run, batches)
    hook.remove()
    assert (result.updated, result.bad, math.isnan(result.grad_norm)) == (False, precision == "fp32", True)
    assert all(map(torch.equal, before, tensors()))
    assert take_step(run, batches).updated
    batches.close()
    assert not any(map(torch.equal, before, tensors()))
