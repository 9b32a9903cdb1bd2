"""run.json in a checkpoint folder: the name of the run, and where it writes besides that folder.

A checkpoint may come from a stranger, so it decides none of this. The command line does, or a run.json that a run of
this user has written into the folder. A copy of the folder has another inode.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from steadygpt.base.durable import check_regular, replace_file
from steadygpt.base.progress import say
from steadygpt.base.typed import parse_json
from steadygpt.config import FIELDS, TrainConfig

RUN = "run.json"
PLACES = [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "place"]


class RunFile(TypedDict):
    """The content of run.json."""

    inode: int  # of the folder
    places: TrainConfig  # the options of PLACES


def written_mark(content: bytes) -> Path:
    """Return the file that exists if this user has written this run.json; no folder of a stranger can bring it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 (never raises)
    return Path(state, "steadygpt", hashlib.sha256(content).hexdigest())


def read_places(folder: Path) -> dict[str, Any]:
    """Return the options of PLACES of the run in a folder, by name; without a run, or in a copy of its folder, {}."""
    path, advice = folder / RUN, "remove it, and give the options of the run again, such as --logdir"
    check_regular(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    found = parse_json(content, RunFile, path, advice)
    is_own = found["inode"] == folder.stat().st_ino and written_mark(content).exists()
    return {name: getattr(found["places"], name) for name in PLACES if is_own}


def write_places(folder: Path, config: TrainConfig) -> None:
    """Write run.json."""
    places = {name: getattr(config, name) for name in PLACES}
    content = json.dumps({"inode": folder.stat().st_ino, "places": places}, indent=2).encode()
    mark = written_mark(content)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that is kept, or name run, logs and mirror with each resume"
        say(f"warning: {mark.parent}: {error.strerror}; the next start will not recognize {folder}; {advice}")
    replace_file(folder / RUN, lambda file: file.write(content))


def note_of_places(saved: Mapping[str, Any], given: Mapping[str, str], places: Mapping[str, Any]) -> str:
    """Return a line about the `saved` options of a checkpoint that are places, if its run has others here."""
    unknown = [name for name in PLACES if name not in {*given, *places}]
    used = {name: saved[name] for name in unknown if saved[name] != FIELDS[name].default}
    flags = [f"--{name}" + f" {shlex.quote(str(value))}" * (value is not True) for name, value in used.items()]
    text = "the run wrote elsewhere, which a checkpoint cannot decide here; to continue that, start with"
    return f"{text} {' '.join(flags)}" * bool(flags)
