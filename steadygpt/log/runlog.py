"""The run log: console, log.txt, metrics.jsonl, status.json, alerts, TensorBoard and Weights & Biases.

A step's number is the number of steps before its measurements, so the training loss and the validation loss of one step
belong to the same weights. Logs are only appended to: a run that resumes at step s logs step s and later steps again,
after a line of its own (see metrics.py), which it writes with its first measurement.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from torch import nn

from steadygpt.base.durable import leads_to_lock
from steadygpt.base.options import UserError, mute
from steadygpt.base.retry import brief
from steadygpt.base.text import columns_of, duration_text, fitting, labelled, printable
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.log.metrics import LOG, LOGS, METRICS, STATUS, LineFile, line_of, without_nan, write_status
from steadygpt.log.system import measure_load
from steadygpt.log.tensorboard import TensorBoard
from steadygpt.log.wandb_sink import open_wandb
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks

HEARTBEAT_S = 10.0  # between updates of status.json while training
QUIET_S = 30.0  # without a line of progress, after which one is printed, whatever --log_freq
LOAD_S = 10.0  # at least, between measurements of GPUs and memory
MAX_WARNINGS = 5  # the last ones are in status.json
STEP_FORMS = {
    "loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad norm {:.2f}", "step_ms": "{:,.0f} ms",
    "tokens_per_second": "{:,.0f} tok/s", "mfu": "mfu {:.1%}", "cost": "cost {:,.2f}",
}  # fmt: skip
# Parts of a step's line that a narrow terminal drops, the least important first.
EXPENDABLE = ("share", "step_ms", "mfu", "cost", "lr", "grad_norm", "tokens_per_second", "left")


class RunLog:
    """Prints the measurements of a run, and after open() writes them to every sink. Other threads may write too.

    On ranks other than 0 it prints nothing and is never opened.

    Args:
        folder_lock: the lock of the run's folder; without it, status.json is not written.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, folder_lock: IO[str] | None = None):
        self.config = config
        self.ranks = ranks
        self.folder_lock = folder_lock
        self.max_steps = config.max_steps
        self.lock = threading.RLock()
        self.failed: set[str] = set()  # files and sinks that could not be written to, each reported once
        self.unmeasured: dict[str, str] = {}  # see measure_load()
        self.facts: dict[str, Any] = {  # of status.json
            "status": "running", "reason": "", "doing": "starting", "warnings": [], "run_name": config.name,
            "step": 0, "max_steps": config.max_steps,
            "mirror": config.mirror, "ranks": ranks.world_size, "device": device_name(ranks.device),
            "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        self.heartbeat_at_s = -math.inf
        self.progress_at_s = time.monotonic()  # of the last line of progress
        self.load_at_s = -math.inf
        self.files: dict[str, LineFile] = {}  # LOGS; {}: only print
        self.tensorboard: TensorBoard | None = None
        self.wandb: Any = None
        self.alerts: Alerts | None = None
        self.launch: Mapping[str, Any] = {}  # see metrics.LaunchLine
        self.first_step = 0
        self.has_begun = False  # see begin()
        self.early: list[str] = []  # lines for log.txt from before it was opened

    def open(self, first_step: int, launch: Mapping[str, Any]) -> None:
        """Open the files and sinks of a run, on rank 0; `launch` is a LaunchLine without its steps."""
        config = self.config
        self.launch = launch
        self.first_step = first_step
        self.files = {name: LineFile(Path(config.checkpoint_dir, name)) for name in LOGS}
        self.note(step=first_step)
        for line in self.early:
            self._attempt(LOG, self.files[LOG].write, line)
        self.early = []
        if config.use_wandb:
            self.wandb = open_wandb(config, launch["run"], self.warn)
            self.say(labelled("wandb", str(self.wandb.settings.sync_dir if self.wandb.offline else self.wandb.url)))
        if config.use_tensorboard:
            import torch.utils.tensorboard  # noqa: F401  # here, because it would delay the first step
        if config.alert_url:
            self.alerts = Alerts(config.alert_url, config.name, self.warn)

    def begin(self) -> None:
        """Let this launch replace what earlier ones have recorded from its first step on.

        Called with the first measurement, so that a launch that ends before it does not hide their records.
        """
        if self.has_begun or not self.files:
            return
        self.has_begun = True
        self._write_launch_line(self.first_step)
        if self.config.use_tensorboard:
            self._attempt("TensorBoard", self._open_tensorboard)

    def _write_launch_line(self, step: int) -> None:
        self._attempt(METRICS, self.files[METRICS].write, line_of(step, {"first_step": step, **self.launch}))

    def _open_tensorboard(self) -> None:
        self.tensorboard = TensorBoard(self.config, self.first_step)

    def step(
        self,
        step: int,
        numbers: Mapping[str, float | None],
        metrics: Mapping[str, float],
        left_s: float,
        is_first: bool,
        **facts: object,
    ) -> None:
        """Log a step every log_freq steps, print it also after a silence, and renew the facts of status.json.

        Args:
            metrics: further numbers, such as terms of the loss.
            left_s: seconds left; not in status.json if is_first, because a launch's first step is not typical.
            facts: for status.json, besides the numbers.
        """
        self.begin()
        is_logged = step % self.config.log_freq == 0 or step + 1 == self.max_steps
        if is_logged or self._is_silent():
            shown = {"place": f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"}
            for name, form in STEP_FORMS.items():
                if numbers.get(name) is not None:
                    shown[name] = form.format(numbers[name])
            shown |= {name: f"{name} {value:.4g}" for name, value in metrics.items()}
            shown |= {"share": f"{(step + 1) / self.max_steps:.1%}", "left": f"ETA {duration_text(left_s)}"}
            brief = fitting(shown, columns_of(sys.stdout), [*metrics, *EXPENDABLE])
            self._progress(" | ".join(shown.values()), brief)
        if is_logged:
            self._record("train", step, {**numbers, **metrics})
            if self.files and time.monotonic() - self.load_at_s >= LOAD_S:
                self._record_load(step)
        left = {} if is_first else {"eta_s": round(left_s)}
        self.note(doing="training", step=step + 1, **numbers, **metrics, **left, **facts)
        self.beat()

    def evaluation(self, step: int, result: str, **scores: float | None) -> None:
        """Log the result of an evaluation before step `step`, as text and as numbers."""
        self._progress(f"step {step}/{self.max_steps} | {result}")
        self._record("eval", step, scores)

    def text(self, step: int, text: str) -> None:
        """Log a sample of text from the model."""
        self.begin()
        self._progress(f"step {step}/{self.max_steps} | sample:\n{text}")
        if self.tensorboard:
            self._attempt("TensorBoard", self.tensorboard.text, step, text)
        if self.wandb:
            self._attempt("W&B", self.wandb.log, {"step": step, "sample": text})

    def histograms(self, step: int, model: nn.Module) -> None:
        """Log histograms of a model's parameters and gradients."""
        if self.tensorboard:
            self._attempt("TensorBoard", self.tensorboard.histograms, step, model)

    def _record(self, group: str, step: int, numbers: Mapping[str, float | None]) -> None:
        """Write numbers to the sinks, as curves of a group."""
        if not self.files:
            return
        self.begin()
        measured = {name: number for name, number in numbers.items() if number is not None}
        self._attempt(METRICS, self.files[METRICS].write, line_of(step, measured))
        if self.tensorboard:
            self._attempt("TensorBoard", self.tensorboard.curves, step, measured, group)
        if self.wandb:
            self._attempt("W&B", self.wandb.log, {"step": step, **measured})

    def _record_load(self, step: int) -> None:
        """Measure the machine's load, and record it also in status.json."""
        self.load_at_s = time.monotonic()
        known = len(self.unmeasured)
        load = measure_load(self.ranks.device, self.unmeasured)
        if len(self.unmeasured) > known:
            reasons = "; ".join(dict.fromkeys(self.unmeasured.values()))
            self.warn(f"cannot measure {', '.join(self.unmeasured)}: {reasons}; training continues")
        if load:
            self._record("system", step, load)
        self.note(load=load)

    def _attempt(self, name: str, action: Callable[..., object], *args: object) -> None:
        """Call action(*args) of a file or sink, and report its first failure; records are lost, but the run continues.

        A full disk raises OSError, and wandb raises its own errors.
        """
        try:
            action(*args)
        except Exception as error:
            if name not in self.failed:
                self.failed.add(name)
                self.warn(f"cannot write to {name}: {brief(error)}; training continues")

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
            if self.files:
                self._attempt(LOG, self.files[LOG].write, text)
            else:
                self.early.append(text)

    def warn(self, line: str, event: str = "") -> None:
        """Write a warning to stderr, log.txt and status.json, and send it as an alert if it is an event."""
        self.say(f"warning: {line}", sys.stderr)
        with self.lock:
            self.note(warnings=[*self.facts["warnings"], line][-MAX_WARNINGS:])
        if event and self.alerts:
            self.alerts.send(event, line)

    def status(self, status: str, reason: str = "", summary: Sequence[str] = (), **facts: object) -> None:
        """Report running, stopped, finished or failed in status.json and an alert; torchrun's exit status hides it."""
        doing = "starting" if status == "running" else None
        self.note(status=status, reason=reason, doing=doing, summary=list(summary), **facts)
        self.beat(now=True)
        progress = f"at step {self.facts['step']:,} of {self.max_steps:,}"
        if reason:
            progress += f" ({reason})"
        if status != "running":
            event = status
        elif self.facts["step"]:
            event = "resumed"
        else:
            event = "started"
        if self.alerts:
            self.alerts.send(event, " | ".join([progress, *summary]))

    def note(self, **facts: object) -> None:
        """Set facts of status.json; a fact that is None, NaN or infinity is removed."""
        with self.lock:
            self.facts = {name: fact for name, fact in without_nan(self.facts | facts).items() if fact is not None}

    def beat(self, now: bool = False) -> None:
        """Renew status.json if that is due, as a sign that the training thread makes progress; or now, and durably.

        After QUIET_S without a line of progress, print what the run does.
        """
        doing = self.facts.get("doing")  # None at the end
        if doing and self._is_silent():
            self._progress(f"step {self.facts['step']}/{self.max_steps} | {doing}")
        if now or time.monotonic() - self.heartbeat_at_s >= HEARTBEAT_S:
            self.heartbeat_at_s = time.monotonic()
            if self._owns_folder():
                self._attempt(STATUS, write_status, Path(self.config.checkpoint_dir), self.facts, now)

    def _progress(self, text: str, brief: str = "") -> None:
        self.progress_at_s = time.monotonic()
        self.say(text, brief=brief)

    def _is_silent(self) -> bool:
        return time.monotonic() - self.progress_at_s >= QUIET_S

    def _owns_folder(self) -> bool:
        """Return whether the path of the run's folder still leads to the folder that this process has locked."""
        return self.folder_lock is not None and leads_to_lock(Path(self.config.checkpoint_dir), self.folder_lock)

    def flush(self) -> None:
        """Make everything written so far durable; reopen files that were removed or rotated."""
        with self.lock:
            for name in self.files:
                if self.files[name].is_replaced() and self._owns_folder():
                    self._attempt(name, self._open_anew, name)
                self._attempt(name, self.files[name].flush)
        if self.tensorboard:
            self._attempt("TensorBoard", self.tensorboard.flush)

    def _open_anew(self, name: str) -> None:
        replaced = self.files[name]
        self.files[name] = LineFile(replaced.path)
        replaced.close()
        if name == METRICS and self.has_begun:
            self._write_launch_line(self.facts["step"])
        self.warn(f"{replaced.path}: was removed or renamed during the run; opened anew")

    def size_of(self, name: str) -> int:
        """Return the bytes of LOG or METRICS."""
        return self.files[name].file.tell()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Record in status.json an exception before the first step, unless the run was refused."""
        is_refused = isinstance(error, UserError) and not self.files
        if error and self.facts["status"] == "running" and not is_refused:
            if isinstance(error, KeyboardInterrupt):
                reason = f"{str(error) or 'SIGINT'} before the first step"
                self.status("stopped", reason)
                self.say(f"stopped ({reason})")
            else:
                self.status("failed", brief(error))
        self.close()

    def close(self) -> None:
        """Close all sinks; the files come last, because the others may warn."""
        if self.alerts:
            self.alerts.close()
        if self.wandb:
            self._attempt("W&B", self.wandb.finish)
        if self.tensorboard:
            self._attempt("TensorBoard", self.tensorboard.close)
        self.alerts = self.wandb = self.tensorboard = None
        self.flush()
        with self.lock:
            for name, file in self.files.items():
                self._attempt(name, file.close)
            self.files = {}
