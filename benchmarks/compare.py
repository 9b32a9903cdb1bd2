"""Tools of the benchmarks: alternating measurements, medians and spreads, plots, held programs."""

import ctypes
import importlib.util
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING

from steadygpt.durable import replace_file

if TYPE_CHECKING:
    import torch

    from model import GPT

REPO = Path(__file__).resolve().parent.parent


def in_turn(sides: dict[str, Callable[[], float]], rounds: int, unit: str) -> dict[str, list[float]]:
    """Measure all sides once a round, A B B A A B ..., and print the figures of each round and the time left.

    The order alternates because the place matters: of two sides that train 124M on a CPU, the second was 6 to 12 %
    faster, whichever it was.

    Returns: one figure a round for each side.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        for name in list(sides) if number % 2 else reversed(sides):
            figures[name].append(sides[name]())
        left_s = (time.perf_counter() - start) / number * (rounds - number)
        shown = "; ".join(f"{name} {number_text(found[-1])}" for name, found in figures.items())
        print(f"round {number} of {rounds}: {shown} {unit}; {left_s:,.0f} s left", flush=True)
    return figures


def report(figures: dict[str, list[float]], unit: str, pairs: Sequence[tuple[str, str]] | None = None) -> None:
    """Print the median and spread of each side and of the ratios within each round.

    Args:
        pairs: the sides to divide, first by second; default: the first side by each other side.
    """
    width = max(map(len, figures))
    for name, found in figures.items():
        print(f"{name:<{width}}  {median_text(found, unit)}")
    first, *others = figures
    for one, other in pairs if pairs is not None else [(first, name) for name in others]:
        print(ratio_text(figures, one, other))


def report_precisions(figures: dict[str, list[float]], unit: str, defaults: tuple[str, str] = ("", "")) -> None:
    """Print sides named "NAME, PRECISION": ratios for equal precision, and for the defaults if they differ.

    Args:
        defaults: the two sides in the precision that each chooses on this device.
    """
    precisions = {name: name.split(", ")[1] for name in figures}
    ours = [name for name in figures if name.startswith("SteadyGPT")]
    report(figures, unit, [(a, b) for a in ours for b in figures if a != b and precisions[a] == precisions[b]])
    if {*defaults} <= {*figures} and precisions[defaults[0]] != precisions[defaults[1]]:
        print(f"by default: {ratio_text(figures, *defaults)}")


def ratio_text(figures: dict[str, list[float]], one: str, other: str) -> str:
    """Format the median and spread of the ratios of two sides within each round."""
    ratios = [a / b for a, b in zip(figures[one], figures[other], strict=True)]
    return f"{one} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def figure(found: Sequence[float], unit: str) -> dict:
    """Return the median, spread and unit of one figure, for write_json."""
    return {"median": statistics.median(found), "low": min(found), "high": max(found), "unit": unit}


def ratio(figures: dict[str, list[float]], one: str, other: str, unit: str) -> dict | None:
    """Return the figure of the ratios of two sides within each round, None if a side was not measured."""
    if one not in figures or other not in figures:
        return None
    return figure([a / b for a, b in zip(figures[one], figures[other], strict=True)], unit)


def write_json(file: Path | None, figures: dict[str, dict | None], notes: Sequence[str] = (), text: str = "") -> None:
    """Write what a benchmark found for benchmarks.gpu_suite; do nothing without a file.

    Args:
        figures: name -> median, low, high and unit, as figure() returns them; None is left out.
        notes: sentences to show beside the figures.
        text: a report to show below the table.
    """
    if file:
        measured = {name: found for name, found in figures.items() if found}
        content = json.dumps({"figures": measured, "notes": list(notes), "text": text}, indent=1)
        replace_file(file, lambda out: out.write(content.encode()), durable=False)


def plot(figures: dict[str, list[float]], unit: str, title: str, file: Path) -> None:
    """Draw the medians as bars, ours in blue, with a dot for each round. Needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(figures) + 1.2), layout="constrained")
    names = list(figures)[::-1]
    medians = [statistics.median(figures[name]) for name in names]
    colors = ["#2b6cb0" if name.startswith("SteadyGPT") else "#c0c0c0" for name in names]
    axes.barh(names, medians, color=colors, height=0.6)
    for name, median in zip(names, medians, strict=True):
        beside = (max(figures[name]), name)
        axes.annotate(number_text(median), beside, xytext=(8, 0), textcoords="offset points", va="center")
        axes.plot(figures[name], [name] * len(figures[name]), ".", color="black", markersize=3)
    axes.set(title=title, xlabel=unit, xlim=(0, max(medians) * 1.15))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def median_text(found: Sequence[float], unit: str) -> str:
    """Format the median and the spread of one side."""
    spread = f"{number_text(min(found))} to {number_text(max(found))}"
    return f"median {number_text(statistics.median(found))} {unit} ({spread})"


