"""Runs that are interrupted, resumed and moved to other processes end as one uninterrupted run ends.

A row of a table is a recipe and the launches of the run, in order; its reference is one launch with the same recipe.
"""

import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import FSDP, MODERN, TINY, folders, load, write_data
from ground import acting_here, assert_same_state, before_validation_batch, metrics, verified
from harness import Run, assert_equals_reference
from injected import bad_numbers, signal_at, wait_in_step

import train


class Launch(NamedTuple):
    """One start of a run: flags after those of the recipe, faults, and how it ends."""

    flags: tuple[str, ...] = ()
    ranks: int = 1
    faults: tuple[Callable[[int], None], ...] = ()
    status: int = 0
    step: int | None = None  # of latest.pt at the end
    killed: tuple[int, int] | None = None  # a saved step, and one that waits for kill -9 of all ranks
    before: Callable[[Path], object] = lambda folder: None  # called with the folder of the run


def end(*flags: str, **more) -> Launch:
    """A start that trains to the end."""
    return Launch(flags, **more)


def stop(step: int, *flags: str, **more) -> Launch:
    """A start that SIGTERM stops after `step` steps."""
    return Launch(flags, faults=(partial(signal_at, step),), step=step, **more)


def kill(step: int, *flags: str, saved: int, **more) -> Launch:
    """A start that is killed by kill -9 in a step, once an earlier one is saved."""
    return Launch(flags, faults=(partial(wait_in_step, step),), status=-signal.SIGKILL, killed=(saved, step), **more)


def take(start: Launch, recipe: Sequence[str], name: str) -> None:
    """Take a launch of the run in the folder `name`: in this process, if it has one rank and is not killed."""
    start.before(Path(name))
    flags = [*recipe, *folders(name), "--resume", "auto", *start.flags]
    tiny = TINY if "--mix" in flags else [*TINY, "--data_dir", "data"]
    if start.ranks == 1 and not start.killed:
        with acting_here(*start.faults):
            assert train.main([*tiny, *flags]) == start.status
    else:
        run = Run(*flags, ranks=start.ranks, faults=start.faults, tiny=tiny)
        if start.killed:
            saved, step = start.killed
            run.wait_for(f"^saved step {saved} as")
            run.wait_for(f"^step +{step - 1}/")
            run.kill()
        assert run.wait() == [start.status] * start.ranks, run.text()
    if start.step is not None:
        later = start.ranks > 1  # ranks agree to stop one micro-step later
        latest = verified(f"{name}/latest.pt")  # a damaged one would be skipped by the next launch
        assert latest["step"] in range(start.step, start.step + later + 1)


REFERENCES: dict[str, Path] = {}  # of this session


@pytest.fixture
def run_beside_its_reference(tmp_path_factory, monkeypatch, request) -> Callable[..., str]:
    """Return a function that makes a run in a folder with its reference, which rows share, and returns its name."""

    def make(recipe: Sequence[str], launches: Sequence[Launch], reference: Sequence[Launch]) -> str:
        if (key := repr((recipe, reference))) not in REFERENCES:
            monkeypatch.chdir(folder := tmp_path_factory.mktemp("runs"))
            write_data(folder / "data")
            for seed, source in enumerate("abc"):
                write_data(folder / source, num_tokens=(200, 900 + 100 * seed), seed=seed)
            for start in reference:
                take(start, recipe, "reference")
            REFERENCES[key] = folder
        monkeypatch.chdir(REFERENCES[key])
        name = request.node.callspec.id
        for start in launches:
            take(start, recipe, name)
        return name

    return make


def row(what: str, recipe: Sequence[str], *launches: Launch, of: Sequence[Launch] = (end(),), storm: bool = False):
    """A row of a table; `of` are the launches of the reference."""
    return pytest.param(recipe, launches, of, id=what, marks=pytest.mark.storm if storm else ())


# ---------------------------------------------------------------------------------------------------------------------
# the same bits

GPT2 = ("--dropout", "0.1", "--eval_freq", "4")
LONG = ("--dropout", "0.1", "--eval_freq", "12", "--max_steps", "24", "--checkpoint_freq", "6")
RMSNORM = (*MODERN, "--norm", "rmsnorm_no_weight", "--activation", "relu2")
STABLE = (*MODERN, "--cooldown", "0.5", "--max_steps", "12")
MIXED = (*GPT2, "--allow_changes", "--max_steps", "4", "--mix", "a:7,b:3")
TO_8, TO_12 = ("--max_steps", "8", "--mix", "b:1,c:1"), ("--max_steps", "12", "--mix", "a:1,b:4,c:2")


