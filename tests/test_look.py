"""Tests of look.py: what it says of a folder of shards, rows in words, and its errors."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from test_survey import BEGIN, ids_of
from test_tokenizer import need_gpt2
from test_tokenizer_json import byte_tokenizer

from look import main, print_row, visible
from steadygpt.base.options import UserError
from steadygpt.data.shards import write_shard
from steadygpt.data.tokenizer import Tokenizer, get_tokenizer

ONCE, TWICE, BOTH = "Once upon a time.", "This text stands here twice.", "This one is also in val."
TRAIN = ids_of(ONCE, TWICE, "", BOTH, TWICE)


def write(folder: Path, has_manifest: bool = True, **splits: list[list[int]]) -> Path:
    """Write the shards of each split as prepare_dataset.py does, or without a manifest."""
    folder.mkdir(exist_ok=True)
    entries = []
    for split, shards in splits.items():
        for ids in shards:
            name = f"a_{split}_{len(entries):06d}.npy"
            digest = write_shard(folder / name, np.array(ids, np.uint16))
            entries.append({"file": name, "split": split, "tokens": len(ids), "sha256": digest})
    manifest = {"complete": True, "tokenizer": "bytes", "vocab_size": 257, "shards": entries}
    if has_manifest:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def look(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command and returns its lines on stdout."""
    monkeypatch.chdir(tmp_path)

    def look(*argv: str) -> list[str]:
        assert main([*argv]) == 0
        return capsys.readouterr().out.splitlines()

    return look


def test_a_folder_is_described(look, tmp_path):
    cut = 30  # in the first copy of TWICE
    write(tmp_path / "data", train=[TRAIN[:cut], TRAIN[cut:]], val=[ids_of(BOTH, "New.", BOTH, "New.")])
    assert look("data", "--rows", "0") == [
        "data: tokenizer bytes, 257 ids, document token <|endoftext|> (id 256)",
        "",
        "          files           tokens   bytes/token     documents       empty",
        "train         2              102          0.95             5           1",
        "val           1               60          0.93             4           0",
        "total         3              162          0.94             9           1",
        "",
        "tokens per document: shortest 0, median 24, longest 28",
        "                          0             1   11.1%  ########",
        "                          1             0    0.0%",
        "                     2 to 3             0    0.0%",
        "                     4 to 7             2   22.2%  #################",
        "                    8 to 15             0    0.0%",
        "                   16 to 31             6   66.7%  ##################################################",
        "",
        "exact duplicates, and their share of the split:",
        "          repeated in train             1   27.5%",
        "            repeated in val             2   46.7%",
        "      in val, also in train             2   80.0%",
        "  1 in train, 2 in val, 24 tokens each: This one is also in val.",
        "  2 in train, 0 in val, 28 tokens each: This text stands here twice.",
        "  0 in train, 2 in val, 4 tokens each: New.",
    ]


def test_a_split_may_begin_inside_a_document(look, tmp_path):
    write(tmp_path / "data", train=[[*b"the end", *ids_of("a", "b")]], val=[ids_of("Begin of")])
    lines = look("data", "--rows", "0")
    assert "train         1               11          0.82             3           0" in lines
    assert "          repeated in train             0    0.0%" in lines


