"""All that tests know of the inside of training: building a run, faults at named points, its records and checkpoints.

A test that needs anything of a run besides the command line, its output and the files that a user reads calls a
function here. So a change of the training side changes this file, and no test.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import COUNTED, TINY, load
from torch import nn

import evaluation
import train
from model import GPT, GPTConfig
from steadygpt.base.durable import UncachedFile
from steadygpt.checkpoint import files
from steadygpt.checkpoint.files import FORMAT_VERSION, WITHOUT_RUN
from steadygpt.checkpoint.writer import CheckpointWriter
from steadygpt.config import STORED, TrainConfig, parse_args
from steadygpt.data import tokenizer as tokenizers
from steadygpt.data.order import BLOCK_ROWS, Phase
from steadygpt.inference import scoring
from steadygpt.log.metrics import METRICS, read_records
from steadygpt.log.runlog import RunLog
from steadygpt.machine import parallel
from steadygpt.machine.ranks import Ranks
from steadygpt.mirror.uploads import Uploads
from steadygpt.run import saving
from steadygpt.start import build, memory
from steadygpt.start import data as start_data
from steadygpt.start.find import Start, find_start, with_checkpoint_dir
from steadygpt.start.settle import settle

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------------------
# a run in this process


def _count_once(config, *about, count=memory.micro_step_bytes) -> tuple[int, int]:
    """Return micro_step_bytes(), which takes twice as long as all else in a run of eight steps.

    It depends on few options. The processes of a test session share what they have counted.
    """
    names = "activation_checkpointing compile context_length loss_chunk_size mini_batch_size precision sharding"
    config = TrainConfig(**{name: getattr(config, name) for name in names.split()})
    path = Path(os.environ[COUNTED], hashlib.sha256(repr((config, about)).encode()).hexdigest())
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(count(config, *about), file)
        os.replace(file.name, path)
    return tuple(json.loads(path.read_text()))


memory.micro_step_bytes = _count_once


def built(*flags: str, ranks: Ranks | None = None):
    """Return a run that writes nothing, for the functions below."""
    ranks = ranks or Ranks(CPU)
    command, set_by = parse_args([*TINY, *flags, "--dry_run"])
    start, asked, _ = find_start(with_checkpoint_dir(command, set_by), set_by, ranks)
    data = start_data.open_data(start, asked, ranks)
    options = settle(start, asked, data, ranks)
    build.check_start(start, options.of_launch, data)
    return build.build(start, options, data, ranks, RunLog(options.of_launch, ranks))


def settled(run) -> TrainConfig:
    """Return the options that the run trains with."""
    return run.config


def model_of(run, wrapped: bool = False) -> nn.Module:
    """Return the model with the weights, or the one after compile and DDP."""
    return run.forward if wrapped else run.model


def optimizer_of(run) -> torch.optim.Optimizer:
    return run.optimizer


def state_of(run):
    """Return what changes besides model and optimizer: step, rows_consumed, loss, scores, ..."""
    return run.state


def batches_of(run):
    """Return the batches of the run from its next step on, with the methods next() and close()."""
    return run.training_batches()


def agree(run) -> bool:
    """Return whether the ranks have agreed on a timed save before a step.

    Raises: Stopped.
    """
    saving.ask_for_save(run)
    return run.requests.agree()


def take_step(run, batches):
    """Take a step; return what it measured: updated, bad, loss, grad_norm."""
    return train.train_step(run, batches)


def rows_of(run, first: int, count: int) -> np.ndarray:
    """Return rows that the run trains on, (count, T + 1)."""
    return run.rows.read(first, count)


def validation_rows_of(run, name: str = "") -> np.ndarray:
    """Return all rows of a validation set, by default the first one, (rows, T + 1)."""
    rows = _val_set(run, name)
    return rows.read(0, rows.rows_per_epoch)


def validate(run, name: str = "", tokenizer: str = "", eval_tokens: int | None = None) -> dict[str, float]:
    """Validate a set, by default the first one; return its scores. Without a tokenizer, no bytes are known."""
    if eval_tokens is not None:
        run = replace(run, config=replace(run.config, eval_tokens=eval_tokens))
    loaded = tokenizers.load_tokenizer(tokenizers.TokenizerRecord(tokenizer)) if tokenizer else None
    return evaluation.validate(replace(run, tokenizer=loaded), _val_set(run, name))


def _val_set(run, name: str):
    return next(rows for set_name, rows in run.val_sets.items() if name in ("", set_name))


# ---------------------------------------------------------------------------------------------------------------------
# faults at named points: each function below changes this process, up to the end of acting_here()

_POINTS = [
    (train, "train_step"), (train, "train_to_end"), (build, "build_model"), (build, "tokenizer_on_all"),
    (parallel, "shard_model"), (GPT, "forward"), (GPT, "loss_terms"), (train.BatchLoader, "next"),
    (Ranks, "step_numbers"), (saving, "content_of"), (nn.utils, "clip_grad_norm_"), (torch, "save"),
    (torch, "compile"), (os, "fsync"), (os, "link"), (os, "replace"), (os, "unlink"), (UncachedFile, "write"),
    (os, "rename"), (zipfile, "ZipFile"), (tokenizers, "load_tokenizer"), (scoring, "score_batch"), (RunLog, "open"),
    (RunLog, "begin"),
]  # fmt: skip


@contextlib.contextmanager
def acting_here(*faults: Callable[[int], object]) -> Iterator[None]:
    """Let faults act on the runs of this process, as on rank 0, up to the end of the block."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in _POINTS:
            patched.setattr(owner, name, getattr(owner, name))  # at the end, this undoes what a fault puts there
        for fault in faults:
            fault(0)
        yield


