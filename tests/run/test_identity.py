"""A folder is a run: moved, it is the same run, and a copy is another one. A stranger's file decides no place."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import upload_manager
from conftest import in_ranks, load, metrics
from short_runs import folders, run_here, starts, uploaded

import train
from steadygpt.base.options import UserError
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.log.runlog import RunLog
from steadygpt.run.identity import read_run, record_of


def started(*flags: str) -> str:
    """Train the run "a" up to step 3 in the folder "one"; return its id."""
    assert run_here("--max_steps", "3", "--run_name", "a", *folders("one"), *flags) == 0
    return read_run(Path("one")).id


def resume(folder: str, *flags: str, ranks: int = 1) -> None:
    """Resume up to step 6."""
    argv = ("--resume", "latest", "--checkpoint_dir", folder, "--max_steps", "6", *flags)
    if ranks > 1:
        in_ranks(ranks, run_here, *argv)
    else:
        assert run_here(*argv) == 0


def contents(*folders: str) -> dict[Path, bytes]:
    """Return the files of folders, those of runs "NAME-from-STEP" in them aside."""
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if "-from-" not in str(path)}


@pytest.fixture
def url(workdir) -> str:
    """An empty mirror."""
    return f"file://{workdir}/there"


@pytest.fixture
def another_user(url, monkeypatch):
    """A function that changes the user, whose home knows no run; also the machine, if that is asked for."""

    def change(host: str = "") -> None:
        monkeypatch.setenv("XDG_STATE_HOME", "home of another")
        if host:
            monkeypatch.setattr(socket, "gethostname", lambda: host)

    return change


# ---------------------------------------------------------------------------------------------------------------------
# moves and copies


MOVE, COPY, BACKUP = "mv one moved/x", "cp -r one moved/x", "cp -r one backup; rm -r one; mv backup moved/x"
ANOTHER_MACHINE = """sed -i 's/"host": "/"host": "another-/' moved/x/run.json $RECORD"""


@pytest.mark.parametrize(("logdir", "commands", "is_same", "then", "ranks"), [
    pytest.param("logs-one", MOVE, True, "logs-one", 1, id="moved"),
    pytest.param("one/logs", MOVE, True, "moved/x/logs", 2, id="moved with the logs in it"),
    pytest.param("logs-one", f"{MOVE}; mv logs-one moved", True, "moved/logs-one", 1, id="moved with all around it"),
    pytest.param("logs-one", BACKUP, True, "logs-one", 1, id="restored to another place"),
    pytest.param("logs-one", COPY, False, "logs-one/a-from-3", 2, id="copied"),
    pytest.param("one/logs", COPY, False, "moved/x/logs", 1, id="copied with the logs in it"),
    pytest.param("logs-one", f"{BACKUP}; {ANOTHER_MACHINE}", False, "logs-one/a-from-3", 1, id="restored elsewhere"),
])  # fmt: skip
def test_a_folder_is_the_same_run_if_nothing_is_left_of_it_elsewhere(
    url, capsys, logdir, commands, is_same, then, ranks
):
    run_id = started("--logdir", logdir, "--mirror", url, "--use_tensorboard")
    environment = os.environ | {"RECORD": str(record_of(run_id))}
    subprocess.run(f"mkdir moved; {commands}", shell=True, check=True, env=environment)
    names, before = sorted(os.listdir()), contents("one", "logs-one", "there", "runs/a")
    capsys.readouterr()
    resume("moved/x", ranks=ranks)
    text = capsys.readouterr().out
    resume("moved/x", "--max_steps", "7")  # now in its own folder
    run = read_run(Path("moved/x"))
    is_whole = is_same or then == "moved/x/logs"
    assert metrics(then, "loss").keys() == {*range(0 if is_whole else 3, 7)}
    assert (run.id == run_id, run.places["mirror"]) == (is_same, url if is_same else "")
    assert starts(then) == [run_id] * is_whole + [run.id] * 2
    assert sorted(os.listdir()) == names
    assert sorted(os.listdir("runs")) == (["a"] if is_same else ["a", "a-from-3"])
    if is_same:
        return
    assert contents("one", "logs-one", "there", "runs/a") == before
    line = f"of the run a in {Path.cwd()}/one; this is the run a-from-3, with its logs in {then}, and with no mirror"
    assert ranks > 1 or f"copy         {line}" in text.splitlines()
    if Path("one").exists():  # it is still the same run
        resume("one")
        assert (starts(logdir), uploaded(url)["latest.pt"]) == ([run_id] * 2, 6)


def test_the_places_of_a_run_hold_in_its_folder(url):
    started("--use_tensorboard", "--run_name", "a/b")
    assert read_run(Path("one")).places == {
        "run_name": "a/b", "mirror": "", "use_tensorboard": True, "tensorboard_dir": "runs", "logdir": "logs-one",
        "use_wandb": False,
    }  # fmt: skip


def test_a_backup_can_be_restored_twice(url):
    run_id = started()
    shutil.copytree("one", "backup")
    for count in (2, 3):
        Path("one").rename(f"gone-{count}")  # so that its inode is not used again
        shutil.copytree("backup", "one")
        shutil.rmtree(f"gone-{count}")
        resume("one")
        assert starts("logs-one") == [run_id] * count and read_run(Path("one")).places["logdir"] == "logs-one"


def test_of_two_copies_of_a_deleted_folder_the_first_that_resumes_is_the_same_run(url):
    run_id = started()
    shutil.copytree("one", "first")
    Path("one").rename("second")
    for copy in ("first", "second"):
        resume(copy)
    assert (read_run(Path("first")).id == run_id, read_run(Path("second")).id == run_id) == (True, False)
    assert starts("logs-one") == [run_id] * 2


def test_a_copy_with_the_inode_of_the_original_is_another_run(url):
    run_id = started()
    shutil.copytree("one", "copy")
    content = json.dumps(json.loads(Path("one/run.json").read_text()) | {"inode": Path("copy").stat().st_ino})
    for folder in ("one", "copy"):  # as two roots of file systems
        Path(folder, "run.json").write_text(content)
    assert (read_run(Path("one")).id == run_id, read_run(Path("copy")).id == run_id) == (True, False)
    shutil.rmtree("one")
    Path("one").mkdir()  # of another run
    assert read_run(Path("copy")).id == run_id


def killed(*_) -> int:
    raise KeyboardInterrupt


def test_a_copy_that_is_killed_before_it_logs_continues_in_the_logs_inside_it(url, monkeypatch):
    started("--logdir", "one/logs")
    shutil.copytree("one", "copy")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunLog, "open", killed)
        resume("copy")
    resume("copy")
    assert metrics("copy/logs", "loss").keys() == set(range(6))


def test_auto_continues_a_run_that_was_killed_before_its_first_save(url, monkeypatch):
    again = ("--resume", "auto", "--use_tensorboard")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(train, "run_to_end", killed)
        started(*again)
    started(*again)
    assert os.listdir("runs") == ["a"]
    assert metrics("logs-one", "loss").keys() == {0, 1, 2}


def test_a_fork_into_a_folder_around_the_original_has_logs_of_its_own(url):
    started("--checkpoint_dir", "all/one", "--logdir", "all/one/logs")
    before = contents("all/one")
    assert run_here("--resume", "all/one/latest.pt", "--checkpoint_dir", "all", "--max_steps", "6") == 0
    assert contents("all/one") == before
    assert metrics("all/one/logs/a-from-3", "loss").keys() == {3, 4, 5}


def test_a_new_run_leaves_the_logs_of_another_one_alone(url, capsys):
    started("--logdir", "logs")
    before = contents("logs")
    run_here("--max_steps", "4", "--run_name", "b", "--checkpoint_dir", "two")
    resume("two")
    assert metrics("logs/b", "loss").keys() == set(range(6))
    assert {path: data for path, data in contents("logs").items() if "b" not in path.parts} == before
    line = "name         b, with its logs in logs/b, because runs/b or logs belongs to another run"
    assert line in capsys.readouterr().out.splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# another user, another machine, and mirrors


def test_a_run_that_this_user_has_not_started_keeps_its_id_and_needs_its_places(url, another_user, capsys):
    run_id = started()
    another_user()
    assert (read_run(Path("one")).id, read_run(Path("one")).places) == (run_id, {})
    resume("one", "--logdir", "logs-one")
    line = "this user has not started the run in one, so its name, logs and mirror are not known; give them"
    assert f"places       {line}\n" in capsys.readouterr().out
    assert starts("logs-one") == [run_id] * 2


def test_a_run_continues_though_its_folder_cannot_be_recognized_later(url, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")  # as in a container whose home is not kept
    run_id = started()
    warning = "warning: /dev/null/steadygpt: Not a directory; the next start will not recognize one; set XDG_STATE_HOME"
    assert warning in capsys.readouterr().err
    for steps in ("6", "8"):
        resume("one", "--logdir", "logs-one", "--run_name", "x", "--use_tensorboard", "--max_steps", steps)
    assert starts("logs-one") == [run_id] * 3
    assert os.listdir("runs") == ["x"]


def test_a_disk_on_a_new_machine_continues_its_run_in_the_mirror_that_is_named(url, another_user):
    run_id = started("--mirror", url)
    another_user(host="another")
    resume("one", "--mirror", url)
    assert (Mirror(url).index().run, Mirror(url).index().name, uploaded(url)["latest.pt"]) == (run_id, "a", 6)
    assert (read_run(Path("one")).id, read_run(Path("one")).name) == (run_id, "a")


def test_a_copy_takes_the_mirror_that_it_is_given_if_that_is_empty(url):
    run_id, new = started("--mirror", url), f"{url}-new"
    shutil.copytree("one", "copy")
    refused = rf"--mirror {url} belongs to the run a \({run_id}\); give this run another --mirror, or resume a in an"
    with pytest.raises(UserError, match=refused):
        resume("copy", "--mirror", url)
    resume("copy", "--mirror", new)
    resume("copy", "--max_steps", "7")
    assert (Mirror(new).index().run, Mirror(new).index().name) == (read_run(Path("copy")).id, "a-from-3")
    assert (uploaded(url)["latest.pt"], uploaded(new)["latest.pt"]) == (3, 7)


def test_a_restored_run_does_not_mix_its_logs_with_those_of_another_run_in_the_folder(url):
    run_id = started("--mirror", url)
    run_here("--max_steps", "4", "--run_name", "b", "--checkpoint_dir", "two", "--logdir", "two/logs")
    Path("two/latest.pt").unlink()
    resume("two", "--logdir", "two/logs", "--mirror", url)
    assert len(starts("two/logs")) == 1
    assert starts("two/logs/a") == starts("there/logs") == [run_id] * 2


def test_a_restored_copy_continues_in_one_folder_of_logs(url, another_user):
    """Its log begins with the starts of the run that it is a copy of."""
    started("--logdir", "one/logs")
    shutil.copytree("one", "copy")
    resume("copy", "--max_steps", "4", "--mirror", url)
    another_user()
    for steps in ("5", "6", "7"):
        resume("restored", "--max_steps", steps, "--mirror", url, "--logdir", "logs")
    assert metrics("logs", "loss").keys() == set(range(7))
    assert not [path for path in Path("logs").iterdir() if path.is_dir()]


def test_a_mirror_that_is_newer_but_at_fewer_steps_leaves_the_local_checkpoint(url, monkeypatch, capsys):
    started("--mirror", url)
    shutil.copytree("there", "before")
    resume("one", "--max_steps", "8")
    shutil.rmtree("there")
    Path("before").rename("there")  # as if the uploads had failed
    with monkeypatch.context() as another_machine:
        another_machine.setenv("XDG_STATE_HOME", "home of another")
        resume("two", "--max_steps", "5", "--mirror", url, "--logdir", "logs-two")
    capsys.readouterr()
    resume("one", "--max_steps", "6")
    text = capsys.readouterr().out
    [kept] = Path("one").glob("latest.pt.skipped-*")
    assert f"skipped      one/latest.pt: of step 8, but saved before the mirror's; renamed {kept.name}\n" in text
    assert f"resumed      from one/latest.pt (restored from {url}) at step 5\n" in text
    assert load(kept)["step"] == 8


def test_a_mirror_is_no_checkpoint_folder_and_a_dry_run_restores_nothing(url):
    with pytest.raises(UserError, match=r"--mirror file:.*/one is --checkpoint_dir; give a folder of another machine"):
        started("--mirror", f"file://{Path.cwd()}/one")
    started("--mirror", url)
    with pytest.raises(UserError, match="no checkpoints in two, and only a run that trains restores them from file:"):
        resume("two", "--mirror", url, "--dry_run")


def test_uploads_go_to_no_mirror_that_a_copied_folder_names(url):
    started("--mirror", url)
    shutil.copytree("one", "copy")
    with pytest.raises(UserError, match=r"--mirror is missing, and copy/run\.json names none"):
        upload_manager.main(["upload-all", "copy"])
    with pytest.raises(UserError, match=r"copy: a copy of the run .* in .*/one\. Resume from it with --mirror"):
        upload_manager.main(["upload-all", "copy", "--mirror", f"{url}-empty"])


# ---------------------------------------------------------------------------------------------------------------------
# files of a stranger


@pytest.fixture
def victim(url):
    """Folders that a run must not write to, as they were."""
    for folder in ("home", "runs/mine", "theirs"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    Path("home/authorized_keys").write_text("mine\n")
    Path("home/log.txt").write_text("mine\n")
    Path("runs/mine/events.out.tfevents.1.host").write_text("mine\n")
    return lambda: contents("home", "runs/mine", "theirs")


@pytest.fixture
def theirs(victim, another_user):
    """The flags of the mirror of a stranger's run, which is nowhere else."""
    flags = "--mirror", f"file://{Path.cwd()}/theirs", "--use_tensorboard"
    started("--max_steps", "4", *flags, "--run_name", "mine", "--tensorboard_dir", "tb")
    for folder in ("one", "logs-one", "tb"):
        shutil.rmtree(folder)
    another_user()
    return "--resume", "latest", *flags, "--max_steps", "6"


