"""A folder is a run: moved, it is the same run; a copy beside it is another. A file from elsewhere decides no place."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import upload_manager
from conftest import folders, load, refusal, run_here, scalars
from ground import acting_here, alter, in_place_of_training, launches, metrics, options_in, with_options
from stories import tell

from steadygpt.base.options import UserError
from steadygpt.log.metrics import read_run, read_status
from steadygpt.mirror.store import Mirror


def contents(*folders: str) -> dict[Path, bytes]:
    """Return the files of folders."""
    return {path: path.read_bytes() for folder in folders for path in Path(folder).rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------------
# moves, copies and restores


FIRST = "start one --max_steps 3 --use_tensorboard --mirror $URL"
TWICE = "resume x --max_steps 6 {more}\nresume x --max_steps 7 {more}"
WITH_MIRROR = TWICE.format(more="--use_tensorboard --mirror $URL")
ALONE = TWICE.format(more="--use_tensorboard")
COPY = "copy         of the run in {here}/one: a new run in x"
Logs = dict[str, tuple[str, range]]  # folder -> a letter for the run of each launch, the steps
STORIES: dict[str, tuple[str, Logs, str]] = {
    "a moved folder": (
        f"{FIRST}\nmv one x\n{WITH_MIRROR}", {"x": ("aaa", range(7)), "there": ("aaa", range(7))}, ""),
    "a folder above it is moved": (
        f"{FIRST}\nmkdir y; mv one y\nresume y/one --max_steps 6 --use_tensorboard --mirror $URL",
        {"y/one": ("aa", range(6)), "there": ("aa", range(6))}, ""),
    "a backup that is restored to its place": (
        f"{FIRST}\ncp -r one backup; rm -r one; mv backup one\n"
        "resume one --max_steps 6 --use_tensorboard --mirror $URL",
        {"one": ("aa", range(6)), "there": ("aa", range(6))}, ""),
    "a backup at another place": (
        f"{FIRST}\ncp -r one x; rm -r one\n{WITH_MIRROR}", {"x": ("aaa", range(7)), "there": ("aaa", range(7))}, ""),
    "a link to the folder": (
        f"{FIRST}\nln -s one x\n{WITH_MIRROR}", {"one": ("aaa", range(7)), "there": ("aaa", range(7))}, ""),
    "a launch without the mirror": (
        f"{FIRST}\nmv one x\n{ALONE}", {"x": ("aaa", range(7)), "there": ("a", range(3))},
        "mirror       none in this launch; the last one had --mirror file://{here}/there"),
    "a copy": (
        f"{FIRST}\ncp -r one x\n{ALONE}",
        {"one": ("a", range(3)), "x": ("abb", range(7)), "there": ("a", range(3))}, COPY),
    "a copy on two ranks, and its original": (
        f"{FIRST}\ncp -r one x\nresume_on_2_ranks x --max_steps 6 --use_tensorboard\n"
        "resume one --max_steps 6 --use_tensorboard --mirror $URL",
        {"one": ("aa", range(6)), "x": ("ab", range(6)), "there": ("aa", range(6))}, ""),
    "a copy with a mirror of its own": (
        f"{FIRST}\ncp -r one x\n{TWICE.format(more='--use_tensorboard --mirror $URL-new')}",
        {"one": ("a", range(3)), "x": ("abb", range(7)), "there": ("a", range(3)), "there-new": ("abb", range(7))},
        COPY),
    "a folder without run.json": (
        f"{FIRST}\nrm one/run.json\nresume one --max_steps 6 --use_tensorboard",
        {"one": ("ab", range(6)), "there": ("a", range(3))}, ""),
    "a fork": (
        f"{FIRST}\ntrain --resume one/latest.pt --checkpoint_dir x --max_steps 6 --use_tensorboard\n"
        "resume x --max_steps 7 --use_tensorboard",
        {"one": ("a", range(3)), "x": ("bb", range(3, 7)), "there": ("a", range(3))},
        "fork         a new run in x"),
    "a fork into a folder around the original": (
        f"{FIRST}\nmkdir x; mv one x/one\ntrain --resume x/one --checkpoint_dir x --max_steps 6 --use_tensorboard",
        {"x/one": ("a", range(3)), "x": ("b", range(3, 6)), "there": ("a", range(3))}, ""),
    "a lost disk, and the mirror of its run": (
        f"{FIRST}\nrm -r one\n{WITH_MIRROR}",
        {"x": ("aaa", range(7)), "there": ("aaa", range(7))}, ""),
    "a restore after a refused one": (
        f"{FIRST}\nrm -r one\nrefused --resume latest --checkpoint_dir x --mirror $URL --data_dir nowhere\n"
        "resume x --mirror $URL --max_steps 6 --use_tensorboard",
        {"x": ("aa", range(6)), "there": ("aa", range(6))}, ""),
    "a run that changes between two machines": (
        f"{FIRST}\nresume x --mirror $URL --max_steps 6 --use_tensorboard\n"
        "resume one --max_steps 8 --mirror $URL --use_tensorboard",
        {"one": ("aaa", range(8)), "x": ("aa", range(6)), "there": ("aaa", range(8))}, ""),
    "a restored copy": (  # its log begins with the launch of the original
        f"{FIRST}\ncp -r one x; rm -r there\nresume x --mirror $URL --max_steps 4 --use_tensorboard\n"
        "resume y --mirror $URL --max_steps 5 --use_tensorboard",
        {"one": ("a", range(3)), "x": ("ab", range(4)), "y": ("abb", range(5)), "there": ("abb", range(5))}, ""),
    "a new run in the folder of one that never saved": (
        f"{FIRST}\nrm one/*.pt; rm -r there\nstart one --max_steps 4 --use_tensorboard",
        {"one": ("ab", range(4))}, ""),
    "a mirror in the folder of another run": (
        f"{FIRST}\nstart x --max_steps 4\nrm x/*.pt\nrefused --resume latest --checkpoint_dir x --mirror $URL",
        {"one": ("a", range(3)), "x": ("b", range(4)), "there": ("a", range(3))}, ""),
}  # fmt: skip


# Each is told by a shorter one, or takes seconds.
STORM = {
    "a folder above it is moved", "a backup at another place", "a copy on two ranks, and its original",
    "a fork into a folder around the original", "a run that changes between two machines", "a restored copy",
}  # fmt: skip


@pytest.mark.parametrize(("story", "logs", "says"), [
    pytest.param(*story, id=name, marks=pytest.mark.storm if name in STORM else ()) for name, story in STORIES.items()
])  # fmt: skip
def test_logs_curves_and_mirror_belong_to_one_run(url, capsys, story, logs, says):
    tell(story)
    of_folders = {str(path.parent): launches(path.parent) for path in Path().rglob("metrics.jsonl")}
    in_order = sorted((start["time"], start["run"]) for lines in of_folders.values() for start in lines)
    letters = dict(zip(dict.fromkeys(run for _, run in in_order), "ab", strict=False))
    runs = {folder: "".join(letters[start["run"]] for start in lines) for folder, lines in of_folders.items()}
    assert {folder: (runs[folder], [*metrics(folder, "loss")]) for folder in runs} == {
        folder: (run, [*steps]) for folder, (run, steps) in logs.items()
    }
    for folder, (run, steps) in logs.items():
        if folder.startswith("there"):
            index = Mirror(f"file://{Path(folder).absolute()}").index()
            assert (letters[index.run], index.checkpoints["latest.pt"].step) == (run[-1], steps[-1] + 1)
        if Path(folder, "tensorboard").exists():
            assert [*scalars(f"{folder}/tensorboard")["train/loss"]] == [*steps]
    text = "".join(capsys.readouterr())
    assert not says or says.format(here=Path.cwd()) in text.splitlines()


def test_a_folder_is_a_copy_only_beside_a_folder_of_the_same_run(url):
    tell("start one --max_steps 3\nstart other --max_steps 3")
    run_id = read_run(Path("one")).id
    shutil.copytree("one", "copy")
    record = json.loads(Path("one/run.json").read_text())
    here = Path.cwd()
    for folder, is_same in (("one", False), ("copy", True), ("gone", True), ("other", True), ("data", True)):
        Path("copy/run.json").write_text(json.dumps(record | {"folder": f"{here}/{folder}"}))
        found = read_run(Path("copy"))
        assert (found.id == run_id, found.copied_from) == (is_same, "" if is_same else f"{here}/one"), folder


def killed() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("first", ["start one --max_steps 3 --resume auto", "start one"])
def test_a_run_that_is_killed_before_its_first_save_stays_the_same_run(url, first):
    with pytest.raises(KeyboardInterrupt), acting_here(lambda rank: in_place_of_training(killed)):
        tell(first)
    before = read_run(Path("one")).id
    tell("start one --max_steps 3 --resume auto --use_tensorboard")
    assert (read_run(Path("one")).id, os.listdir("one/tensorboard") != []) == (before, True)
    assert metrics("one", "loss").keys() == {0, 1, 2}


def test_a_mirror_that_is_newer_but_at_fewer_steps_leaves_the_local_checkpoint(url, capsys):
    tell("""
        start one --run_name a --max_steps 3 --mirror $URL
        cp -r there before
        resume one --max_steps 8 --mirror $URL
        rm -r there; mv before there  # as if the uploads had failed
        resume two --max_steps 5 --mirror $URL
        resume one --max_steps 6 --mirror $URL
    """)
    text = capsys.readouterr().out
    [kept] = Path("one").glob("latest.pt.skipped-*")
    assert f"skipped      one/latest.pt: of step 8, but saved before the mirror's; renamed {kept.name}\n" in text
    assert f"resumed      from one/latest.pt (restored from {url}) at step 5\n" in text
    assert load(kept)["step"] == 8


def test_a_mirror_is_no_checkpoint_folder_and_a_dry_run_restores_nothing(url):
    with pytest.raises(UserError, match=r"^--mirror file:\S*/one .*--checkpoint_dir\b"):
        tell("start one --mirror file://$PWD/one")
    tell("start one --max_steps 3 --mirror $URL")
    with pytest.raises(UserError, match=rf"\btwo\b.* {url}$"):
        tell("resume two --mirror $URL --dry_run")


def test_a_copy_may_write_to_no_mirror_of_its_original(url):
    tell("start one --max_steps 3 --run_name a --mirror $URL\ncp -r one copy")
    with pytest.raises(UserError, match=r"^copy: .*/one; .*--mirror\b"):
        upload_manager.main(["upload-all", "copy", "--mirror", f"{url}-empty"])
    with pytest.raises(UserError, match=rf"^copy: .* {url}; .*--checkpoint_dir\b"):
        upload_manager.main(["download", "latest", "--mirror", url, "--checkpoint_dir", "copy"])
    with refusal(f"--mirror {url} ", f" a ({read_run(Path('one')).id})"):
        tell("resume copy --mirror $URL")


def test_a_folder_of_a_run_is_no_mirror(url):
    tell("start one --max_steps 3\nstart two --max_steps 3")
    before = contents("one")
    with refusal(f"--mirror file://{Path.cwd()}/one: ") as refused:
        tell("resume two --max_steps 4 --mirror file://$PWD/one")
    assert any(name in str(refused.value) for name in os.listdir("one"))
    assert contents("one") == before


def test_files_of_the_user_stay_in_the_folder_of_a_run(url):
    names = (".env.tmpl", ".bashrc.tmpl", ".notes.tmp", "x.tmp")
    Path("one/.folder.tmp").mkdir(parents=True)
    for name in (*names, ".latest.pt.tmp", ".rolling_step_000001.pt.tmp"):
        Path("one", name).write_text("mine")
    tell("start one --max_steps 3")
    left = {path.name for path in Path("one").glob("*.tmp*")} | {path.name for path in Path("one").glob(".*.tmp*")}
    assert left == {*names, ".folder.tmp"}


def test_settings_of_wandb_in_the_folder_are_refused(url):
    tell("start one --max_steps 3\nmkdir one/wandb; touch one/wandb/settings")
    with pytest.raises(UserError, match=r"^one/wandb/settings: .*~/\.config/wandb\b"):
        tell("resume one --max_steps 4 --use_wandb")
    tell("resume one --max_steps 4")


def test_a_restore_is_the_folder(url):
    tell("start one --max_steps 4 --eval_freq 2 --checkpoint_freq 2 --use_tensorboard --mirror $URL\nmv one gone")
    tell("resume one --mirror $URL --max_steps 5")
    restored, before = (contents(folder) for folder in ("one", "gone"))
    for name in ("log.txt", "metrics.jsonl"):
        assert restored[Path("one", name)].startswith(before[Path("gone", name)])
    events = {path.name for path in before if path.parent.name == "tensorboard"}
    assert events < {path.name for path in restored if path.parent.name == "tensorboard"}
    assert {path.name for path in restored} - events >= {"latest.pt", "run.json", "status.json"}


# ---------------------------------------------------------------------------------------------------------------------
# names and options


NAMES = {
    "": "start one", "that of the folder behind a link": "mkdir one; ln -s one link\nstart link",
    "given": "start two --run_name one",
    "kept on resume": "start two --run_name one --max_steps 3\nresume two --max_steps 4",
    "moved": "start two --max_steps 3\nmv two one\nresume one --max_steps 4",
    "changed on resume": "start two --run_name a --max_steps 3\nresume two --run_name one --max_steps 4",
    "of a mirror": "start one --mirror $URL --max_steps 3\nresume two --mirror $URL --max_steps 4",
}  # fmt: skip


@pytest.mark.parametrize("story", NAMES.values(), ids=NAMES)
def test_the_name_of_a_run_is_that_of_its_folder_unless_it_is_given(url, story):
    tell(story)
    folder = Path("two" if "two" in story and "mv" not in story else "one")
    assert read_status(folder)["run_name"] == "one"
    assert (
        "\nrun          one\n" in folder.joinpath("log.txt").read_text()[-4000:]
        or "run          one\n" in (folder / "log.txt").read_text()
    )


def test_a_fork_that_is_killed_before_its_first_save_keeps_its_options(url):
    tell("start one --max_steps 4 --checkpoint_freq 2")
    with acting_here(lambda rank: in_place_of_training(lambda: 0)):  # as if killed there
        tell("start two --resume one/rolling_step_000002.pt --spike_z 7")
    tell("resume two --max_steps 4")
    assert options_in("two/latest.pt").spike_z == 7


def test_a_fork_has_a_best_model_of_its_own(url):
    tell("start one --max_steps 4 --checkpoint_freq 2 --eval_freq 2")
    alter("one/rolling_step_000002.pt", scores={"val_loss": 0.001})
    tell("start two --resume one/rolling_step_000002.pt --eval_freq 2")
    assert load("two/best_model.pt")["step"] >= 2


def test_without_a_best_model_the_next_one_is_the_best(url):
    tell("start one --max_steps 4 --eval_freq 2\nrm one/best_model.pt")
    tell("resume one --max_steps 5 --max_lr 0 --min_lr 0 --allow_changes --eval_freq 2")
    assert load("one/best_model.pt")["step"] in (4, 5)


# ---------------------------------------------------------------------------------------------------------------------
# files from elsewhere


@pytest.fixture
def victim(url):
    """Folders that a run must not write to, as they were."""
    for folder in ("home/tensorboard", "theirs"):
        Path(folder).mkdir(parents=True)
    for name in ("authorized_keys", "log.txt", "tensorboard/events.out.tfevents.1.host"):
        Path("home", name).write_text("mine\n")
    return lambda: contents("home", "theirs")


@pytest.fixture
def theirs(victim):
    """The flags of the mirror of a stranger's run, which is nowhere else."""
    tell("start one --max_steps 4 --mirror $PWD/theirs --use_tensorboard --run_name mine\nrm -r one")
    return "--resume", "latest", "--mirror", f"{Path.cwd()}/theirs", "--use_tensorboard", "--max_steps", "6"


