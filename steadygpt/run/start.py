"""Where a run starts: from nothing, weights or a checkpoint, and with which configuration."""

import dataclasses
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.base.durable import fsync_folder, link_file, lock_folder
from steadygpt.base.options import UserError, options_of
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import STAMP, labelled
from steadygpt.checkpoint.files import (
    BACKUP,
    LATEST,
    NAMED,
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
from steadygpt.checkpoint.mirror import Mirror, newer_checkpoint, restore_files
from steadygpt.config import TrainConfig
from steadygpt.log.status import read_status
from steadygpt.machine.ranks import Ranks
from steadygpt.run.places import PLACES, note_of_places, read_places, write_places

IN_USE = "wait for it to end, or use another --checkpoint_dir"
STAMP_PATTERN = r"\d{8}-\d{6}"  # matches a time that STAMP has formatted


@dataclass(frozen=True)
class Start:
    """The checkpoint or the weights that a run starts from, if any."""

    path: Path | None = None  # of the checkpoint
    checkpoint: dict | None = None  # tensors on rank 0 only
    weights: dict | None = None  # a checkpoint of weights only; its tensors on rank 0 only, and at first none
    is_fork: bool = False  # the checkpoint is another run's: it stays in its folder, and this run has its own
    run_name: str = ""  # of the run in the folder of the checkpoint; "" for a copy
    renamed: dict[Path, Path] = field(default_factory=dict)  # new names of damaged checkpoints, once the run writes
    notes: tuple[str, ...] = ()  # for the plan

    @property
    def step(self) -> int | None:
        return self.checkpoint["step"] if self.checkpoint else None

    @property
    def rows_consumed(self) -> int:
        return self.checkpoint["rows_consumed"] if self.checkpoint else 0

    def is_finished(self, folder: str, max_steps: int, ranks: Ranks) -> bool:
        """Return whether the checkpoint is the end of the finished run in a folder."""
        finished = ranks.broadcast(read_status(Path(folder)).get("status") == "finished")
        return finished and self.step is not None and self.step >= max_steps


def name_of_run(
    config: TrainConfig, start: Start, given: Mapping[str, str], ranks: Ranks, held: ExitStack
) -> tuple[str, str, str]:
    """Return the name of a run, the folder of its logs, and a line for the plan if it is not the name asked for.

    A run that is resumed in its folder keeps its name. A fork is named RUN-from-STEP and has logs of its own. A new
    name that has a TensorBoard folder already gets a time stamp, because TensorBoard would hide the older points.
    """
    saved, wanted, folder, logdir = start.run_name, config.run_name, Path(config.tensorboard_dir), config.logdir
    if start.is_fork and wanted == saved:
        wanted = f"{saved or 'run'}-from-{start.step}"
    elif saved and wanted == saved:
        return saved, logdir, ""
    wanted = wanted or time.strftime(f"gpt-{STAMP}-{os.getpid()}")
    reserves = config.trains and config.use_tensorboard
    name = ranks.broadcast(ranks.on_main(lambda: unused_name(wanted, folder, held if reserves else None)) or "")
    if start.checkpoint and not (saved and not start.is_fork):
        logdir = logdir if "logdir" in given else str(Path(logdir, name))
        return name, logdir, labelled("name", f"{name}, a fork of {saved or start.path}; its logs are in {logdir}")
    note = labelled("name", f"{name}, because {folder / wanted} belongs to an older run")
    return name, logdir, note if name != wanted else ""


def unused_name(wanted: str, folder: Path, held: ExitStack | None) -> str:
    """Return `wanted`, with a time stamp if it is in the folder already.

    Args:
        held: reserves the name by a folder of its own, which goes when `held` closes, unless it has files by then.
    """
    name = wanted
    while True:
        try:
            if held:
                (folder / name).mkdir(parents=True)
                held.callback(remove_if_empty, folder / name)
            elif (folder / name).exists():
                raise FileExistsError
            return name
        except FileExistsError:
            time.sleep(0.1 * (name != wanted))  # two runs within a second
            name = f"{wanted}-{time.strftime(STAMP)}"


def is_name_from(wanted: str, name: str) -> bool:
    """Return whether a run that wanted one name got the other."""
    return bool(re.fullmatch(rf"{re.escape(wanted)}(-from-\d+)?(-{STAMP_PATTERN})?", name))


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


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


def find_start(
    config: TrainConfig, given: Mapping[str, str], ranks: Ranks, held: ExitStack
) -> tuple[TrainConfig, Start]:
    """Find the checkpoint that the run resumes from, if any; options that are not `given` come from there.

    A run that resumes locks the folder of its checkpoints until `held` closes.
    """
    if config.resume not in ("", "latest", "auto", *NAMED):
        config = ranks.broadcast(_in_its_folder(config, given))
    if config.resume in ("latest", "auto") and not config.mirror:  # a mirror has the newest of all machines
        check_other_machines(Path(config.checkpoint_dir), ranks)
    config, start = ranks.on_main(lambda: _start_on_main(config, given, held)) or (config, Start())
    checkpoint = shared(start.checkpoint, ranks)
    config, start = ranks.broadcast((config, dataclasses.replace(start, checkpoint=None)))
    return config, dataclasses.replace(start, checkpoint=checkpoint)


def _in_its_folder(config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
    """Return the configuration to resume from a file in its own folder, or from the latest checkpoint of a folder."""
    path = Path(config.resume)
    # A link that has the name of a checkpoint belongs to the run in its folder; any other link stands for its target.
    if path.is_symlink() and not path.is_dir() and path not in checkpoint_files(path.parent):
        path = Path(os.path.realpath(path))
    which, folder = ("latest", path) if path.is_dir() else (str(path), path.parent)
    if "checkpoint_dir" in given:
        return dataclasses.replace(config, resume=str(path))
    return dataclasses.replace(config, resume=which, checkpoint_dir=str(folder))


def shared(loaded: dict | None, ranks: Ranks) -> dict | None:
    """Return rank 0's checkpoint or weights; on the other ranks they lack "model" and "optimizer"."""
    light = ranks.broadcast(loaded and loaded | {"model": {}, "optimizer": {}})
    return loaded if ranks.is_main else light


def _start_on_main(config: TrainConfig, given: Mapping[str, str], held: ExitStack) -> tuple[TrainConfig, Start]:
    which, folder, found, places = config.resume, Path(config.checkpoint_dir), Found(), dict[str, Any]()
    if which in ("latest", *NAMED) and not folder.is_dir() and not config.mirror:
        raise no_checkpoints(folder)
    if which not in ("", "latest", "auto", *NAMED) and not Path(which).exists():
        expected = "latest, auto, best, stable, a checkpoint file or a folder of checkpoints"
        raise UserError(f"--resume {which}: no such file; expected {expected}")
    if which:
        if config.trains:
            held.enter_context(lock_folder(folder, IN_USE))
        found, places = find_newest(config, given)
    if not config.eval_only and (found.path or config.trains):
        check_folder(folder, found.path)
    is_fork = found.path is not None and found.path.parent.resolve() != folder.resolve()
    renamed = {file: aside(file) for file in found.damaged if config.trains and not is_fork}
    damaged = [f"{line}; renamed {renamed[file].name}" if renamed else line for file, line in found.damaged.items()]
    notes = [labelled("skipped", line) for line in (*damaged, *found.skipped)]
    if found.path and found.checkpoint:
        saved = found.checkpoint["train_config"]
        if not saved:
            raise UserError(
                f"{found.path}: converted weights, not a run to resume. Start from them with --init_from {found.path}"
            )
        config, changes = resume_config(saved, config, given, places)
        of_mirror = f" (restored from {config.mirror})" * found.restored
        notes.append(labelled("resumed", f"from {found.path}{of_mirror} at step {found.checkpoint['step']:,}"))
        notes += [labelled("changed", line) for line in changes]
        if elsewhere := note_of_places(saved, given, places):
            if config.trains and not is_fork and "--mirror" in elsewhere:
                raise UserError(f"{found.path.parent}: a copy or a download; {elsewhere}, or with --mirror '' for none")
            notes.append(labelled("place", elsewhere))
        if is_fork and config.mirror and "mirror" not in given:
            unused = f"none: {config.mirror} belongs to the run in {found.path.parent}"
            notes.append(labelled("mirror", unused))
            config = dataclasses.replace(config, mirror="")
        # A copy whose command names its run continues that.
        run_name = places.get("run_name", saved["run_name"] if config.run_name == saved["run_name"] else "")
        return config, Start(
            found.path, found.checkpoint, is_fork=is_fork, run_name=run_name, renamed=renamed, notes=tuple(notes)
        )
    return config, Start(notes=tuple(notes))


def find_newest(config: TrainConfig, given: Mapping[str, str]) -> tuple[Found, dict[str, Any]]:
    """Find the checkpoint that --resume asks for, and the options that say where its run writes.

    The checkpoint is downloaded if the mirror has a newer one than the folder.
    """
    folder, found, problem = Path(config.checkpoint_dir), Found(), None
    try:
        found = find_checkpoint(config.resume, folder)
    except Unreadable:
        raise
    except UserError as error:
        problem = error
    places = read_places(found.path.parent if found.path else folder)
    url = config.mirror if "mirror" in given else places.get("mirror", "")
    if not url or config.resume not in ("latest", "auto", *NAMED) or (found.path and not config.trains):
        if problem:
            raise problem
        return found, places
    if not config.trains:
        raise UserError(f"{folder} has no intact checkpoint, and only training downloads one from {url}")
    mirror = Mirror(url)
    try:
        index = mirror.patiently(mirror.index)
        saved = found.checkpoint["train_config"] if found.checkpoint else {}
        name = places.get("run_name") or saved.get("run_name", index.run)
        if index.run and index.run != name:
            raise UserError(
                f"--mirror {url} belongs to the run {index.run}, and {found.path} to {name}; give the right --mirror"
            )
        if index.run:
            places |= {"run_name": name, "mirror": url}
        downloaded, skipped = newer_checkpoint(mirror, index, config.resume, folder, found.checkpoint)
        if downloaded:
            # First, so that a start which fails in between is repeated with all of it.
            restored = read_checkpoint(downloaded)
            files_go_to, _ = resume_config(restored["train_config"], config, given, places)
            mirror.patiently(lambda: restore_files(mirror, files_go_to, replace=True))
            write_places(folder, files_go_to)
            path = folder / NAMED.get(config.resume, LATEST)
            if found.path == path == folder / LATEST:
                link_file(path, folder / BACKUP)
            elif found.path != path and os.path.lexists(path):  # it is damaged
                line = found.damaged.pop(path, f"{path}: corrupt")
                skipped.append(f"{line}; renamed {path.rename(aside(path)).name}")
            os.replace(downloaded, path)
            fsync_folder(folder)
            return Found(path, restored, found.damaged, skipped, restored=True), places
    except NoAnswer as error:
        if not found.path:
            raise
        skipped = [f"{url}, which may have a newer checkpoint: {error}"]
    if problem and config.resume != "auto":
        raise UserError(f"{problem}; --mirror {url} has none either")
    return dataclasses.replace(found, skipped=skipped), places


def resume_config(
    saved: dict, config: TrainConfig, given: Mapping[str, str], places: Mapping[str, Any] = {}
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration of a run that resumes in its `places`, and a line for each value that is not `saved`."""
    taken, changes, options = {}, [], options_of(config)
    saved = saved | {name: places.get(name, getattr(config, name)) for name in PLACES}
    wanted_rows = saved["wanted_rows"]
    if saved["deterministic"]:  # the rows that a rank computes at once decide how sums are rounded
        taken["wanted_rows"] = wanted_rows
    else:
        saved["mini_batch_size"] = wanted_rows or saved["mini_batch_size"]
    if given.get("data_dir") == "flag":
        saved["mix"] = ""  # which would come before it
    for name, f in options.items():
        new, on_resume = getattr(config, name), f.metadata["on_resume"]
        if on_resume == "launch":
            continue
        # The first start shortened a preset's warm-up and turned its micro-steps into tokens; these values apply. It
        # also chose the precision, and perhaps lengthened the name that a flag repeats.
        settled = given.get(name) == "preset" and name in ("warmup_steps", "micro_steps")
        settled |= (name, new) == ("precision", "auto") or (name == "run_name" and is_name_from(new, saved[name]))
        if name == "mini_batch_size" and saved["deterministic"]:
            settled, on_resume = settled or new == wanted_rows, "never"
        if name not in given or settled:
            taken[name] = saved[name]
        elif new != saved[name]:
            dropped = "the flag" if given[name] == "flag" else "--config"
            found = f"--{name} is {new!r}, but the checkpoint was trained with {saved[name]!r}; drop {dropped}, or"
            if on_resume == "never":
                raise UserError(f"{found} start a new run in another --checkpoint_dir")
            if on_resume == "ask" and not config.allow_changes:
                raise UserError(f"{found} add --allow_changes to resume with the new value")
            changes.append(f"{name}: {saved[name]!r} -> {new!r}")
    return dataclasses.replace(config, **taken), changes


def initial_config(shape: dict, config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
    """Return the configuration of a run that starts from weights: unset options of the shape come from the weights."""
    taken = {name: value for name, value in shape.items() if name not in {*given, "dropout", "vocab_size"}}
    return dataclasses.replace(config, **taken)
