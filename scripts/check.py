#!/usr/bin/env python
"""Report whether this machine is ready to train, one line for each thing: ./setup.sh --check

ok: as it should be. note: worth knowing. FIX: fix it first; the line says how. Nothing is installed or left behind.
The exit status is 1 if there is something to fix. Only the standard library is needed, so this also runs before
./setup.sh, and with a broken PyTorch.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt import host
from steadygpt.cli import UserError, run_cli
from steadygpt.disk import bytes_text, disks
from steadygpt.durable import lock_folder

# Of GPT-2 124M, as train.py --dry_run computes them: bytes of a checkpoint, and of its copy in host memory on a GPU.
CHECKPOINT, HOST_COPY = 1_493_277_696, 2_480_922_624
FOLDERS = {Path("checkpoints"): 0, Path("data"): 0, Path("logs"): 0}  # that the defaults write to
SLOW = 100e6  # bytes/s
SHARED_MEMORY = 1e9  # bytes; NCCL's documentation recommends docker --shm-size=1g

# In a process of its own, because importing PyTorch may crash.
ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "problem": ""}
found["mps"] = torch.backends.mps.is_available()
try:
    torch.cuda.init()
    for gpu in range(torch.cuda.device_count()):
        found["gpus"].append(torch.cuda.get_device_name(gpu))
        torch.ones(64, 64, device=gpu).mm(torch.ones(64, 64, device=gpu)).sum().item()
except (AssertionError, RuntimeError) as error:
    found["problem"] = str(error).splitlines()[0]
print(json.dumps(found))
"""

Line = tuple[str, str, str]  # ok, note or FIX; the subject; what was found, and what to do


def ask_torch() -> dict:
    """Return what PyTorch says about itself and its GPUs, or {"error": what is wrong with it}."""
    if importlib.util.find_spec("torch") is None:
        return {"error": "PyTorch is not installed; run ./setup.sh"}
    try:
        done = subprocess.run([sys.executable, "-B", "-c", ASK_TORCH], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"error": "PyTorch and its GPUs do not respond within 120 s; see dmesg, then restart the machine"}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {"error": f"PyTorch cannot be used ({said}); install it again: rm -rf .venv && ./setup.sh"}
    return json.loads(done.stdout.splitlines()[-1])


def check_packages(torch: dict, stamps: Sequence[Path]) -> Line:
    """Check the installed packages.

    Args:
        torch: what ask_torch returns.
        stamps: files of which setup.sh leaves one in .venv when its packages are the ones it installs now.
    """
    if "error" in torch:
        return "FIX", "packages", torch["error"]
    if any(stamp.exists() for stamp in stamps):
        return "ok", "packages", f"torch {torch['version']}; the tested versions"
    if Path(".venv").exists():
        return "FIX", "packages", "those of .venv are not the ones of scripts/requirements.txt; run ./setup.sh"
    return "note", "packages", f"torch {torch['version']}, without .venv; ./setup.sh installs the tested versions"


def check_gpu(torch: dict) -> Line:
    """Check that PyTorch can compute on the machine's GPUs."""
    gpus = torch.get("gpus")
    if host.gpus_are_hidden():
        return "note", "GPU", "hidden by CUDA_VISIBLE_DEVICES; training runs on the CPU"
    if gpus or host.has_gpu(host.DEVICES):
        if "error" in torch:
            return "note", "GPU", "found; install PyTorch first"
        if problem := torch["problem"]:
            return "FIX", "GPU", f"{problem}. Update the driver, or install a build of torch for it (pytorch.org)"
        return "ok", "GPU", f"{len(gpus)} x {gpus[0]}; torch for CUDA {torch['cuda']} computes"
    if host.DRIVER.exists():
        return "FIX", "GPU", "a driver without /dev/nvidia0; start the container with its GPUs: docker run --gpus all"
    if torch.get("mps"):
        return "ok", "GPU", "Apple's; train with --device mps"
    return "note", "GPU", "none with a driver; training runs on the CPU"


