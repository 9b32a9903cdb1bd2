"""Replay of steps of a run, in memory, compared bit by bit with what the run recorded and saved.

python replay.py --step 4213                        # of checkpoints/, from the nearest checkpoint before it
python replay.py --steps 4000:4250 --checkpoint_dir checkpoints/run7
torchrun --nproc_per_node=2 replay.py --step 4213   # of a run on two ranks

Each part of the run is trained with the options, the batch and the data of its start. A replay writes no files.
"""

import gc
import math
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from steadygpt import git_commit
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import counted, printable
from steadygpt.checkpoint.files import Start, intact_checkpoints, named_tensors, scan, trained_with
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.config import TrainConfig
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.log.metrics import METRICS, Record
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks, Stopped, end_with_torchrun, joined
from steadygpt.run.data import Data, recorded_sources, tokenizer_of
from steadygpt.run.history import WITHOUT_TENSORS, History
from steadygpt.run.identity import read_run
from steadygpt.run.plan import settle
from steadygpt.run.repeats import Repeats, repeated_records
from steadygpt.run.starts import difference
from train import Run, build, capture, check_replicas, train_step

AS_RECORDED = "code, machine and options are as recorded"


@dataclass(frozen=True)
class ReplayOptions:
    # fmt: off
    steps: str = option("", "step N, or steps A:B with both ends, numbered as in metrics.jsonl: step A starts from the "
                        "checkpoint of step A; alias: --step", aliases=("step",))
    checkpoint_dir: str = option("checkpoints", "folder of the run's checkpoints", positional=True,
                                 aliases=("checkpoint_dir",))
    mirror: str = option("", "URL of the run's mirror (default: its --mirror)", no_password=True)
    device: str = option("auto", "auto, cpu, cuda or mps")
    # fmt: on

    def span(self) -> tuple[int, int]:
        """Return the first and the last step."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.steps)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise OptionError("steps", repr(self.steps), "a step, such as 4000, or A:B, such as 4000:4250")
        return int(match[1]), int(match[2] or match[1])


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints and records


@dataclass(frozen=True)
class Past:
    """What is known of the steps to replay. Tensors are on rank 0 only."""

    newest: dict  # checkpoint, without tensors
    origin: str  # the file that the replay starts from
    checkpoint: dict | None  # its content
    last: int  # step to replay
    saves: dict[int, tuple[str, dict]]  # checkpoints to compare with: step -> file, content
    metrics: Path  # metrics.jsonl of the run, or a copy of that in its mirror

    def without_tensors(self) -> "Past":
        """Return what ranks other than 0 need."""
        light = self.checkpoint and self.checkpoint | WITHOUT_TENSORS
        return replace(self, checkpoint=light, saves=dict.fromkeys(self.saves, ("", {})))


def find_past(options: ReplayOptions, first: int, last: int, held: ExitStack) -> Past:
    """Find the checkpoint to start from, and the checkpoints and records to compare with; `held` removes copies."""
    places, files = read_run(Path(options.checkpoint_dir)).places, scan(Path(options.checkpoint_dir))
    copies, url = Path(held.enter_context(TemporaryDirectory())), options.mirror or places.get("mirror", "")
    mirror, saves = Mirror(url) if url else None, dict[int, tuple[str, dict]]()

    def add(file: object, checkpoint: dict) -> None:
        """Keep a save that the run has passed on its way to the newest one; others are of steps that a resume undid."""
        starts, own, step = newest["starts"], checkpoint["starts"], checkpoint["step"]
        if own == starts[: len(own)] and step <= [*starts, newest][len(own)]["step"]:
            saves[step] = str(file), checkpoint

    path, newest = next(intact_checkpoints(files), (Path(), {}))
    if newest:
        add(path, newest)
        # From the end back to the first step, and no more, because each is read whole; else the first later one.
        order = newest["saved_at"], newest["step"]
        steps = [(file.head.step, file) for file in files if file.head and file.order != order]
        others = [file for _, file in sorted(steps, key=lambda at: (at[0] > last + 1, abs(at[0] - last - 1)))]
        for path, saved in intact_checkpoints(others):
            add(path, saved)
            if saved["step"] in saves and not first < saved["step"] <= last + 1:
                break
    if mirror and not any(step <= first for step in saves):
        # The nearest one before the first step; and the newest one, which has the record of starts.
        uploaded = sorted(mirror.patiently(mirror.index).checkpoints.values(), key=lambda entry: -entry.step)
        before = [entry for entry in uploaded if entry.step <= first]
        for entry in dict.fromkeys([*uploaded[: not newest], *before[:1]]):
            saved = mirror.download(entry, copies)[1]
            newest = newest or saved
            add(f"{url}/{entry.file}", saved)
    if not newest or not (starts := newest["starts"]):
        raise UserError(f"no checkpoints of a run in {options.checkpoint_dir}; try another --checkpoint_dir")
    if first >= (end := newest["step"]) or last > end:
        raise UserError(f"no step {last} to replay: the newest checkpoint is of step {end:,}; choose earlier steps")
    nearest = max((step for step in saves if step <= first), default=0)
    from_scratch = starts[0]["options"]["init_from"] == "scratch"
    if nearest not in saves and not (from_scratch and first == 0):
        left = [f"from {min(saves):,} on"] * bool(saves) + [f"--steps 0:{last}"] * from_scratch
        raise UserError(
            f"{options.checkpoint_dir}: no checkpoint of step {first:,} or before it is left; steps that can be "
            f"replayed: {', or '.join(left)}"
        )
    origin, checkpoint = saves.get(nearest, ("the first weights, which the seed gives", None))
    last = min(last, end - 1)
    saves = {step: save for step, save in saves.items() if nearest < step <= last + 1}
    metrics = Path(places.get("logdir", TrainConfig.logdir), METRICS)
    if mirror and not metrics.exists():
        with suppress(UserError):  # it has none
            content = mirror.patiently(lambda: mirror.read(f"logs/{METRICS}"))
            metrics = copies / METRICS
            metrics.write_bytes(content)
    return Past(newest | WITHOUT_TENSORS, origin, checkpoint, last, saves, metrics)


# ---------------------------------------------------------------------------------------------------------------------
# the comparison


def compare(content: dict, saved: dict) -> str:
    """Return in words how weights, optimizer state or position differ from a checkpoint's; "" if no bit does."""
    if content["rows_consumed"] != saved["rows_consumed"]:
        return f"{content['rows_consumed']:,} rows consumed, but {saved['rows_consumed']:,} before"
    ours, theirs, shares = named_tensors(content), named_tensors(saved), dict[str, float]()
    for name in sorted(ours | theirs):
        here, there = (found.get(name, torch.empty(0)) for found in (ours, theirs))
        if here.shape != there.shape:
            shares[name] = math.inf
        elif not torch.equal(here.view(torch.int32), there.view(torch.int32)):
            shares[name] = float(((here - there).abs().max() / here.abs().max()).nan_to_num(math.inf))
    most = max(shares, key=shares.__getitem__, default="")
    found = f"{len(shares)} of {len(ours)} tensors differ, {most} most: by {shares.get(most, 0):.2g} of its largest"
    return f"{found} number" * bool(shares)


