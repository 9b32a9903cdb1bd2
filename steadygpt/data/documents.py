"""Files cut into parts, and parts into documents.

Where a part ends depends only on its file and the source's unit of bytes. So any process can read any part, and the
parts that are read, encoded and stored can be in different processes or different runs.
"""

import codecs
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text
from steadygpt.data.ids import ID_SUFFIXES, read_ids

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import ParquetFile

GROUP_UNITS = 10  # of a row group that is one part
# The longest piece of a longer document, about. tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
LONGEST_LINE = 10**9  # bytes of a line of JSON, which takes four times as much memory; longer ones are skipped
CUT_WINDOW = 4000  # bytes in which a place to cut a text is looked for
CUT_BEFORE = 4  # bytes before a place to cut that decide whether it is one
# How a packed text begins, if its name does not say so, and one of UTF-32 or UTF-16 (in this order, for their marks).
PACKED = {".gz": (b"\x1f\x8b", "gzip"), ".zst": (b"\x28\xb5\x2f\xfd", "zstd")}
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NO_TEXT = "no text"  # why an empty document is skipped
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects


class OnDisk(NamedTuple):
    """A part of a local file that is still to be read."""

    path: str
    number: int  # of the part or, in a table, of a row group


class Part(NamedTuple):
    """A part of a file."""

    name: str  # of the file
    file: int  # its number in the source
    number: int  # of the part in the file
    unit: int  # bytes of a text or lines in which a part begins
    end: int  # how far the file is read after it, in bytes of the file (of other Hub data sets, in rows)
    num_bytes: int  # of its texts or ids, approximately
    data: bytes | list | OnDisk | np.ndarray  # of a text or lines; values; where they are; token ids


class Cut(NamedTuple):
    """What cutting a file into parts depends on."""

    unit: int  # bytes of a text, lines or ids in which a part begins
    text_field: str
    vocab_size: int  # implies the dtype of token ids without a header
    size: int  # of the file, in bytes
    path: Path | None  # where the reader of a part finds the file; None if only this process can read it


# ---------------------------------------------------------------------------------------------------------------------
# files -> parts, without looking at the documents; the parts before the number `first` are left out

Parts = Iterator[tuple[int, int, int, Any]]  # number, end, num_bytes and data of each Part


def open_text(file: BinaryIO, offset: int) -> IO[bytes]:
    """Return the text of a file from a byte of it on, in UTF-8: unpacked, and decoded by its byte-order mark.

    Raises a UserError if the first kilobytes are probably not a text in UTF-8.
    """
    text: Any = file
    head, name = text.peek(4), file.name.lower()
    packed = [codec for end, (sign, codec) in PACKED.items() if head.startswith(sign) or name.endswith(end)]
    if not packed and not any(map(head.startswith, MARKS)):
        if offset == 0:
            check_text(file.name, head[:8000])
        file.seek(offset)
        return file
    import pyarrow

    if packed:
        text = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packed[0]))
    if encoding := next((MARKS[mark] for mark in MARKS if text.peek(4).startswith(mark)), ""):
        text = io.BufferedReader(pyarrow.transcoding_input_stream(pyarrow.PythonFile(text, "r"), encoding, "utf-8"))
    check_text(file.name, text.peek(8000)[:8000])
    for at in range(0, offset, 2**20):
        text.read(min(2**20, offset - at))
    return text


def check_text(name: str, head: bytes) -> None:
    """Refuse the beginning of a file that is probably not a text in UTF-8; it may end within a character."""
    invalid = len(head) - len(head.decode(errors="ignore").encode())
    if 0 in head or invalid > 3 + len(head) // 10:  # git decides by a NUL byte too
        advice = "if it is text in another encoding, convert it: iconv -f ENCODING -t UTF-8; or remove it"
        raise UserError(f"{name}: found a NUL byte or much that is not UTF-8; expected text; {advice}")


def cut_lines(text: IO[bytes], begin: int, first: int, unit: int) -> Iterator[bytes]:
    """Yield the lines that begin in each `unit` bytes of a text, which is read up to the byte `begin`."""
    at, is_inside = begin, False  # a line that began before the part
    for start in count(first * unit, unit):
        while at < start + unit and (is_inside or at < start):
            line = text.readline(start + unit - at if is_inside else start - at)
            at, is_inside = at + len(line), line[-1:] not in (b"\n", b"")
            if not line:
                return
        lines = b""
        if not is_inside and at < start + unit:
            lines, last = text.read(start + unit - 1 - at), text.readline(LONGEST_LINE)
            lines, is_inside = lines + last, len(last) == LONGEST_LINE and not last.endswith(b"\n")
            if not lines:
                return
        at += len(lines)
        yield lines


