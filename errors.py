"""What a user can mend is told in one line: what was found, what was expected, what to do."""

import os
import sys
import time
from collections.abc import Callable
from typing import IO


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug of ours."""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command's `main()` and exit: its status, 2 and one line for a `UserError`, 130 for Ctrl-C."""
    try:
        status = main() or 0
    except UserError as error:
        status = 2
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one leaves: let rank 0 speak
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `... | head` closed the pipe: nobody is left to read an error
        mute(sys.stdout)
        status = 0
    if "RANK" in os.environ:
        # FSDP's caches keep gloo's threads alive beyond destroy_process_group. One that happens to want the GIL
        # while the interpreter is taken apart ends a finished run by SIGABRT: leave without taking it apart.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def mute(stream: IO[str]) -> None:
    """Let a stream whose reader is gone swallow what is written to it from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
