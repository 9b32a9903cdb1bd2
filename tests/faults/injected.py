"""Recorders and faults to pass to a Run: each is called in every rank's process, with the rank, before main()."""

import errno
import hashlib
import io
import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ground import (
    around_model,
    around_save_calls,
    around_start_calls,
    around_step,
    around_write,
    before_task_batch,
    before_validation_batch,
    change_loss,
    load_tokenizer_by,
    open_checkpoints_by,
    write_half,
)

from steadygpt.base.options import UserError

# ---------------------------------------------------------------------------------------------------------------------
# recorders


def record_weights(rank: int) -> None:
    """Append [step, rank, hash of the weights] to weights.jsonl after each completed step."""

    def record(step, model, optimizer):
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
            print(save, name, *(_path(file).name for file in files if not isinstance(file, memoryview)), file=file)

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
                write_half(*files)
            os.kill(os.getpid(), signal.SIGKILL)

    around_save_calls(kill)


def kill_in_start(call: int, rank: int) -> None:
    """Replace a system call between the start of a launch and its first record by kill -9; see around_start_calls()."""

    def kill(now: int, name: str, *files) -> None:
        if now == call:
            if name == "write":
                write_half(*files)
            os.kill(os.getpid(), signal.SIGKILL)

    around_start_calls(kill)


def do_in_step(step: int, do: Callable[[], object], rank: int) -> None:
    """Call do() at the start of a step."""
    around_step(before=lambda now, stop: now == step and do())


def no_links(rank: int) -> None:
    """Let the file system have no hard links."""

    def fail(*_) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.link = fail


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
    now = []

    def change(model, terms: dict) -> dict:
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
    change_loss(change)


def fail_save(number: int, error: Exception, rank: int) -> None:
    """Make one save fail, counted from 0."""

    def failing(now: int, write: Callable) -> None:
        if now == number:
            raise error
        write()

    around_write(failing)


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

    def opened(path: Path, open_file: Callable):
        return io.BufferedReader(FailingFile(path)) if path.name == name else open_file(path)

    open_checkpoints_by(opened)


def no_tokenizer(which_rank: int, rank: int) -> None:
    """Make the tokenizer of samples and HellaSwag unavailable on one rank."""

    def fail(record):
        raise UserError(f"the vocabulary of {record.tokenizer!r} could not be downloaded")

    if rank == which_rank:
        load_tokenizer_by(fail)


def pause_before_training(rank: int) -> None:
    """Print "building" before the model is built, and wait for a signal."""

    def wait() -> None:
        print("building", flush=True)
        time.sleep(60)

    around_model(before=wait)


def pause(moment: str, expire: bool, rank: int) -> None:
    """Print "paused in MOMENT" once and wait for a signal; with `expire`, let --max_hours pass instead."""
    stops, paused, last_rank = [], [], int(os.environ.get("WORLD_SIZE", "1")) - 1

    def here(where: str | None) -> None:
        if where == moment and not paused and rank == (0 if moment == "save" else last_rank):
            paused.append(where)
            print(f"paused in {moment}", flush=True)
            if expire:
                stops[0].pass_deadline()
            # Rank 0 saves, but the signal may go to another rank: a pause in a save therefore ends after 2 s.
            for _ in range(200 if moment == "save" else 1000):
                if not expire and not stops[0].asked:
                    time.sleep(0.01)

    def paused_batch(step, batches):
        here({3: "micro-step", 9: "last step of an epoch"}.get(step))
        return batches.next()

    def paused_write(number: int, write: Callable) -> None:
        here("save")
        write()

    around_step(before=lambda step, stop: stops.append(stop), next_batch=paused_batch)
    before_validation_batch(lambda: here("evaluation"))
    before_task_batch(lambda: here("hellaswag"))
    around_write(paused_write)
