"""What belongs to a run: its folder, logs, shards, best model and mirror; and what it says without them."""

import errno
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import folders, load, run_here, write_data
from ground import (
    acting_here,
    around_step,
    around_write,
    best_model,
    change_loss,
    in_place_of_training,
    metrics,
    status_of,
)
from injected import do_in_step, fail_save
from stories import launches, uploaded

from steadygpt.base.options import UserError

EVALUATED = ("--eval_freq", "2", "--eval_tokens", "64")


def messages(capsys) -> str:
    """Return what was printed since the last call, on both streams."""
    output = capsys.readouterr()
    return output.out + output.err


# ---------------------------------------------------------------------------------------------------------------------
# the folder


@pytest.mark.parametrize("new_run", [False, True], ids=["nothing is at its path", "another run begins at its path"])
def test_a_run_whose_folder_was_moved_stops_and_writes_nothing_at_the_old_path(workdir, capsys, new_run):
    def move() -> None:
        Path("run").rename("moved")
        if new_run:
            shutil.copytree("other", "run")

    assert run_here(*folders("other"), "--max_steps", "3") == 0
    before = {path.name: path.read_bytes() for path in Path("other").iterdir() if path.is_file()}
    with acting_here(partial(do_in_step, 3, move)):
        assert run_here(*folders("run"), "--checkpoint_freq", "1") == 1
    assert "run was moved or deleted" in messages(capsys)
    if new_run:
        assert {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()} == before
    else:
        assert not Path("run").exists()
    assert load("moved/latest.pt")["step"] in (2, 3)  # the save of step 3 may be in flight
    assert run_here(*folders("moved"), "--resume", "latest") == 0


def test_a_run_whose_folder_was_deleted_does_not_say_that_saves_are_intact(workdir, capsys):
    def delete():
        Path("run").rename("deleted")  # at once: the save of the step before may still be adding files
        shutil.rmtree("deleted")

    with acting_here(partial(do_in_step, 3, delete)):
        assert run_here(*folders("run"), "--checkpoint_freq", "1") == 1
    output = messages(capsys)
    assert "intact" not in output
    assert "resume_training" not in output
    assert "nothing to resume" in output


