"""Skeleton of the benchmarks: sides measured in turn, medians, ratios, --json and --plot; held programs."""

import argparse
import ctypes
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

import torch

from benchmarks import picture

REPO = Path(__file__).resolve().parent.parent
Figures = dict[str, list[float]]  # side -> one figure per round
LIMIT = "GEMM limit"  # the side whose figures bound those of the same precision

# ---------------------------------------------------------------------------------------------------------------------
# measuring


def benchmark_parser(doc: str, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    parser.add_argument("--json", type=Path, help="file that gets the medians, ranges and ratios")
    parser.add_argument("--plot", type=Path, help="file for a plot of the medians (pip install matplotlib)")
    return parser


def compare(sides: dict[str, Callable[[], float]], unit: str, args: argparse.Namespace) -> Figures:
    """Measure all sides in turn, as the shared options say, and report them."""
    figures = in_turn(sides, args.rounds, unit)
    report(figures, unit, args)
    return figures


def in_turn(sides: dict[str, Callable[[], float]], rounds: int, unit: str) -> Figures:
    """Measure all sides once a round, A B B A A B ..., and print the figures of each round and the time left.

    The order alternates, because a side may gain from its place: in two noisy measurements of 124M on a CPU, the second
    side was 6 and 12 % faster, whichever it was.
    """
    figures: Figures = {name: [] for name in sides}
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        for name in list(sides) if number % 2 else reversed(sides):
            figures[name].append(sides[name]())
        left_s = (time.perf_counter() - start) / number * (rounds - number)
        newest = "; ".join(f"{name} {number_text(values[-1])}" for name, values in figures.items())
        print(f"round {number} of {rounds}: {newest} {unit}; {left_s:,.0f} s left", flush=True)
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# reporting


def report(
    figures: Figures, unit: str, args: argparse.Namespace, pairs: Sequence[tuple[str, str]] | None = None
) -> None:
    """Print the median and range of each side and of the ratios within each round; write --json and --plot.

    Args:
        pairs: the sides to divide, first by second; default: the first side by each other side.
    """
    first, *others = figures
    pairs = [(first, other) for other in others] if pairs is None else pairs
    width = max(map(len, figures))
    for name, values in figures.items():
        print(f"{name:<{width}}  {median_text(values, unit)}")
    for one, other in pairs:
        print(f"{one} / {other}: {ratio_text(figures, one, other)}")
    summaries = {name: summary(values, unit) for name, values in figures.items()}
    summaries |= {f"{a} / {b}": summary(ratios(figures, a, b), "") for a, b in pairs}
    write_json(args.json, summaries)
    if args.plot:
        plot(figures, unit, args.plot)


def pairs_of_equal_precision(figures: Figures) -> list[tuple[str, str]]:
    """Pair our sides, named "SteadyGPT, PRECISION", with the other sides of that precision.

    Our bf16 is also paired with nanoGPT's fp32, because nanoGPT computes in fp32 on a CPU.
    """
    ours = [name for name in figures if name.startswith("SteadyGPT, ")]
    pairs = []
    for our_side in ours:
        for side in figures:
            if side != our_side and side.split(", ")[1] == our_side.split(", ")[1]:
                pairs.append((our_side, side))
    on_a_cpu = ("SteadyGPT, bf16", "nanoGPT, fp32")
    if figures.keys() >= {*on_a_cpu}:
        pairs.append(on_a_cpu)
    return pairs


def ratios(figures: Figures, one: str, other: str) -> list[float]:
    """Return the ratio of two sides within each round."""
    return [a / b for a, b in zip(figures[one], figures[other], strict=True)]


def ratio_text(figures: Figures, one: str, other: str) -> str:
    """Format the median and range of the ratios of two sides."""
    values = ratios(figures, one, other)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def summary(values: Sequence[float], unit: str) -> dict:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "unit": unit}


def write_json(file: Path | None, summaries: dict[str, dict]) -> None:
    """Add figures to the file of --json, if there is one: name -> median, low, high and unit."""
    if file:
        earlier = json.loads(file.read_text() or "{}") if file.exists() else {}
        file.write_text(json.dumps(earlier | summaries, indent=1))


def median_text(values: Sequence[float], unit: str) -> str:
    """Format the median and the range of one side."""
    spread = f"{number_text(min(values))} to {number_text(max(values))}"
    return f"median {number_text(statistics.median(values))} {unit} ({spread})"


def number_text(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def plot(figures: Figures, unit: str, file: Path) -> None:
    """Draw medians as bars with their ranges, grouped by precision, ours in blue, and a GEMM limit as a line."""
    from matplotlib import pyplot

    picture.set_style(15)
    groups: dict[str, Figures] = {}
    for name, values in figures.items():
        side, _, precision = name.partition(", ")
        groups.setdefault(precision, {})[side] = values
    bars = sum(not name.startswith(LIMIT) for name in figures)
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * (bars + len(groups)) + 0.8), layout="constrained")
    high = max(map(max, figures.values()))
    row = 0.0
    ticks = []
    labels = []
    for precision, sides in groups.items():
        top = row
        limits = sides.pop(LIMIT, None)
        for side, values in sides.items():
            median = statistics.median(values)
            colour = picture.BLUE if side.startswith("SteadyGPT") else picture.GREY
            axes.barh(row, median, height=0.8, color=colour)
            axes.plot([min(values), max(values)], [row, row], color=picture.INK, linewidth=1.4)
            ticks.append(row)
            label = f"{side}, {precision}" if precision else side
            labels.append(f"{label}: {number_text(median)}")
            row += 1
        if limits:
            limit = statistics.median(limits)
            axes.plot([limit, limit], [top - 0.5, row - 0.5], color=picture.RED, linewidth=2.5)
            text = f"{LIMIT} {number_text(limit)}"
            axes.annotate(text, (limit, top - 0.5), (0, 3), textcoords="offset points", ha="right", color=picture.RED)
        row += 0.7
    axes.set_yticks(ticks, labels)
    axes.set(xlabel=unit, xlim=(0, high * 1.12), ylim=(row - 1.1, -1.1))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    picture.save(figure, file)


# ---------------------------------------------------------------------------------------------------------------------
# programs


def flags(**options) -> list[str]:
    """Return the options as --name=value."""
    return [f"--{name}={value}" for name, value in options.items()]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason_of(output: str) -> str:
    """Return the line of a program's output that says why it failed: the last error, else the last line."""
    lines = [line.strip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error: |[\w.]*(Error|Exception|Interrupt|Exit)\b)", line)]
    return (errors or lines or ["no output"])[-1][:300]


class ProgramEnded(SystemExit):
    """A held program has ended by itself."""


class HeldProgram:
    """A training program that runs only while it is measured, so that several can alternate.

    Between measurements it is stopped (SIGSTOP). Start it inside held_programs(), which ends it with the
    benchmark.

    Args:
        step_line: matches the line that the program prints after each step.
    """

    metrics: Path | None = None  # our train.py's metrics.jsonl

    def __init__(self, command: Sequence[str | Path], cwd: Path, step_line: str):
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
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
        printed_at = self.lines.get()
        if printed_at is None:
            raise ProgramEnded(f"{' '.join(map(str, self.process.args))} ended:\n{''.join(self.output[-20:])}")
        return printed_at

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
