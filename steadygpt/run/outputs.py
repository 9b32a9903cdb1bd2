"""The files that a run writes: its logs, its checkpoints and its mirror."""

import os
import shutil
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from steadygpt.base.durable import lock_folder
from steadygpt.base.options import UserError, shown_options
from steadygpt.base.retry import NoAnswer
from steadygpt.base.text import bytes_text
from steadygpt.checkpoint.files import LATEST, check_folder
from steadygpt.checkpoint.mirror import Mirror, restore_files
from steadygpt.checkpoint.saves import STALE, CheckpointWriter, Saves
from steadygpt.checkpoint.uploads import Uploads
from steadygpt.data.shards import check_listing
from steadygpt.log.runlog import METRICS, RunLog
from steadygpt.machine.ranks import StopSignal
from steadygpt.run.memory import checkpoint_bytes
from steadygpt.run.places import write_places
from steadygpt.run.plan import Plan
from steadygpt.run.repeats import Repeats, repeated_records
from steadygpt.run.start import IN_USE
from steadygpt.run.starts import Entry, note_of_start


def checked_fingerprint(plan: Plan) -> dict[str, list] | None:
    """Check that every rank has the same shards, and read those that the run has not checked yet.

    Returns: on rank 0 what ShardSet.check() found in each set, by its key, and what is known of sets of earlier starts.
    """
    sets, vocab_size, ranks = plan.data.sets, plan.data.vocab_size, plan.ranks
    known = plan.start.checkpoint["data_fingerprint"] if plan.start.checkpoint else {}
    expected = ranks.broadcast({path: about for shards in sets for path, about in shards.listing().items()})
    ranks.on_each(lambda: check_listing(sets, expected))
    return ranks.on_main(lambda: known | {s.key: s.check(vocab_size, known) for s in sets})


def open_saves(
    plan: Plan, starts: list[Entry], log: RunLog, stop: StopSignal, held: ExitStack
) -> tuple[Saves, Repeats]:
    """Open the folders of a run, and its log, on rank 0; `held` closes the log and releases the locks.

    Args:
        starts: the record of starts; the last one is this start.
    """
    writer, repeats = plan.ranks.on_main(lambda: _open_on_main(plan, starts, log, held)) or (None, Repeats(log))
    start = plan.start
    # A save that was killed may lack one of its names, and be repeated; latest.pt is the last one that it gets.
    step = start.step if start.path and start.path.name == LATEST else None
    return Saves(plan.config, plan.ranks, log, stop, writer, step), repeats


def _open_on_main(plan: Plan, starts: list[Entry], log: RunLog, held: ExitStack) -> tuple[CheckpointWriter, Repeats]:
    config, start = plan.config, plan.start
    folder, logdir = Path(config.checkpoint_dir), Path(config.logdir)
    if not config.resume:  # otherwise find_start has locked it
        held.enter_context(lock_folder(folder, IN_USE))
        check_folder(folder, None)
    size, disk = checkpoint_bytes(plan.sketch, config.optimizer), shutil.disk_usage(folder)
    free = disk.free + sum(file.stat().st_size for file in folder.glob(STALE))
    if free < size and disk.total:  # 0: the file system does not say
        found = f"{bytes_text(size)} needed for a checkpoint, {bytes_text(free)} free"
        raise UserError(f"{folder}: {found}; nothing was changed. Free some space, or use another --checkpoint_dir")
    if os.path.realpath(logdir) != os.path.realpath(folder):  # resolve() raises for a loop of links
        held.enter_context(lock_folder(logdir, "give this run another --logdir"))
    mirror = None
    if config.mirror:
        mirror = Mirror(config.mirror, config.run_name, resumes=start.checkpoint is not None)
        with suppress(NoAnswer):  # the first upload claims it then
            mirror.patiently(mirror.claim)
            if start.checkpoint:
                mirror.patiently(partial(restore_files, mirror, config, replace=False))  # what is missing here
    uploads = Uploads(mirror, config, log) if mirror else None
    writer = CheckpointWriter(folder, log, config.keep_checkpoints, config.keep_epochs, uploads, start.renamed)
    if start.checkpoint and start.is_fork:
        # It has this run's name and options. The file belongs to the other run, as does the best model so far.
        writer.resume(start.checkpoint | {"train_config": shown_options(config), "best_val_loss": None}, None)
    elif start.checkpoint:
        writer.resume(start.checkpoint, start.path)
    write_places(folder, config)
    now, repeats = note_of_start(config, starts), Repeats(log)
    if start.step is not None:
        records, reason = repeated_records(logdir / METRICS, start.step, now["parent"], now["start"])
        is_exact = plan.ranks.device.type == "cpu" or config.deterministic
        repeats = Repeats(log, start.step, records, reason, is_exact)
    log.open(start.step, size, now)  # drops what came after that step
    held.enter_context(log)
    return writer, repeats
