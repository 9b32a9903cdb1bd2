"""Commands as the users of other trainers type them, and the scripts of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import monitor_training
import pytest
from conftest import REPO, TINY, need_gpus, write_data
from ground import launch_in, options_in
from harness import run_to_end

import train
from steadygpt import config
from steadygpt.base.options import read_flags
from steadygpt.machine.host import usable_cores

PAGE = REPO / "docs/from-other-trainers.md"

# ---------------------------------------------------------------------------------------------------------------------
# exactly as typed


def typed(command: str) -> int:
    """Run the command `python train.py ...` in this process, which has already imported torch."""
    python, script, *argv = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    return train.main(argv)


def test_the_test_preset_trains(workdir, capsys):
    write_data(workdir / "data/stdlib", num_tokens=(2000, 70000))
    assert typed("python train.py --config test --mixed-precision bf16 --max-steps 11 --no-background-upload") == 0
    out = capsys.readouterr().out
    assert ", bf16, attention by " in out
    assert "finished after 11 steps" in out
    assert options_in("checkpoints/latest.pt").background_upload is False


def test_the_production_preset_plans_a_run(workdir, capsys):
    write_data(workdir / "data/edu_fineweb10B", (3000, 7000), tokenizer="gpt2", vocab_size=50257)
    assert typed("python train.py --config production --mixed-precision bf16 --max-steps 20000 --dry_run") == 0
    plan = capsys.readouterr().out
    assert "model        1,414.46 M parameters: 24 layers, 16 heads, 2,048 wide, context 2,048" in plan
    assert "steps        20,000, each of 65,536 tokens (4 rows x 2,048 tokens x 1 rank x 8 micro-steps)" in plan
    assert ", bf16, attention by " in plan


def leave_threads_open(rank: int) -> None:
    del os.environ["OMP_NUM_THREADS"]  # set by conftest.py


@pytest.mark.storm
@pytest.mark.parametrize(("processes", "launcher"), [
    (1, ["--num_processes", "1"]),
    (2, ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]),
])  # fmt: skip
def test_accelerate_launches_a_run(workdir, processes, launcher):
    """The launcher begins in a fork that has already imported torch."""
    pytest.importorskip("accelerate")
    need_gpus(processes)
    script = [str(REPO / "train.py"), *TINY, "--data_dir", "data"]
    words = (*launcher, "--mixed_precision", "no", *script)
    output = run_to_end(*words, program="accelerate.commands.launch", tiny=(), faults=[leave_threads_open])
    assert f"x {processes} rank{'s' * (processes > 1)} x" in output
    assert launch_in("checkpoints/latest.pt").settings["ranks"] == processes
    if processes == 1 and "--device cpu" in " ".join(TINY):
        assert f"({usable_cores()} threads)" in output  # though accelerate sets OMP_NUM_THREADS=1


def test_accelerate_passes_every_flag_on():
    """A flag that is the beginning of several flags of accelerate would end its command line."""
    launch = pytest.importorskip("accelerate.commands.launch")
    for name, f in config.FIELDS.items():
        for flag in (name, *f.metadata["aliases"], name.replace("_", "-")):
            launched = launch.launch_command_parser().parse_args(["train.py", f"--{flag}", "x"])
            assert launched.training_script_args == [f"--{flag}", "x"]


# ---------------------------------------------------------------------------------------------------------------------
# scripts


def write_interpreter(path: Path, cases: str) -> Path:
    """Write a stand-in for an interpreter; which arguments it gets decides what it does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in {cases} ;; esac\n')
    path.chmod(0o755)
    return path


READY = ".venv has all packages of scripts/requirements.txt. To use it: source .venv/bin/activate"
VENV = """\
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1])
(folder / "bin").mkdir(parents=True, exist_ok=True)
(folder / "bin/activate").touch()
if not (folder / "bin/python").exists():
    shutil.copy(sys.argv[2], folder / "bin/python")
"""


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """A copy of the scripts, with a stand-in for Python 3.12 that notes its calls and makes environments of itself,
    during which it gets Ctrl-C."""
    shutil.copytree(REPO / "scripts", tmp_path / "repo/scripts")
    (tmp_path / "repo/setup.sh").symlink_to("scripts/setup.sh")
    (tmp_path / "venv.py").write_text(VENV)
    noted = f'echo "$*" >> {tmp_path}/noted'
    python = write_interpreter(
        tmp_path / "python3.12",
        f""""-m venv "*) kill -INT $$; {sys.executable} {tmp_path}/venv.py "$3" "$0"; {noted} ;;
        *sys.version_info*) echo 3.12 ;; *find_spec*) ;;
        "-m pip --version") [ -e {tmp_path}/repo/.venv/bin/activate ] ;; *) {noted}""",
    )
    write_interpreter(tmp_path / "nvidia-smi", "*) echo GPU 0: a card")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", str(python))
    return tmp_path / "repo"


