"""Cost of logging: the share of training time spent in RunLog, with TensorBoard and a line every step.

    python -m benchmarks.logging_cost [--rounds 5] [further flags of train.py]

Trains the quickstart model on random tokens, once a round, with histograms every 250 steps (the default).
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import train
from steadygpt.runlog import RunLog
from steadygpt.shards import write_shard

STEPS = 250


def timed(method, spent: list[float]):
    """Wrap a method so that each call adds its seconds to `spent`."""

    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - start)

    return call


def share_of_logging(folder: Path, flags: list[str]) -> float:
    """Train once; return the seconds in RunLog / the seconds from the second step to the end."""
    spent: list[float] = []
    originals = {name: getattr(RunLog, name) for name in ("record", "histograms", "flush", "text")}
    for name, method in originals.items():
        setattr(RunLog, name, timed(method, spent))
    begun = []

    def note_begin(*args, **kwargs):
        begun.append(time.perf_counter())
        return original_step(*args, **kwargs)

    original_step, train.train_step = train.train_step, note_begin
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main([
                "--config", "quickstart", "--checkpoint_dir", str(folder / "c"),
                "--logdir", str(folder / "l"), "--tensorboard_dir", str(folder / "r"), "--max_steps", str(STEPS),
                "--warmup_steps", "10", "--log_freq", "1", "--eval_freq", "250", "--eval_tokens", "1024",
                "--sample_freq", "0", "--checkpoint_freq", "0", *flags,
            ])  # fmt: skip
    finally:
        train.train_step = original_step
        for name, method in originals.items():
            setattr(RunLog, name, method)
    return sum(spent) / (time.perf_counter() - begun[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args, flags = parser.parse_known_args()
    shares = []
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        data.mkdir()
        for split in ("train", "val"):
            write_shard(
                data / f"random_{split}_000000.npy", np.random.default_rng(0).integers(0, 256, 10**6, np.uint16)
            )
        for number in range(args.rounds):
            shares.append(
                share_of_logging(
                    Path(temporary) / str(number), ["--data_dir", str(data), "--tokenizer", "bytes", *flags]
                )
            )
            print(f"round {number + 1} of {args.rounds}: {shares[-1]:.2%} of the time in RunLog", flush=True)
    print(f"median {statistics.median(shares):.2%} (from {min(shares):.2%} to {max(shares):.2%})")


if __name__ == "__main__":
    main()
