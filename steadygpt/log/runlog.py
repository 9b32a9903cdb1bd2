"""The run log: console, log.txt, metrics.jsonl, status.json, alerts, TensorBoard and Weights & Biases.

A step's number is the number of updates that the weights had when they were measured, so the training loss and the
validation loss of one step belong to the same weights. Files are only appended to: a run that resumes at step s logs
the steps from s on again, after a line of its own (see metrics.py).
"""

import json
import math
import os
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

from steadygpt.base.durable import no_link, replace_file
from steadygpt.base.options import mute
from steadygpt.base.retry import brief
from steadygpt.base.text import duration_text, labelled, printable
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.log.metrics import METRICS, LineFile, Metrics, places_of, without_nan
from steadygpt.log.status import LOG, STATUS
from steadygpt.log.system import Load, SystemMetrics, gpu_count
from steadygpt.log.tensorboard import TensorBoard
from steadygpt.log.wandb_sink import WandbSink
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks

HEARTBEAT_S = 10.0  # between updates of status.json while training
MAX_WARNINGS = 5  # the last ones are in status.json
STEP_FORMS = {
    "loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad norm {:.2f}", "step_ms": "{:,.0f} ms",
    "tokens_per_second": "{:,.0f} tok/s", "mfu": "mfu {:.1%}", "cost": "cost {:,.2f}",
}  # fmt: skip


