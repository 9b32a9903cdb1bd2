"""Peak memory of training beside the plan's estimate: plain, loss in chunks, recomputed blocks, DDP, FSDP, offload.

    python -m benchmarks.memory --ranks 1 2 --sharding ddp fsdp --precisions fp32 bf16     # any CPU, 15 minutes
    python -m benchmarks.memory --config small_32k --variants both --rows 1                # a whole preset
    python -m benchmarks.memory --variants plain both --compile on                         # further flags of train.py

Each figure is one start of train.py that makes two steps on random GPT-2 tokens. (One step is not enough: Adam creates
its moments at its end.) On CUDA the figure is PyTorch's peak allocation. On a CPU it is the largest resident set of
rank 0, minus that of a model of negligible size started in the same way. Freed memory returns to the system here, so
that the figure is what is in use; --keep_freed measures a real run, which keeps it (device.keep_freed_memory).
--cpu_offload on a CPU keeps everything in the same memory, so there the plan's figure is the sum of its two lines,
without the copy for checkpoints.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

import train
from benchmarks.compare import REPO, flags
from config import parse_args
from steadygpt import distributed
from steadygpt.cli import run_cli

SMALL = flags(num_layers=4, num_heads=8, embd_size=512, context_length=520)
NOTHING = flags(num_layers=1, num_heads=1, embd_size=2, context_length=32)
QUIET = flags(max_steps=2, warmup_steps=1, eval_freq=0, hellaswag_freq=0, sample_freq=0)
PLACES = flags(data_dir="data", checkpoint_dir="c", logdir="l", checkpoint_freq=0, checkpoint_minutes=0)
VARIANTS = {
    "plain": flags(loss_chunk_size=0, activation_checkpointing="off"),
    "chunked": flags(loss_chunk_size=256, activation_checkpointing="off"),
    "both": flags(loss_chunk_size=256, activation_checkpointing="on"),
    "offload": flags(loss_chunk_size=256, activation_checkpointing="on", cpu_offload="on"),
}


def peak_gb(folder: Path, options: list[str], ranks: int, keep_freed: bool) -> tuple[float, float, float]:
    """Train; return rank 0's peak memory in GB, the seconds of the last step and the plan's estimate in GB."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    script = [str(REPO / "train.py")] if keep_freed else [str(REPO / "benchmarks/memory.py"), "train"]
    command = [sys.executable, *torchrun, *script, *QUIET, *options, *PLACES]
    glibc = {} if keep_freed else dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    env = os.environ | glibc | {"PYTHONPATH": str(REPO)}
    for left in ("c", "l"):
        shutil.rmtree(folder / left, ignore_errors=True)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-1000:]}")
    records = [json.loads(line) for line in (folder / "l" / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "memory_gb" in record]  # of steps, not of the machine
    estimate = float(re.search(r"^memory +about ([\d.]+) GB", done.stdout, re.MULTILINE)[1])
    in_host = re.search(r"^host memory .* gradients and optimizer ([\d.]+)", done.stdout, re.MULTILINE)
    return records[-1]["memory_gb"], records[-1]["step_ms"] / 1000, estimate + (float(in_host[1]) if in_host else 0)


def train_rank() -> int:
    """Run train.py, with freed memory returned to the system."""
    distributed.keep_freed_memory = lambda: None
    return train.main(sys.argv[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="", help="preset to measure (default: 4 layers, 512 wide, 520 tokens)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--sharding", nargs="+", default=["ddp"], choices=("ddp", "fsdp"))
    parser.add_argument("--precisions", nargs="+", default=["auto"])
    parser.add_argument("--rows", type=int, default=2, help="of a micro-step (default: 2)")
    parser.add_argument("--micro_steps", type=int, default=2, help="of a step (default: 2)")
    parser.add_argument("--keep_freed", action="store_true", help="keep freed memory, as a real run does")
    args, further = parser.parse_known_args()
    shape = ["--config", args.config] if args.config else SMALL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        tokens = np.random.default_rng(0).integers(0, 50257, 200_000).astype(np.uint16)
        for split, number in (("val", 0), ("train", 1)):
            np.save(folder / "data" / f"random_{split}_{number:06d}.npy", tokens)
        context = parse_args([*shape, *further])[0].context_length
        print("| ranks | sharding | precision | variant | peak GB | plan GB | plan / peak | s a step |")
        print("|---|---|---|---|---|---|---|---|")
        for ranks, sharding in product(args.ranks, args.sharding):
            rows = ranks * args.rows * args.micro_steps
            common = [*further, *flags(sharding=sharding, mini_batch_size=args.rows)]
            nothing, _, _ = peak_gb(
                folder, [*common, *NOTHING, *flags(total_batch_size=32 * rows)], ranks, args.keep_freed
            )
            for precision, variant in product(args.precisions, args.variants):
                if variant == "offload" and sharding != "fsdp":
                    continue
                options = [*shape, *common, *flags(total_batch_size=context * rows, precision=precision)]
                options += VARIANTS[variant]
                peak, seconds, plan = peak_gb(folder, options, ranks, args.keep_freed)
                peak -= nothing
                print(
                    f"| {ranks} | {sharding} | {precision} | {variant} | {peak:.2f} | {plan:.2f} | {plan / peak:.2f} | "
                    f"{seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    run_cli(train_rank) if sys.argv[1:2] == ["train"] else main()
