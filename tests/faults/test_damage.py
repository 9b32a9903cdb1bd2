"""Damaged checkpoint files, and files that cannot be read: skipped in order, or refused; never replaced.

What each kind of damage is called, and files of other programs: tests/checkpoint/test_files.py.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import command, environment, folders, load, run_here
from ground import around_step
from harness import Run, assert_equals_reference, continue_here, error_line, run_to_end
from injected import fail_reads, signal_at
from test_files import damage

FLAGS = (
    "--max_steps 12 --checkpoint_freq 2 --keep_checkpoints 2 --steps_per_epoch 4 --total_batch_size 128 --dropout 0.1"
).split()
# The checkpoints of a run stopped after 9 steps, in the order in which --resume latest tries them, with their steps.
ORDER = {
    "latest.pt": 9, "rolling_step_000008.pt": 8, "latest_backup.pt": 8, "epoch_00002.pt": 8,
    "rolling_step_000006.pt": 6, "epoch_00001.pt": 4,
}  # fmt: skip
DAMAGE = ("one bit", "truncated", "empty", "zeros")


@pytest.fixture
def copied_run(reference, request):
    """A copy of a run that was stopped at step 9, whose checkpoints can be damaged alone; and "reference" beside it."""
    if not (reference(*FLAGS) / "stopped").exists():
        run_to_end(*FLAGS, *folders("stopped"), faults=[partial(signal_at, 9)])
    name = request.node.name
    shutil.copytree("stopped", name)  # without hard links
    continue_here(Path(name))
    for second, path in enumerate(ORDER):  # the newest has the oldest date
        os.utime(Path(name, path), (second, second))
    assert {path: load(f"{name}/{path}")["step"] for path in ORDER} == ORDER
    return name, Path(name)


def content(name: str) -> dict[Path, bytes]:
    files = [path for path in Path(name).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(("count", "how"), [
    pytest.param(count, how, marks=() if count % len(DAMAGE) == kind else pytest.mark.storm)
    for count in range(1, len(ORDER)) for kind, how in enumerate(DAMAGE)
])  # fmt: skip
def test_resume_skips_damaged_files_in_order(copied_run, capsys, how, count):
    name, folder = copied_run
    damaged, next_file = list(ORDER)[:count], list(ORDER)[count]
    for file in damaged:
        damage(folder / file, how)
    (folder / "stable.pt").symlink_to("/nowhere/stable.pt")
    before = content(name)
    assert run_here(*FLAGS, *folders(name), "--resume", "latest") == 0
    text = capsys.readouterr().out
    renamed = dict(re.findall(r"^skipped +(.+?\.pt)(?:, step \d+)?: .*; renamed (\S+)$", text, re.M))
    assert os.readlink(folder / renamed.pop(str(folder / "stable.pt"))) == "/nowhere/stable.pt"
    assert renamed.keys() == {str(folder / file) for file in damaged}
    for file, new in renamed.items():
        assert re.fullmatch(rf"{Path(file).name}\.skipped-\d{{8}}-\d{{6}}-\d{{6}}", new)
        assert (folder / new).read_bytes() == before[Path(file)]
    assert f"resumed      from {folder / next_file} at step {ORDER[next_file]}" in text
    assert_equals_reference(name)


def die(rank: int) -> None:
    """Kill the rank before its first step."""
    around_step(before=lambda step, stop: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(("which", "ranks"), [
    ("rolling_step_000006.pt", 1),
    pytest.param("latest_backup.pt", 2, marks=pytest.mark.storm),
    pytest.param("rolling_step_000006.pt", 2, marks=pytest.mark.storm),
    pytest.param("latest_backup.pt", 1, marks=pytest.mark.storm),
])  # fmt: skip
def test_a_kill_before_the_first_save_does_not_undo_a_choice_to_go_back(copied_run, which, ranks):
    name, folder = copied_run
    run = Run(*FLAGS, *folders(name), "--resume", f"{folder}/{which}", ranks=ranks, faults=[die])
    run.wait()
    assert f"/{which} at step {ORDER[which]}" in run.text() and "| loss" not in run.text()
    os.utime(folder / "latest.pt", (0, 0))  # as in a copy of the folder
    text = run_to_end(*FLAGS, *folders(name), "--resume", "latest", ranks=ranks)
    assert f"resumed      from {folder}/latest.pt at step {ORDER[which]}" in text
    if ranks == 1:
        assert_equals_reference(name)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.storm)])
def test_resume_is_refused_if_all_files_are_damaged(copied_run, ranks):
    name, folder = copied_run
    for file in folder.glob("*.pt"):
        damage(file, "one bit")
    before = content(name)
    message = error_line(*FLAGS, *folders(name), "--resume", "latest", ranks=ranks)
    assert message.startswith(f"error: {folder}: ")
    assert all(file in message for file in ORDER)
    assert content(name) == before


def test_a_newest_checkpoint_that_cannot_be_read_is_not_skipped(copied_run):
    name, folder = copied_run
    before, faults = content(name), [partial(fail_reads, "latest.pt", errno.EIO, True)]
    message = error_line(*FLAGS, *folders(name), "--resume", "latest", ranks=2, faults=faults)
    assert re.match(rf"error: {re.escape(str(folder))}/latest\.pt: .*\(Input/output error\); ", message)
    assert content(name) == before
    assert run_here(*FLAGS, *folders(name), "--resume", "latest") == 0  # works once the file can be read
    assert_equals_reference(name)


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
def test_a_disk_that_fails_does_not_cost_the_newest_checkpoint(copied_run, tmp_path, processes):
    """A library makes all reads of latest.pt fail in the processes of the command."""
    if not shutil.which("cc"):
        pytest.skip("requires a C compiler")
    (tmp_path / "fail.c").write_text(FAIL)
    library = str(tmp_path / "fail.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "fail.c"), "-ldl"], check=True)
    name, folder = copied_run
    before, words = content(name), command(*FLAGS, *folders(name), "--resume", processes=processes)
    done = subprocess.run(words, env=environment() | {"LD_PRELOAD": library}, capture_output=True, text=True)
    assert done.returncode == (2 if processes == 1 else 1), done.stderr  # torchrun has its own
    assert re.search(rf"error: {re.escape(str(folder))}/latest\.pt: .*\(Input/output error\); ", done.stderr)
    assert content(name) == before
    run_to_end(*FLAGS, *folders(name), "--resume")
    assert_equals_reference(name)
