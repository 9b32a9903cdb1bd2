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

from steadygpt.base.durable import fsync_folder, link_file, lock_folder, replace_file
from steadygpt.base.options import UserError, options_of
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import STAMP, labelled
from steadygpt.checkpoint.files import (
    BACKUP,
    EVALUATIONS,
    LATEST,
    NAMED,
    Found,
    Unreadable,
    aside,
    check_folder,
    checkpoint_files,
    find_checkpoint,
    newest_ns,
    no_checkpoints,
    read_checkpoint,
)
from steadygpt.checkpoint.mirror import Mirror, newer_checkpoint
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import owner
from steadygpt.log.status import read_status
from steadygpt.machine.ranks import Ranks
from steadygpt.run.identity import PLACES, Identity, note_of_places, read_run, write_run

IN_USE = "wait for it to end, or use another --checkpoint_dir"


@dataclass(frozen=True)
class Start:
    """The checkpoint or the weights that a run starts from, if any."""

    path: Path | None = None  # of the checkpoint
    checkpoint: dict | None = None  # tensors on rank 0 only
    weights: dict | None = None  # a checkpoint of weights only; its tensors on rank 0 only, and at first none
    is_fork: bool = False  # the checkpoint stays in its folder, and this run has its own
    run: Identity = field(default_factory=Identity)
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
    """Return the name of a run, the folder of its logs, and a line for the plan if they are not those asked for.

    A run that is resumed keeps its name; a fork or a copy is named RUN-from-STEP. A new name that has a TensorBoard
    folder already gets a time stamp, because TensorBoard would hide the older points. A folder of logs belongs to one
    run, so another one has a subfolder.
    """
    run, wanted, folder = start.run, config.run_name, Path(config.tensorboard_dir)
    if run.other and wanted in ("", run.name):
        wanted = f"{run.name or 'run'}-from-{start.step}"
    wanted = wanted or run.name or time.strftime(f"gpt-{STAMP}-{os.getpid()}")
    reserved = held if config.trains and config.use_tensorboard else None

    def choose() -> tuple[str, str]:
        is_kept = bool(run.name) and not run.other and is_name_from(wanted, run.name)
        name, logdir = run.name if is_kept else unused_name(wanted, folder, reserved), Path(config.logdir)
        # A copy of a folder has a copy of the logs inside it.
        is_inside = Path(os.path.realpath(logdir)).is_relative_to(os.path.realpath(config.checkpoint_dir))
        if not (is_inside and start.checkpoint and not start.is_fork):
            if run.other and "logdir" not in given:
                logdir /= name
            while owner(logdir) not in ("", run.id):
                logdir /= name
        return name, str(logdir)

    name, logdir = ranks.broadcast(ranks.on_main(choose) or ("", ""))
    if run.other:
        mirror = f"the mirror {config.mirror}" if config.mirror else "no mirror"
        text = f"of {run.other}; this is the run {name}, with its logs in {logdir}, and with {mirror}"
        return name, logdir, labelled("fork" if start.is_fork else "copy", text)
    notes = [labelled("name", f"{name}, because {folder / wanted} belongs to an older run")]
    notes = notes * (name not in (wanted, run.name))
    if logdir != str(Path(config.logdir)):
        notes.append(labelled("logs", f"{logdir}, because {config.logdir} has those of another run"))
    return name, logdir, "\n".join(notes)


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
    return bool(re.fullmatch(rf"{re.escape(wanted)}(-from-\d+)?(-\d{{8}}-\d{{6}})?", name))


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def check_other_machines(folder: Path, ranks: Ranks) -> None:
    """Check that no other machine has newer checkpoints than rank 0, which resumes from its own."""
    inode = folder.stat().st_ino if folder.is_dir() else 0  # the same on every machine that shares the folder
    main, *others = ranks.gather((newest_ns(folder), inode, f"{socket.gethostname()}:{folder.absolute()}"))
    for other_ns, other_inode, place in others:
        if other_ns > main[0] and other_inode != main[1]:
            raise UserError(
                f"{place} has newer checkpoints than rank 0's {main[2]}, which --resume reads; start that machine as "
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
    path = Path(os.path.realpath(path)) if path.is_symlink() and not path.is_dir() else path
    which, folder = ("latest", path) if path.is_dir() else (str(path), path.parent)
    if "checkpoint_dir" in given:
        return dataclasses.replace(config, resume=str(path))
    return dataclasses.replace(config, resume=which, checkpoint_dir=str(folder))


def shared(loaded: dict | None, ranks: Ranks) -> dict | None:
    """Return rank 0's checkpoint or weights; on the other ranks they lack "model" and "optimizer"."""
    light = ranks.broadcast(loaded and loaded | {"model": {}, "optimizer": {}})
    return loaded if ranks.is_main else light


def _start_on_main(config: TrainConfig, given: Mapping[str, str], held: ExitStack) -> tuple[TrainConfig, Start]:
    which, folder, found, run = config.resume, Path(config.checkpoint_dir), Found(), Identity()
    if which in ("latest", *NAMED) and not folder.is_dir() and not config.mirror:
        raise no_checkpoints(folder)
    if which not in ("", "latest", "auto", *NAMED) and not Path(which).exists():
        expected = "latest, auto, best, stable, a checkpoint file or a folder of checkpoints"
        raise UserError(f"--resume {which}: no such file; expected {expected}")
    if which:
        if config.trains:
            held.enter_context(lock_folder(folder, IN_USE))
        found, run = find_newest(config, given)
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
        if is_fork:
            run = run.copied(found.path.parent)
        if config.run_name == saved["run_name"]:  # the command repeats it
            run.places.setdefault("run_name", config.run_name)
        config, changes = resume_config(saved, config, given, run.places)
        of_mirror = f" (restored from {config.mirror})" * found.restored
        notes.append(labelled("resumed", f"from {found.path}{of_mirror} at step {found.checkpoint['step']:,}"))
        notes += [labelled("changed", line) for line in changes]
        if elsewhere := note_of_places(saved, given, run.places):
            notes.append(labelled("place", elsewhere))
        return config, Start(found.path, found.checkpoint, None, is_fork, run, renamed, tuple(notes))
    return config, Start(run=Identity() if run.other else run, notes=tuple(notes))


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
        downloaded, skipped = newer_checkpoint(mirror, index, config.resume, folder, found.path)
        if downloaded:
            # Before the checkpoint, so that a start which fails in between is repeated with all of it.
            restored = read_checkpoint(downloaded)
            settled, _ = resume_config(restored["train_config"], config, given, run.places)
            write_run(folder, run.id, settled)
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
    return dataclasses.replace(found, skipped=skipped), run


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
