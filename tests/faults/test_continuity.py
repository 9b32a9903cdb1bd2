"""Resumed on other numbers of ranks, compiled and not, for thousands of steps: the same tokens, weights and memory."""

import contextlib
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import load, metrics
from harness import Life, assert_continued, folders, whole_life
from injected import record_tokens, rows_of_steps, stop_after, tokens_of_steps

FLAGS = ("--max_steps", "30", "--total_batch_size", "128")


def lives(name: str, *each: tuple[int, tuple[str, ...]]) -> None:
    """A run in lives of 10 steps; each on a number of ranks, with flags of its own."""
    for number, (ranks, flags) in enumerate(each, start=1):
        faults = [record_tokens, partial(stop_after, 10 * number)]
        whole_life(*FLAGS, *flags, *folders(name), "--resume", "auto", ranks=ranks, faults=faults)
    assert load(f"{name}/ckpt/latest.pt")["step"] == 30


def assert_close(name: str) -> None:
    """Within 1e-6 of the uninterrupted run, on the same rows."""
    whole, other = load("whole/ckpt/latest.pt")["model"], load(f"{name}/ckpt/latest.pt")["model"]
    assert max((whole[key] - other[key]).abs().max().item() for key in whole) < 1e-6
    one, another = metrics("whole/logs", "loss"), metrics(f"{name}/logs", "loss")
    assert one.keys() == another.keys() and all(abs(one[step] - another[step]) < 1e-5 for step in one)


def test_on_1_2_and_1_ranks(workdir):
    whole_life(*FLAGS, *folders("whole"), faults=[record_tokens])
    expected = rows_of_steps()
    os.unlink("tokens.jsonl")
    lives("run", (1, ()), (2, ()), (1, ()))
    assert rows_of_steps() == expected and len(expected) == 30
    assert_close("run")


def test_eager_compiled_and_eager_again(workdir):
    whole_life(*FLAGS, *folders("whole"), faults=[record_tokens])
    lives("run", (1, ()), (1, ("--compile", "on")), (1, ("--compile", "off")))
    tokens_of_steps()  # each step's are the same in both runs
    assert_close("run")


@pytest.mark.parametrize(("steps", "freq"), [(800, 20), pytest.param(5000, 25, marks=pytest.mark.storm)])
def test_memory_descriptors_and_threads_stay_flat(workdir, steps, freq):
    """From a fifth of the run on; what the page cache holds of shards does not count."""
    flags = ("--max_steps", str(steps), "--checkpoint_freq", str(freq), "--total_batch_size", "32", "--log_freq", "100")
    life = Life(*flags, "--eval_freq", str(4 * freq), "--use_tensorboard", *folders("run"))
    pid = life.ranks[0].pid

    def used() -> tuple[int, int, int]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return int(status["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])

    samples = []
    life.wait_for(rf"^saved step {steps // 5} as")
    while life.is_alive() and f"saved step {steps - freq} as" not in life.text():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            samples.append(used())
        time.sleep(0.02)
    assert life.wait() == [0]
    early, late = (np.max(half, axis=0) for half in np.array_split(samples, 2))
    assert len(samples) > 50 and late[0] < early[0] + 4 * 1024, f"{early[0]} KB, later {late[0]} KB"
    assert late[1] <= early[1] + 1 and late[2] <= early[2] + 1, f"descriptors and threads {early[1:]}, later {late[1:]}"


def test_going_back_is_not_undone_by_a_kill(workdir):
    """From then on the older checkpoint is the latest one, as the logs say too."""
    flags = ("--max_steps", "20", "--checkpoint_freq", "5", "--dropout", "0.1")
    whole_life(*flags, *folders("whole"))
    shutil.copytree("whole", "run", copy_function=os.link)
    back = ("--resume", "run/ckpt/rolling_step_000010.pt", "--logdir", "run/logs")
    assert Life(*flags, *back, faults=[partial(stop_after, 12, number=signal.SIGKILL)]).wait() == [-signal.SIGKILL]
    assert load("run/ckpt/latest_backup.pt")["step"] == 20  # nothing is lost
    assert "resumed from run/ckpt/latest.pt at step 10" in whole_life(*flags, *folders("run"), "--resume", "latest")
    assert_continued("run")
