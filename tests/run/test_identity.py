"""A folder is a run: moved, it is the same run, and a copy is another one. A stranger's file decides no place."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import upload_manager
from conftest import load, metrics, run_here, scalars
from stories import own_folders, starts, tell

import train
from steadygpt.base.options import UserError
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.log.runlog import RunLog
from steadygpt.run.identity import read_run, record_of


def started(*flags: str) -> str:
    """Train the run "a" up to step 3 in the folder "one"; return its id."""
    assert run_here("--run_name", "a", "--max_steps", "3", *own_folders("one"), *flags) == 0
    return read_run(Path("one")).id


def contents(*folders: str) -> dict[Path, bytes]:
    """Return the files of folders, those of runs "NAME-from-STEP" in them aside."""
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if "-from-" not in str(path)}


# ---------------------------------------------------------------------------------------------------------------------
# moves, copies and restores


FIRST = "start one --run_name a --max_steps 3"
CURVES = f"{FIRST} --use_tensorboard"
TWICE = "resume x --max_steps 6\nresume x --max_steps 7"
BACK = "mv one gone; cp -r backup one; rm -r gone  # another inode\nresume one --max_steps 6"
TO_ANOTHER_MACHINE = """cp -r one x; rm -r one; sed -i 's/"host": "/&another-/' x/run.json user/steadygpt/*.json"""
COPY = "copy         of the run a in {here}/one; this is the run a-from-3, with its logs in"
Logs = dict[str, tuple[str, range]]  # folder -> a letter for the run of each start, the steps
STORIES: dict[str, tuple[str, Logs, str]] = {
    "a moved folder": (
        f"{CURVES} --mirror $URL\nmv one x\n{TWICE}",
        {"logs-one": ("aaa", range(7)), "there/logs": ("aaa", range(7))}, ""),
    "a moved folder with logs in it": (
        f"{FIRST} --logdir one/logs\nmv one x\nresume x --max_steps 6",
        {"x/logs": ("aa", range(6))}, ""),
    "a moved project": (
        f"{FIRST}\nmkdir y; mv one logs-one y\nresume y/one --max_steps 6",
        {"y/logs-one": ("aa", range(6))}, ""),
    "a backup at another place": (
        f"{FIRST}\ncp -r one x; rm -r one\n{TWICE}",
        {"logs-one": ("aaa", range(7))}, ""),
    "a backup that is restored twice": (
        f"{FIRST}\ncp -r one backup\n{BACK}\n{BACK}",
        {"logs-one": ("aaa", range(6))}, ""),
    "a copy": (
        f"{CURVES} --mirror $URL\ncp -r one x\n{TWICE}",
        {"logs-one": ("a", range(3)), "logs-one/a-from-3": ("bb", range(3, 7)), "there/logs": ("a", range(3))},
        f"{COPY} logs-one/a-from-3, and with no mirror"),
    "a copy on two ranks, and its original": (
        f"{CURVES} --mirror $URL\ncp -r one x\nresume_on_2_ranks x --max_steps 6\nresume one --max_steps 6",
        {"logs-one": ("aa", range(6)), "logs-one/a-from-3": ("b", range(3, 6)), "there/logs": ("aa", range(6))}, ""),
    "a copy with logs in it": (
        f"{FIRST} --logdir one/logs\ncp -r one x\n{TWICE}",
        {"one/logs": ("a", range(3)), "x/logs": ("abb", range(7))},
        f"{COPY} x/logs, and with no mirror"),
    "a copy on another machine": (
        f"{FIRST}\n{TO_ANOTHER_MACHINE}\n{TWICE}",
        {"logs-one": ("a", range(3)), "logs-one/a-from-3": ("bb", range(3, 7))}, ""),
    "a copy with a mirror of its own": (
        f"{FIRST} --mirror $URL\ncp -r one x\nresume x --max_steps 6 --mirror $URL-new\nresume x --max_steps 7",
        {"logs-one": ("a", range(3)), "logs-one/a-from-3": ("bb", range(3, 7)), "there/logs": ("a", range(3)),
         "there-new/logs": ("bb", range(3, 7))},
        f"{COPY} logs-one/a-from-3, and with file://{{here}}/there-new"),
    "two copies of a deleted folder": (  # the first that resumes is the same run
        f"{FIRST}\ncp -r one x; mv one y\nresume x --max_steps 6\nresume y --max_steps 6",
        {"logs-one": ("aa", range(6)), "logs-one/a-from-3": ("b", range(3, 6))}, ""),
    "a fork into a folder around the original": (
        f"{FIRST} --checkpoint_dir all/one --logdir all/one/logs\n"
        "train --resume all/one/latest.pt --checkpoint_dir all --max_steps 6",
        {"all/one/logs": ("a", range(3)), "all/one/logs/a-from-3": ("b", range(3, 6))}, ""),
    "a new run with the logs of another one": (
        f"{CURVES} --logdir logs\ntrain --run_name b --max_steps 4 --checkpoint_dir x --use_tensorboard\n{TWICE}",
        {"logs": ("a", range(3)), "logs/b": ("bbb", range(7))},
        "name         b, with its logs in logs/b, because runs/b or logs belongs to another run"),
    "another user": (
        f"{FIRST}\nXDG_STATE_HOME=other\nresume one --logdir logs-one --max_steps 6",
        {"logs-one": ("aa", range(6))},
        "places       this user has not started the run in one, so its name, logs and mirror are not known; give them"),
    "a user whose home is not kept": (
        "XDG_STATE_HOME=/dev/null\nstart one --run_name x --use_tensorboard --max_steps 3\n"
        "resume one --logdir logs-one --run_name x --use_tensorboard --max_steps 6\n"
        "resume one --logdir logs-one --run_name x --use_tensorboard --max_steps 8",
        {"logs-one": ("aaa", range(8))},
        "warning: /dev/null/steadygpt: Not a directory; the next start will not recognize one; set XDG_STATE_HOME to a "
        "folder that is kept, or name run, logs and mirror with each resume"),
    "a disk on a new machine, and the mirror of its run": (
        f"{FIRST} --mirror $URL\nXDG_STATE_HOME=other\nresume one --max_steps 6 --mirror $URL",
        {"logs-one": ("a", range(3)), "logs": ("aa", range(6)), "there/logs": ("aa", range(6))}, ""),
    "a restored run in the folder of another one": (
        f"{FIRST} --mirror $URL\nstart two --run_name b --max_steps 4 --logdir two/logs\n"
        "rm two/latest.pt\nresume two --logdir two/logs --mirror $URL --max_steps 6",
        {"logs-one": ("a", range(3)), "two/logs": ("b", range(4)), "two/logs/a": ("aa", range(6)),
         "there/logs": ("aa", range(6))}, ""),
    "a run that changes between two machines": (  # on one of them, other logs are in the way
        f"{FIRST} --mirror $URL\nXDG_STATE_HOME=other\ntrain --max_steps 3 --checkpoint_dir two\n"
        "resume x --mirror $URL --max_steps 6\nXDG_STATE_HOME=user\nresume one --max_steps 8",
        {"logs-one": ("aaa", range(8)), "logs": ("b", range(3)), "logs/a": ("aa", range(6)),
         "there/logs": ("aaa", range(8))},
        "name         a, with its logs in logs/a, because runs/a or logs belongs to another run"),
    "a restore after a refused one": (
        f"{FIRST} --mirror $URL\nXDG_STATE_HOME=other\n"
        "refused --resume latest --checkpoint_dir x --mirror $URL --data_dir nowhere\n"
        "resume x --mirror $URL --max_steps 6",
        {"logs-one": ("a", range(3)), "logs": ("aa", range(6)), "there/logs": ("aa", range(6))}, ""),
    "a fork of a run with a mirror": (
        f"{FIRST} --mirror $URL --max_steps 8 --checkpoint_freq 4\n"
        "train --resume one/rolling_step_000004.pt --checkpoint_dir x --logdir logs-x",
        {"logs-one": ("a", range(8)), "logs-x": ("b", range(4, 8)), "there/logs": ("a", range(8))},
        "fork         of the run a in one; this is the run a-from-4, with its logs in logs-x, and with no mirror"),
    "a restored copy": (  # its log begins with the starts of the original
        f"{FIRST} --logdir one/logs\ncp -r one x\nresume x --max_steps 4 --mirror $URL\nXDG_STATE_HOME=other\n"
        "resume y --max_steps 5 --mirror $URL --logdir logs\n"
        "resume y --max_steps 6 --mirror $URL --logdir logs",
        {"one/logs": ("a", range(3)), "x/logs": ("ab", range(4)), "logs": ("abbb", range(6)),
         "there/logs": ("abbb", range(6))}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("story", "logs", "says"), STORIES.values(), ids=STORIES)
def test_logs_curves_and_mirror_belong_to_one_run(url, capsys, story, logs, says):
    tell(story)
    of_places = {str(path.parent): starts(path.parent) for path in Path().rglob("metrics.jsonl")}
    in_order = sorted((start["time"], start["run"]) for found in of_places.values() for start in found)
    letters = dict(zip(dict.fromkeys(run for _, run in in_order), "ab", strict=False))
    runs = {place: "".join(letters[start["run"]] for start in found) for place, found in of_places.items()}
    assert {place: (runs[place], [*metrics(place, "loss")]) for place in runs} == {
        place: (run, [*steps]) for place, (run, steps) in logs.items()
    }
    for mirror in Path().glob("there*"):
        index, (run, steps) = Mirror(f"file://{mirror.absolute()}").index(), logs[f"{mirror}/logs"]
        assert (letters[index.run], index.checkpoints["latest.pt"].step) == (run[-1], steps[-1] + 1)
        assert index.name == {"a": "a", "b": "a-from-3"}[run[-1]]
    if "tensorboard" in story:
        curves = {tuple(scalars(path)["train/loss"]) for path in Path("runs").iterdir()}
        assert curves == {tuple(steps) for _, steps in logs.values()}
    text = "".join(capsys.readouterr())
    assert not says or says.format(here=Path.cwd()) in text.splitlines()


def test_the_places_of_a_run_hold_in_its_folder(url):
    started("--use_tensorboard", "--run_name", "a/b")
    assert read_run(Path("one")).places == {
        "run_name": "a/b", "mirror": "", "use_tensorboard": True, "tensorboard_dir": "runs", "logdir": "logs-one",
        "use_wandb": False,
    }  # fmt: skip


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
    tell("cp -r one copy")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RunLog, "open", killed)
        tell("resume copy --max_steps 6")
    tell("resume copy --max_steps 6")
    assert metrics("copy/logs", "loss").keys() == set(range(6))


def test_auto_continues_a_run_that_was_killed_before_its_first_save(url, monkeypatch):
    again = ("--resume", "auto", "--use_tensorboard")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(train, "run_to_end", killed)
        started(*again)
    started(*again)
    assert os.listdir("runs") == ["a"]
    assert metrics("logs-one", "loss").keys() == {0, 1, 2}


def test_a_mirror_that_is_newer_but_at_fewer_steps_leaves_the_local_checkpoint(url, capsys):
    tell("""
        start one --run_name a --max_steps 3 --mirror $URL
        cp -r there before
        resume one --max_steps 8
        rm -r there; mv before there  # as if the uploads had failed
        mv user other
        resume two --max_steps 5 --mirror $URL --logdir logs-two
        mv user gone; mv other user
        resume one --max_steps 6
    """)
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
        tell("resume two --mirror $URL --dry_run")


def test_a_copy_may_write_to_no_mirror_of_its_original(url):
    run_id = started("--mirror", url)
    tell("cp -r one copy")
    with pytest.raises(UserError, match=r"--mirror is missing, and copy/run\.json names none"):
        upload_manager.main(["upload-all", "copy"])
    with pytest.raises(UserError, match=r"copy: a copy of the run .* in .*/one\. Resume from it with --mirror"):
        upload_manager.main(["upload-all", "copy", "--mirror", f"{url}-empty"])
    refused = rf"--mirror {url} belongs to the run a \({run_id}\); give this run another --mirror, or resume a in an"
    with pytest.raises(UserError, match=refused):
        tell("resume copy --mirror $URL")


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
def theirs(victim):
    """The flags of the mirror of a stranger's run, which is nowhere else."""
    tell("""
        start one --max_steps 4 --mirror $PWD/theirs --use_tensorboard --run_name mine --tensorboard_dir tb
        rm -r one logs-one tb user
    """)
    return "--resume", "latest", "--mirror", f"{Path.cwd()}/theirs", "--use_tensorboard", "--max_steps", "6"


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
        run_here(*theirs, *own_folders("here"))


