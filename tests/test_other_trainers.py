"""Commands as the users of other trainers type them, and the scripts of the repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import monitor_training
import numpy as np
import pip_progress
import pytest
from conftest import REPO, TINY, need_gpus, write_data
from ground import launch_in, options_in
from harness import run_to_end

import prepare_dataset
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


def test_the_npz_files_of_a_bucket_become_shards_with_the_command_of_the_page(workdir):
    [command] = re.findall(r"`python (prepare_dataset\.py --source 'gs://[^`]*)`", PAGE.read_text())
    Path("bucket").mkdir()
    for name in ("a", "b"):
        np.savez(f"bucket/{name}.npz", input_ids=np.arange(3000, dtype=np.uint16))
    argv = shlex.split(command.replace("gs://", ""))[1:]
    assert not prepare_dataset.main(argv)
    assert json.loads(Path(argv[-1], "manifest.json").read_text())["tokenizer"] == "gpt2"


def leave_threads_open(rank: int) -> None:
    del os.environ["OMP_NUM_THREADS"]  # set by conftest.py


@pytest.mark.parametrize(("processes", "launcher"), [
    (1, ["--num_processes", "1"]),
    pytest.param(2, ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"], marks=pytest.mark.storm),
])  # fmt: skip
def test_accelerate_launches_a_run(workdir, processes, launcher):
    """The launcher begins in a fork that has already imported torch."""
    pytest.importorskip("accelerate")
    need_gpus(processes)
    script = [str(REPO / "train.py"), *TINY, "--data_dir", "data"]
    words = (*launcher, "--mixed_precision", "no", *script)
    output = run_to_end(*words, program="accelerate.commands.launch", tiny=(), faults=[leave_threads_open])
    assert f"x {processes} rank{'s' * (processes > 1)} x" in output
    assert launch_in("checkpoints/latest.pt").how["ranks"] == processes
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


def test_setup_creates_the_environment_of_its_repository(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(REPO / "scripts", tmp_path / "repo/scripts")
    (tmp_path / "repo/setup.sh").symlink_to("scripts/setup.sh")
    creates = '"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"'
    python = write_interpreter(tmp_path / "python", f'{creates} ;; "-c "*) ;; *) echo "$*" >> {tmp_path}/noted')
    monkeypatch.chdir(tmp_path / "elsewhere")
    # --check installs nothing, and the second call of setup.sh finds it installed.
    for words in (["--check", "--config", "test"], [], []):
        subprocess.run(["../repo/setup.sh", *words], check=True, env=os.environ | {"PYTHON": str(python)})
        assert (tmp_path / "repo/.venv/bin/python").is_file() == (words == [])
    assert os.listdir() == []
    planned, pip, *installed = (tmp_path / "noted").read_text().splitlines()
    assert planned == "train.py --dry_run --config test" and pip.startswith("-m pip install ")
    progress, install = sorted(installed, reverse=True)  # both sides of a pipe
    assert progress == "scripts/pip_progress.py"
    assert install.startswith("-m pip install ") and install.endswith("--progress-bar raw -r scripts/requirements.txt")


PIP = """\
Collecting torch==2.13.0 (from -r scripts/requirements.txt (line 2))
  Downloading http://127.0.0.1/torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (30 kB)
Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (500 MB)
Progress 0 of 500000000
Progress 250000000 of 500000000
Progress 500000000 of 500000000
  Downloading https://127.0.0.1/nvidia_cublas_cu13-13.1-py3-none-linux_x86_64.whl (300 MB)
