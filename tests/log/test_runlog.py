"""The run log: log.txt, metrics.jsonl, TensorBoard and status.json."""

import contextlib
import errno
import io
import json
import math
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run_here, scalars
from ground import evaluations, open_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from steadygpt.base.text import duration_text
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.log import metrics, runlog
from steadygpt.log.metrics import read_records, read_status
from steadygpt.log.runlog import RunLog
from steadygpt.machine.ranks import Ranks
from steadygpt.run import step as steps
from steadygpt.run.run import Meter
from steadygpt.run.step import StepResult


def config(tmp_path, **options) -> TrainConfig:
    return TrainConfig(**{"run_name": "tiny", "max_steps": 10, "checkpoint_dir": str(tmp_path), **options})


def records(tmp_path) -> list[dict]:
    return read_records(tmp_path / "metrics.jsonl")


def write(log: RunLog, steps, value=1.0) -> None:
    for step in steps:
        log.evaluation(step, f"loss {value}", loss=value, mfu=None)


def test_each_line_of_metrics_is_a_json_object(tmp_path):
    log = open_log(config(tmp_path), None)
    log.evaluation(3, "loss 2.5", loss=2.5, mfu=None, grad_norm=math.nan)
    log.close()
    start, line = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert re.fullmatch(
        r'\{"step": 0, "time": \S+, "first_step": 0, "run": "tiny", "id": "[0-9a-f]{16}", "parent": "", '
        r'"settings": \{\}\}\n',
        start,
    )
    assert re.fullmatch(r'\{"step": 3, "time": \d+\.\d+, "loss": 2\.5, "grad_norm": null\}\n', line)
    assert abs(json.loads(line)["time"] - time.time()) < 60
    assert (tmp_path / "log.txt").read_text() == "step 3/10 | loss 2.5\n"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.integers(40, 200), max_steps=st.integers(1, 10**6), numbers=st.lists(st.floats(1, 9e3), max_size=7))
def test_a_step_fits_the_terminal_and_log_txt_has_all_of_it(tmp_path, columns, max_steps, numbers):
    names = ("loss", "lr", "grad_norm", "step_ms", "tokens_per_second", "mfu", "cost")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(runlog, "columns_of", lambda stream: columns)
        log = open_log(config(tmp_path, max_steps=max_steps), None)
        log.step(max_steps - 1, dict(zip(names, numbers, strict=False)), {"z_loss": 0.125}, 1e6, is_first=False)
        log.close()
    line = out.getvalue().splitlines()[-1]
    whole = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert len(line) <= columns and {*line.split(" | ")} <= {*whole.split(" | ")}
    assert f"{max_steps - 1}/{max_steps}" in line and (" loss " in line) == bool(numbers)
    assert "z_loss 0.125" in whole and whole.endswith("| 100.0% | ETA 11 d 13 h")
    assert line == whole or len(whole) > columns


def test_a_resumed_run_appends_to_its_logs_and_changes_nothing_in_them(tmp_path):
    log = open_log(config(tmp_path), None)
    log.say("the plan")
    write(log, range(6))
    log.text(4, "a line\nstep 1/10 of the text itself")
    log.close()
    paths = [tmp_path / name for name in ("log.txt", "metrics.jsonl")]
    before = [path.read_bytes() for path in paths]
    log = open_log(config(tmp_path), 4)
    write(log, range(4, 8), value=2.0)
    log.close()
    assert [path.read_bytes()[: len(old)] for path, old in zip(paths, before, strict=True)] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "log.txt", "metrics.jsonl"]
    assert [(r["step"], r["loss"]) for r in read_records(paths[1])] == [(s, 1.0) for s in range(4)] + [
        (s, 2.0) for s in range(4, 8)
    ]
    sample = "step 4/10 | sample:\na line\nstep 1/10 of the text itself\n"
    again = "".join(f"step {step}/10 | loss 2.0\n" for step in range(4, 8))
    assert paths[0].read_text().endswith(f"{sample}{again}")


