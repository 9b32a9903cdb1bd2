"""Commands as the users of other trainers type them; and those of docs/from-other-trainers.md."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import monitor_training
import pytest
from conftest import REPO, TINY, load, need_gpus, options_in, write_data
from harness import run_to_end

import convert_hf
import generate
import hellaswag_eval
import prepare_dataset
import replay
import train
from steadygpt import config
from steadygpt.base.options import read_flags
from steadygpt.machine.host import usable_cores

# ---------------------------------------------------------------------------------------------------------------------
# exactly as typed


def typed(command: str) -> int:
    """Run the command `python train.py ...` in this process, which has already imported torch."""
    python, script, *argv = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    return train.main(argv)


def test_the_test_preset_trains(workdir, capsys):
    write_data(workdir / "data/stdlib", num_tokens=(2000, 70000))
    assert typed("python train.py --config test --mixed-precision bf16 --max-steps 1 --no-background-upload") == 0
    out = capsys.readouterr().out
    assert ", bf16, attention by " in out
    assert "finished after 1 step" in out
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
    assert load("checkpoints/latest.pt")["starts"][-1]["ranks"] == processes
    if processes == 1 and "--device cpu" in " ".join(TINY):
        assert f"({usable_cores()} threads)" in output  # though accelerate sets OMP_NUM_THREADS=1


def test_accelerate_passes_every_flag_on():
    """A flag that is the beginning of several flags of accelerate would end its command line."""
    launch = pytest.importorskip("accelerate.commands.launch")
    for name, f in config.FIELDS.items():
        for flag in (name, *f.metadata["aliases"], name.replace("_", "-")):
            launched = launch.launch_command_parser().parse_args(["train.py", f"--{flag}", "x"])
            assert launched.training_script_args == [f"--{flag}", "x"]


def test_setup_creates_the_environment_of_its_repository(tmp_path, monkeypatch):
    """The interpreter is a stand-in that creates an environment with itself in it, and notes its other arguments."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(REPO / "scripts", tmp_path / "repo/scripts")
    (tmp_path / "repo/setup.sh").symlink_to("scripts/setup.sh")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;\n'
        f'"-c "*) ;;\n*) echo "$*" >> {tmp_path}/noted ;;\nesac\n'
    )
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path / "elsewhere")
    # --check installs nothing, and the second call of setup.sh finds it installed.
    for words in (["--check", "--config", "test"], [], []):
        subprocess.run(["../repo/setup.sh", *words], check=True, env=os.environ | {"PYTHON": str(python)})
        assert (tmp_path / "repo/.venv/bin/python").is_file() == (words == [])
    assert os.listdir() == []
    planned, installed = (tmp_path / "noted").read_text().splitlines()
    assert planned == "train.py --dry_run --config test"
    assert installed.startswith("-m pip install ") and installed.endswith("-r scripts/requirements.txt")


def test_check_names_what_is_missing(tmp_path):
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    missing = {"old": "found no Python 3.11 or later", "bare": "PyTorch cannot be imported; run ./setup.sh"}
    for name, said in missing.items():
        python = tmp_path / name
        python.write_text(f'#!/bin/sh\ncase "$*" in *version_info*) exit {int(name == "old")} ;; *) exit 1 ;; esac\n')
        python.chmod(0o755)
        words, env = [tmp_path / "scripts/setup.sh", "--check"], os.environ | {"PYTHON": str(python)}
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr.startswith(f"error: {said}")) == (2, True)


@pytest.mark.parametrize("name", ["list_checkpoints.sh", "resume_training.sh", "setup.sh", "start_tensorboard.sh"])
def test_scripts_at_the_root_are_links(name):
    assert (REPO / name).resolve() == REPO / "scripts" / name


@pytest.mark.parametrize("words", [["list_checkpoints.sh"], ["list_checkpoints.sh", "-v"], ["resume_training.sh"]])
def test_a_script_takes_the_folder_of_a_run(words, tmp_path):
    env = os.environ | {"NPROC": "1"}
    done = subprocess.run(
        [REPO / words[0], *words[1:], "runs/mine"], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.stderr == "error: no checkpoints in runs/mine; try another --checkpoint_dir\n"
    assert done.returncode == 2


@pytest.mark.parametrize("options", [monitor_training.MonitorOptions, replay.ReplayOptions])
def test_a_command_takes_the_folder_of_a_run(options):
    for argv in (["runs/mine"], ["--checkpoint_dir", "runs/mine"], ["--checkpoint-dir=runs/mine"]):
        assert read_flags(options, argv) == {"checkpoint_dir": "runs/mine"}


@pytest.mark.parametrize("words", [["a"], ["--checkpoint_dir", "a"], ["--checkpoint-dir=a"]])
def test_tensorboard_takes_the_folder_of_a_run(words, tmp_path):
    """The interpreter is a stand-in that prints its arguments, except for the reader of status.json."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(REPO / "scripts/start_tensorboard.sh", tmp_path / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$*"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    run = partial(subprocess.run, [script, *words, "--port", "1"], cwd=tmp_path, capture_output=True, text=True)
    done = run()
    assert done.stderr.startswith("error: a/status.json: names no TensorBoard folder; expected")
    assert (done.returncode, done.stdout) == (2, "")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/status.json").write_text(json.dumps({"tensorboard": "/runs/é"}))
    assert run().stdout == "-m tensorboard.main --logdir /runs/é --port 1\n"


def test_nproc_must_be_a_number(tmp_path):
    env = os.environ | {"NPROC": "auto"}
    done = subprocess.run([REPO / "resume_training.sh"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.stderr == "error: NPROC is auto; expected a number of processes\n"
    assert done.returncode == 2


# ---------------------------------------------------------------------------------------------------------------------
# docs/from-other-trainers.md

PAGE = (REPO / "docs/from-other-trainers.md").read_text()
RIGHT = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
COMMANDS = [
    command
    for command in re.findall(r"`([^`]+)`", "\n".join(RIGHT)) + re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)
    if re.match(r"(python|torchrun|accelerate|\./)", command)
]
OTHERS = {
    "generate.py": generate.GenerateOptions,
    "convert_hf.py": convert_hf.ConvertOptions,
    "hellaswag_eval.py": hellaswag_eval.HellaSwagOptions,
    "prepare_dataset.py": prepare_dataset.PrepareOptions,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_page_is_accepted(command, tmp_path, monkeypatch):
    for name, values in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(values)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    at = next(at for at, word in enumerate(words) if word.endswith((".py", ".sh")))
    script, argv = words[at], words[at + 1 :]
    assert (REPO / script).is_file()
    if script == "train.py":
        config.parse_args(argv)
    elif script in OTHERS:
        read_flags(OTHERS[script], argv, "")


def test_page_has_commands_of_every_trainer():
    sections = PAGE.split("\n## ")[2:]
    assert len(sections) == 6
    for section in sections:
        assert [command for command in COMMANDS if command in section and "train.py" in command], section
