"""Whole runs of train.py on random tokens: peak memory, cost of a checkpoint, start-up, trace of some steps.

    python -m benchmarks.runs memory --config small_32k                # beside the plan's estimate
    python -m benchmarks.runs memory --config small_32k --rows auto    # with the largest micro-step that fits
    python -m benchmarks.runs checkpoint                               # in steps of GPT-2 124M
    python -m benchmarks.runs start_up                                 # with a cold and a warm compile cache
    python -m benchmarks.runs trace --out FOLDER                       # trace.json.gz and its summary

benchmarks.gpu_suite calls these commands. Further flags are passed to train.py and override those chosen here.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import train
from benchmarks.compare import REPO, figure, flags, write_json
from benchmarks.start_up import STEP_LINE, seconds
from benchmarks.trace_summary import summarize
from benchmarks.train_speed import write_tokens
from config import parse_args
from steadygpt.cli import run_cli

ROWS = {"cpu": 1, "cuda": 64}  # of 1,024 tokens, for the commands that train GPT-2 124M
MICRO_STEPS = 8
QUIET = flags(
    data_dir="data", checkpoint_dir="c", logdir="l", tensorboard_dir="t", eval_freq=0, hellaswag_freq=0,
    sample_freq=0, checkpoint_freq=0, checkpoint_minutes=0, log_freq=1,
)  # fmt: skip
LARGEST_TRACE = 16e6  # bytes; a larger one is slow to copy and to open


def run_here(options: list[str]) -> list[dict]:
    """Train in this process and the current folder; return the lines of metrics.jsonl."""
    if status := train.main([*QUIET, *options]):
        sys.exit(f"error: train.py ended with status {status}; see above")
    return [json.loads(line) for line in Path("l/metrics.jsonl").read_text().splitlines()]


def make_data(options: list[str]) -> None:
    """Write random tokens to data/ in the current folder: of GPT-2's vocabulary, or bytes if the options say so."""
    byte_level = "--tokenizer=bytes" in options
    Path("data").mkdir()
    write_tokens(Path("data"), 320 if byte_level else 50304)
    if not byte_level:
        options.append("--tokenizer=gpt2")


# ---------------------------------------------------------------------------------------------------------------------
# commands: each runs in an empty folder, and returns figures, notes and a text for write_json


def memory(args, device: str, further: list[str]):
    """Take three steps of two micro-steps, and return the peak memory beside the plan's estimate."""
    preset = parse_args([f"--config={args.config}", *further])[0]
    micro_step = preset.mini_batch_size * preset.context_length
    auto = args.rows == "auto"
    options = flags(
        config=args.config, max_steps=3, warmup_steps=1, mini_batch_size=args.rows or preset.mini_batch_size,
        total_batch_size=micro_step * (16 if auto else 2),
    )  # fmt: skip
    options += [*further, *flags(tokenizer="bytes" if "stdlib" in preset.data_dir else "gpt2")]
    make_data(options)
    records, log = run_here(options), Path("l/log.txt").read_text()
    found = {
        "peak": figure([records[-1]["memory_gb"]], "GB at the peak"),
        "reserved": figure([torch.cuda.max_memory_reserved() / 1e9], "GB reserved") if device == "cuda" else None,
        "plan": figure([float(re.search(r"^memory +about ([\d.]+) GB", log, re.MULTILINE)[1])], "GB by the plan"),
    }
    steps = re.search(r"tokens = ([\d,]+ rows x [\d,]+ tokens) .* x (\d+) micro-steps?;", log)
    notes = [f"{steps[1]} x {steps[2]} micro-step{'s' * (steps[2] != '1')}"]
    if device == "cpu":
        notes.append("the peak is the resident set, with Python and torch")
    return found, notes, ""