def test_a_folder_that_cannot_be_read_is_not_called_empty(workdir, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    assert run_here(*folders("run"), "--max_steps", "3") == 0
    monkeypatch.setattr(Path, "iterdir", denied)  # the superuser, who may run tests, is never denied
    for flags in (("--resume", "latest"), ("--resume", "auto"), ("--list_checkpoints",), ()):
        with pytest.raises(UserError, match=r"^run: .*\(Permission denied\)"):
            run_here(*folders("run"), *flags)


def test_a_copy_beside_the_original_is_another_run_and_a_moved_folder_is_the_same(workdir, capsys):
    assert run_here(*folders("run"), "--max_steps", "3") == 0
    shutil.copytree("run", "copy")
    shutil.move("run", "moved")
    assert run_here(*folders("moved"), "--resume", "latest", "--max_steps", "4") == 0
    assert "copy" not in messages(capsys)
    shutil.copytree("moved", "beside")
    assert run_here(*folders("beside"), "--resume", "latest", "--max_steps", "5") == 0
    assert re.search(r"^copy +of the run in \S*/moved", messages(capsys), re.MULTILINE)
    ids = {name: json.loads(Path(name, "run.json").read_text())["id"] for name in ("copy", "moved", "beside")}
    assert ids["moved"] == ids["copy"] != ids["beside"]


# ---------------------------------------------------------------------------------------------------------------------
# the logs


def end_before_the_first_save(rank: int) -> None:
    in_place_of_training(sys.exit)


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
@pytest.mark.parametrize("do", [os.unlink, lambda path: os.rename(path, f"{path}.1")], ids=["removed", "rotated"])
def test_a_log_that_was_removed_is_opened_anew_and_that_is_said_once(workdir, capsys, name, do):
    with acting_here(partial(do_in_step, 3, lambda: do(f"run/{name}"))):
        assert run_here(*folders("run"), "--checkpoint_freq", "1") == 0
    assert messages(capsys).count(f"run/{name}: was removed or renamed during the run; opened anew") == 1
    assert f"run/{name}" in Path("run/log.txt").read_text() or name == "log.txt"
    if name == "metrics.jsonl":
        assert sorted(metrics("run", "loss")) == [4, 5, 6, 7]  # from the first save after it on


def test_a_resume_after_the_log_was_removed_compares_nothing_and_says_nothing(workdir, capsys):
    assert run_here(*folders("run"), "--max_steps", "4", "--checkpoint_freq", "2") == 0
    Path("run/metrics.jsonl").unlink()
    assert run_here("--resume", "run/rolling_step_000002.pt") == 0
    assert "repeated" not in messages(capsys)


def test_a_run_that_goes_back_without_its_log_is_compared_from_the_new_log_on(workdir, capsys):
    assert run_here(*folders("run"), "--max_steps", "4", "--checkpoint_freq", "2") == 0
    Path("run/metrics.jsonl").unlink()
    with acting_here(end_before_the_first_save), pytest.raises(SystemExit):
        run_here("--resume", "run/rolling_step_000002.pt")
    assert load("run/latest.pt")["metrics_bytes"] == 0


def test_a_fork_compares_its_steps_with_the_records_of_its_parent(workdir, capsys):
    assert run_here(*folders("run"), "--checkpoint_freq", "4") == 0
    assert run_here("--resume", "run/rolling_step_000004.pt", *folders("fork")) == 0
    assert "resumed at step 4: repeated 4 steps, bit for bit the same losses" in messages(capsys)
    assert launches("fork")[-1]["parent"] == launches("run")[-1]["id"]


# ---------------------------------------------------------------------------------------------------------------------
# the shards


@pytest.mark.parametrize(("format", "ids"), [("npy", "valid"), ("npy", "outside the vocabulary"), ("bin", "fewer")])
def test_a_shard_that_is_overwritten_ends_the_run_with_its_name(workdir, format, ids):
    if format == "bin":  # of nanoGPT, without a manifest
        for split in ("train", "val"):
            shard = next(Path("data").glob(f"*_{split}_*.npy"))
            np.load(shard).tofile(f"data/{split}.bin")
        for path in (*Path("data").glob("*.npy"), Path("data/manifest.json")):
            path.unlink()
    path = next(Path("data").glob("*train*"))

    def overwrite() -> None:
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(128)
            file.write({"valid": b"\1\0", "outside the vocabulary": b"\xff\xff", "fewer": b""}[ids] * 50)
            if ids == "fewer":
                file.truncate(size - 2)

    flags = (*folders("run"), "--tokenizer", "bytes", "--max_steps", "2000", "--num_epochs", "9999")
    with acting_here(partial(do_in_step, 3, overwrite)), pytest.raises(UserError) as error:
        run_here(*flags, "--checkpoint_freq", "1", "--keep_checkpoints", "1")
    assert re.match(rf"(?i){re.escape(str(path))}: .*--resume latest\b", str(error.value))
    assert status_of("run")["status"] == "failed"


def test_a_shard_that_was_replaced_stays_as_it_is_mapped(workdir):
    """A copy that is renamed into its place, as rsync does, is another file; the mapped one stays."""

    def replace() -> None:
        for path in Path("data").glob("*train*"):
            shutil.copy(path, "copy")
            os.replace("copy", path)

    with acting_here(partial(do_in_step, 3, replace)):
        assert run_here(*folders("run")) == 0


@pytest.mark.parametrize("date", ["same", "another"])
def test_a_resume_reads_a_shard_again_if_its_date_has_changed(workdir, date):
    assert run_here(*folders("run"), "--max_steps", "3") == 0
    [path, *_] = sorted(Path("data").glob("*train*"))
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if date == "same" else 1)))
    if date == "same":  # nothing tells of it without reading everything at each launch
        assert run_here(*folders("run"), "--resume", "latest") == 0
        return
    with pytest.raises(UserError, match=rf"^{path}: SHA-256 "):
        run_here(*folders("run"), "--resume", "latest")


