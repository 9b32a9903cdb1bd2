"""The benchmark of the tokens until a loss: which runs it makes, what interrupts and repeats them, its tables."""

import json
import math
import re
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY
from torch.nn.functional import cross_entropy

from benchmarks import nanochat_run, tokens_to_loss
from benchmarks.tokens_to_loss import (
    SCALES,
    SEEDS,
    Run,
    Study,
    markdown,
    seeds_together,
    spread,
    spread_out,
)
from steadygpt.base.options import UserError
from steadygpt.config import parse_args
from steadygpt.run.data import find_data

BEST = {"gpt2": ("max_lr", 2e-3), "nanogpt": ("learning_rate", 4e-3), "nanochat": ("factor", 8)}


@pytest.fixture
def study(tmp_path) -> Study:
    """The smallest scale: 20 steps for the references."""
    return Study("tiny", tmp_path, {"nanogpt": tmp_path, "nanochat": tmp_path})


def finish(study: Study, run: Run, losses: dict[int, float | None]) -> None:
    """Leave what a finished run leaves."""
    study.folder(run).mkdir(parents=True, exist_ok=True)
    found = {step: {"val_loss": loss} for step, loss in losses.items()}
    (study.folder(run) / "evaluations.json").write_text(json.dumps(found))


def finish_sweep(study: Study) -> None:
    """Leave the sweep of the references, with 2.0 for the BEST setting and 2.5 for the others."""
    for run in study.sweep():
        if run.side in BEST:
            finish(study, run, {run.steps: 2.0 if run.changes == (BEST[run.side],) else 2.5})


@pytest.mark.parametrize(
    ("losses", "best"), [([2.5, 2.0, 2.5], 1), ([None, None, 2.5, 2.0, math.inf], 3), ([2.5, 2.0], None), ([], None)]
)
def test_the_best_setting_of_a_sweep_is_known_once_the_next_ones_are_worse(study, losses, best):
    runs = [run for run in study.sweep() if run.side == "gpt2"]
    for run, loss in zip(runs, losses, strict=False):
        if loss is not None:
            finish(study, run, {run.steps: loss if loss < math.inf else None})
    assert study.tuned("gpt2") == (None if best is None else runs[best].changes)


