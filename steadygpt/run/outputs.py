"""The files that a run writes: its folder and its mirror."""

import os
import shutil
from collections.abc import Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from steadygpt.base.durable import fsync_folder, locked
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import bytes_text
from steadygpt.checkpoint.evaluations import EVALUATIONS
from steadygpt.checkpoint.files import check_folder
from steadygpt.checkpoint.mirror import Mirror, restore_files
from steadygpt.checkpoint.saves import CheckpointWriter, stale_files
from steadygpt.checkpoint.uploads import Uploads
from steadygpt.log.metrics import LOG, METRICS, STATUS
from steadygpt.log.runlog import RunLog
from steadygpt.log.tensorboard import FOLDER as TENSORBOARD
from steadygpt.log.wandb_sink import FOLDER as WANDB
from steadygpt.run.history import IN_USE
from steadygpt.run.identity import RUN, write_run
from steadygpt.run.launches import note_of_launch
from steadygpt.run.memory import checkpoint_bytes
from steadygpt.run.plan import Plan
from steadygpt.run.repeats import Repeats, repeated_records

OWN_FILES = (LOG, METRICS, STATUS, RUN, EVALUATIONS, TENSORBOARD, WANDB)  # besides checkpoints


def check_own_files(folder: Path) -> None:
    """Check that what a run writes is no link: in a folder from elsewhere, a link may lead out of the folder."""
    paths = [folder / name for name in OWN_FILES]
    paths += folder.glob(f"{TENSORBOARD}/*")
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path}: a link; expected none, since a run writes into its own folder. Remove the link")
    for name in (TENSORBOARD, WANDB):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{folder / name}: expected a folder. Move it away")
    settings = folder / WANDB / "settings"
    if os.path.lexists(settings):
        raise UserError(f"{settings}: may name another server for W&B. Move it to ~/.config/wandb if it is yours")


def open_outputs(plan: Plan, log: RunLog, stack: ExitStack) -> tuple[CheckpointWriter, Repeats]:
    """Open the folder, mirror and logs of a run on rank 0; `stack` closes the log and releases the lock."""
    config = plan.config
    history = plan.history
    launches = plan.launches
    folder = Path(config.checkpoint_dir)
    if not config.resume:  # otherwise open_history() has locked it
        stack.enter_context(locked(folder, IN_USE))
        check_folder(folder, None)

    # Check the disk, the folder and the mirror, before anything in the folder is changed.
    needed = checkpoint_bytes(plan.sketch, config.optimizer)
    disk = shutil.disk_usage(folder)
    free = disk.free
    for file in stale_files(folder):  # of killed writers: CheckpointWriter deletes them
        if file != history.downloaded:
            free += file.stat().st_size
    if free < needed and disk.total:  # a total of 0: the file system does not report its size
        message = f"{bytes_text(needed)} needed for a checkpoint, {bytes_text(free)} free"
        raise UserError(f"{folder}: {message}; nothing was changed. Free some space, or use another --checkpoint_dir")
    check_own_files(folder)
    mirror = Mirror(config.mirror, history.run.id, config.name) if config.mirror else None
    if mirror and os.path.realpath(mirror.folder) == os.path.realpath(folder):  # resolve() raises for a loop of links
        raise UserError(f"--mirror {config.mirror} is --checkpoint_dir; give a folder of another machine or disk")
    mirrored: Collection[str] = ()  # names of checkpoints
    with suppress(NoAnswer):  # then the first upload claims the mirror
        if mirror:
            mirrored = mirror.patiently(mirror.claim).checkpoints

    # Prepare the folder. run.json comes first, so that a folder with a checkpoint always says which run it is.
    write_run(folder, history.run.id, config)
    for damaged, name in history.renamed.items():  # under their old names, saves would replace or delete them
        damaged.rename(name)
    if history.downloaded and history.path:
        os.replace(history.downloaded, history.path)
        fsync_folder(folder)
    if mirror and mirror.is_claimed:
        if history.checkpoint:
            mirror.patiently(partial(restore_files, mirror, folder))
        mirror.has_other_logs = False

    # Open the writer and the log.
    uploads = Uploads(mirror, config, log, mirrored) if mirror else None
    writer = CheckpointWriter(config, launches, log, uploads)
    launch_line = {"run": history.run.id, **note_of_launch(config, launches)}
    repeats = Repeats(log)
    checkpoint = history.checkpoint
    if checkpoint:
        path = history.path
        if history.is_fork:
            # The fork's first checkpoint has this run's options. The file and the best model are the other run's.
            checkpoint = checkpoint | {"launches": launches, "best_val_loss": None}
            path = None
        writer.resume(checkpoint, path)
        records, reason = repeated_records(folder / METRICS, history.step, launch_line["parent"], launch_line["how"])
        is_exact = config.repeats_bits(plan.ranks.device.type)
        repeats = Repeats(log, history.step, records, reason, is_exact)
    log.note(checkpoint_bytes=needed)
    log.open(history.step, launch_line)
    stack.enter_context(log)
    return writer, repeats
