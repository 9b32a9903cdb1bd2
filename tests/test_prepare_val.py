"""Tests of the validation split of prepare_dataset.py: the same text for every tokenizer, from every kind of source."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from prepared import ids_of, npy, npz, prepare, refused
from standin import parquet
from test_prepare_resume import LONG, TEXTS

import prepare_dataset
from steadygpt.data.tokenizer import END_OF_TEXT, Tokenizer, get_tokenizer

# Its tokens cross the ends of lines and words.
CROSSING = Tokenizer(
    tiktoken.Encoding(
        "crossing",
        pat_str=r"[\s\S]{1,5}",
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"\n\n": 256, b".\n": 257, b"e ": 258, b"\nl": 259},
        special_tokens={END_OF_TEXT: 260},
    ),
    pattern=r"[\s\S]{1,5}",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steadygpt.data.tokenizer.get_tokenizer", tokenizer_of)
    monkeypatch.setattr("os.fsync", lambda file: None)  # power cuts are not tested here
    return tmp_path


def tokenizer_of(name: str) -> Tokenizer:
    return CROSSING if name == "crossing" else get_tokenizer(name)


def texts_of(tokenizer: str, split: str) -> list[str]:
    """Return the documents of a split in the folder of a tokenizer; of one that is cut, the part in the split."""
    encoding, begin_id = tokenizer_of(tokenizer).encoding, tokenizer_of(tokenizer).document_id
    ids = ids_of(tokenizer, split)
    begins = [at for at, token in enumerate(ids) if token == begin_id or at == 0]
    parts = [ids[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    return [encoding.decode_bytes([token for token in part if token != begin_id]).decode() for part in parts]


def val_of(source: str, texts: list[str], flags: str = "", tokenizers=("bytes", "crossing")) -> list[str]:
    """Prepare with each tokenizer; check that val and train hold the texts, and val the same ones; return those."""
    vals = []
    for tokenizer in tokenizers:
        manifest = prepare(source, tokenizer, f"--tokenizer {tokenizer} {flags}")
        assert [shard["split"] for shard in manifest["shards"]].count("val") == 1
        vals.append(texts_of(tokenizer, "val"))
        assert [*vals[-1], *texts_of(tokenizer, "train")] == texts
    assert vals.count(vals[0]) == len(vals)
    return vals[0]


def assert_size(val: list[str], val_bytes: float, unit: float) -> None:
    """Check that val has val_bytes of whole documents, and at most a unit more."""
    without_last = sum(len(text.encode()) for text in val[:-1])
    assert without_last - unit < val_bytes <= without_last + len(val[-1].encode())


def write_lines(texts: list[str]) -> bytes:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    Path("a.jsonl").write_bytes(lines)
    return lines


def write_files(texts: list[str]) -> None:
    Path("files").mkdir()
    for number, text in enumerate(texts):
        Path(f"files/{number:06d}.md").write_text(text)


LINES = [text.replace("\n", "") for text in TEXTS]


@pytest.fixture
def sources(standin) -> dict[str, int]:
    """The same texts as sources of every kind; their names, and their sizes in bytes."""
    write_files(TEXTS)
    Path("a.jsonl.gz").write_bytes(gzip.compress(write_lines(TEXTS)))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "a.parquet", row_group_size=70)
    halves = {f"data/train-{n}.parquet": parquet(half) for n, half in enumerate((TEXTS[:200], TEXTS[200:]))}
    standin.put("datasets/some/texts", halves)
    csv = "\n".join(["text", *(f'"{line}"' for line in LINES)]).encode()
    standin.put("datasets/some/rows", {"data/train.csv": csv})
    sizes = {name: Path(name).stat().st_size for name in ("a.jsonl", "a.jsonl.gz", "a.parquet")}
    return sizes | {
        "files": len(LONG.encode()),
        "hf:some/texts": sum(map(len, halves.values())),
        "hf:some/rows": len(csv),
    }


@pytest.mark.parametrize("source", ["files", "a.jsonl", "a.jsonl.gz", "a.parquet", "hf:some/texts", "hf:some/rows"])
def test_val_is_a_fortieth_of_the_source_in_whole_documents(source, sources):
    size, is_streamed_by_datasets = sources[source], source == "hf:some/rows"
    val = val_of(source, LINES if is_streamed_by_datasets else TEXTS, "--shard_size 9000")
    assert_size(val, size / 40, 32 * 300 if is_streamed_by_datasets else size / 200)


def test_files_with_little_text_need_the_size_of_val():
    columns = {"text": TEXTS, "embedding": [os.urandom(5000) for _ in TEXTS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "wide.parquet")
    message = r"about 5.\.\d kB of text in 2\.\d+ MB of files, too little .* such as --val_tokens 1\d{3}$"
    refused("--source wide.parquet", message)
    assert not Path("out").exists()
    assert prepare("wide.parquet", flags="--val_tokens 1000")["shards"][0]["tokens"] >= 1000


@pytest.mark.parametrize("text", [LONG, LONG.replace("\n", " "), "字" * 40_000], ids=["lines", "words", "characters"])
def test_val_ends_before_a_word_of_one_long_text(text):
    Path("a.txt").write_text(text)
    vals, size = set(), len(text.encode())
    for tokenizer in ("gpt2", "crossing"):
        prepare("a.txt", tokenizer, f"--tokenizer {tokenizer}")
        [val], [train] = (texts_of(tokenizer, split) for split in ("val", "train"))
        assert val + train == text
        assert size / 40 <= len(val.encode()) < size / 30
        assert train[0] == (" " if " " in text else "字")
        vals.add(val)
    assert len(vals) == 1


NUMBERS = [f"{number:<40}" for number in range(1000)]


@pytest.mark.parametrize(("source", "texts", "most"), [
    ("files", ["ten bytes\n"] * 40, 1),
    ("a.jsonl", ["words " * 1667, *NUMBERS[:250]], 1),
    ("a.jsonl", [*NUMBERS[:10], "words " * 1667, *NUMBERS], 10),
], ids=["val is exactly a fortieth", "the first line is longer", "a long line is left to training"])  # fmt: skip
def test_val_has_the_first_documents(source, texts, most):
    write_files(texts)
    write_lines(texts)
    assert 1 <= len(val_of(source, texts)) <= most


def test_a_limit_in_tokens_wins():
    write_lines(TEXTS)
    manifest = prepare("a.jsonl", flags="--val_tokens 123")
    assert 123 <= manifest["shards"][0]["tokens"] < 123 + 2 * max(map(len, TEXTS))
    manifest = prepare("a.jsonl", "none", "--val_tokens 0")
    assert [shard["split"] for shard in manifest["shards"]] == ["train"]


def test_val_has_at_most_400_mb(monkeypatch):
    monkeypatch.setattr(prepare_dataset, "VAL_BYTES", 200)
    write_lines(TEXTS)
    assert_size(val_of("a.jsonl", TEXTS), 200, 300)


@pytest.mark.parametrize(("name", "dtype"), [("ids.npy", "uint16"), ("ids.npz", "int64")])
def test_a_fortieth_of_token_ids_is_val_whatever_their_dtype(name, dtype):
    ids = np.arange(4000, dtype=dtype) % 256
    Path(name).write_bytes(npy(ids) if name == "ids.npy" else npz(ids=ids))
    manifest = prepare(name, flags="")
    assert [shard["tokens"] for shard in manifest["shards"]] == pytest.approx([100, 3900], abs=10)
    assert ids_of() == ids.tolist()
