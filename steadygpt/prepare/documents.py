"""Reading of files in blocks, and of documents from blocks.

A block begins where the previous one ends, so a file and a position in it are enough to resume.
"""

import codecs
import gzip
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

from steadygpt.base.foreign import BEGINNINGS, LFS_POINTER
from steadygpt.base.options import UserError
from steadygpt.base.text import encoding_of
from steadygpt.prepare.advice import convert_command, converted, rename_command

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

BLOCK_BYTES = 2**20  # about the size of a block; a line or a row is never cut
# About the size of the pieces that a longer document is cut into: tiktoken's regex fails on a million spaces in a row.
PIECE_BYTES = 400_000
LONGEST_LINE = 10**9  # bytes; reading a line of JSON takes four times as much memory
CUT_WINDOW = 4000  # bytes in which to look for a place to cut a text
LEAST_WINDOW = 32  # the same for short pieces; a smaller window would cut within words
PACKED = (".gz", ".zst")  # suffixes of packed texts
GZIP = b"\x1f\x8b"
ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # a frame with data, or one to be skipped
REPAIR = "repair or remove it, then run this again"  # advice before the first shard is written
NO_TEXT = "no text"  # why an empty document is skipped
ROWS_AT_ONCE = 256  # rows of a table in memory as Python objects


class Damaged(UserError):
    """A file cannot be read, or not to its end; other files can."""


class Wanted(NamedTuple):
    """The text to read in files."""

    text_field: str = "text"  # the field or column
    separator: str = ""  # between the documents in a text; "": a text is one document

    @property
    def pattern(self) -> str:
        """The regular expression of the separator, which also matches Windows line ends."""
        return re.escape(self.separator).replace("\\\n", "\r?\n")


class Block(NamedTuple):
    """Consecutive text or rows of a file, or why the rest of it cannot be read."""

    name: str  # of the file
    file: int  # the number of the file in the source
    at: int  # where the block begins: a byte of the unpacked text, or a row
    end: int  # where the next block begins
    progress: int  # how far the file is read after the block, in bytes
    data: bytes | list | Damaged  # bytes of a text or of lines, or values of a column

    @property
    def num_bytes(self) -> int:
        """About the size of the content in memory, in bytes."""
        if isinstance(self.data, list):
            return sum(map(size_of, self.data))
        return len(self.data) if isinstance(self.data, bytes) else 0


def size_of(value: object) -> int:
    """Return about the size in bytes of a row's text."""
    return len(value) if isinstance(value, str) else 0


# ---------------------------------------------------------------------------------------------------------------------
# files -> positions and content of blocks, without looking at the documents


def open_text(file: BinaryIO, offset: int = 0) -> IO[bytes]:
    """Open the text of a file in UTF-8, unpacked and decoded by its first bytes, whatever its name says.

    Args:
        offset: in bytes of this text, where reading begins.

    Raises: Damaged if the first kilobytes are probably not a text in UTF-8.
    """
    text: Any = file
    head = text.peek(4)[:4]
    while head.startswith(GZIP) or ZSTD.match(head):  # some files are packed twice
        text = io.BufferedReader(unpacked(text, head))
        head = text.peek(4)[:4]
    encoding = encoding_of(head)
    if not encoding.startswith("utf-8"):
        import pyarrow

        text = io.BufferedReader(pyarrow.transcoding_input_stream(pyarrow.PythonFile(text, "r"), encoding, "utf-8"))
    check_text(file.name, text.peek(8000)[:8000])
    if text is file:
        file.seek(offset)
    else:
        for at in range(0, offset, 2**20):
            text.read(min(2**20, offset - at))
    return text


def unpacked(file: Any, head: bytes) -> Any:
    """Open the content of a packed file that begins with `head`."""
    if head.startswith(GZIP):
        return gzip.GzipFile("", "rb", fileobj=file)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")


