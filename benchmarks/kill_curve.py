"""The loss of a run that is killed fifty times, drawn over the loss of the same run uninterrupted.

    python -m benchmarks.kill_curve                      # with matplotlib, draws docs/steady.svg
    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.kill_curve --nanogpt nanoGPT    # nanoGPT's own train.py, killed likewise, beside it
    python -m benchmarks.kill_curve --data benchmarks/losses/kill_curve.json   # redraws it from these losses
    python -m benchmarks.kill_curve --kills 5 --steps 50 --plot small.svg --precision bf16       # options of train.py

GPT-2's shape on a GPU, killed about once a minute. --data_dir is any prepared tokens, here those of tokens_to_loss:

    data=benchmarks/out/tokens_to_loss/data/bpe-32768-text
    python -m benchmarks.kill_curve --folder killed --data_dir $data --kills 14 --steps 1500 --ranks 1 --plot gpu.svg \
        --caption '111 M parameters, bf16 on an H200, saves every 20 steps' --data killed/losses.json \
        --tokenizer $data/train_shards/tokenizer.json --device cuda --precision bf16 --compile on --config gpt2 \
        --num_layers 12 --num_heads 12 --embd_size 768 --context_length 1024 --mini_batch_size 16 \
        --total_batch_size 131072 --checkpoint_freq 20

On average, a kill comes after 0.95 x steps / kills steps, and a start takes 20 to 30 s of the minute. With --folder,
the same command continues after an interruption: the uninterrupted run starts again, the killed one resumes.

Trains a byte-level GPT of 0.84 M parameters on Python's standard library twice, with dropout, in fp32 on the CPU. The
first run is left alone. The second run is killed with kill -9 at random instants and resumed with --resume auto. Both
have --ranks processes. On a CPU the expected difference is exactly 0; on a GPU it is with --deterministic.

nanoGPT trains the same shape on the same text with the same batch size and learning rates, on one process. It is killed
after the same numbers of its own steps and restarted with --init_from=resume. Both save after every step. nanoGPT
overwrites its only checkpoint in place: before each start this script copies a checkpoint that loads, and restores the
copy when a kill has corrupted the next one. The loss that nanoGPT logs is that of the last micro-batch of a step.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from benchmarks import picture
from benchmarks.compare import REPO, die_with_parent, exit_on_signals, flags
from steadygpt.base.text import counted
from steadygpt.log.metrics import METRICS, read_records

STEP_LINE = re.compile(r"^(?:step +(?=\d+/)|iter (?=\d+:))(\d+)", re.MULTILINE)  # ours, nanoGPT's
RUN = flags(
    device="cpu", precision="fp32", compile="off", num_layers=4, num_heads=4, embd_size=128, context_length=128,
    total_batch_size=2048, mini_batch_size=4, max_lr=1e-3, min_lr=1e-4, dropout=0.1, checkpoint_freq=1,
    keep_checkpoints=2, checkpoint_minutes=0, eval_freq=0, hellaswag_freq=0, sample_freq=0, resume="auto",
)  # fmt: skip


NANOGPT = flags(
    device="cpu", dtype="float32", compile=False, n_layer=4, n_head=4, n_embd=128, block_size=128, bias=True,
    batch_size=4, gradient_accumulation_steps=4, learning_rate=1e-3, min_lr=1e-4, dropout=0.1, log_interval=1,
    eval_interval=1, eval_iters=1, always_save_checkpoint=True,
)  # fmt: skip


class Kill(NamedTuple):
    """A kill: the last step that was logged before, and whether a save was in progress."""

    step: int
    within_save: bool


Start = Callable[[Path, int, int], list[subprocess.Popen]]  # folder, ranks, steps -> a process per rank


def start(folder: Path, ranks: int, steps: int) -> list[subprocess.Popen]:
    """Start train.py, one process per rank, whose output goes to out.txt."""
    own = flags(
        data_dir=folder.parent / "data", checkpoint_dir=folder / "saved", max_steps=steps,
        warmup_steps=steps // 10,
    )  # fmt: skip
    environment = {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    with open(folder / "out.txt", "w") as out:
        for rank in range(ranks):
            if ranks > 1:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(spawn([*RUN, *own], REPO, out, environment))
    return processes


def start_nanogpt(checkout: Path, folder: Path, ranks: int, steps: int) -> list[subprocess.Popen]:
    """Start nanoGPT's train.py on one process, from its checkpoint if there is one."""
    assert ranks == 1
    init_from = "resume" if (folder / "saved" / "ckpt.pt").exists() else "scratch"
    own = flags(
        dataset=folder.parent / "bins", out_dir=folder / "saved", init_from=init_from, max_iters=steps - 1,
        lr_decay_iters=steps, warmup_iters=steps // 10,
    )  # fmt: skip
    with open(folder / "out.txt", "w") as out:
        return [spawn([*NANOGPT, *own], checkout, out, {})]


