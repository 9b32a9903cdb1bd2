"""The run log: console, log.txt, metrics.jsonl, status.json, alerts, TensorBoard and Weights & Biases.

A record is a step and its named numbers. A step's number is the number of updates that the weights had when they were
measured, so the training loss and the validation loss of one step belong to the same weights. A run that resumes at
step s drops every record from s on, because it measures them again.
"""

import json
import math
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import nn

from steadygpt.base.durable import fsync, fsync_folder, lines_from_end, no_link, replace_file
from steadygpt.base.options import mute
from steadygpt.base.retry import brief
from steadygpt.base.text import STAMP, printable
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.log.status import LOG, METRICS, RUN, STATUS
from steadygpt.log.system import Load, SystemMetrics, gpu_count
from steadygpt.log.tensorboard import TensorBoard
from steadygpt.log.wandb_sink import WandbSink
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks

HEARTBEAT_S = 10.0  # between updates of status.json while training


class RunLog:
    """Prints the measurements of a run, and after open() writes them to every sink. Other threads may write too.

    On ranks other than 0 it prints nothing and is never opened.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, max_steps: int = 0):
        self.config, self.ranks, self.max_steps = config, ranks, max_steps
        self.lock = threading.RLock()
        self.live_line = False  # the terminal's last line is one that show() rewrites
        self.failed: set[str] = set()  # sinks that could not be written to, each reported once
        self.load = Load()
        self.is_resumed = False
        self.facts: dict[str, Any] = {  # of status.json
            "status": "running", "reason": "", "doing": "starting", "run_name": config.run_name,
            "step": 0, "max_steps": max_steps, "tokens_per_step": config.total_batch_size,
            "precision": config.precision, "ranks": ranks.world_size, "device": device_name(ranks.device),
            "started_at": time.time(), "host": socket.gethostname(), "pid": os.getpid(),
            "logdir": str(Path(config.logdir).absolute()), "mirror": config.mirror,
            "tensorboard": str(Path(config.tensorboard_dir, config.run_name).absolute()) * config.use_tensorboard,
        }  # fmt: skip
        self.heartbeat_at_s = -math.inf
        self.text_file: LineFile | None = None  # None: the log only prints
        self.sinks: list[Metrics | TensorBoard | WandbSink] = []
        self.alerts: Alerts | None = None
        self.system: SystemMetrics | None = None

    def open(self, start_step: int | None, checkpoint_bytes: int = 0, start: Mapping[str, Any] | None = None) -> None:
        """Open the files and sinks of a run, on rank 0.

        Args:
            start_step: where a resumed run starts: records from there on are dropped. None for a new run: the logs of
                an older run are moved aside.
            checkpoint_bytes: of one file, for status.json.
            start: what metrics.jsonl records of this start, see note_of_start().
        """
        config, logdir = self.config, Path(self.config.logdir)
        logdir.mkdir(parents=True, exist_ok=True)
        if start_step is None:
            move_aside(logdir)  # the logs of an earlier start, which saved nothing
        self.text_file, self.sinks = LineFile(logdir / LOG, start_step), [Metrics(logdir / METRICS, start_step)]
        self.is_resumed = start_step is not None
        self.note(step=start_step or 0, checkpoint_bytes=checkpoint_bytes)
        if not self.text_file.file.tell():  # it is new
            self.say(f"{RUN}{config.run_name}")
        if start:  # before there are other sinks, which have the options already
            self._record(start_step or 0, start)
        if config.use_tensorboard:
            self.sinks.append(TensorBoard(config, start_step or 0))
        if config.alert_url:
            self.alerts = Alerts(config.alert_url, config.run_name, self.warn)
        if config.use_wandb:
            wandb = WandbSink(config, start_step, logdir / LOG, self.warn)
            self.say(wandb.note)
            self.sinks.append(wandb)

    # -----------------------------------------------------------------------------------------------------------------
    # measurements

    def evaluation(self, step: int, found: str, **scores: float) -> None:
        """Log the result of an evaluation after `step` updates, in words and numbers."""
        place = f"step {step}/{self.max_steps} | " if self.text_file else ""
        self.record(step, f"{place}{found}", **scores)

    def text(self, step: int, text: str) -> None:
        """Log a sample of text that the model of this step has written."""
        if not self.text_file:
            self.say(f"sample {json.dumps(text, ensure_ascii=False)}")
            return
        self.say(f"step {step}/{self.max_steps} | sample:")
        self.say(text, step)
        self._tell_sinks("text", step, text)

    def histograms(self, step: int, model: nn.Module) -> None:
        """Log histograms of parameters and gradients to TensorBoard."""
        self._tell_sinks("histograms", step, model)

    def measure_system(self) -> None:
        """Record what GPUs and host do, every --system_metrics_s from now on, in a thread of its own."""
        if self.text_file and (seconds := self.config.system_metrics_s):
            folder, gpus = Path(self.config.checkpoint_dir), gpu_count(self.ranks.device)
            self.system = SystemMetrics(seconds, folder, gpus, self.record_system, self.warn)

    def record_system(self, metrics: Mapping[str, float]) -> None:
        """Record the machine's load beside the current step, and its mean in this start for status.json."""
        with self.lock:
            self._record(self.facts["step"], metrics)
            self.load.add(metrics)
            self.note(mean_load={name: round(value, 2) for name, value in self.load.means().items()})

    def record(self, step: int, line: str, **metrics: float | None) -> None:
        """Write a line of text, and its numbers to the sinks."""
        with self.lock:
            self.say(line)
            self._record(step, metrics)

    def _record(self, step: int, values: Mapping[str, Any]) -> None:
        self._tell_sinks("log", step, {name: value for name, value in values.items() if value is not None})

    def _tell_sinks(self, method: str, *args: object) -> None:
        """Call a method of the sinks that have it."""
        for sink in (*self.sinks, self.text_file):  # log.txt is closed last: the others may warn
            if hasattr(sink, method):
                with self._surviving(sink):
                    getattr(sink, method)(*args)

    # -----------------------------------------------------------------------------------------------------------------
    # status.json and alerts

    def status(self, status: str, reason: str = "", summary: Sequence[str] = (), **facts: object) -> None:
        """Write status.json: running, stopped, finished or failed; torchrun's exit status does not tell these apart."""
        self.note(status=status, reason=reason, **facts)
        if status != "running":
            self.note(summary=list(summary), doing=None)
        self._write_status(durable=True)
        event = ("resumed" if self.is_resumed else "started") if status == "running" else status
        found = f"at step {self.facts['step']:,} of {self.max_steps:,}{f' ({reason})' if reason else ''}"
        self.alert(event, " | ".join([found, *summary]))

    def note(self, **facts: object) -> None:
        """Keep facts for status.json; None removes one."""
        with self.lock:
            self.facts = {name: value for name, value in (self.facts | facts).items() if value is not None}

    def beat(self, is_news: bool = False) -> None:
        """Renew status.json if that is due, as a sign that the training thread makes progress, or if there is news."""
        if is_news or time.monotonic() - self.heartbeat_at_s >= HEARTBEAT_S:
            self._write_status(durable=False)

    def _write_status(self, durable: bool) -> None:
        self.heartbeat_at_s = time.monotonic()
        if not self.text_file:
            return
        path = Path(self.config.checkpoint_dir, STATUS)
        content = f"{json.dumps({**self.facts, 'updated_at': time.time()}, indent=2)}\n".encode()
        with self._surviving(STATUS):
            try:
                replace_file(path, lambda file: file.write(content), durable)
            except OSError:  # a full disk has no room for a second file
                with open(path, "r+b", opener=no_link) as file:
                    file.write(content)
                    file.truncate()

    def alert(self, event: str, text: str) -> None:
        """Send an event to --alert_url, if there is one."""
        if self.alerts:
            self.alerts.send(event, text, step=self.facts["step"], max_steps=self.max_steps)

    # -----------------------------------------------------------------------------------------------------------------
    # text

    def say(self, line: str, step: int | None = None) -> None:
        """Write lines of text to the console and to log.txt, there after the step they belong to."""
        self._write(sys.stdout, line, "" if step is None else f"[{step}] ")

    def show(self, line: str) -> None:
        """Rewrite the terminal's last line in place; do nothing where output goes to a file."""
        if sys.stdout.isatty():
            self._print(sys.stdout, line[: shutil.get_terminal_size().columns - 1], end="")
            self.live_line = True

    def warn(self, line: str, event: str = "") -> None:
        """Write a warning to stderr and log.txt, and send it as an alert if it is an event."""
        self._write(sys.stderr, f"warning: {line}")
        if event:
            self.alert(event, line)

    def _write(self, stream: IO[str], text: str, prefix: str = "") -> None:
        self._print(stream, text)
        if self.text_file:
            with self.lock, self._surviving(self.text_file):
                lines = printable(text, keep="\n\t").splitlines()
                self.text_file.write("\n".join(prefix + line for line in lines))

    def _print(self, stream: IO[str], text: str, end: str = "\n") -> None:
        if not self.ranks.is_main:
            return
        text = printable(text, keep="\n\t")
        with self.lock:
            try:
                print(f"\r\x1b[K{text}" if self.live_line else text, end=end, file=stream, flush=True)
            except OSError:  # the terminal was closed, or the reader of a pipe has exited; training continues
                mute(stream)
            self.live_line = False

    @contextmanager
    def _surviving(self, sink: object):
        """Lose records on a full disk, not the run."""
        try:
            yield
        except OSError as error:
            name = sink if isinstance(sink, str) else getattr(sink, "name", type(sink).__name__)
            if name not in self.failed:
                self.failed.add(name)
                self._print(sys.stderr, f"warning: cannot write to {name}: {error}; training continues")

    # -----------------------------------------------------------------------------------------------------------------
    # the end

    def flush(self) -> None:
        """Make everything written so far durable."""
        self._tell_sinks("flush")

    def __enter__(self) -> "RunLog":
        self._write_status(durable=True)  # starting: the model is not built yet
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.text_file and self.facts["status"] == "running":  # the run has not begun
            if isinstance(error, KeyboardInterrupt):
                reason = f"{str(error) or 'SIGINT'} before the first step"
                self.status("stopped", reason)
                self.say(f"stopped ({reason}); nothing was saved")
            else:
                self.status("failed", brief(error) if error else "before the first step")
        self.close()

    def close(self) -> None:
        if self.system:
            self.system.close()
        if self.alerts:
            self.alerts.close()
        self.flush()
        self._tell_sinks("close")
        self.text_file, self.sinks = None, []


