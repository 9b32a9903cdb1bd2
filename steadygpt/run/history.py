"""What a run continues: a checkpoint, weights or nothing; and the options that follow from it."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dataloader import Data, find_data
from steadygpt.base.durable import fsync_folder, link_file, lock_folder, replace_file
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import labelled
from steadygpt.checkpoint.files import (
    BACKUP,
    EVALUATIONS,
    LATEST,
    NAMED,
    Entry,
    Found,
    Unreadable,
    aside,
    check_folder,
    checkpoint_files,
    find_checkpoint,
    no_checkpoints,
    read_checkpoint,
    scan,
)
from steadygpt.checkpoint.mirror import Mirror, newer_checkpoint
from steadygpt.config import EXCLUSIVE, FIELDS, KEPT, TrainConfig
from steadygpt.convert.weights import read_weights
from steadygpt.data.shards import Recorded, check_listing
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.machine.ranks import Ranks
from steadygpt.run.identity import Identity, read_run, write_run

IN_USE = "wait for it to end, or use another --checkpoint_dir"
WITHOUT_TENSORS: dict[str, dict] = {"model": {}, "optimizer": {}}


@dataclass(frozen=True)
class History:
    """What a run continues, and what it is asked for. Tensors are on rank 0 only."""

    config: TrainConfig  # what this command asks for, on top of what the checkpoint's run was asked for
    given: Mapping[str, str] = field(default_factory=dict)  # the options of this command, see parse_args()
    decisions: Mapping[str, Any] = field(default_factory=dict)  # of the first start, which still hold
    checkpoint: dict | None = None
    weights: dict | None = None  # of --init_from; their tensors are read by build()
    path: Path | None = None  # of the checkpoint
    is_fork: bool = False  # the checkpoint stays in its folder, and this run has its own
    run: Identity = field(default_factory=Identity)
    renamed: Mapping[Path, Path] = field(default_factory=dict)  # new names of damaged files, once the run writes
    notes: tuple[str, ...] = ()  # for the plan

    @property
    def starts(self) -> list[Entry]:
        return self.checkpoint["starts"] if self.checkpoint else []

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
    """Find on rank 0 the checkpoint or the weights that a run starts from, and merge its options with those given.

    A run that resumes locks the folder of its checkpoints until `held` closes.
    """
    config = ranks.broadcast(in_its_folder(config, given))
    if config.resume in ("latest", "auto") and not config.mirror:  # a mirror has the newest of all machines
        check_other_machines(Path(config.checkpoint_dir), ranks)
    history = ranks.on_main(lambda: _open_on_main(config, given, held))
    without_tensors = ranks.broadcast(history and history.without_tensors())
    return history or cast(History, without_tensors)


def open_data(history: History, ranks: Ranks) -> Data:
    """Find the shards of a run and map them into memory on each rank, where they must be the same."""
    saved, first_set = None, None
    if checkpoint := history.checkpoint:
        saved, first_set = TokenizerRecord.of(checkpoint), first_val_set(history.starts)
    config = replace(history.config, **history.decisions)
    data = ranks.on_each(lambda: find_data(config, saved, first_set, history.fingerprint))
    listing = {path: about for shards in data.sets for path, about in shards.listing().items()}
    expected = ranks.broadcast(listing)
    ranks.on_each(lambda: check_listing(listing, expected))
    if saved:
        data = replace(data, tokenizer_record=data.tokenizer_record.resumed(saved, data.folder))
    return data


def first_val_set(starts: Sequence[Entry]) -> Recorded | None:
    """Return the validation set that tells which model is best, if there is one yet."""
    return next((Recorded(name, *place) for entry in starts for name, place in entry["val_sets"].items()), None)


def in_its_folder(config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
    """Return the configuration to resume from a file in its own folder, or from the latest checkpoint of a folder."""
    if config.resume in ("", "latest", "auto", *NAMED):
        return config
    path = Path(config.resume)
    # A link that has the name of a checkpoint belongs to the run in its folder; any other link stands for its target.
    if path.is_symlink() and not path.is_dir() and path not in checkpoint_files(path.parent):
        path = Path(os.path.realpath(path))
    which, folder = ("latest", path) if path.is_dir() else (str(path), path.parent)
    if "checkpoint_dir" in given:
        return replace(config, resume=str(path))
    return replace(config, resume=which, checkpoint_dir=str(folder))


def check_other_machines(folder: Path, ranks: Ranks) -> None:
    """Check that no other machine has newer checkpoints than rank 0, which resumes from its own."""
    inode = folder.stat().st_ino if folder.is_dir() else 0  # the same on every machine that shares the folder
    is_read = ranks.broadcast(inode) != inode or ranks.is_main
    newest = max((file.order for file in scan(folder)), default=(0.0, 0)) if is_read else (0.0, 0)
    main, *others = ranks.gather((newest, f"{socket.gethostname()}:{folder.absolute()}"))
    for of_other, place in others:
        if of_other > main[0]:
            raise UserError(
                f"{place} has newer checkpoints than rank 0's {main[1]}, which --resume reads; start that machine as "
                "node 0, use a shared folder or --mirror, or move its checkpoints to rank 0's folder"
            )


def _open_on_main(config: TrainConfig, given: Mapping[str, str], held: ExitStack) -> History:
    which, folder = config.resume, Path(config.checkpoint_dir)
    if not which:
        if config.trains:
            check_folder(folder, None)
        return _with_weights(config, given)
    if which in ("latest", *NAMED) and not folder.is_dir() and not config.mirror:
        raise no_checkpoints(folder)
    if which not in ("latest", "auto", *NAMED) and not Path(which).exists():
        expected = "latest, auto, best, stable, a checkpoint file or a folder of checkpoints"
        raise UserError(f"--resume {which}: no such file; expected {expected}")
    if config.trains:
        held.enter_context(lock_folder(folder, IN_USE))
    found, run = find_newest(config, given)
    if not config.eval_only and (found.path or config.trains):
        check_folder(folder, found.path)
    is_fork = found.path is not None and found.path.parent.resolve() != folder.resolve()
    renamed = {file: aside(file) for file in found.damaged if config.trains and not is_fork}
    damaged = [f"{line}; renamed {renamed[file].name}" if renamed else line for file, line in found.damaged.items()]
    notes = [labelled("skipped", line) for line in (*damaged, *found.skipped)]
    if not (found.path and found.checkpoint):
        return replace(_with_weights(config, given), run=Identity() if run.other else run, notes=tuple(notes))
    if not found.checkpoint["starts"]:
        raise UserError(
            f"{found.path}: converted weights, not a run to resume. Start from them with --init_from {found.path}"
        )
    if is_fork:
        run = run.copied(found.path.parent)
    config, decisions, changes = resumed(found.checkpoint["starts"][-1], config, given)
    config = replace(config, **{name: value for name, value in run.places.items() if name not in given})
    of_mirror = f" (restored from {config.mirror})" * found.restored
    notes.append(labelled("resumed", f"from {found.path}{of_mirror} at step {found.checkpoint['step']:,}"))
    notes += [labelled("changed", line) for line in changes]
    return History(
        config, given, decisions, found.checkpoint, path=found.path, is_fork=is_fork, run=run, renamed=renamed,
        notes=tuple(notes),
    )  # fmt: skip


def _with_weights(config: TrainConfig, given: Mapping[str, str]) -> History:
    """Return the history of a new run, whose unset options of the shape come from the weights that it starts from."""
    if config.init_from == "scratch":
        return History(config, given)
    weights = read_weights(config.init_from, download=False)
    own = weights["model_config"].items()
    kept = {name: value for name, value in own if name not in {*given, "dropout", "vocab_size"}}
    return History(replace(config, **kept), given, weights=weights)


def resumed(
    last: Entry, config: TrainConfig, given: Mapping[str, str]
) -> tuple[TrainConfig, dict[str, Any], list[str]]:
    """Return the options of a run that resumes, the decisions that still hold, and a line for each option that changes.

    Args:
        last: the start that wrote the checkpoint. A given option is compared with what that was asked for and with
            what was decided then, so the command of the first start also resumes.
    """
    options, decisions, changes = dict(last["options"]), dict(last["decisions"]), []
    for name in filter(given.__contains__, KEPT):
        rule, new, other = FIELDS[name].metadata["on_resume"], getattr(config, name), EXCLUSIVE.get(name, "")
        trained_with = decisions.get(name, options[name])
        if new in (options[name], trained_with) or (
            other and given[name] == "preset" and options[other] != FIELDS[other].default
        ):
            continue  # as it was; or a flag of the first start overrode the preset
        dropped = "the flag" if given[name] == "flag" else "--config"
        found = f"--{name} is {new!r}, but the checkpoint was trained with {trained_with!r}; drop {dropped}, or"
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


def find_newest(config: TrainConfig, given: Mapping[str, str]) -> tuple[Found, Identity]:
    """Find the checkpoint that --resume asks for, and the run in its folder.

    The checkpoint is downloaded if the mirror has a newer one than the folder.
    """
    folder, found, problem = Path(config.checkpoint_dir), Found(), None
    try:
        found = find_checkpoint(config.resume, folder)
    except Unreadable:
        raise
    except UserError as error:
        problem = error
    run = read_run(found.path.parent if found.path else folder)
    url = config.mirror if "mirror" in given else run.places.get("mirror", "")
    if not url or config.resume not in ("latest", "auto", *NAMED) or (found.path and not config.trains):
        if problem:
            raise problem
        return found, run
    if not config.trains:
        raise UserError(f"{folder} has no intact checkpoint, and only training downloads one from {url}")
    mirror = Mirror(url, run.id if checkpoint_files(folder) else "")
    try:
        index = mirror.patiently(mirror.index)
        if index.checkpoints:
            known = run.places if run.id == index.run else {}
            run = Identity(index.run, {"run_name": index.name, **known, "mirror": url})
        downloaded, skipped = newer_checkpoint(mirror, index, config.resume, folder, found.checkpoint)
        if downloaded:
            # Before the checkpoint, so that a start which fails in between is repeated with all of it.
            restored = read_checkpoint(downloaded)
            write_run(folder, run.id, replace(config, **{n: v for n, v in run.places.items() if n not in given}))
            if EVALUATIONS in mirror.patiently(mirror.sizes):
                evaluations = mirror.patiently(lambda: mirror.read(EVALUATIONS))
                replace_file(folder / EVALUATIONS, lambda file: file.write(evaluations))
            path = folder / NAMED.get(config.resume, LATEST)
            if found.path == path == folder / LATEST:
                link_file(path, folder / BACKUP)
            elif found.path != path and os.path.lexists(path):  # it is damaged
                line = found.damaged.pop(path, f"{path}: corrupt")
                skipped.append(f"{line}; renamed {path.rename(aside(path)).name}")
            os.replace(downloaded, path)
            fsync_folder(folder)
            return Found(path, restored, found.damaged, skipped, restored=True), run
    except NoAnswer as error:
        if not found.path:
            raise
        skipped = [f"{url}, which may have a newer checkpoint: {error}"]
    if problem and config.resume != "auto":
        raise UserError(f"{problem}; --mirror {url} has none either")
    return replace(found, skipped=skipped), run
