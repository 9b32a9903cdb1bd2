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

WORDS = ("latest", "auto", *files.NAMED)  # what --resume takes besides files
IN_USE = "wait for it to end, or use another --checkpoint_dir"
WITHOUT_TENSORS: dict[str, dict] = {"model": {}, "optimizer": {}}


@dataclass(frozen=True)
class History:
    """What a run continues, and what it is asked for. Tensors are on rank 0 only."""

    config: TrainConfig  # what this command asks for, on top of what the checkpoint's run was asked for
    given: Mapping[str, str] = field(default_factory=dict)  # the options of this command, see parse_args()
    decisions: Mapping[str, Any] = field(default_factory=dict)  # of the first launch, which still hold
    checkpoint: dict | None = None
    weights: dict | None = None  # of --init_from; their tensors are read by build()
    path: Path | None = None  # of the checkpoint
    is_fork: bool = False  # the checkpoint stays in its folder, and this run has its own
    run: Identity = field(default_factory=Identity)
    downloaded: Path | None = None  # from the mirror; becomes `path` once the run writes
    renamed: Mapping[Path, Path] = field(default_factory=dict)  # new names of damaged files, likewise
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
        """What ShardSet.check() has found so far, by the keys of the sets."""
        return self.checkpoint["data_fingerprint"] if self.checkpoint else {}

    def without_tensors(self) -> "History":
        """Return what ranks other than 0 need."""
        checkpoint, weights = (of and of | WITHOUT_TENSORS for of in (self.checkpoint, self.weights))
        return replace(self, checkpoint=checkpoint, weights=weights)


def open_history(config: TrainConfig, given: Mapping[str, str], ranks: Ranks, held: ExitStack) -> History:
    """Find on rank 0 what a run continues, and merge its options with those given; `held` locks its folder."""
    if ranks.world_size > 1:
        check_programs(ranks)
    ignored = ignored_options(config, ranks.broadcast(config), given, ranks)
    config = ranks.from_main(lambda: in_its_folder(config, given))
    folder = Path(config.checkpoint_dir)
    compares = config.resume in ("latest", "auto") and ranks.world_size > 1
    # A mirror has the newest of all machines.
    if compares and not ranks.from_main(lambda: bool(config.mirror or read_run(folder).places.get("mirror"))):
        check_other_machines(folder, ranks)
    history = ranks.on_main(lambda: _open_on_main(config, given, held))
    if history:
        history = replace(history, notes=(*ignored, *history.notes))
    without_tensors = ranks.broadcast(history and history.without_tensors())
    return history or cast(History, without_tensors)


def open_data(history: History, ranks: Ranks) -> Data:
    """Find the shards of a run and map them into memory on each rank, where they must be the same."""
    saved = TokenizerRecord.of(history.checkpoint) if history.checkpoint else None
    val_sets = (Recorded(name, *place) for entry in history.launches for name, place in entry["val_sets"].items())
    config, tells_best = replace(history.config, **history.decisions), next(val_sets, None)
    initial = TokenizerRecord.of(history.weights) if history.weights else None
    of_weights = (initial, history.weights["model_config"]["vocab_size"]) if history.weights and initial else None
    data = ranks.on_each(lambda: find_data(config, saved, tells_best, history.fingerprint, of_weights))
    listing = {path: about for of in data.sets for path, about in of.listing(reads=not ranks.is_one_machine).items()}
    expected = ranks.broadcast(listing)

    def checked() -> Data:
        check_listing(listing, expected)
        record = data.tokenizer_record
        if saved:
            record = record.resumed(saved, data.folder)
        elif initial and record.is_number and initial.tokenizer:
            record = initial
        elif initial and record.tokenizer_sha256 == initial.tokenizer_sha256:
            record = record.completed(initial)
        return replace(data, tokenizer_record=record)

    return ranks.on_each(checked)


