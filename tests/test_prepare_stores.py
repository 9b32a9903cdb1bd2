"""Tests of prepare_dataset.py with files in object stores, and of its behaviour when a store fails."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPO
from test_hub import retries
from test_ids import npz
from test_prepare_dataset import files_of, ids_expected, ids_of, prepare, refused
from test_prepare_hub import interrupt_after

from steadygpt.base import retry
from steadygpt.data import stores

OPTIONS = ("--val_tokens", "7000", "--shard_size", "15000", "--name", "ids")
IDS = np.random.default_rng(0).integers(0, 257, 100_000)
FILES = {f"part{number}.npz": npz(np.savez, ids=part) for number, part in enumerate(np.split(IDS, 5))}  # 160 kB each


@pytest.fixture(scope="module")
def local_shards(tmp_path_factory) -> dict[str, str]:
    """The shards of the same files on this machine."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "in").mkdir()
    for name, data in FILES.items():
        (folder / "in" / name).write_bytes(data)
    prepare(folder / "in", str(folder / "out"), *OPTIONS)
    return shards_of(folder / "out")


@pytest.fixture
def bucket(store, tmp_path, monkeypatch):
    """A bucket with token ids, small requests and no pauses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=no_pause))
    for name, data in FILES.items():
        store.put(name, data)
    return store


async def no_pause(seconds: float) -> None:
    pass


def shards_of(folder) -> dict[str, str]:
    return {name: digest for name, digest in files_of(Path(folder)).items() if name.endswith(".npy")}


def test_a_bucket_gives_the_shards_of_local_files(bucket, local_shards):
    prepare(f"{bucket.url}/*.npz", "downloaded", *OPTIONS)
    prepare(bucket.url, "streamed", *OPTIONS, "--streaming")
    assert shards_of("downloaded") == shards_of("streamed") == local_shards
    assert ids_of(Path("streamed")) == IDS.tolist()
    assert not Path("downloaded/.download").exists()


def test_text_in_a_bucket_is_tokenized(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ["first", "second", "third"]
    store.put("text/a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    store.put("text/.hidden/b.jsonl", b"{}")
    store.put("text/image.png", b"image")
    prepare(f"{store.url}/text", "out", "--val_tokens", "3")
    assert ids_of(tmp_path / "out") == ids_expected(texts)


def by_turns(cases: list[tuple]) -> list:
    """Return each case with each store, by turns in the fast suite; the others are for the fault storm."""
    return [
        pytest.param(store, *case, marks=() if (i + j) % 2 == 0 else pytest.mark.storm)
        for i, store in enumerate(("s3", "gcs"))
        for j, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("store", "mode"), by_turns([([],), (["--streaming"],)]), indirect=["store"], ids=str)
def test_an_interrupted_preparation_continues(mode, bucket, local_shards, monkeypatch):
    interrupt_after(4, monkeypatch)  # inside the third file
    with pytest.raises(KeyboardInterrupt):
        prepare(f"{bucket.url}/*.npz", "out", *OPTIONS, *mode)
    prepare(f"{bucket.url}/*.npz", "out", *OPTIONS, *mode)
    assert shards_of("out") == local_shards


# The libraries repeat some requests by themselves: aiohttp after a reset, gcsfs six times after any of these.
FAULTS = {
    "reset": ({"times": 20, "drop_after": 0}, "Disconnected|Connect"),
    "reset inside": ({"times": 20, "drop_after": 1}, "Incomplete|ClientPayload|ClientOSError|Connect"),
    "unavailable": ({"times": 7, "status": 503}, "HTTP 503 Service Unavailable"),
    "slow down": ({"times": 7, "status": 429}, "HTTP 429 Too Many Requests"),
    "stall": ({"times": 7, "stall_after": 0, "stall_s": 3}, "Timeout"),
}


@pytest.mark.parametrize(
    ("store", "fault", "mode"),
    by_turns([*((fault, []) for fault in FAULTS), ("unavailable", ["--streaming"])]),
    indirect=["store"],
    ids=str,
)
def test_passing_faults_of_a_store_cost_a_line_each(fault, mode, bucket, local_shards, capsys, monkeypatch):
    how, line = FAULTS[fault]
    if fault == "stall":
        monkeypatch.setattr(retry, "SILENCE_S", 0.5)
    bucket.fail(r"GET .*part3\.npz.* bytes", **how)
    prepare(f"{bucket.url}/*.npz", "out", *OPTIONS, *mode)
    told = [text for text in retries(capsys) if re.match(rf"{bucket.url}/part3.npz: .*({line})", text)]
    assert 0 < len(told) <= how["times"]
    assert shards_of("out") == local_shards


def test_a_file_that_changed_between_two_starts_is_found(bucket):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare(f"{bucket.url}/*.npz", "out", *OPTIONS)
    bucket.put("part1.npz", npz(np.savez, ids=IDS[:20_000]))  # of the same size
    refused(
        "--source",
        f"{bucket.url}/*.npz",
        "--out",
        "out",
        *OPTIONS,
        match="out: prepared with 5 files, .* but now found 5 files",
    )


@pytest.mark.parametrize("mode", [[], ["--streaming"]])
def test_a_file_that_changes_while_it_is_read_is_found(mode, bucket, monkeypatch):
    files = stores.Store.files

    def list_then_change(store):
        found = files(store)
        bucket.put("part2.npz", FILES["part1.npz"])
        return found

    monkeypatch.setattr(stores.Store, "files", list_then_change)
    changed = "part2.npz: changed in the store while it was read; run this again"
    refused("--source", f"{bucket.url}/*.npz", "--out", "out", *OPTIONS, *mode, match=changed)


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("{url}/*.npy", [], r"--source .*/\*.npy: no such file; expected a file, a folder, a glob, a URL"),
        ("{url}x/*.npz", [], r"x/\*.npz: no such"),
        ("{url}x", [], "x: no such"),
        ("nothing://x/y", [], "nothing://x/y: .*expected a URL that fsspec knows"),
        ("{url}", ["--keep_download"], "--keep_download is for data sets of the Hub; copy the files"),
    ],
)
def test_mistakes_are_reported_in_one_line(source, more, message, bucket):
    refused("--source", source.format(url=bucket.url), "--out", "out", *more, match=message)
    assert not Path("out").exists()


LOG_IN = {"s3": "set AWS_ACCESS_KEY_ID", "gs": "run `gcloud auth application-default login`"}


@pytest.mark.parametrize(
    ("match", "how", "message"),
    [
        ("GET", {"status": 401}, r"/\S+: access denied .*; check the URL, or {log_in}"),
        ("GET .*part3.npz", {"status": 403}, r"/\S+: access denied .*; check the URL, or {log_in}"),
        ("", {"drop_after": 0}, r"/\*.npz: no answer \(.*; check the network"),
    ],
)
def test_a_store_that_refuses_or_never_answers_is_reported_at_once(match, how, message, bucket, monkeypatch, capsys):
    monkeypatch.setattr(retry, "FIRST_PATIENCE_S", 0.0)
    bucket.fail(match, times=-1, **how)
    message = f"^{bucket.url}{message.format(log_in=LOG_IN[bucket.scheme])}"
    refused("--source", f"{bucket.url}/*.npz", "--out", "out", match=message)
    assert not [line for line in retries(capsys) if bucket.url in line]  # an earlier test's download may still be tried


def test_without_credentials_s3_is_reported(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "nothing")
    refused("--source", s3.url, match=rf"access denied \(NoCredentialsError: .*; check the URL, or {LOG_IN['s3']}")


@pytest.mark.parametrize(("url", "package"), [("s3://a/b", "s3fs"), ("gs://a/b", "gcsfs")])
def test_a_missing_package_is_named(url, package, tmp_path):
    script = f"import sys; sys.modules['{package}'] = None; import prepare_dataset as p; p.run_cli(p.main)"
    flags = ["--source", url, "--tokenizer", "bytes"]
    done = subprocess.run([sys.executable, "-c", script, *flags], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {url}: needs a package that is not installed; pip install {package}\n",
    )


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_sigterm_ends_a_download_and_the_same_command_continues(bucket, local_shards):
    flags = ["--source", f"{bucket.url}/*.npz", "--tokenizer", "bytes", "--num_workers", "1", "--out", "out", *OPTIONS]
    command = [sys.executable, str(REPO / "prepare_dataset.py"), *flags]
    bucket.fail("GET .*npz.* bytes", times=-1, bytes_per_s=400_000)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(Path("out").rglob("*.npz*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    errors = process.communicate(timeout=20)[1]
    assert (process.returncode, errors.splitlines()[-1]) == (130, "stopped; run the same command again to resume")
    bucket.faults.clear()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    assert shards_of("out") == local_shards
