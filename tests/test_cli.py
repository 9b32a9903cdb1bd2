"""Exit statuses of commands."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO

ENDINGS = {
    "result": ("return 3", 3, ""),
    "no result": ("pass", 0, ""),
    "user error": ("raise UserError('wrong; expected right')", 2, "error: wrong; expected right\n"),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, ""),
}


@pytest.mark.parametrize("under_torchrun", [False, True])
@pytest.mark.parametrize("body, status, stderr", ENDINGS.values(), ids=ENDINGS)
def test_command_ends_with_its_exit_status_and_at_most_one_line(body, status, stderr, under_torchrun):
    program = f"from steadygpt.cli import UserError, run_cli\ndef main():\n print('printed')\n {body}\nrun_cli(main)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=REPO, env=os.environ | ({"RANK": "0"} if under_torchrun else {}),
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "printed\n", stderr)


def test_rank_exits_without_interpreter_shutdown():
    """Gloo threads outlive FSDP; one that takes the GIL during shutdown would end a finished run with SIGABRT."""
    program = "import atexit, os\nfrom steadygpt.cli import run_cli\natexit.register(os.abort)\nrun_cli(lambda: 0)"
    for environment, status in (({"RANK": "1"}, 0), ({}, -6)):
        ended = subprocess.run([sys.executable, "-c", program], cwd=REPO, env=os.environ | environment)
        assert ended.returncode == status


def test_a_rank_that_raises_leaves_at_once():
    """Shutting down NCCL could wait for the other ranks."""
    program = "import atexit, time\nfrom steadygpt.cli import run_cli\natexit.register(time.sleep, 60)\n"
    program += "run_cli(lambda: 1 / 0)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=REPO,
        env=os.environ | {"RANK": "1"},
        timeout=30,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_an_error_of_one_rank_alone_is_printed_unless_torchrun_ends_the_rank_first():
    program = (
        "from steadygpt.cli import UserError, run_cli\ndef main():\n raise UserError('out of memory')\nrun_cli(main)"
    )
    command, rank_1 = [sys.executable, "-c", program], os.environ | {"RANK": "1"}
    alone = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=rank_1)
    assert (alone.returncode, alone.stderr) == (2, "error: out of memory\n")
    ready = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    ready += program.replace("raise", "print('ready', flush=True)\n raise")
    ended = subprocess.Popen(
        [*command[:2], ready], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPO, env=rank_1
    )
    assert ended.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    ended.send_signal(signal.SIGTERM)
    assert ended.communicate(timeout=10) == (b"", b"")
    assert ended.returncode == -signal.SIGTERM
