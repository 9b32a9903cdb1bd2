"""The monitor: snapshots of a run's files, the state that follows from them, the view, the connection."""

import ast
import json
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from conftest import REPO
from rich.cells import cell_len

from steadygpt import watch
from steadygpt.cli import UserError
from steadygpt.curves import Chart
from steadygpt.liveness import state_of

sys.path.insert(0, str(REPO / "scripts"))
import monitor_training
from monitor_view import view

STATUS = {
    "status": "running", "reason": "", "doing": "training", "run_name": "tiny", "step": 120, "max_steps": 1000,
    "tokens_per_step": 524288, "ranks": 8, "device": "NVIDIA H100 80GB HBM3", "tokens_per_second": 1204000,
    "step_ms": 435.2, "mfu": 0.52, "eta_s": 4000, "elapsed_s": 7000, "cost": 24.1, "cost_to_go": 13.7,
    "host": socket.gethostname(), "pid": os.getpid(), "checkpoint_bytes": 1.5e9, "mirror": "s3://bucket/run",
}  # fmt: skip


def write_run(folder: Path, heartbeat_age_s=1.0, warnings=(), **changes) -> Path:
    """Write the files of a run; return its checkpoint folder."""
    checkpoints, logs = folder / "checkpoints", folder / "logs"
    checkpoints.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    updated_at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - heartbeat_age_s))
    status = {**STATUS, "logdir": str(logs), "updated_at": updated_at, **changes}
    (checkpoints / "status.json").write_text(json.dumps(status))
    lines = [f"run          {status.get('run_name', '')}", *(f"warning: {text}" for text in warnings), ""]
    (logs / "log.txt").write_text("\n".join(lines))
    append(
        checkpoints, *({"step": step, "loss": 5.0 - step / 100} for step in range(100)), {"step": 100, "val_loss": 4}
    )
    return checkpoints


def append(checkpoints: Path, *records: dict, end="\n") -> None:
    with open(checkpoints.parent / "logs/metrics.jsonl", "a") as file:
        file.write("\n".join(map(json.dumps, records)) + end)


# ---------------------------------------------------------------------------------------------------------------------
# states

HERE = {"stat": "Sl+", "age_s": 5000}
STATES = {
    "running": ({}, 3, HERE),
    "running, within a long step": ({"step_ms": 60_000}, 280, HERE),
    "running, in a container on this host, where its process has a different number": ({}, 3, {}),
    "running, on a machine with a shared folder": ({"host": "node7"}, 3, {}),
    "running, of an older version": ({"doing": None, "host": None, "step_ms": None}, 50, HERE),
    "starting": ({"doing": "starting"}, 600, HERE),
    "starting, of an older version": ({"doing": None, "tokens_per_second": None}, 600, HERE),
    "hung": ({}, 61, HERE),
    "hung, in the first step": ({"doing": "starting"}, 901, HERE),
    "hung, in a validation": ({"doing": "evaluating", "step_ms": 60_000}, 301, HERE),
    "suspended": ({}, 2, {"stat": "T", "age_s": 5000}),
    "killed": ({}, 16, {}),
    "killed, not yet reaped": ({}, 16, {"stat": "Z+", "age_s": 5000}),
    "killed, and its pid is used again": ({}, 5000, {"stat": "S", "age_s": 60}),
    "silent, on a machine with a shared folder": ({"host": "node7"}, 61, {}),
    "silent, without ps": ({}, 61, None),
    "stopped": ({"status": "stopped", "reason": "SIGTERM"}, 5000, {}),
    "finished": ({"status": "finished"}, 5000, {}),
    "failed": ({"status": "failed", "reason": "the last save failed"}, 5000, {}),
}


@pytest.mark.parametrize("case", STATES)
def test_state(case):
    changes, age_s, process = STATES[case]
    status = {key: value for key, value in {**STATUS, **changes, "pid": 42}.items() if value is not None}
    snapshot = {
        "status": status,
        "heartbeat_age_s": age_s,
        "process": process,
        "folder": "checkpoints",
        "saved_age_s": 9,
    }
    state = state_of({**snapshot, "host": STATUS["host"]})
    assert state.name == case.split(",")[0]
    assert state.is_well == (state.name in ("running", "starting", "stopped", "finished"))