def test_logs_are_durable_once_they_are_flushed(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(metrics, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    log = open_log(config(tmp_path), None)
    write(log, range(3))
    assert not synced
    log.flush()
    assert synced == [str(tmp_path / name) for name in ("log.txt", "metrics.jsonl")]
    assert len(records(tmp_path)) == 3
    log.close()


def test_texts_cannot_control_the_terminal(tmp_path, capsys):
    log = open_log(config(tmp_path), None)
    log.say("skipped \x1b[2J.pt")
    log.warn("the set \x9b2J differs")
    log.text(1, "a\tmodel\x07\nwrites \x1b[31m")
    log.close()
    printed = capsys.readouterr()
    text = (tmp_path / "log.txt").read_text()
    assert "skipped \\x1b[2J.pt\n" in printed.out and "skipped \\x1b[2J.pt\n" in text
    assert printed.err == "warning: the set \\u009b2J differs\n" and printed.err in text
    assert "\na\tmodel\\x07\nwrites \\x1b[31m\n" in printed.out
    assert "\na\tmodel\\x07\nwrites \\x1b[31m\n" in text


def test_full_disk_is_one_warning_and_loses_only_records(tmp_path, monkeypatch, capsys):
    log = open_log(config(tmp_path), None)

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log.files["log.txt"], "write", full)
        write(log, range(3))
    log.close()
    assert capsys.readouterr().err.count("cannot write to log.txt: ") == 1
    assert len(records(tmp_path)) == 3


@pytest.mark.parametrize("files_before", [0, 9])  # its names end with a count of this process: 10 sorts before 9
def test_tensorboard_curves_have_no_duplicate_steps_after_a_resume(tmp_path, monkeypatch, files_before):
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(files_before))
    log = open_log(config(tmp_path, use_tensorboard=True), None)
    write(log, range(6), value=1.0)
    log.close()
    log = open_log(config(tmp_path, use_tensorboard=True), 4)
    write(log, range(4, 8), value=2.0)
    model = torch.nn.Linear(200, 200)
    model(torch.ones(200)).sum().backward()
    log.histograms(8, model)
    log.text(8, "words")
    log.close()
    folder = tmp_path / "tensorboard"
    assert scalars(folder)["eval/loss"] == {s: 1.0 if s < 4 else 2.0 for s in range(8)}
    tags = EventAccumulator(str(folder)).Reload().Tags()
    names = {f"{kind}/{p}" for kind in ("weights", "weights_grad") for p in ("weight", "bias")}
    assert set(tags["histograms"]) == names and min(names) > "train/loss"  # TensorBoard sorts by name
    assert any("sample" in tag for tag in tags["tensors"])


# ---------------------------------------------------------------------------------------------------------------------
# steps and status


@pytest.fixture
def log(tmp_path):
    options = {"checkpoint_dir": str(tmp_path), "context_length": 125, "total_batch_size": 1000, "gpu_hour_cost": 3.0}
    log = open_log(config(tmp_path, **options), None, ranks=Ranks(torch.device("cpu"), world_size=4))
    yield log
    log.close()


