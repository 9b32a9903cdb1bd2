"""Recorders and faults to pass to a Run: each is called in every rank's process, with the rank, before main()."""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hellaswag_eval as scores
import train
from steadygpt.base.durable import UncachedFile
from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.data import tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# where recorders and faults hook into training


def around_step(
    before: Callable | None = None, next_batch: Callable | None = None, after: Callable | None = None
) -> None:
    """Install callbacks around train.train_step; no other function here depends on its signature.

    Args:
        before: before(step, stop), called at the start of each step.
        next_batch: next_batch(step, batches), called in place of batches.next().
        after: after(step, model), called when a step is complete, but not when a stop interrupted it.
    """
    train_step = train.train_step

    def wrapped_step(run, batches):
        step = run.state.step
        if before:
            before(step, run.guard.stop)
        wrapped = SimpleNamespace(next=lambda: next_batch(step, batches)) if next_batch else batches
        result = train_step(run, wrapped)  # raises Stopped when interrupted
        if after:
            after(step, run.model)
        return result

    train.train_step = wrapped_step


def before_validation_batch(do: Callable[[], None]) -> None:
    """Call do() before each validation batch. Only those are read while gradients are disabled."""
    next_batch = train.BatchLoader.next

    def wrapped_next(loader):
        if not torch.is_grad_enabled():
            do()
        return next_batch(loader)

    train.BatchLoader.next = wrapped_next


def around_save_calls(do: Callable) -> None:
    """Call do(save, call, name, *files) before each system call of the saving thread.

    Saves are numbered from 1, the calls of a save from 0. An fsync in another thread calls do(0, 0, "fsync", file).
    """
    save, call = 0, -1

    def intercepted(name: str, function: Callable) -> Callable:
        def wrapper(*args):
            nonlocal save, call
            if threading.current_thread().name.startswith("checkpoint"):
                save, call = (save + 1, 0) if name == "write" else (save, call + 1)
                do(save, call, name, *args)
            elif name == "fsync":
                do(0, 0, name, *args)
            return function(*args)

        return wrapper

    for name in ("fsync", "link", "replace", "unlink"):
        setattr(os, name, intercepted(name, getattr(os, name)))
    UncachedFile._drain = intercepted("write", UncachedFile._drain)  # called once per save of a model this small


@contextlib.contextmanager
def acting_here(*faults: Callable[[int], None]) -> Iterator[None]:
    """Let faults act on the runs of this process, as on rank 0, up to the end of the block."""
    hooks = [(train, "train_step"), (train, "Results"), (train.GPT, "forward"), (train.BatchLoader, "next")]
    hooks += [(torch, "save"), (torch, "compile")]
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in hooks:
            patched.setattr(owner, name, getattr(owner, name))  # at the end, this undoes what a fault puts there
        for fault in faults:
            fault(0)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# recorders


def record_weights(rank: int) -> None:
    """Append [step, rank, hash of the weights] to weights.jsonl after each completed step."""

    def record(step, model):
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
        with open("weights.jsonl", "a") as file:
            file.write(json.dumps([step, rank, digest.hexdigest()]) + "\n")

    around_step(after=record)


def weights_of_steps() -> dict[tuple[int, int], str]:
    """Return (step, rank) -> hash of the weights after the step."""
    lines = map(json.loads, Path("weights.jsonl").read_text().splitlines())
    return {(step, rank): digest for step, rank, digest in lines}


def record_save_calls(rank: int) -> None:
    """Append one line to calls.txt for each system call that makes saves durable: save, call, file names."""

    def record(save: int, call: int, name: str, *files) -> None:
        with open("calls.txt", "a") as file:
            print(save, name, *(_path(file).name for file in files), file=file)

    around_save_calls(record)


def _path(file) -> Path:
    number = file if isinstance(file, int) else getattr(file, "fileno", lambda: None)()
    return Path(file if number is None else os.readlink(f"/proc/self/fd/{number}"))


# ---------------------------------------------------------------------------------------------------------------------
# faults


