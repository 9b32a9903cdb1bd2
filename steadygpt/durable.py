"""Files that are there whole or not at all, whatever kills the writer, and folders with one writer."""

import errno
import fcntl
import io
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from steadygpt.cli import UserError


def replace_file(path: Path, write: Callable[[IO[bytes]], object], durable: bool = True) -> None:
    """Write `path` through `write(file)`; after a crash the old file or the new one is there, never a part.

    Raises: OSError, with `path` untouched, when the disk is full or the folder read-only.
    """
    temporary = write_temporary(path, write, durable=durable)
    os.replace(temporary, path)
    if durable:
        fsync_folder(path.parent)


def write_temporary(
    path: Path, write: Callable[[IO[bytes]], object], cached: bool = True, durable: bool = True
) -> Path:
    """Write the temporary neighbour of `path` and bring it to the disk; the caller links or replaces it.

    Not `cached`, `write` may only append; it then goes past the page cache (see UncachedFile).
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # A file object, not a path: torch.save then reports a full disk as OSError 28, not as an opaque RuntimeError.
        with open(temporary, "wb") if cached else UncachedFile(temporary) as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(temporary)
        raise
    return temporary


class UncachedFile(io.FileIO):
    """A new file, written in sequence past the page cache (O_DIRECT), where the file system can.

    Gigabytes cost a fifth of the processor time that way, and what the cache holds, the training data, stays there;
    who reads the file next reads it from the disk.
    """

    def __init__(self, path: Path, buffer_size: int = 2**24):
        super().__init__(str(path), "wb")  # errors show it as it is given
        self.buffer = memoryview(mmap.mmap(-1, buffer_size))  # from a page's start and of whole pages, as it must be
        self.used = 0
        self._set_direct(True)

    def write(self, data) -> int:
        rest = data = memoryview(data).cast("B")
        while rest:
            part, rest = rest[: len(self.buffer) - self.used], rest[len(self.buffer) - self.used :]
            self.buffer[self.used : self.used + len(part)] = part
            self.used += len(part)
            if self.used == len(self.buffer):
                self._drain()
        return len(data)

    def flush(self) -> None:
        """Write what is left in the buffer; being no whole pages, it goes through the cache."""
        if self.used:
            self._set_direct(False)
            self._drain()

    def _drain(self) -> None:
        rest = self.buffer[: self.used]
        while rest:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                if not (self.direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)):
                    raise
                self._set_direct(False)  # the file system took the flag, but not the write
        self.used = 0  # not before: on a full disk, close() tries again, and its OSError says more than torch.save's

    def _set_direct(self, on: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)  # macOS has none
        flags = fcntl.fcntl(self, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self, fcntl.F_SETFL, flags | flag if on else flags)
            self.direct = on
        except OSError:
            self.direct = False


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
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise UserError(f"{folder} is in use by process {owner}; {advice}") from None
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; expected a folder of your own with room in it"
        ) from error
    return file
