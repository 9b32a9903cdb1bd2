"""The file with predicted losses, and the warning of a run outside the band around them."""

import json
import math

import pytest
from conftest import folders, load, run_here
from ground import metrics
from hypothesis import given
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import config_of
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.run.expected import BAND, IN_A_ROW, LOSSES, Expected, Prediction, compared_options

CURVE = [(10, 4.0), (1000, 1.0)]


def expected() -> Expected:
    return Expected(Prediction({}, CURVE))


def test_the_band_is_a_fifth_of_the_predicted_loss_on_either_side():
    assert BAND == 0.2
    assert expected().compare(10, 4.0)[0] == pytest.approx({"expected_low": 3.2, "expected_high": 4.8})


def test_between_predicted_steps_the_loss_is_a_power_of_the_step():
    assert expected().compare(100, 2.0)[0] == pytest.approx({"expected_low": 1.6, "expected_high": 2.4})


def test_before_the_first_predicted_step_there_is_no_band_and_beyond_the_last_one_that_of_the_last():
    assert expected().compare(9, 1e9) == ({}, "")
    assert expected().compare(10**6, 1.0) == expected().compare(1000, 1.0)


@given(
    st.dictionaries(st.integers(1, 2**62), st.floats(*LOSSES), min_size=1, max_size=5),
    st.integers(0, 2**62),
    st.floats(),
)
def test_no_prediction_ends_a_run(curve, step, loss):
    """Every curve that read_json() accepts, at every step."""
    band, _ = Expected(Prediction({}, sorted(curve.items()))).compare(step, loss)
    assert bool(band) == (step >= min(curve))
    assert all(math.isfinite(number) for number in band.values())


@pytest.mark.parametrize("bad", [0.79, 1.21, math.nan, math.inf])
def test_the_warning_comes_once_with_the_second_loss_in_a_row_outside(bad):
    assert IN_A_ROW == 2
    run = expected()
    warned = [bool(run.compare(1000, loss)[1]) for loss in (bad, 1.0, bad, bad, bad, bad, 1.19, bad, bad)]
    assert warned == [False, False, False, True, False, False, False, False, True]


def write(**changes) -> list[str]:
    """Write a prediction for the tiny run of these tests, and return its flags."""
    assert run_here("--eval_freq", "4", *folders("first")) == 0
    options = compared_options(config_of(load("first/latest.pt")["launches"][-1]))
    with open("prediction.json", "w") as file:
        json.dump(Prediction(options, [(1, 5.5)])._asdict() | changes, file)
    return ["--expect", "prediction.json", "--eval_freq", "1", *folders("run")]


def test_a_run_logs_its_band_and_warns_once_when_it_leaves_it(workdir, capsys, monkeypatch):
    flags = write(curve=[(1, 5.6), (8, 1.0)])
    capsys.readouterr()
    sent = []
    monkeypatch.setattr(Alerts, "send", lambda _, event, *rest: sent.append(event))
    assert run_here(*flags, "--alert_url", "http://127.0.0.1:9/") == 0
    said = capsys.readouterr()
    assert "step 1/8 | val loss" in said.out and said.out.count(" | expected ") == 8
    warning = next(line for line in said.err.splitlines() if "expected" in line)
    assert "for the second time in a row; compare data, learning rates and code" in warning
    assert said.err.count("expected") == 1
    assert sent == ["started", "off course", "finished"]
    assert list(metrics("run", "expected_low")) == list(range(1, 9))
    status = json.loads(open("run/status.json").read())
    assert status["expected_high"] == pytest.approx(1.2) and len(status["warnings"]) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"options": {"max_lr": 3.0}}, "prediction.json: is for another run (num_layers None -> 2, "),
        ({"options": {"gone": 1}}, "prediction.json: is for another run ("),
        *(
            (
                {"curve": curve},
                f"prediction.json: curve has steps {steps}; expected ascending ones; write it again with predict.py",
            )
            for curve, steps in (([], "[]"), ([(8, 2), (4, 2)], "[8, 4]"), ([(4, 2), (4, 2)], "[4, 4]"))
        ),
        ({"curve": [(1, 0.0)]}, "prediction.json: curve[0][1] is 0.0; expected "),
    ],
)
def test_a_prediction_of_another_run_is_refused_before_anything_is_written(workdir, changes, line):
    flags = write(**changes)
    with pytest.raises(UserError) as refused:
        run_here(*flags)
    assert str(refused.value).startswith(line)
    assert not (workdir / "run").exists()


def test_a_missing_prediction_is_refused():
    with pytest.raises(UserError, match=r"none\.json: cannot be read \(No such file or directory\); write it again"):
        Expected.load(TrainConfig(expect="none.json"))


def test_a_resumed_run_keeps_its_band_and_a_longer_one_needs_another(workdir):
    flags = write()
    assert run_here(*flags, "--max_hours", "1e-9") == 0
    assert run_here("--resume", "--eval_freq", "1", "--max_hours", "0", *folders("run")) == 0
    assert metrics("run", "expected_low")
    with pytest.raises(
        UserError, match=r"another run \(max_steps 8 -> 9\); write it again with predict.py, or add --expect="
    ):
        run_here("--resume", "--max_steps", "9", *folders("run"))
    assert run_here("--resume", "--max_steps", "9", "--expect=", *folders("run")) == 0
