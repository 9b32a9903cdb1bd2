"""Worker processes that compute results in the order of their inputs."""

import fcntl
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, resource_tracker
from typing import TypeVar

from steadygpt.base.options import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
RUN_AHEAD = 32  # items in memory beyond one per worker; they keep the workers busy while results are written


def map_in_order(
    work: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[tuple[Item, Result]]:
    """Yield each item and work(item), in order; at most num_workers + RUN_AHEAD items are in memory.

    Args:
        work: is pickled and sent to the workers with each item. With num_workers = 1 it runs in this process.
    """
    if num_workers == 1:
        yield from ((item, work(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        # Workers are spawned instead of forked, because this process may have threads.
        pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=end_with_main)
    except OSError as error:  # the semaphores of the pool are files in /dev/shm
        raise UserError(
            f"cannot start {num_workers} workers: /dev/shm: {error.strerror}; expected a writable folder with free "
            "space (df /dev/shm; docker run --shm-size=1g), or use --num_workers 1"
        ) from error
    # All results go through one pipe. With its usual 64 KB, each of 64 workers waits a fifth of the time for its turn.
    # The attributes are private and F_SETPIPE_SZ is Linux's, so one may be missing.
    with suppress(AttributeError, OSError):
        fcntl.fcntl(pool._result_queue._reader.fileno(), fcntl.F_SETPIPE_SZ, 2**20)  # type: ignore[attr-defined]
    try:
        for item in items:
            with without_ctrl_c():  # submit() may start a worker
                pending.append((item, pool.submit(work, item)))
            while pending and (len(pending) >= num_workers + RUN_AHEAD or pending[0][1].done()):
                oldest, future = pending.popleft()
                yield oldest, future.result()
        for oldest, future in pending:
            yield oldest, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of the {num_workers} workers was killed, perhaps for lack of memory; try fewer with --num_workers, "
            "and run the same command again to resume"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Keep Ctrl-C from the processes started in this block: they inherit the signal mask, which blocks SIGINT."""
    # The resource tracker starts with the first process, and unblocks SIGINT then. So it has to run before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with_main() -> None:
    """End this worker when the main process ends, even if that is killed."""
    main_process = parent_process()
    assert main_process

    def wait() -> None:
        main_process.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
