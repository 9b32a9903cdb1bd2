"""The validation split of prepare_dataset.py: spread over a source of any kind, the same text for every tokenizer."""

import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from prepared import ids_of, prepare, refused
from test_prepare_resume import TEXTS

import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.data import tokenizer
from steadygpt.data.encoders import Tiktoken
from steadygpt.data.shards import read_manifest
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer

# Its tokens cross the ends of lines and words.
CROSSING = Tiktoken(
    tiktoken.Encoding(
        "crossing",
        pat_str=r"[\s\S]{1,5}",
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"\n\n": 256, b".\n": 257, b"e ": 258, b"\nl": 259},
        special_tokens={END_OF_TEXT: 260},
    ),
    pattern=r"[\s\S]{1,5}",
)


@pytest.fixture(autouse=True)
def crossing(monkeypatch) -> None:
    named = tokenizer._named
    monkeypatch.setattr(tokenizer, "_named", lambda name, end: CROSSING if name == "crossing" else named(name, end))
    monkeypatch.setattr("prepare_dataset.check_known", lambda name: None)
    monkeypatch.setattr("os.fsync", lambda file: None)  # power cuts are not tested here


def text_of(name: str, split: str) -> str:
    """Return the text of a split in the folder of a tokenizer."""
    found = load_tokenizer(TokenizerRecord(name))
    ids = [token for token in ids_of(f"of-{name}", split) if token != found.document_id]
    return b"".join(found.bytes_of[i] for i in ids).decode()


def share_of_val(source: str, flags: str = "") -> float:
    """Prepare with two tokenizers, check that val has the same text and train the rest, and return val's share."""
    vals = []
    shares = []
    for name in ("bytes", "crossing"):
        manifest = prepare(source, f"of-{name}", f"--tokenizer {name} {flags}")
        vals.append(text_of(name, "val"))
        shares.append(len(ids_of(f"of-{name}", "val")) / manifest["tokens"])
        assert ids_of(f"of-{name}", "train")
    assert vals[0] == vals[1]
    prepare(source, "whole", "--val_share 0")
    assert Counter(ids_of("of-bytes")) == Counter(ids_of("whole"))
    return shares[0]


def write_rows_as(kind: str, rows: dict[str, list[str]]) -> str:
    """Write columns of text as a source of a kind, and return its name."""
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(rows), "a.parquet", row_group_size=random.choice([1, 7, 1000]))
        return "a.parquet"
    if kind in ("txt", "md.gz"):
        Path("files").mkdir(exist_ok=True)
        for number, text in enumerate(rows["text"]):
            content = text.encode()
            Path(f"files/{number:06d}.{kind}").write_bytes(gzip.compress(content) if kind == "md.gz" else content)
        return "files"
    lines = [json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)]
    content = "".join(f"{line}\n" for line in lines).encode()
    if kind == "jsonl.gz":
        content = gzip.compress(content)
    if kind == "ndjson.zst":
        content = pyarrow.compress(content, "zstd", asbytes=True)
    Path(f"a.{kind}").write_bytes(content)
    return f"a.{kind}"


def random_source(rng: random.Random) -> str:
    """Write a source of up to 300 kB of text, in documents whose lengths span five orders, beside other fields."""
    alphabet = rng.choice(["ab cd ", "abcdefghij", "é你 好 ", "x"])
    left = int(10 ** rng.uniform(0, 5.5))
    texts = []
    others = []
    size_of_others = rng.choice([1, 4])
    while left > 0 and len(texts) < 300:
        length = min(left, int(10 ** rng.uniform(0, 5)))
        texts.append("".join(rng.choices(alphabet, k=length)))
        others.append("m" * int(10 ** rng.uniform(0, size_of_others)))
        left -= length
    random.seed(rng.random())
    kind = rng.choice(["txt", "md.gz", "jsonl", "jsonl.gz", "ndjson.zst", "parquet"])
    return write_rows_as(kind, {"text": texts, "other": others})


@pytest.mark.parametrize("seed", range(15))
def test_val_is_a_fortieth_within_one_piece(seed, capsys):
    source = random_source(random.Random(seed))
    try:
        share = share_of_val(source)
    except UserError as error:  # of spaces only
        assert source in str(error) and " 0 " in str(error)
        return
    manifest = read_manifest(Path("of-bytes"))
    piece = 2 * manifest["piece_bytes"] / manifest["validation"]["num_bytes"]
    assert abs(share - 1 / 40) < piece + 0.001
    assert share > 0.001 or "warning: fewer tokens for validation" in capsys.readouterr().err


LONG_FIRST, LONG_LAST = (["words " * 40_000, *["short"] * 50][::step] for step in (1, -1))


@pytest.mark.parametrize(("kind", "texts"), [
    ("txt", LONG_FIRST), ("jsonl", LONG_FIRST), ("jsonl", LONG_LAST), ("parquet", LONG_LAST), ("txt", ["w" * 240_000]),
    ("parquet", ["w" * 240_000]), ("jsonl", ["ten bytes\n"] * 40),
], ids=lambda value: value if isinstance(value, str) else f"{len(value)} texts")  # fmt: skip
def test_long_documents_are_cut(kind, texts):
    assert 0.01 < share_of_val(write_rows_as(kind, {"text": texts})) < 0.03


def test_a_sorted_source_needs_no_shuffling():
    texts = [f"{topic} " * 30 for topic in range(10) for _ in range(100)]
    share_of_val(write_rows_as("jsonl", {"text": texts}))
    assert {*text_of("bytes", "val").split()} == {str(topic) for topic in range(10)}


def test_little_text_beside_other_columns_has_a_val_too():
    rows = {"text": TEXTS, "embedding": [os.urandom(5000) for _ in TEXTS]}
    pyarrow.parquet.write_table(pyarrow.table(rows), "wide.parquet")
    assert 0.01 < share_of_val("wide.parquet") < 0.03


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5])
def test_a_share_is_met(share):
    write_rows_as("jsonl", {"text": TEXTS})
    manifest = prepare("a.jsonl", flags=f"--val_share {share}")
    assert 0.8 * share < len(ids_of("out", "val")) / manifest["tokens"] < 1.1 * share


def test_without_val():
    write_rows_as("jsonl", {"text": TEXTS})
    manifest = prepare("a.jsonl", "none", "--val_share 0")
    assert [shard["split"] for shard in manifest["shards"]] == ["train"]
    refused("--source a.jsonl --val_share 0.9", "--val_share", "0.9", " 0.5")


def test_val_has_at_most_400_mb(monkeypatch):
    monkeypatch.setattr(prepare_dataset, "VAL_BYTES", 1000)
    write_rows_as("jsonl", {"text": TEXTS})
    piece = max(len(text.encode()) for text in TEXTS)
    assert abs(share_of_val("a.jsonl") * len(ids_of("whole")) - 1000) < piece
