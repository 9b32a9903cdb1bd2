"""Tests of steadygpt/network/hub.py against a stand-in of the Hub that fails in every way."""

import errno
import io
import random
from functools import partial
from unittest.mock import Mock

import pytest
from conftest import refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.network import hub, stores
from steadygpt.network.hub import Repo, fetch, find_repo
from steadygpt.network.stores import RemoteFile

DATA = random.Random(0).randbytes(3_000_000)
FILE = "data/train.parquet"


@pytest.fixture
def repo(standin, monkeypatch) -> Repo:
    """A repository with DATA in one file, and a clock on which waiting takes no time."""
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    return Repo("dataset", "some/corpus", standin.put("datasets/some/corpus", {FILE: DATA}))


@pytest.fixture
def clock(repo, monkeypatch) -> list[float]:
    """The time in seconds, which only waiting moves."""
    now = [0.0]
    monkeypatch.setattr(retry, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def retries(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "retrying" in line]


# ---------------------------------------------------------------------------------------------------------------------
# reading in place


def remote_file(repo: Repo) -> RemoteFile:
    _, (file,) = hub.data_files(repo.name, "", repo.commit)
    return file


def read(repo: Repo) -> bytes:
    """Return the content of the file, read in place."""
    with remote_file(repo).open() as opened:
        return opened.read()


def test_a_hub_that_is_gone_is_waited_for_for_25_minutes(repo, standin, clock, capsys):
    standin.fail("GET .*train.parquet", status=429, headers={"Retry-After": "7"})
    standin.fail("GET .*train.parquet", times=13, status=503)
    assert read(repo) == DATA
    assert 500 < clock[0] < 700
    first, *others = retries(capsys)
    assert first == f"hf://datasets/some/corpus@{repo.commit}/{FILE}: HTTP 429 Too Many Requests; retrying in 7 s"
    assert len(others) == 13  # about one a minute
    standin.fail("GET .*train.parquet", times=-1, status=503)
    start_s = clock[0]
    with refusal(FILE, "HTTP 503 Service Unavailable", kind=retry.NoAnswer):
        read(repo)
    assert retry.PATIENCE_S <= clock[0] - start_s < retry.PATIENCE_S + 2 * retry.LONGEST_PAUSE_S


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reads=st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 2_000_000)), max_size=8),
    drops=st.lists(st.integers(0, 200_000), max_size=4),
)
def test_a_file_read_in_place_has_the_bytes_of_the_file_wherever_connections_are_lost(repo, standin, reads, drops):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "BLOCK_BYTES", 50_000)
        standin.forget()
        for drop in drops:
            standin.fail("GET .*train.parquet", drop_after=drop)
        file = remote_file(repo).open()
        for position, count in reads:
            file.seek(position)
            assert file.read(count) == DATA[position : position + count]
        assert file.seek(-10, io.SEEK_END) == len(DATA) - 10
        assert file.read() == DATA[-10:]