def test_a_checkpoint_decides_neither_folder_nor_mirror_nor_name(victim, capsys):
    started()
    content = load("one/latest.pt")
    url = f"file://{Path.cwd()}/theirs"
    places = {"logdir": "home", "tensorboard_dir": "runs", "run_name": "mine", "mirror": url}
    content["starts"][0]["options"] |= places | {"use_tensorboard": True, "use_wandb": True}
    torch.save(content, "model.pt")
    before = victim()
    assert run_here("--resume", "model.pt", "--checkpoint_dir", "here", "--max_steps", "6") == 0
    assert victim() == before
    assert metrics("logs", "loss").keys() == {3, 4, 5}
    line = (
        "fork         of a run without run.json; this is the run run-from-3, with its logs in logs, and with no mirror"
    )
    assert line in capsys.readouterr().out.splitlines()


def test_a_log_of_a_mirror_is_no_module(theirs, monkeypatch):
    for name in ("logs/wandb.py", "logs/authorized_keys", "logs/metrics.jsonl.py"):
        Path("theirs", name).write_text("open('code-was-run', 'w')")
    for name in ("wandb.py", "tensorboard/wandb.py", "tensorboard/events.py"):
        Path("theirs", name).write_text("")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_here(*theirs, "--logdir", "home", "--checkpoint_dir", "here") == 0
    assert {path.name.split("-")[0] for path in Path("home").iterdir()} == {
        ".lock", "authorized_keys", "log.txt", "metrics.jsonl"
    }  # fmt: skip
    assert Path("home/authorized_keys").read_text() == "mine\n"
    assert not [*Path("here").glob("*.py"), *Path("runs").rglob("*.py")]
    assert metrics("home", "loss").keys() == set(range(6))


