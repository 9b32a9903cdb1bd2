"""Files cut into chunks, and chunks into documents.

Cutting is cheap and done by one process; reading the documents of a chunk is done by many.
"""

import codecs
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.data.ids import ID_SUFFIXES, read_ids

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import ParquetFile

CHUNK_BYTES = 2**20  # of lines
# The longest piece of a text, and of a longer document. tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
TABLE_BYTES = 2**25  # of the texts in a chunk of Parquet, unless the file's row groups are smaller
# How a packed text begins, whatever its name is, and one of UTF-32 or UTF-16 (in this order, for their marks).
PACKED = {".gz": (b"\x1f\x8b", "gzip"), ".zst": (b"\x28\xb5\x2f\xfd", "zstd")}
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_TEXT = "no text"  # why an empty document is skipped
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects


class Position(NamedTuple):
    """Where a chunk begins."""

    file: int = 0
    row: int = 0  # documents before it in the file, except in a text, which is one document
    offset: int = 0  # bytes before it in the file or array of ids, after decompression; 0 in tables


class TableRows(NamedTuple):
    """Rows of a local Parquet file that are still to be read."""

    path: str
    group: int
    first: int  # within the group
    length: int


class Chunk(NamedTuple):
    """A part of a file."""

    at: Position
    end: int  # how far the file is read after it, in bytes of the file (of other Hub data sets, in rows)
    num_bytes: int  # of its texts or ids, approximately
    data: bytes | list | TableRows | np.ndarray  # of a text or lines; values; where they are; token ids
    name: str = ""  # of the file


# ---------------------------------------------------------------------------------------------------------------------
# files -> chunks, without looking at the documents


def open_text(file: BinaryIO, offset: int) -> IO[bytes]:
    """Return the text of a file from a byte of it on, in UTF-8: unpacked, and decoded by its byte-order mark."""
    text: Any = file
    head, name = text.peek(4), file.name.lower()
    packed = [codec for end, (sign, codec) in PACKED.items() if head.startswith(sign) or name.endswith(end)]
    if not packed and not any(map(head.startswith, MARKS)):
        file.seek(offset)
        return file
    import pyarrow

    if packed:
        text = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packed[0]))
    if encoding := next((MARKS[mark] for mark in MARKS if text.peek(4).startswith(mark)), ""):
        text = io.BufferedReader(pyarrow.transcoding_input_stream(pyarrow.PythonFile(text, "r"), encoding, "utf-8"))
    for at in range(0, offset, CHUNK_BYTES):
        text.read(min(CHUNK_BYTES, offset - at))
    return text


# A space after an ASCII character or a byte of another one, except after Unicode's own spaces.
_LAST_CUT = re.compile(
    rb"(?s:.*)(?<=[!-~\x80-\xff])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80)(?= )"
)


_PLACES = [re.compile(place) for place in (rb"(?<=\n)", rb"(?<=[!-~])(?= )", rb"(?=[^\x80-\xbf])")]


