"""The load of the machine: psutil for real, and GPUs of a fake pynvml."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from steadygpt import host, system
from steadygpt.system import SystemMetrics, gpu_uuids, missing

H100 = {"percent": 97, "memory": (40e9, 80e9), "celsius": 61, "watts": 512_345}
HOST = {"cpu_percent", "ram_gb", "ram_total_gb", "disk_free_gb"}


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of pynvml as is used. A GPU is a dict of its counters; one that is missing or None is not supported."""

    NVMLError, NVML_TEMPERATURE_GPU = NVMLError, 0

    def __init__(self, **gpus: dict):
        self.gpus, self.asked = {name.replace("_", "-"): gpu for name, gpu in gpus.items()}, []

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.gpus:
            raise NVMLError("Not Found")
        return self.gpus[uuid]

    def read(self, gpu, counter):
        self.asked.append(counter)
        if "lost" in gpu:
            raise NVMLError("GPU is lost")
        if gpu.get(counter) is None:
            raise NVMLError("Not Supported")
        return gpu[counter]

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        return SimpleNamespace(gpu=self.read(gpu, "percent"))

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        used, total = self.read(gpu, "memory")
        return SimpleNamespace(used=used, total=total)

    def nvmlDeviceGetTemperature(self, gpu, sensor):  # noqa: N802
        return self.read(gpu, "celsius")

    def nvmlDeviceGetPowerUsage(self, gpu):  # noqa: N802
        return self.read(gpu, "watts")


class Run:
    """The metrics and warnings of a SystemMetrics that measures all the time."""

    def __init__(self, gpus=(), folder="checkpoints", interval_s=0.01, on_record=lambda: None):
        self.records: list[dict[str, float]] = []
        self.warnings: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.on_record = on_record
        self.metrics = SystemMetrics(interval_s, Path(folder), gpus, self.record, self.warnings.append)

    def record(self, metrics):
        self.threads.add(threading.current_thread())
        self.records.append(metrics)
        self.on_record()

    def wait(self, count: int) -> dict[str, float]:
        """Wait for `count` further records and return the last."""
        end = len(self.records) + count
        give_up_s = time.monotonic() + 20
        while len(self.records) < end:
            assert time.monotonic() < give_up_s, "no more records"
            time.sleep(0.005)
        return self.records[-1]

    def gpu_metrics(self) -> dict[str, float]:
        return {name: value for name, value in self.wait(2).items() if name not in HOST}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Start measuring, beside this machine's GPUs as given; stop at the end of the test."""
    monkeypatch.chdir(tmp_path)
    runs: list[Run] = []

    def start(nvml=None, **options) -> Run:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: not installed
        runs.append(Run(**options))
        return runs[-1]

    yield start
    for started in runs:
        started.metrics.close()


def test_the_host_is_measured_in_a_thread_of_its_own(run):
    started = run()
    found = started.wait(3)
    assert found.keys() == HOST
    assert 0 <= found["cpu_percent"] <= 100
    assert found["ram_total_gb"] == pytest.approx(
        min(psutil.virtual_memory().total, host.container_limit_bytes()) / 1e9
    )
    assert 0 < found["ram_gb"] < found["ram_total_gb"]
    assert found["disk_free_gb"] == pytest.approx(psutil.disk_usage(".").free / 1e9, rel=0.05)
    assert threading.main_thread() not in started.threads and len(started.threads) == 1
    assert not started.warnings


def test_pynvml_has_what_the_fake_one_has():
    pynvml = pytest.importorskip("pynvml")
    assert all(hasattr(pynvml, name) for name in dir(FakeNvml) if name.upper().startswith("NVML"))


def test_eight_gpus(run):
    gpus = {f"GPU_{n}": {**H100, "percent": n} for n in range(8)}
    found = run(FakeNvml(**gpus), gpus=[str(n) for n in range(8)]).gpu_metrics()
    assert len(found) == 8 * 5
    assert [found[f"gpu{n}_percent"] for n in range(8)] == list(range(8))
    assert found["gpu7_memory_gb"] == 40 and found["gpu7_memory_total_gb"] == 80
    assert found["gpu7_celsius"] == 61 and found["gpu7_watts"] == 512.345


def test_only_the_gpus_of_the_run_are_measured_in_its_order(run):
    nvml = FakeNvml(GPU_a={**H100, "percent": 1}, GPU_b={**H100, "percent": 2}, GPU_c={**H100, "percent": 3})
    found = run(nvml, gpus=["c", "a"]).gpu_metrics()
    assert (found["gpu0_percent"], found["gpu1_percent"]) == (3, 1) and "gpu2_percent" not in found


