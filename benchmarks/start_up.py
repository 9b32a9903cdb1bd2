"""Start-up time: seconds from the command to the end of the first step, new and resumed, and the time of --help.

    python -m benchmarks.start_up [--before CHECKOUT] [--cold] [--rounds 5] [further flags of train.py]

GPT-2 124M, steps of 64 tokens, 2**26 training tokens, all files in the page cache. CHECKOUT is another version of this
repository to compare with. With --cold each start has an empty compile cache.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.compare import REPO, benchmark_parser, flags, in_turn, report

STEP_LINE = re.compile(r"step +\d+/")


def seconds(command: list[str], until: re.Pattern | None = None, cold: bool = False) -> float:
    """Time a command until it prints a line that matches `until`, which ends it, or until it exits."""
    cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    environment = dict(os.environ)
    if cold:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
        cache.cleanup()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--before", type=Path, help="another checkout of SteadyGPT to compare with")
    parser.add_argument("--cold", action="store_true", help="start with an empty compile cache")
    args, further = parser.parse_known_args()
    checkouts = {"now": REPO}
    if args.before:
        checkouts["before"] = args.before
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(0)
        random.integers(0, 50257, 2**26, np.uint16).tofile(folder / "train.bin")

        def train(checkout: Path, name: str, **options) -> list[str]:
            options = {"max_steps": 10**6, **options}
            return [sys.executable, str(checkout / "train.py"), *further, *flags(
                data_dir=folder, checkpoint_dir=folder / name, mini_batch_size=1,
                context_length=64, total_batch_size=64, warmup_steps=10, eval_freq=0, hellaswag_freq=0, sample_freq=0,
                **options,
            )]  # fmt: skip

        sides = {}
        for name, checkout in checkouts.items():
            seconds(train(checkout, f"saved-{name}", max_steps=11))
            (folder / f"saved-{name}" / "latest.pt").read_bytes()  # into the page cache, which the save bypassed
            for measured, command, until in (
                ("--help", [sys.executable, str(checkout / "train.py"), "--help"], None),
                ("first step", train(checkout, f"new-{name}"), STEP_LINE),
                ("first step after --resume", train(checkout, f"saved-{name}", resume="latest"), STEP_LINE),
            ):
                sides[f"{measured}, {name}"] = partial(seconds, command, until, args.cold)
        figures = in_turn(sides, args.rounds, "s")
    now = [side for side in sides if side.endswith(", now")] if args.before else []
    report(figures, "s", args, [(side, side.replace(", now", ", before")) for side in now])


if __name__ == "__main__":
    main()
