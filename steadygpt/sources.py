"""Sources of text: local files, Python's own library and the Hugging Face Hub, read as rows."""

import glob
import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from steadygpt.cli import UserError

NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
STDLIB = Path(sysconfig.get_path("stdlib"))
MAX_LINE_BYTES = 2**26  # of a line of JSON, which is in memory several times at once


class Position(NamedTuple):
    """A position in the source; positions compare in reading order."""

    file: int = 0
    row: int = 0  # line of JSON Lines, row of Parquet or of a Hub data set
    piece: int = 0  # part of a document longer than PIECE_CHARS


class Row(NamedTuple):
    """A row, usually one document."""

    at: Position
    value: object  # str or open text file; a ValueError with the reason to skip the row; or data of the wrong type
    amount_read: Callable[[], int]  # how far the file is read, in bytes; a Hub data set, in rows


def find_files(source: str) -> list[Path]:
    """Find the readable files of a path, a folder (recursive, without hidden files), a glob or "stdlib", sorted.

    Raises: UserError when there are none.
    """
    if source == "stdlib":
        return [path for path in _files_below(STDLIB, NOT_IN_STDLIB) if path.suffix == ".py"]
    if not source:
        raise UserError("--source is empty; expected a file, a folder, a glob, stdlib, fineweb-edu or hf:NAME[:CONFIG]")
    paths = [Path(source)] if Path(source).exists() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = {file for path in paths for file in (_files_below(path) if path.is_dir() else [path])}
    files = sorted(file for file in found if suffix_of(file.name))
    kinds = " ".join(READERS)
    if not files:
        raise UserError(
            f"--source {source}: {f'{len(found)} files of other kinds' if found else 'no such file'}; expected "
            f"{kinds} files, a folder or a glob, stdlib, fineweb-edu or hf:NAME[:CONFIG]"
        )
    if len(files) < len(found):
        print(f"{source}: skipped {len(found) - len(files)} files that are not {kinds}", file=sys.stderr)
    return files


def _files_below(folder: Path, excluded: Iterable[str] = ()) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [p for p in paths if not any(n in excluded or n.startswith(".") for n in p.relative_to(folder).parts)]


def fingerprint(files: Sequence[Path]) -> str:
    """Return a line that changes when files are added, removed or renamed, or change their size."""
    root = os.path.commonpath([file.parent for file in files])
    sizes = [(os.path.relpath(file, root), file.stat().st_size) for file in files]
    return f"{len(files)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


def file_rows(files: Sequence[Path], text_field: str, start: Position) -> Iterator[Row]:
    """Read the rows of local files, from `start` on.

    Raises: UserError for a file that cannot be read, is damaged, or lacks the text field.
    """
    for index, path in islice(enumerate(files), start.file, None):
        first_row = start.row if index == start.file else 0
        with _naming(path), open(path, "rb") as raw:
            for number, value in islice(enumerate(READERS[suffix_of(path.name)](raw, text_field)), first_row, None):
                yield Row(Position(index, number), value, raw.tell)


def _text_values(raw: BinaryIO, text_field: str) -> Iterator[object]:
    # Line endings are kept. Invalid UTF-8 becomes lone surrogates here and U+FFFD in read_pieces.
    yield io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _json_values(raw: BinaryIO, text_field: str) -> Iterator[object]:
    file = gzip.GzipFile(fileobj=raw) if raw.name.lower().endswith(".gz") else raw
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(2**20)
            yield ValueError(f"a line of more than {MAX_LINE_BYTES // 2**20} MB")
            continue
        try:
            row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
        except (ValueError, RecursionError):
            yield ValueError("broken JSON" if line.strip() else "blank line")
            continue
        fields = row if isinstance(row, dict) else {}
        if number == 0 and text_field not in fields:  # probably the wrong --text_field for the whole file
            raise _no_text_field(raw.name, text_field, fields or [type(row).__name__])
        yield fields.get(text_field, ValueError(f"no field {text_field!r}"))


def _parquet_values(raw: BinaryIO, text_field: str) -> Iterator[object]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(raw)
    if text_field not in file.schema_arrow.names:
        raise _no_text_field(raw.name, text_field, file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=64, columns=[text_field]):
        yield from batch.column(0).to_pylist()


READERS = dict.fromkeys((".txt", ".md", ".py"), _text_values)
READERS |= dict.fromkeys((".jsonl", ".jsonl.gz", ".json.gz"), _json_values)
READERS |= {".parquet": _parquet_values}


def suffix_of(name: str) -> str:
    """Return the suffix in READERS that a file name ends with, "" if there is none."""
    return next((suffix for suffix in READERS if name.lower().endswith(suffix)), "")


def check_hub() -> bool:
    """Return whether the Hub responds; if not, set its library to use only its cache from now on."""
    import requests

    try:
        requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=10)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise the library retries for half a minute
        return False
    return True


def load_hub(source: str, split: str = "train", streaming: bool = False):
    """Load a split of "hf:NAME[:CONFIG]" as a datasets.Dataset, or as an IterableDataset if `streaming`.

    Raises: UserError when it cannot be loaded.
    """
    name, _, config = source.removeprefix("hf:").partition(":")
    check_hub()
    with _naming(source):
        from datasets import load_dataset

        return load_dataset(name, config or None, split=split, streaming=streaming)


def hub_rows(dataset, source: str, text_field: str, start: Position) -> Iterator[Row]:
    """Read the rows of a Hub data set, from `start` on."""
    with _naming(source):
        if text_field in (dataset.column_names or ()):  # a stream may not know its columns
            dataset = dataset.select_columns(text_field)
        number = start.row
        for batch in dataset.skip(number).iter(batch_size=64):
            if text_field not in batch:
                raise _no_text_field(source, text_field, batch)
            for value in batch[text_field]:
                yield Row(Position(row=number), value, lambda: number)  # noqa: B023 (called before the next row)
                number += 1


@contextmanager
def _naming(source: object) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip, pyarrow, datasets and the Hub's HTTP library each raise their own types
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        is_hub = str(source).startswith("hf:")
        hint = "check the name and the network (files need none)" if is_hub else "repair or remove it"
        raise UserError(f"{source}: cannot be read, {reason}; {hint}, and run this again") from error


def _no_text_field(where: str, text_field: str, found: Iterable[str]) -> UserError:
    return UserError(f"{where}: no field {text_field!r}; found {', '.join(found)}; name the text with --text_field")
