"""Stories: short runs of train.py in this process, and what happens between them, a line each."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import in_ranks, run_here

from steadygpt.base.options import UserError
from steadygpt.checkpoint.mirror import Mirror

HOME = os.environ.get("XDG_STATE_HOME", "")  # of the session


def own_folders(name: str) -> tuple[str, ...]:
    """Return the flags that name the folders of a run."""
    return "--checkpoint_dir", name, "--logdir", f"logs-{name}"


def starts(logdir) -> list[dict]:
    """Return the line of each start in a metrics.jsonl."""
    records = map(json.loads, Path(logdir, "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "start" in record]


def uploaded(url: str) -> dict[str, int]:
    """Return checkpoint name -> step in a mirror."""
    return {name: entry.step for name, entry in Mirror(url).index().checkpoints.items()}


def _run_rank(home: str, argv: tuple[str, ...]) -> int:
    os.environ["XDG_STATE_HOME"] = home
    return run_here(*argv)


def tell(story: str) -> None:
    """Run each line of a story.

    train FLAGS, start FOLDER FLAGS, resume FOLDER FLAGS and resume_on_2_ranks FOLDER FLAGS run train.py, which accepts
    them, and refused FLAGS, which it does not. NAME=VALUE is a variable, which a fixture of the test restores. Other
    lines are commands of the shell.
    """
    for line in os.path.expandvars(story).strip().splitlines():
        match shlex.split(line):
            case ["train", *flags]:
                assert run_here(*flags) == 0
            case ["start", folder, *flags]:
                assert run_here(*own_folders(folder), *flags) == 0
            case ["resume", folder, *flags]:
                assert run_here("--resume", "latest", "--checkpoint_dir", folder, *flags) == 0
            case ["resume_on_2_ranks", folder, *flags]:
                argv = ("--resume", "latest", "--checkpoint_dir", folder, *flags)
                home = os.environ["XDG_STATE_HOME"]
                with patch.dict(os.environ, XDG_STATE_HOME=HOME):  # the server of forked processes may start here
                    in_ranks(2, _run_rank, home, argv)
            case ["refused", *flags]:
                with pytest.raises(UserError):
                    run_here(*flags)
            case [setting] if "=" in setting:
                os.environ.update([setting.split("=")])
            case _:
                subprocess.run(line, shell=True, check=True)
