"""kill -9 at random instants and at every system call of a save: a resume loses no reported save and stays bitwise."""

import contextlib
import os
import random
import re
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import MODERN
from harness import LaunchedRun, Run, assert_equals_reference, folders, reference_run
from injected import kill_at, record_save_calls, record_tokens, tokens_of_steps

from steadygpt.checkpoint import find_checkpoint

FLAGS = ("--max_steps", "200", "--checkpoint_freq", "1", "--keep_checkpoints", "3", "--dropout", "0.1")


def last_reported(text: str) -> int:
    return max([int(step) for step in re.findall(r"^saved step (\d+) as", text, re.MULTILINE)], default=-1)


def save_in_progress(name: str, since_ns: int) -> bool:
    """Return whether a temporary file newer than `since_ns` exists; an earlier process may have left older ones."""
    with contextlib.suppress(FileNotFoundError):  # the save has just finished
        return any(path.stat().st_mtime_ns > since_ns for path in Path(name, "ckpt").glob(".*.pt.tmp"))
    return False


def kill_repeatedly(least: int, least_within_saves: int, start, seed: int) -> tuple[int, int]:
    """Start, kill and resume runs until enough of them were killed; return the kills and those within a save."""
    rng, number, kills, within_saves, reported = random.Random(seed), 0, 0, 0, -1
    while kills < least or within_saves < least_within_saves:
        assert kills < 3 * least, f"only {within_saves} of {kills} kills were within a save"
        name = f"run{number}"
        run, since_ns = start(*FLAGS, *folders(name), "--resume", "auto"), time.time_ns()
        kind = rng.random()
        if kind < 0.8:  # four of five kills come while the run trains, the others at any time from its start
            run.wait_for(r"^step +\d+/|is finished|^finished")
        time.sleep(rng.uniform(0, 0.25))
        while kind < 0.5 and run.is_alive() and not save_in_progress(name, since_ns):
            time.sleep(0.0005)  # half of the kills wait for a save
        run.kill()
        text = run.text()
        kills += "finished after" not in text
        if resumed := re.search(r"^resumed from .* at step (\d+)", text, re.MULTILINE):
            assert int(resumed[1]) >= reported, f"step {reported} was reported as saved, but is lost"
        reported = max(reported, last_reported(text))
        if reported >= 0:
            assert find_checkpoint("latest", Path(name, "ckpt")).checkpoint["step"] >= reported
        within_saves += save_in_progress(name, since_ns)
        if "finished after" in text:
            assert_equals_reference(name)
            number, reported = number + 1, -1
    last = start(*FLAGS, *folders(name), "--resume", "auto")
    assert set(last.wait()) == {0}, last.text()
    assert_equals_reference(name)
    return kills, within_saves


@pytest.mark.parametrize("recipe", [(), pytest.param(MODERN, marks=pytest.mark.storm)], ids=["gpt2", "modern"])
@pytest.mark.parametrize(("least", "least_within_saves", "ranks"), [(35, 14, 1), (15, 6, 2)])
def test_kill_at_random_instants(workdir, least, least_within_saves, ranks, recipe, record_property):
    def start(*flags: str) -> Run:
        return Run(*flags, *recipe, ranks=ranks, faults=[record_tokens])

    assert start(*FLAGS, *folders("reference")).wait() == [0] * ranks
    kills, within_saves = kill_repeatedly(least, least_within_saves, start, seed=ranks)
    record_property(f"of {kills} kills on {ranks} rank{'s' * (ranks > 1)} were within a save", within_saves)
    assert len(tokens_of_steps()) == 200 * ranks  # also checks that repeated steps read the same tokens


@pytest.mark.storm
@pytest.mark.parametrize("ranks", [1, 2], ids=["python train.py", "torchrun with 2 ranks"])
def test_kill_commands_at_random_instants(workdir, ranks, record_property):
    start = partial(LaunchedRun, processes=ranks)
    assert start(*FLAGS, *folders("reference")).wait() == [0]
    kills, within_saves = kill_repeatedly(50, 15, start, seed=ranks)
    record_property(f"of {kills} kills on {ranks} rank{'s' * (ranks > 1)} were within a save", within_saves)


# ---------------------------------------------------------------------------------------------------------------------
# at every system call of a save

