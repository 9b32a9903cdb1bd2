"""The steps that a resumed run repeats are compared with the records of before the resume."""

import json
import math
import random
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import folders, load, run_here
from ground import acting_here, alter, metrics, open_log
from injected import signal_at
from test_metrics import start_line, steps, write_lines

from steadygpt.config import TrainConfig, parse_args
from steadygpt.log.runlog import RunLog
from steadygpt.run.repeats import Repeats, compare_step

RUN = ("--checkpoint_freq", "3", "--dropout", "0.1", "--max_lr", "1e-3", *folders("a"))  # 8 steps, saved at 3, 6 and 8
FROM_3 = (*RUN, "--resume", "a/rolling_step_000003.pt")
EQUAL = "resumed at step 3: repeated 5 steps, bit for bit the same losses"
LOWER_LR = ("--allow_changes", "--max_lr", "5e-4")


@pytest.fixture
def run_to_8(workdir, capsys) -> Path:
    """A working directory with a finished run of 8 steps in a/."""
    assert run_here(*RUN) == 0
    capsys.readouterr()
    return workdir


def resumed(capsys, *flags: str) -> str:
    """Resume a run, and return what it prints about repeated steps."""
    assert run_here(*flags) == 0
    captured = capsys.readouterr()
    return "\n".join(re.findall(r"^(?:warning: )?resumed at step .*", captured.out + captured.err, re.MULTILINE))


def test_equal_steps_are_reported_once_in_the_log_and_in_status_json_also_at_a_stop(run_to_8, capsys):
    before = metrics("a", "loss")
    assert resumed(capsys, *FROM_3, "--eval_freq", "5", "--max_hours", "9") == EQUAL  # which do not change a step
    assert metrics("a", "loss") == before
    assert Path("a/log.txt").read_text().count(EQUAL) == 1
    assert json.loads(Path("a/status.json").read_text())["resume"] == EQUAL
    assert resumed(capsys, *RUN, "--resume", "latest", "--max_steps", "9") == ""  # which repeats nothing
    with acting_here(partial(signal_at, 5)):
        assert resumed(capsys, *FROM_3).startswith("resumed at step 3: repeated 2 steps, bit for bit the same losses")
    assert "repeated 2 steps" in json.loads(Path("a/status.json").read_text())["resume"]


def test_a_flipped_bit_in_a_restored_weight_is_one_warning_and_one_alert(run_to_8, capsys, inject):
    alerts = inject.alerts_of_runs()

    def flip(content: dict) -> None:
        content["model"]["wte.weight"].view(torch.int32)[7, 0] ^= 1 << 22

    alter("a/rolling_step_000003.pt", flip)  # with a valid checksum
    before = metrics("a", "loss")
    warning = resumed(capsys, *FROM_3)
    now = metrics("a", "loss")
    assert before[3] != now[3]
    found = f"resumed at step 3: repeated step 3 has loss {now[3]!r}, but had {before[3]!r} before"
    causes = "causes are in docs/checkpoints.md, Repeated steps"
    assert warning == f"warning: {found}; {causes}"
    assert [event for event, _ in alerts] == ["resumed", "resume differs", "finished"]
    assert json.loads(Path("a/status.json").read_text())["resume"] == found
    assert load("a/latest.pt")["step"] == 8


def test_the_steps_of_a_changed_launch_are_not_compared_though_it_saved_nothing(run_to_8, capsys):
    shutil.copytree("a", "before", ignore=shutil.ignore_patterns("metrics.jsonl"))

    def forget_saves() -> None:
        """Restore the folder but for its log, as if the launch had been killed before its first save."""
        shutil.move("a/metrics.jsonl", "log")
        shutil.rmtree("a")
        shutil.copytree("before", "a")
        shutil.move("log", "a/metrics.jsonl")

    lowered = resumed(capsys, *FROM_3, *LOWER_LR)
    assert lowered == "resumed at step 3: repeated steps are not compared: max_lr 0.001 -> 0.0005"
    forget_saves()
    for _ in range(2):  # its records stay between those of the checkpoint's launch and the next ones
        assert resumed(capsys, *FROM_3) == f"{EQUAL}; later steps are not compared: max_lr 0.0005 -> 0.001"
        forget_saves()


def test_only_logged_steps_are_compared(workdir, capsys):
    assert run_here(*RUN, "--log_freq", "2") == 0  # the steps 0, 2, 4, 6 and the last one, 7
    capsys.readouterr()
    found = resumed(capsys, *FROM_3, "--log_freq", "3")
    assert found.startswith("resumed at step 3: repeated 5 steps (3 logged), bit for bit")


# ---------------------------------------------------------------------------------------------------------------------
# records and numbers


def start(step: int, id: str, parent: str, ranks: int = 1) -> dict:
    return start_line(step, id, parent) | {"settings": {"ranks": ranks}}


def compared(*lines: dict) -> tuple[list[int], str]:
    """Return the steps that are compared after a checkpoint of launch A at step 4, and why not all.

    Args:
        lines: of the log after that checkpoint.
    """
    path = Path("metrics.jsonl")
    path.unlink(missing_ok=True)
    offset = write_lines(path, start(0, "A", ""), *steps(0, 4)).stat().st_size
    write_lines(path, *lines)
    parent = {"id": "A", "parent": "", "settings": {"ranks": 1}}
    repeats = Repeats.read(path, offset, 4, parent, {"ranks": 1}, is_exact=True)
    return list(repeats.records), repeats.reason


