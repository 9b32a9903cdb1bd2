"""Snapshots of a run, taken from its files and its process.

The monitor sends this file to a Python interpreter on the machine of the run: `ssh HOST python3 - FOLDER INTERVAL_S`.
Nothing needs to be installed there, because the file imports only the standard library and runs on Python 3.8.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path

CURVES = ("loss", "val_loss")
MAX_POINTS = 4000  # of a curve, many more than a terminal has columns
MAX_WARNINGS = 5


def watch(run_folder: str, interval_s: float) -> Iterator[dict]:
    """Yield a snapshot of the run in a checkpoint folder at each interval.

    A snapshot holds what RunLogs.read() returns, and:
        folder, host: where the run was found
        status: the content of status.json
        heartbeat_age_s, saved_age_s, mirrored_age_s: seconds since status.json was renewed, the last save and upload;
            None if unknown
        process: that find_process() returns for the pid in status.json
        checkpoint_bytes, disk_free_bytes: the size of a checkpoint, None if unknown, and the free space of its disk

    Raises: FileNotFoundError when the folder has no run.
    """
    folder = find_run(run_folder)
    status: dict = {}
    logs = None
    while True:
        before = status
        known = _parsed(_text(folder / "status.json")).items()
        status = {key: value for key, value in known if value is not None} or before
        if not before:
            heartbeat_s = _seconds(status.get("updated_at")) or (folder / "status.json").stat().st_mtime
        elif status != before:
            # Not the date in the file: the writer of a shared folder may have a clock that differs.
            heartbeat_s = time.time()
        logdir = find_logs(folder, status)
        if logs is None or logs.folder != logdir:
            logs = RunLogs(logdir)
        latest = _stat(folder / "latest.pt")
        yield {
            "folder": str(folder),
            "host": socket.gethostname(),
            "status": status,
            "heartbeat_age_s": _age_s(heartbeat_s),
            "saved_age_s": _age_s(latest and latest.st_mtime),
            "mirrored_age_s": _age_s(_seconds(status.get("mirrored_at"))),
            "process": find_process(status.get("pid")),
            "checkpoint_bytes": status.get("checkpoint_bytes") or (latest and latest.st_size),
            "disk_free_bytes": shutil.disk_usage(folder).free,
            **logs.read(),
        }
        time.sleep(interval_s)


class RunLogs:
    """The logs of a run in a folder, read as they grow."""

    def __init__(self, folder: Path):
        self.folder, self.metrics, self.log = folder, Tail(folder / "metrics.jsonl"), Tail(folder / "log.txt")
        self.latest: dict = {}
        self.warnings: list[str] = []

    def read(self) -> dict:
        """Return the part of a snapshot that comes from the logs.

        points: for each curve [[step, value], ...], the new ones since the last call
        reset: whether they replace all earlier ones, because the file is a different one or was cut back
        latest: the last value of each metric
        warnings: the last ones in log.txt
        """
        points: dict[str, list] = {name: [] for name in CURVES}
        if reset := self.metrics.rewind():
            self.latest = {}
        for line in self.metrics.lines():
            record = _parsed(line)
            self.latest.update(record)
            for name in CURVES:
                if record.get(name) is not None:  # null: it was not finite
                    points[name].append([record["step"], record[name]])
                    if len(points[name]) > 2 * MAX_POINTS:
                        points[name] = thin(points[name])
        if self.log.rewind():
            self.warnings = []
        for line in self.log.lines():
            if line.startswith("warning: "):
                self.warnings = [*self.warnings, line[len("warning: ") :].strip()[:500]][-MAX_WARNINGS:]
        points = {name: thin(curve) for name, curve in points.items()}
        return {"points": points, "reset": reset, "latest": self.latest, "warnings": self.warnings}


class Tail:
    """The new lines of a file that grows, and that may be replaced or cut back."""

    def __init__(self, path: Path):
        self.path, self.inode, self.offset = path, -1, 0

    def rewind(self) -> bool:
        """Return whether the file is a different one than before or was cut back; lines() then begins at its start."""
        stat = _stat(self.path)
        inode, size = (stat.st_ino, stat.st_size) if stat else (0, 0)
        is_new = inode != self.inode or size < self.offset
        if is_new:
            self.inode, self.offset = inode, 0
        return is_new

    def lines(self) -> Iterator[str]:
        """Yield the complete lines since the last call."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if line.endswith(b"\n"):
                    self.offset += len(line)
                    yield line.decode("utf-8", "replace")


