"""The load of the machine: RAM for real, and torch's counters of GPUs on a fake driver."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import run_here, scalars
from ground import open_log

from steadygpt.config import TrainConfig
from steadygpt.log import runlog, system
from steadygpt.log.metrics import read_records, read_status
from steadygpt.log.system import measure_load
from steadygpt.machine import host
from steadygpt.machine.ranks import Ranks

HOST = {"ram_gb", "ram_total_gb"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


def test_the_ram_is_measured():
    failed: dict[str, str] = {}
    found = measure_load(CPU, failed)
    assert found.keys() == HOST and not failed
    assert 0 < found["ram_gb"] < found["ram_total_gb"]


def test_the_gpus_of_this_machines_ranks_are_measured_and_a_lost_one_no_longer(driver, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # gpu0 of the run is the driver's number 3
    failed: dict[str, str] = {}
    found = measure_load(CUDA, failed)
    assert not failed
    assert len(found) == 2 + 2 * 5
    assert (found["gpu0_percent"], found["gpu1_percent"]) == (30, 10)
    assert (found["gpu1_memory_gb"], found["gpu1_memory_total_gb"]) == (40, 80)
    assert (found["gpu1_celsius"], found["gpu1_watts"]) == (61, 512.345)
    driver.add(3)
    for _ in range(2):
        found = measure_load(CUDA, failed)
        assert "gpu0_watts" not in found and "gpu1_watts" in found
    assert [*failed] == ["gpu0_percent", "gpu0_memory_gb", "gpu0_celsius", "gpu0_watts"]


def test_without_the_package_of_the_driver_one_line_is_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", None, raising=False)
    monkeypatch.setattr(runlog, "device_name", str)
    monkeypatch.setattr(runlog, "LOAD_S", 0.0)
    log = open_log(TrainConfig(run_name="tiny", max_steps=9, checkpoint_dir=str(tmp_path)), None, Ranks(CUDA))
    log.load_at_s = 0.0
    for step in range(3):
        log.step(step, {"loss": 1.0}, {}, 9.0, is_first=False)
    log.close()
    err = capsys.readouterr().err
    assert err.count("warning: cannot measure gpu0_percent, ") == 1 and "nvidia-ml-py" in err
    assert len(read_records(tmp_path / "metrics.jsonl", "ram_gb")) == 3


@pytest.mark.parametrize(("limit", "stat", "content"), [
    ("memory.max", "memory.stat", "anon 300000000\nfile 900000000\nshmem 50000000\n"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "cache 900000000\nrss 300000000\nshmem 50000000\n"),
], ids=["cgroup v2", "cgroup v1"])  # fmt: skip
def test_in_a_container_the_ram_is_the_containers(monkeypatch, tmp_path, limit, stat, content):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("400000000\n")
    (tmp_path / stat).write_text(content)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    found = measure_load(CPU, {})
    assert (found["ram_gb"], found["ram_total_gb"]) == (0.35, 0.4)


def test_load_of_the_machine_is_recorded_at_most_every_few_seconds_beside_the_step(workdir, monkeypatch):
    def loads() -> list[dict]:
        records = [json.loads(line) for line in (workdir / "checkpoints/metrics.jsonl").read_text().splitlines()]
        return [record for record in records if "ram_gb" in record]

    monkeypatch.setattr(runlog, "LOAD_S", 1000.0)
    run_here("--max_steps", "4", "--use_tensorboard")
    assert len(loads()) == 1
    monkeypatch.setattr(runlog, "LOAD_S", 0.0)
    run_here("--resume", "--max_steps", "8", "--use_tensorboard")
    assert [record["step"] for record in loads()] == [0, 4, 5, 6, 7]
    assert all(record.keys() >= HOST and "loss" not in record for record in loads())
    assert loads()[-1].items() >= read_status(workdir / "checkpoints")["load"].items()  # for the monitor
    assert "system/ram_gb" in scalars(workdir / "checkpoints/tensorboard")
