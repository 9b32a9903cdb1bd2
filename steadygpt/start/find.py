"""The start of a run: its checkpoint or weights, if any, and the requested options."""

import os
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from steadygpt.base.options import UserError
from steadygpt.base.text import labelled
from steadygpt.checkpoint import files
from steadygpt.config import EXCLUSIVE, FIELDS, STORED, TrainConfig
from steadygpt.convert.weights import read_weights
from steadygpt.log.metrics import RunIdentity, read_run
from steadygpt.machine.ranks import Ranks
from steadygpt.mirror.restore import find_newest

WORDS = ("latest", "auto", *files.NAMED)  # that --resume accepts, besides files and folders
RESOLVED = ("precision", "tokenizer")  # options whose "auto" is resolved once for the whole run
IN_USE = "wait for it to end, or use another --checkpoint_dir"
WITHOUT_TENSORS: dict[str, dict] = {"model": {}, "optimizer": {}}


@dataclass
class Start:
    """The checkpoint or weights that a run starts from, if any. Tensors are on rank 0 only."""

    checkpoint: dict | None = None
    weights: dict | None = None  # of --init_from
    state: files.TrainState = field(default_factory=files.TrainState)
    data: files.DataRecord | None = None  # what the checkpoint was trained on
    path: Path | None = None  # of the checkpoint
    is_fork: bool = False  # the checkpoint is in another folder, and this run is a new one
    identity: RunIdentity = field(default_factory=RunIdentity)
    downloaded: Path | None = None  # a file from the mirror, which is moved to `path` once the run writes
    renamed: Mapping[Path, Path] = field(default_factory=dict)  # damaged file -> its new name once the run writes


def find_start(command: TrainConfig, set_by: Mapping[str, str], ranks: Ranks) -> tuple[Start, TrainConfig, list[str]]:
    """Find on rank 0 the checkpoint or weights that a run starts from, for all ranks.

    Args:
        set_by: option of this command -> "flag" or "preset".

    Returns: the start; the requested options, where unset ones come from the checkpoint or the weights; lines for the
        plan about surprising choices.
    """
    found = None
    for_others = None
    with ranks.sharing_errors():
        if ranks.is_main:
            found = _find(command, set_by)
            start, asked, notes = found
            without_tensors = replace(start)
            if start.checkpoint:
                without_tensors.checkpoint = start.checkpoint | WITHOUT_TENSORS
            if start.weights:
                without_tensors.weights = start.weights | WITHOUT_TENSORS
            for_others = (without_tensors, asked, notes)
    received = ranks.broadcast(for_others)
    return found or cast(tuple[Start, TrainConfig, list[str]], received)


def agreed_command(
    command: TrainConfig, set_by: dict[str, str], ranks: Ranks
) -> tuple[TrainConfig, dict[str, str], list[str]]:
    """Return the command of rank 0 and its set_by, and a line for each node whose differing options are ignored.

    Args:
        set_by: see find_start().
    """
    of_main, set_by_of_main = ranks.broadcast((command, set_by))
    differing = []
    for name in set_by:
        if getattr(command, name) != getattr(of_main, name):
            differing.append(f"--{name} {getattr(command, name)!r}")
    line = f"{', '.join(differing)} on {socket.gethostname()}; the options of rank 0 count" if differing else ""
    lines = dict.fromkeys(filter(None, ranks.gather(line)))  # the same line once for all ranks of a node
    with ranks.sharing_errors():
        if ranks.is_main:
            of_main = with_checkpoint_dir(of_main, set_by_of_main)
    return ranks.broadcast(of_main), set_by_of_main, [labelled("ignored", line) for line in lines]


