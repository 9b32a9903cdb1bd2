"""Runs of train.py that tests kill, stop and disturb.

A `Life` is one start of a run: real processes, one a rank, each with a fork of a server that has imported torch
already, so that a start takes a tenth of a second. Tests that need torchrun itself start it (conftest.command).
"""

import contextlib
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from conftest import TINY, assert_same_state, command, environment, load, metrics

import evaluation
import hellaswag_eval
from durable import UncachedFile
from errors import run_cli

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    "pytest train prepare_dataset torch._dynamo torch.distributed.checkpoint.state_dict".split()
)


class Life:
    """One start of train.py, or of another program, on `ranks` processes; leaves its output in `out`.

    Args:
        tiny: flags that stand before the others.
        faults: called in each rank before main(), with its rank.
    """

    def __init__(
        self,
        *flags: str,
        ranks: int = 1,
        faults: Sequence[Callable[[int], None]] = (),
        tiny: Sequence[str] = (*TINY, "--data_dir", "data"),
        program: str = "train",
    ):
        self.out = Path(f"out-{time.monotonic_ns()}.txt")
        self.out.touch()
        environments = [{}]
        if ranks > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            environments = [address | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        self.ranks = [
            FORKS.Process(
                target=_rank, args=(program, [*tiny, *flags], environment, os.getcwd(), self.out, rank, faults)
            )
            for rank, environment in enumerate(environments)
        ]
        for process in self.ranks:
            process.start()

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """Wait until a line with `pattern` is in the output; returns the output."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, text := self.text(), re.MULTILINE):
            assert self.is_alive() and time.monotonic() < deadline, f"no {pattern!r} in the output:\n{text}"
            time.sleep(0.002)
        return text

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.ranks)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks; to all, when none is named."""
        for rank in ranks or range(len(self.ranks)):
            if self.ranks[rank].is_alive():
                os.kill(self.ranks[rank].pid, number)

    def kill(self) -> None:
        """kill -9 of the whole group."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Wait for the end of all ranks; returns their exit statuses."""
        for process in self.ranks:
            process.join(timeout_s)
            if process.exitcode is None:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {timeout_s} s:\n{self.text()}")
        return [process.exitcode for process in self.ranks]


def folders(name: str) -> tuple[str, ...]:
    """The flags that put a run into a folder of its own."""
    return "--checkpoint_dir", f"{name}/ckpt", "--logdir", f"{name}/logs"


def assert_continued(name: str, *measured: str) -> None:
    """The run in the folder `name` came, bit by bit, to what the uninterrupted one in "whole" came to."""
    assert_same_state(load("whole/ckpt/latest.pt"), load(f"{name}/ckpt/latest.pt"))
    for key in measured or ("loss", "grad_norm"):
        assert metrics("whole/logs", key) == metrics(f"{name}/logs", key), key


class Launched:
    """One start of train.py, or of torchrun with it, as a user types it; otherwise like a Life."""

    def __init__(self, *flags: str, processes: int = 1, tiny=TINY):
        self.out = Path(f"out-{time.monotonic_ns()}.txt")
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                command(*flags, processes=processes, tiny=tiny),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment() | {"LAUNCHED": str(self.out)},
                start_new_session=True,
                preexec_fn=_as_from_a_terminal,
            )

    text, wait_for = Life.text, Life.wait_for

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """The process ids of torchrun's workers."""
        children = subprocess.run(["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True)
        return [int(pid) for pid in children.stdout.split()]

    def group(self) -> list[int]:
        """The process ids of all that is alive of it; torchrun's workers are in sessions of their own."""
        mark, found = f"LAUNCHED={self.out}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if mark in path.read_bytes().split(b"\0") else []
        return sorted(found)

    def kill(self) -> None:
        """kill -9 of all of it, workers first: torchrun's death would be a SIGTERM to them."""
        for pid in self.group()[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        assert not self.group()

    def wait(self, timeout_s: float = 120) -> list[int]:
        return [self.process.wait(timeout_s)]


def whole_life(*flags: str, **options) -> str:
    """Run to the end, which must be a good one; returns the output."""
    life = Life(*flags, **options)
    statuses = life.wait()
    assert set(statuses) == {0}, f"{statuses}\n{life.text()}"
    return life.text()


def refused(*flags: str, **options) -> str:
    """Run what must end with status 2, before any step, and one line on stderr, which is returned."""
    life = Life(*flags, **options)
    assert set(life.wait()) == {2}, life.text()
    errors = [line for line in life.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in life.text() and "| loss" not in life.text(), life.text()
    return errors[0]


def _rank(
    program: str, argv: list[str], environment: dict, cwd: str, out: Path, rank: int, faults: Sequence[Callable]
) -> None:
    _as_from_a_terminal()
    os.chdir(cwd)
    os.environ.update(environment)
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = [f"{program}.py", *argv]
    for fault in faults:
        fault(rank)
    run_cli(importlib.import_module(program).main)


def _as_from_a_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though the tests may have been started with nohup


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------------------
# what is put into a life


def record_tokens(rank: int) -> None:
    """Append to tokens.jsonl the step, the rank and its rows' hashes of each step that is computed to its end."""
    import train

    train_step = train.train_step

    def recording_step(trainer, loader, lr, state, stop):
        rows, step = [], state.step

        class Recording:
            def next(self):
                inputs, targets = loader.next()
                for row in torch.cat([inputs, targets], dim=1):
                    rows.append(hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16])
                return inputs, targets

        result = train_step(trainer, Recording(), lr, state, stop)
        if result is not None:
            with open("tokens.jsonl", "a") as file:
                file.write(json.dumps([step, rank, rows]) + "\n")
        return result

    train.train_step = recording_step


def tokens_of_steps() -> dict[tuple[int, int], list[str]]:
    """(step, rank) -> hashes of its rows; a step was trained on the same tokens however often it was computed."""
    found = {}
    for line in Path("tokens.jsonl").read_text().splitlines():
        step, rank, rows = json.loads(line)
        assert found.setdefault((step, rank), rows) == rows, f"step {step} has seen other tokens in another life"
    return found


def rows_of_steps() -> dict[int, list[str]]:
    """Step -> hashes of the rows of all its ranks, sorted: whichever rank computed which."""
    found = {}
    for line in Path("tokens.jsonl").read_text().splitlines():
        step, _, rows = json.loads(line)
        found.setdefault(step, []).extend(rows)
    return {step: sorted(rows) for step, rows in found.items()}


def hash_weights(rank: int) -> None:
    """Append to weights.jsonl the step, rank and hash of the weights after each step."""
    import train

    train_step = train.train_step

    def hashing_step(trainer, loader, lr, state, stop):
        result = train_step(trainer, loader, lr, state, stop)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()))
        with open("weights.jsonl", "a") as file:
            file.write(json.dumps([state.step, rank, digest.hexdigest()]) + "\n")
        return result

    train.train_step = hashing_step


def weights_of_steps() -> dict[tuple[int, int], str]:
    """(step, rank) -> hash."""
    lines = map(json.loads, Path("weights.jsonl").read_text().splitlines())
    return {(step, rank): digest for step, rank, digest in lines}


def bad_numbers(steps: Sequence, kind: str, which_rank: int, rank: int) -> None:
    """Give one rank a loss or gradient that is no number in these steps ("validation" is one), or a large loss."""
    import train

    train_step, forward, now = train.train_step, train.GPT.forward, [None]

    def bad_step(trainer, loader, lr, state, stop):
        now[0] = state.step
        return train_step(trainer, loader, lr, state, stop)

    def bad_forward(model, *args, **kwargs):
        loss = forward(model, *args, **kwargs)
        if rank != which_rank or (now[0] if model.training else "validation") not in steps:
            return loss
        if kind.endswith("gradient"):
            loss.register_hook(lambda gradient: gradient * float(kind.split()[0]))
            return loss
        return {"nan loss": loss * math.nan, "inf loss": loss + math.inf, "large loss": loss * 3}[kind]

    train.train_step, train.GPT.forward = bad_step, bad_forward


def stop_after(steps: int, rank: int) -> None:
    """Ask for a stop when so many steps are made."""
    import train

    train_step = train.train_step

    def stopping_step(trainer, loader, lr, state, stop):
        if state.step == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, loader, lr, state, stop)

    train.train_step = stopping_step


