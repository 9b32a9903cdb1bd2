"""Tests that prepare_dataset.py writes the same bytes after interruptions, and with any number of workers."""

import gzip
import hashlib
import json
import os
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from prepared import (
    files_of,
    ids_expected,
    ids_of,
    prepare,
    prepare_interrupted,
    prepare_stopped,
    small_units,  # noqa: F401
    write_rows,
)
from standin import TEXTS as HUB_TEXTS
from standin import parquet

import prepare_dataset
from steadygpt.prepare import documents, writer
from steadygpt.prepare.train_tokenizer import train_bpe

WORDS = "the a of naïve 数据 token\nline loss,\nstep. gradient".split(" ")
TEXTS = [f"{n}: " + " ".join(random.Random(n).choices(WORDS, k=1 + n % 40)) + "\n" * (n % 3) for n in range(400)]
LONG = "".join(TEXTS)
BYTES_FOLDER = os.fsdecode(b"caf\xe9")
HUB = "--shard_size 150000 --val_share 0.1"
TRAINED = "--tokenizer bpe:280 --tokenizer_bytes 20000 --shard_size 5000"
# name -> source, flags, shards at least, documents; the source is written by the fixture below
SOURCES = {
    "rows and bytes that are skipped": ("mixed", "--shard_size 397 --val_share 0.1", 5, 1 + 99 + 29),
    "a unit larger than a shard": ("long.jsonl", "--shard_size 200 --val_share 0", 3, 3),
    "late rows that a new preparation refuses": ("late", "--shard_size 3000", 9, 301),
    "lines, many val shards": ("lines.jsonl", "--shard_size 131 --val_share 0.3", 6, 22),
    "one text, many val shards": ("text.txt", "--shard_size 400 --val_share 0.3", 6, 1),
    "a file that is damaged late": ("damaged", "--shard_size 5000", 9, 1350),
    "a trained tokenizer, a folder whose name is not UTF-8": ("bytes", TRAINED, 3, 400),
    "CSV of the Hub, by its copy in Parquet": ("hf:some/csv", HUB, 2, 900),
    "lines of the Hub": ("hf:some/lines", HUB, 2, 900),
}


@pytest.fixture
def sources(standin, monkeypatch) -> None:
    """All sources, in the working directory and on the Hub."""
    monkeypatch.setattr("os.fsync", lambda file: None)  # power cuts are not tested here
    for folder in ("mixed", "late", "damaged", f"bytes/{BYTES_FOLDER}"):
        os.makedirs(folder)
    rows = '{"text": "one"}\n{broken\n' + '{"text": "caf\\udce9"}\n' * 99 + '{"text": 1}\n' * 50
    Path("mixed/a.jsonl").write_text(rows)
    write_rows("mixed/c.jsonl", ("word " * n for n in range(30)))
    write_rows("long.jsonl", ("a" * n for n in (9, 500, 9)))
    # Rows without text, and with little text beside other fields, which only a new preparation checks.
    row = json.dumps({"text": "word " * 20, "meta": ""}) + "\n"
    Path("late/a.jsonl").write_text(row * 300)
    Path("late/b.jsonl").write_text((json.dumps({"text": None, "meta": "m" * 9000}) + "\n") * 100 + row)
    write_rows("lines.jsonl", ["short", LONG[:1000], *TEXTS[:20]])
    Path("text.txt").write_text(LONG[:9000])
    Path("damaged/a.jsonl").write_text(row * 600)
    Path("damaged/b.jsonl.gz").write_bytes(gzip.compress(row.encode() * 150 + os.urandom(50_000))[:-1000])
    Path("damaged/c.jsonl").write_text(row * 600)
    Path("bytes", BYTES_FOLDER, "a.parquet").write_bytes(parquet(TEXTS))
    csv = "text,number\n" + "".join(f'"{text}",1\n' for text in HUB_TEXTS[:900])
    standin.put("datasets/some/csv", {"data/train.csv": csv.encode()})
    standin.put("datasets/some/csv", {"default/train/0000.parquet": parquet(HUB_TEXTS[:900])}, "refs/convert/parquet")
    lines = "".join(f'{{"text": "{text}"}}\n' for text in HUB_TEXTS[:900])
    standin.put("datasets/some/lines", {"data/train.jsonl": lines.encode()})


