"""kill -9 while an evaluation is recorded: best_model.pt and evaluations.json end as in an uninterrupted run."""

import json
from functools import partial
from pathlib import Path

import pytest
from conftest import assert_same_state, load
from harness import Run, assert_equals_reference, folders, reference_run
from injected import kill_at, record_save_calls

EVALUATED = ("--max_steps", "12", "--checkpoint_freq", "4", "--eval_freq", "4", "--max_lr", "1e-2", "--dropout", "0.1")


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory):
    """A folder with data, the uninterrupted run of EVALUATED in "reference" and its system calls in calls.txt."""
    with reference_run(tmp_path_factory, *EVALUATED, faults=[record_save_calls]) as folder:
        yield folder


@pytest.mark.parametrize("call", [pytest.param(n, marks=() if n % 4 == 0 else pytest.mark.storm) for n in range(26)])
def test_kill_while_an_evaluation_is_recorded(evaluated_run, call):
    """Kill at each call of the save at step 4, of the link of best_model.pt and of the write of evaluations.json."""
    calls = [line for line in Path("calls.txt").read_text().splitlines() if line.startswith("1 ")]
    assert any("best_model.pt" in line for line in calls)
    assert any("evaluations.json" in line for line in calls)
    name = f"killed{call}"
    run = Run(*EVALUATED, *folders(name), faults=[partial(kill_at, 1, call)])
    if run.wait() == [0]:
        assert call >= len(calls)
        return
    assert Run(*EVALUATED, *folders(name), "--resume", "auto").wait() == [0]
    assert_equals_reference(name, "loss", "val_loss")
    assert_same_state(load("reference/ckpt/best_model.pt"), load(f"{name}/ckpt/best_model.pt"))
    reference, found = (json.loads(Path(run, "ckpt/evaluations.json").read_text()) for run in ("reference", name))
    assert found == reference
