"""The corpus of a source: which of its files are read, and why the others are not."""

import glob
import os
import re
import shlex
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, some
from steadygpt.base.typed import read_json
from steadygpt.prepare.advice import ORIGINAL, convert_command, converted, rename_command, target_of
from steadygpt.prepare.documents import PACKED, READABLE, TEXTS, suffix_by_content, suffix_of

STDLIB = Path(sysconfig.get_path("stdlib"))
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SPLITS = re.compile(r"(?<![a-z])(?:(train)|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
EXPECTED = (
    "a file, a folder, a glob, a URL such as s3://... or gs://..., stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
)
# Names of files that are not part of a corpus: cards and licences, descriptions of other files, caches of `datasets`.
NEVER = re.compile(
    r"((readme|licen[sc]e|requirements)([_-]\w+)*|copying|notice|authors|contributing|change(s|log)|citation|security|"
    r"code_of_conduct|dataset_?card|sha\d+sums?|checksums?)(\.\w\w)?(\.(md|txt|rst))?|"
    r"(dataset_infos?|dataset_dict|state|package(-lock)?|meta(data)?|info|index|config|manifest|tokenizer(_config)?|"
    r"special_tokens_map|generation_config|vocab)\.json|cache-.*\.arrow",
    re.IGNORECASE,
)
# Groups of files: a kind, or why they are not read.
TEXT = "text"
ONLY_ALONE = (".json", ".py")  # read if a source has no other text, beside which these are configuration and scripts
NOT_READ = "cards, licences, descriptions, caches, or converted"
TOKEN_IDS = "token ids"
TABLES_PAGE = "docs/data.md#tables-and-other-json"
ARCHIVES = {r"\.zip$": "python -m zipfile -e", r"\.(tar(\.\w+)?|tgz)$": "python -m tarfile -e"}


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: str
    size: int  # in bytes
    version: str  # the time of its last change

    def open(self) -> BinaryIO:
        return Path(self.path).open("rb")


class LeftOut(NamedTuple):
    """Files that are not read, for one reason."""

    reason: str
    names: list[str]
    num_bytes: int = 0  # of text that they may hold
    advice: str = ""  # how to read them anyway

    def __str__(self) -> str:
        size = f" ({bytes_text(self.num_bytes)})" if self.num_bytes else ""
        beside = " beside other text" if self.reason in ONLY_ALONE else ""
        advice = self.advice and f"; {self.advice}"
        return f"{', '.join(some(self.names, 'file', 3))}{size}: {self.reason}{beside}{advice}"


# ---------------------------------------------------------------------------------------------------------------------
# which files there are


def local_files(name: str, out: Path | None = None, text_field: str = "text") -> tuple[list[LocalFile], list[LeftOut]]:
    """Find the files of a corpus: of a file, a folder, a glob or "stdlib", sorted by name; each real file once.

    Hidden names are left out.

    Args:
        out: the folder for the shards, whose files are left out.
    """
    if not name:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    pattern = Path(STDLIB if name == "stdlib" else name)
    paths: set[Path] = set()
    for match in [pattern] if os.path.lexists(pattern) else matches(pattern):
        paths.update(match.glob("**/*") if match.is_dir() else [match])
    links_to_folders: list[str] = []
    files: dict[tuple[int, int], LocalFile] = {}
    # Of a file with several names, as in the Hub's cache, take the first name whose suffix tells the format.
    for path in sorted(paths, key=lambda path: (not suffix_of(path.name), path)):
        if any(part.startswith(".") for part in {*path.parts} - {*pattern.parts}):
            continue
        if name == "stdlib" and (path.suffix != ".py" or NOT_IN_STDLIB & {*path.relative_to(STDLIB).parts}):
            continue
        if path.is_symlink() and path.is_dir():
            links_to_folders.append(str(path))
        elif path.is_file() and not (out and path.resolve().is_relative_to(out.resolve())):
            status = path.stat()
            file = LocalFile(str(path), status.st_size, str(status.st_mtime_ns))
            files.setdefault((status.st_dev, status.st_ino), file)
    by_path = {file.path: file for file in sorted(files.values(), key=lambda file: Path(file.path))}
    left_out: list[LeftOut] = []
    if links_to_folders:
        folder = Path(links_to_folders[0]).parent
        left_out.append(
            LeftOut("links to folders", links_to_folders, advice=f"to read them too: --source '{folder}/*'")
        )
    if name == "stdlib":
        return [*by_path.values()], left_out
    of_data_set = without_caches([*by_path.values()])
    caches = [path for path, file in by_path.items() if file not in of_data_set]
    if caches:
        left_out.append(LeftOut("not among the files that state.json of the data set names", caches))
    chosen, others = choose(name, {file.path: file.size for file in of_data_set}, text_field)
    return [by_path[path] for path in chosen], others + left_out


def matches(pattern: Path) -> list[Path]:
    """Return what a glob matches."""
    base = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    if base == pattern:
        return []
    try:
        return list(base.glob(str(pattern.relative_to(base))))
    except ValueError as error:  # a**
        raise UserError(f"--source {pattern}: {error}") from None


def without_caches(files: Sequence[LocalFile]) -> list[LocalFile]:
    """Leave out the .arrow files beside a state.json of `datasets` that does not name them."""
    kept = []
    named: dict[Path, set[str]] = {}  # folder -> the files of the data set
    for file in files:
        folder = Path(file.path).parent
        if len(files) > 1 and suffix_of(file.path) == ".arrow" and (folder / "state.json").exists():
            if folder not in named:
                state = read_json(folder / "state.json", dict, "expected that of a data set of `datasets`")
                named[folder] = {entry["filename"] for entry in state.get("_data_files", [])}
            if Path(file.path).name not in named[folder]:
                continue
        kept.append(file)
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# which of them are the corpus


def choose(source: str, sizes: Mapping[str, int], text_field: str) -> tuple[list[str], list[LeftOut]]:
    """Choose the files of a corpus by their names: all that hold text.

    A source that is a single file is read, even if its name would be left out in a folder.

    Args:
        sizes: name -> bytes.

    Raises: UserError if no file can be read, if more than half of the bytes are left out, or if the user has to choose.
    """
    if [*sizes] == [source] and suffix_of(source):
        return [source], []
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sizes:
        groups[group_of(name, sizes)].append(name)
    kind = next((kind for kind in (TEXT, *ONLY_ALONE) if kind in groups), TEXT)
    chosen = groups.pop(kind, [])
    left_out = []
    for group, names in groups.items():
        num_bytes = 0 if group == NOT_READ else sum(sizes[name] for name in names)
        left_out.append(LeftOut(group, names, num_bytes, advice_for(source, group, names, text_field)))
    if not chosen:
        raise nothing_found(source, left_out)
    lost = sum(lost.num_bytes for lost in left_out)
    total = lost + sum(sizes[name] for name in chosen)
    if 2 * lost > total:
        raise UserError(
            f"--source {source}: {lost / total:.0%} of its {bytes_text(total)} would be left out: "
            f"{'. '.join(str(lost) for lost in left_out if lost.num_bytes)}. Move or convert them, or choose files "
            f"with a glob: {glob_of(source, chosen)}"
        )
    if not glob.has_magic(source):
        check_splits(source, [name for name in chosen if suffix_of(name) not in (".py", ".md")])
    check_formats(source, chosen)
    return chosen, left_out


def glob_of(source: str, names: Sequence[str]) -> str:
    """Return --source with a glob for the files of a source that have the suffix of the first of these names."""
    base = source.rstrip("/")
    if glob.has_magic(source):
        base = os.path.commonpath([Path(name).parent for name in names]) or os.curdir
    return f"--source {shlex.quote(f'{base}/**/*{suffix_of(names[0])}')}"


def group_of(name: str, names: Collection[str]) -> str:
    """Return TEXT for a file that is read, the suffix of one that is only read alone, or else why it is not read.

    Args:
        names: of all files.
    """
    suffix = suffix_of(name).removesuffix(".gz").removesuffix(".zst")
    made_of_it = converted(name.removesuffix(ORIGINAL)) if name.endswith(ORIGINAL) else target_of(name)
    if NEVER.fullmatch(re.split("[/\\\\]", name)[-1]) or made_of_it in names:
        return NOT_READ
    if suffix:
        return suffix if suffix in ONLY_ALONE else TEXT
    if name.lower().endswith((".npy", ".npz", ".bin")):
        return TOKEN_IDS
    for pattern in ARCHIVES:
        if re.search(pattern, name.lower()):
            folder = re.sub(pattern, "/", name, flags=re.IGNORECASE)
            return NOT_READ if any(other.startswith(folder) for other in names) else "archives"
    return "of a format that is not read" if target_of(name) else "of other types"


def advice_for(source: str, group: str, names: Sequence[str], text_field: str) -> str:
    """Return what to type to read the first of these left-out files; "" if that is unknown."""
    name = names[0]
    if group == NOT_READ:
        return ""
    if group in ONLY_ALONE:
        return f"to read them: {glob_of(source, names)}"
    if group == TOKEN_IDS:
        return "train.py reads .npy and .bin as they are, see docs/data.md#token-ids"
    if "://" in name:
        return "copy them to a folder of this machine, and prepare that"
    for pattern, unpack in ARCHIVES.items():
        if re.search(pattern, name.lower()):
            target = re.sub(pattern, "", name, flags=re.IGNORECASE)
            command = shlex.join([*unpack.split(), name, target])
            break
    else:
        target = target_of(name)
        suffix = "" if target else suffix_by_content(Path(name))
        if suffix:
            base = name if suffix in TEXTS else str(Path(name).with_suffix(""))
            target = base if suffix_of(base) else f"{base}{suffix}"
        if not target:
            return ""
        command = rename_command(name, target) if suffix else convert_command(name, text_field)
    then = f"then --source {shlex.quote(target)}" if name == source else "then run this again, with a new --out"
    others = "; the others alike" if len(names) > 1 else ""
    page = f"; for other tables see {TABLES_PAGE}" if target_of(name) else ""
    return f"type {command}, {then}{others}{page}"


def nothing_found(source: str, left_out: Sequence[LeftOut]) -> UserError:
    """Return the error for a source without a readable file."""
    if left_out:
        found = sorted(left_out, key=lambda lost: not lost.advice)  # what can be converted first
        problem = "; ".join(map(str, found))
        return UserError(f"--source {source}: found {problem}; expected files of {READABLE}")
    problem = "no such file"
    if os.path.isdir(source):  # noqa: PTH112 (Path.is_dir may raise)
        problem = "empty, but for what is left out: hidden files and the folder for the shards"
    return UserError(f"--source {source}: {problem}; expected {EXPECTED}; files of {READABLE}")


def check_splits(folder: str, names: Sequence[str]) -> None:
    """Refuse a folder with files both for training and for tests, such as a copy of a data set of the Hub."""
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
            f"glob: --source {shlex.quote(f'{folder}/**/*{train_word}*')}, or name a data set of the Hub hf:NAME"
        )


def stem_of(name: str) -> str:
    """Return the name of a data file without its format, or of a text without its packing."""
    suffix = suffix_of(name)
    if suffix in TEXTS:
        suffix = next((packing for packing in PACKED if suffix.endswith(packing)), "")
    return name.lower().removesuffix(suffix)


def check_formats(source: str, names: Iterable[str]) -> None:
    """Refuse files whose names differ only in the format or packing: they are probably the same text."""
    first_of: dict[str, str] = {}
    for name in names:
        other = first_of.setdefault(stem_of(name), name)
        if other != name:
            raise UserError(
                f"--source {source}: found {other} and {name}, which are probably the same text in two formats, or of "
                f"two dates; choose files with a glob: {glob_of(source, [other])} or {glob_of(source, [name])}"
            )