@pytest.fixture
def finish_step(log, monkeypatch):
    """Return a function that logs a step that took some seconds."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(steps, "time", clock)
    monkeypatch.setattr(TrainState, "total_s", lambda _: 1800.0)
    run = SimpleNamespace(
        config=log.config, ranks=log.ranks, state=TrainState(), log=log, meter=Meter(step_start_s=0.0), repeats=None,
        requests=SimpleNamespace(), rows_per_epoch=32,
    )  # fmt: skip

    def finish(step: int, seconds: float) -> None:
        clock.now_s += seconds
        numbers = {"lr": 1e-3, "loss": 2.5, "grad_norm": 0.5, "loss_z": math.nan}
        result = StepResult(step, **numbers, finite=True, spike=False, bad=False, updated=True)
        steps.log_step(run, result)

    return finish


def test_records_and_status_json_have_speed_and_cost(log, finish_step, tmp_path):
    log.status("running")
    started = read_status(tmp_path)
    assert (started["doing"], started["step"], started["pid"]) == ("starting", 0, os.getpid())
    assert (started["ranks"], started["run_name"]) == (4, "tiny")
    assert abs(started["updated_at"] - time.time()) < 60
    log.heartbeat_at_s = -math.inf
    finish_step(2, seconds=9.5)
    assert read_status(tmp_path)["step"] == 3
    assert "eta_s" not in read_status(tmp_path)  # the first step compiles
    log.heartbeat_at_s = -math.inf
    finish_step(3, seconds=0.5)
    *_, record = records(tmp_path)
    assert (record["tokens_per_second"], record["steps_per_second"], record["step_ms"]) == (2000, 2, 500)
    assert (record["epoch"], record["lr"], record["loss"]) == (0.25, 1e-3, 2.5)
    assert record["cost"] == pytest.approx(0.5 * 4 * 3.0)  # half an hour on four GPUs
    status = read_status(tmp_path)
    assert (status["doing"], status["step"], status["step_ms"]) == ("training", 4, 500)
    assert (status["loss"], status["lr"], status["grad_norm"], status["epoch"]) == (2.5, 1e-3, 0.5, 0.25)
    stored = json.loads((tmp_path / "status.json").read_text())
    assert stored["steps_per_second"] == 2
    assert status["cost"] == pytest.approx(6.0)
    assert (status["eta_s"], status["cost_to_go"]) == (3, pytest.approx(6 * 0.5 / 3600 * 4 * 3.0))
    assert "mfu" not in status  # unknown on a CPU
    log.status("finished", summary=["time  1 s"], step=10)
    assert (read_status(tmp_path)["step"], read_status(tmp_path)["summary"]) == (10, ["time  1 s"])


def test_heartbeat_renews_status_json_at_most_every_ten_seconds(log, tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log.status("running")
    written = []
    for seconds in (5, 4, 1, 9, 1):
        now_s[0] += seconds
        log.note(elapsed_s=now_s[0])
        log.beat()
        written.append(read_status(tmp_path).get("elapsed_s"))
    assert written == [None, None, 110.0, 110.0, 120.0]


def test_a_silent_run_says_every_30_seconds_what_it_does(log, tmp_path, monkeypatch, capsys):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log.evaluation(6, "a line of progress")
    for doing, seconds in (("training", 29), ("training", 2), ("evaluating", 29), ("evaluating", 2)):
        now_s[0] += seconds
        log.note(doing=doing, step=7)
        log.say("saved step 3 as latest.pt")
        log.beat()
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("saved")]
    assert said == ["step 6/10 | a line of progress", "step 7/10 | training", "step 7/10 | evaluating"]
    log.status("finished")
    now_s[0] += 100
    log.beat()
    assert capsys.readouterr().out == ""


def test_records_of_several_threads_are_whole_lines(log, tmp_path):
    def record() -> None:
        for _ in range(200):
            log.evaluation(7, "a line", val_loss=1.0)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    write(log, range(200))
    for thread in threads:
        thread.join()
    found = records(tmp_path)
    assert len(found) == 5 * 200
    assert (tmp_path / "log.txt").read_text().count("step 7/10 | a line\n") == 4 * 200


def test_status_json_on_a_full_disk_is_overwritten_in_place(log, tmp_path, monkeypatch, capsys):
    log.status("running")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        log.status("failed", "no space")
        assert (read_status(tmp_path)["status"], read_status(tmp_path)["reason"]) == ("failed", "no space")
        assert not capsys.readouterr().err
        (tmp_path / "status.json").unlink()
        log.status("failed", "no space")
    assert "cannot write to status.json: " in capsys.readouterr().err


def test_status_has_the_last_scores_also_after_a_resume(workdir):
    def scores() -> tuple[float, float]:
        status = read_status(Path("checkpoints"))
        return status["val_loss"], status["val_bpb"]

    assert run_here("--eval_freq", "4", "--max_steps", "8") == 0
    last = evaluations("checkpoints")[8]
    assert scores() == (last["val_loss"], last["val_bpb"])
    before = scores()
    assert run_here("--resume", "--eval_freq", "0", "--max_steps", "9") == 0
    assert scores() == before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (12 * 86400 + 3 * 3600, "12 d 03 h")],
)
def test_durations_are_rounded_to_readable_units(seconds, text):
    assert duration_text(seconds) == text
