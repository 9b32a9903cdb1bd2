"""Replay of steps of a run, in memory, compared bit by bit with what the run recorded and saved.

python replay.py --step 4213                        # of checkpoints/, from the nearest checkpoint before it
python replay.py --steps 4000:4250 --checkpoint_dir checkpoints/run7
torchrun --nproc_per_node=2 replay.py --step 4213   # of a run on two ranks

Each part of the run is trained with the options, the batch and the data of its start. A replay writes no files.
"""

import json
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
from model import GPT
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar, say
from steadygpt.checkpoint.files import LATEST, git_commit, intact_checkpoints, read_checkpoint
from steadygpt.checkpoint.mirror import Damaged, Mirror
from steadygpt.checkpoint.mirror import Entry as Uploaded
from steadygpt.config import TrainConfig
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.log.runlog import METRICS, RunLog, run_of
from steadygpt.machine.device import device_name
from steadygpt.machine.ranks import Ranks, Stopped, end_with_torchrun, joined
from steadygpt.run.plan import settle
from steadygpt.run.results import StepResult
from steadygpt.run.start import Start, resume_config, shared
from steadygpt.run.starts import Entry, known_shards, starts_of
from train import Run, build_run, capture, train_step

AS_RECORDED = "same ranks, device, torch and commit as recorded"
COMPARED = {"loss": "losses", "grad_norm": "norms", "lr": "learning rates"}


@dataclass(frozen=True)
class ReplayOptions:
    """The options of replay.py."""

    # fmt: off
    step: int | None = option(None, "short for --steps STEP:STEP")
    steps: str = option("", "A:B: the steps from A to B, both included, numbered as in metrics.jsonl; step A follows "
                        "the checkpoint of step A, and the checkpoint of step B is compared too")
    checkpoint_dir: str = option("checkpoints", "folder of the run's checkpoints")
    mirror: str = option("", "URL of the run's copy in an object store (default: its --mirror)")
    device: str = option("auto", "auto, cpu, cuda or mps")
    # fmt: on

    def span(self) -> tuple[int, int]:
        """Return the first and the last step."""
        if (self.step is None) == (not self.steps):
            raise UserError("expected the steps to replay: either --step N or --steps A:B")
        match = re.fullmatch(r"(\d+):(\d+)", self.steps or f"{self.step}:{self.step}")
        if not match or int(match[1]) > int(match[2]):
            raise OptionError("steps", repr(self.steps), "A:B, such as 4000:4250")
        return int(match[1]), int(match[2])


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints and records


@dataclass(frozen=True)
class Past:
    """The checkpoints and records of the steps to replay. Tensors are on rank 0 only."""

    newest: dict  # checkpoint, without tensors
    start: Start  # of the replay
    last: int  # step to replay
    saves: dict[int, tuple[str, dict]]  # checkpoints to compare with: step -> file, content
    metrics: str  # the file that has the records
    records: dict[int, dict[str, Any]]  # of steps


