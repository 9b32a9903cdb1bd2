"""The tools of the benchmarks: held programs, ratios, instants of kills, the suite. Nothing is measured here."""

import gzip
import importlib
import json
import signal
import subprocess
import sys
import time
from random import Random

import pytest
import torch
from conftest import REPO

from benchmarks import gpu_suite, kill_curve
from benchmarks.compare import reason_of, report_precisions
from benchmarks.gpu_suite import Row
from benchmarks.kill_curve import Kill, kill_instants
from benchmarks.trace_summary import summarize
from steadygpt.runlog import git_commit


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPO / "benchmarks").glob("*.py")))
def test_each_benchmark_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")


HOLDING = """
import signal, sys
from benchmarks.compare import REPO, HeldProgram, held_programs
program = "import time\\nwhile True: print('step', flush=True); time.sleep(0.01)"
with held_programs() as programs:
    programs["loop"] = HeldProgram([sys.executable, "-c", program], REPO, "step")
    programs["loop"].seconds_per_step(1)  # then the program is stopped
    print(programs["loop"].process.pid, flush=True)
    signal.pause()
"""


def is_running(pid: str) -> bool:
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    return not state.startswith("Z") and bool(state)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGHUP,
        pytest.param(signal.SIGKILL, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")),
    ],
)
def test_a_held_program_dies_with_its_benchmark(number):
    benchmark = subprocess.Popen([sys.executable, "-c", HOLDING], cwd=REPO, stdout=subprocess.PIPE, text=True)
    held = benchmark.stdout.readline().strip()
    assert is_running(held)
    benchmark.send_signal(number)
    assert benchmark.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 5
    while is_running(held) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(held)


def test_ratios_compare_equal_precision_and_the_defaults(capsys):
    figures = {"SteadyGPT, bf16": [8.0, 6.0], "nanoGPT, bf16": [4.0, 4.0]}
    figures |= {"SteadyGPT, fp32": [3.0, 3.0], "nanoGPT, fp32": [2.0, 2.0], "GEMM limit, fp32": [4.0, 4.0]}
    report_precisions(figures, "tokens/s", ("SteadyGPT, bf16", "nanoGPT, fp32"))
    assert [line for line in capsys.readouterr().out.splitlines() if " / " in line] == [
        "SteadyGPT, bf16 / nanoGPT, bf16: 1.75 (1.50 to 2.00)",
        "SteadyGPT, fp32 / nanoGPT, fp32: 1.50 (1.50 to 1.50)",
        "SteadyGPT, fp32 / GEMM limit, fp32: 0.75 (0.75 to 0.75)",
        "by default: SteadyGPT, bf16 / nanoGPT, fp32: 3.50 (3.00 to 4.00)",
    ]