# A space after an ASCII character or a byte of another one, except after Unicode's own spaces.
_WORD_END = re.compile(
    rb"(?<=[!-~\x80-\xff])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80) "
)
_CHARACTER = re.compile(rb"[^\x80-\xbf]")  # its first byte


def _cut_at(text: bytes, at: int) -> int:
    """Return where a text is cut: at or after a byte, before a space that follows a non-space.

    There pre-tokenizers such as GPT-2's always begin a new word, so the ids of the pieces, concatenated, are those of
    the whole. Without such a space in CUT_WINDOW bytes the text is cut before any character, and its ids may differ.
    """
    if at == 0:
        return 0
    if found := _WORD_END.search(text, at, at + CUT_WINDOW):
        return found.start()
    if at + CUT_WINDOW > len(text):  # the text ends in the window
        return len(text)
    found = _CHARACTER.search(text, at, at + CUT_BEFORE)
    return found.start() if found else at  # not UTF-8


def cut_pieces(text: IO[bytes], begin: int, first: int, unit: int) -> Iterator[bytes]:
    """Yield the piece of a text that begins in each `unit` bytes of it; the text is read up to the byte `begin`."""
    held = b""  # from `begin` on
    for start in count(first * unit, unit):
        held += text.read(start + unit + CUT_WINDOW - begin - len(held))
        here, there = (_cut_at(held, place - begin) for place in (start, start + unit))
        if start and here == len(held):
            return
        yield held[here:there]
        held, begin = held[max(0, start + unit - CUT_BEFORE - begin) :], max(begin, start + unit - CUT_BEFORE)


def read_text(file: BinaryIO, first: int, unit: int, suffix: str) -> tuple[IO[bytes], Iterator[bytes]]:
    """Open the text of a file, and cut it into parts."""
    begin = max(0, first * unit - CUT_BEFORE)
    text = open_text(file, begin)
    return text, TEXTS[suffix](text, begin, first, unit)


