"""Curves in Weights & Biases: files of the real package, written offline and read back, and a stand-in for a server."""

import json
import os
import struct
import sys
import threading
import time
import types
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import open_log, run_here
from harness import Run

from steadygpt.base.options import UserError, option
from steadygpt.config import TrainConfig
from steadygpt.log import wandb_sink
from steadygpt.log.metrics import read_records

# ---------------------------------------------------------------------------------------------------------------------
# the real package


def records(folder: Path) -> dict[str, list]:
    """Return the records of a finished run by their kind. W&B's process writes the last ones after finish()."""
    deadline = time.monotonic() + 30
    while "exit" not in (found := records_so_far(folder)):
        assert time.monotonic() < deadline, f"{folder}: W&B has not written the end of the run"
        time.sleep(0.05)
    return found


def records_so_far(folder: Path) -> dict[str, list]:
    """Read a run-ID.wandb file: a LevelDB log of protocol buffers, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    data, at, part, found = path.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:  # too little for a header: the rest of this block is padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            record, part = Record.FromString(part), b""
            which = record.WhichOneof("record_type")
            found[which].append(getattr(record, which))
    return found


def rows_of(folder: Path) -> list[dict]:
    """Return what W&B stored for each of its steps, in its order."""
    rows = records(folder)["history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]


def measured() -> dict[int, dict]:
    """Return the rows that metrics.jsonl stands for."""
    found = defaultdict(dict)
    for record in read_records(Path("logs/metrics.jsonl")):
        found[record["step"]] |= {name: value for name, value in record.items() if name not in ("step", "time")}
    return found


def curves_of(folder: Path) -> dict[int, dict]:
    """Return W&B's rows by step, without texts and W&B's own columns; check that they ascend."""
    rows = rows_of(folder)
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))
    return {row["_step"]: {k: v for k, v in row.items() if k[0] != "_" and k != "sample"} for row in rows}


def test_each_step_is_one_row_with_all_that_was_measured(workdir):
    pytest.importorskip("wandb")
    assert run_here("--use_wandb", "--eval_freq", "4", "--sample_freq", "4", "--run_name", "mine") == 0
    (folder,) = Path("logs/wandb").glob("offline-run-*")
    found = curves_of(folder)
    assert found == measured()
    assert list(found) == list(range(9))
    assert {"loss", "val_loss", "val_bpb"} <= found[4].keys()
    assert "sample" in rows_of(folder)[4]
    assert abs(rows_of(folder)[0]["_timestamp"] - folder.stat().st_mtime) < 60
    (run,) = records(folder)["run"]
    assert run.display_name == "mine"
    assert {option.key: option.value_json for option in run.config.update}["max_steps"] == "8"


def held_after_20_steps(rank: int) -> None:
    """Keep this run from passing the end of the one that resumes it, however late the kill comes."""
    import train

    os.environ.pop("WANDB_SERVICE", None)  # the process of W&B of the earlier tests
    compute = train.train_step

    def held(*args):
        if args[0].state.step == 20:
            time.sleep(60)
        return compute(*args)

    train.train_step = held


def test_a_killed_run_and_the_one_that_resumes_it_are_offline_runs_of_their_own(workdir):
    pytest.importorskip("wandb")
    flags = ("--use_wandb", "--eval_freq", "10", "--checkpoint_freq", "10")
    killed = Run(*flags, "--max_steps", "100000", faults=[held_after_20_steps])
    killed.wait_for(r"^step +15/")
    killed.kill()
    assert run_here(*flags, "--max_steps", "60", "--resume") == 0
    older, newest = sorted(Path("logs/wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_mtime)
    assert older.name.split("-")[-1] != newest.name.split("-")[-1]
    found = curves_of(newest)
    assert found == {step: row for step, row in measured().items() if step >= min(found)} and max(found) == 60


# ---------------------------------------------------------------------------------------------------------------------
# a stand-in


class StandIn:
    """The module wandb with a server: runs by id, each a list of (step, row)."""

    def __init__(self):
        self.runs, self.names, self.finished = defaultdict(list), {}, threading.Event()
        self.Settings, self.mode = lambda **_: None, "online"

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def init(self, *, name, id, config, mode=None, **_):
        self.config = config
        id = id or f"id{len(self.runs)}"
        self.names[id], self.rows, self.offline = name, self.runs[id], "offline" in (mode, self.mode)
        self.id, self.starting_step = id, self.rows[-1][0] + 1 if self.rows else 0
        self.url, self.settings = f"https://wandb.example/{id}", types.SimpleNamespace(sync_dir=f"wandb/{id}")
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.finished.set()


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", StandIn())
    return sys.modules["wandb"]


def write(tmp_path, start_step, steps, loss=1.0, resume="latest", run="tiny") -> None:
    """Log some steps of a run of 10."""
    options = {"run_name": run, "logdir": str(tmp_path), "use_wandb": True, "max_steps": 10}
    log = open_log(TrainConfig(**options, resume="" if start_step is None else resume), start_step)
    for step in steps:
        log.evaluation(step, "", loss=loss)
    log.close()


def test_resumed_run_continues_where_the_server_is_and_sends_nothing_twice(tmp_path, wandb):
    write(tmp_path, None, range(6))
    write(tmp_path, 5, range(5, 8), loss=2.0)
    (rows,) = wandb.runs.values()
    assert rows == [(step, {"loss": 1.0}) for step in range(6)] + [(step, {"loss": 2.0}) for step in (6, 7)]
    assert wandb.names == {"id0": "tiny"}


def test_going_back_to_an_older_checkpoint_and_a_fork_start_a_new_run(tmp_path, wandb):
    write(tmp_path, None, range(8))
    write(tmp_path, 3, range(3, 5), loss=2.0, resume="checkpoints/rolling_step_000003.pt")
    write(tmp_path, 5, range(5, 6), loss=2.0)
    write(tmp_path / "fork", 3, range(3, 5), resume="elsewhere/rolling_step_000003.pt")  # --run_name names it
    assert wandb.names == {"id0": "tiny", "id1": "tiny", "id2": "tiny"}
    assert [step for step, _ in wandb.runs["id0"]] == list(range(8))
    assert wandb.runs["id1"] == [(step, {"loss": 2.0}) for step in range(3, 6)]


def test_a_copy_of_a_run_with_its_logs_is_a_new_run(tmp_path, wandb):
    write(tmp_path, None, range(4))
    write(tmp_path, 4, range(4, 6), run="copy")
    write(tmp_path, 6, range(6, 8), run="copy")
    assert wandb.names == {"id0": "tiny", "id1": "copy"}
    assert [step for step, _ in wandb.runs["id1"]] == [4, 5, 6, 7]


def test_offline_starts_stay_apart_from_the_run_online(tmp_path, wandb):
    write(tmp_path, None, range(4))
    wandb.mode = "offline"
    write(tmp_path, 2, range(2, 6))
    write(tmp_path, 6, range(6, 8))
    wandb.mode = "online"
    write(tmp_path, 8, range(8, 10))
    assert {id: [step for step, _ in rows] for id, rows in wandb.runs.items()} == {
        "id0": [0, 1, 2, 3, 8, 9], "id1": [2, 3, 4, 5], "id2": [6, 7]
    }  # fmt: skip


def test_a_process_of_wandb_that_dies_or_hangs_loses_curves_and_not_the_run(tmp_path, wandb, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "log", lambda: None)  # raises a TypeError, as a process that dies raises its errors
        write(tmp_path / "dead", None, range(10))
    assert capsys.readouterr().err.count("warning: Weights & Biases no longer receives curves: TypeError") == 1
    assert len(read_records(tmp_path / "dead/metrics.jsonl")) == 10
    monkeypatch.setattr(wandb, "finish", threading.Event().wait)
    monkeypatch.setattr(wandb_sink, "FINISH_S", 0.2)
    write(tmp_path, None, range(3))
    assert "W&B did not take all records within 0 s; they are in wandb/id1" in capsys.readouterr().err


def test_wandb_that_fails_to_start_is_a_user_error_but_does_not_stop_a_resume(tmp_path, wandb, monkeypatch, capsys):
    def fail(**options):
        if "mode" not in options:
            raise RuntimeError("api_key not configured (no-tty)\nTraceback of wandb")
        return StandIn.init(wandb, **options)

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError) as raised:
        write(tmp_path, None, [])
    assert str(raised.value).startswith("--use_wandb: wandb did not start (RuntimeError: api_key not configured")
    assert "WANDB_MODE=offline" in str(raised.value)
    assert "\n" not in str(raised.value)
    write(tmp_path, 0, [0])
    assert "Traceback of wandb); this start is recorded offline" in capsys.readouterr().err
    assert wandb.runs == {"id0": [(0, {"loss": 1.0})]}


@dataclass(frozen=True)
class WithSecret(TrainConfig):
    webhook: str = option("", "where to post", secret=True)


def test_secret_options_are_not_sent(tmp_path, monkeypatch):
    """W&B's metadata would have the command line."""
    pytest.importorskip("wandb")
    arguments = ["train.py", "--webhook=https://hooks.example/token", "--in_the_command=line"]
    monkeypatch.setattr(sys, "argv", list(arguments))
    for name, url in (("open", ""), ("secret", "https://hooks.example/token")):
        open_log(WithSecret(webhook=url, logdir=str(tmp_path / name), use_wandb=True), None).close()
        (folder,) = (tmp_path / name / "wandb").glob("offline-run-*")
        [run] = records(folder)["run"]
        assert {item.key: item.value_json for item in run.config.update}["max_lr"] == str(TrainConfig.max_lr)
        (file,) = folder.glob("run-*.wandb")
        assert (b"in_the_command" in file.read_bytes()) == (not url)
    assert b"hooks.example" not in file.read_bytes()
    assert sys.argv == arguments
