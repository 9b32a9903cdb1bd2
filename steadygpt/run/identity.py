"""The identity of a run: run.json in its checkpoint folder, and what this user's runs know of their places.

A run is a folder. Moved, or restored to its old place, the folder is the same run; a copy of it is another one.

A folder of checkpoints may come from a stranger, so it decides no place. The command line does, or the record of a run
that this user has started, which no folder can bring along.
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
    """The content of run.json."""

    id: Annotated[str, "[0-9a-f]{16}"]
    inode: int  # of the folder


class Record(TypedDict):
    """Where a run was and wrote when it was started last."""

    host: str
    folder: str  # its real path
    logs: list[str]  # see places_of()
    options: TrainConfig  # those of PLACES; logdir is absolute


@dataclass(frozen=True)
class Identity:
    """A run, by default a new one, and what is known of the run whose checkpoint it resumes from."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    places: dict[str, Any] = field(default_factory=dict)  # options of PLACES, by name, as far as they are known
    other: str = ""  # the run of the checkpoint, in words, if it is not this one

    @property
    def name(self) -> str:
        return self.places.get("run_name", "")

    def copied(self, folder: object) -> "Identity":
        """Return a new run that resumes from a checkpoint of this one, which is in `folder`."""
        other = self.other or f"the run {self.name or self.id} in {folder}"
        return Identity(places=self.places | {"mirror": ""}, other=other)

    def placed(self, config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
        """Return a configuration with the places of this run that are not given."""
        return replace(config, **{name: place for name, place in self.places.items() if name not in given})


def record_of(run_id: str) -> Path:
    """Return the file of a run's Record, in the home of the user."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 (never raises)
    return Path(state, "steadygpt", f"{run_id}.json")


def read_run(folder: Path) -> Identity:
    """Return the run in a folder; a new one without run.json, and in a copy of the folder."""
    advice = "remove it, and give the options of the run again, such as --logdir"
    try:
        found = read_json(folder / RUN, RunFile, advice)
    except FileNotFoundError:
        return Identity(other=f"a run without {RUN}")
    run, is_same, place = Identity(found["id"]), found["inode"] == folder.stat().st_ino, Path("another folder")
    if record_of(run.id).exists():
        record = read_json(record_of(run.id), Record, advice)
        logdir, place = (
            str(find_logs(record["logs"], folder, run.id) or record["options"].logdir),
            Path(record["folder"]),
        )
        below = os.path.relpath(logdir)
        run.places.update({name: getattr(record["options"], name) for name in PLACES})
        run.places["logdir"] = logdir if below.startswith("..") else below
        if record["host"] == socket.gethostname():  # a backup, or a move across file systems, changes the inode
            is_there = (place / RUN).exists() and run.id.encode() in (place / RUN).read_bytes()
            is_same = not is_there or place.samefile(folder)
    return run if is_same else run.copied(place)


def write_run(folder: Path, run_id: str, config: TrainConfig) -> None:
    """Write run.json, and the record of the run."""
    options = {name: getattr(config, name) for name in PLACES} | {"logdir": str(Path(config.logdir).absolute())}
    place = {"host": socket.gethostname(), "folder": os.path.realpath(folder)}
    record = json.dumps(place | {"logs": places_of(config.logdir, folder), "options": options}, indent=2)
    about = json.dumps({"id": run_id, "inode": folder.stat().st_ino})
    path = record_of(run_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(record.encode()))
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that is kept, or name run, logs and mirror with each resume"
        say(f"warning: {path.parent}: {error.strerror}; the next start will not recognize {folder}; {advice}")
    replace_file(folder / RUN, lambda file: file.write(about.encode()))
