"""Damaged and foreign files: named with the reason, passed over in the documented order, never run, never touched."""

import contextlib
import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import load, write_data
from harness import assert_continued, folders, refused, whole_life
from injected import stop_after

FLAGS = (
    "--max_steps 12 --checkpoint_freq 2 --keep_checkpoints 2 --steps_per_epoch 4 --total_batch_size 128 --dropout 0.1"
).split()
# The files of a run that was stopped after 9 steps, in the order in which --resume latest tries them, and their steps.
ORDER = {
    "latest.pt": 9,
    "latest_backup.pt": 8,
    "rolling_step_000008.pt": 8,
    "rolling_step_000006.pt": 6,
    "epoch_00002.pt": 8,
    "epoch_00001.pt": 4,
}
DAMAGE = ("one bit flipped", "truncated", "empty", "zero-filled")


def damage(path: Path, how: str) -> None:
    """As a disk does it: the file's time stays."""
    stat, whole = path.stat(), path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(
        dict(zip(DAMAGE, (flipped, whole[: len(whole) * 2 // 3], b"", bytes(len(whole))), strict=True))[how]
    )
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A folder with data, the uninterrupted run in "whole" and one that was stopped at step 9 in "stopped"."""
    folder = tmp_path_factory.mktemp("damage")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        whole_life(*FLAGS, *folders("whole"))
        whole_life(*FLAGS, *folders("stopped"), faults=[partial(stop_after, 9)])
        yield folder


def copy_of_the_run(name: str) -> Path:
    """A copy of the stopped run in which each name is a file of its own."""
    shutil.copytree("stopped", name)
    assert {path: load(f"{name}/ckpt/{path}")["step"] for path in ORDER} == ORDER
    return Path(name, "ckpt")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("count", range(1, len(ORDER)))
def test_damaged_files_are_passed_over_in_order(stopped_run, how, count):
    name = f"{how} {count}"
    folder = copy_of_the_run(name)
    damaged = list(ORDER)[:count]
    for file in damaged:
        damage(folder / file, how)
    text = whole_life(*FLAGS, *folders(name), "--resume", "latest")
    said = re.findall(r"^passed over (.*?): (damaged.*)$", text, re.M)
    assert [file for file, _ in said] == [str(folder / file) for file in damaged]
    heir = list(ORDER)[count]
    assert f"resumed from {folder / heir} at step {ORDER[heir]}" in text
    assert_continued(name)


@pytest.mark.parametrize(
    ("how", "which", "ranks"),
    [*((how, which, 1) for how in DAMAGE for which in ("latest", "auto")), ("one bit flipped", "latest", 2)],
)
def test_with_none_left_it_stops_and_touches_nothing(stopped_run, how, which, ranks):
    name = f"{how} {which} {ranks}"
    folder = copy_of_the_run(name)
    for file in folder.glob("*.pt"):
        damage(file, how)
    before, logs = content(folder), content(Path(name, "logs"))
    message = refused(*FLAGS, *folders(name), "--resume", which, ranks=ranks)
    assert f"no checkpoint in {folder} is whole" in message and all(file in message for file in ORDER)
    assert content(folder) == before and content(Path(name, "logs")) == logs


class RunsCode:
    def __reduce__(self):
        return open, ("it-ran", "w")


def test_what_is_no_checkpoint_is_refused_and_nothing_of_it_runs(stopped_run):
    ours = load("stopped/ckpt/latest.pt")
    torch.save({"weights": torch.zeros(3)}, "foreign.pt")
    torch.save(ours | {"format_version": 99}, "newer.pt")
    torch.save(ours | {"scaler": RunsCode()}, "code.pt")
    torch.save(RunsCode(), "zipped.pt")
    torch.save(ours["model"], "weights.pt")
    torch.save(RunsCode(), "old-style.pt", _use_new_zipfile_serialization=False)
    Path("pickle.pt").write_bytes(pickle.dumps(RunsCode()))
    Path("folder.pt").mkdir()
    for file, words in {
        "foreign.pt": "not a SteadyGPT checkpoint (expected format_version, int)",
        "weights.pt": "not a SteadyGPT checkpoint",
        "newer.pt": "format 99; expected at most 2: update SteadyGPT",
        "code.pt": "holds more than tensors and plain types; it was not loaded",
        "zipped.pt": "holds more than tensors and plain types; it was not loaded",
        "old-style.pt": "not a checkpoint",
        "pickle.pt": "not a checkpoint",
        "folder.pt": "a folder; expected latest, auto, best or a checkpoint file",
        "missing.pt": "no such file",
    }.items():
        message = refused("--resume", file, tiny=[])
        assert file in message and words in message
    assert not Path("it-ran").exists()
    assert not Path("logs").exists()  # of no use to anyone


def test_a_checkpoint_of_format_1_is_read(stopped_run):
    """Its data was recognized otherwise, and it kept no losses."""
    folder = copy_of_the_run("older")
    saved = load(folder / "latest.pt")
    del saved["recent_losses"]
    torch.save(saved | {"format_version": 1, "data_fingerprint": "0123abcd"}, folder / "latest.pt")
    whole_life(*FLAGS, *folders("older"), "--resume")
    assert load(folder / "latest.pt")["step"] == 12 and load(folder / "latest.pt")["format_version"] == 2
