"""How a command ends."""

import os
import subprocess
import sys

import pytest
from conftest import REPO

ENDINGS = {
    "a result": ("return 3", 3, ""),
    "nothing to tell": ("pass", 0, ""),
    "a user's mistake": ("raise UserError('wrong; expected right')", 2, "error: wrong; expected right\n"),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, ""),
}


@pytest.mark.parametrize("under_torchrun", [False, True])
@pytest.mark.parametrize("body, status, stderr", ENDINGS.values(), ids=ENDINGS)
def test_command_ends_with_its_exit_status_and_at_most_one_line(body, status, stderr, under_torchrun):
    program = f"from steadygpt.cli import UserError, run_cli\ndef main():\n print('said')\n {body}\nrun_cli(main)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, cwd=REPO, env=os.environ | ({"RANK": "0"} if under_torchrun else {}),
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "said\n", stderr)


def test_rank_exits_without_interpreter_shutdown():
    """FSDP leaves gloo's threads behind, and one that wants the GIL just then would end a finished run by SIGABRT."""
    program = "import atexit, os\nfrom steadygpt.cli import run_cli\natexit.register(os.abort)\nrun_cli(lambda: 0)"
    for environment, status in (({"RANK": "1"}, 0), ({}, -6)):
        ended = subprocess.run([sys.executable, "-c", program], cwd=REPO, env=os.environ | environment)
        assert ended.returncode == status