def with_checkpoint_dir(config: TrainConfig, set_by: Mapping[str, str]) -> TrainConfig:
    """Check that --resume leads to a file or folder, and return a configuration with its folder as checkpoint_dir.

    A folder after --resume becomes checkpoint_dir itself, and its latest checkpoint is resumed. A given
    --checkpoint_dir stays. This comes before checkpoint_dir is locked, which creates the folder.
    """
    if config.resume in ("", "auto"):
        return config
    if config.resume in WORDS:
        folder = Path(config.checkpoint_dir)
        if not config.mirror and not folder.exists():
            raise files.no_checkpoints(folder)
        return config
    if "://" in config.resume:
        advice = f"to resume from a store, use --resume latest --mirror {config.resume}"
        raise UserError(f"--resume {config.resume}: expected a file or folder of this machine; {advice}")
    path = Path(config.resume)
    # A link that has the name of a checkpoint belongs to the run in its folder; any other link stands for its target.
    if path.is_symlink() and not path.is_dir() and path not in files.checkpoint_files(path.parent):
        path = Path(os.path.realpath(path))
    if not path.exists():
        raise UserError(f"--resume {path}: no such file; expected latest, auto, best, stable, a file or a folder")
    if "checkpoint_dir" in set_by:
        return replace(config, resume=str(path))
    if path.is_dir():
        return replace(config, resume="latest", checkpoint_dir=str(path))
    return replace(config, resume=str(path), checkpoint_dir=str(path.parent))


def _find(command: TrainConfig, set_by: Mapping[str, str]) -> tuple[Start, TrainConfig, list[str]]:
    which = command.resume
    folder = Path(command.checkpoint_dir)
    resumed_folder = checked_folder(command)
    if not which:
        start, asked, notes = new_start(command, set_by)
        if command.dry_run and files.checkpoint_files(folder):  # a plan is allowed there, training is not
            note = f"{folder} already holds checkpoints; to train, use another --checkpoint_dir or --resume latest"
            notes.append(labelled("folder", note))
        return start, asked, notes
    is_fork = _leads_elsewhere(resumed_folder, folder)
    identity = RunIdentity() if is_fork else read_run(resumed_folder)
    notes = notes_of_places(identity, command)
    if command.mirror and command.trains and which in WORDS:
        found, identity = find_newest(command.mirror, which, folder, identity)
    elif command.mirror and which != "auto" and not (command.trains or files.checkpoint_files(folder)):
        raise UserError(f"no checkpoints in {folder}, and only a run that trains restores them from {command.mirror}")
    else:
        found = files.find_checkpoint(which, folder)
    if identity.name and "run_name" not in set_by:
        command = replace(command, run_name=identity.name)
    if found.checkpoint:
        start, asked, further = resumed_start(found, command, set_by, identity, is_fork)
        return start, asked, notes + further
    start, asked, notes = new_start(command, set_by)
    places = f"{folder} or {command.mirror}" if command.mirror else folder
    notes.append(labelled("new run", f"from step 0: no checkpoints in {places}"))
    return replace(start, identity=identity), asked, notes


def checked_folder(command: TrainConfig) -> Path:
    """Return the folder that --resume names, by default checkpoint_dir; check that the run may write to the latter.

    A new run needs a folder without checkpoints, and so does a fork, which resumes from another folder.
    """
    which = command.resume
    folder = Path(command.checkpoint_dir)
    path = folder if which in ("", *WORDS) else Path(which)
    resumed_folder = path if path == folder or path.is_dir() else path.parent
    if command.trains or (_leads_elsewhere(resumed_folder, folder) and not command.eval_only):
        files.check_folder(folder, resumed_folder / files.LATEST if which else None)
    return resumed_folder


def _leads_elsewhere(path: Path, folder: Path) -> bool:
    return os.path.realpath(path) != os.path.realpath(folder)  # resolve() raises for a loop of links