def skipped(capsys) -> set[str]:
    """Return the rows that were named as skipped since the last call."""
    return {line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped ")}


@pytest.mark.parametrize("name", SOURCES)
def test_an_interruption_after_each_shard_does_not_change_a_byte(name, sources, small_units, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(documents, "PIECE_BYTES", 300)
    monkeypatch.setattr(writer, "NAMED_SKIPS", 10**6)
    source, flags, shards, count = SOURCES[name]
    manifest = prepare(source, "whole", flags)
    named = skipped(capsys)
    assert manifest["documents"] == count
    assert len(manifest["damaged"]) == (source == "damaged")
    assert not source.startswith("hf:") or sorted(ids_of("whole")) == sorted(ids_expected(HUB_TEXTS[:count]))
    assert prepare_interrupted(source, "stopped", flags) >= shards
    assert files_of("stopped") == files_of("whole")
    assert skipped(capsys) == named


@pytest.mark.parametrize(("name", "workers"), [
    ("one text, many val shards", 2),
    ("a trained tokenizer, a folder whose name is not UTF-8", 2),
])  # fmt: skip
def test_any_number_of_workers_writes_the_same_bytes(name, workers, sources):
    source, flags, _, _ = SOURCES[name]
    manifest = prepare(source, "whole", flags)
    assert "many val" not in name or [shard["split"] for shard in manifest["shards"]].count("val") > 3
    prepare(source, "parallel", f"{flags} --num_workers {workers}")
    assert files_of("parallel") == files_of("whole")


def test_a_finished_tokenizer_is_not_trained_again(sources, monkeypatch):
    trained = Mock(return_value=train_bpe(TEXTS, 280))
    monkeypatch.setattr(prepare_dataset, "train_tokenizer", trained)
    prepare("bytes", "whole", TRAINED)
    for place in ("train_tokenizer", "write_missing", "sha256_of"):
        prepare_stopped("bytes", "stopped", TRAINED, at=place)
    prepare("bytes", "stopped", TRAINED)
    assert trained.call_count == 2  # once in each folder
    assert files_of("stopped") == files_of("whole")


def test_a_tokenizer_of_other_files_is_trained_again(sources):
    prepare_stopped("lines.jsonl", "stopped", TRAINED, at="write_missing")
    write_rows("lines.jsonl", [text.upper() for text in TEXTS])
    prepare("lines.jsonl", "stopped", TRAINED)
    prepare("lines.jsonl", "whole", TRAINED)
    assert files_of("stopped") == files_of("whole")


def known_corpus(folder: Path) -> None:
    """Write the same mixed documents on every machine: rows in several formats, with words of several scripts."""
    folder.mkdir()
    texts = []
    for number in range(600):
        more = ["  spaces ", "12345", "<|endoftext|>", "emoji \U0001f600"]
        words = random.Random(number).choices([*WORDS, *more], k=number)
        texts.append(" ".join(words) + "\t" * (number % 3))
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(rows[:200]) + '{broken\n{"text": ""}\n{"text": "bad \\udcff"}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(rows[200:400]).encode()))
    (folder / "c.parquet").write_bytes(parquet(texts[400:]))


@pytest.mark.parametrize(("tokenizer", "workers", "digest"), [
    ("gpt2", 1, "60214ce9ae516753"), ("gpt2", 4, "60214ce9ae516753"), ("bytes", 2, "56c4e78b4ee87862"),
])  # fmt: skip
def test_the_documents_of_a_known_corpus_have_known_ids(tokenizer, workers, digest):
    """The digests are of the ids that commit 90030995 gave, whose preparation was written another way."""
    known_corpus(Path("corpus"))
    prepare("corpus", "out", f"--val_share 0 --tokenizer {tokenizer} --num_workers {workers}")
    ids = np.array(ids_of())
    documents = np.split(ids, np.flatnonzero(ids == ids[0]))
    digests = sorted(hashlib.sha256(part.astype("<u4").tobytes()).hexdigest() for part in documents)
    assert hashlib.sha256("".join(digests).encode()).hexdigest()[:16] == digest