OTHER_COURSE = "their records do not descend from this checkpoint"


def test_records_are_compared_up_to_the_first_one_of_another_start_or_course():
    rest = steps(4, 6)
    assert compared() == ([], "")
    assert compared(*rest, {"step": 5, "time": 3.5, "cpu_percent": 3.0}) == ([4, 5], "")
    assert compared(*rest, start(6, "B", "A"), *steps(6, 8)) == ([4, 5, 6, 7], "")
    assert compared(*rest, start(6, "B", "A", ranks=2), *steps(6, 8)) == ([4, 5], "ranks 2 -> 1")
    assert compared(*rest, start(6, "B", "other"), *steps(6, 7)) == ([4, 5], OTHER_COURSE)
    assert compared(start(4, "B", "A"), *steps(4, 5)) == ([4], "")
    assert compared(start(4, "B", "other"), *steps(4, 5)) == ([], OTHER_COURSE)


def test_starts_that_logged_nothing_and_abandoned_ones_stand_between():
    rest = steps(4, 6)
    assert compared(*rest, start(4, "B", "A"), start(5, "C", "B"), *steps(5, 6)) == ([4, 5], "")
    # One that went back to step 2 of the checkpoint's start, and ended before step 4.
    assert compared(*rest, start(2, "B", "A"), *steps(2, 4), start(6, "C", "A"), *steps(6, 7)) == ([4, 5, 6], "")
    assert compared(*rest, start(2, "B", "A"), *steps(2, 6)) == ([4, 5], OTHER_COURSE)


@pytest.fixture
def log(tmp_path, capsys):
    log = open_log(TrainConfig(run_name="tiny", checkpoint_dir=str(tmp_path)), None)
    yield log
    log.close()


def reported(log: RunLog, before: list[float | None], now: list[float], is_exact: bool) -> str:
    """Return the result for steps with these losses; None is a number that was not finite."""
    numbers = {"grad_norm": 1.0, "lr": 0.1}
    records = {step: {"loss": loss, **numbers} for step, loss in enumerate(before)}
    repeats = Repeats(0, records, is_exact=is_exact)
    for step, loss in enumerate(now):
        compare_step(repeats, log, step, {"loss": loss, **numbers})
    return log.facts["resume"]


def test_nan_equals_nan(log):
    assert "repeated 2 steps, bit for bit" in reported(log, [None, 2.0], [math.nan, 2.0], is_exact=True)
    assert reported(log, [2.0], [math.nan], is_exact=True).endswith("step 0 has loss null, but had 2.0 before")
    assert "has loss null, but had 2.0 before" in reported(log, [2.0], [math.nan], is_exact=False)
    assert "within" in reported(log, [2.0, None], [2.00001, math.inf], is_exact=False)


def test_where_bits_are_not_promised_the_largest_difference_is_shown_without_a_warning(log, capsys):
    found = reported(log, [2.0, 4.0, 1.0], [2.0, 4.001, 1.0], is_exact=False)
    assert found == "resumed at step 0: repeated 3 steps, losses within 0.0002 of those before"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_that_training_does_not_make_is_a_warning_wherever_it_begins(log, capsys, seed):
    """Losses that another data order, learning rate or checkpoint gives, from a random step on."""
    rng = random.Random(seed)
    before = [4 * 0.99**step for step in range(200)]
    noise = [loss * (1 + rng.uniform(-1, 1) * 0.02 * min(1, (step / 50) ** 3)) for step, loss in enumerate(before)]
    assert "losses within 0" in reported(log, before, noise, is_exact=False)
    first = rng.randrange(200)
    factor = rng.choice([0.5, 0.8, 1.2, 2.0, 10.0])
    wrong = [loss * factor if step >= first else loss for step, loss in enumerate(noise)]
    capsys.readouterr()
    found = reported(log, before, wrong, is_exact=False)
    assert f"repeated step {first} has loss" in found and "that are usual without --deterministic" in found
    assert capsys.readouterr().err.startswith(f"warning: {found}; causes are in docs/checkpoints.md")


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [0, 5, 50])
def test_a_step_that_was_finite_before_is_finite_again(name, step):
    record = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3}
    repeats = Repeats(0, {step: record}, is_exact=False)
    repeats.add(step, record | {name: math.inf})
    assert repeats.result() == f"repeated step {step} has {name} null, but had {record[name]} before"


def test_a_learning_rate_is_the_same_also_where_bits_are_not_promised():
    record = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3}
    repeats = Repeats(0, {0: record}, is_exact=False)
    repeats.add(0, record | {"lr": 1.0001e-3})
    assert repeats.result() == "repeated step 0 has lr 0.0010001, but had 0.001 before"


def test_equal_launches_compute_the_same_bits_on_a_cpu_and_with_deterministic_kernels():
    for flags in ("", "--sharding fsdp"):
        config, _ = parse_args(flags.split())
        deterministic, _ = parse_args([*flags.split(), "--deterministic"])
        assert config.repeats_bits("cpu") and deterministic.repeats_bits("cpu")
        assert deterministic.repeats_bits("cuda") and not config.repeats_bits("cuda")
