"""One run log, many sinks: console, log.txt, metrics.jsonl, TensorBoard, Weights & Biases. Used on rank 0 only.

A record is a step and its named numbers. The number of a step is how many updates the weights had when they were
measured, so the training loss and the validation loss of one step belong to the same weights, and a run that resumes
at step s drops every record from s on: it will measure them again.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import nn

from steadygpt.cli import UserError, mute
from steadygpt.durable import fsync_folder, replace_file

if TYPE_CHECKING:
    from config import TrainConfig

LOG, METRICS = "log.txt", "metrics.jsonl"
RUN = "run          "  # begins log.txt, before the run's name
HISTOGRAM_VALUES = 2**14  # a tensor: looks the same as all of its values and costs a thousandth

# TensorBoard's tags; a metric that is not here goes there under its own name.
TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/val",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "loss_z": "train/loss_z",
    "tokens_per_second": "speed/tokens_per_second",
    "step_ms": "speed/step_ms",
    "mfu": "speed/mfu",
    "memory_gb": "memory/gb",
    "hellaswag_acc": "hellaswag/acc",
    "hellaswag_acc_norm": "hellaswag/acc_norm",
    "cost": "run/cost",
    "epoch": "run/epoch",
}


class RunLog:
    """Writes what a run measures to every sink.

    Args:
        start_step: of a resumed run: records from there on go. None for a new run: an older run's logs are moved aside.

    Raises: OSError when it cannot write.
    """

    def __init__(self, config: "TrainConfig", start_step: int | None):
        logdir = Path(config.logdir)
        logdir.mkdir(parents=True, exist_ok=True)
        if start_step is None:
            _move_aside(logdir)
        elif _run_of(logdir) != config.run_name:
            _move_aside(logdir)  # another run's: its records are not ours to cut
        else:
            _cut_back(logdir / METRICS, start_step, re.compile(r'\{"step": (\d+)'))
            _cut_back(logdir / LOG, start_step, re.compile(r"step +(\d+)/|\[(\d+)\] "))
        self.log = open(logdir / LOG, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        self.metrics = open(logdir / METRICS, "a", encoding="utf-8")  # noqa: SIM115
        self.config = config
        self.tensorboard = _open_tensorboard(config, start_step or 0) if config.use_tensorboard else None
        self.wandb = _open_wandb(config) if config.use_wandb else None
        self.log_freq = config.log_freq
        self.live = sys.stdout.isatty()
        self.live_line = False
        self.second_step: tuple[int, float] | None = None  # of this start, and when it began
        self.failed: set[str] = set()  # the sinks that could not be written to, each told once
        if not self.log.tell():
            self.say(f"{RUN}{config.run_name}")

    def step(self, step: int, max_steps: int, **measured) -> None:
        """The line and the numbers of a step, every log_freq steps; in between a terminal sees the line pass by."""
        left, now, step_ms = max_steps - step - 1, time.monotonic(), measured["step_ms"]
        if self.second_step is None:  # the first step compiles and warms up: it says nothing about the others
            self.second_step = step + 1, now
            left_s = left * step_ms / 1000
        else:
            left_s = left * (now - self.second_step[1]) / (step + 1 - self.second_step[0])
        line = (
            f"step {step:>{len(str(max_steps))}}/{max_steps} | loss {measured['loss']:.4f} | lr {measured['lr']:.2e} | "
            f"grad norm {measured['grad_norm']:.2f} | {step_ms:,.0f} ms | {measured['tokens_per_second']:,.0f} tok/s | "
            + (f"mfu {measured['mfu']:.1%} | " if measured["mfu"] is not None else "")
            + (f"cost {measured['cost']:,.2f} | " if measured["cost"] is not None else "")
            + f"{(step + 1) / max_steps:.1%} | ETA {duration_text(left_s)}"
        )
        if step % self.log_freq == 0 or not left:
            self.record(step, line, **measured)
        else:
            self.show(line)

    def record(self, step: int, line: str, **metrics) -> None:
        """Write one line of text, and numbers to the sinks that keep numbers."""
        self.say(line)
        measured = {name: value for name, value in metrics.items() if value is not None}
        # NaN is no JSON
        plain = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        self._to_file(self.metrics, json.dumps({"step": step, **plain}))
        with self._writing_tensorboard() as tensorboard:
            for name, value in measured.items() if tensorboard else ():
                tensorboard.add_scalar(TAGS.get(name, name), value, step)
        if self.wandb:
            self.wandb.log(measured, step=step)

    def say(self, line: str, step: int | None = None) -> None:
        """Write lines of text to console and to log.txt, there behind the step they belong to."""
        self._to_console(sys.stdout, line)
        prefix = "" if step is None else f"[{step}] "
        self._to_file(self.log, "\n".join(prefix + part for part in line.splitlines()))

    def show(self, line: str) -> None:
        """Rewrite the terminal's last line in place; nothing where output goes to a file."""
        if self.live:
            width = shutil.get_terminal_size().columns
            self._to_console(sys.stdout, line[: width - 1], end="")
            self.live_line = True

    def warn(self, line: str) -> None:
        """Say on stderr, and in log.txt, what the user should know."""
        self._to_console(sys.stderr, f"warning: {line}")
        self._to_file(self.log, f"warning: {line}")

    def _to_console(self, stream: IO[str], text: str, end: str = "\n") -> None:
        try:
            print(f"\r\x1b[K{text}" if self.live_line else text, end=end, file=stream, flush=True)
        except OSError:  # the terminal was closed, or `| tee` ended before us: no reason to lose the run
            mute(stream)
        self.live_line = False

    def _to_file(self, file: IO[str], text: str) -> None:
        with self._surviving(Path(file.name).name):
            print(text, file=file, flush=True)

    @contextmanager
    def _surviving(self, sink: str):
        """A full disk costs records, not the run."""
        try:
            yield
        except OSError as error:
            if sink not in self.failed:
                self.failed.add(sink)
                self._to_console(sys.stderr, f"warning: cannot write to {sink}: {error}; training goes on")

    @contextmanager
    def _writing_tensorboard(self):
        """TensorBoard's writer, or None; one that could not write never will again, so flush() opens another."""
        with self._surviving("TensorBoard"):
            try:
                yield self.tensorboard
            except OSError:
                self.tensorboard = None
                raise

    def text(self, step: int, title: str, text: str) -> None:
        """A piece of text, such as a sample."""
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)  # no escape codes on a terminal
        self.say(title)
        self.say(text, step)
        with self._writing_tensorboard() as tensorboard:
            if tensorboard:
                tensorboard.add_text("sample", f"```\n{text}\n```", step)
        if self.wandb:
            self.wandb.log({"sample": text}, step=step)

    def histograms(self, step: int, model: nn.Module) -> None:
        """Histograms of parameters and gradients (TensorBoard only), of at most HISTOGRAM_VALUES values each."""
        with self._writing_tensorboard() as tensorboard:
            for name, parameter in model.named_parameters() if tensorboard else ():
                for kind, tensor in (("parameters", parameter.detach()), ("parameters_grad", parameter.grad)):
                    if tensor is None:
                        continue
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP's shard of it
                    values = local.flatten()[:: max(1, local.numel() // HISTOGRAM_VALUES)]
                    if values.numel():
                        tensorboard.add_histogram(f"{kind}/{name}", values.float(), step, bins=64)

    def flush(self) -> None:
        """Bring everything to the disk: a checkpoint must not be newer than the log of what led to it."""
        for file in (self.log, self.metrics):
            with self._surviving(Path(file.name).name):
                file.flush()
                os.fsync(file.fileno())
        with self._writing_tensorboard() as tensorboard:
            if tensorboard:
                tensorboard.flush()
            elif self.config.use_tensorboard:
                self.tensorboard = _open_tensorboard(self.config)

    def close(self) -> None:
        self.flush()
        for sink in (self.log, self.metrics, self.tensorboard):
            if sink:
                with self._surviving("its last records"):
                    sink.close()
        if self.wandb:
            self.wandb.finish()


def _open_tensorboard(config: "TrainConfig", start_step: int | None = None):
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    # purge_step hides what an interrupted run logged past its last checkpoint.
    writer = SummaryWriter(str(Path(config.tensorboard_dir) / config.run_name), purge_step=start_step)
    options = {name: value for name, value in dataclasses.asdict(config).items() if value != ""}
    for summary in hparams(options, {"loss/val": None, "loss/train": None}):
        writer.file_writer.add_summary(summary)
    return writer


def _open_wandb(config: "TrainConfig"):
    try:
        import wandb
    except ImportError:
        raise UserError("--use_wandb: wandb is not installed; pip install wandb") from None
    name = config.run_name
    return wandb.init(project="steadygpt", name=name, id=name, resume="allow", config=dataclasses.asdict(config))


def _run_of(logdir: Path) -> str | None:
    """The name of the run that a log.txt belongs to."""
    try:
        with open(logdir / LOG, encoding="utf-8", errors="replace") as file:
            return file.readline().strip().removeprefix(RUN)
    except FileNotFoundError:
        return None


def _cut_back(path: Path, start_step: int, step_of: re.Pattern) -> None:
    """Drop the lines of start_step and later, and a half-written last one; lines of no step stay."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)

    def stays(line: str) -> bool:
        match = step_of.match(line)
        return line.endswith("\n") and (match is None or int(match[match.lastindex]) < start_step)

    kept = "".join(line for line in lines if stays(line))
    replace_file(path, lambda file: file.write(kept.encode()))


def _move_aside(logdir: Path) -> None:
    """A new run never overwrites or continues the log of another."""
    for path in (logdir / LOG, logdir / METRICS):
        if path.exists() and path.stat().st_size:
            written = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            path.rename(path.with_name(f"{path.stem}-until-{written}{path.suffix}"))
    fsync_folder(logdir)


def duration_text(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min, 12 d 03 h."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} min"
    return f"{s // 86400} d {s % 86400 // 3600:02d} h"
