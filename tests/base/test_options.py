"""Exit statuses of commands."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import REPO

import prepare_dataset
import train
from steadygpt import __version__, git_commit
from steadygpt.base.options import UserError, option, parse_options


def run(program: str, **environment: str) -> tuple[int, str, str]:
    """Run a program that has run_cli and the errors; return its exit status and what it printed."""
    words = [sys.executable, "-c", f"from steadygpt.base.options import *\n{program}"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=REPO, env=os.environ | environment, timeout=30)
    return ended.returncode, ended.stdout, ended.stderr


ENDINGS = {
    "result": ("return 3", 3, ""),
    "no result": ("pass", 0, ""),
    "user error": ("raise UserError('wrong; expected right')", 2, "error: wrong; expected right\n"),
    "values with control characters": (r"raise UserError('\x1b[2J: a\nb')", 2, "error: \\x1b[2J: a\\nb\n"),
    "a path that cannot be": (
        "os.stat('x' * 5000)",
        2,
        f"error: {'x' * 5000}: File name too long; change its permissions, or give another path\n",
    ),
    "a path without access": (
        "raise PermissionError(13, 'Permission denied', 'data/a')",
        2,
        "error: data/a: Permission denied; change its permissions, or give another path\n",
    ),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, ""),
    "Ctrl-C in a constructor": (
        "class Half:\n  def __init__(self): raise KeyboardInterrupt\n  def __del__(self): self.missing\n Half()",
        130,
        "",
    ),
}


@pytest.mark.parametrize("body, status, stderr", ENDINGS.values(), ids=ENDINGS)
def test_command_ends_with_its_exit_status_and_at_most_one_line(body, status, stderr):
    assert run(f"def main():\n print('printed')\n {body}\nrun_cli(main)") == (status, "printed\n", stderr)


@pytest.mark.parametrize("name", ["result", "user error", "Ctrl-C"])
def test_a_rank_ends_with_the_same_exit_status_and_line(name):
    body, status, stderr = ENDINGS[name]
    program = f"def main():\n print('printed')\n {body}\nrun_cli(main)"
    assert run(program, RANK="0") == (status, "printed\n", stderr)


@pytest.mark.parametrize("raised", ["OSError(5, 'Input/output error', 'data/a')", "PermissionError(13, 'denied')"])
def test_other_errors_of_the_system_keep_their_traceback(raised):
    status, _, stderr = run(f"def main():\n raise {raised}\nrun_cli(main)")
    assert status == 1 and stderr.startswith("Traceback")


@dataclass(frozen=True)
class Copy:
    mirror: str = option("", "", no_password=True)


@pytest.mark.parametrize("url", ["s3://key:sec/ret@bucket/run", "ftp://me:@host", "zip://a::sftp://me:pw@host/a"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(UserError, match=r"--mirror is a URL with a password.*GOOGLE_APPLICATION_CREDENTIALS") as raised:
        parse_options(Copy, ["--mirror", url], "")
    assert "@" not in str(raised.value) and "sec" not in str(raised.value)


@pytest.mark.parametrize("url", ["sftp://me@host/run", "http://host:8080/a@b", "abfs://a@b.net:443/c", "/mnt/a:b@c"])
def test_a_url_without_a_password_is_accepted(url):
    assert parse_options(Copy, ["--mirror", url], "").mirror == url


def test_characters_that_the_encoding_of_the_terminal_lacks_are_escaped():
    program = r"run_cli(lambda: print('\ufffd') or sys.stderr.write('\ufffd'))"
    assert run(f"import sys\n{program}", PYTHONIOENCODING="latin-1") == (1, "\\ufffd\n", "\\ufffd")


def test_a_pipe_that_closes_before_the_last_lines_is_no_error():
    program = "from steadygpt.base.options import *\nrun_cli(lambda: time.sleep(0.5) or print('late'))"
    words = [sys.executable, "-c", program]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO)
    command.stdout.close()
    assert (command.wait(30), command.stderr.read()) == (0, "")


@dataclass(frozen=True)
class Watch:
    folder: str = option("here", "", positional=True)
    once: bool = option(False, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--once there", Watch("there", True)),
        ("there --once", Watch("there", True)),
        ("--once off there", Watch("there", False)),
        ("--once", Watch(once=True)),
    ],
)
def test_argument_behind_a_switch_is_not_its_value(words, expected):
    assert parse_options(Watch, words.split(), "") == expected


def test_rank_exits_without_interpreter_shutdown():
    """Gloo threads outlive FSDP; one that takes the GIL during shutdown would end a finished run with SIGABRT."""
    program = "import atexit\natexit.register(os.abort)\nrun_cli(lambda: 0)"
    assert run(program)[0] == -6
    assert run(program, RANK="1")[0] == 0


def test_a_rank_that_raises_leaves_at_once():
    """Shutting down NCCL could wait for the other ranks."""
    program = "import atexit\natexit.register(time.sleep, 60)\nrun_cli(lambda: 1 / 0)"
    status, _, stderr = run(program, RANK="1")
    assert status == 1
    assert stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(("kind", "printed"), [("RankError", "error: no memory\n"), ("UserError", "")])
def test_only_an_error_that_local_rank_0_lacks_is_printed_by_another_rank(kind, printed):
    program = f"def main():\n raise {kind}('no memory')\nrun_cli(main)"
    assert run(program, RANK="1", LOCAL_RANK="1") == (2, "", printed)
    assert run(program, LOCAL_RANK="1") == (2, "", "error: no memory\n")  # left behind, without torchrun


@pytest.mark.parametrize("main", [train.main, prepare_dataset.main])
def test_version_is_one_line_with_the_commit(main, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    out, err = capsys.readouterr()
    commit = f", commit {git_commit()[:12]}" if git_commit() else ""
    assert (ended.value.code, err) == (None, "")
    assert out.rstrip("+\n") == f"SteadyGPT {__version__}{commit}" and out.count("\n") == 1


def test_an_incomplete_installation_is_refused_in_one_line(tmp_path):
    """`pip install .` builds a wheel, which has no train.py; `pip install -e .` builds none."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("setup.py", "pyproject.toml", "README.md", "steadygpt"):
        (tmp_path / name).symlink_to(REPO / name)
    words = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: SteadyGPT runs from a clone")
    assert list(tmp_path.rglob("*.whl")) == []
