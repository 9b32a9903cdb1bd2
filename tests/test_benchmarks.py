"""The benchmarks' tools."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO

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
