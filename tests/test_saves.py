"""When a run saves, under which names, evaluations.json, and the background writer."""

import errno
import json
import math
import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import content, damage, names

from steadygpt import saves
from steadygpt.checkpoint import Captured, checkpoint_files, read_checkpoint, read_evaluations
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks, Silent
from steadygpt.saves import CheckpointWriter, Saves, interval_text
from steadygpt.start import known_evaluations
from steadygpt.table import checkpoint_table


class Log:
    def __init__(self):
        self.said, self.warned, self.events, self.beats = [], [], [], 0

    def say(self, line):
        self.said.append(line)

    def warn(self, line, event=""):
        self.warned.append(line)
        self.events.append(event)

    def note(self, **facts):
        pass

    def beat(self):
        self.beats += 1

    def flush(self):
        pass


class Clock:
    """A fake of the module time; tests advance now_s."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A fake run with Saves and a fake clock; run.at(step) saves if a save is due and returns the files."""
    clock = Clock()
    monkeypatch.setattr(saves, "time", clock)
    config = SimpleNamespace(checkpoint_freq=10, checkpoint_minutes=1.0, background_upload=True)
    run = SimpleNamespace(clock=clock, log=Log(), step=0, pause_s=0.0, folder=tmp_path, captured=[])

    def capture():
        clock.now_s += run.pause_s
        run.captured.append(run.step)
        return Captured(content(run.step))

    run.writer = CheckpointWriter(tmp_path, keep=3)
    run.saves = Saves(config, Ranks(torch.device("cpu")), capture, run.log, run.writer)

    def at(step, seconds=0.0, milestones=(), last=False):
        run.step, clock.now_s = step, clock.now_s + seconds
        run.saves.save_if_due(step, list(milestones), last, bool)
        run.writer.wait()
        return names(tmp_path)

    run.at = at
    yield run
    run.saves.close()


def test_step_is_saved_under_the_names_of_its_tiers(run):
    assert run.at(0) == []
    assert run.at(9) == []
    assert run.at(10) == ["latest.pt", "rolling_step_000010.pt"]
    assert run.at(13, milestones=["epoch_00002.pt"])[0] == "epoch_00002.pt"
    assert run.captured == [10, 13]
    run.at(14, last=True)
    assert read_checkpoint(run.folder / "latest.pt")["step"] == 14


def test_timed_save_writes_only_latest_once_a_minute(run):
    assert run.at(1, seconds=59) == []
    assert run.at(2, seconds=1) == ["latest.pt"]
    assert run.at(3, seconds=59) == ["latest.pt"]
    assert run.at(4, seconds=1) == ["latest.pt", "latest_backup.pt"]
    run.at(10, seconds=59)  # restarts the clock
    run.at(11, seconds=59)
    assert run.captured == [2, 4, 10]


def test_timed_saves_pause_training_for_at_most_one_percent(run):
    run.pause_s = 9.0
    run.at(10)
    assert run.saves.interval_s() == 60  # the first pause does not count: it includes the allocation of host memory
    run.pause_s = 3.0
    run.at(20)
    assert run.saves.interval_s() == pytest.approx(300)
    assert [line for line in run.log.said if "paused" in line] == [
        "a save paused training for 3.0 s, so latest.pt is saved at least every 5 min 00 s, 0.0 GB a day"
    ]
    run.pause_s = 0.5  # the interval follows the longest pause
    run.at(30)
    run.at(31, seconds=299)
    assert run.captured == [10, 20, 30]
    run.at(32, seconds=1)
    assert run.captured == [10, 20, 30, 32]


def test_checkpoint_minutes_0_disables_timed_saves(run):
    run.saves.config.checkpoint_minutes = 0
    run.at(1, seconds=1e6)
    assert run.captured == []


def test_timed_save_waits_for_the_save_in_flight(run, monkeypatch):
    may_write, real = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (may_write.wait(10), real(*args)))
    run.saves.save_if_due(10, [], False, bool)
    run.clock.now_s += 1000
    run.saves.save_if_due(11, [], False, bool)
    assert run.captured == [0]  # only the capture of step 10 (run.step is unset here)
    may_write.set()


def test_interval_text_contains_bytes_per_day():
    assert interval_text(60, 1.49e9) == "latest.pt is saved at least every 1 min 00 s, 2.1 TB a day"
    assert interval_text(3600, 10e6) == "latest.pt is saved at least every 1 h 00 min, 0.2 GB a day"


# ---------------------------------------------------------------------------------------------------------------------
# evaluations


def test_best_model_is_a_link_to_the_save_of_its_step(run):
    run.at(10)
    run.saves.record(10, {"val_loss": 3.5}, best=True)
    run.saves.finish(10)
    assert run.captured == [10]  # one capture, one write
    assert (run.folder / "best_model.pt").samefile(run.folder / "rolling_step_000010.pt")
    assert run.log.said[1:] == ["best_model.pt is step 10 (val loss 3.5000)"]
    assert read_evaluations(run.folder) == {10: {"val_loss": 3.5}}


