"""Start-up time: seconds from the command to the end of the first step, new and resumed, and the time of --help.

    python -m benchmarks.start_up [--before CHECKOUT] [--rounds 5]

GPT-2 124M, steps of 64 tokens, 2**26 training tokens, all files in the page cache. CHECKOUT is another version of this
repository to compare with.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.compare import REPO, in_turn, report

STEP_LINE = re.compile(r"step +\d+/")


def seconds(command: list[str], until: re.Pattern | None = None) -> float:
    """Time a command until it prints a line that matches `until`, which ends it, or until it exits."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if until and until.match(line):
                return time.perf_counter() - start
        if until or process.wait():
            sys.exit(f"{' '.join(command)} ended:\n{''.join(output[-20:])}")
        return time.perf_counter() - start
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout of SteadyGPT to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    args, further = parser.parse_known_args()
    checkouts = {"now": REPO} | ({"before": args.before} if args.before else {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(0)
        random.integers(0, 50257, 2**26, np.uint16).tofile(folder / "train.bin")

        def train(checkout: Path, checkpoints: str, **options) -> list[str]:
            options = {
                "data_dir": folder, "checkpoint_dir": folder / checkpoints, "logdir": folder / "logs",
                "mini_batch_size": 1, "context_length": 64, "total_batch_size": 64, "warmup_steps": 10,
                "eval_freq": 0, "hellaswag_freq": 0, "sample_freq": 0, **options,
            }  # fmt: skip
            return [sys.executable, checkout / "train.py", *(f"--{n}={v}" for n, v in options.items()), *further]

        seconds(train(REPO, "saved", max_steps=11))
        (folder / "saved" / "latest.pt").read_bytes()  # into the page cache, which the save bypassed
        resumed = {"resume": "latest", "max_steps": 10**6}
        for what, command, until in (
            ("--help", lambda checkout: [sys.executable, checkout / "train.py", "--help"], None),
            ("first step", lambda checkout: train(checkout, "new", max_steps=10**6), STEP_LINE),
            ("first step after --resume", lambda checkout: train(checkout, "saved", **resumed), STEP_LINE),
        ):
            print(f"{what}:")
            sides = {
                name: lambda path=path, command=command, until=until: seconds([*map(str, command(path))], until)
                for name, path in checkouts.items()
            }
            report(in_turn(sides, args.rounds, "s"), "s")


if __name__ == "__main__":
    main()
