"""Load of the machine during training, for the monitor and TensorBoard: GPUs (with nvidia-ml-py) and RAM (on Linux)."""

import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from steadygpt.base.retry import brief
from steadygpt.machine.host import CGROUP, available_memory_bytes, container_limit_bytes

# Of the GPU of a local rank. torch.cuda.mem_get_info() would create a context on each of the other ranks' GPUs.
GPU_METRICS: dict[str, Callable[[int], float]] = {
    "percent": torch.cuda.utilization,
    "memory_gb": lambda gpu: torch.cuda.device_memory_used(gpu) / 1e9,
    "memory_total_gb": lambda gpu: torch.cuda.get_device_properties(gpu).total_memory / 1e9,
    "celsius": torch.cuda.temperature,
    "watts": lambda gpu: torch.cuda.power_draw(gpu) / 1000,
}
HOST_METRICS: dict[str, Callable[[], float]] = {
    "ram_gb": lambda: ram_bytes()[0] / 1e9,
    "ram_total_gb": lambda: ram_bytes()[1] / 1e9,
}


def measure_load(device: torch.device, failed: dict[str, str]) -> dict[str, float]:
    """Measure the load of this machine; the names of GPU metrics begin with gpu0_, gpu1_ and so on.

    Args:
        device: "cuda" if each of this machine's ranks has a GPU.
        failed: name -> error of metrics that are no longer measured; those that fail now are added.
    """
    readers: dict[str, Callable[[], float]] = {}
    if sys.platform == "linux":
        readers |= HOST_METRICS
    if device.type == "cuda":
        for gpu in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            readers |= {f"gpu{gpu}_{name}": partial(read, gpu) for name, read in GPU_METRICS.items()}
    load = {}
    for name, read in readers.items():
        if name not in failed:
            try:
                load[name] = read()
            except Exception as error:  # a GPU that is lost, a driver that is reloaded, a /proc that is denied
                failed[name] = brief(error)
    return load


def ram_bytes() -> tuple[int, int]:
    """Return the bytes of used and total memory, of the container if it has a limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = container_limit_bytes()
    if limit >= total:
        return total - available_memory_bytes(), total
    path = CGROUP / "memory.stat"
    if not path.exists():  # cgroup v1
        path = CGROUP / "memory/memory.stat"
    counts = {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    # Without the cache of files, which the kernel can drop: cgroup v2 calls the rest anon, v1 rss.
    return counts.get("anon", counts.get("rss", 0)) + counts["shmem"], limit
