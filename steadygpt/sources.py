"""Sources of text: local files, Python's own library and data sets of the Hugging Face Hub, cut into chunks.

Cutting is cheap and done by one process; reading the documents of a chunk is done by many.
"""

import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from steadygpt import hub
from steadygpt.cli import UserError

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
STDLIB = Path(sysconfig.get_path("stdlib"))
MAX_LINE_BYTES = 2**26  # of a line of JSON, which is in memory several times at once
CHUNK_BYTES = 2**20  # of lines
# Of a text; the pieces of a longer one have up to twice as many. tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
TABLE_BYTES = 2**25  # of the texts in a chunk of Parquet, unless the file's row groups are smaller
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects
AHEAD = 1  # files that are downloaded while one is read


class Position(NamedTuple):
    """Where a chunk begins."""

    file: int = 0
    row: int = 0  # documents before it in the file, except in a text, which is one document
    offset: int = 0  # bytes before it in the file, after decompression; 0 in tables


class Rows(NamedTuple):
    """Rows of a local Parquet file that are still to be read."""

    path: str
    group: int
    first: int  # within the group
    length: int


class Chunk(NamedTuple):
    """A part of a file."""

    at: Position
    end: int  # how far the file is read after it, in bytes of the file (of other Hub data sets, in rows)
    num_bytes: int  # of its texts, approximately
    data: bytes | list | Rows  # of a text or lines; values; or where they are
    name: str = ""  # of the file


# ---------------------------------------------------------------------------------------------------------------------
# where files are


class Source:
    """Local files. For other sources see HubSource and StreamedSource."""

    unit, commit = "B", ""
    progress: Callable[[int], object] = bool  # is called with the bytes that are on this machine

    def __init__(self, name: str, files: Sequence[Path]):
        self.name, self.paths = name, files
        self.names, self.sizes = [str(file) for file in files], [file.stat().st_size for file in files]

    def fingerprint(self) -> str:
        """Return a line that changes when files are added, removed or renamed, or change their size."""
        return fingerprint(list(zip(self.names, self.sizes, strict=True)))

    def open(self, file: int, in_place: bool = False) -> BinaryIO:
        """Open a file; `in_place` without waiting until all of it is on this machine."""
        return open(self.paths[file], "rb")

    def chunks(self, text_field: str, start: Position, in_place: bool = False) -> Iterator[Chunk]:
        """Cut the files into chunks, from `start` on.

        Raises: UserError for a file that cannot be read, is damaged, or lacks the text field.
        """
        for index in range(start.file, len(self.names)):
            begin = start if index == start.file else Position(index)
            name = self.names[index]
            with self.open(index, in_place) as file, naming(name):
                for chunk in CUTTERS[suffix_of(name)](file, text_field, begin, self.sizes[index]):
                    yield chunk._replace(name=name)

    def release(self, before: int) -> None:
        """Files before this one are in shards."""

    def close(self) -> None:
        """Nothing more will be read."""

    def needs(self, first: int, shard_bytes: float) -> dict[Path, int]:
        """Return folder -> bytes of disk for downloads from file `first` on; `shard_bytes` of it make one shard.

        Raises: UserError when files cannot be downloaded.
        """
        return {}


def fingerprint(files: Sequence[tuple[str, int]]) -> str:
    """Describe files, given as names and sizes in bytes, by their number and a hash."""
    root = os.path.commonpath([Path(name).parent for name, _ in files])
    sizes = [(os.path.relpath(name, root), size) for name, size in files]
    return f"{len(sizes)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


