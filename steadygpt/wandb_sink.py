"""Weights & Biases: the records of a run as curves."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from steadygpt.cli import UserError, shown_options

if TYPE_CHECKING:
    from config import TrainConfig

RUN_LINE = re.compile(r"wandb +(.+), id (\S+), ")  # in log.txt: name and id of the W&B run
WAITING_ROWS = 10_000  # more than that, and W&B is not responding
FINISH_S = 60.0  # for W&B to take the last rows


class WandbSink:
    """Sends the records of a run to Weights & Biases, at W&B's step = our step.

    W&B takes each step once, in ascending order. A resumed run first sends the records of metrics.jsonl that W&B does
    not have yet. Offline, W&B starts each time from nothing, so the newest folder holds the whole run.

    A thread sends them, because a W&B process that hangs blocks its caller.

    Args:
        start_step: where a resumed run starts; None for a new run.
        log, metrics: log.txt and metrics.jsonl, without what a resumed run measures again.
        warn: prints a warning.

    Raises: UserError when W&B does not start. A resumed run that cannot reach it records offline.
    """

    def __init__(
        self,
        config: "TrainConfig",
        start_step: int | None,
        max_steps: int,
        log: Path,
        metrics: Path,
        warn: Callable[[str], None],
    ):
        known = None if start_step is None else _last_match(RUN_LINE, log)
        if known is None:
            name, run_id = config.run_name, None  # W&B chooses an id, so runs of the same name stay apart
        elif Path(config.resume).stem in ("latest", "auto"):
            name, run_id = known.groups()
        else:  # back to an older checkpoint: the steps after it, which W&B has, belong to the abandoned run
            name, run_id = f"{config.run_name}-from-{start_step}", None
        self.run = _start(config, name, run_id, warn if start_step is not None else None)
        place = self.run.settings.sync_dir if self.run.offline else self.run.url
        self.note = f"wandb        {name}, id {self.run.id}, {place}"
        self.max_steps, self.problem = max_steps, ""
        self.records: SimpleQueue[dict | None] = SimpleQueue()
        past = () if start_step is None else _records_before(start_step, metrics)
        self.thread = Thread(target=self._send, args=(past,), daemon=True)
        self.thread.start()

    def log(self, record: dict) -> None:
        """Send a record of metrics.jsonl, or one with a text.

        Raises: OSError when W&B takes no more.
        """
        if self.records.qsize() > WAITING_ROWS:
            self.problem = "its process does not respond"
        if self.problem:
            raise OSError(self.problem)
        self.records.put(record)

    def close(self) -> None:
        """Wait until W&B has taken everything, but not longer than FINISH_S.

        Raises: OSError when it has not.
        """
        self.records.put(None)
        self.thread.join(0 if self.problem else FINISH_S)
        if self.thread.is_alive() and not self.problem:
            self.problem = (
                f"not finished after {FINISH_S:.0f} s; 'wandb sync {self.run.settings.sync_dir}' sends the rest"
            )
        if self.problem:
            raise OSError(self.problem)

    def _send(self, past: Iterable[dict]) -> None:
        try:
            for step, row in whole_rows(itertools.chain(past, iter(self.records.get, None)), self.max_steps):
                if step >= self.run.starting_step:
                    self.run.log(row, step=step, commit=True)
            self.run.finish()
        except Exception as error:  # a full disk, a killed process, and whatever else wandb raises
            self.problem = f"{type(error).__name__}: {error}"


def whole_rows(records: Iterable[dict], max_steps: int) -> Iterator[tuple[int, dict]]:
    """Merge the records of each step into one row, and yield (step, row) in ascending order.

    Evaluations come before the training record of their step. If that is missing at the end, a resumed run measures
    them again, so the last row is dropped unless the run is complete.
    """
    step, row = -1, dict[str, Any]()
    for record in records:
        if record["step"] > step and row:
            yield step, row
            row = {}
        step = max(step, record["step"])
        row |= {"_timestamp": record["time"]}
        row |= {
            name: math.nan if value is None else value for name, value in record.items() if name not in ("step", "time")
        }
    if "loss" in row or (row and step >= max_steps):
        yield step, row


def _start(config: "TrainConfig", name: str, run_id: str | None, warn: Callable[[str], None] | None):
    """Return a W&B run. If W&B cannot be reached, it is an offline run, with a warning, or an error without `warn`."""
    try:
        import wandb
    except ImportError:
        raise UserError("--use_wandb: wandb is not installed; pip install wandb") from None

    def start(**options):
        settings = wandb.Settings(console="off", quiet=True)  # log.txt has the output, without the line that changes
        options |= {
            "project": "steadygpt",
            "name": name,
            "id": run_id,
            "resume": "allow",
            "dir": Path(config.logdir).absolute(),
        }
        return wandb.init(**options, config=shown_options(config), settings=settings)

    try:
        return start()
    except Exception as error:  # wandb raises its own errors for logins, networks and names
        reason = f"wandb did not start ({f'{type(error).__name__}: {error}'.splitlines()[0]})"
        if not warn:
            raise UserError(
                f"--use_wandb: {reason}. Log in with 'wandb login', set WANDB_MODE=offline, or drop the flag"
            ) from error
        warn(f"{reason}; this start is recorded offline")
        return start(mode="offline")


def _last_match(pattern: re.Pattern, path: Path) -> re.Match | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        matches = [match for line in file if (match := pattern.match(line))]
    return matches[-1] if matches else None


def _records_before(start_step: int, metrics: Path) -> Iterator[dict]:
    """Read the records that metrics.jsonl has before those of this start, which follow them."""
    with open(metrics, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n") or (record := json.loads(line))["step"] >= start_step:
                return
            yield record
