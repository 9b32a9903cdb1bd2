"""What the benchmarks share: two sides measured in turn, medians and spreads, programs that are held and let go."""

import ctypes
import importlib.util
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

if TYPE_CHECKING:
    import torch

REPO = Path(__file__).resolve().parent.parent


def in_turn(sides: dict[str, Callable[[], float]], rounds: int, unit: str) -> dict[str, list[float]]:
    """Call every side once a round, A B A B ..., and tell each round's figures and the time left.

    Returns: the figures of each side, one a round.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        for name, measure in sides.items():
            figures[name].append(measure())
        left_s = (time.perf_counter() - start) / number * (rounds - number)
        shown = ", ".join(f"{name} {number_text(found[-1])}" for name, found in figures.items())
        print(f"round {number} of {rounds}: {shown} {unit}; {left_s:,.0f} s left", flush=True)
    return figures


def report(figures: dict[str, list[float]], unit: str) -> None:
    """Median and spread of every side, and the first side's median ratio to each of the others, round by round."""
    width = max(map(len, figures))
    for name, found in figures.items():
        print(f"{name:<{width}}  {median_text(found, unit)}")
    first, *others = figures
    for name in others:
        ratios = [a / b for a, b in zip(figures[first], figures[name], strict=True)]
        print(f"{first} / {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def plot(figures: dict[str, list[float]], unit: str, title: str, file: Path) -> None:
    """A picture of the medians as bars, with a dot for each round. Needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(figures) + 1.2), layout="constrained")
    names = list(figures)[::-1]
    medians = [statistics.median(figures[name]) for name in names]
    bars = axes.barh(names, medians, color=["#c0c0c0"] * (len(names) - 1) + ["#2b6cb0"], height=0.6)
    axes.bar_label(bars, [f" {number_text(median)}" for median in medians], padding=12)
    for name in names:
        axes.plot(figures[name], [name] * len(figures[name]), ".", color="black", markersize=3)
    axes.set(title=title, xlabel=unit, xlim=(0, max(medians) * 1.15))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def median_text(found: Sequence[float], unit: str) -> str:
    """Median and spread of one side's figures."""
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


def gemm_flops(device: "torch.device", seconds: float = 1.0) -> float:
    """FLOP/s of a bf16 matrix product, 2048^3 on a CPU and 8192^3 on a GPU: the most that training can hope for."""
    import torch

    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
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
            preexec_fn=_die_with_parent,
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
            sys.exit(f"{' '.join(map(str, self.process.args))} ended:\n{''.join(self.output[-20:])}")
        return at

    def seconds_per_step(self, steps: int) -> float:
        """Continue the program, discard the step in progress and time the next `steps` steps."""
        self.process.send_signal(signal.SIGCONT)
        try:
            while True:  # discard lines printed before the program was stopped
                self.lines.get_nowait()
        except Empty:
            pass
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
    """Yield a dict for held programs; end all of them on exit, also when SIGTERM or SIGHUP ends the benchmark."""
    programs: dict[str, HeldProgram] = {}
    ending = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, lambda received, _: sys.exit(128 + received)) for number in ending]
    try:
        yield programs
    finally:
        for program in programs.values():
            program.end()
        for number, handler in zip(ending, previous, strict=True):
            signal.signal(number, handler)


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Get SIGKILL when the parent dies, even by SIGKILL (Linux only): a stopped process would stay in memory."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
