"""run.json in a checkpoint folder: which run the folder is, and where that writes besides the folder.

A run is a folder. Moved, or restored to its old place, the folder is the same run; a copy of it is another one.

A checkpoint may come from a stranger, so it decides no place. The command line does, or a run.json that a run of this
user has written.
"""

import hashlib
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from steadygpt.base.durable import check_regular, replace_file
from steadygpt.base.progress import say
from steadygpt.base.typed import parse_json
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.log.metrics import find_logs, places_of

RUN = "run.json"
PLACES = [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "place"]


class RunFile(TypedDict):
    """The content of run.json."""

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
    places: dict[str, Any] = field(default_factory=dict)  # options of PLACES, by name, as far as they count
    other: str = ""  # the run of the checkpoint, in words, if it is not this one

    @property
    def name(self) -> str:
        return self.places.get("run_name", "")

    def copied(self, folder: object) -> "Identity":
        """Return a new run that resumes from a checkpoint of this one, which is in `folder`."""
        places = self.places | {"mirror": ""} if self.places else {}
        return Identity(places=places, other=self.other or f"the run{' ' * bool(self.name)}{self.name} in {folder}")


def written_mark(content: bytes) -> Path:
    """Return the file that exists if this user has written this run.json; no folder of a stranger can bring it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 (never raises)
    return Path(state, "steadygpt", hashlib.sha256(content).hexdigest())


def read_run(folder: Path) -> Identity:
    """Return the run in a folder; a new one without run.json, and in a copy of the folder."""
    path, advice = folder / RUN, "remove it, and give the options of the run again, such as --logdir"
    check_regular(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Identity(other=f"a run without {RUN}")
    found = parse_json(content, RunFile, path, advice)
    is_own = written_mark(content).exists()
    run = Identity(found["id"], {name: getattr(found["options"], name) for name in PLACES if is_own})
    if is_own:
        logdir = str(find_logs(found["logs"], folder, run.id) or found["options"].logdir)
        below = os.path.relpath(logdir)
        run.places["logdir"] = logdir if below.startswith("..") else below
    is_same = found["inode"] == folder.stat().st_ino
    if is_own and found["host"] == socket.gethostname():
        # A backup, or a move across file systems, changes the number. Roots of file systems have the same one.
        place = Path(found["folder"])
        is_taken = place.exists() and not place.samefile(folder)
        is_same = not is_taken or (is_same and not _has_run(place, run.id))
    return run if is_same else run.copied(found["folder"])


def _has_run(folder: Path, run_id: str) -> bool:
    with suppress(OSError):
        return f'"{run_id}"'.encode() in (folder / RUN).read_bytes()
    return False


def write_run(folder: Path, run_id: str, config: TrainConfig) -> None:
    """Write run.json."""
    real, path = os.path.realpath(folder), folder / RUN
    options = {name: getattr(config, name) for name in PLACES} | {"logdir": str(Path(config.logdir).absolute())}
    logs = places_of(config.logdir, folder)
    found: dict[str, Any] = {"id": run_id, "host": socket.gethostname(), "folder": real, "inode": folder.stat().st_ino}
    content = json.dumps(found | {"logs": logs, "options": options}, indent=2).encode()
    mark = written_mark(content)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that is kept, or name run, logs and mirror with each resume"
        say(f"warning: {mark.parent}: {error.strerror}; the next start will not recognize {folder}; {advice}")
    before = path.read_bytes() if _has_run(folder, run_id) else content
    replace_file(path, lambda file: file.write(content))
    if json.dumps(real).encode() not in before:  # of the copies of a deleted folder, only the first resumed is the run
        with suppress(OSError):
            written_mark(before).unlink()
