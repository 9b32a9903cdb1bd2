"""run.json in a run's folder: which run the folder is.

A run is a folder. A copy of it that stands beside the original is another run.
"""

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError
from steadygpt.base.text import printable
from steadygpt.base.typed import Id, read_json
from steadygpt.config import MAX_NAME, TrainConfig

RUN = "run.json"


class RunFile(TypedDict):
    """The content of run.json."""

    id: Id
    name: str
    folder: str  # its real path at the last launch
    mirror: str  # of the last launch, "" if it had none; only a note says it, because a file decides no place
    wandb: bool  # whether the last launch used Weights & Biases, for the same note


@dataclass(frozen=True)
class Identity:
    """A run, by default a new one."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    name: str = ""  # "": that of the folder
    mirror: str = ""
    wandb: bool = False
    copied_from: str = ""  # the folder that this one is a copy of; "" if it is no copy


def read_run(folder: Path) -> Identity:
    """Return the run in a folder: a new one if the folder has no run.json, or is a copy of another existing folder."""
    try:
        record = read_json(folder / RUN, RunFile, "remove it; the run then gets a new id")
    except FileNotFoundError:
        return Identity()
    original = Path(record["folder"])
    if os.path.realpath(folder) != record["folder"] and _id_in(original) == record["id"]:
        return Identity(copied_from=printable(record["folder"])[:1000])
    return Identity(record["id"], printable(record["name"])[:MAX_NAME], record["mirror"], record["wandb"])


def _id_in(folder: Path) -> str:
    """Return the id of the run in a folder; "" if there is none, or it cannot be read."""
    try:
        return read_json(folder / RUN, RunFile, "")["id"]
    except (OSError, UserError, ValueError):
        return ""


def write_run(folder: Path, run_id: str, config: TrainConfig) -> None:
    """Write run.json."""
    record = {
        "id": run_id,
        "name": config.run_name,
        "folder": os.path.realpath(folder),
        "mirror": config.mirror,
        "wandb": config.use_wandb,
    }
    replace_file(folder / RUN, lambda file: file.write(f"{json.dumps(record, indent=2)}\n".encode()))
