"""The files that a source names: those that can be read, each once, whatever links lead to it."""

import glob
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from steadygpt.base.foreign import what_it_is
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.text import counted
from steadygpt.prepare.documents import READABLE, suffix_of
from steadygpt.prepare.ids import ID_SUFFIXES

STDLIB = Path(sysconfig.get_path("stdlib"))
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SPLITS = re.compile(r"(?<![a-z])(?:(train)|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
EXPECTED = (
    "a file, a folder, a glob, a URL such as s3://... or gs://..., stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
)
Entered = Counter[tuple[int, int]]  # (device, inode) of a folder -> how many of its names were met


def find_files(source: str, out: Path | None = None) -> list[Path]:
    """Find the readable files of a path, a folder and those below it, a glob or "stdlib", sorted by name.

    A file or folder that has several names, by links, has the first one. Hidden ones in folders are left out.

    Args:
        out: a folder that is left out of those above it, because shards are written there.

    Raises: UserError if there are none, or text beside token ids.
    """
    entered: Entered = Counter()
    if source == "stdlib":
        return sorted(path for path in files_below(STDLIB, entered, NOT_IN_STDLIB) if path.suffix == ".py")
    if not source:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    names = set[str]()
    for path in [Path(source)] if os.path.lexists(source) else matches(source):
        if path.is_dir():
            below = list(files_below(path, entered))
            inside = {folder for folder in {file.parent for file in below} if out and is_in(folder, out)}
            names.update(str(file) for file in below if file.parent not in inside)
        elif path.exists() or str(path) == source:  # a glob also matches links to nothing
            names.add(str(path))
    chosen = choose(source, sorted(names, key=Path))
    files = dict[tuple[int, int], Path]()
    for name in chosen:
        found = Path(name).stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{name}: not a regular file; expected {EXPECTED}")
        files.setdefault((found.st_dev, found.st_ino), Path(name))
    repeated = len(chosen) - len(files) + sum(entered.values()) - len(entered)
    if repeated:
        say(f"{source}: left out {counted(repeated, 'link')} to files and folders that have another name here")
    return list(files.values())


def is_in(path: Path, folder: Path) -> bool:
    """Return whether a path leads into a folder, or to it."""
    return path.resolve().is_relative_to(folder.resolve())


def matches(pattern: str) -> list[Path]:
    """Return what a glob matches, sorted; ** stands for a folder and those below it, each once.

    In place of glob's own **, which follows links that lead back until a path is too long.
    """
    parts = re.split(r"(?:(?<=/)|^)\*\*(?:/+|$)", pattern, maxsplit=1)
    if len(parts) == 1:
        return sorted(map(Path, glob.glob(pattern)))
    head, rest = parts
    found = set[Path]()
    for base in glob.glob(head) if head else [os.curdir]:
        if not rest:
            found.add(Path(base))
            continue
        for folder, _ in walk(Path(base), Counter()):
            found.update(matches(f"{glob.escape(str(folder))}/{rest}"))
    return sorted(found)


def files_below(folder: Path, entered: Entered, excluded: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files of a folder and of those below it that are not entered yet, without links to nothing."""
    for place, names in walk(folder, entered, excluded):
        for name in names:
            path = place / name
            if path.is_file():
                yield path


def walk(folder: Path, entered: Entered, excluded: Collection[str] = ()) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those below it that are not entered yet, each with the names in it that are no folders.

    Hidden names and those in `excluded` are left out.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    def visible(names: list[str]) -> list[str]:
        return sorted(name for name in names if name not in excluded and not name.startswith("."))

    for place, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        found = Path(place).stat()
        identity = found.st_dev, found.st_ino
        entered[identity] += 1
        if entered[identity] > 1:
            subfolders[:] = []
            continue
        subfolders[:] = visible(subfolders)
        yield Path(place), visible(names)


def choose(source: str, names: Sequence[str]) -> list[str]:
    """Return the names of files that can be read."""
    chosen = [name for name in names if suffix_of(name)]
    # Beside other files, .json files are rarely JSON Lines.
    chosen = [name for name in chosen if suffix_of(name) != ".json"] or chosen
    if not chosen:
        for name in names:
            kind = what_it_is(Path(name))
            if kind:
                raise UserError(f"--source {source}: {name} is {kind}")
        found = "no such file"
        if names:
            found = f"found {counted(len(names), 'file')} of other types"
        elif Path(source).is_dir():
            found = "an empty folder"
        raise UserError(f"--source {source}: {found}; expected {EXPECTED}; files of {READABLE}")
    ids = [name for name in chosen if suffix_of(name) in ID_SUFFIXES]
    if 0 < len(ids) < len(chosen):
        text = next(name for name in chosen if suffix_of(name) not in ID_SUFFIXES)
        raise UserError(
            f"--source {source}: found text, such as {text}, and token ids, such as {ids[0]}; expected only one kind; "
            f"choose files with a glob such as '*{suffix_of(text)}'"
        )
    if not glob.has_magic(source):
        check_splits(source, [name for name in chosen if suffix_of(name) not in (".py", ".md")])
    if len(chosen) < len(names):
        skipped = counted(len(names) - len(chosen), "file")
        say(f"{source}: skipped {skipped} of other types than {READABLE}, or .json beside these")
    return chosen


def check_splits(folder: str, names: Sequence[str]) -> None:
    """Refuse a folder with files for training beside files for tests, such as a copy of a data set of the Hub."""
    train, other, word = "", "", ""
    for name in names:
        split = SPLITS.search(name.removeprefix(folder))
        if split and split[1]:
            train, word = name, split[1]
        elif split:
            other = name
    if train and other:
        raise UserError(
            f"--source {folder}: found {train}, and {other}, which is not for training; choose files with a glob such "
            f"as '{folder}/**/*{word}*', or name a data set of the Hub hf:NAME"
        )
