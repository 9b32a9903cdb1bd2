"""Options declared once as dataclass fields: flags, help, bounds; and errors of one line for users' mistakes."""

import argparse
import dataclasses
import difflib
import errno
import itertools
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, Any, TypeVar

from steadygpt import version_text
from steadygpt.base.text import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
OTHER_CONFIGS = (".py", ".yaml", ".yml", ".json")  # of other trainers; ours are TOML
OF_PATHS = (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
PASSWORD = r"[^/:@]*:(?!\d*(/|$))[^@]*@"  # begins the rest of a URL, which may also begin with a server and a port
ON_OFF = {"on": True, "true": True, "1": True, "yes": True, "off": False, "false": False, "0": False, "no": False}


class UserError(Exception):
    """A mistake in flags, configuration, data or checkpoint files; never a bug in SteadyGPT.

    Every function that reads what users give may raise it, so docstrings do not repeat it; run_cli() prints one line.
    """


class RankError(UserError):
    """A UserError that local rank 0 does not have, so the rank itself prints it."""


class Interrupted(KeyboardInterrupt):
    """A signal that ends a run before its first step; `number` is the signal's, the text its name."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class OptionError(UserError):
    """A value that an option does not accept. `name` is that of the field; other formats report their own name."""

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
    aliases: tuple[str, ...] = (),
    spellings: Mapping[str, str] = {},
    at_least: float = 0,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    bare: str | None = None,
    positional: bool = False,
    secret: bool = False,
    on_resume: str = "free",
) -> Any:
    """Declare an option as a dataclass field. Its type is the field's: int, float, str, bool or Path, perhaps `| None`.

    Args:
        aliases: other names of the flag, without dashes; one letter stands behind one dash.
        spellings: other words for values of this option, such as other trainers'.
        at_least, above, at_most, below: bounds of numbers.
        bare: the value of the flag without one (`--resume`).
        positional: an argument without a flag, though its aliases are flags; optional if it has a default.
        secret: kept out of everything that a run writes.
        on_resume: of train.py: "never" changes, changes if asked ("ask": --allow_changes), changes "free"ly, belongs to
            one "launch", so that the checkpoint's value is ignored, or says a "place" that a run writes to, which its
            folder knows (see steadygpt/run/places.py) and its checkpoints cannot decide.
    """
    metadata = {
        "text": text, "group": group, "choices": choices, "aliases": aliases, "spellings": spellings, "bare": bare,
        "at_least": at_least, "above": above, "at_most": at_most, "below": below,
        "positional": positional, "secret": secret, "on_resume": on_resume,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def options_of(options: "DataclassInstance | type[DataclassInstance]") -> dict[str, dataclasses.Field]:
    """The options of a dataclass by name; fields without metadata are none."""
    return {f.name: f for f in dataclasses.fields(options) if f.metadata}


def shown_options(options: "DataclassInstance") -> dict[str, Any]:
    """Return the fields that a run may write, by name: all but the secret ones."""
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if not f.metadata.get("secret")}


def check_options(options: "DataclassInstance") -> None:
    """Compare each value with the choices and bounds of its option; refuse passwords that a run would write."""
    for name, f in options_of(options).items():
        value, about = getattr(options, name), f.metadata
        if about["choices"] and value not in about["choices"]:
            raise OptionError(name, repr(value), f"one of {', '.join(about['choices'])}")
        if name in ("mirror", "source") and re.match(PASSWORD, value.partition("://")[2]):
            log_in = "log in with AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or another setting of the store"
            raise OptionError(name, "a URL with a password, which files and logs would show", f"one without; {log_in}")
        if value is None or kind_of(f) not in (int, float):
            continue
        least = about["at_least"]
        for fits, expected in (
            (least <= value < math.inf, f"at least {least}" if least else "0 or more"),
            (value > about["above"], f"more than {about['above']}"),
            (value <= about["at_most"], f"at most {about['at_most']:,}"),
            (value < about["below"], f"less than {about['below']:,}"),
        ):
            if not fits:
                raise OptionError(name, f"{value:,}" if isinstance(value, int) else value, expected)


def kind_of(f: dataclasses.Field) -> type:
    """Return the type of a field, without `| None`."""
    return f.type.__args__[0] if isinstance(f.type, types.UnionType) else f.type  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options of all commands that use a trained model."""

    checkpoint_dir: str = option("checkpoints", "folder of checkpoints")
    device: str = option("auto", "auto (CUDA if available), cpu, cuda or mps")
    precision: str = option(
        "auto",
        "auto: on a GPU bf16 if supported, else fp16; on a CPU the faster of bf16 and fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(ModelOptions):
    """Options of the commands that use a given checkpoint."""

    checkpoint: str = option(
        "latest",
        "latest, best, stable, a file, a folder for its latest, or average:N for the mean weights of the newest N "
        "rolling checkpoints",
        positional=True,
    )


# ---------------------------------------------------------------------------------------------------------------------
# reading the command line


def parse_options(
    options: type[Options], argv: Sequence[str] | None, description: str, elsewhere: Mapping[str, str] = {}
) -> Options:
    parsed = options(**read_flags(options, sys.argv[1:] if argv is None else argv, description, elsewhere=elsewhere))
    check_options(parsed)
    return parsed


def read_flags(
    options: type, argv: Sequence[str], description: str = "", elsewhere: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the values that a command line gives, by field name. --flag_name and --flag-name are the same.

    Args:
        elsewhere: names that other programs use -> our flag, or a sentence about what has none here; {} is the
            given value, and "" the name of a word without a flag.
    """
    for argument in argv:
        if not argument.isascii() and "\\udc" in (shown := ascii(argument)):
            problem = f"{shown}: not valid {sys.getfilesystemencoding()}, the encoding of this system"
            raise UserError(f"{problem}; rename it, or set LC_ALL=C.UTF-8 and PYTHONUTF8=1")
    argv = [_underscored(argument) for argument in argv]
    if any(f.metadata["positional"] for f in options_of(options).values()):
        # A word behind a switch is an argument of the command, unless it says on or off: --once FOLDER.
        switches = {f"--{name}" for name, f in options_of(options).items() if kind_of(f) is bool}
        for i, (flag, word) in enumerate(itertools.pairwise(argv)):
            if flag in switches and word.lower() not in ON_OFF:
                argv[i] = f"{flag}=on"
    values, unknown = _parser(options, description).parse_known_args(argv)
    if unknown:
        raise UserError(_unknown_text(argv, unknown, options, elsewhere))
    return vars(values)


@cache  # a preset is read as flags too, and so is the preset that it names
def _parser(options: type, description: str) -> argparse.ArgumentParser:
    positional = {name: f for name, f in options_of(options).items() if f.metadata["positional"]}
    words = [name if f.default is dataclasses.MISSING else f"[{name}]" for name, f in positional.items()]
    words += ["[--config NAME]"] * ("config" in options_of(options)) + ["[--flag value ...]"]
    usage = " ".join(["%(prog)s", *words])
    cli = _Parser(usage=usage, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    cli.add_argument("--version", action=_Version, nargs=0, help="print the version and the commit, and exit")
    groups: dict[str, Any] = {}
    for name, f in options_of(options).items():
        about, kind = f.metadata, kind_of(f)
        group = groups.setdefault(about["group"], cli.add_argument_group(about["group"]))
        shown = {True: "on", False: "off", "": None}.get(f.default, f.default) if kind in (bool, str) else f.default
        text = about["text"] + ("" if shown in (None, dataclasses.MISSING) else f" (default: {shown})")
        text = text.replace("%", "%%")
        if about["positional"]:
            group.add_argument(name, nargs=None if f.default is dataclasses.MISSING else "?", type=kind, help=text)
        bare = True if kind is bool else about["bare"]
        typed = "on|off" if kind is bool else kind.__name__.upper()
        for flag in (*([] if about["positional"] else [name]), *about["aliases"]):
            group.add_argument(
                f"--{flag}" if len(flag) > 1 else f"-{flag}",
                dest=name,
                type=_reader(kind, about["spellings"]),
                nargs=None if bare is None else "?",
                const=bare,
                metavar="|".join(about["choices"]) or typed,
                help=text if flag == name else argparse.SUPPRESS,
            )
        if kind is bool:
            group.add_argument(f"--no_{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS)
    return cli


def _unknown_text(argv: Sequence[str], unknown: list[str], options: type, elsewhere: Mapping[str, str]) -> str:
    """Name every unknown argument of a command line, with what to type instead."""
    told: dict[str, str] = {}
    for before, argument, after in zip(["", *argv], argv, [*argv[1:], "--"], strict=False):
        is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
        if argument in unknown and not is_value:
            name, _, value = argument.partition("=")
            value = (value or ("..." if after.startswith("--") else after)) if name.startswith("-") else name
            if name in options_of(options):  # as in NAME=VALUE, nanoGPT's and Hydra's form
                told[argument] = f"use --{argument}"
            else:
                told[name] = _suggestion(name, options, elsewhere).replace("{}", shlex.quote(value))
    if len(told) == 1:
        [(name, advice)] = told.items()
        return f"unknown argument {name!r}; {advice}"
    return "unknown arguments: " + "; ".join(f"{name!r}: {advice}" for name, advice in told.items())


def _suggestion(unknown: str, options: type, elsewhere: Mapping[str, str]) -> str:
    name, is_flag = unknown.lstrip("-").lower(), unknown.startswith("-")
    if ours := elsewhere.get(name) or (not is_flag and elsewhere.get("")):
        return f"use {ours}" if ours.startswith("--") else ours
    if not is_flag and "config" in options_of(options):
        if unknown.endswith(OTHER_CONFIGS):
            return "write its options as flags, or as TOML for --config; see docs/from-other-trainers.md"
        return f"a preset or TOML file is --config {unknown}, a value --flag VALUE"
    # 0.85: a typing mistake, or a letter more or less; below that names are alike by chance.
    close = difflib.get_close_matches(name, [n for n in options_of(options)], n=1, cutoff=0.85)
    return f"did you mean --{close[0]}?" if close and is_flag else "see --help"


class _Version(argparse.Action):
    def __call__(self, parser, *_) -> None:  # only here, because git reads the state of every file
        print(f"SteadyGPT {version_text()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _underscored(argument: str) -> str:
    """--flag-name[=value] as --flag_name[=value]."""
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value if argument.startswith("--") else argument


def _reader(kind: type, spellings: Mapping[str, str]) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return ON_OFF[text.lower()] if kind is bool else kind(spellings.get(text, text))
        except KeyError:
            raise argparse.ArgumentTypeError(f"is {text!r}; expected on or off") from None
        except ValueError:
            expected, (base, _, exponent) = "a number" if kind is float else "an integer", text.partition("**")
            with suppress(ValueError, OverflowError):
                if (number := math.pow(float(base), float(exponent or 1))).is_integer():
                    expected += f": {int(number)}"
            raise argparse.ArgumentTypeError(f"is {text!r}; expected {expected}") from None

    return parse


# ---------------------------------------------------------------------------------------------------------------------
# running a command


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command's `main()` and exit: with its status, 2 and one line for a `UserError` or a path that cannot be
    used, 128 + the number of the signal that interrupts it (Ctrl-C: 130), 1 and a traceback for other exceptions.
    """
    for name in ("stdout", "stderr"):  # None if the shell has closed it: >&-
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115 (open as long as the process)
    for stream in (sys.stdout, sys.stderr):  # texts may have characters that the terminal's encoding lacks
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main() or 0
        sys.stdout.flush()  # here, because the last lines may find the pipe closed
    except UserError as error:
        status = 2
        if isinstance(error, RankError) or "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {printable(str(error))}", file=sys.stderr)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first one exits: let local rank 0 print the error
    except KeyboardInterrupt as interrupt:
        status = 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
        sys.unraisablehook = lambda _: None  # the destructors of objects that Ctrl-C left half-built may fail
    except BrokenPipeError:  # `... | head` closed the pipe, so there is no reader for an error either
        mute(sys.stdout)
        status = 0
    except Exception as error:
        status = 2 if isinstance(error, OSError) and error.filename and error.errno in OF_PATHS else 1
        if status == 2:  # a path that a user gave: even Path.exists() raises these
            found = printable(f"{error.filename}: {error.strerror}")  # type: ignore[attr-defined]
            print(f"error: {found}; change its permissions, or give another path", file=sys.stderr)
        else:
            traceback.print_exc()
    if "RANK" in os.environ or threading.active_count() > 1:
        # FSDP's caches keep gloo's threads alive after destroy_process_group, and a download may run. If one of them
        # asks for the GIL while the interpreter shuts down, it aborts (SIGABRT). After an exception, shutting down NCCL
        # may wait for the other ranks. So exit without shutting the interpreter down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def mute(stream: IO[str]) -> None:
    """Discard everything written to a stream from now on, because its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