# DDP on three ranks and more: sums of three numbers have an order, which follows from the buckets.
DDP = (*GPT2, "--max_steps", "12", "--total_batch_size", "384")


def stop_in_validation(rank: int) -> None:
    before_validation_batch(lambda: os.kill(os.getpid(), signal.SIGTERM))


nan_from_5 = partial(bad_numbers, range(5, 100), "nan loss", 0)
nan_on_rank_1 = partial(bad_numbers, range(5, 100), "nan gradient", 1)


@pytest.mark.parametrize(("recipe", "launches", "of"), [
    row("stop before the first step", GPT2, end("--max_hours", "1e-9", step=0), end("--max_hours", "0")),
    row("stop", GPT2, stop(3), stop(4), end()),
    row("stop in the last evaluation", ("--eval_freq", "8"), end(faults=(stop_in_validation,), step=8), end()),
    row("kill -9", LONG, kill(17, saved=12), end(), storm=True),
    row("kill -9 of 2 ranks", LONG, kill(17, saved=12, ranks=2), end(ranks=2), of=[end(ranks=2)]),
    row("stop of 3 ranks", DDP, stop(6, ranks=3), end(ranks=3), of=[end(ranks=3)]),
    row("kill -9 of 4 ranks, bf16", (*DDP, "--precision", "bf16"), kill(9, saved=7, ranks=4), end(ranks=4),
        of=[end(ranks=4)], storm=True),
    row("kill -9 of 3 ranks, modern", (*DDP, *MODERN), kill(9, saved=7, ranks=3), end(ranks=3), of=[end(ranks=3)],
        storm=True),
    row("fsdp on 3 ranks", (*DDP, *FSDP), stop(6, ranks=3), end(ranks=3), of=[end(ranks=3)], storm=True),
    row("stop of 3 ranks, compiled", (*DDP, "--compile", "on"), stop(6, ranks=3), end(ranks=3), of=[end(ranks=3)],
        storm=True),
    row("fp16", ("--precision", "fp16"), stop(4), end()),
    row("modern", MODERN, stop(3), end(), storm=True),
    row("modern, bf16", (*MODERN, "--precision", "bf16"), stop(3), end()),
    row("modern, norms without weights", RMSNORM, stop(3), end(), storm=True),
    row("extended from stable.pt", STABLE, end("--max_steps", "8", step=8), end("--resume", "stable")),
    row("moved and moved back", GPT2, stop(3),
        Launch(folders("elsewhere"), faults=(partial(signal_at, 6),), before=lambda folder: folder.rename("elsewhere")),
        end(before=Path("elsewhere").rename)),
    row("moved data", GPT2, stop(3), end("--data_dir", "moved", before=lambda _: shutil.copytree("data", "moved"))),
    row("too many bad steps", GPT2, end("--max_bad_steps", "3", faults=(nan_from_5,), status=1, step=5), end()),
    row("too many bad steps on 2 ranks", LONG,
        end("--max_bad_steps", "3", faults=(nan_on_rank_1,), status=1, step=5, ranks=2), end(ranks=2),
        of=[end(ranks=2)], storm=True),
    row("a mixture that changes twice", MIXED, stop(3), end(), stop(6, *TO_8), end(*TO_8), stop(9, *TO_12), end(*TO_12),
        of=[end(), end(*TO_8), end(*TO_12)]),
    row("one source with a weight", (), end("--mix", "a:3"), of=[end("--data_dir", "a")]),
    row("fsdp on one process", GPT2, end(*FSDP), storm=True),
])  # fmt: skip
def test_a_run_ends_with_the_bits_of_its_reference(run_beside_its_reference, recipe, launches, of):
    name = run_beside_its_reference(recipe, launches, of)
    assert_equals_reference(name, "loss", "grad_norm", "lr", "loss_z", "val_loss", "val_bpb")
    one, other = (load(f"{folder}/latest.pt") for folder in ("reference", name))
    for key in ("loss", "scores", "recent_losses", "bad_steps", "scaler"):
        assert one[key] == other[key], key
    for file in ("best_model.pt", "stable.pt"):
        if Path("reference", file).exists():
            assert_same_state(load(f"reference/{file}"), load(f"{name}/{file}"))
    log = Path(name, "log.txt").read_text()
    assert "warning: resumed at" not in log  # bad steps, which were logged before the save, are not compared
    for start in launches:
        if start.killed:
            repeated = rf"^resumed at step {start.killed[0]}: repeated \d+ steps?, bit for bit the same losses$"
            assert re.search(repeated, log, re.MULTILINE)


