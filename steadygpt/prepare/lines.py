"""Conversion of a file that prepare_dataset.py does not read, such as a table in CSV, to JSON Lines.

    python -m steadygpt.prepare.lines corpus/rows.csv              # writes corpus/rows.jsonl
    python -m steadygpt.prepare.lines corpus/stories.txt '<|endoftext|>'

The new file stands beside the old one. A file of JSON keeps its name, and the old one gets the suffix .original.
"""

import steadygpt.launch  # noqa: F401  # before all others

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import IO, Any

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import counted

COMMAND = "python -m steadygpt.prepare.lines"
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".lzma": lzma.open, ".bz2": bz2.open}
NAME = re.compile(r"(.+?)(?:\.(csv|tsv|json|jsonl|ndjson|txt|md))?(\.(?:gz|xz|lzma|bz2|zst))?", re.IGNORECASE)
ORIGINAL = ".original"  # the suffix of a file that a new one replaces


def convert_command(name: str, separator: str = "") -> str:
    """Return the command that converts a file of this machine, or what to do with one of a network."""
    if "://" in name:
        return f"copy it to this machine, and use {COMMAND}"
    return shlex.join([*COMMAND.split(), name, *([separator] if separator else [])])


def kind_of(path: Path) -> str:
    """Return the kind of a file: csv, tsv, json for any JSON, or txt."""
    match = NAME.fullmatch(path.name)
    kind = ((match and match[2]) or "txt").lower()
    return "json" if kind in ("jsonl", "ndjson") else kind.replace("md", "txt")


def target_of(path: Path) -> Path:
    """Return the path of the new file."""
    if kind_of(path) == "json" and path.suffix not in (".xz", ".lzma", ".bz2"):
        return path
    match = NAME.fullmatch(path.name)
    assert match, "the pattern matches any name"
    return path.with_name(f"{match[1]}.jsonl")


def open_packed(path: Path) -> IO[bytes]:
    """Open a file, unpacked."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    opener = OPENERS.get(suffix, open)
    return opener(path, "rb")


def rows_of(path: Path, separator: str) -> Iterator[dict]:
    """Yield the rows of a table or of JSON, or the documents of a text."""
    match = NAME.fullmatch(path.name)
    kind = ((match and match[2]) or "txt").lower()
    with open_packed(path) as file, io.TextIOWrapper(file, "utf-8-sig", "replace", newline="") as text:
        if kind in ("csv", "tsv"):
            csv.field_size_limit(2**31 - 1)
            yield from csv.DictReader(text, delimiter="\t" if kind == "tsv" else ",")
        elif kind == "txt":
            content = text.read()
            for document in content.split(separator) if separator else [content]:
                if document.strip():
                    yield {"text": document}
        else:
            yield from json_rows(text.read(), separator)


def json_rows(text: str, separator: str) -> Iterator[dict]:
    """Yield the objects in a text of JSON values, also those in arrays; what stands between values is left out."""
    decoder = json.JSONDecoder()
    begin = re.compile(r"[\[{]")
    found = begin.search(text)
    while found:
        value, end = decoder.raw_decode(text, found.start())
        for row in value if isinstance(value, list) else [value]:
            if isinstance(row, dict):
                yield from split_row(row, separator)
        found = begin.search(text, end)


def split_row(row: dict, separator: str) -> Iterator[dict]:
    """Yield a row, or a row for each part of its texts that a separator divides."""
    parts = {}
    for key, value in row.items():
        if separator and isinstance(value, str) and separator in value:
            parts = {key: [part for part in value.split(separator) if part.strip()]}
    if not parts:
        yield row
    for key, texts in parts.items():
        for text in texts:
            yield row | {key: text}


def convert(path: Path, separator: str = "") -> Path:
    """Write the rows of a file as JSON Lines, and return the new file.

    Raises: UserError if the file cannot be converted.
    """
    target = target_of(path)
    if target.exists() and target != path:
        raise UserError(f"{target}: exists, and would be replaced; move it")
    count = 0

    def write(file: IO[bytes]) -> None:
        nonlocal count
        with gzip.GzipFile("", "wb", 6, file) if target.suffix == ".gz" else nullcontext(file) as packed:
            for row in rows_of(path, separator):
                packed.write(f"{json.dumps(row)}\n".encode())
                count += 1

    new = target.with_name(f"{target.name}.new")
    try:
        replace_file(new, write)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give that of the table or text") from None
    except (OSError, ValueError, EOFError, csv.Error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", "") or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: cannot be converted ({reason})") from error
    if target == path:
        path.rename(path.with_name(f"{path.name}{ORIGINAL}"))
        print(f"{path}: the old file is now {path.name}{ORIGINAL}")
    print(f"{target}: {counted(count, 'row')}")
    return new.rename(target)


@dataclass(frozen=True)
class LinesOptions:
    file: str = option(MISSING, "table or text to convert", positional=True)
    separator: str = option("", "what stands between the documents of a text", positional=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(LinesOptions, argv, "Convert a table or a text to JSON Lines, one document a row.")
    convert(Path(options.file), options.separator)
    return 0


if __name__ == "__main__":
    run_cli(main)
