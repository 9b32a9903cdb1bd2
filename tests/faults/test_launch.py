"""Launches that end before their first record: the run is as if they had not been, or as they decided."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import folders, load, run_here, scalars, write_data
from ground import around_model, around_write, assert_same_state, evaluations, metrics
from harness import Run, continue_here
from injected import kill_in_start, signal_at

from steadygpt.base.options import UserError

FLAGS = (
    "--max_steps 12 --checkpoint_freq 2 --eval_freq 4 --eval_tokens 64 --max_lr 1e-2 --dropout 0.1 --use_tensorboard"
).split()

# What a launch changes: its flags.
CHANGES = {
    "nothing": "--resume latest",
    "going back": "--resume run/rolling_step_000004.pt",
    "longer": "--resume latest --max_steps 16",
    "other data": "--resume latest --mix data,other --allow_changes",
    "other validation rows": "--resume latest --val other",
    "going back, longer": "--resume run/rolling_step_000004.pt --max_steps 14",
}


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory) -> Path:
    """A folder with data/, other/ and a run that was stopped after step 9 of 12, in run/."""
    folder = tmp_path_factory.mktemp("stopped")
    write_data(folder / "data")
    write_data(folder / "other", seed=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        stopped = Run(*FLAGS, *folders("run"), faults=[partial(signal_at, 9)])
        assert stopped.wait() == [0], stopped.text()
    return folder


@pytest.fixture
def stopped(stopped_run, folder) -> Path:
    """A copy of the stopped run in the working directory."""
    shutil.copytree(stopped_run, folder, dirs_exist_ok=True)
    continue_here(folder / "run")
    return folder


def finish(name: str) -> None:
    """Resume the run in a folder without changing it, until it is finished."""
    run = Run("--resume", "latest", *folders(name), tiny=())
    assert run.wait() == [0], run.text()


def result_of(name: str) -> dict:
    """Return what a finished run has: options, data, scores of its files, curves."""
    content = load(f"{name}/latest.pt")
    files = {}
    for path in Path(name).glob("*.pt"):
        checkpoint = load(path)
        files[path.name] = (checkpoint["step"], checkpoint["loss"], checkpoint["scores"])
    return {
        "options": content["options"],
        "phase": content["data"]["phase"],
        "files": files,
        "losses": metrics(name, "loss"),
        "evaluations": evaluations(name),
        "TensorBoard": scalars(f"{name}/tensorboard")["train/loss"],
    }


ENDS: dict[tuple[Path, str], dict] = {}  # what a run has that was stopped, changed and not killed


def end_after(change: str, stopped_run: Path) -> dict:
    """Return what the stopped run has at its end, if a launch with this change is not disturbed."""
    if (stopped_run, change) not in ENDS:
        shutil.copytree("run", "undisturbed")
        shutil.move("run", "killed")
        shutil.move("undisturbed", "run")
        continue_here(Path("run"))
        changed = Run(*CHANGES[change].split(), *folders("run"), tiny=())
        assert changed.wait() == [0], changed.text()
        ENDS[stopped_run, change] = result_of("run") | {"content": load("run/latest.pt")}
        shutil.rmtree("run")
        shutil.move("killed", "run")
    return ENDS[stopped_run, change]


FAST = {("going back, longer", 3), ("going back, longer", 9), ("longer", 6), ("other validation rows", 5)}


@pytest.mark.parametrize(
    ("change", "call"),
    [
        pytest.param(change, call, marks=() if (change, call) in FAST else pytest.mark.storm)
        for change in CHANGES
        for call in range(24)
    ],
)
def test_a_kill_at_each_call_of_a_start_leaves_the_run_as_it_was_or_as_decided(stopped, stopped_run, change, call):
    """The killed launch is followed by a plain --resume latest."""
    ends = [end_after("nothing", stopped_run), end_after(change, stopped_run)]
    log = Path("run/metrics.jsonl").read_bytes()
    events = sorted(os.listdir("run/tensorboard"))
    killed = Run(*CHANGES[change].split(), *folders("run"), tiny=(), faults=[partial(kill_in_start, call)])
    if killed.wait() == [0]:
        assert call > 4
        return
    assert killed.wait() == [-signal.SIGKILL], killed.text()
    assert Path("run/metrics.jsonl").read_bytes() == log
    assert sorted(os.listdir("run/tensorboard")) == events
    finish("run")
    end = result_of("run")
    matching = [other for other in ends if all(end[key] == other[key] for key in end)]
    assert matching, [{key for key in end if end[key] != other[key]} for other in ends]
    assert_same_state(matching[0]["content"], load("run/latest.pt"))


# ---------------------------------------------------------------------------------------------------------------------
# refusals and failures


def no_wandb(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "wandb", None)


def full_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))


def failing_write(patch: pytest.MonkeyPatch) -> None:
    def fail(number: int, write: Callable) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    around_write(fail)


def interrupted(patch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    around_model(before=interrupt)


def mirror_of_another_run(patch: pytest.MonkeyPatch) -> None:
    assert run_here(*folders("another"), "--max_steps", "3", "--mirror", f"file://{Path.cwd()}/mirror") == 0


def settings_of_wandb(patch: pytest.MonkeyPatch) -> None:
    Path("run/wandb").mkdir()
    Path("run/wandb/settings").touch()


def damaged_shard(patch: pytest.MonkeyPatch) -> None:
    path = next(Path("data").glob("*train*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


REFUSALS = {
    "wandb is not installed": (no_wandb, "--use_wandb"),
    "settings of W&B in the folder": (settings_of_wandb, "--use_wandb"),
    "no space": (full_disk, ""),
    "the disk is full during the first save": (failing_write, ""),
    "the mirror of another run": (mirror_of_another_run, "--mirror file://$PWD/mirror"),
    "an option that cannot change": (lambda patch: None, "--seed 1"),
    "a damaged shard": (damaged_shard, ""),
    "Ctrl-C": (interrupted, ""),
}


def content_of_run() -> dict[str, bytes]:
    """Return the files of the run, without those that tell of any attempt."""
    told = {".lock", "status.json", "log.txt"}
    return {str(path): path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.name not in told}


@pytest.mark.parametrize("change", [*CHANGES][1:])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_launch_that_is_refused_or_fails_changes_nothing(stopped, inject, monkeypatch, refusal, change):
    fault, flags = REFUSALS[refusal]
    fault(monkeypatch)
    monkeypatch.setenv("PWD", str(Path.cwd()))
    before = content_of_run()
    argv = [*CHANGES[change].split(), *os.path.expandvars(flags).split(), *folders("run")]
    with pytest.raises((UserError, OSError, KeyboardInterrupt)):
        run_without_tiny(*argv)
    after = content_of_run()
    name = "run/run.json"
    if refusal == "the disk is full during the first save":  # the only one after the identity was written
        assert json.loads(after.pop(name))["id"] == json.loads(before.pop(name))["id"]
    assert after == before


def run_without_tiny(*flags: str) -> None:
    """Run train.main in this process with the options that the run has."""
    import train

    train.main(flags)
