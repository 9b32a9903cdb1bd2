"""A folder is a run: moved, it is the same one, and a copy is another one. A stranger's file decides no place."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
import upload_manager
from conftest import in_ranks, load, metrics, run_here
from test_train import folders

import train
from steadygpt.base.options import UserError
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.log.runlog import RunLog
from steadygpt.run.identity import read_run, record_of


@pytest.fixture
def victim(workdir):
    """Folders that a run must not write to, as they were."""
    for folder in ("home", "runs/mine", "theirs"):
        Path(folder).mkdir(parents=True)
    Path("home/authorized_keys").write_text("mine\n")
    Path("home/log.txt").write_text("mine\n")
    Path("runs/mine/events.out.tfevents.1.host").write_text("mine\n")
    return lambda: {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and mine(path)}


def mine(path: Path) -> bool:
    return path.parts[0] in ("home", "theirs") or path.parts[:2] == ("runs", "mine") or path.suffix == ".py"


def made(**options) -> str:
    """Return a checkpoint file whose options are a stranger's."""
    run_here("--max_steps", "4", "--checkpoint_dir", "there", "--logdir", "there/logs")
    content = load("there/latest.pt")
    for entry in content["starts"]:
        entry["options"] |= options
    torch.save(content, "model.pt")
    shutil.rmtree("there")
    return "model.pt"


def test_a_checkpoint_decides_neither_folder_nor_mirror_nor_name(victim, capsys):
    url = f"file://{Path.cwd()}/theirs"
    file = made(
        logdir="home", tensorboard_dir="runs", run_name="mine", use_tensorboard=True, use_wandb=True, mirror=url
    )
    before = victim()
    capsys.readouterr()
    assert run_here("--resume", file, "--checkpoint_dir", "here", "--max_steps", "6") == 0
    assert victim() == before
    assert metrics("logs", "loss").keys() == {4, 5}
    assert (
        "fork         of a run without run.json; this is the run run-from-4, with its logs in logs, and with no mirror"
    ) in capsys.readouterr().out.splitlines()


def test_a_log_of_a_mirror_is_no_module(victim, monkeypatch):
    url = f"file://{Path.cwd()}/theirs"
    run_here("--max_steps", "4", "--mirror", url, "--use_tensorboard", *folders("there"))
    for name in ("wandb.py", "..", "authorized_keys", "metrics.jsonl.py"):
        (Path("theirs/logs") / name).is_dir() or Path("theirs/logs", name).write_text("open('code-was-run', 'w')")
    for name in ("wandb.py", "events.py"):
        Path("theirs/tensorboard", name).write_text("")
    Path("theirs/wandb.py").write_text("")
    for folder in ("there", "logs-there"):
        shutil.rmtree(folder)
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = ("--mirror", url, "--logdir", "home", "--max_steps", "6", "--checkpoint_dir", "here", "--use_tensorboard")
    assert run_here("--resume", "latest", *flags) == 0
    assert {path.name.split("-")[0] for path in Path("home").iterdir()} == {
        ".lock", "authorized_keys", "log.txt", "metrics.jsonl"
    }  # fmt: skip
    assert Path("home/authorized_keys").read_text() == "mine\n"
    assert not [*Path("here").glob("*.py"), *Path("runs").rglob("*.py")]
    assert metrics("home", "loss").keys() == set(range(6))


def test_a_name_in_the_index_of_a_mirror_is_a_name(victim):
    url = f"file://{Path.cwd()}/theirs"
    run_here("--max_steps", "4", "--mirror", url, *folders("there"))
    index = json.loads(Path("theirs/index.json").read_text())
    Path("theirs/index.json").write_text(json.dumps(index | {"name": "../../home"}))
    with pytest.raises(UserError, match=r"theirs/index\.json: --run_name is '\.\./\.\./home'; expected"):
        run_here("--resume", "latest", "--mirror", url, "--use_tensorboard", *folders("here"))


