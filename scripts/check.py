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
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt import host
from steadygpt.cli import UserError, run_cli
from steadygpt.disk import bytes_text, existing
from steadygpt.durable import link_file, lock_folder

REPO = Path(__file__).resolve().parent.parent
# Of GPT-2 124M, as train.py --dry_run computes them: bytes of a checkpoint, bytes of its copy in host memory on a GPU,
# and the number of checkpoints that a run with the default options keeps.
CHECKPOINT, HOST_COPY, KEPT = 1_493_277_696, 2_480_922_624, 18
DATA = 24_000_000_000  # bytes that preparing FineWeb-Edu 10B takes at its peak
FOLDERS = {"checkpoints": KEPT * CHECKPOINT, "data": DATA, "logs": 0}  # and the bytes that the defaults write there
SLOW = 100e6  # bytes/s
SHARED_MEMORY = 1e9  # bytes; NCCL's documentation recommends docker --shm-size=1g
PCI, MOUNTS = Path("/sys/bus/pci/devices"), Path("/proc/mounts")  # on Linux

# Both run in processes of their own: importing PyTorch may crash, and a lock excludes other processes only.
ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "problem": "", "nccl": ""}
found["mps"] = torch.backends.mps.is_available()
if torch.cuda.is_available():
    found["gpus"] = torch.cuda.device_count()
    for gpu in range(found["gpus"]):
        try:
            torch.ones(64, 64, device=gpu).mm(torch.ones(64, 64, device=gpu)).sum().item()
        except RuntimeError as error:
            found["problem"] = f"GPU {gpu}: {str(error).splitlines()[0]}"
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""
LOCK_TOO = """
import sys
from pathlib import Path
from steadygpt.cli import UserError
from steadygpt.durable import lock_folder
try:
    lock_folder(Path(sys.argv[1]), "")
except UserError:
    sys.exit(3)
"""

Line = tuple[str, str, str]  # ok, note or FIX; the subject; what was found, and what to do


def check_packages(stamps: Sequence[Path], torch: dict) -> Iterator[Line]:
    """Check the installed packages.

    Args:
        stamps: files of which setup.sh leaves one in .venv when its packages are the ones it installs now.
        torch: what ask_torch returns.
    """
    if "error" in torch:
        yield "FIX", "packages", torch["error"]
    elif any(stamp.exists() for stamp in stamps):
        yield "ok", "packages", f"torch {torch['version']}; the tested versions"
    elif Path(".venv").exists():
        yield "FIX", "packages", "those of .venv are not the ones of scripts/requirements.txt; run ./setup.sh"
    else:
        yield "note", "packages", f"torch {torch['version']}, without .venv; ./setup.sh installs the tested versions"


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


def check_gpus(torch: dict) -> Iterator[Line]:
    """Check GPUs, their driver, and whether PyTorch can compute on them."""
    if host.gpus_are_hidden():
        yield "note", "GPU", "hidden by CUDA_VISIBLE_DEVICES; training runs on the CPU"
    elif has_gpu(torch):
        yield from driver_lines()
        if not torch.get("gpus") and "error" not in torch:
            yield "FIX", "CUDA", host.why_no_cuda(torch["version"], torch["cuda"], host.DRIVER)
        elif torch.get("problem"):
            yield "FIX", "CUDA", f"{torch['problem']}. Install a build of torch for this GPU (pytorch.org)"
        elif torch.get("gpus"):
            count = f"{torch['gpus']} GPU{'s' * (torch['gpus'] > 1)}"
            yield "ok", "CUDA", f"torch for CUDA {torch['cuda']} computes on {count}"
    elif has_nvidia_card():
        loaded = host.DRIVER.exists()
        advice = "start the container with its GPUs: docker run --gpus all" if loaded else "install NVIDIA's driver"
        yield "FIX", "GPU", f"an NVIDIA GPU without {'/dev/nvidia0' if loaded else 'a driver'}; {advice}"
    elif torch.get("mps"):
        yield "ok", "GPU", "Apple's; train with --device mps"
    else:
        yield "note", "GPU", "none; training runs on the CPU"


def has_gpu(torch: dict) -> bool:
    return host.has_gpu(host.DEVICES) or bool(torch.get("gpus"))  # WSL has no device files


