"""The benchmarks: each at its smallest setting, the figures they compute, the suite for GPUs."""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from benchmarks import gpu_suite
from benchmarks.compare import pairs_of_equal_precision, report
from benchmarks.gpu_suite import Row
from steadygpt.config import parse_args


def run_suite(monkeypatch, tmp_path, rows: list[Row], *further: str) -> dict:
    """Run the suite with other rows; return name -> text."""
    monkeypatch.setattr(gpu_suite, "ROWS", rows)
    if "{out}/data" not in rows[0].command:
        monkeypatch.setattr(gpu_suite, "write_tokens", lambda *_: None)
    gpu_suite.main(["--out", str(tmp_path), *further])
    return {row["name"]: row["text"] for row in json.loads((tmp_path / "gpu_suite.json").read_text())["rows"].values()}


SMALLEST = {  # of the benchmarks that are not in the suite for GPUs
    "core_speed": "--rows 11 --rounds 1 --size 1 1 8",
    "cast": "--data {tmp}/cast.json --plot {tmp}/cast.svg",
    "kill_curve": "--kills 1 --steps 4 --ranks 1 --plot {tmp}/steady.svg",
    "prepare_speed": "--megabytes 10 --rounds 1",
    "repeated_steps": "--precision fp32 --ranks 1 --models gpt2 --steps 4 8",
    "tokens_to_loss": "--scale tiny --out {tmp} --only 'sweep/gpt2 max_lr 0.008*'",
}
QUICK = [row for row in gpu_suite.ROWS if row.quick]
QUICK += [Row("fast", name, 300, f"-m benchmarks.{name} {flags}") for name, flags in SMALLEST.items()]
# Two train for longer, one needs a checkout of nanochat, and the others are parts of benchmarks.
NOT_RUN = {"monitor_picture", "quickstart_curve", "nanochat_run", "compare", "gpu_suite", "picture"}


@pytest.mark.parametrize("row", [
    pytest.param(row, marks=() if "checkpoint_cost" in row.command else pytest.mark.storm, id=row.name) for row in QUICK
])  # fmt: skip
def test_each_benchmark_runs_at_its_smallest_setting(row, monkeypatch, tmp_path):
    [text] = run_suite(monkeypatch, tmp_path, [row], *["--quick"] * bool(row.quick)).values()
    assert not re.match("failed|no time", text), text


def test_each_benchmark_can_be_imported_and_has_a_smallest_setting():
    names = {path.stem for path in (REPO / "benchmarks").glob("*.py")} - {"__init__"}
    for name in names:
        importlib.import_module(f"benchmarks.{name}")
    assert names - NOT_RUN == set(re.findall(r"-m benchmarks\.(\w+)", " ".join(row.command for row in QUICK)))


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
