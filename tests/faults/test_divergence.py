"""NaN, infinity and spikes: every rank skips the same update, says so, and no bad number gets into a checkpoint."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import assert_same_state, load, metrics
from harness import Life, assert_continued, folders, whole_life
from injected import bad_numbers, hash_weights, stop_after, weights_of_steps

FLAGS = ("--max_steps", "12", "--checkpoint_freq", "1", "--keep_checkpoints", "99", "--dropout", "0.1")


def assert_finite(folder: str) -> None:
    """No checkpoint of the folder holds a number that is none."""
    for path in Path(folder, "ckpt").glob("*.pt"):
        saved = load(path)
        moments = [tensor for state in saved["optimizer"].get("state", {}).values() for tensor in state.values()]
        assert all(tensor.isfinite().all() for tensor in [*saved["model"].values(), *moments]), path
        numbers = (saved["loss"], saved["val_loss"], saved["best_val_loss"], *saved["recent_losses"])
        assert all(number is None or math.isfinite(number) for number in numbers), path


def assert_nothing_learned(folder: str, first: int, last: int) -> None:
    before, after = (load(f"{folder}/ckpt/rolling_step_{step:06d}.pt") for step in (first, last))
    assert_same_state(before, after | {key: before[key] for key in ("step", "rows_consumed")})
    assert after["step"] - before["step"] == last - first  # the data went on


@pytest.mark.parametrize("kind", ["nan loss", "inf loss", "nan gradient", "inf gradient"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_bad_step_is_skipped_by_all_ranks(workdir, kind, ranks):
    faults = [hash_weights, partial(bad_numbers, [5], kind, ranks - 1)]
    text = whole_life(*FLAGS, *folders("run"), "--eval_freq", "1", "--use_tensorboard", ranks=ranks, faults=faults)
    said = re.findall(r"^warning: step 5: loss \S+, gradient norm \S+; its update was skipped", text, re.M)
    assert len(said) == 1 and text.count("its update was skipped") == 1
    assert_nothing_learned("run", 5, 6)
    assert_finite("run")
    hashes = weights_of_steps()
    assert all(hashes[step, 0] == hashes[step, ranks - 1] for step in range(12))
    assert hashes[4, 0] == hashes[5, 0] and len({hashes[step, 0] for step in range(12)}) == 11
    loss, grad_norm = metrics("run/logs", "loss")[5], metrics("run/logs", "grad_norm")[5]
    assert [value for value in (loss, grad_norm) if value is None]  # NaN is no JSON


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_max_bad_steps_it_stops_where_the_last_good_step_was(workdir, ranks):
    assert Life(*FLAGS, *folders("whole"), ranks=ranks).wait() == [0] * ranks
    fault = partial(bad_numbers, range(4, 100), "nan gradient", ranks - 1)
    life = Life(*FLAGS, *folders("run"), "--max_bad_steps", "3", "--checkpoint_freq", "5", ranks=ranks, faults=[fault])
    assert life.wait() == [1] * ranks
    told = (
        r"^warning: stopping after 3 bad steps, at step 4 before them. Go on with (--resume latest .*?), or past these"
    )
    assert re.search(told, life.text(), re.M)
    status = json.loads(Path("run/ckpt/status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", 4) and "3 steps running" in status["reason"]
    assert load("run/ckpt/latest.pt")["step"] == 4
    assert_finite("run")
    # Whatever it was, it is gone: the same steps are made again, and nothing was lost.
    assert Life(*FLAGS, *folders("run"), "--resume", "latest", ranks=ranks).wait() == [0] * ranks
    assert_continued("run")


@pytest.mark.parametrize("flags", [(), ("--max_lr", "1.5e-4"), ("--precision", "bf16")])
def test_the_advice_at_the_end_can_be_followed(workdir, flags):
    fault = partial(bad_numbers, range(4, 100), "nan loss", 0)
    life = Life(*FLAGS, *flags, *folders("run"), faults=[fault])
    assert life.wait() == [1]
    (advice,) = re.findall(r"Go on with (--resume latest .*?), or past these", life.text())
    assert ("--precision fp32" in advice) == ("bf16" in flags)
    for number, words in enumerate(advice.removeprefix("--resume latest ").split(" or ")):
        shutil.copytree("run", f"run{number}")
        whole_life("--resume", "latest", *words.split(), *folders(f"run{number}"), tiny=())


def test_bad_steps_are_counted_across_starts(workdir):
    fault = partial(bad_numbers, range(4, 100), "nan loss", 0)
    assert Life(*FLAGS, *folders("run"), faults=[fault, partial(stop_after, 7)]).wait() == [0]
    life = Life(*FLAGS, *folders("run"), "--resume", faults=[fault])
    assert life.wait() == [1] and "stopping after 5 bad steps, at step 4 before them" in life.text()
    assert life.text().count("its update was skipped") == 2


def test_bad_steps_that_do_not_follow_each_other_do_not_stop_it(workdir):
    fault = partial(bad_numbers, [2, 3, 5, 6, 8, 9], "nan loss", 0)
    text = whole_life(*FLAGS, *folders("run"), "--max_bad_steps", "3", faults=[fault])
    assert text.count("its update was skipped") == 6 and "finished after 12 steps" in text


def test_max_bad_steps_0_never_stops(workdir):
    fault = partial(bad_numbers, range(100), "nan loss", 0)
    text = whole_life(*FLAGS, *folders("run"), "--max_bad_steps", "0", faults=[fault])
    assert text.count("its update was skipped") == 12
    assert_finite("run")


def test_a_bad_validation_loss_is_never_the_best(workdir):
    fault = partial(bad_numbers, ["validation"], "nan loss", 0)
    assert Life(*FLAGS, *folders("run"), "--eval_freq", "4", faults=[fault]).wait() == [0]
    assert load("run/ckpt/latest.pt")["best_val_loss"] is None and not Path("run/ckpt/best_model.pt").exists()
    assert_finite("run")


# ---------------------------------------------------------------------------------------------------------------------
# spikes

LONG = ("--max_steps", "140", "--checkpoint_freq", "10", "--keep_checkpoints", "99", "--max_lr", "1e-3")


@pytest.mark.parametrize("skip", [pytest.param("off", marks=pytest.mark.storm), "on"])
def test_a_spike_is_told_and_skipped_if_asked_for(workdir, skip):
    flags, fault = (*LONG, "--skip_spikes", skip), partial(bad_numbers, [135], "large loss", 0)
    text = whole_life(*flags, *folders("whole"), "--checkpoint_freq", "1", faults=[hash_weights, fault])
    said = re.findall(r"^warning: step 135: loss \S+ is \S+ standard deviations above the mean .*", text, re.M)
    assert len(said) == 1 and said[0].endswith("its update was skipped") == (skip == "on")
    scores = metrics("whole/logs", "loss_z")
    assert list(scores) == list(range(128, 140)) and scores[135] > 6
    assert all(abs(score) < 6 for step, score in scores.items() if step != 135)
    hashes = weights_of_steps()
    assert (hashes[134, 0] == hashes[135, 0]) == (skip == "on")
    # What a spike is measured against survives a resume.
    life = Life(*flags, *folders("run"), faults=[fault])
    life.wait_for(r"^saved step 130 as")
    life.kill()
    whole_life(*flags, *folders("run"), "--resume", "latest", faults=[fault])
    assert_continued("run", "loss", "loss_z")


def test_spike_z_0_looks_for_none(workdir):
    fault = partial(bad_numbers, [135], "large loss", 0)
    assert "standard deviations" not in whole_life(*LONG, *folders("run"), "--spike_z", "0", faults=[fault])


def test_a_gradient_too_large_for_fp16_is_the_loss_scalers_business(workdir):
    """It is skipped and told, but no bad step: the scale is lowered until it fits."""
    flags = (*FLAGS, "--precision", "fp16", *folders("run"))
    assert Life(*flags).wait() == [0]
    saved = load("run/ckpt/latest.pt")
    torch.save(saved | {"scaler": saved["scaler"] | {"scale": 2.0**100}}, "run/ckpt/latest.pt")
    text = whole_life(*flags, "--resume", "--max_steps", "30", "--max_bad_steps", "2")
    assert text.count("gradients too large for fp16, loss scale now ") == 18
    assert "finished after 30 steps" in text