class RunLog:
    """Prints the measurements of a run, and after open() writes them to every sink. Other threads may write too.

    On ranks other than 0, and in a replay, it prints nothing and is never opened.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, prints: bool = True):
        self.config, self.ranks, self.max_steps = config, ranks, config.max_steps
        self.prints = prints and ranks.is_main
        self.lock = threading.RLock()
        self.live_line = False  # the terminal's last line is one that show() rewrites
        self.failed: set[str] = set()  # sinks that could not be written to, each reported once
        self.load = Load()
        self.is_resumed = False
        self.facts: dict[str, Any] = {  # of status.json
            "status": "running", "reason": "", "doing": "starting", "warnings": [], "run_name": config.run_name,
            "step": 0, "max_steps": config.max_steps, "tokens_per_step": config.total_batch_size,
            "precision": config.precision, "ranks": ranks.world_size, "device": device_name(ranks.device),
            "started_at": time.time(), "host": socket.gethostname(), "pid": os.getpid(),
            "logdirs": places_of(config.logdir, Path(config.checkpoint_dir)), "mirror": config.mirror,
            "tensorboard": str(Path(config.tensorboard_dir, config.run_name).absolute()) * config.use_tensorboard,
        }  # fmt: skip
        self.heartbeat_at_s = -math.inf
        self.text_file: LineFile | None = None  # None: the log only prints
        self.sinks: list[Metrics | TensorBoard | WandbSink | Alerts | SystemMetrics] = []

    def open(self, first_step: int, start: Mapping[str, Any], checkpoint_bytes: int = 0) -> None:
        """Open the files and sinks of a run, on rank 0.

        Args:
            start: the fields "run", "id", "parent" and "how" of its line in metrics.jsonl, see StartLine.
            checkpoint_bytes: of one file, for status.json.
        """
        config, logdir = self.config, Path(self.config.logdir)
        logdir.mkdir(parents=True, exist_ok=True)
        metrics = Metrics(logdir / METRICS)
        self.text_file, self.sinks, self.is_resumed = LineFile(logdir / LOG), [metrics], bool(start["parent"])
        self.note(step=first_step, run_id=start["run"], checkpoint_bytes=checkpoint_bytes)
        self.say(labelled("run", config.run_name))
        if config.use_tensorboard:
            self.sinks.append(TensorBoard(config, first_step))
        if config.alert_url:
            self.sinks.append(Alerts(config.alert_url, config.run_name, self.warn))
        if config.use_wandb:
            wandb = WandbSink(config, first_step, start, self.warn)
            self.say(wandb.note)
            self.sinks.append(wandb)
            start = {**start, **wandb.online}
        with self._surviving(metrics):
            metrics.log(first_step, {"start": first_step, **start})

    # -----------------------------------------------------------------------------------------------------------------
    # measurements

    def step(
        self, step: int, numbers: Mapping[str, float | None], left_s: float, is_first: bool, **facts: object
    ) -> None:
        """Log a step every log_freq steps; in between only a terminal shows it.

        Args:
            numbers: what the step measured, by name; None: unknown.
            left_s: how long the remaining steps take. The first step of a start tells little about them.
            facts: further ones for status.json.
        """
        shown = [form.format(numbers[name]) for name, form in STEP_FORMS.items() if numbers[name] is not None]
        place = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        done = f"{(step + 1) / self.max_steps:.1%}"
        line = " | ".join([place, *shown, done, f"ETA {duration_text(left_s)}"])
        if step % self.config.log_freq == 0 or step + 1 == self.max_steps:
            self._record(step, numbers, line)
        else:
            self.show(line)
        left = {} if is_first else {"eta_s": round(left_s)}
        self.note(doing="training", step=step + 1, **numbers, **left, **facts)
        self.beat(is_news=is_first)

    def evaluation(self, step: int, found: str, **scores: float | None) -> None:
        """Log the result of an evaluation after `step` updates, in words and numbers."""
        place = f"step {step}/{self.max_steps} | " if self.text_file else ""
        self._record(step, scores, f"{place}{found}")

    def text(self, step: int, text: str) -> None:
        """Log a sample of text that the model of this step has written."""
        if not self.text_file:
            self.say(f"sample {json.dumps(text, ensure_ascii=False)}")
            return
        self.say(f"step {step}/{self.max_steps} | sample:\n{text}")
        self._tell_sinks("text", step, text)

    def histograms(self, step: int, model: nn.Module) -> None:
        """Log histograms of parameters and gradients to TensorBoard."""
        self._tell_sinks("histograms", step, model)

    def measure_system(self) -> None:
        """Record what GPUs and host do, every --system_metrics_s from now on, in a thread of its own."""
        if self.text_file and (seconds := self.config.system_metrics_s):
            folder, gpus = Path(self.config.checkpoint_dir), gpu_count(self.ranks.device)
            self.sinks.append(SystemMetrics(seconds, folder, gpus, self.record_system, self.warn))

    def record_system(self, metrics: Mapping[str, float]) -> None:
        """Record the machine's load beside the current step, and in status.json also its mean in this start."""
        self._record(self.facts["step"], metrics)
        self.note(load=dict(metrics), mean_load=self.load.add(metrics))

    def _record(self, step: int, numbers: Mapping[str, float | None], line: str = "") -> None:
        """Write a line of text, if there is one, and numbers to the sinks."""
        with self.lock:
            if line:
                self.say(line)
            self._tell_sinks("log", step, {name: number for name, number in numbers.items() if number is not None})

    def _tell_sinks(self, method: str, *args: object) -> None:
        """Call a method of the sinks that have it."""
        for sink in (*reversed(self.sinks), self.text_file):  # closed last: log.txt, because the others may warn
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
        """Keep facts for status.json; None, NaN and infinity remove one."""
        with self.lock:
            known = without_nan(self.facts | facts)
            self.facts = {name: value for name, value in known.items() if value is not None}

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
        self._tell_sinks("send", event, text, self.facts["step"], self.max_steps)

    # -----------------------------------------------------------------------------------------------------------------
    # text

    def say(self, text: str) -> None:
        """Write lines of text to the console and to log.txt."""
        self._write(sys.stdout, text)

    def show(self, line: str) -> None:
        """Rewrite the terminal's last line in place; do nothing where output goes to a file."""
        if sys.stdout.isatty():
            self._print(sys.stdout, line[: shutil.get_terminal_size().columns - 1], end="")
            self.live_line = True

    def warn(self, line: str, event: str = "") -> None:
        """Write a warning to stderr, log.txt and status.json, and send it as an alert if it is an event."""
        self._write(sys.stderr, f"warning: {line}")
        with self.lock:
            self.note(warnings=[*self.facts["warnings"], line][-MAX_WARNINGS:])
        if event:
            self.alert(event, line)

    def _write(self, stream: IO[str], text: str) -> None:
        self._print(stream, text)
        if self.text_file:
            with self.lock, self._surviving(self.text_file):
                self.text_file.write(printable(text, keep="\n\t"))

    def _print(self, stream: IO[str], text: str, end: str = "\n") -> None:
        if not self.prints:
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
        self.flush()
        self._tell_sinks("close")
        self.text_file, self.sinks = None, []
