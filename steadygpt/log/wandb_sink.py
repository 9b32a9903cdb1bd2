"""Weights & Biases: the records of a run as curves over our step."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from steadygpt.base.options import UserError, shown_options
from steadygpt.base.retry import brief
from steadygpt.config import TrainConfig

FOLDER = "wandb"  # which wandb makes in the run's folder
CONNECT_S = 30.0  # time for W&B to answer at the start
FINISH_S = 60.0  # time for W&B to take the last rows; then finish() raises TimeoutError


def check_wandb(folder: Path) -> None:
    """Check that wandb is installed, and that a run's folder does not decide where W&B sends the curves."""
    settings = folder / FOLDER / "settings"
    if settings.exists():  # the folder may come from a stranger
        raise UserError(f"{settings}: may name another server for W&B. Move it to ~/.config/wandb if it is yours")
    try:
        from wandb import init  # noqa: F401  # without the package, a folder wandb/ beside train.py can be imported
    except ImportError as error:
        raise UserError("--use_wandb: wandb is not installed; pip install wandb, or drop the flag") from error


def open_wandb(config: TrainConfig, run_id: str, warn: Callable[[str], object]) -> Any:
    """Return the wandb.Run of a run; a resumed run continues it, and shows repeated steps twice.

    If W&B does not answer, the launch is recorded offline as a separate run, because two launches that are recorded
    under one id would replace each other's rows.

    Args:
        run_id: of run.json.
    """
    import wandb

    shown = shown_options(config)
    has_secrets = any(value for option, value in vars(config).items() if option not in shown)
    # log.txt has the console output; W&B's metadata would have the command line. A dict, because init() would change
    # a wandb.Settings.
    settings = {
        "console": "off", "quiet": True, "x_disable_meta": has_secrets, "init_timeout": CONNECT_S,
        "finish_timeout": FINISH_S, "finish_timeout_raises": True,
    }  # fmt: skip
    init = partial(
        wandb.init, project=os.environ.get("WANDB_PROJECT", "steadygpt"), name=config.name,
        dir=Path(config.checkpoint_dir).absolute(), config=shown, settings=settings,
    )  # fmt: skip
    try:
        is_offline = wandb.setup().settings.mode == "offline"
        run = init() if is_offline else init(id=run_id, resume="allow")
    except Exception as error:  # wandb raises its own errors for logins, networks and names
        warn(f"--use_wandb: wandb did not start ({brief(error)}); this launch is recorded offline")
        run = init(mode="offline")
    run.define_metric("*", step_metric="step")
    return run
