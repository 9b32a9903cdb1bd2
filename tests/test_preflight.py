"""Tests of steadygpt/preflight.py: Ctrl-C while Python imports, missing packages, idle threads."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from conftest import REPO

PROGRAMS = [*REPO.glob("*.py"), *REPO.glob("scripts/*.py"), REPO / "docs/walkthrough.py"]
COMMANDS = sorted(str(path.relative_to(REPO)) for path in PROGRAMS if "run_cli(main)" in path.read_text())


def catches_ctrl_c(pid: int) -> bool:
    caught = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) & 1 << (signal.SIGINT - 1))


def test_each_command_imports_it_before_all_others():
    assert len(COMMANDS) == 9
    for name in COMMANDS:
        text = (REPO / name).read_text()
        imported = re.findall(r"^(?:import|from) ([\w.]+)", text, re.MULTILINE)
        [first] = [i for i, module in enumerate(imported) if module == "steadygpt.preflight"]
        assert {module.partition(".")[0] for module in imported[:first]} <= sys.stdlib_module_names, name


@pytest.mark.parametrize("name", ["train.py", "prepare_dataset.py"])
def test_ctrl_c_while_python_imports_ends_a_command_in_silence(name, tmp_path):
    """Property, for random instants: status 130, or what the command itself answers; a traceback never."""
    random = Random(name)
    ended = 0
    for _ in range(4):
        command = [sys.executable, REPO / name, "nothing"]
        process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not catches_ctrl_c(process.pid):  # Python starts
            time.sleep(0.001)
        while catches_ctrl_c(process.pid):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.4))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGINT, 0, 1, 2, 130), said
        assert "Traceback" not in said and "Error" not in said
        if process.returncode == -signal.SIGINT:
            assert re.fullmatch("|error: .*\n", said)  # the latter at its end
            ended += 1
    assert ended


@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_without_the_packages_is_named_in_one_line(command):
    words = [sys.executable, "-S", *command.split(), "--help"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: \S+ is Python 3\.\d+ without torch; expected .* Try: .*activate\n", done.stderr)


def test_a_deleted_working_directory_is_named_in_one_line(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    command = f"rmdir {here} && {sys.executable} {REPO}/train.py --help"
    done = subprocess.run(command, cwd=here, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the working directory was deleted; ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("program", "given", "expected"), [
    ("train.py", None, "10000 SIG_DFL"),
    ("scripts/upload_manager.py", None, "10000 SIG_DFL"),
    ("train.py", "ACTIVE", "None SIG_DFL"),
    ("tests/test_preflight.py", None, "None default_int_handler"),
    ("/notebook.py", None, "None default_int_handler"),
])  # fmt: skip
def test_only_a_command_is_launched(program, given, expected):
    code = f"""
import os, signal, sys
sys.modules["__main__"].__file__ = "{program}"
import steadygpt.preflight
handler = signal.getsignal(signal.SIGINT)
print(os.environ.get("GOMP_SPINCOUNT"), getattr(handler, "name", None) or handler.__name__)
"""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env |= {"OMP_WAIT_POLICY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.stdout == f"{expected}\n", done.stderr
