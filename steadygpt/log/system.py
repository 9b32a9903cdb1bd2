"""Load of the machine while it trains: CPU, RAM, disk and GPUs, measured by a thread.

Needs psutil for CPU and RAM, and nvidia-ml-py for GPUs. Without them the rest is measured.
"""

import os
import re
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from steadygpt.base.disk import existing
from steadygpt.base.retry import brief
from steadygpt.machine.host import CGROUP, container_limit_bytes

LOAD = ("cpu_percent", "ram_gb", "gpu_percent", "gpu_memory_gb")
FIRST_S = 2.0  # after which the first record follows at the latest

# Of the GPU of a local rank. torch.cuda.mem_get_info() would create a context on each of the other ranks' GPUs.
GPU_METRICS: dict[str, Callable[[int], float]] = {
    "percent": torch.cuda.utilization,
    "memory_gb": lambda gpu: torch.cuda.device_memory_used(gpu) / 1e9,
    "memory_total_gb": lambda gpu: torch.cuda.get_device_properties(gpu).total_memory / 1e9,
    "celsius": torch.cuda.temperature,
    "watts": lambda gpu: torch.cuda.power_draw(gpu) / 1000,
}


class SystemMetrics:
    """A thread that measures every `interval_s` seconds until close().

    Args:
        folder: of the disk whose free space is measured; it need not exist.
        gpus: number of GPUs, as gpu_count() returns it.
        record: is called in the thread with the metrics by name: cpu_percent (0 to 100, of all cores), ram_gb,
            ram_total_gb, disk_free_gb, and for each GPU gpu0_percent, gpu0_memory_gb, gpu0_memory_total_gb,
            gpu0_celsius and gpu0_watts. What the machine cannot measure is absent.
        warn: is called in the thread with one line for each error.
    """

    def __init__(
        self,
        interval_s: float,
        folder: Path,
        gpus: int,
        record: Callable[[dict[str, float]], object],
        warn: Callable[[str], object],
    ):
        self.interval_s, self.record, self.warn = interval_s, record, warn
        self.readers: dict[str, Callable[[], float]] = {
            "disk_free_gb": lambda: shutil.disk_usage(existing(folder)).free / 1e9,
            "cpu_percent": lambda: import_module("psutil").cpu_percent(),  # since the last call
            "ram_gb": lambda: _ram_bytes()[0] / 1e9,
            "ram_total_gb": lambda: _ram_bytes()[1] / 1e9,
        }
        for gpu in range(gpus):
            self.readers |= {f"gpu{gpu}_{name}": partial(read, gpu) for name, read in GPU_METRICS.items()}
        self.reported: set[str] = set()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop measuring. A measurement that hangs, as on a lost network file system, is not waited for."""
        self.closing.set()
        self.thread.join(1.0)

    def _work(self) -> None:
        self._measure()  # the first load of the CPU only starts the clock
        pause_s = min(self.interval_s, FIRST_S)
        while not self.closing.wait(pause_s):
            pause_s = self.interval_s
            metrics = self._measure()
            if self.closing.is_set():
                return
            try:
                self.record(metrics)
            except Exception as error:  # nothing that happens here may end the measuring, or the run
                self._report("cannot record the load of the machine", error)

    def _measure(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, read in self.readers.items():
            try:
                metrics[name] = read()
            except Exception as error:  # a GPU that is lost, a driver that is reloaded, a /proc that is denied
                self._report(f"cannot measure {name}", error)
        return metrics

    def _report(self, problem: str, error: Exception) -> None:
        """Warn once about each error, also if several metrics have it."""
        remedy = "; pip install psutil nvidia-ml-py" if isinstance(error, ImportError) else ""
        if (reason := brief(error)) not in self.reported:
            self.reported.add(reason)
            self.warn(f"{problem}: {reason}{remedy}; training continues")


class Load:
    """Means over time of what SystemMetrics records: the load of the CPU and the GPUs, and the memory in use."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count a record, and return the means of LOAD as far as it was measured; those of GPUs are for one GPU."""
        for name, value in metrics.items():
            if (kind := re.sub(r"^gpu\d+", "gpu", name)) in LOAD:
                self.sums[kind] += value
                self.counts[kind] += 1
        return {name: round(self.sums[name] / count, 2) for name, count in self.counts.items()}


def gpu_count(device: torch.device) -> int:
    """Return the number of GPUs that this machine's ranks use; none on other devices."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(ranks, torch.cuda.device_count()) if device.type == "cuda" else 0


def _ram_bytes() -> tuple[int, int]:
    """Return the used and the total memory, of the container if that has a limit: psutil reports the host's."""
    host = import_module("psutil").virtual_memory()
    if (limit := container_limit_bytes()) >= host.total:
        return host.total - host.available, host.total
    path = next(path for path in (CGROUP / "memory.stat", CGROUP / "memory/memory.stat") if path.exists())
    counts = {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    # Without the cache of files, which the kernel can drop: cgroup v2 calls the rest anon, v1 rss.
    return counts.get("anon", counts.get("rss", 0)) + counts["shmem"], limit