def set_up(*words: str) -> tuple[int, str]:
    """Run setup.sh from elsewhere; return its status and the last line that it prints."""
    done = subprocess.run(["repo/setup.sh", *words], capture_output=True, text=True)
    return done.returncode, f"{done.stdout}{done.stderr}".strip().rpartition("\n")[2]


INSTALL = "-m pip install --disable-pip-version-check -r scripts/requirements.txt"


def test_setup_creates_the_environment_of_its_repository_once(copied):
    assert set_up() == set_up() == (0, READY)
    assert Path("noted").read_text().splitlines() == ["-m venv .venv", INSTALL]
    assert (copied / ".venv/bin/activate").exists() and not Path(".venv").exists()


@pytest.mark.parametrize("available", [True, False])
def test_setup_installs_pytorch_for_cpus_where_there_is_no_gpu(copied, monkeypatch, available):
    write_interpreter(Path("nvidia-smi"), "*) echo No devices were found; exit 6")
    write_interpreter(Path("uname"), "*) echo Linux x86_64")
    write_interpreter(
        copied / ".venv/bin/python",
        f"""*version_info*) echo 3.12 ;; *--version*) ;; *) echo "$*" >> {os.getcwd()}/noted
        case "$*" in *index-url*) exit {int(not available)} ;; esac""",
    )
    (copied / ".venv/bin/activate").touch()
    assert set_up() == (0, READY)
    for_cpus, rest = Path("noted").read_text().splitlines()
    [torch] = [line for line in Path(copied, "scripts/requirements.txt").read_text().splitlines() if "torch==" in line]
    assert for_cpus.endswith(f"--no-deps --index-url https://download.pytorch.org/whl/cpu {torch}") and rest == INSTALL
    for file in copied.glob(".venv/installed-*"):
        file.unlink()
    monkeypatch.setenv("TORCH", "cuda")
    assert set_up() == (0, READY)
    assert Path("noted").read_text().splitlines()[2:] == [INSTALL]


def test_setup_completes_an_environment_whose_creation_was_interrupted(copied):
    assert set_up() == (0, READY)
    for file in copied.glob(".venv/installed-*"):
        file.unlink()
    (copied / ".venv/mine").touch()
    (copied / ".venv/bin/activate").unlink()  # written last
    assert set_up() == (0, READY)
    assert Path("noted").read_text().splitlines() == ["-m venv .venv", INSTALL] * 2
    assert (copied / ".venv/mine").exists()


def test_setup_replaces_an_environment_whose_interpreter_was_removed(copied):
    (copied / ".venv/bin").mkdir(parents=True)
    (copied / ".venv/bin/python").symlink_to("/nowhere/python3.12")
    (copied / ".venv/bin/activate").touch()
    assert set_up() == (0, READY)
    assert (copied / ".venv/bin/python").is_file()


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_setup_names_an_environment_of_another_version_and_what_replaces_it(copied, monkeypatch, version):
    write_interpreter(copied / ".venv/bin/python", f"*version_info*) echo {version}")
    monkeypatch.setenv("PYTHON", "python3.12")
    status, said = set_up()
    advice = "rm -rf .venv && PYTHON=python3.12 ./setup.sh"
    assert (status, said) == (
        2, f"error: .venv has Python {version}, but python3.12 is Python 3.12. To replace it: {advice}",
    )  # fmt: skip
    assert not Path("noted").exists()
    monkeypatch.chdir(copied)
    assert subprocess.run(advice, shell=True, capture_output=True, text=True).stdout.endswith(f"{READY}\n")


def test_setup_keeps_an_environment_of_a_later_version_than_python3(copied, monkeypatch):
    write_interpreter(copied / ".venv/bin/python", f'*version_info*) echo 3.13 ;; *) echo "$*" >> {os.getcwd()}/noted')
    (copied / ".venv/bin/activate").touch()
    monkeypatch.delenv("PYTHON")
    assert set_up() == (0, READY)
    assert INSTALL in Path("noted").read_text()


