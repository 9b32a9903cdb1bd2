"""Restores from the mirror: a checkpoint newer than the folder's, and the logs that led to it."""

from dataclasses import replace
from operator import methodcaller
from pathlib import Path

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer
from steadygpt.checkpoint.files import LATEST, NAMED, Found, Unreadable, checkpoint_files, find_checkpoint
from steadygpt.log.metrics import RUN, RunIdentity
from steadygpt.mirror.store import FILES, Damaged, Mirror


def find_newest(url: str, which: str, folder: Path, identity: RunIdentity) -> tuple[Found, RunIdentity]:
    """Find the checkpoint that --resume asks for: the folder's or, if that is newer, the mirror's.

    Args:
        which: latest, auto, or a word of NAMED.
        identity: of the run in the folder.

    Returns: the checkpoint, downloaded to a temporary file if it comes from the mirror; and the run's identity.
    """
    is_named = which in NAMED
    path = folder / NAMED.get(which, LATEST)
    problem = ""  # why the folder has no such checkpoint
    try:
        local = find_checkpoint(which, folder)
    except Unreadable:
        raise
    except UserError as error:
        corrupt = checkpoint_files(folder)
        if is_named:
            corrupt = [file for file in corrupt if file == path]
        local = Found(damaged={file: f"{file}: corrupt" for file in corrupt})
        problem = str(error)
    newest_s = local.checkpoint["saved_at"] if local.checkpoint else 0
    holds_run = (folder / RUN).exists() or checkpoint_files(folder)
    mirror = Mirror(url, identity.id if holds_run else "")  # an empty folder accepts the mirror of any run
    skipped: list[str] = []
    try:
        index = mirror.patiently(mirror.index)
        if index.checkpoints:
            identity = replace(identity, id=index.run, name=identity.name or index.name, mirror=url)
        entries = list(index.checkpoints.values())
        if is_named:
            entries = [entry for name, entry in index.checkpoints.items() if name == path.name]
        for entry in dict.fromkeys(entries):  # newest first
            if entry.saved_at <= newest_s:
                break
            try:
                downloaded, checkpoint = mirror.download(entry, folder)
            except Damaged as error:
                skipped.append(str(error))
                continue
            if local.checkpoint and local.path == path and local.checkpoint["step"] > entry.step:
                step = local.checkpoint["step"]
                # Files in `damaged` are renamed, so this one is not lost.
                local.damaged[path] = f"{path}: of step {step:,}, but saved before the mirror's"
            return Found(path, checkpoint, local.damaged, skipped, downloaded), identity
    except NoAnswer as error:
        if not local.path:
            raise
        skipped.append(f"the mirror may have a newer checkpoint: {error}")
    if not local.path and (problem or skipped):  # auto starts no new run beside damaged checkpoints
        raise UserError("; ".join(skipped) or f"{problem}; nor is there one in --mirror {url}")
    return replace(local, skipped=skipped), identity


def restore_logs(mirror: Mirror, folder: Path) -> None:
    """Replace the logs in a folder with the mirror's, which belong to the newest checkpoint."""
    for name in filter(FILES.fullmatch, mirror.sizes()):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, methodcaller("write", mirror.read(name)))
