"""What tests put into a Life: recorders and faults, each called in a rank, with its number, before main()."""

import errno
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import evaluation
import torch

import hellaswag_eval
import train
from steadygpt.durable import UncachedFile


def record_tokens(rank: int) -> None:
    """Append to tokens.jsonl the step, the rank and its rows' hashes of each step that is computed to its end."""
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


def stop_after(steps: int, rank: int, number: int = signal.SIGTERM) -> None:
    """Have a signal come when so many steps are made."""
    train_step = train.train_step

    def stopping_step(trainer, loader, lr, state, stop):
        if state.step == steps:
            os.kill(os.getpid(), number)
        return train_step(trainer, loader, lr, state, stop)

    train.train_step = stopping_step


def fail_saves(first: int, count: int, rank: int) -> None:
    """Let `count` saves fail from the `first` on (from 0), as on a full disk."""
    save, number = torch.save, [0]

    def failing_save(*args):
        number[0] += 1
        if first < number[0] <= first + count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*args)

    torch.save = failing_save


def raise_in_step(step: int, which_rank: int, rank: int) -> None:
    """Let a rank fail in the middle of a step."""
    train_step = train.train_step

    def failing_step(trainer, loader, lr, state, stop):
        if (state.step, rank) == (step, which_rank):
            loader.next()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return train_step(trainer, loader, lr, state, stop)

    train.train_step = failing_step


def pause(moment: str, expire: bool, rank: int) -> None:
    """Say "paused in MOMENT" and wait, once, until a signal has come; or let --max_hours be over."""
    signals, paused, last_rank = [], [], int(os.environ.get("WORLD_SIZE", "1")) - 1
    train_step, torch_save, score_batch = train.train_step, torch.save, hellaswag_eval.score_batch

    def here(where: str) -> None:
        if where == moment and not paused and rank == (0 if moment == "save" else last_rank):
            paused.append(where)
            print(f"paused in {moment}", flush=True)
            signals[0].deadline = 0 if expire else math.inf
            for _ in range(100 if moment == "save" else 1000):  # of a save another rank may be signalled
                if not expire and not signals[0].asked:
                    time.sleep(0.01)

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
    """Append to calls.txt, a line each, the calls by which saves become durable: save, name and files."""

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
    """Have do(save, call, name, *files) done before each call of the saving thread; saves count from 1, calls from 0.

    And do(0, 0, "fsync", file) before each fsync of other threads.
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
    UncachedFile._drain = intercepted("write", UncachedFile._drain)  # once a save, of a model this small


def _path(file) -> Path:
    number = file if isinstance(file, int) else getattr(file, "fileno", lambda: None)()
    return Path(file if number is None else os.readlink(f"/proc/self/fd/{number}"))