Progress 30000000 of 300000000
Installing collected packages: nvidia-cublas, torch
"""


def test_setup_shows_how_much_is_downloaded_on_a_terminal_and_in_a_file(capsys, monkeypatch):
    monkeypatch.setattr(pip_progress, "INTERVAL_S", 0.0)
    shown = [
        "downloaded 0 MB; torch 0% of 500 MB", "downloaded 250 MB; torch 50% of 500 MB",
        "downloaded 500 MB; torch 100% of 500 MB", "downloaded 530 MB; nvidia_cublas_cu13 10% of 300 MB",
        "downloaded 530 MB; unpacking",
    ]  # fmt: skip
    pip_progress.show(PIP.splitlines(), is_terminal=False)
    assert capsys.readouterr().out.splitlines() == shown
    pip_progress.show(PIP.splitlines(), is_terminal=True)
    out = capsys.readouterr().out
    assert [state.rstrip() for state in out.split("\r")[1:]] == shown
    assert max(map(len, out.split("\r"))) < 80 and out.count("\n") == 1


@pytest.mark.parametrize("name", ["list_checkpoints.sh", "resume_training.sh", "setup.sh", "start_tensorboard.sh"])
def test_scripts_at_the_root_are_links(name):
    assert (REPO / name).resolve() == REPO / "scripts" / name


LIST, RESUME = "scripts/list_checkpoints.sh", "scripts/resume_training.sh"
SHOW, SETUP = "scripts/start_tensorboard.sh", "scripts/setup.sh"
RUNS = {  # a command -> what Python runs, or the error; there is no folder b
    f"{LIST} a": "REPO/train.py --list_checkpoints --checkpoint_dir a",
    f"{LIST} -v a": "REPO/train.py --list_checkpoints --checkpoint_dir a -v",
    f"{RESUME} a": "REPO/train.py --resume latest --checkpoint_dir a",
    f"NPROC=auto {RESUME}": "error: NPROC is auto; expected a number of processes",
    f"{SHOW} --port 1": "-m tensorboard.main --logdir checkpoints --port 1",
    f"{SHOW} a --port 1": "-m tensorboard.main --logdir a --port 1",
    f"{SHOW} --checkpoint_dir a": "-m tensorboard.main --logdir a",
    f"{SHOW} --checkpoint-dir=a": "-m tensorboard.main --logdir a",
    f"{SHOW} b": "error: b: no such folder; expected that of a run with --use_tensorboard, or one above it",
    f"PYTHON=./old {SETUP} --check": "error: found no Python 3.11 or later. Install it, or give its path: "
    "PYTHON=/path/to/python3 ./setup.sh",
    f"PYTHON=./bare {SETUP} --check": "error: PyTorch cannot be imported; run ./setup.sh, or rm -rf .venv first",
}


@pytest.mark.parametrize("command", RUNS)
def test_a_script_runs_python_or_says_what_is_missing(command, tmp_path):
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    write_interpreter(tmp_path / "old", "*version_info*) exit 1 ;; *) exit 0")
    write_interpreter(tmp_path / "bare", "*version_info*) exit 0 ;; *) exit 1")
    if SETUP not in command:
        write_interpreter(tmp_path / ".venv/bin/python", f'-c*) exec {sys.executable} "$@" ;; *) echo "$*"')
    for folder in ("a", "checkpoints"):
        (tmp_path / folder).mkdir()
    env = os.environ | {"NPROC": "1"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, env=env)
    said = f"{done.stdout}{done.stderr}".replace(str(tmp_path.resolve()), "REPO").replace("REPO/scripts/..", "REPO")
    assert (said, done.returncode) == (f"{RUNS[command]}\n", 2 if "error" in said else 0)
    if "train.py" in said:
        config.parse_args(said.split()[1:])


def test_the_monitor_takes_the_folder_of_a_run():
    for argv in (["runs/mine"], ["--checkpoint_dir", "runs/mine"], ["--checkpoint-dir=runs/mine"]):
        assert read_flags(monitor_training.MonitorOptions, argv) == {"checkpoint_dir": "runs/mine"}


def test_the_page_on_other_trainers_has_a_command_for_each():
    """test_doc_commands.py checks that its commands are accepted."""
    sections = PAGE.read_text().split("\n## ")[2:]
    assert len(sections) == 6
    assert all(re.search(r"(python|torchrun|accelerate) .*train\.py", section) for section in sections)
