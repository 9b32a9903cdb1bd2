"""Reading of files in blocks, and of documents from blocks.

A block begins where the previous one ends, so a file and a position in it are enough to continue.
"""

import gzip
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, encoding_of
from steadygpt.prepare.ids import ID_SUFFIXES, MASK, read_ids

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

BLOCK_BYTES = 2**20  # about the size of a block; a line or a row is never cut
# About the size of the pieces that a longer document is cut into: tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
LONGEST_LINE = 10**9  # bytes; a longer line of JSON is skipped, because reading it takes four times as much memory
CUT_WINDOW = 4000  # bytes in which to look for a place to cut a text
LEAST_WINDOW = 32  # the same for short pieces; a smaller window would cut within words
# Suffix of a packed text -> its first bytes, which show it under any name, and pyarrow's name of the codec.
PACKED = {".gz": (b"\x1f\x8b", "gzip"), ".zst": (b"\x28\xb5\x2f\xfd", "zstd")}
NO_TEXT = "no text"  # why an empty document is skipped
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects


class Block(NamedTuple):
    """Consecutive text, rows or ids of a file."""

    name: str  # of the file
    file: int  # the number of the file in the source
    at: int  # where the block begins: a byte of the unpacked text, a row, or an element of the array
    end: int  # where the next block begins
    row: int  # the number of the first row
    end_row: int  # the number of the first row of the next block
    progress: int  # how far the file is read after the block, in bytes; of a StreamedSource, in rows
    data: Any  # bytes of a text or of lines, a list of values, or an array of token ids
    skips_line: bool = False  # whether a line of LONGEST_LINE or more after its lines is skipped

    @property
    def num_bytes(self) -> int:
        """About the size of the content in memory, in bytes."""
        if isinstance(self.data, list):
            return sum(map(size_of, self.data))
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


def size_of(value: object) -> int:
    """Return about the size in bytes of a row's text, or of its token ids."""
    if isinstance(value, str):
        return len(value)
    return 4 * len(value) if isinstance(value, list) else 0


class FileToRead(NamedTuple):
    """An open file of a source, and the options that its blocks depend on."""

    file: BinaryIO
    name: str
    number: int  # in the source
    size: int  # in bytes
    text_field: str
    vocab_size: int  # implies the dtype of token ids without a header


# ---------------------------------------------------------------------------------------------------------------------
# files -> blocks, without looking at the documents


def open_text(file: BinaryIO, offset: int) -> IO[bytes]:
    """Open the text of a file in UTF-8, unpacked, and decoded by its byte-order mark.

    Args:
        offset: in bytes of this text, where reading begins.

    Raises: UserError if the first kilobytes are probably not a text in UTF-8.
    """
    text: Any = file
    head = text.peek(4)
    name = file.name.lower()
    codecs = []
    for suffix, (first_bytes, codec) in PACKED.items():
        if head.startswith(first_bytes) or name.endswith(suffix):
            codecs.append(codec)
    if not codecs and encoding_of(head).startswith("utf-8"):
        if offset == 0:
            check_text(file.name, head[:8000])
        file.seek(offset)
        return file
    import pyarrow

    if codecs == ["gzip"]:
        text = gzip.GzipFile(fileobj=file)
    elif codecs:
        text = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codecs[0]))
    encoding = encoding_of(text.peek(4))
    if not encoding.startswith("utf-8"):
        text = io.BufferedReader(pyarrow.transcoding_input_stream(pyarrow.PythonFile(text, "r"), encoding, "utf-8"))
    check_text(file.name, text.peek(8000)[:8000])
    for at in range(0, offset, 2**20):
        text.read(min(2**20, offset - at))
    return text


def check_text(name: str, head: bytes) -> None:
    """Refuse a file that is probably not a text in UTF-8, by its first bytes, which may end within a character."""
    invalid = len(head) - len(head.decode(errors="ignore").encode())
    if 0 in head or invalid > 3 + len(head) // 10:  # git, too, takes a NUL byte as the sign of a binary file
        advice = "if it is text in another encoding, convert it: iconv -f ENCODING -t UTF-8; or remove it"
        raise UserError(f"{name}: found a NUL byte or much that is not UTF-8; expected text; {advice}")