def test_best_step_that_was_not_saved_is_captured(run):
    run.at(10)
    run.step = 15
    run.saves.record(15, {"val_loss": 3.5}, best=True)
    run.saves.finish(15)
    assert run.captured == [10, 15]
    assert read_checkpoint(run.folder / "best_model.pt")["step"] == 15


def test_scores_of_a_step_are_merged_and_nan_is_stored_as_null(run):
    run.at(10)
    run.saves.record(10, {"val_loss": math.nan})
    run.saves.record(10, {"hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.3})
    run.saves.finish(10)
    stored = json.loads((run.folder / "evaluations.json").read_text())
    assert stored == {"10": {"val_loss": None, "hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.3}}


def test_best_model_that_cannot_be_saved_is_a_warning_and_not_recorded(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        run.at(10)
        run.saves.record(10, {"val_loss": 3.5}, best=True)
        run.saves.writer.pool.submit(lambda: None).result()
    run.saves.report()
    assert "step 10 was not saved" in run.log.warned[0]
    assert run.log.events[0] == "save failed"
    assert "best_model.pt was not written: step 10 was not saved" in run.log.warned[1]
    assert read_evaluations(run.folder) == {}  # so a resumed run validates this step again
    run.saves.finish(10)  # there is space again
    assert names(run.folder) == ["latest.pt"]


def test_resumed_run_knows_the_best_validation_loss_of_earlier_steps(tmp_path):
    (tmp_path / "evaluations.json").write_text('{"10": {"val_loss": 3.5}, "20": {"val_loss": 3.1}}')
    known = known_evaluations(tmp_path, 15, Silent())
    resumed = Saves(None, Ranks(torch.device("cpu")), dict, Silent(), Silent(), 15, known)
    assert resumed.best_val_loss(None) == 3.5
    assert resumed.best_val_loss(3.6) == 3.5
    assert resumed.best_val_loss(3.4) == 3.4  # older checkpoints contain their validation loss


@pytest.mark.parametrize("stored", ["", "[]", '{"ten": {}}', '{"10": 3.5}'])
def test_corrupt_evaluations_are_a_user_error(tmp_path, stored):
    (tmp_path / "evaluations.json").write_text(stored)
    with pytest.raises(UserError, match=r"evaluations.json: corrupt, so its validation losses are ignored"):
        read_evaluations(tmp_path)


def test_table_takes_validation_losses_from_the_evaluations(run):
    run.at(10)
    run.saves.record(10, {"val_loss": 3.5}, best=True)
    run.at(13, milestones=["epoch_00001.pt"])
    run.saves.record(13, {"hellaswag_acc": 0.25})
    run.saves.finish(13)
    rows = {line.split()[0]: line.split() for line in checkpoint_table(run.folder)}
    assert rows["best_model.pt"][1:5] == ["10", "1.00", "3.2500", "3.5000"]
    assert rows["latest.pt"][4] == "-"  # not validated


# ---------------------------------------------------------------------------------------------------------------------
# CheckpointWriter


def save(writer: CheckpointWriter, step: int, *tiers: str) -> list[tuple[str, str]]:
    writer.save(Captured(content(step)), list(tiers))
    writer.wait()
    return list(writer.take_reports())


@pytest.fixture
def writer(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    yield writer
    writer.close()


def test_save_is_one_file_with_several_names(writer, tmp_path):
    [(outcome, report)] = save(writer, 7, "rolling_step_000007.pt", "epoch_00001.pt", "best_model.pt")
    assert outcome == "saved"
    assert "saved step 7 as latest.pt, rolling_step_000007.pt, epoch_00001.pt" in report
    assert names(tmp_path) == ["best_model.pt", "epoch_00001.pt", "latest.pt", "rolling_step_000007.pt"]
    assert {os.stat(tmp_path / name).st_ino for name in names(tmp_path)} == {os.stat(tmp_path / "latest.pt").st_ino}


def test_without_hard_links_each_name_is_a_copy(writer, tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    save(writer, 1)
    save(writer, 2, "rolling_step_000002.pt")
    assert names(tmp_path) == ["latest.pt", "latest_backup.pt", "rolling_step_000002.pt"]
    assert [read_checkpoint(tmp_path / name)["step"] for name in names(tmp_path)] == [2, 1, 2]


def test_previous_step_that_was_saved_becomes_the_backup(writer, tmp_path):
    for step in (1, 2, 3, 3):
        save(writer, step)
    assert read_checkpoint(tmp_path / "latest.pt")["step"] == 3
    assert read_checkpoint(tmp_path / "latest_backup.pt")["step"] == 2


@pytest.mark.parametrize(("keep_epochs", "epochs"), [(0, (1, 2, 3, 4)), (2, (3, 4))])
def test_only_the_newest_rolling_checkpoints_and_epochs_are_kept(tmp_path, keep_epochs, epochs):
    writer = CheckpointWriter(tmp_path, keep=3, keep_epochs=keep_epochs)
    for step in (1, 2, 3, 4):
        save(writer, step, f"rolling_step_{step:06d}.pt", f"epoch_{step:05d}.pt")
        os.utime(tmp_path / "latest.pt", ns=(0, 10**18 + step * 10**9))
    writer.close()
    rolling = [f"rolling_step_{step:06d}.pt" for step in (2, 3, 4)]
    assert names(tmp_path) == [*(f"epoch_{step:05d}.pt" for step in epochs), "latest.pt", "latest_backup.pt", *rolling]


def test_rolling_checkpoints_are_deleted_by_age_not_by_step(writer, tmp_path):
    for step in (10, 20, 30, 11, 12):
        save(writer, step, f"rolling_step_{step:06d}.pt")
        os.utime(tmp_path / "latest.pt", ns=(step, 10**18 + len(names(tmp_path)) * 10**9 + step % 10 * 10**9))
    assert [file.name for file in checkpoint_files(tmp_path)[2:]] == [
        "rolling_step_000012.pt", "rolling_step_000011.pt", "rolling_step_000030.pt",
    ]  # fmt: skip


def test_run_that_waits_for_a_slow_save_gives_signs_of_life(run, monkeypatch):
    really_save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (time.sleep(0.3), really_save(*args)))
    run.step = 10
    run.saves.save_if_due(10, [], False, bool)
    assert run.log.beats == 0
    run.saves.finish(10)
    assert run.log.beats > 5


def test_nearly_full_disk_is_an_alert_before_a_save_fails(run, monkeypatch):
    free = iter([10**9, 0.0, 0.5, 1.5, 10**9, 0.9])  # in checkpoints
    usage = lambda folder: SimpleNamespace(free=int(next(free) * (run.folder / "latest.pt").stat().st_size))  # noqa: E731
    monkeypatch.setattr(saves.shutil, "disk_usage", usage)
    for step in range(10, 70, 10):
        run.at(step)
    run.saves.report()
    rooms = [re.search(r"room for (\d) more checkpoint", line)[1] for line in run.log.warned]
    assert (rooms, run.log.events) == (["0", "1", "0"], ["no disk"] * 3)


def test_folder_that_vanishes_after_a_save_does_not_end_the_run(run, monkeypatch):
    def gone(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saves.shutil, "disk_usage", gone)
    run.at(10)
    run.saves.report()
    assert "saved step 10" in run.log.said[0] and not run.log.warned


FAILURES = {
    "full disk": (os, "fsync", OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "broken disk": (torch, "save", OSError(errno.EIO, "Input/output error"), "Input/output error"),
    "no memory": (torch, "save", MemoryError(), "MemoryError"),
}


@pytest.mark.parametrize(("module", "function", "error", "reason"), FAILURES.values(), ids=FAILURES)
def test_any_error_during_a_save_is_reported_and_old_files_stay(
    writer, tmp_path, monkeypatch, module, function, error, reason
):
    def fail(*_):
        raise error

    save(writer, 1)
    before = (tmp_path / "latest.pt").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail)
        [(outcome, report)] = save(writer, 2)
    assert outcome == "not saved"
    assert report.startswith(f"{tmp_path / 'latest.pt'}: step 2 was not saved: ")
    assert reason in report
    assert re.search(r"; it takes 4,000 bytes, [\d,]+ are free; older", report)
    assert names(tmp_path) == ["latest.pt"]
    assert (tmp_path / "latest.pt").read_bytes() == before
    [(outcome, _)] = save(writer, 3)  # the cause has passed
    assert outcome == "saved"
    assert read_checkpoint(tmp_path / "latest.pt")["step"] == 3


def test_missing_folder_is_reported(tmp_path):
    writer = CheckpointWriter(tmp_path / "gone", keep=3)
    (tmp_path / "gone").rmdir()
    [(outcome, report)] = save(writer, 1)
    assert outcome == "not saved"
    assert "No such file or directory" in report
    assert str(tmp_path / "gone") in report
    writer.close()


def test_save_returns_before_the_file_is_written(writer, monkeypatch):
    may_write = threading.Event()
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (may_write.wait(10), real(*args)))
    writer.save(Captured(content(1)), [])
    assert list(writer.take_reports()) == []  # save() returned before the file was written
    may_write.set()
    writer.wait()
    assert len(list(writer.take_reports())) == 1


def test_temporary_files_of_a_killed_run_are_deleted(tmp_path):
    (tmp_path / ".latest.pt.tmp").write_bytes(b"half")
    CheckpointWriter(tmp_path, keep=3).close()
    assert names(tmp_path) == []


def test_checkpoint_the_run_resumes_from_becomes_latest(tmp_path):
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
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "rolling_step_000001.pt").close()  # is latest.pt already
    assert steps() == {"latest.pt": 1, "latest_backup.pt": 2}
    damage(tmp_path / "latest.pt", "one bit")
    CheckpointWriter(tmp_path, keep=3, resumed_from=tmp_path / "latest_backup.pt").close()
    assert steps() == {"latest.pt": 2, "latest_backup.pt": 2}
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_corrupt_latest_does_not_replace_the_backup(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    save(writer, 1)
    save(writer, 2)
    writer.close()
    damage(tmp_path / "latest.pt", "one bit")
    writer = CheckpointWriter(tmp_path, keep=3)
    save(writer, 3)
    writer.close()
    assert read_checkpoint(tmp_path / "latest_backup.pt")["step"] == 1