def test_state_names_the_reason_and_the_next_command():
    snapshot = {"status": STATUS, "heartbeat_age_s": 99, "saved_age_s": 9, "process": HERE, "host": STATUS["host"]}
    snapshot["folder"] = "my run"
    pid = os.getpid()
    assert state_of(snapshot) == ("hung", f"process {pid} exists, but no heartbeat for 1 min 39 s", f"kill -9 {pid}")
    stopped = {**snapshot, "status": {"status": "stopped", "reason": "SIGTERM"}}
    assert state_of(stopped) == ("stopped", "SIGTERM", "./resume_training.sh --checkpoint_dir 'my run'")
    assert state_of({**stopped, "saved_age_s": None}).command == ""  # there is nothing to resume


# ---------------------------------------------------------------------------------------------------------------------
# snapshots


def test_snapshots_have_what_is_new(tmp_path):
    checkpoints = write_run(tmp_path, warnings=["one", "two"])
    (checkpoints / "latest.pt").write_bytes(b"12345")
    snapshots = watch.watch(str(checkpoints), 0)
    first = next(snapshots)
    assert first["reset"] and len(first["points"]["loss"]) == 100 and first["points"]["val_loss"] == [[100, 4]]
    assert first["warnings"] == ["one", "two"]
    assert first["saved_age_s"] < 60 and first["mirrored_age_s"] is None and first["disk_free_bytes"] > 0

    append(checkpoints, {"step": 100, "loss": None}, {"step": 101, "loss": 3.5}, {"step": 102, "loss": 1}, end="")
    second = next(snapshots)
    assert not second["reset"]
    assert second["points"] == {"loss": [[101, 3.5]], "val_loss": []}  # without null, and the last line is incomplete
    assert second["latest"]["loss"] == 3.5 and second["latest"]["val_loss"] == 4
    append(checkpoints)
    assert next(snapshots)["points"]["loss"] == [[102, 1]]


def test_snapshots_after_a_resume_begin_again(tmp_path):
    checkpoints = write_run(tmp_path, warnings=["of the first start"])
    snapshots = watch.watch(str(checkpoints), 0)
    next(snapshots)
    replacement = tmp_path / "new"
    for name, text in (("metrics.jsonl", '{"step": 0, "loss": 5}\n'), ("log.txt", "run          tiny\n")):
        replacement.write_text(text)
        replacement.replace(tmp_path / "logs" / name)
    again = next(snapshots)
    assert again["reset"] and again["points"]["loss"] == [[0, 5]] and again["warnings"] == []
    with open(tmp_path / "logs/metrics.jsonl", "r+") as file:
        file.truncate(5)
    assert next(snapshots)["reset"]


