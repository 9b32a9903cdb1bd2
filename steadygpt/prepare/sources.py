"""Sources of text and token ids: local files, Python's own library, object stores, data sets of the Hub."""

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from steadygpt.base.disk import check_pulled
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.text import counted
from steadygpt.network import hub
from steadygpt.network.remote import RemoteFile
from steadygpt.network.stores import Store
from steadygpt.prepare.documents import (
    BLOCK_BYTES,
    READABLE,
    READERS,
    TABLES,
    Block,
    FileToRead,
    naming,
    no_text_field,
    suffix_of,
)
from steadygpt.prepare.ids import ID_SUFFIXES

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
STDLIB = Path(sysconfig.get_path("stdlib"))
SPLITS = re.compile(r"(?<![a-z])(?:(train)|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
ROWS_AT_ONCE = 32  # rows of a block of what `datasets` streams
EXPECTED = (
    "a file, a folder, a glob, a URL such as s3://... or gs://..., stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
)


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
        self.sizes = [file.size for file in self.remote] or [path.stat().st_size for path in self.paths]
        self.identities = [file.identity for file in self.remote] or list(zip(self.names, self.sizes, strict=True))

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
        opened = self.remote[file].open() if self.remote else open(self.paths[file], "rb")  # noqa: SIM115
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

    def check_whole(self) -> None:
        """Check that no local file has become shorter while it was read."""
        for path, size in zip(self.paths, self.sizes, strict=False):
            if path.stat().st_size < size:
                raise UserError(f"{path}: became shorter while it was read; restore it, and give another --out")


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


def find_source(name: str, commit: str = "", max_files: int | None = None) -> Source:
    """Find the files of --source.

    Args:
        commit: of the Hub data set, if an earlier run has begun with it.
        max_files: how many files to take, in their order; None for all.
    """
    if "://" in name:
        found = {file.path: file for file in Store(name).files()}
        # Without hidden files, as below a local folder.
        visible = [path for path in found if "/." not in path.removeprefix(name.partition("*")[0])]
        return Source(name, remote=[found[path] for path in choose(name, visible)[:max_files]])
    if not name.startswith("hf:"):
        return Source(name, find_files(name)[:max_files])
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


def find_files(source: str) -> list[Path]:
    """Find the readable files of a path, a folder (recursive, without hidden files), a glob or "stdlib", sorted."""
    if source == "stdlib":
        return [path for path in _files_below(STDLIB, NOT_IN_STDLIB) if path.suffix == ".py"]
    if not source:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    paths = [Path(source)] if Path(source).exists() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = {file for path in paths for file in (_files_below(path) if path.is_dir() else [path])}
    return [Path(name) for name in choose(source, [str(path) for path in sorted(found)])]


def choose(source: str, names: Sequence[str]) -> list[str]:
    """Return the names of files that can be read."""
    chosen = [name for name in names if suffix_of(name)]
    # Beside other files, .json files are rarely JSON Lines.
    chosen = [name for name in chosen if suffix_of(name) != ".json"] or chosen
    if not chosen:
        found = f"found {counted(len(names), 'file')} of other types" if names else "no such file"
        found = "an empty folder" if not names and Path(source).is_dir() else found
        raise UserError(f"--source {source}: {found}; expected {EXPECTED}; files of {READABLE}")
    ids = [name for name in chosen if suffix_of(name) in ID_SUFFIXES]
    if 0 < len(ids) < len(chosen):
        text = next(name for name in chosen if suffix_of(name) not in ID_SUFFIXES)
        raise UserError(
            f"--source {source}: found text, such as {text}, and token ids, such as {ids[0]}; expected only one kind; "
            f"choose files with a glob such as '*{suffix_of(text)}'"
        )
    if not glob.has_magic(source):
        check_splits(source, [name for name in chosen if suffix_of(name) not in (".py", ".md")])
    if len(chosen) < len(names):
        skipped = counted(len(names) - len(chosen), "file")
        say(f"{source}: skipped {skipped} of other types than {READABLE}, or .json beside these")
    return chosen


def check_splits(folder: str, names: Sequence[str]) -> None:
    """Refuse a folder with files for training beside files for tests, such as a copy of a data set of the Hub."""
    train, other, word = "", "", ""
    for name in names:
        split = SPLITS.search(name.removeprefix(folder))
        if split and split[1]:
            train, word = name, split[1]
        elif split:
            other = name
    if train and other:
        raise UserError(
            f"--source {folder}: found {train}, and {other}, which is not for training; choose files with a glob such "
            f"as '{folder}/**/*{word}*', or name a data set of the Hub hf:NAME"
        )


def _files_below(folder: Path, excluded: Iterable[str] = ()) -> list[Path]:
    """Return the files of a folder and its subfolders, each once, without hidden and excluded ones."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    found, entered = [], {folder.resolve()}
    for place, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        wanted = [name for name in sorted(subfolders) if name not in excluded and not name.startswith(".")]
        subfolders[:] = []
        for name in wanted:
            if (target := Path(place, name).resolve()) not in entered:  # a link may lead back
                entered.add(target)
                subfolders.append(name)
        found += [Path(place, name) for name in names if name not in excluded and not name.startswith(".")]
    return sorted(path for path in found if path.is_file())
