#!/usr/bin/env python
"""Run torchrun on one of several machines, after a check that the machine can join the others.

scripts/start_node.py HEAD PORT torchrun ... train.py [flags], see scripts/multinode.sh
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt.base.durable import lock_folder
from steadygpt.base.opening import open_to_write
from steadygpt.base.options import REFUSED, UserError, run_cli
from steadygpt.base.progress import say
from steadygpt.config import parse_args

ANSWER_S = 3.0


def address_of(host: str, role: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UserError(f"{role} is {host}: {error.strerror}; give an address, or add it to /etc/hosts") from None


def is_alone(head: str) -> bool:
    """Return whether HEAD means that this machine is the only one."""
    return head == "localhost" or head.startswith("127.")


def check_names(head: str, port: int) -> None:
    """Check that names lead to addresses that other machines can reach. HEAD may be this machine."""
    own = socket.gethostname()
    address = address_of(head, "HEAD")
    if is_alone(head):
        return
    if address.startswith("127.") and head != own:
        raise UserError(f"HEAD is {head}, which is {address} here, this machine; give its address, or mend /etc/hosts")
    own_address = address_of(own, "the name of this machine")
    if own_address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise UserError(
            f"the name of this machine, {own}, is {own_address} here, where others cannot reach it; mend /etc/hosts, "
            "or set GLOO_SOCKET_IFNAME to the interface of their network, such as eth0 (ip -br address)"
        )
    if address != own_address:
        try:
            socket.create_connection((head, port), ANSWER_S).close()
        except OSError as error:  # the machine may start later
            say(f"waiting for an agent on {head}:{port}, which does not answer yet: {error.strerror or error}")


def run_agent(command: Sequence[str], trace: Path) -> None:
    """Run torchrun in this process, which ends with its parent, and write its log and its traceback to a file.

    The output of the ranks is not redirected. They report an error in one line, which torchrun repeats in forty.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    from torch.distributed import run

    trace.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = [*command]
    with open_to_write(trace, "a") as file:
        for name in ("torch", "torch.distributed"):
            logging.getLogger(name).handlers = [logging.StreamHandler(file)]
        try:
            run.main()
        except Exception:
            traceback.print_exc(file=file)
            sys.exit(1)


def own_folder() -> Path:
    """Return a folder for locks, to which no other user can write."""
    folder = Path(tempfile.gettempdir(), f"steadygpt-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        expected = "expected a folder of your own that is closed to others (mode 700)"
        raise UserError(f"{folder}: {expected}; remove it, or set TMPDIR to another folder")
    return folder


def main() -> int:
    head, port, *command = sys.argv[1:]
    flags = next(number for number, word in enumerate(command, start=1) if word.endswith("/train.py"))
    config, _ = parse_args(command[flags:])
    check_names(head, int(port))
    if not is_alone(head):
        folder = own_folder() / f"{socket.gethostname()}-{port}"
        _lock = lock_folder(folder, "this machine has an agent already; one starts the ranks of all its GPUs (NPROC)")
    trace = Path(config.checkpoint_dir, f"torchrun-{socket.gethostname()}.log")
    with tempfile.TemporaryDirectory() as temporary:
        refused = Path(temporary, "refused")  # exists once a rank has ended with a user's error
        os.environ[REFUSED] = str(refused)
        agent = multiprocessing.get_context("fork").Process(target=run_agent, args=(command, trace))
        agent.start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(agent.pid, number))
        while agent.exitcode is None:
            if refused.exists():  # the agent would restart the ranks, with the same result
                agent.kill()
            time.sleep(0.2)
        if refused.exists():
            return 2
    status = agent.exitcode
    if status:
        say(f"error: torchrun has ended with status {status}; what it wrote is in {trace}")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    run_cli(main)
