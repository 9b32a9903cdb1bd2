"""The copy of a run in an object store: its layout, uploads, downloads and verification, through fsspec.

    step_000250-20261122-063200-123456.pt     a checkpoint, uploaded once: its step, and when it was written (UTC)
    evaluations.json  logs/  tensorboard/     of the run
    index.json                                the name of the run, and the checkpoint that each name stands for

The index is written last. Only the files in it are checkpoints, so an incomplete upload is never taken for one.
"""

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from steadygpt.checkpoint import BACKUP, BEST, EVALUATIONS, LATEST, NAMED, read_checkpoint
from steadygpt.cli import UserError
from steadygpt.durable import fsync_folder, link_file, replace_file
from steadygpt.progress import ProgressBar
from steadygpt.runlog import LOG, METRICS, move_aside
from steadygpt.stores import Store, version_of
from steadygpt.units import STAMP

if TYPE_CHECKING:
    from config import TrainConfig

Result = TypeVar("Result")
INDEX = "index.json"
OLD_RUN, OLD_POINTER = "run.json", ".pt.json"  # what mirrors had in place of an index
PARTS = 4  # of 50 MB each, in memory and under way at once
SILENCE_S = 60  # a store may take this long to put the parts of a large file together
RETRIES = 5  # of a part, before the whole upload is repeated


@dataclass(frozen=True)
class Entry:
    """What the index says of a checkpoint."""

    file: str
    size: int  # in bytes
    mtime_ns: int  # of the file on the machine that wrote it
    step: int
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None

    @classmethod
    def of(cls, path: Path, about: Mapping[str, Any]) -> "Entry":
        """Describe a checkpoint file; `about` has its step, epoch and losses."""
        stat = path.stat()
        seconds, ns = divmod(stat.st_mtime_ns, 10**9)
        written = f"{time.strftime(STAMP, time.gmtime(seconds))}-{ns // 1000:06d}"
        return cls(f"step_{about['step']:06d}-{written}.pt", stat.st_size, stat.st_mtime_ns, **about)


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    run: str  # the name; "" for an empty folder
    checkpoints: dict[str, Entry]  # by name, in the order in which they are tried

    @classmethod
    def of(cls, run: str, checkpoints: Mapping[str, Entry]) -> "Index":
        order = {LATEST: 3, BACKUP: 2, BEST: -1}

        def turn(name: str) -> tuple:
            return order.get(name, name.startswith("rolling")), checkpoints[name].mtime_ns

        return cls(run, {name: checkpoints[name] for name in sorted(checkpoints, key=turn, reverse=True)})


class Damaged(UserError):
    """A checkpoint in the store is missing, incomplete or corrupt."""


