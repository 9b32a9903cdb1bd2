"""Opening of a run's folder: its first write, after all checks."""

import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from steadygpt.base.durable import fsync_folder
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import bytes_text
from steadygpt.checkpoint.files import (
    BEST,
    Best,
    OtherVersion,
    Unreadable,
    aside,
    checkpoint_bytes,
    read_checkpoint,
    read_head,
)
from steadygpt.checkpoint.writer import CheckpointWriter, stale_files
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import METRICS, write_run
from steadygpt.mirror.restore import restore_logs
from steadygpt.mirror.store import Index, Mirror
from steadygpt.mirror.uploads import Uploads
from steadygpt.run.repeats import Repeats
from steadygpt.run.run import Run
from steadygpt.start.find import Start


def check_space(folder: Path, needed: int, downloaded: Path | None) -> None:
    """Check that a checkpoint fits on the disk of a folder."""
    disk = shutil.disk_usage(folder)
    free = disk.free
    for file in stale_files(folder):  # of killed writers: CheckpointWriter deletes them
        if file != downloaded:
            free += file.stat().st_size
    if free < needed and disk.total:  # a total of 0: the file system does not report its size
        message = f"{bytes_text(needed)} needed for a checkpoint, {bytes_text(free)} free"
        raise UserError(f"{folder}: {message}; nothing was changed. Free some space, or use another --checkpoint_dir")


def open_folder(run: Run, start: Start) -> None:
    """Open the folder, mirror and logs of a run on rank 0, which has locked the folder."""
    config = run.config
    folder = Path(config.checkpoint_dir)
    needed = checkpoint_bytes(run.model, config.optimizer)
    check_space(folder, needed, start.downloaded)
    best = None
    old_best = None  # where to move a best_model.pt that this run cannot compare with
    if folder / BEST not in start.renamed:
        best, old_best, note = best_in_folder(run, folder)
    mirror = None
    if config.mirror:
        mirror, best_in_mirror = claim_mirror(run, start, folder)
        if best_in_mirror:
            best = min(best or best_in_mirror, best_in_mirror)
    take_over(folder, start, config, mirror)
    if start.checkpoint:
        run.repeats = steps_to_repeat(run, start, start.checkpoint)  # before the log grows
    run.log.note(checkpoint_bytes=needed, best_val_loss=best.val_loss if best else None, **run.state.scores)
    run.log.open(start.state.step, {"run": start.identity.id, **run.fixed_content["launch"]})
    if mirror:
        run.uploads = Uploads(mirror, config, run.log)
    after_write = run.uploads.start if run.uploads else lambda: None
    assert run.log.folder_lock
    run.writer = CheckpointWriter(config, run.log.folder_lock, run.log, best, after_write)
    if start.checkpoint:
        begin_at(run, start, start.checkpoint)
        after_write()  # this choice is uploaded too
    if old_best:  # only now: a launch that ends before has changed nothing
        (folder / BEST).rename(old_best)
        run.log.warn(f"{note}; renamed {old_best.name}; the best model is chosen anew")


def claim_mirror(run: Run, start: Start, folder: Path) -> tuple[Mirror, Best | None]:
    """Claim the mirror for this launch; return it, and its best model if its loss is comparable."""
    mirror = Mirror(run.config.mirror, start.identity.id, run.config.name)
    if os.path.realpath(mirror.folder) == os.path.realpath(folder):  # resolve() raises for a loop of links
        raise UserError(f"--mirror {run.config.mirror} is --checkpoint_dir; give a folder of another machine or disk")
    index = Index("", "", "", {})
    with suppress(NoAnswer):  # then the first upload claims the mirror
        index = mirror.patiently(mirror.claim)
    best = Best.of(index.checkpoints[BEST]) if BEST in index.checkpoints else None
    if best and best.validated_on != run.validated_on:
        best = None
    return mirror, best


def take_over(folder: Path, start: Start, config: TrainConfig, mirror: Mirror | None) -> None:
    """Write run.json, rename damaged files, and move a checkpoint from the mirror to its place."""
    # First, so that a folder with a checkpoint has its run's identity.
    write_run(folder, start.identity.id, config.run_name, config.mirror, config.use_wandb)
    for damaged, name in start.renamed.items():  # under their old names, saves would replace or delete them
        damaged.rename(name)
    if start.downloaded and start.path:
        if mirror and mirror.is_claimed:  # logs first: once the checkpoint is there, no launch restores them
            mirror.patiently(partial(restore_logs, mirror, folder))
        os.replace(start.downloaded, start.path)
        fsync_folder(folder)


def steps_to_repeat(run: Run, start: Start, checkpoint: dict) -> Repeats:
    """Return the records of the steps after the checkpoint, from the log that led to it."""
    folder = start.path.parent if start.is_fork and start.path else Path(run.config.checkpoint_dir)
    records = folder / METRICS
    size = records.stat().st_size if records.exists() else 0
    checkpoint["metrics_bytes"] = min(checkpoint["metrics_bytes"], size)  # the log may have been deleted
    return Repeats.read(
        records,
        checkpoint["metrics_bytes"],
        start.state.step,
        checkpoint["launch"],
        run.fixed_content["launch"]["settings"],
        run.config.repeats_bits(run.ranks.device.type),
    )


def begin_at(run: Run, start: Start, checkpoint: dict) -> None:
    """Save what this launch decides before its first step: an older checkpoint, a fork, other options, other data.

    A later --resume latest then continues as decided, even if this launch is killed before its first save.
    """
    assert run.writer
    data = checkpoint["data"]
    stored = {"options": checkpoint["options"], "data": {**data, "phase": asdict(data["phase"])}}
    decided = {name: run.fixed_content[name] for name in stored}
    # The launch stays: until this one records its first measurement, the log's records are that launch's.
    content = {**checkpoint, **asdict(run.state), **decided}
    if start.is_fork:
        content["metrics_bytes"] = run.log.size_of(METRICS)
    run.writer.begin_at(content, None if start.is_fork else start.path, decided != stored)


def best_in_folder(run: Run, folder: Path) -> tuple[Best | None, Path | None, str]:
    """Return the folder's best model so far; None if there is none with a comparable loss.

    Also returns a new name for a file that is damaged, or was chosen on other validation rows, and a text that says so.

    Raises: Unreadable, OtherVersion.
    """
    path = folder / BEST
    if not path.exists():
        return None, None, ""
    try:
        read_checkpoint(path)
    except (Unreadable, OtherVersion):
        raise
    except UserError as error:
        return None, aside(path), str(error)
    best = Best.of(read_head(path))
    if best and run.validated_on and best.validated_on != run.validated_on:
        other = folder / f"best_model_step_{best.step:06d}.pt"
        return None, other, f"{path}: was chosen on other validation rows"
    return best, None, ""
