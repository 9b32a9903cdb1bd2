"""Tests of prepare_dataset.py: what it writes, which files it reads, and what it reports."""

import codecs
import errno
import gzip
import json
import os
import re
from functools import partial
from operator import itemgetter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import refusal
from prepared import (
    files_of,
    ids_expected,
    ids_of,
    prepare,
    refused,
    small_units,  # noqa: F401
    write_rows,
)
from standin import CARD, parquet
from test_tokenizer_json import byte_tokenizer

import prepare_dataset
from steadygpt.data.shards import ShardSet
from steadygpt.data.tokenizer import END_OF_TEXT
from steadygpt.prepare import writer
from steadygpt.prepare.manifest import Manifest
from steadygpt.prepare.sources import find_source

TEXTS = ["one", "the second one", "third " * 30, "fourth\n", f"5 {END_OF_TEXT}"] * 8


@pytest.fixture(autouse=True)
def docs(folder) -> None:
    write_rows("docs.jsonl", TEXTS)


def write(files: dict[str, str | bytes]) -> None:
    """Write path -> content, and the folders."""
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


# ---------------------------------------------------------------------------------------------------------------------
# output


def test_shards_hold_every_document_after_end_of_text_and_are_not_written_twice(capsys):
    manifest = prepare("docs.jsonl", flags="--shard_size 220 --val_share 0.1")
    assert sorted(ids_of()) == sorted(ids_expected(TEXTS))
    assert (manifest["tokens"], manifest["documents"]) == (len(ids_expected(TEXTS)), len(TEXTS))
    shards = sorted(manifest["shards"], key=itemgetter("file"))
    *train, val = [(shard["file"], shard["split"], shard["tokens"]) for shard in shards]
    assert val[:2] == ("docs_val_000000.npy", "val") and 120 <= val[2] < 200
    assert train[0][:2] == ("docs_train_000000.npy", "train")
    assert max(tokens for *_, tokens in train) <= 220 < 2 * min(tokens for *_, tokens in train)
    for split in ("train", "val"):
        ShardSet.find("", "out", split).check(manifest["vocab_size"])
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("[!.]*")}
    capsys.readouterr()
    prepare("docs.jsonl", flags="--shard_size 220 --val_share 0.1")
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("[!.]*")} == before
    complete, size, read, found, next_command = capsys.readouterr().out.splitlines()
    assert complete == "out: already complete"
    assert size == "read 2.28 kB"
    assert read == "40 documents, 8 <|endoftext|> inside texts encoded as text, 1,792 tokens"
    assert re.match(r"1 val shard \(\d+\.\d% of the tokens\) and 8 train shards in out \(", found)
    folders = "--data_dir out --context_length 128 --checkpoint_dir checkpoints/out"
    assert next_command == f"next: python train.py --config quickstart {folders}"


def test_a_large_vocabulary_is_stored_as_uint32():
    write({"large.json": byte_tokenizer({END_OF_TEXT: 69999}, first_id=60000), "a.txt": "abc"})
    manifest = prepare("a.txt", flags="--val_share 0 --tokenizer large.json")
    assert manifest["dtype"] == "uint32"
    assert ids_of() == [69999, 60097, 60098, 60099]


def test_shards_of_a_different_preparation_are_refused_and_kept():
    prepare("docs.jsonl", flags="")
    before = files_of("out")
    refused("--source docs.jsonl --shard_size 100", "out: ", "--shard_size 100000000, and now 100.", "--out")
    refused("--source docs.jsonl --text_field body", "out: ", "text_field 'text'", "'body'", "--out")
    write_rows("docs.jsonl", [*TEXTS, "more"])
    refused("--source docs.jsonl", "out: ", " 1 ", "docs.jsonl", "--out")
    assert files_of("out") == before


