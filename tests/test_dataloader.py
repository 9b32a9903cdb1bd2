"""Tests of the data order, the shard formats and the checks of shards."""

import io
import json
import math
import os
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import refusal, write_data, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import npy

import dataloader
from dataloader import IN_ORDER, BatchLoader, EvenlySpaced, RowStream
from steadygpt.base.options import RankError
from steadygpt.config import TrainConfig
from steadygpt.data.order import key_of, permute
from steadygpt.data.shards import (
    Shard,
    ShardSet,
    open_shard,
    read_manifest,
    token_dtype,
)
from steadygpt.start.data import find_data
from steadygpt.start.find import Start


class Tokens(Shard):
    """A shard in memory with the tokens shard number * 1000 + position."""

    def __init__(self, number: int, num_tokens: int):
        super().__init__(None, np.dtype("<u2"), 0, num_tokens)
        object.__setattr__(self, "array", number * 1000 + np.arange(num_tokens))

    def tokens(self):
        return self.array

    def check_unchanged(self):
        pass


def stream(*sizes: int, context=4, **options) -> RowStream:
    return RowStream([Tokens(number, size) for number, size in enumerate(sizes)], context, replace(IN_ORDER, **options))


shard_sizes = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 7)
contexts, seeds, switches = st.integers(1, 7), st.integers(0, 2**31), st.booleans()

# ---------------------------------------------------------------------------------------------------------------------
# the order


@given(st.integers(1, 2000), st.integers(1, 2**52), seeds, st.integers(0, 2**52))
@settings(max_examples=40)
def test_permute_is_a_permutation(n, huge, seed, start):
    assert sorted(permute(np.arange(n), n, key_of(seed, start))) == list(range(n))
    elements = np.unique((start + np.arange(200)) % huge)
    images = permute(elements, huge, key_of(seed))
    assert len(np.unique(images)) == len(elements)
    assert 0 <= images.min() <= images.max() < huge


@pytest.mark.parametrize("n", range(2, 7))
def test_permute_draws_every_order_equally_often(n):
    """As Pearson's test tells it: counts differ from each other as chance makes them differ."""
    keys = key_of(np.arange(60_000), n)
    orders = np.stack([permute(np.full(len(keys), i), n, keys) for i in range(n)], axis=1)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == math.factorial(n)
    expected = len(keys) / len(counts)
    freedom = len(counts) - 1
    deviation = ((counts - expected) ** 2 / expected).sum() / freedom
    assert deviation < 1 + 5 * math.sqrt(2 / freedom)