def test_a_gb10_has_no_memory_counters_and_is_not_asked_again(run):
    nvml = FakeNvml(GPU_a={**H100, "memory": None})
    started = run(nvml, gpus=["a"])
    assert started.gpu_metrics().keys() == {"gpu0_percent", "gpu0_celsius", "gpu0_watts"}
    assert nvml.asked.count("memory") == 1 and nvml.asked.count("watts") > 2
    assert not started.warnings


def test_a_mig_instance_shows_its_memory(run):
    started = run(FakeNvml(GPU_parent=H100, MIG_a={"memory": (5e9, 10e9)}), gpus=["a"])
    assert started.gpu_metrics() == {"gpu0_memory_gb": 5, "gpu0_memory_total_gb": 10}
    assert not started.warnings


def test_a_lost_gpu_is_reported_once_and_the_others_go_on(run):
    nvml = FakeNvml(GPU_a=dict(H100), GPU_b=dict(H100))
    started = run(nvml, gpus=["a", "b"])
    assert len(started.gpu_metrics()) == 10
    nvml.gpus["GPU-a"]["lost"] = True
    found = started.gpu_metrics()
    assert len(found) == 5 and "gpu1_watts" in found
    assert started.warnings == ["cannot measure GPU 0: NVMLError: GPU is lost; training continues"]
    del nvml.gpus["GPU-a"]["lost"]
    assert len(started.gpu_metrics()) == 10


def test_without_a_driver_one_line_is_enough_for_all_gpus(run):
    nvml = FakeNvml()

    def fail():
        raise NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = fail
    started = run(nvml, gpus=["a", "b"])
    assert started.wait(2).keys() == HOST
    assert started.warnings == ["cannot measure GPU 0: NVMLError: NVML Shared Library Not Found; training continues"]


def test_without_the_packages_the_disk_is_measured(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    started = run(nvml=None, gpus=["a"])
    assert started.wait(2).keys() == {"disk_free_gb"}
    assert not started.warnings  # missing() tells


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(system, "find_spec", lambda module: None)
    assert missing(cuda=True) == ["psutil", "nvidia-ml-py"]
    assert missing(cuda=False) == ["psutil"]
    monkeypatch.setattr(system, "find_spec", lambda module: object())
    assert missing(cuda=True) == []


def test_a_record_that_fails_is_reported_once_and_measuring_continues(run):
    def fail():
        raise ValueError("I/O operation on closed file")

    started = run(on_record=fail)
    started.wait(3)
    assert started.warnings == [
        "cannot record the load of the machine: ValueError: I/O operation on closed file; training continues"
    ]


def test_psutil_that_fails_is_reported_once_and_the_rest_is_measured(run, monkeypatch):
    def fail():
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    started = run()
    assert started.wait(3).keys() == {"cpu_percent", "disk_free_gb"}
    assert len(started.warnings) == 1 and "Permission denied" in started.warnings[0]


@pytest.mark.parametrize(
    ("limit", "stat", "content"),
    [
        ("memory.max", "memory.stat", "anon 300000000\nfile 900000000\nshmem 50000000\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.stat", "cache 900000000\nrss 300000000\nshmem 50000000\n"),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_in_a_container_the_ram_is_the_containers(run, monkeypatch, tmp_path, limit, stat, content):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("400000000\n")
    (tmp_path / stat).write_text(content)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    found = run().wait(1)
    assert (found["ram_gb"], found["ram_total_gb"]) == (0.35, 0.4)


def test_the_first_record_does_not_wait_for_the_interval_and_close_ends_at_once(run, monkeypatch):
    monkeypatch.setattr(system, "FIRST_S", 0.1)
    started = run(interval_s=3600)
    started.wait(1)
    start = time.monotonic()
    started.metrics.close()
    assert time.monotonic() - start < 0.5
    assert not started.metrics.thread.is_alive()
    assert len(started.records) == 1


def test_after_close_nothing_is_recorded(run):
    started = run()
    started.wait(2)
    started.metrics.close()
    count = len(started.records)
    time.sleep(0.1)
    assert len(started.records) == count


def test_a_disk_that_hangs_does_not_hold_the_end_up(run, monkeypatch):
    hangs, recovers = threading.Event(), threading.Event()

    def hang(folder):
        hangs.set()
        assert recovers.wait(20)
        return SimpleNamespace(free=0)

    monkeypatch.setattr(system.shutil, "disk_usage", hang)
    started = run()
    assert hangs.wait(20)
    start = time.monotonic()
    started.metrics.close()
    assert time.monotonic() - start < 2.0
    recovers.set()
    started.metrics.thread.join(20)
    assert not started.records  # the log is closed by then


def test_uuids_of_this_machines_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda rank: SimpleNamespace(uuid=f"uuid{rank}"))
    assert gpu_uuids(torch.device("cuda", 0)) == ["uuid0"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpu_uuids(torch.device("cuda", 0)) == ["uuid0", "uuid1"]
    assert gpu_uuids(torch.device("cpu")) == []
