"""Options declared once as dataclass fields: flags, help, bounds; and one-line errors for users' mistakes."""

import argparse
import dataclasses
import difflib
import errno
import itertools
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

from steadygpt import __version__
from steadygpt.base.text import printable

Options = TypeVar("Options")  # a dataclass
OTHER_TRAINERS = Path(__file__).with_name("other_trainers.toml")  # names of our options in other programs
OF_PATHS = (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
SECRETS = re.compile(  # in URLs: a password, but not a port; a token in place of a user; a parameter
    r"(://)[^\s/:@']*:(?!\d*(?:/|$))[^\s@']*(?=@)|(https?://)[^\s/:@']+(?=@)"
    r"|([?&][\w-]*(?:token|key|secret|sig|signature|pass|passwd|password|pwd|auth)=)[^&\s']+",
    re.IGNORECASE,
)
ON_OFF = {"on": True, "true": True, "1": True, "yes": True, "off": False, "false": False, "0": False, "no": False}


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug in SteadyGPT.

    Every function that reads user input may raise it, so docstrings do not mention it; run_cli() prints one line.
    """


class RankError(UserError):
    """A UserError that local rank 0 does not have, so the rank itself prints it."""


class LostRankError(Exception):
    """Another rank has ended or does not answer. That rank's output says why, so this rank prints one line."""


class OptionError(UserError):
    """A value that an option does not accept. `name` is the field; other readers put their key in its place."""

    def __init__(self, name: str, found: object, expected: str):
        super().__init__(f"--{name} is {found}; expected {expected}")
        self.name, self.found, self.expected = name, found, expected


# ---------------------------------------------------------------------------------------------------------------------
# declaring options


def option(
    default: Any,
    text: str,
    group: str = "arguments",
    *,
    choices: tuple = (),
    aliases: tuple[str, ...] = (),  # other names of the flag, without dashes; a single letter takes one dash
    spellings: Mapping[str, str] = {},  # other words for values of this option, such as other trainers'
    at_least: float = 0,  # bounds of numbers
    at_most: float = math.inf,
    bare: str | None = None,  # the value of a flag that is given without a value (`--resume`)
    positional: bool = False,  # an argument without a flag, though its aliases are flags; optional if it has a default
    secret: bool = False,  # kept out of everything that a run writes
    no_password: bool = False,  # refuse a URL with a password or a token, which files and logs would show
    on_resume: str = "free",  # of train.py: what a resume does with a value that differs (docs/options.md)
) -> Any:
    """Declare an option as a dataclass field of type int, float, str, bool or Path, perhaps with `| None`."""
    return dataclasses.field(default=default, metadata=locals())  # all arguments, by name


def options_of(options: Any) -> dict[str, dataclasses.Field]:
    """Return the options of a dataclass, or of an object, by name; fields without metadata are not options."""
    return {f.name: f for f in dataclasses.fields(options) if f.metadata}


def shown_options(options: Any) -> dict[str, Any]:
    """Return the fields that a run may write, by name: all but the secret ones."""
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if not f.metadata.get("secret")}


def without_secrets(text: str) -> str:
    """Return a text with ... in place of passwords and tokens in its URLs."""
    return SECRETS.sub(r"\1\2\3...", text)


def check_options(options: Any) -> None:
    """Compare each value with the choices and bounds of its option; refuse passwords that a run would write."""
    for name, f in options_of(options).items():
        value = getattr(options, name)
        metadata = f.metadata
        if metadata["choices"] and value not in metadata["choices"]:
            raise OptionError(name, repr(value), f"one of {', '.join(metadata['choices'])}")
        if metadata["no_password"] and without_secrets(value) != value:
            log_in = "log in with AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or another setting of the store"
            raise OptionError(
                name, "a URL with a password or a token, which files and logs would show", f"one without; {log_in}"
            )
        least = metadata["at_least"]
        most = metadata["at_most"]
        if type(value) in (int, float) and not (least <= value <= most and value < math.inf):
            raise OptionError(name, f"{value:,}", f"{least} or more" if most == math.inf else f"{least:,} to {most:,}")