def checkpoint(args, device: str, further: list[str]):
    """Return the extra time of the steps after a save, beside as many steps before it, in one run."""
    every, window = 12, 6
    saves = range(every, every * args.rounds + 1, every)
    options = flags(max_steps=saves[-1] + window, checkpoint_freq=every, keep_checkpoints=1)
    options += [*flags_of_124m(device), *further]
    make_data(options)
    ended_s = {record["step"]: record["time"] for record in run_here(options)}  # a save comes after step `save - 1`
    step_s = [(ended_s[save - 1] - ended_s[save - 1 - window]) / window for save in saves]
    extra_s = [
        ended_s[save - 1 + window] - ended_s[save - 1] - window * step for save, step in zip(saves, step_s, strict=True)
    ]
    return (
        {
            "cost": figure([extra / step for extra, step in zip(extra_s, step_s, strict=True)], "steps a checkpoint"),
            "extra time": figure(extra_s, "s"),
            "step": figure(step_s, "s a step"),
        },
        [f"{Path('c/latest.pt').stat().st_size / 1e9:.2f} GB; {window} steps after each save, {window} before"],
        "",
    )


def start_up(args, device: str, further: list[str]):
    """Return the seconds from the command to the line of the first step, with a new and with a filled compile cache."""
    batch = flags_of_124m(device, rows=8 if device == "cuda" else 1, micro_steps=1)
    options = [*flags(max_steps=100), *batch, *further]
    make_data(options)
    cold, warm = [], []
    for number in range(args.rounds):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(f"cache{number}").absolute())
        for times in (cold, warm):
            command = [sys.executable, str(REPO / "train.py"), *QUIET, *options]
            times.append(seconds(command, STEP_LINE))
            print(f"first step after {times[-1]:.1f} s", flush=True)
    return {"cold": figure(cold, "s, cold cache"), "warm": figure(warm, "s, warm cache")}, [], ""


def trace(args, device: str, further: list[str]):
    """Record five steps of two micro-steps; leave the trace and its summary in --out."""
    options = [*flags(max_steps=10, profile=5, run_name="trace"), *flags_of_124m(device, micro_steps=2), *further]
    make_data(options)
    run_here(options)
    (recorded,) = Path("t").glob("*/rank0.pt.trace.json.gz")
    kept = args.out / "trace.json.gz"
    shutil.copy(recorded, kept)
    found, text = summarize(kept)
    (args.out / "trace.txt").write_text(text)
    print(text)
    notes, size = [f"{kept.name}, {kept.stat().st_size / 1e6:.1f} MB"], kept.stat().st_size
    if size > LARGEST_TRACE:
        notes.append(f"warning: larger than {LARGEST_TRACE / 1e6:.0f} MB")
    return {name: figure([value], unit) for name, (value, unit) in found.items()}, notes, text


def flags_of_124m(device: str, rows: int | None = None, micro_steps: int = MICRO_STEPS) -> list[str]:
    """Return the flags of a step of GPT-2 124M."""
    rows = rows or ROWS[device]
    return flags(mini_batch_size=rows, total_batch_size=rows * 1024 * micro_steps)


def main() -> int:
    commands = {command.__name__: command for command in (memory, checkpoint, start_up, trace)}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=commands)
    parser.add_argument("--config", default="gpt2", help="memory: a preset of configs/")
    parser.add_argument("--rows", help="memory: rows in a micro-step, or auto (default: the preset's)")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoint and start_up")
    parser.add_argument("--out", type=Path, default=Path(), help="trace: folder for the trace and its summary")
    parser.add_argument("--json", type=Path, help="file for the result")
    args, further = parser.parse_known_args()
    args.out, args.json = args.out.absolute(), args.json and args.json.absolute()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found, notes, text = commands[args.what](args, device, further)
        os.chdir(args.out)  # the temporary folder must not be the current one when it is removed
    for name, measured in found.items():
        if measured:
            print(f"{name}: {measured['median']:.4g} {measured['unit']}")
    print(*notes, sep="\n")
    write_json(args.json, found, notes, text)
    return 0


if __name__ == "__main__":
    run_cli(main)
