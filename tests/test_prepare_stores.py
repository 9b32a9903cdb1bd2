"""Tests of prepare_dataset.py with the Hub and object stores, and of its behaviour when these fail."""

import http.server
import random
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import REPO, refusal
from fsspec.registry import _registry
from prepared import files_of, ids_expected, ids_of, prepare, prepare_stopped, refused
from standin import CARD, CORPUS, Server, corpus, parquet
from standin import TEXTS as ALL_TEXTS
from test_hub import retries

import prepare_dataset
from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.network import stores
from steadygpt.prepare import documents, sources

TEXTS = ALL_TEXTS[:1200]
HUB_FILES = corpus(TEXTS)
OF_HUB = "--val_share 0 --shard_size 80000 --name texts"
FINE = "--val_share 0 --shard_size 30000"
CORPUS_PART = "hf:some/corpus:part"
LONG_TEXTS = ["".join(random.Random(number).choices("ab cd\n", k=130_000)) for number in range(3)]
STORE_FILES = {f"part{number}.txt": text.encode() for number, text in enumerate(LONG_TEXTS)}
OF_STORE = "--val_share 0 --shard_size 200000 --name texts"


class Network(NamedTuple):
    """A server with a data set, --source and the other flags, and how requests and messages name one of its files."""

    server: Server
    source: str
    flags: str
    request: str
    place: str


async def no_pause(seconds: float) -> None:
    pass


@pytest.fixture
def hub(standin, monkeypatch) -> Server:
    """The Hub with a data set, and an empty working directory."""
    small_blocks(monkeypatch)
    standin.put(CORPUS, HUB_FILES)
    return standin


def small_blocks(monkeypatch) -> None:
    """Let a file have several units."""
    for module in (documents, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", 20_000)


def fill(store: Server, monkeypatch) -> Server:
    """Put texts into a bucket; requests become small, and pauses short."""
    small_blocks(monkeypatch)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=no_pause))
    for name, data in STORE_FILES.items():
        store.put(name, data)
    return store


@pytest.fixture
def bucket(store, monkeypatch) -> Server:
    """A bucket with texts, and an empty working directory."""
    return fill(store, monkeypatch)


@pytest.fixture
def network(request, hub, monkeypatch) -> Network:
    """The data set in hub, s3 or gcs."""
    if request.param == "hub":
        monkeypatch.setattr(retry, "sleep", lambda _: None)
        return Network(
            hub, CORPUS_PART, OF_HUB, "GET .*part/1.parquet", "hf://datasets/some/corpus@[0-9a-f]*/part/1.parquet"
        )
    bucket = fill(request.getfixturevalue(request.param), monkeypatch)
    return Network(bucket, f"{bucket.url}/*.txt", OF_STORE, r"GET .*part2\.txt.* bytes", f"{bucket.url}/part2.txt")


def shards_of(out) -> dict[str, str]:
    return {name: digest for name, digest in files_of(out).items() if name.endswith(".npy")}


@pytest.fixture(scope="module")
def local_shards(tmp_path_factory) -> dict[str, dict[str, str]]:
    """The shards of the same files on this machine, by the flags."""
    folder, found = tmp_path_factory.mktemp("local"), {}
    for flags, files in ((OF_HUB, HUB_FILES), (OF_STORE, STORE_FILES)):
        for name, data in files.items():
            if name.endswith((".txt", "parquet")) and not name.startswith("other"):
                (folder / flags / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / flags / name).write_bytes(data)
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch)
            prepare(str(folder / flags), str(folder / f"out{flags}"), flags)
        found[flags] = shards_of(folder / f"out{flags}")
    assert ids_of(folder / f"out{OF_HUB}") == ids_expected(TEXTS)
    assert ids_of(folder / f"out{OF_STORE}") == ids_expected(LONG_TEXTS)
    return found


