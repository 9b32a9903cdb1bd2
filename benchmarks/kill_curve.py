"""The loss of a run that is killed fifty times, drawn over the loss of the same run undisturbed.

    python -m benchmarks.kill_curve                      # with matplotlib, draws docs/steady.png
    python -m benchmarks.kill_curve --kills 5 --steps 50 --plot small.png --precision bf16       # options of train.py

Trains a byte-level GPT of 0.84 M parameters on Python's standard library twice, with dropout, in fp32 on the CPU. The
first run is left alone, on one process. The second run is killed with kill -9 at random instants and resumed with
--resume auto, each time on one, two or four processes, drawn at random. With --deterministic, the expected difference
is exactly 0.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from benchmarks.compare import REPO, die_with_parent, exit_on_signals, flags

STEP_LINE = re.compile(r"^step +(\d+)/", re.MULTILINE)
RUN = flags(
    device="cpu", precision="fp32", compile="off", num_layers=4, num_heads=4, embd_size=128, context_length=128,
    total_batch_size=2048, mini_batch_size=4, max_lr=1e-3, min_lr=1e-4, dropout=0.1, checkpoint_freq=1,
    keep_checkpoints=2, checkpoint_minutes=0, eval_freq=0, hellaswag_freq=0, sample_freq=0, resume="auto",
    deterministic="on",
)  # fmt: skip


class Kill(NamedTuple):
    """A kill: the last step that was logged before, the number of ranks, and whether a save was in progress."""

    step: int
    ranks: int
    within_save: bool


def start(folder: Path, ranks: int, steps: int) -> list[subprocess.Popen]:
    """Start train.py, one process per rank, whose output goes to out.txt."""
    own = flags(
        data_dir=folder.parent / "data", checkpoint_dir=folder / "saved", logdir=folder / "logs", max_steps=steps,
        warmup_steps=steps // 10,
    )  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # four processes share two cores
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    with open(folder / "out.txt", "w") as out:
        for rank in range(ranks):
            if ranks > 1:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(
                [sys.executable, "train.py", *RUN, *own], cwd=REPO, env=environment, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
            ))  # fmt: skip
    return processes


def live(folder: Path, ranks: int, steps: int, instant: float = math.inf) -> Kill | None:
    """Train until the run ends, or until all ranks are killed with kill -9; return that kill.

    Args:
        instant: after how many of its own steps it is killed; the fraction is a part of the next step.

    Raises: SystemExit when a rank ended with an error of its own.
    """
    started_ns, out, logged_at = time.time_ns(), folder / "out.txt", []
    processes = start(folder, ranks, steps)
    try:
        while len(logged_at) <= instant - 1 and all(process.poll() is None for process in processes):
            time.sleep(0.005)
            logged_at += [time.monotonic()] * (len(logged_steps(out)) - len(logged_at))
        if len(logged_at) > instant - 1:
            time.sleep(instant % 1 * (logged_at[-1] - logged_at[0]) / max(1, len(logged_at) - 1))
        if any(process.poll() is not None for process in processes):
            if any(process.wait() for process in processes):
                sys.exit(f"train.py failed:\n{out.read_text(errors='replace')[-2000:]}")
            return None
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    half_written = list(folder.glob("saved/.*.pt.tmp"))
    return Kill(logged_steps(out)[-1], ranks, any(file.stat().st_mtime_ns > started_ns for file in half_written))


def logged_steps(out: Path) -> list[int]:
    return [int(step) for step in STEP_LINE.findall(out.read_text(errors="replace"))]


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


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a SHA-256 of the bits of all tensors."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors.items()))).hexdigest()


def draw(calm: dict[int, float], disturbed: dict[int, float], kills: list[Kill], difference: float, file: Path) -> None:
    """Draw both curves over each other, with a mark at each kill."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 13})
    figure, axes = pyplot.subplots(figsize=(12, 6), layout="constrained")
    axes.plot(calm.keys(), calm.values(), color="#c3d0e3", linewidth=6, label="undisturbed run, 1 process")
    label = "run that was killed and resumed"
    axes.plot(disturbed.keys(), disturbed.values(), color="#1a4f8b", linewidth=1.3, label=label)
    for ranks, mark, color in ((1, "o", "#d1382c"), (2, "^", "#e88b1a"), (4, "s", "#3d8f5a")):
        steps = [kill.step for kill in kills if kill.ranks == ranks]
        label = f"kill -9 with {ranks} process{'es' * (ranks > 1)} ({len(steps)} times)"
        at = [disturbed[step] for step in steps]
        axes.plot(steps, at, mark, color=color, markersize=9, markeredgecolor="white", zorder=3, label=label)
    times = f"Killed {len(kills)} times, resumed {len(kills)} times"
    axes.set(xlabel="step", ylabel="training loss", xlim=(0, max(calm) + 1))
    axes.set_title(f"{times}; largest difference of the loss: {difference:.1g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4), help="default: 1 2 4")
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the numbers of ranks")
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "steady.png")
    args, of_training = parser.parse_known_args()
    RUN.extend(of_training)
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        print("there will be no picture: matplotlib is missing; pip install matplotlib", flush=True)
    random_ = Random(args.seed)
    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        calm, disturbed = (Path(name) / run for run in ("calm", "killed"))
        for run in (calm, disturbed):
            run.mkdir()
        prepare = ["prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out=f"{name}/data")]
        subprocess.run([sys.executable, *prepare], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        print(f"undisturbed: {args.steps} steps", flush=True)
        live(calm, 1, args.steps)
        ranks_of_lives, kills, begun = [random_.choice(args.ranks) for _ in range(args.kills)], [], time.monotonic()
        for ranks, instant in zip(ranks_of_lives, kill_instants(args.kills, args.steps, random_), strict=True):
            if kill := live(disturbed, ranks, args.steps, instant):
                kills.append(kill)
                where = f"at step {kill.step} of {args.steps}, ranks: {ranks}{', within a save' * kill.within_save}"
                left_s = (time.monotonic() - begun) / len(kills) * (args.kills - len(kills))
                print(f"kill {len(kills)} of {args.kills}: {where}; {left_s:.0f} s left", flush=True)
        live(disturbed, 1, args.steps)
        calm_losses, killed_losses = losses(calm), losses(disturbed)
        difference = max(abs(calm_losses[step] - killed_losses[step]) for step in range(args.steps))
        one, other = weights(calm), weights(disturbed)
        weight_difference = max((one[name] - other[name]).abs().max().item() for name in one)
    lives = ", ".join(f"{count} on {ranks}" for ranks, count in sorted(Counter(kill.ranks for kill in kills).items()))
    print(f"{len(kills)} kills (number of ranks: {lives}), {sum(kill.within_save for kill in kills)} within a save")
    print(f"largest difference of the losses of {args.steps} steps: {difference:.3g}")
    print(f"largest difference of the final weights: {weight_difference:.3g}")
    print(f"SHA-256 of the final weights: undisturbed {digest(one)[:16]}..., killed {digest(other)[:16]}...")
    if draws:
        draw(calm_losses, killed_losses, kills, difference, args.plot)


if __name__ == "__main__":
    main()
