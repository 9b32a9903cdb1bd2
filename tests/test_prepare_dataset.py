"""Tests of prepare_dataset.py: output, resume, and reports of unusable input."""

import codecs
import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from standin import CARD, parquet
from test_tokenizer_json import byte_tokenizer

import prepare_dataset
from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError
from steadygpt.data import documents, shards, sources
from steadygpt.data.documents import Part
from steadygpt.data.shards import ShardSet, read_manifest
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord

END = 256  # <|endoftext|> of the byte tokenizer
TEXTS = ["one", "the second one", "third " * 30, "fourth\n", "5"] * 8


def prepare(source, out="out", *more: str, tokens="bytes") -> dict:
    """Run the command in this process, where one worker needs no other, and return the manifest."""
    options = ["--source", str(source), "--tokenizer", tokens, "--out", str(out)]
    assert prepare_dataset.main([*options, *(() if "--num_workers" in more else ("--num_workers", "1")), *more]) == 0
    return read_manifest(prepare_dataset.Path(out))


def prepare_interrupted(source, out, *options: str) -> int:
    """Press Ctrl-C after each shard, when it is written but not in the manifest; return how often."""
    write_shard, seen = prepare_dataset.write_shard, set()

    def write_then_stop(path, *ids):
        digest = write_shard(path, *ids)
        if path.name not in seen:
            seen.add(path.name)
            raise KeyboardInterrupt
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_dataset, "write_shard", write_then_stop)
        while True:
            with suppress(KeyboardInterrupt):
                prepare(source, out, *options)
                return len(seen)


def refused(*argv: str, match: str) -> None:
    with pytest.raises(UserError, match=match) as raised:
        prepare_dataset.main(["--tokenizer", "bytes", "--num_workers", "1", *argv])
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


def test_shards_hold_every_document_after_end_of_text_and_are_not_written_twice(jsonl, capsys):
    manifest = prepare("docs.jsonl", "out", "--shard_size", "220", "--val_tokens", "150")
    assert ids_of(jsonl / "out") == ids_expected(TEXTS)
    assert (manifest["tokens"], manifest["documents"]) == (len(ids_expected(TEXTS)), len(TEXTS))
    val, *train = [(s["file"], s["split"], s["tokens"]) for s in manifest["shards"]]
    first_three = len(ids_expected(TEXTS[:3]))
    assert val == ("docs_val_000000.npy", "val", first_three)  # at least 150
    assert train[0][:2] == ("docs_train_000001.npy", "train")
    assert max(tokens for *_, tokens in train) <= 220
    assert all(np.load(path)[0] == END for path in (jsonl / "out").glob("*.npy"))
    for split in ("train", "val"):
        ShardSet.find("", "out", split).check(manifest["vocab_size"])
    before = {path: path.stat().st_mtime_ns for path in (jsonl / "out").iterdir()}
    capsys.readouterr()
    (jsonl / "out/.download/file").mkdir(parents=True)  # as after a kill behind the last shard
    prepare("docs.jsonl", "out", "--shard_size", "220")  # --val_tokens is that of the first start
    assert {path: path.stat().st_mtime_ns for path in (jsonl / "out").iterdir()} == before
    complete, read, found, next_command = capsys.readouterr().out.splitlines()
    assert (complete, read) == ("out: already complete", "40 documents, 1,680 tokens")
    assert found.startswith("1 val shard (11.9% of the tokens) and 7 train shards in out (")
    folders = "--data_dir out --checkpoint_dir checkpoints/out --logdir logs/out"
    assert next_command == f"next: python train.py --config quickstart {folders}"


def test_shards_are_the_same_for_any_number_of_workers(jsonl):
    for workers in "124":
        prepare("docs.jsonl", f"out{workers}", "--num_workers", workers, "--shard_size", "333", "--val_tokens", "10")
    assert files_of(jsonl / "out1") == files_of(jsonl / "out2") == files_of(jsonl / "out4")


