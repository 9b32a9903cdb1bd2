"""Load of the machine while it trains, as the monitor and TensorBoard show it: CPU, RAM and GPUs, measured by a thread.

Needs psutil for CPU and RAM, and nvidia-ml-py for GPUs. What cannot be measured is left out.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from steadygpt.base.retry import brief
from steadygpt.machine.host import CGROUP, container_limit_bytes

# Of the GPU of a local rank. torch.cuda.mem_get_info() would create a context on each of the other ranks' GPUs.
GPU_METRICS: dict[str, Callable[[int], float]] = {
    "percent": torch.cuda.utilization,
    "memory_gb": lambda gpu: torch.cuda.device_memory_used(gpu) / 1e9,
    "memory_total_gb": lambda gpu: torch.cuda.get_device_properties(gpu).total_memory / 1e9,
    "celsius": torch.cuda.temperature,
    "watts": lambda gpu: torch.cuda.power_draw(gpu) / 1000,
}
HOST_METRICS: dict[str, Callable[[], float]] = {
    "cpu_percent": lambda: import_module("psutil").cpu_percent(),  # of all cores, since the last call
    "ram_gb": lambda: ram_bytes()[0] / 1e9,
    "ram_total_gb": lambda: ram_bytes()[1] / 1e9,
}


class SystemMetrics:
    """A thread that measures every `interval_s` seconds until close().

    Args:
        device: "cuda" if each of this machine's ranks has a GPU.
        record: is called in the thread with the metrics by name; those of GPUs begin with gpu0_, gpu1_ and so on.
        warn: is called in the thread with one line about metrics that fail. They are no longer measured then.
    """

    def __init__(self, interval_s: float, device: torch.device, record: Callable, warn: Callable):
        self.interval_s = interval_s
        self.record = record
        self.warn = warn
        self.readers = dict(HOST_METRICS)
        if device.type == "cuda":
            for gpu in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
                self.readers |= {f"gpu{gpu}_{name}": partial(read, gpu) for name, read in GPU_METRICS.items()}
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop measuring. A driver that hangs is not waited for."""
        self.closing.set()
        self.thread.join(1.0)

    def _work(self) -> None:
        self._measure()  # psutil measures the CPU's load since the call before, so the first call measures nothing
        while self.readers and not self.closing.wait(self.interval_s):
            self.record(self._measure())

    def _measure(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        failed: dict[str, str] = {}
        for name, read in self.readers.items():
            try:
                metrics[name] = read()
            except Exception as error:  # a GPU that is lost, a driver that is reloaded, a /proc that is denied
                failed[name] = brief(error)
        if failed:
            for name in failed:
                del self.readers[name]
            reasons = "; ".join(dict.fromkeys(failed.values()))
            self.warn(f"cannot measure {', '.join(failed)}: {reasons}; training continues")
        return metrics


def ram_bytes() -> tuple[int, int]:
    """Return the bytes of used and total memory, of the container if it has a limit: psutil reports the host's."""
    host = import_module("psutil").virtual_memory()
    limit = container_limit_bytes()
    if limit >= host.total:
        return host.total - host.available, host.total
    path = CGROUP / "memory.stat"
    if not path.exists():  # cgroup v1
        path = CGROUP / "memory/memory.stat"
    counts = {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    # Without the cache of files, which the kernel can drop: cgroup v2 calls the rest anon, v1 rss.
    return counts.get("anon", counts.get("rss", 0)) + counts["shmem"], limit
