"""The opening of a run's folder: the first write of a run, after everything that can refuse it has not."""

import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from steadygpt.base.durable import fsync_folder
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import bytes_text, labelled
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
from steadygpt.log.metrics import METRICS, write_run
from steadygpt.log.wandb_sink import FOLDER as WANDB
from steadygpt.mirror.restore import restore_logs
from steadygpt.mirror.store import Index, Mirror
from steadygpt.mirror.uploads import Uploads
from steadygpt.run.repeats import Repeats
from steadygpt.run.run import Run
from steadygpt.start.find import Start


def check_wandb_settings(folder: Path) -> None:
    """Check that the folder, which may be from elsewhere, does not decide where W&B sends the curves."""
    settings = folder / WANDB / "settings"
    if settings.exists():
        raise UserError(f"{settings}: may name another server for W&B. Move it to ~/.config/wandb if it is yours")


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
    assert run.log.folder_lock
    config = run.config
    folder = Path(config.checkpoint_dir)
    needed = checkpoint_bytes(run.model, config.optimizer)
    check_space(folder, needed, start.downloaded)
    check_wandb_settings(folder)
    best = None
    if folder / BEST not in start.renamed:
        best = best_in_folder(run, folder)
    mirror = Mirror(config.mirror, start.run.id, config.name) if config.mirror else None
    if mirror and os.path.realpath(mirror.folder) == os.path.realpath(folder):  # resolve() raises for a loop of links
        raise UserError(f"--mirror {config.mirror} is --checkpoint_dir; give a folder of another machine or disk")
    index = Index("", "", "", {})
    with suppress(NoAnswer):  # then the first upload claims the mirror
        if mirror:
            index = mirror.patiently(mirror.claim)

    # Prepare the folder. run.json comes first, so that a folder with a checkpoint always says which run it is.
    write_run(folder, start.run.id, config)
    for damaged, name in start.renamed.items():  # under their old names, saves would replace or delete them
        damaged.rename(name)
    if start.downloaded and start.path:
        if mirror and mirror.is_claimed:  # first the logs: with the checkpoint in the folder, none are restored
            mirror.patiently(partial(restore_logs, mirror, folder))
        os.replace(start.downloaded, start.path)
        fsync_folder(folder)
    if BEST in index.checkpoints:
        mirrored = Best.of(index.checkpoints[BEST])
        if mirrored and mirrored.validated_on == run.validated_on:
            best = min(best or mirrored, mirrored)

    # What the run compares itself with, before its log grows.
    checkpoint = start.checkpoint
    launch = run.stored["launch"]
    if checkpoint:
        log_folder = start.path.parent if start.is_fork and start.path else folder
        records = log_folder / METRICS
        size = records.stat().st_size if records.exists() else 0
        checkpoint["metrics_bytes"] = min(checkpoint["metrics_bytes"], size)  # the log may have been deleted
        run.repeats = Repeats.read(
            records,
            checkpoint["metrics_bytes"],
            start.state.step,
            checkpoint["launch"],
            launch["how"],
            config.repeats_bits(run.ranks.device.type),
        )
    run.log.note(checkpoint_bytes=needed, best_val_loss=best.val_loss if best else None, **run.state.scores)
    run.log.open(start.state.step, {"run": start.run.id, **launch})

    if mirror:
        run.uploads = Uploads(mirror, config, run.log)
    after_write = run.uploads.start if run.uploads else lambda: None
    run.writer = CheckpointWriter(config, run.log.folder_lock, run.log, best, after_write)
    if checkpoint:
        data = checkpoint["data"]
        checkpoint = {**checkpoint, "data": {**data, "phase": asdict(data["phase"])}}  # plain types, as in the file
        if start.is_fork:  # the fork's first checkpoint has this run's options
            checkpoint = checkpoint | {name: run.stored[name] for name in ("options", "data", "launch")}
            checkpoint["metrics_bytes"] = run.log.size_of(METRICS)
        run.writer.begin_at(checkpoint, None if start.is_fork else start.path)
        after_write()  # the choice of an older checkpoint is uploaded too


def best_in_folder(run: Run, folder: Path) -> Best | None:
    """Return the best model so far in the folder; None if there is none with which losses can be compared.

    A damaged file gets another name. So does a model that was chosen on other rows, whose loss says nothing here.

    Raises: Unreadable, OtherVersion.
    """
    path = folder / BEST
    if not path.exists():
        return None
    try:
        read_checkpoint(path)
    except (Unreadable, OtherVersion):
        raise
    except UserError as error:
        name = aside(path).name
        path.rename(folder / name)
        run.log.warn(f"{error}; renamed {name}. The next validation chooses the best model anew")
        return None
    best = Best.of(read_head(path))
    if best and run.validated_on and best.validated_on != run.validated_on:
        other = folder / f"best_model_step_{best.step:06d}.pt"
        path.rename(other)
        text = f"{other.name} was chosen on other validation rows; the next validation chooses the best model anew"
        run.log.say(labelled("best", text))
        return None
    return best
