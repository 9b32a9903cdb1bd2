"""./start_training.sh: its questions, the plan, training in the background, and the monitor."""

import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, TINY, write_data

from steadygpt.base.durable import lock_folder

MONITOR = "import sys, pathlib; pathlib.Path('monitor').write_text(sys.argv[1])"
# In place of train.py: starts, trains until it is interrupted, or ends at once.
TRAIN = """
import sys, time
if "--nope" in sys.argv:
    print("error: unknown argument", file=sys.stderr)
    sys.exit(2)
if "--dry_run" in sys.argv:
    sys.exit(print("the plan"))
print("output of", *sys.argv[1:], flush=True)
if "--seed=1" in sys.argv:
    sys.exit("error: no disk")
try:
    time.sleep(0.5)
    print("step  0/8 | loss 5.5", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.fixture
def script(workdir, monkeypatch) -> Path:
    """Return start_training.sh in a copy of the repository, with TRAIN and MONITOR as its programs."""
    repo = workdir / "repo"
    (repo / "scripts").mkdir(parents=True)
    for name in ("start_training.sh", "monitor_training.sh", "common.sh"):
        shutil.copy(REPO / "scripts" / name, repo / "scripts")
    (repo / "monitor_training.sh").symlink_to("scripts/monitor_training.sh")
    (repo / "configs").symlink_to(REPO / "configs")
    (repo / "steadygpt").symlink_to(REPO / "steadygpt")
    for name in ("model.py", "optim.py", "dataloader.py"):
        (repo / name).symlink_to(REPO / name)
    (repo / "train.py").write_text(TRAIN)
    (repo / "prepare_dataset.py").write_text("import sys; print('prepares', *sys.argv[1:])")
    (repo / "scripts/monitor_training.py").write_text(MONITOR)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("NPROC", raising=False)
    return repo / "scripts/start_training.sh"


def on_terminal(script: Path, *answers: str) -> tuple[int, str]:
    """Run the script without flags on a terminal, type a line at each question, and return status and screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(script, [script])
    screen, questions, deadline = "", 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            screen += os.read(terminal, 4096).decode()
        except OSError:  # the script has ended
            break
        asked = len(re.findall(r"^(?:Preset|Data .*|GPUs to use) \(Enter for \d\): |to cancel: ", screen, re.MULTILINE))
        for answer in answers[questions:asked]:
            os.write(terminal, answer.encode())
        questions = asked
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen.replace("\r\n", "\n")


def stop(screen: str) -> int:
    """Stop the training that the script has left running, and return its process."""
    process = int(re.search(r"kill -INT (\d+)", screen)[1])
    os.kill(process, signal.SIGINT)
    return process


def preset(name: str) -> str:
    """Return the number of a preset, as a line that is typed: the quickstart is first, then they come by size."""
    sizes = {}
    for path in (REPO / "configs").glob("*.toml"):
        [size] = re.findall(r" ([\d,.]+) M parameters", path.read_text())
        sizes[path.stem] = float(size.replace(",", "")) if path.stem != "quickstart" else 0.0
    return f"{1 + sorted(sizes, key=sizes.__getitem__).index(name)}\n"


def test_answers_become_the_flags_of_training_in_the_background(script):
    """A wrong answer is asked again; folders of another run are not used."""
    write_data(Path("data/more"))
    Path("checkpoints/test").mkdir(parents=True)
    status, screen = on_terminal(script, "99\n", preset("test"), "2\n", "\n")
    assert status == 0, screen
    assert re.search(
        r"^ ?3\) gpt2: GPT-2 small: 124.4 M parameters, context 1,024, a GPU of 24 GB$", screen, re.MULTILINE
    )
    assert "Preset (Enter for 1): 99\nfound '99'; expected the number of a line\n" in screen
    folders = "--checkpoint_dir checkpoints/test-2"
    flags = f"--config test --data_dir data/more --use_tensorboard {folders}"
    assert f"train.py {flags}\nthe plan\n" in screen and f"output of {flags}\n" in screen
    assert Path("monitor").read_text() == "checkpoints/test-2"
    process = stop(screen)
    assert os.getpgid(process) == process  # so Ctrl-C in the monitor does not reach it
    while "stopped" not in Path("checkpoints/test-2/console.txt").read_text():
        time.sleep(0.05)


