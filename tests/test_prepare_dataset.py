"""Tests of prepare_dataset.py: output, resume, and reports of unusable input."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
from itertools import count, pairwise

import numpy as np
import pytest
import requests
import tiktoken
from conftest import REPO
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_dataset
from prepare_dataset import Piece, Position, encode, encode_all, split_text
from steadygpt import sources, tokenizer
from steadygpt.cli import UserError
from steadygpt.shards import check_shards, find_shards, read_manifest
from steadygpt.tokenizer import END_OF_TEXT, get_tokenizer

END = 256  # <|endoftext|> of the byte tokenizer
TEXTS = ["one", "the second one", "third " * 30, "fourth\n", "5"] * 8


def prepare(source, out="out", *more: str, tokens="bytes") -> dict:
    """Run the command in this process and return the manifest."""
    assert prepare_dataset.main(["--source", str(source), "--tokenizer", tokens, "--out", str(out), *more]) == 0
    return read_manifest(prepare_dataset.Path(out))


def refused(*argv: str, match: str) -> None:
    with pytest.raises(UserError, match=match) as raised:
        prepare_dataset.main(["--tokenizer", "bytes", *argv])
    assert "\n" not in str(raised.value)


def ids_of(folder) -> list[int]:
    """Return all tokens of a folder's shards, val before train."""
    return [int(token) for path in sorted(folder.glob("*.npy"), key=lambda p: p.stem[-6:]) for token in np.load(path)]


def ids_expected(texts) -> list[int]:
    return [token for text in texts for token in (END, *text.encode())]


def files_of(folder) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != ".lock"}


@pytest.fixture
def jsonl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------------
# output


def test_shards_hold_every_document_after_end_of_text(jsonl):
    manifest = prepare("docs.jsonl", "out", "--shard_size", "100", "--val_tokens", "150")
    assert ids_of(jsonl / "out") == ids_expected(TEXTS)
    assert (manifest["tokens"], manifest["documents"]) == (len(ids_expected(TEXTS)), len(TEXTS))
    assert [(s["split"], s["tokens"]) for s in manifest["shards"][:4]] == [
        ("val", 100), ("val", 50), ("train", 100), ("train", 100),
    ]  # fmt: skip
    assert [s["file"] for s in manifest["shards"][1:3]] == ["docs_val_000001.npy", "docs_train_000002.npy"]


def test_the_loader_accepts_the_shards(jsonl):
    manifest = prepare("docs.jsonl")
    shards = find_shards(jsonl / "out", "train", manifest) + find_shards(jsonl / "out", "val", manifest)
    check_shards(shards, manifest, manifest["vocab_size"])
    assert sum(shard.num_tokens for shard in shards) == manifest["tokens"]


def test_shards_are_the_same_for_any_number_of_workers(jsonl, monkeypatch):
    monkeypatch.setattr(prepare_dataset, "BATCH_CHARS", 200)  # many batches
    for workers in "123":
        prepare("docs.jsonl", f"out{workers}", "--num_workers", workers, "--shard_size", "333", "--val_tokens", "10")
    assert files_of(jsonl / "out1") == files_of(jsonl / "out2") == files_of(jsonl / "out3")


