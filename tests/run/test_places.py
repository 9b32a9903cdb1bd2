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
        "place        this folder is a copy or a download; to continue the logs and the mirror of its run, start it "
        f"with --run_name mine --mirror {url} --use_tensorboard --logdir home --use_wandb"
    ) in capsys.readouterr().out.splitlines()


def test_a_log_of_a_mirror_is_no_module(victim, monkeypatch):
    url = f"file://{Path.cwd()}/theirs"
    run_here("--max_steps", "4", "--mirror", url, "--use_tensorboard", *folders("there"))
    for name in ("wandb.py", "..", "authorized_keys", "metrics.jsonl.py"):
        (Path("theirs/logs") / name).is_dir() or Path("theirs/logs", name).write_text("open('code-was-run', 'w')")
    Path("theirs/tensorboard/wandb.py").write_text("")
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
    with pytest.raises(UserError, match=r"--run_name is '\.\./\.\./home'; expected"):
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
    assert "of its run, start it with --run_name a --logdir logs-one" in capsys.readouterr().out
    assert read_places(Path("copy"))["run_name"].startswith("gpt-")


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
