"""Sources of text and token ids: local files, Python's own library, object stores, data sets of the Hub."""

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from steadygpt.base.disk import check_pulled
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.retry import brief
from steadygpt.base.text import counted
from steadygpt.data import hub
from steadygpt.data.documents import CUTTERS, READABLE, TABLES, Cut, Part, naming, no_text_field, suffix_of
from steadygpt.data.ids import ID_SUFFIXES
from steadygpt.data.remote import RemoteFile
from steadygpt.data.stores import Store

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
STDLIB = Path(sysconfig.get_path("stdlib"))
# In the README.md or the .gitattributes of a data set of the Hub.
CARD = re.compile(
    r"\A---\n.*?^(configs|dataset_info|size_categories|task_categories):|^\*\.parquet filter=lfs",
    re.DOTALL | re.MULTILINE,
)
HUB_SPLITS = "data/train-*", "train-*-of-*"
AHEAD = 1  # files that are downloaded while one is read
UNIT_BYTES = 2**21  # of a source of at least UNITS times as much
UNITS = 200  # of a smaller source, so that a fortieth of it is some of them
ROWS_AT_ONCE = 32  # rows of a part of what `datasets` streams
EXPECTED = (
    "a file, a folder, a glob, a URL such as s3://... or gs://..., stdlib, fineweb-edu or hf:NAME[@REVISION][:CONFIG]"
)