def test_every_local_format_gives_the_same_tokens(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    texts = ["first text", "zweiter Text: äöü", "third\r\ntext"]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    for name in ("b.jsonl.gz", "c.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "other": [1, 2, 3]}), tmp_path / "d.parquet")
    for suffix in ("txt", "md", "py"):
        for number, text in enumerate(texts):
            path = tmp_path / suffix / ("below" if number == 0 else "zz") / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    for source in ("a.jsonl", "b.jsonl.gz", "c.json.gz", "d.parquet", "txt", "md/**/*.md", "py"):
        out = f"out-{source[:2].rstrip('.')}"
        prepare(source, out, "--text_field", "body", "--val_tokens", "5")
        assert ids_of(tmp_path / out) == ids_expected(texts), source


def test_stdlib_is_pythons_library_without_packages_and_tests():
    files = sources.find_files("stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "decoder.py"} <= names
    assert len(files) > 300
    assert not [file for file in files if {"site-packages", "test", "tests"} & set(file.parts[-3:])]


def test_hub_data_sets_are_read_or_streamed(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        dataset = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
        return dataset.to_iterable_dataset() if options["streaming"] else dataset

    monkeypatch.setattr(requests, "head", lambda *args, **options: None)  # the Hub responds
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare("hf:some/corpus:part", "out", "--val_tokens", "7")
    prepare("hf:some/corpus:part", "streamed", "--val_tokens", "7", "--streaming")
    assert ids_of(tmp_path / "out") == ids_of(tmp_path / "streamed") == ids_expected(TEXTS)
    assert asked[0] == (("some/corpus", "part"), {"split": "train", "streaming": False})
    prepare_dataset.main(["--tokenizer", "bytes", "--val_tokens", "9", "--shard_size", "100"])
    assert asked[-1][0] == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert (tmp_path / "data/edu_fineweb10B/edufineweb_val_000000.npy").exists()

    def unreachable(*args, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    refused("--source", "hf:some/other", "--out", "x", match="hf:some/other: cannot be read.*network")


def test_end_of_text_in_a_document_is_encoded_as_text(tmp_path):
    (tmp_path / "a.txt").write_text(f"before {END_OF_TEXT} after")
    prepare(tmp_path / "a.txt", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected([f"before {END_OF_TEXT} after"])


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path, monkeypatch):
    large = tiktoken.Encoding(
        "large",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([byte]): 60000 + byte for byte in range(256)},
        special_tokens={END_OF_TEXT: 69999},
    )
    monkeypatch.setattr(prepare_dataset, "get_tokenizer", lambda name: large)
    (tmp_path / "a.txt").write_text("abc")
    manifest = prepare(tmp_path / "a.txt", tmp_path / "out", "--val_tokens", "1", tokens="large")
    assert manifest["dtype"] == "uint32"
    assert ids_of(tmp_path / "out") == [69999, 60097, 60098, 60099]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@given(st.text(st.sampled_from("ab1 \n\t.'é你"), max_size=200), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_pieces_of_a_document_have_the_ids_of_the_whole(name, text, length):
    if name == "gpt2" and tokenizer._offline_gpt2_folder() is None:
        pytest.skip("the extra with GPT-2's vocabulary is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_dataset, "PIECE_CHARS", length)
        pieces = list(split_text(io.StringIO(text, newline="")))
    assert "".join(pieces) == text
    encoding = get_tokenizer(name)
    # A piece without the end of a word is cut anywhere, and its ids may differ.
    if all(piece[-1:].strip() and after[:1] == " " for piece, after in pairwise(pieces)):
        assert [i for piece in pieces for i in encoding.encode_ordinary(piece)] == encoding.encode_ordinary(text)


# ---------------------------------------------------------------------------------------------------------------------
# an output folder that is not empty


def test_a_complete_preparation_is_not_repeated(jsonl, capsys):
    prepare("docs.jsonl")
    before = {path: path.stat().st_mtime_ns for path in (jsonl / "out").iterdir()}
    prepare("docs.jsonl")
    assert {path: path.stat().st_mtime_ns for path in (jsonl / "out").iterdir()} == before
    assert "out: already complete" in capsys.readouterr().out


def test_shards_of_a_different_preparation_are_refused_and_kept(jsonl):
    prepare("docs.jsonl")
    before = files_of(jsonl / "out")
    same = ("--source", "docs.jsonl", "--out", "out")
    refused(
        *same,
        "--shard_size",
        "100",
        match="out: prepared with shard_size 100000000, but now it is 100; use a different --out",
    )
    refused(
        "--source",
        "docs.jsonl",
        "--out",
        "out",
        "--text_field",
        "body",
        match="text_field 'text', but now it is 'body'",
    )
    with open("docs.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    refused(*same, match="prepared with files")
    assert files_of(jsonl / "out") == before
    (jsonl / "foreign").mkdir()
    np.save("foreign/x_train_000000.npy", np.zeros(3, np.uint16))
    refused("--source", "docs.jsonl", "--out", "foreign", match=r"x_train_000000\.npy but no manifest\.json")


# ---------------------------------------------------------------------------------------------------------------------
# unusable input


def test_skipped_rows_are_counted_and_named(tmp_path, capsys):
    lines = ['{"text": "good"}', "{broken", '{"text": ""}', '{"text": 3}', '{"other": "x"}', "", '{"text": "end"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["good", "end"])
    assert (manifest["documents"], sum(manifest["skipped"].values())) == (2, 5)
    assert {"no text", "broken JSON", "blank line"} < manifest["skipped"].keys()
    captured = capsys.readouterr()
    assert "a.jsonl:2: broken JSON" in captured.err
    assert "2 documents" in captured.out
    assert "skipped (broken JSON)" in captured.out


def test_invalid_utf8_is_repaired_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff\xfe text")
    manifest = prepare(tmp_path / "a.txt", tmp_path / "out", "--val_tokens", "1")
    assert manifest["repaired"] == 1
    assert bytes(ids_of(tmp_path / "out")[1:]).decode() == "good \ufffd\ufffd text"


def test_mistakes_are_reported_in_one_line(jsonl):
    (jsonl / "image.png").write_bytes(b"")
    (jsonl / "empty.txt").write_bytes(b"")
    (jsonl / "broken.jsonl.gz").write_bytes(b"no gzip")
    for argv, match in [
        (["--source", "nowhere"], "no such file; expected .txt"),
        (["--source", "image.png"], "1 files of other kinds"),
        (
            ["--source", "docs.jsonl", "--text_field", "body"],
            "no field 'body'; found text; name the text with --text_field",
        ),
        (["--source", "docs.jsonl", "--val_tokens", "1000000"], "leaves none for train; try --val_tokens"),
        (["--source", "broken.jsonl.gz"], "broken.jsonl.gz: cannot be read"),
        (
            ["--source", "docs.jsonl", "--shard_size", "1" + 17 * "0"],
            "--shard_size is 1.*; expected at most 2,147,483,648",
        ),
        (["--source", "empty.txt"], "0 tokens.*try more text"),
        (["--source", "docs.jsonl", "--shard_size", "0"], "--shard_size is 0; expected at least 1"),
        (["--source", "docs.jsonl", "--shard-size", "many"], "argument --shard_size: invalid int value: 'many'"),
        (["--source", "docs.jsonl", "--name", "a/b"], "--name is 'a/b'; expected only letters"),
        (["--shard_sizes", "3"], "unknown argument '--shard_sizes'; did you mean --shard_size?"),
    ]:
        refused(*argv, "--out", "bad", match=match)
    prepare("docs.jsonl", "bad", "--val_tokens", "100")  # failed commands leave the folder usable


def test_a_mistake_exits_with_status_2(tmp_path):
    script = [sys.executable, str(REPO / "prepare_dataset.py"), "--source", "nowhere", "--tokenizer", "bytes"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("error: --source nowhere: ")


def test_a_full_disk_is_reported_with_path_and_bytes(jsonl):
    (jsonl / "out").mkdir()
    (jsonl / "out/.docs_val_000000.npy.tmp").symlink_to("/dev/full")
    message = (
        r"^out/\.docs_val_000000\.npy\.tmp: No space left on device; [\d,]+ bytes are free, a shard takes 200,000,000; "
        "fix it and run the same command again to continue$"
    )
    refused("--source", "docs.jsonl", "--out", "out", match=message)
    assert prepare("docs.jsonl")["complete"]


def test_only_a_few_batches_are_in_memory_at_once():
    begun = count()
    batches = ([Piece(Position(next(begun)), 0, "some text")] for _ in range(10_000))
    encoded = encode_all(batches, get_tokenizer("bytes"), num_workers=2)
    for number in range(200):
        batch, ids = next(encoded)
        assert batch[0].at.file == number
        assert ids.tolist() == ids_expected(["some text"])
        ahead = next(begun) - number
        begun = count(ahead + number)
        assert ahead <= 2 + prepare_dataset.RUN_AHEAD + 1
    encoded.close()


def test_documents_of_a_batch_are_encoded_independently():
    texts = ["a b", f"with {END_OF_TEXT}", " c"]
    batch = [Piece(Position(row=n), 0, text) for n, text in enumerate(texts)]
    assert encode(get_tokenizer("bytes"), batch).tolist() == ids_expected(texts)


# ---------------------------------------------------------------------------------------------------------------------
# interruptions and reports


def test_a_preparation_interrupted_after_each_shard_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_dataset, "BATCH_CHARS", 700)
    monkeypatch.setattr(prepare_dataset, "PIECE_CHARS", 300)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        '{"text": "one"}\n{broken\n' + '{"text": "caf\\udce9"}\n{"text": 1}\n' * 20
    )
    (tmp_path / "in" / "b.txt").write_bytes(b"a long document \xff " * 200)
    (tmp_path / "in" / "c.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(60)))
    options = ("--shard_size", "397", "--val_tokens", "500")
    prepare(tmp_path / "in", tmp_path / "whole", *options)

    def write_then_stop(path, ids):
        digest = write_shard(path, ids)
        if path.name not in seen:
            seen.add(path.name)
            raise KeyboardInterrupt  # the shard is written, but not in the manifest
        return digest

    seen, write_shard = set(), prepare_dataset.write_shard
    monkeypatch.setattr(prepare_dataset, "write_shard", write_then_stop)
    for _ in range(100):
        try:
            prepare(tmp_path / "in", tmp_path / "stopped", *options)
            break
        except KeyboardInterrupt:
            continue
    assert len(seen) > 30
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert (manifest["documents"], manifest["repaired"]) == (1 + 20 + 1 + 59, 21)
    assert manifest["skipped"] == {"broken JSON": 1, "int, not a string": 20, "no text": 1}


def test_without_a_network_the_hub_is_not_retried(tmp_path, monkeypatch):
    import datasets

    def no_network(*args, **options):
        raise ConnectionError("no network")

    def load_dataset(*args, **options):
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        raise FileNotFoundError("no copy was downloaded before")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(requests, "head", no_network)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused("--source", "hf:some/other", "--out", str(tmp_path), match="FileNotFoundError: no copy .* the network")


def test_the_last_line_is_the_next_command(jsonl, capsys):
    prepare("docs.jsonl", "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40 documents, 1,680 tokens"
    assert lines[1].startswith("1 val shard and 1 train shard in out (")
    folders = "--data_dir out --checkpoint_dir checkpoints/docs --logdir logs/docs"
    assert lines[2:] == [f"next: python train.py --config quickstart {folders}"]


def test_folders_are_read_recursively_without_hidden_and_other_files(tmp_path, capsys):
    for name in ("b.txt", "sub/a.md", "c.png", ".hidden/d.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    prepare(tmp_path / "in", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["b.txt", "sub/a.md"])
    assert "skipped 1 files that are not .txt" in capsys.readouterr().err
