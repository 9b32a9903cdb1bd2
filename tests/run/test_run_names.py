"""Names of runs: no two runs share a TensorBoard folder, and a resumed run finds its own."""

import re
from pathlib import Path

import pytest
import torch
from conftest import load, metrics, options_in, scalars
from short_runs import folders, run_here

import train
from steadygpt.log.metrics import read_status
from steadygpt.run.identity import read_run

STAMP = r"-\d{8}-\d{6}"
TB = ("--use_tensorboard",)
ROLLING = "one/rolling_step_000004.pt"


def steps_of(name: str) -> list[int]:
    """Return the steps of a run that TensorBoard shows."""
    return [*scalars(f"runs/{name}")["train/loss"]]


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def names_in(folder: str) -> set[str]:
    """Return the name of the run in its run.json, its status and its log."""
    log = Path(f"logs-{folder}/log.txt").read_text().splitlines()[0]
    return {read_run(Path(folder)).name, read_status(Path(folder))["run_name"], log.split()[1]}


@pytest.fixture
def first(workdir, capsys):
    """The run "a" of eight steps in "one", with a checkpoint of step 4; its output is read."""
    run_here(*TB, "--run_name", "a", "--checkpoint_freq", "4", "--eval_freq", "4", *folders("one"))
    capsys.readouterr()


def content(folder: str) -> dict[str, tuple[bytes, int]]:
    there = filter(Path.is_file, Path(folder).iterdir())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in there}


@pytest.mark.parametrize(("flags", "name", "steps", "line"), [
    pytest.param(("--run_name", "a"), f"a{STAMP}", [*range(8)],
        "name         {}, with its logs in logs-two, because runs/a or logs-two belongs to another run",
        id="a new run of the same name"),
    pytest.param(("--resume", ROLLING), "a-from-4", [4, 5, 6, 7],
        "fork         of the run a in one; this is the run {}, with its logs in logs-two, and with no mirror",
        id="a fork"),
    pytest.param(("--resume", ROLLING, "--run_name", "a"), "a-from-4", [4, 5, 6, 7], "", id="with its run's name"),
    pytest.param(("--resume", ROLLING, "--run_name", "b"), "b", [4, 5, 6, 7], "", id="with a name of its own"),
])  # fmt: skip
def test_a_run_in_another_folder_has_a_name_of_its_own_and_hides_no_point(first, capsys, flags, name, steps, line):
    before = content("one"), content("logs-one")
    assert run_here(*TB, *flags, *folders("two")) == 0
    _, new = runs()
    assert re.fullmatch(name, new)
    assert (steps_of("a"), steps_of(new)) == ([*range(8)], steps)
    assert names_in("two") == {new} and names_in("one") == {"a"}
    assert not line or line.format(new) in capsys.readouterr().out.splitlines()
    assert (content("one"), content("logs-one")) == before


@pytest.mark.parametrize(("flags", "steps"), [
    pytest.param(("--resume", "latest", "--max_steps", "10"), {"a": [*range(10)]}, id="resumed"),
    pytest.param(("--resume", ROLLING, "--max_steps", "6"), {"a": [*range(6)]}, id="back to an older checkpoint"),
    pytest.param(("--resume", "latest", "--run_name", "b", "--max_steps", "10"), {"a": [*range(8)], "b": [8, 9]},
        id="renamed"),
])  # fmt: skip
def test_a_run_in_the_same_folder_keeps_its_name_unless_it_is_given_another(first, flags, steps):
    run_here(*flags, *folders("one"))
    assert {name: steps_of(name) for name in runs()} == steps


@pytest.mark.parametrize("flags", [(), ("--run_name", "a")], ids=["without a name", "with that of the first start"])
def test_a_run_whose_name_got_a_time_stamp_finds_its_folder(workdir, flags):
    Path("runs/a").mkdir(parents=True)
    run_here(*TB, "--run_name", "a", "--max_steps", "3", *folders("one"))
    run_here("--resume", "latest", "--max_steps", "6", *flags, *folders("one"))
    _, new = runs()
    assert steps_of(new) == [*range(6)]
    assert names_in("one") == {new}
    assert "changed      run_name" not in Path("logs-one/log.txt").read_text()


def test_a_second_fork_of_the_name_gets_a_time_stamp(first):
    for folder in ("two", "three"):
        run_here("--resume", ROLLING, *folders(folder))
    assert re.fullmatch(f"a-from-4{STAMP}", runs()[-1])
    assert steps_of("a-from-4") == [4, 5, 6, 7]


def test_a_fork_without_a_folder_for_logs_leaves_those_of_its_run_alone(first):
    before = content("logs-one")
    run_here("--resume", ROLLING, "--checkpoint_dir", "two", "--max_steps", "6")
    run_here("--resume", "latest", "--checkpoint_dir", "two")
    assert content("logs-one").items() >= before.items()
    assert metrics("logs-one/a-from-4", "loss").keys() == {4, 5, 6, 7}


def test_a_fork_that_is_killed_before_its_first_save_keeps_its_name_and_its_options(first, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(train, "run_to_end", lambda run: 137)  # as if killed there
        run_here("--resume", ROLLING, "--spike_z", "7", *folders("two"))
    run_here("--resume", "latest", "--checkpoint_dir", "two")
    assert (steps_of("a"), steps_of("a-from-4")) == ([*range(8)], [4, 5, 6, 7])
    assert names_in("two") == {"a-from-4"}
    assert options_in("two/latest.pt").spike_z == 7


def test_a_fork_has_a_best_model_of_its_own(first):
    torch.save(load(ROLLING) | {"best_val_loss": 0.001}, ROLLING)
    run_here("--resume", ROLLING, "--eval_freq", "4", *folders("two"))
    assert load("two/best_model.pt")["step"] >= 4


def test_dry_run_says_the_name_and_reserves_nothing(workdir, capsys):
    Path("runs/a").mkdir(parents=True)
    run_here(*TB, "--run_name", "a", "--dry_run")
    assert re.search(f"^name         a{STAMP}, with its logs in logs, because", capsys.readouterr().out, re.MULTILINE)
    assert runs() == ["a"]