def finish_finals(study: Study) -> None:
    """Leave what all sides leave: GPT-2 ends at 2.0, which two seeds of the recipe reach in 5.7 steps, one in 4."""
    finish_sweep(study)
    for run in study.finals():
        number = SEEDS.index(run.seed)
        if run.side == "gpt2":
            assert run.changes == (BEST["gpt2"],)
            finish(study, run, {10: 2.6, 20: 1.9 + number / 10})
        elif run.side == "modern":
            finish(study, run, {run.steps // 2: 2.5, run.steps: 2.2 - run.steps / 20 + (number < 2) / 20})
    study.time_file.write_text(json.dumps({"gpt2": [0.1] * 3, "modern": [0.1, 0.15, 0.2]}))


def test_the_recipe_beside_the_references(study):
    assert {run.side for run in study.finals()} == {"modern"}
    assert study.tuned("nanochat") is None
    finish_finals(study)
    report = markdown(study)
    reached = "0.26 (0.20 to 0.29) | 0.39 (0.30 to 0.43) |"
    assert f"| GPT-2 max_lr 0.002, 20 steps, seeds: 3 | 2.000 (1.900 to 2.100) | {reached}" in report
    # 2.42 lies 3/10 of the way from step 10 to step 20. The recipe's run of 20 steps reaches it after 10.6.
    assert "| GPT-2 max_lr 0.002, 13 of 20 steps, seeds: 3 | 2.420 (2.390 to 2.450) | 0.82 (0.82 to 0.82) |" in report
    assert "| nanoGPT learning_rate 0.004, 20 steps, seeds: 1 | 2.000 | 0.26 (0.20 to 0.29) | not measured |" in report
    assert "| the recipe, 6 steps, seeds: 3 | 1.933 (1.900 to 1.950) |  |  |" in report
    assert "| the recipe | median 0.15 s (0.1 to 0.2) | 1.50 (1.00 to 2.00) |" in report
    assert spread([0.2, math.inf, 0.3]) == "not reached by 1 of 3 seeds"


def test_the_pictures_have_the_mean_of_the_seeds_and_the_tokens_saved(study):
    pytest.importorskip("matplotlib")
    assert seeds_together([{1: 3.0, 2: 2.0}, {1: 4.0, 2: 2.5}, {2: 3.0}]) == [(2, 2.5, 2.0, 3.0)]
    assert seeds_together([]) == []
    file = study.out / "picture.svg"
    tokens_to_loss.draw([study], file)  # without any run
    finish_finals(study)
    tokens_to_loss.draw_rates([study], file)
    tokens_to_loss.draw([study], file)
    assert "same loss, 3.9 times fewer tokens" in file.read_text()  # 1 / mean of 0.29, 0.29 and 0.2
    assert "same loss, 2.6 times less time" in file.read_text()  # a step of the recipe takes 1.5 times as long
    study.time_file.unlink()
    tokens_to_loss.draw([study], file)
    assert "less time" not in file.read_text()
    assert "prefers-color-scheme:dark" in file.read_text() and "var(--ink" in file.read_text()


NANOCHAT = """
import torch
from torch.nn import functional as F

class GPTConfig:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Optimizer(torch.optim.SGD):
    def step(self):
        print([(group["lr"], group.get("momentum"), group["weight_decay"]) for group in self.param_groups])
        super().step()

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table, self.config = torch.nn.Embedding(config.vocab_size, config.vocab_size), config
    def init_weights(self):
        self.table.weight.data.zero_()
    def num_scaling_params(self):
        return {"transformer_matrices": 600 if self.config.n_layer == 12 else 100, "lm_head": 0}
    def setup_optimizer(self, matrix_lr, weight_decay, **of_others):
        groups = [{"params": [self.table.weight], "lr": matrix_lr, "kind": "muon", "weight_decay": weight_decay}]
        assert of_others == {name: 0.5 * 2 * rate for name, rate in RATES.items()}
        optimizer = Optimizer(groups)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer
    def forward(self, inputs, targets):
        return F.cross_entropy(self.table(inputs).view(-1, 257), targets.view(-1))

RATES = {"embedding_lr": 0.3, "unembedding_lr": 0.008, "scalar_lr": 0.5}
"""
BASE_TRAIN = """
parser.add_argument("--run", type=str, default="dummy")
parser.add_argument("--embedding-lr", type=float, default=0.3)
parser.add_argument("--unembedding-lr", type=float, default=0.008)
parser.add_argument("--scalar-lr", type=float, default=0.5)
parser.add_argument("--matrix-lr", type=float, default=0.02)
parser.add_argument("--weight-decay", type=float, default=0.4)
raise RuntimeError("only definitions are used")
def get_lr_multiplier(it):
    return 1 - it / num_iterations
def get_muon_momentum(it):
    return 0.5 + 0.125 * it
def get_weight_decay(it):
    return weight_decay_scaled * math.cos(0)
"""


def test_nanochat_trains_on_our_rows_with_its_own_rates_and_schedules(workdir, monkeypatch, capsys):
    """A quarter of its batch: its rule halves the rates and the decay. The model has 1/6 of the tokens of depth 12."""
    for name, text in {"nanochat/gpt.py": NANOCHAT, "scripts/base_train.py": BASE_TRAIN}.items():
        Path("checkout", name).parent.mkdir(parents=True)
        Path("checkout", name).write_text(text)
    options = ["--max_steps", "2", "--eval_freq", "1", "--eval_tokens", "64", "--total_batch_size", str(2**17)]
    options = [*TINY, "--data_dir", "data", *options, "--mini_batch_size", "4096"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    nanochat_run.main(["checkout", "2", "found.json", *options])
    del sys.modules["nanochat"], sys.modules["nanochat.gpt"]
    updates = [literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("[(")]
    rate, decay = 0.02 * 0.5 * 2, pytest.approx(0.4 * 0.5 * 6 / 2)
    assert updates == [[(rate, 0.5, decay)], [(rate / 2, 0.625, decay)]]

    data, table = find_data(parse_args(options)[0]), torch.zeros(257, 257, requires_grad=True)
    optimizer = torch.optim.SGD([table], rate, 0.5, weight_decay=0.6)
    for step, (lr, momentum, _) in enumerate(update for (update,) in updates):
        rows = torch.from_numpy(data.sources[0].rows.read(step * 8192, 8192))
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        optimizer.zero_grad()
        cross_entropy(table[rows[:, :-1]].flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    rows = torch.from_numpy(data.val_sets[0].rows.read(0, 4))
    expected = cross_entropy(table[rows[:, :-1]].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert json.loads(Path("found.json").read_text())["2"]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_pieces_are_compared_seed_by_seed(study):
    study = replace(study, changes=((("qk_norm", "off"), ("muon_lr", "0.02")),))
    for run in study.pieces():
        if run.changes or run.seed != SEEDS[2]:
            finish(study, run, {run.steps: 2.0 + run.seed % 1337 / 10 + bool(run.changes) * (run.seed - 1336) / 100})
    report = markdown(study)
    assert "| as it is | 2.050 (2.000 to 2.100) |  |" in report
    assert "| qk_norm off muon_lr 0.02 | 2.120 (2.010 to 2.230) | 0.015 (0.010 to 0.020) |" in report


@pytest.mark.parametrize(
    "arguments", [["--only", "sweep/gpt3*"], ["--nanogpt", "/nowhere"], ["--nanochat", "/nowhere"], ["--scale", "124m"]]
)
def test_mistakes_are_reported_before_any_run(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_to_loss.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"^{arguments[0]} .*: .*expected"):
        tokens_to_loss.main(["--out", str(tmp_path), *arguments])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", SCALES)
def test_train_py_knows_the_options_of_every_run(scale, tmp_path):
    """The name of a run's folder needs them, those of the preset included."""
    study = Study(scale, tmp_path, {"nanogpt": tmp_path, "nanochat": tmp_path}, ((("qk_norm", "off"),),))
    finish_sweep(study)
    runs = study.sweep() + study.pieces() + study.finals()
    assert {run.side for run in runs} == set(tokens_to_loss.SIDES)
    shared = 3 + 4  # each reference at its best rate; the recipe in the sweep, and with three seeds among the pieces
    assert len({study.folder(run) for run in runs}) == len(runs) - shared


def test_the_packages_of_the_larger_scales_are_pinned():
    lines = [line for line in tokens_to_loss.PACKAGES.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert {line.partition("==")[0] + "-" for line in lines} > set(tokens_to_loss.HELD_OUT)


def test_rows_are_spread_out():
    assert spread_out(np.arange(13), 3, 2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