def check_compiler(needed: bool) -> Line:
    """Check what torch.compile needs; on a CPU, only --compile on uses it."""
    try:
        host.check_compiler("cuda" if needed else "cpu")
        return "ok", "compiler", "found, and Python's headers, for torch.compile"
    except UserError as error:
        return "FIX" if needed else "note", "compiler", str(error)


def check_memory(has_gpu: bool) -> Line:
    free = host.available_memory_bytes()
    text = f"{bytes_text(free)} available; saves of GPT-2 124M on a GPU keep a copy of {bytes_text(HOST_COPY)} there"
    if free >= HOST_COPY:
        return "ok", "RAM", text
    advice = "end other programs, raise the container's limit, or train a smaller model"
    return "FIX" if has_gpu else "note", "RAM", f"{text}; {advice}"


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Line:
    """Check what several GPUs exchange gradients through."""
    size = shutil.disk_usage(folder).total if folder.exists() else 0
    if size < SHARED_MEMORY:
        return "FIX", str(folder), f"{bytes_text(size)}; several GPUs need 1 GB: docker run --shm-size=1g"
    return "ok", str(folder), bytes_text(size)


def check_disk(folder: Path, free: int) -> Iterator[Line]:
    """Check the space and the speed of a folder's disk, and whether the folder can be locked."""
    text = f"{folder}: {bytes_text(free)} free, room for {free // CHECKPOINT} checkpoints of GPT-2 124M"
    if free < 3 * CHECKPOINT:  # latest.pt, latest_backup.pt and the next one
        yield "FIX", "disk", f"{text}; free some, or give another --checkpoint_dir and --data_dir"
        return  # a run may need the rest
    yield "ok", "disk", text
    try:
        speed = write_speed(folder)
    except OSError as error:
        yield "FIX", "disk speed", f"{folder}: cannot be written to ({error.strerror}); see its owner, quotas and dmesg"
        return
    text = f"{folder}: {bytes_text(speed)}/s; a checkpoint of GPT-2 124M takes {CHECKPOINT / speed:.2g} s"
    if speed < SLOW:
        yield "note", "disk speed", f"{text} in the background. Saves become rarer; a faster disk loses less"
    else:
        yield "ok", "disk speed", text
    try:
        with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as name, lock_folder(Path(name), ""):
            yield "ok", "locks", f"{folder}: file locking works"
    except UserError as error:
        yield "FIX", "locks", f"{folder}: no file locks ({error.__cause__}); mount it with locks, or use another disk"


def write_speed(folder: Path, size: int = 2**28, at_most_s: float = 3.0) -> float:
    """Return the bytes a second that a new file takes, fsync included. The file has no name, so none is left behind."""
    block, written, started_s = os.urandom(2**24), 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < size and time.monotonic() - started_s < at_most_s:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / (time.monotonic() - started_s)


def check_machine(stamps: Sequence[Path]) -> Iterator[Line]:
    yield "ok", "Python", f"{platform.python_version()}, {sys.executable}"  # setup.sh refuses one before 3.11
    torch = ask_torch()
    has_gpu = host.has_gpu(host.DEVICES) or bool(torch.get("gpus"))  # WSL has no device files
    yield check_packages(torch, stamps)
    yield check_gpu(torch)
    yield check_compiler(has_gpu)
    yield check_memory(has_gpu)
    if len(torch.get("gpus", ())) > 1:
        yield check_shared_memory()
    for folder, (free, _) in disks(FOLDERS).items():
        yield from check_disk(folder, free)


def main(argv: Sequence[str] | None = None) -> int:
    fixes = 0
    for state, subject, text in check_machine([Path(name) for name in (sys.argv[1:] if argv is None else argv)]):
        print(f"{state:<4}  {subject:<10}  {text}", flush=True)
        fixes += state == "FIX"
    if fixes:
        print(f"{fixes} to fix; then run ./setup.sh --check again")
        return 1
    print("nothing to fix; next: ./start_training.sh")
    return 0


if __name__ == "__main__":
    run_cli(main)
