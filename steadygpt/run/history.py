"""What a run continues: a checkpoint, weights or nothing; and the options that follow from it."""

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from steadygpt import code_digest
from steadygpt.base.durable import locked
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import labelled
from steadygpt.checkpoint import files
from steadygpt.checkpoint.mirror import Damaged, Mirror
from steadygpt.config import EXCLUSIVE, FIELDS, STORED, TrainConfig
from steadygpt.convert.weights import read_weights
from steadygpt.data.shards import Recorded, check_listing
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.machine.ranks import Ranks
from steadygpt.run.data import Data, find_data
from steadygpt.run.identity import RUN, Identity, read_run

WORDS = ("latest", "auto", *files.NAMED)  # that --resume accepts, besides files and folders
IN_USE = "wait for it to end, or use another --checkpoint_dir"
WITHOUT_TENSORS: dict[str, dict] = {"model": {}, "optimizer": {}}


@dataclass(frozen=True)
class History:
    """What a run continues, and what it is asked for. Tensors are on rank 0 only."""

    config: TrainConfig  # the options of this command; unset ones come from the checkpoint's run
    set_by: Mapping[str, str] = field(default_factory=dict)  # option of this command -> "flag" or "preset"
    decisions: Mapping[str, Any] = field(default_factory=dict)  # of the first launch, as far as they still hold
    checkpoint: dict | None = None
    weights: dict | None = None  # of --init_from; build() reads their tensors
    path: Path | None = None  # of the checkpoint
    is_fork: bool = False  # the checkpoint stays in its folder, and this run has its own
    run: Identity = field(default_factory=Identity)
    downloaded: Path | None = None  # a file from the mirror, which is moved to `path` once the run writes
    renamed: Mapping[Path, Path] = field(default_factory=dict)  # damaged file -> its new name once the run writes
    notes: tuple[str, ...] = ()  # for the plan

    @property
    def launches(self) -> list[files.Launch]:
        return self.checkpoint["launches"] if self.checkpoint else []

    @property
    def step(self) -> int:
        return self.checkpoint["step"] if self.checkpoint else 0

    @property
    def rows_consumed(self) -> int:
        return self.checkpoint["rows_consumed"] if self.checkpoint else 0

    @property
    def fingerprint(self) -> dict[str, list]:
        """The results of ShardSet.check() that the checkpoint has, by the key of the set."""
        return self.checkpoint["data_fingerprint"] if self.checkpoint else {}

    def without_tensors(self) -> "History":
        """Return the history that ranks other than 0 need."""
        checkpoint = self.checkpoint
        if checkpoint:
            checkpoint = checkpoint | WITHOUT_TENSORS
        weights = self.weights
        if weights:
            weights = weights | WITHOUT_TENSORS
        return replace(self, checkpoint=checkpoint, weights=weights)


def open_history(config: TrainConfig, set_by: Mapping[str, str], ranks: Ranks, stack: ExitStack) -> History:
    """Find on rank 0 what a run continues, and merge its options with those of this command.

    Args:
        set_by: see History.
        stack: holds the lock of the run's folder.
    """
    if ranks.world_size > 1:
        check_programs(ranks)
    ignored = ignored_options(config, ranks.broadcast(config), set_by, ranks)
    config = ranks.from_main(lambda: with_checkpoint_dir(config, set_by))
    folder = Path(config.checkpoint_dir)
    if ranks.world_size > 1 and config.resume in ("latest", "auto"):
        # A mirror has the newest checkpoint of all machines.
        has_mirror = ranks.from_main(lambda: bool(config.mirror or read_run(folder).places.get("mirror")))
        if not has_mirror:
            check_other_machines(folder, ranks)
    history = ranks.on_main(lambda: _open_on_main(config, set_by, stack))
    if history:
        history = replace(history, notes=(*ignored, *history.notes))
    without_tensors = ranks.broadcast(history.without_tensors() if history else None)
    return history or cast(History, without_tensors)