def test_events_of_another_run_of_the_name_stay(theirs):
    Path("theirs/tensorboard/events.out.tfevents.1.host").write_text("theirs")
    before = contents("runs/mine")
    assert run_here(*theirs, *own_folders("here")) == 0
    assert contents("runs/mine") == before
    mine, restored = sorted(Path("runs").iterdir())  # "mine" and "mine-20261126-081500"
    assert (len([*mine.iterdir()]), len([*restored.iterdir()])) == (1, 3)


def test_a_run_json_from_elsewhere_decides_no_place(url):
    record = json.loads(record_of(started()).read_text())
    path = Path("one/run.json")
    path.write_text(json.dumps(record | json.loads(path.read_text())))
    tell("rm -r user")  # another one, who has downloaded the folder
    assert read_run(Path("one")).places == {}


def test_a_link_in_place_of_a_log_is_not_followed(url):
    started()
    tell("echo mine > mine.txt; ln -sf ../mine.txt logs-one/metrics.jsonl")
    with pytest.raises(UserError, match=r"Too many levels of symbolic links: '.*logs-one/metrics.jsonl'"):
        tell("resume one")
    assert Path("mine.txt").read_text() == "mine\n"


BROKEN = ["", "[]", '{"id": "../x"}', '{"id": "0123456789abcdef", "inode": "x"}', "{" * 9999]


def test_a_broken_run_json_is_refused(url):
    started()
    for text in BROKEN:
        Path("one/run.json").write_text(text)
        with pytest.raises(UserError, match=r"one/run\.json: .*; remove it, and give the options of the run again"):
            tell("resume one")
    tell("rm one/run.json\nresume one --logdir logs-one --run_name a --max_steps 6")
