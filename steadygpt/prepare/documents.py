"""Files read in blocks, and blocks cut into documents.

A block begins where the one before it ends, so a file and a position in it are enough to continue.
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

BLOCK_BYTES = 2**20  # of a block, about; a line or a row is never cut
# The longest piece of a longer document, about. tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
LONGEST_LINE = 10**9  # bytes of a line of JSON, which takes four times as much memory; longer ones are skipped
CUT_WINDOW = 4000  # bytes in which a place to cut a text is looked for
LEAST_WINDOW = 32  # of short pieces, which would be cut within words otherwise
# How a packed text begins, if its name does not say so.
PACKED = {".gz": (b"\x1f\x8b", "gzip"), ".zst": (b"\x28\xb5\x2f\xfd", "zstd")}
NO_TEXT = "no text"  # why an empty document is skipped
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects


class Block(NamedTuple):
    """Consecutive text, rows or ids of a file."""

    name: str  # of the file
    file: int  # its number in the source
    at: int  # where it begins: a byte of the unpacked text, a row, or an element of the array
    end: int  # where the next one begins
    row: int  # the number of the first row
    end_row: int
    progress: int  # how far the file is read after it, in bytes of the file (of some data sets of the Hub, in rows)
    data: Any  # bytes of a text or of lines, a list of values, or an array of token ids
    skips_line: bool = False  # after its lines: a line of LONGEST_LINE or more

    @property
    def num_bytes(self) -> int:
        """About the bytes of its content, in memory."""
        if isinstance(self.data, list):
            return sum(map(size_of, self.data))
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


def size_of(value: object) -> int:
    """Return about the bytes of a row's text, or of its token ids."""
    if isinstance(value, str):
        return len(value)
    return 4 * len(value) if isinstance(value, list) else 0


class FileToRead(NamedTuple):
    """An open file of a source, and what its blocks depend on."""

    file: BinaryIO
    name: str
    number: int  # in the source
    size: int  # in bytes
    text_field: str
    vocab_size: int  # implies the dtype of token ids without a header


# ---------------------------------------------------------------------------------------------------------------------
# files -> blocks, without looking at the documents


def open_text(file: BinaryIO, offset: int) -> IO[bytes]:
    """Return the text of a file from a byte of it on, in UTF-8: unpacked, and decoded by its byte-order mark.

    Raises a UserError if the first kilobytes are probably not a text in UTF-8.
    """
    text: Any = file
    head, name = text.peek(4), file.name.lower()
    packed = [codec for end, (sign, codec) in PACKED.items() if head.startswith(sign) or name.endswith(end)]
    if not packed and encoding_of(head).startswith("utf-8"):
        if offset == 0:
            check_text(file.name, head[:8000])
        file.seek(offset)
        return file
    import pyarrow

    if packed == ["gzip"]:
        text = gzip.GzipFile(fileobj=file)
    elif packed:
        text = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), packed[0]))
    encoding = encoding_of(text.peek(4))
    if not encoding.startswith("utf-8"):
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
        end_row = row + lines.count(b"\n") + skips_line + (not lines.endswith(b"\n") and lines != b"")
        progress = end if text is source.file else source.file.tell()
        yield Block(source.name, source.number, at, end, row, end_row, progress, lines, skips_line)
        at = end
        row = end_row


# A space after an ASCII character or a byte of another one, except after Unicode's own spaces.
_WORD_END = re.compile(
    rb"(?<=[!-~\x80-\xff])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f)"
    rb"(?<!\xe3\x80\x80) "
)
_CHARACTER = re.compile(rb"[^\x80-\xbf]")  # its first byte


def cut_at(text: bytes, at: int, window: int) -> int:
    """Return where a text is cut: at or after a byte, before a space that follows a non-space.

    There pre-tokenizers such as GPT-2's always begin a new word, so the ids of the pieces, concatenated, are those of
    the whole. Without such a space in `window` bytes the text is cut before any character, and its ids may differ.
    """
    found = _WORD_END.search(text, at, at + window)
    if found:
        return found.start()
    if at + window > len(text):  # the text ends in the window
        return len(text)
    found = _CHARACTER.search(text, at, at + 4)
    return found.start() if found else at  # not UTF-8


