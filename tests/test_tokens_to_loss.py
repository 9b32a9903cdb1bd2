"""The benchmark of the tokens until a loss: which runs it makes, what interrupts and repeats them, its tables."""

import dataclasses
import json
import math
import pickle
import sys

import numpy as np
import pytest

from benchmarks import loss_runs, tokens_to_loss
from benchmarks.loss_report import loss_within, markdown, spread, steps_to
from benchmarks.loss_runs import GROUPS, SCALES, SEEDS, Bench, Run, Scale, points_every, recorded_options
from benchmarks.tokens_to_loss import check_unchanged, output_of, train
from steadygpt.cli import UserError

BEST = {"gpt2": ("max_lr", 2e-3), "nanogpt": ("learning_rate", 4e-3)}
SHORT = Scale("stdlib", 1, 2, 16, 16, 2, 1, 100, 10, 64, 2, tuple(BEST))


@pytest.fixture
def bench(tmp_path) -> Bench:
    """A scale whose data are there: 257 tokens that repeat."""
    bench = Bench("short", SHORT, tmp_path)
    bench.data.mkdir(parents=True)
    for split, count in (("train", 5000), ("val", 500)):
        np.resize(np.arange(257, dtype=np.uint16), count).tofile(bench.data / f"{split}.bin")
    (bench.data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))
    return bench


def finish(bench: Bench, run: Run, losses: dict[int, float | None]) -> None:
    """Leave what a finished run leaves."""
    bench.folder(run).mkdir(parents=True, exist_ok=True)
    found = {step: {"val_loss": loss} for step, loss in losses.items()}
    (bench.folder(run) / "evaluations.json").write_text(json.dumps(found))


def finish_sweep(bench: Bench) -> None:
    """Leave the sweep of the references, with 2.0 for the BEST setting and 2.5 for the others."""
    for run in GROUPS["sweep"](bench):
        if run.side in BEST:
            finish(bench, run, {run.steps: 2.0 if run.changes == (BEST[run.side],) else 2.5})


def test_a_finished_run_is_not_repeated_and_keeps_only_its_losses(bench, monkeypatch, capsys):
    once = ["--quick", "--out", str(bench.out), "--only", "sweep/gpt2 max_lr 0.008*"]
    assert tokens_to_loss.main(once) == 0
    (folder,) = (bench.out / "1m-quick").iterdir()
    losses = {int(step): at["val_loss"] for step, at in json.loads((folder / "evaluations.json").read_text()).items()}
    assert list(losses) == list(range(1, 21)) and losses[20] < losses[1]
    assert not list(folder.glob("*.pt"))
    first = capsys.readouterr().out
    assert f"step 10, val loss {losses[10]:.4f}; " in first
    assert f"| GPT-2 | max_lr 0.008 | **{losses[20]:.4f}** |" in first

    monkeypatch.setattr(tokens_to_loss, "output_of", None)  # a second training would call it
    assert tokens_to_loss.main(once) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1]


def test_a_run_whose_options_have_changed_is_refused(tmp_path):
    check_unchanged(tmp_path, {"max_lr": 0.004, "qk_norm": True})
    check_unchanged(tmp_path, {"max_lr": 0.004, "qk_norm": True})
    with pytest.raises(UserError, match=r"max_lr 0\.004, qk_norm True; expected 0\.002, default"):
        check_unchanged(tmp_path, {"max_lr": 0.002})


def test_an_interruption_lets_the_run_save(tmp_path):
    saves = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('saved', 'w').close()))\n"
        "print('step 1/9 | val loss 3.0', flush=True)\n"
        "time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt), output_of([sys.executable, "-c", saves], tmp_path) as lines:
        for _ in lines:
            raise KeyboardInterrupt
    assert (tmp_path / "saved").exists()


def test_the_reason_of_a_failure_is_one_line(tmp_path):
    fails = [sys.executable, "-c", "import sys; print('step 1'); sys.exit('error: no space left')"]
    with pytest.raises(UserError, match=r"^the run failed: error: no space left$"), output_of(fails, tmp_path) as lines:
        assert "step 1\n" in lines