def cut_text(file: BinaryIO, first: int, cut: Cut, suffix: str) -> Parts:
    """Cut a text, a document or lines, into parts."""
    text, parts = read_text(file, first, cut.unit, suffix)
    if text is not file:  # then its size is not known
        for number, data in enumerate(parts, first):
            yield number, file.tell(), len(data), data
        return
    for number in range(first, max(1, -(-cut.size // cut.unit))):
        end = min(cut.size, (number + 1) * cut.unit)
        place = OnDisk(str(cut.path), number) if cut.path else next(parts, b"")
        yield number, end, end - number * cut.unit, place


def cut_table(file: BinaryIO, first: int, cut: Cut) -> Parts:
    """Cut a Parquet file into its row groups, or large ones into some rows."""
    import pyarrow.parquet as pq

    table, number, before = pq.ParquetFile(file), 0, 0
    wanted = [i for i, column in enumerate(table.schema) if f"{column.path}.".startswith(f"{cut.text_field}.")]
    if not wanted:
        raise no_text_field(file.name, cut.text_field, table.schema_arrow.names)
    for group in range(table.num_row_groups):
        metadata, values = table.metadata.row_group(group), None
        rows, text_bytes = metadata.num_rows, sum(metadata.column(i).total_uncompressed_size for i in wanted)
        num_bytes = max(text_bytes, cut.size * rows // max(1, table.metadata.num_rows))
        step = rows if num_bytes <= GROUP_UNITS * cut.unit else max(1, rows * cut.unit // num_bytes)
        for begin in range(0, rows, step or 1):
            taken = min(step, rows - begin)
            if number >= first:
                if cut.path and taken == rows:
                    data: Any = OnDisk(str(cut.path), group)
                else:
                    values = values or _column(table, group, cut.text_field, begin)
                    data = list(islice(values, taken))
                end = cut.size * (before + begin + taken) // table.metadata.num_rows
                yield number, end, num_bytes * taken // rows, data
            number += 1
        before += rows


def _column(table: "ParquetFile", group: int, text_field: str, first: int = 0) -> Iterator[object]:
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


def cut_ids(file: BinaryIO, first: int, cut: Cut, suffix: str) -> Parts:
    """Cut an array of token ids into blocks."""
    for number, (num_bytes, done, ids) in enumerate(
        read_ids(file, suffix, cut.text_field, cut.vocab_size, first, cut.unit, cut.size), first
    ):
        yield number, int(cut.size * done), num_bytes, ids


LINES = (".jsonl", ".ndjson", ".json")
TEXTS = {f"{suffix}{packed}": cut_pieces for suffix in (".txt", ".md", ".py") for packed in ("", *PACKED)}
TEXTS |= {f"{suffix}{packed}": cut_lines for suffix in LINES for packed in ("", *PACKED)}
CUTTERS: dict[str, Callable[[BinaryIO, int, Cut], Parts]]
CUTTERS = {suffix: partial(cut_text, suffix=suffix) for suffix in TEXTS} | {".parquet": cut_table}
CUTTERS |= {suffix: partial(cut_ids, suffix=suffix) for suffix in ID_SUFFIXES}
TABLES = (".parquet",)  # each file may lack the column of the text
READABLE = f"{' '.join(suffix for suffix in CUTTERS if not suffix.endswith((*PACKED,)))} (texts also with .gz or .zst)"


def suffix_of(name: str) -> str:
    """Return the suffix in CUTTERS that a file name ends with, "" if there is none."""
    return next((suffix for suffix in CUTTERS if name.lower().endswith(suffix)), "")


# ---------------------------------------------------------------------------------------------------------------------
# parts -> documents


class Document(NamedTuple):
    """A document, or a piece of a text."""

    text: object  # str; a ValueError with the reason to skip the row; or data of the wrong type
    is_begin: bool = True


def read_documents(part: Part, text_field: str) -> Iterator[Document]:
    """Read the documents of a part."""
    with naming(part.name):
        data, suffix = part.data, suffix_of(part.name)
        if isinstance(data, OnDisk) and suffix in TEXTS:
            with open(data.path, "rb") as file:
                data = next(read_text(file, data.number, part.unit, suffix)[1], b"")
        values: Any = data
        if isinstance(data, OnDisk):
            values = _column(_open_table(data.path), data.number, text_field)
        elif isinstance(data, bytes):
            if TEXTS[suffix] is cut_pieces:
                yield from _piece(part, data)
                return
            lines = data.split(b"\n")
            del data  # a line may be most of the memory
            values = _json_values(part, lines, text_field)
        for value in values:
            yield Document(ValueError(NO_TEXT) if isinstance(value, str) and not value.strip() else value)


def _piece(part: Part, data: bytes) -> Iterator[Document]:
    text = data.decode("utf-8" if part.number else "utf-8-sig", "surrogateescape")
    is_empty = part.number == 0 and len(data) < part.unit and not text.strip()  # and so is the whole file
    if text or part.number == 0:
        yield Document(ValueError(NO_TEXT) if is_empty else text, part.number == 0)


@lru_cache(maxsize=1)
def _open_table(path: str) -> "ParquetFile":
    import pyarrow.parquet as pq

    return pq.ParquetFile(open(path, "rb"))


def _json_values(part: Part, lines: list[bytes], text_field: str) -> Iterator[object]:
    """Yield the text of each line of JSON, or a ValueError that says why there is none; the list becomes empty."""
    lines.reverse()
    for number in range(len(lines)):
        is_first, is_long = part.number == number == 0, len(lines[-1]) >= LONGEST_LINE  # the first one of the file
        text = lines.pop().decode("utf-8-sig", "surrogateescape")
        if not (text or lines):  # what follows the last line break
            return
        if is_long:
            yield ValueError(f"a line of {bytes_text(LONGEST_LINE)} or more")
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            if not is_first or text.strip() not in ("[", "[{", "{"):
                yield ValueError("broken JSON" if text.strip() else "blank line")
                continue
            row = []  # begun in this line
        if is_first and isinstance(row, list):
            command = f"""jq -c 'if type == "array" then .[] else . end' {shlex.quote(part.name)} > rows.jsonl"""
            raise UserError(f"{part.name}: found an array or indented JSON; expected one object a line. Try: {command}")
        del text
        value = field_of(row, text_field)
        if is_first and part.file == 0 and isinstance(value, ValueError):  # probably the wrong --text_field
            raise no_text_field(part.name, text_field, (isinstance(row, dict) and row) or [type(row).__name__])
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


def cut_document(text: str) -> Iterator[str]:
    """Cut a long document into pieces, as cut_pieces() does."""
    data = text.encode()
    if len(data) <= 2 * PIECE_BYTES:
        yield text
        return
    for piece in cut_pieces(io.BytesIO(data), 0, 0, PIECE_BYTES):
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
