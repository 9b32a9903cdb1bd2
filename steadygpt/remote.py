"""Files behind a network: downloads that resume from their partial file, and reading in place."""

import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from steadygpt.retry import Patience, Service, is_local

READ_AHEAD = (2**20, 2**25)  # bytes requested by a reader that jumps, and at most by one that reads on


class Receive(Protocol):
    """Append the bytes [start, end) of a remote file to `file`; after an error it holds what has arrived.

    `progress` is called with the number of bytes that have arrived, and patience.received() with each block.
    """

    def __call__(
        self, start: int, end: int, file: BinaryIO, patience: Patience, progress: Callable[[int], object] = bool
    ) -> None: ...


def download(
    receive: Receive,
    target: Path,
    size: int,
    is_whole: Callable[[Path], bool],
    patience: Patience,
    progress: Callable[[int], object],
) -> None:
    """Download a file of `size` bytes, from where an earlier attempt or run ended.

    Args:
        is_whole: checks the content of the file, which may have been begun before the machine crashed.

    Raises: ConnectionError when another attempt may help; OSError for errors of this machine, such as a full disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    try:
        with open(part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another command may want the same file
            if target.exists():
                return
            if (have := file.seek(0, os.SEEK_END)) < size:
                receive(have, size, file, patience, lambda count: progress(have + count))
            file.flush()
            os.fsync(file.fileno())
            if (found := file.tell()) < size:
                raise ConnectionError(f"the connection ended after {found:,} of {size:,} bytes")
            if found > size or not is_whole(part):
                file.truncate(0)
                raise ConnectionError("damaged on the way")
            os.replace(part, target)
    except OSError as error:
        if is_local(error) and error.filename is None:  # as after a write
            error.filename = str(part)
        raise


class RemoteFile(io.RawIOBase):
    """A remote file, read in place: a few requests for large blocks, each repeated until it succeeds."""

    def __init__(self, name: str, size: int, receive: Receive, service: Service):
        self.name, self.size, self.position = name, size, 0
        self.receive, self.service = receive, service
        self.block, self.block_start, self.ahead = b"", 0, READ_AHEAD[0]

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.size - self.position)
        if wanted <= 0:
            return 0
        if not 0 <= self.position - self.block_start < len(self.block):
            self._fetch(wanted)
        at = self.position - self.block_start
        part = self.block[at : at + wanted]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)

    def _fetch(self, wanted: int) -> None:
        """Receive the block with the bytes from the position on, at least `wanted`; of a small file, all of it."""
        reads_on = 0 <= self.position - self.block_start - len(self.block) < READ_AHEAD[0]
        self.ahead = min(2 * self.ahead, READ_AHEAD[1]) if reads_on else READ_AHEAD[0]
        start = self.position if self.size > READ_AHEAD[0] else 0
        end = min(self.position + max(wanted, self.ahead), self.size)
        received = io.BytesIO()

        def attempt(patience: Patience) -> None:
            self.receive(start + received.tell(), end, received, patience)
            if received.tell() < end - start:
                raise ConnectionError("the connection ended early")

        self.service.persistently(self.name, attempt)
        self.block, self.block_start = received.getvalue(), start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
