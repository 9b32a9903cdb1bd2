"""Time and memory that the logs and the folder of a month-long run cost: a resume, the monitor, the list.

    python -m benchmarks.long_logs [--lines 1_000_000] [--files 2001]

metrics.jsonl and log.txt have a line for each step, and the resume repeats the last 200 steps. The checkpoints are
copies of one of a tiny model. Each figure is of a separate process, with the files in the page cache: its seconds and
its largest resident set, of the resume without the imports.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import REPO, flags

REPEATED = 200  # steps
TINY = flags(num_layers=2, num_heads=2, embd_size=16, context_length=16, total_batch_size=64, mini_batch_size=2)
TINY += flags(
    max_steps=2, warmup_steps=1, eval_freq=0, hellaswag_freq=0, sample_freq=0, device="cpu", tokenizer="bytes"
)
RESUME = """
import resource, sys, time
from pathlib import Path
from steadygpt.log.metrics import LineFile
from steadygpt.run.repeats import repeated_records
logs, step = Path(sys.argv[1]), int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start_s = time.perf_counter()
records, reason = repeated_records(logs / "metrics.jsonl", step, "1f")
for name in ("metrics.jsonl", "log.txt"):
    LineFile(logs / name).close()
took_s = time.perf_counter() - start_s
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert not reason
print(f"{took_s:.2f} s, {kilobytes / 1000:,.0f} MB: repeated_records() and opening the logs, {len(records)} steps")
"""
# In a small process of its own, because the largest resident set of a process is at least that of its parent.
MEASURE = """
import resource, subprocess, sys, time
start_s = time.perf_counter()
status = subprocess.run(sys.argv[1:]).returncode
took_s, kilobytes = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(f"{took_s:.2f} s, {kilobytes / 1000:,.0f} MB", file=sys.stderr)
sys.exit(status)
"""


def write_logs(folder: Path, lines: int) -> None:
    """Write metrics.jsonl and log.txt of a run in one start, with an evaluation every 1,000 steps."""
    losses = 3 + 8 * np.exp(np.arange(lines) / -5e4) + np.random.default_rng(0).normal(0, 0.05, lines)
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "log.txt", "w") as log:
        ids = {"run": "long", "id": "1f", "parent": "", "how": {}, "wandb": ""}
        start = {"step": 0, "time": 1796400000.0, "start": 0, **ids}
        print(json.dumps(start), file=metrics)
        print("run          long", file=log)
        for step, loss in enumerate(losses.tolist()):
            time_s, epoch = round(1796400000 + 2.592 * step + loss, 3), step / 19000.7
            scores = {"val_loss": loss, "val_bpb": loss / 3.1} if step % 1000 == 0 else {}
            numbers = {
                "loss": loss, "lr": 6e-4 / (1 + epoch), "grad_norm": loss / 7, "loss_z": loss / 9,
                "step_ms": 435.2 + loss, "steps_per_second": 2.3 + loss / 99, "tokens_per_second": 1204000.3 + loss,
                "mfu": 0.5 + loss / 999, "cost": step / 777, "memory_gb": 61.2345, "epoch": epoch,
            }  # fmt: skip
            for found in (scores, numbers):
                if found:
                    print(json.dumps({"step": step, "time": time_s, **found}), file=metrics)
            place = f"step {step:>7}/{lines} | loss {loss:.4f} | lr {numbers['lr']:.2e} | grad norm 0.43 | 435 ms"
            print(f"{place} | 1,204,000 tok/s | mfu 52.0% | cost 24.10 | {step / lines:.1%} | ETA 2 d 03 h", file=log)


def measured(command: list[str], what: str, statuses=(0,)) -> None:
    """Run a command, and print its seconds and its largest resident set."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], cwd=REPO, capture_output=True, text=True)
    if done.returncode not in statuses:
        sys.exit(f"{what} exits with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    print(f"{done.stderr.splitlines()[-1]}: {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000, help="steps in the logs (default: 1,000,000)")
    parser.add_argument("--files", type=int, default=2001, help="checkpoints in the folder (default: 2,001)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, python = Path(temporary), sys.executable
        np.random.default_rng(0).integers(0, 257, 10_000, np.uint16).tofile(folder / "train.bin")
        places = flags(data_dir=folder, checkpoint_dir=folder / "run", logdir=folder / "logs", run_name="long")
        subprocess.run([python, "train.py", *TINY, *places], cwd=REPO, check=True, stdout=subprocess.DEVNULL)
        write_logs(folder / "logs", args.lines)
        size = sum(path.stat().st_size for path in (folder / "logs").iterdir())
        print(f"{args.lines:,} steps in {size / 1e6:,.0f} MB of logs, {args.files:,} checkpoints", flush=True)
        once = [python, "scripts/monitor_training.py", str(folder / "run"), "--once"]
        measured(once, "monitor_training.py --once", statuses=(0, 1))
        resume = [python, "-c", RESUME, str(folder / "logs"), str(args.lines - REPEATED)]
        subprocess.run([python, "-c", MEASURE, *resume], cwd=REPO, check=True, stderr=subprocess.DEVNULL)
        content = (folder / "run/latest.pt").read_bytes()
        for path in (folder / "run").glob("*.pt"):
            path.unlink()
        for number in range(args.files):
            (folder / "run" / f"rolling_step_{number:06d}.pt").write_bytes(content)
        listing = [python, "train.py", "--list_checkpoints", "--checkpoint_dir", str(folder / "run")]
        measured(listing, "--list_checkpoints")
        measured([*listing, "-v"], "--list_checkpoints -v")


if __name__ == "__main__":
    main()
