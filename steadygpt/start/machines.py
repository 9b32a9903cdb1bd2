"""The machines of a run, compared: code, commands, and the checkpoints in their folders."""

import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from steadygpt.base.options import UserError
from steadygpt.base.text import labelled
from steadygpt.checkpoint import files
from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.version import code_digest


def agreed_command(
    command: TrainConfig, set_by: Mapping[str, str], ranks: Ranks
) -> tuple[TrainConfig, dict[str, str], list[str]]:
    """Compare the machines of a run, and return the command of rank 0, which counts on all of them.

    Args:
        set_by: option of this rank's command -> "flag" or "preset".

    Returns: the command, its set_by, and lines for the plan.
    """
    check_programs(ranks)
    main, set_by_main = ranks.broadcast((command, dict(set_by)))
    ignored = ignored_options(command, main, set_by, ranks)
    # A mirror has the newest checkpoint of all machines.
    if main.resume in ("latest", "auto") and not main.mirror:
        check_other_machines(Path(main.checkpoint_dir), ranks)
    return main, set_by_main, ignored


def check_programs(ranks: Ranks) -> None:
    """Check that all machines run the same code with the same PyTorch."""
    program = ""  # of a rank that shares its machine with an earlier one
    if ranks.is_first_of_machine:
        program = f"code {code_digest()}, torch {torch.__version__}"
    (main_host, main_program), *others = ranks.gather((socket.gethostname(), program))
    for host, host_program in others:
        if host_program not in ("", main_program):
            raise UserError(
                f"{host} runs {host_program}, but {main_host}, which has rank 0, {main_program}; copy the checkout and "
                "its .venv to all machines"
            )


def ignored_options(own: TrainConfig, main: TrainConfig, set_by: Mapping[str, str], ranks: Ranks) -> list[str]:
    """Return a line for each machine whose command differs from rank 0's; the options of rank 0 count.

    Args:
        own: the configuration of this rank's command.
        main: the configuration of rank 0's command.
        set_by: see agreed_command(); of this rank's command.
    """
    differing = [f"--{name} {getattr(own, name)!r}" for name in set_by if getattr(own, name) != getattr(main, name)]
    line = ""
    if differing and not ranks.is_main:
        line = f"{', '.join(differing)} on {socket.gethostname()}"
    lines = dict.fromkeys(filter(None, ranks.gather(line)))  # the same line once for all ranks of a machine
    return [labelled("ignored", f"{text}; the options of rank 0 count") for text in lines]


def check_other_machines(folder: Path, ranks: Ranks) -> None:
    """Check that no other machine has newer checkpoints than rank 0, which resumes from its own.

    Machines that share the folder are not compared, because to rank 0 it may look older than it is, such as through
    NFS. They are the machines that see a file that rank 0 makes in the folder.
    """
    mark = folder / ranks.broadcast(f".{secrets.token_hex(8)}.tmp")
    if ranks.is_main:
        with suppress(OSError):  # there is no folder, or it cannot be written
            mark.touch()
    ranks.broadcast(None)
    newest = (0.0, 0)
    if ranks.is_first_of_machine and (ranks.is_main or not mark.exists()):
        newest = max((file.order for file in files.scan(folder)), default=newest)
    (main_newest, main_place), *others = ranks.gather((newest, f"{socket.gethostname()}:{folder.absolute()}"))
    if ranks.is_main:
        mark.unlink(missing_ok=True)
    for other_newest, place in others:
        if other_newest > main_newest:
            raise UserError(
                f"{place} has newer checkpoints than rank 0's {main_place}, which --resume reads; start that machine "
                "as node 0, use a shared folder or --mirror, or move its checkpoints to rank 0's folder"
            )
