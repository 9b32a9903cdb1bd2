"""The run log: console, log.txt, metrics.jsonl, TensorBoard, Weights & Biases, and status.json. Used on rank 0 only.

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
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn

from steadygpt.alerts import Alerts
from steadygpt.cli import mute, shown_options
from steadygpt.device import device_name, peak_flops, peak_memory_bytes
from steadygpt.distributed import Ranks, Silent
from steadygpt.durable import fsync_folder, replace_file
from steadygpt.retry import brief
from steadygpt.stability import StepResult, Totals
from steadygpt.system import Load, SystemMetrics, gpu_count
from steadygpt.tasks import TASKS
from steadygpt.units import STAMP, duration_text, timestamp
from steadygpt.wandb_sink import WandbSink

if TYPE_CHECKING:
    from config import TrainConfig

LOG, METRICS, STATUS = "log.txt", "metrics.jsonl", "status.json"
HEARTBEAT_S = 10.0  # between updates of status.json while training
RUN = "run          "  # begins log.txt, before the run's name
HISTOGRAM_VALUES = 2**14  # of each tensor: looks the same as all of its values at a thousandth of the cost

# TensorBoard's tags; other metrics are logged under their own names.
TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/val",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_z": "train/loss_z",
    "tokens_per_second": "speed/tokens_per_second",
    "steps_per_second": "speed/steps_per_second",
    "step_ms": "speed/step_ms",
    "mfu": "speed/mfu",
    "memory_gb": "memory/gb",
    **{f"{task}_{metric}": f"{task}/{metric}" for task in TASKS for metric in ("acc", "acc_norm")},
    "cost": "run/cost",
    "epoch": "run/epoch",
}


class RunLog:
    """Writes what a run measures to every sink. Other threads may write too.

    Args:
        start_step: where a resumed run starts: records from there on are dropped. None for a new run: the logs of an
            older run are moved aside.
        max_steps: of the run.
        ranks, flops_per_token: for MFU and cost.
        checkpoint_bytes: of one file, for status.json.
    """

    def __init__(
        self,
        config: "TrainConfig",
        start_step: int | None,
        max_steps: int = 0,
        ranks: Ranks | None = None,
        flops_per_token: float = 0.0,
        checkpoint_bytes: int = 0,
    ):
        logdir = Path(config.logdir)
        logdir.mkdir(parents=True, exist_ok=True)
        if start_step is None:
            move_aside(logdir)
        elif _run_of(logdir) != config.run_name:
            move_aside(logdir)  # the logs of a different run
        else:
            _cut_back(logdir / METRICS, start_step, re.compile(r'\{"step": (\d+)'))
            _cut_back(logdir / LOG, start_step, re.compile(r"step +(\d+)/|\[(\d+)\] "))
        self.log = open(logdir / LOG, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        self.metrics = open(logdir / METRICS, "a", encoding="utf-8")  # noqa: SIM115
        self.config, self.max_steps, self.flops_per_token = config, max_steps, flops_per_token
        self.ranks = ranks or Ranks(torch.device("cpu"))
        self.lock = threading.RLock()
        self.totals = Totals()
        self.resumed = start_step is not None
        self.facts: dict[str, Any] = {  # of status.json
            "status": "running",
            "reason": "",
            "doing": "starting",
            "run_name": config.run_name,
            "step": start_step or 0,
            "max_steps": max_steps,
            "tokens_per_step": config.total_batch_size,
            "precision": config.precision,
            "ranks": self.ranks.world_size,
            "device": device_name(self.ranks.device),
            "started_at": timestamp(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "logdir": str(logdir.absolute()),
            "checkpoint_bytes": checkpoint_bytes,
            "mirror": config.mirror,
        }
        self.heartbeat_at_s = -math.inf
        self.tensorboard = _open_tensorboard(config, start_step or 0) if config.use_tensorboard else None
        self.live = sys.stdout.isatty()
        self.live_line = False
        self.second_step: tuple[int, float] | None = None  # of this start, and when it started
        self.failed: set[str] = set()  # sinks that could not be written to, each reported once
        if not self.log.tell():
            self.say(f"{RUN}{config.run_name}")
        self.alerts = Alerts(config.alert_url, config.run_name, self.warn) if config.alert_url else None
        self.system: SystemMetrics | None = None
        self.load = Load()
        self.wandb: WandbSink | None = None
        if config.use_wandb:
            self.wandb = WandbSink(config, start_step, logdir / LOG, self.warn)
            self.say(self.wandb.note)

    def step(self, result: StepResult, step_s: float, elapsed_s: float, epoch: float) -> None:
        """Log a step every log_freq steps; in between only a terminal shows it.

        Args:
            step_s: seconds since the step before ended, without evaluations.
            elapsed_s: seconds of wall-clock over all starts of the run.
            epoch: after the step.
        """
        config, step, now_s = self.config, result.step, time.monotonic()
        left = self.max_steps - step - 1
        if self.second_step is None:  # the first step compiles and warms up, so its speed is not typical
            self.second_step = step + 1, now_s
            left_s = left * step_s
        else:
            left_s = left * (now_s - self.second_step[1]) / (step + 1 - self.second_step[0])
        self.totals.add(result, step_s)
        speed = config.total_batch_size / step_s
        mfu, cost = self.mfu(speed), self.cost(elapsed_s)
        line = (
            f"step {step:>{len(str(self.max_steps))}}/{self.max_steps} | loss {result.loss:.4f} | lr {result.lr:.2e} | "
            f"grad norm {result.grad_norm:.2f} | {step_s * 1000:,.0f} ms | {speed:,.0f} tok/s | "
            + (f"mfu {mfu:.1%} | " if mfu is not None else "")
            + (f"cost {cost:,.2f} | " if cost is not None else "")
            + f"{(step + 1) / self.max_steps:.1%} | ETA {duration_text(left_s)}"
        )
        measured = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm, "loss_z": result.loss_z}
        measured |= {"step_ms": step_s * 1000, "steps_per_second": 1 / step_s, "tokens_per_second": speed}
        measured |= {"mfu": mfu, "cost": cost}
        if step % config.log_freq == 0 or not left:
            memory_gb = peak_memory_bytes(self.ranks.device) / 1e9
            self.record(step, line, **measured, memory_gb=memory_gb, epoch=epoch)
        else:
            self.show(line)
        if self.facts["doing"] == "starting":
            self.heartbeat_at_s = -math.inf  # the first step is news
        is_typical = self.totals.steps > 1  # the first one compiles
        self.note(
            doing="training",
            step=step + 1,
            loss=result.loss if result.finite else None,
            tokens_per_second=round(speed),
            steps_per_second=round(1 / step_s, 3),
            step_ms=round(step_s * 1000, 1),
            mfu=mfu,
            elapsed_s=round(elapsed_s),
            cost=cost,
            eta_s=round(left_s) if is_typical else None,
            cost_to_go=self.cost(left_s) if is_typical else None,
        )
        self.beat()

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the devices' peak FLOP/s that a speed needs (PaLM, Chowdhery et al. 2022, appendix B)."""
        peak = peak_flops(self.ranks.device)
        return tokens_per_second * self.flops_per_token / (peak * self.ranks.world_size) if peak else None

    def cost(self, seconds: float) -> float | None:
        """Return the cost of all GPUs for some time, or None without --gpu_hour_cost."""
        return seconds / 3600 * self.ranks.world_size * self.config.gpu_hour_cost if self.config.gpu_hour_cost else None

    def evaluation(self, step: int, found: str, **scores: float) -> None:
        """Log the result of an evaluation after `step` updates, in words and numbers."""
        self.record(step, f"step {step}/{self.max_steps} | {found}", **scores)

    def status(self, status: str, reason: str = "", summary: Sequence[str] = (), **facts) -> None:
        """Write status.json: running, stopped, finished or failed; torchrun's exit status does not tell these apart."""
        self.note(status=status, reason=reason, **facts)
        if status != "running":
            self.note(summary=list(summary), doing=None)
        self._write_status(durable=True)
        event = ("resumed" if self.resumed else "started") if status == "running" else status
        found = f"at step {self.facts['step']:,} of {self.max_steps:,}{f' ({reason})' if reason else ''}"
        self.alert(event, " | ".join([found, *summary]))

    def note(self, **facts) -> None:
        """Keep facts for status.json; None removes one."""
        with self.lock:
            self.facts = {name: value for name, value in (self.facts | facts).items() if value is not None}

    def beat(self) -> None:
        """Renew status.json if that is due, as a sign that the training thread makes progress."""
        if time.monotonic() - self.heartbeat_at_s >= HEARTBEAT_S:
            self._write_status(durable=False)

    def _write_status(self, durable: bool) -> None:
        self.heartbeat_at_s = time.monotonic()
        text = json.dumps(self.facts | {"updated_at": timestamp()}, indent=2)
        with self._surviving(STATUS):
            path, content = Path(self.config.checkpoint_dir, STATUS), f"{text}\n".encode()
            try:
                replace_file(path, lambda file: file.write(content), durable)
            except OSError:  # a full disk has no room for a second file
                with open(path, "r+b") as file:
                    file.write(content)
                    file.truncate()

    def alert(self, event: str, text: str) -> None:
        """Send an event to --alert_url, if there is one."""
        if self.alerts:
            self.alerts.send(event, text, step=self.facts["step"], max_steps=self.max_steps)

    def measure_system(self) -> None:
        """Record what GPUs and host do, every --system_metrics_s from now on, in a thread of its own."""
        if seconds := self.config.system_metrics_s:
            folder, gpus = Path(self.config.checkpoint_dir), gpu_count(self.ranks.device)
            self.system = SystemMetrics(seconds, folder, gpus, self.record_system, self.warn)

    def record_system(self, metrics: Mapping[str, float]) -> None:
        """Record the machine's load beside the current step, and its mean in this start for status.json."""
        with self.lock:
            self._record(self.facts["step"], metrics, "system/")
            self.load.add(metrics)
            self.note(mean_load={name: round(value, 2) for name, value in self.load.means().items()})

    def record(self, step: int, line: str, **metrics) -> None:
        """Write a line of text, and numbers to the sinks for numbers."""
        with self.lock:
            self.say(line)
            self._record(step, metrics)

    def _record(self, step: int, metrics: Mapping[str, float | None], group: str = "") -> None:
        measured = {name: value for name, value in metrics.items() if value is not None}
        # JSON has no NaN.
        plain = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        record = {"step": step, "time": round(time.time(), 3), **plain}
        self._to_file(self.metrics, json.dumps(record))
        with self._writing_tensorboard() as tensorboard:
            for name, value in measured.items() if tensorboard else ():
                tensorboard.add_scalar(TAGS.get(name, f"{group}{name}"), value, step)
        if self.wandb:
            self.wandb.log(step, measured)

    def say(self, line: str, step: int | None = None) -> None:
        """Write lines of text to the console and to log.txt, there after the step they belong to."""
        self._to_console(sys.stdout, line)
        prefix = "" if step is None else f"[{step}] "
        self._to_file(self.log, "\n".join(prefix + part for part in line.splitlines()))

    def show(self, line: str) -> None:
        """Rewrite the terminal's last line in place; do nothing where output goes to a file."""
        if self.live:
            width = shutil.get_terminal_size().columns
            self._to_console(sys.stdout, line[: width - 1], end="")
            self.live_line = True

    def warn(self, line: str, event: str = "") -> None:
        """Write a warning to stderr and log.txt, and send it as an alert if it is an event."""
        self._to_console(sys.stderr, f"warning: {line}")
        self._to_file(self.log, f"warning: {line}")
        if event:
            self.alert(event, line)

    def _to_console(self, stream: IO[str], text: str, end: str = "\n") -> None:
        with self.lock:
            try:
                print(f"\r\x1b[K{text}" if self.live_line else text, end=end, file=stream, flush=True)
            except OSError:  # the terminal was closed, or the reader of a pipe has exited; training continues
                mute(stream)
            self.live_line = False

    def _to_file(self, file: IO[str], text: str) -> None:
        with self.lock, self._surviving(Path(file.name).name):
            print(text, file=file, flush=True)

    @contextmanager
    def _surviving(self, sink: str):
        """Lose records on a full disk, not the run."""
        try:
            yield
        except OSError as error:
            if sink not in self.failed:
                self.failed.add(sink)
                self._to_console(sys.stderr, f"warning: cannot write to {sink}: {error}; training continues")

    @contextmanager
    def _writing_tensorboard(self):
        """Yield TensorBoard's writer, or None. It does not recover from a failed write, so flush() opens a new one."""
        with self._surviving("TensorBoard"):
            try:
                yield self.tensorboard
            except OSError:
                self.tensorboard = None
                raise

    def text(self, step: int, text: str) -> None:
        """Log a sample of text that the model of this step has written."""
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)  # no terminal escape codes
        self.say(f"step {step}/{self.max_steps} | sample:")
        self.say(text, step)
        with self._writing_tensorboard() as tensorboard:
            if tensorboard:
                tensorboard.add_text("sample", f"```\n{text}\n```", step)
        if self.wandb:
            self.wandb.log(step, {"sample": text})

    def histograms(self, step: int, model: nn.Module) -> None:
        """Log histograms of parameters and gradients to TensorBoard, of at most HISTOGRAM_VALUES values each."""
        with self._writing_tensorboard() as tensorboard:
            for name, parameter in model.named_parameters() if tensorboard else ():
                for kind, tensor in (("parameters", parameter.detach()), ("parameters_grad", parameter.grad)):
                    if tensor is None:
                        continue
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP: this rank's shard
                    values = local.flatten()[:: max(1, local.numel() // HISTOGRAM_VALUES)]
                    values = values[values.isfinite()]  # a skipped step may leave NaN in the gradients
                    if values.numel():
                        tensorboard.add_histogram(f"{kind}/{name}", values.float(), step, bins=64)

    def flush(self) -> None:
        """Make everything written so far durable."""
        for file in (self.log, self.metrics):
            with self._surviving(Path(file.name).name):
                file.flush()
                os.fsync(file.fileno())
        with self._writing_tensorboard() as tensorboard:
            if tensorboard:
                tensorboard.flush()
            elif self.config.use_tensorboard:
                self.tensorboard = _open_tensorboard(self.config)

    def __enter__(self) -> "RunLog":
        self._write_status(durable=True)  # starting: the model is not built yet
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.facts["status"] == "running":  # the run has not begun
            if isinstance(error, KeyboardInterrupt):
                reason = f"{str(error) or 'SIGINT'} before the first step"
                self.status("stopped", reason)
                self.say(f"stopped ({reason}); nothing is saved")
            else:
                self.status("failed", brief(error) if error else "before the first step")
        self.close()

    def close(self) -> None:
        if self.system:
            self.system.close()
        if self.alerts:
            self.alerts.close()
        if self.wandb:
            self.wandb.close()
        self.flush()
        for sink in (self.log, self.metrics, self.tensorboard):
            if sink:
                with self._surviving("the logs"):
                    sink.close()


class Printed(Silent):
    """In place of a RunLog, for what is no run: prints, and writes no file."""

    def say(self, line: str, step: int | None = None) -> None:
        print(line, flush=True)

    def warn(self, line: str, event: str = "") -> None:
        print(f"warning: {line}", file=sys.stderr, flush=True)

    def evaluation(self, step: int, found: str, **scores: float) -> None:
        print(found, flush=True)

    def text(self, step: int, text: str) -> None:
        print(f"sample {json.dumps(text, ensure_ascii=False)}", flush=True)


def read_status(folder: Path) -> dict:
    """Return what status.json says, {} if there is none."""
    try:
        return json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return {}


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
        return commit + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _open_tensorboard(config: "TrainConfig", start_step: int | None = None):
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    # purge_step hides what an interrupted run logged after its last checkpoint.
    writer = SummaryWriter(str(Path(config.tensorboard_dir) / config.run_name), purge_step=start_step)
    options = {name: value for name, value in shown_options(config).items() if value != ""}
    for summary in hparams(options, {"loss/val": None, "loss/train": None}):
        writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch's stubs say None
    return writer


def _run_of(logdir: Path) -> str | None:
    """Return the name of the run that a log.txt belongs to."""
    try:
        with open(logdir / LOG, encoding="utf-8", errors="replace") as file:
            return file.readline().strip().removeprefix(RUN)
    except FileNotFoundError:
        return None


def _cut_back(path: Path, start_step: int, step_of: re.Pattern) -> None:
    """Drop the lines of start_step and later, and an incomplete last one; lines without a step stay."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)

    def stays(line: str) -> bool:
        match = step_of.match(line)
        return line.endswith("\n") and (match is None or int(match[match.lastindex or 0]) < start_step)

    kept = "".join(line for line in lines if stays(line))
    replace_file(path, lambda file: file.write(kept.encode()))


def move_aside(logdir: Path) -> None:
    """Rename the logs of a different run, so that they are neither overwritten nor continued."""
    for path in (logdir / LOG, logdir / METRICS):
        if path.exists() and path.stat().st_size:
            written = time.strftime(STAMP, time.localtime(path.stat().st_mtime))
            path.rename(path.with_name(f"{path.stem}-until-{written}{path.suffix}"))
    fsync_folder(logdir)
