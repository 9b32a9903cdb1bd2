"""NaN, infinity and loss spikes: every rank skips the same update and reports it; no checkpoint contains NaN."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import assert_same_state, load, metrics
from harness import Run, assert_equals_reference, folders, run_to_end
from injected import bad_numbers, record_weights, signal_at, weights_of_steps

FLAGS = ("--max_steps", "12", "--checkpoint_freq", "1", "--keep_checkpoints", "99", "--dropout", "0.1")


def assert_finite(folder: str) -> None:
    """Assert that all numbers in all checkpoints and in evaluations.json are finite."""
    for path in Path(folder, "ckpt").glob("*.pt"):
        saved = load(path)
        moments = [tensor for state in saved["optimizer"].values() for tensor in state.values()]
        assert all(tensor.isfinite().all() for tensor in [*saved["model"].values(), *moments]), path
        numbers = (saved["loss"], saved["val_loss"], saved["best_val_loss"], *saved["recent_losses"])
        assert all(number is None or math.isfinite(number) for number in numbers), path
    for path in Path(folder, "ckpt").glob("evaluations.json"):
        assert not re.search("NaN|Infinity", path.read_text()), path


def assert_update_skipped(folder: str, first: int, last: int) -> None:
    """Assert that the state is the same after steps `first` and `last`, except for the position in the data.

    best_val_loss is not compared: the checkpoint of `first` is written before the evaluation of that step.
    """
    before, after = (load(f"{folder}/ckpt/rolling_step_{step:06d}.pt") for step in (first, last))
    assert_same_state(before, after | {key: before[key] for key in ("step", "rows_consumed", "best_val_loss")})
    assert after["step"] - before["step"] == last - first
    assert after["rows_consumed"] - before["rows_consumed"] == 4 * (last - first)


BAD = {2: "nan loss", 4: "inf loss", 6: "nan gradient", 9: "inf gradient"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_skip_a_bad_step(workdir, ranks):
    faults = [record_weights, *(partial(bad_numbers, [step], kind, ranks - 1) for step, kind in BAD.items())]
    text = run_to_end(*FLAGS, *folders("run"), "--eval_freq", "1", "--use_tensorboard", ranks=ranks, faults=faults)
    warnings = re.findall(r"^warning: step (\d+): loss \S+, gradient norm \S+; its update was skipped", text, re.M)
    assert [*map(int, warnings)] == [*BAD]
    assert text.count("its update was skipped") == len(BAD)
    assert_finite("run")
    hashes = weights_of_steps()
    assert all(hashes[step, 0] == hashes[step, ranks - 1] for step in range(12))
    assert len({hashes[step, 0] for step in range(12)}) == 12 - len(BAD)
    for step in BAD:
        assert_update_skipped("run", step, step + 1)
        assert hashes[step - 1, 0] == hashes[step, 0]
        assert None in (metrics("run/logs", "loss")[step], metrics("run/logs", "grad_norm")[step])  # JSON has no NaN


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_bad_steps_stops_at_the_last_good_step(workdir, ranks):
    assert Run(*FLAGS, *folders("reference"), ranks=ranks).wait() == [0] * ranks
    fault = partial(bad_numbers, range(4, 100), "nan gradient", ranks - 1)
    run = Run(*FLAGS, *folders("run"), "--max_bad_steps", "3", "--checkpoint_freq", "5", ranks=ranks, faults=[fault])
    assert run.wait() == [1] * ranks
    warning = r"^warning: stopping after 3 .* of step 4, .* Resume with (--resume latest .*?), or skip these"
    assert re.search(warning, run.text(), re.M)
    status = json.loads(Path("run/ckpt/status.json").read_text())
    assert status["status"] == "failed"
    assert status["step"] == 4
    assert "3 consecutive steps" in status["reason"]
    assert load("run/ckpt/latest.pt")["step"] == 4
    assert_finite("run")
    # Without the fault, a resume repeats the steps and equals the uninterrupted run.
    assert Run(*FLAGS, *folders("run"), "--resume", "latest", ranks=ranks).wait() == [0] * ranks
    assert_equals_reference("run")


@pytest.mark.parametrize("flags", [(), ("--max_lr", "1.5e-4"), ("--precision", "bf16")], ids=["fp32", "max_lr", "bf16"])
def test_the_commands_suggested_after_bad_steps_work(workdir, flags):
    fault = partial(bad_numbers, range(4, 100), "nan loss", 0)
    run = Run(*FLAGS, *flags, *folders("run"), faults=[fault])
    assert run.wait() == [1]
    (advice,) = re.findall(r"Resume with (--resume latest .*?), or skip these", run.text())
    assert ("--precision fp32" in advice) == ("bf16" in flags)
    for number, suggestion in enumerate(advice.removeprefix("--resume latest ").split(" or ")):
        shutil.copytree("run", f"run{number}")
        run_to_end("--resume", "latest", *suggestion.split(), *folders(f"run{number}"), tiny=())


def test_bad_steps_are_counted_across_resumes(workdir):
    fault = partial(bad_numbers, range(4, 100), "nan loss", 0)
    assert Run(*FLAGS, *folders("run"), faults=[fault, partial(signal_at, 7)]).wait() == [0]
    run = Run(*FLAGS, *folders("run"), "--resume", faults=[fault])
    assert run.wait() == [1]
    assert (
        "stopping after 5 consecutive steps with a non-finite loss or gradient, with the weights of step 4"
        in run.text()
    )
    assert run.text().count("its update was skipped") == 2


@pytest.mark.parametrize(("limit", "steps"), [("3", [2, 3, 5, 6, 8, 9]), ("0", range(12))])
def test_bad_steps_within_the_limit_do_not_stop_the_run(workdir, limit, steps):
    """Only consecutive bad steps count, and --max_bad_steps 0 permits any number."""
    fault = partial(bad_numbers, steps, "nan loss", 0)
    text = run_to_end(*FLAGS, *folders("run"), "--max_bad_steps", limit, faults=[fault])
    assert text.count("its update was skipped") == len(steps)
    assert "finished after 12 steps" in text
    assert_finite("run")


def test_a_nan_validation_loss_is_never_the_best(workdir):
    fault = partial(bad_numbers, ["validation"], "nan loss", 0)
    assert Run(*FLAGS, *folders("run"), "--eval_freq", "4", faults=[fault]).wait() == [0]
    assert load("run/ckpt/latest.pt")["best_val_loss"] is None
    assert not Path("run/ckpt/best_model.pt").exists()
    assert_finite("run")


# ---------------------------------------------------------------------------------------------------------------------
# loss spikes

LONG = ("--max_steps", "140", "--checkpoint_freq", "10", "--keep_checkpoints", "99", "--max_lr", "1e-3")


@pytest.mark.parametrize("skip", [pytest.param("off", marks=pytest.mark.storm), "on"])
def test_a_loss_spike_is_reported_and_optionally_skipped(workdir, skip):
    flags, fault = (*LONG, "--skip_spikes", skip), partial(bad_numbers, [135], "large loss", 0)
    text = run_to_end(*flags, *folders("reference"), faults=[record_weights, fault])
    (warning,) = re.findall(r"^warning: step 135: loss \S+ is \S+ standard deviations above the mean .*", text, re.M)
    assert ("; its update was skipped" in warning) == (skip == "on")
    scores = metrics("reference/logs", "loss_z")
    assert list(scores) == list(range(128, 140))
    assert scores[135] > 6
    assert all(abs(score) < 6 for step, score in scores.items() if step != 135)
    hashes = weights_of_steps()
    assert (hashes[134, 0] == hashes[135, 0]) == (skip == "on")
    # The recent losses that define a spike survive a resume.
    run = Run(*flags, *folders("run"), faults=[fault])
    run.wait_for(r"^saved step 130 as")
    run.kill()
    run_to_end(*flags, *folders("run"), "--resume", "latest", faults=[fault])
    assert_equals_reference("run", "loss", "loss_z")


def test_fp16_overflow_lowers_the_loss_scale_and_is_not_a_bad_step(workdir):
    flags = (*FLAGS, "--precision", "fp16", *folders("run"))
    assert Run(*flags).wait() == [0]
    saved = load("run/ckpt/latest.pt")
    torch.save(saved | {"scaler": saved["scaler"] | {"scale": 2.0**100}}, "run/ckpt/latest.pt")
    text = run_to_end(*flags, "--resume", "--max_steps", "30", "--max_bad_steps", "2")
    assert text.count("too large for fp16: the loss scale is lowered") == 18
    assert "finished after 30 steps" in text
    skipped = load("run/ckpt/latest.pt")
    assert skipped["scaler"]["scale"] == 2.0**82
    assert all(torch.equal(tensor, skipped["model"][name]) for name, tensor in saved["model"].items())


def test_weights_that_an_update_makes_infinite_are_not_saved(workdir):
    """The gradient is finite, so that no check of the step sees it, but the learning rate overflows."""
    run_to_end(*FLAGS, *folders("run"), "--max_steps", "4")
    run = Run(*FLAGS, *folders("run"), "--resume", "latest", "--max_steps", "8", "--allow_changes", "--max_lr", "1e39")
    assert run.wait() == [1]
    text = run.text()
    assert re.search(r"step \d was not saved: \S+ has a NaN or an infinite number; older saves are intact", text)
    assert "failed (the last save failed)" in text or "the last save failed) after" in text
    assert_finite("run")
    assert load("run/ckpt/latest.pt")["step"] == 4
