"""The judgement of a step: which updates are skipped, what warns, and the advice after a divergence."""

import math
from random import Random
from statistics import fmean, pstdev

import pytest
import torch
from conftest import write_data
from ground import batches_of, built, model_of, optimizer_of, take_step
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.config import TrainConfig
from steadygpt.run.step import SPIKE_WINDOW, Diverged, StepResult, judge


def judged(loss: float, recent_losses: list[float], loss_scale: float | None = None, **config) -> StepResult:
    """Judge a step with this loss; with a loss scale below 2**16, its gradient norm is infinite."""
    grad_norm = math.inf if loss_scale and loss_scale < 2**16 else 1.0
    numbers = {"loss": loss, "grad_norm": grad_norm}
    return judge(TrainConfig(**config), recent_losses, step=0, lr=1e-3, loss_scale=loss_scale, numbers=numbers)


@settings(max_examples=25)
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
    command = "python inspect_data.py --checkpoint_dir 'my run' --step 0"
    assert spike.warning("my run").endswith(f"; its update was skipped; to see its rows: {command}")
    assert judged(math.nan, steady).warning("my run").endswith("; its update was skipped")
    assert judged(2.0, steady).warning("my run") == ""


@pytest.mark.parametrize(("config", "advice"), [
    (TrainConfig(max_lr=1e-3, min_lr=1e-4, precision="fp32"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0001, or skip"),
    (TrainConfig(max_lr=1e-3, min_lr=8e-4, precision="bf16"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0005 or --precision fp32, or skip"),
])  # fmt: skip
def test_the_advice_after_a_divergence_halves_the_learning_rate(config, advice):
    assert advice in Diverged(3, step=4).advice(config)


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
