"""Weights & Biases: the records of a run as curves."""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from steadygpt.cli import UserError, secrets_of, shown_options

if TYPE_CHECKING:
    from config import TrainConfig

RUN_LINE = re.compile(r"wandb +(.+), id (\S+), (.+)")  # in log.txt: name, id and URL or folder of a W&B run
WAITING_ROWS = 10_000  # more than that, and W&B is not responding
FINISH_S = 60.0  # for W&B to take the last rows


class WandbSink:
    """Sends the records of a run to Weights & Biases, with our step as W&B's.

    W&B takes each step once, in ascending order. A resumed run first sends the records of metrics.jsonl that W&B does
    not have yet. An offline start cannot know what W&B has, so it is a W&B run of its own that holds everything.

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
        known = [] if start_step is None else _earlier_starts(log)
        name = known[-1][1] if known else config.run_name
        if known and Path(config.resume).stem not in ("latest", "auto"):
            # Back to an older checkpoint: the steps after it, which W&B may have, belong to the abandoned run.
            name, known = f"{config.run_name}-from-{start_step}", []
        # W&B chooses the id of a new run, so runs of the same name stay apart.
        run_id = next((match[2] for match in known[::-1] if match[1] == name and match[3].startswith("http")), None)
        self.run = _start(config, name, run_id, warn if start_step is not None else None)
        place = self.run.settings.sync_dir if self.run.offline else self.run.url
        self.note = f"wandb        {name}, id {self.run.id}, {place}"
        self.max_steps, self.warn = max_steps, warn
        self.problem, self.warned = "", False
        self.records: SimpleQueue[dict | None] = SimpleQueue()
        past = () if start_step is None else _records_before(start_step, metrics)
        self.thread = Thread(target=self._send, args=(past,), daemon=True)
        self.thread.start()

    def log(self, record: dict) -> None:
        """Send a record of metrics.jsonl, or one with a text; do nothing once W&B has failed."""
        if self.records.qsize() > WAITING_ROWS:
            self.problem = "its process does not respond"
        if not self.problem:
            self.records.put(record)
        elif not self.warned:
            self.warned = True
            self.warn(f"Weights & Biases gets no more curves: {self.problem}; training continues")

    def close(self) -> None:
        """Wait until W&B has taken everything, but not longer than FINISH_S."""
        self.records.put(None)
        self.thread.join(0 if self.problem else FINISH_S)
        if self.problem and not self.warned:
            self.warn(f"Weights & Biases lacks the last curves: {self.problem}")
        elif self.thread.is_alive() and not self.problem:
            place = self.run.settings.sync_dir
            self.warn(f"Weights & Biases has not taken everything within {FINISH_S:.0f} s; the rest is in {place}")

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
        row |= {name: math.nan if value is None else value for name, value in record.items()}
        row["_timestamp"] = row.pop("time")
        del row["step"]
    if "loss" in row or (row and step >= max_steps):
        yield step, row


def _start(config: "TrainConfig", name: str, run_id: str | None, warn: Callable[[str], None] | None):
    """Return a W&B run. If W&B cannot be reached, it is an offline run, with a warning, or an error without `warn`."""
    try:
        import wandb
    except ImportError:
        raise UserError("--use_wandb: wandb is not installed; pip install wandb") from None

    for secret in filter(None, secrets_of(config)):  # wandb records the command line
        sys.argv = [argument.replace(secret, "...") for argument in sys.argv]

    def start(run_id: str | None, mode: Literal["offline"] | None = None):
        return wandb.init(
            project="steadygpt",
            name=name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=Path(config.logdir).absolute(),
            config=shown_options(config),
            settings=wandb.Settings(console="off", quiet=True),  # log.txt has the output, without the line that changes
        )

    try:
        return start(None if wandb.setup().settings.mode == "offline" else run_id)
    except Exception as error:  # wandb raises its own errors for logins, networks and names
        reason = f"wandb did not start ({f'{type(error).__name__}: {error}'.splitlines()[0]})"
        if not warn:
            raise UserError(
                f"--use_wandb: {reason}. Log in with 'wandb login', set WANDB_MODE=offline, or drop the flag"
            ) from error
        warn(f"{reason}; this start is recorded offline")
        return start(None, "offline")


def _earlier_starts(log: Path) -> list[re.Match]:
    """Return what log.txt says of the W&B runs so far, oldest first."""
    with open(log, encoding="utf-8", errors="replace") as file:
        return [match for line in file if (match := RUN_LINE.match(line))]


def _records_before(start_step: int, metrics: Path) -> Iterator[dict]:
    """Read the records that metrics.jsonl has before those of this start, which follow them."""
    with open(metrics, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n") or (record := json.loads(line))["step"] >= start_step:
                return
            yield record