def read_lines(source: FileToRead, at: int, row: int) -> Iterator[Block]:
    """Yield blocks of whole lines."""
    text = open_text(source.file, at)
    while True:
        lines = text.read(BLOCK_BYTES)
        if not lines:
            return
        end = at + len(lines)
        skips_line = False
        if not lines.endswith(b"\n"):
            rest = text.readline(LONGEST_LINE)
            end += len(rest)
            skips_line = len(rest) == LONGEST_LINE and not rest.endswith(b"\n")
            if skips_line:
                lines = lines[: lines.rfind(b"\n") + 1]
                while rest and not rest.endswith(b"\n"):
                    rest = text.readline(BLOCK_BYTES)
                    end += len(rest)
            else:
                lines += rest
            del rest
        end_row = row + lines.count(b"\n")
        if lines and not lines.endswith(b"\n"):  # the last line of the file has no line break
            end_row += 1
        if skips_line:
            end_row += 1
        progress = end if text is source.file else source.file.tell()
        yield Block(source.name, source.number, at, end, row, end_row, progress, lines, skips_line)
        at = end
        row = end_row


# A non-space is an ASCII character, or a byte of another character except Unicode's own spaces, of two or three bytes.
_SPACE_2 = rb"\xc2[\x85\xa0]"
_SPACE_3 = rb"(?:\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
_BEFORE_SPACE = rb"(?<=[!-~\x80-\xff])(?<!%b)(?<!%b)(?= )" % (_SPACE_2, _SPACE_3)
_AFTER_NEWLINE = rb"(?<=[!-~\x80-\xff]\n)(?<!%b\n)(?<!%b\n)" % (_SPACE_2, _SPACE_3)
_BEFORE_WORD = rb"(?=[!-.0-~\x80-\xff])(?!%b|%b)" % (_SPACE_2, _SPACE_3)  # no "/": GPT-4o joins it to a newline
_WORD_END = re.compile(_BEFORE_SPACE + rb"|" + _AFTER_NEWLINE + _BEFORE_WORD)
_CHARACTER = re.compile(rb"[^\x80-\xbf]")  # the first byte of a character


def cut_at(text: bytes, at: int, window: int) -> int:
    """Return where to cut a text: at the first end of a word from byte `at` on.

    It is before a space that follows a non-space, or after a newline between two non-spaces. Pre-tokenizers such as
    GPT-2's always begin a word there, so the ids of the pieces, concatenated, are those of the whole text. If `window`
    bytes have no such place, the text is cut before the next character, and the ids may differ.
    """
    word_end = _WORD_END.search(text, at, at + window)
    if word_end:
        return word_end.start()
    if at + window > len(text):  # the text ends in the window
        return len(text)
    character = _CHARACTER.search(text, at, at + 4)
    return character.start() if character else at  # none: the text is not UTF-8


def read_text(source: FileToRead, at: int, row: int) -> Iterator[Block]:
    """Yield blocks of a text, which is one document; none if the file is empty."""
    text = open_text(source.file, at)
    buffer = b""
    while True:
        buffer += text.read(BLOCK_BYTES + CUT_WINDOW - len(buffer))
        cut = cut_at(buffer, BLOCK_BYTES, CUT_WINDOW) if len(buffer) > BLOCK_BYTES else len(buffer)
        data = buffer[:cut]
        buffer = buffer[cut:]
        if not data:
            return
        end = at + len(data)
        progress = end if text is source.file else source.file.tell()
        yield Block(source.name, source.number, at, end, 0, 0, progress, data)
        at = end