def read_text(source: FileToRead, at: int, row: int) -> Iterator[Block]:
    """Yield blocks of a text, which is one document, unless the file is empty."""
    text = open_text(source.file, at)
    held = b""
    while True:
        held += text.read(BLOCK_BYTES + CUT_WINDOW - len(held))
        cut = cut_at(held, BLOCK_BYTES, CUT_WINDOW) if len(held) > BLOCK_BYTES else len(held)
        data = held[:cut]
        held = held[cut:]
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
    ends = [0]  # of the batches that are read: rows,
    tells = [source.file.tell()]  # and bytes

    def parts() -> Iterator["RecordBatch"]:
        for batch in batches:
            ends.append(ends[-1] + batch.num_rows)
            tells.append(source.file.tell())
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.select(columns).slice(first, ROWS_AT_ONCE)

    for values in _values_of_batches(parts(), source.text_field, at):
        end = at + len(values)
        yield Block(source.name, source.number, at, end, at, end, round(np.interp(end, ends, tells)), values)
        at = end


def _values_of_batches(batches: "Iterable[RecordBatch]", text_field: str, first: int) -> Iterator[list]:
    """Yield the values of batches, from a row on, in lists of about BLOCK_BYTES.

    Their columns are that of the text field, and perhaps MASK.
    """
    values: list = []
    num_bytes = 0
    for batch in batches:
        columns = {name: _values(batch.column(name)[first:]) for name in batch.schema.names}
        for row in zip(*columns.values(), strict=True):
            text = field_of(dict(zip(columns, row, strict=True)), text_field)
            if isinstance(text, bytes):
                with suppress(UnicodeDecodeError):  # then they are no text
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
    for end, done, ids in read_ids(
        source.file, suffix, source.text_field, source.vocab_size, at, BLOCK_BYTES, source.size
    ):
        yield Block(source.name, source.number, at, end, 0, 0, int(source.size * done), ids)
        at = end


Reader = Callable[[FileToRead, int, int], Iterator[Block]]  # from a position and its row on
LINES = (".jsonl", ".ndjson", ".json")
TEXTS = [f"{suffix}{packed}" for suffix in (".txt", ".md", ".py") for packed in ("", *PACKED)]
READERS: dict[str, Reader] = dict.fromkeys(TEXTS, read_text)
READERS |= {f"{suffix}{packed}": read_lines for suffix in LINES for packed in ("", *PACKED)}
READERS |= {".parquet": read_table, ".arrow": read_arrow}
READERS |= {suffix: partial(read_array, suffix=suffix) for suffix in ID_SUFFIXES}
TABLES = (".parquet", ".arrow")  # each file may lack the column of the text
READABLE = f"{' '.join(suffix for suffix in READERS if not suffix.endswith((*PACKED,)))} (texts also with .gz or .zst)"


def suffix_of(name: str) -> str:
    """Return the suffix in READERS that a file name ends with, "" if there is none."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


# ---------------------------------------------------------------------------------------------------------------------
# blocks -> documents


class Skipped(ValueError):
    """Why a row has no text, and what to do if no row has any."""

    def __init__(self, reason: str, advice: str = ""):
        super().__init__(reason)
        self.advice = advice


class Document(NamedTuple):
    """A document, or what a text has after its first block."""

    row: int  # of its file
    text: str | list | Skipped  # a list may hold token ids
    is_begin: bool = True


def read_documents(block: Block, text_field: str) -> Iterator[Document]:
    """Read the documents of a block of text or rows."""
    with naming(block.name):
        if suffix_of(block.name) in TEXTS:
            yield from _document_of(block)
            return
        values: Iterable = block.data
        if isinstance(block.data, bytes):
            lines = block.data.split(b"\n")
            if not lines[-1]:  # what follows the last line break
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
    if is_begin and len(block.data) < BLOCK_BYTES and not text.strip():  # and so is the whole file
        yield Document(0, Skipped(NO_TEXT))
    else:
        yield Document(0, text, is_begin)


def _json_values(name: str, lines: list[bytes], text_field: str) -> Iterator[object]:
    """Yield the text of each line of JSON, or why there is none; the list becomes empty."""
    lines.reverse()
    while lines:
        row = json_of(lines.pop().decode("utf-8-sig", "surrogateescape"), name)
        yield row if isinstance(row, Skipped) else field_of(row, text_field)


def json_of(line: str, name: str) -> object:
    """Return what a line of a file holds as JSON, perhaps as a part of an array, or why there is no object."""
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
    """Return a field of an object, meta.text being the field text of its field meta, or why there is none."""
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
    """Replace lone surrogates, which stand for invalid UTF-8 or come from escapes in JSON, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def cut_document(text: str, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, int]]:
    """Cut a document of more than two pieces into pieces of about so many bytes; yield each with its bytes."""
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
    """Name the file that cannot be read."""
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
    """Return what to do if none of the fields with these names is that of --text_field."""
    found = f"found {', '.join(names)}"
    if "input_ids" in names:
        return f"{found}; --text_field input_ids reads token ids; name their tokenizer with --tokenizer"
    return f"{found}; set --text_field to the field with the text"
