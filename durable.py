"""Files that are there whole or not at all, whatever kills the writer, and folders with one writer."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from errors import UserError


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write `path` through `write(file)`; after a crash the old file or the new one is there, never a part.

    Raises: OSError, with `path` untouched, when the disk is full or the folder read-only.
    """
    temporary = write_temporary(path, write)
    os.replace(temporary, path)
    fsync_folder(path.parent)


def write_temporary(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Write the temporary neighbour of `path` and bring it to the disk; the caller links or replaces it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # A file object, not a path: torch.save then reports a full disk as OSError 28, not as an opaque RuntimeError.
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def link_file(source: Path, target: Path) -> None:
    """Make `target` another name of `source`, atomically (a copy where the file system has no hard links)."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)  # os.link refuses an existing target; a killed writer may have left one
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copy2(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # rename() between two names of one file does nothing and leaves both


def fsync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk: a file's fsync does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path, advice: str) -> IO[str]:
    """Make this process the only writer of `folder` until it ends, however it ends; keep the returned file.

    Raises: UserError naming the other process, with `advice`, when the folder is taken.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115 (held open: closing it gives the lock back)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; expected a folder of your own") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise UserError(f"{folder} is in use by process {owner}; {advice}") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