class Stop:
    """The stop request of a run."""

    def __init__(self, stop):
        self._stop = stop

    @property
    def asked(self) -> bool:
        return bool(self._stop.asked)

    def pass_deadline(self) -> None:
        """Let --max_hours be over."""
        self._stop.deadline = 0


def around_step(
    before: Callable | None = None, next_batch: Callable | None = None, after: Callable | None = None
) -> None:
    """Install callbacks around each step.

    Args:
        before: before(step, stop), called at the start of each step.
        next_batch: next_batch(step, batches), called in place of batches.next().
        after: after(step, model, optimizer), called when a step is complete, but not when a stop interrupted it.
    """
    train_step = train.train_step

    def wrapped_step(run, batches):
        step = run.state.step
        if before:
            before(step, Stop(run.requests))
        wrapped = SimpleNamespace(next=lambda: next_batch(step, batches)) if next_batch else batches
        result = train_step(run, wrapped)  # raises Stopped when interrupted
        if after:
            after(step, run.model, run.optimizer)
        return result

    train.train_step = wrapped_step


def before_validation_batch(do: Callable[[], object]) -> None:
    """Call do() before each validation batch. Only those are read while gradients are disabled."""
    next_batch = train.BatchLoader.next

    def wrapped_next(loader):
        if not torch.is_grad_enabled():
            do()
        return next_batch(loader)

    train.BatchLoader.next = wrapped_next


def before_task_batch(do: Callable[[], object]) -> None:
    """Call do() before each batch of questions of a task, such as HellaSwag."""
    score_batch = scoring.score_batch
    scoring.score_batch = lambda *args: (do(), score_batch(*args))[1]


def around_model(before: Callable[[], object] = bool, after: Callable[[Any], object] = bool) -> None:
    """Call before() and after(model) when the model of a run is built."""
    build_model = build.build_model

    def wrapped_build(*args):
        before()
        model = build_model(*args)
        after(model)
        return model

    build.build_model = wrapped_build


def before_sharding(do: Callable[[Any], object]) -> None:
    """Call do(model) before FSDP shards the model."""
    shard_model = parallel.shard_model
    parallel.shard_model = lambda model, *args: (do(model), shard_model(model, *args))[1]


def in_place_of_training(do: Callable[[], int]) -> None:
    """Call do() when a run is built and its folder is open, in place of its first step and its first save."""
    train.train_to_end = lambda run: do()


def load_tokenizer_by(load_tokenizer: Callable) -> None:
    """Call load_tokenizer(record) when a run loads its tokenizer, for samples and tasks."""
    tokenizer_on_all = build.tokenizer_on_all

    def loading(*args):
        tokenizers.load_tokenizer = load_tokenizer
        return tokenizer_on_all(*args)

    build.tokenizer_on_all = loading


def replace_loss_terms(terms: Callable) -> None:
    """Let terms(model, x, targets) be the terms of the loss."""
    GPT.loss_terms = terms


def change_loss(change: Callable[[Any, dict], dict]) -> None:
    """Replace the terms of the loss of each micro-batch by change(model, terms), also in validations and estimates."""
    forward = GPT.forward
    GPT.forward = lambda model, *args, **options: change(model, forward(model, *args, **options))