def find_past(options: ReplayOptions, first: int, last: int) -> Past:
    """Find the checkpoint to start from, and the checkpoints and records to compare with.

    Raises: UserError if nothing is left to start from, or to compare with.
    """
    files = [(str(path), checkpoint) for path, checkpoint in intact_checkpoints(Path(options.checkpoint_dir))]
    mirror, of_mirror = None, dict[int, Uploaded]()
    try:
        if url := options.mirror or (files and files[0][1]["train_config"].get("mirror")):
            mirror = Mirror(url)
            index = mirror.patiently(mirror.index)
            if files and index.run != files[0][1]["train_config"]["run_name"]:
                raise UserError(f"{url} belongs to the run {index.run}")
            of_mirror = {entry.step: entry for entry in index.checkpoints.values()}
            files += [download(mirror, index.checkpoints[LATEST])] if of_mirror and not files else []
    except UserError as error:
        if not files:
            raise
        mirror = None
        say(f"warning: without the mirror: {error}")
    newest = files[0][1] if files else {}
    if not newest.get("train_config"):
        raise UserError(f"no checkpoints of a run in {options.checkpoint_dir}; name their folder with --checkpoint_dir")
    metrics, records = read_records(newest["train_config"], mirror)
    end = max([newest["step"], *(step + 1 for step in records)])
    if first >= end or last > end:
        raise UserError(f"--steps {first}:{last}: the run has taken steps 0 to {end - 1:,}; name some of these")
    saves = {checkpoint["step"]: (file, checkpoint) for file, checkpoint in files if is_of_run(checkpoint, newest)}
    for step in sorted({*of_mirror} - {*saves}, reverse=True):
        before = max((step for step in saves if step <= first), default=-1)
        if mirror and before < step <= last + 1:
            try:
                file, checkpoint = download(mirror, of_mirror[step])
                saves |= {step: (file, checkpoint)} if is_of_run(checkpoint, newest) else {}
            except Damaged as error:
                say(f"warning: skipped {error}")
    before = max((step for step in saves if step <= first), default=0)
    from_scratch = starts_of(newest)[0]["options"].get("init_from", "scratch") == "scratch"
    if before not in saves and not (from_scratch and first == 0):
        left = [f"from {min(saves):,} on"] * bool(saves) + [f"--steps 0:{last}"] * from_scratch
        raise UserError(
            f"{options.checkpoint_dir}: no checkpoint of step {first:,} or before it is left; steps that can be "
            f"replayed: {', or '.join(left)}"
        )
    start, last = Start(checkpoint=saves[before][1]) if before in saves else Start(), min(last, end - 1)
    saves = {step: save for step, save in saves.items() if before < step <= last + 1}
    if not saves and not any(before <= step <= last for step in records):
        raise UserError(f"nothing to compare with: no checkpoint up to step {last + 1:,}, and no record in {metrics}")
    return Past(newest | {"model": {}, "optimizer": {}}, start, last, saves, metrics, records)


def download(mirror: Mirror, entry: Uploaded) -> tuple[str, dict]:
    """Return a checkpoint of a mirror; its file is temporary, and takes space as long as the content is mapped."""
    with TemporaryDirectory() as folder:
        path = Path(folder, entry.file)
        mirror.download(entry, path)
        return f"{mirror.url}/{entry.file}", read_checkpoint(path)


def is_of_run(checkpoint: dict, newest: dict) -> bool:
    """Return whether a run has passed a checkpoint on its way to the newest one; others are of steps it has undone."""
    own, starts = starts_of(checkpoint), starts_of(newest)
    end = starts[len(own)]["step"] if len(own) < len(starts) else newest["step"]
    return own == starts[: len(own)] and checkpoint["step"] <= end


def read_records(config: dict, mirror: Mirror | None) -> tuple[str, dict[int, dict]]:
    """Return the name of metrics.jsonl, and its records of steps."""
    path, records = Path(config["logdir"], METRICS), dict[int, dict]()
    name, content = str(path), b""
    if path.exists() and (run := run_of(path.parent)) != config["run_name"]:
        name = f"{name}, of the run {run},"
    elif path.exists():
        content = path.read_bytes()
    elif mirror:
        with suppress(UserError):  # it has none
            content = mirror.patiently(lambda: mirror.read(f"logs/{METRICS}"))
            name = f"{mirror.url}/logs/{METRICS}"
    for line in content.splitlines():
        with suppress(ValueError):  # a run is just writing the last one
            record = json.loads(line)
            records |= {record["step"]: record} if "grad_norm" in record else {}
    return name, records


# ---------------------------------------------------------------------------------------------------------------------
# the comparison


