"""Stories: short runs of train.py in this process, and what happens between them, a line each."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import folders, in_ranks, run_here

from steadygpt.base.options import UserError
from steadygpt.mirror.store import Mirror


def launches(folder) -> list[dict]:
    """Return the line of each launch in the metrics.jsonl of a run."""
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "first_step" in record]


def uploaded(url: str) -> dict[str, int]:
    """Return checkpoint name -> step in a mirror."""
    return {name: entry.step for name, entry in Mirror(url).index().checkpoints.items()}


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
                assert run_here(*folders(folder), *flags) == 0
            case ["resume", folder, *flags]:
                assert run_here("--resume", "latest", *folders(folder), *flags) == 0
            case ["resume_on_2_ranks", folder, *flags]:
                in_ranks(2, run_here, "--resume", "latest", *folders(folder), *flags)
            case ["refused", *flags]:
                with pytest.raises(UserError):
                    run_here(*flags)
            case [setting] if "=" in setting:
                os.environ.update([setting.split("=")])
            case _:
                subprocess.run(line, shell=True, check=True)