def test_shards_without_document_tokens_have_no_documents(look, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(
        np.frombuffer(b"To be or not to be", np.uint8).astype("<u2").tobytes()
    )
    lines = look("data", "--tokenizer", "bytes", "--context_length", "5", "--rows", "1")
    assert lines[:7] == [
        "data: tokenizer bytes, 257 ids, document token <|endoftext|> (id 256)",
        "",
        "          files           tokens   bytes/token",
        "train         1               18          1.00",
        "total         1               18          1.00",
        "",
        "no document edges: the document token does not occur, so documents and duplicates are unknown",
    ]
    assert lines[8].startswith("--- train, 5 tokens from ")
    assert len(lines[9]) == 5 and lines[9] in "To be or not to be"
    assert len(lines) == 10


def test_without_a_manifest_the_tokenizer_is_gpt2_as_in_training(look, tmp_path):
    need_gpt2()
    ids = [50256, *get_tokenizer("gpt2").encode("Hello, I'm a language model,")]
    write(tmp_path / "data", has_manifest=False, train=[ids])
    lines = look("data", "--context_length", "5", "--rows", "20")
    assert lines[0] == "data: tokenizer gpt2, 50,257 ids, document token <|endoftext|> (id 50256)"
    assert "⟨document⟩Hello, I'm" in lines


def test_the_tokenizer_and_its_document_token_are_those_of_the_folder(look, tmp_path):
    folder = write(tmp_path / "data", train=[[300, *b"one", 300, *b"two"]])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": "my.json", "document_token": "<doc>"}))
    (folder / "tokenizer.json").write_text(byte_tokenizer({"<doc>": 300}))
    lines = look("data")
    assert lines[0] == "data: tokenizer my.json, 301 ids, document token <doc> (id 300)"
    assert lines[-2:] == ["⟨document⟩one", "⟨document⟩two"]


def test_the_seed_decides_the_rows(look, tmp_path):
    write(tmp_path / "data", train=[TRAIN[:30], TRAIN[30:]], val=[TRAIN])
    flags = ("data", "--context_length", "9", "--rows", "4", "--seed")
    one = look(*flags, "1")
    assert one == look(*flags, "1") != look(*flags, "2")
    assert sum(line.startswith("--- train, 9 tokens from ") for line in one) == 4


def test_a_row_is_at_most_the_split(look, tmp_path):
    write(tmp_path / "data", train=[ids_of("ab"), ids_of("c")])
    assert look("data", "--rows", "1")[-3:] == ["--- train, 5 tokens from 0 on", "⟨document⟩ab", "⟨document⟩c"]


def test_what_cannot_be_seen_is_escaped():
    text = "\x1b[31mred\x07\r\n\ttab \u00a0\u202e\U000e0001 \U0001f600é"
    ids = [*text.encode(), 0xFF, 0xA0, BEGIN, BEGIN, 65]
    assert visible(ids, get_tokenizer("bytes")) == (
        "\\x1b[31mred\\x07\\r\n\ttab \\u00a0\\u202e\\U000e0001 \U0001f600é\\xff\\xa0\n⟨document⟩\n⟨document⟩A"
    )


def test_marks_and_escapes_are_highlighted_on_a_terminal():
    text = visible([65, 0x1B, BEGIN], get_tokenizer("bytes"), "[{}]".format)
    assert text == "A[\\x1b]\n[⟨document⟩]"


def test_colours_are_for_terminals_only(capsys, monkeypatch):
    print_row(np.array([65, BEGIN]), get_tokenizer("bytes"), "label")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_row(np.array([65, BEGIN]), get_tokenizer("bytes"), "label")
    assert capsys.readouterr().out == "\n--- label\nA\n⟨document⟩\n\n--- label\nA\n\x1b[7m⟨document⟩\x1b[0m\n"


def test_ids_without_text_are_named():
    special = {"<pad>": 2, "<\x1b[2J>": 3, "<|endoftext|>": 5}
    encoding = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks={b"\xc3": 0, b"\xa9": 1}, special_tokens=special)
    assert visible([0, 1, 2, 3, 4, 5, 0, 2, 1], Tokenizer(encoding, ".")) == (
        "é⟨<pad>⟩⟨<\\x1b[2J>⟩⟨id 4⟩\n⟨document⟩\\xc3⟨<pad>⟩\\xa9"
    )


def broken(folder: Path, how: str) -> None:
    """Damage a folder of shards."""
    shard, manifest = folder / "a_train_000000.npy", folder / "manifest.json"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "changed":
        shard.write_bytes(shard.read_bytes()[:-2] + b"ab")
    elif how == "unfinished":
        manifest.write_text(manifest.read_text().replace("true", "false"))
    elif how == "foreign":
        manifest.unlink()
        write_shard(shard, np.array([1, 2, 300], np.uint16))
    elif how == "empty":
        for file in folder.iterdir():
            file.unlink()


@pytest.mark.parametrize(("how", "flags", "words"), [
    ("", ["none"], "none: no such folder; expected one of token shards"),
    ("", ["data/manifest.json"], "data/manifest.json: no such folder"),
    ("empty", ["data"], "no train shards in data"),
    ("truncated", ["data"], "a_train_000000.npy: 331 bytes, but its header says 102 tokens"),
    ("changed", ["data"], "but manifest.json says"),
    ("unfinished", ["data"], "data: its preparation was interrupted"),
    ("foreign", ["data", "--tokenizer", "bytes"], "token 2 is 300, outside the vocabulary of 257; name the tokenizer"),
    ("", ["data", "--tokenizer", "gpt2"], "data was prepared with 'bytes', so drop the flag"),
    ("", ["data", "--rows", "-1"], "--rows is -1; expected 0 or more"),
    ("", [], "folder"),
])  # fmt: skip
def test_mistakes_are_reported_in_one_line(tmp_path, monkeypatch, capsys, how, flags, words):
    monkeypatch.chdir(tmp_path)
    broken(write(tmp_path / "data", train=[TRAIN]), how)
    with pytest.raises(UserError) as raised:
        main(flags)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""
