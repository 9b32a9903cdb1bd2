"""Stops by signal, by --max_hours and by the loss of a rank: one save of the same step on all ranks, then a resume."""

import json
import os
import re
import signal
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from conftest import MODERN, load
from harness import LaunchedRun, Run, assert_equals_reference, folders, reference_run
from injected import pause, pause_before_training, raise_in_step, record_tokens, tokens_of_steps

FLAGS = (
    "--total_batch_size 128 --max_steps 14 --checkpoint_freq 6 --eval_freq 6 --hellaswag_freq 6 --dropout 0.1"
).split()
# When the signal comes -> the first and the last step after which one rank may stop. Training continues during a save.
# Two ranks agree one micro-step later, of which a step has two.
MOMENTS = {
    "micro-step": (3, 3),
    "evaluation": (6, 6),
    "save": (6, 10),
    "hellaswag": (6, 6),
    "last step of an epoch": (9, 9),
}
SIGNALS = ("SIGTERM", "SIGINT", "SIGINT twice", "SIGUSR1", "SIGHUP", "max_hours")


@pytest.fixture(scope="module")
def setting(request, tmp_path_factory):
    """A number of ranks and the flags of a recipe; the working folder has their uninterrupted run in "reference"."""
    count, recipe = request.param
    examples = tmp_path_factory.mktemp("examples") / "hs.jsonl"
    example = {"ctx": "A man", "endings": ["sits.", "flies away.", "is a.", "of."], "label": 0}
    examples.write_text(json.dumps(example) + "\n" + json.dumps(example | {"label": 3}) + "\n")
    flags = (*recipe, "--eval_tasks", f"hellaswag={examples}")
    with reference_run(tmp_path_factory, *FLAGS, *flags, ranks=count, faults=[record_tokens]):
        yield count, flags


def cases():
    """Yield each signal at each moment on 1 and 2 ranks; one moment per signal runs outside the fault storm.

    With the recipe of --config modern, one moment per signal runs in the storm.
    """
    for ranks, (number, name), (index, moment) in product((1, 2), enumerate(SIGNALS), enumerate(MOMENTS)):
        fast = (number + ranks) % len(MOMENTS) == index
        marks = () if fast else pytest.mark.storm
        yield pytest.param((ranks, ()), name, moment, id=f"{name} in {moment}, {ranks} ranks", marks=marks)
        if fast:
            case = f"{name} in {moment}, {ranks} ranks, modern"
            yield pytest.param((ranks, tuple(MODERN)), name, moment, id=case, marks=pytest.mark.storm)


@pytest.mark.parametrize(("setting", "name", "moment"), list(cases()), indirect=["setting"])
def test_a_stop_saves_once_and_can_be_resumed(setting, name, moment):
    ranks, recipe = setting
    folder = f"{name} in {moment}, {ranks}"
    tokens_before = len(tokens_of_steps())
    faults = [record_tokens, partial(pause, moment, name == "max_hours")]
    run = Run(*FLAGS, *recipe, *folders(folder), ranks=ranks, faults=faults)
    run.wait_for(f"^paused in {moment}")
    for signal_name in name.split()[:1] * (2 if "twice" in name else 1):
        if signal_name.startswith("SIG"):
            run.signal(getattr(signal, signal_name), ranks - 1)  # of two ranks, the one that does not save
    assert run.wait() == [0] * ranks, run.text()
    status = json.loads(Path(folder, "ckpt/status.json").read_text())
    step, reason = status["step"], name.split()[0]
    first, last = MOMENTS[moment]
    assert first <= step <= last + (ranks - 1)
    assert (status["status"], status["reason"]) == ("stopped", reason)
    assert f"stopped ({reason}) after {step} step" in run.text()
    assert len(re.findall(rf"^saved step {step} as ", run.text(), re.MULTILINE)) == 1
    assert load(f"{folder}/ckpt/latest.pt")["step"] == step
    assert tokens_before == len(tokens_of_steps())  # no rank made a step that the reference did not make
    resumed = Run(*FLAGS, *recipe, *folders(folder), "--resume", "latest", ranks=ranks, faults=[record_tokens])
    assert resumed.wait() == [0] * ranks
    assert_equals_reference(folder, "loss", "grad_norm", "val_loss", "hellaswag_acc_norm")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_before_the_first_step_ends_the_run_as_stopped(workdir, name):
    number, folder = getattr(signal, name), f"{name} before training"
    run = Run(*folders(folder), faults=[pause_before_training])
    run.wait_for("^building")
    run.signal(number)
    assert run.wait() == [128 + number], run.text()
    status = json.loads(Path(folder, "ckpt/status.json").read_text())
    assert status["status"] == "stopped"
    assert status["reason"] == f"{name} before the first step"
    assert f"stopped ({name} before the first step); nothing is saved" in run.text()
    assert "doing" not in status
    run = Run(*folders(folder))  # there is no checkpoint, so the same command starts
    assert run.wait() == [0], run.text()


# ---------------------------------------------------------------------------------------------------------------------
# torchrun

