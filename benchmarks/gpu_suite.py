"""Every figure that needs a GPU, as one command: tests on the device, speed, memory, a trace.

    python -m benchmarks.gpu_suite --out FOLDER --parts right
    python -m benchmarks.gpu_suite --out FOLDER --parts fast --nanogpt nanoGPT
    python -m benchmarks.gpu_suite --out FOLDER --parts fits trace
    python -m benchmarks.gpu_suite --out FOLDER --quick              # tiny shapes, to try the command on any machine

Each row is a process with a time limit: if it fails, hangs or runs out of memory, the table says why and the other rows
run. A call ends within --minutes, so that it fits into a short loan of a GPU, and the next call runs the rows that have
no result yet. FOLDER/gpu_suite.md is a section for RESULTS.md; FOLDER also has the output of each row. Nothing is
downloaded; tokens are random.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compare import REPO, die_with_parent, exit_on_signals, number_text, reason_of
from benchmarks.train_speed import write_tokens
from steadygpt.base.options import git_commit

PARTS = ("right", "fast", "fits", "trace")
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
LONGEST_KILL_S = 15  # for the driver to release the memory of killed processes

# ---------------------------------------------------------------------------------------------------------------------
# the rows


@dataclass(frozen=True)
class Row:
    """One row of the table: a command of Python. --quick appends the flags of `quick`, and omits a row without them."""

    part: str
    name: str
    limit_s: float
    command: str
    quick: str = ""
    target: str = ""


PYTEST = "-m pytest -v -p no:cacheprovider -n auto --dist worksteal --device {device}"
TRAIN = "-m benchmarks.train_speed --json {json} --rounds 3 --steps 2 --precision bf16"
TINY_TRAIN = "--precision fp32 --eager --rounds 1 --steps 1"
TINY = "--num_layers 2 --num_heads 2 --embd_size 64 --precision fp32 --compile off"
TRACE = (
    "train.py --data_dir {out}/data --tokenizer gpt2 --checkpoint_dir {out}/trace --log_freq 1 "
    "--profile 5 --max_steps 10 --warmup_steps 2 --eval_freq 0 "
    "--hellaswag_freq 0 --sample_freq 0 --checkpoint_freq 0 --mini_batch_size 64 --total_batch_size 131072"
)
PRESETS = sorted(path.stem for path in (REPO / "configs").glob("*.toml"))
# The most important row of a part comes first: a short visit may have no time for the others.
ROWS = [
    Row("right", "model, runs and ranks", 200, f"{PYTEST} tests/machine/test_on_device.py"),
    Row("right", "resumes, bad steps, stops, kills in a save", 200,
        f"{PYTEST} tests/test_resume.py tests/faults/test_divergence.py tests/faults/test_stop.py "
        "tests/faults/test_kill.py -k '(not torchrun and not hanging and not lost) and (each_call or not test_kill)'"),
    Row("fast", "124 M, 64 x 1,024", 180, TRAIN, f"{TINY_TRAIN} --shape tiny",
        "520,000 tokens/s on an H100, 550,000 on an H200; 0.65 of a GEMM"),
    Row("fast", "124 M, 32 x 1,024, beside nanoGPT", 300, f"{TRAIN} --rows 32 {{nanogpt}}", "", "1.2 x nanoGPT"),
    Row("fast", "1.4 B, gpt-neox-1.2b", 200, f"{TRAIN} --config gpt-neox-1.2b --micro_steps 4",
        f"{TINY_TRAIN} --config test --micro_steps 1", "0.50 of a GEMM"),
    Row("fast", "a checkpoint of 124 M", 240,
        "-m benchmarks.checkpoint_cost --json {json} --rows 16 --context 1024 --micro_steps 32 --steps 5",
        "--rows 1 --context 64 --micro_steps 1 --rounds 1 --layers 1 --steps 1", "at most one step per checkpoint"),
    Row("fast", "the loss of 124 M, with several blocks of the kernel", 200,
        "-m benchmarks.loss_speed --json {json} --blocks 2048x4 4096x8 4096x16 8192x16 8192x32",
        "--tokens 64 --width 8 --vocab_size 257 --rounds 1", "5 ms less than operators"),
    Row("fast", "attention and a short convolution, 768 wide", 100, "-m benchmarks.layer_speed --json {json}",
        "--rows 1 --tokens 16 --rounds 1", "half of attention's time"),
    Row("fast", "generation, 124 M", 120,
        "-m benchmarks.generation_speed --json {json} --precision bf16 --rounds 3 {nanogpt}",
        "--precision fp32 --rounds 1 --layers 1 --tokens 4", "4 x nanoGPT"),
    Row("fast", "162 M, modern", 200, f"{TRAIN} --config modern --micro_steps 4"),
    Row("fast", "10 M, 64 x 256", 160, f"{TRAIN} --shape 10m {{nanogpt}}"),
    Row("fast", "152 M, small_32k", 200, f"{TRAIN} --config small_32k --micro_steps 2", "",
        "160,000 tokens/s on an H100"),
    Row("fast", "124 M in bf16 and fp32, with memory", 200, f"{TRAIN} fp32 --rows 32 --micro_steps 4"),
    Row("fast", "760 M, gpt2-1b, with steps an hour", 200, f"{TRAIN} --config gpt2-1b --micro_steps 4"),
    Row("fast", "124 M on 1 to all GPUs", 300,
        "-m benchmarks.scaling --json {json} --rounds 2 --config gpt2 --processes {gpus}",
        "--num_layers 1 --embd_size 64 --num_heads 1 --context_length 64 --mini_batch_size 1 --precision fp32"),
    Row("fast", "start-up of 124 M", 240, "-m benchmarks.start_up --json {json} --rounds 2", f"--rounds 1 {TINY}"),
    Row("fast", "start-up, empty compile cache", 240, "-m benchmarks.start_up --json {json} --rounds 2 --cold"),
    Row("fast", "loader", 90,
        "-m benchmarks.loader_speed --json {json} --rows 32 --rounds 5 --micro_steps 8 {nanogpt}",
        "--rows 2 --context 64 --rounds 1 --micro_steps 1 --seconds 0.1"),
    *[Row("fits", f"{preset}, {rows} rows", 300,
          f"-m benchmarks.memory --json {{json}} --variants as_it_is --config {preset} --rows {rows}",
          "--micro_steps 1" if preset in ("test", "quickstart") else "")
      for preset in PRESETS for rows in ("preset", "auto")],
    Row("trace", "five steps of 124 M", 240, TRACE, f"{TINY} --mini_batch_size 1 --total_batch_size 1024"),
]  # fmt: skip


def run_row(row: Row, args: argparse.Namespace, limit_s: float) -> dict:
    """Run a row in a process of its own; return its figures, or the last line of its output, or why it failed."""
    start_s = time.monotonic()
    log = args.out / f"{row.part}, {row.name}.log"
    with tempfile.TemporaryDirectory(prefix="gpu_suite-", ignore_cleanup_errors=True) as tmp:
        figures_file = Path(tmp, "figures.json")
        figures_file.touch()
        values = {"json": figures_file, "tmp": tmp, "out": args.out, "device": args.device}
        lists = {"{nanogpt}": args.nanogpt, "{gpus}": args.gpus}
        command = f"{row.command} {row.quick}" if args.quick else row.command
        words = []
        for part in shlex.split(command):
            words += [word.format(**values) for word in lists.get(part, [part])]
        # Rows share compiled kernels, although each has a temporary folder of its own.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), "gpu_suite-compile-cache"))}
        with open(log, "w") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", *words], cwd=REPO, env=cache | os.environ | OFFLINE | {"TMPDIR": tmp},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_all(process, f"TMPDIR={tmp}")
        figures = json.loads(figures_file.read_text() or "{}")
    reason = reason_of(log.read_text(errors="replace")).strip("= ")
    if status == 0:
        text = "; ".join(f"{name} {figure_text(figure)}" for name, figure in figures.items()) or reason
    elif status is None:
        text = f"failed: did not end in {limit_s:.0f} s; {reason}"
    elif status < 0:
        text = f"failed: killed by {signal.Signals(-status).name}; {reason}"
    else:
        text = f"failed: {reason}"
    return {"ok": status == 0, "text": text, "figures": figures, "seconds": round(time.monotonic() - start_s)}


def figure_text(figure: dict) -> str:
    text = f"{number_text(figure['median'])} {figure['unit']}".rstrip()
    if figure["low"] != figure["high"]:
        text += f" ({number_text(figure['low'])} to {number_text(figure['high'])})"
    return text


def kill_all(process: subprocess.Popen, mark: str) -> None:
    """Kill the row's process group and, on Linux, all processes with its environment; wait until they are gone.

    Until then they hold GPU memory, which the next row needs.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline_s = time.monotonic() + LONGEST_KILL_S
    some_left = True
    while some_left and time.monotonic() < deadline_s:
        some_left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark.encode() in path.read_bytes().split(b"\0"):
                    some_left = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.1 if some_left else 0)