def raise_in_step(step: int, which_rank: int, rank: int) -> None:
    """Let a rank fail in the middle of a step."""
    import train

    train_step = train.train_step

    def failing_step(trainer, loader, lr, state, stop):
        if (state.step, rank) == (step, which_rank):
            loader.next()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return train_step(trainer, loader, lr, state, stop)

    train.train_step = failing_step


def pause(moment: str, expire: bool, rank: int) -> None:
    """Say "paused in MOMENT" and wait a little, once, so that a signal comes just then; or let --max_hours be over."""
    import train

    left, signals, last_rank = [0.2], [], int(os.environ.get("WORLD_SIZE", "1")) - 1
    train_step, torch_save, score_batch = train.train_step, torch.save, hellaswag_eval.score_batch

    def here(where: str) -> None:
        if where == moment and left and rank == (0 if moment == "save" else last_rank):
            print(f"paused in {moment}", flush=True)
            signals[0].deadline = 0 if expire else math.inf
            time.sleep(left.pop())

    class Loader(train.BatchLoader):
        def next(self):
            here("evaluation")
            return super().next()

    def paused_step(trainer, loader, lr, state, stop):
        class Pausing:
            def next(self):
                here({3: "micro-step", 9: "epoch's last step"}.get(state.step))
                return loader.next()

        signals.append(stop)
        return train_step(trainer, Pausing(), lr, state, stop)

    def paused_save(*args):
        here("save")
        torch_save(*args)

    hellaswag_eval.score_batch = lambda *args: (here("hellaswag"), score_batch(*args))[1]
    evaluation.BatchLoader, train.train_step, torch.save = Loader, paused_step, paused_save


