"""The monitor: snapshots of a run's files, the state that follows from them, the view, the command."""

import fcntl
import io
import json
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import REPO, refusal
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_metrics import start_line

from steadygpt.base.durable import lock_folder, lock_owner
from steadygpt.base.options import UserError
from steadygpt.monitor import snapshot as watch
from steadygpt.monitor.snapshot import HEALTHY, Snapshot, state_of

sys.path.insert(0, str(REPO / "scripts"))
import monitor_training

from steadygpt.monitor.view import chart, view

STATUS = {
    "status": "running", "reason": "", "doing": "training", "run_name": "tiny", "step": 120,
    "max_steps": 1000, "tokens": 330301440, "ranks": 8, "device": "NVIDIA H100 80GB HBM3",
    "tokens_per_second": 1204000,
    "step_ms": 435.2, "mfu": 0.52, "eta_s": 4000, "elapsed_s": 7000, "cost": 24.1, "cost_to_go": 13.7,
    "host": socket.gethostname(), "pid": os.getpid(), "mirror": "s3://bucket/run", "loss": 3.25, "val_loss": 4,
    "val_bpb": 1.0625, "lr": 6e-4,
}  # fmt: skip

LOCKS: list = []  # of runs that live


def write_run(folder: Path, heartbeat_age_s=1.0, warnings=(), **changes) -> Path:
    """Write the files of a run; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not lock_owner(folder):
        LOCKS.append(lock_folder(folder, ""))
    status = {**STATUS, "updated_at": time.time() - heartbeat_age_s, **changes}
    status["warnings"] = list(warnings)
    (folder / "status.json").write_text(json.dumps(status))
    append(
        folder,
        start_line(0, settings={"ranks": 8, "max_lr": 1e-3}),
        *({"step": step, "loss": 5.0 - step / 100} for step in range(100)),
        {"step": 100, "val_loss": 4, "val_bpb": 1.0625},
    )
    return folder


def append(folder: Path, *records: dict, end="\n") -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            "\n".join(json.dumps({"step": record.pop("step"), "time": 1.5} | record) for record in records) + end
        )


def look(checkpoints: Path) -> Snapshot:
    return next(watch.watch(str(checkpoints)))


# ---------------------------------------------------------------------------------------------------------------------
# states

HERE = socket.gethostname()
OWNER = f"42 on {HERE}"
STATES = {
    "running": ({}, 3, OWNER),
    "running, within a long step": ({"step_ms": 60_000}, 280, OWNER),
    "running, on a machine with a shared folder, whose lock is not seen": ({"host": "elsewhere"}, 3, ""),
    "running, compiling the model for its first validation": ({"doing": "evaluating"}, 600, OWNER),
    "running, compiling the model for its first step": ({"doing": "starting"}, 600, OWNER),
    "running, a launch after one that was killed": ({}, 5000, f"43 on {HERE}"),
    "running, a launch after one that has finished": ({"status": "finished"}, 5000, f"43 on {HERE}"),
    "hung": ({}, 61, OWNER),
    "hung, in the first step": ({"doing": "starting"}, 901, OWNER),
    "hung, in a validation": ({"doing": "evaluating", "step_ms": 60_000}, 901, OWNER),
    "hung, on a machine with a shared folder": ({"host": "elsewhere"}, 61, ""),
    "killed": ({}, 0, ""),
    "stopped": ({"status": "stopped", "reason": "SIGTERM"}, 5000, ""),
    "finished": ({"status": "finished"}, 5000, ""),
    "finished, and still uploading": ({"status": "finished"}, 5000, OWNER),
    "failed": ({"status": "failed", "reason": "the last save failed"}, 5000, ""),
}


def snapshot_of(changes=(), owner=OWNER, age_s=1.0, folder="checkpoints", saved_at: float | None = 9) -> Snapshot:
    status = {**STATUS, "pid": 42, **dict(changes)}
    return Snapshot(Path(folder), status, owner, age_s, saved_at, {})


@pytest.mark.parametrize("case", STATES)
def test_state(case):
    changes, age_s, owner = STATES[case]
    state = state_of(snapshot_of(changes, owner, age_s))
    assert state.name == case.split(",")[0]
    assert (state.name in HEALTHY) == (state.name in ("running", "stopped", "finished"))


def test_state_names_the_reason_and_the_next_command():
    why = f"no heartbeat for 1 min 39 s from process 42 on {HERE}"
    assert state_of(snapshot_of(age_s=99)) == ("hung", why, "kill -9 42")
    assert state_of(snapshot_of({"host": "elsewhere"}, "", 99)).command == ""  # it cannot be killed from here
    ended = {"status": "stopped", "reason": "SIGTERM"}
    command = "./resume_training.sh --checkpoint_dir 'my run' --mirror s3://bucket/run"
    assert state_of(snapshot_of(ended, "", folder="my run")) == ("stopped", "SIGTERM", command)
    assert state_of(snapshot_of(ended, "", saved_at=None)).command == ""  # there is nothing to resume


def test_a_run_whose_process_was_killed_has_lost_its_lock(tmp_path):
    code = (
        "import sys, time; from steadygpt.base.durable import *; lock = lock_folder(Path('.'), ''); print(flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], cwd=tmp_path, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    try:
        process.stdout.readline()
        assert lock_owner(tmp_path) == f"{process.pid} on {HERE}"
        process.kill()
        deadline = time.monotonic() + 20
        while lock_owner(tmp_path):  # although its parent has not noticed yet
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()


def test_a_run_that_has_only_locked_its_folder_starts(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "one"):
        with lock_folder(folder, ""):
            assert monitor_training.main([str(tmp_path), "--once"]) == 0
            assert f"process {os.getpid()} on {HERE} has locked the folder" in " ".join(capsys.readouterr().out.split())
    with refusal(f"{tmp_path}: no run"):
        monitor_training.main([str(tmp_path), "--once"])


def test_a_start_waits_for_a_monitor_that_asks_the_lock(tmp_path):
    lock_folder(tmp_path, "").close()
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monitor = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        monitor.start()
        lock_folder(tmp_path, "").close()
        monitor.join()


# ---------------------------------------------------------------------------------------------------------------------
# snapshots


@given(st.lists(st.floats(0, allow_nan=False, allow_infinity=False), max_size=30))
def test_every_loss_that_a_run_can_log_is_read(losses):
    with tempfile.TemporaryDirectory() as folder:
        append(Path(folder), *({"step": step, "loss": loss} for step, loss in enumerate(losses)))
        curves = watch.Curves(Path(folder, "metrics.jsonl"))
        curves.read()
        assert curves.by_name["loss"] == [*enumerate(losses)]


def test_snapshots_have_what_is_new(tmp_path):
    checkpoints = write_run(tmp_path, warnings=["one", "two"])
    (checkpoints / "latest.pt").write_bytes(b"12345")
    snapshots = watch.watch(str(checkpoints))
    first = next(snapshots)
    assert len(first.curves["loss"]) == 100 and first.curves["val_loss"] == [(100, 4)]
    assert first.status["warnings"] == ["one", "two"]
    assert first.owner == f"{os.getpid()} on {HERE}" and time.time() - first.saved_at < 60

    append(checkpoints, {"step": 100, "loss": None}, {"step": 101, "loss": 3.5}, {"step": 102, "loss": 1}, end="")
    second = next(snapshots)
    assert second.curves["loss"][100:] == [(101, 3.5)]  # without null, and the last line is incomplete
    append(checkpoints)
    assert next(snapshots).curves["loss"][100:] == [(101, 3.5), (102, 1)]


def test_after_a_resume_the_steps_that_are_repeated_count_once(tmp_path):
    checkpoints = write_run(tmp_path)
    snapshots = watch.watch(str(checkpoints))
    assert next(snapshots).curves["val_loss"] == [(100, 4)]
    append(checkpoints, start_line(50), *({"step": step, "loss": 2.0, "lr": 0.5} for step in range(50, 60)))
    again = next(snapshots)
    assert again.curves == {"loss": [(s, 5.0 - s / 100 if s < 50 else 2.0) for s in range(60)], "val_loss": []}
    assert look(checkpoints).curves == again.curves
    append(checkpoints, start_line(60, settings={"long": "x" * 70_000}), *({"step": s, "loss": 1.0} for s in (60, 61)))
    append(checkpoints, start_line(61), {"step": 61, "loss": 0.5})
    assert next(snapshots).curves["loss"][59:] == [(59, 2.0), (60, 1.0), (61, 0.5)]


BROKEN_LINES = [
    '{"step": "x", "time": 1, "loss": 1}', '{"time": 1, "loss": 1}',
    '{"step": 1, "time": 1, "loss": "low"}', '{"step": 1, "time": 1, "loss": NaN}',
    '{"step": 1, "time": 1, "loss": 1e999}',
    '{"step": 1' + "0" * 5000 + ', "time": 1, "loss": 1}',
    '{"step": 1, "time": 1, "lo', "\xff\xfe not JSON", "[1, 2]", "\x00" * 99, "",
]  # fmt: skip


def test_snapshots_of_damaged_and_missing_files_and_of_logs_that_begin_again(tmp_path):
    checkpoints = write_run(tmp_path)
    snapshots, logs = watch.watch(str(checkpoints)), tmp_path / "metrics.jsonl"
    next(snapshots)
    with open(logs, "a", encoding="latin-1") as file:
        file.writelines(f"{line}\n" for line in BROKEN_LINES)
    append(checkpoints, {"step": 101, "loss": 2.5})
    assert look(checkpoints).curves["loss"][100:] == [(101, 2.5)]
    assert any("● running" in line for line in shown(checkpoints, 100, 40))
    (checkpoints / "status.json").write_text("{")
    after = next(snapshots)
    assert after.curves["loss"][100:] == [(101, 2.5)]
    assert after.status["run_name"] == "tiny"  # what it said before
    logs.unlink()
    append(checkpoints, start_line(0), {"step": 0, "loss": 5})
    assert next(snapshots).curves["loss"] == [(0, 5)]
    logs.write_text("")
    assert next(snapshots).curves["loss"] == []


MISFITS = [
    "", "[]", '"x"', "[" * 99_999, '{"pid": -1}', '{"pid": 1e99}', '{"step": 1' + "0" * 5000 + "}", '{"step": null}',
    '{"step": "9"}', '{"updated_at": "yesterday"}', '{"updated_at": NaN}', '{"eta_s": Infinity}', '{"summary": [1]}',
    '{"run_name": {}}', '{"max_steps": -5}', '{"status": ["running"]}', '{"loss": "low"}', "\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", MISFITS, ids=lambda text: ascii(text)[:40])
def test_a_status_that_does_not_fit_is_one_line_and_the_live_view_keeps_the_last_one(tmp_path, text):
    checkpoints = write_run(tmp_path)
    snapshots = watch.watch(str(checkpoints))
    next(snapshots)
    (checkpoints / "status.json").write_text(text, encoding="latin-1")
    assert next(snapshots).status["run_name"] == "tiny"
    with pytest.raises(UserError) as raised:
        monitor_training.main([str(checkpoints), "--once"])
    assert str(raised.value).startswith(f"{checkpoints}/status.json: ")
    assert str(raised.value).endswith("; a run that is alive writes this file again within seconds")
    assert len(str(raised.value)) < 400


ODD = {
    "empty": {}, "finished without a step": {"status": "finished"}, "an unknown word": {"status": "", "doing": ""},
    "a pid that cannot exist": {"pid": 2**63 - 1},
    "a large date": {"updated_at": 1e308, "mirrored_at": 1e308, "mirror": "s3://x/y"},
    "large numbers": dict.fromkeys(("eta_s", "elapsed_s", "step_ms", "cost", "mfu"), 1e308) | {"step": 2**62},
    "no size": {"checkpoint_bytes": 0, "max_steps": 0},
    "escape codes": {"run_name": "\x1b[2J", "device": "\x1b[31m", "resume": "\r\n", "reason": "\x85"},
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_a_status_with_odd_values_is_shown(tmp_path, case):
    checkpoints = write_run(tmp_path)
    (checkpoints / "status.json").write_text(json.dumps(ODD[case]))
    assert all(line.isprintable() for line in shown(checkpoints, 100, 40))


def test_the_log_of_a_mirror_is_shown_without_a_status(tmp_path):
    append(tmp_path, start_line(0), *({"step": step, "loss": 5.0 - step / 100} for step in range(100)))
    lines = shown(tmp_path, 80, 24)
    assert lines[0].startswith("● unknown") and "no status.json" in lines[1]
    assert any("\u2801" <= character <= "\u28ff" for line in lines for character in line)


def test_the_run_of_a_folder_or_the_newest_one_below_it_and_a_line_for_each_other_run(tmp_path):
    for name, seconds in (("a", 100), ("b", 300), ("x/c", 200)):
        os.utime(write_run(tmp_path / name) / "status.json", (seconds, seconds))
    (tmp_path / "a/status.json").write_text(json.dumps(STATUS | {"status": "finished", "step": 1000}))
    os.utime(tmp_path / "a/status.json", (100, 100))
    assert (look(tmp_path).folder, [*look(tmp_path).other_runs]) == (tmp_path / "b", ["x/c", "a"])
    write_run(tmp_path)
    os.utime(tmp_path / "status.json", (50, 50))
    snapshot = look(tmp_path)
    assert (snapshot.folder, [*snapshot.other_runs]) == (tmp_path, ["b", "x/c", "a"])
    lines = shown(tmp_path, 100, 40)
    start = next(number for number, line in enumerate(lines) if line.startswith("other runs"))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert rows[0][:6] == ["b", "running", "step", "120", "of", "1,000"]
    assert " ".join(rows[2]) == "a finished step 1,000 of 1,000 loss 3.2500 val loss 4.0000"
    for number in range(9):
        write_run(tmp_path / f"more-{number}")
    assert "and 4 more" in [line.strip() for line in shown(tmp_path, 100, 40)]
    assert "other runs" not in "".join(shown(tmp_path / "b", 100, 40))


def test_long_curves_are_thinned_and_keep_their_spikes(tmp_path):
    checkpoints = write_run(tmp_path)
    losses = [3 + random.random() for _ in range(5000)]
    losses[1500] = 9
    append(checkpoints, *({"step": 100 + step, "loss": loss} for step, loss in enumerate(losses)))
    curve = look(checkpoints).curves["loss"]
    assert watch.MAX_POINTS / 2 <= len(curve) <= watch.MAX_POINTS + 2
    assert (1600, 9) in curve and curve[0][0] < 100 and curve[-1][0] > 5000
    assert curve == sorted(curve)


# ---------------------------------------------------------------------------------------------------------------------
# the view


def drawn(width: int, height: int, curve: list[tuple[int, float]]) -> list[str]:
    """Return a curve of so many characters, without the values and the steps beside it."""
    lines = chart({"loss": curve, "val_loss": []}, width + 10, height + 2)
    return [line.plain[10:] for line in lines[1:-1]]


def test_chart():
    falling = [(step, 8 - step) for step in range(9)]
    assert drawn(4, 2, falling) == ["⠑⢄  ", "  ⠑⢄"]
    flat_with_a_spike = [(step, 50.0 if step == 40 else 3 + step % 2 / 10) for step in range(80)]
    rows = drawn(40, 4, flat_with_a_spike)
    assert rows[0].strip() and rows[-1].count(" ") == 0  # the spike leaves the chart, the rest is not flat
    assert drawn(2, 1, [(7, 3.0)])[0].strip()  # one point


GPU = {"percent": 97.0, "memory_gb": 64.2, "memory_total_gb": 79.6, "celsius": 88, "watts": 612.0}
GPUS = {f"gpu{number}_{kind}": value for number in range(8) for kind, value in GPU.items()}
HOST = {"cpu_percent": 23.4, "ram_gb": 120.3, "ram_total_gb": 512.0}
RUNS = {
    "8 GPUs": ({}, {**GPUS, **HOST}, ["a long\t\x1b[31m warning " * 20] * 5),
    "2 GPUs without memory counters": ({"ranks": 2}, {"gpu0_percent": 5, "gpu1_watts": 30}, []),
    "a CPU": ({"device": "cpu"}, {"cpu_percent": 3.0}, ["bad step"]),
    "RAM without its size": ({}, {"ram_gb": 3.0}, []),
    "resumed": ({"resume": "resumed at step 100: repeated 20 steps, bit for bit the same " * 3}, HOST, []),
    "ended": ({"status": "finished", "summary": ["a line of the summary " * 9] * 6}, GPUS, ["a warning"]),
    "before its first step": ({"step": 0, "max_steps": 0, "doing": "starting"}, {}, []),
}


def shown(checkpoints: Path, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(view(look(checkpoints), console, "Ctrl-C closes the monitor"))
    return console.file.getvalue().splitlines()


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(40, 200), height=st.integers(10, 60))
@example(width=80, height=24)
@pytest.mark.parametrize("name", RUNS)
def test_view_fits_the_terminal_and_has_curves_from_80_x_24_on(tmp_path, name, width, height):
    changes, load, warnings = RUNS[name]
    checkpoints = write_run(tmp_path, warnings=warnings, load=load, **changes)
    lines = shown(checkpoints, width, height)
    assert all(line.isprintable() for line in lines) and max(map(cell_len, lines)) <= width
    assert any("a long\\t" in line for line in lines) == bool(name == "8 GPUs")
    if width >= 80 and height >= 24:
        assert len(lines) <= height
        assert any("\u2801" <= character <= "\u28ff" for line in lines for character in line)


def test_view_shows_first_of_all_whether_the_run_is_alive(tmp_path):
    resume = "resumed at step 100: repeated 20 steps, bit for bit the same losses"
    checkpoints = write_run(tmp_path, warnings=["the disk is nearly full"], resume=resume, load={**GPUS, **HOST})
    text = "\n".join(lines := shown(checkpoints, 120, 36))
    assert lines[0].startswith("● running  tiny") and "8 x NVIDIA H100 80GB HBM3" in lines[0]
    for part in (
        "12.0%  120 of 1,000 steps  1 h 06 min remaining", "loss      3.2500", "bits/byte 1.0625", "lr       6.00e-04",
        "1,204,000", "MFU      52.0%", "24.10", "GPU 7  97%  64 of  80 GB  88 °C  612 W", "120 of 512 GB",
        "warning the disk is nearly full", "mirror not yet", resume,
    ):  # fmt: skip
        assert part in text
    assert any("\u2801" <= character <= "\u28ff" for character in text)  # the curves


def test_view_of_a_run_that_ended_has_its_summary_and_advice_instead_of_the_load(tmp_path):
    advice = "stopping after 5 bad steps. " + "Resume with a smaller learning rate. " * 3 + "Or skip these tokens."
    for status in ("running", "failed"):
        changes = {"status": status, "summary": ["tokens  6.34 B"], "load": {**GPUS, **HOST}}
        checkpoints = write_run(tmp_path, warnings=[advice], **changes)
        text = " ".join("\n".join(shown(checkpoints, 80, 36)).split())
        ended = status == "failed"
        assert ("GPU 0" in text, "remaining" in text, "Or skip these tokens." in text) == (not ended, not ended, ended)
        assert "tokens 6.34 B" in text and "B free" in text


# ---------------------------------------------------------------------------------------------------------------------
# the command


def test_once_prints_the_view_and_tells_by_its_status_whether_the_run_is_well(tmp_path, capsys):
    assert monitor_training.main([str(write_run(tmp_path)), "--once"]) == 0
    assert "● running" in capsys.readouterr().out
    failed = write_run(tmp_path, status="failed", reason="disk full")
    (failed / "latest.pt").touch()
    assert monitor_training.main([str(failed), "--once"]) == 1
    assert "next: ./resume_training.sh" in capsys.readouterr().out


@pytest.mark.parametrize(("leave", "status"), [("\x03", 0), (signal.SIGTERM, 143)])
def test_live_view_leaves_the_terminal_as_it_was(tmp_path, leave, status):
    command = [sys.executable, monitor_training.__file__, str(write_run(tmp_path)), "--interval_s", "0.1"]
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"},
        start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )  # fmt: skip
    os.close(terminal)
    watchdog = threading.Timer(60, process.kill)  # ends the reads below too
    watchdog.start()
    text = b""
    while "● running".encode() not in text:
        text += os.read(main, 65536)
    with suppress(OSError):  # the terminal is closed
        while True:  # as people do; Python loses an interrupt that comes within a destructor
            if isinstance(leave, str):
                os.write(main, leave.encode())
            else:
                process.send_signal(leave)
            again_s = time.monotonic() + 5
            while time.monotonic() < again_s:
                text += os.read(main, 65536)
    assert process.wait(10) == status, text
    watchdog.cancel()
    assert text.index(b"\x1b[?1049h") < text.index(b"\x1b[?1049l")  # the alternate screen
    os.close(main)
