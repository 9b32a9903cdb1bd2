"""Tests of the validation split of prepare_dataset.py: the same text for every tokenizer, from every kind of source."""

import gzip
import json
import os
import random
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from standin import parquet
from test_ids import npy, npz
from test_prepare_dataset import files_of, ids_of, prepare, refused
from test_prepare_hub import interrupt_after

import prepare_dataset
from steadygpt.data import documents
from steadygpt.data.documents import Chunk, Position
from steadygpt.data.tokenizer import END_OF_TEXT, Tokenizer, TokenizerRecord, get_tokenizer

WORDS = "the a of naïve 数据 token\nline loss,\nstep. gradient".split(" ")
TEXTS = [f"{n}: " + " ".join(random.Random(n).choices(WORDS, k=1 + n % 40)) + "\n" * (n % 3) for n in range(400)]
LONG = "".join(TEXTS)
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steadygpt.data.tokenizer.get_tokenizer", tokenizer_of)
    monkeypatch.setattr("os.fsync", lambda file: None)  # power cuts are not tested here
    return tmp_path


def tokenizer_of(name: str) -> Tokenizer:
    return CROSSING if name == "crossing" else get_tokenizer(name)


def texts_of(out, split: str, tokenizer: str) -> list[str]:
    """Return the documents of a split; of one that is cut, the part in the split."""
    encoding, begin_id = tokenizer_of(tokenizer).encoding, tokenizer_of(tokenizer).document_id
    ids = [int(token) for path in sorted(out.glob(f"*_{split}_*.npy")) for token in np.load(path)]
    begins = [at for at, token in enumerate(ids) if token == begin_id or at == 0]
    parts = [ids[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    return [encoding.decode_bytes([token for token in part if token != begin_id]).decode() for part in parts]


def write_source(name: str, texts: list[str] = TEXTS) -> int:
    """Write texts as a kind of source; return its size in bytes."""
    path = prepare_dataset.Path(name)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name == "files":
        path.mkdir()
        for number, text in enumerate(texts):
            (path / f"{number:06d}.md").write_text(text)
        return sum(len(text.encode()) for text in texts)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=70)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return path.stat().st_size


def val_of(texts: list[str], val_bytes: int) -> list[str]:
    """Return the texts before the first one that begins at or after a byte."""
    begins = [0, *accumulate(len(text.encode()) for text in texts)]
    return [text for text, begin in zip(texts, begins, strict=False) if begin < val_bytes]


# ---------------------------------------------------------------------------------------------------------------------
# the same text


def test_a_data_set_of_the_hub_has_the_same_val_in_every_mode(standin, folder):
    halves = {f"data/train-{n}.parquet": parquet(half) for n, half in enumerate((TEXTS[:200], TEXTS[200:]))}
    standin.put("datasets/some/texts", halves)
    expected = val_of(TEXTS, sum(map(len, halves.values())) / 40)
    for number, more in enumerate(([], ["--streaming"], ["--keep_download"])):
        for tokenizer in ("bytes", "gpt2"):
            prepare("hf:some/texts", f"{tokenizer}{number}", *more, tokens=tokenizer)
            assert texts_of(folder / f"{tokenizer}{number}", "val", tokenizer) == expected
            assert files_of(folder / f"{tokenizer}{number}") == files_of(folder / f"{tokenizer}0")


def test_rows_that_are_streamed_by_datasets_have_the_same_val(standin, folder):
    lines = [text.replace("\n", "") for text in TEXTS]
    csv = "\n".join(["text", *(f'"{line}"' for line in lines)]).encode()
    standin.put("datasets/some/rows", {"data/train.csv": csv})
    for tokenizer in ("bytes", "gpt2"):
        prepare("hf:some/rows", tokenizer, tokens=tokenizer)
        assert texts_of(folder / tokenizer, "val", tokenizer) == val_of(lines, len(csv) / 40)


def test_files_with_little_text_need_the_size_of_val(folder):
    columns = {"text": TEXTS, "embedding": [os.urandom(5000) for _ in TEXTS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "wide.parquet")
    argv = ("--source", "wide.parquet", "--out", "out")
    refused(*argv, match=r"about 5.\.\d kB of text in 2\.\d+ MB, so over a tenth .* such as --val_tokens 1\d{3}$")
    assert not Path("out").exists()
    assert prepare("wide.parquet", "out", "--val_tokens", "1000", tokens="bytes")["val_tokens"] == 1000


@pytest.mark.parametrize("source", ["files", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_val_ends_before_the_document_that_begins_at_a_fortieth_of_the_source(source, folder, monkeypatch):
    # Val ends in a later batch. How much of so small a compressed file a batch has taken is not known.
    monkeypatch.setattr(prepare_dataset, "BATCH_BYTES", 4000 if source.endswith(".gz") else 400)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 300)
    expected = val_of(TEXTS, write_source(source) / 40)
    assert len(expected) > 3
    for tokenizer in ("bytes", "gpt2", "crossing"):
        manifest = prepare(source, tokenizer, "--shard_size", "9000", tokens=tokenizer)
        assert texts_of(folder / tokenizer, "val", tokenizer) == expected
        assert texts_of(folder / tokenizer, "train", tokenizer) == TEXTS[len(expected) :]
        assert manifest["val_tokens"] == manifest["shards"][0]["tokens"]


def test_val_may_end_exactly_at_a_fortieth(folder):
    write_source("files", ["ten bytes\n"] * 40)
    (folder / "lines.txt").write_text("ten bytes\n" * 40)
    for source in ("files", "lines.txt"):
        prepare(source, f"out-{source}")
        assert texts_of(folder / f"out-{source}", "val", "bytes") == ["ten bytes\n"]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 700, 90], ids="piece={}".format)
def test_val_ends_at_a_line_of_one_long_text(piece_bytes, folder, monkeypatch):
    """With 90 bytes val ends in a later piece; of 700, in the first."""
    monkeypatch.setattr(documents, "PIECE_BYTES", piece_bytes)
    (folder / "a.txt").write_text(LONG)
    data = LONG.encode()
    expected = data[: data.index(b"\n", -(-len(data) // 40) - 1) + 1].decode()
    for tokenizer in ("bytes", "gpt2", "crossing"):
        prepare("a.txt", tokenizer, tokens=tokenizer)
        assert texts_of(folder / tokenizer, "val", tokenizer) == [expected]
        assert texts_of(folder / tokenizer, "train", tokenizer) == [LONG.removeprefix(expected)]


def test_a_text_without_lines_is_cut_where_its_next_piece_begins(folder, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 200)
    (folder / "a.txt").write_text(LONG.replace("\n", " "))
    for tokenizer in ("bytes", "gpt2"):
        prepare("a.txt", tokenizer, tokens=tokenizer)
        [val], [train] = (texts_of(folder / tokenizer, split, tokenizer) for split in ("val", "train"))
        assert val + train == LONG.replace("\n", " ")
        assert 0 <= len(val.encode()) - len(LONG.encode()) / 40 < 400
        assert train.startswith(" ")


DOCUMENTS = st.lists(st.text("ab \n.é你", min_size=1, max_size=90).filter(str.strip), min_size=1, max_size=9)


@given(DOCUMENTS, st.integers(1, 100))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_places_where_val_may_end_do_not_depend_on_the_tokenizer(monkeypatch, texts, val_bytes):
    monkeypatch.setattr(documents, "PIECE_BYTES", 30)
    monkeypatch.setattr("steadygpt.data.tokenizer.get_tokenizer", tokenizer_of)
    batch, whole = [Chunk(Position(), 0, 0, texts)], "".join(texts).encode()
    begins = [0, *accumulate(len(text.encode()) for text in texts)]
    places = []
    for tokenizer in ("bytes", "crossing"):
        found = prepare_dataset.encode(batch, TokenizerRecord(tokenizer), Path(), 300, "text", val_bytes)
        end = tokenizer_of(tokenizer).document_id
        for num_ids, num_bytes in found.val_ends:
            ids = [int(token) for token in found.ids[:num_ids] if token != end]
            assert tokenizer_of(tokenizer).encoding.decode_bytes(ids) == whole[:num_bytes]
        places.append([num_bytes for _, num_bytes in found.val_ends])
        assert found.text_bytes == len(whole)
    assert places[0] == places[1] == sorted(places[0])
    assert set(begins[:-1]) <= set(places[0])
    for place in set(places[0]) - set(begins):
        begin = max(begin for begin in begins if begin < place)
        assert place - begin >= val_bytes
        assert whole[:place].decode()  # not inside a character
        end = min(begin + 3 * val_bytes, *(end for end in begins if end > begin))
        has_line = b"\n" in whole[begin + val_bytes - 1 : end - 1]
        assert whole[:place].endswith(b"\n") or not has_line or max(np.diff(begins)) > 60
        assert place <= begin + 3 * val_bytes or max(np.diff(begins)) > 60


# ---------------------------------------------------------------------------------------------------------------------
# interruptions, workers, other rules


def test_interruptions_do_not_change_the_split(folder, monkeypatch):
    for name in ("CHUNK_BYTES", "PIECE_BYTES"):  # val has several batches
        monkeypatch.setattr(documents, name, 40)
    monkeypatch.setattr(prepare_dataset, "BATCH_BYTES", 50)
    write_source("a.jsonl", ["short", LONG[:1000], *TEXTS[:60]])
    (folder / "b.txt").write_text(LONG[:9000])
    for source in ("a.jsonl", "b.txt"):  # val ends inside the second document; inside the only one
        manifest = prepare(source, f"{source}-whole", "--shard_size", "131")
        val = [shard["tokens"] for shard in manifest["shards"] if shard["split"] == "val"]
        assert val[:-1] == [131] * (len(val) - 1) != []
        for number in range(len(val) + 1):  # each start writes one shard
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                interrupt_after(2, patch)
                patch.setattr(prepare_dataset, "BATCH_BYTES", (50, 2**20)[number % 2])  # a stream has smaller batches
                prepare(source, f"{source}-stopped", "--shard_size", "131")
        prepare(source, f"{source}-stopped", "--shard_size", "131")
        assert files_of(folder / f"{source}-stopped") == files_of(folder / f"{source}-whole")


def test_workers_do_not_change_the_split(folder, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 40)
    monkeypatch.setattr(prepare_dataset, "BATCH_BYTES", 50)
    write_source("a.jsonl", ["short", LONG[:1000], *TEXTS[:60]])
    for workers in "12":
        prepare("a.jsonl", f"out{workers}", "--num_workers", workers)
    assert files_of(folder / "out1") == files_of(folder / "out2")
    assert texts_of(folder / "out2", "val", "bytes")[1].endswith("\n")


def test_a_limit_in_tokens_wins_and_token_ids_keep_theirs(folder):
    write_source("a.jsonl")
    manifest = prepare("a.jsonl", "out", "--val_tokens", "123")
    assert [shard["tokens"] for shard in manifest["shards"]][:1] == [123]
    ids = np.arange(4000) % 256
    (folder / "a.npz").write_bytes(npz(ids=ids))
    manifest = prepare("a.npz", "ids")
    assert [shard["tokens"] for shard in manifest["shards"]] == [100, 3900]
    assert ids_of(folder / "ids") == ids.tolist()


def test_val_has_at_most_400_mb(folder, monkeypatch):
    monkeypatch.setattr(prepare_dataset, "VAL_BYTES", 200)
    write_source("a.jsonl")
    prepare("a.jsonl")
    assert texts_of(folder / "out", "val", "bytes") == val_of(TEXTS, 200)


@pytest.mark.parametrize(
    ("first", "val"),
    [
        ("words " * 1667, "words " * 83 + "words"),
        ("字" * 3334, "字" * 167),
        ("words " * 100 + "\n" + "words " * 1567, "words " * 100 + "\n"),
        ("words " * 300 + "\n" + "words " * 1367, "words " * 83 + "words"),  # the line ends too late
    ],
)
def test_a_long_document_is_cut_so_that_val_has_at_most_a_tenth(first, val, folder, capsys):
    """At the end of a line between a fortieth and a tenth of the text, else of a word, else of a character."""
    texts = [first, *(f"{number:<40}" for number in range(250))]
    assert write_source("files", texts) == pytest.approx(20_000, abs=4)
    for tokenizer in ("bytes", "gpt2"):
        prepare("files", tokenizer, tokens=tokenizer)
        assert texts_of(folder / tokenizer, "val", tokenizer) == [val]
        assert texts_of(folder / tokenizer, "train", tokenizer) == [first.removeprefix(val), *texts[1:]]
    assert "1 val shard (2.5% of the tokens) and" in capsys.readouterr().out or len(val) > 503


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize(("suffix", "packed"), [(".npy", npy), (".npz", lambda ids: npz(ids=ids))])
def test_a_fortieth_of_token_ids_is_val_whatever_their_dtype(folder, dtype, suffix, packed):
    Path(f"ids{suffix}").write_bytes(packed(np.arange(40_000, dtype=dtype) % 200))
    manifest = prepare(f"ids{suffix}", "out")
    assert [shard["tokens"] for shard in manifest["shards"]] == pytest.approx([1_000, 39_000], abs=3)
