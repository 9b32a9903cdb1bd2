"""Sources of text and token ids: local files, Python's own library, object stores, data sets of the Hub."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from steadygpt.base.disk import check_pulled
from steadygpt.base.opening import open_to_read
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
ROWS_AT_ONCE = 32  # rows of a block of what `datasets` streams


class Place(NamedTuple):
    """Where a block of a source begins."""

    file: int = 0
    at: int = 0  # see Block
    row: int = 0
    progress: int = 0  # of the file, before this block


@dataclass(eq=False)
class Source:
    """Files of text or token ids: local ones, or files on a network, which are read in place."""

    name: str
    paths: Sequence[Path] = ()  # the local files
    remote: Sequence[RemoteFile] = ()  # or the files on the network
    repo: hub.Repo | None = None  # of a data set of the Hub
    progress_unit = "B"

    def __post_init__(self):
        self.names = [file.path for file in self.remote] or [str(path) for path in self.paths]
        self.stats = [path.stat() for path in self.paths]
        self.sizes = [file.size for file in self.remote] or [found.st_size for found in self.stats]
        self.identities = [file.identity for file in self.remote] or list(zip(self.names, self.sizes, strict=True))

    @property
    def times(self) -> str:
        """A line that changes when a local file is modified."""
        return hashlib.sha256(json.dumps([found.st_mtime_ns for found in self.stats]).encode()).hexdigest()[:16]

    @property
    def commit(self) -> str:
        """The commit of a data set of the Hub."""
        return self.repo.commit if self.repo else ""

    @property
    def holds_ids(self) -> bool:
        """Whether the files hold token ids instead of text."""
        return suffix_of(self.names[0]) in ID_SUFFIXES

    def open(self, file: int) -> BinaryIO:
        """Open a file; peeking into it and seeking work, and it has a `name`."""
        opened = self.remote[file].open() if self.remote else open_to_read(self.paths[file])
        if self.sizes[file] < 1000:  # peeking into a large remote file would request more of it
            check_pulled(self.names[file], opened.peek(1))  # type: ignore[attr-defined]
        return opened

    def blocks(self, text_field: str, vocab_size: int, first: Place) -> Iterator[Block]:
        """Read the files in blocks, from a place on.

        Args:
            vocab_size: is needed for token ids.
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
        """Gather consecutive blocks into units of at least BLOCK_BYTES: small files would keep the workers waiting."""
        unit = list[Block]()
        num_bytes = 0
        for block in self.blocks(text_field, vocab_size, first):
            unit.append(block)
            num_bytes += block.num_bytes + 64  # 64: empty files take memory too
            if num_bytes >= BLOCK_BYTES:
                yield unit
                unit = []
                num_bytes = 0
        if unit:
            yield unit

    def check(self, text_field: str) -> None:
        """Begin to read the local files that are pointers or tables, which may lack the column of the text."""
        for index, path in enumerate(self.paths):
            if suffix_of(path.name) in TABLES:
                next(self.blocks(text_field, 0, Place(index)), None)
            elif self.sizes[index] < 1000:
                self.open(index).close()

    def _check_unchanged(self, file: int) -> None:
        """Check that a local file, which has been read, is as it was when it was found."""
        now = self.paths[file].stat()
        before = self.stats[file]
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            size = f"{now.st_size:,}" if now.st_size != before.st_size else "as many"
            raise UserError(
                f"{self.names[file]}: changed while it was read; it had {before.st_size:,} bytes, and now it has "
                f"{size}. Prepare it again when it is complete, or a copy of it, with another --out"
            )


def fingerprint(files: Sequence[tuple]) -> str:
    """Return a line that changes when files (name, size in bytes, perhaps version) are added, removed or changed."""
    root = os.path.commonpath([Path(name).parent for name, *_ in files])
    sizes = [(os.path.relpath(name, root), *rest) for name, *rest in files]
    return f"{len(sizes)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


class StreamedSource(Source):
    """A Hub data set in a format that only `datasets` reads: a stream of rows."""

    progress_unit = " documents"

    def __init__(self, name: str, repo: hub.Repo, config: str, files: Sequence[RemoteFile]):
        super().__init__(name, repo=repo)
        self.config = config
        self.names, self.sizes, self.identities = [name], [0], [file.identity for file in files]

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
        commit: of the Hub data set, if an earlier run has begun with it.
        max_files: how many files to take, in their order; None for all.
        out: see find_files.
    """
    if "://" in name:
        found = {file.path: file for file in Store(name).files()}
        # Without hidden files, as below a local folder.
        visible = [path for path in found if "/." not in path.removeprefix(name.partition("*")[0])]
        return Source(name, remote=[found[path] for path in choose(name, visible)[:max_files]])
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
