"""Files on a network, read in ranges without a copy on the disk."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from steadygpt.base.options import UserError
from steadygpt.base.retry import Service

READ_AHEAD = 2**24  # bytes requested beyond those that a reader wants, because services limit the rate of requests


@dataclass(frozen=True)
class RemoteFile:
    """A file of the Hub or of an object store."""

    name: str  # in messages
    path: str  # in its repository; in a store, its URL
    size: int  # in bytes
    service: Service
    request: Callable[[int, int], Iterator[bytes]]  # yields the bytes [start, end) of this version
    version: str | None = None  # changes with the content in a store
    cached: Path | None = None  # where a downloaded file of the Hub is

    @property
    def identity(self) -> tuple:
        """A key that changes when the file is renamed or replaced; a file of the Hub, at one commit, never is."""
        return (self.path, self.size) if self.version is None else (self.path, self.size, self.version)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) in blocks; after a lost connection, request the rest."""
        blocks: Iterator[bytes] | None = None

        def receive() -> bytes:
            nonlocal blocks
            response = blocks or self.request(start, end)
            blocks = None  # after an error, request the rest
            block = next(response, b"")
            if not block and start < end:
                raise ConnectionError(f"the connection ended {end - start:,} bytes early")
            blocks = response
            return block

        while block := self.service.persistently(self.name, receive):
            start += len(block)
            if start > end:
                raise UserError(f"{self.name}: cannot be read in parts; download it, and name its folder with --source")
            yield block

    def open(self) -> BinaryIO:
        """Open the file; if the Hub's cache has it, open it there."""
        if self.cached and self.cached.exists():
            return self.cached.open("rb")
        from fsspec.spec import AbstractBufferedFile

        class InPlace(AbstractBufferedFile):
            def _fetch_range(file, start: int, end: int) -> bytes:  # noqa: N805
                return b"".join(self.read(start, end))

        file = InPlace(None, self.path, block_size=READ_AHEAD, size=self.size)
        file.name = self.name
        return io.BufferedReader(file, 2**16)
