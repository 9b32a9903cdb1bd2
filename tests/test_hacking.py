"""The patch in docs/hacking.md applies to this repository, and a run with its option trains and resumes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, TINY, load, write_data

# One process for all commands, because most of the time goes into imports.
COMMANDS = """
import contextlib, io, json, sys, train
from model import GPTConfig
from steadygpt.base.options import UserError
from steadygpt.convert.families import find_family

def ending(function, *args):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            end = function(*args)
        except (UserError, SystemExit) as error:
            end = error
    return f"{output.getvalue()}{end}"

endings = [ending(train.main, command) for command in json.loads(sys.argv[1])]
print(json.dumps([*endings, ending(find_family, GPTConfig(post_norm=True))]))
"""


@pytest.fixture
def patched(tmp_path) -> Path:
    """A copy of the tracked files with the patch."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, target, follow_symlinks=False)
    [patch] = re.findall(r"^```diff\n(.*?)^```$", (REPO / "docs/hacking.md").read_text(), re.MULTILINE | re.DOTALL)
    applied = subprocess.run(["git", "apply"], cwd=tmp_path, input=patch, text=True, capture_output=True)
    assert not applied.returncode, f"the patch in docs/hacking.md needs the lines as they are now: {applied.stderr}"
    return tmp_path


def test_a_run_with_the_option_of_the_patch_trains_and_resumes(patched):
    write_data(patched / "data")
    run = [*TINY, "--data_dir", "data"]
    resume = [*run, "--resume", "latest", "--max_steps", "8"]
    commands = [["--help"], [*run, "--post_norm", "--max_steps", "4"], resume, [*resume, "--post_norm", "off"]]
    argv = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(argv, cwd=patched, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, trained, resumed, refused, exported = json.loads(done.stdout)
    assert "--post_norm" in shown
    assert trained.endswith("\n0")
    assert resumed.endswith("\n0")
    assert "latest.pt at step 4" in resumed
    assert refused.startswith("--post_norm is False, but the checkpoint was trained with True")
    assert "post_norm is True" in exported
    checkpoint = load(patched / "checkpoints/latest.pt")
    assert checkpoint["step"] == 8
    assert checkpoint["model_config"]["post_norm"] is checkpoint["options"]["post_norm"] is True
    for name in ("h.0.post_1.weight", "h.1.post_2.weight"):
        moved = checkpoint["model"][name] - 0.5  # 1 / sqrt(2 * 2 layers)
        assert 0 < moved.abs().max() < 0.05
