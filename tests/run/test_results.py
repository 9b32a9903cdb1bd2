"""Which updates are skipped, decided on the device."""

import math
from random import Random
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch
from conftest import built, write_data
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.run.results import SPIKE_WINDOW, Diverged, Judge, StepResult, pending

CPU = torch.device("cpu")


def results(
    losses: list[float], recent: list[float] | None = None, scales: list[float] | None = None, bad_steps=0, **config
) -> list[StepResult]:
    """Judge consecutive steps with these losses, and loss scales of fp16 if given."""
    judge = Judge(TrainConfig(**config), CPU, recent or [], bad_steps)
    found = []
    for step, loss in enumerate(losses):
        scaler = SimpleNamespace(is_enabled=lambda: bool(scales), scale=lambda ones, step=step: ones * scales[step])
        grad_norm = torch.tensor(math.inf if scales and scales[step] < 2**16 else 1.0)
        skipped, fields = judge(torch.tensor(loss), grad_norm, scaler)
        found.append(pending(step, 0, 1e-3, fields)())
        assert found[-1].updated == (skipped.item() == 0)
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 10, width=32))
def test_loss_z_counts_standard_deviations_above_the_mean(seed, loss):
    random = Random(seed)
    recent = [random.uniform(1, 10) for _ in range(SPIKE_WINDOW)]
    expected = (loss - fmean(recent)) / pstdev(recent)
    assert results([loss], recent)[0].loss_z == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_spikes_are_found_once_enough_losses_are_known():
    steady = [2.0 + 0.1 * (i % 2) for i in range(SPIKE_WINDOW)]
    assert [r.spike for r in results([9.0], steady[1:])] == [False]
    assert [(r.spike, r.updated) for r in results([9.0], steady)] == [(True, True)]
    assert [(r.spike, r.updated) for r in results([9.0], steady, skip_spikes=True)] == [(True, False)]
    assert [r.spike for r in results([9.0], steady, spike_z=0.0)] == [False]
    # The losses of the run itself count as well: the last of these is the first with enough before it.
    found = results([*steady, 9.0])
    assert [math.isnan(r.loss_z) for r in found] == [True] * SPIKE_WINDOW + [False]


def test_the_warning_of_a_spike_names_the_command_that_shows_its_rows():
    steady = [2.0 + 0.1 * (i % 2) for i in range(SPIKE_WINDOW)]
    [spike] = results([9.0], steady, skip_spikes=True)
    command = "python look.py --checkpoint_dir 'my run' --step 0 --by loss"
    assert spike.warning("my run").endswith(f"; its update was skipped; to see its rows: {command}")
    [bad] = results([math.nan], steady)
    assert bad.warning("my run").endswith("; its update was skipped")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(0, 4), st.integers(0, 3))
def test_after_max_bad_steps_in_a_row_every_update_is_skipped(good, max_bad_steps, bad_steps):
    """The host may start another step before it reads that the last one was bad."""
    found = results([2.0 if ok else math.nan for ok in good], max_bad_steps=max_bad_steps, bad_steps=bad_steps)
    expected = []
    for ok in good:
        halted = 0 < max_bad_steps <= bad_steps
        expected.append(ok and not halted)
        bad_steps = bad_steps if halted else 0 if ok else bad_steps + 1
    assert [result.updated for result in found] == expected


@pytest.mark.parametrize(("config", "advice"), [
    (TrainConfig(max_lr=1e-3, min_lr=1e-4, precision="fp32"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0001, or skip"),
    (TrainConfig(max_lr=1e-3, min_lr=8e-4, precision="bf16"),
     "--resume latest --allow_changes --max_lr 0.0005 --min_lr 0.0005 or --precision fp32, or skip"),
])  # fmt: skip
def test_the_advice_after_a_divergence_halves_the_learning_rate(config, advice):
    assert advice in Diverged(3, step=4, row=16).advice(config)


def test_an_overflow_in_fp16_is_bad_when_no_lower_scale_is_left():
    found = results([2.0] * 4, scales=[2.0**16, 2.0**15, 1.0, 0.5])
    assert [(r.bad, r.updated) for r in found] == [(False, True), (False, False), (False, False), (True, False)]
    assert "fp16" in found[1].warning("run") and "fp16" not in found[3].warning("run")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_never_waits_for_the_device(precision, tmp_path, monkeypatch):
    """On CUDA, each of these calls waits until the GPU has finished everything before it."""
    data = str(write_data(tmp_path / "data"))
    run = built("--data_dir", data, "--skip_spikes", "--precision", precision, ranks=Ranks(CPU))
    batches = run.training_batches()
    train.train_step(run, batches)  # the optimizer's first step allocates its state
    weights = [parameter.clone() for parameter in run.model.parameters()]

    def waited(*args):
        raise AssertionError("the step waits for the device")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"):
            patched.setattr(torch.Tensor, name, waited)
        result = train.train_step(run, batches)
    batches.close()
    assert result().updated
    assert not any(torch.equal(old, new) for old, new in zip(weights, run.model.parameters(), strict=True))
