"""Files behind a network: downloads that resume from their partial file, and reading in place."""

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from steadygpt.base.durable import fsync, sha256_of
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.retry import Service

COPIES = 3  # of a file, after which corruption is not by chance
READ_AHEAD = 2**22  # bytes that are requested beyond those that a reader wants


@dataclass(frozen=True)
class RemoteFile:
    """A file of the Hub or of an object store."""

    name: str  # in messages
    path: str  # in its repository; in a store, its URL
    size: int  # in bytes
    service: Service
    blocks: Callable[[int, int], Iterator[bytes]]  # requests the bytes [start, end)
    version: str | None = None  # changes with the content in a store
    sha256: str = ""  # of the content in hex, where it is known

    @property
    def identity(self) -> tuple:
        """What changes when the file is renamed or replaced; a data set of the Hub is at one commit."""
        return (self.path, self.size) if self.version is None else (self.path, self.size, self.version)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) in blocks; after a lost connection, request the rest."""
        blocks: Iterator[bytes] | None = None

        def receive() -> bytes:
            nonlocal blocks
            begun, blocks = blocks or self.blocks(start, end), None  # after an error, blocks are requested again
            block = next(begun, b"")
            if not block and start < end:
                raise ConnectionError(f"the connection ended {end - start:,} bytes early")
            blocks = begun
            return block

        while block := self.service.persistently(self.name, receive):
            start += len(block)
            if start > end:
                raise UserError(f"{self.name}: cannot be read in parts; download it, and name its folder with --source")
            yield block

    def download(self, target: Path, progress: Callable[[int], object] = bool) -> Path:
        """Download the file to `target` unless it is there, and return `target`.

        hf_hub_download and fsspec's get_file begin a file again after a reset, and check no SHA-256. This resumes from
        the partial file, also in a later run.

        Args:
            progress: is called with the number of bytes that are there.

        Raises: UserError; OSError for errors of this machine, such as a full disk.
        """
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            try:
                self._download(target, part, progress)
            except OSError as error:
                error.filename = error.filename or str(part)  # writes name no file
                raise
        progress(self.size)
        return target

    def _download(self, target: Path, part: Path, progress: Callable[[int], object]) -> None:
        with open(part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another command may want the same file
            copies = 0
            while not target.exists():
                for block in self.read(file.seek(0, os.SEEK_END), self.size):
                    file.write(block)
                    progress(file.tell())
                file.flush()
                fsync(file.fileno())
                # The partial file may have been begun before the machine crashed.
                if file.tell() == self.size and (not self.sha256 or sha256_of(part) == self.sha256):
                    os.replace(part, target)
                    return
                file.truncate(0)
                copies += 1
                if copies == COPIES:
                    raise UserError(
                        f"{self.name}: corrupted in {COPIES} downloads; check the memory and disk of this machine, and "
                        "any proxy, then run this again"
                    )
                say(f"{self.name}: corrupted in transit; downloading it again")

    def open(self) -> BinaryIO:
        """Open the file to read parts of it without a download."""
        from fsspec.spec import AbstractBufferedFile

        class InPlace(AbstractBufferedFile):
            def _fetch_range(file, start: int, end: int) -> bytes:  # noqa: N805
                return b"".join(self.read(start, end))

        file = InPlace(None, self.path, block_size=READ_AHEAD, size=self.size)
        file.name = self.name
        return io.BufferedReader(file, 2**16)