def test_a_name_in_the_index_of_a_mirror_is_a_name(theirs):
    index = json.loads(Path("theirs/index.json").read_text())
    Path("theirs/index.json").write_text(json.dumps(index | {"name": "../../home"}))
    with pytest.raises(UserError, match=r"theirs/index\.json: --run_name is '\.\./\.\./home'; expected"):
        run_here(*theirs, *folders("here"))


def test_events_of_another_run_of_the_name_stay(theirs):
    Path("theirs/tensorboard/events.out.tfevents.1.host").write_text("theirs")
    before = contents("runs/mine")
    assert run_here(*theirs, *folders("here")) == 0
    assert contents("runs/mine") == before
    mine, restored = sorted(Path("runs").iterdir())  # "mine" and "mine-20261126-081500"
    assert (len([*mine.iterdir()]), len([*restored.iterdir()])) == (1, 3)


def test_a_run_json_from_elsewhere_decides_no_place(url, another_user):
    record = json.loads(record_of(started()).read_text())
    path = Path("one/run.json")
    path.write_text(json.dumps(record | json.loads(path.read_text())))
    another_user()  # who has downloaded the folder
    assert read_run(Path("one")).places == {}


def test_a_link_in_place_of_a_log_is_not_followed(url):
    started()
    Path("mine.txt").write_text("mine")
    os.remove("logs-one/metrics.jsonl")
    Path("logs-one/metrics.jsonl").symlink_to("../mine.txt")
    with pytest.raises(UserError, match=r"Too many levels of symbolic links: '.*logs-one/metrics.jsonl'"):
        resume("one")
    assert Path("mine.txt").read_text() == "mine"


BROKEN = ["", "[]", '{"id": "../x"}', '{"id": "0123456789abcdef", "inode": "x"}', "{" * 9999]


def test_a_broken_run_json_is_refused(url):
    started()
    for text in BROKEN:
        Path("one/run.json").write_text(text)
        with pytest.raises(UserError, match=r"one/run\.json: .*; remove it, and give the options of the run again"):
            resume("one")
    os.remove("one/run.json")
    resume("one", *folders("one"))
