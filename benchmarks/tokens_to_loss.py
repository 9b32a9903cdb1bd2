"""Tokens and time until a loss: the recipe (--config modern) beside GPT-2 and nanoGPT. The figures of docs/RECIPE.md.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.tokens_to_loss --nanogpt nanoGPT                         # 1 M parameters: hours on two cores
    python -m benchmarks.tokens_to_loss --nanogpt nanoGPT --plot                  # and docs/recipe.png
    python -m benchmarks.tokens_to_loss --list                                    # all runs and their losses
    python -m benchmarks.tokens_to_loss --only 'sweep/gpt2*' 'pieces/*' time      # some of them

sweep    several learning rates for each side; one seed
final    three seeds: GPT-2 and nanoGPT at the best learning rate of their sweeps, the recipe in several lengths
pieces   short runs of one seed: the recipe without each of its pieces, and GPT-2 with only that piece
time     seconds a step of the sides, which alternate; this group alone needs a machine without other work

All sides train on the same files, with the same heads and rows, and warm up for 1/30 of their steps. The references
keep their weight decay and clipping; only their learning rates are tuned. The final losses are those of our evaluation,
on the same held-out rows. nanoGPT is its own train.py, in its own precision. It has no option for the seed, so for the
second and third seed that number is replaced in its source. The points of its curve before the last one are its own
estimates.

The same command continues after an interruption. A finished run is not repeated; its losses are kept, its weights are
removed. An interrupted run of ours resumes. One of nanoGPT starts again, because its resume repeats the first batches.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch

from benchmarks.compare import (
    REPO,
    HeldProgram,
    die_with_parent,
    exit_on_signals,
    flags,
    held_programs,
    in_turn,
    reason_of,
)
from benchmarks.loss_report import draw, loss_text, markdown
from benchmarks.loss_runs import (
    DATA,
    GROUPS,
    REFERENCES,
    SCALES,
    SIDES,
    SWEEP,
    TINY,
    Bench,
    Run,
    command_of,
    make_data,
    recorded_options,
)
from steadygpt.checkpoint import EVALUATIONS
from steadygpt.cli import UserError, run_cli
from steadygpt.durable import replace_file
from steadygpt.runlog import read_status
from steadygpt.units import duration_text

ROUNDS = 7  # of the timing
POINT = re.compile(r"step ([1-9]\d*)(?:/\d+ \||: train loss \S+,) val loss (\S+)")  # ours and nanoGPT's


def train(bench: Bench, run: Run, progress: Callable[[int, float], None]) -> None:
    """Train a run to its end unless it has finished, and remove its weights.

    Args:
        progress: is called with step and validation loss.

    Raises: UserError when its options have changed since it began, or it fails; a divergence is a result.
    """
    folder = bench.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    check_unchanged(folder, recorded_options(bench.scale, run))
    if bench.loss(run) is not None:
        return
    points: dict[int, float] = {}
    try:
        with output_of(*command_of(bench, run, folder)) as lines:
            for found in filter(None, map(POINT.match, lines)):
                step, loss = int(found[1]), float(found[2])
                points[step] = loss
                progress(step, loss)
    except UserError:
        if "non-finite" not in read_status(folder).get("reason", ""):
            raise
        write_points(folder, points | {run.steps: math.nan})
    if run.side == "nanogpt":
        if not math.isnan(points[run.steps]):
            points[run.steps] = evaluate(bench, folder / "ckpt.pt")
        write_points(folder, points)
    if bench.loss(run) is None:
        raise UserError(f"{folder}: stopped before step {run.steps}. Run the same command again")
    for weights in folder.glob("*.pt"):
        weights.unlink()


def check_unchanged(folder: Path, options: dict[str, object]) -> None:
    """Record the options of a run in its folder, or compare them with the record.

    Raises: UserError naming those that differ.
    """
    record = folder / "options.json"
    began = json.loads(record.read_text()) if record.exists() else options
    differ = [name for name in sorted({*began, *options}) if began.get(name) != options.get(name)]
    if differ:
        changes = ", ".join(f"{name} {began.get(name, 'default')}" for name in differ)
        now = ", ".join(str(options.get(name, "default")) for name in differ)
        raise UserError(f"{folder}: trained with {changes}; expected {now}. Delete the folder to train again")
    write_json(record, options)


def write_points(folder: Path, points: dict[int, float]) -> None:
    write_json(folder / EVALUATIONS, {step: {"val_loss": loss} for step, loss in points.items()})


def write_json(file: Path, content: object) -> None:
    replace_file(file, lambda out: out.write(json.dumps(content, indent=1).encode()))


@contextmanager
def output_of(command: Sequence[str], cwd: Path) -> Iterator[Iterator[str]]:
    """Start a program and yield the lines of its output; stop it when the caller is interrupted.

    Raises: UserError with the reason when it fails.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal sends Ctrl-C to this process alone, which then stops the program
        preexec_fn=die_with_parent,
    )
    last: deque[str] = deque(maxlen=20)

    def lines() -> Iterator[str]:
        for line in process.stdout or ():
            last.append(line)
            yield line

    try:
        yield lines()
        deque(lines())  # reads what the caller has not
    except BaseException:
        process.terminate()  # our train.py saves
        raise
    finally:
        process.wait()
    if process.returncode:
        raise UserError(f"the run failed: {reason_of(''.join(last))}")