def trace_saves(rank: int) -> None:
    """Append to calls.txt, a line each, the calls by which saves become durable: their number, name and files."""

    def note(save: int, call: int, name: str, *files) -> None:
        with open("calls.txt", "a") as file:
            print(save, name, *(_path(file).name for file in files), file=file)

    _before_each_call(note)


def die_at(save: int, call: int, rank: int) -> None:
    """kill -9 in place of one of those calls; where it is a write, when that is half done."""

    def die(now_save: int, now_call: int, name: str, *files) -> None:
        if (now_save, now_call) == (save, call):
            if name == "write":
                os.write(files[0].fileno(), files[0].buffer[: files[0].used // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    _before_each_call(die)


def _before_each_call(do: Callable) -> None:
    """Have do(number of the save, of the call in it, its name, *files) done before each call of the saving thread."""
    save, call = 0, -1

    def intercepted(name: str, function: Callable) -> Callable:
        def wrapper(*args):
            nonlocal save, call
            if threading.current_thread().name.startswith("checkpoint"):
                save, call = (save + 1, 0) if name == "write" else (save, call + 1)
                do(save, call, name, *args)
            return function(*args)

        return wrapper

    for name in ("fsync", "link", "replace", "unlink"):
        setattr(os, name, intercepted(name, getattr(os, name)))
    UncachedFile._drain = intercepted("write", UncachedFile._drain)  # once a save, of a model this small


def _path(file) -> Path:
    number = file if isinstance(file, int) else getattr(file, "fileno", lambda: None)()
    return Path(file if number is None else os.readlink(f"/proc/self/fd/{number}"))