def open_data(history: History, ranks: Ranks) -> Data:
    """Find the shards of a run and map them into memory on each rank, where they must be the same."""
    config = replace(history.config, **history.decisions)
    saved = TokenizerRecord.of(history.checkpoint) if history.checkpoint else None
    best_set = None  # the first validation set, whose loss decides which model is best
    for launch in history.launches:
        if launch["val_sets"]:
            name, place = next(iter(launch["val_sets"].items()))
            best_set = Recorded(name, *place)
            break
    initial = None
    initial_with_size = None
    if history.weights:
        initial = TokenizerRecord.of(history.weights)
        initial_with_size = (initial, history.weights["model_config"]["vocab_size"])
    data = ranks.on_each(lambda: find_data(config, saved, best_set, history.fingerprint, initial_with_size))
    listing: dict[str, str] = {}
    for shards in data.sets:
        listing |= shards.listing(reads=not ranks.is_one_machine)
    expected = ranks.broadcast(listing)

    def check() -> Data:
        check_listing(listing, expected)
        record = data.tokenizer_record
        if saved:
            record = record.resumed(saved, data.folder)
        elif initial and record.is_number and initial.tokenizer:
            record = initial
        elif initial and record.tokenizer_sha256 == initial.tokenizer_sha256:
            record = record.completed(initial)
        return replace(data, tokenizer_record=record)

    return ranks.on_each(check)


def with_checkpoint_dir(config: TrainConfig, set_by: Mapping[str, str]) -> TrainConfig:
    """Return a configuration whose checkpoint_dir is the folder of the file that --resume names.

    A folder after --resume becomes checkpoint_dir itself, and its latest checkpoint is resumed.
    """
    if config.resume in ("", *WORDS):
        return config
    path = Path(config.resume)
    # A link that has the name of a checkpoint belongs to the run in its folder; any other link stands for its target.
    if path.is_symlink() and not path.is_dir() and path not in files.checkpoint_files(path.parent):
        path = Path(os.path.realpath(path))
    if "checkpoint_dir" in set_by:
        return replace(config, resume=str(path))
    if path.is_dir():
        return replace(config, resume="latest", checkpoint_dir=str(path))
    return replace(config, resume=str(path), checkpoint_dir=str(path.parent))


def check_programs(ranks: Ranks) -> None:
    """Check that all machines run the same code with the same PyTorch."""
    program = ""  # of a rank that shares its machine with an earlier one
    if ranks.is_first_of_machine:
        program = f"code {code_digest()}, torch {torch.__version__}"
    (main_host, main_program), *others = ranks.gather((socket.gethostname(), program))
    for host, host_program in others:
        if host_program not in ("", main_program):
            raise UserError(
                f"{host} runs {host_program}, but {main_host}, which has rank 0, {main_program}; copy the checkout and "
                "its .venv to all machines"
            )


def ignored_options(own: TrainConfig, main: TrainConfig, set_by: Mapping[str, str], ranks: Ranks) -> list[str]:
    """Return a line for each machine whose command differs from rank 0's; the options of rank 0 count.

    Args:
        own: the configuration of this rank's command.
        main: the configuration of rank 0's command.
        set_by: see History; of this rank's command.
    """
    differing = [f"--{name} {getattr(own, name)!r}" for name in set_by if getattr(own, name) != getattr(main, name)]
    line = ""
    if differing and not ranks.is_main:
        line = f"{', '.join(differing)} on {socket.gethostname()}"
    lines = dict.fromkeys(filter(None, ranks.gather(line)))  # the same line once for all ranks of a machine
    return [labelled("ignored", f"{text}; the options of rank 0 count") for text in lines]


def check_other_machines(folder: Path, ranks: Ranks) -> None:
    """Check that no other machine has newer checkpoints than rank 0, which resumes from its own.

    Machines that share the folder are not compared, because to rank 0 it may look older than it is, such as through
    NFS. They are the machines that see a file that rank 0 makes in the folder.
    """
    mark = folder / ranks.broadcast(f".{secrets.token_hex(8)}.tmp")
    if ranks.is_main:
        with suppress(OSError):  # there is no folder, or it cannot be written
            mark.touch()
    ranks.broadcast(None)
    newest = (0.0, 0)
    if ranks.is_first_of_machine and (ranks.is_main or not mark.exists()):
        newest = max((file.order for file in files.scan(folder)), default=newest)
    (main_newest, main_place), *others = ranks.gather((newest, f"{socket.gethostname()}:{folder.absolute()}"))
    if ranks.is_main:
        mark.unlink(missing_ok=True)
    for other_newest, place in others:
        if other_newest > main_newest:
            raise UserError(
                f"{place} has newer checkpoints than rank 0's {main_place}, which --resume reads; start that machine "
                "as node 0, use a shared folder or --mirror, or move its checkpoints to rank 0's folder"
            )