def evaluate(bench: Bench, checkpoint: Path) -> float:
    """Return our validation loss of nanoGPT's weights, whose shape and options come from the file."""
    scale = bench.scale
    options = flags(
        init_from=checkpoint, data_dir=bench.data, tokenizer=DATA[scale.data].tokenizer, mini_batch_size=scale.rows,
        total_batch_size=scale.tokens, eval_tokens=scale.eval_tokens, eval_freq=1, hellaswag_freq=0, sample_freq=0,
    )  # fmt: skip
    with output_of([sys.executable, "train.py", "--eval_only", *options], REPO) as lines:
        losses = [float(line.split()[-1]) for line in lines if line.startswith("val loss")]
    return losses[0]  # there is one, or the evaluation failed


def run_group(bench: Bench, group: str, runs: Sequence[Run]) -> int:
    """Train those runs that have not finished; return how many failed."""
    begun = {run: max(bench.losses(run), default=0) for run in runs}
    todo, done, failed, start_s = sum(run.steps - begun[run] for run in runs), 0, 0, time.monotonic()
    for number, run in enumerate(runs, start=1):
        title = f"{bench.name} {group} [{number}/{len(runs)}] {run}"

        def progress(step: int, loss: float, title=title, before=done - begun[run]) -> None:
            steps = before + step
            left_s = (time.monotonic() - start_s) / max(1, steps) * (todo - steps)
            print(f"{title}: step {step}, val loss {loss:.4f}; {duration_text(left_s)} left in {group}", flush=True)

        try:
            train(bench, run, progress)
            print(f"{title}: {loss_text(bench.loss(run))} at the end", flush=True)
        except UserError as error:
            print(f"{title}: {error}", file=sys.stderr, flush=True)
            failed += 1
        done += run.steps - begun[run]
    return failed


def measure_time(bench: Bench) -> None:
    """Write the seconds a step of all sides in each round to time.json, unless it is there."""
    if bench.time_file.exists():
        return
    discarded = 2 if torch.cuda.is_available() else 1
    quiet: dict[str, dict] = {side: {"eval_freq": 0, "checkpoint_minutes": 0, "log_freq": 1} for side in SIDES}
    quiet["nanogpt"] = {"eval_interval": 10**9, "eval_iters": 1, "log_interval": 1}
    measured: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as name, held_programs() as programs:
        for side in SIDES if bench.nanogpt else [side for side in SIDES if side != "nanogpt"]:
            run = Run(side, SWEEP[side][0], steps=10**6)  # a learning rate does not change the time
            command, cwd = command_of(bench, run, Path(name, side), **quiet[side])
            programs[side] = HeldProgram(command, cwd, r"step +\d+/|iter \d+:")
            programs[side].seconds_per_step(bench.scale.timed_steps)  # before the next one competes for the cores
            measured[side] = lambda held=programs[side]: held.seconds_per_step(bench.scale.timed_steps, discarded)
        write_json(bench.time_file, in_turn(measured, ROUNDS, "s a step"))


def select(bench: Bench, group: str, patterns: Sequence[str]) -> list[Run]:
    """Return the runs of a group whose "GROUP/RUN" matches a pattern; a pattern without a slash is a group."""
    runs = GROUPS[group](bench)
    return [run for run in runs if any(fnmatch(f"{group}/{run}", p if "/" in p else f"{p}/*") for p in patterns)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", nargs="+", default=["1m"], choices=SCALES, help="default: 1m; 124m needs a GPU")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GROUP/RUN", help="patterns of what --list shows")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/out/tokens_to_loss", help="folder for the runs")
    parser.add_argument("--list", action="store_true", help="print the runs and their losses, and train nothing")
    parser.add_argument("--plot", type=Path, nargs="?", const=REPO / "docs/recipe.png",
                        help="draw the curves (pip install matplotlib)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny runs: tries this command, measures nothing")
    args = parser.parse_args(argv)
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot: matplotlib is missing. Try pip install matplotlib")
    if args.nanogpt and not (args.nanogpt / "train.py").exists():
        raise UserError(f"--nanogpt {args.nanogpt}: found no train.py, expected a checkout of nanoGPT")
    if "124m" in args.scale and not (torch.cuda.is_available() or args.quick or args.list):
        raise UserError("--scale 124m: found no CUDA GPU, expected one. Try --scale 10m")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in scripts/quickstart.sh
    scales = (
        {f"{name}-quick": TINY for name in args.scale} if args.quick else {name: SCALES[name] for name in args.scale}
    )
    nanogpt, times = args.nanogpt and args.nanogpt.absolute(), any(fnmatch("time", pattern) for pattern in args.only)
    benches = [Bench(name, scale, args.out.absolute(), nanogpt) for name, scale in scales.items()]
    if not times and not any(select(bench, group, args.only) for bench in benches for group in GROUPS):
        raise UserError(f"--only {' '.join(args.only)}: found no such run, expected names that --list shows")
    if args.list:
        for bench in benches:
            for group in GROUPS:
                for run in select(bench, group, args.only):
                    print(f"{bench.name} {group}/{run}: {loss_text(bench.loss(run))}")
        return 0
    failed = 0
    with exit_on_signals():
        for bench in benches:
            make_data(bench.scale.data, bench.data)
            for group in GROUPS:
                runs = select(bench, group, args.only)
                failed += run_group(bench, group, [run for run in runs if nanogpt or run.side != "nanogpt"])
            if times:
                measure_time(bench)
            for side in REFERENCES:
                if bench.tuned(side) is None:
                    print(f"{bench.name}: skipped runs that need the best setting of {side}; finish its sweep first")
    print("\n".join(map(markdown, benches)))
    if args.plot:
        draw(benches, args.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
