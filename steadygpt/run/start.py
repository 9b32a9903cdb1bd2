"""The name of a run, and the folder of its logs."""

import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from steadygpt.base.text import STAMP, labelled
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import owner
from steadygpt.run.history import History


def name_of_run(config: TrainConfig, history: History, held: ExitStack) -> tuple[str, str, list[str]]:
    """Return the name of a run, the folder of its logs, and lines for the plan if they are not those asked for.

    A run that is resumed keeps its name; a fork or a copy is named RUN-from-STEP. A new name that has a TensorBoard
    folder already gets a time stamp, because TensorBoard would hide the older points. A folder of logs belongs to one
    run, so another one has a subfolder.
    """
    run, wanted, folder = history.run, config.run_name, Path(config.tensorboard_dir)
    if run.other and wanted in ("", run.name):
        wanted = f"{run.name or 'run'}-from-{history.step}"
    wanted = wanted or run.name or time.strftime(f"gpt-{STAMP}-{os.getpid()}")
    name, logdir = run.name, Path(config.logdir)
    if run.other or not run.name or not is_name_from(wanted, name):
        name = unused_name(wanted, folder, held if config.trains and config.use_tensorboard else None)
    # A copy of a folder has a copy of the logs inside it.
    is_inside = Path(os.path.realpath(logdir)).is_relative_to(os.path.realpath(config.checkpoint_dir))
    if not (is_inside and history.checkpoint and not history.is_fork):
        if run.other and "logdir" not in history.given:
            logdir /= name
        while owner(logdir) not in ("", run.id):
            logdir /= name
    if run.other:
        mirror = f"the mirror {config.mirror}" if config.mirror else "no mirror"
        text = f"of {run.other}; this is the run {name}, with its logs in {logdir}, and with {mirror}"
        return name, str(logdir), [labelled("fork" if history.is_fork else "copy", text)]
    notes = []
    if name not in (wanted, run.name):
        notes.append(labelled("name", f"{name}, because {folder / wanted} belongs to an older run"))
    if logdir != Path(config.logdir):
        notes.append(labelled("logs", f"{logdir}, because {config.logdir} has those of another run"))
    return name, str(logdir), notes


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
    return bool(re.fullmatch(rf"{re.escape(wanted)}(-from-\d+)?(-\d{{8}}-\d{{6}})?", name))


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
