"""The law of losses, its interval, the file with a predicted curve, and the warning of a run outside its band."""

import json
import math

import numpy as np
import pytest
from conftest import load, metrics, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import own_folders as folders

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import trained_with
from steadygpt.config import TrainConfig
from steadygpt.log.alerts import Alerts
from steadygpt.run.expected import (
    IN_A_ROW,
    NINETY,
    TOLERANCE,
    Expected,
    Points,
    Prediction,
    compared,
    fitted,
    predicted,
)

SIZES, TOKENS = np.array([1e5, 2e5, 4e5, 8e5]), np.array([1e7, 2e7, 4e7])


def points_of(law, noise=0.0, seed=0) -> Points:
    """Return the losses of a ladder of four sizes and three lengths by a law."""
    sizes, tokens = (grid.ravel() for grid in np.meshgrid(SIZES, TOKENS))
    return Points(sizes, tokens, law(sizes, tokens) * np.exp(noise * np.random.default_rng(seed).normal(size=12)))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 0.7), st.floats(0.2, 0.7), st.floats(0.5, 3), st.floats(0.1, 2), st.floats(0.1, 2))
def test_a_law_is_found_again_and_extrapolates(a, b, e, of_size, of_tokens):
    def law(sizes, tokens):
        return e + of_size * (sizes / 1e6) ** -a + of_tokens * (tokens / 1e8) ** -b

    points = points_of(law)
    longest = points.of(points.tokens == TOKENS[-1])
    assert fitted(points)(longest.sizes, TOKENS[-1]) == pytest.approx(longest.losses, rel=0.02)
    loss, deviation = predicted(points, 3.2e6, 1e8)
    assert loss == pytest.approx(law(3.2e6, 1e8), rel=0.1)
    assert abs(math.log(loss / law(3.2e6, 1e8))) < NINETY * deviation


def law(sizes, tokens):
    return 1.5 + (sizes / 1e6) ** -0.3 + (tokens / 1e8) ** -0.4


def test_losses_fall_with_size_and_tokens_and_stay_above_zero():
    found = fitted(points_of(law, noise=0.05))
    losses = found(np.geomspace(1e4, 1e12), 4e7)
    assert (np.diff(losses) <= 0).all() and (losses > 0).all()
    assert (np.diff(found(8e5, np.geomspace(1e6, 1e14))) <= 0).all()


def test_runs_near_the_target_count_most():
    """A short, narrow run that has not left a plateau says little."""
    points = points_of(law)
    odd = points._replace(losses=np.where((points.sizes == 1e5) & (points.tokens == 1e7), 6.0, points.losses))
    assert predicted(odd, 1.6e6, 4e7)[0] == pytest.approx(law(1.6e6, 4e7), rel=0.01)


def test_the_interval_grows_with_the_distance_and_with_what_the_law_missed():
    points = points_of(law)
    near, far = predicted(points, 1e6, 4e7)[1], predicted(points, 1e8, 4e9)[1]
    assert 0.015 <= near < 0.02 < far
    bent = points._replace(losses=points.losses * np.where(points.sizes == SIZES[-1], 0.8, 1.0))
    assert predicted(bent, 1.6e6, 4e7)[1] > 2 * predicted(points, 1.6e6, 4e7)[1]
    late = points._replace(losses=points.losses * np.where(points.tokens == TOKENS[-1], 0.8, 1.0))
    assert predicted(late, 8e5, 1e8)[1] > 2 * predicted(points, 8e5, 1e8)[1]


CURVE = [(10, 5.0, 4.5, 5.5), (100, 3.0, 2.7, 3.4)]


def expected() -> Expected:
    return Expected(Prediction({}, CURVE))


def test_the_band_follows_the_curve_between_its_points():
    assert expected().compare(9, 1e9) == ({}, "")
    assert expected().compare(100, 3.0)[0] == pytest.approx(
        {"expected_low": 3.0 * (2.7 / 3.0) ** TOLERANCE, "expected_high": 3.0 * (3.4 / 3.0) ** TOLERANCE}
    )
    middle = expected().compare(32, 4.0)[0]
    assert expected().compare(100, 3.0)[0]["expected_low"] < middle["expected_low"] < 4.5
    assert expected().compare(10**6, 3.0) == expected().compare(100, 3.0)


@pytest.mark.parametrize("bad", [1.0, 9.0, math.nan, math.inf])
def test_the_warning_comes_once_with_the_second_loss_in_a_row_outside(bad):
    assert IN_A_ROW == 2
    run = expected()
    warned = [bool(run.compare(100, loss)[1]) for loss in (bad, 3.0, bad, bad, bad, bad, 3.0, bad, bad)]
    assert warned == [False, False, False, True, False, False, False, False, True]


def write(**changes) -> list[str]:
    """Write a prediction for the tiny run of these tests, and return its flags."""
    assert run_here("--eval_freq", "4", *folders("first")) == 0
    options = compared(trained_with(load("first/latest.pt")["starts"][-1]))
    with open("prediction.json", "w") as file:
        json.dump(Prediction(options, [(1, 5.5, 5.4, 5.6)])._asdict() | changes, file)
    return ["--expect", "prediction.json", "--eval_freq", "1", *folders("run")]


def test_a_run_logs_its_band_and_warns_once_when_it_leaves_it(workdir, capsys, monkeypatch):
    flags = write(curve=[(1, 5.6, 5.5, 5.7), (8, 1.0, 0.99, 1.01)])
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
    assert list(metrics("logs-run", "expected_low")) == list(range(1, 9))
    status = json.loads(open("run/status.json").read())
    assert status["expected_high"] < 1.05 and len(status["warnings"]) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"options": {"max_lr": 3.0}}, "prediction.json: is for another run (num_layers None -> 2, "),
        ({"options": {"gone": 1}}, "prediction.json: is for another run ("),
        *(
            (
                {"curve": curve},
                "prediction.json: curve has no ascending steps, or a loss outside its interval; write it again",
            )
            for curve in ([], [(8, 2, 1, 3), (4, 2, 1, 3)], [(1, 2, 3, 1)])
        ),
        ({"curve": [(1, 2.0, 0.0, 3.0)]}, "prediction.json: curve[0][2] is 0.0; expected "),
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
    assert metrics("logs-run", "expected_low")
    with pytest.raises(
        UserError, match=r"another run \(max_steps 8 -> 9\); write it again with predict.py, or add --expect="
    ):
        run_here("--resume", "--max_steps", "9", *folders("run"))
    assert run_here("--resume", "--max_steps", "9", "--expect=", *folders("run")) == 0