# ---------------------------------------------------------------------------------------------------------------------
# the best model


def test_a_damaged_best_model_is_put_aside_and_chosen_anew(workdir, capsys):
    assert run_here(*folders("run"), *EVALUATED, "--max_steps", "4") == 0
    Path("run/best_model.pt").write_bytes(b"not a checkpoint")
    assert run_here(*folders("run"), *EVALUATED, "--resume", "latest", "--max_steps", "6") == 0
    output = messages(capsys)
    assert re.search(r"warning: run/best_model\.pt: corrupt .*; renamed best_model\.pt\.skipped-", output)
    assert best_model("run")[0] in (4, 6)
    assert len(list(Path("run").glob("best_model.pt.skipped-*"))) == 1


def test_losses_on_other_rows_are_not_compared_and_no_best_model_is_lost(workdir, capsys):
    write_data(Path("other"), seed=1)
    assert run_here(*folders("run"), *EVALUATED, "--max_steps", "4") == 0
    first = load("run/best_model.pt")
    for max_steps, flags in (("6", ("--val", "other")), ("8", ("--eval_tokens", "32"))):
        messages(capsys)
        before = load("run/best_model.pt")
        assert run_here(*folders("run"), *EVALUATED, *flags, "--resume", "latest", "--max_steps", max_steps) == 0
        assert re.search(
            r"^warning: run/best_model\.pt: was chosen on other validation rows; renamed", messages(capsys), re.M
        )
        assert load(f"run/best_model_step_{before['step']:06d}.pt")["scores"] == before["scores"]
        assert load("run/best_model.pt")["validated_on"] != before["validated_on"]
    assert load(f"run/best_model_step_{first['step']:06d}.pt")["validated_on"] == first["validated_on"]


def better_each_step(rank: int) -> None:
    """Let the validation loss of step n be 9 - n."""
    now = [0]

    def count(step: int, *_) -> None:
        now[0] = step + 1

    def change(model, terms: dict) -> dict:
        return terms if model.training else {"loss": terms["loss"] * 0 + 9 - now[0]}

    around_step(after=count)
    change_loss(change)


