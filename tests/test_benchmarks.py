"""The benchmarks: each at its smallest setting, the figures they compute, their pictures, the suite for GPUs."""

import argparse
import importlib.util
import json
import math
import re
import shlex
import subprocess
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import REPO, TINY

from benchmarks import cast, gpu_suite, kill_curve, nanochat_run, picture, quickstart_curve, tokens_to_loss
from benchmarks.compare import pairs_of_equal_precision, plot, report
from benchmarks.gpu_suite import Row
from benchmarks.tokens_to_loss import SCALES, SEEDS, Run, Study, markdown, seeds_together, spread, spread_out
from steadygpt.base.options import UserError
from steadygpt.config import parse_args


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPO / "benchmarks").glob("*.py")))
def test_each_benchmark_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")


def run_suite(monkeypatch, tmp_path, rows: list[Row], *further: str) -> dict:
    """Run the suite with other rows; return name -> text."""
    monkeypatch.setattr(gpu_suite, "ROWS", rows)
    if "{out}/data" not in rows[0].command:
        monkeypatch.setattr(gpu_suite, "write_tokens", lambda *_: None)
    gpu_suite.main(["--out", str(tmp_path), *further])
    return {row["name"]: row["text"] for row in json.loads((tmp_path / "gpu_suite.json").read_text())["rows"].values()}


SMALLEST = {  # of the benchmarks that are not in the suite for GPUs
    "growth": "--only seed validation ranks --ranks 16",
    "kill_curve": "--kills 1 --steps 4 --ranks 1 --plot {tmp}/steady.svg",
    "long_logs": "--lines 500 --files 3",
    "optimizer_cost": "--layers 1 --width 12 --tokens 4096 --rounds 1",
    "prepare_speed": "--megabytes 10 --rounds 1",
    "prepare_workers": "--workers 2 --megabytes 200 --rounds 1",
    "tokens_to_loss": "--scale tiny --out {tmp} --only 'sweep/gpt2 max_lr 0.008*'",
}
QUICK = [row for row in gpu_suite.ROWS if row.quick]
QUICK += [Row("fast", name, 300, f"-m benchmarks.{name} {flags}") for name, flags in SMALLEST.items()]


@pytest.mark.storm
@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_each_benchmark_runs_at_its_smallest_setting(row, monkeypatch, tmp_path):
    [text] = run_suite(monkeypatch, tmp_path, [row], *["--quick"] * bool(row.quick)).values()
    assert not re.match("failed|no time", text), text


# ---------------------------------------------------------------------------------------------------------------------
# figures


def test_ratios_compare_equal_precision_and_the_defaults_on_a_cpu(capsys, tmp_path):
    figures = {"SteadyGPT, bf16": [8.0, 6.0], "nanoGPT, bf16": [4.0, 4.0]}
    figures |= {"SteadyGPT, fp32": [3.0, 3.0], "nanoGPT, fp32": [2.0, 2.0], "GEMM limit, fp32": [4.0, 4.0]}
    args = argparse.Namespace(json=tmp_path / "found.json", plot=None)
    report(figures, "tokens/s", args, pairs_of_equal_precision(figures))
    assert [line for line in capsys.readouterr().out.splitlines() if " / " in line] == [
        "SteadyGPT, bf16 / nanoGPT, bf16: 1.75 (1.50 to 2.00)",
        "SteadyGPT, fp32 / nanoGPT, fp32: 1.50 (1.50 to 1.50)",
        "SteadyGPT, fp32 / GEMM limit, fp32: 0.75 (0.75 to 0.75)",
        "SteadyGPT, bf16 / nanoGPT, fp32: 3.50 (3.00 to 4.00)",
    ]
    report({"waiting": [1.0, 2.0, 6.0]}, "%", args)  # is added
    found = json.loads(args.json.read_text())
    assert found["SteadyGPT, bf16 / nanoGPT, bf16"] == {"median": 1.75, "low": 1.5, "high": 2.0, "unit": ""}
    assert found["waiting"] == {"median": 2.0, "low": 1.0, "high": 6.0, "unit": "%"}


