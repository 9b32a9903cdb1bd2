"""Tests of what people bring to prepare_dataset.py: rows and files that other programs write in their own ways."""

import gzip
import json
import os
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import (
    ids_expected,
    ids_of,
    prepare,
    prepare_stopped,
    refused,
    small_units,  # noqa: F401
)
from test_tokenizer_json import byte_tokenizer

TEXTS = [f"{number} {'word ' * (number % 7)}\u00e9" for number in range(40)]
ROWS = [json.dumps({"text": text}) for text in TEXTS]


def write_arrow(path: str, table: pyarrow.Table, writer=pyarrow.ipc.new_stream, rows=7) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, writer(file, table.schema) as written:
        written.write_table(table, max_chunksize=rows)


def write_saved(path: str) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path, num_shards=3)


def write_binary(path: str, kind: pyarrow.DataType) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([t.encode() for t in TEXTS], kind)}), path)


@pytest.mark.parametrize(("source", "write"), [
    ("a.jsonl", lambda path: path.write_text(",\n".join(ROWS) + ",\n")),
    ("a.jsonl", lambda path: path.write_text("[" + ",\n".join(ROWS) + "]\n")),
    ("a.jsonl", lambda path: path.write_text("\r\n".join(ROWS))),
    ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress("\n".join(ROWS).encode()) + bytes(1000))),
    ("a.jsonl.gz", lambda path: path.write_bytes(b"".join(gzip.compress(f"{row}\n".encode()) for row in ROWS))),
    ("a.arrow", lambda path: write_arrow(path, pyarrow.table({"text": TEXTS}))),
    ("a.arrow", lambda path: write_arrow(path, pyarrow.table({"text": TEXTS}), rows=1000)),
    ("a.arrow", lambda path: write_arrow(path, pyarrow.table({"text": TEXTS}), pyarrow.ipc.new_file)),
    ("saved", write_saved),
    *(("a.parquet", partial(write_binary, kind=kind)) for kind in (pyarrow.binary(), pyarrow.large_binary())),
])  # fmt: skip
@pytest.mark.usefixtures("small_units")
def test_rows_as_other_programs_write_them_are_read(source, write):
    write(Path(source))
    prepare(source)
    assert ids_of() == ids_expected(TEXTS)


@pytest.mark.parametrize(("content", "facts"), [
    ('"text"\n' * 9, (" str", "'text'")),
    ('{"body": "a"}\n' * 9, ("'text'", " body", "--text_field")),
    ('{"text": 1}\n' * 9, (" int", "--text_field")),
    ('{"input_ids": [1]}\n' * 9, ("'text'", " input_ids", "docs/data.md#token-ids")),
])  # fmt: skip
def test_rows_that_cannot_be_read_are_explained(content, facts):
    Path("a.jsonl").write_text(content)
    refused("--source a.jsonl", "a.jsonl, byte 0", *facts)


@pytest.mark.parametrize(
    "bad", ['{"n": ' + "9" * 5000 + ', "text": "x"}', "[" * 10**5, '{"text": 1e999}', "{", "[]", '"', "1"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_row_does_not_end_the_command(bad, place):
    rows = ROWS * 150  # so that it is less than half of the bytes
    Path("a.jsonl").write_text("\n".join([*rows[:place], bad, *rows[place:]]) + "\n")
    manifest = prepare("a.jsonl")
    assert manifest["documents"] + manifest["skipped"] in (len(rows), len(rows) + 1)


# ---------------------------------------------------------------------------------------------------------------------
# special tokens that texts spell


def test_all_special_tokens_that_texts_spell_are_counted(capsys):
    special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<|im|>": 259}
    Path("tokenizer.json").write_text(byte_tokenizer(special))
    text = "<|im_start|>user hi<|im_end|><|im|>\n" * 30 + "<|endoftext|>"
    Path("a.jsonl").write_text((json.dumps({"text": text}) + "\n") * 100)
    manifest = prepare("a.jsonl", flags="--tokenizer tokenizer.json --val_share 0")
    assert manifest["spelled"] == {"<|im_start|>": 3000, "<|im_end|>": 3000, "<|im|>": 3000, "<|endoftext|>": 100}
    said = capsys.readouterr()
    assert "a.jsonl: contains <|im_start|>, which is encoded as text. If it means the token, write" in said.err
    assert "a.jsonl: contains <|endoftext|>, which is encoded as text. If it separates documents" in said.err
    assert "3,000 <|im_start|> inside texts encoded as text" in said.out
    assert np.isin(ids_of(), [257, 258, 259]).sum() == 0


# ---------------------------------------------------------------------------------------------------------------------
# files between two starts


@pytest.mark.usefixtures("small_units")
def test_a_source_that_is_modified_between_two_starts_is_refused_until_the_preparation_is_complete():
    Path("a.jsonl").write_text("".join(f'{{"text": "{number:09d}"}}\n' for number in range(2000)))
    prepare_stopped("a.jsonl", "out", "--val_share 0 --shard_size 3000", before=3)
    text = Path("a.jsonl").read_text()
    stat = Path("a.jsonl").stat()
    Path("a.jsonl").write_text(text.replace("1", "2"))  # as many bytes
    os.utime("a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    refused("--source a.jsonl --val_share 0 --shard_size 3000", "out: ", " 1 ", "a.jsonl", "--out")
    Path("a.jsonl").write_text(text)
    os.utime("a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prepare("a.jsonl", flags="--val_share 0 --shard_size 3000")
    assert len(ids_of()) == 20_000
    Path("a.jsonl").touch()
    prepare("a.jsonl", flags="--val_share 0 --shard_size 3000")  # already complete


def test_the_folder_for_the_shards_may_be_in_that_of_the_source():
    for name in ("a.txt", "sub/b.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    for _ in range(2):
        prepare(".", "data/here")
    assert ids_of("data/here") == ids_expected(["a.txt", "sub/b.txt"])
