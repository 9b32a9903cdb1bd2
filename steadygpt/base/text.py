"""Times, sizes, counts and flags as text; imports no PyTorch, so that the monitor starts at once."""

import codecs
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent.parent  # of the repository
MAX_NAME = 200  # characters of the name of a run
# Byte-order marks. UTF-32 comes first, because its little-endian mark begins with UTF-16's.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}


def encoding_of(beginning: bytes) -> str:
    """Return the encoding of a text that begins with a byte-order mark, or "utf-8"."""
    return next((encoding for mark, encoding in MARKS.items() if beginning.startswith(mark)), "utf-8")


def printable(text: str, keep: str = "") -> str:
    """Return untrusted text, safe to print on one line: \\x1b for a control character, \\xff for a bad byte.

    Args:
        keep: characters that stay, such as line breaks.
    """

    def shown(c: str) -> str:
        if c.isprintable() or c in keep:
            return c
        if "\udc80" <= c <= "\udcff":  # a byte that is not UTF-8
            return f"\\x{ord(c) - 0xDC00:02x}"
        return f"\\u{ord(c):04x}" if "\x80" <= c <= "\xff" else c.encode("unicode_escape").decode()

    return text if text.isprintable() else "".join(map(shown, text))


def columns_of(stream: IO[str]) -> float:
    """Return the width of a terminal in columns; infinity for a file or a pipe, whose lines are not cut."""
    with suppress(OSError, ValueError):  # no terminal; closed, or without a descriptor
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a terminal without a size, as in containers
    return math.inf


def fitting(parts: Mapping[str, str], columns: float, expendable: Sequence[str]) -> str:
    """Join the parts of a line with |, and drop `expendable` parts, in their order, until the line fits."""
    kept = dict(parts)
    for name in expendable:
        if len(" | ".join(kept.values())) <= columns:
            break
        kept.pop(name, None)
    return " | ".join(kept.values())


def duration_text(seconds: float) -> str:
    """Return a duration as 42 s, 3 min 05 s, 2 h 07 min or 12 d 03 h."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} min"
    return f"{s // 86400} d {s % 86400 // 3600:02d} h"


def scaled_text(count: float, units: Sequence[str]) -> str:
    """Return a number with three digits and one of `units`, each a thousand times the previous one."""
    *smaller, largest = units
    for unit in smaller:
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.3g}{largest}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    return scaled_text(count, (" bytes", " kB", " MB", " GB", " TB"))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which is plural except after 1."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "batch")) else "s"
    return f"{count:,} {noun}{ending}"


def some(texts: Sequence[str], noun: str, most: int = 8) -> list[str]:
    """Return the first `most` texts, then "and N more" if there are others."""
    if len(texts) <= most:
        return list(texts)
    return [*texts[:most], f"and {counted(len(texts) - most, f'more {noun}')}"]


def labelled(label: str, text: str) -> str:
    """Return a line of the plan or the summary: every text begins in the same column."""
    return f"{label:<13}{text}"


def command(name: str) -> str:
    """Return how to type a command of the repository, such as generate.py, in the working directory."""
    path = name
    if not ROOT.samefile("."):
        path = shlex.quote(str(ROOT / name))
    elif "/" not in name and name.endswith(".sh"):
        path = f"./{name}"
    return f"python {path}" if name.endswith(".py") else path


def run_flags(folder: str, mirror: str = "") -> str:
    """Return the flags that name a run's folder and mirror in a command, each after a space; defaults are left out."""
    flags = ""
    if folder != "checkpoints":
        flags += f" --checkpoint_dir {shlex.quote(folder)}"
    if mirror:
        flags += f" --mirror {shlex.quote(mirror)}"
    return flags