def test_events_of_another_run_of_the_name_stay(victim):
    url = f"file://{Path.cwd()}/theirs"
    flags = ("--mirror", url, "--use_tensorboard", "--run_name", "mine", "--tensorboard_dir", "there-tb")
    run_here("--max_steps", "4", *flags, *folders("there"))
    Path("theirs/tensorboard/events.out.tfevents.1.host").write_text("theirs")
    before = Path("runs/mine/events.out.tfevents.1.host").read_bytes()
    shutil.rmtree("there")
    assert (
        run_here("--resume", "latest", "--mirror", url, "--use_tensorboard", "--max_steps", "6", *folders("here")) == 0
    )
    assert Path("runs/mine/events.out.tfevents.1.host").read_bytes() == before
    mine, theirs = sorted(Path("runs").iterdir())  # "mine" and "mine-20261126-081500"
    assert (len([*mine.iterdir()]), len([*theirs.iterdir()])) == (1, 3)


# ---------------------------------------------------------------------------------------------------------------------
# the same run


def starts(logdir) -> list[str]:
    """Return the run of each start in a metrics.jsonl."""
    records = map(json.loads, Path(logdir, "metrics.jsonl").read_text().splitlines())
    return [record["run"] for record in records if "start" in record]


def resume(folder: str, *flags: str, ranks: int = 1) -> None:
    """Resume up to step 6."""
    argv = ("--resume", "latest", "--checkpoint_dir", folder, "--max_steps", "6", *flags)
    if ranks > 1:
        in_ranks(ranks, run_here, *argv)
    else:
        assert run_here(*argv) == 0


def test_places_hold_in_the_own_folder_and_after_a_move_of_it(workdir):
    flags = ("--use_tensorboard", "--run_name", "a/b", *folders("one"))
    run_here("--max_steps", "3", *flags)
    run = read_run(Path("one"))
    assert run.places == {
        "run_name": "a/b", "mirror": "", "use_tensorboard": True, "tensorboard_dir": "runs", "logdir": "logs-one",
        "use_wandb": False,
    }  # fmt: skip
    Path("one").rename("moved")
    resume("moved")
    assert metrics("logs-one", "loss").keys() == set(range(6))
    assert read_run(Path("moved")) == run and starts("logs-one") == [run.id] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_logs_inside_a_folder_move_along(workdir, ranks):
    run_here("--max_steps", "3", "--checkpoint_dir", "one", "--logdir", "one/logs")
    Path("one").rename("moved")
    resume("moved", ranks=ranks)
    assert metrics("moved/logs", "loss").keys() == set(range(6))
    assert not Path("one").exists()


def test_logs_move_along_with_the_whole_project(workdir, monkeypatch):
    run_here("--max_steps", "3", *folders("one"))
    moved = workdir.with_name("moved")
    workdir.rename(moved)
    monkeypatch.chdir(moved)
    resume("one")
    assert metrics("logs-one", "loss").keys() == set(range(6))
    assert not workdir.exists()


@pytest.mark.parametrize("place", ["the old one", "another file system"])
def test_a_folder_with_another_inode_is_the_same_run_if_nothing_is_left_of_it_elsewhere(workdir, place):
    run_here("--max_steps", "3", *folders("one"))
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "backup")
    shutil.rmtree("one")
    folder = str(Path("backup").rename("one" if place == "the old one" else "other"))
    resume(folder)
    assert starts("logs-one") == [run_id] * 2


def test_a_backup_can_be_restored_twice(workdir):
    run_here("--max_steps", "3", *folders("one"))
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "backup")
    for count in (2, 3):
        Path("one").rename(f"gone-{count}")  # so that its inode is not used again
        shutil.copytree("backup", "one")
        shutil.rmtree(f"gone-{count}")
        resume("one")
        assert starts("logs-one")[-1] == run_id and read_run(Path("one")).places["logdir"] == "logs-one"


def test_of_two_copies_of_a_deleted_folder_the_first_that_resumes_is_the_same_run(workdir):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    run_id = read_run(Path("one")).id
    for copy in ("first", "second"):
        shutil.copytree("one", copy)
    shutil.rmtree("one")
    resume("first")
    resume("second")
    assert (read_run(Path("first")).id == run_id, read_run(Path("second")).id == run_id) == (True, False)
    assert starts("logs-one") == [run_id] * 2


