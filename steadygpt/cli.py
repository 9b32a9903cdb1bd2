"""What a user can mend is told in one line: what was found, what was expected, what to do."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import IO


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug of ours."""


class OneLineParser(argparse.ArgumentParser):
    """argparse for our commands: --flag_name and --flag-name are the same, no abbreviations, mistakes in one line.

    Raises: UserError when parsing.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        return super().parse_known_args([_underscored(a) for a in (sys.argv[1:] if args is None else args)], namespace)

    def error(self, message):
        raise UserError(f"{message}; see --help")


def _underscored(argument: str) -> str:
    """--flag-name[=value] as --flag_name[=value]."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


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
