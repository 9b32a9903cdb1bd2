"""Devices: choice, precision, peak throughput, memory, threads, profiler."""

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from steadygpt.base.options import RankError, UserError
from steadygpt.base.text import counted
from steadygpt.machine.host import DEVICES, available_memory_bytes, has_gpu, usable_cores

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}  # flags of x86 processors in /proc/cpuinfo
# Peak dense FLOP/s in bf16 (fp16 on a T4) by device_name(), the whole name of the GPU.
# Source: NVIDIA's data sheets, halved where these give figures "with sparsity".
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12, "NVIDIA RTX A6000": 155e12,
    "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 3090": 71e12, "Tesla T4": 65e12,
    "NVIDIA GB10": 125e12,  # a quarter of its fp4
}  # fmt: skip
AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # dtype of products by precision


def choose_device(name: str) -> torch.device:
    """Return this process's device of the kind in --device; torchrun starts a process for each GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or has_gpu(DEVICES) else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():  # an error, because a run on the CPU instead would take weeks
            try:
                torch.cuda.init()  # raises the reason
            except (AssertionError, RuntimeError) as error:
                raise UserError(
                    f"PyTorch cannot use a GPU here: {str(error).splitlines()[0]}; install a build of PyTorch for it, "
                    "or use --device cpu"
                ) from None
        if local_rank >= torch.cuda.device_count():
            # The first process without a GPU prints the error, so that it is printed once.
            error_type = RankError if local_rank == torch.cuda.device_count() else UserError
            raise error_type(
                f"more processes on this machine than its {torch.cuda.device_count()} GPUs; "
                f"start torchrun with --nproc_per_node={torch.cuda.device_count()}"
            )
        return torch.device("cuda", local_rank)
    if name not in ("cpu", "mps") or (name == "mps" and not torch.backends.mps.is_available()):
        raise UserError(f"--device {name}: not on this machine; expected auto, cpu, cuda or, on a Mac, mps")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({counted(threads, 'thread')})" if device.type == "cpu" else device.type


def choose_precision(wanted: str, device: torch.device) -> str:
    """Resolve "auto": bf16 if the device has instructions for it, else fp16 on a GPU and fp32 elsewhere."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    cpu_flags = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpu_flags.exists() and BF16_INSTRUCTIONS & {*cpu_flags.read_text().split()}:
        return "bf16"
    return "fp32"


def autocast(device: torch.device, precision: str):
    """Return a context that computes in this precision; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


def be_deterministic(compiles: bool) -> None:
    """Use deterministic kernels, so that an identical process computes the same bits."""
    if compiles:  # otherwise each process times a GPU's kernels and takes the fastest, which may differ
        torch._inductor.config.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with warn_only, attention would stay nondeterministic
    # Filling is not needed, because every tensor is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed(device: torch.device, number: int) -> None:
    """Seed the generators of the CPU and of a device. torch.manual_seed would take 0.3 ms for that (torch 2.13)."""
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


@contextmanager
def evaluating(model: nn.Module):
    """Turn off dropout and gradients in this context; restore the model's mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def any_length():
    """Return a context without cuDNN's attention, which spends time on a plan for each new length (torch 2.13)."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class CapturedGraph:
    """A function whose kernels a GPU launches at once, as a CUDA graph, from its second call on.

    Each call uses the same memory, so it overwrites the previous result. In the first call, libraries choose kernels
    and allocate memory; the second call records the graph.
    """

    def __init__(self, function: Callable[[], torch.Tensor], device: torch.device):
        self.function = function
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        if self.device.type != "cuda" or self.calls == 1:
            return self.function()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads, which write checkpoints and read data, may allocate during the capture.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.function()
        self.graph.replay()
        return self.result


def compute_alone() -> None:
    """Make this background thread compute without a team of OpenMP threads.

    On a CPU, a second team makes each step 1.15 times as long while it exists: with more threads than cores, the
    threads of both teams sleep between two parts of their work (torch 2.13).
    """
    torch.set_num_threads(1)


@contextmanager
def profiled(steps: int, path: Path, tell: Callable[[str], None]):
    """Skip 3 steps, then record `steps` steps into a trace file for Perfetto and TensorBoard's profiler.

    Yields a function to be called after each step. With 0 steps, nothing is recorded.
    """
    if not steps:
        yield lambda: None
        return

    def write(profiler: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            tell(f"{path}: the trace was not written: {error}")
        else:
            tell(f"trace in {path}; open it at https://ui.perfetto.dev")

    schedule = torch.profiler.schedule(wait=2, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, acc_events=True) as profiler:
        yield profiler.step
    if profiler.step_num < 3:  # the skipped steps: wait + warmup
        tell("no trace: the run was too short")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used, on the GPU or on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU had too little memory; errors not from PyTorch's allocator say so only in their message."""
    is_in_message = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return is_in_message or isinstance(error, torch.OutOfMemoryError)


def memory_bytes(device: torch.device) -> int:
    """Return the memory that this process can use: all of its GPU, or its share of what the host has available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return available_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def use_expandable_segments() -> None:
    """Let PyTorch's allocator grow its segments of GPU memory, unless the user has set it up otherwise.

    The tensors of an evaluation differ in size from a step's. In segments of fixed size they leave fragments,
    so a run that fits at first runs out of memory later. The allocator reads the variable when the first tensor is
    allocated. In WSL 2 that allocation can fail (pytorch issue 192330), so segments keep their size there.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second one is the older name
    is_wsl = "microsoft" in platform.release().lower()
    is_set = any(name in os.environ for name in names)
    if not is_wsl and not is_set:
        os.environ |= dict.fromkeys(names, "expandable_segments:True")


def use_all_cores() -> None:
    """Divide the machine's cores among its processes, unless OMP_NUM_THREADS is set."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets OMP_NUM_THREADS=1 for several processes, and accelerate for one. Then 1 is not the user's choice.
    has_launcher = local_world_size > 1 or "ACCELERATE_MIXED_PRECISION" in os.environ
    if num_threads is None or (num_threads == "1" and has_launcher):
        torch.set_num_threads(max(1, usable_cores() // local_world_size))


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for new ones; by default glibc returns large blocks to the system at once.

    Getting them back costs a page fault every 4 KB, a fifth of a training step on a CPU (benchmarks/train_speed.py).
    In return the process never shrinks.
    """
    with suppress(AttributeError, OSError):  # another C library
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)  # allocate from the heap only,
        libc.mallopt(m_trim_threshold, -1)  # which never shrinks