def kill_at(save: int, call: int, rank: int) -> None:
    """Replace one system call of a save by kill -9; a write is killed after half of its bytes."""

    def kill(now_save: int, now_call: int, name: str, *files) -> None:
        if (now_save, now_call) == (save, call):
            if name == "write":
                os.write(files[0].fileno(), files[0].buffer[: files[0].buffer.tell() // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    around_save_calls(kill)


def do_in_step(step: int, do: Callable[[], object], rank: int) -> None:
    """Call do() at the start of a step."""
    around_step(before=lambda now, stop: now == step and do())


def signal_at(step: int, rank: int, number: int = signal.SIGTERM) -> None:
    """Send the process a signal at the start of a step: SIGTERM stops the run after `step` steps."""
    do_in_step(step, lambda: os.kill(os.getpid(), number), rank)


def wait_in_step(step: int, rank: int) -> None:
    """Wait a minute at the start of a step, for a signal."""
    do_in_step(step, lambda: time.sleep(60), rank)


def raise_in_step(step: int, which_rank: int, rank: int) -> None:
    """Raise an exception on one rank in the middle of a step."""

    def failing_batch(now, batches):
        batch = batches.next()
        if (now, rank) == (step, which_rank):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return batch

    around_step(next_batch=failing_batch)


def bad_numbers(steps: Sequence, kind: str, which_rank: int, rank: int) -> None:
    """Make the loss or gradient of one rank NaN, infinite or large in some steps; "validation" counts as a step."""
    forward, now = train.GPT.forward, []

    def bad_forward(model, *args, **kwargs):
        terms = forward(model, *args, **kwargs)
        if not now:  # the plan counts the memory of a step
            return terms
        if rank != which_rank or (now[-1] if model.training else "validation") not in steps:
            return terms
        loss = terms["loss"]
        if kind.endswith("gradient"):
            loss.register_hook(lambda gradient: gradient * float(kind.split()[0]))
            return terms
        return {"loss": {"nan loss": loss * math.nan, "inf loss": loss + math.inf, "large loss": loss * 3}[kind]}

    around_step(before=lambda step, stop: now.append(step))
    train.GPT.forward = bad_forward


def flip_bit(step: int, which_rank: int, name: str, kind: str, rank: int) -> None:
    """Flip a bit of a weight, or of a kind of the optimizer's state for it, on one rank, after a step."""
    take_step = train.train_step

    def flipping(run, batches):
        result = take_step(run, batches)
        if (run.state.step, rank) == (step + 1, which_rank):
            weight = run.model.get_parameter(name)
            tensor = run.optimizer.state[weight][kind] if kind else weight.detach()
            getattr(tensor, "to_local", lambda: tensor)().view(-1).view(torch.int32)[0] ^= 1 << 12
        return result

    train.train_step = flipping


def fail_save(number: int, error: Exception, rank: int) -> None:
    """Make one save fail, counted from 0."""
    save, numbers = torch.save, itertools.count()

    def failing_save(*args):
        if next(numbers) == number:
            raise error
        save(*args)

    torch.save = failing_save


def fail_reads(name: str, number: int, end: bool, rank: int) -> None:
    """Make reads of files of this name fail with an errno: those within the last 100 bytes, or those before them."""

    class FailingFile(io.FileIO):
        def read(self, size=-1):
            if (self.tell() >= os.stat(self.fileno()).st_size - 100) == end:
                raise OSError(number, os.strerror(number))
            return super().read(size)

        def readall(self):
            return self.read(2**30)

        def readinto(self, buffer):
            data = self.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)

    real = files.open_to_read

    def opened(path: Path):
        return io.BufferedReader(FailingFile(path)) if path.name == name else real(path)

    files.open_to_read = opened


def no_tokenizer(which_rank: int, rank: int) -> None:
    """Make the tokenizer of samples and HellaSwag unavailable on one rank."""

    tokenizer_on_all = train.tokenizer_on_all

    def fail(record):
        raise UserError(f"the vocabulary of {record.tokenizer!r} could not be downloaded")

    def failing(*args):
        if rank == which_rank:
            tokenizer.load_tokenizer = fail
        return tokenizer_on_all(*args)

    train.tokenizer_on_all = failing


def pause_before_training(rank: int) -> None:
    """Print "building" before the model is built, and wait for a signal."""
    build_model = train.build_model

    def paused_build(*args):
        print("building", flush=True)
        time.sleep(60)
        return build_model(*args)

    train.build_model = paused_build


def pause(moment: str, expire: bool, rank: int) -> None:
    """Print "paused in MOMENT" once and wait for a signal; with `expire`, let --max_hours pass instead."""
    stops, paused, last_rank = [], [], int(os.environ.get("WORLD_SIZE", "1")) - 1
    torch_save, score_batch = torch.save, scores.score_batch

    def here(where: str | None) -> None:
        if where == moment and not paused and rank == (0 if moment == "save" else last_rank):
            paused.append(where)
            print(f"paused in {moment}", flush=True)
            stops[0].deadline = 0 if expire else math.inf
            # Rank 0 saves, but the signal may go to another rank: a pause in a save therefore ends after 2 s.
            for _ in range(200 if moment == "save" else 1000):
                if not expire and not stops[0].asked:
                    time.sleep(0.01)

    def paused_batch(step, batches):
        here({3: "micro-step", 9: "last step of an epoch"}.get(step))
        return batches.next()

    def paused_save(*args):
        here("save")
        torch_save(*args)

    def paused_score(*args):
        here("hellaswag")
        return score_batch(*args)

    around_step(before=lambda step, stop: stops.append(stop), next_batch=paused_batch)
    before_validation_batch(lambda: here("evaluation"))
    torch.save, scores.score_batch = paused_save, paused_score
