"""./setup.sh --check on this machine, and each fault faked."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import REPO

sys.path.append(str(REPO / "scripts"))

import check

from config import TrainConfig
from model import GPT
from steadygpt import host
from steadygpt.plan import COPY, estimate_memory

CPU = {"version": "2.13.0", "cuda": "13.0", "gpus": [], "problem": "", "mps": False}
GPU = CPU | {"gpus": ["NVIDIA H100"]}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A folder in place of /dev, /proc and $PATH: a machine without a GPU and without programs."""
    for name in ("DEVICES", "DRIVER"):
        monkeypatch.setattr(host, name, tmp_path / name.lower())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def insert_gpu() -> None:
    host.DEVICES.mkdir()
    (host.DEVICES / "nvidia0").touch()


def test_check_of_this_machine_leaves_nothing_behind(tmp_path):
    """In a copy of the repository without .venv: packages of the interpreter that runs the tests are found."""
    for name in ("scripts", "steadygpt"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(tmp_path.rglob("*"))
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([tmp_path / "scripts/setup.sh", "--check"], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    subjects = [line[6:18].strip() for line in lines]
    assert subjects[:4] == ["Python", "packages", "GPU", "compiler"]
    assert {"RAM", "disk", "disk speed", "locks"} <= {*subjects}
    assert lines[1].startswith(f"note  packages    torch {torch.__version__}, without .venv")
    fixes = sum(line.startswith("FIX ") for line in lines)
    assert (done.returncode, last.startswith("nothing to fix")) == ((1, False) if fixes else (0, True))
    assert sorted(tmp_path.rglob("*")) == files


def test_a_missing_or_old_python_is_a_line_of_the_check(tmp_path):
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    (tmp_path / "old").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "old").chmod(0o755)
    for python in (tmp_path / "old", tmp_path / "none"):
        setup = [tmp_path / "scripts/setup.sh", "--check"]
        done = subprocess.run(setup, capture_output=True, text=True, env=os.environ | {"PYTHON": str(python)})
        assert done.returncode == 1
        assert done.stdout.startswith("FIX   Python      found no Python 3.11 or later. Install it, or give its path")


def test_packages(machine):
    stamp = machine / ".venv/installed-1"
    assert check.check_packages(CPU, [stamp])[0] == "note"
    stamp.parent.mkdir()
    state, _, text = check.check_packages(CPU, [stamp])
    assert state == "FIX" and text.endswith("run ./setup.sh")
    stamp.touch()
    assert check.check_packages(CPU, [stamp])[0] == "ok"


def test_no_pytorch_and_a_broken_one_are_lines(machine, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(check.importlib.util, "find_spec", lambda name: None)
        missing = check.ask_torch()
    assert check.check_packages(missing, []) == ("FIX", "packages", "PyTorch is not installed; run ./setup.sh")
    (machine / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(machine))
    state, _, text = check.check_packages(broken := check.ask_torch(), [])
    assert state == "FIX" and "(ImportError: libcudart.so.13: cannot open shared object file)" in text
    insert_gpu()
    assert check.check_gpu(broken) == ("note", "GPU", "found; install PyTorch first")


UNUSABLE = CPU | {"problem": "Torch not compiled with CUDA enabled"}


@pytest.mark.parametrize(("has_gpu", "torch", "line"), [
    (False, UNUSABLE, "note: none with a driver; training runs on the CPU"),
    (False, UNUSABLE | {"mps": True}, "ok: Apple's"),
    (False, GPU, "ok: 1 x NVIDIA H100; torch for CUDA 13.0 computes"),  # WSL
    (True, GPU, "ok: 1 x NVIDIA H100; torch for CUDA 13.0 computes"),
    (True, UNUSABLE, "FIX: Torch not compiled with CUDA enabled. Update the driver, or install a build of torch for"),
    (True, GPU | {"problem": "no kernel image"}, "FIX: no kernel image. Update the driver, or install"),
])  # fmt: skip
def test_gpu(has_gpu, torch, line, machine):
    if has_gpu:
        insert_gpu()
    state, _, text = check.check_gpu(torch)
    assert f"{state}: {text}".startswith(line)


def test_a_gpu_that_is_hidden_or_outside_the_container(machine, monkeypatch):
    host.DRIVER.touch()
    state, _, text = check.check_gpu(CPU)
    assert state == "FIX" and text.endswith("docker run --gpus all")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check.check_gpu(CPU) == ("note", "GPU", "hidden by CUDA_VISIBLE_DEVICES; training runs on the CPU")


def test_several_gpus_need_shared_memory(machine, monkeypatch):
    for size, state in ((2**26, "FIX"), (2**30, "ok")):  # Docker's default is 64 MB
        monkeypatch.setattr(shutil, "disk_usage", lambda path, size=size: Usage(size, 0, size))
        assert check.check_shared_memory(machine)[:2] == (state, str(machine))


def test_no_compiler_and_too_little_memory_are_faults_on_a_gpu_only(machine, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2_000_000_000)
    for has_gpu, state in ((True, "FIX"), (False, "note")):
        compiler, memory = check.check_compiler(has_gpu), check.check_memory(has_gpu)
        assert compiler[0] == memory[0] == state
        assert "needs a compiler" in compiler[2] and memory[2].startswith("2 GB available")
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 4_000_000_000)
    assert check.check_memory(True)[0] == "ok"


@pytest.mark.parametrize(("free_gb", "speed", "expected"), [
    (4, 1e9, ["FIX disk"]),
    (100, 1e9, ["ok disk", "ok disk speed", "ok locks"]),
    (100, 3e7, ["ok disk", "note disk speed", "ok locks"]),
])  # fmt: skip
def test_disk(free_gb, speed, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "write_speed", lambda folder: speed)
    lines = [*check.check_disk(tmp_path, free_gb * 10**9)]
    assert [f"{state} {subject}" for state, subject, _ in lines] == expected
    assert speed < 1e9 or free_gb < 5 or lines[1][2] == f"{tmp_path}: 1 GB/s; a checkpoint of GPT-2 124M takes 1.5 s"
    assert not [*tmp_path.iterdir()]


def test_speed_includes_fsync(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.3))
    assert 10e6 < check.write_speed(tmp_path, at_most_s=0.5) < 2**24 / 0.3


@pytest.mark.parametrize(("module", "name", "said"), [
    (os, "fsync", "cannot be written to (Disk quota exceeded)"), (fcntl, "flock", "no file locks ("),
])  # fmt: skip
def test_a_disk_that_refuses_files_or_locks(module, name, said, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(module, name, refuse)
    *_, (state, _, text) = check.check_disk(tmp_path, 10**12)
    assert state == "FIX" and said in text
    assert not [*tmp_path.iterdir()]


def test_sizes_are_those_of_the_default_run():
    with torch.device("meta"):
        model = GPT(TrainConfig().shape(50257), initialize=False)
    assert model.num_parameters() * 12 == check.CHECKPOINT
    assert estimate_memory(TrainConfig(), model, torch.device("cuda"), 1)[1][COPY] == check.HOST_COPY
