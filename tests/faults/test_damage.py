"""Damaged and foreign checkpoint files: reported with the reason, skipped in order, never executed or modified."""

import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import command, environment, load
from harness import Run, assert_equals_reference, continue_here, folders, refusal, run_to_end
from injected import around_step, fail_reads, signal_at

FLAGS = (
    "--max_steps 12 --checkpoint_freq 2 --keep_checkpoints 2 --steps_per_epoch 4 --total_batch_size 128 --dropout 0.1"
).split()
# The checkpoints of a run stopped after 9 steps, in the order in which --resume latest tries them, with their steps.
ORDER = {
    "latest.pt": 9,
    "rolling_step_000008.pt": 8,
    "latest_backup.pt": 8,
    "epoch_00002.pt": 8,
    "rolling_step_000006.pt": 6,
    "epoch_00001.pt": 4,
}
DAMAGE = {
    "one bit flipped": lambda content: flip_bit(content, len(content) // 2),
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "empty": lambda content: b"",
    "zero-filled": lambda content: bytes(len(content)),
}


def flip_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def damage(path: Path, how: str) -> None:
    path.write_bytes(DAMAGE[how](path.read_bytes()))


@pytest.fixture
def stopped_run(reference):
    """The uninterrupted run "reference" and the run "stopped", which was stopped at step 9."""
    if not (reference(*FLAGS) / "stopped").exists():
        run_to_end(*FLAGS, *folders("stopped"), faults=[partial(signal_at, 9)])


def copy_of_stopped_run(name: str) -> Path:
    """Copy the stopped run without hard links and dates, so that each checkpoint can be damaged alone."""
    shutil.copytree("stopped", name)
    continue_here(Path(name, "ckpt"))
    for second, path in enumerate(ORDER):  # the newest first
        os.utime(Path(name, "ckpt", path), (second, second))
    assert {path: load(f"{name}/ckpt/{path}")["step"] for path in ORDER} == ORDER
    return Path(name, "ckpt")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize(
    ("count", "how"),
    [
        pytest.param(count, how, marks=() if count % len(DAMAGE) == kind else pytest.mark.storm)
        for count in range(1, len(ORDER))
        for kind, how in enumerate(DAMAGE)
    ],
)
def test_resume_skips_damaged_files_in_order(stopped_run, how, count):
    name = f"{how} {count}"
    folder = copy_of_stopped_run(name)
    damaged = list(ORDER)[:count]
    for file in damaged:
        damage(folder / file, how)
    contents = [(folder / file).read_bytes() for file in damaged]
    text = run_to_end(*FLAGS, *folders(name), "--resume", "latest")
    reported = dict(re.findall(r"^skipped +(.+?\.pt)(?:, step \d+)?: corrupt.*; renamed (\S+)$", text, re.M))
    new_names = [reported.pop(str(folder / file)) for file in damaged]
    assert not reported
    assert all(new.startswith(f"{file}.skipped-") for file, new in zip(damaged, new_names, strict=True))
    assert [(folder / new).read_bytes() for new in new_names] == contents
    next_file = list(ORDER)[count]
    assert f"resumed      from {folder / next_file} at step {ORDER[next_file]}" in text
    assert_equals_reference(name)


def die(rank: int) -> None:
    """Kill the rank before its first step."""
    around_step(before=lambda step, stop: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("which", ["rolling_step_000006.pt", "latest_backup.pt"])
def test_a_kill_before_the_first_save_does_not_undo_a_choice_to_go_back(stopped_run, which, ranks):
    name = f"back to {which} {ranks}"
    folder = copy_of_stopped_run(name)
    run = Run(*FLAGS, *folders(name), "--resume", f"{folder}/{which}", ranks=ranks, faults=[die])
    run.wait()
    assert f"/{which} at step {ORDER[which]}" in run.text() and "| loss" not in run.text()
    os.utime(folder / "latest.pt", (0, 0))  # as in a copy of the folder
    text = run_to_end(*FLAGS, *folders(name), "--resume", "latest", ranks=ranks)
    assert f"resumed      from {folder}/latest.pt at step {ORDER[which]}" in text
    if ranks == 1:
        assert_equals_reference(name)


@pytest.mark.parametrize(
    ("how", "which", "ranks"),
    [("one bit flipped", "latest", 2), ("truncated", "auto", 1), ("empty", "latest", 1), ("zero-filled", "auto", 1)],
)
def test_resume_is_refused_if_all_files_are_damaged(stopped_run, how, which, ranks):
    name = f"{how} {which} {ranks}"
    folder = copy_of_stopped_run(name)
    for file in folder.glob("*.pt"):
        damage(file, how)
    checkpoints, logs = content(folder), content(Path(name, "logs"))
    message = refusal(*FLAGS, *folders(name), "--resume", which, ranks=ranks)
    assert f"{folder}: all checkpoints are corrupt: " in message
    assert all(file in message for file in ORDER)
    assert content(folder) == checkpoints
    assert content(Path(name, "logs")) == logs


FAIL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

ssize_t read(int file, void *buffer, size_t size) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/latest.pt")) {
        errno = EIO;
        return -1;
    }
    return ((ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read"))(file, buffer, size);
}
"""


@pytest.mark.storm
@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_fails_does_not_cost_the_newest_checkpoint(stopped_run, tmp_path, processes):
    """A library makes all reads of latest.pt fail in the processes of the command."""
    if not shutil.which("cc"):
        pytest.skip("requires a C compiler")
    (tmp_path / "fail.c").write_text(FAIL)
    library = str(tmp_path / "fail.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "fail.c"), "-ldl"], check=True)
    name = f"failing disk {processes}"
    folder = copy_of_stopped_run(name)
    before, words = content(folder), command(*FLAGS, *folders(name), "--resume", processes=processes)
    done = subprocess.run(words, env=environment() | {"LD_PRELOAD": library}, capture_output=True, text=True)
    assert done.returncode == (2 if processes == 1 else 1), done.stderr  # torchrun has its own
    assert f"error: {folder}/latest.pt: cannot be read (Input/output error); fix the disk" in done.stderr
    assert content(folder) == before
    run_to_end(*FLAGS, *folders(name), "--resume")
    assert_equals_reference(name)


@pytest.mark.parametrize(
    ("how", "which", "ranks"), [("EIO", "latest", 2), ("EACCES", "auto", 1), ("a folder", "latest", 1)]
)
def test_a_newest_checkpoint_that_cannot_be_read_is_not_skipped(stopped_run, how, which, ranks):
    name = f"unreadable {how}"
    folder = copy_of_stopped_run(name)
    if how == "a folder":
        (folder / "latest.pt").rename(Path(name, "latest.pt"))
        (folder / "latest.pt").mkdir()
    faults = [] if how == "a folder" else [partial(fail_reads, "latest.pt", getattr(errno, how), True)]
    before, logs = sorted(folder.iterdir()), content(Path(name, "logs"))
    message = refusal(*FLAGS, *folders(name), "--resume", which, ranks=ranks, faults=faults)
    reason = {"EIO": "Input/output error", "EACCES": "Permission denied"}.get(how, "Is a directory")
    assert message == (
        f"error: {folder}/latest.pt: cannot be read ({reason}); fix the disk or the permissions, or give an older file"
    )
    assert (sorted(folder.iterdir()), content(Path(name, "logs"))) == (before, logs)
    if how == "a folder":
        (folder / "latest.pt").rmdir()
        Path(name, "latest.pt").rename(folder / "latest.pt")
    run_to_end(*FLAGS, *folders(name), "--resume", which)  # the same command works once the file can be read
    assert_equals_reference(name)


class RunsCode:
    def __reduce__(self):
        return open, ("code-was-run", "w")


def test_foreign_files_are_refused_and_their_code_is_not_run(stopped_run):
    checkpoint = load("stopped/ckpt/latest.pt")
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    torch.save({"state_dict": checkpoint["model"], "epoch": 1}, "lightning.pt")
    torch.save(checkpoint | {"format_version": 99}, "newer.pt")
    torch.save(checkpoint | {"format_version": 2}, "older.pt")
    torch.save(checkpoint | {"scaler": RunsCode()}, "code.pt")
    torch.save(RunsCode(), "zipped.pt")
    torch.save(checkpoint["model"], "weights.pt")
    torch.save(RunsCode(), "old-style.pt", _use_new_zipfile_serialization=False)
    Path("pickle.pt").write_bytes(pickle.dumps(RunsCode()))
    torch.save({"model": checkpoint["model"], "model_args": {"n_layer": 2}}, "nanogpt.pt")
    Path("llm.c.bin").write_bytes(np.array([20240326, 3], np.int32).tobytes())
    Path("folder.pt").mkdir()
    Path("model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    foreign = "expected a value; take another checkpoint, or the version of SteadyGPT that wrote it; see convert_hf.py"
    for file, words in {
        "foreign.pt": f"format_version is None; {foreign}",
        "lightning.pt": f"format_version is None; {foreign}",
        "weights.pt": f"format_version is None; {foreign}",
        "nanogpt.pt": f"format_version is None; {foreign}",
        "newer.pt": "format_version is 99; expected 4; take another checkpoint, or the version of SteadyGPT",
        "older.pt": "format_version is 2; expected 4; take another checkpoint, or the version of SteadyGPT",
        "model.safetensors": "corrupt (File is not a zip file); see convert_hf.py for files of other programs",
        "llm.c.bin": "corrupt (File is not a zip file); see convert_hf.py for files of other programs",
        "code.pt": "corrupt (more than tensors and plain types); see convert_hf.py for files of other programs",
        "zipped.pt": "corrupt (more than tensors and plain types); see convert_hf.py for files of other programs",
        "old-style.pt": "corrupt (File is not a zip file)",
        "pickle.pt": "corrupt (File is not a zip file)",
        "hf": "no checkpoints in hf; try another --checkpoint_dir",
        "folder.pt": "no checkpoints in folder.pt",
        "missing.pt": "no such file",
    }.items():
        message = refusal("--resume", file, tiny=[])
        assert file in message
        assert words in message
    assert not Path("code-was-run").exists()
    assert not Path("logs").exists()  # a refused start leaves no files
