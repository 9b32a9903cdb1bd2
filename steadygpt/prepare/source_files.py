"""What the corpus of a source is: which of its files are read, and why the others are not."""

import glob
import hashlib
import os
import re
import shlex
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from steadygpt.base.durable import possible_copies
from steadygpt.base.options import UserError
from steadygpt.base.text import some
from steadygpt.base.typed import read_json
from steadygpt.prepare.documents import LINES, PACKED, READABLE, TEXTS, naming, open_text, suffix_of
from steadygpt.prepare.ids import ID_SUFFIXES
from steadygpt.prepare.lines import convert_command

STDLIB = Path(sysconfig.get_path("stdlib"))
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SPLITS = re.compile(r"(?<![a-z])(?:(train)|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
EXPECTED = (
    "a file, a folder, a glob, a URL such as s3://... or gs://..., stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
)
# Names that are no text of a corpus, and what they are. The whole name has to match.
NEVER = {
    "a card or a licence": r"(readme|licen[sc]e|copying|notice|authors|contributing|change(s|log)|citation|security|"
    r"code_of_conduct|dataset_?card|sha\d+sums?|checksums?|requirements)([_-]\w+)*(\.\w\w)?(\.(md|txt|rst))?",
    "a description of other files": r"(dataset_infos?|dataset_dict|state|package(-lock)?|meta(data)?|info|index|config|"
    r"manifest|tokenizer(_config)?|special_tokens_map|generation_config|vocab)\.json",
    "a cache of `datasets`": r"cache-.*\.arrow",
    "the index of Megatron's token ids (MMIDIDX)": r".*\.idx",
}
# Kinds of file, from the first to the last choice: only those of the first kind that a source has are read.
TIERS = (
    (".parquet", ".arrow", ".jsonl", ".ndjson", *ID_SUFFIXES),
    (".json",),  # beside others, these are rarely JSON Lines
    (".txt", ".md"),
    (".py",),  # beside others, these are scripts
)
BESIDE = "beside other files, which are read in place of these"
# Data of a kind that is not read: a pattern of its name, and the command that turns it into what is read.
ARCHIVES = {r"\.zip$": "python -m zipfile -e", r"\.(tar(\.\w+)?|tgz)$": "python -m tarfile -e"}
TO_CONVERT = r"\.(csv|tsv)(\.(gz|zst|xz|bz2|lzma))?$|\.(json|jsonl|ndjson|txt|md)\.(xz|bz2|lzma)$"


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: str
    size: int  # in bytes
    version: str  # the time of its last change

    def open(self) -> BinaryIO:
        return Path(self.path).open("rb")


# ---------------------------------------------------------------------------------------------------------------------
# which files there are


def local_files(name: str, out: Path | None = None) -> tuple[list[LocalFile], list[str]]:
    """Find the files of a corpus: of a file, a folder, a glob or "stdlib", sorted by name; each real file once.

    Hidden names are left out.

    Args:
        out: the folder for the shards, whose files are left out.

    Returns: the files, and a line on each kind of file that is left out.
    """
    if not name:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    pattern = Path(STDLIB if name == "stdlib" else name)
    paths: set[Path] = set()
    for match in [pattern] if os.path.lexists(pattern) else matches(pattern):
        paths.update(match.glob("**/*") if match.is_dir() else [match])
    links_to_folders: list[str] = []
    other_names: list[str] = []
    files: dict[tuple[int, int], LocalFile] = {}
    for path in sorted(paths):
        if any(part.startswith(".") for part in {*path.parts} - {*pattern.parts}):
            continue
        if name == "stdlib" and (path.suffix != ".py" or NOT_IN_STDLIB & {*path.relative_to(STDLIB).parts}):
            continue
        if path.is_symlink() and path.is_dir():
            links_to_folders.append(str(path))
        elif path.is_file() and not (out and path.resolve().is_relative_to(out.resolve())):
            status = path.stat()
            identity = status.st_dev, status.st_ino
            if identity in files:
                other_names.append(str(path))
            files.setdefault(identity, LocalFile(str(path), status.st_size, str(status.st_mtime_ns)))
    by_path = {file.path: file for file in files.values()}
    chosen, notes = choose(name, [*by_path])
    if other_names:
        notes.append(left_out(name, other_names, "links to files that have another name here"))
    if links_to_folders:
        folder = Path(links_to_folders[0]).parent
        notes.append(left_out(name, links_to_folders, f"links to folders; to read them too: --source '{folder}/*'"))
    kept = [by_path[path] for path in chosen]
    if name != "stdlib" and chosen != [name]:
        of_data_set = without_caches(kept)
        if len(of_data_set) < len(kept):
            others = [file.path for file in kept if file not in of_data_set]
            notes.append(left_out(name, others, "not among the files of the data set, which state.json names"))
        kept, copies = without_copies(of_data_set)
        if copies:
            pairs = [f"{path} (of {first})" for path, first in copies.items()]
            notes.append(left_out(name, pairs, "copies"))
        check_formats(name, [file.path for file in kept])
    return kept, notes


def matches(pattern: Path) -> list[Path]:
    """Return what a glob matches."""
    base = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    if base == pattern:
        return []
    try:
        return list(base.glob(str(pattern.relative_to(base))))
    except ValueError as error:  # a**
        raise UserError(f"--source {pattern}: {error}") from None


def left_out(source: str, names: Sequence[str], reason: str) -> str:
    """Return a line that names files that are not read."""
    return f"{source}: left out {', '.join(some(names, 'file'))}: {reason}"


# ---------------------------------------------------------------------------------------------------------------------
# which of them are the corpus


def choose(source: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose the files of a corpus by their names.

    A file that is the source itself is read, whatever its name means elsewhere.

    Returns: the chosen names, and a line on each kind of file that is left out.

    Raises: UserError if no file can be read, or if some of the others have to be chosen by the user.
    """
    if [*names] == [source] and suffix_of(source):
        return [source], []
    reasons: dict[str, list[str]] = defaultdict(list)  # why files are not read -> their names
    tiers: list[list[str]] = [[] for _ in TIERS]
    for name in names:
        last = re.split("[/\\\\]", name)[-1]
        never = next((kind for kind, pattern in NEVER.items() if re.fullmatch(pattern, last, re.IGNORECASE)), "")
        suffix = suffix_of(name).removesuffix(".gz").removesuffix(".zst")
        if never:
            reasons[never].append(name)
        elif suffix:
            number = next(number for number, tier in enumerate(TIERS) if suffix in tier)
            tiers[number].append(name)
        else:
            reasons[what_to_type(source, name, names)].append(name)
    chosen = next(filter(None, tiers), [])
    if not chosen:
        raise nothing_found(source, names, reasons)
    for tier in tiers:
        if tier and tier is not chosen:
            suffixes = " ".join(sorted({suffix_of(name) for name in tier}))
            reasons[f"{suffixes} {BESIDE}; to read them, choose them with a glob: {glob_of(source, tier)}"] += tier
    ids = [name for name in chosen if suffix_of(name) in ID_SUFFIXES]
    texts = [name for name in tiers[0] if name not in ids] + tiers[2]
    if ids and texts:
        raise UserError(
            f"--source {source}: found text, such as {texts[0]}, and token ids, such as {ids[0]}; expected only one "
            f"kind; choose files with a glob: {glob_of(source, texts[:1])} or {glob_of(source, ids[:1])}"
        )
    if not glob.has_magic(source):
        check_splits(source, [name for name in chosen if suffix_of(name) not in (".py", ".md")])
    return chosen, [left_out(source, names, reason) for reason, names in reasons.items()]


def glob_of(source: str, names: Sequence[str]) -> str:
    """Return --source with a glob for the files of a source that have the suffix of the first of these names."""
    base = source.rstrip("/")
    if glob.has_magic(source):
        base = os.path.commonpath([Path(name).parent for name in names]) or os.curdir
    return f"--source {shlex.quote(f'{base}/**/*{suffix_of(names[0])}')}"


def what_to_type(source: str, name: str, names: Sequence[str]) -> str:
    """Return why a file of a kind that is not read is left out, one of these names, and what to type if it is data."""
    then = "then run this again"
    if "://" in name and any(re.search(pattern, name.lower()) for pattern in ARCHIVES):
        return "an archive; unpack it"
    for pattern, command in ARCHIVES.items():
        if re.search(pattern, name.lower()):
            folder = re.sub(pattern, "", name, flags=re.IGNORECASE)
            if name == source:
                then = f"then --source {shlex.quote(folder)}"
            return f"an archive; type {command} {shlex.quote(name)} {shlex.quote(folder)}, {then}"
    if re.search(TO_CONVERT, name.lower()):
        target = re.sub(rf"(\.(json|jsonl|ndjson|txt|md))?({TO_CONVERT})", ".jsonl", name, flags=re.IGNORECASE)
        if target in names:
            return "of a kind that is not read; its .jsonl is there"
        if name == source:
            then = f"then --source {shlex.quote(target)}"
        return f"of a kind that is not read; type {convert_command(name)}, {then}"
    return "of other types"


def nothing_found(source: str, names: Sequence[str], reasons: dict[str, list[str]]) -> UserError:
    """Explain that a source has no file that is read."""
    problem = "no such file"
    if names:
        reasons = dict(
            sorted(reasons.items(), key=lambda item: "; type " not in item[0])
        )  # what can be converted first
        problem = "; ".join(f"{', '.join(some(found, 'file'))}: {reason}" for reason, found in reasons.items())
        return UserError(f"--source {source}: found {problem}; expected files of {READABLE}")
    if os.path.isdir(source):  # noqa: PTH112 (Path.is_dir may raise)
        problem = "empty, but for what is left out: hidden files and the folder for the shards"
    return UserError(f"--source {source}: {problem}; expected {EXPECTED}; files of {READABLE}")


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
            f"glob: --source {shlex.quote(f'{folder}/**/*{train_word}*')}, or name a data set of the Hub hf:NAME"
        )


# ---------------------------------------------------------------------------------------------------------------------
# the same text twice


def stem_of(name: str) -> str:
    """Return the name of a file of data without its format, or of a text without its packing."""
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


def without_caches(files: Sequence[LocalFile]) -> list[LocalFile]:
    """Leave out the .arrow files beside a state.json of `datasets` that does not name them."""
    kept = []
    named: dict[Path, set[str]] = {}  # folder -> the files of the data set
    for file in files:
        folder = Path(file.path).parent
        if suffix_of(file.path) == ".arrow" and (folder / "state.json").exists():
            if folder not in named:
                state = read_json(folder / "state.json", dict, "expected that of a data set of `datasets`")
                named[folder] = {entry["filename"] for entry in state.get("_data_files", [])}
            if Path(file.path).name not in named[folder]:
                continue
        kept.append(file)
    return kept


def without_copies(files: Sequence[LocalFile]) -> tuple[list[LocalFile], dict[str, str]]:
    """Leave out files with the content of another one, also if one of two is packed.

    Returns: the other files, and path -> the file of the same content.
    """
    of_path = {Path(file.path): file for file in files}
    of_stem: dict[str, list[LocalFile]] = defaultdict(list)
    for file in files:
        of_stem[stem_of(file.path)].append(file)
    groups = [group for group in of_stem.values() if len(group) > 1]
    for paths in possible_copies({path: file.size for path, file in of_path.items()}):
        groups.append([of_path[path] for path in paths])
    copies: dict[str, str] = {}
    for group in groups:
        first_of: dict[str, str] = {}  # digest -> the file with the shortest name
        for file in sorted(group, key=lambda file: (len(file.path), file.path)):
            first = first_of.setdefault(digest_of(file), file.path)
            if first != file.path:
                copies[file.path] = first
    return [file for file in files if file.path not in copies], copies


def digest_of(file: LocalFile) -> str:
    """Return the SHA-256 of the content of a file, unpacked."""
    with naming(file.path), file.open() as opened:
        content = open_text(opened) if suffix_of(file.path) in (*TEXTS, *LINES) else opened
        return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