@pytest.mark.parametrize("network", ["hub", "s3", "gcs"], indirect=True)
def test_a_network_gives_the_shards_of_local_files_also_after_an_interruption(network, local_shards):
    prepare_stopped(network.source, "out", network.flags, before=1)  # within a file
    prepare(network.source, "out", network.flags)
    assert shards_of("out") == local_shards[network.flags]
    written = {path.name for path in Path("out").rglob("*")} - {*shards_of("out"), "manifest.json", ".lock"}
    assert not written | {path.name for path in Path().rglob("*.parquet")}


# ---------------------------------------------------------------------------------------------------------------------
# the Hub


def test_the_commit_is_in_the_manifest_and_other_files_are_not_read(hub):
    manifest = prepare(CORPUS_PART, "out", FINE)
    assert ids_of("out") == ids_expected(TEXTS)
    assert manifest["commit"] == hub.heads[CORPUS]
    assert not hub.sent("GET .*other/0.parquet")
    hub.log.clear()
    prepare(CORPUS_PART, "out", FINE)  # the Hub is not asked about a preparation that is complete
    assert not hub.log


def test_other_formats_are_read_from_the_copy_of_the_hub_in_parquet(hub, capsys):
    hub.put("datasets/some/csv", {"data/train.csv": b"text\nno\n"})
    refused("--source hf:some/csv", "hf:some/csv@refs/convert/parquet")
    hub.put("datasets/some/csv", {"other/train/0000.parquet": parquet(TEXTS)}, "refs/convert/parquet")
    refused("--source hf:some/csv", "hf:some/csv@refs/convert/parquet", "default/train")
    hub.put("datasets/some/csv", {"default/train/0000.parquet": parquet(TEXTS)}, "refs/convert/parquet")
    capsys.readouterr()
    prepare("hf:some/csv", "out", OF_HUB)
    assert ids_of("out") == ids_expected(TEXTS)
    said = "hf:some/csv: found csv; reading the Hub's copy of it in Parquet, @refs/convert/parquet\n"
    assert said in capsys.readouterr().err


