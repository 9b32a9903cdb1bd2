"""Tests of the validation split of prepare_dataset.py: the same text for every tokenizer, from every kind of source."""

import gzip
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from standin import parquet
from test_ids import npy, npz
from test_prepare_dataset import files_of, ids_of, prepare, prepare_interrupted, refused

import prepare_dataset
from steadygpt.data.tokenizer import END_OF_TEXT, Tokenizer, get_tokenizer

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


def check_val(out: Path, tokenizer: str, texts: list[str], val_bytes: float, unit: float) -> str:
    """Check that the val split has val_bytes of whole documents, and at most a unit more; return its text."""
    val, train = (texts_of(out, split, tokenizer) for split in ("val", "train"))
    assert [*val, *train] == texts
    without_last = sum(len(text.encode()) for text in val[:-1])
    assert without_last - unit < val_bytes <= without_last + len(val[-1].encode())
    return "".join(val)


# ---------------------------------------------------------------------------------------------------------------------
# the same text


def test_a_data_set_of_the_hub_has_the_same_val_in_every_mode(standin, folder):
    halves = {f"data/train-{n}.parquet": parquet(half) for n, half in enumerate((TEXTS[:200], TEXTS[200:]))}
    standin.put("datasets/some/texts", halves)
    size = sum(map(len, halves.values()))
    for number, more in enumerate(([], ["--streaming"], ["--keep_download"])):
        for tokenizer in ("bytes", "gpt2"):
            prepare("hf:some/texts", f"{tokenizer}{number}", *more, tokens=tokenizer)
            check_val(folder / f"{tokenizer}{number}", tokenizer, TEXTS, size / 40, size / 200)
            assert files_of(folder / f"{tokenizer}{number}") == files_of(folder / f"{tokenizer}0")
    assert texts_of(folder / "bytes0", "val", "bytes") == texts_of(folder / "gpt20", "val", "gpt2")


def test_rows_that_are_streamed_by_datasets_have_the_same_val(standin, folder):
    lines = [text.replace("\n", "") for text in TEXTS]
    csv = "\n".join(["text", *(f'"{line}"' for line in lines)]).encode()
    standin.put("datasets/some/rows", {"data/train.csv": csv})
    for tokenizer in ("bytes", "gpt2"):
        prepare("hf:some/rows", tokenizer, tokens=tokenizer)
        check_val(folder / tokenizer, tokenizer, lines, len(csv) / 40, 32 * 300)
    assert texts_of(folder / "bytes", "val", "bytes") == texts_of(folder / "gpt2", "val", "gpt2")


