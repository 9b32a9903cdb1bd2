"""Files behind a network: downloads that resume from their partial file, and reading in place."""

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from steadygpt.cli import UserError
from steadygpt.durable import sha256_of
from steadygpt.retry import Service, is_local

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

    def download(self, target: Path, progress: Callable[[int], object] = bool) -> Path:
        """Download the file to `target` unless it is there, and return `target`.

        hf_hub_download and fsspec's get_file begin a file again after a reset, and check no SHA-256. This resumes from
        the partial file, also in a later run.

        Args:
            progress: is called with the number of bytes that are there.

        Raises: UserError; OSError for errors of this machine, such as a full disk.
        """
        if not target.exists():
            self.service.persistently(self.name, lambda: self._download(target, progress))
        progress(self.size)
        return target

    def _download(self, target: Path, progress: Callable[[int], object]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            with open(part, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another command may want the same file
                if target.exists():
                    return
                start = file.seek(0, os.SEEK_END)
                for block in self.blocks(start, self.size) if start < self.size else ():
                    file.write(block)
                    self.service.received()
                    progress(file.tell())
                file.flush()
                os.fsync(file.fileno())
                if (found := file.tell()) < self.size:
                    raise ConnectionError(f"the connection ended after {found:,} of {self.size:,} bytes")
                # The partial file may have been begun before the machine crashed.
                if found > self.size or (self.sha256 and sha256_of(part) != self.sha256):
                    file.truncate(0)
                    raise ConnectionError("damaged on the way")
                os.replace(part, target)
        except OSError as error:
            if is_local(error) and error.filename is None:  # as after a write
                error.filename = str(part)
            raise

    def read(self, start: int, end: int) -> bytes:
        """Read the bytes [start, end).

        Raises: UserError.
        """
        received = bytearray()

        def attempt() -> None:
            for block in self.blocks(start + len(received), end):
                received.extend(block)
                self.service.received()
            if len(received) < end - start:
                raise ConnectionError("the connection ended early")

        self.service.persistently(self.name, attempt)
        if len(received) > end - start:
            raise UserError(f"{self.name}: cannot be read in parts; run this again without --streaming")
        return bytes(received)

    def open(self) -> BinaryIO:
        """Open the file to read parts of it without a download."""
        from fsspec.spec import AbstractBufferedFile

        class InPlace(AbstractBufferedFile):
            def _fetch_range(file, start: int, end: int) -> bytes:  # noqa: N805
                return self.read(start, end)

        file = InPlace(None, self.path, block_size=READ_AHEAD, size=self.size)
        file.name = self.name
        return io.BufferedReader(file, 2**16)