def with_nanogpt(bench: Bench, losses: str) -> Bench:
    """Add a stand-in for nanoGPT, whose losses are an expression of `step` and of its seed."""
    checkout = bench.out / "nanoGPT"
    checkout.mkdir()
    (checkout / "train.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "manual_seed = float\n"
        "seed = manual_seed(1337 + 0)\n"
        "for step in (0, 50, 100):\n"
        f"    print(f'step {{step}}: train loss 9.0, val loss', {losses})\n"
        "(out,) = (arg[10:] for arg in sys.argv if arg.startswith('--out_dir='))\n"
        "Path(out, 'ckpt.pt').touch()\n"
    )
    return dataclasses.replace(bench, nanogpt=checkout)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_of_nanogpt_ends_with_our_loss(bench, seed, monkeypatch):
    bench, evaluated = with_nanogpt(bench, "seed"), []  # nanoGPT has no option for it
    monkeypatch.setattr(tokens_to_loss, "evaluate", lambda _, checkpoint: evaluated.append(checkpoint) or 1.5)
    run, seen = Run("nanogpt", (("learning_rate", 1e-3),), 100, seed), []
    train(bench, run, lambda *point: seen.append(point))
    assert seen == [(50, seed), (100, seed)]
    assert bench.losses(run) == {50: seed, 100: 1.5}
    assert evaluated == [bench.folder(run) / "ckpt.pt"] and not evaluated[0].exists()


def test_a_divergence_is_a_result(bench, monkeypatch):
    run = Run("gpt2", (("max_lr", 8e-3),), 100)
    fails = "print('step 5/100 | val loss 7.5'); import sys; sys.exit('error')"
    monkeypatch.setattr(tokens_to_loss, "command_of", lambda *_: ([sys.executable, "-c", fails], bench.out))
    with pytest.raises(UserError, match="the run failed"):
        train(bench, run, lambda *_: None)
    reason = "5 consecutive steps with a non-finite loss or gradient"
    (bench.folder(run) / "status.json").write_text(json.dumps({"status": "failed", "reason": reason}))
    train(bench, run, lambda *_: None)
    assert bench.losses(run) == {5: 7.5, 100: float("inf")}
    assert "| GPT-2 | max_lr 0.008 | **diverged** |" in markdown(bench)


def test_a_divergence_of_nanogpt_is_a_result(bench):
    bench = with_nanogpt(bench, "2.5 if step < 100 else float('nan')")
    run = Run("nanogpt", (("learning_rate", 1),), 100)
    train(bench, run, lambda *_: None)
    assert bench.losses(run) == {50: 2.5, 100: float("inf")}


def test_nothing_is_compared_with_a_reference_that_diverged(bench):
    finish_sweep(bench)
    for run in GROUPS["final"](bench):
        finish(bench, run, {10: 2.1, run.steps: None if (run.side, run.seed) == ("gpt2", SEEDS[1]) else 2.0})
    assert "| GPT-2 max_lr 0.002, 100 steps, 3 seeds | diverged: 1 of 3 seeds |  |  |  |" in markdown(bench)


def test_the_references_are_trained_at_the_best_setting_of_their_sweep(bench):
    assert {run.side for run in GROUPS["final"](bench)} == {"modern"}
    finish_sweep(bench)
    found = {(run.side, run.changes, run.seed) for run in GROUPS["final"](bench) if run.side != "modern"}
    assert found == {(side, (setting,), seed) for side, setting in BEST.items() for seed in SEEDS}


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([2.5, 2.0, 2.5], 1), ([2.0, 2.5], 0), ([None, None, 2.5, 2.0, math.inf], 3),
        ([2.5, 2.0], None), ([None, 2.0, 2.5], None), ([], None),
    ],
)  # fmt: skip
def test_the_best_setting_of_a_sweep_is_known_once_the_next_ones_are_worse(bench, losses, best):
    runs = [run for run in GROUPS["sweep"](bench) if run.side == "gpt2"]
    for run, loss in zip(runs, losses, strict=False):
        if loss is not None:
            finish(bench, run, {run.steps: loss if loss < math.inf else None})
    assert bench.tuned("gpt2") == (None if best is None else runs[best].changes)


def test_the_recipe_is_tuned_at_one_scale_and_goes_to_the_others_unchanged(tmp_path):
    swept = {
        name: {run.side for run in GROUPS["sweep"](Bench(name, scale, tmp_path))} for name, scale in SCALES.items()
    }
    assert swept == {"1m": {*BEST, "modern"}, "10m": {"gpt2"}, "124m": {"gpt2"}}
    finals = [run for scale in SCALES.values() for run in GROUPS["final"](Bench("", scale, tmp_path))]
    assert {run.changes for run in finals if run.side == "modern"} == {()}


def test_nanogpt_without_a_sweep_takes_the_learning_rate_of_our_gpt2(bench):
    bench = dataclasses.replace(bench, scale=dataclasses.replace(SHORT, tuned=("gpt2",)))
    finish_sweep(bench)
    [run] = [run for run in GROUPS["final"](bench) if run.side == "nanogpt"]
    assert (run.changes, run.seed) == ((("learning_rate", BEST["gpt2"][1]),), SEEDS[0])