def spawn(options: Sequence[str], folder: Path, out: TextIO, environment: dict[str, str]) -> subprocess.Popen:
    """Start the train.py in a folder on one thread, because four processes share two cores."""
    return subprocess.Popen(
        [sys.executable, "-u", "train.py", *options], cwd=folder, stdout=out, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip


def live(folder: Path, ranks: int, steps: int, instant: float = math.inf, start: Start = start) -> Kill | None:
    """Train until the run ends, or until all ranks are killed with kill -9; return that kill.

    Args:
        instant: after how many of its own steps it is killed; the fraction is a part of the next step.

    Raises: SystemExit when a rank ended with an error of its own.
    """
    started_ns = time.time_ns()
    out = folder / "out.txt"
    logged_at: list[float] = []
    processes = start(folder, ranks, steps)
    try:
        while len(logged_at) <= instant - 1 and all(process.poll() is None for process in processes):
            time.sleep(0.02)
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
    return Kill(logged_steps(out)[-1], any(file.stat().st_mtime_ns > started_ns for file in half_written))


def logged_steps(out: Path) -> list[int]:
    return [int(step) for step in STEP_LINE.findall(out.read_text(errors="replace"))]


def kill_instants(kills: int, steps: int, random: Random) -> list[float]:
    """Draw how many steps each life makes before its kill: together 95 % of the run, so that it outlasts all kills."""
    lengths = [random.uniform(0.2, 2.5) for _ in range(kills)]
    return [1 + (0.95 * steps - kills) * length / sum(lengths) for length in lengths]


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss."""
    return {record["step"]: record["loss"] for record in read_records(folder / "saved" / METRICS, "loss")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "saved" / "latest.pt", map_location="cpu", weights_only=True)["model"]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a SHA-256 of the bits of all tensors."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors.items()))).hexdigest()


def killed_lives(
    folder: Path, args: argparse.Namespace, ranks: int, start: Start = start, done: int = 0
) -> Iterator[Kill | None]:
    """Start and kill a run again and again, then let it finish. Yield each kill, and None at the end.

    Args:
        done: the kills that an earlier call has made.
    """
    random = Random(args.seed)
    started_s = time.monotonic()
    instants = kill_instants(args.kills, args.steps, random)
    for number, instant in enumerate(instants[done:], start=done + 1):
        kill = live(folder, ranks, args.steps, instant, start)
        if kill:
            where = f"at step {kill.step} of {args.steps}"
            if kill.within_save:
                where += ", within a save"
            left_s = (time.monotonic() - started_s) / (number - done) * (args.kills - number)
            print(f"kill {number} of {args.kills}: {where}; {left_s:.0f} s left", flush=True)
            yield kill
    live(folder, ranks, args.steps, math.inf, start)
    yield None


def measure_steadygpt(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train without and with kills, report how far the runs differ, and return their losses and the kills."""
    calm, disturbed = (folder / run for run in ("calm", "killed"))
    kills_file = disturbed / "kills.json"
    if len(losses(calm)) < args.steps:
        shutil.rmtree(calm, ignore_errors=True)
        calm.mkdir()
        print(f"uninterrupted: {args.steps} steps", flush=True)
        live(calm, args.ranks, args.steps)
    disturbed.mkdir(exist_ok=True)
    kills = [Kill(*kill) for kill in json.loads(kills_file.read_text())] if kills_file.exists() else []
    for kill in killed_lives(disturbed, args, args.ranks, done=len(kills)):
        if kill:
            kills.append(kill)
            kills_file.write_text(json.dumps(kills))
    calm_by_step = losses(calm)
    killed_by_step = losses(disturbed)
    calm_losses = [calm_by_step[step] for step in range(args.steps)]
    killed_losses = [killed_by_step[step] for step in range(args.steps)]
    difference = max(abs(one - other) for one, other in zip(calm_losses, killed_losses, strict=True))
    calm_weights = weights(calm)
    killed_weights = weights(disturbed)
    weight_difference = max((tensor - killed_weights[name]).abs().max().item() for name, tensor in calm_weights.items())
    within_saves = sum(kill.within_save for kill in kills)
    print(f"{len(kills)} kills on {counted(args.ranks, 'process')}, {within_saves} within a save")
    print(f"largest difference of the losses of {args.steps} steps: {difference:.3g}")
    print(f"largest difference of the final weights: {weight_difference:.3g}")
    hashes = f"uninterrupted {digest(calm_weights)[:16]}..., killed {digest(killed_weights)[:16]}..."
    print(f"SHA-256 of the final weights: {hashes}")
    return {
        "uninterrupted": calm_losses,
        "killed": killed_losses,
        "kills": kills,
        "ranks": args.ranks,
        "weight_difference": weight_difference,
    }


def measure_nanogpt(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train nanoGPT without and with kills; return the losses of each life with its first step."""
    bins, calm, disturbed = (folder / name for name in ("bins", "calm_nanogpt", "killed_nanogpt"))
    for new in (bins, calm / "saved", disturbed / "saved"):
        new.mkdir(parents=True)
    for split in ("train", "val"):
        shards = sorted((folder / "data").glob(f"*_{split}_*.npy"))
        np.concatenate([np.load(shard) for shard in shards]).astype(np.uint16).tofile(bins / f"{split}.bin")
    (bins / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))
    start = partial(start_nanogpt, args.nanogpt.absolute())
    print(f"nanoGPT, uninterrupted: {args.steps} steps", flush=True)
    live(calm, 1, args.steps, math.inf, start)
    lives = []
    kills = []  # the steps
    corrupt = []  # the steps of the kills that corrupted ckpt.pt
    for kill in killed_lives(disturbed, args, 1, start):
        lives.append(nanogpt_losses(disturbed))
        if kill:
            kills.append(kill.step)
            if not keep_loading(disturbed / "saved" / "ckpt.pt"):
                corrupt.append(kill.step)
                print(
                    "nanoGPT: the kill corrupted ckpt.pt; its copy from before the last start is restored", flush=True
                )
    print(f"nanoGPT: {len(kills)} kills, of which {len(corrupt)} corrupted ckpt.pt")
    [uninterrupted] = nanogpt_losses(calm)[1:]
    return {"uninterrupted": uninterrupted, "lives": lives, "kills": kills, "corrupt": corrupt}


def nanogpt_losses(folder: Path) -> tuple[int, list[float]]:
    """Return the first step of the last life, and the loss of each of its steps."""
    out = (folder / "out.txt").read_text(errors="replace")
    steps = re.findall(r"^iter (\d+): loss ([\d.]+)", out, re.MULTILINE)
    return int(steps[0][0]), [float(loss) for _, loss in steps]


def keep_loading(checkpoint: Path) -> bool:
    """Copy a checkpoint that loads, replace one that does not by its copy, and return whether it loads."""
    copy = checkpoint.with_name("copy.pt")
    try:
        torch.load(checkpoint, weights_only=False)
    except FileNotFoundError:  # killed before the first save
        return True
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        checkpoint.unlink()
        if copy.exists():
            shutil.copy(copy, checkpoint)
        return False
    shutil.copy(checkpoint, copy)
    return True


def draw(measured: dict[str, Any], file: Path, caption: str = "") -> None:
    """Draw the runs over each other, with a mark at each kill, and below them the differences that the kills made."""
    from matplotlib import pyplot

    ours = measured["steadygpt"]
    theirs = measured.get("nanogpt")
    picture.set_style(16)
    heights = [3, 3, 1.7] if theirs else [3, 1.7]
    figure, (top, *middle, below) = pyplot.subplots(
        len(heights), figsize=(10, sum(heights) + 3), layout="constrained", sharex=True, height_ratios=heights
    )
    steps = len(ours["uninterrupted"])
    kills = [Kill(*kill) for kill in ours["kills"]]
    processes = counted(ours["ranks"], "process")
    times = "1 kill" if len(kills) == 1 else f"{len(kills)} kills"
    difference = [one - other for one, other in zip(ours["killed"], ours["uninterrupted"], strict=True)]
    largest = max(map(abs, difference))
    top.set_title(f"SteadyGPT: {times}, difference {largest:.2g} at {'all' if largest == 0 else 'most'} steps")
    top.plot(ours["uninterrupted"], color=picture.PALE, linewidth=7, label=f"uninterrupted, {processes}")
    top.plot(ours["killed"], color=picture.BLUE, linewidth=1.8, label="killed and resumed")
    kill_steps = [kill.step for kill in kills]
    style = {"color": picture.RED, "markersize": 9, "zorder": 3, "label": f"kill -9 ({len(kills)})"}
    top.plot(kill_steps, [ours["killed"][step] for step in kill_steps], "o", **style)
    below.set_title("difference from the uninterrupted run")
    below.plot(difference, color=picture.BLUE, linewidth=4, label="SteadyGPT", zorder=3)
    for axes in middle:
        axes.set_title(f"nanoGPT: {times}; each resume repeats its first batches")
        axes.plot(theirs["uninterrupted"], color=picture.SAND, linewidth=7, label="uninterrupted, 1 process")
        for number, (first, life) in enumerate(theirs["lives"]):
            style = {"color": picture.ORANGE, "linewidth": 1.8}
            own = range(first, first + len(life))
            axes.plot(own, life, **style, label="" if number else "killed and resumed")
            apart = [loss - theirs["uninterrupted"][step] for step, loss in zip(own, life, strict=True)]
            below.plot(own, apart, **style, label="" if number else "nanoGPT")
        ends = [life[-1] for _, life in theirs["lives"]][: len(theirs["kills"])]
        label = f"kill -9 ({len(ends)})"
        axes.plot(theirs["kills"], ends, "o", color=picture.RED, markersize=9, zorder=3, label=label)
    for axes in (top, *middle):
        axes.set(ylabel="training loss")
        axes.legend(fontsize=14, labelspacing=0.3)
    below.set(xlabel="step", xlim=(0, steps))
    below.legend(fontsize=14, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)  # beside the title
    if not caption:
        saves = "both save" if theirs else "saves"
        caption = f"0.84 M parameters, fp32 on a CPU, one thread per process, {saves} after every step,\n"
        caption += " ".join([f"SteadyGPT on {processes}", *measured.get("options", ())])
    if theirs:
        caption += "; nanoGPT logs the loss of its last micro-batch"
    figure.supxlabel(caption, fontsize=14, color=picture.DIM, x=0.01, ha="left")
    picture.save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4), help="processes of SteadyGPT (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, only SteadyGPT is killed")
    parser.add_argument("--data", type=Path, help="file for the losses; a run that it holds is not trained again")
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "steady.svg")
    parser.add_argument("--caption", default="", help="for the plot, if options of train.py are given")
    parser.add_argument("--folder", type=Path, help="folder for the runs, to continue an interrupted call")
    parser.add_argument("--data_dir", type=Path, help="prepared tokens (default: Python's library, as bytes)")
    args, training_options = parser.parse_known_args()
    if args.nanogpt and (args.folder or args.data_dir):
        parser.error("--nanogpt does not go with --folder or --data_dir: its runs are short, on the default tokens")
    RUN.extend(training_options)
    draws = importlib.util.find_spec("matplotlib") is not None
    if not draws:
        print("there will be no picture: matplotlib is missing; pip install matplotlib", flush=True)
    measured = json.loads(args.data.read_text()) if args.data and args.data.exists() else {}
    sides = {"steadygpt": measure_steadygpt}
    if args.nanogpt:
        sides["nanogpt"] = measure_nanogpt
    missing = [name for name in sides if name not in measured]
    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        folder = args.folder.absolute() if args.folder else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "data"
        if missing and args.data_dir:
            data.unlink(missing_ok=True)
            data.symlink_to(args.data_dir.absolute())
        elif missing:
            prepare = ["prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out=data)]
            subprocess.run([sys.executable, *prepare], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        for side in missing:
            measured |= {side: sides[side](folder, args), "options": training_options}
            if args.data:
                args.data.write_text(json.dumps(measured).replace("], ", "],\n") + "\n")
    if draws:
        draw(measured, args.plot, args.caption)


if __name__ == "__main__":
    main()