def changes(entry: Start, ranks: Ranks) -> list[str]:
    """Return why a part of the run may have other bits here: what differs from the start that trained it."""
    commit, is_exact = git_commit(), entry["options"]["deterministic"]
    here: dict[str, Any] = {} if is_exact else {"ranks": ranks.world_size}
    # The name of a CPU has its threads.
    here |= {"device": device_name(ranks.device), "torch": str(torch.__version__), "commit": commit}
    found = [difference({name: entry.get(name) for name in here}, here)]
    found += ["files have changed since the commit"] * commit.endswith("+")
    if not trained_with(entry).repeats_bits(ranks.device.type, ranks.world_size):
        found.append("CUDA, or DDP on more than two processes, without --deterministic")
    return [*filter(None, found)]


# ---------------------------------------------------------------------------------------------------------------------
# the replay


def build_part(
    past: Past, checkpoint: dict | None, starts: list[Start], device: str, ranks: Ranks, held: ExitStack
) -> Run:
    """Build a run, which writes nothing, that continues as the last of these starts did."""
    entry, known = starts[-1], past.newest["data_fingerprint"]
    if ranks.device.type == "cpu":
        torch.set_num_threads(entry["threads"])
    # Bad steps are skipped, and the run's own records say where it ended.
    asked = TrainConfig(**entry["options"] | {"device": device, "max_bad_steps": 0})
    history = History(asked, decisions=entry["decisions"], checkpoint=checkpoint)
    trained = replace(asked, **history.decisions)
    sources = ranks.on_each(lambda: recorded_sources(trained, entry["sources"], history.step, known))
    tokenizer = tokenizer_of([source.shards for source in sources], trained.tokenizer, TokenizerRecord.of(past.newest))
    plan = settle(history, Data(sources, (), *tokenizer), ranks, starts)
    return build(plan, RunLog(plan.config, ranks, prints=False), held)