def test_a_check_plans_with_the_installed_python_and_installs_nothing(copied):
    assert set_up() == (0, READY)
    Path("noted").unlink()
    assert set_up("--check", "--config", "test")[0] == 0
    assert Path("noted").read_text() == "train.py --dry_run --config test\n"


SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.sh") if path.name != "common.sh")


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_comment_at_the_head_of_a_script_and_nothing_else_runs(name, flag, tmp_path):
    """Whatever runs finds no file and no variable, and of the programs only those that --help needs."""
    for program in ("bash", "sed", "dirname", "readlink"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script = REPO / "scripts" / name
    command = ["bash", script, "--config", "test", flag]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    head = script.read_text().partition("\n")[2]
    comment = [line.removeprefix("# ") for line in head.splitlines() if line.startswith("# ")]
    assert len(done.stdout) > 80 and comment[: done.stdout.count("\n")] == done.stdout.splitlines()
    assert name in done.stdout or name in ("setup.sh", "quickstart.sh", "fault_storm.sh")
    assert ("[flags of train.py]" in done.stdout) == ("python train.py --help" in done.stdout)
    assert not {path.name for path in tmp_path.iterdir()} - {"bash", "sed", "dirname", "readlink"}


@pytest.mark.parametrize("name", ["list_checkpoints.sh", "resume_training.sh", "setup.sh", "start_tensorboard.sh"])
def test_scripts_at_the_root_are_links(name):
    assert (REPO / name).resolve() == REPO / "scripts" / name


LIST, RESUME = "scripts/list_checkpoints.sh", "scripts/resume_training.sh"
SHOW, SETUP = "scripts/start_tensorboard.sh", "scripts/setup.sh"
RUNS = {  # a command -> what Python runs, or the error; there is no folder b
    f"{LIST} a": "REPO/train.py --list_checkpoints --checkpoint_dir a",
    f"{LIST} -v a": "REPO/train.py --list_checkpoints --checkpoint_dir a -v",
    f"{RESUME} a": "REPO/train.py --resume latest --checkpoint_dir a",
    f"NPROC=0 {RESUME}": "REPO/train.py --resume latest",
    f"NPROC=auto {RESUME}": "error: NPROC is auto; expected a number of processes",
    f"{SHOW} --port 1": "-m tensorboard.main --logdir checkpoints --port 1",
    f"{SHOW} a --port 1": "-m tensorboard.main --logdir a --port 1",
    f"{SHOW} b": "error: b: no run there; expected that of a run with --use_tensorboard, or one above it",
    f"{SHOW} empty": "error: empty: no run there; expected that of a run with --use_tensorboard, or one above it",
    f"PYTHON=./old {SETUP}": "error: found no Python 3.11 or later. Install it, or give its path: "
    "PYTHON=/path/to/python3 ./setup.sh",
    f"{SETUP} tests": "error: found './setup.sh tests', expected './setup.sh', './setup.sh test' or "
    "'./setup.sh --check'",
    "scripts/quickstart.sh --seed 1": "error: --seed: quickstart.sh takes no flags. Try python train.py --config "
    "quickstart --seed 1",
}


@pytest.mark.parametrize("command", RUNS)
def test_a_script_runs_python_or_says_what_is_missing(command, tmp_path):
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    write_interpreter(tmp_path / "old", "*version_info*) echo 3.10")
    write_interpreter(tmp_path / ".venv/bin/python", f'-c*) exec {sys.executable} "$@" ;; *) echo "$*"')
    for folder in ("a", "checkpoints"):
        (tmp_path / folder / "tensorboard").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.lock").touch()  # of a start that was refused
    env = os.environ | {"NPROC": "1"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, env=env)
    said = f"{done.stdout}{done.stderr}".replace(str(tmp_path.resolve()), "REPO")
    assert (said, done.returncode) == (f"{RUNS[command]}\n", 2 if "error" in said else 0)
    if "train.py --" in said and "error" not in said:
        config.parse_args(said.split()[1:])


def test_the_monitor_takes_the_folder_of_a_run():
    for argv in (["runs/mine"], ["--checkpoint_dir", "runs/mine"], ["--checkpoint-dir=runs/mine"]):
        assert read_flags(monitor_training.MonitorOptions, argv) == {"checkpoint_dir": "runs/mine"}


def test_the_page_on_other_trainers_has_a_command_for_each():
    """test_doc_commands.py checks that its commands are accepted."""
    sections = PAGE.read_text().split("\n## ")[1:]
    assert len(sections) == 3
    assert all(re.search(r"(python|torchrun|accelerate) .*train\.py", section) for section in sections)