@pytest.mark.parametrize("change", [
    {"shards": [{"file": "../a.npy", "split": "val", "tokens": 1, "sha256": ""}]}, {"tokens": -1}, {"tokens": "9"},
])  # fmt: skip
def test_a_manifest_with_other_values_is_refused(change):
    prepare("docs.jsonl")
    path = Path("out/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused("--source docs.jsonl", f"{path}: ", f"`$.{min(change)}", "--out")


# ---------------------------------------------------------------------------------------------------------------------
# files

FORMAT_TEXTS = ["first text", "zweiter Text: äöü", "third\r\ntext"]
LINES = "".join(json.dumps({"body": text}) + "\n" for text in FORMAT_TEXTS).encode()
zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)


def each(names: str, encode=str.encode) -> dict[str, bytes]:
    """Return one file for each text."""
    return {names.format("below" if n == 0 else "zz", n): encode(text) for n, text in enumerate(FORMAT_TEXTS)}


@pytest.mark.parametrize(("source", "files"), [
    ("a.jsonl", {"a.jsonl": LINES}),
    ("a.jsonl.gz", {"a.jsonl.gz": gzip.compress(LINES)}),
    ("a.json.gz", {"a.json.gz": gzip.compress(LINES)}),
    ("packed_without_its_suffix.jsonl", {"packed_without_its_suffix.jsonl": gzip.compress(LINES)}),
    ("a.ndjson.zst", {"a.ndjson.zst": zstd(LINES)}),
    ("a.json", {"a.json": LINES}),
    ("a.ndjson", {"a.ndjson": LINES.decode().encode("utf-16")}),
    ("a.parquet", {"a.parquet": parquet(FORMAT_TEXTS, "body")}),
    ("in", each("in/{}/{}.txt")),
    ("in/**/*.md", each("in/{}/{}.md")),
    ("in", each("in/{}/{}.py")),
    # as Windows and others write text
    ("in*.gz", each("in{}{}.txt.gz", lambda text: gzip.compress(text.encode("utf-16")))),
    ("in*", each("in{}{}.txt", lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"))),
    ("in*", each("in{}{}.md.zst", lambda text: zstd(text.encode("utf-32")))),
], ids=lambda value: value if isinstance(value, str) else min(value))  # fmt: skip
def test_every_format_gives_the_same_tokens(source, files):
    write(files)
    prepare(source, flags="--text_field body --val_share 0")
    assert ids_of() == ids_expected(FORMAT_TEXTS)


@pytest.mark.storm  # lists all packages of this Python
def test_stdlib_is_pythons_library_without_packages_and_tests():
    files = [Path(file.path) for file in find_source("stdlib").files]
    assert {"argparse.py", "decoder.py"} <= {file.name for file in files}
    assert len(files) > 300
    assert not [file for file in files if {"site-packages", "test", "tests"} & set(file.parts[-3:])]


@pytest.mark.parametrize("names", [
    ("data/train-0-of-1.parquet", "data/test-0-of-1.parquet"), ("train/0.parquet", "validation/0.parquet"),
    ("Train.parquet", "Dev.parquet"),
])  # fmt: skip
def test_a_folder_with_files_for_tests_is_refused_with_a_glob_for_those_for_training(names):
    write({f"tests/copy/{name}": parquet([name] * 40) for name in names} | {"tests/copy/README.md": CARD})
    with refusal("--source tests/copy", *(f"tests/copy/{name}" for name in names)) as raised:
        prepare("tests/copy")
    prepare(re.search(r" --source '(.*?)'", str(raised.value))[1])
    assert ids_of() == ids_expected([names[0]] * 40)


def test_a_folder_of_one_split_or_of_code_is_read():
    write({f"copy/data/train-{n}.jsonl": LINES for n in range(2)} | {"code/train.py": "a", "code/test.py": "b"})
    assert len(find_source("code").files) == 2
    Path("copy/data/train-1.jsonl").write_bytes(LINES + LINES)
    assert len(find_source("copy").files) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_field_within_a_field_is_named_with_a_dot(suffix):
    rows = [{"id": 1, "meta": {"text": "one", "n": 1}}, {"id": 2, "meta": None}, {"id": 3, "meta": {"text": "two"}}]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    manifest = prepare(f"a.{suffix}", flags="--text_field meta.text --val_share 0")
    assert ids_of() == ids_expected(["one", "two"])
    assert manifest["skipped"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# reports


def test_skipped_rows_are_counted_and_named(capsys):
    lines = [
        '{"text": "good \\udcff"}', "{broken", '{"text": ""}', '{"text": 3}', '{"text": null}', '{"other": "x"}', "",
        '{"text": "end"}',
    ]  # fmt: skip
    long_row = b'{"text": "%s"}' % (b"a long document \xff " * 200)
    write({"in/a.jsonl": "\n".join(lines) + "\n", "in/b.jsonl": long_row, "in/c.jsonl": ""})
    write({"in/d.jsonl": '{"text": "more"}\n' * 9})
    manifest = prepare("in")
    assert ids_of() == ids_expected(["good \ufffd", "end", "a long document \ufffd " * 200, *["more"] * 9])
    counts = [manifest[name] for name in ("documents", "repaired", "skipped", "empty")]
    assert counts == [12, 201, 4, 1]
    captured = capsys.readouterr()
    assert "a.jsonl, byte 24: not JSON" in captured.err and "no text" not in captured.err
    assert "a.jsonl, byte 45: int, not a string" in captured.err
    assert "a.jsonl, byte 57: null, not a string" in captured.err
    assert "a.jsonl, byte 72: no field 'text', found other; set --text_field" in captured.err
    assert "12 documents, 1 row without text, 4 rows skipped, 201 invalid characters replaced" in captured.out


@pytest.mark.parametrize(("bad", "is_converted"), [
    ('{"text": "a" b}', False), ('{"text": "a", }', False), ('{"text": "a"} {"text": "b"}', True), ('{"text":', True),
])  # fmt: skip
def test_only_rows_that_are_not_one_a_line_are_left_to_the_converter(bad, is_converted, capsys):
    write({"in/a.jsonl": "\n".join([*['{"text": "x"}'] * 9, bad, ""])})
    assert prepare("in")["skipped"] == 1
    said = capsys.readouterr().err
    assert "a.jsonl, byte 126: " in said
    assert ("datasets.load_dataset" in said) == is_converted


def test_a_first_line_without_text_is_skipped_in_later_files():
    write({"in/0.jsonl": '{"text": "a"}\n{"text": "b"}\n', "in/1.jsonl": '{"meta": 1}\n{"text": "b"}\n'})
    assert prepare("in")["skipped"] == 1
    assert ids_of() == ids_expected(["a", "b", "b"])


def test_texts_that_spell_the_document_token_are_counted_and_can_be_split(capsys):
    stories = ["One day\n", "\ntwo 'so'\n", "\nthree\n"]
    write({"in/0.txt": "no such text", "in/a.txt": END_OF_TEXT.join(stories)})
    assert prepare("in")["spelled"] == {END_OF_TEXT: 2}
    said = capsys.readouterr()
    assert "in/a.txt: contains <|endoftext|>, which is encoded as text. If it separates documents, use" in said.err
    assert "2 documents, 2 <|endoftext|> inside texts encoded as text, " in said.out
    separator = re.search("use (--separator '.*')", said.err)[1]
    prepare("in", "split", f"{separator} --val_share 0")
    assert ids_of("split") == ids_expected(["no such text", *stories])


def test_progress_may_be_disabled(monkeypatch, capsys):
    """As by TQDM_DISABLE=1, with which no time passes."""
    monkeypatch.setattr(prepare_dataset, "ProgressBar", partial(prepare_dataset.ProgressBar, disable=True))
    prepare("docs.jsonl")
    assert "tokenizing" not in capsys.readouterr().err


def test_a_full_disk_is_reported_with_path_and_bytes(monkeypatch):
    def full(file, arr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer.np, "save", full)
        with refusal("out/.docs_train_000000.npy.tmp: No space left on device") as raised:
            prepare("docs.jsonl")
    assert re.search(r"[\d.,]+ [GT]B", str(raised.value))
    assert prepare("docs.jsonl", flags="")["complete"]


@pytest.mark.parametrize("change", ["append", "shorten", "overwrite"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.usefixtures("small_units")
def test_a_file_that_changes_while_it_is_read_is_named(monkeypatch, kind, change, calls):
    texts = [f"{number} {'word ' * 90}" for number in range(30)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    contents = {"jsonl": lines, "jsonl.gz": gzip.compress(lines, 0), "parquet": parquet(texts), "txt": lines}
    path = Path(f"a.{kind}")
    path.write_bytes(contents[kind])
    count = Manifest.count
    countdown = [calls]

    def count_and_change(manifest, unit, encoded):
        countdown[0] -= 1
        if countdown[0] == 0:
            content = path.read_bytes()
            changed = {"append": content + content[-400:], "shorten": content[:-200], "overwrite": content}
            path.write_bytes(changed[change])
        return count(manifest, unit, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "count", count_and_change)
        refused(f"--source a.{kind} --val_share 0", f"a.{kind}: ")
    assert not Path("out/manifest.json").exists() or not json.loads(Path("out/manifest.json").read_text())["complete"]
