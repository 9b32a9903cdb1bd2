"""The run log: console, log.txt, metrics.jsonl, status.json, alerts, TensorBoard and Weights & Biases.

A step's number is the number of updates that the weights had when they were measured, so the training loss and the
validation loss of one step belong to the same weights. Logs are only appended to: a run that resumes at step s logs
the steps from s on again, after a line of its own (see metrics.py).
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from steadygpt.base.durable import leads_to_lock, replace_file
from steadygpt.base.options import UserError, mute
from steadygpt.base.retry import brief
from steadygpt.base.text import columns_of, duration_text, fitting, labelled, printable
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.log.metrics import LOG, METRICS, STATUS, LineFile, Metrics, without_nan
from steadygpt.log.system import SystemMetrics
from steadygpt.log.tensorboard import TensorBoard
from steadygpt.log.wandb_sink import WandbSink
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks

HEARTBEAT_S = 10.0  # between updates of status.json while training
LOAD_S = 10.0  # between measurements of GPUs, CPU and memory
MAX_WARNINGS = 5  # the last ones are in status.json
STEP_FORMS = {
    "loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad norm {:.2f}", "step_ms": "{:,.0f} ms",
    "tokens_per_second": "{:,.0f} tok/s", "mfu": "mfu {:.1%}", "cost": "cost {:,.2f}",
}  # fmt: skip
# What a terminal that is too narrow for a step's line does not show, the least important first.
EXPENDABLE = ("share", "step_ms", "mfu", "cost", "lr", "grad_norm", "tokens_per_second", "left")


class RunLog:
    """Prints the measurements of a run, and after open() writes them to every sink. Other threads may write too.

    On ranks other than 0 it prints nothing and is never opened.

    Args:
        folder_lock: the lock of the run's folder, without which nothing is written there.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, folder_lock: IO[str] | None = None):
        self.config = config
        self.ranks = ranks
        self.folder_lock = folder_lock
        self.max_steps = config.max_steps
        self.lock = threading.RLock()
        self.failed: set[str] = set()  # files and sinks that could not be written to, each reported once
        self.facts: dict[str, Any] = {  # of status.json
            "status": "running", "reason": "", "doing": "starting", "warnings": [], "run_name": config.name,
            "step": 0, "max_steps": config.max_steps,
            "mirror": config.mirror, "ranks": ranks.world_size, "device": device_name(ranks.device),
            "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        self.heartbeat_at_s = -math.inf
        self.sinks: dict[str, Any] = {}  # by name, each with some of the methods that tell() calls; {}: only print
        self.launch: dict[str, Any] = {}  # see metrics.LaunchLine
        self.early: list[str] = []  # lines for log.txt from before it was opened

    def open(self, first_step: int, launch: Mapping[str, Any]) -> None:
        """Open the files and sinks of a run, on rank 0; `launch` has "run", "id", "parent" and "how" of LaunchLine."""
        config = self.config
        folder = Path(config.checkpoint_dir)
        self.sinks = {LOG: LineFile(folder / LOG), METRICS: Metrics(folder / METRICS)}
        self.note(step=first_step)
        with self._surviving(LOG):
            for line in self.early:
                self.sinks[LOG].write(line)
        self.early = []
        wandb = WandbSink(config, launch, self.warn) if config.use_wandb else None
        self.launch = {**launch, "wandb": wandb.id if wandb else ""}
        self.sinks[METRICS].log(first_step, {"first_step": first_step, **self.launch})
        if wandb:
            self.say(labelled("wandb", wandb.place))
            self.sinks["wandb"] = wandb
        if config.use_tensorboard:
            self.sinks["TensorBoard"] = TensorBoard(config, first_step)
        if config.alert_url:
            self.sinks["alerts"] = Alerts(config.alert_url, config.name, self.warn)
        self.sinks["system"] = SystemMetrics(LOAD_S, self.ranks.device, self.load, self.warn)

    def step(
        self,
        step: int,
        numbers: Mapping[str, float | None],
        metrics: Mapping[str, float],
        left_s: float,
        is_first: bool,
        **facts: object,
    ) -> None:
        """Log a step every log_freq steps, and renew the facts of status.json.

        Args:
            metrics: further numbers, such as terms of the loss.
            left_s: the time left, not shown in status.json for the first step of a launch, which tells little about it.
            facts: for status.json, besides the numbers.
        """
        if step % self.config.log_freq == 0 or step + 1 == self.max_steps:
            shown = {"place": f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"}
            for name, form in STEP_FORMS.items():
                if numbers.get(name) is not None:
                    shown[name] = form.format(numbers[name])
            shown |= {name: f"{name} {value:.4g}" for name, value in metrics.items()}
            shown |= {"share": f"{(step + 1) / self.max_steps:.1%}", "left": f"ETA {duration_text(left_s)}"}
            brief = fitting(shown, columns_of(sys.stdout), [*metrics, *EXPENDABLE])
            self._record("train", step, {**numbers, **metrics}, " | ".join(shown.values()), brief)
        left = {} if is_first else {"eta_s": round(left_s)}
        self.note(doing="training", step=step + 1, **numbers, **metrics, **left, **facts)
        self.beat()

    def evaluation(self, step: int, result: str, **scores: float | None) -> None:
        """Log the result of an evaluation after `step` updates, in words and numbers."""
        self._record("eval", step, scores, f"step {step}/{self.max_steps} | {result}")

    def text(self, step: int, text: str) -> None:
        """Log a text that the model generates at this step."""
        self.say(f"step {step}/{self.max_steps} | sample:\n{text}")
        self.tell("text", step, text)

    def load(self, metrics: Mapping[str, float]) -> None:
        """Record the machine's load with the number of the current step, and in status.json."""
        self._record("system", self.facts["step"], metrics)
        self.note(load=dict(metrics))

    def _record(
        self, group: str, step: int, numbers: Mapping[str, float | None], line: str = "", brief: str = ""
    ) -> None:
        """Write a line of text, if there is one, and numbers to the sinks, as curves of a group."""
        measured = {name: number for name, number in numbers.items() if number is not None}
        with self.lock:
            if line:
                self.say(line, brief=brief)
            self.tell("log", step, measured)
            self.tell("curves", step, measured, group)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the sinks that have it."""
        for name, sink in reversed(self.sinks.items()):  # log.txt is closed last, because other sinks may warn
            if hasattr(sink, method):
                with self._surviving(name):
                    getattr(sink, method)(*args)

    @contextmanager
    def _surviving(self, name: str):
        """Report an OSError inside, such as on a full disk, once: records are lost, but the run continues."""
        try:
            yield
        except OSError as error:
            if name not in self.failed:
                self.failed.add(name)
                self.warn(f"cannot write to {name}: {error}; training continues")

    def say(self, text: str, stream: TextIO | None = None, brief: str = "") -> None:
        """Write lines of text to the console, where `brief` may replace them, and to log.txt."""
        text = printable(text, keep="\n\t")
        stream = stream or sys.stdout
        with self.lock:
            if self.ranks.is_main:
                try:
                    print(printable(brief) or text, file=stream, flush=True)
                except OSError:  # the terminal was closed, or the reader of a pipe has exited; training continues
                    mute(stream)
            if self.sinks:
                with self._surviving(LOG):
                    self.sinks[LOG].write(text)
            else:
                self.early.append(text)

    def warn(self, line: str, event: str = "") -> None:
        """Write a warning to stderr, log.txt and status.json, and send it as an alert if it is an event."""
        self.say(f"warning: {line}", sys.stderr)
        with self.lock:
            self.note(warnings=[*self.facts["warnings"], line][-MAX_WARNINGS:])
        if event:
            self.tell("send", event, line)

    def status(self, status: str, reason: str = "", summary: Sequence[str] = (), **facts: object) -> None:
        """Write status.json: running, stopped, finished or failed. torchrun's exit status does not tell these apart."""
        doing = "starting" if status == "running" else None
        self.note(status=status, reason=reason, doing=doing, summary=list(summary), **facts)
        self._write_status(durable=True)
        progress = f"at step {self.facts['step']:,} of {self.max_steps:,}"
        if reason:
            progress += f" ({reason})"
        if status != "running":
            event = status
        elif self.facts["step"]:
            event = "resumed"
        else:
            event = "started"
        self.tell("send", event, " | ".join([progress, *summary]))

    def note(self, **facts: object) -> None:
        """Set facts of status.json; a fact that is None, NaN or infinity is removed."""
        with self.lock:
            self.facts = {name: fact for name, fact in without_nan(self.facts | facts).items() if fact is not None}

    def beat(self) -> None:
        """Renew status.json if that is due, as a sign that the training thread makes progress."""
        if time.monotonic() - self.heartbeat_at_s >= HEARTBEAT_S:
            self._write_status(durable=False)

    def _write_status(self, durable: bool) -> None:
        self.heartbeat_at_s = time.monotonic()
        if not self._owns_folder():
            return
        path = Path(self.config.checkpoint_dir, STATUS)
        content = f"{json.dumps({**self.facts, 'updated_at': time.time()}, indent=2)}\n".encode()
        with self._surviving(STATUS):
            try:
                replace_file(path, lambda file: file.write(content), durable)
            except OSError:  # a full disk has no room for a second file
                with path.open("r+b") as file:
                    file.write(content)
                    file.truncate()

    def _owns_folder(self) -> bool:
        """Return whether the path of the run's folder still leads to the folder that this process has locked."""
        return self.folder_lock is not None and leads_to_lock(Path(self.config.checkpoint_dir), self.folder_lock)

    def flush(self) -> None:
        """Make everything written so far durable; open files anew that were removed or rotated."""
        with self.lock:
            for name, kind in ((LOG, LineFile), (METRICS, Metrics)):
                sink = self.sinks.get(name)
                if sink and sink.is_replaced() and self._owns_folder():
                    with self._surviving(name):
                        self.sinks[name] = kind(sink.path)
                        sink.close()
                        if name == METRICS:
                            step = self.facts["step"]
                            self.sinks[name].log(step, {"first_step": step, **self.launch})
                        self.warn(f"{sink.path}: was removed or renamed during the run; opened anew")
        self.tell("flush")

    def size_of(self, name: str) -> int:
        """Return the bytes of LOG or METRICS."""
        return self.sinks[name].file.tell()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Record in status.json a run that has ended before its first step; nothing if it was refused."""
        is_refused = isinstance(error, UserError) and not self.sinks
        if error and self.facts["status"] == "running" and not is_refused:
            if isinstance(error, KeyboardInterrupt):
                reason = f"{str(error) or 'SIGINT'} before the first step"
                self.status("stopped", reason)
                self.say(f"stopped ({reason})")
            else:
                self.status("failed", brief(error))
        self.close()

    def close(self) -> None:
        self.tell("flush")
        self.tell("close")
        self.sinks = {}
