"""Tests of prepare_dataset.py with files in object stores, and of its behaviour when a store fails."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPO
from fsspec.registry import _registry
from prepared import files_of, ids_expected, ids_of, interrupt, npz, prepare, prepare_interrupted, refused
from test_hub import retries

from steadygpt.base import retry
from steadygpt.data import stores

OPTIONS = "--val_tokens 7000 --shard_size 50000 --name ids"
IDS = np.random.default_rng(0).integers(0, 257, 100_000)
FILES = {f"part{number}.npz": npz(np.savez, ids=part) for number, part in enumerate(np.split(IDS, 5))}  # 160 kB each


def shards_of(out) -> dict[str, str]:
    return {name: digest for name, digest in files_of(out).items() if name.endswith(".npy")}


@pytest.fixture(scope="module")
def local_shards(tmp_path_factory) -> dict[str, str]:
    """The shards of the same files on this machine."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "in").mkdir()
    for name, data in FILES.items():
        (folder / "in" / name).write_bytes(data)
    prepare(str(folder / "in"), str(folder / "out"), OPTIONS)
    assert ids_of(folder / "out") == IDS.tolist()
    return shards_of(folder / "out")


async def no_pause(seconds: float) -> None:
    pass


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


@pytest.mark.parametrize(("files", "mode"), [("/*.npz", ""), ("", "--streaming")])
def test_a_bucket_gives_the_shards_of_local_files_also_when_interrupted(files, mode, bucket, local_shards):
    assert prepare_interrupted(f"{bucket.url}{files}", "out", f"{OPTIONS} {mode}") == 3  # within files
    assert shards_of("out") == local_shards
    assert not Path("out/.download").exists()


def test_text_in_a_bucket_is_tokenized(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.put("text/a.jsonl", b'{"text": "first"}\n{"text": "second"}\n{"text": "third"}\n')
    store.put("text/.hidden/b.jsonl", b"{}")
    store.put("text/image.png", b"image")
    prepare(f"{store.url}/text")
    assert ids_of() == ids_expected(["first", "second", "third"])


# The libraries repeat some requests by themselves: aiohttp after a reset, gcsfs six times after any of these.
FAULTS = {
    "reset": ("", {"times": 20, "drop_after": 0}, "Disconnected|Connect"),
    "reset inside": ("", {"times": 20, "drop_after": 1}, "Incomplete|ClientPayload|ClientOSError|Connect"),
    "unavailable": ("", {"times": 7, "status": 503}, "HTTP 503 Service Unavailable"),
    "slow down": ("", {"times": 7, "status": 429}, "HTTP 429 Too Many Requests"),
    "stall": ("", {"times": 7, "stall_after": 0, "stall_s": 3}, "Timeout"),
    "unavailable, streamed": ("--streaming", {"times": 7, "status": 503}, "HTTP 503 Service Unavailable"),
}


@pytest.mark.parametrize(
    ("store", "fault"),
    [
        # Each fault with one of the stores in the fast suite, by turns; with the other one in the fault storm.
        pytest.param(store, fault, marks=() if (i + j) % 2 == 0 else pytest.mark.storm)
        for i, store in enumerate(("s3", "gcs"))
        for j, fault in enumerate(FAULTS)
    ],
    indirect=["store"],
)
def test_passing_faults_of_a_store_cost_a_line_each(fault, bucket, local_shards, capsys, monkeypatch):
    mode, how, line = FAULTS[fault]
    if fault == "stall":
        monkeypatch.setattr(retry, "SILENCE_S", 0.5)
    bucket.fail(r"GET .*part3\.npz.* bytes", **how)
    prepare(f"{bucket.url}/*.npz", "out", f"{OPTIONS} {mode}")
    told = [text for text in retries(capsys) if re.match(rf"{bucket.url}/part3.npz: .*({line})", text)]
    assert 0 < len(told) <= how["times"]
    assert shards_of("out") == local_shards


def test_a_file_that_changed_between_two_starts_is_found(bucket):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt("write_shard", patch, before=1)
        prepare(f"{bucket.url}/*.npz", "out", OPTIONS)
    bucket.put("part1.npz", npz(np.savez, ids=IDS[:20_000]))  # of the same size
    refused(f"--source '{bucket.url}/*.npz' {OPTIONS}", "out: prepared with 5 files, .* but now found 5 files")


@pytest.mark.parametrize("mode", ["", "--streaming"])
def test_a_file_that_changes_while_it_is_read_is_found(mode, bucket, monkeypatch):
    files = stores.Store.files

    def list_then_change(store):
        found = files(store)
        bucket.put("part2.npz", FILES["part1.npz"])
        return found

    monkeypatch.setattr(stores.Store, "files", list_then_change)
    changed = "part2.npz: changed in the store while it was read; run this again"
    refused(f"--source '{bucket.url}/*.npz' {OPTIONS} {mode}", changed)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--source '{url}/*.npy'", r"--source .*/\*.npy: no such file; expected a file, a folder, a glob, a URL"),
        ("--source '{url}x/*.npz'", r"x/\*.npz: no such"),
        ("--source {url}x", "x: no such"),
        ("--source nothing://x/y", "nothing://x/y: .*expected a URL that fsspec knows"),
        ("--source {url} --keep_download", "--keep_download is for data sets of the Hub; copy the files"),
    ],
)
def test_mistakes_are_reported_in_one_line(flags, message, bucket):
    refused(flags.format(url=bucket.url), message)
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
    refused(f"--source '{bucket.url}/*.npz'", f"^{bucket.url}{message.format(log_in=LOG_IN[bucket.scheme])}")
    assert not [line for line in retries(capsys) if bucket.url in line]  # an earlier test's download may still be tried


def test_without_credentials_s3_is_reported(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "nothing")
    refused(f"--source {s3.url}", rf"access denied \(NoCredentialsError: .*; check the URL, or {LOG_IN['s3']}")


@pytest.mark.parametrize(("url", "package"), [("s3://a/b", "s3fs"), ("gs://a/b", "gcsfs")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # loaded by other tests
    refused(f"--source {url}", f"^{url}: needs a package that is not installed; pip install {package}$")


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_sigterm_ends_a_download_and_the_same_command_continues(bucket, local_shards):
    flags = f"--source {bucket.url}/*.npz --tokenizer bytes --num_workers 1 --out out {OPTIONS}".split()
    command = [sys.executable, str(REPO / "prepare_dataset.py"), *flags]
    bucket.fail("GET .*npz.* bytes", times=-1, bytes_per_s=400_000)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(Path("out").rglob("*.npz*")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    errors = process.communicate(timeout=20)[1]
    assert (process.returncode, errors.splitlines()[-1]) == (130, "stopped; run the same command again to resume")
    bucket.faults.clear()
    prepare(f"{bucket.url}/*.npz", "out", OPTIONS)
    assert shards_of("out") == local_shards
