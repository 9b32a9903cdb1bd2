"""Tests of what prepare_dataset.py refuses: in one line, before a large download and before the first shard."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import npy, prepare, refused, write_rows
from standin import CORPUS, TEXTS, corpus, parquet
from test_tokenizer_json import byte_tokenizer

from steadygpt.network import stores

IDS = np.random.default_rng(0).integers(0, 257, 5000)
CORPUS_FILES = corpus()
NUMBERS, PARQUET = parquet(list(range(3000))), parquet(TEXTS)


@pytest.fixture
def inputs(standin, monkeypatch):
    """One of each input, in the working directory and on the Hub."""
    monkeypatch.setattr(stores, "BLOCK_BYTES", 1000)
    for folder in ("empty", "ids", "foreign", "own"):
        Path(folder).mkdir()
    write_rows("docs.jsonl", ["one", "the second one", "third " * 30, "fourth\n", "5"] * 8)
    for name in ("image.png", "empty.txt", "empty.json"):
        Path(name).touch()
    Path("ids/ids.npy").write_bytes(npy(IDS))
    Path("foreign/x_train_000000.npy").touch()
    Path("loop").symlink_to("loop")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 100}), "0.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["b"]}), "1.parquet")
    Path("2.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    Path("own/tokenizer.json").write_text("my own")
    Path("binary.json").write_bytes(b"\xff\xfe")
    Path("begin.json").write_text(byte_tokenizer({"<|begin_of_text|>": 256, "<|end|>": 400}))
    standin.put(CORPUS, CORPUS_FILES)
    standin.put("datasets/some/tests", {"data/test-0.parquet": PARQUET})
    standin.put("datasets/some/gated", {"data/train-0.parquet": PARQUET})
    standin.put("datasets/some/numbers", {"data/train-0.parquet": NUMBERS})
    standin.put("models/some/model", {"config.json": b"{}"})
    standin.put("models/some/gated", {"tokenizer.json": b"{}"})
    standin.gated |= {"datasets/some/gated", "models/some/gated"}
    return standin


DOCS = "--source docs.jsonl"
TEXT_FIELD = "--text_field"
SOURCES = ("hf:NAME", ".jsonl")
BPE = ("258", "16,777,216")
AT_ONCE = [
    ("--source empty", ("--source empty", *SOURCES)),
    ("--source nowhere", ("--source nowhere", *SOURCES)),
    ("--source image.png", ("--source image.png", ".jsonl")),
    ("--source loop", ("--source loop", *SOURCES)),
    (f"--source {'n' * 300}", (f"--source {'n' * 300}", *SOURCES)),
    ("--source '[01].parquet'", ("1.parquet", "'text'", "content", TEXT_FIELD)),
    ("--source '[02].parquet'", ("2.parquet", "Git LFS", "git lfs pull")),
    ("--source nothing://x/y", ("nothing://x/y", "Protocol not known", "s3://...")),
    ("--source ids", ("ids/ids.npy", "token ids; train.py reads", "docs/data.md#token-ids")),
    (f"{DOCS} --text_field body", ("docs.jsonl", "'body'", TEXT_FIELD)),
    (f"{DOCS} --shard_size 1{17 * '0'}", ("--shard_size", "100,000,000,000,000,000", "2,147,483,648")),
    (f"{DOCS} --shard_size 0", ("--shard_size", " 0", "2,147,483,648")),
    (f"{DOCS} --shard-size many", ("--shard_size", "'many'")),
    (f"{DOCS} --name a/b", ("--name ", "'a/b'", ". _ -")),
    (f"{DOCS} --out docs.jsonl", ("docs.jsonl", "File exists")),
    (f"{DOCS} --out loop", ("loop", "File exists")),
    (f"{DOCS} --out .", (DOCS, *SOURCES)),
    (f"{DOCS} --out foreign", ("x_train_000000.npy", "manifest.json", "--out", "foreign")),
    ("--shard_sizes 3", ("'--shard_sizes'", "--shard_size?")),
    ("--dataset X", ("'--dataset'", "--source hf:NAME", "--source FILE")),
    ("'--input=my text.txt'", ("'--input'", "--source FILE")),
    ("my.txt", ("'my.txt'", "--source FILE", "'*.txt'")),
]
OF_THE_HUB = [
    ("--source hf:", ("'hf:'", "NAME@REVISION")),
    ("--source hf:some/corpus:part --text_field txt", ("0.parquet", "'txt'", "id, text", TEXT_FIELD)),
    ("--source hf:some/corpus:nothing", ("hf:some/corpus:nothing", "BuilderConfig 'nothing' not found")),
    ("--source hf:some/tests", ("hf:some/tests", " test")),
    ("--source hf:some/numbers", ("some/numbers", "train-0.parquet, row 0", " int", TEXT_FIELD)),
    ("--source hf:some/gated", ("some/gated", "`hf auth login`", "HF_TOKEN")),
]
LATER = [
    ("--source empty.txt", ("empty.txt", " 0 ")),
    (f"{DOCS} --tokenizer hf:some/model", ("some/model/tokenizer.json", "Hugging Face Hub")),
    (f"{DOCS} --tokenizer hf:some/none", ("some/none", "HF_TOKEN")),
    (f"{DOCS} --tokenizer hf:some/gated", ("some/gated/tokenizer.json", "HF_TOKEN")),
    (f"{DOCS} --tokenizer hf:some/model@", ("'some/model@'", "NAME@REVISION")),
    (f"{DOCS} --tokenizer none.json", ("none.json", "No such file")),
    (f"{DOCS} --tokenizer binary.json", ("binary.json", "byte 0xff")),
    (f"{DOCS} --tokenizer empty.json", ("empty.json", "tokenizer.json")),
    (f"{DOCS} --tokenizer begin.json", ("'<|endoftext|>'", "<|begin_of_text|> <|end|>", "--document_token")),
    (f"{DOCS} --tokenizer begin.json --document_token a", ("'a'", "<|begin_of_text|> <|end|>", "--document_token")),
    (f"{DOCS} --tokenizer bpe:257", ("--tokenizer bpe:257", *BPE)),
    (f"{DOCS} --tokenizer bpe:16777217", ("--tokenizer bpe:16777217", *BPE)),
    (f"{DOCS} --tokenizer bpe:many", ("--tokenizer bpe:many", *BPE)),
    (f"{DOCS} --tokenizer bpe:5000", ("docs.jsonl", "--tokenizer bpe:275", "--tokenizer_bytes")),
    (f"{DOCS} --tokenizer bpe:300 --tokenizer_bytes 9", ("docs.jsonl", "--tokenizer bpe:263", "--tokenizer_bytes")),
    (f"{DOCS} --tokenizer bpe:300 --document_token <s>", ("--document_token", "'<s>'", "bpe:300", "<|endoftext|>")),
    (f"{DOCS} --tokenizer bpe:260 --out own", ("own/tokenizer.json", "--tokenizer bpe:260")),
    (f"{DOCS} --tokenizer_bytes 9", ("--tokenizer_bytes", "--tokenizer ", " bytes")),
    ("--source empty.txt --tokenizer bpe:300", ("empty.txt",)),
]


@pytest.mark.parametrize(("flags", "facts"), [*AT_ONCE, *OF_THE_HUB])
def test_a_mistake_is_one_line_before_anything_large_is_read_or_written(flags, facts, inputs):
    refused(flags, *facts)
    assert not [path for path in Path("out").glob("*") if path.name != ".lock"]
    assert inputs.sent("GET .*parquet") <= 2**17  # where a Parquet file says what it holds


@pytest.mark.parametrize(("flags", "facts"), LATER)
def test_a_mistake_that_is_found_later_is_one_line_and_leaves_no_file(flags, facts, inputs):
    refused(flags, *facts)
    assert {path.name for path in Path("out").glob("*")} <= {".lock"}
    assert Path("own/tokenizer.json").read_text() == "my own"


def test_mistakes_leave_the_folder_usable(inputs):
    for flags, facts in LATER[:3]:
        refused(flags, *facts)
    assert prepare("docs.jsonl")["complete"]
    refused(f"{DOCS} --tokenizer byte", "'byte'", " bytes?")  # not: empty the folder


def test_training_needs_the_library(inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(f"{DOCS} --tokenizer bpe:300", "pip install tokenizers")


NOT_TEXT = ("NUL", "UTF-8")
ROW = json.dumps({"text": "a"}).encode()
ZSTD = pyarrow.compress(ROW * 9999, "zstd", asbytes=True)


@pytest.mark.parametrize(("name", "content", "facts"), [
    ("a.jsonl", ROW + b"\n" + b"\0" * 100, NOT_TEXT),
    ("a.txt", b"one\0" + b"word " * 99, NOT_TEXT),
    ("a.txt", bytes(range(128, 256)) * 99, NOT_TEXT),
    ("a.md", "по-русски ".encode("cp1251") * 99, NOT_TEXT),
    ("a.jsonl.gz", b"no gzip", ("a.jsonl.gz, byte 0", "JSON")),
    ("a.jsonl.zst", ZSTD[:-9], ("OSError: Truncated compressed stream",)),
])  # fmt: skip
def test_an_unusable_file_is_named(name, content, facts, tmp_path):
    Path(name).write_bytes(content)
    refused(f"--source {name}", name, *facts)
    assert not list(tmp_path.rglob("out/*.npy"))
