"""Tests of what prepare_dataset.py refuses: in one line, before a large download and before the first shard."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import npy, npz, prepare, refused, write_rows
from standin import CORPUS, TEXTS, corpus, parquet
from test_tokenizer_json import byte_tokenizer

from steadygpt.network import stores

IDS = np.random.default_rng(0).integers(0, 257, 5000)
LLMC = np.array([20240520, 1, len(IDS)] + [0] * 253, "<i4").tobytes() + IDS.astype("<u2").tobytes()
CORPUS_FILES = corpus()
NUMBERS, PARQUET = parquet(list(range(3000))), parquet(TEXTS)
BAD = np.array([*range(200), 257, 3])


@pytest.fixture
def inputs(standin, tmp_path, monkeypatch):
    """One of each input, in the working directory and on the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 1000)
    for folder in ("empty", "ids", "both", "foreign", "own"):
        Path(folder).mkdir()
    write_rows("docs.jsonl", ["one", "the second one", "third " * 30, "fourth\n", "5"] * 8)
    for name in ("image.png", "empty.txt", "empty.json", "both/b.txt"):
        Path(name).touch()
    Path("ids/ids.npy").write_bytes(npy(IDS))
    Path("both/a.npz").write_bytes(npz(ids=IDS))
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
SET_FIELD = "set --text_field to the field with the text"
NO_DOCUMENT_TOKEN = r"no special token '<\|endoftext\|>'; found"
AT_ONCE = [
    ("--source empty", "--source empty: empty, but for .* expected a file"),
    ("--source nowhere", "no such file; expected a file, a folder, a glob, .*; files of .txt"),
    ("--source image.png", "found image.png: of other types; expected files of"),
    ("--source loop", "--source loop: no such file"),
    (f"--source {'n' * 300}", "n: no such file"),
    ("--source '[01].parquet'", f"1.parquet: no field 'text', found content; {SET_FIELD}"),
    ("--source '[02].parquet'", "2.parquet: found a Git LFS pointer, expected the file. Try: git lfs pull"),
    ("--source nothing://x/y", "nothing://x/y: .*expected a URL that fsspec knows"),
    ("--source both", "found text, such as both/b.txt, and token ids, such as both/a.npz; expected only one kind"),
    ("--source ids --tokenizer ''", "ids.npy: holds token ids; name the tokenizer that wrote them with --tokenizer"),
    (f"{DOCS} --text_field body", f"no field 'body', found text; {SET_FIELD}"),
    (f"{DOCS} --shard_size 1{17 * '0'}", "--shard_size is 1.*; expected 1 to 2,147,483,648"),
    (f"{DOCS} --shard_size 0", "--shard_size is 0; expected 1 to"),
    (f"{DOCS} --shard-size many", "argument --shard_size: is 'many'; expected an integer"),
    (f"{DOCS} --name a/b", "--name is 'a/b'; expected only letters"),
    (
        f"{DOCS} --out docs.jsonl",
        "cannot write to docs.jsonl: File exists; expected a writable folder",
    ),
    (f"{DOCS} --out loop", "loop"),
    (f"{DOCS} --out .", "docs.jsonl: no such file"),
    (f"{DOCS} --out foreign", r"x_train_000000\.npy but no manifest\.json"),
    ("--shard_sizes 3", "unknown argument '--shard_sizes'; did you mean --shard_size?"),
    ("--dataset X", "unknown argument '--dataset'; use --source hf:NAME for the Hugging Face Hub, or --source FILE"),
    ("'--input=my text.txt'", "unknown argument '--input'; use --source FILE"),
    ("my.txt", r"unknown argument 'my.txt'; use --source FILE; quote a glob: '\*.txt'"),
]
OF_THE_HUB = [
    ("--source hf:", "'hf:' is incomplete; expected NAME or NAME@REVISION"),
    ("--source hf:some/corpus:part --text_field txt", f"0.parquet: no field 'txt', found id, text; {SET_FIELD}"),
    ("--source hf:some/corpus:nothing", "hf:some/corpus:nothing: .*BuilderConfig 'nothing' not found"),
    ("--source hf:some/tests", "hf:some/tests: no split 'train', found test"),
    (
        "--source hf:some/numbers",
        "int, not a string; set --text_field",
    ),
    ("--source hf:some/gated", "gated; accept its conditions .* run `hf auth login` or set HF_TOKEN"),
]
LATER = [
    ("--source empty.txt", "empty.txt: found nothing .*; expected text"),
    (f"{DOCS} --tokenizer hf:some/model", "some/model/tokenizer.json: no such file on the Hugging Face Hub"),
    (f"{DOCS} --tokenizer hf:some/none", "some/none: not found on the Hugging Face Hub"),
    (f"{DOCS} --tokenizer hf:some/gated", "gated; accept its conditions"),
    (f"{DOCS} --tokenizer hf:some/model@", "'some/model@' is incomplete; expected NAME"),
    (f"{DOCS} --tokenizer none.json", "none.json: cannot be read"),
    (f"{DOCS} --tokenizer binary.json", "binary.json: cannot be read"),
    (f"{DOCS} --tokenizer empty.json", "empty.json: empty; expected a tokenizer.json"),
    (f"{DOCS} --tokenizer begin.json", rf"{NO_DOCUMENT_TOKEN} <\|begin_of_text\|> <\|end\|>; name .* --document_token"),
    (f"{DOCS} --tokenizer begin.json --document_token a", "no special token 'a'; found"),
    (f"{DOCS} --tokenizer bpe:257", r"expected bpe:N, such as bpe:32768, with N from 258"),
    (f"{DOCS} --tokenizer bpe:16777217", "to 16,777,216"),
    (f"{DOCS} --tokenizer bpe:many", "expected bpe:N"),
    (
        f"{DOCS} --tokenizer bpe:5000",
        r"docs.jsonl has text for \d+ tokens only; try --tokenizer bpe",
    ),
    (f"{DOCS} --tokenizer bpe:300 --tokenizer_bytes 9", "more text or a larger --tokenizer_bytes"),
    (f"{DOCS} --tokenizer bpe:300 --document_token <s>", "but bpe:300 has only <.endoftext.>; drop it"),
    (f"{DOCS} --tokenizer bpe:260 --out own", "own/tokenizer.json: not the file of --tokenizer bpe:260"),
    (f"{DOCS} --tokenizer_bytes 9", "is for --tokenizer bpe:N"),
    ("--source ids --tokenizer bpe:300", "ids.npy: holds token ids"),
    ("--source empty.txt --tokenizer bpe:300", "empty.txt: no text"),
]