# ---------------------------------------------------------------------------------------------------------------------
# the report


def machine(device: str) -> str:
    """Describe device, driver and software. Only nvidia-smi is asked: this process must not hold GPU memory."""
    devices = ["CPU"]
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        devices = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return f"{len(devices)} x {devices[0]}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def markdown(content: dict) -> str:
    """Return the section for RESULTS.md."""
    title = f"### {content['machine']}"
    if content["quick"]:
        title += " (tiny shapes, no figures to publish)"
    lines = [
        title,
        "",
        "A figure is the median of the rounds, with the smallest and the largest in parentheses.",
        "",
        "| part | row | result | target | s | commit and date |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"].values():
        cells = [row[key] for key in ("part", "name", "text", "target", "seconds", "measured")]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_suite.md, the logs and the trace")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="default: all")
    parser.add_argument("--minutes", type=float, default=8.0, help="for this call (default: 8)")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: tries this command, measures nothing")
    args = parser.parse_args(argv)
    args.nanogpt = ["--nanogpt", str(args.nanogpt.absolute())] if args.nanogpt else []
    args.out = args.out.absolute()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.gpus = [str(2**i) for i in range(max(1, torch.cuda.device_count()).bit_length())]
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    write_tokens(args.out / "data", 50304)
    record = args.out / "gpu_suite.json"
    content = {"machine": machine(args.device), "quick": args.quick, "rows": {}}
    if record.exists():
        earlier = json.loads(record.read_text())
        for key in ("machine", "quick"):
            if earlier[key] != content[key]:
                sys.exit(f"error: {record} has figures with {key} {earlier[key]}. Try another --out")
        content = earlier
    deadline_s = time.monotonic() + 60 * args.minutes
    chosen = [row for row in ROWS if row.part in args.parts and (row.quick or not args.quick)]
    with exit_on_signals():
        for number, row in enumerate(chosen, start=1):
            key = f"{row.part}, {row.name}"
            left_s = deadline_s - time.monotonic()
            if content["rows"].get(key, {}).get("ok"):
                continue
            print(f"[{number}/{len(chosen)}] {key}: ", end="", flush=True)
            if left_s < row.limit_s / 2:
                result = content["rows"].get(key) or {"ok": False, "text": "no time left", "seconds": 0}
            else:
                result = run_row(row, args, min(row.limit_s, left_s))
            print(f"{result['text']}; {deadline_s - time.monotonic():.0f} s left", flush=True)
            measured = f"{git_commit()[:7] or 'unknown'}, {time.strftime('%Y-%m-%d')}"
            header = {"part": row.part, "name": row.name, "target": row.target, "measured": measured}
            content["rows"][key] = header | result
            record.write_text(json.dumps(content, indent=1))
            (args.out / "gpu_suite.md").write_text(markdown(content))
    print(args.out / "gpu_suite.md")


if __name__ == "__main__":
    main()
