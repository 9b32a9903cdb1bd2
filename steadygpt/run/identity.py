"""run.json in a run's folder: which run the folder is, and where that run writes besides the folder.

A run is a folder. A folder that was moved, or restored to its old place, is the same run. Any other folder with this
run.json is a copy, which is another run. A stranger's folder is such a copy, so its run.json decides nothing.
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
    folder: str  # its real path on that machine
    inodes: tuple[int, int]  # of the folder and of this file: the top folders of two disks may have the same number


@dataclass(frozen=True)
class Identity:
    """A run, by default a new one."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    places: dict[str, Any] = field(default_factory=dict)  # options of PLACES, by name; {} for a new run
    copied_from: str = ""  # in words, the run that this one is a copy of; "" if this is no copy

    def with_places(self, config: TrainConfig, set_by: Mapping[str, str]) -> TrainConfig:
        """Return a configuration with the places of this run, except those that the command sets (History.set_by)."""
        return replace(config, **{name: place for name, place in self.places.items() if name not in set_by})


def this_machine() -> str:
    """Return the name of this machine and, if it has a machine id, a digest that tells it from others of that name."""
    with suppress(OSError):
        machine_id = MACHINE_ID.read_bytes().strip()
        if machine_id:  # it is empty in most containers
            digest = hashlib.sha256(b"SteadyGPT " + machine_id).hexdigest()[:16]
            return f"{socket.gethostname()} {digest}"
    return socket.gethostname()


def read_run(folder: Path) -> Identity:
    """Return the run in a folder: a new one if the folder has no run.json, or is a copy."""
    places = ", ".join(f"--{name}" for name in PLACES)
    try:
        record = read_json(folder / RUN, RunFile, f"remove it, and give {places} again")
    except FileNotFoundError:
        return Identity(copied_from=f"a run without {RUN}")
    is_moved = record["inodes"] == (folder.stat().st_ino, (folder / RUN).stat().st_ino)
    is_restored = (record["machine"], record["folder"]) == (this_machine(), os.path.realpath(folder))
    if is_moved or is_restored:
        return Identity(record["id"], {name: getattr(record["options"], name) for name in PLACES})
    return Identity(copied_from=f"the run in {printable(record['folder'])[:1000]}")


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