def find_records(past: Past, starts: list[Start], begin: int, end: int) -> tuple[dict[int, Record], str]:
    """Return the records of the steps of a part, see repeated_records()."""
    # A replay repeats steps as a resume does, from where this start began or from a checkpoint that it has made.
    before = starts[:-1] if starts[-1]["step"] == begin else starts
    records, reason = repeated_records(past.metrics, begin, before[-1]["id"] if before else "")
    records = {step: record for step, record in records.items() if step < end}
    if not records and not past.saves:
        raise UserError(
            f"nothing to compare steps {begin:,} to {end - 1:,} with: no checkpoint is left, and "
            f"{reason or f'{past.metrics} lacks their records'}; choose other steps, or restore the logs"
        )
    return records, reason if end - 1 not in records else ""


def replay(past: Past, device: str, ranks: Ranks, held: ExitStack) -> bool:
    """Train in memory and compare; return whether there is a difference where bits are promised, which ends it."""
    log, starts, checkpoint, equal = RunLog(TrainConfig(), ranks), past.newest["starts"], past.checkpoint, list[int]()
    first, end_of_all, reasons = checkpoint["step"] if checkpoint else 0, past.last + 1, list[str]()
    resumed = sorted({entry["step"] for entry in starts if first < entry["step"] < end_of_all})
    with ProgressBar(
        desc="replaying", total=end_of_all - first, unit="step", delay=3, disable=not ranks.is_main
    ) as bar:
        for begin, end in pairwise([first, *resumed, end_of_all]):
            so_far = [entry for entry in starts if entry["step"] <= begin]
            run, found_here = build_part(past, checkpoint, so_far, device, ranks, held), changes(so_far[-1], ranks)
            reasons += found_here  # later parts continue with other bits too
            found = ranks.on_main(partial(find_records, past, so_far, begin, end)) or ({}, "")
            repeats = run.results.repeats = Repeats(log, begin, *found, is_exact=not reasons)
            digests = ranks.broadcast({step for step, record in repeats.records.items() if "digest" in record})
            log.say(f"steps {begin:,} to {end - 1:,}: {', '.join(found_here) or AS_RECORDED}")
            with closing(run.training_batches()) as batches:
                while run.state.step < end:
                    if run.state.step in digests:
                        check_replicas(run)  # notes its own
                    run.results.add(train_step(run, batches))
                    if run.state.step in past.saves:
                        run.results.read_all()
                        content, (file, saved) = capture(run)(), past.saves[run.state.step]
                        if ranks.is_main and (differs := compare(content, saved)):
                            (log.say if reasons else log.warn)(f"step {run.state.step:,}, {file}: {differs}")
                            repeats.differs |= not reasons
                        else:
                            equal.append(run.state.step)
                    bar.update(1)
                    if ranks.any(repeats.differs):
                        return True
            run.results.read_all()
            repeats.report()
            if ranks.any(repeats.differs):
                return True
            if end < end_of_all:
                checkpoint = capture(run)()
                del run, repeats, batches  # the next part builds a model of its own
                gc.collect()
    if equal:
        log.say(f"{counted(len(equal), 'checkpoint')} up to step {equal[-1]:,}: equal, bit for bit")
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Replay steps; return 1 if one of them differs although its bits are promised."""
    end_with_torchrun()
    about = "Retrain steps of a run in memory, and compare them with its records and checkpoints."
    options = parse_options(ReplayOptions, argv, about)
    first, last = options.span()
    with joined(options.device) as ranks, ExitStack() as held:
        past = ranks.on_main(lambda: find_past(options, first, last, held))
        if past:
            print(printable(f"from {past.origin}"), flush=True)
        sent = ranks.broadcast(past and past.without_tensors())
        try:
            return int(replay(past or sent, options.device, ranks, held))
        except Stopped as stopped:
            return 128 + signal.Signals[stopped.reason]


if __name__ == "__main__":
    run_cli(main)