def test_files_with_little_text_need_the_size_of_val(folder):
    columns = {"text": TEXTS, "embedding": [os.urandom(5000) for _ in TEXTS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "wide.parquet")
    argv = ("--source", "wide.parquet", "--out", "out")
    refused(*argv, match=r"about 5.\.\d kB of text in 2\.\d+ MB, so over a tenth .* such as --val_tokens 1\d{3}$")
    assert not Path("out").exists()
    assert prepare("wide.parquet", "out", "--val_tokens", "1000", tokens="bytes")["shards"][0]["tokens"] >= 1000


@pytest.mark.parametrize("source", ["files", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_val_is_a_fortieth_of_the_source_in_whole_documents(source, folder):
    size, vals = write_source(source), set()
    for tokenizer in ("bytes", "gpt2", "crossing"):
        manifest = prepare(source, tokenizer, "--shard_size", "9000", tokens=tokenizer)
        vals.add(check_val(folder / tokenizer, tokenizer, TEXTS, size / 40, size / 200))
        assert [shard["split"] for shard in manifest["shards"]].count("val") == 1
    assert len(vals) == 1


def test_val_may_end_exactly_at_a_fortieth(folder):
    write_source("files", ["ten bytes\n"] * 40)
    prepare("files", "out")
    assert texts_of(folder / "out", "val", "bytes") == ["ten bytes\n"]


@pytest.mark.parametrize("text", [LONG, LONG.replace("\n", " "), "字" * 40_000], ids=["lines", "words", "characters"])
def test_val_ends_before_a_word_of_one_long_text(text, folder):
    (folder / "a.txt").write_text(text)
    vals, size = set(), len(text.encode())
    for tokenizer in ("bytes", "gpt2", "crossing"):
        prepare("a.txt", tokenizer, tokens=tokenizer)
        [val], [train] = (texts_of(folder / tokenizer, split, tokenizer) for split in ("val", "train"))
        assert val + train == text
        assert size / 40 <= len(val.encode()) < size / 30
        assert train[0] == (" " if " " in text else "字")
        vals.add(val)
    assert len(vals) == 1


def test_a_first_document_of_more_than_a_fortieth_is_the_whole_val(folder):
    texts = ["words " * 1667, *(f"{number:<40}" for number in range(250))]
    write_source("a.jsonl", texts)
    for tokenizer in ("bytes", "gpt2"):
        prepare("a.jsonl", tokenizer, tokens=tokenizer)
        assert texts_of(folder / tokenizer, "val", tokenizer) == texts[:1]


# ---------------------------------------------------------------------------------------------------------------------
# interruptions, workers, other rules


def test_interruptions_and_workers_do_not_change_the_split(folder):
    write_source("a.jsonl", ["short", LONG[:1000], *TEXTS[:60]])
    (folder / "b.txt").write_text(LONG[:9000])
    for source in ("a.jsonl", "b.txt"):
        manifest = prepare(source, f"{source}-whole", "--shard_size", "131", "--val_tokens", "700")
        assert [shard["split"] for shard in manifest["shards"]].count("val") > 3
        assert prepare_interrupted(source, f"{source}-stopped", "--shard_size", "131", "--val_tokens", "700") > 10
        prepare(source, f"{source}-2", "--shard_size", "131", "--val_tokens", "700", "--num_workers", "2")
        for other in ("stopped", "2"):
            assert files_of(folder / f"{source}-{other}") == files_of(folder / f"{source}-whole")


def test_a_limit_in_tokens_wins_and_token_ids_keep_theirs(folder):
    write_source("a.jsonl")
    manifest = prepare("a.jsonl", "out", "--val_tokens", "123")
    assert 123 <= manifest["shards"][0]["tokens"] < 123 + 2 * max(map(len, TEXTS))
    manifest = prepare("a.jsonl", "none", "--val_tokens", "0")
    assert [shard["split"] for shard in manifest["shards"]] == ["train"]
    ids = np.arange(4000) % 256
    (folder / "a.npz").write_bytes(npz(ids=ids))
    manifest = prepare("a.npz", "ids")
    assert [shard["tokens"] for shard in manifest["shards"]] == pytest.approx([100, 3900], abs=10)
    assert ids_of(folder / "ids") == ids.tolist()


def test_val_has_at_most_400_mb(folder, monkeypatch):
    monkeypatch.setattr(prepare_dataset, "VAL_BYTES", 200)
    write_source("a.jsonl")
    prepare("a.jsonl")
    check_val(folder / "out", "bytes", TEXTS, 200, 300)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize(("suffix", "packed"), [(".npy", npy), (".npz", lambda ids: npz(ids=ids))])
def test_a_fortieth_of_token_ids_is_val_whatever_their_dtype(folder, dtype, suffix, packed):
    Path(f"ids{suffix}").write_bytes(packed(np.arange(40_000, dtype=dtype) % 200))
    manifest = prepare(f"ids{suffix}", "out")
    assert [shard["tokens"] for shard in manifest["shards"]] == pytest.approx([1_000, 39_000], abs=100)


def test_a_long_line_inside_the_first_fortieth_is_left_to_training(folder):
    texts = [*(f"{number:<40}" for number in range(10)), "words " * 1667, *(f"{number:<40}" for number in range(1000))]
    write_source("a.jsonl", texts)
    for tokenizer in ("bytes", "gpt2"):
        prepare("a.jsonl", tokenizer, tokens=tokenizer)
        val = texts_of(folder / tokenizer, "val", tokenizer)
        assert 0 < len(val) <= 10
        assert val == texts[: len(val)]
