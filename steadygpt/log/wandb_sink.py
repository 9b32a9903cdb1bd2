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
from steadygpt.base.retry import brief
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import METRICS, segments

FOLDER = "wandb"  # which wandb makes in the run's folder
FINISH_S = 60.0  # time for W&B to take the last rows


class WandbSink:
    """Sends the records of a run to Weights & Biases, with our step as W&B's.

    W&B takes steps in ascending order only, so a resumed run skips those that W&B already has. A run that goes back to
    an older checkpoint continues as a new W&B run. So does each offline launch, because it cannot know what W&B has. A
    resumed run that cannot reach W&B records offline; a new run that cannot reach it does not start.

    A thread sends the records, because a W&B process that hangs blocks its caller.

    Args:
        launch: has "run" and "parent" of the LaunchLine. This line also stores `id`, for the next launch.
    """

    def __init__(self, config: TrainConfig, launch: Mapping[str, Any], warn: Callable[[str], object]):
        last_id = None
        for line, _ in segments(Path(config.checkpoint_dir, METRICS), math.inf):  # the newest launch first
            if line["run"] == launch["run"] and line["wandb"]:
                last_id = line["wandb"]
                break
        continues = Path(config.resume).stem in ("latest", "auto")  # otherwise W&B chooses a new id
        shown = shown_options(config)
        has_secrets = any(value for option, value in vars(config).items() if option not in shown)
        try:
            import wandb

            # log.txt has the output. W&B's metadata would have the command line.
            settings = wandb.Settings(console="off", quiet=True, x_disable_meta=has_secrets)
            init = partial(
                wandb.init, project=os.environ.get("WANDB_PROJECT", "steadygpt"), name=config.name, resume="allow",
                dir=Path(config.checkpoint_dir).absolute(), config=shown, settings=settings,
            )  # fmt: skip
            self.run = init(id=last_id if continues and wandb.setup().settings.mode != "offline" else None)
        except Exception as error:  # wandb raises its own errors for logins, networks and names
            reason = f"--use_wandb: wandb did not start ({brief(error)})"
            if not launch["parent"] or isinstance(error, ImportError):
                advice = "pip install wandb and log in with 'wandb login', set WANDB_MODE=offline, or drop the flag"
                raise UserError(f"{reason}; {advice}") from error
            warn(f"{reason}; this launch is recorded offline")
            self.run = init(id=None, mode="offline")
        self.warn = warn
        self.place = str(self.run.settings.sync_dir if self.run.offline else self.run.url)
        self.id = "" if self.run.offline else self.run.id
        self.rows: SimpleQueue[tuple[int, Mapping[str, Any]] | None] = SimpleQueue()
        self.thread = Thread(target=self._send, daemon=True)
        self.thread.start()

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Send the numbers of a step; do nothing once W&B has failed."""
        if self.thread.is_alive():
            self.rows.put((step, numbers))

    def text(self, step: int, text: str) -> None:
        self.log(step, {"sample": text})

    def close(self) -> None:
        """Wait until W&B has taken everything, but not longer than FINISH_S."""
        self.rows.put(None)
        self.thread.join(FINISH_S)
        if self.thread.is_alive():
            self.warn(f"W&B did not take all records within {FINISH_S:.0f} s; they are in {self.run.settings.sync_dir}")

    def _send(self) -> None:
        first = self.run.starting_step
        newest = first
        try:
            for step, values in iter(self.rows.get, None):
                if step >= first:
                    newest = max(newest, step)
                    self.run.log(dict(values), step=newest)  # W&B merges rows of the same step
            self.run.finish()
        except Exception as error:  # a full disk, a killed process, or any other error of wandb
            self.warn(f"Weights & Biases no longer receives curves: {brief(error)}; training continues")
