"""What costs more as a run grows: counts, bytes and processor time at two sizes, ten times apart.

    python -m benchmarks.growth                  # a row for each cost, in ten minutes
    python -m benchmarks.growth --only ranks     # collectives, and the bytes that a rank receives

Counts of calls and bytes mean the same on any machine; processor time is given as a ratio. Each row runs in a process
of its own. Thousands of ranks are one process that stands for rank 0: its collectives are counted, and the other ranks
say what it says.
"""

import argparse
import io
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import look
import prepare_dataset
import replay
import train
from benchmarks.compare import REPO, flags, number_text
from benchmarks.long_logs import write_logs
from dataloader import RowStream
from steadygpt.base.text import bytes_text
from steadygpt.checkpoint import files, saves
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.config import TrainConfig
from steadygpt.data.shards import ShardSet, write_shard
from steadygpt.machine import device, ranks
from steadygpt.run.plan import validation_rows
from steadygpt.run.repeats import repeated_records

TINY = flags(
    num_layers=1, num_heads=1, embd_size=8, context_length=16, mini_batch_size=1, warmup_steps=0, eval_freq=0,
    hellaswag_freq=0, sample_freq=0, checkpoint_minutes=0, device="cpu", tokenizer="bytes", data_dir="data",
)  # fmt: skip
CPU = torch.device("cpu")


def write_data(shards: int, tokens: int = 40) -> None:
    Path("data").mkdir()
    for number in range(shards):
        write_shard(Path(f"data/x_train_{number:06d}.npy"), np.arange(tokens, dtype=np.uint16) % 257)


@contextmanager
def counted(owner: object, *names: str):
    """Yield a list that grows by one with each call of these functions of a module or class."""
    calls: list[str] = []
    before = {name: getattr(owner, name) for name in names}
    for name, function in before.items():

        def counting(*args, name=name, function=function, **how):
            calls.append(name)
            return function(*args, **how)

        setattr(owner, name, counting)
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


stats = partial(counted, os, "stat", "lstat")


def silently(main: Callable, *argv: str) -> None:
    with redirect_stdout(io.StringIO()):
        main([*argv])


# ---------------------------------------------------------------------------------------------------------------------
# the rows: each returns what `size` of something costs


def open_files(size: int) -> float:
    """Files that are open once each of so many shards was read, with a limit of 1,024."""
    write_data(size)
    stream = RowStream(ShardSet.find("data", "data", "train").shards, 16)
    stream.read(0, stream.rows_per_epoch)
    return len([*Path("/proc/self/fd").iterdir()])


def maps_of_look(size: int) -> float:
    """Shards that look.py maps to print eight rows of a step, of so many shards."""
    write_data(size)
    silently(train.main, *TINY, "--total_batch_size", "128", "--max_steps", "2")
    with counted(np, "memmap") as calls:
        silently(look.main, "--step", "1")
    return len(calls)


def seeding(size: int) -> float:
    """Processor time of the seeds of so many micro-steps, as a share of that of torch.manual_seed."""
    took = []
    for seed in (partial(device.seed, CPU), torch.manual_seed):
        start_s = time.process_time()
        for number in range(size):
            seed(number)
        took.append(time.process_time() - start_s)
    return took[0] / took[1]


def checkpoints(size: int) -> None:
    """Train a step between so many checkpoints."""
    write_data(4)
    every = ("--total_batch_size", "16", "--checkpoint_freq", "1", "--keep_checkpoints", str(size))
    silently(train.main, *TINY, *every, "--max_steps", str(size))


