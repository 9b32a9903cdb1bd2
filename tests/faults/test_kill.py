"""kill -9 at random instants, kill -9 and power cuts at every system call of a save: no reported save is lost."""

import contextlib
import os
import random
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from conftest import FSDP, MODERN, SLOW, TINY, folders, load, write_data
from ground import assert_same_state, evaluations, latest, phase_in
from harness import LaunchedRun, Run, assert_equals_reference, assert_resumes
from injected import kill_at, no_links, record_save_calls

FLAGS = "--checkpoint_freq 1 --keep_checkpoints 3 --dropout 0.1 --eval_freq 7 --eval_tokens 64".split()


def assert_same_files(name: str) -> None:
    """Assert that the folder `name` has the files of "reference", and its checkpoints the same states and scores."""
    assert sorted(os.listdir(name)) == sorted(os.listdir("reference"))
    for path in Path(name).glob("*.pt"):
        found, expected = load(path), load(f"reference/{path.name}")
        assert_same_state(expected, found)
        for key in ("scores", "validated_on", "scaler", "bad_steps"):
            assert found[key] == expected[key], (path, key)
    assert evaluations(name) == evaluations("reference")


def last_reported(text: str) -> int:
    return max([int(step) for step in re.findall(r"^saved step (\d+) as", text, re.MULTILINE)], default=-1)


def save_in_progress(name: str, since_ns: int) -> bool:
    """Return whether a temporary file newer than `since_ns` exists; an earlier process may have left older ones."""
    with contextlib.suppress(FileNotFoundError):  # the save has just finished
        return any(path.stat().st_mtime_ns > since_ns for path in Path(name).glob(".*.pt.tmp"))
    return False


# The last step of each part, and its mixture: a source comes back, and one is new.
ONE_MIXTURE = (("--max_steps", "100", "--data_dir", "data"),)
CHANGES_TWICE = tuple(
    ("--max_steps", last, "--mix", mix, "--allow_changes")
    for last, mix in (("30", "a:7,b:3"), ("60", "b:1,c:1"), ("100", "a:1,b:4,c:2"))
)


def wait_for_an_instant(run: Run, rng: random.Random, name: str, since_ns: int) -> None:
    kind = rng.random()
    if kind < 0.8:  # four of five kills come while the run trains, the others at any time from its start
        run.wait_for(r"^step +\d+/|is finished|^finished")
    time.sleep(rng.uniform(0, 0.25))
    while kind < 0.5 and run.is_alive() and not save_in_progress(name, since_ns):
        time.sleep(0.0005)  # half of the kills wait for a save


def kill_repeatedly(least: int, start: Callable, where: str, record_property, parts=ONE_MIXTURE) -> None:
    """Start, kill and resume runs until `least` of them were killed, a third of these within a save.

    Args:
        start: starts a run with some flags, the first ones as parts of the reference, which is not killed.
        where: on how many ranks; the seed of the instants.
        parts: flags of the consecutive parts of a run.
    """
    for part in parts:
        assert set(start(*FLAGS, *part, *folders("reference"), "--resume", "auto").wait()) == {0}
    rng, number, kills, within_saves, repeated = random.Random(where), 0, 0, 0, 0
    while kills < least or 3 * within_saves < least:
        name, reported, left = f"run{number}", -1, list(parts)
        while left:
            run, since_ns = start(*FLAGS, *left[0], *folders(name), "--resume", "auto"), time.time_ns()
            if kills >= least and 3 * within_saves >= least:
                run.wait()
            else:
                assert kills < 3 * least, f"only {within_saves} of {kills} kills were within a save"
                wait_for_an_instant(run, rng, name, since_ns)
                run.kill()
            text = run.text()
            assert "warning: resumed at" not in text, text  # repeated steps equal those before
            repeated += len(re.findall(r"^resumed at step \d+: repeated .* bit for bit", text, re.MULTILINE))
            if resumed := re.search(r"^resumed +from .* at step (\d+)", text, re.MULTILINE):
                assert int(resumed[1]) >= reported, f"step {reported} was reported as saved, but is lost"
            reported = max(reported, last_reported(text))
            if reported >= 0:
                assert latest(name)["step"] >= reported
            within_saves += save_in_progress(name, since_ns)
            if re.search("^finished|is finished", text, re.MULTILINE):
                left.pop(0)
            else:
                kills += 1
        assert_equals_reference(name)
        assert_same_files(name)
        number += 1
    record_property("kills", kills)
    record_property("in a save", within_saves)
    record_property("resumes with repeated steps", repeated)


def run_on(ranks: int, *recipe: str) -> Callable[..., Run]:
    return lambda *flags: Run(*flags, *recipe, ranks=ranks, tiny=TINY)


@pytest.fixture
def sources(workdir) -> None:
    for seed, name in enumerate("abc"):
        write_data(Path(name), num_tokens=(200, 900 + 100 * seed), seed=seed)