def read_table(source: FileToRead, at: int, row: int) -> Iterator[Block]:
    """Yield blocks of rows of a Parquet file."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(source.file)
    names = [column.path for column in table.schema]
    if not any(f"{name}.".startswith(f"{source.text_field}.") for name in names):
        raise no_text_field(source.name, source.text_field, table.schema_arrow.names)
    columns = [source.text_field, *(name for name in table.schema_arrow.names if name == MASK)]
    num_rows = table.metadata.num_rows
    first_row = 0  # of the row group
    for group in range(table.num_row_groups):
        next_group = first_row + table.metadata.row_group(group).num_rows
        if at < next_group:
            batches = table.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False)
            for values in _values_of_batches(batches, source.text_field, at - first_row):
                end = at + len(values)
                progress = source.size * end // num_rows
                yield Block(source.name, source.number, at, end, at, end, progress, values)
                at = end
        first_row = next_group


def read_arrow(source: FileToRead, at: int, row: int) -> Iterator[Block]:
    """Yield blocks of rows of an Arrow file or stream, such as those of Dataset.save_to_disk."""
    import pyarrow.ipc

    is_file = source.file.peek(6).startswith(b"ARROW1")  # type: ignore[attr-defined]
    table = pyarrow.ipc.open_file(source.file) if is_file else pyarrow.ipc.open_stream(source.file)
    names = table.schema.names
    column = next((name for name in names if f"{source.text_field}.".startswith(f"{name}.")), "")
    if not column:
        raise no_text_field(source.name, source.text_field, names)
    batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
    columns = [column, *(name for name in names if name == MASK)]
    rows_read = [0]  # after each batch so far
    bytes_read = [source.file.tell()]  # after each batch so far

    def slices() -> Iterator["RecordBatch"]:
        for batch in batches:
            rows_read.append(rows_read[-1] + batch.num_rows)
            bytes_read.append(source.file.tell())
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.select(columns).slice(first, ROWS_AT_ONCE)

    for values in _values_of_batches(slices(), source.text_field, at):
        end = at + len(values)
        progress = round(np.interp(end, rows_read, bytes_read))
        yield Block(source.name, source.number, at, end, at, end, progress, values)
        at = end


def _values_of_batches(batches: "Iterable[RecordBatch]", text_field: str, first: int) -> Iterator[list]:
    """Yield the values of a field, from a row on, in lists of about BLOCK_BYTES.

    Args:
        batches: have the column of the text field, and perhaps the column MASK.
    """
    values: list = []
    num_bytes = 0
    for batch in batches:
        columns = {name: _values(batch.column(name)[first:]) for name in batch.schema.names}
        for row in zip(*columns.values(), strict=True):
            text = field_of(dict(zip(columns, row, strict=True)), text_field)
            if isinstance(text, bytes):
                with suppress(UnicodeDecodeError):  # other bytes are skipped later: they are no text
                    text = text.decode()
            values.append(text)
            num_bytes += size_of(text)
            if num_bytes >= BLOCK_BYTES:
                yield values
                values = []
                num_bytes = 0
        first = max(0, first - len(batch))
    if values:
        yield values


def _values(column: "Array") -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # its text is not UTF-8
        return [value and value.decode("utf-8", "surrogateescape") for value in column.cast("binary").to_pylist()]


def read_array(source: FileToRead, at: int, row: int, suffix: str) -> Iterator[Block]:
    """Yield blocks of an array of token ids."""
    blocks = read_ids(source.file, suffix, source.text_field, source.vocab_size, at, BLOCK_BYTES, source.size)
    for end, fraction_read, ids in blocks:
        yield Block(source.name, source.number, at, end, 0, 0, int(source.size * fraction_read), ids)
        at = end


Reader = Callable[[FileToRead, int, int], Iterator[Block]]  # reads from a position on, whose row is given too
LINES = (".jsonl", ".ndjson", ".json")
TEXTS = [f"{suffix}{packed}" for suffix in (".txt", ".md", ".py") for packed in ("", *PACKED)]
READERS: dict[str, Reader] = dict.fromkeys(TEXTS, read_text)
READERS |= {f"{suffix}{packed}": read_lines for suffix in LINES for packed in ("", *PACKED)}
READERS |= {".parquet": read_table, ".arrow": read_arrow}
READERS |= {suffix: partial(read_array, suffix=suffix) for suffix in ID_SUFFIXES}
TABLES = (".parquet", ".arrow")  # formats in which any file may lack the column of the text
READABLE = f"{' '.join(suffix for suffix in READERS if not suffix.endswith((*PACKED,)))} (texts also with .gz or .zst)"


def suffix_of(name: str) -> str:
    """Return the suffix in READERS that a file name ends with, or ""."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


# ---------------------------------------------------------------------------------------------------------------------
# blocks -> documents


class Skipped(ValueError):
    """Why a row has no text, and what to do if no row has any."""

    def __init__(self, reason: str, advice: str = ""):
        super().__init__(reason)
        self.advice = advice


class Document(NamedTuple):
    """A document, or a later block of a text that is longer than one block."""

    row: int  # in the file
    text: str | list | Skipped  # a list may hold token ids
    is_begin: bool = True  # False for a later block of a text


def read_documents(block: Block, text_field: str) -> Iterator[Document]:
    """Read the documents of a block of text or rows."""
    with naming(block.name):
        if suffix_of(block.name) in TEXTS:
            yield from _document_of(block)
            return
        values: Iterable = block.data
        if isinstance(block.data, bytes):
            lines = block.data.split(b"\n")
            if not lines[-1]:  # nothing follows the last line break
                lines.pop()
            values = _json_values(block.name, lines, text_field)
        row = block.row
        for value in values:
            if isinstance(value, str) and not value.strip():
                value = Skipped(NO_TEXT)
            if not isinstance(value, str | list | Skipped):
                kind = "null" if value is None else type(value).__name__
                value = Skipped(f"{kind}, not a string", "set --text_field to the field with the text")
            yield Document(row, value)
            row += 1
        if block.skips_line:
            yield Document(row, Skipped(f"a line of {bytes_text(LONGEST_LINE)} or more"))


