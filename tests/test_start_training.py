"""./start_training.sh: its questions, the command that follows from the answers, and training in the background."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, TINY, write_data

sys.path.append(str(REPO / "scripts"))

import start_training

from steadygpt.base.options import UserError
from steadygpt.config import PRESETS, TrainConfig, parse_args
from steadygpt.run.identity import write_run


class Typed(io.StringIO):
    """A terminal at which these lines are typed; then Ctrl-D."""

    def isatty(self) -> bool:
        return True


class Session:
    """A machine without a GPU, with data in data/. Commands are noted, and return `status`; training is noted too."""

    status, stderr = 0, ""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.ran, self.started = monkeypatch, [], []
        monkeypatch.setattr(start_training, "GPUS", 0)
        monkeypatch.delenv("NPROC", raising=False)
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(start_training, "train_and_watch", lambda *arguments: self.started.append(arguments) or 0)

    def run(self, words, **_):
        self.ran.append(words)
        return subprocess.CompletedProcess(words, self.status, stderr=self.stderr)

    def type(self, *answers: str) -> None:
        self.monkeypatch.setattr(sys, "stdin", Typed("".join(f"{answer}\n" for answer in answers)))


@pytest.fixture
def session(workdir, monkeypatch) -> Session:
    return Session(monkeypatch)


def test_dialogue_in_a_terminal_ends_in_the_plan_of_the_printed_command(workdir):
    """A wrong answer, a preset by number, and Enter to all other questions."""
    terminal, stdin = pty.openpty()
    os.write(terminal, b"99\n1\n\n")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NPROC": ""}
    words, flags = [REPO / "start_training.sh"], [*TINY, "--dry_run"]
    done = subprocess.run([*words, *flags], stdin=stdin, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found '99'; expected a number from 1 to 13, or a name" in done.stdout
    folders = "--data_dir=data --checkpoint_dir=checkpoints/test --logdir=logs/test"
    (printed,) = re.findall(r"^\S*python\S* .*train\.py .*$", done.stdout, re.MULTILINE)
    assert shlex.split(printed)[2:] == [*f"--config test {folders} --use_tensorboard=on".split(), *flags]
    assert re.search(r"^steps +8, each of 64 tokens", done.stdout, re.MULTILINE)


def test_printed_command_is_the_one_that_runs(session, capsys):
    session.type("test", "", "")
    assert start_training.main(["--run_name", "it's", "--checkpoint_dir", "my runs/first"]) == 0
    [(words, folder, console)] = session.started
    assert f"\n{shlex.join(words)}\n" in capsys.readouterr().out
    assert session.ran == [[*words, "--dry_run"]]
    assert "--logdir=logs/first --use_tensorboard=on --run_name" in shlex.join(words)
    assert (folder, console) == (Path("my runs/first"), Path("logs/first/console.txt"))


def test_presets_are_listed_from_the_smallest_to_the_largest():
    found = start_training.presets()
    assert found.keys() == {path.stem for path in PRESETS.glob("*.toml")}
    assert [*found][2] == "gpt2" and [*found][-1] == "gpt2-xl"
    assert found["gpt2"] == "GPT-2 small: 124.4 M parameters, context 1,024, a GPU of 24 GB"


@pytest.mark.parametrize(("given", "answers", "found"), [
    ("--config test --data_dir data --checkpoint_dir c --no_use_tensorboard", [],
     "--logdir=logs/c --config test --data_dir data --checkpoint_dir c --no_use_tensorboard"),
    ("--resume best", [], "--resume best"),
    ("--config test", [""], "--data_dir=data --checkpoint_dir=checkpoints/test-3 --logdir=logs/test-3 "
     "--use_tensorboard=on --config test"),
])  # fmt: skip
def test_flags_answer_their_questions_and_a_new_run_gets_folders_without_another_run(session, given, answers, found):
    Path("checkpoints/test").mkdir(parents=True)
    Path("logs/test-2").mkdir(parents=True)
    session.type(*answers)
    assert shlex.join(start_training.flags_of_run(given.split())) == found


def test_a_resumed_run_asks_nothing_and_its_output_goes_to_its_own_logs(session):
    Path("checkpoints").mkdir()
    write_run(Path("checkpoints"), "a" * 16, TrainConfig(logdir="/elsewhere/logs"))
    session.type("")
    assert start_training.main(["--resume"]) == 0
    assert session.started[0][2] == Path("/elsewhere/logs/console.txt")


def test_yes_accepts_every_default(session, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(UserError, match="no terminal to ask questions on; add --yes"):
        start_training.main([])
    assert start_training.main(["--yes"]) == 0
    assert "number or name [quickstart]: quickstart\n" in capsys.readouterr().out
    [(words, _, _)] = session.started
    assert "--config quickstart --data_dir=data --checkpoint_dir=checkpoints/quickstart" in shlex.join(words)


def test_data_is_found_with_its_tokens(session, capsys):
    write_data(Path("data/more"))
    write_data(Path("data/interrupted"))
    manifest = Path("data/interrupted/manifest.json")
    manifest.write_text(manifest.read_text().replace("true", "false"))
    session.type("2")
    assert start_training.choose_data("data/stdlib") == "data/more"
    shown = capsys.readouterr().out
    assert "  2  data/more  1,200 training tokens (bytes)" in shown
    assert "skipped data/interrupted: its preparation was interrupted" in shown


def test_without_data_the_standard_library_is_offered(session, monkeypatch, capsys):
    monkeypatch.chdir("data")
    session.type("", "", "n")
    assert start_training.choose_data("data/edu_fineweb10B") == "data/stdlib"
    prepare = f"{REPO / 'prepare_dataset.py'} --source stdlib --tokenizer bytes --out data/stdlib"
    assert shlex.join(session.ran[0][1:]) == prepare
    session.status = 1
    for status in (1, "nothing was started"):  # the preparation fails; it is not wanted
        with pytest.raises(SystemExit) as ended:
            start_training.choose_data("data/edu_fineweb10B")
        assert ended.value.code == status
    assert "To prepare FineWeb-Edu 10B (24 GB of disk): /" in capsys.readouterr().out
    assert len(session.ran) == 2


@pytest.mark.parametrize(("gpus", "nproc", "flags", "processes"), [
    (0, "", [], 0), (4, "", [], 4), (4, "", ["--device", "cpu"], 0), (4, "2", [], 2), (4, "1", [], 0),
])  # fmt: skip
def test_processes(session, monkeypatch, gpus, nproc, flags, processes):
    monkeypatch.setattr(start_training, "GPUS", gpus)
    if nproc:
        monkeypatch.setenv("NPROC", nproc)
    program, *words = start_training.command_of(parse_args(flags)[0], ["-v"])
    expected = ["--standalone", f"--nproc_per_node={processes}"] if processes else []
    assert Path(program).name == ("torchrun" if processes else Path(sys.executable).name)
    assert words == [*expected, str(REPO / "train.py"), "-v"]


@pytest.mark.parametrize("answers", [(), ("test", "", "n")])
def test_nothing_starts_after_ctrl_d_or_a_no(answers, session):
    session.type(*answers)
    with pytest.raises(SystemExit, match="nothing was started"):
        start_training.main([])
    assert not session.started


def test_a_plan_that_fails_prints_the_error_and_starts_nothing(session, capsys):
    session.status, session.stderr = 2, "W1123 torchrun: a warning\nerror: 3 rows; expected 2\nTraceback of torchrun\n"
    session.type("", "")
    assert start_training.main(["--config", "test"]) == 2
    assert capsys.readouterr().err == "error: 3 rows; expected 2\n"
    assert not session.started


TRAINS = """
import pathlib, time
status = pathlib.Path("checkpoints/status.json")
status.parent.mkdir()
try:
    for doing in ("starting", "training"):
        status.write_text('{"status": "running", "doing": "' + doing + '"}')
        time.sleep(0.5)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped")
