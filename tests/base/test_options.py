"""Exit statuses of commands, and spellings of their options."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import REPO, refusal

import prepare_dataset
import train
from steadygpt import __version__
from steadygpt.base import options
from steadygpt.base.options import RankError, UserError, git_commit, option, parse_options, run_cli


@pytest.fixture
def ending(monkeypatch, capsys):
    """Return a function that runs a command in this process; it returns the exit status and what was printed."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(options.time, "sleep", lambda seconds: print(f"waits {seconds} s", file=sys.stderr))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which Ctrl-C replaces

    def run(end: int | BaseException | None, **environment: str) -> tuple[int, str, str]:
        def main() -> int | None:
            print("printed")
            if isinstance(end, BaseException):
                raise end
            return end

        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run_cli(main)
        return ended.value.code, *capsys.readouterr()

    return run


def run(program: str, **environment: str) -> tuple[int, str, str]:
    """Run a program that has run_cli, in a process of its own."""
    words = [sys.executable, "-c", f"from steadygpt.base.options import *\n{program}"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=REPO, env=os.environ | environment, timeout=30)
    return ended.returncode, ended.stdout, ended.stderr


LONG = "x" * 5000


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}], ids=str)
@pytest.mark.parametrize(("end", "status", "stderr"), [
    (3, 3, ""),
    (None, 0, ""),
    (UserError("wrong; expected right"), 2, "error: wrong; expected right\n"),
    (UserError("\x1b[2J: a\nb"), 2, r"error: \\x1b\[2J: a\\nb\n"),
    (OSError(36, "File name too long", LONG), 2, f"error: {LONG}: File name too long; .*\n"),
    (PermissionError(13, "Permission denied", "data/a"), 2, "error: data/a: Permission denied; .*\n"),
    (KeyboardInterrupt(), 130, ""),
    (UserError("https://me:pw@host/x: no such file"), 2, r"error: https://\.\.\.@host/x: no such file\n"),
    (UserError("'https://ghp_s3cret@host/x'"), 2, r"error: 'https://\.\.\.@host/x'\n"),
    (UserError("s3://AK:se/cret@b/a?pwd=1"), 2, r"error: s3://\.\.\.@b/a\?pwd=\.\.\.\n"),
    (UserError("s3://b/a?X-Token=pw&v=1"), 2, r"error: s3://b/a\?X-Token=\.\.\.&v=1\n"),
], ids=lambda value: repr(value)[:40])  # fmt: skip
def test_a_command_ends_with_its_exit_status_and_at_most_one_line(ending, environment, end, status, stderr):
    *others, err = ending(end, **environment)
    assert others == [status, "printed\n"] and re.fullmatch(stderr, err)


@pytest.mark.parametrize("raised", [OSError(5, "Input/output error", "data/a"), PermissionError(13, "denied")])
def test_other_errors_of_the_system_keep_their_traceback(ending, raised):
    status, _, stderr = ending(raised)
    assert status == 1 and stderr.startswith("Traceback")


def test_only_an_error_that_local_rank_0_lacks_is_printed_by_another_rank(ending):
    rank_1 = {"RANK": "1", "LOCAL_RANK": "1"}
    assert ending(UserError("no memory"), LOCAL_RANK="1")[2] == "error: no memory\n"  # without torchrun
    assert ending(RankError("no memory"), **rank_1) == (2, "printed\n", "error: no memory\n")
    assert ending(UserError("no memory"), **rank_1) == (2, "printed\n", "")
    # Importing PyTorch may take local rank 0 longer.
    assert ending(UserError("no memory"), **rank_1, TORCHELASTIC_RUN_ID="none") == (2, "printed\n", "waits 30 s\n")


def test_ctrl_c_in_a_constructor_prints_nothing():
    half = (
        "class Half:\n  def __init__(self): raise KeyboardInterrupt\n  def __del__(self): self.missing\nrun_cli(Half)"
    )
    assert run(half) == (130, "", "")


def test_a_rank_exits_without_interpreter_shutdown():
    """Gloo threads outlive FSDP; one that takes the GIL during shutdown would end a finished run with SIGABRT.

    After an error, shutting down NCCL could wait for the other ranks.
    """
    program = "import atexit\natexit.register(os.abort)\nrun_cli(lambda: {})".format
    assert run(program(0))[0] == -6
    assert run(program(0), RANK="1")[0] == 0
    status, _, stderr = run(program("1 / 0"), RANK="1")
    assert status == 1 and stderr.endswith("ZeroDivisionError: division by zero\n")


def test_characters_that_the_encoding_of_the_terminal_lacks_are_escaped():
    program = r"run_cli(lambda: print('\ufffd') or sys.stderr.write('\ufffd'))"
    assert run(f"import sys\n{program}", PYTHONIOENCODING="latin-1") == (1, "\\ufffd\n", "\\ufffd")


def test_a_pipe_that_closes_before_the_last_lines_is_no_error():
    program = "from steadygpt.base.options import *\nrun_cli(lambda: time.sleep(0.5) or print('late'))"
    words = [sys.executable, "-c", program]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO)
    command.stdout.close()
    assert (command.wait(30), command.stderr.read()) == (0, "")


def test_the_broken_pipe_of_a_socket_is_an_error():
    program = """
import socket
def main():
    print("printed")
    near, far = socket.socketpair()
    far.close()
    near.send(b"x")
run_cli(main)
"""
    status, stdout, stderr = run(program)
    assert (status, stdout) == (1, "printed\n")
    assert stderr.endswith("BrokenPipeError: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("url", ["s3://bucket/run", "abfs://container@account.dfs/run", "http://host:8080/a@b"])
def test_a_url_without_a_secret_is_accepted(url):
    assert parse_options(Watch, ["--mirror", url], "").mirror == url


@dataclass(frozen=True)
class Watch:
    folder: str = option("here", "", positional=True)
    once: bool = option(False, "")
    mirror: str = option("", "", no_password=True)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:sec/ret@bucket/run",
        "ftp://me:@host",
        "zip://a::sftp://me:pw@host/a",
        "https://host/a?sig=sec",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url):
    with refusal("--mirror ", "URL", "GOOGLE_APPLICATION_CREDENTIALS") as raised:
        parse_options(Watch, ["--mirror", url], "")
    assert "@" not in str(raised.value) and "sec" not in str(raised.value)


@pytest.mark.parametrize(("words", "expected"), [
    ("--once there", Watch("there", True)),
    ("there --once", Watch("there", True)),
    ("--once off there", Watch("there", False)),
    ("--once", Watch(once=True)),
    *((f"--mirror {url}", Watch(mirror=url)) for url in (
        "sftp://me@host/run", "http://host:8080/a@b", "abfs://a@b.net:443/c", "/mnt/a:b@c")),
])  # fmt: skip
def test_an_argument_behind_a_switch_is_not_its_value_and_a_url_without_a_password_is_accepted(words, expected):
    assert parse_options(Watch, words.split(), "") == expected


@pytest.mark.parametrize("main", [train.main, prepare_dataset.main])
def test_version_is_one_line_with_the_commit(main, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    out, err = capsys.readouterr()
    commit = f", commit {git_commit()[:12]}" if git_commit() else ""
    assert not ended.value.code and not err  # None, or 0 after W&B has replaced sys.exit
    assert out.rstrip("+\n") == f"SteadyGPT {__version__}{commit}" and out.count("\n") == 1
