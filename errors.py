"""What a user can mend is told in one line: what was found, what was expected, what to do."""

import os
import sys
import time
from typing import IO


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug of ours."""


def run_cli(main) -> None:
    """Run a command's `main()` and exit: its status, 2 and one line for a `UserError`, 130 for Ctrl-C."""
    try:
        sys.exit(main())
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one leaves: let rank 0 speak
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `... | head` closed the pipe: nobody is left to read an error
        mute(sys.stdout)
        sys.exit(0)


def mute(stream: IO[str]) -> None:
    """Let a stream whose reader is gone swallow what is written to it from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