def case(least: int, where: str, start: Callable, parts=ONE_MIXTURE, id: str = ""):
    """A row: kills of a run that `start` starts with some flags."""
    return pytest.param(least, where, start, parts, id=id or where)


@pytest.mark.storm
@pytest.mark.timeout(1200)  # 50 launches of torchrun take minutes
@pytest.mark.parametrize(("least", "where", "start", "parts"), [
    case(35, "1 rank", run_on(1)),
    case(35, "1 rank", run_on(1, *MODERN), id="1 rank, modern"),
    case(15, "2 ranks", run_on(2)),
    case(15, "2 ranks", run_on(2, *MODERN), id="2 ranks, modern"),
    case(50, "1 rank by python train.py", LaunchedRun),
    case(50, "2 ranks by torchrun", partial(LaunchedRun, processes=2)),
    case(10, "1 rank while the mixture changes twice", run_on(1), CHANGES_TWICE),
    case(10, "2 ranks while the mixture changes twice", run_on(2), CHANGES_TWICE),
])  # fmt: skip
def test_kill_at_random_instants(sources, least, where, start, parts, record_property):
    kill_repeatedly(least, start, where, record_property, parts)
    assert phase_in("run0/latest.pt").number == len(parts) - 1


THREE = (3, "--total_batch_size", "192")  # processes, and a batch that they divide


@pytest.mark.storm
@pytest.mark.parametrize(("least", "where", "start", "parts"), [
    case(15, "3 ranks", run_on(*THREE)),
    case(5, "4 ranks", run_on(4, *MODERN), id="4 ranks, modern"),
    case(5, "4 ranks", run_on(4, "--precision", "bf16"), id="4 ranks, bf16"),
    case(5, "3 ranks", run_on(*THREE, *FSDP), id="3 ranks, fsdp"),
    case(3, "3 ranks while the mixture changes twice", run_on(*THREE), CHANGES_TWICE),
])  # fmt: skip
def test_kill_of_more_than_two_ranks(sources, least, where, start, parts, record_property):
    """The sum of three gradients has an order, which is the same in each launch."""
    kill_repeatedly(least, start, where, record_property, parts)


# ---------------------------------------------------------------------------------------------------------------------
# at every system call of a save, also of a best model

SHORT = (
    "--max_steps 12 --checkpoint_freq 2 --keep_checkpoints 1 --steps_per_epoch 4 --eval_freq 4 --max_lr 1e-2 "
    "--dropout 0.1"
).split()
# The second save, at step 4, which the validation before it finds to be the best model so far: linked as a rolling and
# an epoch checkpoint and as the best model, a backup is made, an old file is deleted.
CALLS = [
    "write .latest.pt.tmp",
    "fsync .latest.pt.tmp",
    "link .latest.pt.tmp .rolling_step_000004.pt.tmp",
    "replace .rolling_step_000004.pt.tmp rolling_step_000004.pt",
    "link .latest.pt.tmp .epoch_00001.pt.tmp",
    "replace .epoch_00001.pt.tmp epoch_00001.pt",
    "link .latest.pt.tmp .best_model.pt.tmp",
    "replace .best_model.pt.tmp best_model.pt",
    "link latest.pt .latest_backup.pt.tmp",
    "replace .latest_backup.pt.tmp latest_backup.pt",
    "replace .latest.pt.tmp latest.pt",
    "fsync reference",
    "unlink rolling_step_000002.pt",
]


@pytest.fixture
def short_run(reference):
    """The uninterrupted run of SHORT in "reference" and its system calls in calls.txt."""
    return reference(*SHORT, faults=[record_save_calls])


def calls_of_saves() -> dict[int, list[list[str]]]:
    """Return save -> its system calls, each as name and files; 0 are the fsyncs of other threads."""
    saves: dict[int, list[list[str]]] = {}
    for line in Path("calls.txt").read_text().splitlines():
        save, *call = line.split()
        saves.setdefault(int(save), []).append(call)
    return saves


def test_a_save_makes_these_calls_in_this_order(short_run):
    """Make the logs durable, then the file before it gets a name, then its names before older files are deleted.

    Of the names, latest.pt is the last one; the order of the others does not matter.
    """
    # Temporary names are unlinked in case they exist; these calls usually change nothing.
    found = [" ".join(call) for call in calls_of_saves()[2]]
    found = [call for call in found if not re.fullmatch(r"unlink \..*\.tmp", call)]
    others = slice(CALLS.index("fsync .latest.pt.tmp") + 1, CALLS.index("replace .latest.pt.tmp latest.pt"))
    assert sorted(found[others]) == sorted(CALLS[others])
    assert [*found[: others.start], *found[others.stop :]] == [*CALLS[: others.start], *CALLS[others.stop :]]
    logged = 0
    for line in Path("calls.txt").read_text().splitlines():
        save, *call = line.split()
        logged += call == ["fsync", "metrics.jsonl"]
        if call[0] == "write":
            assert logged >= int(save)


