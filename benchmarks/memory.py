"""Peak memory of training: plain, with the loss in chunks, and with activation checkpointing as well.

    python -m benchmarks.memory                                  # 8,192 tokens of context, 16 M parameters: any CPU
    python -m benchmarks.memory --config small_32k               # a whole preset: a CUDA GPU, or a CPU and time
    python -m benchmarks.memory --config small_32k --variants both --max_steps 1 --warmup_steps 0

Each figure is one process of train.py that makes two steps of one row of random GPT-2 tokens. (One step is not enough:
Adam creates its moments at its end.) On CUDA the figure is PyTorch's peak allocation. On a CPU it is the largest
resident set, minus that of a model of negligible size.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import REPO, flags
from config import parse_args

SMALL = flags(num_layers=4, num_heads=4, embd_size=256, context_length=8192, rotary_pct=1)
NOTHING = flags(num_layers=1, num_heads=1, embd_size=2, context_length=32, total_batch_size=32)
QUIET = flags(mini_batch_size=1, max_steps=2, warmup_steps=1, eval_freq=0, hellaswag_freq=0, sample_freq=0)
PLACES = flags(data_dir="data", checkpoint_dir="c", logdir="l", checkpoint_freq=0)
VARIANTS = {
    "plain": flags(loss_chunk_size=0, activation_checkpointing="off"),
    "chunked": flags(loss_chunk_size=1024, activation_checkpointing="off"),
    "both": flags(loss_chunk_size=1024, activation_checkpointing="on"),
}


def peak_gb(folder: Path, options: list[str]) -> tuple[float, float, float]:
    """Train; return the peak memory in GB, the seconds of the last step and the plan's estimate in GB."""
    command = [sys.executable, str(REPO / "train.py"), *QUIET, *options, *PLACES]
    for left in ("c", "l"):
        shutil.rmtree(folder / left, ignore_errors=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-1000:]}")
    records = [json.loads(line) for line in (folder / "l" / "metrics.jsonl").read_text().splitlines()]
    estimate = float(re.search(r"memory +about ([\d.]+) GB", done.stdout)[1])
    return records[-1]["memory_gb"], records[-1]["step_ms"] / 1000, estimate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="", help="preset to measure (default: 4 layers, 256 wide, 8,192 tokens)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="default: all")
    args, further = parser.parse_known_args()
    shape = ["--config", args.config] if args.config else SMALL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        tokens = np.random.default_rng(0).integers(0, 50257, 200_000).astype(np.uint16)
        for split, number in (("val", 0), ("train", 1)):
            np.save(folder / "data" / f"random_{split}_{number:06d}.npy", tokens)
        context = parse_args([*shape, *further])[0].context_length
        nothing, _, _ = peak_gb(folder, [*further, *NOTHING])
        print(f"{'variant':<10} {'peak GB':>8} {'plan says':>10} {'s a step':>9}")
        for variant in args.variants:
            options = [*shape, *flags(total_batch_size=context), *VARIANTS[variant], *further]
            peak, seconds, estimate = peak_gb(folder, options)
            print(f"{variant:<10} {peak - nothing:>8.2f} {estimate:>10.2f} {seconds:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
