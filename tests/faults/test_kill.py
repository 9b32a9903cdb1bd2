"""kill -9 at random instants and at every stage of a save: nothing reported is lost, all goes on bit by bit."""

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
from conftest import write_data
from harness import Launched, Life, assert_continued, folders
from injected import die_at, record_tokens, tokens_of_steps, trace_saves

from steadygpt.checkpoint import find_checkpoint

FLAGS = ("--max_steps", "200", "--checkpoint_freq", "1", "--keep_checkpoints", "3", "--dropout", "0.1")


def last_reported(text: str) -> int:
    return max([int(step) for step in re.findall(r"^saved step (\d+) as", text, re.MULTILINE)], default=-1)


def half_saved(name: str, since_ns: int) -> bool:
    """Whether a save is half done; what an earlier life left does not count."""
    with contextlib.suppress(FileNotFoundError):  # just done
        return any(path.stat().st_mtime_ns > since_ns for path in Path(name, "ckpt").glob(".*.pt.tmp"))
    return False


def storm(kills: int, start_life, seed: int) -> int:
    """Kill lives at random instants, run after run; returns how many died with a save half done."""
    instants, run, within_saves, reported = random.Random(seed), 0, 0, -1
    while kills > 0:
        name = f"run{run}"
        life, since_ns = start_life(*FLAGS, *folders(name), "--resume", "auto"), time.time_ns()
        kind = instants.random()
        if kind < 0.8:  # once it trains; else anywhere from its start on
            life.wait_for(r"^step +\d+/|is finished|^finished")
        time.sleep(instants.uniform(0, 0.25))
        while kind < 0.5 and life.is_alive() and not half_saved(name, since_ns):
            time.sleep(0.0005)  # half of them within a save
        life.kill()
        text = life.text()
        kills -= "finished after" not in text
        if resumed := re.search(r"^resumed from .* at step (\d+)", text, re.MULTILINE):
            assert int(resumed[1]) >= reported, f"step {reported} was reported as saved, and is gone"
        reported = max(reported, last_reported(text))
        if reported >= 0:
            assert find_checkpoint("latest", Path(name, "ckpt"))[1]["step"] >= reported
        within_saves += half_saved(name, since_ns)
        if "finished after" in text:
            assert_continued(name)
            run, reported = run + 1, -1
    whole = start_life(*FLAGS, *folders(name), "--resume", "auto")
    assert set(whole.wait()) == {0}, whole.text()
    assert_continued(name)
    return within_saves


@pytest.mark.parametrize(("kills", "ranks"), [(35, 1), (15, 2)])
def test_kill_9_at_random_instants(workdir, kills, ranks, record_property):
    start_life = partial(Life, ranks=ranks, faults=[record_tokens])
    assert start_life(*FLAGS, *folders("whole")).wait() == [0] * ranks
    within_saves = storm(kills, start_life, seed=ranks)
    assert within_saves >= 0.4 * kills
    record_property(f"of {kills} kills on {ranks} rank{'s' * (ranks > 1)} were within a save", within_saves)
    assert len(tokens_of_steps()) == 200 * ranks  # and each step saw the same tokens in every life


@pytest.mark.storm
@pytest.mark.parametrize("ranks", [1, 2], ids=["python train.py", "torchrun with 2 ranks"])
def test_kill_9_at_random_instants_of_what_users_type(workdir, ranks, record_property):
    start_life = partial(Launched, processes=ranks)
    assert start_life(*FLAGS, *folders("whole")).wait() == [0]
    within_saves = storm(50, start_life, seed=ranks)
    assert within_saves >= 15
    record_property(f"of 50 kills on {ranks} rank{'s' * (ranks > 1)} were within a save", within_saves)


# ---------------------------------------------------------------------------------------------------------------------
# at every stage of a save

SHORT = ("--max_steps", "12", "--checkpoint_freq", "2", "--keep_checkpoints", "2", "--steps_per_epoch", "4")
# The save at step 8, the fourth: two tiers beside latest.pt, the one before becomes the backup, an old one goes.
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
    """A folder with data and, in "whole", the uninterrupted run of SHORT, its calls in calls.txt."""
    folder = tmp_path_factory.mktemp("short")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        assert Life(*SHORT, *folders("whole"), faults=[trace_saves]).wait() == [0]
        yield folder


def test_a_save_is_these_calls_in_this_order(short_run):
    """On the disk before it has a name; named before older ones go."""
    calls = [line.partition(" ") for line in Path("calls.txt").read_text().splitlines()]
    # A temporary name that is not there is no call that changes anything.
    found = [call for save, _, call in calls if save == "4" and not re.fullmatch(r"unlink \..*\.tmp", call)]
    assert found == CALLS


def test_a_log_is_on_the_disk_before_the_checkpoint_that_follows_from_it(short_run):
    logged = 0
    for line in Path("calls.txt").read_text().splitlines():
        save, *call = line.split()
        logged += call == ["fsync", "metrics.jsonl"]
        assert call[0] != "write" or logged >= int(save)


def test_the_kernel_sees_them_in_this_order(workdir):
    """File, then its name, then the folder: as strace shows them, of a save in the middle of a run."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    watched = "trace=fsync,?rename,?renameat,?renameat2,?link,?linkat"
    life = Life("--max_steps", "100000", "--checkpoint_freq", "10", "--steps_per_epoch", "99999", *folders("run"))
    life.wait_for("^saved step 20 as")
    argv = ["strace", "-f", "-y", "-o", "trace.txt", "-e", watched, "-p", str(life.ranks[0].pid)]
    tracer = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    if "attached" not in (said := tracer.stderr.readline()):
        pytest.skip(f"strace may not attach: {said}")
    step = last_reported(life.text()) // 10 * 10 + 30  # a later one than those that are under way
    life.wait_for(f"^saved step {step} as")
    life.kill()
    tracer.wait()
    # A thread's calls begin one after the other, whatever other threads do in between.
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
def test_killed_at_each_call_of_a_save(short_run, call):
    name = f"killed{call}"
    life = Life(*SHORT, *folders(name), faults=[partial(die_at, 4, call)])
    if life.wait() == [0]:
        assert call > len(CALLS)  # there are not so many
        return
    assert last_reported(life.text()) >= 4
    assert find_checkpoint("latest", Path(name, "ckpt"))[1]["step"] >= last_reported(life.text())
    assert Life(*SHORT, *folders(name), "--resume", "latest").wait() == [0]
    assert_continued(name)
    assert sorted(os.listdir(f"{name}/ckpt")) == sorted(os.listdir("whole/ckpt"))
