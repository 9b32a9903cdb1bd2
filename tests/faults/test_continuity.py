"""Resuming on other numbers of ranks, compiled and eager, and resource use over thousands of steps."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load, metrics
from harness import Run, assert_equals_reference, continue_here, folders, run_to_end
from injected import record_tokens, rows_of_steps, signal_at, tokens_of_steps

FLAGS = ("--max_steps", "30", "--total_batch_size", "128")


def run_in_parts(name: str, *parts: tuple[int, tuple[str, ...]], faults: Sequence[Callable[[int], None]] = ()) -> None:
    """Run in parts of 10 steps, each with its own number of ranks and flags."""
    for number, (ranks, flags) in enumerate(parts, start=1):
        all_faults = [record_tokens, partial(signal_at, 10 * number), *faults]
        run_to_end(*FLAGS, *flags, *folders(name), "--resume", "auto", ranks=ranks, faults=all_faults)
    assert load(f"{name}/ckpt/latest.pt")["step"] == 30


def assert_close_to_reference(name: str) -> None:
    """Assert that weights are within 1e-6 and losses within 1e-5 of the uninterrupted run."""
    expected, found = load("reference/ckpt/latest.pt")["model"], load(f"{name}/ckpt/latest.pt")["model"]
    assert max((expected[key] - found[key]).abs().max().item() for key in expected) < 1e-6
    expected, found = metrics("reference/logs", "loss"), metrics(f"{name}/logs", "loss")
    assert expected.keys() == found.keys()
    assert all(abs(expected[step] - found[step]) < 1e-5 for step in expected)


@pytest.mark.storm
def test_resume_on_1_2_and_1_ranks(workdir):
    run_to_end(*FLAGS, *folders("reference"), faults=[record_tokens])
    expected = rows_of_steps()
    os.unlink("tokens.jsonl")
    run_in_parts("run", (1, ()), (2, ()), (1, ()))
    assert len(expected) == 30
    assert rows_of_steps() == expected
    assert_close_to_reference("run")


def compile_with(backend: str, rank: int) -> None:
    """Choose what runs the graphs of torch.compile: inductor, the default, or the kernels of eager mode."""
    torch.compile = partial(torch.compile, backend=backend)


@pytest.mark.storm
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_resume_eager_compiled_and_eager(workdir, backend):
    """Inductor calls a C++ compiler for each kernel, which takes a minute."""
    small = ("--num_layers", "1", "--rotary_pct", "0.5")  # one layer compiles sooner
    small += ("--activation_checkpointing", "--loss_chunk_size", "12")
    run_to_end(*FLAGS, *small, *folders("reference"), faults=[record_tokens])
    parts = (1, small), (1, (*small, "--compile", "on")), (1, (*small, "--compile", "off"))
    run_in_parts("run", *parts, faults=[partial(compile_with, backend)])
    tokens_of_steps()  # checks that each step read the same tokens in both runs
    assert_close_to_reference("run")


@pytest.mark.parametrize(("steps", "freq"), [(400, 10), pytest.param(5000, 25, marks=pytest.mark.storm)])
def test_memory_file_descriptors_and_threads_stay_flat(workdir, steps, freq):
    """Compare the two halves of the run after its first fifth; shards in the page cache are not counted."""
    flags = ("--max_steps", str(steps), "--checkpoint_freq", str(freq), "--total_batch_size", "32", "--log_freq", "100")
    run = Run(*flags, "--eval_freq", str(4 * freq), "--use_tensorboard", *folders("run"))
    pid = run.ranks[0].pid

    def used() -> tuple[int, int, int]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return int(status["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])

    samples = []
    run.wait_for(rf"^saved step {steps // 5} as")
    while run.is_alive() and f"saved step {steps - freq} as" not in run.text():
        with contextlib.suppress(FileNotFoundError):  # the process has just ended
            samples.append(used())
        time.sleep(0.02)
    assert run.wait() == [0]
    early, late = (np.max(half, axis=0) for half in np.array_split(samples, 2))
    assert len(samples) > 50
    assert late[0] < early[0] + 4 * 1024, f"{early[0]} KB, later {late[0]} KB"
    assert late[1] <= early[1] + 1, f"{early[1]} file descriptors, later {late[1]}"
    assert late[2] <= early[2] + 1, f"{early[2]} threads, later {late[2]}"


@pytest.mark.parametrize(
    ("file", "step", "damaged"), [("rolling_step_000010.pt", 10, False), ("latest_backup.pt", 19, True)]
)
def test_resume_from_an_older_checkpoint_survives_a_kill(reference, file, step, damaged):
    """Make the older checkpoint latest.pt at once, so that a later --resume latest matches the truncated logs."""
    flags, name = ("--max_steps", "20", "--checkpoint_freq", "5", "--dropout", "0.1"), f"from {step}"
    reference(*flags)
    shutil.copytree("reference", name)
    continue_here(Path(name, "ckpt"))
    if damaged:
        os.truncate(f"{name}/ckpt/latest.pt", 1000)
    older = ("--resume", f"{name}/ckpt/{file}", *folders(name)[2:])
    killed = Run(*flags, *older, faults=[partial(signal_at, step, number=signal.SIGKILL)])
    assert killed.wait() == [-signal.SIGKILL]
    # The newer checkpoint is kept if it is intact; a corrupt one never becomes the backup.
    assert load(f"{name}/ckpt/latest_backup.pt")["step"] == (19 if damaged else 20)
    text = run_to_end(*flags, *folders(name), "--resume", "latest")
    assert f"resumed      from {name}/ckpt/latest.pt at step {step}" in text
    assert_equals_reference(name)
