"""The benchmarks: each at its smallest setting, the figures they compute, their pictures, the suite for GPUs."""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
import torch
from conftest import REPO

from benchmarks import cast, gpu_suite, kill_curve, picture, quickstart_curve
from benchmarks.compare import pairs_of_equal_precision, plot, report
from benchmarks.gpu_suite import Row
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
    "kill_curve": "--kills 1 --steps 4 --ranks 1 --plot {tmp}/steady.svg",
    "long_logs": "--lines 500 --files 3",
    "optimizer_cost": "--layers 1 --width 6 --tokens 4096 --rounds 1",
    "prepare_speed": "--megabytes 1 --rounds 1",
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
