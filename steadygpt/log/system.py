"""Load of the machine while it trains: CPU, RAM, disk and GPUs, measured by a thread.

Needs psutil for CPU and RAM, and nvidia-ml-py for GPUs. Without them the rest is measured.
"""

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from steadygpt.base.retry import brief
from steadygpt.config import TrainConfig
from steadygpt.machine.host import CGROUP, container_limit_bytes

# Of the GPU of a local rank. torch.cuda.mem_get_info() would create a context on each of the other ranks' GPUs.
GPU_METRICS: dict[str, Callable[[int], float]] = {
    "percent": torch.cuda.utilization,
    "memory_gb": lambda gpu: torch.cuda.device_memory_used(gpu) / 1e9,
    "memory_total_gb": lambda gpu: torch.cuda.get_device_properties(gpu).total_memory / 1e9,
    "celsius": torch.cuda.temperature,
    "watts": lambda gpu: torch.cuda.power_draw(gpu) / 1000,
}


class SystemMetrics:
    """A thread that measures every --system_metrics_s seconds until close().

    Args:
        device: "cuda" if each of this machine's ranks has a GPU.
        record: is called in the thread with the metrics by name; those of GPUs begin with gpu0_, gpu1_ and so on.
        warn: is called in the thread with one line about metrics that fail, and are no longer measured.
    """

    def __init__(self, config: TrainConfig, device: torch.device, record: Callable, warn: Callable):
        self.interval_s, self.record, self.warn = config.system_metrics_s, record, warn
        self.readers: dict[str, Callable[[], float]] = {
            "disk_free_gb": lambda: shutil.disk_usage(config.checkpoint_dir).free / 1e9,
            "cpu_percent": lambda: import_module("psutil").cpu_percent(),  # of all cores, since the last call
            "ram_gb": lambda: _ram_bytes()[0] / 1e9,
            "ram_total_gb": lambda: _ram_bytes()[1] / 1e9,
        }
        for gpu in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cuda" else 0):
            self.readers |= {f"gpu{gpu}_{name}": partial(read, gpu) for name, read in GPU_METRICS.items()}
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop measuring. A measurement that hangs, as on a lost network file system, is not waited for."""
        self.closing.set()
        self.thread.join(1.0)

    def _work(self) -> None:
        self._measure()  # the first load of the CPU only starts the clock
        while not self.closing.wait(self.interval_s):
            metrics = self._measure()
            if not self.closing.is_set():
                self.record(metrics)

    def _measure(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        failed: dict[str, Exception] = {}
        for name, read in self.readers.items():
            try:
                metrics[name] = read()
            except Exception as error:  # a GPU that is lost, a driver that is reloaded, a /proc that is denied
                failed[name] = error
        if failed:
            self.readers = {name: read for name, read in self.readers.items() if name not in failed}
            reasons = "; ".join(dict.fromkeys(map(brief, failed.values())))
            self.warn(f"cannot measure {', '.join(failed)}: {reasons}; training continues")
        return metrics


def _ram_bytes() -> tuple[int, int]:
    """Return the used and the total memory, of the container if that has a limit: psutil reports the host's."""
    host = import_module("psutil").virtual_memory()
    if (limit := container_limit_bytes()) >= host.total:
        return host.total - host.available, host.total
    path = next(path for path in (CGROUP / "memory.stat", CGROUP / "memory/memory.stat") if path.exists())
    counts = {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    # Without the cache of files, which the kernel can drop: cgroup v2 calls the rest anon, v1 rss.
    return counts.get("anon", counts.get("rss", 0)) + counts["shmem"], limit
