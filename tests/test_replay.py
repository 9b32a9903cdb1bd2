"""Tests of replay.py: equal steps of killed and changed runs, differences that are named, and its errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import MODERN, TINY, fork, in_ranks, load, need_gpus, run_here, write_data
from ground import acting_here, metrics
from harness import run_program
from injected import do_in_step

import replay
import train
from replay import AS_RECORDED, main
from steadygpt import git_commit
from steadygpt.base.options import UserError
from steadygpt.base.text import counted

EVERY_2 = ("--checkpoint_freq", "2")
METRICS = Path("checkpoints/metrics.jsonl")


class Forked:
    """In place of subprocess.Popen for train.py: a process that has already imported torch."""

    def __init__(self, flags: Sequence[str], env: dict[str, str]):
        self.process = fork(run_program, "train", flags, dict(env), os.getcwd(), os.devnull, 0, ())
        self.pid, self.terminate = self.process.pid, self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Fork one process of train.py; several are started by torchrun, as for a user."""

    def start(command: Sequence[str], env: dict[str, str]):
        return Forked(command[2:], env) if Path(command[1]).name == "train.py" else subprocess.Popen(command, env=env)

    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(Popen=start))


@pytest.fixture(autouse=True)
def committed(tmp_path_factory, monkeypatch):
    """Let runs and replays find a commit without changed files, which promises bits."""
    git = tmp_path_factory.mktemp("bin") / "git"
    git.write_text("#!/bin/sh\necho c0ffee\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    git_commit.cache_clear()
    yield
    git_commit.cache_clear()


def contents() -> dict[Path, tuple[int, bytes]]:
    """Return time and content of each file of the working directory that is not a replay's."""
    files = [path for path in Path().rglob("*") if path.is_file() and not path.parts[0].startswith("replay-")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def replayed(workdir, capsys):
    """Return a function that runs the command and returns its status and its lines; it must leave all files alone."""

    def replayed(*flags: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        before = contents()
        status = main([*flags])
        assert contents() == before
        *lines, log = capsys.readouterr().out.splitlines()
        path = re.fullmatch(r"the log of the replay is (replay-\S+/log.txt); you can delete replay-\S+", log)[1]
        assert "stopped (SIGINT)" in Path(path).read_text() or "finished" in Path(path).read_text()
        return status, lines

    return replayed


def equal(origin: int, last: int, count: int | None = None) -> tuple[int, list[str]]:
    """Return status and lines of a replay from the rolling checkpoint of a step."""
    steps = counted(last - origin + 1, "step")
    if count:
        steps += f" ({count} logged)"
    return 0, [
        f"replayed from checkpoints/rolling_step_{origin:06d}.pt: {AS_RECORDED}",
        f"steps {origin} to {last}: repeated {steps}, bit for bit the same losses",
    ]


class Killed(Exception): ...


def kill(rank: int, step: int) -> None:
    def killing() -> None:
        raise Killed

    do_in_step(step, killing, rank)


def killed_before(step: int, *flags: str) -> None:
    """Train until just before a step, without a last save."""
    with acting_here(partial(kill, step=step)), suppress(Killed):
        run_here(*flags)


def rewrite_lines(change) -> None:
    """Change the lines of metrics.jsonl, each a dictionary."""
    lines = [json.loads(line) for line in METRICS.read_text().splitlines()]
    for line in lines:
        change(line)
    METRICS.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# ---------------------------------------------------------------------------------------------------------------------
# equal


def test_steps_of_each_start_of_a_killed_run_are_replayed(replayed):
    flags = ("--dropout", "0.1", "--eval_freq", "4", *EVERY_2)
    killed_before(5, *flags)
    assert run_here(*flags, "--resume") == 0
    assert replayed("--step", "3") == equal(2, 3)
    assert replayed("--steps", "4:7") == equal(4, 7)
    crosses = (
        r"metrics.jsonl: the launch at step 0 has records of steps 0 to 3, not of step 6; choose recorded steps of one"
    )
    with pytest.raises(UserError, match=crosses):
        main(["--steps", "3:6"])


def test_a_run_whose_options_batch_and_mixture_changed_is_replayed_after_the_changes(replayed, workdir):
    write_data(workdir / "more", seed=1)
    assert run_here("--max_steps", "3", *EVERY_2) == 0
    mix = ("--mix", "data:1,m=more:2", "--total_batch_size", "96", "--max_lr", "1e-2", "--dropout", "0.1")
    assert train.main([*TINY, "--resume", "--allow_changes", *mix, "--max_steps", "8", *EVERY_2]) == 0
    assert replayed("--steps", "5:7") == equal(4, 7)


@pytest.mark.parametrize("flags", [
    [*MODERN, "--precision", "bf16", "--dropout", "0.1", "--schedule", "wsd"], ["--precision", "fp16"],
    ["--max_lr", "1e30", "--grad_clip", "0", "--max_bad_steps", "0"],
], ids=["modern", "fp16", "infinite losses"])  # fmt: skip
def test_other_models_precisions_and_bad_steps_are_replayed(replayed, flags):
    assert run_here(*flags, *EVERY_2) == 0
    assert (None in metrics("checkpoints", "loss").values()) == ("1e30" in flags)
    assert replayed("--steps", "2:7") == equal(2, 7)


def test_steps_that_a_run_has_undone_are_not_compared(replayed):
    assert run_here(*EVERY_2) == 0
    again = ("--resume", "checkpoints/rolling_step_000004.pt", "--allow_changes", "--max_lr", "1e-2")
    killed_before(7, *again, *EVERY_2)
    assert load("checkpoints/rolling_step_000008.pt")["step"] == 8  # of the first launch
    assert replayed("--step", "5") == equal(4, 5)


def test_only_recorded_steps_are_compared(replayed):
    assert run_here("--log_freq", "2", *EVERY_2) == 0
    assert replayed("--steps", "4:7") == equal(4, 7, count=3)  # 4, 6 and the last one


def train_on_ranks(folder: Path, path: str) -> int:
    os.chdir(folder)
    os.environ["PATH"] = path  # the server of forked processes may be older than the test
    return run_here("--max_steps", "12", *EVERY_2, "--keep_checkpoints", "99")


@pytest.mark.storm  # torchrun's second start takes most of ten seconds
def test_a_run_on_two_ranks_is_replayed_on_two(replayed, workdir):
    need_gpus(2)
    in_ranks(2, train_on_ranks, workdir, os.environ["PATH"])
    assert replayed("--steps", "2:3") == equal(2, 3)


# ---------------------------------------------------------------------------------------------------------------------
# different


def test_a_number_changed_in_the_records_is_named(replayed):
    assert run_here(*EVERY_2) == 0
    true = metrics("checkpoints", "loss")[5]

    def change(line: dict) -> None:
        if line["step"] == 5 and "loss" in line:
            line["loss"] = 5.25

    rewrite_lines(change)
    status, lines = replayed("--steps", "2:7")
    assert (status, lines[1]) == (1, f"steps 2 to 7: repeated step 5 has loss {true!r}, but had 5.25 before")
    assert replayed("--steps", "2:4") == equal(2, 4)


def test_a_flipped_bit_in_a_checkpoint_changes_the_steps_after_it(replayed):
    assert run_here(*EVERY_2) == 0
    path = Path("checkpoints/rolling_step_000006.pt")
    checkpoint = load(path)
    checkpoint["model"]["h.1.mlp.c_fc.weight"].view(torch.int32)[3, 7] ^= 1 << 22
    path.unlink()  # other names keep their content
    torch.save(checkpoint | {"digests": {}}, path)  # with a valid checksum
    status, lines = replayed("--step", "7")
    assert status == 1
    assert lines[1].startswith("steps 6 to 7: repeated step 6 has loss ")


@pytest.mark.parametrize(("factor", "expected"), [
    (1.001, (0, "losses within 0.001 of those before")),
    (1.05, (1, "more than the 0.005 (relative) that are usual without --deterministic")),  # as of another data order
])  # fmt: skip
def test_a_record_of_another_machine_is_named_and_its_difference_is_measured(replayed, factor, expected):
    assert run_here(*EVERY_2) == 0

    def change(line: dict) -> None:
        if "how" in line:
            line["how"] |= {"device": "NVIDIA A100", "torch": "2.9.0"}
        elif line["step"] == 5 and "loss" in line:
            line["loss"] *= factor

    rewrite_lines(change)
    status, lines = replayed("--step", "5")
    assert (status, expected[1] in lines[1]) == (expected[0], True)
    assert re.search(r": device NVIDIA A100 -> .*, torch 2\.9\.0 -> [\d.+a-z]+$", lines[0])


# ---------------------------------------------------------------------------------------------------------------------
# errors


def test_a_bit_flipped_in_a_shard_ends_the_replay(workdir):
    assert run_here(*EVERY_2) == 0
    path = workdir / "data/tiny_train_000002.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        UserError,
        match=r"train\.py has not taken steps 3 to 3 in replay-3-3-\S+; it ended with exit status 2, and its messages",
    ):
        main(["--step", "3"])


def test_steps_without_a_checkpoint_or_a_record_are_refused(workdir):
    assert run_here(*EVERY_2) == 0
    for step in (2, 4):
        Path(f"checkpoints/rolling_step_00000{step}.pt").unlink()
    left = r"checkpoints: the launch at step 0 has left no checkpoint of step 5 or before it; choose steps after its"
    with pytest.raises(UserError, match=left):
        main(["--step", "5"])
    METRICS.unlink()
    with pytest.raises(
        UserError, match=r"checkpoints/metrics.jsonl: no record of step 6; choose other steps, or restore"
    ):
        main(["--step", "6"])


def test_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="starts torchrun itself"):
        main(["--step", "3"])


def test_an_interrupt_ends_the_child(tmp_path, monkeypatch):
    children = []
    popen = replay.subprocess.Popen

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    def start(*args, **options):
        children.append(popen(*args, **options))
        return children[0]

    monkeypatch.setattr(replay.subprocess, "Popen", start)
    monkeypatch.setattr(replay.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replay.train_until(3, tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"], {})
    assert children[0].poll() is not None
