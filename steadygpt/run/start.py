"""The name of a run."""

import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from steadygpt.base.text import STAMP, labelled
from steadygpt.config import TrainConfig
from steadygpt.run.history import History

STAMP_PATTERN = r"\d{8}-\d{6}"  # matches a time that STAMP has formatted


def name_of_run(config: TrainConfig, history: History, held: ExitStack) -> tuple[str, str, str]:
    """Return the name of a run, the folder of its logs, and a line for the plan if it is not the name asked for.

    A run that is resumed in its folder keeps its name. A fork is named RUN-from-STEP and has logs of its own. A new
    name that has a TensorBoard folder already gets a time stamp, because TensorBoard would hide the older points.
    """
    saved, wanted, folder, logdir = history.run_name, config.run_name, Path(config.tensorboard_dir), config.logdir
    if history.is_fork and is_name_from(wanted, saved):
        wanted = f"{saved or 'run'}-from-{history.step}"
    elif saved and is_name_from(wanted, saved):
        return saved, logdir, ""
    wanted = wanted or time.strftime(f"gpt-{STAMP}-{os.getpid()}")
    name = unused_name(wanted, folder, held if config.trains and config.use_tensorboard else None)
    if history.checkpoint and not (saved and not history.is_fork):
        logdir = logdir if "logdir" in history.given else str(Path(logdir, name))
        return name, logdir, labelled("name", f"{name}, a fork of {saved or history.path}; its logs are in {logdir}")
    note = labelled("name", f"{name}, because {folder / wanted} belongs to an older run")
    return name, logdir, note if name != wanted else ""


def unused_name(wanted: str, folder: Path, held: ExitStack | None) -> str:
    """Return `wanted`, with a time stamp if it is in the folder already.

    Args:
        held: reserves the name by a folder of its own, which goes when `held` closes, unless it has files by then.
    """
    name = wanted
    while True:
        try:
            if held:
                (folder / name).mkdir(parents=True)
                held.callback(remove_if_empty, folder / name)
            elif (folder / name).exists():
                raise FileExistsError
            return name
        except FileExistsError:
            time.sleep(0.1 * (name != wanted))  # two runs within a second
            name = f"{wanted}-{time.strftime(STAMP)}"


def is_name_from(wanted: str, name: str) -> bool:
    """Return whether a run that wanted one name got the other."""
    return bool(re.fullmatch(rf"{re.escape(wanted)}(-from-\d+)?(-{STAMP_PATTERN})?", name))


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
