"""Curves in Weights & Biases: files of the real package, written offline and read back, and a stand-in for a server."""

import json
import socket
import struct
import sys
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
    """Return W&B's rows by our step, without texts and W&B's own columns."""
    found = defaultdict(dict)
    for row in rows_of(folder):
        found[row["step"]] |= {k: v for k, v in row.items() if k[0] != "_" and k not in ("sample", "step")}
    return found


def test_all_that_was_measured_is_a_curve_over_our_step_and_a_resume_is_an_offline_run_of_its_own(workdir):
    pytest.importorskip("wandb")
    flags = ("--use_wandb", "--eval_freq", "4", "--sample_freq", "4", "--run_name", "mine")
    assert run_here(*flags) == 0
    (folder,) = Path("checkpoints/wandb").glob("offline-run-*")
    found = curves_of(folder)
    assert found == measured()
    assert list(found) == list(range(9))
    assert {"loss", "val_loss", "val_bpb"} <= found[4].keys()
    assert [row["step"] for row in rows_of(folder) if "sample" in row] == [4, 8]
    assert [(metric.glob_name, metric.step_metric) for metric in records(folder)["metric"]] == [("*", "step")]
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
    """The module wandb with a server: runs by id, each a list of rows."""

    def __init__(self):
        self.runs, self.names, self.used = defaultdict(list), {}, []
        self.Settings, self.mode = lambda **_: None, "online"

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def init(self, *, name, id=None, resume=None, config, mode=None, **_):
        assert (resume == "allow") == bool(id)
        id = id or f"id{len(self.runs)}"
        self.names[id], self.rows, self.offline = name, self.runs[id], "offline" in (mode, self.mode)
        self.id, self.url, self.settings = id, f"https://x/{id}", types.SimpleNamespace(sync_dir=f"wandb/{id}")
        self.used.append(id)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        pass


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", StandIn())
    return sys.modules["wandb"]


def write(tmp_path, start_step, steps, run="tiny") -> None:
    """Log some steps of a run of 10."""
    config = TrainConfig(run_name=run, checkpoint_dir=str(tmp_path), use_wandb=True, max_steps=10)
    log = open_log(config, start_step)
    for step in steps:
        log.evaluation(step, "", loss=1.0)
    log.close()


def test_a_run_is_one_run_there_and_offline_launches_are_runs_of_their_own(tmp_path, wandb):
    write(tmp_path, None, range(4))
    write(tmp_path, 2, range(2, 6))
    wandb.mode = "offline"
    write(tmp_path, 6, range(6, 8))
    write(tmp_path, 8, range(8, 9))
    wandb.mode = "online"
    write(tmp_path, 9, range(9, 10))
    write(tmp_path / "other", None, range(2), run="another")
    assert wandb.used == ["tiny", "tiny", "id1", "id2", "tiny", "another"]
    assert [row["step"] for row in wandb.runs["tiny"]] == [0, 1, 2, 3, 2, 3, 4, 5, 9]
    assert wandb.runs["id1"] == [{"step": step, "loss": 1.0} for step in (6, 7)]


def test_a_process_of_wandb_that_dies_or_does_not_finish_loses_curves_and_not_the_run(
    tmp_path, wandb, monkeypatch, capsys
):
    def fail(*_):
        raise TimeoutError("no answer")

    for method in ("log", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(wandb, method, fail)
            write(tmp_path / method, None, range(10))
        warning = "warning: cannot write to W&B: TimeoutError: no answer; training continues\n"
        assert capsys.readouterr().err == warning
        assert len(read_records(tmp_path / method / "metrics.jsonl")) == 10


@pytest.mark.parametrize("start_step", [None, 0])
def test_a_launch_that_does_not_reach_wandb_is_recorded_offline(tmp_path, wandb, monkeypatch, capsys, start_step):
    def fail(**options):
        if "mode" not in options:
            raise RuntimeError("api_key not configured (no-tty)\nTraceback of wandb")
        return StandIn.init(wandb, **options)

    monkeypatch.setattr(wandb, "init", fail)
    write(tmp_path, start_step, [0])
    assert capsys.readouterr().err == (
        "warning: --use_wandb: wandb did not start (RuntimeError: api_key not configured (no-tty) Traceback of wandb); "
        "this launch is recorded offline\n"
    )
    assert wandb.runs == {"id0": [{"step": 0, "loss": 1.0}]}


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")], ids=["nothing", "an empty folder wandb/"])
def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(workdir, monkeypatch, found):
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(UserError, match=r"(?i)^--use_wandb: .*\bpip install wandb\b"):
        run_here("--use_wandb")
    assert [path.name for path in Path("checkpoints").iterdir()] == [".lock"]


@pytest.mark.storm
@pytest.mark.parametrize("answers", [False, True])
def test_a_server_of_wandb_that_is_down_or_silent_takes_less_than_a_minute(
    tmp_path, monkeypatch, capsys, answers, request
):
    """The real package; the time that it has is shorter than in a run."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # else the environment that other tests had is kept
    request.addfinalizer(wandb.teardown)
    monkeypatch.setattr(wandb_sink, "CONNECT_S", 5.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()  # and says nothing
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        begun_s = time.monotonic()
        write(tmp_path, None, range(3))
    assert time.monotonic() - begun_s < 30
    assert "this launch is recorded offline" in capsys.readouterr().err
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [*curves_of(folder)] == [0, 1, 2]


@dataclass(frozen=True)
class WithSecret(TrainConfig):
    webhook: str = option("", "where to post", secret=True)


def test_secret_options_are_not_sent(tmp_path, monkeypatch):
    """W&B's metadata would have the command line."""
    pytest.importorskip("wandb")
    arguments = ["train.py", "--webhook=https://hooks.example/token", "--in_the_command=line"]
    monkeypatch.setattr(sys, "argv", list(arguments))
    config = WithSecret(webhook="https://hooks.example/token", checkpoint_dir=str(tmp_path), use_wandb=True)
    open_log(config, None).close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    [run] = records(folder)["run"]
    assert {item.key: item.value_json for item in run.config.update}["max_lr"] == str(TrainConfig.max_lr)
    (file,) = folder.glob("run-*.wandb")
    assert b"in_the_command" not in file.read_bytes() and b"hooks.example" not in file.read_bytes()
    assert sys.argv == arguments
