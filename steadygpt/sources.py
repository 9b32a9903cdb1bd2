"""Where text comes from: files, Python's own library, the Hub -> rows, each of which may be a document."""

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
from typing import BinaryIO, NamedTuple, TextIO

from steadygpt.cli import UserError

NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
STDLIB = Path(sysconfig.get_path("stdlib"))
MAX_LINE_BYTES = 2**26  # of JSON: it is in memory a few times at once


class Position(NamedTuple):
    """Where something begins in the source; positions compare in the source's order."""

    file: int = 0
    row: int = 0  # line of JSON lines, row of Parquet or of a Hub data set
    piece: int = 0  # of a document longer than PIECE_CHARS


# What may be a document: where it is; a str, an open text file, or a ValueError that says why there is none (another
# type is a mistake in the data); and how far into its file it is read by now: in bytes, from the Hub in rows.
Row = tuple[Position, object, Callable[[], int]]


def find_files(source: str) -> list[Path]:
    """The readable files of a path, a folder (recursively), a glob or "stdlib", sorted; no hidden ones of a folder.

    Raises: UserError when there are none.
    """
    if source == "stdlib":
        return [path for path in _files_below(STDLIB, NOT_IN_STDLIB) if path.suffix == ".py"]
    if not source:
        raise UserError("--source is empty; expected a file, a folder, a glob, stdlib, fineweb-edu or hf:NAME[:CONFIG]")
    paths = [Path(source)] if Path(source).exists() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = {file for path in paths for file in (_files_below(path) if path.is_dir() else [path])}
    files = sorted(file for file in found if _reader(file))
    kinds = " ".join(READERS)
    if not files:
        raise UserError(
            f"--source {source}: {f'{len(found)} files of other kinds' if found else 'nothing there'}; expected "
            f"{kinds} files, a folder or a glob, stdlib, fineweb-edu or hf:NAME[:CONFIG]"
        )
    if len(files) < len(found):
        print(f"{source}: {len(found) - len(files)} files are left out, not being {kinds}", file=sys.stderr)
    return files


def _files_below(folder: Path, excluded: Iterable[str] = ()) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [p for p in paths if not any(n in excluded or n.startswith(".") for n in p.relative_to(folder).parts)]


def fingerprint(files: Sequence[Path]) -> str:
    """A line that changes when a file comes, goes, or changes its name or size."""
    root = os.path.commonpath([file.parent for file in files])
    sizes = [(os.path.relpath(file, root), file.stat().st_size) for file in files]
    return f"{len(files)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


def file_rows(files: Sequence[Path], text_field: str, start: Position) -> Iterator[Row]:
    """The rows of local files, from `start` on.

    Raises: UserError naming a file that cannot be read, is damaged, or lacks the text field.
    """
    for index, path in islice(enumerate(files), start.file, None):
        first_row = start.row if index == start.file else 0
        with _naming(path), open(path, "rb") as raw:
            for number, value in islice(enumerate(_reader(path)(raw, text_field)), first_row, None):
                yield Position(index, number), value, raw.tell


def _text_values(raw: BinaryIO, text_field: str) -> Iterator[TextIO]:
    # Line ends stay as they are. Bytes that are no UTF-8 become lone surrogates here, U+FFFD in read_pieces.
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
        if number == 0 and text_field not in fields:  # which speaks for the file
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


def _reader(path: Path) -> Callable[[BinaryIO, str], Iterator[object]] | None:
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)


def hub_is_there() -> bool:
    """Whether the Hub can be reached; without it, its library takes copies from before or fails at once from now on."""
    import requests

    try:
        requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=10)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # else it would try for half a minute
        return False
    return True


def load_hub(source: str, split: str = "train", streaming: bool = False):
    """A split of "hf:NAME[:CONFIG]": a datasets.Dataset, or an IterableDataset if `streaming`.

    Raises: UserError when it cannot be had.
    """
    name, _, config = source.removeprefix("hf:").partition(":")
    hub_is_there()
    with _naming(source):
        from datasets import load_dataset

        return load_dataset(name, config or None, split=split, streaming=streaming)


def hub_rows(dataset, source: str, text_field: str, start: Position) -> Iterator[Row]:
    """The rows of a Hub data set, from `start` on."""
    with _naming(source):
        if text_field in (dataset.column_names or ()):  # a stream may not know its columns
            dataset = dataset.select_columns(text_field)
        number = start.row
        for batch in dataset.skip(number).iter(batch_size=64):
            if text_field not in batch:
                raise _no_text_field(source, text_field, batch)
            for value in batch[text_field]:
                yield Position(row=number), value, lambda: number  # noqa: B023 (asked for before the next row)
                number += 1


@contextmanager
def _naming(source: object) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # gzip, pyarrow, datasets and the Hub's HTTP library each raise kinds of their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        is_hub = str(source).startswith("hf:")
        hint = "check the name and the network (files need none)" if is_hub else "mend it or take it away"
        raise UserError(f"{source}: cannot be read, {reason}; {hint}, and run this again") from error


def _no_text_field(where: str, text_field: str, found: Iterable[str]) -> UserError:
    return UserError(f"{where}: expected {text_field!r}, found {', '.join(found)}; name the text with --text_field")
