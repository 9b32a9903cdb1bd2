"""The loss of a run that is killed fifty times, drawn over the loss of the same run undisturbed.

    python -m benchmarks.kill_curve                      # with matplotlib, draws docs/steady.png
    python -m benchmarks.kill_curve --kills 5 --steps 50 --plot small.png

Trains a byte-level GPT of 0.84 M parameters on Python's standard library twice, in fp32 on the CPU. The first run is
left alone. The second run is killed with kill -9 at random instants and resumed with --resume auto, each time on one
rank or on two, drawn at random. Two ranks add the same two gradients that one rank adds in two micro-steps, and each
process computes on one thread, so the expected difference is exactly 0.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from benchmarks.compare import REPO, die_with_parent, exit_on_signals, flags

STEP_LINE = re.compile(r"^step +(\d+)/", re.MULTILINE)
RUN = flags(
    device="cpu", precision="fp32", compile="off", num_layers=4, num_heads=4, embd_size=128, context_length=128,
    total_batch_size=2048, mini_batch_size=8, max_lr=1e-3, min_lr=1e-4, dropout=0, checkpoint_freq=1,
    keep_checkpoints=2, checkpoint_minutes=0, eval_freq=0, hellaswag_freq=0, sample_freq=0,
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """A kill: the last step that was logged before, the number of ranks, and whether a save was in progress."""

    step: int
    ranks: int
    within_save: bool


class Life:
    """One start of train.py: one process per rank, whose output goes to one file."""

    def __init__(self, folder: Path, ranks: int, steps: int):
        self.folder, self.out, self.started_ns = folder, folder / "out.txt", time.time_ns()
        own = flags(
            data_dir=folder.parent / "data", checkpoint_dir=folder / "saved", logdir=folder / "logs",
            max_steps=steps, warmup_steps=steps // 10, resume="auto",
        )  # fmt: skip
        command = [sys.executable, "train.py", *RUN, *own]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more threads would sum in a different order
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.processes = []
        with open(self.out, "w") as out:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                self.processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPO,
                        env=environment | place,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                )

    def steps(self) -> list[int]:
        """Return the steps logged in this life."""
        return [int(step) for step in STEP_LINE.findall(self.out.read_text(errors="replace"))]

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def is_saving(self) -> bool:
        """Whether this life has left a half-written checkpoint."""
        with contextlib.suppress(FileNotFoundError):  # completed between the listing and stat()
            return any(file.stat().st_mtime_ns > self.started_ns for file in self.folder.glob("saved/.*.pt.tmp"))
        return False

    def kill(self) -> None:
        """Kill all ranks with kill -9."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def check(self) -> None:
        """Raises: SystemExit when a rank ended with an error of its own."""
        if any(process.wait() for process in self.processes):
            sys.exit(f"train.py failed:\n{self.out.read_text(errors='replace')[-2000:]}")


@contextmanager
def life(folder: Path, ranks: int, steps: int) -> Iterator[Life]:
    """Start a life, and kill what is left of it on exit."""
    started = Life(folder, ranks, steps)
    try:
        yield started
    finally:
        started.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def undisturbed(folder: Path, steps: int) -> None:
    """Train without a kill, on one rank."""
    with life(folder, 1, steps) as process:
        start = time.monotonic()
        while process.is_running():
            time.sleep(0.5)
            done = len(process.steps())
            left_s = (time.monotonic() - start) / max(1, done) * (steps - done)
            print(f"\rundisturbed: {done} of {steps} steps, {left_s:.0f} s left  ", end="", flush=True)
        print()
        process.check()