def resumed_start(
    found: files.Found, command: TrainConfig, set_by: Mapping[str, str], identity: RunIdentity, is_fork: bool
) -> tuple[Start, TrainConfig, list[str]]:
    """Return the start from a checkpoint, the options completed from it, and lines for the plan."""
    folder = Path(command.checkpoint_dir)
    checkpoint = cast(dict, found.checkpoint)
    if not checkpoint["launch"]:
        raise UserError(f"{found.path}: converted weights, not a run. Start from them with --init_from {found.path}")
    renamed = {}
    if command.trains and not is_fork:
        renamed = {file: files.aside(file) for file in found.damaged}
    notes = []
    for file, problem in found.damaged.items():
        text = f"{problem}; renamed {renamed[file].name}" if renamed else problem
        notes.append(labelled("skipped", text))
    notes += [labelled("skipped", line) for line in found.skipped]
    restored = f" (restored from {command.mirror})" if found.downloaded else ""
    notes.append(labelled("resumed", f"from {found.path}{restored} at step {checkpoint['step']:,}"))
    asked, further = with_stored_options(command, set_by, checkpoint["options"])
    notes += further
    if is_fork:
        notes.append(labelled("fork", f"a new run in {folder}"))
    elif identity.copied_from:
        notes.append(labelled("copy", f"of the run in {identity.copied_from}: a new run in {folder}"))
    start = Start(
        checkpoint,
        state=files.TrainState(**{name: checkpoint[name] for name in files.TrainState.__annotations__}),
        data=checkpoint["data"],
        path=found.path,
        is_fork=is_fork,
        identity=identity,
        downloaded=found.downloaded,
        renamed=renamed,
    )
    return start, asked, notes


def notes_of_places(identity: RunIdentity, config: TrainConfig) -> list[str]:
    """Return a line for a mirror or W&B that the last launch had and this one lacks: each launch must name them."""
    notes = []
    if identity.mirror and not config.mirror and config.trains:
        notes.append(labelled("mirror", f"none in this launch; the last one had --mirror {identity.mirror}"))
    if identity.wandb and not config.use_wandb and config.trains:
        notes.append(labelled("wandb", "off in this launch; the last one had --use_wandb"))
    return notes


def new_start(command: TrainConfig, set_by: Mapping[str, str]) -> tuple[Start, TrainConfig, list[str]]:
    """Return the start of a new run. Unset options of the model's shape come from the weights of --init_from."""
    if command.init_from == "scratch":
        return Start(), command, []
    weights = read_weights(command.init_from, download=False)
    ignored = {*set_by, "dropout", "vocab_size"}
    shape = {name: value for name, value in weights["model_config"].items() if name not in ignored}
    return Start(weights=weights), replace(command, **shape), [labelled("weights", f"from {command.init_from}")]


def flag_text(name: str, value: object) -> str:
    """Return a flag as it is typed."""
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"--{name} {shlex.quote(str(value))}"


def with_stored_options(
    config: TrainConfig, set_by: Mapping[str, str], stored: Mapping[str, Any]
) -> tuple[TrainConfig, list[str]]:
    """Return the options of a run that resumes, and lines for the plan about what changes and what does not.

    The run keeps its options; only flags change them.

    Args:
        set_by: see find_start().
        stored: the options of the checkpoint.
    """
    options = dict(stored)
    changes = []
    of_preset = []  # flags with the values of the preset that the run does not have
    for name in STORED:
        new = getattr(config, name)
        old = options[name]
        if name not in set_by or new == old or (name in RESOLVED and new == "auto"):
            continue
        if set_by[name] == "preset":
            of_preset.append(flag_text(name, new))
            continue
        rule = FIELDS[name].metadata["on_resume"]
        message = f"--{name} is {new!r}, but the checkpoint was trained with {old!r}; drop the option, or"
        if rule == "never":
            raise UserError(f"{message} start a new run in another --checkpoint_dir")
        if rule == "ask" and not config.allow_changes:
            raise UserError(f"{message} add --allow_changes to resume with the new value")
        changes.append(f"{name}: {old!r} -> {new!r}")
        options[name] = new
        alternative = EXCLUSIVE.get(name)
        if alternative in options:
            options[alternative] = FIELDS[alternative].default
    notes = [labelled("changed", line) for line in changes]
    if of_preset:
        text = f"{config.config}: ignored where the run has another value; to change one, type {' '.join(of_preset)}"
        notes.append(labelled("preset", text))
    return replace(config, **options), notes
