"""The order of fsync and rename in everything that is written to last: a power cut leaves whole files with their names.

A name may be given to content only after an fsync of this content, and the names in a folder are durable only after an
fsync of the folder. A recorder notes both for every file of a command.
"""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from conftest import run_here
from ground import SCORE_FILES

import convert_hf
import prepare_dataset

TRANSIENT = {"status.json", ".upload.tmp"}  # may be lost


class Recorder:
    """Notes names that are given to content without an fsync, and folders without an fsync after the last name."""

    def __init__(self, monkeypatch, folder: Path):
        self.folder = folder.resolve()
        self.synced: set[tuple[int, int]] = set()  # device and inode of content
        self.not_synced: list[str] = []
        self.open_folders: dict[Path, str] = {}  # folder -> the last name in it
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, self.naming(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self.syncing(os.fsync))

    def naming(self, rename):
        def recorded(source, target, **options):
            rename(source, target, **options)
            path = Path(os.path.realpath(target))
            if not path.is_relative_to(self.folder) or path.name in TRANSIENT:
                return
            for file in [path, *path.rglob("*")]:  # a folder is named with all that is in it
                info = file.stat()
                if stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) not in self.synced:
                    self.not_synced.append(str(file.relative_to(self.folder)))
            self.open_folders[path.parent] = path.name

        return recorded

    def syncing(self, fsync):
        def recorded(file):
            fsync(file)
            info = os.fstat(file)
            if stat.S_ISDIR(info.st_mode):
                self.open_folders.pop(Path(os.readlink(f"/proc/self/fd/{file}")), None)
            else:
                self.synced.add((info.st_dev, info.st_ino))

        return recorded


@pytest.fixture
def recorder(workdir, monkeypatch) -> Recorder:
    return Recorder(monkeypatch, workdir)


def assert_durable(recorder: Recorder) -> None:
    assert recorder.not_synced == []
    assert recorder.open_folders == {}


SAVES = ("--eval_freq", "2", "--checkpoint_freq", "3", "--steps_per_epoch", "4", "--keep_checkpoints", "1")


def without_links(*_, **__):
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("has_links", [True, False], ids=["linked", "copied where there are no links"])
def test_saves(recorder, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", without_links)
    assert run_here(*SAVES) == 0
    assert run_here(*SAVES, "--resume", "latest", "--max_steps", "12") == 0
    names = {path.name for path in Path("checkpoints").iterdir()}
    assert {"latest.pt", "latest_backup.pt", "best_model.pt", "epoch_00001.pt", "run.json", *SCORE_FILES} <= names
    assert_durable(recorder)


def test_a_return_to_an_older_checkpoint(recorder):
    assert run_here(*SAVES) == 0
    assert run_here("--resume", "checkpoints/epoch_00001.pt", "--max_steps", "9") == 0
    assert_durable(recorder)


def test_a_restore_from_a_mirror(recorder, workdir, inject):
    """What is downloaded is durable before the first step."""
    mirror = ("--mirror", f"file://{workdir}/mirror")
    assert run_here(*SAVES, *mirror) == 0
    shutil.rmtree("checkpoints")
    recorder.open_folders.clear()
    recorder.synced.clear()
    recorder.not_synced.clear()  # of the mirror, which stands for a store
    recorder.folder /= "checkpoints"
    before = []

    def check(step: int, stop) -> None:
        assert_durable(recorder)
        before.append(step)

    inject.around_step(before=check)
    # "off", because a resume saves the names that the mirror lacks, and check() would see such a save half done.
    assert run_here("--resume", "latest", "--max_steps", "9", *mirror, "--background_upload", "off") == 0
    assert before == [8]
    assert_durable(recorder)


def test_a_damaged_checkpoint_that_is_put_aside(recorder):
    assert run_here(*SAVES) == 0
    latest = Path("checkpoints/latest.pt")
    latest.unlink()
    latest.write_bytes(b"damaged")
    recorder.synced.add((latest.stat().st_dev, latest.stat().st_ino))  # it keeps what it has
    assert run_here("--resume", "latest", "--max_steps", "9") == 0
    assert_durable(recorder)


@pytest.mark.parametrize("target", ["model.pt", "hf_model"])
def test_an_export(recorder, target):
    assert run_here("--max_steps", "3") == 0
    assert convert_hf.main(["checkpoints/latest.pt", target]) == 0
    assert_durable(recorder)


def test_a_preparation(recorder):
    Path("docs.jsonl").write_text("".join(json.dumps({"text": "words " * n}) + "\n" for n in range(1, 200)))
    flags = "--source docs.jsonl --tokenizer bytes --shard_size 40_000 --num_workers 1 --out prepared"
    assert prepare_dataset.main(flags.split()) == 0
    assert len(list(Path("prepared").glob("*.npy"))) > 2
    assert_durable(recorder)