def test_the_curve_of_the_quickstart_has_the_time_since_its_start(tmp_path):
    records = [{"step": 0, "time": 100.0, "start": {}}, {"step": 0, "time": 101.0, "loss": 5.5}]
    records += [{"step": 5, "time": 130.0, "cpu_percent": 9.0}, {"step": 10, "time": 160.0, "loss": 2.5}]
    records += [{"step": 10, "time": 163.0, "val_loss": 2.6}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    curve = quickstart_curve.read_curve(tmp_path / "metrics.jsonl")
    assert curve.losses == {0: 5.5, 10: 2.5} and curve.val_losses == {10: 2.6}
    assert (curve.seconds[0], curve.seconds[10]) == (1.0, 63.0)


def test_a_run_outlasts_its_kills():
    assert sum(kill_curve.kill_instants(50, 500, Random(0))) < 500


def test_a_checkpoint_of_nanogpt_that_a_kill_has_corrupted_is_replaced_by_its_copy(tmp_path):
    checkpoint = tmp_path / "ckpt.pt"
    assert kill_curve.keep_loading(checkpoint)  # killed before the first save
    torch.save({"iter_num": 1}, checkpoint)
    assert kill_curve.keep_loading(checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    assert not kill_curve.keep_loading(checkpoint)
    assert torch.load(checkpoint) == {"iter_num": 1}


# ---------------------------------------------------------------------------------------------------------------------
# pictures

KILLED = {
    "steadygpt": {"uninterrupted": [3.0, 2.0, 1.0], "killed": [3.0, 2.0, 1.0], "kills": [[1, 2, True]]},
    "nanogpt": {
        "uninterrupted": [3.0, 2.0, 1.5], "lives": [[0, [3.0, 2.0]], [1, [1.0, 0.5]]], "kills": [1], "corrupt": [],
    },
}  # fmt: skip
SPEEDS = {"SteadyGPT, bf16": [8.0, 7.0], "nanoGPT, bf16": [4.0, 5.0], "GEMM limit, bf16": [16.0, 16.5]}
CURVE = quickstart_curve.Curve({0: 1.0, 10: 63.0}, {0: 5.5, 10: 2.5}, {10: 2.6})
PICTURES = {
    "speeds": (lambda file: plot(SPEEDS, "tokens/s", file), ["SteadyGPT, bf16: 7.5", "GEMM limit 16.2"]),
    "the quickstart": (lambda file: quickstart_curve.draw(CURVE, file), ["validation"]),
    "killed runs": (lambda file: kill_curve.draw(KILLED, file), ["SteadyGPT: 1 kill, difference 0 at all steps"]),
}


def shown(svg: str) -> list[str]:
    """Return the texts of an SVG, which must not load or run anything."""
    assert not re.search(r"<script|@font-face|https?://(?!www.w3.org|purl.org|creativecommons|matplotlib)", svg)
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_follows_both_colour_schemes(name, tmp_path):
    pytest.importorskip("matplotlib")
    draw, texts = PICTURES[name]
    draw(tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text()
    assert {*texts} <= {*shown(svg)}
    assert svg.count("font-family") == svg.count(picture.FONT) > 0
    for colour, (light, dark) in picture.COLOURS.items():
        assert f"--{colour}:{light};" in svg and f"--{colour}:{dark};" in svg
    assert f": {picture.BLUE}" not in svg and f"var(--blue, {picture.BLUE})" in svg


def test_a_cast_has_lines_of_the_terminal_and_requires_equal_repeated_steps():
    step = "step   7/100 | loss 2.5000 | lr 1.00e-04"
    first = {"lines": ["device       1 x cpu, " + "x" * 80, "step 7/100 | val loss 3.1000", step], "pid": 42}
    second = {"lines": [step, "resumed at step 7: repeated 1 step, bit for bit the same losses", step], "pid": 43}
    texts = shown(cast.draw({"lives": [first, second]}))
    assert {"$ kill -9 42", "Killed", step, second["lines"][1]} <= {*texts}
    assert max(map(len, texts)) <= cast.COLUMNS and texts.count(step) == 3
    assert cast.step_of(first["lines"][1]) == -1 and cast.step_of(step) == 7
    with pytest.raises(SystemExit):
        cast.draw({"lives": [first, {"lines": [step, "warning: repeated step 7 has loss 1"], "pid": 43}]})


# ---------------------------------------------------------------------------------------------------------------------
# the suite for GPUs


def is_running(pid: str) -> bool:
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    return not state.startswith("Z") and bool(state)


MEASURES = "import json, sys; json.dump({'speed': FIGURE}, open(sys.argv[1], 'w'))".replace(
    "FIGURE", "dict(median=1234.5, low=1200, high=1300, unit='tokens/s')"
)
LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("CHILD", "w").write(str(child.pid))
print("compiling", flush=True)
time.sleep(600)
"""


def fake(name: str, program: str, limit_s: float = 20) -> Row:
    command = shlex.join(["-c", program.replace("{", "{{").replace("}", "}}"), "{json}"])
    return Row("fast", name, limit_s, command, target="fast enough")


def test_a_row_that_fails_or_hangs_costs_only_itself(monkeypatch, tmp_path):
    child = tmp_path / "child"
    rows = [
        fake("first", MEASURES),
        fake("memory", "print('step 1'); raise MemoryError('CUDA out of memory')"),
        fake("hangs", LEAVES_A_CHILD.replace("CHILD", str(child)), limit_s=3),
        fake("killed", "import os; os.kill(os.getpid(), 9)"),
        fake("tests", "print('=== 3 passed in 2 s ===')"),
        fake("long", MEASURES, limit_s=1000),
    ]
    first = "speed 1,234 tokens/s (1,200 to 1,300)"
    assert run_suite(monkeypatch, tmp_path, rows, "--minutes", "2") == {
        "first": first,
        "memory": "failed: MemoryError: CUDA out of memory",
        "hangs": "failed: did not end in 3 s; compiling",
        "killed": "failed: killed by SIGKILL; no output",
        "tests": "3 passed in 2 s",
        "long": "no time left",
    }
    assert not is_running(child.read_text())  # also a process in a session of its own
    assert f"| fast | first | {first} | fast enough |" in (tmp_path / "gpu_suite.md").read_text()


def test_another_call_runs_only_what_has_no_result(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # GPU images often lack git
    monkeypatch.setattr(gpu_suite, "git_commit", gpu_suite.git_commit.__wrapped__)  # without its cache
    first = run_suite(monkeypatch, tmp_path, [fake("a", MEASURES), fake("b", "raise ValueError('once')")])
    assert first["b"] == "failed: ValueError: once"
    rows = [fake("a", "raise ValueError('again')"), fake("b", MEASURES)]
    assert run_suite(monkeypatch, tmp_path, rows) == {"a": first["a"], "b": first["a"]}
    with pytest.raises(SystemExit, match="has figures with quick False"):
        run_suite(monkeypatch, tmp_path, rows, "--quick")


@pytest.mark.parametrize("row", gpu_suite.ROWS, ids=lambda row: row.name)
def test_the_command_of_each_row_exists(row):
    """A visit to a GPU is short: a row that cannot run would be lost."""
    words = shlex.split(row.command)
    module = words[1] if words[0] == "-m" else words[0]
    assert (REPO / module).exists() or importlib.util.find_spec(module)
    assert all(Path(REPO, word).exists() for word in words if word.startswith("tests/"))
    if "--config" in words:
        assert (REPO / "configs" / f"{words[words.index('--config') + 1]}.toml").exists()
    if module == "train.py":
        assert parse_args(words[1:])[0].profile == 5


@pytest.mark.storm
@pytest.mark.parametrize("row", [row for row in gpu_suite.ROWS if row.part == "right"], ids=lambda row: row.name)
def test_the_rows_of_tests_find_tests_in_each_file(row):
    words = [word.format(device="cpu") for word in shlex.split(row.command)]
    words = [word for word in words if word not in ("-v", "-n", "auto", "--dist", "worksteal")]
    collect = [sys.executable, *words, "--collect-only", "-q"]
    done = subprocess.run(collect, cwd=REPO, capture_output=True, text=True, check=True)
    for path in words:
        assert not path.startswith("tests/") or f"\n{path}::" in f"\n{done.stdout}"


# ---------------------------------------------------------------------------------------------------------------------
# tokens_to_loss: which runs it makes, its tables

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


def test_nanochat_trains_with_its_own_rates_and_schedules(workdir, monkeypatch, capsys):
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
    assert json.loads(Path("found.json").read_text())["2"]["val_loss"] < math.log(257)  # of zero weights


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
