"""Tests of steadygpt/data/ids.py: token ids of other programs become shards, checked and unchanged."""

import io
import re
import tracemalloc

import numpy as np
import pytest
from test_prepare_dataset import files_of, ids_of, prepare, prepare_interrupted, refused
from test_tokenizer_json import byte_tokenizer

import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.data import ids
from steadygpt.data.shards import headerless_dtype, open_shard
from steadygpt.data.tokenizer import END_OF_TEXT
from steadygpt.run.data import find_data

IDS = np.random.default_rng(0).integers(0, 257, 5000)


def npz(save=np.savez_compressed, **arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


LLMC = np.array([20240520, 1, len(IDS)] + [0] * 253, "<i4").tobytes() + IDS.astype("<u2").tobytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one_array.npz", npz(arr_0=IDS)),
        ("rows.npz", npz(tokens=IDS.reshape(50, 100).astype(np.int32))),
        ("named.npz", npz(labels=IDS + 1, text=IDS)),  # --text_field is "text"
        ("beside_masks.npz", npz(input_ids=IDS, loss_mask=np.zeros(3))),
        ("build_nanogpt.npy", npy(IDS.astype(np.uint16))),
        ("large_and_big_endian.npy", npy(IDS.astype(">u8"))),
        ("nanogpt.bin", IDS.astype("<u2").tobytes()),
        ("llmc.bin", LLMC),
    ],
)
def test_every_format_gives_the_ids_it_holds(name, content, folder):
    (folder / name).write_bytes(content)
    manifest = prepare(name, "out", "--val_tokens", "700", "--shard_size", "1500")
    assert ids_of(folder / "out") == IDS.tolist()
    assert [shard["tokens"] for shard in manifest["shards"]] == pytest.approx([700, 1500, 1500, 1300], abs=40)


def test_a_large_vocabulary_implies_uint32_for_a_file_without_header(folder):
    (folder / "large.json").write_text(byte_tokenizer({END_OF_TEXT: 200_000}))
    (folder / "a.bin").write_bytes((IDS + 100_000).astype("<u4").tobytes())
    manifest = prepare("a.bin", "out", "--val_tokens", "700", tokens="large.json")
    assert manifest["dtype"] == "uint32"
    assert ids_of(folder / "out") == (IDS + 100_000).tolist()


@pytest.mark.parametrize(
    ("written", "factor", "tokenizer", "expected"),
    [
        ("uint32", 1, "bytes", "uint16"),
        ("uint64", 1, "bytes", "uint16"),
        ("uint32", 700, "gpt2", "uint16"),
        ("uint64", 700, "large.json", "uint32"),
        ("uint16", 1, "large.json", "uint32"),
    ],
)
def test_ids_of_another_width_are_refused_by_both_commands(written, factor, tokenizer, expected, folder):
    (folder / "large.json").write_text(byte_tokenizer({END_OF_TEXT: 200_000}))
    (folder / "data").mkdir()
    for split in ("train", "val"):
        (IDS * factor).astype(written).tofile(f"data/{split}.bin")
    message = f"data/train.bin: found ids that look like {written}, without a header; expected {expected}, because the"
    with pytest.raises(UserError, match=message) as raised:
        prepare("data/train.bin", "out", tokens=tokenizer)
    with pytest.raises(UserError, match=message):
        find_data(TrainConfig(data_dir="data", tokenizer=tokenizer, context_length=16))
    advice = re.search(r"numpy\.save\(.*\)(?=, and remove)", str(raised.value))
    eval(advice[0], {"numpy": np})
    assert np.load("data/train.npy").tolist() == (IDS * factor).tolist()
    assert len(open_shard(folder / "data/train.npy").tokens()) == len(IDS)


def test_bytes_and_padded_ids_are_not_taken_for_uint16(folder):
    text = np.frombuffer(b"To be, or not to be: that is the question. " * 200, np.uint8)
    padded = np.concatenate([np.zeros(4096), np.resize(IDS, 20_000)])
    for written, tokenizer in ((text, "gpt2"), (text, "bytes"), (padded.astype("<u4"), "gpt2")):
        written.tofile("train.bin")
        with pytest.raises(UserError, match=f"ids that look like {written.dtype}, without a header; expected uint16"):
            prepare("train.bin", "out", tokens=tokenizer)
    text.astype("<u2").tofile("train.bin")  # characters in uint16 are ids
    prepare("train.bin", "out", "--val_tokens", "700", tokens="bytes")
    few = np.random.default_rng(0).integers(256, 320, 5000).astype("<u2")  # mostly the merges of a small BPE
    few.tofile("few.bin")
    with open("few.bin", "rb") as file:
        assert headerless_dtype(file, few.nbytes, 320) == "<u2"


def test_training_reads_the_width_that_the_vocabulary_implies(folder):
    (folder / "tokenizer.json").write_text(byte_tokenizer({END_OF_TEXT: 200_000}))
    for split in ("train", "val"):
        (IDS + 100_000).astype("<u4").tofile(f"{split}.bin")
    data = find_data(TrainConfig(data_dir=".", context_length=16, shuffle_rows=False))
    for source in (*data.sources, *data.val_sets):
        assert source.rows.read(0, 2)[:, 0].tolist() == (IDS[[0, 16]] + 100_000).tolist()