def test_nanogpt_has_its_last_point_at_the_last_step():
    assert [points_every(steps) for steps in (3000, 1000, 400, 150, 10, 21, 47)] == [150, 50, 20, 10, 1, 1, 47]


def test_reached_losses():
    points = [(50, 2.5), (100, 2.2), (150, 1.9), (20, 2.4), (40, 2.1)]
    assert (steps_to(points, 2.2), steps_to(points, 2.0), steps_to(points, 1.0)) == (40, 150, float("inf"))
    assert (loss_within(points, 39.9), loss_within(points, 100), loss_within(points, 10)) == (2.4, 2.1, float("inf"))


def test_the_recipe_beside_the_references(bench):
    """GPT-2 ends at 2.0 on average. Two seeds of the recipe are there after 30 of the 100 steps, one after 20."""
    finish_sweep(bench)
    for run in GROUPS["final"](bench):
        number = SEEDS.index(run.seed)
        if run.side == "gpt2":
            finish(bench, run, {50: 2.6, 100: 1.9 + number / 10})
        elif run.side == "modern":
            finish(bench, run, {run.steps // 2: 2.5, run.steps: 2.2 - run.steps / 100 + (number < 2) / 20})
    bench.time_file.write_text(json.dumps({"gpt2": [0.1] * 3, "modern": [0.1, 0.15, 0.2]}))
    gpt2, nanogpt, *recipe = [line for line in markdown(bench).splitlines() if " steps, " in line]
    reached = "0.27 (0.20 to 0.30) | 0.40 (0.30 to 0.45) | 1.933 (1.900 to 1.950)"
    assert gpt2 == f"| GPT-2 max_lr 0.002, 100 steps, 3 seeds | 2.000 (1.900 to 2.100) | {reached} |"
    shares = "0.27 (0.20 to 0.30) | not measured | not measured"
    assert nanogpt == f"| nanoGPT learning_rate 0.004, 100 steps, 1 seed | 2.000 | {shares} |"
    assert recipe[1] == "| the recipe, 30 steps, 3 seeds | 1.933 (1.900 to 1.950) |  |  |  |"
    assert "| the recipe | median 0.15 s (0.1 to 0.2) | 1.50 (1.00 to 2.00) |" in markdown(bench)
    assert spread([0.2, float("inf"), 0.3]) == "not reached by 1 of 3 seeds"


def test_each_piece_is_compared_with_its_side(bench):
    finish_sweep(bench)
    for run in GROUPS["pieces"](bench):
        if run.side == "modern" or run.changes[1:] in ((), (("optimizer", "muon"),)):
            finish(bench, run, {10: 1.5 + len(run.changes) / 100})
    report = markdown(bench)
    assert "| nothing changed | 1.5000 | 1.5100 |" in report
    assert "| Muon | 1.5100 (+0.0100) | 1.5200 (+0.0100) |" in report
    assert "| QK-norm | 1.5100 (+0.0100) | not finished |" in report


def test_a_package_is_either_training_or_validation_data(tmp_path, monkeypatch):
    names = [f"package{number}" for number in range(40)]
    for name in names:
        for module in ("__init__.py", "sub/module.py"):
            path = tmp_path / "site" / name / module
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    monkeypatch.setattr(loss_runs.sysconfig, "get_path", lambda _: str(tmp_path / "site"))
    installed = {name: [f"distribution-{name}"] for name in [*names, "gone"]}
    monkeypatch.setattr(loss_runs.importlib.metadata, "packages_distributions", lambda: installed)
    loss_runs.link_packages(tmp_path / "sources")
    train, val = ([p.read_text() for p in (tmp_path / "sources" / split).iterdir()] for split in ("train", "val"))
    assert sorted(train + val) == sorted(2 * names)
    assert set(train).isdisjoint(val) and 0 < len(val) < len(train)


@pytest.mark.parametrize("arguments", [["--only", "sweep/gpt3*"], ["--nanogpt", "/nowhere"], ["--scale", "124m"]])
def test_mistakes_are_reported_before_any_run(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_to_loss.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"^{arguments[0]} .*: .*expected"):
        tokens_to_loss.main(["--out", str(tmp_path), *arguments])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_train_py_knows_the_options_of_every_run(scale, tmp_path):
    bench = Bench("full", scale, tmp_path)
    finish_sweep(bench)
    for run in [run for runs_of in GROUPS.values() for run in runs_of(bench) if run.side != "nanogpt"]:
        assert recorded_options(scale, run)["max_steps"] == run.steps