class LineFile:
    """A file that a run appends lines to. A resumed run first drops the lines of the steps that it repeats."""

    step_of = re.compile(rb"step +(\d{1,18})/|\[(\d{1,18})\] ")  # lines without a step stay

    def __init__(self, path: Path, start_step: int | None):
        self.name = path.name
        if start_step is not None and path.exists():
            kept: list[bytes] = []
            with open(path, "r+b", opener=no_link) as file:
                # In place, from the end. If it is killed between these calls, the next resume drops the rest.
                for at, line in lines_from_end(file):
                    match, is_whole = self.step_of.match(line), line.endswith(b"\n")
                    if match and is_whole and int(match[match.lastindex or 0]) < start_step:
                        file.seek(at + len(line))
                        break
                    kept += [line] * (match is None and is_whole)
                else:
                    file.seek(0)
                file.writelines(reversed(kept))
                file.truncate()
        self.file = open(path, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115 (open as long as the run)

    def write(self, line: str) -> None:
        print(line, file=self.file, flush=True)

    def flush(self) -> None:
        """Make the lines durable."""
        self.file.flush()
        fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class Metrics(LineFile):
    """metrics.jsonl: a line of JSON for each record."""

    step_of = re.compile(rb'\{"step": (\d{1,18}),')

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record."""
        nan = {name: None for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
        self.write(json.dumps({"step": step, "time": round(time.time(), 3), **values, **nan}))  # JSON has no NaN


def move_aside(logdir: Path) -> None:
    """Rename the logs of a different run, so that they are neither overwritten nor continued."""
    for path in (logdir / LOG, logdir / METRICS):
        if path.exists() and path.stat().st_size:
            written = time.strftime(STAMP, time.localtime(path.stat().st_mtime))
            path.rename(path.with_name(f"{path.stem}-until-{written}{path.suffix}"))
    fsync_folder(logdir)
