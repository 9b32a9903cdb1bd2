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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from dataloader import Data, recorded_sources, tokenizer_of
from steadygpt import git_commit
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import counted, printable
from steadygpt.checkpoint.files import Entry, intact_checkpoints, read_checkpoint, scan, trained_with
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.config import TrainConfig
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.log.metrics import METRICS
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks, Stopped, end_with_torchrun, joined
from steadygpt.run.history import WITHOUT_TENSORS, History
from steadygpt.run.identity import read_run
from steadygpt.run.plan import settle
from steadygpt.run.repeats import repeated_records
from steadygpt.run.results import StepResult
from steadygpt.run.starts import difference, id_of_last
from train import Run, build, capture, train_step

AS_RECORDED = "code, machine and options are as recorded"
COMPARED = {"loss": "losses", "grad_norm": "norms", "lr": "learning rates"}


@dataclass(frozen=True)
class ReplayOptions:
    # fmt: off
    step: int | None = option(None, "one step to replay, as --steps STEP:STEP")
    steps: str = option("", "steps to replay, A:B, including both, numbered as in metrics.jsonl: step A starts from "
                        "the checkpoint of step A")
    checkpoint_dir: str = option("checkpoints", "folder of the run's checkpoints", positional=True,
                                 aliases=("checkpoint_dir",))
    mirror: str = option("", "URL of the run's mirror (default: its --mirror)", no_password=True)
    device: str = option("auto", "auto, cpu, cuda or mps")
    # fmt: on

    def span(self) -> tuple[int, int]:
        """Return the first and the last step."""
        if (self.step is None) == (not self.steps):
            raise UserError("no steps to replay; expected either --step N or --steps A:B")
        match = re.fullmatch(r"(\d+):(\d+)", self.steps or f"{self.step}:{self.step}")
        if not match or int(match[1]) > int(match[2]):
            raise OptionError("steps", repr(self.steps), "A:B, such as 4000:4250")
        return int(match[1]), int(match[2])


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


def find_past(options: ReplayOptions, first: int, last: int, held: ExitStack) -> Past:
    """Find the checkpoint to start from, and the checkpoints and records to compare with; `held` removes copies."""
    folder = Path(options.checkpoint_dir)
    files = [(str(path), checkpoint) for path, checkpoint in intact_checkpoints(scan(folder))]
    places = read_run(folder).places
    url = options.mirror or places.get("mirror", "")
    mirror = Mirror(url) if url else None
    if mirror and not any(checkpoint["step"] <= first for _, checkpoint in files):
        files += from_mirror(mirror, first, with_newest=not files)
    if not files or not files[0][1]["starts"]:
        raise UserError(f"no checkpoints of a run in {options.checkpoint_dir}; try another --checkpoint_dir")
    newest = files[0][1]
    if first >= (end := newest["step"]) or last > end:
        raise UserError(f"no step {last} to replay: the newest checkpoint is of step {end:,}; choose earlier steps")
    saves = {checkpoint["step"]: (file, checkpoint) for file, checkpoint in files if is_of_run(checkpoint, newest)}
    before = max((step for step in saves if step <= first), default=0)
    from_scratch = newest["starts"][0]["options"]["init_from"] == "scratch"
    if before not in saves and not (from_scratch and first == 0):
        left = [f"from {min(saves):,} on"] * bool(saves) + [f"--steps 0:{last}"] * from_scratch
        raise UserError(
            f"{options.checkpoint_dir}: no checkpoint of step {first:,} or before it is left; steps that can be "
            f"replayed: {', or '.join(left)}"
        )
    origin, checkpoint = saves.get(before, ("the first weights, which the seed gives", None))
    last = min(last, end - 1)
    saves = {step: save for step, save in saves.items() if before < step <= last + 1}
    metrics = Path(places.get("logdir", TrainConfig.logdir), METRICS)
    if mirror and not metrics.exists():
        with suppress(UserError):  # it has none
            content = mirror.patiently(lambda: mirror.read(f"logs/{METRICS}"))
            metrics = Path(held.enter_context(TemporaryDirectory()), METRICS)
            metrics.write_bytes(content)
    return Past(newest | {"model": {}, "optimizer": {}}, origin, checkpoint, last, saves, metrics)


def from_mirror(mirror: Mirror, first: int, with_newest: bool) -> list[tuple[str, dict]]:
    """Return the file and content of the checkpoint nearest before a step, and of the newest one before it if wanted.

    Files are temporary, and take space as long as their content is mapped.
    """
    uploaded = sorted(mirror.patiently(mirror.index).checkpoints.values(), key=lambda entry: -entry.step)
    wanted = {entry.file: entry for entry in [*uploaded[:with_newest], *[e for e in uploaded if e.step <= first][:1]]}
    found = []
    with TemporaryDirectory() as folder:
        for name, entry in wanted.items():
            mirror.download(entry, Path(folder, name))
            found.append((f"{mirror.url}/{name}", read_checkpoint(Path(folder, name))))
    return found