def _open_on_main(config: TrainConfig, set_by: Mapping[str, str], stack: ExitStack) -> History:
    which = config.resume
    folder = Path(config.checkpoint_dir)
    is_word = which in ("", *WORDS)
    path = folder if is_word else Path(which)
    if which not in ("", "auto") and not path.exists() and not config.mirror:
        if is_word:
            raise files.no_checkpoints(folder)
        raise UserError(f"--resume {which}: no such file; expected latest, auto, best, stable, a file or a folder")
    resumed_folder = path if is_word or path.is_dir() else path.parent
    is_fork = os.path.realpath(resumed_folder) != os.path.realpath(folder)  # resolve() raises for a loop of links
    if config.trains and which:
        stack.enter_context(locked(folder, IN_USE))
    if config.trains or (is_fork and not config.eval_only):
        files.check_folder(folder, resumed_folder / files.LATEST if which else None)
    if not which:
        history = _new_history(config, set_by)
        if config.dry_run and files.checkpoint_files(folder):  # a plan is allowed there, training is not
            note = f"{folder} already holds checkpoints; to train, use another --checkpoint_dir or --resume latest"
            history = replace(history, notes=(labelled("folder", note),))
        return history

    # Find the checkpoint.
    run = Identity() if is_fork else read_run(resumed_folder)
    config = run.with_places(config, set_by)
    if config.mirror and config.trains and is_word:
        source, run = find_newest(config, run)
        config = run.with_places(config, set_by)
    elif config.mirror and which != "auto" and not (config.trains or files.checkpoint_files(folder)):
        raise UserError(f"no checkpoints in {folder}, and only a run that trains restores them from {config.mirror}")
    else:
        source = files.find_checkpoint(which, folder)
    checkpoint = source.checkpoint
    if not (source.path and checkpoint):
        text = f"from step 0: no checkpoints in {folder}"
        if config.mirror:
            text += f" or {config.mirror}"
        history = _new_history(config, set_by)
        return replace(history, run=Identity() if run.copied_from else run, notes=(labelled("new run", text),))
    if not checkpoint["launches"]:
        raise UserError(f"{source.path}: converted weights, not a run. Start from them with --init_from {source.path}")

    # Tell what is resumed, and with which options.
    renamed = {}
    if config.trains and not is_fork:
        renamed = {file: files.aside(file) for file in source.damaged}
    notes = []
    for file, problem in source.damaged.items():
        text = f"{problem}; renamed {renamed[file].name}" if renamed else problem
        notes.append(labelled("skipped", text))
    notes += [labelled("skipped", line) for line in source.skipped]
    restored = f" (restored from {config.mirror})" if source.downloaded else ""
    notes.append(labelled("resumed", f"from {source.path}{restored} at step {checkpoint['step']:,}"))
    config, decisions, changes = resume_options(checkpoint["launches"][-1], config, set_by)
    notes += [labelled("changed", line) for line in changes]
    new_run = f"a new run in {folder}, with {config.mirror or 'no mirror'}"
    if is_fork:
        notes.append(labelled("fork", new_run))
    elif run.copied_from:
        notes.append(labelled("copy", f"of {run.copied_from}: {new_run}"))
    return History(
        config, set_by, decisions, checkpoint, path=source.path, is_fork=is_fork, run=run,
        downloaded=source.downloaded, renamed=renamed, notes=tuple(notes),
    )  # fmt: skip