LONG_STEP = ("--total_batch_size", str(16 * 2 * 600), "--max_steps", "3", "--warmup_steps", "1", "--dropout", "0.1")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A folder with data and, in "reference", the uninterrupted run of LONG_STEP on 2 ranks."""
    with reference_run(tmp_path_factory, *LONG_STEP, ranks=2) as folder:
        yield folder


def to_agent(name: str):
    return lambda run: run.process.send_signal(getattr(signal, name))


def to_the_group_twice(run: LaunchedRun) -> None:
    """Press Ctrl-C twice: the terminal signals the agent and the workers, and the agent signals the workers again."""
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(run.process.pid, signal.SIGINT)


def to_a_worker(run: LaunchedRun, number: int = signal.SIGUSR1) -> None:
    os.kill(run.workers()[-1], number)


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        pytest.param(to_agent("SIGKILL"), "SIGTERM", id="kill -9 of torchrun"),
        pytest.param(to_the_group_twice, "SIGINT", id="Ctrl-C twice", marks=pytest.mark.storm),
        pytest.param(to_agent("SIGTERM"), "SIGTERM", id="SIGTERM to torchrun", marks=pytest.mark.storm),
        pytest.param(to_agent("SIGINT"), "SIGINT", id="SIGINT to torchrun", marks=pytest.mark.storm),
        pytest.param(to_agent("SIGUSR1"), "SIGTERM", id="SIGUSR1 to torchrun", marks=pytest.mark.storm),
        pytest.param(to_agent("SIGHUP"), "SIGHUP", id="SIGHUP to torchrun", marks=pytest.mark.storm),
        pytest.param(to_a_worker, "SIGUSR1", id="SIGUSR1 to a worker", marks=pytest.mark.storm),
    ],
)
def test_a_stop_of_torchrun_can_be_resumed(long_run, send, reason, request):
    """Let the workers save and exit, whether torchrun forwards the signal or is killed by it."""
    name = request.node.callspec.id.replace(" ", "-")
    run = LaunchedRun(*LONG_STEP, *folders(name), processes=2)
    run.wait_for(r"^step 0/3")  # step 1, of 300 micro-steps, has begun
    send(run)
    sent = time.monotonic()
    run.wait()
    while run.group():
        assert time.monotonic() - sent < 10, f"orphans: {run.group()}"
        time.sleep(0.05)
    assert f"stopped ({reason}) after 1 step " in run.text(), run.text()
    status = json.loads(Path(name, "ckpt/status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("stopped", reason, 1)
    assert Run(*LONG_STEP, *folders(name), "--resume", "latest", ranks=2).wait() == [0, 0]
    assert_equals_reference(name)


# ---------------------------------------------------------------------------------------------------------------------
# a rank that was killed, failed or hangs

SHORT = ("--max_steps", "40", "--checkpoint_freq", "4", "--dropout", "0.1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A folder with data and, in "reference", the uninterrupted run of SHORT on 2 ranks."""
    with reference_run(tmp_path_factory, *SHORT, ranks=2) as folder:
        pass  # the fixtures above keep their working folder
    return folder


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        *(("kill -9", 1), ("an exception", 0), ("SIGSTOP", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.storm)
            for case in (("kill -9", 0), ("an exception", 1), ("SIGSTOP", 0))
        ),
    ],
)
def test_a_lost_rank_ends_the_run_and_it_can_be_resumed(undisturbed, monkeypatch, how, rank):
    monkeypatch.chdir(undisturbed)
    name = f"{how} of {rank}"
    faults = [partial(raise_in_step, 10, rank)] if how == "an exception" else [partial(pause, "micro-step", False)]
    # The time-out must also leave the ranks time to start, on a loaded machine.
    run = Run(*SHORT, *folders(name), "--timeout_minutes", "0.1", ranks=2, faults=faults)
    if how != "an exception":
        run.wait_for("^paused in micro-step")
        run.signal(signal.SIGKILL if how == "kill -9" else signal.SIGSTOP, rank)
    other = run.ranks[1 - rank]
    other.join(120)  # the time-out is 6 s
    assert other.exitcode not in (None, 0), run.text()
    run.signal(signal.SIGKILL)
    run.wait()
    if how == "an exception":
        assert "saved step 4 as" in run.text()
    assert Run(*SHORT, *folders(name), "--resume", "auto", ranks=2).wait() == [0, 0]
    assert_equals_reference(name)


@pytest.mark.storm
def test_a_hanging_worker_of_torchrun_ends_the_run(long_run):
    """Wait for torchrun, which sends SIGTERM and kills the stopped process 30 s later."""
    run = LaunchedRun(*LONG_STEP, *folders("hangs"), "--timeout_minutes", "0.3", processes=2)
    run.wait_for(r"^step 0/3")
    to_a_worker(run, signal.SIGSTOP)
    (status,) = run.wait(timeout_s=18 + 30 + 30)
    assert status != 0, run.text()
    assert not run.group()
    assert Run(*LONG_STEP, *folders("hangs"), "--resume", "auto", ranks=2).wait() == [0, 0]
    assert_equals_reference("hangs")
