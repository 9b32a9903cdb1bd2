"""What a user can mend is told in one line: what was found, what was expected, what to do."""

import os
import sys


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug of ours."""


def run_cli(main) -> None:
    """Run a command's `main()` and exit: its status, 2 and one line for a `UserError`, 130 for Ctrl-C."""
    try:
        sys.exit(main())
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `... | head` closed the pipe: nobody is left to read an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