def is_of_run(checkpoint: dict, newest: dict) -> bool:
    """Return whether a run has passed a checkpoint on its way to the newest one; others are of steps it has undone."""
    own, starts = checkpoint["starts"], newest["starts"]
    end = starts[len(own)]["step"] if len(own) < len(starts) else newest["step"]
    return own == starts[: len(own)] and checkpoint["step"] <= end


# ---------------------------------------------------------------------------------------------------------------------
# the comparison


@dataclass
class Comparison:
    """How closely a replay agrees with the run so far. Checkpoints are compared on rank 0 only."""

    past: Past
    records: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the steps of this part of the run
    steps: int = 0  # replayed
    recorded: int = 0  # of these
    missing: dict[str, None] = field(default_factory=dict)  # why records are missing
    saved: list[int] = field(default_factory=list)  # steps of the checkpoints
    largest: dict[str, float] = field(default_factory=dict)  # kind -> largest difference, as a share of the numbers
    first: str = ""  # difference, in words
    reasons: dict[str, None] = field(default_factory=dict)  # why bits are not promised

    @property
    def fails(self) -> bool:
        """Whether there is a difference where bits are promised."""
        return bool(self.first) and not self.reasons

    def find_records(self, starts: list[Entry], begin: int, end: int) -> None:
        # A replay repeats steps as a resume does, from where this start began or from a checkpoint that it has made.
        before = starts[:-1] if starts[-1]["step"] == begin else starts
        self.records, missing = repeated_records(self.past.metrics, begin, id_of_last(before))
        if not any(begin <= step < end for step in self.records) and not self.past.saves:
            why = missing or f"{self.past.metrics} lacks their records"
            raise UserError(
                f"nothing to compare steps {begin:,} to {end - 1:,} with: no checkpoint is left, and {why}; choose "
                "other steps, or restore the logs"
            )
        self.missing |= {missing: None} if missing and end - 1 not in self.records else {}

    def step(self, result: StepResult) -> None:
        """Compare a step with its record, if there is one."""
        self.steps += 1
        if record := self.records.get(result.step):
            self.recorded += 1
            for name, kind in COMPARED.items():
                here, there = getattr(result, name), math.nan if record.get(name) is None else record[name]
                here = here if math.isfinite(here) else math.nan  # as in metrics.jsonl
                numbers = [torch.tensor([number], dtype=torch.float64) for number in (here, there)]
                self.compare(kind, name, result.step, METRICS, *numbers)

    def checkpoint(self, content: dict) -> None:
        """Compare weights and optimizer with those of the checkpoint file of their step."""
        step, (file, saved) = content["step"], self.past.saves[content["step"]]
        self.saved.append(step)
        ours, theirs = tensors_of(content), tensors_of(saved)
        for name in ours | theirs:
            kind = "weights" if name in content["model"] else "optimizer"
            self.compare(kind, name, step, file, *(found.get(name, torch.empty(0)) for found in (ours, theirs)))

    def compare(self, kind: str, name: str, step: int, file: str, here: torch.Tensor, there: torch.Tensor) -> None:
        """Compare the bits of two tensors."""
        self.largest.setdefault(kind, 0.0)
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            found, share = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (here, there)], math.inf
        elif (differs := here.flatten().view(torch.uint8) != there.flatten().view(torch.uint8)).any():
            at = int(differs.view(torch.uint8).argmax()) // here.element_size()
            found = [str(tensor.flatten()[at].item()) for tensor in (here, there)]
            name += str([*map(int, np.unravel_index(at, here.shape))]) * (here.numel() > 1)
            share = float(((here - there).abs().max() / here.abs().max()).nan_to_num(math.inf))
        else:
            return
        self.largest[kind] = max(self.largest[kind], share)
        self.first = self.first or f"{name} of step {step:,} is {found[0]}, but {found[1]} in {file}"

    def __str__(self) -> str:
        many = f"{len(self.saved)} checkpoints up to" if len(self.saved) > 1 else "the checkpoint of"
        what = ["losses", "norms"] * bool(self.recorded) + [f"{many} step {step:,}" for step in self.saved[-1:]]
        text = f"{' and '.join(filter(None, (', '.join(what[:-1]), *what[-1:])))} equal, bit for bit"
        if self.first:
            text = "largest difference, as a share of the largest number: "
            text += ", ".join(f"{kind} {share:.2g}" for kind, share in self.largest.items())
            text += f"; bits are not promised: {', '.join(self.reasons)}"
        if missing := self.steps - self.recorded:
            why = ", ".join(self.missing) or f"{METRICS} lacks them"
            text += f"; losses and norms of {counted(missing, 'step')} not compared: {why}"
        return f"{counted(self.steps, 'step')}: {text}"