SHORT = ("--max_steps", "12", "--checkpoint_freq", "2", "--keep_checkpoints", "2", "--steps_per_epoch", "4")
# The fourth save, at step 8: linked as a rolling and an epoch checkpoint, a backup is made, an old file is deleted.
CALLS = [
    "write .latest.pt.tmp",
    "fsync .latest.pt.tmp",
    "link .latest.pt.tmp .rolling_step_000008.pt.tmp",
    "replace .rolling_step_000008.pt.tmp rolling_step_000008.pt",
    "link .latest.pt.tmp .epoch_00002.pt.tmp",
    "replace .epoch_00002.pt.tmp epoch_00002.pt",
    "link latest.pt .latest_backup.pt.tmp",
    "replace .latest_backup.pt.tmp latest_backup.pt",
    "replace .latest.pt.tmp latest.pt",
    "fsync ckpt",
    "unlink rolling_step_000004.pt",
]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A folder with data, the uninterrupted run of SHORT in "reference" and its system calls in calls.txt."""
    with reference_run(tmp_path_factory, *SHORT, faults=[record_save_calls]) as folder:
        yield folder


def test_a_save_makes_these_calls_in_this_order(short_run):
    """Make the file durable before it gets a name, and its names durable before older files are deleted."""
    calls = [line.partition(" ") for line in Path("calls.txt").read_text().splitlines()]
    # Temporary names are unlinked in case they exist; these calls usually change nothing.
    found = [call for save, _, call in calls if save == "4" and not re.fullmatch(r"unlink \..*\.tmp", call)]
    assert found == CALLS


def test_logs_are_durable_before_the_checkpoint(short_run):
    logged = 0
    for line in Path("calls.txt").read_text().splitlines():
        save, *call = line.split()
        logged += call == ["fsync", "metrics.jsonl"]
        if call[0] == "write":
            assert logged >= int(save)


def test_strace_shows_the_calls_of_a_save_in_order(workdir):
    """Find fsync of the file, link, rename and fsync of the folder in the trace of the kernel."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    watched = "trace=fsync,?rename,?renameat,?renameat2,?link,?linkat"
    run = Run("--max_steps", "100000", "--checkpoint_freq", "10", "--steps_per_epoch", "99999", *folders("run"))
    run.wait_for("^saved step 20 as")
    argv = ["strace", "-f", "-y", "-o", "trace.txt", "-e", watched, "-p", str(run.ranks[0].pid)]
    tracer = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    if "attached" not in (message := tracer.stderr.readline()):
        pytest.skip(f"strace may not attach: {message}")
    step = last_reported(run.text()) // 10 * 10 + 30  # a save that starts after strace is attached
    run.wait_for(f"^saved step {step} as")
    run.kill()
    tracer.wait()
    # Only the saving thread is checked: calls of other threads come in between.
    trace = Path("trace.txt").read_text()
    (thread,) = re.findall(rf"^(\d+) +link.*rolling_step_{step:06d}", trace, re.MULTILINE)
    calls = "".join(f"{line}\n" for line in trace.splitlines() if line.startswith(f"{thread} "))
    assert re.search(
        r" fsync\(\d+<\S+/ckpt/\.latest\.pt\.tmp>.*\n"
        rf'.* link.*"run/ckpt/\.latest\.pt\.tmp", .*"run/ckpt/\.rolling_step_{step:06d}\.pt\.tmp".*\n'
        r"(?:.*\n){,6}?"
        r'.* rename.*"run/ckpt/\.latest\.pt\.tmp", .*"run/ckpt/latest\.pt".*\n'
        r".* fsync\(\d+<\S+/ckpt>",
        calls,
    ), trace


@pytest.mark.parametrize("call", range(len(CALLS) + 6))
def test_kill_at_each_call_of_a_save(short_run, call):
    name = f"killed{call}"
    run = Run(*SHORT, *folders(name), faults=[partial(kill_at, 4, call)])
    if run.wait() == [0]:
        assert call > len(CALLS)  # the save made fewer calls
        return
    reported = last_reported(run.text())
    assert reported >= 4
    assert find_checkpoint("latest", Path(name, "ckpt")).checkpoint["step"] >= reported
    assert Run(*SHORT, *folders(name), "--resume", "latest").wait() == [0]
    assert_equals_reference(name)
    assert sorted(os.listdir(f"{name}/ckpt")) == sorted(os.listdir("reference/ckpt"))
