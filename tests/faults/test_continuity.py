"""Older checkpoints, and resource use over thousands of steps."""

import contextlib
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import folders, load
from harness import Run, assert_resumes, continue_here
from injected import signal_at


@pytest.mark.storm
@pytest.mark.parametrize(("steps", "freq"), [(200, 10), (5000, 25)])
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
        time.sleep(0.01)
    assert run.wait() == [0]
    early, late = (np.max(half, axis=0) for half in np.array_split(samples, 2))
    assert len(samples) > 50
    assert late[0] < early[0] + 4 * 1024, f"{early[0]} KB, later {late[0]} KB"
    assert late[1] <= early[1] + 1, f"{early[1]} file descriptors, later {late[1]}"
    assert late[2] <= early[2] + 1, f"{early[2]} threads, later {late[2]}"


@pytest.mark.parametrize(("file", "step", "damaged"), [
    ("rolling_step_000010.pt", 10, False), pytest.param("latest_backup.pt", 19, True, marks=pytest.mark.storm),
])  # fmt: skip
def test_resume_from_an_older_checkpoint_survives_a_kill(reference, file, step, damaged):
    """Make the older checkpoint latest.pt at once, so that a later --resume latest matches the truncated logs."""
    flags, name = ("--max_steps", "20", "--checkpoint_freq", "5", "--dropout", "0.1"), f"from {step}"
    reference(*flags)
    shutil.copytree("reference", name)
    continue_here(Path(name))
    if damaged:
        os.truncate(f"{name}/latest.pt", 1000)
    killed = Run(*flags, "--resume", f"{name}/{file}", faults=[partial(signal_at, step, number=signal.SIGKILL)])
    assert killed.wait() == [-signal.SIGKILL]
    # The newer checkpoint is kept if it is intact; a corrupt one never becomes the backup.
    assert load(f"{name}/latest_backup.pt")["step"] == (19 if damaged else 20)
    assert_resumes(name, *flags)
    assert f"resumed      from {name}/latest.pt at step {step}\n" in Path(name, "log.txt").read_text()