@pytest.mark.parametrize(
    "call", [pytest.param(n, marks=() if n % 7 == 0 else pytest.mark.storm) for n in range(len(CALLS) + 12)]
)
def test_kill_at_each_call_of_a_save(short_run, call):
    name = f"killed{call}"
    run = Run(*SHORT, *folders(name), faults=[partial(kill_at, 2, call)])
    if run.wait() == [0]:
        assert call >= len(calls_of_saves()[2])
        return
    reported = last_reported(run.text())
    assert reported >= 2
    assert latest(name)["step"] >= reported
    assert_resumes(name, *SHORT, measured=("loss", "grad_norm", "val_loss"))
    assert_same_files(name)


@pytest.mark.storm
@pytest.mark.parametrize(("ranks", "call"), [*product((2, 3, 4), range(len(CALLS) + 6))])
def test_kill_of_several_ranks_at_each_call_of_a_save(reference, ranks, call):
    """Rank 0 saves; the others end when they lose it."""
    flags = (*SHORT, "--total_batch_size", "384")
    reference(*flags, ranks=ranks, faults=[record_save_calls])
    name = f"killed{call}"
    run = Run(*flags, *folders(name), ranks=ranks, faults=[partial(kill_at, 2, call)])
    if run.wait() == [0] * ranks:
        assert call >= len(calls_of_saves()[2])
        return
    assert last_reported(run.text()) >= 2
    assert_resumes(name, *flags, ranks=ranks, measured=("loss", "grad_norm", "val_loss"))
    assert_same_files(name)


# Each validation finds the best model, and so makes a save; there are no others.
EVALUATED = (*"--max_steps 20 --steps_per_epoch 99 --eval_freq 4 --dropout 0.1".split(), *SLOW)


@pytest.mark.parametrize(
    "call", [pytest.param(n, marks=() if n in (8, 10) else pytest.mark.storm) for n in range(len(CALLS) + 4)]
)
def test_kill_at_each_call_of_a_save_by_an_evaluation(reference, call):
    """The best model gets its name before latest.pt, and the resumed run evaluates its step again."""
    reference(*EVALUATED, faults=[record_save_calls])
    assert load("reference/best_model.pt")["step"] == 20
    name = f"killed{call}"
    run = Run(*EVALUATED, *folders(name), faults=[partial(kill_at, 3, call)])
    if run.wait() == [0]:
        assert call >= len(calls_of_saves()[3])
        return
    assert latest(name)["step"] in (8, 12)
    assert_resumes(name, *EVALUATED, measured=("loss", "grad_norm", "val_loss"))
    assert_same_files(name)


@pytest.mark.parametrize(
    "call", [pytest.param(n, marks=() if n == 15 else pytest.mark.storm) for n in range(len(CALLS) + 20)]
)
def test_kill_at_each_call_of_a_save_without_hard_links(short_run, call):
    name = f"copied{call}"
    run = Run(*SHORT, *folders(name), faults=[no_links, partial(kill_at, 2, call)])
    if run.wait() == [0]:
        assert call > len(calls_of_saves()[2])  # the copies are fsynced
        return
    assert latest(name)["step"] >= last_reported(run.text()) >= 2
    assert_resumes(name, *SHORT, measured=("loss", "grad_norm", "val_loss"))
    assert_same_files(name)


def names_after(names: dict[str, int], calls) -> dict[str, int]:
    """Return the folder (name -> number of the save that wrote the file) after some calls."""
    names = dict(names)
    for name, *files in calls:
        if name == "create":
            names[files[0]] = files[1]
        elif files[0] in names:
            content = names[files[0]] if name == "link" else names.pop(files[0])
            if name != "unlink":
                names[files[1]] = content
    return names


def test_a_power_cut_loses_no_reported_save(short_run, record_property):
    """Simulate a disk that keeps fsynced files and any subset of the name changes since the folder's last fsync."""
    saves = calls_of_saves()
    del saves[0]
    durable_names: dict[str, int] = {}
    pending, durable_files, reported, states = [], set(), 0, 0
    for save, calls in saves.items():
        for name, *files in calls:
            if name == "write":
                pending.append(("create", files[0], save))
            elif name == "fsync" and files[0] != "reference":
                durable_files.add(save)
            elif name == "fsync":
                durable_names, pending, reported = names_after(durable_names, pending), [], save
            elif name != "unlink" or files[0] in names_after(durable_names, pending):
                pending.append((name, *files))
            assert len(pending) < 16  # a larger number means that an fsync of the folder is missing
            for kept in product([False, True], repeat=len(pending)):
                found = names_after(durable_names, [call for call, keep in zip(pending, kept, strict=True) if keep])
                readable = [save for name, save in found.items() if not name.startswith(".") and save in durable_files]
                assert max(readable, default=0) >= reported, (save, name, files, kept)
                states += 1
    assert reported == len(saves) == 6
    assert states > 1000
    record_property("states of the disk", states)
