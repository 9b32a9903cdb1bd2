"""A disk that is full, read-only or over quota costs saves, never the run or a checkpoint that was there."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import assert_same_state, load
from harness import Life, folders, refused, whole_life
from injected import fail_saves, stop_after
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadygpt.checkpoint import checkpoint_files, read_checkpoint

FLAGS = "--max_steps 4000 --checkpoint_freq 20 --keep_checkpoints 3 --steps_per_epoch 9999 --dropout 0.1".split()


@pytest.fixture
def disk(workdir):
    """A disk of 3 MB, mounted as "run"; a checkpoint takes 0.2 MB."""
    Path("run").mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", "run"], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mounting a small disk needs root: {mount.stderr.strip()}")
    yield Path("run")
    subprocess.run(["umount", "--lazy", "run"], check=True)


def fill(life: Life | None) -> None:
    with open("run/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_room(life: Life | None) -> None:
    Path("run/filler").unlink()


def forbid(life: Life) -> None:
    if os.getuid():
        Path("run").chmod(0o555)
    elif subprocess.run(["chattr", "+i", "run"], capture_output=True).returncode:  # root may write in spite of 555
        pytest.skip("this file system has no immutable folders")


def allow(life: Life) -> None:
    Path("run").chmod(0o755) if os.getuid() else subprocess.run(["chattr", "-i", "run"], check=True)


def allow_files_of(size: int):
    return lambda life: resource.prlimit(life.ranks[0].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


TROUBLE = {
    "disk full": (fill, make_room, r"\[Errno 28\] No space left on device: 'run/.latest.pt.tmp'"),
    "read-only": (forbid, allow, r"\[Errno 13?\] (Permission denied|Operation not permitted): 'run/.latest.pt.tmp'"),
    "quota": (
        allow_files_of(100_000),
        allow_files_of(resource.RLIM_INFINITY),
        r"\[Errno 27\] File too large: 'run/.latest.pt.tmp'",
    ),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_training_goes_on_and_saves_again_when_it_can(workdir, request, what):
    if what == "disk full":
        request.getfixturevalue("disk")
    begin, end, error = TROUBLE[what]
    flags = (*FLAGS, "--checkpoint_dir", "run", "--logdir", "logs")
    life = Life(*flags)
    life.wait_for("^saved step 60 as")
    begin(life)
    try:
        text = life.wait_for(r"(was not saved[\s\S]*){3}")  # it goes on, and tries again
        whole = [read_checkpoint(path)["step"] for path in checkpoint_files(Path("run"))]
    finally:
        end(life)
    warning = (
        rf"^warning: run/latest.pt: step \d+ was not saved: {error}; it takes 14\d,\d{{3}} bytes, [\d,]+ are free; "
    )
    assert re.search(warning + "older saves are whole$", text, re.M), text
    assert whole[0] == max(whole) >= last_saved(text) and len(whole) == 5
    seen = len(life.text())
    life.wait_for(rf"(?s:\A.{{{seen}}}).*\n(?s:.*)^saved step")
    life.signal(signal.SIGTERM)
    assert life.wait() == [0]
    assert not list(Path("run").glob(".*.tmp"))
    # The trouble left no trace in what was learned.
    stopped = load("run/latest.pt")["step"]
    assert stopped > last_saved(text)
    whole_life(*FLAGS, *folders("whole"), "--max_hours", "0", faults=[partial(stop_after, stopped)])
    assert_same_state(load("whole/ckpt/latest.pt"), load("run/latest.pt"))


def last_saved(text: str) -> int:
    return max(int(step) for step in re.findall(r"^saved step (\d+) as", text, re.M))


def test_logs_on_a_full_disk_cost_records_and_not_the_run(disk):
    flags = (*FLAGS, "--max_steps", "400", "--use_tensorboard", "--eval_freq", "50", "--checkpoint_dir", "run/ckpt")
    life = Life(*flags, "--logdir", "run/logs", "--tensorboard_dir", "run/tb")
    life.wait_for("^saved step 40 as")
    fill(life)
    life.wait_for("^step 150/")
    make_room(life)
    assert life.wait() == [0], life.text()
    assert "warning: cannot write to metrics.jsonl: [Errno 28] No space left on device; training" in life.text()
    assert load("run/ckpt/latest.pt")["step"] == 400
    steps = [json.loads(line)["step"] for line in Path("run/logs/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 400 and steps == sorted(steps)
    (folder,) = Path("run/tb").iterdir()
    curve = [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss/train")]
    assert curve[-1] == 399 and 0 < 400 - len(curve) < 250  # from a save after the trouble on it continues


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.storm)])
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_start_on_a_full_disk_is_refused_in_one_line(disk, resume, ranks):
    flags = (*FLAGS, "--max_steps", "40", *folders("run"))
    if resume:
        whole_life(*flags, ranks=ranks)
    fill(None)
    assert "No space left on device" in refused(*flags, *resume, "--max_steps", "60", ranks=ranks)
    make_room(None)
    whole_life(*flags, *resume, "--max_steps", "60", ranks=ranks)
    assert load("run/ckpt/latest.pt")["step"] == 60


def test_a_last_save_that_fails_is_tried_again(workdir):
    flags = (*FLAGS, "--max_steps", "40", *folders("run"))
    text = whole_life(*flags, faults=[partial(fail_saves, 1, 1)])
    assert "step 40 was not saved" in text and text.index("saved step 40 as") < text.index("finished after 40 steps")


def test_a_last_save_that_fails_is_a_failed_run(disk):
    flags = (*FLAGS, "--max_steps", "300", "--checkpoint_dir", "run", "--logdir", "logs")
    life = Life(*flags)
    life.wait_for("^saved step 40 as")
    fill(life)
    assert life.wait() == [1]
    assert "failed (the last save failed) after 300 steps" in life.text()
    make_room(life)
    assert load("run/latest.pt")["step"] < 300
    whole_life(*flags, "--resume")
    assert load("run/latest.pt")["step"] == 300


def test_a_hundred_saves_with_keep_3_leave_exactly_these_files(workdir):
    flags = ("--max_steps", "100", "--checkpoint_freq", "1", "--keep_checkpoints", "3", "--steps_per_epoch", "50")
    whole_life(*flags, "--eval_freq", "100", *folders("run"))
    assert sorted(os.listdir("run/ckpt")) == [
        ".lock", "best_model.pt", "epoch_00001.pt", "epoch_00002.pt", "latest.pt", "latest_backup.pt",
        "rolling_step_000098.pt", "rolling_step_000099.pt", "rolling_step_000100.pt", "status.json",
    ]  # fmt: skip
