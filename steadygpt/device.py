"""What a device is called, computes in, reaches at best, and has used."""

import resource
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from steadygpt.cli import UserError

# Dense bf16 FLOP/s by the name the driver gives (NVIDIA's data sheets); the first match counts.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
    "A10": 125e12, "A6000": 155e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


def choose_precision(wanted: str, device: torch.device) -> str:
    """ "auto" as one of fp32, bf16, fp16: what the device computes natively."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    cpu_flags = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpu_flags.exists() and "avx512_bf16" in cpu_flags.read_text():
        return "bf16"
    return "fp32"


def autocast(device: torch.device, precision: str):
    """Compute in bf16 or fp16 inside; weights stay fp32. fp32: nothing changes; fp8: bf16 around the fp8 products."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def use_fp8(blocks: nn.Module, device: torch.device) -> None:
    """Let the linear layers of the blocks multiply in fp8 with a scale per tensor; their weights stay fp32.

    On a CPU the rounding is emulated, to try it; that is slow.

    Raises: UserError when torchao is missing or the GPU has no fp8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UserError("--precision fp8 needs torchao; pip install torchao==0.18.0") from None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f"--precision fp8: {torch.cuda.get_device_name(device)} has no fp8 units; use bf16 or fp16")
    convert_to_float8_training(blocks, config=Float8LinearConfig(emulate=device.type != "cuda"))


@contextmanager
def profiled(steps: int, path: Path, tell: Callable[[str], None]):
    """Record `steps` steps, after 3 others, into a trace file that Perfetto and TensorBoard's profiler open.

    Yields what is to be called after each step. 0 steps record nothing.
    """
    if not steps:
        yield lambda: None
        return

    recorded = False

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal recorded
        recorded = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            tell(f"no trace in {path}: {error}")
        else:
            tell(f"trace in {path}; open it at https://ui.perfetto.dev")

    schedule = torch.profiler.schedule(wait=2, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step
    if not recorded:
        tell("no trace: the run was too short")


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 FLOP/s; None where PEAK_FLOPS does not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has used: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