def _document_of(block: Block) -> Iterator[Document]:
    is_begin = block.at == 0
    text = block.data.decode("utf-8-sig" if is_begin else "utf-8", "surrogateescape")
    if is_begin and len(block.data) < BLOCK_BYTES and not text.strip():  # the block is the whole file
        yield Document(0, Skipped(NO_TEXT))
    else:
        yield Document(0, text, is_begin)


def _json_values(name: str, lines: list[bytes], text_field: str) -> Iterator[object]:
    """Yield the text of each line of JSON, or why it has none; empty the list meanwhile, to free memory."""
    lines.reverse()
    while lines:
        row = json_of(lines.pop().decode("utf-8-sig", "surrogateescape"), name)
        yield row if isinstance(row, Skipped) else field_of(row, text_field)


def json_of(line: str, name: str) -> object:
    """Parse a line of a file as JSON, also as part of an array of several lines; return why if it is no object."""
    text = line.strip()
    for part in (text, text.removeprefix("[").rstrip(",]")):
        try:
            row = _loads(part)
        except RecursionError:
            return Skipped("JSON that is nested too deeply")
        except ValueError:
            continue
        if isinstance(row, dict) or (part == text and not isinstance(row, list)):
            return row
    file = shlex.quote(name)
    if not text:
        return Skipped("blank line")
    if text in ("[", "[{", "{") or text.endswith("]"):
        command = f"""jq -c 'if type == "array" then .[] else . end' {file} > rows.jsonl"""
        return Skipped("an array or indented JSON", f"expected one object a line. Try: {command}")
    if "\r" in text:
        return Skipped("lines that end with CR", f"try: tr '\\r' '\\n' < {file} > rows.jsonl")
    if "\t{" in text:
        return Skipped("a column before the JSON", f"try: cut -f 2- {file} > rows.jsonl")
    return Skipped("broken JSON", "expected one object a line")


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more than 4,300 digits
        return json.loads(text, parse_int=float)


def field_of(row: object, name: str) -> object:
    """Return a field of an object, or why it has none; the name meta.text is the field text of its field meta."""
    if not isinstance(row, dict):
        return Skipped(f"no field {name!r}", f"found {type(row).__name__}; expected one object a line")
    if name in row:
        value = row[name]
        mask = row.get(MASK)
        if isinstance(value, list) and isinstance(mask, list):  # token ids with padding
            if len(mask) != len(value):
                return Skipped(f"{len(value)} ids, but {len(mask)} values of {MASK}")
            return [i for i, is_kept in zip(value, mask, strict=True) if is_kept]
        return value
    outer, _, inner = name.partition(".")
    if outer in row:
        return field_of(row[outer], inner)
    return Skipped(f"no field {name!r}", which_field(row))


def repair(text: str) -> str:
    """Replace lone surrogates by U+FFFD; they stand for invalid UTF-8, or come from escapes in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_document(text: str, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, int]]:
    """Cut a document into pieces of about piece_bytes, if it is longer than two; yield each with its size in bytes."""
    data = text.encode()
    if len(data) <= 2 * piece_bytes:
        yield text, len(data)
        return
    window = max(LEAST_WINDOW, min(CUT_WINDOW, piece_bytes))
    start = 0
    while start < len(data):
        part = data[start : start + piece_bytes + window]
        end = cut_at(part, piece_bytes, window) if len(part) > piece_bytes else len(part)
        yield part[:end].decode(), end
        start += end


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn the errors of reading a file into a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip, pyarrow and datasets each raise their own types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "repair or remove it, then run this again, with another --out if shards were already written"
        if "requires too much memory" in reason:
            advice = (
                f"pack it with a window of at most 128 MB: zstd -d --long=31 -c {shlex.quote(name)} | zstd > NEW.zst"
            )
        raise UserError(f"{name}: cannot be read, {reason}; {advice}") from error


def no_text_field(where: str, text_field: str, names: Iterable[str]) -> UserError:
    return UserError(f"{where}: no field {text_field!r}; {which_field(names)}")


def which_field(names: Iterable[str]) -> str:
    """Return advice for rows that have fields with these names, but not the field of --text_field."""
    found = f"found {', '.join(names)}"
    if "input_ids" in names:
        return f"{found}; --text_field input_ids reads token ids; name their tokenizer with --tokenizer"
    return f"{found}; set --text_field to the field with the text"
