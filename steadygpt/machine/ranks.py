"""Ranks: this process among its peers, their collectives, and how they agree to stop."""

import ctypes
import errno
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from steadygpt.base.options import LostRankError, RankError, UserError
from steadygpt.machine.device import choose_device, keep_freed_memory, use_all_cores, use_expandable_segments
from steadygpt.machine.host import process_age_s

Result = TypeVar("Result")
LOST = re.compile("Connection (closed|reset) by peer|Broken pipe")  # in messages of gloo
NO_ANSWER = re.compile("[Tt]imed ?out|Socket Timeout")
# Gathers into one tensor, because NCCL copies lists. torch 2.11 has only the older name, for which torch 2.13 warns.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Request(NamedTuple):
    """What a rank asks for. Ranks agree on the maximum of each number."""

    stop: float = 0  # index of a reason in Requests.REASONS; 0: continue
    save: float = 0  # 1: a timed save
    step_s: float = math.inf  # seconds that the last step took


@dataclass(frozen=True)
class Ranks:
    """This process among world_size processes."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are on one machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) == self.world_size

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank."""
        return bool(self.max_of([flag])[0])

    def max_of(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of the ranks' first numbers, of their second numbers, and so on.

        They are sent as CPU tensors, so no GPU has to synchronize.
        """
        if self.world_size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)  # which is exact for integers up to 2**53
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, computed in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def step_numbers(
        self, measured: Mapping[str, torch.Tensor], request: "Request"
    ) -> tuple[dict[str, float], "Request"]:
        """Return the mean of each measurement over its entries on all ranks, and the agreed request.

        Takes one collective and one synchronization with the device.

        Args:
            measured: name -> (n,) or a scalar on the device, on each rank.
            request: of this rank.
        """
        parts = [tensor.detach().reshape(-1).float() for tensor in measured.values()]
        numbers_here = torch.cat(parts)
        if self.world_size > 1:
            numbers_here = torch.cat([numbers_here, numbers_here.new_tensor(request)])
        whole = self.concatenated(numbers_here[None])  # (ranks, numbers)
        results = []
        at = 0
        for part in parts:
            results.append(whole[:, at : at + len(part)].reshape(-1).mean())
            at += len(part)
        numbers = torch.stack(results)
        if self.world_size > 1:
            numbers = torch.cat([numbers, whole[:, at:].amax(0)])
        values = numbers.tolist()
        agreed = Request(*values[len(measured) :]) if self.world_size > 1 else request
        return dict(zip(measured, values, strict=False)), agreed

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors, (n, ...) on each, in the order of the ranks: (world_size * n, ...)."""
        if self.world_size == 1:
            return tensor
        whole = tensor.new_empty(self.world_size * len(tensor), *tensor.shape[1:])
        all_gather(whole, tensor)
        return whole

    def broadcast(self, value: Result) -> Result:
        """Return rank 0's value (picklable) on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: Result) -> list[Result]:
        """Return the ranks' values (picklable), in the order of the ranks, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def sharing_errors(self):
        """Raise a UserError or OSError of one rank on all of them, as a UserError; every rank enters this context."""
        problem = ""
        try:
            yield
        except UserError as error:
            problem = str(error)
        except OSError as error:
            advice = "raise the limit (ulimit -n 65536)" if error.errno == errno.EMFILE else "fix it"
            problem = f"{error}; {advice}, then start again"
        if self.any(bool(problem)):
            if problem and not self.is_main:
                problem = f"rank {self.rank} on {socket.gethostname()}: {problem}"
            problems = [text for text in self.gather(problem) if text]
            raise UserError(problems[0])


class Stopped(Exception):
    """The ranks have agreed to stop before the last step; `reason` is one of Requests.REASONS."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Requests:
    """Requests to stop and to save, until the ranks agree on them.

    Signals, --max_hours and failed saves ask to stop; rank 0, by its clock, asks for timed saves. The ranks exchange
    their requests together with the numbers of each step, and during long steps and evaluations also in between.

    Args:
        max_hours: counted from the start of this process, as a job's time limit is; 0: no limit.
        alive: called at each exchange, as a sign that the run makes progress.
    """

    SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")  # schedulers announce the end by SIGUSR1 or 2
    REASONS = ("", *SIGNALS, "max_hours", "saves failed", "folder lost")
    LONG_S = 2.0  # if steps take longer, the ranks also agree between micro-steps

    def __init__(self, ranks: Ranks, max_hours: float, alive: Callable[[], object] = lambda: None):
        self.ranks = ranks
        self.alive = alive
        self.deadline = time.monotonic() - process_age_s() + 3600 * max_hours if max_hours else math.inf
        self.asked = 0  # index in REASONS
        self.save = False  # whether this rank asks for a timed save
        self.step_s = math.inf  # of the last step of this rank
        self.agreed = Request()  # at the last exchange

    def listen(self) -> None:
        """Collect signals from now on. Under nohup, SIGHUP stays ignored: closing the terminal must not stop a run."""
        for name in self.SIGNALS:
            number = signal.Signals[name]
            if name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_, name=name: self.ask(name))

    @classmethod
    def raise_until_listen(cls) -> None:
        """Let the same signals raise KeyboardInterrupt(NAME) until listen(); a second one ends the process at once.

        Signals that the process ignores from its start stay ignored, such as SIGUSR1 under multinode.sh.
        """

        def interrupt(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number).name)

        for name in cls.SIGNALS[1:]:  # SIGINT already raises a KeyboardInterrupt
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop, for one of REASONS."""
        self.asked = self.asked or self.REASONS.index(reason)  # under torchrun a terminal's Ctrl-C arrives twice

    def take_interrupt(self) -> bool:
        """Forget the last signal, and return whether it was Ctrl-C or SIGTERM: a scheduler may repeat its SIGUSR1."""
        asked = self.asked
        self.asked = 0
        return self.REASONS[asked] in ("SIGINT", "SIGTERM")

    def of_this_rank(self) -> Request:
        """Return what this rank asks for now."""
        self.alive()
        if time.monotonic() > self.deadline:
            self.ask("max_hours")
        return Request(self.asked, self.save, self.step_s)

    def agree(self, now: bool = False) -> bool:
        """Stop if the ranks have agreed on it; return whether they have agreed on a timed save. All ranks call it.

        Args:
            now: exchange requests first, even if steps are short.

        Raises: Stopped, on all ranks together.
        """
        if now or self.ranks.world_size == 1 or self.agreed.step_s > self.LONG_S:
            self.agreed = Request(*self.ranks.max_of(self.of_this_rank()))
        if self.agreed.stop:
            raise Stopped(self.REASONS[int(self.agreed.stop)])
        return bool(self.agreed.save)


def launched_as() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, which torchrun puts into the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    numbers = {}
    for name, text in variables.items():
        if name != "MASTER_ADDR" and text.isdecimal():
            numbers[name] = int(text)
    rank = numbers.get("RANK", 0)
    world_size = numbers.get("WORLD_SIZE", 1)
    missing = set(names[:2] + names[4:]) - set(variables) if world_size > 1 else set()
    if len(numbers) < len(variables.keys() - {"MASTER_ADDR"}) or rank >= world_size or missing:
        shown = " ".join(f"{name}={text}" for name, text in variables.items())
        raise RankError(
            f"the environment has {shown}; expected torchrun's variables, a RANK below WORLD_SIZE and an address. "
            f"Start with torchrun --nproc_per_node=N {Path(sys.argv[0]).name}, or unset them"
        )
    for tool, name in (("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE"), ("mpirun", "PMI_SIZE")):
        tasks = os.environ.get(name, "1")
        if "RANK" not in variables and tasks != "1":
            raise RankError(
                f"{tool} has started {tasks} processes, and each would run alone; expected one torchrun on each "
                "node: scripts/slurm.sh or scripts/multinode.sh (docs/multi-node.md)"
            )
    return rank, world_size


def lost_rank(error: Exception, ranks: Ranks, timeout_minutes: float) -> str:
    """Return a text about the rank that an exception of gloo reports as lost; "" for other exceptions."""
    if ranks.world_size == 1 or not isinstance(error, RuntimeError):
        return ""
    reason = str(error).partition("\n")[0]
    if NO_ANSWER.search(reason):
        problem = f"no answer from another rank for {timeout_minutes:g} minutes (--timeout_minutes)"
        return f"{problem}; it hangs, all ranks were suspended, or its machine cannot be reached ({reason})"
    if LOST.search(reason):
        return f"lost another rank, whose output says why ({reason})"
    return ""


@contextmanager
def joined(device_name: str, timeout_minutes: float = 10):
    """Join the processes that torchrun has started, as a `Ranks`; leave them at the end.

    CPU tensors are sent by gloo, CUDA tensors by NCCL. If a rank does not respond for `timeout_minutes`, the run ends.
    This time must suffice for rank 0 to read all shards or a large checkpoint, because the other ranks wait for it.

    Raises: LostRankError if gloo loses a rank; NCCL ends the process instead.
    """
    rank, world_size = launched_as()
    ranks = Ranks(choose_device(device_name), rank, world_size)
    cuda = ranks.device.type == "cuda"
    if cuda:
        use_expandable_segments()
        torch.cuda.set_device(ranks.device)
    else:
        use_all_cores()
        keep_freed_memory()
    if world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            device_id=ranks.device if cuda else None,
            timeout=timedelta(minutes=timeout_minutes),
        )
    try:
        yield ranks
    except RuntimeError as error:
        lost = lost_rank(error, ranks, timeout_minutes)
        if lost:
            raise LostRankError(f"rank {rank}: {lost}") from error
        raise
    # Not after an exception: with NCCL this waits for all ranks, so the error would not be printed before the time-out.
    if dist.is_initialized():
        dist.destroy_process_group()


def end_with_torchrun() -> None:
    """Receive SIGTERM when torchrun's agent dies, even by SIGKILL, which leaves its workers running (Linux only)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    # In a container, the launcher may be process 1.
    if os.getppid() == 1 and not re.search(rb"torch|accelerate", Path("/proc/1/cmdline").read_bytes()):
        raise UserError("torchrun has exited; start it again")