def killed(folder: Path, steps: int, instants: Sequence[float], ranks_of_lives: Sequence[int]) -> list[Kill]:
    """Train the same run in lives that are killed at the given instants, and a last one that finishes it.

    Args:
        instants: for each life, after how many of its own steps it is killed; the fraction is a part of the next step.
    """
    kills, start = [], time.monotonic()
    for number, (instant, ranks) in enumerate(zip(instants, ranks_of_lives, strict=True), start=1):
        with life(folder, ranks, steps) as started:
            logged_at = []
            while started.is_running() and len(logged_at) < int(instant):
                time.sleep(0.005)
                logged_at += [time.monotonic()] * (len(started.steps()) - len(logged_at))
            step_s = (logged_at[-1] - logged_at[0]) / max(1, len(logged_at) - 1) if logged_at else 0
            time.sleep(instant % 1 * step_s)
            if not started.is_running():
                started.check()
                break
            started.kill()
            kills.append(Kill(started.steps()[-1], ranks, started.is_saving()))
        left_s = (time.monotonic() - start) / number * (len(instants) - number)
        where = f"at step {kills[-1].step} of {steps} on {ranks_text(ranks)}{', within a save' * kills[-1].within_save}"
        print(f"kill {number} of {len(instants)}: {where}; {left_s:.0f} s left", flush=True)
    with life(folder, 1, steps) as last:
        last.check()
    return kills


def ranks_text(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def kill_instants(kills: int, steps: int, random: Random) -> list[float]:
    """Draw how many steps each life makes before its kill: together 95 % of the run, so that it outlasts all kills."""
    drawn = [random.uniform(0.2, 2.5) for _ in range(kills)]
    return [1 + (0.95 * steps - kills) * one / sum(drawn) for one in drawn]


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss."""
    records = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "saved" / "latest.pt", weights_only=True)["model"]


def draw(calm: dict[int, float], disturbed: dict[int, float], kills: list[Kill], difference: float, file: Path) -> None:
    """Draw both curves over each other, with a mark at each kill."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 13})
    figure, axes = pyplot.subplots(figsize=(12, 6), layout="constrained")
    axes.plot(calm.keys(), calm.values(), color="#c3d0e3", linewidth=6, label="undisturbed run, 1 rank")
    axes.plot(
        disturbed.keys(), disturbed.values(), color="#1a4f8b", linewidth=1.3, label="run that was killed and resumed"
    )
    for ranks, mark, color in ((1, "o", "#d1382c"), (2, "^", "#e88b1a")):
        steps = [kill.step for kill in kills if kill.ranks == ranks]
        label, at = f"kill -9 on {ranks_text(ranks)} ({len(steps)} times)", [disturbed[step] for step in steps]
        axes.plot(steps, at, mark, color=color, markersize=9, markeredgecolor="white", zorder=3, label=label)
    axes.set(xlabel="step", ylabel="training loss", xlim=(0, max(calm) + 1))
    axes.set_title(
        f"Killed {len(kills)} times, resumed {len(kills)} times; largest difference of the loss: {difference:.1g}"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=(1, 2), help="default: 1 2")
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the numbers of ranks")
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "steady.png")
    args = parser.parse_args()
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        print("there will be no picture: matplotlib is missing; pip install matplotlib", flush=True)
    random_ = Random(args.seed)
    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        folder = Path(name)
        for run in ("calm", "killed"):
            (folder / run).mkdir()
        prepare = ["prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out=folder / "data")]
        subprocess.run([sys.executable, *prepare], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        undisturbed(folder / "calm", args.steps)
        ranks_of_lives = [random_.choice(args.ranks) for _ in range(args.kills)]
        kills = killed(folder / "killed", args.steps, kill_instants(args.kills, args.steps, random_), ranks_of_lives)
        calm, disturbed = losses(folder / "calm"), losses(folder / "killed")
        difference = max(abs(calm[step] - disturbed[step]) for step in range(args.steps))
        one, other = weights(folder / "calm"), weights(folder / "killed")
        weight_difference = max((one[name] - other[name]).abs().max().item() for name in one)
    lives = ", ".join(f"{count} on {ranks}" for ranks, count in sorted(Counter(kill.ranks for kill in kills).items()))
    print(f"{len(kills)} kills (number of ranks: {lives}), {sum(kill.within_save for kill in kills)} within a save")
    print(f"largest difference of the losses of {args.steps} steps: {difference:.3g}")
    print(f"largest difference of the final weights: {weight_difference:.3g}")
    if draws:
        draw(calm, disturbed, kills, difference, args.plot)


if __name__ == "__main__":
    main()