def test_snapshots_of_damaged_and_missing_files(tmp_path):
    checkpoints = write_run(tmp_path)
    snapshots = watch.watch(str(checkpoints), 0)
    next(snapshots)
    with open(tmp_path / "logs/metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe not JSON\n[1, 2]\n{"step": 101, "loss": 2}\n')
    (checkpoints / "status.json").write_text("{")
    after = next(snapshots)
    assert after["points"]["loss"] == [[101, 2]]
    assert after["status"]["run_name"] == "tiny"  # what it said before
    (tmp_path / "logs/metrics.jsonl").unlink()
    (tmp_path / "logs/log.txt").unlink()
    assert next(snapshots)["points"]["loss"] == []


def test_heartbeat_does_not_need_equal_clocks(tmp_path):
    checkpoints = write_run(tmp_path, heartbeat_age_s=3600)
    snapshots = watch.watch(str(checkpoints), 0)
    assert next(snapshots)["heartbeat_age_s"] > 3500
    write_run(tmp_path, heartbeat_age_s=3590)  # a machine whose clock is an hour behind has renewed it
    assert next(snapshots)["heartbeat_age_s"] < 1


def test_logs_of_a_run_that_was_moved(tmp_path):
    write_run(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert len(next(watch.watch(str(tmp_path / "new/checkpoints"), 0))["points"]["loss"]) == 100
    (tmp_path / "new/logs/log.txt").write_text("run          a later one\n")
    assert next(watch.watch(str(tmp_path / "new/checkpoints"), 0))["points"]["loss"] == []


def test_newest_run_in_subfolders(tmp_path):
    for name, seconds in (("a", 100), ("b", 300), ("c", 200)):
        os.utime(write_run(tmp_path / name) / "status.json", (seconds, seconds))
        (tmp_path / name / "checkpoints").rename(tmp_path / f"checkpoints-{name}")
    assert next(watch.watch(str(tmp_path), 0))["folder"] == str(tmp_path / "checkpoints-b")


def test_age_of_a_process():
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = watch.find_process(process.pid)
        assert found is not None and found["stat"][0] in "SRD" and found["age_s"] < 30
    finally:
        process.kill()
        process.wait()
    assert watch.find_process(process.pid) == {}


@pytest.mark.parametrize(("etime", "age_s"), [
    ("00:07", 7), ("02:00:01", 7201), ("3-00:00:00", 259200), ("441077234-10:25:20", 0),
])  # fmt: skip
def test_age_that_ps_prints(monkeypatch, etime, age_s):
    found = subprocess.CompletedProcess([], 0, f"S    {etime}\n", "")
    monkeypatch.setattr(watch.subprocess, "run", lambda *_, **__: found)
    assert watch.find_process(1) == {"stat": "S", "age_s": age_s}


def test_long_curves_are_thinned_and_keep_their_spikes():
    curve: list = []
    for start in range(0, 100_000, 1000):
        values = [[step, 3 + random.random()] for step in range(start, start + 1000)]
        values[500][1] = 9 if start == 7000 else values[500][1]
        curve = watch.thin(curve + values)
    assert len(curve) <= watch.MAX_POINTS
    assert [7500, 9] in curve and curve[0][0] < 100 and curve[-1][0] > 99_900
    assert curve == sorted(curve)


# ---------------------------------------------------------------------------------------------------------------------
# the view


def drawn(chart: Chart) -> list[str]:
    return ["".join(character for character, _ in row) for row in chart.cells]


def test_chart():
    falling = [(step, 8 - step) for step in range(9)]
    assert drawn(Chart([falling], 4, 2)) == ["⠹⢤  ", " ⠈⠹⢤"]
    flat_with_a_spike = [(step, 50.0 if step == 40 else 3 + step % 2 / 10) for step in range(80)]
    rows = drawn(Chart([flat_with_a_spike], 40, 4))
    assert rows[0].strip() and rows[-1].count(" ") == 0  # the spike leaves the chart, the rest is not flat
    assert drawn(Chart([[], []], 2, 1)) == ["  "]
    assert drawn(Chart([[(7, 3.0)]], 2, 1))[0].strip()  # one point


GPUS = {
    f"gpu{number}_{kind}": value
    for number in range(8)
    for kind, value in (
        ("percent", 97.0),
        ("memory_gb", 64.2),
        ("memory_total_gb", 79.6),
        ("celsius", 88),
        ("watts", 612.0),
    )
}
HOST = {"cpu_percent": 23.4, "ram_gb": 120.3, "ram_total_gb": 512.0}
RUNS = {
    "8 GPUs": ({}, [{**GPUS, **HOST}], ["a long\t\x1b[31m warning " * 20] * 5),
    "2 GPUs without memory counters": ({"ranks": 2}, [{"gpu0_percent": 5, "gpu1_watts": 30}], []),
    "NaN, a CPU": ({"device": "cpu"}, [{"loss": None, "grad_norm": None}], ["bad step"]),
    "ended": ({"status": "finished", "summary": ["a line of the summary " * 9] * 12}, [GPUS], ["a warning"]),
    "old": (
        dict.fromkeys(("run_name", "eta_s", "ranks", "device", "mirror", "tokens_per_step", "cost", "host")),
        [],
        [],
    ),
    "before its first step": ({"step": 0, "max_steps": 0, "doing": "starting"}, [], []),
}


def shown(checkpoints: Path, width: int, height: int) -> list[str]:
    snapshot = next(watch.watch(str(checkpoints), 0))
    return [line.plain for line in view(snapshot, snapshot["points"], state_of(snapshot), width, height, "q leaves")]


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 36), (200, 60), (40, 10)])
@pytest.mark.parametrize("name", RUNS)
def test_view_fits_the_terminal(tmp_path, name, size):
    changes, measured, warnings = RUNS[name]
    checkpoints = write_run(tmp_path, warnings=warnings, **changes)
    append(checkpoints, *({"step": 100, **record} for record in measured))
    lines = shown(checkpoints, *size)
    assert len(lines) <= size[1] and all(line.isprintable() for line in lines)
    assert max(map(cell_len, lines)) <= size[0]