def check_text(name: str, head: bytes) -> None:
    """Refuse a file that is probably not a text in UTF-8, by its first bytes, which may end within a character."""
    invalid = len(head) - len(head.decode(errors="ignore").encode())
    if 0 not in head and invalid <= 3 + len(head) // 10:  # git, too, takes a NUL byte as the sign of a binary file
        return
    for encoding, first in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        zeros = head[first::2].count(0)
        if 2 * zeros > len(head[first::2]) and not head[1 - first :: 2].count(0):
            file = shlex.quote(name)
            raise Damaged(
                f"{name}: found {encoding} without a byte-order mark; expected UTF-8. Try: "
                f"iconv -f {encoding} -t UTF-8 {file} > {file}.new && mv {file}.new {file}"
            )
    raise Damaged(
        f"{name}: found a NUL byte or much that is not UTF-8; expected text; if it is text in another encoding, "
        "convert it with iconv"
    )


def read_lines(file: BinaryIO, wanted: Wanted, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of whole lines, each with the position after it."""
    text = open_text(file, at)
    while lines := text.read(BLOCK_BYTES):
        if not lines.endswith(b"\n"):
            lines += text.readline(LONGEST_LINE)
        if len(lines) > LONGEST_LINE:
            raise Damaged(f"{file.name}: a line of {LONGEST_LINE:,} bytes or more, after byte {at:,}; remove it")
        at += len(lines)
        yield at, lines


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


def read_text(file: BinaryIO, wanted: Wanted, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of a text, each with the position after it; none if the file is empty. No separator is cut."""
    text = open_text(file, at)
    separator = re.compile(wanted.pattern.encode())
    longest = 2 * len(wanted.separator.encode())  # of a separator, with line ends of Windows
    least = BLOCK_BYTES + longest
    buffer = b""
    while True:
        buffer += text.read(least + CUT_WINDOW + longest - len(buffer))
        if at == 0 and holds_json_lines(buffer):
            target = re.sub(r"\.\w+(\.gz|\.zst)?$", r".jsonl\1", file.name)
            advice = f"Try: {rename_command(file.name, target)}"
            raise Damaged(f"{file.name}: JSON Lines, each line an object, in place of a text; name it so. {advice}")
        cut = cut_at(buffer, least, CUT_WINDOW) if len(buffer) > least else len(buffer)
        for match in separator.finditer(buffer, cut - longest, cut + longest) if longest else ():
            if match.start() < cut < match.end():
                cut = match.start()
        data = buffer[:cut]
        buffer = buffer[cut:]
        if not data:
            return
        at += len(data)
        yield at, data


def holds_json_lines(text: bytes) -> bool:
    """Return whether a text, or the beginning of one, is JSON Lines: each of its first lines is an object."""
    lines = text.removeprefix(codecs.BOM_UTF8).lstrip()[:BLOCK_BYTES].split(b"\n", 10)[:10]
    if len(text) > BLOCK_BYTES and len(lines) < 10:
        lines.pop()  # which may be cut
    lines = [line for line in lines if line.strip()]
    with suppress(ValueError, RecursionError):
        return bool(lines) and all(line.startswith(b"{") and isinstance(json.loads(line), dict) for line in lines)
    return False


def suffix_by_content(path: Path) -> str:
    """Return the suffix in READERS that fits the content of a local file; "" if it cannot be read."""
    with path.open("rb") as file, suppress(Exception):  # libraries raise any type on arbitrary bytes
        head = file.peek(6)
        if head.startswith(b"PAR1"):
            return ".parquet"
        if head.startswith(b"ARROW1"):
            return ".arrow"
        return ".jsonl" if holds_json_lines(open_text(file).read(BLOCK_BYTES + 1)) else ".txt"
    return ""


def parquet_batches(file: BinaryIO, field: str, first: int) -> Iterator["RecordBatch"]:
    """Yield the column of a field of a Parquet file, in batches from a row on."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    names = [column.path for column in table.schema]
    if not any(f"{name}.".startswith(f"{field}.") for name in names):
        raise no_text_field(file.name, field, table.schema_arrow.names)
    for group in range(table.num_row_groups):  # one after the other, because pyarrow reads all that it is given at once
        num_rows = table.metadata.row_group(group).num_rows
        if first < num_rows:
            for batch in table.iter_batches(ROWS_AT_ONCE, [group], [field], use_threads=False):
                yield batch.slice(first)
                first = max(0, first - batch.num_rows)
        else:
            first -= num_rows


def arrow_batches(file: BinaryIO, field: str, first: int) -> Iterator["RecordBatch"]:
    """Yield the column of a field of an Arrow file or stream, in batches from a row on."""
    import pyarrow.ipc

    is_file = file.peek(6).startswith(b"ARROW1")  # type: ignore[attr-defined]
    table = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
    names = table.schema.names
    if names == ["indices"]:
        raise Damaged(
            f"{file.name}: the rows that a selection of `datasets` takes, without their text; save the data set with "
            "save_to_disk(), and give its folder"
        )
    column = next((name for name in names if f"{field}.".startswith(f"{name}.")), "")
    if not column:
        raise no_text_field(file.name, field, names)
    batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
    for batch in batches:
        for start in range(first, batch.num_rows, ROWS_AT_ONCE):
            yield batch.select([column]).slice(start, ROWS_AT_ONCE)
        first = max(0, first - batch.num_rows)


def read_table(file: BinaryIO, wanted: Wanted, at: int) -> Iterator[tuple[int, list]]:
    """Yield the values of a field of a table, in lists of about BLOCK_BYTES, each with the row after it."""
    batches_of = parquet_batches if suffix_of(file.name) == ".parquet" else arrow_batches
    values: list = []
    num_bytes = 0
    for batch in batches_of(file, wanted.text_field, at):
        for value in _values(batch.column(0)):
            text = field_of({batch.schema.names[0]: value}, wanted.text_field)
            if isinstance(text, bytes):
                text = text.decode("utf-8", "surrogateescape")
            values.append(text)
            num_bytes += size_of(text)
            if num_bytes >= BLOCK_BYTES:
                at += len(values)
                yield at, values
                values = []
                num_bytes = 0
    if values:
        yield at + len(values), values


def _values(column: "Array") -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # its text is not UTF-8
        return [value and value.decode("utf-8", "surrogateescape") for value in column.cast("binary").to_pylist()]


Reader = Callable[[BinaryIO, Wanted, int], Iterator[tuple[int, Any]]]  # reads from a position on
TEXTS = [f"{suffix}{packed}" for suffix in (".txt", ".md", ".py") for packed in ("", *PACKED)]
LINES = [f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson", ".json") for packed in ("", *PACKED)]
TABLES = (".parquet", ".arrow")
READERS: dict[str, Reader] = dict.fromkeys(TEXTS, read_text)
READERS |= dict.fromkeys(LINES, read_lines)
READERS |= dict.fromkeys(TABLES, read_table)
READABLE = f"{' '.join(suffix for suffix in READERS if not suffix.endswith(PACKED))} (texts also with .gz or .zst)"


def suffix_of(name: str) -> str:
    """Return the suffix in READERS that a file name ends with, or ""."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


def check_beginning(file: BinaryIO, text_field: str) -> None:
    """Check the beginning of a file: not a Git LFS pointer, and a text, or a table with the field.

    Raises: Damaged.
    """
    if file.peek(1).startswith(LFS_POINTER):  # type: ignore[attr-defined]
        raise UserError(f"{file.name}: {BEGINNINGS[LFS_POINTER]}")
    suffix = suffix_of(file.name)
    if suffix in TABLES:
        next(read_table(file, Wanted(text_field), 0), None)
    else:
        open_text(file)


# ---------------------------------------------------------------------------------------------------------------------
# blocks -> documents


class Skipped(ValueError):
    """Why a row has no text."""


class Document(NamedTuple):
    """A document, or a later block of one that is longer than a block."""

    at: int  # where its row or its block begins, see Block
    text: str | Skipped
    is_begin: bool = True  # False for a later block
    row_bytes: int = 0  # of a line, unless its text is null
    is_part: bool = False  # of a text that a separator divides


def read_documents(block: Block, wanted: Wanted) -> Iterator[Document]:
    """Read the documents of a block of text or rows."""
    if isinstance(block.data, list):
        for number, value in enumerate(block.data):
            yield from documents_in(text_of(value), block.at + number, wanted)
    elif isinstance(block.data, bytes) and suffix_of(block.name) in TEXTS:
        text = block.data.decode("utf-8-sig" if block.at == 0 else "utf-8", "surrogateescape")
        is_last = len(block.data) < BLOCK_BYTES
        if block.at == 0 and is_last and not text.strip():
            yield Document(block.at, Skipped(NO_TEXT))
        else:
            yield from documents_in(text, block.at, wanted, is_begin=block.at == 0, is_last=is_last)
    elif isinstance(block.data, bytes):
        at = block.at
        for line in block.data.split(b"\n"):
            text = line.decode("utf-8-sig", "surrogateescape").strip()
            if text not in ("", "[", "]"):
                value = field_of(json_of(text, block.name, wanted.text_field), wanted.text_field)
                row_bytes = 0 if value is None else len(line)
                yield from documents_in(text_of(value), at, wanted, row_bytes)
            at += len(line) + 1


def documents_in(
    text: str | Skipped, at: int, wanted: Wanted, row_bytes: int = 0, is_begin: bool = True, is_last: bool = True
) -> Iterator[Document]:
    """Divide a text at a separator, if there is one; skip parts without text.

    Args:
        is_begin, is_last: whether `text` includes the beginning and the end of the whole text.
    """
    if isinstance(text, Skipped) or not wanted.separator:
        yield Document(at, text, is_begin, row_bytes)
        return
    parts = re.split(wanted.pattern, text)
    for number, part in enumerate(parts):
        is_whole = (is_begin or number > 0) and (is_last or number + 1 < len(parts))
        if part.strip() if is_whole else part or number:
            yield Document(at, part, is_begin or number > 0, is_part=len(parts) > 1)


def text_of(value: object) -> str | Skipped:
    """Return the text of a row, or why it has none."""
    if isinstance(value, str):
        return value if value.strip() else Skipped(NO_TEXT)
    kind = "null" if value is None else type(value).__name__
    advice = "see docs/data.md#tables-and-other-json" if isinstance(value, list | dict) else SET_FIELD
    return value if isinstance(value, Skipped) else Skipped(f"{kind}, not a string; {advice}")


def json_of(line: str, name: str, text_field: str) -> object:
    """Parse a line of a file as JSON, also as part of an array of several lines; return why if that fails."""
    try:
        return json.loads(line if line.endswith("}") else line.removeprefix("[").rstrip(",]"))
    except (ValueError, RecursionError) as error:
        if line.startswith("{") and line.endswith("}") and not str(error).startswith("Extra data"):
            return Skipped(f"not JSON ({error}); repair the line, or leave it out")
        advice = f"Try: {convert_command(name, text_field)}, then --source {shlex.quote(converted(name))} or its folder"
        return Skipped(f"not JSON, or more than one row; expected one object a line. {advice}")


def field_of(row: object, name: str) -> object:
    """Return a field of an object, or why it has none; the name meta.text is the field text of its field meta."""
    if isinstance(row, Skipped):
        return row
    if not isinstance(row, dict):
        return Skipped(f"{type(row).__name__}; expected an object with the field {name!r}")
    outer, _, inner = name.partition(".")
    if name in row:
        return row[name]
    if inner and outer in row:
        return field_of(row[outer], inner)
    return Skipped(no_field(name, row))


SET_FIELD = "set --text_field to the field with the text"


def no_field(name: str, names: Iterable[str]) -> str:
    found = ", ".join(names)
    if "input_ids" in found:
        return f"no field {name!r}, found {found}; write token ids as shards, see docs/data.md#token-ids"
    return f"no field {name!r}, found {found}; {SET_FIELD}"


def no_text_field(where: str, text_field: str, names: Iterable[str]) -> Damaged:
    return Damaged(f"{where}: {no_field(text_field, names)}")


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
    """Turn the errors of reading a file into a Damaged that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip and pyarrow each raise their own types
        if isinstance(error, OSError) and error.errno:  # of this machine
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = REPAIR
        if "requires too much memory" in reason:
            file = shlex.quote(name)
            advice = (
                "pack it with a window of at most 128 MB: "
                f"zstd -d --long=31 -c {file} | zstd > {file}.new && mv {file}.new {file}"
            )
        raise Damaged(f"{name}: cannot be read, {reason}; {advice}") from error
