"""The records of a run in metrics.jsonl."""

import json
from pathlib import Path

from steadygpt.base.durable import check_regular, no_link
from steadygpt.log.status import METRICS


def owner(logdir: Path) -> str:
    """Return the id of the run that a folder of logs belongs to, "" if there is none."""
    try:
        check_regular(logdir / METRICS)
        with open(logdir / METRICS, "rb", opener=no_link) as file:
            return str(json.loads(file.readline(2**20))["run"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