def number_text(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def flags(**options) -> list[str]:
    """Return the options as --name=value."""
    return [f"--{name}={value}" for name, value in options.items()]


def load_module(file: Path) -> ModuleType:
    """Import a file of another project, under a name that no module of ours has."""
    spec = importlib.util.spec_from_file_location(f"{file.resolve().parent.name}.{file.stem}", file)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def described_model(options: Sequence[str], vocab_size: int) -> "GPT":
    """Return the model, on the meta device, that these flags of train.py describe."""
    import torch

    from config import parse_args
    from model import GPT

    config, _ = parse_args(options)
    with torch.device("meta"):
        return GPT(config.shape(vocab_size), initialize=False)


def gemm_flops(device: "torch.device", precision: str, seconds: float = 1.0) -> float:
    """Measure the FLOP/s of a matrix product, an upper limit for training: 2048^3, on a GPU 8192^3.

    For fp8 it is measured in bf16.
    """
    import torch

    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    times = []
    while sum(times) < seconds:
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times)


def synchronize(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def reason_of(output: str) -> str:
    """Return the line of a program's output that says why it failed: the last error, else the last line."""
    lines = [line.strip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error: |[\w.]*(Error|Exception|Interrupt|Exit)\b)", line)]
    return (errors or lines or ["no output"])[-1][:300]


class ProgramEnded(SystemExit):
    """A held program has ended by itself; `reason` is one line."""

    def __init__(self, command: Sequence, output: str):
        super().__init__(f"{' '.join(map(str, command))} ended:\n{output}")
        self.reason = reason_of(output)


class HeldProgram:
    """A training program that runs only while it is measured, so that several can alternate.

    Between measurements it is stopped (SIGSTOP). Start it inside held_programs(), which ends it with the
    benchmark.

    Args:
        step_line: matches the line that the program prints after each step.
    """

    def __init__(self, command: Sequence[str | Path], cwd: Path, step_line: str):
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.lines: SimpleQueue[float | None] = SimpleQueue()  # the time of each step line; None: the program ended
        self.output: list[str] = []
        Thread(target=self._read, args=(re.compile(step_line),), daemon=True).start()

    def _read(self, step_line: re.Pattern) -> None:
        for line in self.process.stdout:
            self.output.append(line)
            if step_line.match(line):
                self.lines.put(time.perf_counter())
        self.lines.put(None)

    def _next_line(self) -> float:
        at = self.lines.get()
        if at is None:
            raise ProgramEnded(self.process.args, "".join(self.output[-20:]))
        return at

    def seconds_per_step(self, steps: int, discarded: int = 1) -> float:
        """Continue the program, discard the steps in progress and time the next `steps` steps.

        Args:
            discarded: 2 for a program on a GPU that prints a step while the next one is queued already. The GPU
                completes its queue while the program is stopped, so the next step would look too short.
        """
        self.process.send_signal(signal.SIGCONT)
        try:
            while True:  # discard lines printed before the program was stopped
                self.lines.get_nowait()
        except Empty:
            pass
        for _ in range(discarded):
            start = self._next_line()
        for _ in range(steps):
            end = self._next_line()
        self.process.send_signal(signal.SIGSTOP)
        return (end - start) / steps

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def held_programs() -> Iterator[dict[str, HeldProgram]]:
    """Yield a dict for held programs; end all of them on exit, also when a signal ends the benchmark."""
    programs: dict[str, HeldProgram] = {}
    with exit_on_signals():
        try:
            yield programs
        finally:
            for program in programs.values():
                program.end()


@contextmanager
def exit_on_signals():
    """Turn SIGTERM and SIGHUP into SystemExit inside, so that `finally` blocks end child processes."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, lambda received, _: sys.exit(128 + received)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Get SIGKILL when the parent dies, even by SIGKILL (Linux only): a stopped process would stay in memory."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