class HubSource(Source):
    """Files of a Hub data set, downloaded one ahead of the reader and removed behind it, or read in place.

    Args:
        folder: for the downloads, below the name of the commit; None for the Hub's own cache, where they stay.
        in_place: reads the files by ranges, without any on the disk.
    """

    def __init__(self, name: str, repo: hub.Repo, files: Sequence[hub.RepoFile], folder: Path | None, in_place: bool):
        self.name, self.repo, self.files, self.commit = name, repo, files, repo.commit
        self.names, self.sizes = [file.path for file in files], [file.size for file in files]
        self.folder, self.in_place = folder and folder / repo.commit, in_place
        self.downloads: dict[int, Future[Path]] = {}
        self.pool = ThreadPoolExecutor(1)

    def open(self, file: int, in_place: bool = False) -> BinaryIO:
        if self.in_place or in_place:
            if found := self._find(file):
                return open(found, "rb")
            if self.repo.online:
                return io.BufferedReader(hub.open_in_place(self.repo, self.files[file]), 2**16)
        for index in range(file, min(file + AHEAD + 1, len(self.files))):
            if index not in self.downloads:
                self.downloads[index] = self.pool.submit(self._download, index)
        return open(self.downloads[file].result(), "rb")

    def _find(self, file: int) -> Path | None:
        return hub.find_file(self.repo, self.names[file], self.folder)

    def _download(self, file: int) -> Path:
        before = sum(self.sizes[:file])
        found = hub.fetch(self.repo, self.names[file], self.folder, lambda count: self.progress(before + count))
        self.progress(before + self.sizes[file])
        return found

    def release(self, before: int) -> None:
        for name in self.names[:before]:
            if self.folder:
                (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def needs(self, first: int, shard_bytes: float) -> dict[Path, int]:
        from huggingface_hub import constants

        missing = [self.sizes[file] for file in range(first, len(self.files)) if not self._find(file)]
        if missing and not self.repo.online:
            raise UserError(
                f"{self.name}: {len(missing)} of {len(self.files)} files are not in the cache; run this once with a "
                "network and without HF_HUB_OFFLINE"
            )
        if self.in_place or not missing:
            return {}
        if not self.folder:
            return {Path(constants.HF_HUB_CACHE): sum(missing)}
        # A file stays until the last of its tokens is in a shard.
        there = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        window = int(shard_bytes) + (AHEAD + 2) * max(missing)
        return {self.folder.parent: min(sum(missing), max(0, window - there))}


class StreamedSource(Source):
    """A Hub data set in a format that only `datasets` reads: a stream of rows."""

    unit = " documents"

    def __init__(self, name: str, repo: hub.Repo, config: str, files: Sequence[hub.RepoFile]):
        self.name, self.repo, self.config, self.commit = name, repo, config, repo.commit
        self.files, self.names, self.sizes = files, [name], [0]

    def fingerprint(self) -> str:
        return fingerprint(self.files)

    def chunks(self, text_field: str, start: Position, in_place: bool = False) -> Iterator[Chunk]:
        with naming(self.name):
            dataset = hub.stream(self.repo, self.config, "train")
            row = start.row
            for batch in dataset.skip(row).iter(ROWS_AT_ONCE):
                if text_field not in batch:
                    raise no_text_field(self.name, text_field, batch)
                values = batch[text_field]
                yield Chunk(Position(0, row), row + len(values), CHUNK_BYTES, values, self.name)
                row += len(values)


def find_source(name: str, commit: str = "", streaming: bool = False, folder: Path | None = None) -> Source:
    """Find the files of --source.

    Args:
        commit: of the Hub data set, if an earlier run has begun with it.
        streaming: reads a Hub data set in place.
        folder: for downloads; None for the Hub's cache.

    Raises: UserError when there are none.
    """
    if not name.startswith("hf:"):
        return Source(name, find_files(name))
    spec, _, config = name.removeprefix("hf:").partition(":")
    repo_name, at, revision = spec.partition("@")
    if not repo_name or (at and not revision):
        raise UserError(f"--source {name!r} is incomplete; expected hf:NAME[@REVISION][:CONFIG], such as {FINEWEB_EDU}")
    repo = hub.find_repo("dataset", repo_name, revision, commit)
    kind, files = hub.data_files(repo, config, "train")
    if kind in ("parquet", "json") and all(suffix_of(file.path) for file in files):
        return HubSource(name, repo, files, folder, streaming)
    return StreamedSource(name, repo, config, files)


def read_split(name: str, split: str) -> list[dict]:
    """Return the rows of a split of a small data set of the Hub, whose Parquet files are kept in the cache.

    Raises: UserError; OSError for errors of this machine, such as a full disk.
    """
    import pyarrow.parquet as pq

    repo = hub.find_repo("dataset", name)
    _, files = hub.data_files(repo, "", split)
    paths = [hub.fetch(repo, file.path) for file in files]
    with naming(str(repo)):
        return [row for path in paths for row in pq.read_table(path).to_pylist()]


def find_files(source: str) -> list[Path]:
    """Find the readable files of a path, a folder (recursive, without hidden files), a glob or "stdlib", sorted.

    Raises: UserError when there are none.
    """
    expected = "a file, a folder, a glob, stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
    if source == "stdlib":
        return [path for path in _files_below(STDLIB, NOT_IN_STDLIB) if path.suffix == ".py"]
    if not source:
        raise UserError(f"--source is empty; expected {expected}")
    paths = [Path(source)] if Path(source).exists() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = {file for path in paths for file in (_files_below(path) if path.is_dir() else [path])}
    files = sorted(file for file in found if suffix_of(file.name))
    kinds = " ".join(CUTTERS)
    if not files:
        raise UserError(
            f"--source {source}: {f'{len(found)} files of other kinds' if found else 'no such file'}; expected "
            f"{expected}; files of {kinds}"
        )
    if len(files) < len(found):
        print(f"{source}: skipped {len(found) - len(files)} files that are not {kinds}", file=sys.stderr)
    return files


def _files_below(folder: Path, excluded: Iterable[str] = ()) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [p for p in paths if not any(n in excluded or n.startswith(".") for n in p.relative_to(folder).parts)]


# ---------------------------------------------------------------------------------------------------------------------
# files -> chunks, without looking at the documents

# A space after an ASCII character or a byte of another one, except after Unicode's own spaces.
_LAST_CUT = re.compile(
    rb"(?s:.*)(?<=[!-~\x80-\xff])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80)(?= )"
)


def cut_text(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut a text into pieces whose ids, concatenated, are the ids of the whole text.

    Cuts come before a space that follows a non-space, where pre-tokenizers such as GPT-2's always begin a new word. A
    text without such a space is cut between any two characters, and its ids may differ.
    """
    file.seek(start.offset)
    offset, text, is_end = start.offset, b"", False
    while not is_end:
        more = file.read(PIECE_BYTES)
        text, is_end = text + more, len(more) < PIECE_BYTES
        match = _LAST_CUT.match(text)
        cut = len(text) if is_end else match.end() if match else len(text) - _unfinished(text)
        if cut or offset == 0:
            yield Chunk(Position(start.file, 0, offset), offset + cut, cut, text[:cut])
        offset, text = offset + cut, text[cut:]


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end may be an incomplete character of UTF-8."""
    return next((count for count, byte in enumerate(text[:-4:-1], start=1) if byte >= 0xC0), 0)


def cut_lines(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut JSON Lines into chunks of whole lines."""
    return _cut_lines(file, start, file.tell)


def cut_gzip(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut compressed JSON Lines into chunks of whole lines."""
    return _cut_lines(gzip.GzipFile(fileobj=file), start, file.tell)  # type: ignore[arg-type]


def _cut_lines(lines: BinaryIO, start: Position, amount_read: Callable[[], int]) -> Iterator[Chunk]:
    lines.seek(start.offset)
    at = start
    while data := lines.read(CHUNK_BYTES):
        last, tail = data.rfind(b"\n") + 1, lines.readline(MAX_LINE_BYTES)
        offset = at.offset + len(data) + len(tail)
        is_too_long = len(data) - last + len(tail) >= MAX_LINE_BYTES
        data = data[:last] if is_too_long else data + tail
        row = at.row + data.count(b"\n") + (data[-1:] not in (b"\n", b""))
        if data:
            yield Chunk(at, amount_read(), len(data), data)
        if is_too_long:
            at, row = Position(start.file, row, at.offset + last), row + 1
            while tail and not tail.endswith(b"\n"):
                tail = lines.readline(CHUNK_BYTES)
                offset += len(tail)
            yield Chunk(at, amount_read(), 0, [ValueError(f"a line of more than {MAX_LINE_BYTES // 2**20} MB")])
        at = Position(start.file, row, offset)


def cut_table(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut a Parquet file into groups of rows, which the reader of the chunk reads if the file is on this machine."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    if text_field not in table.schema_arrow.names:
        raise no_text_field(file.name, text_field, table.schema_arrow.names)
    end = 0
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        begin, end = end, end + metadata.num_rows
        if end <= start.row:
            continue
        columns = (metadata.column(i) for i in range(metadata.num_columns))
        text_bytes = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] == text_field)

        def chunk(row: int, count: int, data: Any, begin=begin, end=end, text_bytes=text_bytes) -> Chunk:
            read = size * (row + count) // table.metadata.num_rows
            return Chunk(Position(start.file, row), read, text_bytes * count // (end - begin), data)

        row = max(begin, start.row)
        if not Path(file.name).exists():  # it is on the Hub
            values = _column(table, group, text_field, row - begin)
            while part := list(islice(values, ROWS_AT_ONCE)):
                yield chunk(row, len(part), part)
                row += len(part)
            continue
        step = -(-metadata.num_rows // -(-text_bytes // TABLE_BYTES or 1))
        for first in range(row, end, step):
            count = min(step, end - first)
            yield chunk(first, count, Rows(file.name, group, first - begin, count))


def _column(table: Any, group: int, text_field: str, first: int) -> Iterator[object]:
    """Read a column of a row group, from a row on."""
    batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_field], use_threads=False)
    for batch in batches:
        if first < len(batch):
            yield from _values(batch.column(0)[first:])
        first = max(0, first - len(batch))


def _values(column: Any) -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # its text is not UTF-8
        return [value and value.decode("utf-8", "surrogateescape") for value in column.cast("binary").to_pylist()]


CUTTERS = dict.fromkeys((".txt", ".md", ".py"), cut_text)
CUTTERS |= {".jsonl": cut_lines, ".jsonl.gz": cut_gzip, ".json.gz": cut_gzip, ".parquet": cut_table}


def suffix_of(name: str) -> str:
    """Return the suffix in CUTTERS that a file name ends with, "" if there is none."""
    return next((suffix for suffix in CUTTERS if name.lower().endswith(suffix)), "")


# ---------------------------------------------------------------------------------------------------------------------
# chunks -> documents


class Document(NamedTuple):
    """A document, or a part of a long text."""

    row: int
    text: object  # str; a ValueError with the reason to skip the row; or data of the wrong type
    is_begin: bool = True


def read_documents(chunk: Chunk, text_field: str) -> Iterator[Document]:
    """Read the documents of a chunk.

    Raises: UserError for a file that is damaged, or whose first line lacks the text field.
    """
    with naming(chunk.name):
        if isinstance(chunk.data, Rows):
            path, group, first, length = chunk.data
            values: Iterable[object] = islice(_column(_open_table(path), group, text_field, first), length)
        elif isinstance(chunk.data, list):
            values = chunk.data
        elif CUTTERS[suffix_of(chunk.name)] is cut_text:
            text = chunk.data.decode("utf-8-sig" if chunk.at.offset == 0 else "utf-8", "surrogateescape")
            is_empty = chunk.at.offset == 0 and len(chunk.data) < PIECE_BYTES and not text.strip()
            yield Document(0, ValueError("no text") if is_empty else text, chunk.at.offset == 0)
            return
        else:
            values = _json_values(chunk, text_field)
        for row, value in enumerate(values, start=chunk.at.row):
            yield Document(row, ValueError("no text") if isinstance(value, str) and not value.strip() else value)


@lru_cache(maxsize=1)
def _open_table(path: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path)


def _json_values(chunk: Chunk, text_field: str) -> Iterator[object]:
    assert isinstance(chunk.data, bytes)
    for number, line in enumerate(io.BytesIO(chunk.data), start=chunk.at.row):
        try:
            row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
        except (ValueError, RecursionError):
            yield ValueError("broken JSON" if line.strip() else "blank line")
            continue
        fields = row if isinstance(row, dict) else {}
        if number == 0 and text_field not in fields:  # probably the wrong --text_field for the whole file
            raise no_text_field(chunk.name, text_field, fields or [type(row).__name__])
        yield fields.get(text_field, ValueError(f"no field {text_field!r}"))


def cut_document(text: str) -> Iterator[str]:
    """Cut a long document as cut_text does."""
    data = text.encode()
    if len(data) <= 2 * PIECE_BYTES:
        yield text
        return
    for chunk in cut_text(io.BytesIO(data), "", Position(), len(data)):
        yield chunk.data.decode()  # type: ignore[union-attr]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip, pyarrow and datasets each raise their own types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{name}: cannot be read, {reason}; repair or remove it, and run this again") from error


def no_text_field(where: str, text_field: str, found: Iterable[str]) -> UserError:
    return UserError(f"{where}: no field {text_field!r}; found {', '.join(found)}; name the text with --text_field")