def test_a_file_costs_a_request_for_each_read_ahead_and_few_more(hub, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK_BYTES", 100_000)
    file = parquet(ALL_TEXTS)
    hub.put("datasets/some/large", {"data/train.parquet": file})
    prepare("hf:some/large", "out", FINE)
    requests = [line for line, _ in hub.log if "train.parquet" in line]
    assert len(file) / 200_000 < len(requests) < len(file) / 100_000 + 5  # twice for the footer


def test_an_interrupted_preparation_continues_inside_the_file(hub, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK_BYTES", 4000)
    hub.put(CORPUS, corpus())
    flags = "--val_share 0 --shard_size 90000"
    shards = prepare(CORPUS_PART, "whole", flags)["shards"]
    of_whole = hub.sent("GET .*parquet")
    prepare_stopped(CORPUS_PART, "out", flags, before=len(shards) - 2)  # within the last file
    hub.log.clear()
    prepare(CORPUS_PART, "out", flags)
    assert files_of("out") == files_of("whole")
    assert hub.sent("GET .*parquet") < 0.4 * of_whole


def test_the_commit_moves_under_an_interrupted_preparation(hub, local_shards, capsys):
    prepare_stopped(CORPUS_PART, "out", OF_HUB, before=2)
    old, new = hub.heads[CORPUS], hub.put(CORPUS, corpus([text.upper() for text in TEXTS]))
    prepare(CORPUS_PART, "out", OF_HUB)
    assert f"source: {CORPUS_PART} at commit {old[:7]}, 6 files" in capsys.readouterr().err
    assert shards_of("out") == local_shards[OF_HUB]
    assert prepare(CORPUS_PART, "new", OF_HUB)["commit"] == new
    assert shards_of("new") != local_shards[OF_HUB]


def test_a_preparation_of_one_large_row_group_continues_within_it(hub):
    """A large row group is read in several batches: what is skipped at the start spans some of them."""
    hub.put("datasets/some/large", {"data/train.parquet": parquet(TEXTS, row_group_size=1200)})
    prepare("hf:some/large", "whole", FINE)
    prepare_stopped("hf:some/large", "out", FINE, before=7)
    prepare("hf:some/large", "out", FINE)
    assert files_of("out") == files_of("whole")


def test_a_file_of_a_web_server_is_read(tmp_path):
    text = "some words " * 500
    (tmp_path / "x.txt").write_text(text)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        flags = ("--tokenizer", "bytes", "--num_workers", "1", "--val_share", "0", "--out", "web")
        assert prepare_dataset.main(["--source", f"{url}/x.txt", *flags]) == 0
        with refusal(f"--source {url}/none.txt", "hf:NAME"):
            prepare_dataset.main(["--source", f"{url}/none.txt", *flags, "--out", "none"])
        server.shutdown()
    assert ids_of("web") == ids_expected([text])


def test_fineweb_edu_is_the_default_and_replaces_a_preparation_without_shards(hub):
    card = CARD.replace("part/*", "sample/10BT/*").replace("part", "sample-10BT")
    files = {"README.md": card.encode(), "sample/10BT/000_00000.parquet": parquet(TEXTS)}
    hub.put("datasets/HuggingFaceFW/fineweb-edu", files)
    prepare_stopped(CORPUS_PART, "data/edu_fineweb10B", FINE, at="write_missing")
    assert prepare_dataset.main(["--tokenizer", "bytes", "--val_share", "0", "--num_workers", "1"]) == 0
    assert Path("data/edu_fineweb10B/edufineweb_train_000000.npy").exists()
    assert ids_of("data/edu_fineweb10B") == ids_expected(TEXTS)


# ---------------------------------------------------------------------------------------------------------------------
# passing faults

# The libraries repeat some requests by themselves: aiohttp after a reset, gcsfs five times after any of these.
FAULTS = {
    "reset": ({"times": 20, "drop_after": 0}, "Disconnected|Connect|RemoteProtocolError|ReadError"),
    "reset inside": (
        {"times": 20, "drop_after": 1},
        "Incomplete|ClientPayload|ClientOSError|Connect|RemoteProtocolError|ReadError",
    ),
    "unavailable": ({"times": 7, "status": 503}, "HTTP 503 Service Unavailable"),
    "slow down": ({"times": 7, "status": 429, "headers": {"Retry-After": "1"}}, "HTTP 429 Too Many Requests"),
    "stall": ({"times": 3, "stall_after": 0, "stall_s": 3}, "Timeout"),
}

FAST = {("s3", "stall"), ("hub", "reset")}  # the others are in the fault storm
ALL = [(name, fault) for name in ("s3", "gcs", "hub") for fault in FAULTS]


@pytest.mark.parametrize(("network", "fault"), [
    pytest.param(*row, marks=() if row in FAST else pytest.mark.storm) for row in ALL
], indirect=["network"])  # fmt: skip
def test_passing_faults_of_a_network_cost_a_line_each(network, fault, local_shards, capsys, monkeypatch):
    how, line = FAULTS[fault]
    if fault == "stall":
        monkeypatch.setattr(retry, "SILENCE_S", 0.25)
        if network.place.startswith("gs:"):
            how = how | {"times": 7}
    network.server.fail(network.request, **how)
    prepare(network.source, "out", network.flags)
    told = [text for text in retries(capsys) if re.match(f"{network.place}: .*({line})", text)]
    assert 0 < len(told) <= how["times"]
    assert shards_of("out") == local_shards[network.flags]


def test_a_hub_that_is_gone_is_waited_for_or_told(hub, local_shards, capsys, monkeypatch):
    monkeypatch.setattr(retry, "PATIENCE_S", 0.0)
    hub.fail("GET .*[1-5].parquet", times=-1, drop_after=0)
    refused(f"--source {CORPUS_PART} {OF_HUB}", ".parquet", kind=retry.NoAnswer)
    monkeypatch.setattr(retry, "PATIENCE_S", 60.0)
    monkeypatch.setattr(retry, "sleep", lambda _: hub.faults.clear())  # it is back after a pause
    prepare(CORPUS_PART, "out", OF_HUB)
    assert retries(capsys)
    assert shards_of("out") == local_shards[OF_HUB]


# ---------------------------------------------------------------------------------------------------------------------
# object stores


def test_text_in_a_bucket_is_tokenized(store):
    store.put("text/a.jsonl", b'{"text": "first"}\n{"text": "second"}\n{"text": "third"}\n')
    store.put("text/.hidden/b.jsonl", b"{}")
    store.put("text/image.png", b"image")
    prepare(f"{store.url}/text")
    assert ids_of() == ids_expected(["first", "second", "third"])


def test_a_file_that_changed_between_two_starts_is_found(bucket):
    prepare_stopped(f"{bucket.url}/*.txt", "out", OF_STORE, before=1)
    bucket.put("part1.txt", STORE_FILES["part0.txt"])  # of the same size
    refused(f"--source '{bucket.url}/*.txt' {OF_STORE}", "out: ", " 3 ", "/*.txt", "--out")


def test_a_file_that_changes_while_it_is_read_is_found(bucket, monkeypatch):
    files = stores.Store.files

    def list_then_change(store):
        found = files(store)
        bucket.put("part2.txt", STORE_FILES["part1.txt"])
        return found

    monkeypatch.setattr(stores.Store, "files", list_then_change)
    refused(f"--source '{bucket.url}/*.txt' {OF_STORE}", f"{bucket.url}/part2.txt")


LOG_IN = {"s3": "AWS_ACCESS_KEY_ID", "gs": "`gcloud auth application-default login`"}


@pytest.mark.parametrize("store", ["s3", pytest.param("gcs", marks=pytest.mark.storm)], indirect=True)
def test_mistakes_and_a_store_that_refuses_or_never_answers_are_reported_in_one_line(bucket, monkeypatch, capsys):
    url, log_in = bucket.url, LOG_IN[bucket.scheme]
    for flags, facts in (
        (f"'{url}/*.npy'", (f"--source {url}/*.npy", "hf:NAME")),
        (f"'{url}x/*.txt'", (f"{url}x/*.txt",)),
        (f"{url}x", (f"{url}x",)),
    ):
        refused(f"--source {flags}", *facts)
    monkeypatch.setattr(retry, "FIRST_PATIENCE_S", 0.0)
    capsys.readouterr()
    for match, how, facts, kind in (
        ("GET", {"status": 401}, (log_in,), UserError),
        ("GET .*part1.txt", {"status": 403}, ("/part1.txt", log_in), UserError),
        ("", {"drop_after": 0}, ("/*.txt",), retry.NoAnswer),
    ):
        bucket.faults.clear()
        bucket.fail(match, times=-1, **how)
        refused(f"--source '{url}/*.txt' --out refused", url, *facts, kind=kind)
        assert not [line for line in retries(capsys) if url in line]
    assert not [path for path in Path("out").glob("*") if path.name != ".lock"]


def test_without_credentials_s3_is_reported(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "nothing")
    refused(f"--source {s3.url}", s3.url, "NoCredentialsError", LOG_IN["s3"])


@pytest.mark.parametrize(("url", "package"), [("s3://a/b", "s3fs"), ("gs://a/b", "gcsfs")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # loaded by other tests
    refused(f"--source {url}", url, f"pip install {package}")


@pytest.mark.storm
def test_sigterm_ends_a_preparation_and_the_same_command_continues(bucket, local_shards):
    flags = f"--source {bucket.url}/*.txt --tokenizer bytes --num_workers 1 --out out {OF_STORE}".split()
    command = [sys.executable, str(REPO / "prepare_dataset.py"), *flags]
    bucket.fail("GET .*npz.* bytes", times=-1, bytes_per_s=400_000)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not Path("out/manifest.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    errors = process.communicate(timeout=20)[1]
    assert (process.returncode, errors.splitlines()[-1]) == (130, "stopped; run the same command again to resume")
    bucket.faults.clear()
    prepare(f"{bucket.url}/*.txt", "out", OF_STORE)
    assert shards_of("out") == local_shards[OF_STORE]