def test_padding_is_left_out(folder):
    rows, mask = IDS.reshape(50, 100).copy(), np.ones((50, 100), np.int64)
    rows[:, 80:], mask[:, 80:] = -100, 0
    (folder / "a.npz").write_bytes(npz(input_ids=rows, attention_mask=mask))
    prepare("a.npz", "out", "--val_tokens", "700")
    assert ids_of(folder / "out") == IDS.reshape(50, 100)[:, :80].reshape(-1).tolist()


def test_files_are_joined_by_name_and_max_files_takes_the_first(folder):
    for number in (2, 0, 1):
        (folder / f"part{number}.npz").write_bytes(npz(ids=IDS[number * 1000 : number * 1000 + 1000]))
    prepare("*.npz", "all", "--val_tokens", "700")
    assert ids_of(folder / "all") == IDS[:3000].tolist()
    prepare("*.npz", "out", "--val_tokens", "700", "--max_files", "2")
    assert ids_of(folder / "out") == IDS[:2000].tolist()


def test_an_interrupted_preparation_continues_inside_a_file(folder, monkeypatch):
    rows, mask = IDS.reshape(50, 100), np.arange(5000).reshape(50, 100) % 7 != 0
    (folder / "a.npz").write_bytes(npz(input_ids=rows, attention_mask=mask))
    options = ("--val_tokens", "700", "--shard_size", "333")
    prepare("a.npz", "whole", *options)
    assert prepare_interrupted("a.npz", "out", *options) > 12
    assert files_of(folder / "out") == files_of(folder / "whole")


BAD = np.array([*range(200), 257, 3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", npz(ids=BAD), "a.npz: holds token id 257, outside the vocabulary of 257; name the tokenizer"),
        ("a.npz", npz(ids=BAD - 1 - 2 * BAD), "a.npz: holds token id -1, outside the vocabulary"),
        ("a.bin", BAD.astype("<u2").tobytes(), "a.bin: holds token id 257, outside"),
        ("a.bin", b"123", "a.bin: 3 bytes is not a whole number of uint16 token ids"),
        ("a.bin", LLMC[:-2], "a.bin: cannot be read, ValueError: the file ends before its array"),
        ("a.npz", npz(ids=IDS / 2), r"a.npz: ids: holds float64 of shape \(5000,\); expected one row or rows of int"),
        ("a.npz", npz(ids=IDS.reshape(5, 10, 100)), r"holds int64 of shape \(5, 10, 100\); expected one row or rows"),
        ("a.npz", npz(ids=np.asfortranarray(IDS.reshape(5, 1000))), "in Fortran order"),
        ("a.npz", npz(a=IDS, b=IDS), "a.npz: found a, b; expected one array of token ids, or its name as --text_field"),
        ("a.npz", npz(ids=IDS, attention_mask=IDS[1:]), r"attention_mask has shape \(4999,\), expected \(5000,\)"),
        ("a.npz", npz(ids=IDS)[:-100], "a.npz: cannot be read, BadZipFile"),
        ("a.npy", npy(IDS)[:-100], "a.npy: cannot be read, ValueError: the file ends before its array"),
        ("a.npy", npy(IDS[:1]).replace(b"(1,), }   ", b"(True,), }"), r"a.npy: holds int64 of shape \(True,\)"),
        ("a.npy", npy(IDS).replace(b"(5000,), }  ", b"(-2, -3), } "), r"a.npy: holds int64 of shape \(-2, -3\)"),
        ("a.npy", npy(IDS).replace(b"(5000,), }" + b" " * 20, b"(4294967296, 4294967296), }   "), "ends before its"),
        ("a.npy", IDS.astype("<u2").tobytes(), "a.npy: not a .npy file; .* If it holds only ids, name it .bin"),
        ("a.npy", npy(np.zeros(5, [("id", "<i4"), ("weight", "<f4")])), r"a.npy: holds \[\('id'.* of shape \(5,\)"),
    ],
)
def test_unusable_files_are_reported_in_one_line(name, content, message, folder):
    (folder / name).write_bytes(content)
    refused("--source", name, "--out", "out", match=message)


def test_damage_that_leaves_ids_in_the_vocabulary_is_found(folder):
    whole = npz(np.savez, ids=IDS)
    at = whole.index(IDS.tobytes()) + 8 * 1234
    (folder / "a.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    refused("--source", "a.npz", "--out", "out", match="a.npz: cannot be read, BadZipFile: Bad CRC-32")


def test_ids_need_their_tokenizer_and_are_not_mixed_with_text(folder):
    (folder / "a.npz").write_bytes(npz(ids=IDS))
    with pytest.raises(UserError, match=r"a.npz: holds token ids; name the tokenizer that wrote them with --tokenizer"):
        prepare_dataset.main(["--source", "a.npz"])
    (folder / "b.txt").write_text("text")
    refused("--source", ".", match=r"found text, such as b.txt, and token ids, such as a.npz; expected only one kind")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_file(save, tmp_path):
    path = tmp_path / "a.npz"
    save(path, ids=np.zeros(20_000_000, np.int32))  # 80 MB
    tracemalloc.start()
    with open(path, "rb") as file:
        count = sum(len(found) for *_, found in ids.read_ids(file, ".npz", "", 0, 0, 2**20, path.stat().st_size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000_000
    assert peak < 8 * 2**20