def test_view_shows_first_of_all_whether_the_run_is_alive(tmp_path):
    checkpoints = write_run(tmp_path, warnings=["the disk is nearly full"])
    append(checkpoints, {"step": 120, "loss": 3.25, **GPUS, **HOST})
    text = "\n".join(lines := shown(checkpoints, 120, 36))
    assert lines[0].startswith("● running  tiny") and "8 x NVIDIA H100 80GB HBM3" in lines[0]
    for part in (
        "12.0%  120 of 1,000 steps  1 h 06 min to go", "loss     3.2500", "1,204,000", "MFU      52.0%", "24.10",
        "GPU 7", "64/80 GB 88 °C 612 W", "RAM 120 of 512 GB", "warning the disk is nearly full", "mirror not yet",
    ):  # fmt: skip
        assert part in text
    assert any("\u2801" <= character <= "\u28ff" for character in text)  # the curves


def test_view_of_a_run_that_ended_has_its_summary_instead_of_the_load(tmp_path):
    checkpoints = write_run(tmp_path, status="finished", summary=["tokens  6.34 B"])
    append(checkpoints, {"step": 120, **GPUS, **HOST})
    text = "\n".join(shown(checkpoints, 120, 36))
    assert "tokens  6.34 B" in text and "GPU 0" not in text and "to go" not in text and "free, room for" in text


def test_advice_to_a_failed_run_is_not_cut_off(tmp_path):
    advice = "stopping after 5 bad steps. " + "Resume with a smaller learning rate. " * 3 + "Or skip these tokens."
    checkpoints = write_run(tmp_path, warnings=[advice])
    assert "Or skip these tokens." not in " ".join("\n".join(shown(checkpoints, 80, 24)).split())
    write_run(tmp_path, warnings=[advice], status="failed")
    assert "Or skip these tokens." in " ".join("\n".join(shown(checkpoints, 80, 24)).split())


# ---------------------------------------------------------------------------------------------------------------------
# the command


@pytest.fixture
def ssh(tmp_path, monkeypatch) -> str:
    """A command in place of ssh: it ignores the host and runs the rest here."""
    script = tmp_path / "ssh"
    script.write_text('echo "Welcome to $1"; shift; eval "exec $*"\n')
    monkeypatch.setattr(monitor_training, "FIRST_PAUSE_S", 0.1)
    return f"sh {script}"


def test_once_prints_the_view_and_tells_by_its_status_whether_the_run_is_well(tmp_path, capfd):
    assert monitor_training.main([str(write_run(tmp_path)), "--once"]) == 0
    assert "● running" in capfd.readouterr().out
    failed = write_run(tmp_path, status="failed", reason="disk full")
    (failed / "latest.pt").touch()
    assert monitor_training.main([str(failed), "--once"]) == 1
    assert "disk full\nnext: ./resume_training.sh" in capfd.readouterr().out
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert monitor_training.main([str(write_run(tmp_path, heartbeat_age_s=30, pid=gone.pid)), "--once"]) == 1
    assert "● killed" in capfd.readouterr().out