def reads_of_replay(size: int) -> float:
    """Checkpoints, of so many, that the replay of a step reads."""
    checkpoints(size)
    with counted(files, "read_checkpoint") as calls:
        silently(replay.main, "--steps", str(size // 2))
    return len(calls)


def stats_of_a_save(size: int) -> float:
    """Calls of stat in a save, in a folder of so many checkpoints."""
    checkpoints(size)
    content = files.read_checkpoint(Path("checkpoints/latest.pt"))
    writer = saves.CheckpointWriter(TrainConfig(keep_checkpoints=size), Mock())
    with stats() as calls:
        writer.save(size + 1, lambda: content | {"step": size + 1}, [f"rolling_step_{size + 1:06d}.pt"])
    assert not writer.failed
    return len(calls)


def rows_of_validation(size: int) -> float:
    """Tokens of a validation of so many sets, as a share of eval_tokens."""
    config, val = TrainConfig(), SimpleNamespace(rows_per_epoch=10**6)
    return size * validation_rows(config, val, size) * config.context_length / config.eval_tokens  # type: ignore[arg-type]


def stats_of_preparing(size: int) -> float:
    """Calls of stat for each of so many files that are prepared."""
    Path("text").mkdir()
    for number in range(size):
        Path(f"text/{number}.txt").write_text("some words " * 100)
    with stats() as calls:
        silently(prepare_dataset.main, *flags(source="text", tokenizer="bytes", num_workers=1, out="out"))
    return len(calls) / size


def memory_of_a_line(size: int) -> float:
    """Memory beyond that of 1 MB, as a multiple of a line of so many MB in a .jsonl."""

    def peak_mb(megabytes: int) -> float:
        Path("a.jsonl").write_text(
            json.dumps({"text": "some words " * (megabytes * 10**6 // 11)}) + '\n{"text": "x"}\n'
        )
        place = flags(source="a.jsonl", tokenizer="bytes", num_workers=1, out=f"out{megabytes}", val_tokens=0)
        silently(prepare_dataset.main, *place)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

    before = peak_mb(1)
    return (peak_mb(size) - before) / size


def megabytes_of_resume(size: int) -> float:
    """Memory in MB that a resume needs for the logs of so many steps."""
    write_logs(Path(), size)
    tracemalloc.start()
    repeated_records(Path("metrics.jsonl"), size - 200, "1f")
    return tracemalloc.get_traced_memory()[1] / 1e6


def bytes_of_upload(size: int) -> float:
    """Bytes of logs that an upload sends for each of so many steps so far."""
    Path("logs").mkdir()
    write_logs(Path("logs"), size)
    mirror, sent = Mirror(f"{Path.cwd()}/mirror", "run", "run"), []
    mirror.has_other_logs = False
    mirror.fs.pipe_file = lambda _, content: sent.append(len(content))
    mirror.upload_files(TrainConfig(run_name="run"))
    return sum(sent) / size


ROWS: dict[str, tuple[Callable[[int], float], int]] = {
    "shards": (open_files, 200), "look": (maps_of_look, 200), "seed": (seeding, 500),
    "replay": (reads_of_replay, 12), "save": (stats_of_a_save, 30), "validation": (rows_of_validation, 20),
    "files": (stats_of_preparing, 50), "line": (memory_of_a_line, 10), "resume": (megabytes_of_resume, 20_000),
    "upload": (bytes_of_upload, 2_000),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# ranks


class Counting(ranks.Ranks):
    """Rank 0 of many, which all say what it says. Counts its collectives, and the bytes that it receives."""

    phase, calls, received = "start", Counter[str](), Counter[str]()

    def count(self, num_bytes: int) -> None:
        self.calls[self.phase] += 1
        self.received[self.phase] += num_bytes

    def max_later(self, *numbers: int) -> Callable[[], list[int]]:
        self.count(8 * len(numbers))
        return lambda: [*numbers]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor.nbytes)
        return tensor

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor.nbytes * self.world_size)
        return torch.cat([tensor] * self.world_size)

    def broadcast(self, value):
        self.count(len(pickle.dumps(value)))
        return value

    def gather(self, value):
        self.count(len(pickle.dumps(value)) * self.world_size)
        return [value] * self.world_size


def count_ranks(world_size: int, micro_steps: int) -> None:
    """Train as rank 0 of many: start, steps, a save, a stop. Print the collectives and bytes of each phase."""
    write_data(1, tokens=40 * 16 * world_size * micro_steps)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    ranks.Ranks = Counting  # type: ignore[misc]
    train.parallel.replicate = lambda forward, _: forward  # DDP's sums of gradients are not counted
    steps, asked_at = Counter[str](), [0.0]

    def phased(owner: object, name: str, phase: str):
        function = getattr(owner, name)

        def in_phase(*args, **how):
            Counting.phase, before = phase, Counting.phase
            steps[phase] += 1
            try:
                return function(*args, **how)
            finally:
                Counting.phase = before if before == "save" else "loop"

        setattr(owner, name, in_phase)

    check = ranks.StopSignal.check

    def stopping(stop):
        if steps["step"] == 6:
            asked_at[0] = asked_at[0] or steps["step"]
            stop.ask("SIGTERM")
        check(stop)

    ranks.StopSignal.check = stopping  # type: ignore[method-assign]
    phased(train, "train_step", "step")
    phased(train, "save", "save")
    tokens = 16 * world_size * micro_steps
    silently(train.main, *TINY, *flags(total_batch_size=tokens, max_steps=100, checkpoint_freq=3))
    per = {"start": 1, "step": steps["step"], "loop": steps["step"], "save": steps["save"]}
    found = {phase: (Counting.calls[phase] / n, Counting.received[phase] / n) for phase, n in per.items()}
    shown = "; ".join(f"{phase} {calls:.1f}, {bytes_text(int(size))}" for phase, (calls, size) in found.items())
    print(f"{shown}; steps until the stop {steps['step'] - asked_at[0]:.0f}")


# ---------------------------------------------------------------------------------------------------------------------
# the command


def in_process(*arguments: object) -> str:
    """Return what this file prints in a process with a limit of 1,024 open files, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.growth", "--measure", *map(str, arguments)], cwd=folder, text=True,
            env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}, capture_output=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)),
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"{arguments}: {done.stderr[-2000:]}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*ROWS, "ranks"], default=[*ROWS, "ranks"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 512, 4096])
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, *sizes = args.measure
        if what == "ranks":
            count_ranks(*map(int, sizes))
        else:
            print(ROWS[what][0](*map(int, sizes)))
        return
    print("| what | of | costs | of | costs | ratio |\n|---|---|---|---|---|---|")
    for name in filter(ROWS.__contains__, args.only):
        measure, size = ROWS[name]
        few, many = (float(in_process(name, n)) for n in (size, 10 * size))
        ratio = number_text(many / few) if few else math.inf
        what = (measure.__doc__ or "").removesuffix(".")
        print(f"| {what} | {size:,} | {number_text(few)} | {10 * size:,} | {number_text(many)} | {ratio} |", flush=True)
    for world_size in args.ranks if "ranks" in args.only else ():
        for micro_steps in (1, 8):
            print(f"{world_size:,} ranks, {micro_steps} micro-steps: {in_process('ranks', world_size, micro_steps)}")


if __name__ == "__main__":
    main()
