"""The load of the machine: psutil for real, and torch's counters of GPUs on a fake driver."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import run_here, scalars

from steadygpt.log import runlog, system
from steadygpt.log.metrics import read_status
from steadygpt.log.system import SystemMetrics
from steadygpt.machine import host

HOST = {"cpu_percent", "ram_gb", "ram_total_gb"}


class Run:
    """The metrics and warnings of a SystemMetrics that measures all the time."""

    def __init__(self, device="cpu", interval_s=0.01):
        self.records: list[dict[str, float]] = []
        self.warnings: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.metrics = SystemMetrics(interval_s, torch.device(device), self.record, self.warnings.append)

    def record(self, metrics):
        self.threads.add(threading.current_thread())
        self.records.append(metrics)

    def wait(self, count: int) -> dict[str, float]:
        """Wait for `count` further records and return the last."""
        end = len(self.records) + count
        give_up_s = time.monotonic() + 20
        while len(self.records) < end:
            assert time.monotonic() < give_up_s, "no more records"
            time.sleep(0.005)
        return self.records[-1]


@pytest.fixture
def run():
    """Start measuring; stop at the end of the test."""
    runs: list[Run] = []

    def start(**options) -> Run:
        runs.append(Run(**options))
        return runs[-1]

    yield start
    for started in runs:
        started.metrics.close()


@pytest.fixture
def driver(monkeypatch):
    """A driver with GPUs whose load is 10 times their number; those in its set are lost."""
    pynvml = pytest.importorskip("pynvml")
    lost: set[int] = set()

    def of_gpu(value):
        def read(gpu, *_):
            if gpu in lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return value(gpu)

        return read

    counters = {
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=10 * gpu),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=40e9),
        "nvmlDeviceGetTemperature": lambda gpu: 61,
        "nvmlDeviceGetPowerUsage": lambda gpu: 512_345,
    }
    for name, value in counters.items():
        monkeypatch.setattr(pynvml, name, of_gpu(value))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda gpu: gpu)
    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda gpu, optional: gpu or 0)  # asks CUDA for None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80e9))
    return lost


def test_the_host_is_measured_in_a_thread_of_its_own(run):
    started = run()
    found = started.wait(3)
    assert found.keys() == HOST
    assert all(0 <= record["cpu_percent"] <= 100 for record in started.records)
    total_bytes = min(psutil.virtual_memory().total, host.container_limit_bytes())
    assert found["ram_total_gb"] == pytest.approx(total_bytes / 1e9)
    assert 0 < found["ram_gb"] < found["ram_total_gb"]
    assert threading.main_thread() not in started.threads and len(started.threads) == 1
    assert not started.warnings


def test_the_gpus_of_this_machines_ranks_are_measured_and_a_lost_one_is_reported_once(run, driver, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # gpu0 of the run is the driver's number 3
    started = run(device="cuda")
    found = started.wait(1)
    assert not started.warnings
    assert len(found) == 3 + 2 * 5
    assert (found["gpu0_percent"], found["gpu1_percent"]) == (30, 10)
    assert (found["gpu1_memory_gb"], found["gpu1_memory_total_gb"]) == (40, 80)
    assert (found["gpu1_celsius"], found["gpu1_watts"]) == (61, 512.345)
    driver.add(3)
    found = started.wait(2)
    assert "gpu0_watts" not in found and "gpu1_watts" in found
    assert len(started.warnings) == 1
    assert started.warnings[0].startswith("cannot measure gpu0_percent, gpu0_memory_gb, gpu0_celsius, gpu0_watts: ")


def test_without_packages_or_a_driver_one_line_is_enough(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", None, raising=False)
    started = run(device="cuda")
    started.metrics.thread.join(20)
    assert not started.metrics.thread.is_alive() and not started.records  # nothing is left to measure
    [warning] = started.warnings
    assert warning.startswith("cannot measure cpu_percent, ram_gb, ram_total_gb, gpu0_percent, ")
    assert "psutil" in warning and "nvidia-ml-py" in warning


@pytest.mark.parametrize(("limit", "stat", "content"), [
    ("memory.max", "memory.stat", "anon 300000000\nfile 900000000\nshmem 50000000\n"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "cache 900000000\nrss 300000000\nshmem 50000000\n"),
], ids=["cgroup v2", "cgroup v1"])  # fmt: skip
def test_in_a_container_the_ram_is_the_containers(run, monkeypatch, tmp_path, limit, stat, content):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("400000000\n")
    (tmp_path / stat).write_text(content)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    found = run().wait(1)
    assert (found["ram_gb"], found["ram_total_gb"]) == (0.35, 0.4)


def test_close_waits_neither_for_the_interval_nor_for_a_driver_that_hangs(run, monkeypatch):
    waiting = run(interval_s=3600)
    hangs, recovers = threading.Event(), threading.Event()
    monkeypatch.setitem(system.HOST_METRICS, "cpu_percent", lambda: (hangs.set(), recovers.wait(20)))
    hanging = run()
    assert hangs.wait(20)
    start = time.monotonic()
    for started in (waiting, hanging):
        started.metrics.close()
    assert time.monotonic() - start < 2.0
    assert not waiting.metrics.thread.is_alive() and hanging.metrics.thread.is_alive()
    recovers.set()


def test_load_of_the_machine_is_recorded_beside_the_step(workdir, monkeypatch):
    monkeypatch.setattr(runlog, "LOAD_S", 0.01)
    run_here("--max_steps", "20", "--use_tensorboard")
    records = [json.loads(line) for line in (workdir / "checkpoints/metrics.jsonl").read_text().splitlines()]
    loads = [record for record in records if "cpu_percent" in record]
    assert loads and all(0 <= record["step"] <= 20 and "loss" not in record for record in loads)
    assert loads[-1].keys() >= HOST
    shown = read_status(workdir / "checkpoints")["load"].items()  # for the monitor
    assert any(load.items() >= shown for load in loads)
    folder = workdir / "checkpoints/tensorboard"
    assert "system/cpu_percent" in scalars(folder)
