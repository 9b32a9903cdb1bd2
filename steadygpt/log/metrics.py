"""The records of a run in metrics.jsonl."""

import json
from pathlib import Path

from steadygpt.base.durable import check_regular, no_link
from steadygpt.log.status import METRICS


def owner(logdir: Path) -> str:
    """Return the id of the run that a folder of logs belongs to, "" if there is none."""
    check_regular(logdir / METRICS)
    try:
        with open(logdir / METRICS, "rb", opener=no_link) as file:
            first = file.readline(2**20)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        return str(json.loads(first)["run"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown" if first else ""
