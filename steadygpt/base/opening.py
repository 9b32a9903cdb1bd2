"""The two functions that open what others may have made: a run's folder, data, a bundle, a mirror, a preset.

Such a folder may have been copied from anywhere. A pipe in place of a file would hang the reader, a device would fill
its memory, and a link would lead a writer to a file elsewhere.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO, Any

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text

LARGEST = 2**30  # bytes of a file that is read as a whole
LARGEST_JSON = 2**25  # bytes; parsed, they take some thirty times as many


def open_to_read(path: Path, at_most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading.

    Args:
        at_most: bytes that the file may have.

    Raises: UserError for a pipe, a device or a larger file; OSError as open() does, also for a folder.
    """
    file = open(path, "rb", opener=_regular)  # noqa: SIM115 (the caller closes it)
    size = os.fstat(file.fileno()).st_size
    if at_most is not None and size > at_most:
        file.close()
        raise UserError(
            f"{path}: {bytes_text(size)}; expected at most {bytes_text(at_most)}. Move it away, or give another file"
        )
    return file


def read_file(path: Path, at_most: int = LARGEST) -> bytes:
    """Return the content of a regular file, with the limit and the errors of open_to_read()."""
    with open_to_read(path, at_most) as file:
        return file.read()


def regular(path: Path) -> Path:
    """Return a path that open_to_read() would open, for a library that opens it itself."""
    open_to_read(path).close()
    return path


def open_to_write(path: Path, mode: str) -> IO[Any]:
    """Open a file as open() does, but not through a link, because writing would change the link's target.

    Raises: UserError for a pipe or a device; OSError as open() does, also for a link.
    """
    return open(path, mode, opener=through_no_link)


def _regular(path: str, flags: int) -> int:
    refusal = UserError(f"{path}: a pipe or a device; expected a file. Remove it, or give another path")
    try:
        # With O_NONBLOCK, a pipe without a writer opens at once. It does not change how a file is read or written.
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise refusal from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() refuses a folder itself
        os.close(descriptor)
        raise refusal
    return descriptor


def through_no_link(path: str, flags: int) -> int:
    """Open a file for writing, but not through a link: an `opener` for open()."""
    return _regular(path, flags | os.O_NOFOLLOW)
