"""Tests of steadygpt/prepare/ids.py: token ids of other programs become shards, checked and unchanged."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from prepared import ids_of, npy, npz, prepare, refused
from test_prepare_refusals import IDS, LLMC
from test_tokenizer_json import byte_tokenizer

from steadygpt.config import TrainConfig
from steadygpt.data.shards import headerless_dtype, open_shard
from steadygpt.data.tokenizer import END_OF_TEXT
from steadygpt.prepare import ids
from steadygpt.start.data import find_data
from steadygpt.start.find import Start

VAL = "--val_share 0"


@pytest.fixture(autouse=True)
def large(folder) -> None:
    """The tokenizer.json of a vocabulary that needs uint32."""
    Path("large.json").write_text(byte_tokenizer({END_OF_TEXT: 200_000}))


@pytest.mark.parametrize(("name", "content"), [
    ("one_array.npz", npz(arr_0=IDS)),
    ("rows.npz", npz(tokens=IDS.reshape(50, 100).astype(np.int32))),
    ("named.npz", npz(labels=IDS + 1, text=IDS)),  # --text_field is "text"
    ("build_nanogpt.npy", npy(IDS.astype(np.uint16))),
    ("large_and_big_endian.npy", npy(IDS.astype(">u8"))),
    ("nanogpt.bin", IDS.astype("<u2").tobytes()),
    ("llmc.bin", LLMC),
])  # fmt: skip
def test_every_format_gives_the_ids_it_holds(name, content):
    Path(name).write_bytes(content)
    manifest = prepare(name, flags=f"{VAL} --shard_size 1500")
    assert ids_of() == IDS.tolist()
    assert [shard["tokens"] for shard in manifest["shards"]] == [1250] * 4


def test_a_large_vocabulary_implies_uint32_for_a_file_without_header():
    (IDS + 100_000).astype("<u4").tofile("a.bin")
    assert prepare("a.bin", flags=f"{VAL} --tokenizer large.json")["dtype"] == "uint32"
    assert ids_of() == (IDS + 100_000).tolist()


@pytest.mark.parametrize(("written", "factor", "tokenizer", "expected"), [
    ("uint32", 1, "bytes", "uint16"),
    ("uint64", 1, "bytes", "uint16"),
    ("uint32", 700, "gpt2", "uint16"),
    ("uint64", 700, "large.json", "uint32"),
    ("uint16", 1, "large.json", "uint32"),
])  # fmt: skip
def test_ids_of_another_width_are_refused_by_both_commands(written, factor, tokenizer, expected):
    Path("data").mkdir()
    for split in ("train", "val"):
        (IDS * factor).astype(written).tofile(f"data/{split}.bin")
    facts = ("data/train.bin: ", f" {written},", f" {expected},", "--tokenizer")
    refused(f"--source data/train.bin --tokenizer {tokenizer}", *facts)
    with refusal(*facts) as raised:
        find_data(Start(TrainConfig(data_dir="data", tokenizer=tokenizer, context_length=16)))
    advice = re.search(r"numpy\.save\(.*\)", str(raised.value))
    eval(advice[0], {"numpy": np})
    assert open_shard(Path("data/train.npy")).tokens().tolist() == (IDS * factor).tolist()


def test_bytes_and_padded_ids_are_not_taken_for_uint16():
    text = np.frombuffer(b"To be, or not to be: that is the question. " * 200, np.uint8)
    padded = np.concatenate([np.zeros(4096), np.resize(IDS, 20_000)])
    for written, tokenizer in ((text, "gpt2"), (text, "bytes"), (padded.astype("<u4"), "gpt2")):
        written.tofile("train.bin")
        refused(f"--source train.bin --tokenizer {tokenizer}", "train.bin: ", f" {written.dtype},", " uint16,")
    text.astype("<u2").tofile("train.bin")  # characters in uint16 are ids
    prepare("train.bin", flags=VAL)
    few = np.random.default_rng(0).integers(256, 320, 5000).astype("<u2")  # mostly the merges of a small BPE
    few.tofile("few.bin")
    with open("few.bin", "rb") as file:
        assert headerless_dtype(file, few.nbytes, 320) == "<u2"


def test_training_reads_the_width_that_the_vocabulary_implies():
    Path("large.json").rename("tokenizer.json")
    for split in ("train", "val"):
        (IDS + 100_000).astype("<u4").tofile(f"{split}.bin")
    data = find_data(Start(TrainConfig(data_dir=".", context_length=16, shuffle_rows=False)))
    for source in (*data.sources, *data.val_sets):
        assert source.rows.read(0, 2)[:, 0].tolist() == (IDS[[0, 16]] + 100_000).tolist()


def test_ids_without_a_document_token_are_told(capsys):
    Path("a.npy").write_bytes(npy(np.arange(5000, dtype="<u2") % 256))
    Path("a.idx").write_bytes(b"MMIDIDX\x00\x00")
    prepare(".", flags=VAL)
    said = capsys.readouterr().err
    assert "left out a.idx: the index of Megatron's token ids (MMIDIDX)" in said
    assert "warning: .: 0 document tokens (<|endoftext|>) among the ids" in said
    Path("a.npy").write_bytes(npy(np.arange(5000, dtype="<u2") % 257))
    assert prepare(".", "with", flags=VAL)["documents"] == 19
    assert "0 document tokens" not in capsys.readouterr().err


@pytest.mark.parametrize(("more", "files"), [("", 3), ("--max_files 2", 2)])
def test_files_are_joined_by_name_and_max_files_takes_the_first(more, files):
    for number in (2, 0, 1):
        Path(f"part{number}.npz").write_bytes(npz(ids=IDS[number * 1000 : number * 1000 + 1000]))
    prepare("*.npz", flags=f"{VAL} {more}")
    assert ids_of() == IDS[: files * 1000].tolist()


def test_damage_that_leaves_ids_in_the_vocabulary_is_found():
    whole = npz(np.savez, ids=IDS)
    at = whole.index(IDS.tobytes()) + 8 * 1234
    Path("a.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    refused("--source a.npz", "a.npz: ", "BadZipFile: Bad CRC-32")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_file(save):
    save("a.npz", ids=np.zeros(5_000_000, np.int32))  # 20 MB
    tracemalloc.start()
    with open("a.npz", "rb") as file:
        blocks = ids.read_ids(file, ".npz", "", 0, 0, 2**20)
        assert sum(len(block) for _, block in blocks) == 5_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
