"""Preparing data: killed at any instant it comes to the same shards; what cannot be used is counted and named."""

import gzip
import json
import random
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import Life

from steadygpt import sources
from steadygpt.shards import read_manifest

prepare = partial(Life, program="prepare_dataset", tiny=("--tokenizer", "bytes", "--num_workers", "2"))


def prepared(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """4 MB with all that may be wrong in it, in the folder "corpus"."""
    monkeypatch.chdir(tmp_path)
    folder, words = tmp_path / "corpus", random.Random(0)
    folder.mkdir()
    rows = [json.dumps({"text": f"{n} {words.random()} " * words.randrange(60)}).encode() for n in range(3000)]
    for at, line in {
        5: b"{broken",
        900: b'{"text": ""}',
        901: b'{"text": null}',
        902: b'{"other": 1}',
        1700: b"",
        1701: b'{"text": "\xff\xfe and \\ud800"}',
    }.items():
        rows[at] = line
    (folder / "a.jsonl").write_bytes(b"\n".join(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows[::-1])))
    (folder / "c.txt").write_bytes(b"one long document " * 50_000 + b"\xff")
    (folder / "empty.jsonl").touch()
    (folder / "empty.txt").touch()
    return folder


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.storm)])
def test_killed_at_random_instants(corpus, kills):
    flags = ("--source", "corpus", "--shard_size", "50000", "--val_tokens", "60000")
    assert prepare(*flags, "--out", "whole").wait() == [0]
    manifest = read_manifest(Path("whole"))
    assert manifest["repaired"] == 3
    assert manifest["skipped"] == {
        "broken JSON": 2, "no text": manifest["skipped"]["no text"], "NoneType, not a string": 2,
        "no field 'text'": 2, "blank line": 2,
    }  # fmt: skip
    instants, number, shards_at_kill = random.Random(1), 0, []
    while len(shards_at_kill) < kills:
        life = prepare(*flags, "--out", f"killed{number}")
        time.sleep(instants.uniform(0.05, 0.35))
        if life.is_alive():
            life.kill()
            shards_at_kill.append(len(list(Path(f"killed{number}").glob("*.npy"))))
        else:
            assert prepared(f"killed{number}") == prepared("whole")
            number += 1
    assert prepare(*flags, "--out", f"killed{number}").wait() == [0]
    assert prepared(f"killed{number}") == prepared("whole")
    assert len(set(shards_at_kill)) > 5  # all over it


def test_what_is_skipped_is_named(corpus):
    life = prepare("--source", "corpus", "--out", "out")
    assert life.wait() == [0]
    assert "skipped corpus/a.jsonl:6: broken JSON" in life.text()
    assert "skipped (broken JSON)" in life.text() and "skipped (NoneType, not a string)" in life.text()


def note_memory(rank: int) -> None:
    """Write to memory.txt by how many bytes the process has grown at most."""
    import prepare_dataset

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before, main = peak(), prepare_dataset.main

    def noting_main():
        status = main()
        Path("memory.txt").write_text(str(peak() - before))
        return status

    prepare_dataset.main = noting_main


def memory_for(megabytes: int, kind: str) -> int:
    """Peak growth in bytes for one line of text of so many megabytes."""
    path = Path(f"{megabytes}.{kind}")
    with open(path, "wb") as file:
        file.write(b'{"text": "first"}\n{"text": "' if kind == "jsonl" else b"")
        for _ in range(megabytes):
            file.write(b"word " * 200_000)
        file.write(b'"}\n{"text": "last"}\n' if kind == "jsonl" else b"")
    life = prepare(
        "--source",
        str(path),
        "--out",
        f"out-{path}",
        "--shard_size",
        "1000000",
        "--val_tokens",
        "2",
        faults=[note_memory],
    )
    assert life.wait(timeout_s=1200) == [0], life.text()
    path.unlink()
    return int(Path("memory.txt").read_text())


@pytest.mark.parametrize(("small", "large"), [(2, 16), pytest.param(16, 1000, marks=pytest.mark.storm)])
def test_one_line_of_any_length_takes_the_same_memory(tmp_path, monkeypatch, small, large):
    monkeypatch.chdir(tmp_path)
    assert memory_for(large, "txt") < memory_for(small, "txt") + 150e6


@pytest.mark.parametrize("large", [200, pytest.param(1000, marks=pytest.mark.storm)])
def test_a_line_of_json_that_is_too_long_is_skipped_and_told(tmp_path, monkeypatch, large):
    monkeypatch.chdir(tmp_path)
    assert memory_for(large, "jsonl") < 3 * sources.MAX_LINE_BYTES
    manifest = read_manifest(Path(f"out-{large}.jsonl"))
    assert manifest["documents"] == 2 and manifest["skipped"] == {"a line of more than 64 MB": 1}
    shards = sorted(Path(f"out-{large}.jsonl").glob("*.npy"), key=lambda path: path.stem[-6:])
    ids = np.concatenate([np.load(path) for path in shards])
    assert bytes(ids[ids < 256].astype(np.uint8)) == b"firstlast"
