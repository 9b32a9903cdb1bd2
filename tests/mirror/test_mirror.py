"""Mirrors: what is uploaded and when, what stays there, and runs restored from one on an empty machine."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import REPO, load, refusal, run_here
from ground import (
    acting_here,
    assert_same_state,
    evaluations,
    in_place_of_training,
    metrics,
    mock_log,
    run_content,
    verified,
    write_checkpoint,
    writer_of,
)
from injected import do_in_step, signal_at
from stories import tell, uploaded
from test_files import damage

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import ROLLING
from steadygpt.config import TrainConfig
from steadygpt.mirror import store, uploads
from steadygpt.mirror.store import Mirror
from steadygpt.mirror.uploads import Uploads
from steadygpt.run import saving

sys.path.insert(0, str(REPO / "scripts"))
import upload_manager

storm = pytest.mark.storm


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Upload each timed save; retry almost at once, and only in our code."""
    monkeypatch.setattr(uploads, "TIMED_S", 0.0)
    monkeypatch.setattr("steadygpt.base.retry.sleep", lambda seconds: time.sleep(min(seconds, 0.05)))
    monkeypatch.setattr(uploads, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr("steadygpt.base.retry.FIRST_PATIENCE_S", 0.1)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setattr("gcsfs.GCSFileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


class Saver:
    """A writer of a run that uploads to `url`."""

    def __init__(self, folder: Path, url: str, run="a" * 16, **options):
        self.folder, self.mirror = folder, Mirror(url, run, f"name of {run}")
        own = {"keep_checkpoints": 4, "checkpoint_dir": str(folder), "run_name": run}
        self.config = TrainConfig(**own | options)
        self.log = mock_log(folder)
        self.uploads = Uploads(self.mirror, self.config, self.log)
        self.writer = writer_of(self.config, self.log, self.uploads)

    def save(self, step: int, *names: str, **more) -> None:
        self.writer.save(step, run_content(step, **more), list(names))

    def roll(self, step: int) -> None:
        self.save(step, ROLLING.format(step))

    def uploaded(self) -> dict[str, int]:
        """Wait for the uploads; return checkpoint name -> step in the mirror."""
        wait_for(lambda: not self.uploads.is_busy())
        return uploaded(self.mirror.url)

    def reports(self) -> list[str]:
        """Return what was said since the last call, saves aside."""
        lines = [call.args[0] for call in self.log.mock_calls if call.args]
        self.log.reset_mock()
        return [line for line in lines if not line.startswith("saved ")]


def rolling(*steps: int) -> dict[str, int]:
    return {ROLLING.format(step): step for step in steps}


def check_checkpoints(mirror: Mirror, folder: Path) -> None:
    """Download all checkpoints, which verifies them."""
    for entry in set(mirror.index().checkpoints.values()):
        mirror.download(entry, folder)


@pytest.fixture
def saver_in(tmp_path):
    """saver_in(folder, **options) is a Saver of a folder, with the mirror "there"."""
    return lambda folder="here", **options: Saver(tmp_path / folder, f"file://{tmp_path}/there", **options)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def keep_in_mirror(count: int, monkeypatch) -> None:
    """Keep so many rolling checkpoints in mirrors."""
    monkeypatch.setattr(store, "KEEP", count)
    monkeypatch.setattr(uploads, "KEEP", count)


def files(folder: Path, pattern: str = "step_*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_checkpoint_is_uploaded_once_under_all_of_its_names(saver_in, tmp_path):
    saver = saver_in()
    saver.save(1, "rolling_step_000001.pt", "epoch_00001.pt", "best_model.pt", scores={"val_loss": 3.5})
    names = ["latest.pt", "rolling_step_000001.pt", "epoch_00001.pt", "best_model.pt"]
    assert saver.uploaded() == dict.fromkeys(names, 1)
    assert len(files(tmp_path / "there")) == 1
    assert not list((tmp_path / "here").glob(".*.tmp"))  # the link that kept the file
    (tmp_path / "there" / files(tmp_path / "there")[0]).unlink()  # the mirror has lost it
    saver.save(2)
    assert saver.uploaded() == dict.fromkeys(names, 1) | {"latest.pt": 2, "latest_backup.pt": 1}
    assert len(files(tmp_path / "there")) == 2


def test_mirror_keeps_the_newest_of_each_tier_and_only_files_that_have_a_name(saver_in, tmp_path, monkeypatch):
    keep_in_mirror(2, monkeypatch)
    saver = saver_in(keep_epochs=1)
    for step in range(1, 6):
        saver.save(step, ROLLING.format(step), f"epoch_{step:05d}.pt")
        saver.uploaded()
    saver.save(6)
    assert saver.uploaded() == {"latest.pt": 6, "latest_backup.pt": 5, "epoch_00005.pt": 5} | rolling(5, 4)
    assert [name[:11] for name in files(tmp_path / "there")] == ["step_000004", "step_000005", "step_000006"]


def test_saves_by_the_clock_are_uploaded_at_most_every_ten_minutes(saver_in, monkeypatch):
    monkeypatch.setattr(uploads, "TIMED_S", 600.0)
    saver = saver_in()
    for step in (1, 2):
        saver.save(step)
        assert saver.uploaded() == {"latest.pt": 1}
    for step, *tiers in ((3, "rolling_step_000003.pt"), (4,)):
        saver.save(step, *tiers)
        assert saver.uploaded()["latest.pt"] == 3
    saver.uploads.uploaded_at_s -= 600
    saver.save(5)
    assert saver.uploaded()["latest.pt"] == 5
    saver.save(6)
    saver.uploads.start(is_last=True)
    assert saver.uploaded()["latest.pt"] == 6
    (saver.folder / "log.txt").write_text("lines after the last checkpoint")
    saver.uploads.start(is_last=True)
    saver.uploaded()
    assert files(saver.folder.with_name("there"), "log.txt") == ["log.txt"]


def test_uploads_that_fall_behind_begin_with_the_newest_and_hold_up_no_save(saver_in, monkeypatch):
    saver = saver_in()
    is_uploading, may_upload, upload = threading.Event(), threading.Event(), saver.mirror.upload
    monkeypatch.setattr(saver.mirror, "upload", lambda *args: (is_uploading.set(), may_upload.wait(20), upload(*args)))
    saver.roll(1)
    assert is_uploading.wait(20)
    for step in range(2, 7):
        saver.roll(step)
    assert verified(saver.folder / "latest.pt")["step"] == 6
    corrupt = saver.folder / ROLLING.format(4)
    damage(corrupt, "one bit")
    may_upload.set()
    there = saver.uploaded()  # step 2 is not in the folder any more
    assert there == {"latest.pt": 6, "latest_backup.pt": 5} | rolling(6, 5, 3, 1)
    assert list(there.values()) == [6, 6, 5, 5, 3, 1] and next(iter(there)) == "latest.pt"
    reports = saver.reports()
    assert [re.split(" to |: ", text)[0] for text in reports] == [
        "uploaded step 1 as latest.pt, rolling_step_000001.pt",
        "uploaded step 6 as latest.pt, rolling_step_000006.pt",
        "uploaded step 5 as rolling_step_000005.pt",
        "not uploaded",
        "uploaded step 3 as rolling_step_000003.pt",
    ]
    assert f"{corrupt}: corrupt" in reports[3]


def test_the_mirror_of_a_copy_without_dates_has_the_newest_as_the_latest(saver_in, tmp_path, monkeypatch):
    keep_in_mirror(3, monkeypatch)
    (tmp_path / "here").mkdir()
    for step in range(1, 5):
        write_checkpoint(tmp_path / "here", step, ROLLING.format(step))  # later ones have older dates
    saver = saver_in()
    saver.uploads.start()
    assert saver.uploaded() == {"latest.pt": 4, "latest_backup.pt": 3} | rolling(4, 3, 2)
    assert files(tmp_path / "there")[-1] == "step_000004-1000000004.000000.pt"


def test_two_runs_that_start_on_one_empty_mirror_are_not_mixed(saver_in):
    first, second = (saver_in(name, run=name * 16) for name in "12")
    first.mirror.claim()
    second.mirror.claim()
    first.save(1)
    first.uploaded()
    second.save(2)
    assert second.uploaded() == {"latest.pt": 2}
    said = first.reports()[0]
    assert f"{first.mirror.url}: " in said and " name of 2222222222222222" in said


def test_of_two_starts_of_one_run_only_the_last_uploads(saver_in):
    first, second = saver_in("first"), saver_in("second")
    for saver, step in ((first, 1), (second, 3)):
        saver.roll(step)
        saver.uploaded()
    for step in (4, 5):
        first.roll(step)
    assert first.uploaded() == {"latest.pt": 3, "latest_backup.pt": 1} | rolling(3, 1)
    _, warning = first.reports()
    assert warning.startswith("uploads have stopped: file://")
    second.save(6)
    assert second.uploaded()["latest.pt"] == 6


# ---------------------------------------------------------------------------------------------------------------------
# faults of the store


@pytest.mark.parametrize(("match", "fault"), [
    pytest.param("PUT .*/step_", {"drop_after": 0}, id="the connection reset"),
    pytest.param("(PUT|POST) ", {"status": 500}, id="server errors", marks=storm),
    pytest.param("PUT .*index.json", {"status": 403}, id="the index refused", marks=storm),
    pytest.param("PUT .*/step_", {"status": 403}, id="the checkpoint refused", marks=storm),
    pytest.param("PUT .*/step_", {"drop_after": 1000}, id="cut off half-way", marks=storm),
    pytest.param("(PUT|POST) ", {"status": 503}, id="slow down", marks=storm),
    pytest.param("PUT|GET", {"status": 403}, id="credentials that expire", marks=storm),
])  # fmt: skip
def test_failed_upload_is_repeated_until_it_succeeds(s3, tmp_path, match, fault):
    saver = Saver(tmp_path / "here", f"{s3.url}/run")
    saver.roll(1)
    assert saver.uploaded() == {"latest.pt": 1} | rolling(1)
    s3.fail(match, times=2, **fault)
    saver.roll(2)
    assert saver.uploaded()["latest.pt"] == 2
    check_checkpoints(saver.mirror, tmp_path)
    assert not any(fault.times for fault in s3.faults)
    _, failed, done = saver.reports()
    assert failed.startswith("uploads to s3://") and failed.endswith("; retrying until they succeed")
    assert "uploaded step 2 as latest.pt, rolling_step_000002.pt" in done


@pytest.mark.parametrize("call", ["unlink", "listdir", "link", "replace"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_reached_for_a_moment_does_not_end_the_uploads(saver_in, monkeypatch, call, number):
    saver = saver_in()
    saver.roll(1)
    saver.uploaded()
    saver.reports()
    real, left = getattr(os, call), [1, 2]

    def failing(path, *args, **options):
        if threading.current_thread() is saver.uploads.thread and Path(path).is_relative_to(saver.folder) and left:
            raise OSError(number, os.strerror(number), left.pop())
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, failing)
    if call == "link":
        monkeypatch.setattr(shutil, "copy2", failing)
    saver.roll(2)
    assert saver.uploaded() == {"latest.pt": 2, "latest_backup.pt": 1} | rolling(2, 1)
    assert not left and not list(saver.folder.glob(".*.tmp"))
    failed = [text for text in saver.reports() if not text.startswith("uploaded ")]
    assert len(failed) == 1 and failed[0].startswith(f"uploads to {saver.mirror.url} fail: ")
    saver.roll(3)
    assert saver.uploaded()["latest.pt"] == 3


def test_a_run_whose_uploads_have_stopped_says_at_its_end_that_not_everything_is_uploaded(url, capsys):
    def claim() -> None:
        Mirror(url, json.loads(Path("one/run.json").read_text())["id"], "first").claim()

    with acting_here(partial(do_in_step, 3, claim)):
        tell(FIRST)
    err = capsys.readouterr().err
    assert err.count("warning: uploads have stopped: ") == err.count("a later launch, of the run first, uploads") == 1
    assert "warning: not everything is uploaded; an earlier warning says why\n" in err


def test_index_is_written_after_what_it_names_and_files_when_they_have_changed(s3, tmp_path):
    saver = Saver(tmp_path / "here", f"{s3.url}/run")
    for step, content in ((1, "1\n"), (2, "1\n"), (3, "1\n2\n")):
        if step != 2:
            (tmp_path / "here/log.txt").write_text(content)
        saver.roll(step)
        saver.uploaded()
    written = [line.split("/run/")[1] for line, _ in s3.log if line.startswith("PUT ")]
    kinds = [re.split("[-? ]", name)[0] for name in written]
    expected = "index.json step_000001 log.txt index.json step_000002 index.json step_000003 log.txt"
    assert kinds == [*expected.split(), "index.json"]
    assert saver.mirror.read("log.txt") == b"1\n2\n"


ENTRY = {"file": "step_000001-1795329120.123456.pt", "size": 9, "saved_at": 9, "step": 1, "scores": {}}
ABOUT = {"run": "a" * 16, "name": "x", "writer": "b" * 16, "checkpoints": {}}


def entry(name: str = "latest.pt", **changes) -> dict:
    return ABOUT | {"checkpoints": {name: ENTRY | changes}}


INDEXES: dict = {
    "JSON": "",
    "Expected `object`, got `array`": [],
    "Expected `object`, got `int` - at `$.checkpoints`": ABOUT | {"checkpoints": 3},
    "Object missing required field `saved_at` - at `$.checkpoints[...]`": ABOUT | {"checkpoints": {"latest.pt": {}}},
    "Expected `str` matching regex '^step_": entry(file="../x"),
    "Expected `float` >= 0.0 - at `$.checkpoints[...].loss`": entry(loss=-1e308),
    "Expected `int` >= 0 - at `$.checkpoints[...].size`": entry(size=-9),
    "Expected `str` matching regex '^(latest|": entry("../latest.pt"),
    "Expected `float` <= 1099511627776.0 - at `$.checkpoints[...].saved_at`": entry(saved_at=2e12),
    "Expected `str` matching regex '^[0-9a-f]{16}": entry() | {"run": ""},
    "--run_name is 'a\\n'": ABOUT | {"name": "a\n"},
}


@pytest.mark.parametrize("problem", ["", *INDEXES])
def test_index_that_is_lost_or_cannot_be_read_is_an_error(tmp_path, problem):
    (tmp_path / ENTRY["file"]).touch()
    if problem in INDEXES:
        (tmp_path / "index.json").write_text(json.dumps(INDEXES[problem]) if INDEXES[problem] != "" else "")
    before = files(tmp_path, "*")
    with refusal(f"{tmp_path}/index.json: ", problem, "step_*.pt", "--resume FILE", "--mirror"):
        Mirror(f"file://{tmp_path}", "a" * 16).claim()
    assert files(tmp_path, "*") == before


@pytest.mark.parametrize(("url", "facts"), [
    *((url, (f"--mirror '{url}': ", "s3://bucket/run")) for url in ("s3:/bucket/run", "s3://", "s3://bucket/run[1]")),
    ("mirror", ("--mirror 'mirror': ", "s3://bucket/run")), ("nowhere://bucket/run", ("Protocol not known",)),
    ("s3://no-such-bucket/run", ("s3://no-such-bucket/run: ",)), ("file:///dev/null/run", ("'/dev/null/run/",)),
])  # fmt: skip
def test_wrong_url_is_reported_before_training(workdir, s3, url, facts):
    with refusal(*facts):
        run_here("--mirror", url)


# ---------------------------------------------------------------------------------------------------------------------
# runs


FLAGS = "--checkpoint_freq 2 --eval_freq 4 --dropout 0.1 --use_tensorboard"
FIRST = f"start one {FLAGS} --run_name first --mirror $URL"


def resumed(capsys) -> str:
    """Return the line about the checkpoint that the last launch resumed from."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed      from")][-1]


@pytest.mark.parametrize("where", ["url", pytest.param("s3_url", marks=storm), pytest.param("gcs_url", marks=storm)])
def test_lost_machine_loses_nothing(where, request, capsys):
    url = request.getfixturevalue(where)
    tell(f"start reference {FLAGS}")
    with acting_here(partial(signal_at, 6)):
        tell(FIRST)
    tell(f"start two {FLAGS} --resume latest --mirror $URL")
    assert resumed(capsys) == f"resumed      from two/latest.pt (restored from {url}) at step 6"
    assert_same_state(load("two/latest.pt"), load("reference/latest.pt"))
    for key in ("loss", "val_loss"):
        assert metrics("two", key) == metrics("reference", key)
    assert list(evaluations("two")) == [4, 8]
    assert len(list(Path("two/tensorboard").glob("events.*"))) == 2  # of both machines


@pytest.fixture
def older(url, capsys):
    """A run in "one", whose disk is that of step 4 again, while its mirror has step 6."""
    tell(f"""
        {FIRST} --max_steps 4
        cp -r one backup
        resume one {FLAGS} --max_steps 6 --mirror $URL
        rm -r one; mv backup one
    """)


def test_newer_one_of_folder_and_mirror_wins(older, url, capsys):
    os.utime("one/latest.pt", (2**32, 2**32))  # the date of a copy
    with refusal("one: ", " kB ", " 5 bytes "), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
        tell("resume one --mirror $URL")  # does not fall back to an older checkpoint
    assert verified("one/latest.pt")["step"] == 4
    tell(f"resume one {FLAGS} --max_steps 8 --mirror $URL")
    assert resumed(capsys).endswith("at step 6")
    assert load("one/latest_backup.pt")["step"] == 6
    assert list(evaluations("one")) == [4, 8]  # those of step 6, the end of an earlier launch, are in its checkpoint
    tell("rm -r there\nresume one --max_steps 10 --mirror $URL")
    assert resumed(capsys) == "resumed      from one/latest.pt at step 8"
    assert uploaded(url)["latest.pt"] == 10


def test_a_finished_run_that_another_machine_has_extended_is_restored_and_is_finished(older, url, capsys):
    capsys.readouterr()
    tell("resume one --max_steps 6 --mirror $URL")
    out = capsys.readouterr().out
    assert f"resumed      from one/latest.pt (restored from {url}) at step 6" in out
    assert "finished after 6 steps; checkpoints in one" in out
    assert verified("one/latest.pt")["step"] == uploaded(url)["latest.pt"] == 6
    assert metrics("one", "loss").keys() == {*range(6)}
    before = Path("one/latest.pt").read_bytes()
    for _ in range(2):
        tell("resume one --max_steps 6 --mirror $URL")
        assert "one: this run is finished, at step 6. " in capsys.readouterr().out
    assert Path("one/latest.pt").read_bytes() == before


def test_upload_all_does_not_replace_what_is_newer(older, url):
    before = {path: path.read_bytes() for path in Path("there").rglob("*.*") if path.is_file()}
    with refusal(url, " one,", " 6;"):
        upload_manager.main(["upload-all", "--mirror", url, "--checkpoint_dir", "one"])
    assert {path: path.read_bytes() for path in Path("there").rglob("*.*") if path.is_file()} == before


def end_before_the_first_save(rank: int) -> None:
    in_place_of_training(sys.exit)


@pytest.mark.parametrize("is_heard", [True, False])
def test_going_back_to_an_older_checkpoint_holds_for_the_mirror_too(url, capsys, monkeypatch, is_heard):
    tell(FIRST)
    with monkeypatch.context() as patch, acting_here(end_before_the_first_save), pytest.raises(SystemExit):
        if not is_heard:
            patch.setattr(Uploads, "start", lambda *_, **__: None)
        tell("train --resume one/rolling_step_000004.pt --mirror $URL")
    if is_heard:
        wait_for(lambda: uploaded(url)["latest.pt"] == 4)
    tell("resume one --mirror $URL")
    assert resumed(capsys) == "resumed      from one/latest.pt at step 4"


@pytest.mark.parametrize("how", ["one bit", *(pytest.param(how, marks=storm) for how in ("missing", "truncated"))])
def test_restore_skips_checkpoints_that_are_not_whole(url, capsys, how):
    tell(FIRST)
    latest = Path("there", Mirror(url).index().checkpoints["latest.pt"].file)
    latest.unlink() if how == "missing" else damage(latest, how)
    tell("resume two --mirror $URL")
    out = capsys.readouterr().out
    assert f"resumed      from two/latest.pt (restored from {url}) at step 6" in out
    assert f"skipped      {url}/{latest.name}: " in out


def test_a_restore_continues_after_lost_connections_and_begins_anew_after_a_kill(s3, saver_in, tmp_path):
    saver = saver_in()
    saver.save(1, "rolling_step_000001.pt")
    saver.uploaded()
    [entry] = set(saver.mirror.index().checkpoints.values())
    content = Path(tmp_path, "there", entry.file).read_bytes()
    mirror = Mirror(f"{s3.url}/run")
    s3.put(f"run/{entry.file}", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadygpt.network.stores.BLOCK_BYTES", len(content) // 7)
        patch.setattr("steadygpt.base.retry.sleep", lambda _: None)
        patch.setattr("steadygpt.base.retry.PATIENCE_S", 5.0)
        (tmp_path / f".{entry.file}.tmp").write_bytes(content[: len(content) // 3])
        s3.fail(f"GET .*{entry.file}.* bytes=[1-9]", times=2, status=503)
        path, _ = mirror.download(entry, tmp_path)
    assert path.read_bytes() == content
    assert s3.sent(f"GET .*{entry.file}.* bytes") <= len(content) + 1


def test_the_mirror_replaces_no_damaged_file_and_none_that_cannot_be_read(url, capsys):
    latest = Path("one/latest.pt")
    tell(f"{FIRST}\nmv one/latest.pt kept; mkdir one/latest.pt")
    with refusal("one/latest.pt: ", "Is a directory"):
        tell("resume one --mirror $URL")
    tell("rmdir one/latest.pt; mv kept one/latest.pt")
    names = {path.name for path in latest.parent.glob("*.pt")}
    for name in names:
        damage(latest.with_name(name), "one bit")
    damaged = latest.read_bytes()
    tell("resume one --mirror $URL --max_steps 9")
    [kept] = latest.parent.glob("latest.pt.skipped-*")
    assert kept.read_bytes() == damaged
    assert f"skipped      {latest}: corrupt; renamed {kept.name}" in capsys.readouterr().out
    assert {path.name.partition(".skipped-")[0] for path in latest.parent.glob("*.skipped-*")} == names
    assert verified(latest)["step"] == 9


def test_the_best_model_of_other_validation_rows_stays_in_the_mirror(url):
    tell(f"{FIRST} --max_steps 4\nresume one --eval_freq 2 --eval_tokens 64 --max_steps 6 --mirror $URL")
    there = Mirror(url).index().checkpoints
    before, after = there["best_model_step_000004.pt"], there["best_model.pt"]
    assert (before.step, after.step) == (4, 4) and before.validated_on != after.validated_on


def test_auto_starts_a_new_run_on_an_empty_mirror_and_another_run_is_refused_there(url):
    with refusal(" one;", f"--mirror {url}"):
        tell("resume one --mirror $URL")
    tell(f"{FIRST} --resume auto --max_steps 4")
    assert uploaded(url)["latest.pt"] == 4
    tell("start two --max_steps 4 --run_name first")
    before = Path("two/latest.pt").read_bytes()
    for start in ("start three", "resume two", "train --resume two/latest.pt"):
        with refusal(f"--mirror {url} ", " first (", "--checkpoint_dir"):
            tell(f"{start} --mirror $URL")
    assert Path("two/latest.pt").read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------------
# runs whose mirror does not answer


GONE = "AWS_ENDPOINT_URL=http://127.0.0.1:9"


@pytest.fixture
def s3_url(s3, url, monkeypatch) -> str:
    """The mirror that stories call $URL, in a store; $THERE is its address."""
    monkeypatch.setenv("URL", f"{s3.url}/run")
    monkeypatch.setenv("THERE", s3.address)
    return f"{s3.url}/run"


@pytest.fixture
def gcs_url(gcs, url, monkeypatch) -> str:
    """The mirror that stories call $URL, in Google's store."""
    monkeypatch.setenv("URL", f"{gcs.url}/run")
    return f"{gcs.url}/run"


def test_run_that_waits_for_its_uploads_can_be_stopped(s3_url, monkeypatch, capsys):
    wait, waits = saving.wait_for_uploads, []

    def wait_and_stop(uploads, is_stopped, *args) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        waits.append(is_stopped)
        wait(uploads, is_stopped, *args)

    monkeypatch.setattr(saving, "wait_for_uploads", wait_and_stop)
    tell(f"{GONE}\n{FIRST} --no-background-upload")
    out, err = capsys.readouterr()
    assert "stopped (SIGTERM) after 2 steps" in out
    assert len(waits) == 2  # in the save and at the end; without a stop, each takes until GIVE_UP_S
    assert "warning: not everything is uploaded; upload the rest with python scripts/upload_manager.py" in err


@storm
def test_unreachable_mirror(s3_url, capsys, monkeypatch):
    tell(f"{FIRST} --max_steps 4\n{GONE}")
    before = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "GIVE_UP_S", 0.5)
        tell("resume one --mirror $URL --max_steps 6")  # trains on, and says that not everything is uploaded
    with monkeypatch.context() as patch:  # its uploads end, as with its process
        patch.setattr(Uploads, "_upload_newest", Mock(side_effect=UserError("ended")))
        threads = [thread for thread in {*threading.enumerate()} - before if thread.name == "uploads"]
        wait_for(lambda: not any(thread.is_alive() for thread in threads))
    out, err = capsys.readouterr()
    assert "the mirror may have a newer checkpoint: " in out
    assert "warning: not everything is uploaded; upload the rest with python scripts/upload_manager.py" in err
    with refusal(f"{s3_url}: ", "EndpointConnectionError"):  # auto starts no new run beside one that it cannot see
        tell("start two --resume auto --mirror $URL")
    tell("AWS_ENDPOINT_URL=$THERE")
    assert upload_manager.main(["upload-all", "--mirror", s3_url, "--checkpoint_dir", "one"]) == 0
    assert uploaded(s3_url)["latest.pt"] == 6


# ---------------------------------------------------------------------------------------------------------------------
# the commands that show, fill and check a mirror


def test_upload_manager(url, capsys):
    run_here(*FLAGS.split(), "--max_steps", "4")
    capsys.readouterr()
    assert upload_manager.main(["upload-all", "--mirror", url]) == 0
    assert "uploaded step 4 as latest.pt, rolling_step_000004.pt, best_model.pt" in capsys.readouterr().out
    assert upload_manager.main(["upload-all", "--mirror", url]) == 0
    assert capsys.readouterr().out == f"{url} has the checkpoints of checkpoints\n"
    there = ("--mirror", url, "--checkpoint_dir", "second")
    assert upload_manager.main(["download", "best", *there]) == 0
    assert Path("second/best_model.pt").read_bytes() == Path("checkpoints/best_model.pt").read_bytes()
    for name, facts in (
        ("best", ("second/best_model.pt ", "--checkpoint_dir")),
        ("epoch_00009.pt", (f"{url}: ", " epoch_00009.pt", "rolling_step_000004.pt")),
    ):
        with refusal(*facts):
            upload_manager.main(["download", name, *there])
    with pytest.raises(UserError, match=rf"--mirror {url} .* checkpoints \([0-9a-f]{{16}}\)"):
        tell(f"train --resume second/best_model.pt --max_steps 6 --mirror {url}")
    mirror = Mirror(url)
    latest = mirror.index().checkpoints["latest.pt"].file
    mirror.fs.pipe_file(f"{mirror.folder}/{latest}", b"half")
    capsys.readouterr()
    assert upload_manager.main(["list", "--mirror", url]) == 0
    assert capsys.readouterr().out.count("  missing or incomplete\n") == 3


def test_table_of_a_mirror_and_upload_all(url, capsys):
    tell(f"train {FLAGS} --mirror $URL --no-background-upload")
    tables = []
    for flags in ("", "--mirror $URL"):
        capsys.readouterr()
        tell(f"train --list_checkpoints {flags}")
        tables.append(capsys.readouterr().out.splitlines())
    same = [(here.split()[:6], there.split()[:6]) for here, there in zip(tables[0][:-1], tables[1][:-1], strict=True)]
    assert len(same) == 8 and all(here == there for here, there in same)
    assert (
        tables[1][1].endswith("complete") and tables[1][1].split()[5] == f"{metrics('checkpoints', 'val_bpb')[8]:.4f}"
    )
    tell("rm -r there")
    assert upload_manager.main(["upload-all", "--mirror", url]) == 0
    assert "latest.pt, rolling_step_000008.pt" in capsys.readouterr().out
    assert upload_manager.main(["list", "--mirror", url]) == 0
