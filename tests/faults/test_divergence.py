"""NaN, infinity and loss spikes: every rank skips the same update and reports it; no checkpoint contains NaN."""

import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import folders, load, run_here, write_data
from ground import SCORE_FILES, acting_here, alter, assert_same_state, metrics, status_of, verified
from harness import run_to_end
from injected import bad_numbers, record_weights, signal_at, weights_of_steps

import train

FLAGS = ("--max_steps", "12", "--checkpoint_freq", "1", "--keep_checkpoints", "99", "--dropout", "0.1", *folders("run"))
nan_from_4 = partial(bad_numbers, range(4, 100), "nan loss", 0)


@pytest.fixture
def trained(workdir, capsys):
    """Return a function that trains in this process with faults, and returns exit status and output."""

    def trained(*flags: str, faults=()) -> tuple[int, str]:
        with acting_here(*faults):
            status = run_here(*FLAGS, *flags)
        said = capsys.readouterr()
        return status, said.out + said.err

    return trained


def assert_finite(folder: str) -> None:
    """Assert that all numbers in all checkpoints and records of scores are finite."""
    for path in Path(folder).glob("*.pt"):
        saved = load(path)
        moments = [tensor for state in saved["optimizer"].values() for tensor in state.values()]
        assert all(tensor.isfinite().all() for tensor in [*saved["model"].values(), *moments]), path
        numbers = (saved["loss"], *saved["scores"].values(), *saved["recent_losses"])
        assert all(number is None or math.isfinite(number) for number in numbers), path
    for path in (Path(folder, name) for name in {*SCORE_FILES, "metrics.jsonl"}):
        assert not (path.exists() and re.search("NaN|Infinity", path.read_text())), path


def assert_update_skipped(folder: str, first: int, last: int) -> None:
    """Assert that the state is the same after steps `first` and `last`, except for the position in the data."""
    before, after = (load(f"{folder}/rolling_step_{step:06d}.pt") for step in (first, last))
    assert_same_state(before, after | {key: before[key] for key in ("step", "rows_consumed")})
    assert after["step"] - before["step"] == last - first
    assert after["rows_consumed"] - before["rows_consumed"] == 4 * (last - first)


BAD = {2: "nan loss", 4: "inf loss", 6: "nan gradient", 9: "inf gradient"}


def test_all_ranks_skip_a_bad_step(workdir):
    faults = [record_weights, *(partial(bad_numbers, [step], kind, 1) for step, kind in BAD.items())]
    text = run_to_end(*FLAGS, "--eval_freq", "1", "--use_tensorboard", ranks=2, faults=faults)
    warnings = re.findall(r"^warning: step (\d+): loss \S+, gradient norm \S+; its update was skipped", text, re.M)
    assert [*map(int, warnings)] == [*BAD]
    assert text.count("its update was skipped") == len(BAD)
    assert_finite("run")
    hashes = weights_of_steps()
    assert all(hashes[step, 0] == hashes[step, 1] for step in range(12))
    assert len({hashes[step, 0] for step in range(12)}) == 12 - len(BAD)
    for step in BAD:
        assert_update_skipped("run", step, step + 1)
        assert hashes[step - 1, 0] == hashes[step, 0]
        assert None in (metrics("run", "loss")[step], metrics("run", "grad_norm")[step])  # JSON has no NaN


@pytest.mark.parametrize("flags", [
    pytest.param((), id="fp32"), pytest.param(("--max_lr", "1.5e-4"), id="max_lr"),
    pytest.param(("--precision", "bf16"), id="bf16", marks=pytest.mark.storm),
])  # fmt: skip
def test_the_commands_suggested_after_bad_steps_work(trained, flags):
    status, text = trained(*flags, "--max_bad_steps", "3", faults=[nan_from_4])
    assert status == 1
    advice = r"^warning: stopping after 3 .* of step 4, .* Resume with (--resume latest .*?), or skip these"
    ((advice),) = re.findall(advice, text, re.M)
    assert ("--precision fp32" in advice) == ("bf16" in flags)
    state = status_of("run")
    assert (state["status"], state["step"], load("run/latest.pt")["step"]) == ("failed", 4, 4)
    assert "3 consecutive steps" in state["reason"]
    assert_finite("run")
    for number, suggestion in enumerate(advice.removeprefix("--resume latest ").split(" or ")):
        shutil.copytree("run", f"run{number}")
        assert train.main(["--resume", "latest", *suggestion.split(), *folders(f"run{number}")]) == 0


