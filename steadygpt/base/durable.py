"""Atomic file writes, hard links, fsync and folder locks."""

import errno
import fcntl
import hashlib
import io
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from steadygpt.base.options import UserError

PIECE_BYTES = 2**25  # most that an UncachedFile writes at once
GONE = (FileNotFoundError, NotADirectoryError)  # other errors, such as of a server that restarts, do not tell
NO_FSYNC = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems that cannot fsync a folder


def replace_file(path: Path, write: Callable[[IO[bytes]], object], durable: bool = True) -> None:
    """Write `path` with `write(file)`; a crash leaves the old file or the new one, never a part.

    Args:
        durable: the file also survives a power cut after this call.

    Raises: OSError with errno and path, for example on a full disk; `path` keeps its content.
    """
    temporary = write_temporary(path, write, durable=durable)
    os.replace(temporary, path)
    if durable:
        fsync_folder(path.parent)


def write_temporary(
    path: Path, write: Callable[[IO[bytes]], object], cached: bool = True, durable: bool = True
) -> Path:
    """Write a temporary file beside `path`, for the caller to link or rename, and return its path.

    Args:
        cached: False for a large file that is not read soon, see UncachedFile.
        durable: wait until the file is on the disk.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process
    try:
        # Given a path instead of a file, torch.save would report a full disk as a RuntimeError without errno.
        with open_new(temporary, cached) as file:
            write(file)
            file.flush()
            if durable:
                fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # gzip's errors have no errno
            error.filename = str(temporary)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and has_no_inodes(path.parent):
            error.strerror = f"{error.strerror}: no inodes are left for new files (df -i)"
        raise
    return temporary


def has_no_inodes(folder: Path) -> bool:
    """Return whether the file system of a folder has no inodes left, although it may have space."""
    disk = os.statvfs(folder)
    return disk.f_files > 0 and disk.f_favail == 0  # without files, it has no such limit


def open_new(path: Path, cached: bool) -> IO[bytes]:
    """Open a new file for writing, through the page cache or as an UncachedFile."""
    if cached:
        return path.open("xb")
    return io.BufferedWriter(UncachedFile(str(path), "xb"), PIECE_BYTES)  # str, because errors show repr(path)


class UncachedFile(io.FileIO):
    """A new file whose content leaves the page cache as soon as it is on the disk, piece by piece.

    So a file of gigabytes neither evicts the training data from the cache nor is written to the disk all at the end,
    which would delay the steps. The next reader of the file must read it from the disk.
    """

    def write(self, data) -> int:
        """Write at most PIECE_BYTES, and return how many bytes."""
        written = super().write(memoryview(data)[:PIECE_BYTES])
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.fdatasync(self.fileno())
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written


def link_file(source: Path, target: Path) -> None:
    """Link `source` as `target` atomically, or copy it where the file system has no hard links."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)  # os.link refuses an existing target, such as a killed process may have left
    try:
        try:
            os.link(source.resolve(), temporary)  # not the symbolic link that the user may have put there
        except OSError:
            shutil.copy2(source, temporary)
            with temporary.open("rb") as file:
                fsync(file.fileno())
        os.replace(temporary, target)
    finally:  # still there after an error, and if both names were already one file: rename() then does nothing
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def existing(path: Path) -> Path:
    """Return the path, or its closest parent folder that exists."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if os.path.exists(place))  # noqa: PTH110 (Path.exists may raise)


def fsync(descriptor: int) -> None:
    """Write a file or folder to the disk. On macOS, os.fsync leaves it in the disk's own cache, so use F_FULLFSYNC."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS
        with suppress(OSError):  # the file system does not support it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def fsync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk, because the fsync of a file does not write its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


def lock_folder(folder: Path, advice: str) -> IO[str]:
    """Lock `folder` against other processes until this process ends or the returned file is closed; the file stays."""
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not through a link, which a downloaded folder may have: the file is emptied.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "a+")
        _take(file)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise UserError(f"{folder}: in use by process {owner}; {advice}") from None
    except OSError as error:
        place = error.filename or lock
        raise UserError(
            f"cannot write to {place}: {error.strerror}; expected a writable folder with free space, on a file system "
            "with locks"
        ) from error
    return file


def _take(file: IO[str]) -> None:
    """Lock a file; retry for half a second, because a monitor may hold the lock briefly: see lock_owner()."""
    until_s = time.monotonic() + 0.5
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def lock_owner(folder: Path) -> str:
    """Return the process that has locked a folder with lock_folder(), as "NUMBER on HOST"; "" if none has."""
    with suppress(FileNotFoundError), (folder / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "unknown"
    return ""


def leads_to_lock(folder: Path, lock: IO[str]) -> bool:
    """Return whether the path of a folder still leads to the lock that this process has taken there.

    It no longer does after the folder was moved or deleted; another run may then use the path.
    """
    return leads_to(folder / ".lock", lock)


def leads_to(path: Path, file: IO) -> bool:
    """Return whether a path still leads to an open file, or cannot be reached at the moment."""
    try:
        there = path.stat()
    except GONE:
        return False
    except OSError:
        return True
    try:
        return os.path.samestat(there, os.fstat(file.fileno()))
    except OSError:  # the open file is stale: another machine has deleted it, so the path has another one
        return False


def is_gone(path: Path) -> bool:
    """Return whether nothing is at a path; False if it cannot be reached at the moment."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, GONE)
    return False
