"""Sources of text and token ids: local files, Python's own library, object stores, data sets of the Hub."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from steadygpt.base.foreign import BEGINNINGS, LFS_POINTER
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.text import counted
from steadygpt.network import hub
from steadygpt.network.remote import RemoteFile
from steadygpt.network.stores import Store
from steadygpt.prepare.documents import (
    BLOCK_BYTES,
    READERS,
    TABLES,
    Block,
    FileToRead,
    naming,
    no_text_field,
    suffix_of,
)
from steadygpt.prepare.ids import ID_SUFFIXES
from steadygpt.prepare.source_files import choose, find_files

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu
ROWS_AT_ONCE = 32  # rows of a block of a StreamedSource


class Place(NamedTuple):
    """Where a block of a source begins."""

    file: int = 0
    at: int = 0  # see Block
    row: int = 0
    progress: int = 0  # how far the file is read before the block, see Block


@dataclass(eq=False)
class Source:
    """Files of text or token ids: local files, or files on a network, which are read in place."""

    name: str
    paths: Sequence[Path] = ()  # of the local files
    remote: Sequence[RemoteFile] = ()  # the files on the network; either these or `paths` are empty
    repo: hub.Repo | None = None  # the data set of the Hub, if the source is one
    progress_unit = "B"

    def __post_init__(self):
        self.names = [file.path for file in self.remote] or [str(path) for path in self.paths]
        self.stats = [path.stat() for path in self.paths]
        self.sizes = [file.size for file in self.remote] or [stat.st_size for stat in self.stats]
        self.identities = [file.identity for file in self.remote] or list(zip(self.names, self.sizes, strict=True))

    @property
    def times(self) -> str:
        """A line that changes when a local file is modified."""
        return hashlib.sha256(json.dumps([stat.st_mtime_ns for stat in self.stats]).encode()).hexdigest()[:16]

    @property
    def commit(self) -> str:
        """The commit of a data set of the Hub, "" for other sources."""
        return self.repo.commit if self.repo else ""

    @property
    def holds_ids(self) -> bool:
        """Whether the files hold token ids instead of text."""
        return suffix_of(self.names[0]) in ID_SUFFIXES

    def open(self, file: int) -> BinaryIO:
        """Open a file; it has peek(), seek() and `name`."""
        opened = self.remote[file].open() if self.remote else self.paths[file].open("rb")
        is_small = self.sizes[file] < 1000  # peeking into a large remote file would request more of it
        if is_small and opened.peek(1).startswith(LFS_POINTER):  # type: ignore[attr-defined]
            raise UserError(f"{self.names[file]}: {BEGINNINGS[LFS_POINTER]}")
        return opened

    def blocks(self, text_field: str, vocab_size: int, first: Place) -> Iterator[Block]:
        """Read the files in blocks, from a place on.

        Args:
            vocab_size: implies the dtype of token ids without a header.
        """
        at = first.at
        row = first.row
        for number in range(first.file, len(self.names)):
            name = self.names[number]
            with self.open(number) as opened, naming(name):
                file = FileToRead(opened, name, number, self.sizes[number], text_field, vocab_size)
                yield from READERS[suffix_of(name)](file, at, row)
            if self.paths:
                self._check_unchanged(number)
            at = 0
            row = 0

    def units(self, text_field: str, vocab_size: int, first: Place) -> Iterator[list[Block]]:
        """Gather consecutive blocks into units of at least BLOCK_BYTES, so that small files do not idle the workers."""
        unit: list[Block] = []
        num_bytes = 0
        for block in self.blocks(text_field, vocab_size, first):
            unit.append(block)
            num_bytes += block.num_bytes + 64  # plus 64, because blocks of empty files take memory too
            if num_bytes >= BLOCK_BYTES:
                yield unit
                unit = []
                num_bytes = 0
        if unit:
            yield unit

    def check(self, text_field: str) -> None:
        """Check that local tables have the column of the text, and that small local files are not mere pointers."""
        for index, path in enumerate(self.paths):
            if suffix_of(path.name) in TABLES:
                next(self.blocks(text_field, 0, Place(index)), None)  # raises if the column is missing
            elif self.sizes[index] < 1000:
                self.open(index).close()  # raises if it is a pointer

    def _check_unchanged(self, file: int) -> None:
        """Check that a local file has not changed between its discovery and the end of reading it."""
        now = self.paths[file].stat()
        before = self.stats[file]
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            size = f"{now.st_size:,}" if now.st_size != before.st_size else "as many"
            raise UserError(
                f"{self.names[file]}: changed while it was read; it had {before.st_size:,} bytes, and now it has "
                f"{size}. Prepare it again when it is complete, or a copy of it, with another --out"
            )


def fingerprint(files: Sequence[tuple]) -> str:
    """Return a line that changes when files are added, removed or changed.

    Args:
        files: of each, the name, the size in bytes, and perhaps a version.
    """
    root = os.path.commonpath([Path(name).parent for name, *_ in files])
    sizes = [(os.path.relpath(name, root), *rest) for name, *rest in files]
    return f"{len(sizes)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


class StreamedSource(Source):
    """The rows of a Hub data set in a format that only the library `datasets` reads."""

    progress_unit = " documents"

    def __init__(self, name: str, repo: hub.Repo, config: str, files: Sequence[RemoteFile]):
        super().__init__(name, repo=repo)
        self.config = config
        self.names = [name]
        self.sizes = [0]
        self.identities = [file.identity for file in files]

    def blocks(self, text_field: str, vocab_size: int, first: Place) -> Iterator[Block]:
        assert self.repo
        with naming(self.name):
            row = first.at
            for batch in hub.stream(self.repo, self.config, "train").skip(row).iter(ROWS_AT_ONCE):
                if text_field not in batch:
                    raise no_text_field(self.name, text_field, batch)
                values = batch[text_field]
                end = row + len(values)
                yield Block(self.name, 0, row, end, row, end, end, values)
                row = end


def find_source(name: str, commit: str = "", max_files: int | None = None, out: Path | None = None) -> Source:
    """Find the files of --source.

    Args:
        commit: of the Hub data set, if an earlier run of the preparation has read this one.
        max_files: how many files to take, in their order; None for all.
        out: see find_files.
    """
    if "://" in name:
        files_of_store = {file.path: file for file in Store(name).files()}
        # Hidden files are left out, as in a local folder.
        visible = [path for path in files_of_store if "/." not in path.removeprefix(name.partition("*")[0])]
        return Source(name, remote=[files_of_store[path] for path in choose(name, visible)[:max_files]])
    if not name.startswith("hf:"):
        return Source(name, find_files(name, out)[:max_files])
    spec, _, config = name.removeprefix("hf:").partition(":")
    repo = hub.find_repo("dataset", spec, commit)
    kind, files = hub.data_files(repo, config, "train")
    if kind in ("parquet", "json") and all(suffix_of(file.path) not in ("", ".json") for file in files):
        if not repo.online:
            say(f"{name}: no network, so only the {counted(len(files), 'file')} in the cache are known")
        return Source(name, remote=files[:max_files], repo=repo)
    if max_files is not None:
        raise UserError(f"{name}: --max_files needs Parquet or JSON Lines, found {kind or 'files elsewhere'}; drop it")
    return StreamedSource(name, repo, config, files)