def kind_of(f: dataclasses.Field) -> type:
    """Return the type of a field, without `| None`."""
    return f.type.__args__[0] if isinstance(f.type, types.UnionType) else f.type  # type: ignore[return-value]


def help_of(f: dataclasses.Field) -> str:
    """Return the text of an option, with its default and what a resume does with it."""
    default = f.default
    if kind_of(f) in (bool, str):
        default = {True: "on", False: "off", "": None}.get(default, default)
    on_resume = f.metadata["on_resume"]
    notes = []
    if default not in (None, dataclasses.MISSING):
        notes.append(f"default: {default}")
    if on_resume != "free":
        notes.append(f"on resume: {on_resume}")
    text = f.metadata["text"]
    return f"{text} ({', '.join(notes)})" if notes else text


# ---------------------------------------------------------------------------------------------------------------------
# reading the command line


def parse_options(options: type[Options], argv: Sequence[str] | None, description: str) -> Options:
    parsed = options(**read_flags(options, sys.argv[1:] if argv is None else argv, description))
    check_options(parsed)
    return parsed


def read_flags(options: type, argv: Sequence[str], description: str = "") -> dict[str, Any]:
    """Return the values that a command line gives, by field name. --flag_name and --flag-name are the same."""
    if "--version" in argv:
        print(f"SteadyGPT {version_text()}")
        sys.exit()
    argv = [re.sub("^--[^=]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), argument) for argument in argv]
    fields = options_of(options)
    if any(f.metadata["positional"] for f in fields.values()):
        # A word after a switch is a positional argument, unless it is on or off: --once FOLDER.
        switches = {f"--{name}" for name, f in fields.items() if kind_of(f) is bool}
        for i, (flag, word) in enumerate(itertools.pairwise(argv)):
            if flag in switches and word.lower() not in ON_OFF:
                argv[i] = f"{flag}=on"
    values, unknown = _parser(options, description).parse_known_args(argv)
    if unknown:
        raise UserError(_unknown_text(unknown, options))
    return vars(values)


@cache  # used several times: presets, and presets that they name, are read as flags too
def _parser(options: type, description: str) -> argparse.ArgumentParser:
    fields = options_of(options)
    words = [name for name, f in fields.items() if f.metadata["positional"]]
    usage = " ".join(["%(prog)s", *words, "[--flag value ...]"])
    cli = _Parser(usage=usage, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    cli.add_argument("--version", action="store_true", help="print the version and the commit, and exit")
    groups: dict[str, Any] = {}
    for name, f in fields.items():
        metadata = f.metadata
        kind = kind_of(f)
        # --help omits the empty groups that this adds.
        group = groups.setdefault(metadata["group"], cli.add_argument_group(metadata["group"]))
        text = help_of(f).replace("%", "%%")
        if metadata["positional"]:
            group.add_argument(name, nargs=None if f.default is dataclasses.MISSING else "?", type=kind, help=text)
        if kind is bool:
            bare = True
            value_name = "on|off"
        else:
            bare = metadata["bare"]
            value_name = kind.__name__.upper()
        flags = [*metadata["aliases"]]
        if not metadata["positional"]:
            flags = [name, *flags]
        for flag in flags:
            group.add_argument(
                f"--{flag}" if len(flag) > 1 else f"-{flag}",
                dest=name,
                type=partial(_value, kind, metadata["spellings"]),
                nargs=None if bare is None else "?",
                const=bare,
                metavar="|".join(metadata["choices"]) or value_name,
                help=text if flag == name else argparse.SUPPRESS,
            )
        if kind is bool:
            group.add_argument(f"--no_{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS)
    return cli


def _unknown_text(unknown: Sequence[str], options: type) -> str:
    """Return, for every unknown argument of a command line, what to type instead."""
    advice_of_flag: dict[str, str] = {}  # flag of another program -> advice
    for advice, other_flags in tomllib.loads(OTHER_TRAINERS.read_text()).get(options.__name__, {}).items():
        advice_of_flag |= dict.fromkeys(other_flags, advice)
    problems = []
    for before, argument in itertools.pairwise(["", *unknown]):
        word = argument.partition("=")[0]
        is_flag = argument.startswith("-")
        if before.startswith("-") and "=" not in before and not is_flag:
            continue  # the value of an unknown flag
        name = word.lstrip("-").lower() if is_flag else ""
        # 0.85: a typo, or one letter more or less. Below that, names are similar by chance.
        [close] = difflib.get_close_matches(name, [*options_of(options), *advice_of_flag], n=1, cutoff=0.85) or [name]
        if advice_of_flag.get(close):
            advice = advice_of_flag[close]
        elif close in options_of(options):
            advice = f"did you mean --{close}?"
        else:
            advice = "see --help"
        problems.append(f"unknown argument {word!r}; {advice}")
    return "; ".join(problems)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _value(kind: type, spellings: Mapping[str, str], text: str) -> object:
    try:
        return ON_OFF[text.lower()] if kind is bool else kind(spellings.get(text, text))
    except (KeyError, ValueError):
        expected = {bool: "on or off", int: "an integer", float: "a number"}[kind]
        raise argparse.ArgumentTypeError(f"is {text!r}; expected {expected}") from None


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version_text() -> str:
    """Return the version and, in a checkout, the beginning of its commit."""
    commit = git_commit()
    return __version__ + f", commit {commit[:12]}{commit[40:]}" * bool(commit)


# ---------------------------------------------------------------------------------------------------------------------
# running a command


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command's `main()` and exit with its status, or after an exception:

    2 and one line for a UserError or a path that cannot be used; 1 and one line for a lost rank; 128 + the number of
    the signal that interrupts it (Ctrl-C: 130); 0 if the reader of its pipe has exited; 1 and a traceback for others.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  # None if the shell has closed it: >&-
        stream.reconfigure(errors="backslashreplace")  # texts may have characters that the terminal's encoding lacks
        setattr(sys, name, stream)
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see preflight.py; from here on, it is caught
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main() or 0
        sys.stdout.flush()  # here, because the pipe may be closed, which is handled below
    except UserError as error:
        status = 2
        if isinstance(error, RankError) or "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {without_secrets(printable(str(error)))}", file=sys.stderr)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun ends all ranks when the first one exits: wait until local rank 0, perhaps later, has printed it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(30)
    except LostRankError as error:
        status = 1
        print(f"error: {printable(str(error))}", file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        status = 128 + signal.Signals.__members__.get(str(interrupt), signal.SIGINT)  # named by Requests
        sys.unraisablehook = lambda _: None  # the destructors of objects that Ctrl-C left half-built may fail
    except Exception as error:
        status = 1
        if isinstance(error, BrokenPipeError) and (has_lost_reader(sys.stdout) or has_lost_reader(sys.stderr)):
            status = 0  # `... | head` has closed the pipe; a broken socket would be an error
            mute(sys.stdout)
        elif isinstance(error, OSError) and error.filename and error.errno in OF_PATHS:
            status = 2  # a path that a user gave: even Path.exists() raises these
            problem = printable(f"{error.filename}: {error.strerror}")
            print(f"error: {problem}; change its permissions, or give another path", file=sys.stderr)
        else:
            traceback.print_exc()
    if "RANK" in os.environ or threading.active_count() > 1:
        # FSDP's caches keep gloo's threads alive after destroy_process_group, and a download may run. If such a thread
        # asks for the GIL while the interpreter shuts down, the process aborts (SIGABRT). After an exception, shutting
        # down NCCL may wait for the other ranks. So exit without shutting the interpreter down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def has_lost_reader(stream: IO[str]) -> bool:
    """Return whether the other end of the pipe that a stream writes to is closed."""
    poll = select.poll()
    poll.register(stream, 0)  # 0: errors are reported without being asked for
    return bool(poll.poll(0))


def mute(stream: IO[str]) -> None:
    """Discard everything written to a stream from now on, because its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