def thin(points: list) -> list:
    """Return at most MAX_POINTS of the points [step, value] of a curve, in order, spikes among them.

    The steps are divided into equal ranges, of which the lowest and the highest value stay.
    """
    if len(points) <= MAX_POINTS:
        return points
    first = points[0][0]
    range_size = (points[-1][0] - first + 1) / (MAX_POINTS // 2)
    kept = []
    for _, group in groupby(points, lambda point: int((point[0] - first) / range_size)):
        by_value = sorted(group, key=itemgetter(1))
        kept += sorted([by_value[0], by_value[-1]]) if len(by_value) > 1 else by_value
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# where the files and the process are


def find_run(run_folder: str) -> Path:
    """Return the folder if it has a status.json, or else its subfolder with the newest one.

    Raises: FileNotFoundError.
    """
    folder = Path(run_folder).expanduser()
    found = list(folder.glob("status.json")) or list(folder.glob("*/status.json"))
    if not found:
        raise FileNotFoundError(
            f"{folder}: no run; found no status.json there or in its subfolders. Try the --checkpoint_dir of a run."
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def find_logs(folder: Path, status: dict) -> Path:
    """Return the folder of the run's logs: that of status.json, or one near the checkpoints if they were moved."""
    there = folder.resolve()
    named = Path(status.get("logdir") or folder)
    for logs in (named, there.parent / "logs", there.parent.parent / "logs" / there.name, folder):
        first_line = _text(logs / "log.txt", 200).partition("\n")[0]
        run_name = first_line[len("run") :].strip()
        # A later run with the same --logdir has moved the logs of this one aside.
        if first_line and run_name == status.get("run_name", run_name):
            return logs
    return named


def find_process(pid: int | None) -> dict | None:
    """Return the state letters ("stat") and the age in seconds ("age_s") of a process here; {} if there is none.

    None if that cannot be known: some containers have no ps, or one without these options.
    """
    try:
        command = ["ps", "-o", "stat=", "-o", "etime=", "-p", str(pid)]
        ps = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    if not ps.stdout.strip():
        return None if ps.stderr else {}
    stat, elapsed = ps.stdout.split()
    days, _, clock = elapsed.rpartition("-")  # [[days-]hours:]minutes:seconds
    age_s = 0
    for number in clock.split(":"):
        age_s = 60 * age_s + int(number)
    age_s += 86400 * int(days or 0)
    # On Linux, ps may compute an age of -1 s for a process that has just started, and prints it as unsigned.
    return {"stat": stat, "age_s": age_s if age_s < 2**32 else 0}


def _text(path: Path, size: int = -1) -> str:
    """Return the first characters of a file; none if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(size)
    except OSError:
        return ""


def _parsed(text: str) -> dict:
    """Return a JSON object; an empty one if the text is none."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _seconds(date: str | None) -> float | None:
    """Return a date of status.json in Unix seconds; None if it is missing or malformed."""
    try:
        return datetime.strptime(date or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _age_s(then_s: float | None) -> float | None:
    return None if then_s is None else max(0.0, time.time() - then_s)


def _stat(path: Path) -> os.stat_result | None:
    """Return what the file system knows of a file; None if there is none."""
    try:
        return path.stat()
    except OSError:
        return None


def main() -> None:
    """Print a snapshot as a line of JSON at each interval until the reader is gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # when the reader is gone, end without a message
    try:
        for snapshot in watch(sys.argv[1], float(sys.argv[2])):
            print(json.dumps(snapshot), flush=True)
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
