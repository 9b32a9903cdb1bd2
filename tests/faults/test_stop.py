"""Asked to stop, at whatever moment and by whatever means, a run saves once, on all ranks alike, and continues."""

import contextlib
import json
import os
import re
import signal
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from conftest import load, write_data
from harness import Launched, Life, assert_continued, folders
from injected import pause, raise_in_step, record_tokens, tokens_of_steps

FLAGS = (
    "--total_batch_size 128 --max_steps 14 --checkpoint_freq 6 --eval_freq 6 --hellaswag_freq 6 "
    "--hellaswag_file hs.jsonl --dropout 0.1"
).split()
# Moments of a run, and after how many steps it stops then. Beside a save it goes on, at most to the next one.
MOMENTS = {"micro-step": [3], "evaluation": [6], "save": range(6, 11), "hellaswag": [6], "epoch's last step": [9]}
SIGNALS = ("SIGTERM", "SIGINT", "SIGINT twice", "SIGUSR1", "SIGHUP", "max_hours")


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """A number of ranks; in the working folder are data and, in "whole", the uninterrupted run on as many."""
    folder = tmp_path_factory.mktemp("stop")
    write_data(folder / "data")
    example = {"ctx": "A man", "endings": ["sits.", "flies away.", "is a.", "of."], "label": 0}
    (folder / "hs.jsonl").write_text(json.dumps(example) + "\n" + json.dumps(example | {"label": 3}) + "\n")
    with contextlib.chdir(folder):
        assert (
            Life(*FLAGS, *folders("whole"), ranks=request.param, faults=[record_tokens]).wait() == [0] * request.param
        )
        yield request.param


def cases():
    """Each signal in each moment, on 1 and on 2 ranks; but for some on both, that is for the storm."""
    for ranks, (number, name), (turn, moment) in product((1, 2), enumerate(SIGNALS), enumerate(MOMENTS)):
        fast = (number + ranks) % len(MOMENTS) == turn
        marks = () if fast else pytest.mark.storm
        yield pytest.param(ranks, name, moment, id=f"{name} in {moment}, {ranks} ranks", marks=marks)


@pytest.mark.parametrize(("ranks", "name", "moment"), list(cases()), indirect=["ranks"])
def test_a_stop(ranks, name, moment):
    run = f"{name} in {moment}, {ranks}"
    tokens_before = len(tokens_of_steps())
    life = Life(*FLAGS, *folders(run), ranks=ranks, faults=[record_tokens, partial(pause, moment, name == "max_hours")])
    life.wait_for(f"^paused in {moment}")
    for signal_name in name.split()[:1] * (2 if "twice" in name else 1):
        if signal_name.startswith("SIG"):
            life.signal(getattr(signal, signal_name), ranks - 1)  # of two ranks the one that does not save
    assert life.wait() == [0] * ranks, life.text()
    status = json.loads(Path(run, "ckpt/status.json").read_text())
    step, reason = status["step"], name.split()[0]
    assert step in MOMENTS[moment]
    assert (status["status"], status["reason"]) == ("stopped", reason)
    assert f"stopped ({reason}) after {step} steps" in life.text()
    # Once; but for the best model, which is saved again with its val_loss.
    assert len(re.findall(rf"^saved step {step} as (?!.*best_model)", life.text(), re.MULTILINE)) == 1
    assert load(f"{run}/ckpt/latest.pt")["step"] == step
    assert tokens_before == len(tokens_of_steps())  # no rank went on to a step that the other has not made
    assert Life(*FLAGS, *folders(run), "--resume", "latest", ranks=ranks, faults=[record_tokens]).wait() == [0] * ranks
    assert_continued(run, "loss", "grad_norm", "val_loss", "hellaswag_acc_norm")


# ---------------------------------------------------------------------------------------------------------------------
# torchrun

LONG_STEP = ("--total_batch_size", str(16 * 2 * 600), "--max_steps", "3", "--warmup_steps", "1", "--dropout", "0.1")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A folder with data and, in "whole", the uninterrupted run of LONG_STEP on 2 ranks."""
    folder = tmp_path_factory.mktemp("long")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        assert Life(*LONG_STEP, *folders("whole"), ranks=2).wait() == [0, 0]
        yield folder


def to_agent(name: str):
    return lambda run: run.process.send_signal(getattr(signal, name))


def to_the_group_twice(run: Launched) -> None:
    """A terminal's Ctrl-C reaches agent and workers, and the agent sends it on to the workers."""
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(run.process.pid, signal.SIGINT)


def to_a_worker(run: Launched, number: int = signal.SIGUSR1) -> None:
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
def test_a_stop_of_torchrun(long_run, send, reason, request):
    """torchrun hands signals on and dies of those that it does not know; its workers save and leave all the same."""
    name = request.node.callspec.id.replace(" ", "-")
    run = Launched(*LONG_STEP, *folders(name), processes=2)
    run.wait_for(r"^step 0/3")  # now it is within step 1, of 300 micro-steps
    send(run)
    sent = time.monotonic()
    run.wait()
    while run.group():
        assert time.monotonic() - sent < 10, f"orphans: {run.group()}"
        time.sleep(0.05)
    assert f"stopped ({reason}) after 1 steps" in run.text(), run.text()
    status = json.loads(Path(name, "ckpt/status.json").read_text())
    assert (status["status"], status["reason"], status["step"]) == ("stopped", reason, 1)
    assert Life(*LONG_STEP, *folders(name), "--resume", "latest", ranks=2).wait() == [0, 0]
    assert_continued(name)


# ---------------------------------------------------------------------------------------------------------------------
# a rank that does not answer any more

SHORT = ("--max_steps", "40", "--checkpoint_freq", "4", "--dropout", "0.1")


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
def test_a_rank_that_is_gone_ends_the_run_and_it_can_be_resumed(workdir, how, rank):
    assert Life(*SHORT, *folders("whole"), ranks=2).wait() == [0, 0]
    faults = [partial(raise_in_step, 10, rank)] if how == "an exception" else [partial(pause, "micro-step", False)]
    # The time-out also counts while the ranks meet.
    life = Life(*SHORT, *folders("run"), "--timeout_minutes", "0.1", ranks=2, faults=faults)
    if how != "an exception":
        life.wait_for("^paused in micro-step")
        life.signal(signal.SIGKILL if how == "kill -9" else signal.SIGSTOP, rank)
    other = life.ranks[1 - rank]
    other.join(30)  # the time-out is 6 s
    assert other.exitcode not in (None, 0), life.text()
    life.signal(signal.SIGKILL)
    life.wait()
    assert "saved step 4 as" in life.text() or how != "an exception"
    assert Life(*SHORT, *folders("run"), "--resume", "auto", ranks=2).wait() == [0, 0]
    assert_continued("run")


@pytest.mark.storm
def test_a_worker_of_torchrun_that_hangs_ends_the_run_and_nothing_stays(long_run):
    """torchrun waits 30 s after its SIGTERM before it kills the stopped process."""
    run = Launched(*LONG_STEP, *folders("hangs"), "--timeout_minutes", "0.3", processes=2)
    run.wait_for(r"^step 0/3")
    to_a_worker(run, signal.SIGSTOP)
    (status,) = run.wait(timeout_s=18 + 30 + 30)
    assert status != 0 and not run.group(), run.text()
    assert Life(*LONG_STEP, *folders("hangs"), "--resume", "auto", ranks=2).wait() == [0, 0]
    assert_continued("hangs")
