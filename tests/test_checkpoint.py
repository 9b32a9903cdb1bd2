"""One write in many tiers, whole or not at all; damage is found and named."""

import errno
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadygpt import checkpoint
from steadygpt.checkpoint import (
    FORMAT_VERSION,
    checkpoint_files,
    checkpoint_table,
    find_checkpoint,
    read_checkpoint,
)
from steadygpt.cli import UserError
from steadygpt.durable import UncachedFile, lock_folder, replace_file
from steadygpt.saves import CheckpointWriter


def content(step: int, **more) -> dict:
    """A checkpoint like those of train.py, with a tensor that tells its step."""
    return {
        "format_version": FORMAT_VERSION,
        "step": step,
        "rows_consumed": 4 * step,
        "model": {"weight": torch.full((1000,), float(step))},
        "optimizer": {"state": {}, "param_groups": []},
        "model_config": {},
        "train_config": {},
        "tokenizer": "bytes",
        "loss": 3.25,
        "val_loss": None,
        "epoch": step / 10,
        **more,
    }


def save(writer: CheckpointWriter, step: int, *tiers: str) -> list[tuple[str, str]]:
    writer.save(content(step), list(tiers))
    writer.wait()
    return list(writer.take_reports())


@pytest.fixture
def writer(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    yield writer
    writer.close()


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_save_is_one_file_under_all_its_names(writer, tmp_path):
    [(outcome, report)] = save(writer, 7, "rolling_step_000007.pt", "epoch_00001.pt", "best_model.pt")
    assert outcome == "saved"
    assert "saved step 7 as latest.pt, rolling_step_000007.pt, epoch_00001.pt" in report
    assert names(tmp_path) == ["best_model.pt", "epoch_00001.pt", "latest.pt", "rolling_step_000007.pt"]
    assert {os.stat(tmp_path / name).st_ino for name in names(tmp_path)} == {os.stat(tmp_path / "latest.pt").st_ino}


def test_where_there_are_no_hard_links_the_names_are_copies(writer, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    save(writer, 1)
    save(writer, 2, "rolling_step_000002.pt")
    assert names(tmp_path) == ["latest.pt", "latest_backup.pt", "rolling_step_000002.pt"]
    assert [read_checkpoint(tmp_path / name)["step"] for name in names(tmp_path)] == [2, 1, 2]


def test_the_save_before_stays_as_the_backup(writer, tmp_path):
    for step in (1, 2, 3):
        save(writer, step)
    assert read_checkpoint(tmp_path / "latest.pt")["step"] == 3
    assert read_checkpoint(tmp_path / "latest_backup.pt")["step"] == 2


def test_saving_a_step_again_does_not_push_the_one_before_out_of_the_backup(writer, tmp_path):
    for step in (1, 2, 2):
        save(writer, step)
    assert read_checkpoint(tmp_path / "latest_backup.pt")["step"] == 1


def test_after_going_back_the_older_branch_goes_first(writer, tmp_path):
    for step in (10, 20, 30, 11, 12):
        save(writer, step, f"rolling_step_{step:06d}.pt")
        os.utime(tmp_path / "latest.pt", ns=(step, 10**18 + len(names(tmp_path)) * 10**9 + step % 10 * 10**9))
    assert [file.name for file in checkpoint_files(tmp_path)[2:]] == [
        "rolling_step_000012.pt", "rolling_step_000011.pt", "rolling_step_000030.pt",
    ]  # fmt: skip


def test_a_full_disk_is_a_report_and_the_old_files_stay(writer, tmp_path, monkeypatch):
    save(writer, 1)
    before = (tmp_path / "latest.pt").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        [(outcome, report)] = save(writer, 2)
    assert outcome == "not saved"
    assert report.startswith(f"{tmp_path / 'latest.pt'}: step 2 was not saved: ")
    assert "No space left" in report
    assert re.search(r"; it takes 4,000 bytes, [\d,]+ are free; older", report)
    assert names(tmp_path) == ["latest.pt"]
    assert (tmp_path / "latest.pt").read_bytes() == before
    [(outcome, _)] = save(writer, 3)  # space again
    assert outcome == "saved"
    assert read_checkpoint(tmp_path / "latest.pt")["step"] == 3


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_whatever_stops_a_save_is_a_report(writer, monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        [(outcome, report)] = save(writer, 1)
    assert outcome == "not saved"
    assert (str(error) or "MemoryError") in report
    [(outcome, _)] = save(writer, 2)
    assert outcome == "saved"


def test_a_folder_that_went_away_is_a_report(tmp_path):
    writer = CheckpointWriter(tmp_path / "gone", keep=3)
    (tmp_path / "gone").rmdir()
    [(outcome, report)] = save(writer, 1)
    assert outcome == "not saved"
    assert "No such file or directory" in report
    assert str(tmp_path / "gone") in report
    writer.close()


def test_the_loop_goes_on_while_a_save_is_written(writer, monkeypatch):
    may_write = threading.Event()
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (may_write.wait(10), real(*args)))
    writer.save(content(1), [])
    assert list(writer.take_reports()) == []  # it came back before anything was written
    may_write.set()
    writer.wait()
    assert len(list(writer.take_reports())) == 1


def test_what_a_killed_writer_left_is_cleaned_up(tmp_path):
    (tmp_path / ".latest.pt.tmp").write_bytes(b"half")
    CheckpointWriter(tmp_path, keep=3).close()
    assert names(tmp_path) == []


def test_the_mirror_gets_each_save(tmp_path):
    writer = CheckpointWriter(tmp_path / "here", keep=3, mirror=f"file://{tmp_path}/there")
    save(writer, 1, "rolling_step_000001.pt")
    writer.close()
    assert names(tmp_path / "there") == ["latest.pt", "rolling_step_000001.pt"]
    assert read_checkpoint(tmp_path / "there" / "latest.pt")["step"] == 1


def test_a_mirror_that_fails_is_told_and_the_save_stands(tmp_path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "here", keep=3, mirror=f"file://{tmp_path}/file")
    (saved, _), (mirrored, report) = save(writer, 1)
    writer.close()
    assert (saved, mirrored) == ("saved", "failed")
    assert "not mirrored to file://" in report
    assert read_checkpoint(tmp_path / "here" / "latest.pt")["step"] == 1


# ---------------------------------------------------------------------------------------------------------------------


def damage(path, how: str) -> None:
    whole = bytearray(path.read_bytes())
    path.unlink()  # not its other names
    if how == "one bit":
        whole[len(whole) // 2] ^= 1
    contents = {"one bit": whole, "truncated": whole[:-100], "empty": b"", "zeros": bytes(len(whole))}
    path.write_bytes(contents[how])


def test_the_checkpoint_that_a_run_goes_on_from_becomes_the_latest(tmp_path):
    def steps():
        return {path.name: read_checkpoint(path)["step"] for path in checkpoint_files(tmp_path)[:2]}

    writer = CheckpointWriter(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(writer, step, f"rolling_step_{step:06d}.pt")
    writer.close()
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "latest.pt").close()
    assert steps() == {"latest.pt": 3, "latest_backup.pt": 2}
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "latest_backup.pt").close()
    assert steps() == {"latest.pt": 2, "latest_backup.pt": 3}
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "rolling_step_000001.pt").close()
    assert steps() == {"latest.pt": 1, "latest_backup.pt": 2}
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "rolling_step_000001.pt").close()  # it is already
    assert steps() == {"latest.pt": 1, "latest_backup.pt": 2}
    damage(tmp_path / "latest.pt", "one bit")
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "latest_backup.pt").close()
    assert steps() == {"latest.pt": 2, "latest_backup.pt": 2}
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_a_damaged_latest_never_replaces_the_good_backup(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    save(writer, 1), save(writer, 2), writer.close()
    damage(tmp_path / "latest.pt", "one bit")
    writer = CheckpointWriter(tmp_path, keep=3)
    save(writer, 3), writer.close()
    assert read_checkpoint(tmp_path / "latest_backup.pt")["step"] == 1


def test_the_table_shows_each_tier_and_what_is_damaged(writer, tmp_path):
    save(writer, 40, "rolling_step_000040.pt")
    save(writer, 50, "rolling_step_000050.pt", "epoch_00005.pt")
    damage(tmp_path / "latest_backup.pt", "truncated")
    table = list(checkpoint_table(tmp_path))
    assert table[0].split() == ["file", "step", "epoch", "loss", "val", "loss", "size", "age", "state"]
    rows = {line.split()[0]: line for line in table[1:-1]}
    assert list(rows) == [
        "latest.pt", "latest_backup.pt", "rolling_step_000050.pt", "rolling_step_000040.pt", "epoch_00005.pt",
    ]  # fmt: skip
    assert rows["latest.pt"].split()[1:5] == ["50", "5.00", "3.2500", "-"]
    assert rows["latest.pt"].endswith("intact")
    assert "corrupt" in rows["latest_backup.pt"]
    assert table[-1].startswith("5 names of 3 files")


def test_an_empty_folder_says_where_to_look(tmp_path):
    with pytest.raises(UserError, match="--checkpoint_dir"):
        list(checkpoint_table(tmp_path))
    with pytest.raises(UserError, match="--checkpoint_dir"):
        find_checkpoint("latest", tmp_path)
    assert find_checkpoint("auto", tmp_path) == (None, None, [])


# ---------------------------------------------------------------------------------------------------------------------


def test_replace_file_leaves_the_old_content_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write(b"half of the new")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"


@given(st.lists(st.binary(max_size=20_000), max_size=5))
def test_past_the_cache_the_same_bytes_are_written(chunks):
    for folder in filter(os.path.isdir, (tempfile.gettempdir(), "/dev/shm")):  # memory may have no O_DIRECT
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            with UncachedFile(Path(file.name), buffer_size=4096) as uncached:
                assert [uncached.write(chunk) for chunk in chunks] == [len(chunk) for chunk in chunks]
            assert file.read() == b"".join(chunks)


def test_a_file_system_that_takes_the_flag_but_not_the_write_is_written_through_the_cache(tmp_path):
    with UncachedFile(tmp_path / "file", buffer_size=1000) as file:  # no whole pages
        file.write(bytes(1500))
        assert not file.direct
    assert (tmp_path / "file").read_bytes() == bytes(1500)


def test_a_full_disk_while_writing_past_the_cache_is_an_oserror():
    with pytest.raises(OSError) as caught, UncachedFile(Path("/dev/full")) as file:
        torch.save({"weight": torch.zeros(2**23)}, file)
    assert caught.value.errno == errno.ENOSPC


def test_a_lock_goes_with_its_file(tmp_path):
    lock = lock_folder(tmp_path, "wait")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}; wait"):
        lock_folder(tmp_path, "wait")
    lock.close()
    lock_folder(tmp_path, "wait").close()


def test_files_are_tried_in_the_documented_order(writer, tmp_path):
    for step in (1, 2, 3, 4):
        tiers = [f"rolling_step_{step:06d}.pt", f"epoch_{step:05d}.pt", checkpoint.BEST]
        save(writer, step, *tiers)
        os.utime(tmp_path / "latest.pt", ns=(0, 10**18 + step * 10**9))
    assert [file.name for file in checkpoint_files(tmp_path)] == [
        "latest.pt", "latest_backup.pt",
        "rolling_step_000004.pt", "rolling_step_000003.pt", "rolling_step_000002.pt",
        "epoch_00004.pt", "epoch_00003.pt", "epoch_00002.pt", "epoch_00001.pt", "best_model.pt",
    ]  # fmt: skip
