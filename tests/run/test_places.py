"""A checkpoint or a mirror of a stranger decides nothing about where a run writes."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import upload_manager
from conftest import load, metrics, run_here
from test_train import folders

from steadygpt.base.options import UserError
from steadygpt.run.places import read_places


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
    content["train_config"] |= options
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
    assert metrics("logs/run-from-4", "loss").keys() == {4, 5}
    assert (
        "place        the run wrote elsewhere, which a checkpoint cannot decide here; to continue that, start with "
        f"--run_name mine --mirror {url} --use_tensorboard --logdir home --use_wandb"
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
        ".lock", "authorized_keys", "log.txt", "log", "metrics.jsonl"
    }  # fmt: skip
    assert Path("home/authorized_keys").read_text() == "mine\n"
    assert not [*Path("here").glob("*.py"), *Path("runs").rglob("*.py")]
    assert metrics("home", "loss").keys() == set(range(6))


def test_a_name_in_the_index_of_a_mirror_is_a_name(victim):
    url = f"file://{Path.cwd()}/theirs"
    run_here("--max_steps", "4", "--mirror", url, *folders("there"))
    index = json.loads(Path("theirs/index.json").read_text())
    Path("theirs/index.json").write_text(json.dumps(index | {"run": "../../home"}))
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


def test_places_hold_in_the_own_folder_and_after_a_move_of_it(workdir):
    flags = ("--use_tensorboard", "--run_name", "a/b", *folders("one"))
    run_here("--max_steps", "3", *flags)
    assert read_places(Path("one")) == {
        "run_name": "a/b", "mirror": "", "use_tensorboard": True, "tensorboard_dir": "runs", "logdir": "logs-one",
        "use_wandb": False,
    }  # fmt: skip
    Path("one").rename("moved")
    assert run_here("--resume", "latest", "--checkpoint_dir", "moved", "--max_steps", "6") == 0
    assert metrics("logs-one", "loss").keys() == set(range(6))


def test_a_copy_has_a_name_and_logs_of_its_own(workdir, capsys):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    shutil.copytree("one", "copy")
    logs = {path: path.read_bytes() for path in Path("logs-one").iterdir()}
    capsys.readouterr()
    assert run_here("--resume", "latest", "--checkpoint_dir", "copy", "--max_steps", "6") == 0
    assert {path: path.read_bytes() for path in Path("logs-one").iterdir()} == logs
    assert "to continue that, start with --run_name a --logdir logs-one" in capsys.readouterr().out
    name = read_places(Path("copy"))["run_name"]
    assert name.startswith("gpt-") and metrics(f"logs/{name}", "loss").keys() == {3, 4, 5}


def test_a_copy_goes_on_with_the_flags_that_it_is_told(workdir):
    run_here("--max_steps", "3", "--run_name", "a", "--use_tensorboard", *folders("one"))
    shutil.copytree("one", "copy")
    flags = ("--run_name", "a", "--logdir", "logs-one", "--use_tensorboard")
    assert run_here("--resume", "latest", "--checkpoint_dir", "copy", "--max_steps", "6", *flags) == 0
    assert metrics("logs-one", "loss").keys() == set(range(6))
    assert [path.name for path in Path("runs").iterdir()] == ["a"]


def test_a_copy_of_a_run_with_a_mirror_asks_for_it(workdir):
    url = f"file://{workdir}/theirs"
    run_here("--max_steps", "3", "--run_name", "a", "--mirror", url, *folders("one"))
    shutil.copytree("one", "copy")
    again = ("--resume", "latest", "--checkpoint_dir", "copy", "--max_steps", "6", "--logdir", "l")
    with pytest.raises(
        UserError, match=rf"copy: a copy .*start with --run_name a --mirror {url}, or with --mirror '' for none"
    ):
        run_here(*again)
    assert run_here(*again, "--mirror", "") == 0
    assert read_places(Path("copy"))["mirror"] == ""


def test_a_run_json_that_this_user_has_not_written_is_ignored(workdir):
    run_here("--max_steps", "3", "--run_name", "a", *folders("one"))
    forged = {"inode": Path("one").stat().st_ino, "places": read_places(Path("one")) | {"logdir": "home"}}
    Path("one/run.json").write_text(json.dumps(forged, indent=2))
    assert read_places(Path("one")) == {}


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
    with pytest.raises(UserError, match=r"Too many levels of symbolic links: 'logs-one/metrics.jsonl'"):
        run_here("--resume", "latest", "--max_steps", "6", *folders("one"))
    assert Path("mine.txt").read_text() == "mine"


def test_upload_all_of_an_older_copy_is_refused(workdir):
    url = f"file://{workdir}/theirs"
    run_here("--max_steps", "3", "--mirror", url, *folders("one"))
    shutil.copytree("one", "copy", copy_function=shutil.copy)  # with dates of its own
    run_here("--resume", "latest", "--max_steps", "6", *folders("one"))
    with pytest.raises(UserError, match="has a newer checkpoint than copy, of step 6; resume from it"):
        upload_manager.main(["upload-all", "copy", "--mirror", url])


@pytest.mark.parametrize("text", ["", "[]", '{"inode": "x"}', '{"inode": 1, "places": {"logdir": 1}}', "{" * 9999])
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