def find_newest(config: TrainConfig, run: Identity) -> tuple[files.Found, Identity]:
    """Find the checkpoint that --resume asks for in the folder or, if the mirror has a newer one, there."""
    url = config.mirror
    folder = Path(config.checkpoint_dir)
    which = config.resume
    is_named = which in files.NAMED
    path = folder / files.NAMED.get(which, files.LATEST)
    problem = ""  # why the folder has no such checkpoint
    try:
        local = files.find_checkpoint(which, folder)
    except files.Unreadable:
        raise
    except UserError as error:
        corrupt = files.checkpoint_files(folder)
        if is_named:
            corrupt = [file for file in corrupt if file == path]
        local = files.Found(damaged={file: f"{file}: corrupt" for file in corrupt})
        problem = str(error)
    newest_s = local.checkpoint["saved_at"] if local.checkpoint else 0
    holds_run = (folder / RUN).exists() or files.checkpoint_files(folder)
    mirror = Mirror(url, run.id if holds_run else "")  # for an empty folder, the mirror may have any run
    skipped: list[str] = []
    try:
        index = mirror.patiently(mirror.index)
        if index.checkpoints:
            places = run.places if run.id == index.run else {}
            run = Identity(index.run, {"run_name": index.name, **places, "mirror": url})
        entries = list(index.checkpoints.values())
        if is_named:
            entries = [entry for name, entry in index.checkpoints.items() if name == path.name]
        for entry in dict.fromkeys(entries):  # newest first
            if entry.saved_at <= newest_s:
                break
            try:
                downloaded, checkpoint = mirror.download(entry, folder)
            except Damaged as error:
                skipped.append(str(error))
                continue
            if local.checkpoint and local.path == path and local.checkpoint["step"] > entry.step:
                step = local.checkpoint["step"]
                # Files in `damaged` are renamed, so this one is not lost.
                local.damaged[path] = f"{path}: of step {step:,}, but saved before the mirror's"
            return files.Found(path, checkpoint, local.damaged, skipped, downloaded), run
    except NoAnswer as error:
        if not local.path:
            raise
        skipped.append(f"the mirror may have a newer checkpoint: {error}")
    if not local.path and (problem or skipped):  # auto starts no new run beside damaged checkpoints
        raise UserError("; ".join(skipped) or f"{problem}; nor is there one in --mirror {url}")
    return replace(local, skipped=skipped), run


def _new_history(config: TrainConfig, set_by: Mapping[str, str]) -> History:
    """Return the history of a new run. Unset options of the model's shape come from the weights of --init_from."""
    if config.init_from == "scratch":
        return History(config, set_by)
    weights = read_weights(config.init_from, download=False)
    ignored = {*set_by, "dropout", "vocab_size"}
    shape = {name: value for name, value in weights["model_config"].items() if name not in ignored}
    return History(replace(config, **shape), set_by, weights=weights)


def resume_options(
    launch: files.Launch, config: TrainConfig, set_by: Mapping[str, str]
) -> tuple[TrainConfig, dict, list[str]]:
    """Return the options of a run that resumes, the decisions that still hold, and a line for each option that changes.

    An option of this command has not changed if it is what the checkpoint's launch was asked for, or what was decided
    then. So the command of the first launch also resumes.

    Args:
        launch: the one that wrote the checkpoint.
        set_by: see History.
    """
    options = dict(launch["options"])
    decisions = dict(launch["decisions"])
    changes = []
    for name in STORED:
        if name not in set_by:
            continue
        rule = FIELDS[name].metadata["on_resume"]
        new = getattr(config, name)
        trained_with = decisions.get(name, options[name])
        if new in (options[name], trained_with):
            continue
        alternative = EXCLUSIVE.get(name, "")
        # A preset may have another value than the checkpoint if a flag of the first launch set its alternative.
        if alternative and set_by[name] == "preset" and options[alternative] != FIELDS[alternative].default:
            continue
        message = f"--{name} is {new!r}, but the checkpoint was trained with {trained_with!r}; drop the option, or"
        if rule == "never":
            raise UserError(f"{message} start a new run in another --checkpoint_dir")
        if rule == "ask" and not config.allow_changes:
            raise UserError(f"{message} add --allow_changes to resume with the new value")
        changes.append(f"{name}: {trained_with!r} -> {new!r}")
        options[name] = new
        decisions.pop(name, None)
        if alternative:
            options[alternative] = FIELDS[alternative].default
    return replace(config, **options), decisions, changes