def driver_lines() -> Iterator[Line]:
    """Report each GPU that nvidia-smi shows."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        yield "note", "GPU", "no nvidia-smi, which shows load and temperature; it is part of NVIDIA's driver"
    except subprocess.TimeoutExpired:
        yield "FIX", "GPU", "nvidia-smi does not respond within 60 s; see dmesg, then restart the machine"
    else:
        if done.returncode:  # for example after an update of the driver, whose old version stays loaded
            said = (done.stdout + done.stderr).strip().partition("\n")[0]
            yield "FIX", "GPU", f"nvidia-smi fails ({said}); restart the machine, or install the driver again"
            return
        for number, gpu in enumerate(done.stdout.splitlines()):
            name, memory, driver = gpu.rsplit(", ", 2)
            yield "ok", f"GPU {number}", f"{name}, {memory}, driver {driver}"


def has_nvidia_card() -> bool:
    """Return whether a display controller of NVIDIA is in the machine, with or without a driver."""
    nvidia, display = "0x10de", "0x03"  # PCI vendor, and class of VGA and 3D controllers
    return any(
        (card / "vendor").read_text().startswith(nvidia) and (card / "class").read_text().startswith(display)
        for card in PCI.glob("*")
    )


def check_nccl(torch: dict, shared_memory: Path = Path("/dev/shm")) -> Iterator[Line]:
    """Check what several GPUs exchange gradients through."""
    if torch.get("gpus", 0) < 2:
        return
    if torch["nccl"]:
        yield "ok", "NCCL", torch["nccl"]
    else:
        yield "FIX", "NCCL", "this build of torch has none, which several GPUs need; run ./setup.sh"
    size = shutil.disk_usage(shared_memory).total if shared_memory.exists() else 0
    if size < SHARED_MEMORY:
        yield "FIX", str(shared_memory), f"{bytes_text(size)}; NCCL needs 1 GB: docker run --shm-size=1g"
    else:
        yield "ok", str(shared_memory), bytes_text(size)


def check_compiler(torch: dict) -> Iterator[Line]:
    try:
        host.check_compiler("cuda" if has_gpu(torch) else "cpu")
        yield "ok", "compiler", "found, and Python's headers, for torch.compile"
    except UserError as error:
        # On a CPU, torch.compile is only used with --compile on.
        yield "FIX" if has_gpu(torch) else "note", "compiler", str(error)


def check_memory(torch: dict) -> Iterator[Line]:
    free = host.available_memory_bytes()
    text = f"{bytes_text(free)} available; saves of GPT-2 124M on a GPU keep a copy of {bytes_text(HOST_COPY)} there"
    if free < HOST_COPY:
        advice = "end other programs, raise the container's limit, or train a smaller model"
        yield "FIX" if has_gpu(torch) else "note", "RAM", f"{text}; {advice}"
    else:
        yield "ok", "RAM", text


def check_files() -> Iterator[Line]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        yield "note", "open files", f"at most {soft}, which many shards and workers may exceed; try ulimit -n 4096"


def check_disks(folders: dict[str, int]) -> Iterator[Line]:
    """Check each disk that holds some of these folders, which need so many bytes."""
    disks: dict[int, list[str]] = {}
    for folder in map(Path, folders):
        if folder.is_symlink() and not folder.exists():
            yield "FIX", "disk", f"{folder}: a link to {folder.readlink()}, which is missing; mount or create it"
        else:
            disks.setdefault(existing(folder).stat().st_dev, []).append(str(folder))
    for names in disks.values():
        kind, options = file_system(existing(Path(names[0])))
        place = f"{', '.join(names)}{f' ({kind})' * bool(kind)}"
        if refused := [name for name in names if not os.access(existing(Path(name)), os.W_OK | os.X_OK)]:
            yield "FIX", "disk", f"{place}: no write access to {', '.join(refused)}; change its owner, mode or mount"
            continue
        yield from check_space(place, existing(Path(names[0])), sum(folders[name] for name in names))
        yield from check_locks(place, existing(Path(names[0])), kind, options)


def check_space(place: str, folder: Path, needed: int) -> Iterator[Line]:
    """Check the free bytes on the disk of a folder, and its speed."""
    free = shutil.disk_usage(folder).free
    text = f"{place}: {bytes_text(free)} free, room for {free // CHECKPOINT} checkpoints of GPT-2 124M"
    if free < 3 * CHECKPOINT:  # latest.pt, latest_backup.pt and the next one
        yield "FIX", "disk", f"{text}; free some, or give another --checkpoint_dir and --data_dir"
    elif free < needed:
        yield "note", "disk", f"{text}; GPT-2 124M on FineWeb-Edu 10B takes {bytes_text(needed)} here in all"
    else:
        yield "ok", "disk", text
    if free < 2 * CHECKPOINT:
        return  # a run may need the rest
    try:
        speed = write_speed(folder)
    except OSError as error:
        yield "FIX", "disk speed", f"{place}: cannot be written to ({error.strerror}); see quotas, and dmesg"
        return
    text = f"{place}: {bytes_text(speed)}/s; a checkpoint of GPT-2 124M takes {CHECKPOINT / speed:.2g} s"
    if speed < SLOW:
        yield "note", "disk speed", f"{text} in the background. Saves become rarer; a faster disk loses less"
    else:
        yield "ok", "disk speed", text


def write_speed(folder: Path, size: int = 2**28, at_most_s: float = 3.0) -> float:
    """Return the bytes a second that a new file takes, fsync included. The file has no name, so none is left behind."""
    block, written, started_s = os.urandom(2**24), 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < size and time.monotonic() - started_s < at_most_s:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / (time.monotonic() - started_s)


def check_locks(place: str, folder: Path, kind: str, options: str) -> Iterator[Line]:
    """Check that a folder's lock excludes a second process, and that a file can have two names."""
    problem, links = "", True
    try:
        with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as name:
            here = Path(name)
            with lock_folder(here, ""):
                second = [sys.executable, "-B", "-c", LOCK_TOO, name]
                done = subprocess.run(second, env=os.environ | {"PYTHONPATH": str(REPO)})
            problem = "" if done.returncode == 3 else "two processes hold the same lock"
            link_file(here / ".lock", here / "second name")
            links = (here / ".lock").samefile(here / "second name")
    except (UserError, OSError) as error:
        cause = error.__cause__ or error
        problem = f"no file locks ({getattr(cause, 'strerror', cause)})"
    advice = "mount it with locks, or use another disk: runs lock their folders"
    if problem:
        yield "FIX", "locks", f"{place}: {problem}; {advice}"
    elif any(word in options.split(",") for word in ("nolock", "local_lock=all", "local_lock=flock", "localflock")):
        yield "note", "locks", f"{place}: other machines do not see them; never start a run on two machines"
    else:
        yield "ok", "locks", f"{place}: a lock keeps a second process out"
    if not links:
        yield "note", "hard links", f"{place}: none, so a checkpoint of several names is written once for each"


def file_system(path: Path) -> tuple[str, str]:
    """Return the type and the mount options of the file system of an existing path; empty where not known."""
    found = "/", "", ""
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else []:
        _, folder, kind, options, *_ = line.split(" ")
        folder = folder.replace("\\040", " ")  # a space in the name
        if path.resolve().is_relative_to(folder) and len(folder) >= len(found[0]):
            found = folder, kind, options
    return found[1:]


def main(argv: Sequence[str] | None = None) -> int:
    stamps = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    torch, fixes = ask_torch(), 0
    lines = chain(
        [("ok", "Python", f"{platform.python_version()}, {sys.executable}")],  # setup.sh refuses one before 3.11
        check_packages(stamps, torch), check_gpus(torch), check_nccl(torch), check_compiler(torch), check_memory(torch),
        check_files(), check_disks(FOLDERS),
    )  # fmt: skip
    for state, subject, text in lines:
        print(f"{state:<4}  {subject:<10}  {text}", flush=True)
        fixes += state == "FIX"
    if fixes:
        print(f"{fixes} to fix; then run ./setup.sh --check again")
        return 1
    print("nothing to fix; next: ./start_training.sh")
    return 0


if __name__ == "__main__":
    run_cli(main)
