"""Choice of the device, precision, peak throughput, process age, and evaluation mode."""

import os
import platform
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import REPO
from torch.nn.attention import SDPBackend

from model import GPT, GPTConfig
from steadygpt.base.options import RankError, UserError
from steadygpt.config import TrainConfig
from steadygpt.inference.sampling import generate
from steadygpt.inference.scoring import Question, score
from steadygpt.machine import device, host
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import autocast, choose_precision, evaluating, memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.start.build import set_up

SIZES = 16, 64, 256  # tokens, width and hidden layer


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Return a function that gives this CPU some flags."""
    monkeypatch.setattr(device, "Path", lambda _: tmp_path / "cpuinfo")
    return lambda flags: (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")


@pytest.mark.parametrize(("flags", "kind", "chosen"), [
    (None, "cpu", "fp32"),  # not Linux
    ("fma avx512f avx512_vnni", "cpu", "fp32"),
    ("fma avx512_bf16", "cpu", "bf16"),
    ("amx_bf16 amx_tile", "cpu", "bf16"),
    ("fma avx512_bf16_emulated", "cpu", "fp32"),  # a whole word
    ("avx512_bf16", "mps", "fp32"),
])  # fmt: skip
def test_precision_follows_from_the_flags_of_the_processor(flags, kind, chosen, cpu):
    if flags:
        cpu(flags)
    assert choose_precision("auto", torch.device(kind)) == chosen
    for wanted in ("fp32", "bf16", "fp16"):
        assert choose_precision(wanted, torch.device(kind)) == wanted


@pytest.mark.parametrize(("has_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_precision_of_a_gpu_follows_from_its_units(has_bf16, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_precision("auto", torch.device("cuda")) == chosen


@pytest.mark.parametrize(("name", "tflops"), [("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA RTX A1000", None)])
def test_peak_flops_match_complete_device_names(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert device.PEAK_FLOPS.get(device.device_name(torch.device("cuda"))) == (tflops and tflops * 1e12)


def test_process_age_includes_the_time_before_imports():
    program = "import time; time.sleep(0.5); from steadygpt.machine.host import process_age_s; print(process_age_s())"
    started_s = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True).stdout)
    assert 0.5 <= age_s <= time.monotonic() - started_s + 0.02  # the kernel counts in ticks of 10 ms


@pytest.mark.parametrize(("precision", "dtype"), [
    ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16),
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


def test_tf32_is_for_training_in_fp32_only(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    for precision in ("bf16", "fp32"):
        set_up(TrainConfig(precision=precision, compile="off"), torch.device("cuda"))
    assert chosen == ["high"]


def test_deterministic_chooses_deterministic_attention(monkeypatch):
    """With warn_only, PyTorch keeps the kernels that are not deterministic. Inductor has a switch of its own."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch._inductor.config, "deterministic", False)
    try:
        set_up(TrainConfig(deterministic=True, compile="on"), torch.device("cpu"))
        assert torch._inductor.config.deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gpu_that_cannot_be_used_is_an_error_unless_it_is_hidden(tmp_path, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    (tmp_path / "nvidia3").touch()  # a container may have this one only
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"(?i)\bGPU\b.*12020\); .*--device cpu\b"):
            device.choose_device(name)
    assert device.choose_device("cpu").type == "cpu"
    for value in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert device.choose_device("auto").type == "cpu"


def test_a_missing_compiler_or_header_is_an_error_before_training(tmp_path, monkeypatch):
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    host.check_compiler("cpu")
    host.check_compiler("cuda")
    monkeypatch.setattr(host.sysconfig, "get_config_var", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=rf" {tmp_path}/Python\.h .*--compile off\b"):
        host.check_compiler("cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"\bgcc\b.*\bclang\b.*--compile off\b"):
        host.check_compiler("cuda")
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(UserError, match=r"\bccache\b.*--compile off\b"):
        host.check_compiler("cpu")


def test_generation_and_hellaswag_avoid_attention_that_plans_each_length(monkeypatch):
    model = GPT(GPTConfig(vocab_size=257, num_layers=1, num_heads=2, embd_size=16))
    question, allowed = Question([np.array([1, 2, n]) for n in range(4)], [1] * 4, 0), []
    model.ln_0.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    generate(model, torch.tensor([[1, 2]]), max_tokens=2)
    score(model, [question], Ranks(torch.device("cpu")))
    assert allowed == [False] * 3
    model(torch.tensor([[1, 2]]))
    assert allowed[-1]  # training uses it


def test_memory_of_the_host_is_what_is_available_within_the_containers_limit(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 32 kB\nMemFree: 1 kB\nMemAvailable:   16 kB\n")
    monkeypatch.setattr(host, "Path", {"/proc/meminfo": tmp_path / "meminfo"}.get)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    for limit, expected in (("max\n", 16384), ("9000\n", 9000), ("99999\n", 16384)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory_bytes(cpu) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_bytes(cpu) == 4096


@pytest.mark.parametrize(("files", "expected"), [
    ({"cpu.max": "250000 100000\n"}, 2), ({"cpu.max": "50000 100000\n"}, 1), ({"cpu.max": "max 100000\n"}, 8),
    ({"cpu.max": "9900000 100000\n"}, 8), ({}, 8),
    ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
], ids=str)  # fmt: skip
def test_cores_are_those_of_the_process_within_the_containers_quota(tmp_path, monkeypatch, files, expected):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert host.usable_cores() == expected


def test_more_processes_than_gpus_are_reported_once(monkeypatch):
    """Rank 0 waits for the other ranks and reports nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, kind in ((2, RankError), (3, UserError)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(UserError, match=r"\btorchrun\b.*--nproc_per_node=2\b") as raised:
            device.choose_device("auto")
        assert type(raised.value) is kind


def test_segments_of_gpu_memory_may_grow_unless_the_user_decides(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for own in (None, *names):
        monkeypatch.setattr(os, "environ", {own: "backend:cudaMallocAsync"} if own else {})
        device.use_expandable_segments()
        expected = {own: "backend:cudaMallocAsync"} if own else dict.fromkeys(names, "expandable_segments:True")
        assert os.environ == expected
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    device.use_expandable_segments()
    assert not os.environ


@pytest.mark.parametrize(("backend", "version", "expected"), [
    (SDPBackend.CUDNN_ATTENTION, 91900, "cuDNN 9.19.0"),
    (SDPBackend.FLASH_ATTENTION, 91002, "FlashAttention (cuDNN 9.10.2 not used)"),
    (SDPBackend.MATH, None, "separate products (slow)"),
])  # fmt: skip
def test_kernel_of_attention_is_the_one_that_pytorch_chooses(backend, version, expected, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, dropout_p, is_causal: backend.value * is_causal)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert kernel_name((1, 12, 1024, 64), torch.bfloat16, torch.device("cuda"), 0.0) == expected


@pytest.mark.parametrize(("tokens", "dtype", "dropout", "expected"), [
    (512, torch.bfloat16, 0.0, "blocks of queries"), (513, torch.bfloat16, 0.0, "FlashAttention"),
    (512, torch.float32, 0.0, "FlashAttention"), (512, torch.float32, 0.1, "separate products (slow)"),
])  # fmt: skip
def test_kernel_of_attention_on_a_cpu(tokens, dtype, dropout, expected):
    assert kernel_name((1, 2, tokens, 8), dtype, torch.device("cpu"), dropout) == expected
    assert kernel_name((1, 2, tokens, 8), dtype, torch.device("mps"), dropout) == ""
