"""run.json in a run's folder: which run the folder is, and where that run writes besides the folder.

A run is a folder. Moved, or restored to its old place, the folder is the same run. Any other folder with this run.json
is a copy, which is another run. A stranger's folder is such a copy, so its run.json decides nothing.
"""

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict

from steadygpt.base.durable import replace_file
from steadygpt.base.text import printable
from steadygpt.base.typed import read_json
from steadygpt.config import FIELDS, TrainConfig

RUN = "run.json"
PLACES = [name for name, f in FIELDS.items() if f.metadata["on_resume"] == "place"]
MACHINE_ID = Path("/etc/machine-id")


class RunFile(TypedDict):
    """The content of run.json."""

    id: Annotated[str, "[0-9a-f]{16}"]
    options: TrainConfig  # those of PLACES
    machine: str  # of the last launch, see this_machine()
    folder: str  # its real path there
    inodes: tuple[int, int]  # of the folder, and of this file: two disks may give one number to their top folders


@dataclass(frozen=True)
class Identity:
    """A run, by default a new one."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    places: dict[str, Any] = field(default_factory=dict)  # options of PLACES, by name; {} of a new run
    original: str = ""  # in words, the run that this one is a copy of; "" if it is none

    def placed(self, config: TrainConfig, given: Mapping[str, str]) -> TrainConfig:
        """Return a configuration with the places of this run that are not given."""
        return replace(config, **{name: place for name, place in self.places.items() if name not in given})


def this_machine() -> str:
    """Return the name of this machine, with a number that machines of the same name do not share, where it has one."""
    with suppress(OSError):
        number = MACHINE_ID.read_bytes().strip()
        if number:  # it is empty in most containers
            return f"{socket.gethostname()} {hashlib.sha256(b'SteadyGPT ' + number).hexdigest()[:16]}"
    return socket.gethostname()


def read_run(folder: Path) -> Identity:
    """Return the run in a folder: a new one if the folder has no run.json, or is a copy."""
    try:
        found = read_json(folder / RUN, RunFile, f"remove it, and give {', '.join(f'--{n}' for n in PLACES)} again")
    except FileNotFoundError:
        return Identity(original=f"a run without {RUN}")
    is_moved = found["inodes"] == (folder.stat().st_ino, (folder / RUN).stat().st_ino)
    is_restored = (found["machine"], found["folder"]) == (this_machine(), os.path.realpath(folder))
    if is_moved or is_restored:
        return Identity(found["id"], {name: getattr(found["options"], name) for name in PLACES})
    return Identity(original=f"the run in {printable(found['folder'])[:1000]}")


def write_run(folder: Path, run_id: str, config: TrainConfig) -> None:
    """Write run.json."""

    def write(file: IO[bytes]) -> None:
        record = {
            "id": run_id,
            "options": {name: getattr(config, name) for name in PLACES},
            "machine": this_machine(),
            "folder": os.path.realpath(folder),
            "inodes": [folder.stat().st_ino, os.fstat(file.fileno()).st_ino],
        }
        file.write(f"{json.dumps(record, indent=2)}\n".encode())

    replace_file(folder / RUN, write)