def test_killed_runs_are_compared_also_without_matplotlib(monkeypatch, capsys):
    """Its command in README must work after README's set-up. Here no run is started."""
    for name, found in {
        "undisturbed": None, "killed": [Kill(3, 1, True)], "losses": {0: 2.5, 1: 2.0}, "weights": {"w": torch.ones(2)}
    }.items():  # fmt: skip
        monkeypatch.setattr(kill_curve, name, lambda *_, found=found: found)
    monkeypatch.setattr(kill_curve.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(kill_curve.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["kill_curve", "--kills", "1", "--steps", "2"])
    kill_curve.main()
    out = capsys.readouterr().out
    assert out.startswith("there will be no picture: matplotlib is missing; pip install matplotlib\n")
    assert "largest difference of the losses of 2 steps: 0\n" in out


def test_the_run_outlasts_its_kills():
    instants = kill_instants(50, 500, Random(0))
    assert len(instants) == 50 and min(instants) >= 1 and sum(instants) < 500
    assert instants == kill_instants(50, 500, Random(0))


# ---------------------------------------------------------------------------------------------------------------------
# gpu_suite: fake rows, then the real command

MEASURES = "import json, sys; json.dump({'figures': {'speed': FIGURE}, 'notes': ['fake']}, open(sys.argv[1], 'w'))"
FIGURE = "dict(median=1234.5, low=1200, high=1300, unit='tokens/s')"
LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("CHILD", "w").write(str(child.pid))
print("compiling", flush=True)
time.sleep(600)
"""


def fake(key: str, program: str, limit_s: float = 20, **options) -> Row:
    return Row(key, f"row {key}", ["-c", program.replace("FIGURE", FIGURE), "{json}"], limit_s, **options)


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Run the suite on the CPU with fake rows; return the content of its JSON."""

    def run(*rows: Row, flags=()) -> dict:
        monkeypatch.setattr(gpu_suite, "ROWS", dict.fromkeys(gpu_suite.PARTS, lambda args, device: rows))
        machine = {"device": "1 x NVIDIA H100", "driver": "580", "software": "torch", "quick": False, "kind": "cuda"}
        monkeypatch.setattr(gpu_suite, "describe_machine", lambda *_: machine)
        assert gpu_suite.main(["--out", str(tmp_path), "--parts", rows[0].key.split("/")[0], *flags]) == 0
        return json.loads((tmp_path / "gpu_suite.json").read_text())

    return run


def test_a_row_that_fails_or_hangs_costs_only_itself(suite, tmp_path, capsys):
    child = tmp_path / "child"
    rows = suite(
        fake("fast/first", MEASURES),
        fake("fast/memory", "print('step 1'); raise MemoryError('CUDA out of memory')"),
        fake("fast/hangs", LEAVES_A_CHILD.replace("CHILD", str(child)), limit_s=3),
        fake("fast/killed", "import os; os.kill(os.getpid(), 9)"),
        fake("fast/silent", "pass"),
        fake("fast/needs", MEASURES, missing="--hellaswag_file is not given"),
        fake("fast/long", MEASURES, limit_s=1000),
        fake("fast/last", MEASURES),
        flags=("--minutes", "2"),
    )["rows"]
    reasons = {key: row["reason"] for key, row in rows.items()}
    assert reasons == {
        "fast/first": "",
        "fast/memory": "MemoryError: CUDA out of memory",
        "fast/hangs": "did not end in 3 s; compiling",
        "fast/killed": "killed by SIGKILL; no output",
        "fast/silent": "no output",
        "fast/needs": "--hellaswag_file is not given",
        "fast/long": "no time left",
        "fast/last": "",
    }
    assert not is_running(child.read_text())  # also a process in a session of its own
    table = (tmp_path / "gpu_suite.md").read_text()
    assert all(table.count(f"| {row['title']} |") == 1 for row in rows.values())
    assert "| fast | row fast/first | 1,234 tokens/s (1,200 to 1,300); fake |" in table
    assert "| fast | row fast/memory | failed: MemoryError: CUDA out of memory |" in table
    assert "row fast/last: begins, at most 20 s" in capsys.readouterr().out


def test_git_is_not_needed(suite, tmp_path, monkeypatch):
    """GPU images often lack it."""
    monkeypatch.setattr(gpu_suite, "git_commit", git_commit.__wrapped__)  # without its cache
    monkeypatch.setenv("PATH", str(tmp_path))
    row = suite(fake("fast/a", MEASURES))["rows"]["fast/a"]
    assert (row["status"], row["commit"]) == ("ok", "unknown")


def test_a_part_ends_within_its_minutes(suite):
    start_s = time.monotonic()
    rows = suite(fake("fast/hangs", "import time; time.sleep(600)", limit_s=4), flags=("--minutes", "0.05"))["rows"]
    assert rows["fast/hangs"]["reason"] == "did not end in 3 s; no output"
    assert time.monotonic() - start_s < 10


def test_another_call_adds_rows_and_repeats_only_those_without_a_figure(suite, tmp_path):
    first = suite(fake("fast/a", MEASURES), fake("fast/b", "raise ValueError('once')"))["rows"]
    (tmp_path / "gpu_suite.md").unlink()
    both = suite(fake("fits/c", MEASURES), fake("fast/a", "raise ValueError('again')"), fake("fast/b", MEASURES))[
        "rows"
    ]
    assert list(both) == ["fast/a", "fast/b", "fits/c"]
    assert both["fast/a"] == first["fast/a"]
    assert [row["status"] for row in both.values()] == ["ok", "ok", "ok"]
    assert "| right | all rows | not run: `--parts right` was not called |" in (tmp_path / "gpu_suite.md").read_text()


def test_targets_are_compared_with_the_figures_of_their_rows(suite, tmp_path):
    speed = MEASURES.replace("'speed'", "'SteadyGPT'").replace("FIGURE", FIGURE.replace("1234.5", "512345"))
    cost = MEASURES.replace("'speed'", "'cost'").replace("FIGURE", FIGURE.replace("1234.5", "1.4"))
    targets = suite(fake("fast/124m", speed), fake("fast/checkpoint", cost))["targets"]
    found = {what: reached for what, _, reached in targets}
    assert found["124 M on one H100, at least 500,000 tokens/s"] == "reached"
    assert found["124 M on one H200, at least 550,000 tokens/s"] == "a different device"
    assert found["a checkpoint costs at most one step"] == "missed"
    assert found["generation, at least 0.9 x nanoGPT"] == "not measured"


def test_a_stopped_suite_ends_its_row(tmp_path):
    row = LEAVES_A_CHILD.replace("CHILD", str(tmp_path / "child"))
    machine = {"device": "x", "driver": "x", "software": "x", "quick": True, "kind": "cpu"}
    program = (
        "from benchmarks import gpu_suite\n"
        f"gpu_suite.ROWS['fast'] = lambda *_: [gpu_suite.Row('fast/a', 'a', ['-c', {row!r}], 60)]\n"
        f"gpu_suite.describe_machine = lambda *_: {machine}\n"
        f"gpu_suite.main(['--out', {str(tmp_path)!r}, '--parts', 'fast'])"
    )
    suite = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    suite.terminate()
    assert suite.wait(20) == 128 + signal.SIGTERM
    assert not is_running((tmp_path / "child").read_text())
    assert json.loads((tmp_path / "gpu_suite.json").read_text())["rows"]["fast/a"]["reason"] == "interrupted"


def test_the_suite_records_and_summarizes_a_trace(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--out", str(tmp_path), "--parts", "trace", "--quick"]
    subprocess.run([*command, "--device", "cpu"], cwd=REPO, check=True, timeout=300)
    row = json.loads((tmp_path / "gpu_suite.json").read_text())["rows"]["trace/124m"]
    assert row["status"] == "ok", row
    assert row["figures"]["step"]["median"] > 0
    assert "aten::" in (tmp_path / "trace.txt").read_text()
    assert (tmp_path / "trace.json.gz").stat().st_size > 10_000


def test_the_reason_is_the_last_error_or_the_last_line():
    out_of_memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.28 GiB."
    assert reason_of(f"step 1\n{out_of_memory}\n[W1122 ProcessGroupNCCL.cpp] warning\n") == out_of_memory
    assert reason_of("loading\nerror: --mini_batch_size auto: unknown\n") == "error: --mini_batch_size auto: unknown"
    assert reason_of("\n") == "no output"


def test_a_test_that_hangs_is_named(tmp_path):
    lines = [
        {"name": "tests/a.py::test_fast", "outcome": "did not end"},
        {"name": "tests/a.py::test_fast", "outcome": "passed", "seconds": 0.1, "reason": ""},
        {"name": "tests/a.py::test_nccl", "outcome": "did not end"},
        {"name": "tests/a.py::test_bits", "outcome": "failed", "seconds": 2, "reason": "assert 1 == 2"},
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = gpu_suite.read_outcomes(tmp_path / "lines")
    assert found["reason"] == "test_nccl did not end, and 1 more below"
    assert found["text"] == "test_nccl did not end\ntest_bits failed assert 1 == 2"
    assert {name: figure["median"] for name, figure in found["figures"].items()} == {
        "passed": 1, "failed": 1, "did not end": 1,
    }  # fmt: skip


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_a_trace_of_a_gpu_is_summarized_by_kernels_and_gaps(tmp_path):
    """Two steps of 1 ms: kernels of two streams overlap, then the GPU waits 300 us for the optimizer on the host."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (0, 1000):
        events += [
            event("user_annotation", f"ProfilerStep#{start}", start, 1000),
            event("gpu_user_annotation", f"ProfilerStep#{start}", start, 900),
            event("cuda_runtime", "cudaStreamSynchronize", start + 100, 400),
            event("user_annotation", "Optimizer.step", start + 500, 350),
            event("cpu_op", "aten::_fused_adamw_", start + 520, 270),
            event("kernel", "gemm", start, 500, tid=7),
            event("kernel", "copy", start + 300, 200, tid=9),
            event("kernel", "adamw", start + 800, 200, tid=7),
        ]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    figures, text = summarize(file)
    assert figures["step"] == (1.0, "ms a step")
    assert figures["host"][0] == pytest.approx(0.6)
    assert figures["idle"][0] == pytest.approx(30)  # 600 of 2,000 us
    lines = text.splitlines()
    assert [line.split() for line in lines if line.endswith("gemm")] == [["1.0", "55.6%", "2", "gemm"]]
    assert "300 us at" in lines[-1]
    assert lines[-1].endswith("aten::_fused_adamw_ in Optimizer.step")