def test_the_id_needs_no_mark(workdir, monkeypatch):
    run_here("--max_steps", "3", *folders("one"))
    run_id = read_run(Path("one")).id
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")  # as in a container whose home is not kept
    assert (read_run(Path("one")).id, read_run(Path("one")).places) == (run_id, {})
    for steps in ("6", "8"):
        resume("one", "--logdir", "logs-one", "--run_name", "x", "--use_tensorboard", "--max_steps", steps)
    assert starts("logs-one") == [run_id] * 3
    assert [path.name for path in Path("runs").iterdir()] == ["x"]


def test_a_disk_on_a_new_machine_continues_its_run_in_the_mirror_that_is_named(s3, workdir, monkeypatch):
    url = f"{s3.url}/run"
    run_here("--max_steps", "3", "--run_name", "a", "--mirror", url, *folders("one"))
    run_id = read_run(Path("one")).id
    monkeypatch.setenv("XDG_STATE_HOME", "empty")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    resume("one", "--mirror", url)
    assert (Mirror(url).index().run, Mirror(url).index().name, steps_of(url)) == (run_id, "a", 6)
    assert (read_run(Path("one")).id, read_run(Path("one")).name) == (run_id, "a")


def test_auto_continues_a_run_that_was_killed_before_its_first_save(workdir, monkeypatch):
    again = ("--resume", "auto", "--run_name", "a", "--use_tensorboard", "--max_steps", "3", *folders("one"))
    with monkeypatch.context() as patched:
        patched.setattr(train, "run_to_end", lambda run: 137)  # as if killed there
        run_here(*again)
    run_here(*again)
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
    assert metrics("logs-one", "loss").keys() == {0, 1, 2}


# ---------------------------------------------------------------------------------------------------------------------
# another run


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_is_another_run(workdir, capfd, ranks):
    url = f"file://{workdir}/there"
    flags = ("--run_name", "a", "--mirror", url, "--use_tensorboard")
    run_here("--max_steps", "3", *flags, *folders("one"))
    shutil.copytree("one", "copy")
    before = contents("logs-one"), contents("there"), contents("runs/a")
    capfd.readouterr()
    resume("copy", ranks=ranks)
    assert (contents("logs-one"), contents("there"), contents("runs/a")) == before
    assert metrics("logs-one/a-from-3", "loss").keys() == {3, 4, 5}
    assert [path.name for path in sorted(Path("runs").iterdir())] == ["a", "a-from-3"]
    assert read_run(Path("copy")).places["mirror"] == ""
    if ranks == 1:
        assert (
            f"copy         of the run a in {workdir}/one; this is the run a-from-3, with its logs in "
            "logs-one/a-from-3, and with no mirror"
        ) in capfd.readouterr().out.splitlines()
    resume("copy", "--max_steps", "7", ranks=ranks)  # now in its own folder
    assert metrics("logs-one/a-from-3", "loss").keys() == {3, 4, 5, 6}
    resume("one")  # which is still the same run
    assert metrics("logs-one", "loss").keys() == set(range(6))
    assert steps_of(url) == 6


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and "from" not in str(path)}


def steps_of(url: str) -> int:
    return Mirror(url).index().checkpoints["latest.pt"].step


def test_a_copy_with_the_inode_of_the_original_is_another_run(workdir):
    run_here("--max_steps", "3", *folders("one"))
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "copy")
    content = json.dumps(json.loads(Path("one/run.json").read_text()) | {"inode": Path("copy").stat().st_ino})
    for folder in ("one", "copy"):  # as two roots of file systems
        Path(folder, "run.json").write_text(content)
    assert (read_run(Path("one")).id == run_id, read_run(Path("copy")).id == run_id) == (True, False)
    shutil.rmtree("one")
    Path("one").mkdir()  # of another run
    assert read_run(Path("copy")).id == run_id


def test_a_copy_on_another_machine_is_another_run(workdir, monkeypatch):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "copy")
    shutil.rmtree("one")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    resume("copy")
    assert read_run(Path("copy")).id != run_id
    assert starts("logs-one") == [run_id] and starts("logs-one/a-from-3") == [read_run(Path("copy")).id]


def test_a_copy_continues_in_the_logs_inside_it(workdir):
    run_here("--max_steps", "3", "--run_name", "a", "--checkpoint_dir", "one", "--logdir", "one/logs")
    shutil.copytree("one", "copy")
    before = contents("one")
    resume("copy")
    resume("copy", "--max_steps", "7")
    assert contents("one") == before
    assert metrics("copy/logs", "loss").keys() == set(range(7))


