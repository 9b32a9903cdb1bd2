"""status.json in a run's checkpoint folder: the state of the run, and how it ended."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygpt.base.durable import replace_file
from steadygpt.base.text import timestamp

STATUS = "status.json"


def read_status(folder: Path) -> dict[str, Any]:
    """Return what status.json says, {} if there is none."""
    try:
        return json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return {}


def write_status(folder: Path, facts: Mapping[str, Any], durable: bool) -> None:
    """Replace status.json.

    Args:
        durable: wait until it is on the disk.
    """
    path = folder / STATUS
    content = f"{json.dumps({**facts, 'updated_at': timestamp()}, indent=2)}\n".encode()
    try:
        replace_file(path, lambda file: file.write(content), durable)
    except OSError:  # a full disk has no room for a second file
        with open(path, "r+b") as file:
            file.write(content)
            file.truncate()
