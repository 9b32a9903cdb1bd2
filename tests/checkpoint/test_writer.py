"""Timed saves, and saves that the disk or the file system hinders."""

import errno
import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import MODERN, SLOW, in_ranks, load, run_here
from ground import (
    acting_here,
    agree,
    alter,
    around_write,
    latest,
    launched_again,
    mock_log,
    run_content,
    status_of,
    write_checkpoint,
    writer_of,
)
from test_files import damage, names

from steadygpt.base.options import UserError
from steadygpt.checkpoint import writer as writers
from steadygpt.checkpoint.files import BEST, ROLLING, TrainState
from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks, Requests, Stopped, joined
from steadygpt.monitor.table import checkpoint_table
from steadygpt.run import saving
from steadygpt.run.run import Meter
from steadygpt.start.folder import best_in_folder

CPU = Ranks(torch.device("cpu"))


def run_of(config: TrainConfig, log, ranks: Ranks = CPU) -> SimpleNamespace:
    """Return what the functions of steadygpt/run/saving.py use of a run; its content is that of run_content()."""
    return SimpleNamespace(
        config=config, ranks=ranks, log=log, state=TrainState(), rows_per_epoch=0, validated_on="rows", saved=None,
        requests=Requests(ranks, max_hours=0), meter=Meter(), uploads=None,
        writer=writer_of(config, log) if ranks.is_main else None,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a fake clock; run.at(step) saves if a save is due and returns the files."""
    clock = SimpleNamespace(now_s=1000.0, sleep=time.sleep, monotonic=lambda: clock.now_s, time=lambda: clock.now_s)
    monkeypatch.setattr(writers, "time", clock)
    monkeypatch.setattr(saving, "time", clock)
    config = TrainConfig(checkpoint_dir=str(tmp_path), keep_checkpoints=3, checkpoint_freq=10)
    run = run_of(config, mock_log(tmp_path))
    run.clock, run.pause_s, run.captured = clock, 0.0, []

    def content_of(_) -> dict:
        clock.now_s += run.pause_s
        run.captured.append(run.state.step)
        return run_content(run.state.step)

    monkeypatch.setattr(saving, "content_of", content_of)

    def at(step: int, seconds: float = 0.0) -> list[str]:
        run.state.step, clock.now_s = step, clock.now_s + seconds
        saving.save_if_due(run, agree(run))
        run.writer.wait()
        return [name for name in names(tmp_path) if name != ".lock"]

    run.at = at
    yield run
    run.writer.wait()


@pytest.fixture
def writer(tmp_path):
    """A writer that keeps two rolling checkpoints; writer.roll(step, *names) saves a step."""
    writer = writer_of(TrainConfig(checkpoint_dir=str(tmp_path), keep_checkpoints=2), mock_log(tmp_path))
    writer.roll = lambda step, *names: writer.save(step, run_content(step), [*names])
    return writer


def steps(folder: Path | str) -> dict[str, int]:
    """Return checkpoint name -> step."""
    return {path.name: load(path)["step"] for path in Path(folder).glob("*.pt")}


def fail(number: int):
    """Return a function that raises an OSError."""

    def failing(*_):
        raise OSError(number, os.strerror(number))

    return failing


no_space = fail(errno.ENOSPC)


# ---------------------------------------------------------------------------------------------------------------------
# when a run saves, and what training waits for


def test_timed_save_writes_only_latest_once_a_minute(run):
    assert run.at(1, seconds=59) == []
    assert run.at(2, seconds=1) == ["latest.pt"]
    assert run.at(3, seconds=59) == ["latest.pt"]
    assert run.at(4, seconds=1) == ["latest.pt", "latest_backup.pt"]
    run.at(10, seconds=59)  # restarts the clock
    run.at(11, seconds=59)
    assert run.captured == [2, 4, 10]


def test_a_slow_save_makes_the_next_timed_one_later(run):
    run.pause_s = 9.0
    run.at(10)
    assert run.writer.interval_s == 60  # the first pause does not count: it includes the allocation of host memory
    run.pause_s = 3.0
    run.at(20)
    run.at(21, seconds=299)
    assert run.captured == [10, 20]
    run.pause_s = 0.5
    run.at(22, seconds=1)
    run.at(23, seconds=59)
    assert run.captured == [10, 20, 22]
    run.at(24, seconds=1)
    assert run.captured == [10, 20, 22, 24]


@pytest.mark.parametrize(
    ("minutes", "pause_s", "interval_s"), [(1, 0.1, 60), (1, 3, 300), (1, 3600, 600), (20, 9, 1200)]
)
def test_no_pause_delays_the_next_timed_save_by_more_than_ten_minutes(tmp_path, minutes, pause_s, interval_s):
    config = TrainConfig(checkpoint_dir=str(tmp_path), checkpoint_minutes=minutes)
    writer = writer_of(config, mock_log(tmp_path))
    writer.note_pause(pause_s)
    assert writer.interval_s == interval_s


def test_waiting_for_the_save_in_flight_does_not_make_timed_saves_rarer(run, monkeypatch):
    waits_s = iter([0.0, 30.0])

    def wait(_) -> None:
        run.clock.now_s += next(waits_s, 0.0)

    monkeypatch.setattr(saving, "wait_for_save", wait)
    run.pause_s = 0.2
    run.at(10)
    run.at(20)
    assert run.writer.interval_s == 60
    assert run.meter.paused_s == pytest.approx(30.4)


def test_timed_save_does_not_wait_for_a_slow_save_but_the_last_one_does_with_signs_of_life(run, inject):
    may_write = threading.Event()
    inject.around_write(lambda number, write: (may_write.wait(10), write()))
    for run.state.step in (10, 11):
        saving.save_if_due(run, agree(run))
        run.clock.now_s += 1000
    assert run.captured == [10]
    run.log.beat.assert_not_called()
    threading.Timer(1.5, may_write.set).start()
    run.state.step = 10
    assert saving.is_saved(run)
    run.log.beat.assert_called()


def test_a_wait_for_uploads_gives_signs_of_life(run):
    busy = iter([True, True, False])
    uploads = SimpleNamespace(is_busy=lambda: next(busy))
    saving.wait_for_uploads(uploads, lambda: False, run.ranks, run.log)
    assert run.log.beat.call_count == 2


def test_the_log_is_durable_before_the_checkpoint(run, inject):
    run.log.attach_mock(save := Mock(), "save")
    inject.around_write(lambda number, write: (save(), write()))
    run.at(10)
    assert [call[0] for call in run.log.mock_calls[:2]] == ["flush", "save"]


def test_a_loss_on_other_rows_is_not_the_best(tmp_path):
    """A checkpoint that is resumed with other validation rows has the loss on those before."""
    config = TrainConfig(checkpoint_dir=str(tmp_path))
    run = run_of(config, mock_log(tmp_path))
    run.state.scores = {"val_loss": 1.0}
    for rows, expected in (("other rows", False), ("rows", True)):
        run.state.validated_on = rows
        assert saving.is_best(run) == expected


def test_only_a_lower_validation_loss_is_the_best(writer, inject):
    """It is compared with what is durable or in flight, on the same rows."""
    assert not writer.is_best(None, "rows")  # NaN
    assert writer.is_best(3.0, "rows")
    may_write = threading.Event()
    inject.around_write(lambda number, write: (may_write.wait(10), write() if number == 0 else no_space()))
    for loss, durable in ((3.0, 3.0), (2.0, 3.0)):  # the second save fails
        may_write.clear()
        writer.start(run_content(10, scores={"val_loss": loss}, validated_on="rows"), [BEST])
        assert [writer.is_best(other, "rows") for other in (loss - 0.1, loss, loss + 0.1)] == [True, False, False]
        may_write.set()
        writer.wait()
        assert [writer.is_best(other, "rows") for other in (durable - 0.1, durable)] == [True, False]
        assert writer.is_best(9.0, "other rows")


def test_the_writer_computes_alone_and_training_with_all_threads(writer):
    assert torch.get_num_threads() == 1  # from here on, this thread has a number of its own
    torch.set_num_threads(2)
    writer.start(run_content(10), [])
    assert writer.pool.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2


# ---------------------------------------------------------------------------------------------------------------------
# the files of a folder


def test_without_hard_links_each_name_is_a_copy(writer, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    for step in (4, 8):
        writer.roll(step, ROLLING.format(step))
    rolling = {ROLLING.format(step): step for step in (4, 8)}
    assert steps(tmp_path) == {"latest.pt": 8, "latest_backup.pt": 4, **rolling}


def test_a_disk_without_hard_links_and_without_room_for_a_copy_has_the_save(writer, monkeypatch, tmp_path):
    """Whichever names have no room, also the backup and the best model."""
    writer.roll(10)
    real = shutil.copy2
    for number, missing in enumerate(product((False, True), repeat=4)):
        step = 20 + number
        names = (ROLLING.format(step), f"epoch_{step:05d}.pt", "best_model.pt")
        has_no_room = [
            name for name, is_missing in zip((*names, "latest_backup.pt"), missing, strict=True) if is_missing
        ]

        def copy(source, target, has_no_room=has_no_room):
            real(source, target)
            if Path(target).name[1:].removesuffix(".tmp") in has_no_room:
                fail(errno.ENOSPC)()

        with monkeypatch.context() as patched:
            patched.setattr(os, "link", fail(errno.EPERM))
            patched.setattr(shutil, "copy2", copy)
            writer.log.warn.reset_mock()
            before = writer.best
            writer.save(step, run_content(step, scores={"val_loss": 1 / step}, validated_on="rows"), [*names])
        assert not writer.failed and not [*tmp_path.glob(".*.tmp")]
        found = steps(tmp_path)
        assert found["latest.pt"] == step
        for name in names:
            assert (found.get(name) == step) == (name not in has_no_room)
        assert (writer.best == before) == ("best_model.pt" in has_no_room)
        warnings = [call.args[0] for call in writer.log.warn.call_args_list]
        said = [f"{tmp_path / name}: not written: " for name in has_no_room]
        assert [warning[: len(start)] for warning, start in zip(warnings, said, strict=True)] == said


def test_saves_continue_after_the_user_has_moved_the_latest(writer, tmp_path):
    for step in (10, 20):
        writer.roll(step)
        (tmp_path / "latest.pt").rename(tmp_path / f"mine_{step}.pt")
    assert not writer.failed
    assert steps(tmp_path) == {"mine_10.pt": 10, "mine_20.pt": 20}


def test_old_checkpoints_are_deleted_by_content_and_none_whose_head_cannot_be_read(writer, tmp_path):
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step, ROLLING.format(step))  # later ones have older dates
    write_checkpoint(tmp_path, 80, ROLLING.format(80), saved_at=1e9)  # before the run went back
    damage(tmp_path / ROLLING.format(10), "truncated")
    writer_of(writer.config, writer.log).save(50, run_content(50), [ROLLING.format(50)])
    assert names(tmp_path)[2:] == [ROLLING.format(step) for step in (10, 40, 50)]


@pytest.mark.parametrize("launches", [1, 4], ids=["while it runs", "between launches"])
def test_a_clock_that_was_set_back_deletes_no_newer_checkpoint(writer, tmp_path, monkeypatch, launches):
    for step in (10, 20, 30, 40):
        monkeypatch.setattr(time, "time", lambda step=step: 1e9 - step)
        if launches > 1:
            writer = writer_of(writer.config, writer.log)
        writer.save(step, run_content(step), [ROLLING.format(step)])
    assert names(tmp_path)[1:] == ["latest.pt", "latest_backup.pt", ROLLING.format(30), ROLLING.format(40)]
    assert latest(tmp_path)["step"] == 40


@pytest.mark.parametrize("seed", range(10))
def test_files_keep_their_losses_and_the_best_model_however_often_a_run_goes_back(tmp_path, monkeypatch, seed):
    """Starts resume from any file; some evaluate the first step, whose weights the launch before has computed."""
    random = Random(seed)
    config = TrainConfig(checkpoint_dir=str(tmp_path), keep_checkpoints=4, checkpoint_freq=2)
    measured: dict[float, float] = {}  # the weights, known by their training loss -> validation loss
    monkeypatch.setattr(saving, "content_of", lambda run: content | vars(run.state))
    for number in range(8):
        run = run_of(config, mock_log(tmp_path))
        run.validated_on = "rows"
        run.writer.best = best_in_folder(run, tmp_path)[0]
        there = [*tmp_path.glob("*.pt")]
        content = run_content(0)
        content["loss"] = random.random()
        if there:
            path = random.choice(there)
            content = launched_again(load(path), f"{number:016x}")
            run.writer.begin_at(content, path, is_changed=False)
        run.state = TrainState(**{name: content[name] for name in TrainState.__annotations__})
        for _ in range(random.randint(1, 6)):
            state = run.state
            if random.random() < 0.5:
                measured.setdefault(state.loss, random.random())
                state.scores = {"val_loss": measured[state.loss]}
                state.validated_on = "rows"
            saving.save_if_due(run, is_due=random.random() < 0.5)
            saving.wait_for_save(run)
            run.state = TrainState(step=state.step + 1, rows_consumed=state.rows_consumed + 4, loss=random.random())
        rows = [row.split() for row in [*checkpoint_table(tmp_path)][1:-1]] if list(tmp_path.glob("*.pt")) else []
        for _, _, _, loss, val_loss, *_ in rows:
            known = [f"{measured[one]:.4f}" for one in measured if f"{one:.4f}" == loss]
            assert val_loss in [*known, "-"]
        if measured:
            assert load(tmp_path / "best_model.pt")["loss"] == min(measured, key=measured.get)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_comes_during_a_save_stops_the_run(workdir, inject, number):
    def signalled(save: int, write) -> None:
        if save == 0:
            os.kill(os.getpid(), number)
        write()

    inject.around_write(signalled)
    assert run_here("--checkpoint_freq", "3", "--max_steps", "300") == 0
    status = status_of("checkpoints")
    assert (status["status"], status["reason"]) == ("stopped", signal.Signals(number).name)
    assert 3 <= load("checkpoints/latest.pt")["step"] < 300


def test_a_slow_save_has_the_weights_of_its_step(workdir, inject):
    """The steps meanwhile change the weights, and the next copy reuses the host memory."""
    captured = {}

    def keep(content: dict) -> dict:
        captured[content["step"]] = {name: tensor.clone() for name, tensor in content["model"].items()}
        return content

    inject.change_captured(keep)
    inject.around_write(lambda number, write: (time.sleep(0.1), write()))
    assert run_here("--checkpoint_freq", "1", "--max_steps", "5") == 0
    assert [*captured] == [1, 2, 3, 4, 5]
    for step, weights in captured.items():
        saved = load(Path("checkpoints", ROLLING.format(step)))["model"]
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items()), step


def test_a_step_is_captured_once_for_all_its_names(workdir, inject):
    captured = []
    inject.change_captured(lambda content: captured.append(content["step"]) or content)
    assert run_here("--checkpoint_freq", "4", "--steps_per_epoch", "4", "--eval_freq", "4", *SLOW) == 0
    assert captured == [4, 8]
    names = {"latest.pt", "rolling_step_000008.pt", "epoch_00002.pt", "best_model.pt"}
    assert all(steps("checkpoints")[name] == 8 for name in names)


# ---------------------------------------------------------------------------------------------------------------------
# runs that cannot save, and launches that may not


def test_a_run_stops_after_ten_failed_saves_in_a_row_and_ten_intervals(run, inject):
    with acting_here(lambda rank: around_write(no_space)):
        for step in range(10, 100, 10):  # nine saves, one of them good
            run.at(step, seconds=1)
    run.at(100)
    inject.around_write(no_space)
    for step in range(110, 310, 10):  # many more saves than ten, by step
        run.at(step, seconds=29)
    agree(run)  # 580 s since the good save
    run.clock.now_s += 20
    with pytest.raises(Stopped, match="saves failed"):
        agree(run)
    events = [call.kwargs["event"] for call in run.log.warn.call_args_list]
    assert events == ["save failed", *[""] * 8, "save failed", *[""] * 19]


def test_without_timed_saves_ten_failed_ones_stop_the_run(run, inject):
    run.writer.config = replace(run.config, checkpoint_minutes=0.0)
    run.writer.interval_s = 0.0
    run.pause_s = 1.0
    inject.around_write(no_space)
    for step in range(10, 100, 10):
        run.at(step)
    agree(run)
    run.at(100)
    with pytest.raises(Stopped, match="saves failed"):
        agree(run)


def test_a_run_that_cannot_save_fails_with_one_warning_and_two_alerts(workdir, inject, capsys):
    alerts = inject.alerts_of_runs()
    inject.around_write(no_space)
    assert run_here("--checkpoint_freq", "1", "--max_steps", "1000") == 1
    assert [event for event, _ in alerts] == ["started", "save failed", "failed"]
    out, err = capsys.readouterr()
    end = re.search(r"^failed \(saves failed; the last save failed\) after (\d+) steps", out, re.M)
    assert int(end[1]) in (11, 12)  # the tenth save may still be in flight
    warning = "warning: checkpoints: the run stops, because saves fail. Fix the disk, then resume\n"
    assert err.count(warning) == 1 and err.count("was not saved") == int(end[1])


def files_of(folder: Path) -> dict[Path, bytes | str]:
    """Return the content of all files but locks, and where links lead."""
    found = [path for path in folder.rglob("*") if path.name != ".lock" and not path.is_dir()]
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in found}


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_start_without_room_for_a_checkpoint_is_refused_and_changes_nothing(workdir, monkeypatch, resume):
    left = Path("checkpoints/.latest.pt.tmp")  # by a killed writer
    if resume:
        run_here("--max_steps", "4")
        left.write_bytes(bytes(1000))
    before = files_of(workdir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99_500, total=10**6))
    with pytest.raises(UserError) as raised:
        run_here(*resume)
    assert re.search(r"^checkpoints: \d{3} kB .*\b(99\.5|100) kB .*--checkpoint_dir\b", str(raised.value))
    assert files_of(workdir) == before
    unknown, full = (SimpleNamespace(free=0, total=total) for total in (0, 10**6))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full if resume else unknown)
    if resume:  # what the killed writer left counts as free
        left.write_bytes(bytes(10**6))
    assert run_here(*resume) == 0


# ---------------------------------------------------------------------------------------------------------------------
# damaged files are renamed, not replaced


@pytest.fixture
def stopped(workdir, capsys) -> Path:
    """The folder of a run whose newest checkpoints are damaged."""
    run_here("--checkpoint_freq", "2", "--keep_checkpoints", "3")
    for name in ("latest.pt", "latest_backup.pt", "rolling_step_000008.pt"):
        damage(Path("checkpoints", name), "one bit")
    capsys.readouterr()
    return Path("checkpoints")


@pytest.mark.parametrize("flags", [
    ("--resume", "--dry_run"),
    ("--resume", "--eval_only", "--eval_freq", "1"),
    ("--resume", "--num_layers", "3"),  # refused
    ("--resume", "--data_dir", "nowhere"),  # refused
    ("--resume", "checkpoints", "--checkpoint_dir", "fork"),
])  # fmt: skip
def test_nothing_is_renamed_by_what_only_reads_or_is_refused(stopped, capsys, flags):
    before = files_of(stopped)
    with suppress(UserError):
        run_here(*flags)
    assert "renamed" not in capsys.readouterr().out
    assert files_of(stopped) == before


@pytest.mark.parametrize("how", ["one bit", "folder", "link"])
def test_a_choice_of_an_older_file_keeps_a_newest_one_that_cannot_be_read(workdir, capsys, how):
    run_here("--checkpoint_freq", "4")
    latest = Path("checkpoints/latest.pt")
    if how == "one bit":
        damage(latest, how)
    else:
        latest.rename("mine.pt")
        latest.mkdir() if how == "folder" else latest.symlink_to("/nowhere/latest.pt")
    assert run_here("--resume", "checkpoints/rolling_step_000004.pt", "--max_steps", "6") == 0
    [kept] = Path("checkpoints").glob("latest.pt.skipped-*")
    assert (kept.is_dir(), kept.is_symlink()) == (how == "folder", how == "link")
    warning = f"warning: {latest}: not a readable checkpoint; renamed {kept.name}"
    assert warning in capsys.readouterr().err and warning in Path("checkpoints/log.txt").read_text()
    assert load(latest)["step"] == 6


def test_a_damaged_save_that_is_also_the_best_model_gets_new_names_once(workdir, capsys):
    """All its names are links to one file."""
    run_here("--checkpoint_freq", "4", "--eval_freq", "4")
    for name in ("latest.pt", "rolling_step_000008.pt", "best_model.pt"):
        damage(Path("checkpoints", name), "one bit")
    assert run_here("--resume", "--max_steps", "9") == 0
    found = [name.partition(".skipped-")[0] for name in names("checkpoints") if ".skipped-" in name]
    assert found == ["best_model.pt", "latest.pt", "rolling_step_000008.pt"]
    assert "resumed      from checkpoints/rolling_step_000004.pt at step 4" in capsys.readouterr().out


def test_optimizer_state_of_another_shape_is_refused_before_anything_is_changed(workdir):
    """A fused AdamW would write beyond the end of such a tensor."""
    run_here(*MODERN, "--max_steps", "4")

    def cut(content: dict) -> None:
        moments = content["optimizer"]["wte.weight"]
        moments["exp_avg"] = moments["exp_avg"][:3].clone()

    alter("checkpoints/latest.pt", cut)
    before = files_of(workdir)
    expected = r"wte.weight.exp_avg [^(]*\(3, 16\) torch.float32\b[^(]*\(\d+, 16\) torch.float32"
    with pytest.raises(UserError, match=f"^checkpoints/latest.pt: {expected}"):
        run_here("--resume")
    assert files_of(workdir) == before


def test_muon_beta2_may_be_switched_off_and_on(workdir):
    run_here(*MODERN, "--muon_beta2", "0.9", "--max_steps", "4")
    for steps, muon_beta2 in ((5, "0"), (7, "0.9")):
        assert run_here("--resume", "--muon_beta2", muon_beta2, "--allow_changes", "--max_steps", str(steps)) == 0
        assert run_here("--resume", "--max_steps", str(steps + 1)) == 0


def save_slowly(folder: str) -> None:
    with joined("cpu", timeout_minutes=0.05) as ranks:
        config = TrainConfig(checkpoint_dir=folder, checkpoint_minutes=0.0)
        run = run_of(config, mock_log(folder), ranks)
        saving.content_of = lambda run: run_content(run.state.step)
        around_write(lambda number, write: (time.sleep(0 if number else 4), write()))
        for run.state.step in (1, 2):
            saving.save(run, [])
        assert saving.is_saved(run)


@pytest.mark.storm
def test_ranks_wait_for_a_save_that_takes_longer_than_timeout_minutes(tmp_path):
    """3 s here: rank 0 writes, and a collective that waits for it would end the others."""
    in_ranks(2, save_slowly, str(tmp_path))