@pytest.mark.parametrize(("flags", "message"), [*AT_ONCE, *OF_THE_HUB])
def test_a_mistake_is_one_line_before_anything_large_is_read_or_written(flags, message, inputs):
    refused(flags, message)
    assert not [path for path in Path("out").glob("*") if path.name != ".lock"]
    assert inputs.sent("GET .*parquet") <= 2**17  # where a Parquet file says what it holds


@pytest.mark.parametrize(("flags", "message"), LATER)
def test_a_mistake_that_is_found_later_is_one_line_and_leaves_no_file(flags, message, inputs):
    refused(flags, message)
    assert {path.name for path in Path("out").glob("*")} <= {".lock"}
    assert Path("own/tokenizer.json").read_text() == "my own"


def test_mistakes_leave_the_folder_usable(inputs):
    for flags, message in LATER[:3]:
        refused(flags, message)
    assert prepare("docs.jsonl")["complete"]
    refused(f"{DOCS} --tokenizer byte", "unknown tokenizer 'byte'; did you mean bytes?")  # not: empty the folder


def test_training_needs_the_library(inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(f"{DOCS} --tokenizer bpe:300", "needs tokenizers; pip install tokenizers")


NOT_TEXT = "found a NUL byte or much that is not UTF-8; expected text; "
ROW = json.dumps({"text": "a"}).encode()
ZSTD = pyarrow.compress(ROW * 9999, "zstd", asbytes=True)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", ROW + b"\n" + b"\0" * 100, f"a.jsonl: {NOT_TEXT}"),
    ("a.txt", b"one\0" + b"word " * 99, f"a.txt: {NOT_TEXT}"),
    ("a.txt", bytes(range(128, 256)) * 99, f"a.txt: {NOT_TEXT}"),
    ("a.md", "по-русски ".encode("cp1251") * 99, f"a.md: {NOT_TEXT}"),
    ("a.jsonl.gz", b"no gzip", "a.jsonl.gz, byte 0: not JSON"),
    ("a.jsonl.zst", ZSTD[:-9], "a.jsonl.zst: cannot be read, OSError: Truncated compressed stream"),
    # token ids
    ("a.npz", npz(ids=BAD), "a.npz: holds token id 257, outside the vocabulary of 257; name the tokenizer"),
    ("a.npz", npz(ids=BAD - 1 - 2 * BAD), "a.npz: holds token id -1, outside the vocabulary"),
    ("a.bin", BAD.astype("<u2").tobytes(), "a.bin: holds token id 257, outside"),
    ("a.bin", b"123", "a.bin: 3 bytes is not a whole number of uint16 token ids"),
    ("a.bin", LLMC[:-2], "a.bin: cannot be read, ValueError: the file ends before its array"),
    ("a.npz", npz(ids=IDS / 2), r"a.npz: cannot be read, .*holds float64 of shape \(5000,\); expected one row or"),
    ("a.npz", npz(ids=IDS.reshape(5, 10, 100)), r"holds int64 of shape \(5, 10, 100\); expected one row or rows"),
    ("a.npz", npz(ids=np.asfortranarray(IDS.reshape(5, 1000))), "in Fortran order"),
    ("a.npz", npz(a=IDS, b=IDS), "found a, b; expected one array of token ids, or its name as --text_field"),
    ("a.npz", npz(ids=IDS)[:-100], "a.npz: cannot be read, BadZipFile"),
    ("a.npy", npy(IDS)[:-100], "a.npy: cannot be read, ValueError: the file ends before its array"),
    ("a.npy", npy(IDS[:1]).replace(b"(1,), }   ", b"(True,), }"), r"holds int64 of shape \(True,\)"),
    ("a.npy", npy(IDS).replace(b"(5000,), }  ", b"(-2, -3), } "), r"holds int64 of shape \(-2, -3\)"),
    ("a.npy", npy(IDS).replace(b"(5000,), }" + b" " * 20, b"(4294967296, 4294967296), }   "), "ends before its"),
    ("a.npy", IDS.astype("<u2").tobytes(), "a.npy: not a .npy file; .* If it holds only ids, name it .bin"),
    ("a.npy", npy(np.zeros(5, [("id", "<i4"), ("weight", "<f4")])), r"holds \[\('id'.* of shape \(5,\)"),
])  # fmt: skip
def test_an_unusable_file_is_named(name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    refused(f"--source {name}", message)
    assert not list(tmp_path.rglob("out/*.npy"))
