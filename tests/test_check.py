"""./setup.sh --check on this machine, and each fault faked."""

import errno
import fcntl
import os
import shutil
import signal
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

GPU = {"version": "2.13.0", "cuda": "13.0", "gpus": 1, "problem": "", "nccl": "2.29.3", "mps": False}
CPU = GPU | {"gpus": 0, "nccl": ""}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A folder in place of /dev, /proc, /sys and $PATH: a machine without a GPU and without programs."""
    for module, names in ((host, ("DEVICES", "DRIVER")), (check, ("PCI", "MOUNTS"))):
        for name in names:
            monkeypatch.setattr(module, name, tmp_path / name.lower())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def insert_gpu(machine: Path, driver="580.159.04", smi="echo NVIDIA H100, 81559 MiB, 580.159.04") -> None:
    """Add a GPU; without a driver, it is only on the PCI bus."""
    card = machine / "pci/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    if driver:
        (machine / "driver").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Feb 27\n")
        (machine / "devices").mkdir()
        (machine / "devices/nvidia0").touch()
        (machine / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (machine / "bin/nvidia-smi").chmod(0o755)


def states(lines) -> list[tuple[str, str]]:
    return [(state, subject) for state, subject, _ in lines]


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
    assert states(check.check_packages([stamp], CPU)) == [("note", "packages")]
    stamp.parent.mkdir()
    [(state, _, text)] = check.check_packages([stamp], CPU)
    assert state == "FIX" and text.endswith("run ./setup.sh")
    stamp.touch()
    assert states(check.check_packages([stamp], CPU)) == [("ok", "packages")]


def test_no_pytorch_and_a_broken_one_are_lines(machine, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(check.importlib.util, "find_spec", lambda name: None)
        missing = check.ask_torch()
    assert [*check.check_packages([], missing)] == [("FIX", "packages", "PyTorch is not installed; run ./setup.sh")]
    (machine / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(machine))
    [(state, _, text)] = check.check_packages([], broken := check.ask_torch())
    assert state == "FIX" and "(ImportError: libcudart.so.13: cannot open shared object file)" in text
    for rest in (check.check_gpus(broken), check.check_nccl(broken), check.check_compiler(broken)):
        assert not [line for line in rest if line[0] == "FIX"]


def test_pytorch_answers():
    found = check.ask_torch()
    assert (found["version"], found["gpus"]) == (torch.__version__, torch.cuda.device_count())


def test_a_machine_without_a_gpu_is_no_fault(machine, monkeypatch):
    assert [*check.check_gpus(CPU)] == [("note", "GPU", "none; training runs on the CPU")]
    assert states(check.check_gpus(CPU | {"mps": True})) == [("ok", "GPU")]
    insert_gpu(machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [*check.check_gpus(CPU)] == [("note", "GPU", "hidden by CUDA_VISIBLE_DEVICES; training runs on the CPU")]


def test_a_gpu_that_works(machine):
    insert_gpu(machine)
    assert [*check.check_gpus(GPU)] == [
        ("ok", "GPU 0", "NVIDIA H100, 81559 MiB, driver 580.159.04"),
        ("ok", "CUDA", "torch for CUDA 13.0 computes on 1 GPU"),
    ]


@pytest.mark.parametrize(("driver", "found", "expected"), [
    ("535.54.03", CPU, "found driver 535.54.03; torch 2.13.0 for CUDA 13.0 expects 580 or later. Update the driver"),
    ("580.159.04", CPU | {"cuda": None}, "built without CUDA. Install the build for driver 580.159.04"),
    ("580.159.04", GPU | {"problem": "GPU 0: no kernel image"}, "GPU 0: no kernel image. Install a build of torch for"),
])  # fmt: skip
def test_a_gpu_that_pytorch_cannot_use(driver, found, expected, machine):
    insert_gpu(machine, driver)
    [_, (state, subject, text)] = check.check_gpus(found)
    assert (state, subject) == ("FIX", "CUDA") and expected in text


def test_a_gpu_without_its_driver_or_outside_the_container(machine):
    insert_gpu(machine, driver="")
    [(state, _, text)] = check.check_gpus(CPU)
    assert state == "FIX" and text.endswith("without a driver; install NVIDIA's driver")
    host.DRIVER.touch()  # of the host, which a container sees
    [(state, _, text)] = check.check_gpus(CPU)
    assert state == "FIX" and text.endswith("docker run --gpus all")


def test_nvidia_smi_fails_or_is_missing(machine):
    insert_gpu(machine, smi="echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    [(state, _, text), _] = check.check_gpus(GPU)
    assert state == "FIX" and "mismatch); restart the machine" in text
    (machine / "bin/nvidia-smi").unlink()
    assert states(check.check_gpus(GPU)) == [("note", "GPU"), ("ok", "CUDA")]


def test_several_gpus_need_nccl_and_shared_memory(machine, monkeypatch):
    assert not [*check.check_nccl(GPU)]  # one GPU
    for size, state in ((2**26, "FIX"), (2**30, "ok")):  # Docker's default is 64 MB
        monkeypatch.setattr(shutil, "disk_usage", lambda path, size=size: Usage(size, 0, size))
        assert states(check.check_nccl(GPU | {"gpus": 2}, machine)) == [("ok", "NCCL"), (state, str(machine))]
    assert states(check.check_nccl(GPU | {"gpus": 2, "nccl": ""}, machine))[0] == ("FIX", "NCCL")


def test_no_compiler_is_a_fault_on_a_gpu_only(machine, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    [(state, _, text)] = check.check_compiler(CPU)
    assert state == "note" and "needs a compiler" in text
    insert_gpu(machine)
    assert states(check.check_compiler(GPU)) == [("FIX", "compiler")]


def test_too_little_memory(machine, monkeypatch):
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 2_000_000_000)
    [(state, _, text)] = check.check_memory(GPU)
    assert state == "FIX" and text.startswith("2 GB available")
    assert states(check.check_memory(CPU)) == [("note", "RAM")]
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 4_000_000_000)
    assert states(check.check_memory(GPU)) == [("ok", "RAM")]


def test_few_open_files_are_a_note(monkeypatch):
    monkeypatch.setattr(check.resource, "getrlimit", lambda which: (256, 4096))
    assert states(check.check_files()) == [("note", "open files")]
    monkeypatch.setattr(check.resource, "getrlimit", lambda which: (1024, 4096))
    assert not [*check.check_files()]


@pytest.mark.parametrize(("free_gb", "state"), [(4, "FIX"), (30, "note"), (100, "ok")])
def test_free_space(free_gb, state, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, free_gb * 10**9))
    monkeypatch.setattr(check, "write_speed", lambda folder: 1e9)
    lines = [*check.check_space("data", tmp_path, check.FOLDERS["checkpoints"] + check.DATA)]
    assert states(lines) == [(state, "disk"), ("ok", "disk speed")]
    assert lines[1][2] == "data: 1 GB/s; a checkpoint of GPT-2 124M takes 1.5 s"


def test_a_disk_that_is_slow_or_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.3))
    assert 10e6 < check.write_speed(tmp_path, at_most_s=0.5) < 2**24 / 0.3
    monkeypatch.setattr(check, "write_speed", lambda folder: 30e6)
    assert states(check.check_space("data", tmp_path, 0)) == [("ok", "disk"), ("note", "disk speed")]
    monkeypatch.undo()

    def over_quota(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", over_quota)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
    [_, (state, _, text)] = check.check_space("data", tmp_path, 0)
    assert state == "FIX" and "Disk quota exceeded" in text
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_leaves_no_file(tmp_path):
    program = f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r}); import check; from pathlib import Path\n"
    program += "print(flush=True); check.write_speed(Path(), size=2**40, at_most_s=60)"
    writing = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=-3)
    writing.stdout.readline()
    time.sleep(0.2)
    writing.send_signal(signal.SIGINT)
    assert writing.wait(10) != 0
    assert not [*tmp_path.iterdir()]


def test_file_systems_with_and_without_locks(tmp_path, monkeypatch):
    def lines(kind="nfs4", options="rw") -> list:
        return [*check.check_locks("data", tmp_path, kind, options)]

    assert [*lines()] == [("ok", "locks", "data: a lock keeps a second process out")]
    assert states(lines(options="rw,local_lock=all")) == [("note", "locks")]  # other machines do not see them

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda file, how: None)
        [(state, _, text)] = lines()
        assert state == "FIX" and text.startswith("data: two processes hold the same lock")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        [(state, _, text)] = lines()
        assert state == "FIX" and text.startswith("data: no file locks (No locks available)")
    monkeypatch.setattr(os, "link", refuse)
    assert states(lines()) == [("ok", "locks"), ("note", "hard links")]
    assert not [*tmp_path.iterdir()]


def test_each_disk_is_checked_once_and_named_with_its_file_system(machine, monkeypatch):
    monkeypatch.setattr(check, "write_speed", lambda folder: 1e9)
    (machine / "mounts").write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {machine} nfs4 rw,local_lock=all 0 0\n")
    lines = [*check.check_disks({"checkpoints": 0, "data": 0})]
    assert len(lines) == 3 and all(text.startswith("checkpoints, data (nfs4): ") for _, _, text in lines)
    assert lines[2][0] == "note"  # its locks
    (machine / "mounts").unlink()  # macOS
    assert [text.partition(":")[0] for _, _, text in check.check_disks({"data": 0})] == ["data"] * 3


def test_a_link_to_a_disk_that_is_not_mounted(machine):
    Path("data").symlink_to("/mnt/none")
    assert [*check.check_disks({"data": 0})] == [
        ("FIX", "disk", "data: a link to /mnt/none, which is missing; mount or create it")
    ]


def test_a_folder_of_another_user(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "data")
    Path("data").mkdir()
    [(state, _, text)] = check.check_disks({"data": 0, "logs": 0})
    assert state == "FIX" and text == "data, logs: no write access to data; change its owner, mode or mount"


def test_sizes_are_those_of_the_default_run():
    with torch.device("meta"):
        model = GPT(TrainConfig().shape(50257), initialize=False)
    config = TrainConfig()
    assert model.num_parameters() * 12 == check.CHECKPOINT
    assert estimate_memory(config, model, torch.device("cuda"), 1)[1][COPY] == check.HOST_COPY
    assert config.keep_checkpoints + 3 + config.num_epochs == check.KEPT  # as steadygpt/plan.py