@given(shard_sizes, contexts, seeds, switches, switches, st.integers(0, 3))
@settings(max_examples=40)
def test_an_epoch_has_each_row_of_each_shard_once(sizes, context, seed, shuffle_shards, shuffle_rows, epoch):
    rows = stream(*sizes, context=context, seed=seed, shuffle_shards=shuffle_shards, shuffle_rows=shuffle_rows)
    n = rows.rows_per_epoch
    found = rows.read(epoch * n, n)
    first = np.sort(found[:, 0])
    assert sorted(found.tolist()) == (first[:, None] + np.arange(context + 1)).tolist()
    expected = []
    for shard, size in enumerate(sizes):
        if size > context:
            start = first[first // 1000 == shard].min()
            assert start - 1000 * shard in range((size - 1) % context + 1 if shuffle_rows else 1)
            expected += (start + context * np.arange((size - 1) // context)).tolist()
    assert first.tolist() == expected


def test_each_epoch_cuts_a_shard_elsewhere():
    """Wherever the tokens that are in no row leave room; here 3 of them."""
    rows = stream(5 * 7 + 1 + 3, context=7, seed=3, shuffle_rows=True)
    firsts = rows.read(0, 400 * 5)[:, 0].reshape(400, 5)
    assert {*firsts.min(1).tolist()} == {0, 1, 2, 3}
    assert np.bincount(firsts.min(1)).min() > 60


@given(shard_sizes, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 200))
@settings(max_examples=50)
def test_a_step_has_the_same_micro_batches_on_any_number_of_ranks(sizes, ranks, batch, in_turn, steps, start):
    rows = stream(*sizes, shuffle_shards=True, shuffle_rows=True)
    with mock.patch.object(dataloader, "READ_TOKENS", 32):  # so that steps cross the limits of what is read at a time
        size = ranks * in_turn * batch
        of_steps = [range(row, row + size) for row in range(start, start + (steps + 1) * size, size)]
        loaders = [BatchLoader(rows, of_steps, batch, "cpu", rank, ranks) for rank in range(ranks)]
    batches = [loader.next() for _ in range(steps) for loader in loaders for _ in range(in_turn)]
    for loader in loaders:
        loader.close()
    expected = rows.read(start, steps * ranks * in_turn * batch)
    assert torch.cat([inputs for inputs, _ in batches]).tolist() == expected[:, :-1].tolist()
    assert torch.cat([targets for _, targets in batches]).tolist() == expected[:, 1:].tolist()


@given(shard_sizes, seeds, st.integers(0, 10**12), st.integers(1, 50))
@settings(max_examples=40)
def test_rows_read_together_equal_rows_read_one_by_one(sizes, seed, start, count):
    rows = stream(*sizes, seed=seed, shuffle_shards=True, shuffle_rows=True)
    one_by_one = [rows.read(start + i, 1)[0].tolist() for i in range(count)]
    assert rows.read(start, count).tolist() == one_by_one


@given(shard_sizes, seeds, st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 9)), min_size=2, max_size=9))
@settings(max_examples=40)
def test_rows_do_not_depend_on_what_was_read_before(sizes, seed, reads):
    """A stream keeps the block that it found last; other reads go on, jump ahead or go back."""
    used = stream(*sizes, seed=seed, shuffle_shards=True, shuffle_rows=True)
    for start, count in [*reads, reads[0]]:
        fresh = stream(*sizes, seed=seed, shuffle_shards=True, shuffle_rows=True)
        assert used.read(start, count).tolist() == fresh.read(start, count).tolist()