def test_the_weights_before_bad_steps_keep_their_scores(trained):
    """They are saved again under the same names."""
    assert trained("--eval_freq", "4", "--max_bad_steps", "3", faults=[nan_from_4])[0] == 1
    scores = load("run/best_model.pt")["scores"]
    assert load("run/best_model.pt")["step"] == 4 and scores["val_loss"]
    for name in ("latest.pt", "rolling_step_000004.pt", "rolling_step_000006.pt"):
        assert load(f"run/{name}")["scores"] == scores, name


def test_bad_steps_are_counted_across_resumes(trained):
    assert trained(faults=[nan_from_4, partial(signal_at, 7)])[0] == 0
    status, text = trained("--resume", faults=[nan_from_4])
    found = "stopping after 5 consecutive steps with a non-finite loss or gradient, with the weights of step 4"
    assert status == 1 and found in text
    assert text.count("its update was skipped") == 2


@pytest.mark.parametrize("changed", [("--total_batch_size", "128"), ("--data_dir", "other")], ids=lambda row: row[0])
def test_bad_steps_with_other_rows_are_not_counted(trained, changed):
    """A run that has diverged goes back over its bad steps, all with the rows of today's."""
    write_data(Path("other"), seed=1)
    assert trained(faults=[nan_from_4, partial(signal_at, 7)])[0] == 0
    before = load("run/latest.pt")
    status, text = trained("--resume", "--allow_changes", *changed, faults=[nan_from_4])
    assert status == 1 and text.count("its update was skipped") == 5
    after = verified("run/latest.pt")
    assert before["step"] == after["step"] == 7
    assert before["rows_consumed"] == after["rows_consumed"]
    assert (before["bad_steps"], after["bad_steps"]) == (3, 0)


@pytest.mark.parametrize(("limit", "steps"), [("3", [2, 3, 5, 6, 8, 9]), ("0", range(12))])
def test_bad_steps_within_the_limit_do_not_stop_the_run(trained, limit, steps):
    """Only consecutive bad steps count, and --max_bad_steps 0 permits any number."""
    status, text = trained("--max_bad_steps", limit, faults=[partial(bad_numbers, steps, "nan loss", 0)])
    assert status == 0 and "finished after 12 steps" in text
    assert text.count("its update was skipped") == len(steps)
    assert_finite("run")


def test_a_nan_validation_loss_is_never_the_best(trained):
    assert trained("--eval_freq", "4", faults=[partial(bad_numbers, ["validation"], "nan loss", 0)])[0] == 0
    assert load("run/latest.pt")["scores"]["val_loss"] is None
    assert not Path("run/best_model.pt").exists()
    assert_finite("run")


@pytest.mark.parametrize("skip", ["off", "on"])
def test_a_loss_spike_is_reported_and_optionally_skipped(trained, skip):
    """The losses before it are those of the checkpoint."""
    trained("--max_steps", "4")
    alter("run/latest.pt", recent_losses=[5.5, 5.6] * 64)
    _, text = trained("--resume", "--skip_spikes", skip, faults=[partial(bad_numbers, [6], "large loss", 0)])
    (warning,) = re.findall(r"^warning: step 6: loss \S+ is \S+ standard deviations above the mean .*", text, re.M)
    assert ("; its update was skipped" in warning) == (skip == "on")
    assert {step for step, score in metrics("run", "loss_z").items() if score > 6} == {6}
    before, after = (load(f"run/rolling_step_00000{step}.pt")["model"]["wte.weight"] for step in (6, 7))
    assert torch.equal(before, after) == (skip == "on")


def test_fp16_overflow_lowers_the_loss_scale_and_is_not_a_bad_step(trained):
    flags = ("--precision", "fp16", "--max_steps")
    assert trained(*flags, "4")[0] == 0
    saved = load("run/latest.pt")
    alter("run/latest.pt", scaler=saved["scaler"] | {"scale": 2.0**100})
    status, text = trained(*flags, "9", "--resume", "--max_bad_steps", "2")
    assert status == 0 and "finished after 9 steps" in text
    assert text.count("too large for fp16: the loss scale is lowered") == 5
    skipped = load("run/latest.pt")
    assert skipped["scaler"]["scale"] == 2.0**95
    assert all(torch.equal(tensor, skipped["model"][name]) for name, tensor in saved["model"].items())


def test_weights_that_an_update_makes_infinite_are_not_saved(trained):
    """The gradient is finite, so that no check of the step sees it, but the learning rate overflows."""
    trained("--max_steps", "4")
    status, text = trained("--resume", "latest", "--max_steps", "8", "--allow_changes", "--max_lr", "1e39")
    assert status == 1 and "the last save failed) after" in text
    assert re.search(r"step \d was not saved: \S+\.weight .*\bNaN\b", text)
    assert_finite("run")
    assert load("run/latest.pt")["step"] == 4