def in_its_folder(config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
    """Return the configuration to resume from a file in its own folder, or from the latest checkpoint of a folder."""
    if config.resume in ("", *WORDS):
        return config
    path = Path(config.resume)
    # A link that has the name of a checkpoint belongs to the run in its folder; any other link stands for its target.
    if path.is_symlink() and not path.is_dir() and path not in files.checkpoint_files(path.parent):
        path = Path(os.path.realpath(path))
    if "checkpoint_dir" in given:
        return replace(config, resume=str(path))
    which, folder = ("latest", path) if path.is_dir() else (str(path), path.parent)
    return replace(config, resume=which, checkpoint_dir=str(folder))


def check_programs(ranks: Ranks) -> None:
    """Check that all machines run the same code with the same PyTorch."""
    program = f"code {code_digest()}, torch {torch.__version__}" if ranks.is_first_of_machine else ""
    (main_host, main), *others = ranks.gather((socket.gethostname(), program))
    for host, other in others:
        if other not in ("", main):
            raise UserError(
                f"{host} runs {other}, but {main_host}, which has rank 0, {main}; copy the checkout and its .venv "
                "to all machines"
            )


def ignored_options(own: TrainConfig, of_main: TrainConfig, given: Mapping[str, str], ranks: Ranks) -> list[str]:
    """Return a line for each machine whose command has other options than rank 0's, which count."""
    differs = [f"--{name} {getattr(own, name)!r}" for name in given if getattr(own, name) != getattr(of_main, name)]
    found = ranks.gather(f"{', '.join(differs)} on {socket.gethostname()}" if differs and not ranks.is_main else "")
    return [labelled("ignored", f"{line}; the options of rank 0 count") for line in dict.fromkeys(filter(None, found))]


def check_other_machines(folder: Path, ranks: Ranks) -> None:
    """Check that no other machine has newer checkpoints than rank 0, which resumes from its own.

    A folder that all share may look older to rank 0, such as through NFS: its machines see a file that rank 0 makes.
    """
    mark = folder / ranks.broadcast(f".{secrets.token_hex(8)}.tmp")
    if ranks.is_main:
        with suppress(OSError):  # there is no folder, or it cannot be written
            mark.touch()
    ranks.broadcast(None)
    is_other = ranks.is_first_of_machine and (ranks.is_main or not mark.exists())
    newest = max((file.order for file in files.scan(folder)), default=(0.0, 0)) if is_other else (0.0, 0)
    main, *others = ranks.gather((newest, f"{socket.gethostname()}:{folder.absolute()}"))
    if ranks.is_main:
        mark.unlink(missing_ok=True)
    for of_other, place in others:
        if of_other > main[0]:
            raise UserError(
                f"{place} has newer checkpoints than rank 0's {main[1]}, which --resume reads; start that machine as "
                "node 0, use a shared folder or --mirror, or move its checkpoints to rank 0's folder"
            )


def _open_on_main(config: TrainConfig, given: Mapping[str, str], held: ExitStack) -> History:
    which, folder = config.resume, Path(config.checkpoint_dir)
    place = folder if which in ("", *WORDS) else Path(which)
    if which not in ("", "auto") and not place.exists() and not config.mirror:
        if which in WORDS:
            raise files.no_checkpoints(folder)
        raise UserError(f"--resume {which}: no such file; expected latest, auto, best, stable, a file or a folder")
    here = place if which in ("", *WORDS) or place.is_dir() else place.parent
    is_fork = os.path.realpath(here) != os.path.realpath(folder)  # resolve() raises for a loop of links
    if config.trains and which:
        held.enter_context(locked(folder, IN_USE))
    if config.trains or (is_fork and not config.eval_only):
        files.check_folder(folder, here / files.LATEST if which else None)
    if not which:
        return _with_weights(config, given)
    run = Identity() if is_fork else read_run(here)
    config = run.placed(config, given)
    if config.mirror and config.trains and which in WORDS:
        found, run = find_newest(config, run)
        config = run.placed(config, given)
    elif config.mirror and which != "auto" and not (config.trains or files.checkpoint_files(folder)):
        raise UserError(f"no checkpoints in {folder}, and only a run that trains restores them from {config.mirror}")
    else:
        found = files.find_checkpoint(which, folder)
    if not (found.path and found.checkpoint):
        nowhere = f"from step 0: no checkpoints in {folder}" + f" or {config.mirror}" * bool(config.mirror)
        history = replace(_with_weights(config, given), run=Identity() if run.original else run)
        return replace(history, notes=(labelled("new run", nowhere),))
    if not found.checkpoint["launches"]:
        raise UserError(f"{found.path}: converted weights, not a run. Start from them with --init_from {found.path}")
    renamed = {file: files.aside(file) for file in found.damaged if config.trains and not is_fork}
    damaged = [f"{line}; renamed {renamed[file].name}" if renamed else line for file, line in found.damaged.items()]
    notes = [labelled("skipped", line) for line in (*damaged, *found.skipped)]
    of_mirror = f" (restored from {config.mirror})" * bool(found.downloaded)
    notes.append(labelled("resumed", f"from {found.path}{of_mirror} at step {found.checkpoint['step']:,}"))
    config, decisions, changes = resumed(found.checkpoint["launches"][-1], config, given)
    notes += [labelled("changed", line) for line in changes]
    about = f"a new run in {folder}, with {config.mirror or 'no mirror'}"
    if is_fork:
        notes.append(labelled("fork", about))
    elif run.original:
        notes.append(labelled("copy", f"of {run.original}: {about}"))
    return History(
        config, given, decisions, found.checkpoint, path=found.path, is_fork=is_fork, run=run,
        downloaded=found.downloaded, renamed=renamed, notes=tuple(notes),
    )  # fmt: skip


def find_newest(config: TrainConfig, run: Identity) -> tuple[files.Found, Identity]:
    """Find the checkpoint that --resume asks for in the folder or, if that has a newer one, in the mirror."""
    url, folder, which, problem = config.mirror, Path(config.checkpoint_dir), config.resume, ""
    path, skipped = folder / files.NAMED.get(which, files.LATEST), list[str]()
    try:
        found = files.find_checkpoint(which, folder)
    except files.Unreadable:
        raise
    except UserError as error:
        corrupt = [file for file in files.checkpoint_files(folder) if which not in files.NAMED or file == path]
        found, problem = files.Found(damaged={file: f"{file}: corrupt" for file in corrupt}), str(error)
    newest_s = found.checkpoint["saved_at"] if found.checkpoint else 0
    holds_run = (folder / RUN).exists() or files.checkpoint_files(folder)
    mirror = Mirror(url, run.id if holds_run else "")  # an empty folder takes any run's
    try:
        index = mirror.patiently(mirror.index)
        if index.checkpoints:
            known = run.places if run.id == index.run else {}
            run = Identity(index.run, {"run_name": index.name, **known, "mirror": url})
        wanted = [entry for name, entry in index.checkpoints.items() if which not in files.NAMED or name == path.name]
        for entry in dict.fromkeys(wanted):  # newest first
            if entry.saved_at <= newest_s:
                break
            try:
                downloaded, checkpoint = mirror.download(entry, folder)
            except Damaged as error:
                skipped.append(str(error))
                continue
            if found.checkpoint and found.path == path and (step := found.checkpoint["step"]) > entry.step:
                found.damaged[path] = f"{path}: of step {step:,}, but saved before the mirror's"  # so it is kept
            return files.Found(path, checkpoint, found.damaged, skipped, downloaded), run
    except NoAnswer as error:
        if not found.path:
            raise
        skipped.append(f"the mirror may have a newer checkpoint: {error}")
    if not found.path and (problem or skipped):  # auto starts no new run beside damaged checkpoints
        raise UserError("; ".join(skipped) or f"{problem}; nor is there one in --mirror {url}")
    return replace(found, skipped=skipped), run


def _with_weights(config: TrainConfig, given: Mapping[str, str]) -> History:
    """Return the history of a new run, whose unset options of the shape come from the weights that it starts from."""
    if config.init_from == "scratch":
        return History(config, given)
    weights = read_weights(config.init_from, download=False)
    own = weights["model_config"].items()
    kept = {name: value for name, value in own if name not in {*given, "dropout", "vocab_size"}}
    return History(replace(config, **kept), given, weights=weights)


def resumed(last: files.Launch, config: TrainConfig, given: Mapping[str, str]) -> tuple[TrainConfig, dict, list[str]]:
    """Return the options of a run that resumes, the decisions that still hold, and a line for each option that changes.

    A given option is compared with what the launch that wrote the checkpoint was asked for, and with what was decided
    then, so the command of the first launch also resumes.
    """
    options, decisions, changes = dict(last["options"]), dict(last["decisions"]), []
    for name in filter(given.__contains__, STORED):
        rule, new, other = FIELDS[name].metadata["on_resume"], getattr(config, name), EXCLUSIVE.get(name, "")
        trained_with = decisions.get(name, options[name])
        # A flag of the first launch may have overridden the preset.
        is_overridden = other and given[name] == "preset" and options[other] != FIELDS[other].default
        if new in (options[name], trained_with) or is_overridden:
            continue
        found = f"--{name} is {new!r}, but the checkpoint was trained with {trained_with!r}; drop the option, or"
        # The rows that a rank computes at once decide how sums are rounded.
        if rule == "never" or (name == "mini_batch_size" and options["deterministic"]):
            raise UserError(f"{found} start a new run in another --checkpoint_dir")
        if rule == "ask" and not config.allow_changes:
            raise UserError(f"{found} add --allow_changes to resume with the new value")
        changes.append(f"{name}: {trained_with!r} -> {new!r}")
        options[name] = new
        decisions.pop(name, None)
        if other:
            options[other] = FIELDS[other].default
    return replace(config, **options), decisions, changes
