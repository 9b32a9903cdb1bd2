"""Tests of steadygpt/data/shards.py: the width of token ids in a file without a header, as nanoGPT writes it."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.config import TrainConfig
from steadygpt.data.shards import headerless_dtype, open_shard, token_dtype
from steadygpt.start.data import find_data
from steadygpt.start.find import Start

VOCABULARIES = st.sampled_from([257, 50257, 65536, 65537, 100_277, 200_000])


@given(VOCABULARIES, st.sampled_from(["<u2", "<u4", "<u8"]), st.integers(50, 5000), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_width_that_the_vocabulary_implies_is_read(tmp_path, vocab_size, written, count, seed):
    draws = np.random.default_rng(seed)
    most = min(vocab_size, 2**16) if written == "<u2" else vocab_size
    ids = (draws.power(0.5, count) * most).astype(int)  # as of a text, small ids are the most frequent
    ids[: draws.integers(count // 2)] = 0  # padding
    path = tmp_path / "train.bin"
    ids.astype(written).tofile(path)
    if token_dtype(vocab_size) == written:
        assert headerless_dtype(path, vocab_size) == written
    else:
        with refusal(str(path), f"{path.stat().st_size:,} bytes", token_dtype(vocab_size).name, "--tokenizer"):
            headerless_dtype(path, vocab_size)


@pytest.mark.parametrize("content", [b"", b"\1\0", b"\0" * 4000, bytes(range(256)) * 2])
def test_small_files_and_padding_are_read(content):
    Path("val.bin").write_bytes(content)
    assert headerless_dtype(Path("val.bin"), 65_536) == "<u2"


def test_the_advice_of_the_refusal_makes_the_ids_readable():
    Path("data").mkdir()
    ids = np.random.default_rng(0).integers(0, 257, 5000)
    for split in ("train", "val"):
        ids.astype("<u8").tofile(f"data/{split}.bin")
    with refusal("data/train.bin", "numpy.save") as raised:
        find_data(Start(), TrainConfig(data_dir="data", tokenizer="bytes", context_length=16))
    exec(re.search(r"numpy\.save\(.*\)", str(raised.value))[0], {"numpy": np, "ids": ids})
    assert open_shard(Path("data/train.npy")).tokens().tolist() == ids.tolist()


def test_training_reads_the_width_that_the_vocabulary_implies():
    ids = np.random.default_rng(0).integers(100_000, 100_257, 5000)
    for split in ("train", "val"):
        ids.astype("<u4").tofile(f"{split}.bin")
    config = TrainConfig(data_dir=".", tokenizer="ids:100300", context_length=16, shuffle_rows=False)
    data = find_data(Start(), config)
    for source in (*data.sources, *data.val_sets):
        assert source.rows.read(0, 2)[:, 0].tolist() == ids[[0, 16]].tolist()