class Mirror:
    """A folder of an object store. Methods raise what the store's fsspec back end raises, unless they say otherwise.

    patiently() repeats a request while the network fails, and raises UserErrors only; see Service.persistently.

    Args:
        url: of the folder, for fsspec.
        run: the name of the run that uploads.
        resumes: whether that run may find its checkpoints there.
    """

    def __init__(self, url: str, run: str = "", resumes: bool = False):
        scheme, separator, rest = url.partition("://")
        if ":" in scheme or not (rest.strip("/") if separator else url.startswith("/")) or set(url) & set("*?["):
            raise UserError(f"--mirror {url!r}: expected a URL such as s3://bucket/run, or an absolute path")
        self.url, self.run, self.resumes = url.rstrip("/"), run, resumes
        self.is_claimed = False
        self.sent: dict[str, tuple[int, int]] = {}  # other files -> size and time of what was uploaded
        self.connect()

    def connect(self) -> None:
        """Open the store with the credentials that are valid now."""
        self.store = Store(self.url, SILENCE_S)
        self.fs, self.folder = self.store.fs, self.store.path
        self.fs.retries = RETRIES
        self.has_folders = self.folder.startswith("/")  # of object stores, paths begin with the bucket

    def patiently(self, request: Callable[[], Result]) -> Result:
        return self.store.service.persistently(self.url, request)

    # -----------------------------------------------------------------------------------------------------------------
    # reading

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name in the folder; complete files only, in object stores."""
        found = self.fs.find(self.folder, detail=True)
        return {path.removeprefix(f"{self.folder}/"): info["size"] for path, info in found.items()}

    def index(self) -> Index:
        """Read the index; it is empty if there is none."""
        try:
            stored = json.loads(self.read(INDEX))
            entries = {name: Entry(**entry) for name, entry in stored["checkpoints"].items()}
            return Index.of(stored["run"], entries)
        except FileNotFoundError:
            return self._index_of_pointers()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self.url}/{INDEX}: not the index of a mirror ({error!r}); its checkpoints are the files step_*.pt: "
                "download one, resume from it with --resume FILE, and give the run another --mirror"
            ) from error

    def _index_of_pointers(self) -> Index:
        """Read what earlier versions wrote: the name of the run, and a pointer to a checkpoint for each name."""
        names = [name for name in self.sizes() if name == OLD_RUN or name.endswith(OLD_POINTER)]
        found = {name: json.loads(self.read(name)) for name in names}
        run = found.pop(OLD_RUN, {"run": ""})["run"]
        return Index.of(run, {name.removesuffix(".json"): Entry(**pointer) for name, pointer in found.items()})

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self._path(name))

    def evaluations(self) -> dict[str, dict]:
        """Return the content of evaluations.json, {} if there is none."""
        try:
            return json.loads(self.read(EVALUATIONS))
        except (FileNotFoundError, ValueError):
            return {}

    def download(self, entry: Entry, target: Path) -> None:
        """Download a checkpoint, verify it, and put it at `target`, with the time of its first writing.

        Raises: Damaged when it is missing or corrupt; UserError when it is larger than the free space or the store
            does not answer; `target` is unchanged.
        """
        free = shutil.disk_usage(target.parent).free
        if free < entry.size:
            raise UserError(f"{target}: {entry.size:,} bytes are needed, {free:,} are free; free some space")
        url, downloaded = f"{self.url}/{entry.file}", target.with_name(f".{entry.file}.tmp")
        size = self.patiently(self.sizes).get(entry.file)
        if size != entry.size:
            found = "missing" if size is None else f"incomplete ({size:,} of {entry.size:,} bytes)"
            raise Damaged(f"{url}: {found}")
        info = self.patiently(lambda: self.fs.info(self._path(entry.file)))
        with ProgressBar(desc=entry.file, total=entry.size, unit="B") as bar:
            self.store.file(url, entry.size, version_of(info)).download(downloaded, bar.show_from(0))
        os.utime(downloaded, ns=(entry.mtime_ns, entry.mtime_ns))  # decides which of several is the newest
        try:
            read_checkpoint(downloaded)
        except UserError as error:
            downloaded.unlink()
            raise Damaged(str(error).replace(str(downloaded), url)) from error
        os.replace(downloaded, target)

    def verify(self, entry: Entry) -> str:
        """Read a checkpoint and its checksums in the store; return intact, or what is wrong with it."""
        try:
            if (size := self.fs.size(self._path(entry.file))) != entry.size:
                return f"incomplete ({size:,} of {entry.size:,} bytes)"
            with self.fs.open(self._path(entry.file), "rb") as file, zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
        except FileNotFoundError:
            return "missing"
        except zipfile.BadZipFile:
            return "corrupt"
        return f"corrupt (checksum of record {bad})" if bad else "intact"

    # -----------------------------------------------------------------------------------------------------------------
    # writing

    def claim(self) -> None:
        """Reserve the folder for the run; this also finds out whether the store accepts files."""
        index = self.index()
        if index.checkpoints and not (self.resumes and index.run == self.run):
            name, *others = index.checkpoints
            raise UserError(
                f"--mirror {self.url} already holds checkpoints of the run {index.run} ({name} and {len(others)} "
                f"more), not of {self.run}; resume that run, or give this one another --mirror"
            )
        if index.run != self.run:
            self._write(Index(self.run, {}))
        self.is_claimed = True

    def upload(
        self, path: Path, entry: Entry, names: Iterable[str], config: "TrainConfig", progress: Callable[[int], object]
    ) -> bool:
        """Upload a checkpoint unless it is there, the other files of the run, and the index; delete what is too old.

        Args:
            names: of the checkpoint; the checkpoint that was latest.pt becomes its backup.
            progress: is called with the number of bytes that are uploaded.

        Returns: whether the checkpoint was not there.

        Raises: UserError when the folder belongs to another run.
        """
        if not self.is_claimed:
            self.claim()
        sizes = self.sizes()
        is_new = sizes.get(entry.file) != entry.size
        if is_new:
            self._upload_checkpoint(path, entry, progress)
        index = self.index()
        if index.run != self.run:  # both runs were started when it was empty
            raise UserError(f"{self.url} belongs to the run {index.run} now; give this run another --mirror")
        self._upload_changed(files_of(config))
        there = dict(index.checkpoints)
        if LATEST in names and LATEST in there and there[LATEST] != entry:
            there[BACKUP] = there[LATEST]
        there |= dict.fromkeys(names, entry)
        for tier, count in {"rolling": config.mirror_keep, "epoch": config.keep_epochs}.items():
            oldest_first = sorted((name for name in there if name.startswith(tier)), key=lambda n: there[n].mtime_ns)
            for name in oldest_first[:-count] if count else []:
                del there[name]
        self._write(Index.of(self.run, there))
        kept = {entry.file for entry in there.values()}
        for name in sizes:
            if (name.startswith("step_") and name not in kept) or name == OLD_RUN or name.endswith(OLD_POINTER):
                self.fs.rm_file(self._path(name))
        return is_new

    def _upload_checkpoint(self, path: Path, entry: Entry, progress: Callable[[int], object]) -> None:
        import fsspec

        callback = fsspec.Callback(hooks={"progress": lambda _, sent, **__: progress(sent)})
        self._make_folder(entry.file)
        self.fs.put_file(str(path), self._path(entry.file), callback=callback, max_concurrency=PARTS)

    def _upload_changed(self, files: Mapping[str, Path]) -> None:
        """Upload files, given by their names in the store, if they have changed since they were uploaded last."""
        for name, path in files.items():
            if not path.exists():
                continue
            stat = path.stat()
            if self.sent.get(name) != (stat.st_size, stat.st_mtime_ns):
                self._make_folder(name)
                self.fs.pipe_file(self._path(name), path.read_bytes())  # the file may grow, so its bytes are taken once
                self.sent[name] = stat.st_size, stat.st_mtime_ns

    def _write(self, index: Index) -> None:
        path, data = self._path(INDEX), f"{json.dumps(asdict(index), indent=1)}\n".encode()
        self._make_folder(INDEX)
        if not self.has_folders:
            self.fs.pipe_file(path, data)  # which object stores do atomically
        else:
            self.fs.pipe_file(f"{path}.tmp", data)
            self.fs.mv(f"{path}.tmp", path)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _make_folder(self, name: str) -> None:
        if self.has_folders:  # in an object store, makedirs might create a bucket
            self.fs.makedirs(Path(self._path(name)).parent.as_posix(), exist_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# a run and its mirror


def files_of(config: "TrainConfig") -> dict[str, Path]:
    """Return the files of a run besides its checkpoints, by their names in the mirror."""
    logs = {f"logs/{name}": Path(config.logdir, name) for name in (LOG, METRICS)}
    events = {f"tensorboard/{path.name}": path for path in _tensorboard(config).glob("events.*")}
    return {EVALUATIONS: Path(config.checkpoint_dir, EVALUATIONS), **logs, **events}


def _tensorboard(config: "TrainConfig") -> Path:
    return Path(config.tensorboard_dir, config.run_name)


def newer_checkpoint(
    mirror: Mirror, index: Index, which: str, folder: Path, local: Path | None
) -> tuple[Path | None, list[str]]:
    """Download the newest intact checkpoint to a temporary file, if it is newer than the local one.

    Args:
        which: a word of NAMED, or anything else for the newest.
        local: the intact checkpoint that is already in the folder, if any.

    Returns: the temporary file, or None; and a line for each checkpoint that was skipped.

    Raises: UserError when nothing is intact though the index names checkpoints, or the store does not answer.
    """
    newest_ns, named = local.stat().st_mtime_ns if local else 0, NAMED.get(which)
    wanted = {name: entry for name, entry in index.checkpoints.items() if (name == named if named else name != BEST)}
    if (first := wanted.get(named or LATEST)) and first.mtime_ns <= newest_ns:
        return None, []  # others may be newer, if the run was resumed from an older one
    newer = {entry for entry in wanted.values() if entry.mtime_ns > newest_ns}
    skipped: list[str] = []
    for entry in sorted(newer, key=lambda entry: (entry == first, entry.mtime_ns), reverse=True):
        downloaded = folder / ".restored.tmp"
        try:
            mirror.download(entry, downloaded)
        except Damaged as error:
            skipped.append(str(error))
        else:
            return downloaded, skipped
    if skipped and not local:
        raise UserError("; ".join(skipped))
    return None, skipped


def put_in_place(downloaded: Path, which: str, folder: Path, local: Path | None) -> Path:
    """Make a downloaded checkpoint latest.pt, or the file that a word of NAMED means.

    An intact latest.pt becomes the backup.
    """
    target = folder / NAMED.get(which, LATEST)
    if local == target == folder / LATEST:
        link_file(target, folder / BACKUP)
    os.replace(downloaded, target)
    fsync_folder(folder)
    return target


def restore_files(mirror: Mirror, config: "TrainConfig", replace: bool) -> None:
    """Download the logs, the TensorBoard files and the evaluations of a run.

    Args:
        replace: also those that are there; the logs are renamed before. Otherwise only what is missing.
    """
    folders = {"": Path(config.checkpoint_dir), "logs": Path(config.logdir), "tensorboard": _tensorboard(config)}
    targets = {}
    for name in mirror.sizes():
        folder, _, file = name.rpartition("/")
        if name == EVALUATIONS or folder in ("logs", "tensorboard"):
            targets[name] = folders[folder] / file
    contents = {target: mirror.read(name) for name, target in targets.items() if replace or not target.exists()}
    if replace:
        folders["logs"].mkdir(parents=True, exist_ok=True)
        move_aside(folders["logs"])
    for target, content in contents.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, methodcaller("write", content))