@given(shard_sizes, contexts, st.integers(1, 40), st.integers(0, 30))
@settings(max_examples=40)
def test_a_part_of_the_rows_is_spread_over_all_of_them(sizes, context, count, start):
    rows = stream(*sizes, context=context)
    count = min(count, rows.rows_per_epoch)
    whole, found = rows.read(0, rows.rows_per_epoch).tolist(), EvenlySpaced(rows, count).read(0, count).tolist()
    places = [whole.index(row) for row in found]
    assert places == [number * len(whole) // count for number in range(count)]
    assert EvenlySpaced(rows, count).read(min(start, count - 1), 1).tolist() == [found[min(start, count - 1)]]
    assert count < len(whole) or found == whole


def test_only_pinned_memory_is_copied_without_waiting():
    """A batch has the only reference to its rows, and their memory may be reused before the device has read it."""
    loader, copied, copy = BatchLoader(stream(60), [range(14)], 2), [], torch.Tensor.to

    def record(rows, device, non_blocking):
        copied.append((rows.is_pinned(), non_blocking))
        return copy(rows, device, non_blocking=non_blocking)

    with mock.patch.object(torch.Tensor, "to", record):
        loader.next()
        loader.ready[0] = mock.Mock(is_pinned=lambda: True, to=lambda device, non_blocking: copied.append(non_blocking))
        with pytest.raises(TypeError):  # the stand-in has no rows
            loader.next()
    loader.close()
    assert copied == [(False, False), True]


def test_data_order_is_the_same_in_every_release():
    """A failure means that runs in progress would resume on different tokens."""
    rows = stream(12, 17, 16, seed=1337, shuffle_shards=True, shuffle_rows=True)
    firsts = [rows.read(epoch * 9, 9)[:, 0].tolist() for epoch in (0, 1, 1000)]
    assert firsts == [
        [2000, 2004, 2008, 1000, 1004, 1008, 1012, 7, 3],
        [4, 0, 2003, 2011, 2007, 1004, 1000, 1012, 1008],
        [1004, 1008, 1012, 1000, 2, 6, 2002, 2006, 2010],
    ]


def test_shards_and_rows_are_shuffled_independently():
    def firsts(epoch=0, **options) -> np.ndarray:
        """The first tokens of the rows of an epoch, one shard in a row."""
        return stream(*[21] * 8, **options).read(40 * epoch, 40)[:, 0].reshape(8, 5)

    plain = firsts()
    assert plain.ravel().tolist() == sorted(plain.ravel())
    by_shard = firsts(shuffle_shards=True)
    assert (np.diff(by_shard) == 4).all()
    assert by_shard[:, 0].tolist() != sorted(by_shard[:, 0])
    by_row = firsts(shuffle_rows=True)
    assert [set(shard // 1000) for shard in by_row] == [{number} for number in range(8)]
    assert by_row.tolist() != np.sort(by_row).tolist()
    assert (firsts(epoch=1) == plain).all()
    assert (firsts(epoch=1, shuffle_rows=True) != by_row).any()
    assert (firsts(seed=1, shuffle_rows=True) != by_row).any()


# ---------------------------------------------------------------------------------------------------------------------
# formats


@given(st.lists(st.integers(0, 2**16 - 1), max_size=300), st.sampled_from(["<u2", "<u4"]))
@settings(max_examples=30)
def test_npy_shards_are_written_as_by_numpy_and_read_back(tmp_path_factory, tokens, dtype):
    path, expected = tmp_path_factory.mktemp("shards") / "a_train_000000.npy", io.BytesIO()
    write_shard(path, np.array(tokens, dtype))
    np.save(expected, np.array(tokens, dtype))
    assert path.read_bytes() == expected.getvalue()
    shard = open_shard(path)
    assert (shard.num_tokens, shard.dtype) == (len(tokens), np.dtype(dtype))
    assert shard.tokens().tolist() == tokens


def llmc_file(path: Path, tokens: list[int], magic=20240520, dtype="<u2") -> Path:
    header = np.array([magic, 1, len(tokens)] + [0] * 253, "<i4")
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def test_shards_of_llmc_modded_nanogpt_and_nanogpt(tmp_path):
    gpt2 = llmc_file(tmp_path / "fineweb_train_000001.bin", [1, 2, 65535])
    llama = llmc_file(tmp_path / "x_val_000000.bin", [1, 128000], 20240801, "<u4")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "train.bin")  # nanoGPT's have no header
    for path, tokens in ((gpt2, [1, 2, 65535]), (llama, [1, 128000]), (tmp_path / "train.bin", [*range(50)])):
        assert open_shard(path).tokens().tolist() == tokens


def test_dtype_of_shards_depends_on_the_vocabulary():
    assert [token_dtype(size).name for size in (65536, 65537)] == ["uint16", "uint32"]


def test_shards_are_selected_by_split_and_sorted_by_name(tmp_path):
    for number, name in enumerate(("a_train_000002.npy", "a_train_000001.npy", "a_val_000000.npy", "training.npy")):
        write_shard(tmp_path / name, np.full(9, number, np.uint16))
    (tmp_path / "a_train_notes.txt").write_text("")
    assert [shard.path.name for shard in train_shards(tmp_path).shards] == ["a_train_000001.npy", "a_train_000002.npy"]
    assert [shard.path.name for shard in ShardSet.find("", str(tmp_path), "val").shards] == ["a_val_000000.npy"]


@pytest.mark.parametrize("way", ["link", "hard link"])
def test_each_real_shard_is_read_once(tmp_path, way):
    first = tmp_path / "a_train_000001.npy"
    write_shard(first, np.arange(60_000, dtype=np.uint16))
    again = tmp_path / "b_train_000000.npy"
    again.hardlink_to(first) if way == "hard link" else again.symlink_to(first)
    (found,) = train_shards(tmp_path).shards
    assert found.path == first


def test_a_broken_link_is_named(tmp_path):
    (tmp_path / "a_train_000001.npy").symlink_to("nowhere.npy")
    refused(lambda: train_shards(tmp_path), "a_train_000001.npy: ", "No such file")


def test_a_name_that_says_both_splits_is_refused(tmp_path):
    write_shard(tmp_path / "train_val_1.npy", np.arange(9, dtype=np.uint16))
    for split in ("train", "val"):
        refused(lambda split=split: ShardSet.find("", str(tmp_path), split), "train_val_1.npy: ")


# ---------------------------------------------------------------------------------------------------------------------
# damage


def refused(action, *facts: str) -> None:
    with refusal(*facts):
        action()


WHOLE = npy(np.arange(100, dtype="<u2"))


@pytest.mark.parametrize(("name", "content", "facts"), [
    ("long.npy", WHOLE + b"x", (" 329 ", " 100 ", "328 ")),
    ("magic.npy", b"XXXXXX" + WHOLE[6:], (r"b'XXXXXX\x01\x00'", "train.bin")),
    ("header.npy", WHOLE[:40], ("ValueError('EOF: reading array header",)),
    ("empty.bin", b"", (" llm.c;", " 20240520 ", " 20240801,")),
    ("float.npy", npy(np.zeros(9, "<f4")), (" float32 ", " (9,);")),
    ("bytes.npy", npy(np.zeros(9, "u1")), (" uint8 ", " (9,);")),
    ("one.npy", npy(np.zeros(1, "<u2")).replace(b"(1,), }   ", b"(True,), }"), (" uint16 ", " (True,);")),
])  # fmt: skip
def test_a_damaged_shard_is_rejected(tmp_path, name, content, facts):
    """Further kinds of damage, as train.py reports them: test_refused.py."""
    (tmp_path / name).write_bytes(content)
    refused(lambda: open_shard(tmp_path / name), f"{tmp_path / name}: ", *facts)


def test_missing_shards_name_the_command_that_writes_them(tmp_path):
    default = TrainConfig(data_dir="data/edu_fineweb10B")
    without_download = "'python prepare_dataset.py --source stdlib --tokenizer bytes --out data/stdlib'"
    refused(lambda: train_shards(default.data_dir), "'python prepare_dataset.py'", without_download)
    elsewhere = "'python prepare_dataset.py --source ... --out data/nowhere'"
    refused(lambda: train_shards("data/nowhere"), " train ", " data/nowhere ", elsewhere, without_download)
    refused(lambda: ShardSet.find("", str(tmp_path), "val"), " val ", f" {tmp_path} ", "--eval_freq 0")


def train_shards(folder: Path | str) -> ShardSet:
    return ShardSet.find("", str(folder), "train")


def test_shards_that_differ_from_the_manifest_are_rejected(tmp_path):
    path = write_data(tmp_path) / "tiny_train_000002.npy"
    write_shard(path, np.zeros(3, np.uint16))
    refused(lambda: train_shards(tmp_path), "tiny_train_000002.npy: ", " 3 ", "manifest.json", " 500")
    path.unlink()
    write_shard(tmp_path / "stray_train_000009.npy", np.zeros(9, np.uint16))  # does not replace the missing one
    refused(lambda: train_shards(tmp_path), "tiny_train_000002.npy: ", "manifest.json")


def test_a_token_outside_the_vocabulary_is_reported_with_its_position(tmp_path):
    np.save(tmp_path / "a_train_000000.npy", np.array([5, -1], np.int16))
    refused(lambda: train_shards(tmp_path).check(257), "a_train_000000.npy: ", " -1 ", " 1,", " 257;")
    for number in (0, 2, 1):  # the first of several bad shards is reported
        tokens = np.zeros(2**24 + 10 if number == 1 else 10, np.uint16)  # checked in parts
        tokens[-5] = 700 * (number > 0)
        write_shard(tmp_path / f"a_train_00000{number}.npy", tokens)
    shards = train_shards(tmp_path)
    refused(lambda: shards.check(257), "a_train_000001.npy: ", " 700 ", " 16,777,221,", " 257;")
    shards.check(701)


def test_shards_that_the_manifest_does_not_list_are_ignored(tmp_path):
    write_data(tmp_path)
    (tmp_path / "stray_train_000009.npy").write_bytes(b"not even a shard")
    assert [shard.num_tokens for shard in train_shards(tmp_path).shards] == [700, 500]


ENTRY = {"file": "a_train_0.npy", "split": "train", "tokens": 9, "sha256": "0"}
MANIFEST = {"complete": True, "tokenizer": "bytes", "vocab_size": 257, "shards": [ENTRY]}


def without(key: str, fields: dict) -> dict:
    return {name: value for name, value in fields.items() if name != key}


@pytest.mark.parametrize(("text", "fact"), [
    ("", "JSON"), ("{", "JSON"), ("[]", "`array`"), ("\xff", "JSON"), ("[" * 100_000, "`array`"),
    *((json.dumps(without(key, MANIFEST)), f"Object missing required field `{key}`") for key in MANIFEST),
    *((json.dumps(MANIFEST | {"shards": [without(key, ENTRY)]}), f"field `{key}` - at `$.shards[0]`")
      for key in ENTRY),
    *((json.dumps(MANIFEST | {"shards": [ENTRY | wrong]}), f" - at `$.shards[0].{min(wrong)}`")
      for wrong in ({"file": "../a_train_0.npy"}, {"file": "/a.npy"}, {"split": "test"}, {"tokens": -1},
                    {"tokens": True}, {"tokens": 2**64}, {"sha256": 0})),
    (json.dumps(MANIFEST | {"complete": False}), "prepare_dataset.py"),
])  # fmt: skip
def test_a_malformed_or_unfinished_manifest_is_rejected(tmp_path, text, fact):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    refused(lambda: read_manifest(tmp_path), str(tmp_path), fact)


@pytest.mark.parametrize("how", ["shortened", "emptied", "deleted", "replaced by a shorter one", "appended to"])
@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_a_shard_that_changes_while_a_run_reads_it_is_named(tmp_path, suffix, how):
    """A shorter file would end the process by a bus error. The run has mapped the other files as they were."""
    path = tmp_path / f"train.{suffix}"
    tokens = np.arange(1000, dtype="<u2")
    np.save(path, tokens) if suffix == "npy" else path.write_bytes(tokens.tobytes())
    loader = BatchLoader(RowStream([open_shard(path)], 16), (range(i, i + 4) for i in range(0, 10**6, 4)), 4)
    loader.next()
    wait(loader.pending)  # a read in progress would still end the process
    match how:
        case "shortened" | "emptied":
            os.truncate(path, 100 if how == "shortened" else 0)
        case "deleted":
            path.unlink()
        case "replaced by a shorter one":
            (tmp_path / "new").write_bytes(b"x")
            (tmp_path / "new").rename(path)
        case "appended to":
            with open(path, "ab") as file:
                file.write(b"more")

    def read() -> None:
        for _ in range(3 * loader.micro_batches_per_read):  # what was read ahead comes first
            loader.next()

    if how in ("shortened", "emptied", "appended to"):
        found = {"shortened": "100", "emptied": "0"}.get(how, "2,132" if suffix == "npy" else "2,004")
        expected = "2,128" if suffix == "npy" else "2,000"
        with refusal(f"{path}: ", f" {found} ", f" {expected}.", "--resume ", kind=RankError):
            read()
    else:
        read()


def test_shards_without_a_whole_row_are_rejected(tmp_path):
    write_shard(tmp_path / "a_train_000000.npy", np.zeros(16, np.uint16))
    shards = train_shards(tmp_path).shards
    refused(lambda: RowStream(shards, 16), "--context_length 16", " 16 ", " 17,")
    assert RowStream(shards, 15).rows_per_epoch == 1
    write_shard(tmp_path / "b_train_000001.npy", np.zeros(0, np.uint16))
    train_shards(tmp_path).check(257)  # also without any token


# ---------------------------------------------------------------------------------------------------------------------
# the data of a run


def test_a_file_with_a_known_name_size_and_time_is_not_read_again(tmp_path, monkeypatch):
    write_data(tmp_path)
    shards = train_shards(tmp_path)
    known = shards.check(257)
    read = []
    monkeypatch.setattr(Shard, "tokens", lambda shard: read.append(shard.path.name) or np.zeros(1, np.uint16))
    assert shards.check(257, known) == known
    assert read == []
    os.utime(tmp_path / "tiny_train_000002.npy")
    shards.check(257, known)
    assert read == ["tiny_train_000002.npy"]


def test_data_is_the_same_by_the_sums_of_its_shards(tmp_path):
    def identity_of(name: str, **options) -> str:
        return ShardSet.find("any", str(write_data(tmp_path / name, **options)), "train").digest()

    there = identity_of("one")
    assert identity_of("copy") == there
    others = [{"seed": 1}, {"num_tokens": (200, 700)}, {"num_tokens": (200, 700, 500, 300)}]
    assert len({there, *(identity_of("other", **options) for options in others)}) == 4
    assert identity_of("one", num_tokens=(300, 700, 500)) == there  # the val shard does not count


def test_data_without_a_manifest_is_the_same_by_samples_of_its_tokens(tmp_path):
    def identity_of(name: str, **options) -> str:
        folder = write_data(tmp_path / name, **options)
        (folder / "manifest.json").unlink()
        return ShardSet.find("any", str(folder), "train").digest()

    there = identity_of("one")
    assert identity_of("copy") == there
    others = [{"seed": 1}, {"num_tokens": (200, 700)}, {"num_tokens": (200, 700, 500, 300)}]
    for number, options in enumerate(others):
        assert identity_of(f"other{number}", **options) != there


def test_the_data_of_a_run_has_shards_a_tokenizer_and_a_vocabulary(tmp_path):
    config = TrainConfig(data_dir=str(write_data(tmp_path)), context_length=16)
    data = find_data(Start(), config)
    assert (data.tokenizer_record.tokenizer, data.vocab_size) == ("bytes", 257)
    assert [shard.num_tokens for shard in data.sources[0].shards.shards] == [700, 500]
    assert data.sources[0].rows.rows_per_epoch == 699 // 16 + 499 // 16
    assert data.val_sets[0].rows.rows_per_epoch == 199 // 16
    for name in ("manifest.json", "tiny_val_000000.npy"):
        (tmp_path / name).unlink()
    data = find_data(Start(), replace(config, eval_freq=0, tokenizer="bytes"))
    assert (data.tokenizer_record.tokenizer, data.vocab_size, data.val_sets) == ("bytes", 257, ())


def test_the_characters_of_nanogpt_are_not_taken_for_tokens_of_gpt2(tmp_path):
    for split in ("train", "val"):
        np.arange(65, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    config = TrainConfig(data_dir=str(tmp_path), context_length=16)
    assert find_data(Start(), config).tokenizer_record.tokenizer == "gpt2"
    (tmp_path / "meta.pkl").write_bytes(b"")  # is never read: a pickle can run code
    refused(lambda: find_data(Start(), config), "meta.pkl: ", "nanoGPT", "--tokenizer bytes")
    assert find_data(Start(), replace(config, tokenizer="bytes")).vocab_size == 257
