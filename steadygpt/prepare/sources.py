"""Sources of text: local files, Python's own library, object stores, data sets of the Hub."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from steadygpt.network import hub
from steadygpt.network.stores import RemoteFile, Store
from steadygpt.prepare.documents import (
    BLOCK_BYTES,
    READERS,
    Block,
    Damaged,
    Wanted,
    check_beginning,
    naming,
    suffix_of,
)
from steadygpt.prepare.source_files import LeftOut, LocalFile, choose, local_files

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu


class Place(NamedTuple):
    """Where a block of a source begins."""

    file: int = 0
    at: int = 0  # see Block


@dataclass(frozen=True)
class Source:
    """Files of text."""

    name: str
    files: Sequence[LocalFile | RemoteFile]
    commit: str = ""  # of a data set of the Hub
    left_out: Sequence[LeftOut] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """A line that changes when files are added, removed or renamed, or change their size."""
        root = os.path.commonpath([Path(file.path).parent for file in self.files])
        known = [(os.path.relpath(file.path, root), file.size) for file in self.files]
        return f"{len(known)} files, sha256 {digest_of(known)}"

    @property
    def versions(self) -> str:
        """A hash that changes when the commit changes or files are modified."""
        return digest_of([self.commit, *(file.version for file in self.files)])

    def blocks(self, wanted: Wanted, first: Place = Place()) -> Iterator[Block]:  # noqa: B008 (a tuple)
        """Read the files in blocks, from a place on. The last block of a damaged file is the error."""
        at = first.at
        for number, file in enumerate(self.files[first.file :], start=first.file):
            progress = 0
            with file.open() as opened:
                try:
                    with naming(file.path):
                        for end, data in READERS[suffix_of(file.path)](opened, wanted, at):
                            progress = max(progress, min(opened.tell(), file.size))
                            yield Block(file.path, number, at, end, progress, data)
                            at = end
                except Damaged as error:
                    yield Block(file.path, number, at, at, file.size, error)
            at = 0

    def units(self, wanted: Wanted, first: Place) -> Iterator[list[Block]]:
        """Gather consecutive blocks into units of at least BLOCK_BYTES, so that small files do not idle the workers."""
        unit: list[Block] = []
        num_bytes = 0
        for block in self.blocks(wanted, first):
            unit.append(block)
            num_bytes += block.num_bytes + 64  # plus 64, because blocks of empty files take memory too
            if num_bytes >= BLOCK_BYTES or isinstance(block.data, Damaged):
                yield unit
                unit = []
                num_bytes = 0
        if unit:
            yield unit

    def check(self, text_field: str) -> None:
        """Check the beginnings of all local files, before any file is encoded."""
        for file in self.files:
            if isinstance(file, LocalFile):
                with file.open() as opened, naming(file.path):
                    check_beginning(opened, text_field)


def digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def find_source(
    name: str, commit: str = "", max_files: int | None = None, out: Path | None = None, text_field: str = "text"
) -> Source:
    """Find the files of --source.

    Args:
        commit: the commit of a Hub data set that an earlier run of the preparation read, if any.
        max_files: how many files to take, in their order; None for all.
        out: the folder for the shards, whose files are left out.
        text_field: for the conversion commands in errors.
    """
    if "://" in name:
        files = {file.path: file for file in Store(name).files()}
        # Hidden files are left out, as in a local folder.
        visible = [path for path in files if "/." not in path.removeprefix(name.partition("*")[0])]
        chosen, left_out = choose(name, {path: files[path].size for path in visible}, text_field)
        return Source(name, [files[path] for path in chosen[:max_files]], left_out=left_out)
    if name.startswith("hf:"):
        spec, _, config = name.removeprefix("hf:").partition(":")
        commit, of_hub = hub.data_files(spec, config, commit)
        return Source(name, of_hub[:max_files], commit)
    local, left_out = local_files(name, out, text_field)
    return Source(name, local[:max_files], left_out=left_out)
