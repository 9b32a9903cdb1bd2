"""Weights & Biases: the records of a run as curves."""

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from steadygpt.base.options import UserError, shown_options
from steadygpt.base.text import labelled
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import METRICS, segments

WAITING_ROWS = 10_000  # more than that, and W&B is not responding
FINISH_S = 60.0  # for W&B to take the last rows


class WandbSink:
    """Sends the records of a run to Weights & Biases, with our step as W&B's.

    W&B takes steps in ascending order only, so a resumed run skips those that W&B has already. A run that goes back to
    an older checkpoint continues as a new W&B run, and so does each offline start, which cannot know what W&B has. A
    resumed run that cannot reach W&B records offline; a new one does not start.

    A thread sends the records, because a W&B process that hangs blocks its caller.

    online: name and id of the W&B run for the line of the start, from which the next start takes them; {} if offline

    Args:
        start: "run" and "parent" of that line.
    """

    def __init__(self, config: TrainConfig, first_step: int, start: Mapping[str, Any], warn: Callable[[str], object]):
        starts = (line for line, _ in segments(Path(config.logdir, METRICS), math.inf) if line["run"] == start["run"])
        known = next((line["wandb"] for line in starts if "wandb" in line), None)
        name, run_id = (known["name"], known["id"]) if known else (config.run_name, None)
        if run_id and Path(config.resume).stem not in ("latest", "auto"):
            name, run_id = f"{config.run_name}-from-{first_step}", None
        self.run = _start(config, name, run_id, warn if start["parent"] else None)  # W&B chooses the id of a new run
        place = self.run.settings.sync_dir if self.run.offline else self.run.url
        self.note = labelled("wandb", f"{name}, id {self.run.id}, {place}")
        self.online = {} if self.run.offline else {"wandb": {"name": name, "id": self.run.id}}
        self.warn = warn
        self.problem = ""
        self.rows: SimpleQueue[tuple[int, Mapping[str, Any]] | None] = SimpleQueue()
        self.thread = Thread(target=self._send, daemon=True)
        self.thread.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send numbers and texts of a step; do nothing once W&B has failed."""
        if self.rows.qsize() > WAITING_ROWS:
            self._give_up("its process does not respond; training continues")
        if not self.problem:
            self.rows.put((step, values))

    def text(self, step: int, text: str) -> None:
        self.log(step, {"sample": text})

    def close(self) -> None:
        """Wait until W&B has taken everything, but not longer than FINISH_S."""
        self.rows.put(None)
        self.thread.join(0 if self.problem else FINISH_S)
        if self.thread.is_alive():
            self._give_up(f"records were left after {FINISH_S:.0f} s; they are in {self.run.settings.sync_dir}")

    def _give_up(self, problem: str) -> None:
        if not self.problem:
            self.problem = problem
            self.warn(f"Weights & Biases no longer receives curves: {problem}")

    def _send(self) -> None:
        first = newest = self.run.starting_step
        try:
            for step, values in iter(self.rows.get, None):
                if step >= first:
                    newest = max(newest, step)
                    self.run.log(dict(values), step=newest)  # W&B merges what belongs to the same step
            self.run.finish()
        except Exception as error:  # a full disk, a killed process, and whatever else wandb raises
            self._give_up(f"{type(error).__name__}: {error}; training continues")


def _start(config: TrainConfig, name: str, run_id: str | None, warn: Callable[[str], object] | None):
    """Return a W&B run. If W&B cannot be reached, it is an offline run, with a warning, or an error without `warn`."""
    try:
        import wandb
    except ImportError:
        raise UserError("--use_wandb: wandb is not installed; pip install wandb") from None

    shown = shown_options(config)
    has_secrets = any(value for option, value in vars(config).items() if option not in shown)

    # log.txt has the output, without the line that changes. W&B's metadata would have the command line.
    settings = wandb.Settings(console="off", quiet=True, x_disable_meta=has_secrets)
    project, folder = os.environ.get("WANDB_PROJECT", "steadygpt"), Path(config.logdir).absolute()
    start = partial(wandb.init, project=project, name=name, resume="allow", dir=folder, config=shown, settings=settings)
    try:
        return start(id=None if wandb.setup().settings.mode == "offline" else run_id, mode=None)
    except Exception as error:  # wandb raises its own errors for logins, networks and names
        reason = f"wandb did not start ({f'{type(error).__name__}: {error}'.splitlines()[0]})"
        if not warn:
            raise UserError(
                f"--use_wandb: {reason}. Log in with 'wandb login', set WANDB_MODE=offline, or drop the flag"
            ) from error
        warn(f"{reason}; this start is recorded offline")
        return start(id=None, mode="offline")
