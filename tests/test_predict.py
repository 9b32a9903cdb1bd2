"""predict.py: the extrapolated losses, the command that it prints, and the runs that it refuses."""

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import folders, run_here, write_data
from harness import continue_here

import predict
import train
from steadygpt.base.options import UserError

SHAPES = {"narrow": (8, 1), "wide": (16, 2), "larger": (32, 4)}  # width and heads
LARGER = ["--embd_size", "32", "--num_heads", "4"]


def train_width(name: str, *flags: str, width: str = "") -> None:
    """Train the tiny run of these tests with one of SHAPES, in a folder of its own."""
    embd_size, num_heads = SHAPES[width or name]
    shape = ["--embd_size", str(embd_size), "--num_heads", str(num_heads)]
    assert run_here("--eval_freq", "2", *shape, *folders(name), *flags) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Finished runs in narrow/ and wide/, and their data."""
    folder = tmp_path_factory.mktemp("trained")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        train_width("narrow")
        train_width("wide")
    return folder


@pytest.fixture
def narrower(trained, tmp_path, monkeypatch, capsys) -> Path:
    """Copies of the runs, in the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("narrow", "wide"):
        continue_here(Path(name))
    capsys.readouterr()
    return tmp_path


def test_a_power_of_size_is_continued_at_each_step_that_both_have_validated():
    narrow = {10: 8.0, 20: 4.0, 40: 2.0}
    wide = {10: 4.0, 30: 3.0, 40: 1.0}
    assert predict.extrapolate(narrow, wide, times=2.0) == [(10, 1.0), (40, 0.25)]


def test_a_wider_model_that_is_worse_is_not_extrapolated():
    assert predict.extrapolate({1: 5.0}, {1: 5.5}, times=2.0) == [(1, 5.5)]


def test_the_printed_command_trains_the_larger_run_inside_its_band(narrower, capsys):
    predict.main(["wide", "narrow", *LARGER])  # in any order
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss +(\d+\.\d+)", said)]
    narrow, wide, larger = losses
    assert larger == pytest.approx(wide * (wide / narrow) ** 1.2, abs=0.02)
    assert f"loss         {larger:.3f}, probably {0.85 * larger:.3f} to {1.15 * larger:.3f}\n" in said
    assert "32 wide, " in said and " times the FLOPs, 8 steps\n" in said
    assert [step for step, _ in json.loads(Path("prediction.json").read_text())["curve"]] == [2, 4, 6, 8]

    command = shlex.split(said.rpartition("next: ")[2])
    assert command[:2] == ["python", "train.py"] and command[-1] == "--expect=prediction.json"
    assert train.main([*command[2:], *folders("larger")]) == 0
    assert capsys.readouterr().out.count(" | expected ") == 4


def test_the_prediction_of_a_much_larger_model_has_a_caution(narrower, capsys):
    predict.main(["narrow", "wide", "--embd_size", "512", "--num_heads", "64", "--out", "predictions/large.json"])
    assert "caution      beyond 4 times the FLOPs, " in capsys.readouterr().out
    assert Path("predictions/large.json").exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["narrow"], "the following arguments are required: second_run; see --help"),
        (["narrow", "wide", "--embd_size", "32"], "expected the --embd_size and the --num_heads of the larger model"),
        (["narrow", "none", *LARGER], "none: no checkpoints; expected the folder of a finished run"),
        (["narrow", "wide", "--embd_size", "32", "--num_heads", "2"], "--num_heads 2: a head has 16 dimensions; "),
        (["narrow", "wide", *LARGER, "--out", "data"], "--out data: cannot be written (it is a folder)"),
        (["narrow", "wide", *LARGER, "--out", "data/manifest.json/x"], "--out data/manifest.json/x: cannot be "),
        (["narrow", "narrow", *LARGER], "the models are 8, 8 and 32 wide; expected two different ones, and "),
        (["narrow", "wide", "--embd_size", "16", "--num_heads", "2"], "the models are 8, 16 and 16 wide; "),
        (["narrow", "wide", "--embd_size", "33", "--num_heads", "2"], "--num_heads is 2; expected a divisor of "),
    ],
)
def test_refused_commands(narrower, argv, line):
    with pytest.raises(UserError) as refused:
        predict.main(argv)
    assert str(refused.value).startswith(line)
    assert not Path("prediction.json").exists()


def test_runs_that_differ_in_more_than_width_are_refused(narrower):
    write_data(Path("other"), seed=1)
    for flags, line in (
        (["--max_lr", "3e-3"], "(max_lr 0.001 -> 0.003)"),
        (["--max_steps", "6"], "(max_steps 8 -> 6)"),
        (["--num_layers", "3"], "(num_layers 2 -> 3)"),
        (["--data_dir", "other"], "(training data ["),
        (["--val", "other"], "(validation data ["),
    ):
        name = flags[0].strip("-")
        train_width(name, *flags, width="wide")
        with pytest.raises(UserError) as refused:
            predict.main(["narrow", name, *LARGER])
        assert str(refused.value).startswith(f"narrow and {name}: expected to differ in width alone {line}")


def test_an_unfinished_run_is_refused(narrower):
    train_width("stopped", "--max_hours", "1e-9", width="wide")
    with pytest.raises(UserError, match=r"stopped: the status of the run is stopped; expected finished\. Resume it"):
        predict.main(["narrow", "stopped", *LARGER])


@pytest.mark.parametrize("loss", [-1.0, 1e308])
def test_losses_that_cannot_be_are_refused(narrower, loss):
    path = Path("wide/evaluations.json")
    found = json.loads(path.read_text())
    for scores in next(iter(found.values())).values():
        scores["val_loss"] = loss
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"wide/evaluations\.json: val_loss of step \d: .*restore the file"):
        predict.main(["narrow", "wide", *LARGER])


def test_a_run_without_validations_is_refused(narrower):
    train_width("blind", "--eval_freq", "0", width="wide")
    with pytest.raises(
        UserError, match=r"evaluations\.json: no validation at step 8, the last one; train the run with --eval_freq"
    ):
        predict.main(["narrow", "blind", *LARGER])


def test_a_run_that_was_extended_is_refused_because_its_first_steps_had_other_learning_rates(narrower):
    train_width("wide", "--resume", "--max_steps", "10")
    with pytest.raises(UserError, match=r"wide: resumed with other options \(max_steps 8 -> 10\); expected the same"):
        predict.main(["narrow", "wide", *LARGER])


def test_the_weights_are_not_read_because_those_of_a_large_run_take_minutes(narrower, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    predict.main(["narrow", "wide", *LARGER])
    assert Path("prediction.json").exists()


def test_a_run_that_was_stopped_and_resumed_is_as_good_as_any(narrower):
    train_width("resumed", "--max_hours", "1e-9", width="wide")
    train_width("resumed", "--resume", "--max_hours", "0", width="wide")
    predict.main(["narrow", "resumed", *LARGER])
    assert Path("prediction.json").exists()
