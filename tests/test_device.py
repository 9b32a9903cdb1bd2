"""Precision, peak throughput, process age, and evaluation mode."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import REPO

from steadygpt import device
from steadygpt.device import autocast, choose_precision, evaluating, memory_bytes


@pytest.mark.parametrize(("bf16_units", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_gpu_uses_bf16_if_the_hardware_supports_it(bf16_units, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16_units)
    assert choose_precision("auto", torch.device("cuda")) == chosen


@pytest.mark.parametrize(("flags", "chosen"), [("fma avx512_bf16 amx_tile", "bf16"), ("fma avx512f", "fp32")])
def test_cpu_uses_bf16_if_the_hardware_supports_it(flags, chosen, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(device, "Path", lambda _: tmp_path / "cpuinfo")
    assert choose_precision("auto", torch.device("cpu")) == chosen


def test_other_devices_use_fp32_unless_a_precision_is_given(monkeypatch):
    assert choose_precision("auto", torch.device("mps")) == "fp32"
    monkeypatch.setattr(device, "Path", lambda _: Path("/no such file"))
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("fp16", torch.device("cpu")) == "fp16"


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA L4", 121), ("NVIDIA L40", 181), ("NVIDIA L40S", 362), ("NVIDIA A10", 125), ("NVIDIA A10G", 70),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 NVL", 835), ("NVIDIA H100 PCIe", 756), ("NVIDIA RTX A1000", None),
    ("NVIDIA A100-SXM4-80GB", 312),
])  # fmt: skip
def test_peak_flops_match_complete_device_names(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert device.peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)


def test_process_age_includes_the_time_before_imports():
    program = "import time; time.sleep(0.5); from steadygpt.device import process_age_s; print(process_age_s())"
    started_s = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True).stdout)
    assert 0.5 <= age_s <= time.monotonic() - started_s + 0.02  # the kernel counts in ticks of 10 ms


@pytest.mark.parametrize(("precision", "dtype"), [
    ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16),
])  # fmt: skip
def test_autocast_computes_in_the_precision_and_keeps_weights_fp32(precision, dtype):
    linear = torch.nn.Linear(4, 4)
    with autocast(torch.device("cpu"), precision):
        assert linear(torch.randn(2, 4)).dtype == dtype
    assert linear.weight.dtype == torch.float32


def test_evaluating_disables_gradients_and_restores_the_mode_after_an_error():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not model.training
        assert not model(torch.randn(2, 4)).requires_grad
        raise ZeroDivisionError
    assert model.training
    assert model(torch.randn(2, 4)).requires_grad


def test_memory_of_the_host_is_what_is_available_within_the_containers_limit(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 32 kB\nMemFree: 1 kB\nMemAvailable:   16 kB\n")
    files = {("/proc/meminfo",): tmp_path / "meminfo", ("/sys/fs/cgroup", "memory.max"): tmp_path / "memory.max"}
    monkeypatch.setattr(device, "Path", lambda *parts: files.get(parts, tmp_path / "none"))
    cpu = torch.device("cpu")
    for limit, expected in (("max\n", 16384), ("9000\n", 9000), ("99999\n", 16384)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory_bytes(cpu) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_bytes(cpu) == 4096