def test_a_folder_from_elsewhere_decides_neither_folder_nor_mirror_nor_wandb(victim, monkeypatch):
    """Each of its files names a place: options, run.json, status.json, logs, the index of a mirror."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    tell("start one --max_steps 3")
    theirs, home = f"file://{Path.cwd()}/theirs", f"{Path.cwd()}/home"
    places = {"checkpoint_dir": home, "run_name": "../home", "mirror": theirs}
    options = places | {"use_wandb": True, "alert_url": "http://127.0.0.1:9"}
    torch.save(with_options(load("one/latest.pt"), **options), "one/latest.pt")
    for name in ("run.json", "status.json"):
        record = json.loads(Path("one", name).read_text())
        options = record.get("options", {}) | places | {"use_wandb": True}
        record |= {"options": options, "folder": home, "logdirs": [home], "tensorboard": home, **places}
        record |= {"name": "../home", "wandb": True}
        Path("one", name).write_text(json.dumps(record))
    start = launches("one")[0] | {"logdir": home, "wandb": "theirs", "mirror": theirs}
    Path("one/metrics.jsonl").write_text(f"{json.dumps(start)}\n")
    Path("one/index.json").write_text(json.dumps({"run": "0" * 16, "name": "x", "writer": "0" * 16, "checkpoints": {}}))
    tell("cp -r one x; rm -r one")
    before = victim()
    tell("resume x --max_steps 4\ntrain --resume x/latest.pt --checkpoint_dir y --max_steps 6\nresume y --max_steps 7")
    Path("x/run.json").write_text(json.dumps(json.loads(Path("x/run.json").read_text()) | {"mirror": theirs}))
    with pytest.raises(UserError, match=r"(?i)^--mirror .* s3://bucket/run$"):
        upload_manager.main(["upload-all", "x"])
    assert victim() == before
    assert (metrics("x", "loss").keys(), metrics("y", "loss").keys()) == ({3}, {4, 5, 6})
    run = read_run(Path("y"))
    assert (run.name, run.mirror, run.wandb) == ("", "", False)


def test_a_mirror_brings_logs_and_curves_but_no_other_file(theirs, monkeypatch):
    for name in ("wandb.py", "authorized_keys", "metrics.jsonl.py", "run.json", "status.json", ".lock", "console.txt"):
        Path("theirs", name).write_text("open('code-was-run', 'w')")
    for name in ("wandb.py", "events.py", "x/events.out.tfevents.1.host"):
        path = Path("theirs/tensorboard", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run_here(*theirs, *folders("home")) == 0
    assert {path.name.split("-")[0] for path in Path("home").iterdir()} == {
        ".lock", "authorized_keys", "latest.pt", "latest_backup.pt", "log.txt", "metrics.jsonl", "run.json",
        "status.json", "tensorboard",
    }  # fmt: skip
    assert Path("home/authorized_keys").read_text() == "mine\n"
    events = sorted(path.name.partition(".")[0] for path in Path("home/tensorboard").iterdir())
    assert events == ["events"] * 3  # mine, theirs and the new one
    assert metrics("home", "loss").keys() == set(range(6))


def test_a_name_in_the_index_of_a_mirror_is_printable(theirs):
    index = json.loads(Path("theirs/index.json").read_text())
    Path("theirs/index.json").write_text(json.dumps(index | {"name": "\x1b[2J"}))
    with pytest.raises(UserError, match=r"theirs/index\.json: --run_name .*'\\x1b\[2J'"):
        run_here(*theirs, *folders("here"))


BROKEN = ["", "[]", '{"id": "../x"}', '{"id": "0123456789abcdef", "folder": 3}', "{" * 9999]


def test_a_broken_run_json_is_refused(url):
    tell("start one --max_steps 3")
    for text in BROKEN:
        Path("one/run.json").write_text(text)
        with refusal("one/run.json: "):
            tell("resume one")
    tell("rm one/run.json\nresume one --max_steps 6")
