"""Tests of steadygpt/data/survey.py: documents found in shards that are cut anywhere and read in any blocks."""

import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.data import survey
from steadygpt.data.shards import Shard, open_shard, write_shard
from steadygpt.data.survey import read_tokens, repeated, survey_split
from steadygpt.data.tokenizer import get_tokenizer

BYTES = get_tokenizer("bytes")
BEGIN = BYTES.document_id


def write(folder: Path, *shards: list[int], dtype="<u2") -> list[Shard]:
    """Write the shards of a split."""
    paths = [folder / f"a_train_{number}.npy" for number in range(len(shards))]
    for path, ids in zip(paths, shards, strict=True):
        write_shard(path, np.array(ids, dtype))
    return [open_shard(path) for path in paths]


def ids_of(*texts: str) -> list[int]:
    """Return the ids of a split with these documents."""
    return [i for text in texts for i in (BEGIN, *text.encode())]


def surveyed(shards: list[Shard]) -> survey.Survey:
    return survey_split(shards, BYTES, lambda count: None)


def documents_in(shards: list[Shard]) -> list[list[int]]:
    """Return the ids of the documents that a survey finds."""
    found = surveyed(shards)
    spans = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    return [read_tokens(shards, start, length).tolist() for start, length in spans]


@settings(deadline=None, max_examples=40)
@given(
    ids=st.lists(st.sampled_from([97, 98, BEGIN]), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=3),
    block=st.integers(1, 8),
)
def test_the_cuts_between_shards_and_blocks_do_not_matter(ids, cuts, block, tmp_path_factory):
    texts = "".join(" " if i == BEGIN else chr(i) for i in ids).split(" ")
    if texts[0] == "":  # each document token begins a document
        del texts[0]
    elif texts[-1] == "":  # each one ends a document
        del texts[-1]
    bounds = [0, *sorted(cuts), len(ids)]
    shards = [ids[start:end] for start, end in pairwise(bounds)]
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "BLOCK_TOKENS", block)
        shards = write(folder, *shards)
        found = surveyed(shards)
    assert documents_in(shards) == [list(text.encode()) for text in texts]
    same = [[one == other for other in texts] for one in texts]
    assert (found.digests[:, None] == found.digests).tolist() == same
    assert found.counts.tolist() == np.bincount(np.array(ids, int), minlength=257).tolist()


def test_the_dtype_of_a_shard_does_not_matter(tmp_path):
    one, other = (surveyed(write(tmp_path, ids_of("same"), dtype=dtype)) for dtype in ("<u2", "<i4"))
    assert one.digests.tolist() == other.digests.tolist()


def test_repeated_keeps_the_documents_that_occur_twice_in_any_splits(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
    train = surveyed(write(tmp_path / "train", ids_of("1", "twice", "", "both", "twice", "")))
    val = surveyed(write(tmp_path / "val", ids_of("both", "other")))
    assert [survey.lengths.tolist() for survey in repeated([train, val])] == [[5, 4, 5], [4]]
    assert [survey.starts.tolist() for survey in repeated([train, val])] == [[3, 10, 15], [1]]
    assert [len(survey.lengths) for survey in repeated([val])] == [0]


def test_a_split_larger_than_memory_is_read_in_blocks(tmp_path, monkeypatch):
    shards = write(tmp_path, ids_of("x" * 1_000_000))
    monkeypatch.setattr(survey, "BLOCK_TOKENS", 10_000)
    tracemalloc.start()
    assert surveyed(shards).lengths.tolist() == [1_000_000]
    assert tracemalloc.get_traced_memory()[1] < os.path.getsize(shards[0].path) / 4
    tracemalloc.stop()
