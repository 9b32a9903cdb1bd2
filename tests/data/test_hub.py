"""Tests of steadygpt/data/hub.py against a stand-in of the Hub that fails in every way."""

import errno
import io
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.data import hub, remote
from steadygpt.data.hub import Repo, fetch, find_repo

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
# downloads


class Killed(BaseException):
    pass


def test_a_file_that_always_arrives_corrupted_is_given_up(repo, standin):
    (file,) = hub.files_at(repo, [FILE])
    with pytest.raises(UserError, match=r"corrupted in 3 downloads; check the memory and disk"):
        replace(file, sha256="0" * 64).download(repo.snapshot / FILE, int)
    assert not (repo.snapshot / FILE).exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_download_resumes_from_its_partial_file_after_a_reset_and_a_kill(is_damaged, repo, standin, capsys):
    (file,), seen = hub.files_at(repo, [FILE]), []

    def die(count: int) -> None:
        seen.append(count)
        if count > 2_000_000:
            raise Killed

    standin.fail("GET .*train.parquet", drop_after=1_000_000)
    with pytest.raises(Killed):
        file.download(repo.snapshot / FILE, die)
    if is_damaged:  # as by a crash of the machine
        with open(repo.snapshot / f"{FILE}.part", "r+b") as part:
            part.write(b"other")
    assert file.download(repo.snapshot / FILE, seen.append).read_bytes() == DATA
    assert capsys.readouterr().err.count("corrupted in transit; downloading it again") == is_damaged
    if is_damaged:
        return
    starts = sorted(int(line.split("bytes=")[1].split("-")[0]) for line, _ in standin.log if FILE in line)
    assert starts[0] == 0 < starts[1] < 1_500_000  # the stand-in sends whole blocks
    assert starts[2:] == [next(count for count in seen if count > 2_000_000)]
    assert seen == sorted(seen)
    assert seen[-1] == len(DATA)


def test_two_commands_download_the_same_file_one_after_the_other(repo, standin, monkeypatch):
    monkeypatch.setattr(retry, "passing_cause", lambda _: None)  # a damaged download is an error, not a retry
    standin.fail("GET .*train.parquet", times=-1, bytes_per_s=6e6)
    with ThreadPoolExecutor(2) as pool:
        for path in pool.map(lambda _: fetch(repo, FILE), range(2)):
            assert path.read_bytes() == DATA


def test_a_hub_that_is_gone_is_waited_for_for_25_minutes(repo, standin, clock, capsys):
    standin.fail("GET .*train.parquet", status=429, headers={"Retry-After": "7"})
    standin.fail("GET .*train.parquet", times=13, status=503)
    assert fetch(repo, FILE).read_bytes() == DATA
    assert 500 < clock[0] < 700
    first, *others = retries(capsys)
    assert first == f"hf:some/corpus/{FILE}: HTTP 429 Too Many Requests; retrying in 7 s"
    assert len(others) == 13  # about one a minute
    standin.fail("GET .*train.parquet", times=-1, status=503)
    (repo.snapshot / FILE).unlink()
    start_s = clock[0]
    with pytest.raises(UserError, match=r"no answer .HTTP 503 Service Unavailable.; check"):
        fetch(repo, FILE)
    assert retry.PATIENCE_S <= clock[0] - start_s < retry.PATIENCE_S + 2 * retry.LONGEST_PAUSE_S


def test_every_byte_that_arrives_restores_the_patience(repo, standin, clock, capsys, monkeypatch):
    monkeypatch.setattr(retry, "PATIENCE_S", 2.0)
    standin.fail("GET .*train.parquet", times=20, drop_after=100_000)
    assert fetch(repo, FILE).read_bytes() == DATA
    assert {line.rpartition("; ")[2] for line in retries(capsys)} == {"retrying in 1 s"}


def test_a_full_disk_is_no_reason_to_try_again(repo, capsys, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote, "open", lambda path, mode: Full(path, mode), raising=False)
    with pytest.raises(OSError, match=r"No space left on device: .*snapshots/.*part") as raised:
        fetch(repo, FILE)
    assert raised.value.errno == errno.ENOSPC
    assert not retries(capsys)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reads=st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 2_000_000)), max_size=8), seed=st.integers())
def test_a_file_read_in_place_has_the_bytes_of_the_file(repo, standin, reads, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "READ_AHEAD", 50_000)
        standin.fail("GET .*train.parquet", times=random.Random(seed).randrange(3), drop_after=70_000)
        file = hub.files_at(repo, [FILE])[0].open()
        for position, count in reads:
            file.seek(position)
            assert file.read(count) == DATA[position : position + count]
        assert file.seek(-10, io.SEEK_END) == len(DATA) - 10
        assert file.read() == DATA[-10:]


# ---------------------------------------------------------------------------------------------------------------------
# names


def test_a_name_stands_for_its_newest_commit_and_a_revision_for_its_own(repo, standin, capsys):
    newer = standin.put("datasets/some/corpus", {FILE: b"newer"})
    assert find_repo("dataset", "some/corpus").commit == newer
    assert find_repo("dataset", f"some/corpus@{repo.commit}").commit == repo.commit
    assert capsys.readouterr().err == ""
    assert find_repo("dataset", "some/corpus", pinned=repo.commit).commit == repo.commit
    assert f"now at commit {newer[:7]}; continuing with the pinned commit {repo.commit[:7]}" in capsys.readouterr().err


def test_a_renamed_repository_is_told_in_one_line(repo, standin, capsys):
    standin.renamed["datasets/corpus"] = "datasets/some/corpus"
    assert find_repo("dataset", "corpus") == repo
    assert capsys.readouterr().err == "hf:corpus: some/corpus on the Hugging Face Hub\n"


@pytest.mark.parametrize(("name", "message"), [
    ("no/such", "hf:no/such: not found on the Hugging Face Hub, or private; check the"),
    ("some/corpus@v9", "hf:some/corpus@v9: no such revision on the Hugging Face Hub"),
    ("a b", "hf:a b: not a name on the Hugging Face Hub; expected NAME or OWNER/NAME"),
])  # fmt: skip
def test_a_wrong_name_is_one_line_without_a_second_try(name, message, repo, standin, capsys):
    with pytest.raises(UserError, match=f"^{message}"):
        find_repo("dataset", name)
    assert not retries(capsys)
    assert len(standin.log) <= 1


def test_offline_no_request_is_sent(repo, standin, monkeypatch):
    find_repo("dataset", "some/corpus")
    fetch(repo, FILE)
    standin.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = find_repo("dataset", "some/corpus")
    assert (found.commit, found.online) == (repo.commit, False)
    assert fetch(found, FILE).read_bytes() == DATA
    with pytest.raises(UserError, match=r"other.parquet is not in the cache"):
        fetch(found, "other.parquet")
    with pytest.raises(UserError, match=r"not in the cache, and HF_HUB_OFFLINE is set"):
        find_repo("dataset", "some/other")
    assert not standin.log