def tensors_of(content: dict) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's tensors of a checkpoint, by name."""
    state = content["optimizer"].get("state", {})
    return content["model"] | {f"{kind} of {name}": of[kind] for name, of in state.items() for kind in of}


def changes(entry: Entry, ranks: Ranks) -> list[str]:
    """Return why a part of the run may have other bits here: what differs from the start that trained it."""
    commit, is_exact = git_commit(), entry["options"]["deterministic"]
    here: dict[str, Any] = {} if is_exact else {"ranks": ranks.world_size}
    # The name of a CPU has its threads.
    here |= {"device": device_name(ranks.device), "torch": str(torch.__version__), "commit": commit}
    found = [difference({name: entry.get(name) for name in here}, here)]
    found += ["files have changed since the commit"] * commit.endswith("+")
    found += ["CUDA without --deterministic"] * (ranks.device.type == "cuda" and not is_exact)
    return [*filter(None, found)]


# ---------------------------------------------------------------------------------------------------------------------
# the replay


def build_part(
    past: Past, checkpoint: dict | None, starts: list[Entry], device: str, ranks: Ranks, held: ExitStack
) -> Run:
    """Build a run, which writes nothing, that continues as the last of these starts did."""
    entry = starts[-1]
    if ranks.device.type == "cpu":
        torch.set_num_threads(entry["threads"])
    trained = trained_with(entry)
    step = checkpoint["step"] if checkpoint else 0
    sources = ranks.on_each(lambda: recorded_sources(trained, entry["sources"], step, past.newest["data_fingerprint"]))
    tokenizer = tokenizer_of([source.shards for source in sources], trained.tokenizer, TokenizerRecord.of(past.newest))
    # Bad steps are skipped, and the run's own records say where it ended.
    asked = TrainConfig(**entry["options"] | {"device": device, "max_bad_steps": 0})
    history = History(asked, decisions=entry["decisions"], checkpoint=checkpoint)
    plan = settle(history, Data(sources, (), *tokenizer), ranks, starts)
    log = RunLog(plan.config, replace(ranks, rank=1), plan.schedule.max_steps)  # which prints nothing
    return build(plan, log, held)


def replay(past: Past, device: str, ranks: Ranks, held: ExitStack) -> Comparison:
    """Train in memory and compare, up to the first difference where bits are promised."""
    comparison, starts = Comparison(past), past.newest["starts"]
    light = ranks.broadcast(past.checkpoint and past.checkpoint | WITHOUT_TENSORS)
    checkpoint = past.checkpoint or light
    first, end_of_all = checkpoint["step"] if checkpoint else 0, past.last + 1
    resumed = sorted({entry["step"] for entry in starts if first < entry["step"] < end_of_all})
    with ProgressBar(
        desc="replaying", total=end_of_all - first, unit="step", delay=3, disable=not ranks.is_main
    ) as bar:
        for begin, end in pairwise([first, *resumed, end_of_all]):
            so_far = [entry for entry in starts if entry["step"] <= begin]
            run = build_part(past, checkpoint, so_far, device, ranks, held)
            state, found = run.state, changes(so_far[-1], ranks)
            comparison.reasons |= dict.fromkeys(found)
            ranks.on_main(partial(comparison.find_records, so_far, begin, end))
            if ranks.is_main:
                print(printable(f"steps {begin:,} to {end - 1:,}: {', '.join(found) or AS_RECORDED}"), flush=True)
            with closing(run.training_batches()) as batches:
                while state.step < end:
                    pending = train_step(run, batches)
                    run.results.add(pending)
                    comparison.step(pending.result())
                    state.step += 1
                    state.rows_consumed += run.plan.schedule.rows_per_step
                    if state.step in past.saves:
                        content = capture(run).wait()
                        ranks.on_main(partial(comparison.checkpoint, content))
                    bar.update(1)
                    if ranks.any(comparison.fails):
                        return comparison
            if end < end_of_all:
                checkpoint = capture(run).wait()
                del run, batches  # the next part builds a model of its own
                gc.collect()
    return comparison


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
        sent = ranks.broadcast(past and replace(past, checkpoint=None, saves=dict.fromkeys(past.saves, ("", {}))))
        try:
            comparison = replay(past or sent, options.device, ranks, held)
        except Stopped as stopped:
            return 128 + signal.Signals[stopped.reason]
        if ranks.is_main:
            print(f"first difference: {comparison.first}" if comparison.fails else comparison)
        return int(ranks.any(comparison.fails))


if __name__ == "__main__":
    run_cli(main)
