"""Who this process is among its peers, and the few things that peers do together."""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygpt.cli import UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among world_size; local_rank counts within the machine."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers. It travels in a CPU tensor, so no GPU has to synchronize."""
        if self.world_size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        return bool(self.max(flag))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: Result) -> Result:
        """Rank 0's value (picklable), on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def on_main(self, compute: Callable[[], Result]) -> Result | None:
        """compute() on rank 0, its result there alone; the other ranks wait, and get None.

        Raises: UserError on every rank when compute() raises one, or cannot read or write a file.
        """
        result, error = None, None
        if self.is_main:
            try:
                result = compute()
            except UserError as raised:
                error = raised
            except OSError as raised:
                error = UserError(f"{raised}; expected to read and write it: mend that and start again")
        if error := self.broadcast(error):
            raise error
        return result


def gradient_sync(forward: nn.Module, last: bool):
    """Average gradients over the ranks in the last micro-step only; a context for its forward and backward."""
    if isinstance(forward, DistributedDataParallel):
        return nullcontext() if last else forward.no_sync()
    bare = getattr(forward, "_orig_mod", forward)
    if hasattr(bare, "set_requires_gradient_sync"):  # FSDP's
        bare.set_requires_gradient_sync(last)
    return nullcontext()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose parts FSDP keeps on several ranks, whole; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class StopSignal:
    """Asks the run to end early: signals and --max_hours set a reason, the ranks agree on it."""

    REASONS = ("", "SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "max_hours")

    def __init__(self, ranks: Ranks, max_hours: float):
        self.ranks = ranks
        self.deadline = time.monotonic() + max_hours * 3600 if max_hours else math.inf
        self.asked = 0
        for number, name in enumerate(self.REASONS[1:5], start=1):
            if name == "SIGHUP" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                continue  # nohup: the user wants it to live on
            signal.signal(getattr(signal, name), lambda *_, number=number: self._ask(number))

    def _ask(self, number: int) -> None:
        self.asked = self.asked or number  # a terminal's Ctrl-C arrives twice under torchrun: no "force quit"

    def agreed(self) -> str:
        """Why the run should end now, the same on every rank; "" to go on. Every rank must call it."""
        if time.monotonic() > self.deadline:
            self._ask(self.REASONS.index("max_hours"))
        return self.REASONS[self.ranks.max(self.asked)]  # a signal during max() counts in the next call


def world_size_of_environment() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device_name: str, timeout_minutes: float = 30):
    """Join the processes that torchrun has started, as a `Ranks`; leave them at the end.

    CPU tensors travel by gloo, CUDA tensors by NCCL. A rank that the others wait for longer than `timeout_minutes` (as
    they do while rank 0 reads through all shards or a large checkpoint) ends the run.

    Raises: UserError when the machine has no such device, or not one for each local process.
    """
    world_size = world_size_of_environment()
    ranks = Ranks(
        device=_choose_device(device_name),
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
    )
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    else:
        _use_all_cores()
        _keep_freed_memory()
    if world_size > 1:
        cuda = ranks.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            device_id=ranks.device if cuda else None,
            timeout=timedelta(minutes=timeout_minutes),
        )
    try:
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _choose_device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no CUDA GPU that PyTorch can use; try --device cpu")
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"more processes on this machine than its {torch.cuda.device_count()} GPUs; "
                f"start torchrun with --nproc_per_node={torch.cuda.device_count()}"
            )
        return torch.device("cuda", local_rank)
    if name not in ("cpu", "mps") or (name == "mps" and not torch.backends.mps.is_available()):
        raise UserError(f"--device {name}: not on this machine; expected auto, cpu, cuda or mps")
    return torch.device(name)


def _use_all_cores() -> None:
    """Share the machine's cores among its processes, unless OMP_NUM_THREADS says otherwise."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets OMP_NUM_THREADS=1 by itself when it starts several processes: that is nobody's wish.
    if wanted is None or (wanted == "1" and local_world_size > 1):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world_size))


def _keep_freed_memory() -> None:
    """Keep what tensors free for the next ones: glibc gives large blocks back to the system at once.

    Getting them again costs a page fault every 4 KB, a fifth of a training step on a CPU (benchmarks/train_speed.py).
    So the process stays as large as it ever was, with the copy that a save takes.
    """
    with suppress(AttributeError, OSError):  # another C library
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)  # from the heap alone,
        libc.mallopt(m_trim_threshold, -1)  # which never shrinks


def end_with_torchrun() -> None:
    """Get SIGTERM when torchrun's agent dies, even by SIGKILL, which leaves its workers running (Linux only).

    Raises: UserError when it is dead already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
        raise UserError("torchrun is gone; start it again")
