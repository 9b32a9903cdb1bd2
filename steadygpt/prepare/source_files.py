"""Search for the readable files of a source; each is found once, even if several links lead to it."""

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
Entered = Counter[tuple[int, int]]  # (device, inode) of a folder -> how many of its names the search has met


def find_files(source: str, out: Path | None = None) -> list[Path]:
    """Find the readable files of a file, a folder with all folders in it, a glob or "stdlib", sorted by name.

    A file or folder with several names, by links, is listed under the first name. Hidden names in folders are left out.

    Args:
        out: the folder for the shards; it is left out if it lies in a folder that is searched.

    Raises: UserError if there are no readable files, or both text and token ids.
    """
    entered: Entered = Counter()
    if source == "stdlib":
        return sorted(path for path in files_below(STDLIB, entered, NOT_IN_STDLIB) if path.suffix == ".py")
    if not source:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    names: set[str] = set()
    for path in [Path(source)] if os.path.lexists(source) else matches(source):
        if path.is_dir():
            below = list(files_below(path, entered))
            folders = {file.parent for file in below}
            excluded = {folder for folder in folders if out and is_in(folder, out)}
            names.update(str(file) for file in below if file.parent not in excluded)
        elif path.exists() or str(path) == source:  # a glob also matches dangling links
            names.add(str(path))
    chosen = choose(source, sorted(names, key=Path))
    files: dict[tuple[int, int], Path] = {}
    for name in chosen:
        status = Path(name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{name}: not a regular file; expected {EXPECTED}")
        files.setdefault((status.st_dev, status.st_ino), Path(name))
    num_links = len(chosen) - len(files) + sum(entered.values()) - len(entered)
    if num_links:
        say(f"{source}: left out {counted(num_links, 'link')} to files and folders that have another name here")
    return list(files.values())


def is_in(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a folder or to something in it."""
    return path.resolve().is_relative_to(folder.resolve())


def matches(pattern: str) -> list[Path]:
    """Return what a glob matches, sorted; ** stands for a folder and all folders in it, each once.

    The ** of glob is not used, because it follows links that lead back, until a path is too long.
    """
    parts = re.split(r"(?:(?<=/)|^)\*\*(?:/+|$)", pattern, maxsplit=1)
    if len(parts) == 1:
        return sorted(map(Path, glob.glob(pattern)))
    head, rest = parts
    paths: set[Path] = set()
    for base in glob.glob(head) if head else [os.curdir]:
        if not rest:
            paths.add(Path(base))
            continue
        for folder, _ in walk(Path(base), Counter()):
            paths.update(matches(f"{glob.escape(str(folder))}/{rest}"))
    return sorted(paths)


def files_below(folder: Path, entered: Entered, excluded: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files of a folder and of all folders in it that are not entered yet, without dangling links."""
    for parent, names in walk(folder, entered, excluded):
        for name in names:
            path = parent / name
            if path.is_file():
                yield path


def walk(folder: Path, entered: Entered, excluded: Collection[str] = ()) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and all folders in it that are not entered yet, each with the names in it that are no folders.

    Hidden names and the names in `excluded` are left out.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    def visible(names: list[str]) -> list[str]:
        return sorted(name for name in names if name not in excluded and not name.startswith("."))

    for parent, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = Path(parent).stat()
        identity = status.st_dev, status.st_ino
        entered[identity] += 1
        if entered[identity] > 1:
            subfolders[:] = []  # tells os.walk to enter none of them
            continue
        subfolders[:] = visible(subfolders)
        yield Path(parent), visible(names)


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
        problem = "no such file"
        if names:
            problem = f"found {counted(len(names), 'file')} of other types"
        elif Path(source).is_dir():
            problem = "an empty folder"
        raise UserError(f"--source {source}: {problem}; expected {EXPECTED}; files of {READABLE}")
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
    """Refuse a folder with both files for training and files for tests, such as a copy of a data set of the Hub."""
    train_name = ""
    train_word = ""  # as the name writes it, such as Train
    test_name = ""
    for name in names:
        split = SPLITS.search(name.removeprefix(folder))
        if split and split[1]:
            train_name = name
            train_word = split[1]
        elif split:
            test_name = name
    if train_name and test_name:
        raise UserError(
            f"--source {folder}: found {train_name}, and {test_name}, which is not for training; choose files with a "
            f"glob such as '{folder}/**/*{train_word}*', or name a data set of the Hub hf:NAME"
        )
