"""Tests of inspect_data.py: what it says of a folder of shards, the rows of a step, rows as text, and its errors."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import TINY, refusal, run_here, write_data, write_shard
from ground import latest, weights_content, with_options
from test_tokenizer_json import byte_tokenizer

import train
from dataloader import BatchLoader
from inspect_data import count_split, main, rows_of_step, visible
from model import GPT, GPTConfig
from steadygpt.data.encoders import Tiktoken
from steadygpt.data.shards import ShardSet
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer

BEGIN = load_tokenizer(TokenizerRecord("bytes")).document_id


def ids_of(*texts: str) -> list[int]:
    """Return the ids of a split with these documents."""
    return [i for text in texts for i in (BEGIN, *text.encode())]


BOTH, TWICE = "This one is also in val.", "This text stands here twice."
TRAIN = ids_of("Once upon a time.", TWICE, "", BOTH, TWICE)


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
def look(capsys):
    """Return a function that runs the command and returns its lines on stdout."""

    def look(*argv: str) -> list[str]:
        assert main([*argv]) == 0
        return capsys.readouterr().out.splitlines()

    return look


def test_a_folder_is_described(look, tmp_path):
    write(tmp_path / "data", train=[TRAIN[:30], TRAIN[30:]], val=[ids_of(BOTH, "New.", BOTH, "New.")])
    assert look("data", "--rows", "0") == [
        "data: tokenizer bytes, 257 ids, document token <|endoftext|> (id 256)",
        "",
        "          files           tokens   bytes/token   document tokens",
        "train         2              102          0.95                 5",
        "val           1               60          0.93                 4",
        "total         3              162          0.94                 9",
    ]


def test_a_split_larger_than_memory_is_read_in_blocks(tmp_path, monkeypatch):
    folder = write(tmp_path / "data", train=[ids_of("x" * 99), ids_of("y")])
    monkeypatch.setattr("inspect_data.BLOCK_TOKENS", 10)
    blocks = []
    shards = ShardSet.find("train", str(folder), "train").shards
    counts = count_split(shards, load_tokenizer(TokenizerRecord("bytes")), blocks.append)
    assert (counts[ord("x")], counts[ord("y")], counts[BEGIN]) == (99, 1, 2)
    assert blocks == [10] * 10 + [2]


def test_shards_of_nanogpt_need_only_a_tokenizer(look, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(
        np.frombuffer(b"To be or not to be", np.uint8).astype("<u2").tobytes()
    )
    lines = look("data", "--tokenizer", "bytes", "--context_length", "5", "--rows", "1")
    assert lines[2:5] == [
        "          files           tokens   bytes/token   document tokens",
        "train         1               18          1.00                 0",
        "total         1               18          1.00                 0",
    ]
    assert lines[6].startswith("--- train, 5 tokens from ")
    assert len(lines[7]) == 5 and lines[7] in "To be or not to be"
    assert len(lines) == 8


def test_without_a_manifest_the_tokenizer_is_gpt2_as_in_training(look, tmp_path):
    ids = [50256, *load_tokenizer(TokenizerRecord("gpt2")).encode("Hello, I'm a language model,")]
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
    assert visible(ids, load_tokenizer(TokenizerRecord("bytes"))) == (
        "\\x1b[31mred\\x07\\r\n\ttab \\u00a0\\u202e\\U000e0001 \U0001f600é\\xff\\xa0\n⟨document⟩\n⟨document⟩A"
    )


def test_ids_without_text_are_named():
    special = {"<pad>": 2, "<\x1b[2J>": 3, "<|endoftext|>": 5}
    encoding = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks={b"\xc3": 0, b"\xa9": 1}, special_tokens=special)
    assert visible([0, 1, 2, 3, 4, 5, 0, 2, 1], Tiktoken(encoding, ".")) == (
        "é⟨<pad>⟩⟨<\\x1b[2J>⟩⟨id 4⟩\n⟨document⟩\\xc3⟨<pad>⟩\\xa9"
    )


# ---------------------------------------------------------------------------------------------------------------------
# the rows of a step


@pytest.fixture
def trained_on(monkeypatch) -> list[list[int]]:
    """The rows that training in this process reads, in their order."""
    rows, read = [], BatchLoader.next

    def record(loader: BatchLoader):
        inputs, targets = read(loader)
        rows.extend([*row, last] for row, (*_, last) in zip(inputs.tolist(), targets.tolist(), strict=True))
        return inputs, targets

    monkeypatch.setattr(BatchLoader, "next", record)
    return rows


def rows_of(capsys, *flags: str) -> list[tuple[int, str, int, str]]:
    """Return number, source and file, position, and text of each row that inspect_data.py prints."""
    capsys.readouterr()
    assert main([*flags]) == 0
    found = []
    for part in capsys.readouterr().out.split("\n--- row ")[1:]:
        label, _, text = part.partition("\n")
        number, where, position = re.fullmatch(r"(\d+): (.*) from token ([\d,]+) on", label).groups()
        found.append((int(number), where, int(position.replace(",", "")), text[:-1]))
    return found


def test_the_rows_of_a_step_are_those_that_it_trained_on(workdir, trained_on, capsys):
    """Also across a change of the batch, a change of the mixture, and after the newest checkpoint."""
    write_data(workdir / "more", seed=1)
    assert run_here("--max_steps", "2", "--warmup_steps", "1", "--checkpoint_freq", "2") == 0
    batch = ("--max_steps", "4", "--total_batch_size", "96", "--allow_changes")
    assert run_here("--resume", "latest", *batch, "--checkpoint_freq", "2") == 0
    mix = ("--mix", "data:1,m=more:2", "--max_steps", "8", "--checkpoint_freq", "6", "--allow_changes")
    assert train.main([*TINY, "--resume", "latest", "--total_batch_size", "96", *mix]) == 0
    for name in ("latest.pt", "latest_backup.pt"):  # the run has crashed before step 8
        (workdir / "checkpoints" / name).unlink(missing_ok=True)
    sources = set()
    for step, count in enumerate([4, 4, 6, 6, 6, 6, 6, 6]):
        expected, trained_on[:] = trained_on[:count], trained_on[count:]
        found = rows_of(capsys, "--step", str(step), "--rows", "0")
        tokenizer = load_tokenizer(TokenizerRecord("bytes"))
        assert [text for *_, text in found] == [visible(row, tokenizer) for row in expected]
        assert [number for number, *_ in found] == list(range(count))
        for (_, where, position, _), row in zip(found, expected, strict=True):
            source, _, file = where.partition(", ")
            sources.add((step, source))
            tokens = np.load(workdir / {"data": "data", "m": "more"}[source] / file)
            assert tokens[position : position + len(row)].tolist() == row
    assert not trained_on
    assert {source for step, source in sources if step < 4} == {"data"}
    assert {source for step, source in sources if step >= 4} == {"data", "m"}
    assert len(rows_of(capsys, "--step", "5")) == 3
    Path("checkpoints/rolling_step_000002.pt").unlink()
    with refusal("--step ", " 1;", " 4 ", " checkpoints"):
        main(["--step", "1"])


def test_weights_without_a_run_have_no_steps(workdir):
    Path("checkpoints").mkdir()
    config = GPTConfig(vocab_size=257, context_length=8, num_layers=1, num_heads=1, embd_size=8)
    torch.save(weights_content(GPT(config).state_dict(), config), "checkpoints/latest.pt")
    with refusal("checkpoints/latest.pt: "):
        main(["--step", "1"])


def test_a_run_of_two_epochs_ends_with_their_last_row(workdir):
    assert run_here("--max_steps", "2", "--warmup_steps", "1") == 0
    path = workdir / "checkpoints" / "latest.pt"
    two_epochs = with_options(latest(workdir / "checkpoints"), max_steps=0, num_epochs=2)
    assert rows_of_step(two_epochs, path, 36)[1].start == 144
    with refusal("--step ", " 37;", " 37,", str(path)):  # 2 * (43 + 31) rows, 4 in a step
        rows_of_step(two_epochs, path, 37)