@dataclass
class Comparison:
    """How closely a replay agrees with the run so far. Checkpoints are compared on rank 0 only."""

    past: Past
    steps: int = 0  # replayed
    recorded: int = 0  # of these
    saved: list[int] = field(default_factory=list)  # steps of the checkpoints
    largest: dict[str, float] = field(default_factory=dict)  # kind -> largest difference, relative but for weights
    first: str = ""  # difference, in words
    reasons: dict[str, None] = field(default_factory=dict)  # why bits are not promised

    @property
    def fails(self) -> bool:
        """Whether there is a difference where bits are promised."""
        return bool(self.first) and not self.reasons

    def add(self, kind: str, difference: float, text: str) -> None:
        """Note a difference."""
        self.largest[kind] = max(self.largest[kind], difference)
        self.first = self.first or text

    def step(self, result: StepResult) -> None:
        """Compare a step with its record, if there is one."""
        self.steps += 1
        record = self.past.records.get(result.step, {})
        self.recorded += bool(record)
        for name, kind in COMPARED.items() if record else ():
            self.largest.setdefault(kind, 0.0)
            measured, there = getattr(result, name), record.get(name)
            here = measured if math.isfinite(measured) else None  # as in metrics.jsonl
            if here != there:
                relative = math.inf if here is None or there is None else abs(here - there) / max(abs(here), abs(there))
                text = f"{name} of step {result.step:,} is {here}, but {there} in {self.past.metrics}"
                self.add(kind, relative, text)

    def checkpoint(self, content: dict) -> None:
        """Compare weights and optimizer with those of the checkpoint file of their step."""
        step, (file, saved) = content["step"], self.past.saves[content["step"]]
        ours, theirs = tensors_of(content), tensors_of(saved)
        self.saved.append(step)
        for name in ours | theirs:
            kind = "weights" if name in content["model"] else "optimizer"
            self.largest.setdefault(kind, 0.0)
            here, there = (tensors.get(name, torch.empty(0)) for tensors in (ours, theirs))
            if (here.shape, here.dtype) != (there.shape, there.dtype):
                found = f"{tuple(here.shape)} {here.dtype}, but {tuple(there.shape)} {there.dtype}"
                self.add(kind, math.inf, f"{name} of step {step:,} is {found} in {file}")
            elif (bits := here.flatten().view(torch.uint8) != there.flatten().view(torch.uint8)).any():
                at = np.unravel_index(int(bits.view(torch.uint8).argmax()) // here.element_size(), here.shape)
                found = f"{here[at].item()}, but {there[at].item()}"
                largest = float((here - there).abs().nan_to_num(math.inf).max())
                self.add(kind, largest, f"{name}{[*map(int, at)]} of step {step:,} is {found} in {file}")

    def __str__(self) -> str:
        """Return the result in a line."""
        what = ["losses", "norms"] * bool(self.recorded)
        if self.saved:
            many = f"{len(self.saved)} checkpoints up to" if len(self.saved) > 1 else "the checkpoint of"
            what.append(f"{many} step {self.saved[-1]:,}")
        text = " and ".join(filter(None, (", ".join(what[:-1]), what[-1]))) + " equal, bit for bit"
        if self.first:
            differences = ", ".join(f"{kind} {largest:.2g}" for kind, largest in self.largest.items())
            text = f"{differences} (largest difference; relative, but of weights and optimizer absolute)"
            text += f"; bits are not promised: {', '.join(self.reasons)}"
        if missing := self.steps - self.recorded:
            text += f"; losses and norms of {missing:,} steps not compared: {self.past.metrics} lacks them"
        if not self.saved:
            text += "; no checkpoint to compare"
        return f"{self.steps:,} step{'s' * (self.steps != 1)}: {text}"


def tensors_of(content: dict) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's tensors of a checkpoint, by name."""
    state = content["optimizer"].get("state", {})
    return content["model"] | {f"{kind} of {name}": of[kind] for name, of in state.items() for kind in of}


def changes(entry: Entry, ranks: Ranks) -> dict[str, None]:
    """Return why a part of the run may have other bits here: what differs from the start that trained it."""
    commit, is_exact = git_commit(), entry["options"].get("deterministic")
    here: dict[str, Any] = {} if is_exact else {"ranks": ranks.world_size}
    # The name of a CPU has its threads.
    here |= {"device": device_name(ranks.device), "torch": str(torch.__version__), "commit": commit}
    found = [f"{name} {entry.get(name)} -> {value}" for name, value in here.items() if value != entry.get(name)]
    if commit.endswith("+"):
        found.append("files have changed since the commit")
    if ranks.device.type == "cuda" and not is_exact:
        found.append("CUDA without --deterministic")
    return dict.fromkeys(found)


# ---------------------------------------------------------------------------------------------------------------------
# the replay


def build(past: Past, start: Start, starts: list[Entry], device: str, ranks: Ranks, held: ExitStack) -> Run:
    """Build a run, which writes nothing, that continues as the last of these starts did."""
    entry, known = starts[-1], known_shards(past.newest)
    if ranks.device.type == "cpu" and entry["threads"]:
        torch.set_num_threads(entry["threads"])
    config, _ = resume_config(entry["options"], TrainConfig(dry_run="measure"), given={})
    # micro_steps has set total_batch_size already. Bad steps are skipped, and the run's own records say where it ended.
    config = replace(config, device=device, micro_steps=0, max_bad_steps=0)
    sources = ranks.on_each(lambda: recorded_sources(entry, start.step or 0, known))
    tokenizer = TokenizerRecord.of(past.newest)
    data = Data(sources, (), *tokenizer_of([source.shards for source in sources], config.tokenizer, tokenizer))
    with torch.device("meta"):
        sketch = GPT(config.shape(data.vocab_size), initialize=False)
    settled = {"warmup_steps": "flag"}  # which keeps its value
    plan = settle(config, start, settled, data, starts, sketch, ranks, held)
    return build_run(plan, RunLog(plan.config, replace(ranks, rank=1)), held)  # a log that prints nothing


def replay(past: Past, device: str, ranks: Ranks, held: ExitStack) -> Comparison:
    """Train in memory and compare, up to the first difference where bits are promised."""
    comparison, starts, newest = Comparison(past), starts_of(past.newest), past.newest["step"]
    start = shared(past.start if ranks.is_main else None, ranks)
    first, end_of_all = start.step or 0, past.last + 1
    resumed = sorted({entry["step"] for entry in starts if first < entry["step"] < end_of_all})
    with ProgressBar(
        desc="replaying", total=end_of_all - first, unit=" steps", delay=3, disable=not ranks.is_main
    ) as bar:
        for begin, end in pairwise([first, *resumed, end_of_all]):
            so_far = [entry for entry in starts if entry["step"] <= begin]
            run = build(past, start, so_far, device, ranks, held)
            state, found = run.state, changes(so_far[-1], ranks)
            comparison.reasons |= found
            if ranks.is_main:
                print(f"steps {begin:,} to {end - 1:,}: {', '.join(found) or AS_RECORDED}", flush=True)
            with closing(run.training_batches()) as batches:
                while state.step < end:
                    if state.step >= newest:
                        comparison.reasons[f"no checkpoint has the options of the steps from {newest:,} on"] = None
                    pending = train_step(run, batches)
                    run.results.add(pending)
                    comparison.step(pending.result())
                    state.step += 1
                    state.rows_consumed += run.schedule.rows_per_step
                    if state.step in past.saves:
                        content = capture(run).wait()
                        ranks.on_main(partial(comparison.checkpoint, content))
                    bar.update(1)
                    if ranks.any(comparison.fails):
                        return comparison
            if end < end_of_all:
                content = capture(run).wait()
                start = shared(Start(checkpoint=content) if ranks.is_main else None, ranks)
    return comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Replay steps; return 1 if one of them differs although its bits are promised.

    Raises: UserError.
    """
    end_with_torchrun()
    about = "Train steps of a run again, in memory, and compare them with its records and checkpoints."
    options = parse_options(ReplayOptions, argv, about)
    first, last = options.span()
    with joined(options.device) as ranks, ExitStack() as held:
        past = ranks.on_main(lambda: find_past(options, first, last))
        sent = ranks.broadcast(past and replace(past, start=Start(), saves=dict.fromkeys(past.saves, ("", {}))))
        try:
            comparison = replay(past or sent, options.device, ranks, held)
        except Stopped as stopped:
            return 128 + signal.Signals[stopped.reason]
        if ranks.is_main:
            print(f"first difference: {comparison.first}" if comparison.fails else comparison)
        return int(ranks.any(comparison.fails))


if __name__ == "__main__":
    run_cli(main)
