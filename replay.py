"""Replay of recorded steps: train.py takes the steps again, and their records are compared bit for bit.

python replay.py --step 4213                        # of checkpoints/, from the nearest checkpoint before it
python replay.py --steps 4000:4250 --checkpoint_dir checkpoints/run7

The replay is a fork of the run in a folder of its own, so the original run does not change.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import BACKUP, LATEST, Launch, config_of, intact_checkpoints, no_checkpoints, scan
from steadygpt.log.metrics import LOG, METRICS, LaunchLine, read_status, segments
from steadygpt.machine.device import choose_device
from steadygpt.machine.ranks import StopSignal
from steadygpt.run.launches import difference
from steadygpt.run.repeats import Comparison, recorded_steps

AS_RECORDED = "code, machine and options are as recorded"
OFF = [  # these cost time and change no step, or write outside the folder of the fork
    "--eval_freq=0", "--hellaswag_freq=0", "--core_freq=0", "--core_dir=", "--sample_freq=0", "--expect=",
    "--checkpoint_freq=0", "--checkpoint_minutes=0", "--max_hours=0", "--system_metrics_s=0", "--mirror=",
    "--use_tensorboard=off", "--use_wandb=off",
]  # fmt: skip


@dataclass(frozen=True)
class ReplayOptions:
    # fmt: off
    steps: str = option("", "step N, or steps A:B with both ends, numbered as in metrics.jsonl: step A starts from the "
                        "checkpoint of step A; alias: --step", aliases=("step",))
    checkpoint_dir: str = option("checkpoints", "folder of the run's checkpoints", positional=True,
                                 aliases=("checkpoint_dir",))
    device: str = option("auto", "auto, cpu, cuda or mps")
    # fmt: on

    def span(self) -> tuple[int, int]:
        """Return the first and the last step."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.steps)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise OptionError("steps", repr(self.steps), "a step, such as 4000, or A:B, such as 4000:4250")
        return int(match[1]), int(match[2] or match[1])


def find_origin(folder: Path, line: LaunchLine, first: int) -> tuple[Path, Launch]:
    """Find the newest checkpoint at or before step `first` that the launch saved.

    Returns: its path, and its record of the launch.
    """
    before = []
    for file in scan(folder):
        if file.head and line["first_step"] <= file.head.step <= first:
            before.append(file)
    # If a step has two names, prefer the one that the next save of a run in progress does not replace.
    before.sort(key=lambda file: (file.order[1], file.path.name not in (LATEST, BACKUP)), reverse=True)
    for path, checkpoint in intact_checkpoints(before):
        launches = checkpoint["launches"]
        if launches and launches[-1]["id"] == line["id"]:
            return path, launches[-1]
    saved = f"the launch at step {line['first_step']:,} has left no checkpoint of step {first:,} or before it"
    raise UserError(f"{folder}: {saved}; choose steps after its first one (./list_checkpoints.sh)")


def train_until(last: int, fork: Path, command: Sequence[str], env: dict[str, str]) -> int:
    """Run a command that trains in a folder until its metrics.jsonl has a step; return its exit status."""
    StopSignal.raise_until_listen()  # so that a signal to this process stops the child too
    child = subprocess.Popen(command, env=env)
    try:
        while child.poll() is None and not any(records for _, records in segments(fork / METRICS, last, "loss")):
            time.sleep(0.2)
        with suppress(ProcessLookupError):  # the process has ended
            # Signal rank 0, which stops all ranks. Signalled instead, torchrun would print a traceback.
            os.kill(read_status(fork).get("pid", child.pid), signal.SIGINT)
        return child.wait()
    finally:
        child.terminate()
        child.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Replay steps; return 1 if one of them differs by more than usual."""
    options = parse_options(ReplayOptions, argv, "Train recorded steps of a run again, and compare the records.")
    first, last = options.span()
    if "RANK" in os.environ:
        raise UserError("replay.py starts torchrun itself; start it with python replay.py")
    folder = Path(options.checkpoint_dir)
    if not scan(folder):
        raise no_checkpoints(folder)
    line, recorded = recorded_steps(folder / METRICS, first, last)
    origin, launch = find_origin(folder, line, first)
    device = choose_device(options.device)
    ranks = launch["ranks"]
    if device.type == "cuda":
        ranks = min(ranks, torch.cuda.device_count())

    # --max_steps decides the learning rate, so it keeps its value, and train_until() stops the child.
    fork = Path(tempfile.mkdtemp(prefix=f"replay-{first}-{last}-", dir=".")).name
    files = ["--checkpoint_dir", fork, "--log_freq", "1"]
    train = [str(Path(__file__).with_name("train.py")), "--resume", str(origin), "--device", device.type]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), *train, *files, *OFF]
    env = os.environ | {"OMP_NUM_THREADS": str(launch["threads"])}  # sums on a CPU depend on the number of threads
    status = train_until(last, Path(fork), command, env)
    replayed, records = next(segments(Path(fork, METRICS), key="loss"), (line, []))
    replayed_steps = {int(record["step"] or 0): record for record in records}
    if replayed["first_step"] > first or last not in replayed_steps:
        with suppress(OSError):  # not empty: train.py has written something
            Path(fork).rmdir()
        ended = f"it ended with exit status {status}, and its messages say why"
        raise UserError(f"train.py has not taken steps {first:,} to {last:,} in {fork}; {ended}")

    reasons = []
    changes = difference(line["how"], replayed["how"])
    if changes:
        reasons.append(changes)
    if replayed["how"]["commit"].endswith("+"):
        reasons.append("files have changed since the commit")
    if not config_of(launch).repeats_bits(device.type):
        reasons.append("CUDA without --deterministic")
    comparison = Comparison(replayed["first_step"], is_exact=not reasons)
    for step in range(replayed["first_step"], last + 1):
        if step in recorded:
            comparison.add(step, recorded[step], replayed_steps[step])
    print(f"replayed from {printable(str(origin))}: {', '.join(reasons) or AS_RECORDED}")
    span = f"steps {replayed['first_step']:,} to {last:,}" if last > replayed["first_step"] else f"step {last:,}"
    print(f"{span}: {comparison.result()}")
    print(f"the log of the replay is {fork}/{LOG}; you can delete {fork}")
    return 1 if comparison.first_difference else 0


if __name__ == "__main__":
    run_cli(main)