def add_metrics(measure: Callable[[Any, int], dict[str, torch.Tensor]]) -> None:
    """Log the scalars measure(model, rank) with each step, by name."""
    train_step, step_numbers = train.train_step, Ranks.step_numbers
    models = []

    def wrapped_step(run, batches):
        models[:] = [run.model]
        return train_step(run, batches)

    def more_numbers(ranks, columns, requests):
        measured = measure(models[0], ranks.rank)
        columns = columns | {name: parallel.full_tensor(scalar) for name, scalar in measured.items()}
        return step_numbers(ranks, columns, requests)

    train.train_step = wrapped_step
    Ranks.step_numbers = more_numbers


def change_grad_norm(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the gradient norm of each step, which is clipped before, by change(norm)."""
    clip = nn.utils.clip_grad_norm_
    nn.utils.clip_grad_norm_ = lambda *args, **options: change(clip(*args, **options))


def change_captured(change: Callable[[dict], dict]) -> None:
    """Replace the content of each save, when it is captured, by change(content)."""
    content_of = saving.content_of
    saving.content_of = lambda run: change(content_of(run))


def around_write(do: Callable[[int, Callable[[], None]], object]) -> None:
    """Call do(number, write) in place of the writing of a checkpoint, which write() does; it is numbered from 0."""
    save, number = torch.save, -1

    def wrapped_save(*args):
        nonlocal number
        number += 1
        do(number, lambda: save(*args))

    torch.save = wrapped_save


def around_save_calls(do: Callable) -> None:
    """Call do(save, call, name, *files) before each system call of the saving thread.

    Saves are numbered from 1, the calls of a save from 0. An fsync in another thread calls do(0, 0, "fsync", file).
    """
    save, call = 0, -1

    def intercepted(name: str, function: Callable) -> Callable:
        def wrapper(*args):
            nonlocal save, call
            if threading.current_thread().name.startswith("checkpoint"):
                save, call = (save + 1, 0) if name == "write" else (save, call + 1)
                do(save, call, name, *args)
            elif name == "fsync":
                do(0, 0, name, *args)
            return function(*args)

        return wrapper

    for name in ("fsync", "link", "replace", "unlink"):
        setattr(os, name, intercepted(name, getattr(os, name)))
    UncachedFile.write = intercepted("write", UncachedFile.write)  # called once per save of a model this small


def around_start_calls(do: Callable) -> None:
    """Call do(call, name, *files) before each system call that changes a file, up to the first record of a launch.

    Calls are numbered from 0; the opening of the log and the first record itself count as calls.
    """
    call = -1
    is_over = False

    def intercepted(name: str, function: Callable) -> Callable:
        def wrapper(*args, **options):
            nonlocal call, is_over
            if not is_over:
                call += 1
                is_over = name == "begin"
                do(call, name, *args)
            return function(*args, **options)

        return wrapper

    for name in ("fsync", "link", "replace", "rename", "unlink"):
        setattr(os, name, intercepted(name, getattr(os, name)))
    UncachedFile.write = intercepted("write", UncachedFile.write)
    RunLog.open = intercepted("open", RunLog.open)
    RunLog.begin = intercepted("begin", RunLog.begin)


def write_half(file, data) -> None:
    """Write half of what a "write" of around_save_calls() would write."""
    os.write(file.fileno(), data[: len(data) // 2])


def open_checkpoints_by(opened: Callable[[Path, Callable], Any]) -> None:
    """Call opened(path, open) in place of open(path) when a checkpoint is read; it returns a binary file."""
    real = zipfile.ZipFile
    zipfile.ZipFile = lambda path: real(opened(Path(path), partial(open, mode="rb")))


def alerts_of_runs() -> list[tuple[str, str]]:
    """Return a list that gets each event that a run sends from now on, with its text."""
    alerts, real = [], RunLog.open

    def open_and_listen(log, *args):
        real(log, *args)
        log.alerts = SimpleNamespace(send=lambda *alert: alerts.append(alert), close=lambda: None)

    RunLog.open = open_and_listen
    return alerts


# ---------------------------------------------------------------------------------------------------------------------
# records of a run


def open_log(config: TrainConfig, start_step: int | None, ranks: Ranks | None = None) -> RunLog:
    """Open the log of a run on rank 0, without the load of the machine; start_step is None for a new run."""
    Path(config.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    log = RunLog(config, ranks or Ranks(CPU), open(Path(config.checkpoint_dir, ".lock"), "a"))
    parent = "" if start_step is None else "0" * 16
    log.load_at_s = math.inf
    log.open(start_step or 0, {"run": config.run_name, "id": secrets.token_hex(8), "parent": parent, "settings": {}})
    return log


def metrics(folder, key: str) -> dict[int, float]:
    """Return step -> value of one metric in metrics.jsonl, its segments joined; fail if a step is logged twice."""
    found = {}
    for record in read_records(Path(folder) / METRICS, key):
        assert record["step"] not in found, f"step {record['step']} is logged twice"
        found[record["step"]] = record[key]
    return found


def launches(folder) -> list[dict]:
    """Return the line of each launch in the metrics.jsonl of a run."""
    records = map(json.loads, Path(folder, METRICS).read_text().splitlines())
    return [record for record in records if "first_step" in record]


def status_of(folder) -> dict:
    """Return the content of status.json."""
    return json.loads(Path(folder, "status.json").read_text())


Scores = dict[int, dict[str, float]]  # step -> name -> score


def evaluations(folder) -> Scores:
    """Return step -> scores of the steps that led to the latest checkpoint of a run."""
    found: Scores = {}
    for record in read_records(Path(folder) / METRICS):
        scores = {name: score for name, score in record.items() if name.startswith(("val_", "hellaswag"))}
        if scores:
            found.setdefault(int(record["step"]), {}).update(scores)
    return found


def best_model(folder) -> tuple[int, float]:
    """Return the step of best_model.pt and its validation loss."""
    content = load(Path(folder, files.BEST))
    return content["step"], content["scores"]["val_loss"]


SCORE_FILES: set[str] = set()  # files of a run that hold scores, besides metrics.jsonl and checkpoints


def forget_scores(folder, name: str) -> None:
    """Remove a score of all steps from the records."""
    for path in files.checkpoint_files(Path(folder)):
        alter(path, lambda content: content["scores"].pop(name, None))


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


class LaunchRecord(NamedTuple):
    """What a checkpoint says of the launch that wrote it."""

    id: str
    parent: str
    settings: dict[str, Any]  # all that determines a step


def launch_in(path) -> LaunchRecord:
    return LaunchRecord(**load(path)["launch"])


def options_in(path) -> TrainConfig:
    """Return the options that the run of a checkpoint has trained with."""
    content = load(path)
    return replace(TrainConfig(**content["options"]), vocab_size=content["model_config"]["vocab_size"])


def asked_in(path) -> dict[str, Any]:
    """Return the options of the last launch as they were asked for."""
    return options_of(load(path))


def phase_in(path) -> Phase:
    """Return the phase of a run's mixture: number, first_row, shares and rows_used_before, by digest."""
    return Phase(**load(path)["data"]["phase"])


def next_phase(before: Phase | None, row: int, shares: dict[str, int], seed: int = 7) -> Phase:
    """Return the phase of a launch at a row, with these shares of the sources; without one before, the first."""
    start = Start(state=files.TrainState(rows_consumed=row))
    if before:
        start.data = {"phase": before, "sources": {}}
    return start_data.next_phase(start, TrainConfig(seed=seed, allow_changes=True), {}, shares)


def start_from(checkpoint: dict) -> Start:
    """Return the start of a run that resumes from the content of a checkpoint."""
    state = files.TrainState(**{name: checkpoint[name] for name in files.TrainState.__annotations__})
    return Start(checkpoint, state=state, data=checkpoint["data"])


def rows_given_in(path) -> dict[str, int]:
    """Return digest -> rows of a source, or of an earlier one, that the steps before the current phase have used."""
    return phase_in(path).rows_used_before


def sources_in(path) -> dict[str, tuple[str, str]]:
    """Return name -> (folder, digest) of the sources."""
    return load(path)["data"]["sources"]


def heads(folder) -> list[tuple[str, int | None]]:
    """Return the name and the step of each checkpoint of a folder, the newest first; None if it cannot be read."""
    return [(file.path.name, file.head.step if file.head else None) for file in files.scan(Path(folder))]


def found(which: str, folder) -> files.Found:
    """Return the checkpoint of --resume `which`: path, checkpoint, and damaged, a line for each skipped path."""
    return files.find_checkpoint(which, Path(folder))


def opened(which: str, folder) -> tuple[Path, dict]:
    """Return the path and the content of the checkpoint that a command names."""
    return files.open_checkpoint(which, Path(folder))


def latest(folder) -> dict:
    """Return the content of the newest intact checkpoint of a folder."""
    return found("latest", folder).checkpoint


def verified(path) -> dict:
    """Return the content of a checkpoint, which must be intact."""
    return files.read_checkpoint(Path(path))


def assert_same_state(one: dict, other: dict) -> None:
    """Assert that weights, optimizer state and position are bitwise equal."""
    for key in ("step", "rows_consumed", "loss", "recent_losses"):
        assert one[key] == other[key], key
    assert one["model"].keys() == other["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
    assert one["optimizer"].keys() == other["optimizer"].keys()
    for name, moments in one["optimizer"].items():
        for kind, tensor in moments.items():
            assert torch.equal(tensor, other["optimizer"][name][kind]), (name, kind)


def weights_content(model: dict, config: GPTConfig, tokenizer="bytes", step=0) -> dict:
    """Return a checkpoint of weights only, as convert_hf.py writes it."""
    return {
        "format_version": FORMAT_VERSION, "step": step, "rows_consumed": 4 * step, "model": model,
        "model_config": vars(config), "tokenizer": tokenizer, "tokenizer_sha256": "",
        "document_token": "<|endoftext|>", "tokenizer_json": "", "tokenizer_files": "", "saved_at": 0.0,
    } | WITHOUT_RUN  # fmt: skip


def run_content(step: int, **more) -> dict:
    """Return a checkpoint of a run with 4 rows per step and no optimizer; one weight is equal to the step.

    It was saved a second after that of the step before.
    """
    options = {name: getattr(TrainConfig(), name) for name in STORED}
    data = {
        "phase": vars(Phase(0, 0, {"0": BLOCK_ROWS}, {"0": 0})), "sources": {"data": ("data", "0")},
        "first_step": 0, "first_row": 0, "shards": [],
    }  # fmt: skip
    progress = {
        "loss": 3.25, "elapsed_s": 0.0, "recent_losses": [], "bad_steps": 0, "cooled_down": False, "scores": {},
        "validated_on": "",
        "epoch": step / 10, "options": options | {"total_batch_size": 4 * TrainConfig.context_length}, "data": data,
        "launch": {"id": "0" * 16, "parent": "", "settings": {}}, "saved_at": 1e9 + step,
    }  # fmt: skip
    model = {"weight": torch.full((1000,), float(step))}
    return weights_content(model, GPTConfig(), step=step) | progress | more


def options_of(content: dict) -> dict[str, Any]:
    """Return the options in a checkpoint's content as they were asked for."""
    return content["options"]


def is_of_a_run(content: dict) -> bool:
    """Return whether a run can resume from a checkpoint's content."""
    return content["launch"] is not None


def with_options(content: dict, **options) -> dict:
    """Return a checkpoint of a run that was asked for other options."""
    return content | {"options": content["options"] | options}


def launched_again(content: dict, id: str) -> dict:
    """Return the content as a launch that resumes from it has it."""
    return content | {"launch": {"id": id, "parent": content["launch"]["id"], "settings": {}}}


def write_checkpoint(folder, step: int, name: str, *other_names: str, **more) -> None:
    """Write the checkpoint of a step under all these names, with a date that is older the later the step."""
    torch.save(run_content(step, **more), folder / name)
    os.utime(folder / name, ns=(0, 10**18 - step * 10**9))
    for other in other_names:
        os.link(folder / name, folder / other)


def alter(path, change: Callable[[dict], object] = bool, **fields) -> None:
    """Write a checkpoint with other fields, or after change(content), as if a run had saved it so."""
    content = load(path)
    change(content)
    torch.save(content | fields, path)


def mock_log(folder) -> mock.Mock:
    """Return a stand-in for the log of a run that has locked the folder."""
    Path(folder).mkdir(exist_ok=True)
    lock = open(Path(folder, ".lock"), "a")
    return mock.Mock(folder_lock=lock, size_of=lambda name: 0)


class Writer(CheckpointWriter):
    """A writer of a run's checkpoints."""

    def save(self, step: int, content: dict, names: list[str]) -> None:
        """Write a checkpoint and wait for it."""
        self.start(content | {"step": step}, names)
        self.wait()


def writer_of(config: TrainConfig, log, uploads: Uploads | None = None) -> Writer:
    """Return the writer of a run's checkpoints: save(step, content, names), start(content, names), wait."""
    return Writer(config, log.folder_lock, log, after_write=uploads.start if uploads else lambda: None)
