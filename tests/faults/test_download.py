"""prepare_dataset.py with a data set of the Hub: killed, stopped, and with a Hub, a network or a disk that fails."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import HUB, REPO
from harness import Run, refusal, wait_for_files
from standin import CORPUS, TEXTS, corpus
from test_disk import fill_disk, free_space, small_disk  # noqa: F401 (a fixture)
from test_preparing import record_memory, shards

from steadygpt.base import retry
from steadygpt.data.shards import read_manifest

FLAGS = "--source hf:some/corpus:part --shard_size 90000 --val_tokens 90000".split()
MODES = {"downloading": [], "streaming": ["--streaming"], "tokenizing": ["--keep_download"]}
SLOW = 1_500_000  # bytes a second: the whole data set takes a second


def begin(rank: int, cache: str = "hf", **constants: float) -> None:
    """Use a cache in the current folder, sample less text, and set constants of steadygpt.base.retry."""
    import huggingface_hub.constants

    import prepare_dataset

    prepare_dataset.SAMPLE_BYTES = 50_000  # of the first file only
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
    huggingface_hub.constants.HF_HUB_CACHE = os.path.abspath(cache)
    for name, value in constants.items():
        setattr(retry, name, value)


def prepare(*flags: str, workers: int = 2, **constants) -> Run:
    options = ("--tokenizer", "bytes", "--num_workers", str(workers))
    return Run(*FLAGS, *flags, program="prepare_dataset", tiny=options, faults=[partial(begin, **constants)])


def finish(*flags: str, **options) -> Run:
    run = prepare(*flags, workers=1, **options)  # the shards are the same for any number of workers
    assert run.wait() == [0], run.text()
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of the data set's shards, prepared without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    HUB.clear()
    HUB.put(CORPUS, corpus())
    with contextlib.chdir(folder):
        finish("--out", "shards")
    return folder / "shards"


@pytest.fixture
def reference(whole, tmp_path, monkeypatch):
    """The data set on the Hub, and its shards in the folder "reference"."""
    monkeypatch.chdir(tmp_path)
    HUB.clear()
    HUB.put(CORPUS, corpus())
    Path("reference").symlink_to(whole)
    assert len(shards("reference")) > 12
    assert not Path("reference/.download").exists()


@pytest.mark.parametrize(
    ("kills", "mode"),
    [
        pytest.param(n, mode, marks=() if (n, mode) == (4, "streaming") else pytest.mark.storm)
        for n in (4, 20)
        for mode in MODES
    ],
)
def test_a_preparation_from_the_hub_survives_kills(mode, kills, reference):
    """Kill at random instants while files are downloaded, streamed, or there."""
    rng, number, stages = random.Random(kills), 0, set()
    if mode == "tokenizing":
        finish("--out", "filling-the-cache", "--keep_download")
    else:
        HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW)
    done = 0
    while done < kills:
        out = f"killed{number}"
        run = prepare(*MODES[mode], "--out", out)
        folder, new_shards = Path(out), rng.randrange(5)
        enough = len(list(folder.glob("*.npy"))) + new_shards
        wait_for_files(run, folder, "*.npy", enough)
        time.sleep(rng.uniform(0, 0.1 if new_shards else 2.5))
        if run.is_alive():
            run.kill()
            parts = sum(path.stat().st_size for path in folder.rglob("*.part"))
            stages.add((len(list(folder.glob("*.npy"))), parts > 0))
            done += 1
        else:
            assert run.wait() == [0], run.text()
            assert shards(out) == shards("reference")
            number += 1
    HUB.faults.clear()
    finish(*MODES[mode], "--out", out)
    assert shards(out) == shards("reference")
    assert len(stages) >= min(4, kills - 2)  # the kills came at different stages
    assert not workers_left()


def workers_left() -> list[str]:
    """Return the processes of killed runs that are still there after some seconds."""
    folder, deadline = os.getcwd(), time.monotonic() + 20

    def alive() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                of_this_test = os.getpid() in (int(process.name), parent)  # it may have started the harness's server
                if os.readlink(process / "cwd") == folder and not of_this_test:
                    found.append((process / "cmdline").read_text().replace("\0", " "))
        return found

    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive()


@pytest.mark.parametrize("mode", ["downloading", pytest.param("streaming", marks=pytest.mark.storm)])
def test_the_commit_moves_under_a_killed_preparation(mode, reference):
    """Kill when the third shard is written."""
    HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW)
    run = prepare(*MODES[mode], "--out", "out")
    wait_for_files(run, Path("out"), "*.npy", 3)
    run.kill()
    HUB.faults.clear()
    old, new = HUB.heads[CORPUS], HUB.put(CORPUS, corpus([text.upper() for text in TEXTS]))
    text = finish(*MODES[mode], "--out", "out").text()
    assert f"now at commit {new[:7]}; continuing with the pinned commit {old[:7]}" in text
    assert shards("out") == shards("reference")
    finish(*MODES[mode], "--out", "new")
    assert read_manifest(Path("new"))["commit"] == new
    assert shards("new") != shards("reference")


FAULTS = {
    "resets": {"times": 5, "drop_after": 70_000},
    "errors": {"times": 3, "status": 500},
    "too many requests": {"times": 2, "status": 429, "headers": {"Retry-After": "1"}},
    "stalls": {"times": 2, "stall_after": 70_000, "stall_s": 3},
    "damage": {"times": 1, "damaged": True},
}


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        # Each fault once in the fast suite, by turns in each mode.
        pytest.param(mode, fault, marks=() if (i + j) % 2 == 0 else pytest.mark.storm)
        for i, mode in enumerate(["downloading", "streaming"])
        for j, fault in enumerate(FAULTS)
    ],
)
def test_passing_faults_of_the_hub_cost_a_line_each(mode, fault, reference):
    if (mode, fault) == ("streaming", "damage"):
        pytest.skip("a part of a file has no checksum")
    HUB.fail("GET .*1.parquet", **FAULTS[fault])
    text = finish(*MODES[mode], "--out", "out", SILENCE_S=1).text()
    lines = text.count("corrupted in transit; downloading it again" if fault == "damage" else "; retrying in ")
    assert 0 < lines <= FAULTS[fault]["times"]
    assert "Traceback" not in text
    assert shards("out") == shards("reference")


@pytest.mark.parametrize("mode", ["downloading", pytest.param("streaming", marks=pytest.mark.storm)])
def test_a_hub_that_is_gone_is_waited_for_or_told(mode, reference):
    """The clock is shortened: an hour is a second."""
    times = {"PATIENCE_S": 2.0, "LONGEST_PAUSE_S": 0.2}
    HUB.fail("GET .*[1-5].parquet", times=-1, drop_after=0)
    message = refusal(
        *FLAGS, *MODES[mode], "--out", "out", program="prepare_dataset",
        tiny=("--tokenizer", "bytes", "--num_workers", "2"), faults=[partial(begin, **times)],
    )  # fmt: skip
    assert "no answer (" in message
    run = prepare(*MODES[mode], "--out", "out", **times)
    run.wait_for("retrying")
    time.sleep(1)
    HUB.faults.clear()
    assert run.wait() == [0], run.text()
    assert shards("out") == shards("reference")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "streaming" else pytest.mark.storm) for mode in MODES]
)
def test_ctrl_c_ends_a_preparation_at_once(mode, reference):
    if mode == "tokenizing":
        finish("--out", "filling-the-cache", "--keep_download")
    HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW / 5)
    run = prepare(*MODES[mode], "--out", "out")
    run.wait_for("disk: about")
    start_s = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait() == [130], run.text()
    assert time.monotonic() - start_s < 5
    assert "stopped; run the same command again to resume" in run.text()
    assert "Traceback" not in run.text()
    assert not workers_left()
    HUB.faults.clear()
    finish(*MODES[mode], "--out", "out")
    assert shards("out") == shards("reference")


@pytest.mark.parametrize(
    "mode", ["downloading", *(pytest.param(mode, marks=pytest.mark.storm) for mode in ("streaming", "keeping"))]
)
def test_a_disk_that_fills_is_told_and_the_same_command_goes_on(mode, reference, small_disk):  # noqa: F811
    """The disk fills while a file is downloaded, a shard is written, or the cache grows."""
    flags = {"keeping": ["--keep_download"], **MODES}[mode]
    place = {"out": "run/out", "cache": "hf"} if mode != "keeping" else {"out": "out", "cache": "run/hf"}
    HUB.fail("GET .*parquet", times=-1, bytes_per_s=SLOW / 2)
    run = prepare(*flags, "--out", place["out"], cache=place["cache"])
    wait_for_files(run, Path(place["out"]), "manifest.json", 1)  # written after the check of the disk
    fill_disk()
    assert run.wait() == [2], run.text()
    (line,) = [line for line in run.text().splitlines() if line.startswith("error: ")]
    what = {"downloading": r"part|npy\.tmp", "streaming": r"npy\.tmp", "keeping": r"part"}[mode]
    assert any(f"{name}: No space left on device; " in line for name in what.replace("\\", "").split("|")), line
    assert " free; fix it, then run the same command again to resume" in line
    free_space()
    HUB.faults.clear()
    finish(*flags, "--out", place["out"], cache=place["cache"])
    assert shards(place["out"]) == shards("reference")


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.storm)])
def test_a_wrong_text_field_ends_with_status_2_every_time(times, reference):
    """As a user types it; threads that were alive at the exit used to abort it (status 134)."""
    command = [sys.executable, str(REPO / "prepare_dataset.py"), *FLAGS, "--tokenizer", "bytes", "--text_field", "txt"]
    for mode in ([], ["--streaming"]):
        for _ in range(times):
            done = subprocess.run([*command, *mode], capture_output=True, text=True)
            assert done.returncode == 2, done.stderr
            assert done.stderr.endswith("no field 'txt'; found id, text; set --text_field to the field with the text\n")


@pytest.mark.parametrize("mode", ["downloading", pytest.param("streaming", marks=pytest.mark.storm)])
def test_memory_does_not_grow_with_the_data_set(mode, reference):
    peaks = []
    for factor in (1, 8):
        HUB.put(CORPUS, corpus(TEXTS, factor))
        options = ("--tokenizer", "bytes", "--num_workers", "2", "--out", f"out{factor}", *MODES[mode])
        run = Run(*FLAGS, program="prepare_dataset", tiny=options, faults=[begin, record_memory])
        assert run.wait() == [0], run.text()
        peaks.append(int(Path("memory.txt").read_text()))
    assert peaks[1] < peaks[0] + 20e6