def test_a_unit_of_more_tokens_than_a_shard_holds_gives_several_shards(jsonl):
    Path("long.jsonl").write_text("".join(json.dumps({"text": "a" * length}) + "\n" for length in (9, 500, 9)))
    manifest = prepare("long.jsonl", "out", "--shard_size", "200", "--val_tokens", "1")
    assert [shard["tokens"] for shard in manifest["shards"]] == [10, 200, 200, 101, 10]
    assert prepare_interrupted("long.jsonl", "stopped", "--shard_size", "200", "--val_tokens", "1") == 5
    assert files_of(jsonl / "stopped") == files_of(jsonl / "out")


def test_every_local_format_gives_the_same_tokens(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    texts = ["first text", "zweiter Text: äöü", "third\r\ntext"]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    packed = {"zst": pyarrow.compress(lines.encode(), "zstd", asbytes=True), "gz": gzip.compress(lines.encode())}
    for name in ("b.jsonl.gz", "c.json.gz", "e.jsonl", "f.ndjson.zst"):  # e.jsonl is packed too
        (tmp_path / name).write_bytes(packed["zst" if name.endswith("zst") else "gz"])
    (tmp_path / "g.json").write_text(lines)
    (tmp_path / "h.ndjson").write_bytes(lines.encode("utf-16"))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "other": [1, 2, 3]}), tmp_path / "d.parquet")
    for suffix in ("txt", "md", "py"):
        for number, text in enumerate(texts):
            path = tmp_path / suffix / ("below" if number == 0 else "zz") / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    for number, text in enumerate(texts):  # as Windows and others write text
        (tmp_path / f"i{number}.txt.gz").write_bytes(gzip.compress(text.encode("utf-16")))
        (tmp_path / f"j{number}.txt").write_bytes(codecs.BOM_UTF16_BE + text.encode("utf-16-be"))
        (tmp_path / f"k{number}.md.zst").write_bytes(pyarrow.compress(text.encode("utf-32"), "zstd", asbytes=True))
    lines = ["a.jsonl", "b.jsonl.gz", "c.json.gz", "d.parquet", "e.jsonl", "f.ndjson.zst", "g.json", "h.ndjson"]
    for number, source in enumerate([*lines, "txt", "md/**/*.md", "py", "i*.gz", "j*", "k*"]):
        out = f"out{number}"
        prepare(source, out, "--text_field", "body", "--val_tokens", "5")
        assert ids_of(tmp_path / out) == ids_expected(texts), source


def test_stdlib_is_pythons_library_without_packages_and_tests():
    files = sources.find_files("stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "decoder.py"} <= names
    assert len(files) > 300
    assert not [file for file in files if {"site-packages", "test", "tests"} & set(file.parts[-3:])]


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path):
    (tmp_path / "large.json").write_text(byte_tokenizer({END_OF_TEXT: 69999}, first_id=60000))
    (tmp_path / "a.txt").write_text("abc")
    manifest = prepare(tmp_path / "a.txt", tmp_path / "out", "--val_tokens", "0", tokens=str(tmp_path / "large.json"))
    assert manifest["dtype"] == "uint32"
    assert ids_of(tmp_path / "out") == [69999, 60097, 60098, 60099]


# ---------------------------------------------------------------------------------------------------------------------
# an output folder that is not empty


