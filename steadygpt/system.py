"""Load of the machine while it trains: CPU, RAM, disk and GPUs, measured by a thread.

Needs psutil for CPU and RAM, and nvidia-ml-py for GPUs. Without them the rest is measured.
"""

import os
import re
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from steadygpt.disk import existing
from steadygpt.host import CGROUP, container_limit_bytes
from steadygpt.retry import brief

LOAD = ("cpu_percent", "ram_gb", "gpu_percent", "gpu_memory_gb")
FIRST_S = 2.0  # after which the first record follows at the latest

Metrics = dict[str, float]
Reader = Callable[[], Metrics]


class SystemMetrics:
    """A thread that measures every `interval_s` seconds until close().

    Args:
        folder: of the disk whose free space is measured; it need not exist.
        gpus: UUIDs, as gpu_uuids() returns them.
        record: is called in the thread with the metrics by name: cpu_percent (0 to 100, of all cores), ram_gb,
            ram_total_gb, disk_free_gb, and for each GPU gpu0_percent, gpu0_memory_gb, gpu0_memory_total_gb,
            gpu0_celsius and gpu0_watts. What the machine cannot measure is absent.
        warn: is called in the thread with one line for each thing that cannot be measured any more.
    """

    def __init__(
        self,
        interval_s: float,
        folder: Path,
        gpus: Sequence[str],
        record: Callable[[Metrics], object],
        warn: Callable[[str], object],
    ):
        self.interval_s, self.folder, self.gpus, self.record, self.warn = interval_s, folder, gpus, record, warn
        self.reported: set[str] = set()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop measuring. A measurement that hangs, as on a lost network file system, is not waited for."""
        self.closing.set()
        self.thread.join(1.0)

    def _work(self) -> None:
        readers = self._readers()
        pause_s = min(self.interval_s, FIRST_S)
        while not self.closing.wait(pause_s):
            pause_s = self.interval_s
            metrics: Metrics = {}
            for what, read in readers:
                try:
                    metrics |= read()
                except Exception as error:  # a GPU that is lost, a driver that is reloaded, a /proc that is denied
                    self._report(f"cannot measure {what}", error)
            if self.closing.is_set():
                return
            try:
                self.record(metrics)
            except Exception as error:  # nothing that happens here may end the measuring, or the run
                self._report("cannot record the load of the machine", error)

    def _readers(self) -> list[tuple[str, Reader]]:
        readers: list[tuple[str, Reader]] = [("the disk", self._disk)]
        sources: dict[str, Callable[[], list[Reader]]] = {"CPU and RAM": _host_readers}
        sources |= {f"GPU {n}": partial(_gpu_readers, n, uuid) for n, uuid in enumerate(self.gpus)}
        for what, find in sources.items():
            try:
                readers += [(what, read) for read in find()]
            except ImportError:  # missing() names the package
                continue
            except Exception as error:
                self._report(f"cannot measure {what}", error)
        return readers

    def _disk(self) -> Metrics:
        return {"disk_free_gb": shutil.disk_usage(existing(self.folder)).free / 1e9}

    def _report(self, problem: str, error: Exception) -> None:
        """Warn once about each problem, and once about an error that all GPUs have."""
        reason = brief(error)
        if not self.reported & {problem, reason}:
            self.warn(f"{problem}: {reason}; training continues")
        self.reported |= {problem, reason}


class Load:
    """Means over time of what SystemMetrics records: the load of the CPU and the GPUs, and the memory in use."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count a record of SystemMetrics."""
        for name, value in metrics.items():
            if (kind := re.sub(r"^gpu\d+", "gpu", name)) in LOAD:
                self.sums[kind] += value
                self.counts[kind] += 1

    def means(self) -> dict[str, float]:
        """Return the means of LOAD as far as it was measured; those of GPUs are for one GPU."""
        return {name: self.sums[name] / count for name, count in self.counts.items()}


def missing(cuda: bool) -> list[str]:
    """Return the packages to install for all metrics, with GPUs or without."""
    wanted = {"psutil": "psutil"} | ({"pynvml": "nvidia-ml-py"} if cuda else {})
    return [package for module, package in wanted.items() if find_spec(module) is None]


def gpu_uuids(device: torch.device) -> list[str]:
    """Return the UUIDs of the GPUs that this machine's ranks use, by local rank; none on other devices.

    Asking for the properties of another rank's GPU creates no context there: PyTorch itself asks for those of all
    visible GPUs when it initializes CUDA (torch.cuda._check_capability).
    """
    if device.type != "cuda":
        return []
    count = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(local_rank).uuid) for local_rank in range(count)]


def _host_readers() -> list[Reader]:
    import psutil

    psutil.cpu_percent()  # the first call only starts the clock
    return [lambda: {"cpu_percent": psutil.cpu_percent()}, _ram]


def _ram() -> Metrics:
    """Return the used and the total memory, of the container if that has a limit: psutil reports the host's."""
    import psutil

    host = psutil.virtual_memory()
    used, total = host.total - host.available, host.total
    if (limit := container_limit_bytes()) < total:
        used, total = _container_used_bytes(), limit
    return {"ram_gb": used / 1e9, "ram_total_gb": total / 1e9}


def _container_used_bytes() -> int:
    """Return the memory of the container's processes, without the cache of files, which the kernel can drop."""
    path = next(path for path in (CGROUP / "memory.stat", CGROUP / "memory/memory.stat") if path.exists())
    counts = dict(line.split() for line in path.read_text().splitlines())
    return int(counts["anon" if "anon" in counts else "rss"]) + int(counts["shmem"])  # cgroup v2, v1


def _gpu_readers(number: int, uuid: str) -> list[Reader]:
    """Return a reader for each counter that a GPU has: a GB10 has no memory of its own, a MIG instance no power.

    Raises: NVMLError when the driver is missing or does not know the GPU; ImportError.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")  # PyTorch leaves out the prefix
    except pynvml.NVMLError:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def memory() -> Metrics:
        found = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {f"gpu{number}_memory_gb": found.used / 1e9, f"gpu{number}_memory_total_gb": found.total / 1e9}

    counters: list[Reader] = [
        lambda: {f"gpu{number}_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu},
        memory,
        lambda: {f"gpu{number}_celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)},
        lambda: {f"gpu{number}_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
    ]
    readers = []
    for read in counters:
        with suppress(pynvml.NVMLError):
            read()
            readers.append(read)
    return readers
