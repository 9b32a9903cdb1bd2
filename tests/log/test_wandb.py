"""Curves in Weights & Biases: files of the real package, written offline and read back, and a stand-in for a server."""

import json
import struct
import sys
import threading
import time
import types
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import run_here
from ground import open_log

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
    for record in read_records(Path("checkpoints/metrics.jsonl")):
        found[record["step"]] |= {name: value for name, value in record.items() if name not in ("step", "time")}
    return found


def curves_of(folder: Path) -> dict[int, dict]:
    """Return W&B's rows by step, without texts and W&B's own columns; check that they ascend."""
    rows = rows_of(folder)
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))
    return {row["_step"]: {k: v for k, v in row.items() if k[0] != "_" and k != "sample"} for row in rows}


def test_each_step_is_one_row_with_all_that_was_measured_and_a_resume_is_an_offline_run_of_its_own(workdir):
    pytest.importorskip("wandb")
    flags = ("--use_wandb", "--eval_freq", "4", "--sample_freq", "4", "--run_name", "mine")
    assert run_here(*flags) == 0
    (folder,) = Path("checkpoints/wandb").glob("offline-run-*")
    found = curves_of(folder)
    assert found == measured()
    assert list(found) == list(range(9))
    assert {"loss", "val_loss", "val_bpb"} <= found[4].keys()
    assert "sample" in rows_of(folder)[4]
    assert abs(rows_of(folder)[0]["_timestamp"] - folder.stat().st_mtime) < 60
    (run,) = records(folder)["run"]
    assert run.display_name == "mine"
    assert {option.key: option.value_json for option in run.config.update}["max_steps"] == "8"

    assert run_here(*flags, "--max_steps", "12", "--resume") == 0
    (resumed,) = {*Path("checkpoints/wandb").glob("offline-run-*")} - {folder}
    assert folder.name.split("-")[-1] != resumed.name.split("-")[-1]
    assert curves_of(resumed) == {step: row for step, row in measured().items() if step >= 8}


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
    options = {"run_name": run, "checkpoint_dir": str(tmp_path), "use_wandb": True, "max_steps": 10}
    log = open_log(TrainConfig(**options, resume="" if start_step is None else resume), start_step)
    for step in steps:
        log.evaluation(step, "", loss=loss)
    log.close()


OLDER = {"resume": "checkpoints/rolling_step_000003.pt"}
STARTS = {  # starts: the first step, the steps, what is different; then id -> run's name, number of the launch -> steps
    "a resume continues where the server is and sends nothing twice": (
        [(None, range(6), {}), (5, range(5, 8), {})], {"id0": ("tiny", {0: range(6), 1: range(6, 8)})},
    ),
    "going back to an older checkpoint starts a new run": (
        [(None, range(8), {}), (3, range(3, 5), OLDER), (5, range(5, 6), {})],
        {"id0": ("tiny", {0: range(8)}), "id1": ("tiny", {1: range(3, 5), 2: range(5, 6)})},
    ),
    "a fork is a new run": (  # --run_name names it
        [(None, range(8), {}), (3, range(3, 5), {"resume": "elsewhere/rolling_step_000003.pt", "folder": "fork"})],
        {"id0": ("tiny", {0: range(8)}), "id1": ("tiny", {1: range(3, 5)})},
    ),
    "a copy of a run with its logs is a new run": (
        [(None, range(4), {}), (4, range(4, 6), {"run": "copy"}), (6, range(6, 8), {"run": "copy"})],
        {"id0": ("tiny", {0: range(4)}), "id1": ("copy", {1: range(4, 6), 2: range(6, 8)})},
    ),
    "offline launches stay apart from the run online": (
        [(None, range(4), {}), (2, range(2, 6), {"mode": "offline"}), (6, range(6, 8), {"mode": "offline"}),
         (8, range(8, 10), {})],
        {"id0": ("tiny", {0: range(4), 3: range(8, 10)}), "id1": ("tiny", {1: range(2, 6)}),
         "id2": ("tiny", {2: range(6, 8)})},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
def test_a_start_continues_a_run_of_the_server_or_begins_one(case, tmp_path, wandb):
    launches, expected = STARTS[case]
    for number, (first, steps, changes) in enumerate(launches):
        wandb.mode = changes.get("mode", "online")
        options = {name: value for name, value in changes.items() if name in ("resume", "run")}
        write(tmp_path / changes.get("folder", ""), first, steps, loss=float(number), **options)
    assert wandb.names == {id: name for id, (name, _) in expected.items()}
    for id, (_, by_start) in expected.items():
        assert wandb.runs[id] == [(step, {"loss": n}) for n, steps in by_start.items() for step in steps]


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
    assert "Traceback of wandb); this launch is recorded offline" in capsys.readouterr().err
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
        open_log(WithSecret(webhook=url, checkpoint_dir=str(tmp_path / name), use_wandb=True), None).close()
        (folder,) = (tmp_path / name / "wandb").glob("offline-run-*")
        [run] = records(folder)["run"]
        assert {item.key: item.value_json for item in run.config.update}["max_lr"] == str(TrainConfig.max_lr)
        (file,) = folder.glob("run-*.wandb")
        assert (b"in_the_command" in file.read_bytes()) == (not url)
    assert b"hooks.example" not in file.read_bytes()
    assert sys.argv == arguments
