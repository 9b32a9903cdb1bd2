"""run.json in a checkpoint folder: which run the folder is, and where that writes besides the folder.

A run is a folder. Moved, or restored to its old place, the folder is the same run; a copy of it is another one.

A folder may come from a stranger, so it decides no place. The command line does, or the copy of run.json in the home of
the user who started the run, which no folder can bring along.
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from steadygpt.base.durable import replace_file
from steadygpt.base.progress import say
from steadygpt.base.typed import read_json
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.log.metrics import find_logs, places_of

RUN = "run.json"
PLACES = [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "place"]


class RunFile(TypedDict):
    """The content of run.json, and of the copy of it that the user has."""

    id: Annotated[str, "[0-9a-f]{16}"]
    host: str  # of the last start
    folder: str  # its real path there
    inode: int  # of the folder
    logs: list[str]  # see places_of()
    options: TrainConfig  # those of PLACES; logdir is absolute


@dataclass(frozen=True)
class Identity:
    """A run, by default a new one, and what is known of the run whose checkpoint it resumes from."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    places: dict[str, Any] = field(default_factory=dict)  # options of PLACES, by name, as far as they are known
    other: str = ""  # the run of the checkpoint, in words, if it is not this one; "" if it is

    @property
    def name(self) -> str:
        return self.places.get("run_name", "")

    def copied(self, folder: object) -> "Identity":
        """Return a new run that resumes from a checkpoint of this one; `folder` is this one's."""
        other = self.other or f"the run {self.name or self.id} in {folder}"
        return Identity(places=self.places | {"mirror": ""}, other=other)

    def placed(self, config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
        """Return a configuration with the places of this run that are not given."""
        return replace(config, **{name: place for name, place in self.places.items() if name not in given})


def record_of(run_id: str) -> Path:
    """Return the user's copy of the run.json of a run."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 (never raises)
    return Path(state, "steadygpt", f"{run_id}.json")


def read_run(folder: Path) -> Identity:
    """Return the run in a folder; a new one without run.json, and in a copy of the folder."""
    advice = "remove it, and give the options of the run again, such as --logdir"
    try:
        found = read_json(folder / RUN, RunFile, advice)
    except FileNotFoundError:
        return Identity(other=f"a run without {RUN}")
    run, is_same, place = Identity(found["id"]), found["inode"] == folder.stat().st_ino, Path(found["folder"])
    if record_of(run.id).exists():
        own = read_json(record_of(run.id), RunFile, advice)
        logdir, place = str(find_logs(own["logs"], folder, run.id) or own["options"].logdir), Path(own["folder"])
        below = os.path.relpath(logdir)
        run.places.update({name: getattr(own["options"], name) for name in PLACES})
        run.places["logdir"] = logdir if below.startswith("..") else below
        if own["host"] == socket.gethostname():  # a backup, or a move across file systems, changes the inode
            is_there = (place / RUN).exists() and run.id.encode() in (place / RUN).read_bytes()
            is_same = not is_there or place.samefile(folder)
    return run if is_same else run.copied(place)


def write_run(folder: Path, run_id: str, config: TrainConfig) -> None:
    """Write run.json, and the user's copy of it."""
    record = {
        "id": run_id,
        "host": socket.gethostname(),
        "folder": os.path.realpath(folder),
        "inode": folder.stat().st_ino,
        "logs": places_of(config.logdir, folder),
        "options": {name: getattr(config, name) for name in PLACES} | {"logdir": str(Path(config.logdir).absolute())},
    }
    content, copy = json.dumps(record, indent=2).encode(), record_of(run_id)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        replace_file(copy, lambda file: file.write(content))
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that is kept, or name run, logs and mirror with each resume"
        say(f"warning: {copy.parent}: {error.strerror}; the next start will not recognize {folder}; {advice}")
    replace_file(folder / RUN, lambda file: file.write(content))