@dataclass(eq=False)
class Source:
    """Files: local, read in place over a network, or downloaded one ahead of the reader and removed after it."""

    name: str
    paths: Sequence[Path]  # where the files are on this machine, or will be
    remote: Sequence[RemoteFile] = ()  # the files on the network
    folder: Path | None = None  # for the downloads that are removed; None if all are kept
    in_place: bool = False  # reads the files by ranges, without any on the disk
    commit: str = ""  # of a Hub data set
    progress: Callable[[int], object] = bool  # is called with the bytes that are on this machine
    progress_unit = "B"

    def __post_init__(self):
        self.names = [file.path for file in self.remote] or [str(path) for path in self.paths]
        self.sizes = [file.size for file in self.remote] or [path.stat().st_size for path in self.paths]
        self.identities = [file.identity for file in self.remote] or list(zip(self.names, self.sizes, strict=True))
        self.downloads: dict[int, Future[Path]] = {}
        self.pool = ThreadPoolExecutor(1)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all files as they are stored; 0 if they are not known."""
        return sum(size for _, size, *_ in self.identities)

    @property
    def unit_bytes(self) -> int:
        """The bytes of a text, lines or ids in which a part begins; a multiple of each dtype's size."""
        unit = min(UNIT_BYTES, (self.stored_bytes or UNITS * UNIT_BYTES) // UNITS)
        return -(-max(1, unit) // 8) * 8

    @property
    def holds_ids(self) -> bool:
        """Whether the files hold token ids instead of text."""
        return suffix_of(self.names[0]) in ID_SUFFIXES

    def open(self, file: int, in_place: bool = False) -> BinaryIO:
        """Open a file; `in_place` without waiting until all of it is on this machine."""
        if self.remote and not (in_place or self.in_place):
            for index in range(file, min(file + AHEAD + 1, len(self.remote))):
                if index not in self.downloads:
                    self.downloads[index] = self.pool.submit(self._download, index)
            self.downloads[file].result()
        is_elsewhere = self.remote and not self.paths[file].exists()
        opened = self.remote[file].open() if is_elsewhere else open(self.paths[file], "rb")  # noqa: SIM115
        if self.sizes[file] < 1000:  # peeking into a large remote file would request more of it
            check_pulled(self.names[file], opened.peek(1))  # type: ignore[attr-defined]
        return opened

    def _download(self, file: int) -> Path:
        before = sum(self.sizes[:file])
        return self.remote[file].download(self.paths[file], lambda count: self.progress(before + count))

    def parts(
        self, text_field: str, vocab_size: int, file: int = 0, number: int = 0, in_place: bool = False
    ) -> Iterator[Part]:
        """Cut the files into parts, from a part of a file on.

        Args:
            vocab_size: is needed for token ids.
        """
        unit = self.unit_bytes
        for index in range(file, len(self.names)):
            name, size, path = self.names[index], self.sizes[index], self.paths[index]
            with self.open(index, in_place) as opened, naming(name):
                cut = Cut(unit, text_field, vocab_size, size, None if self.remote and not path.exists() else path)
                for found in CUTTERS[suffix_of(name)](opened, number if index == file else 0, cut):
                    part, *about = found
                    yield Part(name, index, part, unit, *about)

    def units(
        self, text_field: str, vocab_size: int, file: int = 0, number: int = 0, in_place: bool = False
    ) -> Iterator[list[Part]]:
        """Gather consecutive parts into units, the same for each part that a unit begins with."""
        gathered, num_bytes = list[Part](), 0
        for part in self.parts(text_field, vocab_size, file, number, in_place):
            gathered.append(part)
            num_bytes += part.num_bytes + 64  # 64: empty files take memory too
            if num_bytes >= part.unit:
                yield gathered
                gathered, num_bytes = [], 0
        if gathered:
            yield gathered

    def check(self, text_field: str) -> None:
        """Begin to read the local files that are pointers or tables, which may lack the column of the text."""
        for index, path in enumerate([] if self.remote else self.paths):
            if suffix_of(path.name) in TABLES:
                next(self.parts(text_field, 0, index), None)
            elif self.sizes[index] < 1000:
                self.open(index).close()

    def check_whole(self) -> None:
        """Check that no local file has become shorter while it was read."""
        for path, size in () if self.remote else zip(self.paths, self.sizes, strict=False):
            if path.stat().st_size < size:
                raise UserError(f"{path}: became shorter while it was read; restore it, and give another --out")

    def release(self, before: int) -> None:
        """Remove the downloads of the files before this one, whose tokens are in shards."""
        if folder := self.folder:
            for path in self.paths[:before]:
                if path.is_relative_to(folder):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Cancel the downloads."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def needs(self, first: int, shard_bytes: float) -> dict[Path, int]:
        """Return folder -> bytes of disk for downloads from file `first` on; `shard_bytes` of it make one shard."""
        files = () if self.in_place else range(first, len(self.remote))
        missing = [file for file in files if not self.paths[file].exists()]
        if not missing:
            return {}
        total = sum(self.sizes[file] for file in missing)
        if not self.folder:
            return {self.paths[missing[0]].parent: total}
        # A file stays until the last of its tokens is in a shard.
        there = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        window = int(shard_bytes) + (AHEAD + 2) * max(self.sizes[file] for file in missing)
        return {self.folder.parent: min(total, max(0, window - there))}


def fingerprint(files: Sequence[tuple]) -> str:
    """Return a line that changes when files (name, size in bytes, perhaps version) are added, removed or changed."""
    root = os.path.commonpath([Path(name).parent for name, *_ in files])
    sizes = [(os.path.relpath(name, root), *rest) for name, *rest in files]
    return f"{len(sizes)} files, sha256 {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]}"


class StreamedSource(Source):
    """A Hub data set in a format that only `datasets` reads: a stream of rows."""

    progress_unit = " documents"

    def __init__(self, name: str, repo: hub.Repo, config: str, files: Sequence[RemoteFile]):
        super().__init__(name, [], commit=repo.commit)
        self.repo, self.config = repo, config
        self.names, self.sizes, self.identities = [name], [0], [file.identity for file in files]

    def parts(
        self, text_field: str, vocab_size: int, file: int = 0, number: int = 0, in_place: bool = False
    ) -> Iterator[Part]:
        with naming(self.name):
            rows = hub.stream(self.repo, self.config, "train").skip(number * ROWS_AT_ONCE).iter(ROWS_AT_ONCE)
            for index, batch in enumerate(rows, start=number):
                if text_field not in batch:
                    raise no_text_field(self.name, text_field, batch)
                values = batch[text_field]
                num_bytes = sum(len(value) for value in values if isinstance(value, str))
                end = index * ROWS_AT_ONCE + len(values)
                yield Part(self.name, 0, index, self.unit_bytes, end, num_bytes, values)


def find_source(
    name: str, commit: str = "", streaming: bool = False, folder: Path | None = None, max_files: int | None = None
) -> Source:
    """Find the files of --source.

    Args:
        commit: of the Hub data set, if an earlier run has begun with it.
        streaming: reads a Hub data set or an object store in place.
        folder: for downloads; None for the Hub's cache.
        max_files: how many files to take, in their order; None for all.
    """
    if "://" in name:
        return _store_source(name, streaming, folder, max_files)
    if not name.startswith("hf:"):
        return Source(name, (_train_files(Path(name)) or find_files(name))[:max_files])
    spec, _, config = name.removeprefix("hf:").partition(":")
    repo = hub.find_repo("dataset", spec, commit)
    kind, files = hub.data_files(repo, config, "train")
    if kind in ("parquet", "json") and all(suffix_of(file.path) not in ("", ".json") for file in files):
        return _hub_source(name, repo, files[:max_files], streaming, folder)
    if max_files is not None:
        raise UserError(f"{name}: --max_files needs Parquet or JSON Lines, found {kind or 'files elsewhere'}; drop it")
    return StreamedSource(name, repo, config, files)


def _store_source(url: str, streaming: bool, folder: Path | None, max_files: int | None) -> Source:
    if not folder:
        raise UserError("--keep_download is for data sets of the Hub; copy the files and name their folder as --source")
    found = {file.path: file for file in Store(url).files()}
    # Without hidden files, as below a local folder.
    visible = [path for path in found if "/." not in path.removeprefix(url.partition("*")[0])]
    files = [found[path] for path in choose(url, visible)[:max_files]]
    folder /= fingerprint([file.identity for file in files])[-16:]  # other versions of the files get another folder
    places = [folder / f"{number:06d}_{Path(file.path).name}" for number, file in enumerate(files)]
    return Source(url, places, files, folder, streaming)


def _hub_source(name: str, repo: hub.Repo, files: Sequence[RemoteFile], streaming: bool, folder: Path | None) -> Source:
    if not repo.online:
        say(f"{name}: no network, so only the {counted(len(files), 'file')} in the cache are known")
    folder = folder and folder / repo.commit
    cached = [repo.snapshot / file.path for file in files]
    places = [
        path if not folder or path.exists() else folder / file.path for path, file in zip(cached, files, strict=True)
    ]
    return Source(name, places, files, folder, streaming, repo.commit)


def read_split(name: str, split: str) -> list[dict]:
    """Return the rows of a split of a small data set of the Hub; its Parquet files stay in the cache."""
    import pyarrow.parquet as pq

    repo = hub.find_repo("dataset", name)
    _, files = hub.data_files(repo, "", split)
    paths = [hub.fetch(repo, file.path) for file in files]
    with naming(str(repo)):
        return [row for path in paths for row in pq.read_table(path).to_pylist()]


def find_files(source: str) -> list[Path]:
    """Find the readable files of a path, a folder (recursive, without hidden files), a glob or "stdlib", sorted."""
    if source == "stdlib":
        return [path for path in _files_below(STDLIB, NOT_IN_STDLIB) if path.suffix == ".py"]
    if not source:
        raise UserError(f"--source is empty; expected {EXPECTED}")
    paths = [Path(source)] if Path(source).exists() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = {file for path in paths for file in (_files_below(path) if path.is_dir() else [path])}
    return [Path(name) for name in choose(source, [str(path) for path in sorted(found)])]


def _train_files(folder: Path) -> list[Path]:
    """Return the files of the train split in a copy of a data set of the Hub, as for hf:NAME; none in other folders."""
    about = [folder / name for name in ("README.md", ".gitattributes")] if folder.is_dir() else []
    texts = (path.read_text(errors="replace") for path in about if path.is_file())
    if not any(map(CARD.search, texts)) and not any(map(any, map(folder.glob, HUB_SPLITS))):
        return []
    try:
        splits = hub.splits_of(str(folder.resolve()))[1]
    except Exception as error:  # `datasets` raises its own types
        splits = {brief(error): []}
    files = [Path(file) for file in splits.get("train", ())]
    if not files or not all(suffix_of(file.name) for file in files):
        found = ", ".join(file.name for file in files[:1]) or ", ".join(map(str, splits))
        raise UserError(
            f"--source {folder}: a copy of a data set of the Hub; found {found}, expected a split 'train' in files of "
            f"{READABLE}. Choose files with a glob such as '{folder}/**/*train*', or name it hf:NAME"
        )
    rest = counted(len(_files_below(folder)) - len(files), "other file")
    say(f"{folder}: a copy of a data set of the Hub; took its split train, left out {rest}")
    return files


def choose(source: str, names: Sequence[str]) -> list[str]:
    """Return the names of files that can be read."""
    chosen = [name for name in names if suffix_of(name)]
    # Beside other files, .json files are rarely JSON Lines.
    chosen = [name for name in chosen if suffix_of(name) != ".json"] or chosen
    if not chosen:
        found = f"found {counted(len(names), 'file')} of other types" if names else "no such file"
        found = "an empty folder" if not names and Path(source).is_dir() else found
        raise UserError(f"--source {source}: {found}; expected {EXPECTED}; files of {READABLE}")
    ids = [name for name in chosen if suffix_of(name) in ID_SUFFIXES]
    if 0 < len(ids) < len(chosen):
        text = next(name for name in chosen if suffix_of(name) not in ID_SUFFIXES)
        raise UserError(
            f"--source {source}: found text, such as {text}, and token ids, such as {ids[0]}; expected only one kind; "
            f"choose files with a glob such as '*{suffix_of(text)}'"
        )
    if len(chosen) < len(names):
        skipped = counted(len(names) - len(chosen), "file")
        say(f"{source}: skipped {skipped} of other types than {READABLE}, or .json beside these")
    return chosen


def _files_below(folder: Path, excluded: Iterable[str] = ()) -> list[Path]:
    """Return the files of a folder and its subfolders, each once, without hidden and excluded ones."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    found, entered = [], {folder.resolve()}
    for place, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        wanted = [name for name in sorted(subfolders) if name not in excluded and not name.startswith(".")]
        subfolders[:] = []
        for name in wanted:
            if (target := Path(place, name).resolve()) not in entered:  # a link may lead back
                entered.add(target)
                subfolders.append(name)
        found += [Path(place, name) for name in names if name not in excluded and not name.startswith(".")]
    return sorted(path for path in found if path.is_file())