"""
SHOWS = """
import os, pathlib, signal, sys, time
os.kill(os.getppid(), signal.SIGINT)
time.sleep(0.5)
pathlib.Path("ended").write_text(pathlib.Path(sys.argv[1], "status.json").read_text())
"""


def test_training_outlives_ctrl_c_in_the_monitor_and_stops_at_a_signal_of_its_own(workdir, monkeypatch, capsys):
    """The terminal sends Ctrl-C to this process and to the monitor, which opens after the first step."""
    Path("monitor.py").write_text(SHOWS)
    monkeypatch.setattr(start_training, "MONITOR", Path("monitor.py"))
    words = [sys.executable, "-c", TRAINS]
    assert start_training.train_and_watch(words, Path("checkpoints"), Path("logs/console.txt")) == 0
    assert json.loads(Path("ended").read_text())["doing"] == "training"
    last = capsys.readouterr().out
    process = int(re.search(r"training continues as process (\d+); its output: logs/console.txt", last)[1])
    assert f"kill -INT {process}" in last and os.getsid(process) == process
    os.kill(process, signal.SIGINT)
    assert os.waitpid(process, 0)[1] == 0
    assert Path("logs/console.txt").read_text() == "stopped\n"


def test_training_that_dies_at_its_start_shows_its_last_lines_and_no_monitor(workdir, monkeypatch, capsys):
    """Also beside the status and the output of an earlier start, which was killed."""
    monkeypatch.setattr(start_training, "MONITOR", workdir / "missing.py")
    Path("status.json").write_text('{"status": "running", "doing": "training"}')
    Path("console.txt").write_text("of an earlier start\n")
    dies = [sys.executable, "-c", "import time; print('step 0'); time.sleep(0.5); exit('error: no disk')"]
    assert start_training.train_and_watch(dies, workdir, Path("console.txt")) == 1
    shown = capsys.readouterr().out
    assert "step 0" in shown and "error: no disk" in shown
    assert "training has ended with status 1" in shown and "of an earlier start" not in shown
