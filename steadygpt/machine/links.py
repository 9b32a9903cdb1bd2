"""Links between machines: where one is cut, the ranks on both sides end after 90 seconds."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.machine.ranks import Ranks

PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # seconds, seconds and number; Linux names
ANSWER_S = 30.0
SENT = bytes(2**16)


def watch_links(ranks: Ranks) -> None:
    """Connect rank 0 with the first rank of each other machine; where such a link is lost, this process ends.

    What is on its way between ranks the kernel sends again for 15 minutes. On these links nothing is, so the kernel
    probes them, and answers probes whatever its processes do.

    Raises: UserError on all ranks, if the network loses what is large.
    """
    if ranks.is_one_machine:
        return
    machines = sum(ranks.gather(ranks.is_first_of_machine))
    server = socket.create_server(("", 0), backlog=machines) if ranks.is_main else None
    port: int = ranks.broadcast(server.getsockname()[1] if server else 0)
    links = list[tuple[str, socket.socket]]()
    with suppress(OSError):  # without a link, the kernel's limit counts
        if server:
            server.settimeout(ANSWER_S)
            for _ in range(machines - 1):
                link, (host, *_) = server.accept()
                links.append((host, link))
        elif ranks.is_first_of_machine:
            host = os.environ["MASTER_ADDR"]
            links.append((host, socket.create_connection((host, port), ANSWER_S)))
    ranks.on_each(lambda: _exchange(links))
    for host, link in links:
        Thread(target=_watch, args=(host, link), daemon=True).start()


def _exchange(links: Sequence[tuple[str, socket.socket]]) -> None:
    """Send and receive more than a packet on each link."""
    for host, link in links:
        link.settimeout(ANSWER_S)
        try:
            link.sendall(SENT)
            with link.makefile("rb") as received:
                received.read(len(SENT))
        except OSError as error:
            raise UserError(
                f"{host} can be reached, but 64 kB do not arrive ({error}); check that the MTU of both machines and of "
                "all between them is the same (ip link)"
            ) from None


def _watch(host: str, link: socket.socket) -> None:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if option := getattr(socket, name, None):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        link.recv(1)  # ends when the process there does, which this rank learns from the process group
    except ConnectionResetError:
        pass
    except OSError as error:
        # The main thread may wait for the other machine; nothing but the steps since the last save is lost.
        say(f"error: lost another rank: {host} does not answer ({error.strerror}); resume with --resume latest")
        os._exit(1)
