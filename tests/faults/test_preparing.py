"""prepare_dataset.py killed, stopped, and with a Hub, a network or a disk that fails: the shards are the same."""

import contextlib
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import HUB, REPO
from harness import Run, wait_for_files
from standin import CORPUS, TEXTS, corpus
from test_disk import fill_disk, free_space, small_disk  # noqa: F401 (a fixture)
from test_upload import use_store

OF_HUB = "--source hf:some/corpus:part --shard_size 90000 --val_share 0.1 "
SLOW = 1_500_000  # bytes a second: the whole data set takes a second
storm = pytest.mark.storm


def begin(rank: int, cache: str = "hf") -> None:
    """Use a cache in the current folder, and small units."""
    import huggingface_hub.constants

    from steadygpt.prepare import documents, sources

    documents.BLOCK_BYTES = sources.BLOCK_BYTES = 50_000
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
    huggingface_hub.constants.HF_HUB_CACHE = os.path.abspath(cache)


def prepare(flags: str, out: str, workers: int = 2, faults=(), cache: str = "hf") -> Run:
    options = f"--tokenizer bytes --num_workers {workers} {flags} --out {out}".split()
    return Run(*options, program="prepare_dataset", tiny=(), faults=[partial(begin, cache=cache), *faults])


def finish(flags: str, out: str, **options) -> str:
    """Prepare to the end, with one worker; return the output."""
    run = prepare(flags, out, workers=1, **options)
    assert run.wait() == [0], run.text()
    return run.text()


