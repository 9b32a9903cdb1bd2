"""The machine, examined without PyTorch: GPUs, cores, compiler, memory; and the age of this process."""

import os
import shutil
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

from steadygpt.base.options import UserError

DEVICES = Path("/dev")  # on Linux
IMPORTED_AT_S = time.monotonic()
CGROUP = Path("/sys/fs/cgroup")  # where a container finds its limits, on Linux


def has_gpu(devices: Path) -> bool:
    """Return whether this process has an NVIDIA GPU, usable or not."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last is Slurm's
    return any(devices.glob("nvidia[0-9]*")) and not is_hidden


def usable_cores() -> int:
    """Return the number of cores that this process may use, within the CPU quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limits in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroup v2, v1
        with suppress(OSError, ValueError):  # there are no such files, or "max"
            text = " ".join((CGROUP / limit).read_text() for limit in limits)
            quota, period = map(int, text.split())
            if quota > 0:  # v1 has -1 for no quota
                cores = min(cores, max(1, quota // period))
    return cores


def check_compiler(device_type: str) -> None:
    """Check that torch.compile has a compiler and headers; it would report missing ones only minutes later."""
    if device_type == "cuda":
        variable = "CC"
        defaults = ["gcc", "clang"]
    else:
        variable = "CXX"
        defaults = ["clang++" if sys.platform == "darwin" else "g++"]
    compilers = os.environ.get(variable, "").split()[:1] or defaults
    advice = "install it, or train without torch.compile, with --compile off"
    if not any(map(shutil.which, compilers)):
        raise UserError(f"torch.compile needs a compiler; found no {' or '.join(compilers)}: {advice}")
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    if not header.exists():
        raise UserError(f"torch.compile needs Python's headers; found no {header} (package python3-dev): {advice}")


def available_memory_bytes() -> int:
    """Return the memory that new processes can use, within the limit of a container."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):  # not Linux
        available = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    return min(available, container_limit_bytes())


def container_limit_bytes() -> int:
    """Return the bytes of memory that this container may use; sys.maxsize without a limit."""
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        with suppress(OSError, ValueError):  # there is no such file, or "max"
            return int((CGROUP / limit).read_text())
    return sys.maxsize


def process_age_s() -> float:
    """Return the seconds since this process was started, on Linux; elsewhere since this module was imported."""
    try:
        start_ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # proc(5), field 22
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.monotonic() - IMPORTED_AT_S
