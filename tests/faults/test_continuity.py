"""Resumed on other numbers of ranks, compiled and not, for thousands of steps: the same tokens, weights and memory."""

import os
from functools import partial
from pathlib import Path

import pytest
from conftest import load, metrics
from harness import Life, folders, whole_life
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

    life.wait_for(rf"^saved step {steps // 5} as")
    memory, descriptors, threads = used()
    life.wait_for(rf"^saved step {steps - freq} as", timeout_s=300)
    memory_later, descriptors_later, threads_later = used()
    assert life.wait() == [0]
    assert memory_later < memory + 4 * 1024, f"{memory} KB, later {memory_later} KB"
    assert descriptors_later <= descriptors + 1 and threads_later <= threads  # one may be that of a save