def shards(folder: str) -> dict[str, bytes]:
    """Return name -> content of the shards and the manifest."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of the shards of the data set on the Hub, prepared without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    HUB.clear()
    HUB.put(CORPUS, corpus())
    with contextlib.chdir(folder):
        finish(OF_HUB, "shards")
    return folder / "shards"


@pytest.fixture
def reference(whole) -> None:
    """The data set on the Hub, and its shards in the folder "reference"."""
    HUB.clear()
    HUB.put(CORPUS, corpus())
    Path("reference").symlink_to(whole)
    assert len(shards("reference")) > 12


@pytest.fixture
def texts() -> Path:
    """1 MB of text with examples of unusable input, in the folder "texts"."""
    folder, words = Path("texts"), random.Random(0)
    folder.mkdir()
    rows = [json.dumps({"text": f"{n} {words.random()} " * words.randrange(60)}).encode() for n in range(900)]
    rows[5], rows[300], rows[301] = b"{broken", b'{"text": ""}', b'{"text": null}'
    rows[302], rows[700], rows[701] = b'{"other": 1}', b"", b'{"text": "\xff\xfe and \\ud800"}'
    (folder / "a.jsonl").write_bytes(b"\n".join(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows[::-1])))
    (folder / "c.jsonl").write_bytes(b'{"text": "%s"}' % (b"one long document " * 15_000 + b"\xff"))
    (folder / "empty.jsonl").touch()
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# kills


def survive_kills(flags: str, kills: int, stages: int, pause_s: float, faults: tuple[Callable, ...]) -> None:
    """Kill preparations at random instants until they are complete, and compare them with "reference".

    Args:
        stages: the kills come at so many different counts of shards.
        pause_s: time to the kill, at most; if it comes after a new shard, a tenth.
    """
    rng, number, seen, done = random.Random(kills), 0, set(), 0
    while done < kills:
        out = Path(f"killed{number}")
        run, new_shards = prepare(flags, str(out), faults=faults), rng.randrange(4)
        wait_for_files(run, out, "*.npy", len(list(out.glob("*.npy"))) + new_shards)
        time.sleep(rng.uniform(0, pause_s / 10 if new_shards else pause_s))
        if run.is_alive():
            run.kill()
            seen.add(len(list(out.glob("*.npy"))))
            done += 1
        else:
            assert run.wait() == [0], run.text()
            assert shards(str(out)) == shards("reference")
            number += 1
    HUB.faults.clear()
    finish(flags, str(out), faults=faults)
    assert shards(str(out)) == shards("reference")
    assert len(seen) >= stages
    assert not workers_left()


def workers_left() -> list[psutil.Process]:
    """Return the processes of killed runs that are still there after some seconds."""
    found = [
        process
        for process in psutil.process_iter(["cwd", "ppid"])
        # This process may have started the harness's server.
        if process.info["cwd"] == os.getcwd() and os.getpid() not in (process.pid, process.info["ppid"])
    ]
    return psutil.wait_procs(found, timeout=20)[1]


KILLS = [
    ("on_disk", "--shard_size 50000", 2, 1),
    pytest.param("on_disk", "--shard_size 50000", 20, 6, marks=storm),
    pytest.param("on_disk", "--shard_size 50000", 200, 6, marks=storm),
    pytest.param("on_disk", "--shard_size 20000 --tokenizer bpe:600", 20, 6, marks=storm),
    pytest.param("in_store", "--shard_size 50000", 20, 6, marks=storm),
    pytest.param("on_hub", "", 20, 4, marks=storm),
]


@pytest.mark.parametrize(("where", "flags", "kills", "stages"), KILLS)
def test_preparing_survives_kills_at_random_instants(where, flags, kills, stages, request):
    if where == "on_hub":
        request.getfixturevalue("reference")
        source, pause_s, faults = OF_HUB, 2.5, ()
        HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW)
    else:
        texts = request.getfixturevalue("texts")
        source, pause_s, faults = f"--source {texts}", 0.25, ()
        if where == "in_store":
            s3 = request.getfixturevalue("s3")
            for path in texts.iterdir():
                s3.put(path.name, path.read_bytes())
            variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            source, faults = f"--source {s3.url}/*", (partial(use_store, variables),)
        finish(f"{source} {flags}", "reference", faults=faults)
    survive_kills(f"{source} {flags}", kills, stages, pause_s, faults)


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C, disks, the exit status


def test_ctrl_c_ends_a_preparation_at_once(reference):
    HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW / 5)
    run = prepare(OF_HUB, "out")
    run.wait_for("source: ")
    start_s = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait() == [130], run.text()
    assert time.monotonic() - start_s < 5
    assert "stopped; run the same command again to resume" in run.text()
    assert "Traceback" not in run.text()
    assert not workers_left()
    HUB.faults.clear()
    finish(OF_HUB, "out")
    assert shards("out") == shards("reference")


@storm
def test_a_disk_that_fills_is_told_and_the_same_command_goes_on(reference, small_disk):  # noqa: F811
    """It fills while a shard is written."""
    HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW / 2)
    run = prepare(OF_HUB, "run/out")
    wait_for_files(run, Path("run/out"), "manifest.json", 1)
    fill_disk()
    assert run.wait() == [2], run.text()
    (line,) = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert "run/out" in line and "No space left on device; " in line
    assert " free; fix it, then run the same command again to resume" in line
    free_space()
    HUB.faults.clear()
    finish(OF_HUB, "run/out")
    assert shards("run/out") == shards("reference")


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=storm)])
def test_a_wrong_text_field_ends_with_status_2_every_time(times, reference):
    """As a user types it; threads that were alive at the exit used to abort it (status 134)."""
    command = [sys.executable, str(REPO / "prepare_dataset.py"), *OF_HUB.split(), "--tokenizer", "bytes"]
    for _ in range(times):
        done = subprocess.run([*command, "--text_field", "txt"], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert done.stderr.endswith("no field 'txt', found id, text; set --text_field to the field with the text\n")


# ---------------------------------------------------------------------------------------------------------------------
# memory


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


def memory_for(flags: str, out: str) -> int:
    """Return the peak growth of the process in bytes."""
    run = prepare(flags, out, faults=[record_memory])
    assert run.wait(timeout_s=1200) == [0], run.text()
    return int(Path("memory.txt").read_text())


@storm
def test_memory_does_not_grow_with_the_length_of_a_line():
    peaks = []
    for megabytes in (16, 1000):
        with open("line.txt", "wb") as file:
            for _ in range(megabytes):
                file.write(b"word " * 200_000)
        peaks.append(memory_for("--source line.txt --shard_size 1000000 --val_share 0", f"out{megabytes}"))
    assert peaks[1] < peaks[0] + 200e6  # measured: 150 to 156 MB more


def test_memory_does_not_grow_with_the_data_set(reference):
    peaks = []
    for factor in (1, 4):
        HUB.put(CORPUS, corpus(TEXTS, factor))
        peaks.append(memory_for(OF_HUB, f"out{factor}"))
    assert peaks[1] < peaks[0] + 10e6