def test_mistakes_are_one_line(tmp_path, ssh, monkeypatch):
    with pytest.raises(UserError, match=r"none: no run; found no status.json .* Try the --checkpoint_dir of a run\.$"):
        monitor_training.main([str(tmp_path / "none")])
    with pytest.raises(UserError, match="no run"):
        monitor_training.main(["host:none", "--ssh", ssh])
    with pytest.raises(UserError, match=r"no-ssh: cannot be started \(No such file or directory\)"):
        monitor_training.main(["host:none", "--ssh", "no-ssh"])
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(UserError, match="pip install rich"):
        monitor_training.main([str(write_run(tmp_path))])


def test_run_on_another_machine(tmp_path, ssh, capfd):
    folder = write_run(tmp_path / "a folder")
    assert monitor_training.main([f"me@host:{folder}", "--ssh", ssh, "--once"]) == 0
    assert "● running  tiny" in capfd.readouterr().out


def test_lost_connection_is_shown_and_comes_back(tmp_path, ssh):
    folder = write_run(tmp_path)
    options = monitor_training.MonitorOptions(f"host:{folder}", interval_s=0.1, ssh=ssh)
    with closing(monitor_training.Feed(options)) as feed:
        feed.read(wait=True)
        assert monitor_training.state_now(feed)[1].name == "running"
        os.rename(folder, tmp_path / "away")
        feed.close()
        wait_for(lambda: feed.read() or feed.problem)
        snapshot, state = monitor_training.state_now(feed)
        assert state.name == "not reachable" and "last seen running" in state.why
        assert snapshot["status"]["run_name"] == "tiny" and len(feed.curves["loss"]) == 100
        os.rename(tmp_path / "away", folder)
        wait_for(lambda: feed.read() or not feed.problem)
        assert monitor_training.state_now(feed)[1].name == "running"
        assert len(feed.curves["loss"]) == 100  # not doubled


def test_silent_connection_is_replaced(tmp_path, ssh, monkeypatch):
    monkeypatch.setattr(monitor_training, "SILENCE_S", 1.0)
    options = monitor_training.MonitorOptions(f"host:{write_run(tmp_path)}", interval_s=0.1, ssh=ssh)
    with closing(monitor_training.Feed(options)) as feed:
        feed.read(wait=True)
        feed.process.send_signal(signal.SIGSTOP)  # as a network that drops everything
        wait_for(lambda: feed.read() or feed.problem)
        wait_for(lambda: feed.read() or not feed.problem)


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_watch_needs_only_an_old_python_and_ends_with_its_reader(tmp_path):
    source = Path(watch.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    command = [sys.executable, "-I", "-", str(write_run(tmp_path)), "0.1"]
    with open(watch.__file__) as stdin:
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline())["status"]["run_name"] == "tiny"
    process.stdout.close()
    assert process.wait(10) == -signal.SIGPIPE and process.stderr.read() == ""


@pytest.mark.parametrize(("leave", "status"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143)])
def test_live_view_leaves_the_terminal_as_it_was(tmp_path, leave, status):
    command = [sys.executable, monitor_training.__file__, str(write_run(tmp_path)), "--interval_s", "0.1"]
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"},
        start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )  # fmt: skip
    os.close(terminal)
    text = b""
    while "● running".encode() not in text:
        text += os.read(main, 65536)
    if isinstance(leave, str):
        os.write(main, leave.encode())
    else:
        process.send_signal(leave)
    try:
        while chunk := os.read(main, 65536):
            text += chunk
    except OSError:  # the terminal is closed
        pass
    assert process.wait(10) == status, text
    assert text.index(b"\x1b[?1049h") < text.index(b"\x1b[?1049l")  # the alternate screen
    os.close(main)
