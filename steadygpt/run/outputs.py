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
    """Check that what a run writes in its folder is there: in a folder from elsewhere, a link may lead anywhere."""
    for path in [*(folder / name for name in OWN_FILES), *folder.glob(f"{TENSORBOARD}/*")]:
        if path.is_symlink():
            raise UserError(f"{path}: a link; expected none, since a run writes into its own folder. Remove the link")
    for name in (TENSORBOARD, WANDB):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{folder / name}: expected a folder. Move it away")
    settings = folder / WANDB / "settings"
    if os.path.lexists(settings):
        raise UserError(f"{settings}: may name another server for W&B. Move it to ~/.config/wandb if it is yours")


def open_outputs(plan: Plan, log: RunLog, held: ExitStack) -> tuple[CheckpointWriter, Repeats]:
    """Open the folder, mirror and logs of a run on rank 0; `held` closes the log and releases the lock."""
    config, history, launches = plan.config, plan.history, plan.launches
    folder = Path(config.checkpoint_dir)
    if not config.resume:  # otherwise open_history() has locked it
        held.enter_context(locked(folder, IN_USE))
        check_folder(folder, None)
    size, disk = checkpoint_bytes(plan.sketch, config.optimizer), shutil.disk_usage(folder)
    free = disk.free + sum(file.stat().st_size for file in stale_files(folder) if file != history.downloaded)
    if free < size and disk.total:  # 0: the file system does not say
        found = f"{bytes_text(size)} needed for a checkpoint, {bytes_text(free)} free"
        raise UserError(f"{folder}: {found}; nothing was changed. Free some space, or use another --checkpoint_dir")
    check_own_files(folder)
    mirror = Mirror(config.mirror, history.run.id, config.name) if config.mirror else None
    if mirror and os.path.realpath(mirror.folder) == os.path.realpath(folder):  # resolve() raises for a loop of links
        raise UserError(f"--mirror {config.mirror} is --checkpoint_dir; give a folder of another machine or disk")
    mirrored: Collection[str] = ()  # names of checkpoints
    with suppress(NoAnswer):  # the first upload claims it
        if mirror:
            mirrored = mirror.patiently(mirror.claim).checkpoints
    write_run(folder, history.run.id, config)  # first: a folder with a checkpoint says which run it is
    for damaged, name in history.renamed.items():  # saves would replace or delete them
        damaged.rename(name)
    if history.downloaded and history.path:
        os.replace(history.downloaded, history.path)
        fsync_folder(folder)
    if mirror and mirror.is_claimed:
        if history.checkpoint:
            mirror.patiently(partial(restore_files, mirror, folder))
        mirror.has_other_logs = False
    uploads = Uploads(mirror, config, log, mirrored) if mirror else None
    writer = CheckpointWriter(config, launches, log, uploads)
    now, repeats = {"run": history.run.id, **note_of_launch(config, launches)}, Repeats(log)
    if checkpoint := history.checkpoint:
        if history.is_fork:
            # It has this run's options. The file belongs to the other run, as does the best model so far.
            checkpoint = checkpoint | {"launches": launches, "best_val_loss": None}
        writer.resume(checkpoint, None if history.is_fork else history.path)
        records, reason = repeated_records(folder / METRICS, history.step, now["parent"], now["how"])
        is_exact = config.repeats_bits(plan.ranks.device.type, plan.ranks.world_size)
        repeats = Repeats(log, history.step, records, reason, is_exact)
    log.note(checkpoint_bytes=size)
    log.open(history.step, now)
    held.enter_context(log)
    return writer, repeats
