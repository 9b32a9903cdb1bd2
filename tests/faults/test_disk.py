"""A full, read-only or over-quota disk: saves fail, but the run continues and its older checkpoints stay intact."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import folders, load, run_here, scalars
from ground import (
    SCORE_FILES,
    acting_here,
    around_step,
    assert_same_state,
    best_model,
    evaluations,
    heads,
    launch_in,
    metrics,
    verified,
)
from harness import Run, error_line, run_to_end
from injected import do_in_step, fail_save, signal_at

from steadygpt import __version__

FLAGS = "--max_steps 4000 --checkpoint_freq 20 --keep_checkpoints 3 --steps_per_epoch 9999 --dropout 0.1".split()
NOT_ALLOWED = errno.EACCES if os.getuid() else errno.EPERM  # of a read-only folder
PATIENT = ("--checkpoint_minutes", "10")  # failed saves stop a run only after ten times as long


@pytest.fixture
def small_disk(workdir):
    """A disk of 3 MB, mounted on the folder "run"; a checkpoint takes 0.2 MB."""
    Path("run").mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", "run"], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mounting a small disk requires root: {mount.stderr.strip()}")
    yield Path("run")
    subprocess.run(["umount", "--lazy", "run"], check=True)


def fill_disk(*_) -> None:
    with open("run/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def free_space(*_) -> None:
    Path("run/filler").unlink()


def make_read_only(run: Run) -> None:
    if os.getuid():
        Path("run").chmod(0o555)
    elif subprocess.run(["chattr", "+i", "run"], capture_output=True).returncode:  # root may write to mode 555
        pytest.skip("this file system has no immutable folders")


def make_writable(run: Run) -> None:
    Path("run").chmod(0o755) if os.getuid() else subprocess.run(["chattr", "-i", "run"], check=True)


def limit_file_size(size: int):
    return lambda run: resource.prlimit(run.ranks[0].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# What begins the trouble, what ends it, and the error in the warning.
TROUBLE = {
    "disk full": (fill_disk, free_space, "[Errno 28] No space left on device"),
    "read-only": (make_read_only, make_writable, str(OSError(NOT_ALLOWED, os.strerror(NOT_ALLOWED)))),
    "quota": (limit_file_size(100_000), limit_file_size(resource.RLIM_INFINITY), "[Errno 27] File too large"),
}


@pytest.mark.parametrize(
    "what", ["disk full", *(pytest.param(what, marks=pytest.mark.storm) for what in ("quota", "read-only"))]
)
def test_training_continues_without_saves_until_they_work_again(workdir, request, what):
    if what == "disk full":
        request.getfixturevalue("small_disk")
    begin, end, error = TROUBLE[what]
    flags = (*FLAGS, *PATIENT, "--checkpoint_dir", "run")
    run = Run(*flags)
    run.wait_for("^saved step 60 as")
    begin(run)
    try:
        text = run.wait_for(r"(was not saved[\s\S]*){3}")  # training continues, and each save is attempted
        intact = [verified(Path("run", name))["step"] for name, _ in heads("run")]
    finally:
        end(run)
    warning = rf"^warning: run/latest.pt: step \d+ was not saved: {re.escape(error)}: 'run/.latest.pt.tmp'; "
    assert re.search(warning + r"older saves are intact, but there is no rolling_step_\d+.pt$", text, re.M), text
    assert len(intact) == 5
    assert intact[0] == max(intact) >= last_saved(text)
    length = len(run.text())
    run.wait_for(rf"(?s:\A.{{{length}}}).*\n(?s:.*)^saved step")
    run.signal(signal.SIGTERM)
    assert run.wait() == [0]
    assert not list(Path("run").glob(".*.tmp"))
    # An undisturbed run to the same step ends in the same state.
    stopped = load("run/latest.pt")["step"]
    assert stopped > last_saved(text)
    with acting_here(partial(signal_at, stopped)):
        assert run_here(*FLAGS, *folders("reference")) == 0
    assert_same_state(load("reference/latest.pt"), load("run/latest.pt"))


def last_saved(text: str) -> int:
    return max(int(step) for step in re.findall(r"^saved step (\d+) as", text, re.M))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer ends so
def test_logs_on_a_full_disk_lose_records_but_not_the_run(small_disk, capsys):
    flags = (*FLAGS, "--max_steps", "120", "--use_tensorboard", "--eval_freq", "50")
    with acting_here(partial(do_in_step, 45, fill_disk), partial(do_in_step, 100, free_space)):
        assert run_here(*flags, *folders("run")) == 0
    said = capsys.readouterr().err
    assert "warning: cannot write to metrics.jsonl: OSError: [Errno 28] No space left on device; training" in said
    assert load("run/latest.pt")["step"] == 120
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 120
    assert steps == sorted(steps)
    assert "warning: cannot write to TensorBoard: OSError: [Errno 28] No space left on device; training" in said
    assert 30 < max(scalars("run/tensorboard")["train/loss"]) < 119  # its curves end there until the next launch


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.storm)])
@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["new run", "resume"])
def test_a_start_on_a_full_disk_is_refused(small_disk, resume, ranks):
    flags = (*FLAGS, "--max_steps", "40", *folders("run"))
    if resume:
        run_to_end(*flags, ranks=ranks)
    fill_disk()
    before = files()
    message = error_line(*flags, *resume, "--max_steps", "60", ranks=ranks)
    no_room = r"^error: run: 14\d kB .*\b0 bytes .*--checkpoint_dir\b"
    assert re.search(no_room if resume else "No space left on device", message), message
    assert files() == before
    free_space()
    run_to_end(*flags, *resume, "--max_steps", "60", ranks=ranks)
    assert load("run/latest.pt")["step"] == 60


def files() -> dict[Path, bytes]:
    """Return the content of checkpoints and records."""
    return {path: path.read_bytes() for path in Path().rglob("*") if path.suffix in (".pt", ".jsonl")}


@pytest.mark.storm
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_cannot_save_stops_and_can_be_resumed(small_disk, ranks):
    flags = (*FLAGS, "--checkpoint_dir", "run")
    run = Run(*flags, ranks=ranks)
    run.wait_for("^saved step 40 as")
    fill_disk()
    assert run.wait() == [1] * ranks, run.text()
    text = run.text()
    assert text.count("warning: run: the run stops, because saves fail. Fix the disk, then resume\n") == 1
    end = int(re.search(r"^failed \(saves failed; the last save failed\) after (\d+) steps", text, re.M)[1])
    assert end - last_saved(text) in range(200, 230)  # ten saves, and the steps until the ranks have agreed
    free_space()
    run_to_end(*flags, "--resume", "--max_steps", "300", ranks=ranks)
    assert load("run/latest.pt")["step"] == 300


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()], ids=["disk", "memory"])
def test_a_failed_last_save_is_retried(workdir, capsys, error):
    """It gets all its names again, also that of the best model."""
    flags = (*"--max_steps 9 --checkpoint_freq 3 --steps_per_epoch 9 --eval_freq 9".split(), *folders("run"))
    with acting_here(partial(fail_save, 2, error)):
        assert run_here(*flags) == 0
    saved = {name for name, step in heads("run") if step == 9}
    assert saved == {"latest.pt", "rolling_step_000009.pt", "epoch_00001.pt", "best_model.pt"}
    out, err = capsys.readouterr()
    assert re.search("step 9 was not saved: (.*Input/output error.*|MemoryError); older saves are intact", err)
    assert out.index("saved step 9 as") < out.index("finished after 9 steps")
    assert best_model("run") == (9, evaluations("run")[9]["val_loss"])
    assert run_here(*flags, "--resume", "--max_steps", "10") == 0
    assert list(evaluations("run")) == [9, 10]


def test_the_run_fails_if_its_last_save_fails(small_disk, capsys):
    flags = ("--max_steps", "60", "--checkpoint_freq", "20", "--checkpoint_dir", "run")
    with acting_here(partial(do_in_step, 45, fill_disk)):
        assert run_here(*flags) == 1
    assert "failed (the last save failed) after 60 steps" in capsys.readouterr().out
    free_space()
    assert load("run/latest.pt")["step"] < 60
    assert run_here(*flags, "--resume") == 0
    assert load("run/latest.pt")["step"] == 60


def test_files_after_100_saves_with_keep_checkpoints_3(workdir, capsys):
    """An epoch is 74 rows and a step is 4 rows, so epoch 5 ends in the 93rd step."""
    flags = ("--max_steps", "100", "--checkpoint_freq", "1", "--keep_checkpoints", "3", "--keep_epochs", "2")
    assert run_here(*flags, "--eval_freq", "100", *folders("run")) == 0
    text = capsys.readouterr().out
    assert {*os.listdir("run")} - SCORE_FILES == {
        ".lock", "best_model.pt", "epoch_00004.pt", "epoch_00005.pt", "latest.pt", "latest_backup.pt", "log.txt",
        "metrics.jsonl", "rolling_step_000098.pt", "rolling_step_000099.pt", "rolling_step_000100.pt", "run.json",
        "status.json",
    }  # fmt: skip
    # Step 100 is written once and linked to all of its names.
    assert len(re.findall(r"^saved step 100 as ", text, re.M)) == 1
    assert re.search(r"^step 100/100 \| val loss \d+\.\d+ \(best so far\)", text, re.M)
    assert Path("run/best_model.pt").samefile("run/rolling_step_000100.pt")
    assert load("run/latest_backup.pt")["step"] == 99
    assert 700 // 16 + 500 // 16 == 74
    epoch = load("run/epoch_00005.pt")
    assert (epoch["step"], epoch["rows_consumed"]) == (93, 372)  # the first step after 370 rows
    assert epoch["epoch"] == pytest.approx(372 / 74)
    assert re.fullmatch(r"[0-9a-f]{12}\+?", commit := launch_in("run/epoch_00005.pt").settings["commit"])
    assert f"version      {__version__}, commit {commit[:12]}" in Path("run/log.txt").read_text()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTCONN])
def test_a_folder_that_cannot_be_reached_for_a_while_does_not_end_the_run(workdir, monkeypatch, number):
    """Everything below it fails during the steps 4 to 8, as after an expired ticket; then saves work again."""
    flags = ("--max_steps", "12", "--checkpoint_freq", "2", "--dropout", "0.1")
    assert run_here(*folders("undisturbed"), *flags) == 0
    steps = []

    def failing(function):
        def wrapper(path, *args, **options):
            is_out_of_reach = bool(steps) and 4 <= steps[-1] < 8
            if is_out_of_reach and not isinstance(path, int) and "run" in Path(os.fsdecode(path)).parts:
                raise OSError(number, os.strerror(number), path)
            return function(path, *args, **options)

        return wrapper

    monkeypatch.setattr("steadygpt.log.runlog.HEARTBEAT_S", 0.0)
    count_steps = partial(around_step, lambda step, stop: steps.append(step))
    with acting_here(lambda rank: count_steps()), monkeypatch.context() as patch:
        for owner, names in ((os, "stat lstat open link replace rename unlink scandir listdir"), (io, "open")):
            for name in names.split():
                patch.setattr(owner, name, failing(getattr(owner, name)))
        assert run_here(*folders("run"), *flags) == 0
    assert_same_state(load("undisturbed/latest.pt"), load("run/latest.pt"))
    assert metrics("undisturbed", "loss") == metrics("run", "loss")
    assert {path.name for path in Path("run").glob("rolling*")} >= {"rolling_step_000010.pt", "rolling_step_000012.pt"}
    warnings = json.loads(Path("run/status.json").read_text())["warnings"]
    assert any("was not saved" in warning for warning in warnings)