def test_a_copy_that_is_killed_before_it_logs_continues_in_the_logs_inside_it(workdir, monkeypatch):
    run_here("--max_steps", "3", "--run_name", "a", "--checkpoint_dir", "one", "--logdir", "one/logs")
    shutil.copytree("one", "copy")
    with monkeypatch.context() as patched:
        patched.setattr(RunLog, "open", killed)
        with pytest.raises(KeyboardInterrupt):
            resume("copy")
    resume("copy")
    assert metrics("copy/logs", "loss").keys() == set(range(6))


def killed(*_) -> None:
    raise KeyboardInterrupt


def test_a_fork_into_a_folder_around_the_original_has_logs_of_its_own(workdir):
    run_here("--max_steps", "3", "--run_name", "a", "--checkpoint_dir", "all/one", "--logdir", "all/one/logs")
    before = contents("all/one")
    assert run_here("--resume", "all/one/latest.pt", "--checkpoint_dir", "all", "--max_steps", "6") == 0
    assert contents("all/one") == before
    assert metrics("all/one/logs/a-from-3", "loss").keys() == {3, 4, 5}


def test_a_restored_run_does_not_mix_its_logs_with_those_of_another_run_in_the_folder(workdir):
    url = f"file://{workdir}/there"
    run_here("--max_steps", "3", "--run_name", "a", "--mirror", url, *folders("one"))
    run_here("--max_steps", "4", "--run_name", "b", "--checkpoint_dir", "two", "--logdir", "two/logs")
    Path("two/latest.pt").unlink()
    run_id = read_run(Path("one")).id
    resume("two", "--logdir", "two/logs", "--mirror", url)
    assert len(starts("two/logs")) == 1
    assert starts("two/logs/a") == starts("there/logs") == [run_id] * 2


def test_a_restored_copy_continues_in_one_folder_of_logs(workdir, monkeypatch):
    """Its log begins with the starts of the run that it is a copy of."""
    url = f"file://{workdir}/there"
    run_here("--max_steps", "3", "--run_name", "a", "--checkpoint_dir", "one", "--logdir", "one/logs")
    shutil.copytree("one", "copy")
    resume("copy", "--max_steps", "4", "--mirror", url)
    monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "another machine"))
    for steps in ("5", "6", "7"):
        resume("restored", "--max_steps", steps, "--mirror", url, "--logdir", "logs")
    assert metrics("logs", "loss").keys() == set(range(7))
    assert [path.name for path in Path("logs").iterdir() if path.is_dir()] == []


def test_a_mirror_that_is_newer_but_at_fewer_steps_leaves_the_local_checkpoint(workdir, monkeypatch, capsys):
    url = f"file://{workdir}/there"
    run_here("--max_steps", "3", *folders("one"), "--mirror", url)
    shutil.copytree("there", "before")
    resume("one", "--max_steps", "8")
    shutil.rmtree("there")
    Path("before").rename("there")  # as if the uploads had failed
    with monkeypatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(workdir / "another machine"))
        resume("two", "--max_steps", "5", "--mirror", url, "--logdir", "logs-two")
    capsys.readouterr()
    resume("one", "--max_steps", "6")
    said = capsys.readouterr().out
    [kept] = Path("one").glob("latest.pt.skipped-*")
    assert f"skipped      one/latest.pt: of step 8, but saved before the mirror's; renamed {kept.name}\n" in said
    assert f"resumed      from one/latest.pt (restored from {url}) at step 5\n" in said
    assert load(kept)["step"] == 8


def test_a_mirror_is_no_checkpoint_folder_and_a_dry_run_restores_nothing(workdir):
    with pytest.raises(UserError, match=r"--mirror file:.*/one is --checkpoint_dir; give a folder of another machine"):
        run_here("--max_steps", "3", *folders("one"), "--mirror", f"file://{workdir}/one")
    url = f"file://{workdir}/there"
    run_here("--max_steps", "3", *folders("one"), "--mirror", url)
    with pytest.raises(UserError, match="no checkpoints in two, and only a run that trains restores them from file:"):
        resume("two", "--mirror", url, "--dry_run")