def test_shards_of_a_different_preparation_are_refused_and_kept(jsonl):
    prepare("docs.jsonl")
    before = files_of(jsonl / "out")
    same = ("--source", "docs.jsonl", "--out", "out")
    changed = "out: prepared with shard_size 100000000, but now it is 100; use a different --out"
    refused(*same, "--shard_size", "100", match=changed)
    refused(*same, "--text_field", "body", match="text_field 'text', but now it is 'body'")
    with open("docs.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    refused(*same, match=r"prepared with 1 files, .* of docs\.jsonl, but now found 1 files")
    assert files_of(jsonl / "out") == before
    (jsonl / "foreign").mkdir()
    np.save("foreign/x_train_000000.npy", np.zeros(3, np.uint16))
    refused("--source", "docs.jsonl", "--out", "foreign", match=r"x_train_000000\.npy but no manifest\.json")


# ---------------------------------------------------------------------------------------------------------------------
# unusable input


def test_skipped_rows_are_counted_and_named(tmp_path, capsys):
    lines = [
        '{"text": "good \\udcff"}',
        "{broken",
        '{"text": ""}',
        '{"text": 3}',
        '{"other": "x"}',
        "",
        '{"text": "end"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    manifest = prepare(tmp_path / "a.jsonl", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["good \ufffd", "end"])
    assert (manifest["documents"], manifest["repaired"], sum(manifest["skipped"].values())) == (2, 1, 5)
    assert {"no text", "broken JSON", "blank line"} < manifest["skipped"].keys()
    captured = capsys.readouterr()
    assert "a.jsonl:2: broken JSON" in captured.err and "no text" not in captured.err
    assert "2 documents" in captured.out
    assert "skipped (broken JSON)" in captured.out


def test_mistakes_are_reported_in_one_line(jsonl):
    (jsonl / "image.png").write_bytes(b"")
    (jsonl / "empty.txt").write_bytes(b"")
    (jsonl / "empty").mkdir()
    (jsonl / "broken.jsonl.gz").write_bytes(b"no gzip")
    for argv, match in [
        (["--source", "empty"], "--source empty: an empty folder; expected a file"),
        (["--source", "nowhere"], "no such file; expected a file, a folder, a glob, .*; files of .txt"),
        (["--source", "image.png"], "found 1 file of other types"),
        (
            ["--source", "docs.jsonl", "--text_field", "body"],
            "no field 'body'; found text; set --text_field to the field with the text",
        ),
        (
            ["--source", "docs.jsonl", "--val_tokens", "1000000"],
            "leaves none for train; give a smaller --val_tokens, or 0, because rows",
        ),
        (["--source", "broken.jsonl.gz"], "broken.jsonl.gz: cannot be read"),
        (
            ["--source", "docs.jsonl", "--shard_size", "1" + 17 * "0"],
            "--shard_size is 1.*; expected 1 to 2,147,483,648",
        ),
        (["--source", "empty.txt"], "empty.txt: found nothing .*; expected text"),
        (["--source", "docs.jsonl", "--shard_size", "0"], "--shard_size is 0; expected 1 to"),
        (["--source", "docs.jsonl", "--shard-size", "many"], "argument --shard_size: is 'many'; expected an integer"),
        (["--source", "docs.jsonl", "--name", "a/b"], "--name is 'a/b'; expected only letters"),
        (["--source", "n" * 300], "n: File name too long; .* free"),
        (["--shard_sizes", "3"], "unknown argument '--shard_sizes'; did you mean --shard_size?"),
        (
            ["--dataset", "X"],
            "unknown argument '--dataset'; use --source hf:NAME for the Hugging Face Hub, or --source FILE",
        ),
        (["--input=my text.txt"], "unknown argument '--input'; use --source FILE"),
        (["my.txt"], r"unknown argument 'my.txt'; use --source FILE; quote a glob: '\*.txt'"),
    ]:
        refused(*argv, "--out", "bad", match=match)
    refused("--source", "docs.jsonl", "--out", "docs.jsonl", match="--out docs.jsonl is a file; expected a folder")
    prepare("docs.jsonl", "bad", "--val_tokens", "100")  # failed commands leave the folder usable


def test_a_full_disk_is_reported_with_path_and_bytes(jsonl, monkeypatch):
    def full(file, _):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = (
        r"^out/\.docs_val_000000\.npy\.tmp: No space left on device; [\d.,]+ [GT]B free; "
        "fix it, then run the same command again to resume$"
    )
    with monkeypatch.context() as patch:
        patch.setattr(shards, "replace_file", lambda path, write: replace_file(path, lambda file: full(file, write)))
        refused("--source", "docs.jsonl", "--out", "out", match=message)
    assert prepare("docs.jsonl")["complete"]


def test_documents_of_a_unit_are_encoded_independently():
    texts = ["a b", f"with {END_OF_TEXT}", " c", "d"]
    unit = [Part("rows", 0, number, 8, 0, 0, [text]) for number, text in enumerate(texts)]
    encoded = prepare_dataset.encode(unit, TokenizerRecord("bytes"), Path("unused"), 257, "text")
    assert encoded.ids.tolist() == ids_expected(texts)


# ---------------------------------------------------------------------------------------------------------------------
# interruptions and reports


def test_a_preparation_interrupted_after_each_shard_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 300)
    monkeypatch.setattr(documents, "CUT_WINDOW", 20)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        '{"text": "one"}\n{broken\n' + '{"text": "caf\\udce9"}\n{"text": 1}\n' * 20
    )
    (tmp_path / "in" / "b.txt").write_bytes(b"a long document \xff " * 200)
    (tmp_path / "in" / "c.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(60)))
    options = ("--shard_size", "397", "--val_tokens", "500")
    prepare(tmp_path / "in", tmp_path / "whole", *options)

    assert prepare_interrupted(tmp_path / "in", tmp_path / "stopped", *options) > 30
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert (manifest["documents"], manifest["repaired"]) == (1 + 20 + 1 + 59, 20 + 200)
    assert manifest["skipped"] == {"broken JSON": 1, "int, not a string": 20, "no text": 1}


def test_folders_are_read_recursively_without_hidden_and_other_files(tmp_path, capsys):
    for name in ("b.txt", "sub/a.md", "c.png", "package.json", ".hidden/d.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    prepare(tmp_path / "in", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["b.txt", "sub/a.md"])
    assert "skipped 2 files of other types than .txt" in capsys.readouterr().err


def test_linked_folders_are_read_once(tmp_path):
    for name in ("in/a.txt", "disk/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    for link, target in (("in/disk", "disk"), ("in/again", "disk"), ("disk/back", "in")):
        (tmp_path / link).symlink_to(tmp_path / target)
    prepare(tmp_path / "in", tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["in/a.txt", "disk/b.txt"])


def test_a_field_within_a_field_is_named_with_a_dot(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": 1, "meta": {"text": "one", "n": 1}}, {"id": 2, "meta": None}, {"id": 3, "meta": {"text": "two"}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("jsonl", "parquet"):
        manifest = prepare(
            tmp_path / f"a.{suffix}", tmp_path / suffix, "--text_field", "meta.text", "--val_tokens", "1"
        )
        assert ids_of(tmp_path / suffix) == ids_expected(["one", "two"])
        assert manifest["skipped"] == {"no field 'text'": 1}


def test_files_that_cannot_be_read_are_found_before_the_first_shard(jsonl, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 100}), "0.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["b"]}), "1.parquet")
    (jsonl / "2.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    monkeypatch.setattr(prepare_dataset, "write_shard", None)
    refused("--source", "[01].parquet", "--out", "out", match="1.parquet: no field 'text'; found content; set --text")
    message = "2.parquet: found a Git LFS pointer, expected the file. Try: git lfs pull"
    refused("--source", "[02].parquet", "--out", "out", match=message)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            json.dumps([{"text": "a"}]).encode(),
            "a.json: found an array or indented JSON; expected one object",
        ),
        ("a.json", json.dumps([{"text": "a"}], indent=1).encode(), r"a line. Try: jq -c .* a.json > rows.jsonl"),
        ("a.jsonl", json.dumps({"text": "a"}, indent=1).encode(), "a.jsonl: found an array or indented JSON"),
        ("a.txt", "UTF-16, no mark".encode("utf-16-le"), "a.txt: found a NUL byte or much that .* iconv -f ENCODING"),
        ("a.jsonl", b'{"text": "a"}\n' + b"\0" * 100, "a.jsonl: found a NUL byte or much that"),
        ("a.txt", b"one\0" + b"word " * 99, "a.txt: found a NUL byte or much that is not UTF-8; expected text; "),
        ("a.txt", bytes(range(128, 256)) * 99, "a.txt: found a NUL byte or much that is not UTF-8; expected text; "),
        (
            "a.md",
            "по-русски ".encode("cp1251") * 99,
            "a.md: found a NUL byte or much that is not UTF-8; expected text; ",
        ),
        ("a.txt.zst", b"no zstd", "a.txt.zst: cannot be read, OSError: .*zstd|ZSTD"),
        ("a.jsonl.zst", None, "a.jsonl.zst: cannot be read, OSError: Truncated compressed stream"),
    ],
)
def test_what_a_file_holds_instead_is_said_in_one_line(name, content, message, jsonl):
    import pyarrow

    (jsonl / name).write_bytes(content or pyarrow.compress(b'{"text": "a"}\n' * 9999, "zstd", asbytes=True)[:-9])
    refused("--source", name, "--out", "out", match=message)


def test_a_few_bytes_that_are_not_utf_8_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes("café à la crème ".encode("latin-1") * 10 + b"word " * 100)
    assert prepare(tmp_path / "a.txt", tmp_path / "out", "--val_tokens", "1")["repaired"] == 30


@pytest.mark.parametrize(
    "change",
    [{"shards": [{"file": "../a.npy", "split": "val", "tokens": 1, "sha256": ""}]}, {"next": {}}, {"tokens": "9"}],
)
def test_a_manifest_with_other_values_is_refused(jsonl, change):
    prepare("docs.jsonl")
    written = json.loads(Path("out/manifest.json").read_text())
    Path("out/manifest.json").write_text(json.dumps(written | change))
    arguments = "--source", "docs.jsonl", "--out", "out"
    refused(*arguments, match=f"out/manifest.json: {min(change)}.* not a manifest; use a different --out, or empty out")


def test_texts_that_spell_the_document_token_are_counted_and_can_be_split(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stories = ["One day\n", "\ntwo 'so'\n", "\nthree\n"]
    (tmp_path / "a.txt").write_text(END_OF_TEXT.join(stories))
    assert prepare("a.txt", "out", "--val_tokens", "1")["spelled"] == 2
    said = capsys.readouterr()
    assert "1 document, 2 <|endoftext|> inside texts encoded as text, " in said.out
    command = said.err.split("as a line of JSON: ")[1].splitlines()[0].replace("TEXT", "a.txt", 1)
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    prepare("documents.jsonl", "split", "--val_tokens", "1")
    assert ids_of(tmp_path / "split") == ids_expected(stories)


def test_a_copy_of_a_data_set_of_the_hub_gives_its_train_split(tmp_path, capsys):
    folder = tmp_path / "copy"
    files = {f"data/{split}-00000-of-00001.parquet": parquet([split] * 40) for split in ("train", "test", "validation")}
    files |= {"README.md": CARD.replace("part/*", "data/train*").encode(), "script/load.py": b"import datasets\n"}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    prepare(folder, tmp_path / "out", "--val_tokens", "1")
    assert ids_of(tmp_path / "out") == ids_expected(["train"] * 40)
    assert "copy of a data set of the Hub; took its split train, left out 4 other files" in capsys.readouterr().err
    (folder / "README.md").unlink()
    prepare(folder, tmp_path / "without_card", "--val_tokens", "1")
    assert ids_of(tmp_path / "without_card") == ids_expected(["train"] * 40)
    prepare(folder / "data", tmp_path / "deeper", "--val_tokens", "1")
    assert ids_of(tmp_path / "deeper") == ids_expected(["train"] * 40)
    prepare(folder / "**/*.parquet", tmp_path / "glob", "--val_tokens", "1")
    assert len(ids_of(tmp_path / "glob")) == len(ids_expected(["train", "test", "validation"] * 40))
    (folder / "data/train-00000-of-00001.parquet").unlink()
    (folder / ".gitattributes").write_text("*.parquet filter=lfs diff=lfs merge=lfs -text\n")
    refused(
        "--source", str(folder), match=r"found .*test, expected a split 'train' .* Choose files with a glob such as"
    )


def test_subfolders_whose_names_are_not_utf_8_are_read(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/caf\xe9"))
    folder.mkdir(parents=True)
    (folder / "a.parquet").write_bytes(parquet(["one", "two"]))
    prepare(tmp_path / "in", tmp_path / "out", "--val_tokens", "1", "--num_workers", "2")
    assert ids_of(tmp_path / "out") == ids_expected(["one", "two"])


def test_a_first_line_without_text_is_skipped_in_later_files(tmp_path):
    for number, first in enumerate(('{"text": "a"}', '{"meta": 1}')):
        (tmp_path / f"{number}.jsonl").write_text(f'{first}\n{{"text": "b"}}\n')
    manifest = prepare(tmp_path / "*.jsonl", tmp_path / "out", "--val_tokens", "1")
    assert manifest["skipped"] == {"no field 'text'": 1}
    assert ids_of(tmp_path / "out") == ids_expected(["a", "b", "b"])


def test_a_link_to_itself_is_named(jsonl):
    Path("loop").symlink_to("loop")
    refused("--source", "loop", "--out", "out", match="--source loop: found 1 file of other types")
    refused("--source", "docs.jsonl", "--out", "loop", match="loop")


def test_shards_do_not_go_into_the_folder_of_their_source(jsonl):
    refused(
        "--source", ".", "--out", ".", match=r"docs.jsonl: a file of --source in the folder for the shards, \.; give"
    )
    assert not list(jsonl.glob("*.npy"))


def test_progress_may_be_disabled(jsonl):
    words = "prepare_dataset.py --source docs.jsonl --tokenizer bytes --out out".split()
    words = [sys.executable, REPO / words[0], *words[1:]]
    done = subprocess.run(words, env=os.environ | {"TQDM_DISABLE": "1"}, capture_output=True, text=True)
    assert (done.returncode, "tokenizing" in done.stderr) == (0, False)


def test_a_resume_makes_no_check_of_a_new_preparation(tmp_path, monkeypatch):
    """Later files may begin with rows that have no text, or little text beside other fields."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "word " * 20, "meta": ""}] * 300
    Path("in").mkdir()
    Path("in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("in/b.jsonl").write_text((json.dumps({"text": None, "meta": "m" * 9000}) + "\n") * 100 + json.dumps(rows[0]))
    monkeypatch.setattr(prepare_dataset, "SAMPLE_BYTES", 3000)
    prepare("in", "whole", "--shard_size", "3000")
    assert prepare_interrupted("in", "out", "--shard_size", "3000") > 8
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("tokenizer", ["bytes", "own.json"])
def test_a_folder_that_another_command_has_finished_is_kept_whatever_the_tokenizer(tokenizer, jsonl, monkeypatch):
    Path("own.json").write_text(byte_tokenizer({END_OF_TEXT: 300}))
    find_source = prepare_dataset.find_source

    def overtaken(*arguments):
        monkeypatch.setattr(prepare_dataset, "find_source", find_source)
        prepare("docs.jsonl", "out", tokens="gpt2")
        return find_source(*arguments)

    monkeypatch.setattr(prepare_dataset, "find_source", overtaken)
    with pytest.raises(UserError, match="out: prepared with tokenizer 'gpt2', but now it is"):
        prepare("docs.jsonl", "out", tokens=tokenizer)
    assert json.loads(Path("out/manifest.json").read_text())["tokenizer"] == "gpt2"
    assert not Path("out/tokenizer.json").exists()


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(jsonl, monkeypatch):
    write_shard = prepare_dataset.write_shard

    def write_and_cut(path, *ids):
        os.truncate("docs.jsonl", 300)
        return write_shard(path, *ids)

    monkeypatch.setattr(prepare_dataset, "write_shard", write_and_cut)
    refused(
        "--source", "docs.jsonl", "--out", "out", "--shard_size", "300", match="docs.jsonl: became shorter while it"
    )
