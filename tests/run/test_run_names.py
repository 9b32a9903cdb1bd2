"""Names of runs: no two runs share a TensorBoard folder, and a resumed run finds its own."""

import re
from pathlib import Path

import pytest
import torch
from conftest import load, metrics, options_in, run_here, scalars
from stories import tell

import train
from steadygpt.log.metrics import read_status
from steadygpt.run.identity import read_run

STAMP = r"-\d{8}-\d{6}"
OLDER = "--resume one/rolling_step_000002.pt --max_steps 4"


def curves() -> dict[str, list[int]]:
    """Return name -> steps of each run that TensorBoard shows; a time stamp in a name is TIME."""
    folders = [path for path in Path("runs").iterdir() if any(path.iterdir())]
    return {re.sub(f"{STAMP}$", "-TIME", path.name): [*scalars(path)["train/loss"]] for path in folders}


def content(folder: str) -> dict[str, tuple[bytes, int]]:
    there = filter(Path.is_file, Path(folder).iterdir())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in there}


@pytest.fixture
def first(workdir, capsys):
    """The run "a" of four steps in "one", with a checkpoint of step 2; its output is read."""
    tell("start one --use_tensorboard --run_name a --max_steps 4 --checkpoint_freq 2 --eval_freq 2")
    capsys.readouterr()


FORK = "fork         of the run a in one; this is the run a-from-2, with its logs in logs-two, and with no mirror"
A, FROM_2 = {"a": [*range(4)]}, [2, 3]


STORIES: dict[str, tuple[str, dict[str, list[int]], str]] = {
    "a new run of the same name": (
        "start two --run_name a --use_tensorboard --max_steps 3", A | {"a-TIME": [0, 1, 2]},
        f"name         a{STAMP}, with its logs in logs-two, because runs/a or logs-two belongs to another run"),
    "a fork": (f"start two {OLDER}", A | {"a-from-2": FROM_2}, FORK),
    "a fork with the name of its run": (f"start two {OLDER} --run_name a", A | {"a-from-2": FROM_2}, FORK),
    "a fork with a name of its own": (f"start two {OLDER} --run_name b", A | {"b": FROM_2}, ""),
    "a second fork": (f"start two {OLDER}\nstart three {OLDER}", A | {"a-from-2": FROM_2, "a-from-2-TIME": FROM_2}, ""),
    "a resume": ("resume one --max_steps 6", {"a": [*range(6)]}, ""),
    "a resume by the first command": ("resume one --max_steps 6 --run_name a", {"a": [*range(6)]}, ""),
    "a renamed run": ("resume one --max_steps 6 --run_name b", A | {"b": [4, 5]}, ""),
    "a return to an older checkpoint": (f"train {OLDER} --max_steps 3", {"a": [*range(3)]}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("story", "found", "says"), STORIES.values(), ids=STORIES)
def test_each_run_has_a_name_of_its_own_and_hides_no_point_of_another(first, capsys, story, found, says):
    before = content("one"), content("logs-one")
    tell(story)
    assert curves() == found
    assert re.search(f"^{says}$", capsys.readouterr().out, re.MULTILINE)
    folder = "two" if "two" in story else "one"
    assert folder == "one" or (content("one"), content("logs-one")) == before
    in_log = Path(f"logs-{folder}/log.txt").read_text().splitlines()
    names = {read_run(Path(folder)).name, read_status(Path(folder))["run_name"]}
    assert names <= {path.name for path in Path("runs").iterdir()} and len(names) == 1
    assert f"run          {names.pop()}" in in_log and "changed      run_name" not in "".join(in_log)


@pytest.mark.parametrize("flags", ["", "--run_name a"], ids=["without a name", "with that of the first start"])
def test_a_run_whose_name_got_a_time_stamp_finds_its_folder(workdir, flags):
    tell(f"""
        mkdir -p runs/a
        start one --use_tensorboard --run_name a --max_steps 3
        resume one --max_steps 6 {flags}
    """)
    assert curves() == {"a-TIME": [*range(6)]}


def test_a_fork_without_a_folder_for_logs_leaves_those_of_its_run_alone(first):
    before = content("logs-one")
    tell(f"train {OLDER} --checkpoint_dir two --max_steps 3\nresume two --max_steps 4")
    assert content("logs-one") == before
    assert metrics("logs-one/a-from-2", "loss").keys() == {2, 3}


def test_a_fork_that_is_killed_before_its_first_save_keeps_its_name_and_its_options(first, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(train, "run_to_end", lambda run: 0)  # as if killed there
        tell(f"start two {OLDER} --spike_z 7")
    tell("resume two --max_steps 4")
    assert curves() == A | {"a-from-2": FROM_2}
    assert options_in("two/latest.pt").spike_z == 7


def test_a_fork_has_a_best_model_of_its_own(first):
    path = Path("one/rolling_step_000002.pt")
    torch.save(load(path) | {"best_val_loss": 0.001}, path)
    tell(f"start two {OLDER} --eval_freq 2")
    assert load("two/best_model.pt")["step"] >= 2


def test_dry_run_says_the_name_and_reserves_nothing(workdir, capsys):
    Path("runs/a").mkdir(parents=True)
    run_here("--use_tensorboard", "--run_name", "a", "--dry_run")
    assert re.search(f"^name         a{STAMP}, with its logs in logs, because", capsys.readouterr().out, re.MULTILINE)
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