def test_after_a_lost_connection_only_its_block_is_requested_again(repo, standin, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK_BYTES", 500_000)
    standin.fail("GET .*train.parquet bytes=1000000", drop_after=700_000)
    assert read(repo) == DATA
    starts = [int(line.split("bytes=")[1].split("-")[0]) for line, _ in standin.log if FILE in line]
    assert starts == [0, 1_000_000, 1_000_000, 2_000_000]


def test_a_file_that_is_shorter_than_it_was_is_one_clear_error(repo, standin, capsys, monkeypatch):
    monkeypatch.setattr(stores, "BLOCK_BYTES", 50_000)
    file = remote_file(repo).open()
    assert file.read(1000) == DATA[:1000]
    standin.commits["datasets/some/corpus", repo.commit] = {FILE: DATA[:-1]}
    with pytest.raises(UserError, match=rf"{FILE}: \D+[\d,]+ \D+[\d,]+"):
        file.read()
    assert not retries(capsys)


# ---------------------------------------------------------------------------------------------------------------------
# the cache


def test_a_file_is_downloaded_to_the_cache_once_and_again_after_a_fault(repo, standin, capsys):
    standin.fail("GET .*train.parquet", status=503)
    standin.fail("GET .*train.parquet", drop_after=1_000_000)
    for _ in range(2):
        assert fetch(repo, FILE).read_bytes() == DATA
    assert retries(capsys)[0] == f"hf:some/corpus/{FILE}: HTTP 503 Service Unavailable; retrying in 1 s"
    with refusal("hf:some/corpus/none: ", "Hugging Face Hub"):
        fetch(repo, "none")


def test_a_full_disk_is_no_reason_to_try_again(repo, capsys, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("huggingface_hub.file_download.http_get", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device: .*datasets--some--corpus") as raised:
        fetch(repo, FILE)
    assert raised.value.errno == errno.ENOSPC
    assert not retries(capsys)


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_a_name_stands_for_its_newest_commit_and_a_revision_for_its_own(repo, standin, capsys):
    newer = standin.put("datasets/some/corpus", {FILE: b"newer"})
    assert find_repo("dataset", "some/corpus").commit == newer
    assert find_repo("dataset", f"some/corpus@{repo.commit}").commit == repo.commit
    assert capsys.readouterr().err == ""


def test_a_renamed_repository_is_told_in_one_line(repo, standin, capsys):
    standin.renamed["datasets/corpus"] = "datasets/some/corpus"
    assert find_repo("dataset", "corpus") == repo
    assert capsys.readouterr().err == "hf:corpus: some/corpus on the Hugging Face Hub\n"


@pytest.mark.parametrize(("name", "fact"), [
    ("no/such", "HF_TOKEN"), ("some/corpus@v9", "Hugging Face Hub"), ("a b", "OWNER/NAME"),
])  # fmt: skip
def test_a_wrong_name_is_one_line_without_a_second_try(name, fact, repo, standin, capsys):
    with refusal(f"hf:{name}: ", fact):
        find_repo("dataset", name)
    assert not retries(capsys)
    assert len(standin.log) <= 1


@pytest.mark.parametrize(("spec", "fact"), [("no/such", "HF_TOKEN"), ("some/corpus@v9", "after @")])
def test_a_wrong_name_of_a_data_set_is_one_line_without_a_second_try(spec, fact, repo, standin, capsys):
    with refusal(f"hf:{spec}: ", fact):
        hub.data_files(spec, "")
    assert not retries(capsys)
    assert len(standin.log) == 1


@pytest.mark.parametrize("find", [
    partial(find_repo, "dataset", "some/corpus"),
    partial(hub.data_files, "some/corpus", ""),
    partial(hub.fetch_model, "some/model", with_weights=False),
], ids=["repository", "data set", "model"])  # fmt: skip
def test_a_hub_that_stalls_before_it_has_named_a_commit_is_asked_again(find, repo, standin, capsys, monkeypatch):
    monkeypatch.setattr(retry, "SILENCE_S", 0.25)
    standin.put("models/some/model", {"config.json": b"{}"})
    standin.fail("GET /api/(datasets|models)", times=2, stall_after=0, stall_s=1)
    find()
    assert len(retries(capsys)) == 2


def test_offline_no_request_is_sent(repo, standin, monkeypatch):
    find_repo("dataset", "some/corpus")
    fetch(repo, FILE)
    standin.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = find_repo("dataset", "some/corpus")
    assert (found.commit, found.online) == (repo.commit, False)
    assert fetch(found, FILE).read_bytes() == DATA
    with refusal("hf:some/corpus: other.parquet"):
        fetch(found, "other.parquet")
    with refusal("hf:some/other: ", "HF_HUB_OFFLINE"):
        find_repo("dataset", "some/other")
    with refusal("hf:some/corpus: ", "HF_HUB_OFFLINE"):
        hub.data_files("some/corpus", "")
    assert not standin.log