def cut_text(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut a text into the pieces of cut_pieces()."""
    for offset, piece in cut_pieces(open_text(file, start.offset), start.offset):
        yield Chunk(Position(start.file, 0, offset), file.tell(), len(piece), piece)


def cut_pieces(file: IO[bytes], offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Cut a text into pieces whose ids, concatenated, are the ids of the whole text; yield each with its offset.

    Cuts come before a space that follows a non-space, where pre-tokenizers such as GPT-2's always begin a new word. A
    text without such a space is cut between any two characters, and its ids may differ.
    """
    text, is_end = b"", False
    length = max(4, PIECE_BYTES)  # a character has up to 4 bytes
    while not is_end:
        text += file.read(length - len(text))  # no more, so that cuts do not depend on where reading began
        is_end = len(text) < length
        match = _LAST_CUT.match(text)
        cut = len(text) if is_end else match.end() if match else len(text) - _unfinished(text)
        if cut or offset == 0:
            yield offset, text[:cut]
        offset, text = offset + cut, text[cut:]


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end may be an incomplete character of UTF-8."""
    return next((count for count, byte in enumerate(text[:-4:-1], start=1) if byte >= 0xC0), 0)


def cut_lines(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut JSON Lines into chunks of whole lines."""
    lines, at = open_text(file, start.offset), start
    while data := lines.read(CHUNK_BYTES):
        data += lines.readline()
        yield Chunk(at, file.tell(), len(data), data)
        at = Position(at.file, at.row + data.count(b"\n"), at.offset + len(data))


def cut_table(file: BinaryIO, text_field: str, start: Position, size: int) -> Iterator[Chunk]:
    """Cut a Parquet file into groups of rows, which the reader of the chunk reads if the file is on this machine."""
    import pyarrow.parquet as pq

    table, is_here = pq.ParquetFile(file), Path(file.name).exists()
    wanted = [i for i, column in enumerate(table.schema) if f"{column.path}.".startswith(f"{text_field}.")]
    if not wanted:
        raise no_text_field(file.name, text_field, table.schema_arrow.names)
    end = 0
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        begin, end = end, end + metadata.num_rows
        if end <= max(begin, start.row):
            continue
        text_bytes = sum(metadata.column(i).total_uncompressed_size for i in wanted)
        row = max(begin, start.row)
        values = _column(table, group, text_field, row - begin)
        step = -(-metadata.num_rows // max(1, -(-text_bytes // TABLE_BYTES))) if is_here else ROWS_AT_ONCE
        for first in range(row, end, step):
            count = min(step, end - first)
            data = TableRows(file.name, group, first - begin, count) if is_here else list(islice(values, count))
            read = size * (first + count) // table.metadata.num_rows
            yield Chunk(Position(start.file, first), read, text_bytes * count // metadata.num_rows, data)


def _column(table: "ParquetFile", group: int, text_field: str, first: int) -> Iterator[object]:
    """Read a column of a row group, from a row on."""
    batches = table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_field], use_threads=False)
    for batch in batches:
        if first < len(batch):
            column = batch.schema.names[0]
            yield from (field_of({column: value}, text_field) for value in _values(batch.column(0)[first:]))
        first = max(0, first - len(batch))


def _values(column: "Array") -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # its text is not UTF-8
        return [value and value.decode("utf-8", "surrogateescape") for value in column.cast("binary").to_pylist()]


def cut_ids(file: BinaryIO, text_field: str, start: Position, size: int, suffix: str) -> Iterator[Chunk]:
    """Cut an array of token ids into blocks."""
    for offset, num_bytes, done, ids in read_ids(file, suffix, text_field, start.offset, size):
        yield Chunk(Position(start.file, 0, offset), int(size * done), num_bytes, ids)


CUTTERS: dict[str, Callable[[BinaryIO, str, Position, int], Iterator[Chunk]]]
CUTTERS = {f"{suffix}{packed}": cut_text for suffix in (".txt", ".md", ".py") for packed in ("", *PACKED)}
CUTTERS |= {f"{suffix}{packed}": cut_lines for suffix in (".jsonl", ".ndjson", ".json") for packed in ("", *PACKED)}
CUTTERS[".parquet"] = cut_table
CUTTERS |= {suffix: partial(cut_ids, suffix=suffix) for suffix in ID_SUFFIXES}
TABLES = (".parquet",)  # each file may lack the column of the text
READABLE = f"{' '.join(suffix for suffix in CUTTERS if not suffix.endswith((*PACKED,)))} (texts also with .gz or .zst)"


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
    """Read the documents of a chunk."""
    with naming(chunk.name):
        if isinstance(chunk.data, TableRows):
            path, group, first, length = chunk.data
            values: Iterable[object] = islice(_column(_open_table(path), group, text_field, first), length)
        elif isinstance(chunk.data, list):
            values = chunk.data
        elif CUTTERS[suffix_of(chunk.name)] is cut_text:
            assert isinstance(chunk.data, bytes)
            text = chunk.data.decode("utf-8-sig" if chunk.at.offset == 0 else "utf-8", "surrogateescape")
            is_empty = chunk.at.offset == 0 and len(chunk.data) < PIECE_BYTES and not text.strip()
            yield Document(0, ValueError(NO_TEXT) if is_empty else text, chunk.at.offset == 0)
            return
        else:
            values = _json_values(chunk, text_field)
        for row, value in enumerate(values, start=chunk.at.row):
            yield Document(row, ValueError(NO_TEXT) if isinstance(value, str) and not value.strip() else value)


@lru_cache(maxsize=1)
def _open_table(path: str) -> "ParquetFile":
    import pyarrow.parquet as pq

    return pq.ParquetFile(open(path, "rb"))


def _json_values(chunk: Chunk, text_field: str) -> Iterator[object]:
    assert isinstance(chunk.data, bytes)
    for number, line in enumerate(io.BytesIO(chunk.data), start=chunk.at.row):
        try:
            row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
        except (ValueError, RecursionError):
            if number or line.strip() not in (b"[", b"[{", b"{"):
                yield ValueError("broken JSON" if line.strip() else "blank line")
                continue
            row = []  # begun in this line
        if number == 0 and isinstance(row, list):
            command = f"""jq -c 'if type == "array" then .[] else . end' {shlex.quote(chunk.name)} > rows.jsonl"""
            raise UserError(
                f"{chunk.name}: found an array or indented JSON; expected one object a line. Try: {command}"
            )
        value = field_of(row, text_field)
        if number == chunk.at.file == 0 and isinstance(value, ValueError):  # probably the wrong --text_field
            raise no_text_field(chunk.name, text_field, (isinstance(row, dict) and row) or [type(row).__name__])
        yield value


def field_of(row: object, name: str) -> object:
    """Return a field of an object, meta.text being the field text of its field meta; a ValueError if there is none."""
    if isinstance(row, dict):
        if name in row:
            return row[name]
        outer, _, inner = name.partition(".")
        if outer in row:
            return field_of(row[outer], inner)
    return ValueError(f"no field {name!r}")


def repair(text: str) -> str:
    """Replace lone surrogates, which stand for invalid UTF-8 or come from escapes in JSON, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_document(text: str, at: int = sys.maxsize, until: int = sys.maxsize) -> Iterator[str]:
    """Cut a long document as cut_pieces does, and once more in its bytes [at, until).

    That place is after a line, or else before the space after a word, or else between two characters.
    """
    data = text.encode()
    matches = (place.search(data, at, until) for place in _PLACES) if 0 < at < len(data) else ()
    if match := next(filter(None, matches), None):
        yield from cut_document(data[: match.start()].decode())
        yield from cut_document(data[match.start() :].decode())
        return
    if len(data) <= 2 * PIECE_BYTES:
        yield text
        return
    for _, piece in cut_pieces(io.BytesIO(data)):
        yield piece.decode()


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip, pyarrow and datasets each raise their own types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{name}: cannot be read, {reason}; repair or remove it, then run this again, with another --out if shards "
            "were already written"
        ) from error


def no_text_field(where: str, text_field: str, found: Iterable[str]) -> UserError:
    return UserError(
        f"{where}: no field {text_field!r}; found {', '.join(found)}; set --text_field to the field with the text"
    )
