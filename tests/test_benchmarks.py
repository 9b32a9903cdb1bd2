"""The tools of the benchmarks: held programs, ratios, instants of kills. Nothing is measured here."""

import signal
import subprocess
import sys
import time
from random import Random

import pytest
from conftest import REPO

from benchmarks.compare import report_precisions
from benchmarks.kill_curve import kill_instants

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
        "as they ship: SteadyGPT, bf16 / nanoGPT, fp32: 3.50 (3.00 to 4.00)",
    ]


def test_the_run_outlasts_its_kills():
    instants = kill_instants(50, 500, Random(0))
    assert len(instants) == 50 and min(instants) >= 1 and sum(instants) < 500
    assert instants == kill_instants(50, 500, Random(0))