# ---------------------------------------------------------------------------------------------------------------------
# the same up to rounding: sums in another order

EVALUATED = ("--eval_freq", "4", "--eval_tokens", "112")
FOUR = (*EVALUATED, "--mini_batch_size", "1", "--dropout", "0.1")
LONG_CONTEXT = (*EVALUATED, "--rotary_pct", "0.5", "--parallel_residual", "--tied_head", "off")  # as in small_32k.toml
LESS_MEMORY = ("--activation_checkpointing", "--loss_chunk_size", "12")
ONE_LAYER = (*LESS_MEMORY, *"--num_layers 1 --rotary_pct 0.5 --max_steps 30 --total_batch_size 128".split())
HYBRID = (*FSDP, "--mini_batch_size", "1", "--shard_size", "2")  # 2 copies on 2 ranks each
NO_FSDP = ("--sharding", "ddp", "--shard_size", "0")


def compile_with(backend: str, rank: int) -> None:
    """Choose what runs the graphs of torch.compile: inductor, the default, or the kernels of eager mode."""
    torch.compile = partial(torch.compile, backend=backend)


def compiled(backend: str) -> list[Launch]:
    """Starts that are eager, compiled and eager; inductor calls a C++ compiler for each kernel."""
    second = Launch(("--compile", "on"), faults=(partial(signal_at, 20), partial(compile_with, backend)), step=20)
    return [stop(10), second, end("--compile", "off")]


@pytest.mark.parametrize(("recipe", "launches", "of"), [
    row("2 ranks and 1", EVALUATED, stop(4, ranks=2), end()),
    row("4 ranks, 2 and 1, dropout", FOUR, kill(7, saved=4, ranks=4), stop(6, ranks=2), end()),
    row("fsdp, hybrid, 1 rank", EVALUATED,
        stop(3, *FSDP, ranks=2), stop(6, *HYBRID, ranks=4), end(*NO_FSDP), storm=True),
    row("modern, fsdp, hybrid, 1 rank", (*EVALUATED, *MODERN),
        stop(3, *FSDP, ranks=2), stop(6, *HYBRID, ranks=4), end(*NO_FSDP), storm=True),
    row("modern, fsdp, 1 rank", (*EVALUATED, *MODERN), stop(3, *FSDP, ranks=2), end(*NO_FSDP)),
    row("modern, 3 ranks", (*EVALUATED, *MODERN, "--total_batch_size", "96"), end(ranks=3),
        storm=True),
    row("long context, ddp and fsdp", LONG_CONTEXT,
        stop(4, *LESS_MEMORY, ranks=2), end(*LESS_MEMORY, *FSDP, ranks=2), storm=True),
    row("larger micro-batches", ("--total_batch_size", "128", "--mini_batch_size", "1"), end("--mini_batch_size", "8")),
    row("30 steps on 1, 2 and 1 ranks", ("--max_steps", "30"), stop(10), stop(20, ranks=2), end(), storm=True),
    row("aot_eager", ONE_LAYER, *compiled("aot_eager"), storm=True),
    row("inductor", ONE_LAYER, *compiled("inductor"), storm=True),
])  # fmt: skip
def test_a_run_ends_close_to_its_reference(run_beside_its_reference, recipe, launches, of):
    name = run_beside_its_reference(recipe, launches, of)
    for key in ("loss", "grad_norm", "val_loss", "val_bpb"):
        assert metrics(f"{name}", key) == pytest.approx(metrics("reference", key), abs=1e-5), key
    expected, found = (load(f"{folder}/latest.pt") for folder in ("reference", name))
    assert (found.keys(), found["rows_consumed"]) == (expected.keys(), expected["rows_consumed"])
    torch.testing.assert_close(found["model"], expected["model"], atol=1e-6, rtol=0)
    torch.testing.assert_close(found["optimizer"], expected["optimizer"], atol=1e-5, rtol=1e-5)
    tied = [saved["model"]["wte.weight"].data_ptr() == saved["model"]["lm_head.weight"].data_ptr()
            for saved in (expected, found)]  # fmt: skip
    assert tied[0] == tied[1]  # a tied weight is saved once