@pytest.mark.parametrize("failed", [0, 1, 2, 3])
def test_a_save_that_fails_at_the_best_evaluation_does_not_lower_the_bar(workdir, capsys, failed):
    """The model that the end advises is the best of those on the disk."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with acting_here(better_each_step, partial(fail_save, failed, full)):
        assert run_here(*folders("run"), *EVALUATED, "--max_steps", "7", "--eval_freq", "2") == 0
    assert "was not saved" in messages(capsys)
    assert best_model("run") == (7, 2.0)  # the last save is tried again


def test_after_a_failed_save_a_worse_model_than_that_one_is_the_best_on_the_disk(workdir):
    losses = {2: 5.0, 4: 3.0, 6: 4.0}
    now = [0]

    def change(model, terms: dict) -> dict:
        return terms if model.training else {"loss": terms["loss"] * 0 + losses.get(now[0], 9.0)}

    def install(rank: int) -> None:
        around_step(after=lambda step, *_: now.__setitem__(0, step + 1))
        change_loss(change)

    with acting_here(install, partial(fail_save, 1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))):
        assert run_here(*folders("run"), *EVALUATED, "--max_steps", "7") == 0
    assert best_model("run") == (6, 4.0)


def test_best_is_asked_for_before_the_first_validation(workdir):
    assert run_here(*folders("run"), "--max_steps", "3") == 0
    with pytest.raises(UserError, match=r"(?i)^run/best_model\.pt: .*\blatest\b"):
        run_here(*folders("run"), "--eval_only", "--resume", "best", "--eval_freq", "1")
    with pytest.raises(UserError, match=r"^run/stable\.pt: .*--schedule wsd\b"):
        run_here(*folders("run"), "--resume", "stable")


def test_a_failed_rename_leaves_no_temporary_checkpoint(workdir, monkeypatch):
    replace = os.replace

    def failing(source, target):
        if str(target).endswith("rolling_step_000002.pt"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    assert run_here(*folders("run"), "--checkpoint_freq", "2", "--max_steps", "4") == 0
    assert not list(Path("run").glob(".*.tmp"))


# ---------------------------------------------------------------------------------------------------------------------
# the mirror


def test_a_finished_run_uploads_what_its_mirror_lacks(workdir, url, capsys):
    assert run_here(*folders("run"), "--checkpoint_freq", "4") == 0
    assert run_here(*folders("run"), "--resume", "latest", "--mirror", url) == 0
    assert "this run is finished" in messages(capsys)
    assert uploaded(url)["latest.pt"] == 8
    assert uploaded(url)["rolling_step_000004.pt"] == 4


def test_a_resume_without_the_mirror_of_the_last_launch_says_so(workdir, url, capsys):
    assert run_here(*folders("run"), "--max_steps", "3", "--mirror", url) == 0
    messages(capsys)
    assert run_here(*folders("run"), "--resume", "latest", "--max_steps", "4") == 0
    assert f"none in this launch; the last one had --mirror {url}" in messages(capsys)
    assert uploaded(url)["latest.pt"] == 3


@pytest.mark.parametrize("name", ["run.json", "log.txt", "metrics.jsonl", "latest.pt"])
def test_a_kill_while_a_mirror_is_restored_loses_no_log(workdir, url, monkeypatch, name):
    flags = (*folders("run"), "--mirror", url)
    assert run_here(*flags, "--max_steps", "4") == 0
    before = metrics("run", "loss")
    shutil.rmtree("run")
    replace = os.replace

    def killed(source, target):
        if Path(target) == Path("run", name):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        run_here(*flags, "--resume", "latest", "--max_steps", "6")
    assert run_here(*flags, "--resume", "latest", "--max_steps", "4") == 0
    assert metrics("run", "loss") == before


def test_a_best_model_that_only_the_mirror_has_stays_the_best(workdir, url):
    assert run_here(*folders("run"), *EVALUATED, "--max_steps", "4", "--mirror", url) == 0
    best = best_model("run")
    shutil.rmtree("run")
    flags = ("--max_lr", "0", "--min_lr", "0", "--allow_changes")  # which learns nothing, so no model is better
    assert run_here(*folders("run"), *EVALUATED, *flags, "--resume", "latest", "--max_steps", "8", "--mirror", url) == 0
    assert uploaded(url)["best_model.pt"] == best[0]
    assert not Path("run/best_model.pt").exists()


# ---------------------------------------------------------------------------------------------------------------------
# the time


def test_a_suspended_process_does_not_count_as_training(workdir, monkeypatch, capsys):
    from steadygpt.run import step as steps

    now_s = [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now_s[0])

    def pass_time(step: int, *_) -> None:
        now_s[0] += 3600 if step == 5 else 1

    with acting_here(lambda rank: around_step(after=pass_time)):
        assert run_here(*folders("run")) == 0
    assert "8 s of it training (8 steps)" in messages(capsys)


def test_a_write_is_not_begun_while_another_one_is_in_flight(workdir):
    """Writes are counted: two at once would share the host memory of the copy."""
    writing: list[int] = []

    def counted(number: int, write) -> None:
        writing.append(number)
        assert writing == [number]
        write()
        writing.remove(number)

    with acting_here(lambda rank: around_write(counted)):
        assert run_here(*folders("run"), "--checkpoint_freq", "1") == 0
