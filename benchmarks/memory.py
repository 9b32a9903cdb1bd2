"""Peak memory of training beside the plan's estimate: plain, loss in chunks, recomputed blocks, DDP, FSDP.

    python -m benchmarks.memory --ranks 1 2 --sharding ddp fsdp --precisions fp32 bf16     # any CPU, 15 minutes
    python -m benchmarks.memory --config small_32k --variants as_it_is                     # a preset with its options
    python -m benchmarks.memory --config small_32k --variants as_it_is --rows auto         # the largest micro-step
    python -m benchmarks.memory --variants plain both --compile on                         # further flags of train.py

Each figure is one start of train.py that makes two steps on random tokens. (One step is not enough: Adam creates its
moments at its end.) On CUDA the figure is PyTorch's peak allocation. On a CPU it is the largest resident set of rank 0,
minus that of a model of negligible size started in the same way. Freed memory returns to the system here, so that the
figure is what is in use; --keep_freed measures a real run, which keeps it (device.keep_freed_memory).
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

import torch

import train
from benchmarks.compare import REPO, flags, summary, write_json
from benchmarks.train_speed import write_tokens
from model import GPTConfig
from steadygpt.base.options import run_cli
from steadygpt.config import parse_args
from steadygpt.machine import ranks as machine

SMALL = flags(num_layers=4, num_heads=8, embd_size=512, context_length=520, mini_batch_size=2)
NOTHING = flags(num_layers=1, num_heads=1, embd_size=2, context_length=32)
QUIET = flags(max_steps=2, warmup_steps=1, log_freq=1, eval_freq=0, hellaswag_freq=0, sample_freq=0)
PLACES = flags(data_dir="data", checkpoint_dir="c", checkpoint_freq=0, checkpoint_minutes=0)
VARIANTS = {
    "plain": flags(loss_chunk_size=0, activation_checkpointing="off"),
    "chunked": flags(loss_chunk_size=256, activation_checkpointing="off"),
    "both": flags(loss_chunk_size=256, activation_checkpointing="on"),
    "as_it_is": [],
}
UNITS = {"kB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3}  # in GB
COLUMNS = ("ranks", "sharding", "precision", "variant", "rows", "peak GB", "plan GB", "plan / peak", "s a step")


def train_once(folder: Path, options: list[str], ranks: int, keep_freed: bool) -> tuple[float, float, float, str]:
    """Plan, then train; return rank 0's peak memory and the plan's estimate in GB, the seconds of a step, its rows."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    script = [str(REPO / "train.py")] if keep_freed else [str(REPO / "benchmarks/memory.py"), "train"]
    command = [sys.executable, *torchrun, *script, *QUIET, *options, *PLACES]
    glibc = {} if keep_freed else dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    shutil.rmtree(folder / "c", ignore_errors=True)  # left by the previous run
    environment = os.environ | glibc | {"PYTHONPATH": str(REPO)}

    def output_of(*further: str) -> str:
        done = subprocess.run([*command, *further], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-1000:]}")
        return done.stdout

    plan = output_of("--dry_run")
    output_of()
    records = [json.loads(line) for line in (folder / "c" / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "memory_gb" in record][-1]  # others are of the machine
    number, unit = re.search(r"^memory +about ([\d,.]+) (kB|MB|GB|TB)", plan, re.MULTILINE).groups()
    rows = re.search(r"tokens \(([\d,]+) rows? x", plan)[1]
    return last["memory_gb"], float(number.replace(",", "")) * UNITS[unit], last["step_ms"] / 1000, rows


def train_rank() -> int:
    """Run train.py, with freed memory returned to the system."""
    machine.keep_freed_memory = lambda: None
    return train.main(sys.argv[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="", help="preset to measure (default: 4 layers, 512 wide, 520 tokens)")
    parser.add_argument("--variants", nargs="+", default=["plain", "chunked", "both"], choices=VARIANTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--sharding", nargs="+", default=["ddp"], choices=("ddp", "fsdp"))
    parser.add_argument("--precisions", nargs="+", default=["auto"])
    parser.add_argument("--rows", default="preset", help="of a micro-step: a number, auto, or preset (default)")
    parser.add_argument("--micro_steps", type=int, default=2, help="of a step, unless rows are auto (default: 2)")
    parser.add_argument("--keep_freed", action="store_true", help="keep freed memory, as a real run does")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    args, further = parser.parse_known_args()
    shape = ["--config", args.config] if args.config else SMALL
    preset, _ = parse_args([*shape, *further])
    byte_level = "stdlib" in preset.data_dir
    further += flags(tokenizer="bytes" if byte_level else "gpt2")
    rows = preset.mini_batch_size if args.rows == "preset" else args.rows
    if rows == "auto":
        micro_step, micro_steps = preset.mini_batch_size, 16
    else:
        micro_step, micro_steps = int(rows), args.micro_steps
    summaries = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        write_tokens(folder / "data", 320 if byte_level else GPTConfig.vocab_size)
        print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
        for ranks, sharding in product(args.ranks, args.sharding):
            step = ranks * micro_step * micro_steps
            common = [*further, *flags(sharding=sharding)]
            nothing = 0.0
            if not torch.cuda.is_available():
                small = flags(total_batch_size=32 * step, mini_batch_size=micro_step)
                nothing, *_ = train_once(folder, [*common, *NOTHING, *small], ranks, args.keep_freed)
            for precision, variant in product(args.precisions, args.variants):
                tokens = preset.context_length * step
                options = [*shape, *common, *flags(mini_batch_size=rows, total_batch_size=tokens, precision=precision)]
                options += VARIANTS[variant]
                peak, plan, seconds, used_rows = train_once(folder, options, ranks, args.keep_freed)
                peak -= nothing
                setting = (ranks, sharding, precision, variant, used_rows)
                cells = (*setting, f"{peak:.2f}", f"{plan:.2f}", f"{plan / peak:.2f}")
                print(f"| {' | '.join(map(str, cells))} | {seconds:.1f} |", flush=True)
                name_of_setting = " ".join(map(str, setting)) + " rows"
                summaries[f"{name_of_setting}: peak"] = summary([peak], "GB")
                summaries[f"{name_of_setting}: plan"] = summary([plan], "GB")
    write_json(args.json, summaries)


if __name__ == "__main__":
    run_cli(train_rank) if sys.argv[1:2] == ["train"] else main()
