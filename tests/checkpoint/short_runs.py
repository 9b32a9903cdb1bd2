"""Short runs of train.py in this process, whose plans count the memory of a model once a session."""

import json
from pathlib import Path
from unittest.mock import patch

import conftest

from steadygpt.checkpoint.mirror import Mirror
from steadygpt.run import memory

COUNTED: dict[str, tuple[int, int]] = {}
COUNT = memory.micro_step_bytes
PLACES = {"checkpoint_dir", "data_dir", "logdir", "max_steps", "mirror", "resume", "run_name", "tensorboard_dir"}


def count_once(config, *about) -> tuple[int, int]:
    """Return micro_step_bytes(), which takes twice as long as all else in a run of eight steps."""
    key = repr((about, {name: value for name, value in vars(config).items() if name not in PLACES}))
    if key not in COUNTED:
        COUNTED[key] = COUNT(config, *about)
    return COUNTED[key]


def run_here(*flags: str) -> int:
    """Run train.main as conftest.run_here does."""
    with patch.object(memory, "micro_step_bytes", count_once):
        return conftest.run_here(*flags)


def folders(name: str) -> tuple[str, ...]:
    """Return the flags that name the folders of a run."""
    return "--checkpoint_dir", name, "--logdir", f"logs-{name}"


def starts(logdir) -> list[str]:
    """Return the run of each start in a metrics.jsonl."""
    records = map(json.loads, Path(logdir, "metrics.jsonl").read_text().splitlines())
    return [record["run"] for record in records if "start" in record]


def uploaded(url: str) -> dict[str, int]:
    """Return checkpoint name -> step in a mirror."""
    return {name: entry.step for name, entry in Mirror(url).index().checkpoints.items()}
