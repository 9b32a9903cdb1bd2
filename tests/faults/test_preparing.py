"""prepare_dataset.py killed at random instants, and input that it skips, counts and reports."""

import contextlib
import gzip
import json
import os
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness import Run, wait_for_files
from test_upload import use_store

from steadygpt.data.shards import read_manifest

prepare = partial(Run, program="prepare_dataset", tiny=("--tokenizer", "bytes", "--num_workers", "2"))


def shards(folder: str) -> dict[str, bytes]:
    """Return name -> content of the shards and the manifest."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """4 MB of text with examples of unusable input, in the folder "corpus"."""
    monkeypatch.chdir(tmp_path)
    folder, words = tmp_path / "corpus", random.Random(0)
    folder.mkdir()
    rows = [json.dumps({"text": f"{n} {words.random()} " * words.randrange(60)}).encode() for n in range(3000)]
    for number, line in {
        5: b"{broken",
        900: b'{"text": ""}',
        901: b'{"text": null}',
        902: b'{"other": 1}',
        1700: b"",
        1701: b'{"text": "\xff\xfe and \\ud800"}',
    }.items():
        rows[number] = line
    (folder / "a.jsonl").write_bytes(b"\n".join(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows[::-1])))
    (folder / "c.txt").write_bytes(b"one long document " * 50_000 + b"\xff")
    (folder / "empty.jsonl").touch()
    (folder / "empty.txt").touch()
    return folder


def survive_kills(flags: tuple[str, ...], kills: int, stages: int, begin: Callable[[int], object] = bool) -> None:
    """Kill preparations at random instants until they are complete, and compare them with one without kills."""
    whole = prepare(*flags, "--out", "reference", faults=[begin])
    assert whole.wait() == [0], whole.text()
    rng, number, shards_at_kill = random.Random(1), 0, []
    while len(shards_at_kill) < kills:
        folder = Path(f"killed{number}")
        run, new_shards = prepare(*flags, "--out", str(folder), faults=[begin]), rng.randrange(4)
        enough = len(list(folder.glob("*.npy"))) + new_shards
        wait_for_files(run, folder, "*.npy", enough)
        time.sleep(rng.uniform(0, 0.03 if new_shards else 0.25))
        if run.is_alive():
            run.kill()
            shards_at_kill.append(len(list(folder.glob("*.npy"))))
        else:
            assert shards(str(folder)) == shards("reference")
            number += 1
    assert prepare(*flags, "--out", f"killed{number}", faults=[begin]).wait() == [0]
    assert shards(f"killed{number}") == shards("reference")
    assert len(set(shards_at_kill)) >= stages  # the kills came at different stages


@pytest.mark.parametrize(
    ("kills", "stages"), [(4, 3), *(pytest.param(kills, 6, marks=pytest.mark.storm) for kills in (20, 200))]
)
def test_preparing_survives_kills_at_random_instants(corpus, kills, stages):
    survive_kills(("--source", "corpus", "--shard_size", "50000"), kills, stages)
    manifest = read_manifest(Path("reference"))
    assert manifest["repaired"] == 7
    assert manifest["skipped"] == {
        "broken JSON": 2, "no text": manifest["skipped"]["no text"], "null, not a string": 2,
        "no field 'text'": 2, "blank line": 2,
    }  # fmt: skip


@pytest.mark.storm
def test_preparing_with_a_tokenizer_of_its_own_survives_kills(corpus):
    survive_kills(("--source", "corpus", "--shard_size", "20000", "--tokenizer", "bpe:600"), 20, 6)


@pytest.mark.storm
def test_preparing_from_a_store_survives_kills(corpus, s3):
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for path in corpus.iterdir():
        s3.put(path.name, path.read_bytes())
    for number, mode in enumerate(([], ["--streaming"])):
        Path(str(number)).mkdir()
        with contextlib.chdir(str(number)):
            survive_kills(
                ("--source", f"{s3.url}/*", "--shard_size", "50000", *mode), 20, 6, partial(use_store, variables)
            )


def test_skipped_input_is_counted_and_reported(corpus):
    run = prepare("--source", "corpus", "--out", "out")
    assert run.wait() == [0]
    assert "skipped corpus/a.jsonl:6: broken JSON" in run.text()
    assert "skipped (broken JSON)" in run.text()
    assert "skipped (null, not a string)" in run.text()


def record_memory(rank: int) -> None:
    """Write the peak growth of the process in bytes to memory.txt."""
    import prepare_dataset

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before, main = peak(), prepare_dataset.main

    def recording_main():
        status = main()
        Path("memory.txt").write_text(str(peak() - before))
        return status

    prepare_dataset.main = recording_main


def memory_for(megabytes: int) -> int:
    """Return the peak growth of the process in bytes for one line of `megabytes` MB."""
    path = Path(f"{megabytes}.txt")
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(b"word " * 200_000)
    flags = ("--source", str(path), "--out", f"out-{path}", "--shard_size", "1000000", "--val_tokens", "2")
    run = prepare(*flags, faults=[record_memory])
    assert run.wait(timeout_s=1200) == [0], run.text()
    path.unlink()
    return int(Path("memory.txt").read_text())


@pytest.mark.parametrize(("small", "large"), [(2, 16), pytest.param(16, 1000, marks=pytest.mark.storm)])
def test_memory_does_not_grow_with_the_length_of_a_line(tmp_path, monkeypatch, small, large):
    monkeypatch.chdir(tmp_path)
    assert memory_for(large) < memory_for(small) + 150e6