def test_gpus_are_asked_for_and_each_gets_a_process(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    _, screen = on_terminal(script, preset("test"), "1\n", "4\n", "2\n", "\x03")
    assert " 1) 1\n 2) 2\n 3) 3\nGPUs to use (Enter for 3): 4\nfound '4';" in screen
    assert "torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node=2 " in screen


def test_without_data_the_standard_library_is_prepared_and_ctrl_d_starts_nothing(script):
    shutil.rmtree("data")
    status, screen = on_terminal(script, preset("test"), "1\n", "\x04")
    assert status == 1 and "prepares --source stdlib --tokenizer bytes --out data/stdlib\n\n 1) data/stdlib\n" in screen
    assert not Path("checkpoints").exists()
    _, screen = on_terminal(script, "\n", "\n", "\x03")
    assert "train.py --config quickstart --data_dir data/stdlib" in screen
    status, screen = on_terminal(script, "\x04")
    assert status == 1 and screen.endswith("nothing was started\n")


def run(script: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([script, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_flags_ask_nothing_and_a_wrong_one_starts_nothing(script):
    done = run(script, "--checkpoint_dir", "run", "--nope")
    assert (done.returncode, done.stderr) == (2, "error: unknown argument\n")
    assert not Path("run").exists()
    done = run(script, "--checkpoint_dir", "run", "--run_name", "it's")
    assert done.returncode == 0 and r"train.py --checkpoint_dir run --run_name it\'s" in done.stdout
    stop(done.stdout)


def test_a_run_that_ends_at_its_start_shows_its_output_and_its_status(script):
    """Without the output of an earlier start."""
    Path("run").mkdir()
    Path("run/console.txt").write_text("of an earlier start\nstep  0/8 | loss 5.5\n")
    done = run(script, "--checkpoint_dir", "run", "--seed=1")
    assert done.returncode == 1 and not Path("monitor").exists()
    assert done.stdout.endswith("error: no disk\ntraining has ended with status 1\n")
    assert "of an earlier start" not in done.stdout
    assert Path("run/console.txt").read_text().startswith("of an earlier start\nstep  0/8 | loss 5.5\noutput of")


def test_a_folder_in_which_a_run_is_training_is_refused(script):
    with lock_folder(Path("run"), "busy"):
        done = run(script, "--checkpoint_dir", "run")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (2, ["the plan"])
    assert re.fullmatch(rf"error: run: .* {os.getpid()} .*{socket.gethostname()}.*\n", done.stderr)
    assert not Path("run/console.txt").exists()


def test_a_dry_run_writes_nothing(script):
    done = run(script, "--checkpoint_dir", "run", "--dry_run")
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["the plan"])
    assert not Path("run").exists()


@pytest.mark.pages  # the other tests have a stand-in for it, and this one takes seconds
def test_a_plan_of_the_real_trainer(workdir):
    done = run(REPO / "start_training.sh", *TINY, "--dry_run")
    assert done.returncode == 0 and re.search(r"^steps +8, each of 64 tokens", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["list_checkpoints", "monitor_training", "resume_training", "start_tensorboard"])
def test_a_script_before_the_installation_says_what_to_run(tmp_path, name):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for file in (f"{name}.sh", "common.sh"):
        shutil.copy(REPO / "scripts" / file, scripts)
    python = tmp_path / "bin/python"  # without packages
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (tmp_path / "checkpoints").mkdir()
    env = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    ended = subprocess.run([scripts / f"{name}.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.fullmatch(r"error: .* Python .* \./setup\.sh.*\n", ended.stderr)