def test_a_copy_takes_the_mirror_that_it_is_given_if_that_is_empty(s3, workdir):
    mine, new = f"{s3.url}/mine", f"{s3.url}/new"
    run_here("--max_steps", "3", "--run_name", "a", "--mirror", mine, *folders("one"))
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "copy")
    with pytest.raises(
        UserError,
        match=rf"--mirror {mine} belongs to the run a \({run_id}\); give this run another --mirror, or resume a in an",
    ):
        resume("copy", "--mirror", mine)
    resume("copy", "--mirror", new)
    resume("copy", "--max_steps", "7")
    index = Mirror(new).index()
    assert (index.run, index.name) == (read_run(Path("copy")).id, "a-from-3")
    assert (steps_of(mine), steps_of(new)) == (3, 7)


def test_a_new_run_leaves_the_logs_of_another_one_alone(workdir, capsys):
    run_here("--max_steps", "3", "--run_name", "a", "--checkpoint_dir", "one")
    before = contents("logs")
    capsys.readouterr()
    run_here("--max_steps", "4", "--run_name", "b", "--checkpoint_dir", "two")
    resume("two")
    assert metrics("logs/b", "loss").keys() == set(range(6))
    assert {path: data for path, data in contents("logs").items() if "b" not in path.parts} == before
    assert (
        "name         b, with its logs in logs/b, because runs/b or logs belongs to another run"
        in capsys.readouterr().out.splitlines()
    )


def test_a_run_that_this_user_has_not_started_says_that_its_places_are_not_known(workdir, monkeypatch, capsys):
    run_here("--max_steps", "3", *folders("one"))
    monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "another user"))
    capsys.readouterr()
    resume("one", "--logdir", "logs-one")
    line = "this user has not started the run in one, so its name, logs and mirror are not known; give them"
    assert f"places       {line}\n" in capsys.readouterr().out


def test_a_run_json_from_elsewhere_decides_no_place(workdir, monkeypatch):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    record = json.loads(record_of(read_run(Path("one")).id).read_text())
    path = Path("one/run.json")
    path.write_text(json.dumps(record | json.loads(path.read_text())))
    monkeypatch.setenv("XDG_STATE_HOME", "empty")  # the folder is downloaded by another user
    assert read_run(Path("one")).places == {}


def test_a_run_continues_though_its_folder_cannot_be_recognized_later(workdir, monkeypatch, capsys):
    Path("state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert run_here("--max_steps", "3", *folders("one")) == 0
    assert "state/steadygpt: Not a directory; the next start will not recognize one; set" in capsys.readouterr().err


def test_a_link_in_place_of_a_log_is_not_followed(workdir):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    Path("mine.txt").write_text("mine")
    os.remove("logs-one/metrics.jsonl")
    Path("logs-one/metrics.jsonl").symlink_to("../mine.txt")
    with pytest.raises(UserError, match=r"Too many levels of symbolic links: '.*logs-one/metrics.jsonl'"):
        run_here("--resume", "latest", "--max_steps", "6", *folders("one"))
    assert Path("mine.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "[]", '{"id": "../x"}', '{"id": "0123456789abcdef", "inode": "x"}', "{" * 9999])
def test_a_broken_run_json_is_refused(workdir, text):
    run_here("--max_steps", "3", *folders("one"))
    Path("one/run.json").write_text(text)
    with pytest.raises(UserError, match=r"one/run\.json: .*; remove it, and give the options of the run again"):
        run_here("--resume", "latest", "--max_steps", "6", *folders("one"))
    os.remove("one/run.json")
    assert run_here("--resume", "latest", "--max_steps", "6", *folders("one")) == 0


def test_uploads_go_to_no_mirror_that_a_copied_folder_names(workdir):
    run_here("--max_steps", "3", "--mirror", f"file://{workdir}/theirs", *folders("one"))
    shutil.copytree("one", "copy")
    with pytest.raises(UserError, match=r"--mirror is missing, and copy/run\.json names none"):
        upload_manager.main(["upload-all", "copy"])
    with pytest.raises(UserError, match=r"copy: a copy of the run .* in .*/one\. Resume from it with --mirror"):
        upload_manager.main(["upload-all", "copy", "--mirror", f"file://{workdir}/empty"])
