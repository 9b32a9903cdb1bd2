"""The run log: each step once in every sink, also after an interruption."""

import dataclasses
import errno
import json
import os
import sys
import types

import pytest
import torch

from config import TrainConfig
from steadygpt.runlog import RunLog, duration_text


def config(tmp_path, **options) -> TrainConfig:
    return TrainConfig(
        run_name="tiny", logdir=str(tmp_path / "logs"), tensorboard_dir=str(tmp_path / "runs"), **options
    )


def write(log: RunLog, steps, value=1.0) -> None:
    for step in steps:
        log.record(step, f"step {step}/10 | loss {value}", loss=value, mfu=None)


def test_metrics_are_one_json_object_a_line(tmp_path):
    log = RunLog(config(tmp_path), None)
    log.record(3, "step 3/10 | loss 2.5", loss=2.5, mfu=None)
    log.close()
    assert (tmp_path / "logs" / "metrics.jsonl").read_text() == '{"step": 3, "loss": 2.5}\n'
    assert (tmp_path / "logs" / "log.txt").read_text() == "run          tiny\nstep 3/10 | loss 2.5\n"


def test_a_resumed_run_cuts_its_logs_back_and_continues_them(tmp_path):
    log = RunLog(config(tmp_path), None)
    log.say("the plan")
    write(log, range(6))
    log.text(4, "step 4/10 | sample:", "a line\nstep 1/10 of the text itself")
    log.close()
    with open(tmp_path / "logs" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # what a kill in the middle of a write leaves
    log = RunLog(config(tmp_path), 4)
    write(log, range(4, 8), value=2.0)
    log.close()
    records = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in records] == [(s, 1.0) for s in range(4)] + [(s, 2.0) for s in range(4, 8)]
    text = (tmp_path / "logs" / "log.txt").read_text()
    assert text.startswith("run          tiny\nthe plan\nstep 0/10") and "text itself" not in text
    assert [line.split()[1] for line in text.splitlines()[2:]] == [f"{step}/10" for step in range(8)]


def test_a_new_run_moves_older_logs_aside(tmp_path):
    for value in (1.0, 2.0):
        log = RunLog(config(tmp_path), None)
        write(log, [0], value)
        log.close()
    kept = [name for name in os.listdir(tmp_path / "logs") if "-until-" in name]
    assert len(kept) == 2
    assert json.loads((tmp_path / "logs" / "metrics.jsonl").read_text())["loss"] == 2.0


def test_the_log_of_another_run_is_moved_aside_not_cut(tmp_path):
    log = RunLog(dataclasses.replace(config(tmp_path), run_name="another"), None)
    write(log, range(6))
    log.close()
    log = RunLog(config(tmp_path), 4)
    write(log, [4], value=2.0)
    log.close()
    (theirs,) = (tmp_path / "logs").glob("metrics-until-*.jsonl")
    assert len(theirs.read_text().splitlines()) == 6
    assert (tmp_path / "logs" / "metrics.jsonl").read_text() == '{"step": 4, "loss": 2.0}\n'


def test_nan_is_null_in_json(tmp_path):
    log = RunLog(config(tmp_path), None)
    write(log, [0], value=float("nan"))
    log.close()
    assert json.loads((tmp_path / "logs" / "metrics.jsonl").read_text()) == {"step": 0, "loss": None}


def test_a_full_disk_costs_records_and_not_the_run(tmp_path, monkeypatch, capsys):
    log = RunLog(config(tmp_path), None)

    class Full:
        name = "log.txt"

        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    real, log.log = log.log, Full()
    write(log, range(3))
    log.log = real
    log.close()
    assert capsys.readouterr().err.count("cannot write to log.txt: ") == 1
    assert len((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()) == 3


def curves(tmp_path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs" / "tiny"), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag} has doubled points"
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found, events.Tags()


def test_tensorboard_curves_continue_after_a_resume_without_doubled_points(tmp_path):
    log = RunLog(config(tmp_path, use_tensorboard=True), None)
    write(log, range(6), value=1.0)
    log.close()
    log = RunLog(config(tmp_path, use_tensorboard=True), 4)
    write(log, range(4, 8), value=2.0)
    model = torch.nn.Linear(200, 200)
    model(torch.ones(200)).sum().backward()
    log.histograms(8, model)
    log.text(8, "sample:", "words")
    log.close()
    scalars, tags = curves(tmp_path)
    assert scalars["loss/train"] == {s: 1.0 if s < 4 else 2.0 for s in range(8)}
    assert set(tags["histograms"]) == {
        f"{kind}/{p}" for kind in ("parameters", "parameters_grad") for p in ("weight", "bias")
    }
    assert any("sample" in tag for tag in tags["tensors"])


def test_wandb_gets_the_numbers_and_the_name(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    fake = types.SimpleNamespace(init=lambda **options: (calls.append(options["name"]), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = RunLog(config(tmp_path, use_wandb=True), None)
    write(log, [5])
    log.close()
    assert calls == ["tiny", (5, {"loss": 1.0}), "end"]


def test_the_line_in_progress_is_for_terminals_only(tmp_path, capsys):
    log = RunLog(config(tmp_path), None)
    log.show("passing by")
    log.close()
    assert "passing by" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (12 * 86400 + 3 * 3600, "12 d 03 h")],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration_text(seconds) == text
