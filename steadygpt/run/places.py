"""run.json in a checkpoint folder: the name of the run, and where it writes besides that folder.

A checkpoint may come from a stranger, so it decides none of this. The command line does, or run.json in the folder that
it was written in. A copy of that folder, or a download, is another folder, so it has another inode.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from steadygpt.base.durable import replace_file
from steadygpt.base.text import labelled
from steadygpt.base.typed import read_json
from steadygpt.config import FIELDS, TrainConfig

RUN = "run.json"
PLACES = [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "place"]


class RunFile(TypedDict):
    """The content of run.json."""

    inode: int  # of the folder
    places: TrainConfig  # the options of PLACES


def read_places(folder: Path) -> dict[str, Any]:
    """Return the options of PLACES of the run in a folder, by name; without a run, or in a copy of its folder, {}."""
    try:
        found = read_json(folder / RUN, RunFile, "remove it, and give the options of the run again, such as --logdir")
    except FileNotFoundError:
        return {}
    is_own = found["inode"] == folder.stat().st_ino
    return {name: getattr(found["places"], name) for name in PLACES if is_own}


def write_places(folder: Path, config: TrainConfig) -> None:
    """Write run.json."""
    content = {"inode": folder.stat().st_ino, "places": {name: getattr(config, name) for name in PLACES}}
    replace_file(folder / RUN, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))


def note_of_places(saved: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Return a line for the plan of a run whose checkpoint, with the `saved` options, is from another folder."""
    used = {name: saved[name] for name in PLACES if name not in given and saved[name] != FIELDS[name].default}
    flags = [f"--{name}" + f" {shlex.quote(str(value))}" * (value is not True) for name, value in used.items()]
    text = "this folder is a copy or a download; to continue the logs and the mirror of its run, start it with"
    return labelled("place", f"{text} {' '.join(flags)}") if flags else ""
