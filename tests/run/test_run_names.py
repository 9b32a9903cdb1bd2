"""Names of runs: no two runs share a TensorBoard folder, and a resumed run finds its own."""

import re
from pathlib import Path

import pytest
import torch
from conftest import load, metrics, options_in, run_here, scalars
from test_train import folders

import train
from steadygpt.log.metrics import read_status
from steadygpt.run.identity import read_run

STAMP = r"-\d{8}-\d{6}"
TB = ("--use_tensorboard",)


def steps_of(name: str) -> list[int]:
    """Return the steps of a run that TensorBoard shows."""
    return [*scalars(f"runs/{name}")["train/loss"]]


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def names_in(folder: str) -> set[str]:
    """Return the name of the run in its run.json, its status and its log."""
    log = Path(f"logs-{folder}/log.txt").read_text().splitlines()[0]
    return {read_run(Path(folder)).name, read_status(Path(folder))["run_name"], log.split()[1]}


def test_new_run_of_an_existing_name_gets_a_time_stamp_and_hides_no_point_of_the_older_run(workdir, capsys):
    run_here(*TB, "--run_name", "a", *folders("one"))
    capsys.readouterr()
    run_here(*TB, "--run_name", "a", "--max_steps", "3", *folders("two"))
    _, new = runs()
    assert re.fullmatch(f"a{STAMP}", new)
    assert (steps_of("a"), steps_of(new)) == ([*range(8)], [*range(3)])
    assert names_in("two") == {new}
    assert (
        f"name         {new}, with its logs in logs-two, because runs/a or logs-two belongs to another run"
        in capsys.readouterr().out.splitlines()
    )


@pytest.mark.parametrize(
    "flags", [(), ("--run_name", "a")], ids=["without the flag", "with the flag of the first start"]
)
def test_resumed_run_finds_its_folder(workdir, flags):
    Path("runs/a").mkdir(parents=True)
    run_here(*TB, "--run_name", "a", "--max_steps", "3", *folders("one"))
    run_here("--resume", "latest", "--max_steps", "6", *flags, *folders("one"))
    _, new = runs()
    assert steps_of(new) == [*range(6)]
    assert names_in("one") == {new}
    assert "changed      run_name" not in Path("logs-one/log.txt").read_text()


def test_run_that_is_renamed_on_resume_gets_a_folder_of_its_own(workdir):
    run_here(*TB, "--run_name", "a", "--max_steps", "3", *folders("one"))
    run_here("--resume", "latest", "--max_steps", "6", "--run_name", "b", *folders("one"))
    assert (steps_of("a"), steps_of("b")) == ([0, 1, 2], [3, 4, 5])


def test_fork_is_named_after_its_run_and_its_step(workdir, capsys):
    run_here(*TB, "--run_name", "a", "--checkpoint_freq", "4", *folders("one"))
    original = Path("one/rolling_step_000004.pt")
    before = original.read_bytes(), original.stat().st_mtime_ns, sorted(Path("one").iterdir())
    capsys.readouterr()
    run_here("--resume", str(original), *folders("two"))
    assert (steps_of("a"), steps_of("a-from-4")) == ([*range(8)], [4, 5, 6, 7])
    assert names_in("two") == {"a-from-4"}
    assert names_in("one") == {"a"}
    assert (
        "fork         of the run a in one; this is the run a-from-4, with its logs in logs-two, and with no mirror"
    ) in capsys.readouterr().out.splitlines()
    assert (original.read_bytes(), original.stat().st_mtime_ns, sorted(Path("one").iterdir())) == before
    run_here("--resume", str(original), "--run_name", "a", *folders("three"))  # with the flag of its run
    assert re.fullmatch(f"a-from-4{STAMP}", runs()[-1])  # the second fork from there
    assert steps_of("a-from-4") == [4, 5, 6, 7]
    run_here("--resume", "one/latest.pt", "--run_name", "b", "--max_steps", "12", *folders("four"))
    assert names_in("four") == {"b"}
    assert load("four/latest.pt")["step"] == 12


def test_fork_without_a_folder_for_logs_leaves_those_of_its_run_alone(workdir):
    run_here("--run_name", "a", "--checkpoint_freq", "4", *folders("one"))
    before = {path.name: path.read_bytes() for path in Path("logs-one").iterdir()}
    run_here("--resume", "one/rolling_step_000004.pt", "--checkpoint_dir", "two", "--max_steps", "6")
    run_here("--resume", "latest", "--checkpoint_dir", "two")
    assert {path.name: path.read_bytes() for path in Path("logs-one").iterdir() if path.is_file()} == before
    assert metrics("logs-one/a-from-4", "loss").keys() == {4, 5, 6, 7}


def test_fork_that_is_killed_before_its_first_save_keeps_its_name_and_its_options(workdir, monkeypatch):
    run_here(*TB, "--run_name", "a", "--checkpoint_freq", "4", *folders("one"))
    with monkeypatch.context() as patched:
        patched.setattr(train, "run_to_end", lambda run: 137)  # as if killed there
        run_here("--resume", "one/rolling_step_000004.pt", "--spike_z", "7", *folders("two"))
    run_here("--resume", "latest", "--checkpoint_dir", "two")
    assert (steps_of("a"), steps_of("a-from-4")) == ([*range(8)], [4, 5, 6, 7])
    assert names_in("two") == {"a-from-4"}
    assert options_in("two/latest.pt").spike_z == 7


def test_fork_has_a_best_model_of_its_own(workdir):
    run_here("--checkpoint_freq", "4", "--eval_freq", "4", *folders("one"))
    torch.save(load("one/rolling_step_000004.pt") | {"best_val_loss": 0.001}, "one/rolling_step_000004.pt")
    run_here("--resume", "one/rolling_step_000004.pt", "--eval_freq", "4", *folders("two"))
    assert load("two/best_model.pt")["step"] >= 4


def test_going_back_in_the_same_folder_keeps_the_name(workdir):
    run_here(*TB, "--run_name", "a", "--checkpoint_freq", "4", *folders("one"))
    run_here("--resume", "one/rolling_step_000004.pt", "--max_steps", "6")
    assert runs() == ["a"]
    assert steps_of("a") == [*range(6)]


def test_dry_run_says_the_name_and_reserves_nothing(workdir, capsys):
    Path("runs/a").mkdir(parents=True)
    run_here(*TB, "--run_name", "a", "--dry_run")
    assert re.search(f"^name         a{STAMP}, with its logs in logs, because", capsys.readouterr().out, re.MULTILINE)
    assert runs() == ["a"]
