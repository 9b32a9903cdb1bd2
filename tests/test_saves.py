"""When a run saves, under which names, and what evaluations.json says of it."""

import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import content, names

from steadygpt import saves
from steadygpt.checkpoint import checkpoint_table, read_checkpoint, read_evaluations
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks, Silent
from steadygpt.saves import CheckpointWriter, Saves, interval_text


class Log:
    def __init__(self):
        self.said, self.warned = [], []

    def say(self, line):
        self.said.append(line)

    def warn(self, line):
        self.warned.append(line)

    def flush(self):
        pass


class Clock:
    """Stands in for the module time: only sleeping here moves it."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Saves of a run at step `run.step`, with a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(saves, "time", clock)
    config = SimpleNamespace(checkpoint_freq=10, checkpoint_minutes=1.0)
    run = SimpleNamespace(clock=clock, log=Log(), step=0, pause_s=0.0, folder=tmp_path, captured=[])

    def capture():
        clock.now_s += run.pause_s
        run.captured.append(run.step)
        return content(run.step)

    run.writer = CheckpointWriter(tmp_path, keep=3)
    run.saves = Saves(config, Ranks(torch.device("cpu")), capture, run.log, run.writer)

    def at(step, seconds=0.0, ended_epoch=None, last=False):
        run.step, clock.now_s = step, clock.now_s + seconds
        run.saves.save_if_due(step, ended_epoch, last)
        run.writer.wait()
        return names(tmp_path)

    run.at = at
    yield run
    run.saves.close()


def test_tiers_of_a_step(run):
    assert run.at(0) == []
    assert run.at(9) == []
    assert run.at(10) == ["latest.pt", "rolling_step_000010.pt"]
    assert run.at(13, ended_epoch=2)[0] == "epoch_00002.pt"
    assert run.captured == [10, 13]
    run.at(14, last=True)
    assert read_checkpoint(run.folder / "latest.pt")["step"] == 14


def test_the_clock_saves_latest_only_once_a_minute(run):
    assert run.at(1, seconds=59) == []
    assert run.at(2, seconds=1) == ["latest.pt"]
    assert run.at(3, seconds=59) == ["latest.pt"]
    assert run.at(4, seconds=1) == ["latest.pt", "latest_backup.pt"]
    assert run.captured == [2, 4]


def test_a_save_of_any_kind_restarts_the_clock(run):
    run.at(10, seconds=59)
    run.at(11, seconds=59)
    assert run.captured == [10]


def test_pauses_of_saves_stay_below_one_percent_of_the_time(run):
    run.pause_s = 3.0
    run.at(10)
    assert run.saves.interval_s() == pytest.approx(300)
    assert run.log.said == [
        "a save paused training for 3.0 s, so latest.pt is saved at least every 5 min 00 s, 0.0 GB a day"
    ]
    run.pause_s = 0.5  # the longest pause counts
    run.at(20)
    run.at(21, seconds=299)
    assert run.captured == [10, 20]
    run.at(22, seconds=1)
    assert run.captured == [10, 20, 22]


def test_checkpoint_minutes_0_turns_the_clock_off(run):
    run.saves.config.checkpoint_minutes = 0
    run.at(1, seconds=1e6)
    assert run.captured == []


def test_the_clock_waits_for_the_save_in_flight(run, monkeypatch):
    may_write, real = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (may_write.wait(10), real(*args)))
    run.saves.save_if_due(10, None, last=False)
    run.clock.now_s += 1000
    run.saves.save_if_due(11, None, last=False)
    assert run.captured == [0]  # step 10's, taken before `run.step` was set
    may_write.set()


def test_bytes_a_day():
    assert interval_text(60, 1.49e9) == "latest.pt is saved at least every 1 min 00 s, 2.1 TB a day"
    assert interval_text(3600, 10e6) == "latest.pt is saved at least every 1 h 00 min, 0.2 GB a day"


# ---------------------------------------------------------------------------------------------------------------------
# evaluations


def test_the_best_model_is_a_link_to_the_file_of_its_step(run):
    run.at(10)
    run.saves.record(10, {"val_loss": 3.5}, best=True)
    run.saves.finish(10)
    assert run.captured == [10]  # one capture, one write
    assert (run.folder / "best_model.pt").samefile(run.folder / "rolling_step_000010.pt")
    assert run.log.said[1:] == ["best_model.pt is step 10 (val loss 3.5000)"]
    assert read_evaluations(run.folder) == {10: {"val_loss": 3.5}}


def test_a_best_step_without_a_file_is_captured_then(run):
    run.at(10)
    run.step = 15
    run.saves.record(15, {"val_loss": 3.5}, best=True)
    run.saves.finish(15)
    assert run.captured == [10, 15]
    assert read_checkpoint(run.folder / "best_model.pt")["step"] == 15


def test_the_best_of_an_earlier_step_stays_while_saves_go_on(run):
    run.at(10)
    run.saves.record(10, {"val_loss": 3.5}, best=True)
    run.at(20)
    run.saves.record(20, {"val_loss": 3.6})
    run.saves.finish(20)
    assert read_checkpoint(run.folder / "best_model.pt")["step"] == 10
    assert read_checkpoint(run.folder / "latest.pt")["step"] == 20


def test_scores_of_a_step_are_kept_together_and_nan_is_null(run):
    run.at(10)
    run.saves.record(10, {"val_loss": math.nan})
    run.saves.record(10, {"hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.3})
    run.saves.finish(10)
    stored = json.loads((run.folder / "evaluations.json").read_text())
    assert stored == {"10": {"val_loss": None, "hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.3}}


def test_a_best_model_that_could_not_be_saved_is_a_warning_and_not_recorded(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        run.at(10)
        run.saves.record(10, {"val_loss": 3.5}, best=True)
        run.saves.writer.pool.submit(lambda: None).result()
    run.saves.report()
    assert "step 10 was not saved" in run.log.warned[0]
    assert "best_model.pt was not written: step 10 was not saved" in run.log.warned[1]
    assert read_evaluations(run.folder) == {}  # so a resumed run validates and marks it again
    run.saves.finish(10)  # there is room again
    assert names(run.folder) == ["latest.pt"]


def test_a_resumed_run_knows_the_best_of_the_steps_before_it(tmp_path):
    (tmp_path / "evaluations.json").write_text('{"10": {"val_loss": 3.5}, "20": {"val_loss": 3.1}}')
    known = read_evaluations(tmp_path, last_step=15)
    resumed = Saves(None, Ranks(torch.device("cpu")), dict, Silent(), Silent(), 15, known)
    assert resumed.best_val_loss(None) == 3.5
    assert resumed.best_val_loss(3.6) == 3.5
    assert resumed.best_val_loss(3.4) == 3.4  # an older checkpoint that has its validation loss inside


@pytest.mark.parametrize("stored", ["", "[]", '{"ten": {}}', '{"10": 3.5}'])
def test_corrupt_evaluations_are_one_line(tmp_path, stored):
    (tmp_path / "evaluations.json").write_text(stored)
    with pytest.raises(UserError, match=r"evaluations.json: cannot be read .* Remove it: only the choice of the best"):
        read_evaluations(tmp_path)


def test_the_table_takes_validation_losses_from_the_evaluations(run):
    run.at(10)
    run.saves.record(10, {"val_loss": 3.5}, best=True)
    run.at(13, ended_epoch=1)
    run.saves.finish(13)
    rows = {line.split()[0]: line.split() for line in checkpoint_table(run.folder)}
    assert rows["best_model.pt"][1:5] == ["10", "1.00", "3.2500", "3.5000"]
    assert rows["latest.pt"][4] == "-"  # not validated


def test_the_mirror_gets_each_file_once_and_copies_it_to_its_other_names(tmp_path, monkeypatch):
    uploads, real = [], saves.upload
    monkeypatch.setattr(saves, "upload", lambda file, url, names: (uploads.append(names), real(file, url, names)))
    writer = CheckpointWriter(tmp_path / "here", keep=3, mirror=f"file://{tmp_path}/there")
    writer.save(content(1), ["rolling_step_000001.pt"])
    writer.record({1: {"val_loss": 3.5}}, best=1)
    writer.close()
    assert [text for outcome, text in writer.take_reports() if outcome == "failed"] == []
    assert uploads == [["latest.pt", "rolling_step_000001.pt"]]
    assert names(tmp_path / "there") == ["best_model.pt", "latest.pt", "rolling_step_000001.pt"]
    assert read_checkpoint(tmp_path / "there" / "best_model.pt")["step"] == 1
