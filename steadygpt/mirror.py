"""The copy of a run in an object store: its layout, uploads, downloads and verification, through fsspec.

    step_000250-20261122-063200-123456.pt     a checkpoint, uploaded once: its step, and when it was written (UTC)
    latest.pt.json  rolling_step_000250.pt.json     a pointer for each of its names, uploaded after it
    evaluations.json  logs/  tensorboard/     of the run, uploaded before the pointers
    run.json                                  the name of the run

Only files that a pointer names are checkpoints, so an incomplete upload is never taken for one.
"""

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from steadygpt.checkpoint import BACKUP, BEST, EVALUATIONS, LATEST, NAMED, read_checkpoint
from steadygpt.cli import UserError
from steadygpt.durable import fsync_folder, link_file, replace_file
from steadygpt.progress import ProgressBar
from steadygpt.runlog import LOG, METRICS, move_aside
from steadygpt.stores import Store, StoreFile, version_of
from steadygpt.units import STAMP

if TYPE_CHECKING:
    from config import TrainConfig

Result = TypeVar("Result")
RUN, POINTER = "run.json", ".pt.json"
PARTS = 4  # of 50 MB each, in memory and under way at once
SILENCE_S = 60  # a store may take this long to put the parts of a large file together
RETRIES = 5  # of a part, before the whole upload is repeated


@dataclass(frozen=True)
class Pointer:
    """The content of a pointer file: a checkpoint, and what the table shows of it."""

    file: str
    size: int  # in bytes
    mtime_ns: int  # of the file on the machine that wrote it
    step: int
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None

    @classmethod
    def of(cls, path: Path, about: Mapping[str, Any]) -> "Pointer":
        """Describe a checkpoint file; `about` has its step, epoch and losses."""
        stat = path.stat()
        seconds, ns = divmod(stat.st_mtime_ns, 10**9)
        written = f"{time.strftime(STAMP, time.gmtime(seconds))}-{ns // 1000:06d}"
        return cls(f"step_{about['step']:06d}-{written}.pt", stat.st_size, stat.st_mtime_ns, **about)

    @classmethod
    def parse(cls, content: bytes) -> "Pointer":
        """Raises: ValueError or TypeError for anything but a pointer."""
        stored = json.loads(content)
        found = cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})  # later versions may have more
        numbers = (found.size, found.mtime_ns, found.step)
        if not isinstance(found.file, str) or not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"found {found}")
        return found


class Damaged(UserError):
    """A checkpoint in the store is missing, incomplete or corrupt."""


class Mirror:
    """A folder of an object store. Methods raise what the store's fsspec back end raises, unless they say otherwise.

    patiently() repeats a request while the network fails, and raises UserErrors only; see Service.persistently.

    Args:
        url: of the folder, for fsspec.

    Raises: UserError when fsspec does not know the URL, or its back end is not installed.
    """

    def __init__(self, url: str):
        scheme, separator, rest = url.partition("://")
        if ":" in scheme or not (rest.strip("/") if separator else url.startswith("/")) or set(url) & set("*?["):
            raise UserError(f"--mirror {url!r}: expected a URL such as s3://bucket/run, or an absolute path")
        self.url = url.rstrip("/")
        self.run = ""  # that this process has reserved the folder for
        self.sent: dict[str, tuple[int, int]] = {}  # other files -> size and time of what was uploaded
        self.connect()

    def connect(self) -> None:
        """Open the store with the credentials that are valid now."""
        self.store = Store(self.url, SILENCE_S)
        self.fs, self.folder = self.store.fs, self.store.path
        self.fs.retries = RETRIES
        self.has_folders = self.folder.startswith("/")  # of object stores, paths begin with the bucket
        self.there: dict[str, Pointer] | None = None  # the pointers, while uploading

    def patiently(self, request: Callable[[], Result]) -> Result:
        return self.store.service.persistently(self.url, lambda _: request())

    # -----------------------------------------------------------------------------------------------------------------
    # reading

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file at the top of the folder, by name; complete files only, in object stores."""
        try:
            found = self.fs.ls(self.folder, detail=True)
        except FileNotFoundError:
            return {}
        return {Path(entry["name"]).name: entry["size"] for entry in found if entry["type"] == "file"}

    def pointers(self) -> tuple[dict[str, Pointer], dict[str, str]]:
        """Return checkpoint name -> pointer, in the order in which they are tried; and -> a line for a bad pointer."""
        names = [name for name in self.sizes() if name.endswith(POINTER)]
        contents = self.fs.cat([self._path(name) for name in names]) if names else {}
        found, bad = {}, {}
        for path, content in contents.items():
            name = Path(path).stem
            try:
                found[name] = Pointer.parse(content)
            except (ValueError, TypeError) as error:
                bad[name] = f"{self.url}/{name}.json: not a pointer ({error})"
        order = {LATEST: 3, BACKUP: 2, BEST: -1}

        def turn(name: str) -> tuple:
            return order.get(name, name.startswith("rolling")), found[name].mtime_ns

        return {name: found[name] for name in sorted(found, key=turn, reverse=True)}, bad

    def run_name(self) -> str:
        """Return the name of the run that the folder belongs to; "" if none."""
        try:
            return str(json.loads(self.read(RUN))["run"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # missing, or its upload was interrupted
            return ""

    def find(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder."""
        return list(self.fs.find(self._path(folder)))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self._path(name))

    def evaluations(self) -> dict[str, dict]:
        """Return the content of evaluations.json, {} if there is none."""
        try:
            return json.loads(self.read(EVALUATIONS))
        except (FileNotFoundError, ValueError):
            return {}

    def claim(self, run_name: str, resumes: bool) -> None:
        """Reserve the folder for a run; this also finds out whether the store accepts files.

        Raises: UserError when the folder holds checkpoints of another run.
        """
        owner = self.run_name()
        if owner != run_name or not resumes:
            there, bad = self.pointers()
            if names := [*there, *bad]:
                raise UserError(
                    f"--mirror {self.url} already holds checkpoints of the run {owner or '(unknown)'} ({names[0]} and "
                    f"{len(names) - 1} more), not of {run_name}; resume that run, or give this one another --mirror"
                )
        if owner != run_name:
            self._make_folder()
            self._write(RUN, {"run": run_name})
        self.run = run_name

    def download(self, pointer: Pointer, target: Path) -> None:
        """Download a checkpoint, verify it, and put it at `target`, with the time of its first writing.

        Raises: Damaged when it is missing or corrupt; UserError when it is larger than the free space or the store
            does not answer; `target` is unchanged.
        """
        free = shutil.disk_usage(target.parent).free
        if free < pointer.size:
            raise UserError(f"{target}: {pointer.size:,} bytes are needed, {free:,} are free; free some space")
        url, downloaded = f"{self.url}/{pointer.file}", target.with_name(f".{pointer.file}.tmp")
        size = self.patiently(self.sizes).get(pointer.file)
        if size != pointer.size:
            found = "missing" if size is None else f"incomplete ({size:,} of {pointer.size:,} bytes)"
            raise Damaged(f"{url}: {found}")
        info = self.patiently(lambda: self.fs.info(self._path(pointer.file)))
        with ProgressBar(desc=pointer.file, total=pointer.size, unit="B") as bar:
            self.store.fetch(StoreFile(url, pointer.size, version_of(info)), downloaded, bar.show_from(0))
        os.utime(downloaded, ns=(pointer.mtime_ns, pointer.mtime_ns))  # decides which of several is the newest
        try:
            read_checkpoint(downloaded)
        except UserError as error:
            downloaded.unlink()
            raise Damaged(str(error).replace(str(downloaded), url)) from error
        os.replace(downloaded, target)

    def verify(self, pointer: Pointer) -> str:
        """Read a checkpoint and its checksums in the store; return intact, or what is wrong with it."""
        try:
            if (size := self.fs.size(self._path(pointer.file))) != pointer.size:
                return f"incomplete ({size:,} of {pointer.size:,} bytes)"
            with self.fs.open(self._path(pointer.file), "rb") as file, zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
        except FileNotFoundError:
            return "missing"
        except zipfile.BadZipFile:
            return "corrupt"
        return f"corrupt (checksum of record {bad})" if bad else "intact"

    # -----------------------------------------------------------------------------------------------------------------
    # writing

    def upload(
        self,
        path: Path,
        pointer: Pointer,
        names: Sequence[str],
        files: Mapping[str, Path],
        keep: int,
        progress: Callable[[int], object],
        keep_epochs: int = 0,
    ) -> bool:
        """Upload a checkpoint unless it is there, then other files, then its pointers; then delete what is too old.

        Args:
            names: of the checkpoint; latest.pt's pointer is written last, after the one of its backup.
            files: see upload_files.
            keep, keep_epochs: newest rolling checkpoints and checkpoints of epochs that are kept; 0: all.
            progress: is called with the number of bytes that are uploaded.

        Returns: whether the checkpoint was not there.
        """
        import fsspec

        if self.there is None:
            (self.there, self.bad), self.listed = self.pointers(), self.sizes()
        is_new = self.listed.get(pointer.file) != pointer.size
        if is_new:
            self._make_folder()
            callback = fsspec.Callback(hooks={"progress": lambda _, sent, **__: progress(sent)})
            self.fs.put_file(str(path), self._path(pointer.file), callback=callback, max_concurrency=PARTS)
            self.listed[pointer.file] = pointer.size
        if self.run and (owner := self.run_name()) != self.run:  # both runs were started when it was empty
            raise UserError(f"{self.url} belongs to the run {owner or '(unknown)'} now; give this run another --mirror")
        self.upload_files(files)
        new = dict.fromkeys(names, pointer)
        if LATEST in names and LATEST in self.there and self.there[LATEST] != pointer:
            new[BACKUP] = self.there[LATEST]
        for name in sorted(new, key=lambda name: name == LATEST):
            if self.there.get(name) != new[name]:
                self._write(f"{name}.json", asdict(new[name]))
                self.there[name] = new[name]
                self.bad.pop(name, None)
        self._delete_old(self.there, {"rolling": keep, "epoch": keep_epochs})
        return is_new

    def upload_files(self, files: Mapping[str, Path]) -> None:
        """Upload files, given by their names in the store, if they have changed since they were uploaded last."""
        for name, path in files.items():
            if not path.exists():
                continue
            stat = path.stat()
            if self.sent.get(name) != (stat.st_size, stat.st_mtime_ns):
                self._make_folder(name)
                self.fs.pipe_file(self._path(name), path.read_bytes())  # the file may grow, so its bytes are taken once
                self.sent[name] = stat.st_size, stat.st_mtime_ns

    def _write(self, name: str, content: dict) -> None:
        path, data = self._path(name), f"{json.dumps(content)}\n".encode()
        if not self.has_folders:
            self.fs.pipe_file(path, data)  # which object stores do atomically
        else:
            self.fs.pipe_file(f"{path}.tmp", data)
            self.fs.mv(f"{path}.tmp", path)

    def _delete_old(self, there: dict[str, Pointer], kept: Mapping[str, int]) -> None:
        for tier, count in kept.items():
            names = sorted((name for name in there if name.startswith(tier)), key=lambda name: there[name].mtime_ns)
            for name in names[:-count] if count else []:
                self.fs.rm_file(self._path(f"{name}.json"))  # first, so that no pointer names a deleted file
                del there[name]
        named = {pointer.file for pointer in there.values()}
        for name in list(self.listed):
            # A pointer that cannot be read may name any file.
            if name.startswith("step_") and name not in named and not self.bad:
                self.fs.rm_file(self._path(name))
                del self.listed[name]

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _make_folder(self, name: str = "") -> None:
        if self.has_folders:  # in an object store, makedirs might create a bucket
            self.fs.makedirs(Path(self._path(name)).parent.as_posix() if name else self.folder, exist_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# a run and its mirror


def files_of(config: "TrainConfig") -> dict[str, Path]:
    """Return the files of a run besides its checkpoints, by their names in the mirror."""
    logs = {f"logs/{name}": Path(config.logdir, name) for name in (LOG, METRICS)}
    events = {f"tensorboard/{path.name}": path for path in _tensorboard(config).glob("events.*")}
    return {EVALUATIONS: Path(config.checkpoint_dir, EVALUATIONS), **logs, **events}


def _tensorboard(config: "TrainConfig") -> Path:
    return Path(config.tensorboard_dir, config.run_name)


def newer_checkpoint(mirror: Mirror, which: str, folder: Path, local: Path | None) -> tuple[Path | None, list[str]]:
    """Download the newest intact checkpoint to a temporary file, if it is newer than the local one.

    Args:
        which: a word of NAMED, or anything else for the newest.
        local: the intact checkpoint that is already in the folder, if any.

    Returns: the temporary file, or None; and a line for each checkpoint that was skipped.

    Raises: UserError when nothing is intact though there are pointers, or the store does not answer.
    """
    newest_ns, named = local.stat().st_mtime_ns if local else 0, NAMED.get(which)
    pointers, bad = mirror.patiently(mirror.pointers)
    pointers = {name: pointer for name, pointer in pointers.items() if (name == named if named else name != BEST)}
    skipped, newest = list(bad.values()), pointers.get(named or LATEST)
    if newest and newest.mtime_ns <= newest_ns:  # others may be newer, if the run was resumed from an older one
        return None, []
    for name in sorted(pointers, key=lambda name: (name == LATEST, pointers[name].mtime_ns), reverse=True):
        downloaded = folder / ".restored.tmp"
        if pointers[name].mtime_ns <= newest_ns:
            continue
        try:
            mirror.download(pointers[name], downloaded)
        except Damaged as error:
            skipped.append(str(error))
        else:
            return downloaded, list(dict.fromkeys(skipped))
    if skipped and not local:
        raise UserError("; ".join(dict.fromkeys(skipped)))
    return None, list(dict.fromkeys(skipped))


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
    folders = {"logs": Path(config.logdir), "tensorboard": _tensorboard(config)}
    targets = {EVALUATIONS: Path(config.checkpoint_dir, EVALUATIONS)} if EVALUATIONS in mirror.sizes() else {}
    for name, folder in folders.items():
        targets |= {f"{name}/{Path(found).name}": folder / Path(found).name for found in mirror.find(name)}
    contents = {target: mirror.read(name) for name, target in targets.items() if replace or not target.exists()}
    if replace:
        folders["logs"].mkdir(parents=True, exist_ok=True)
        move_aside(folders["logs"])
    for target, content in contents.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, partial(_write_bytes, content))


def _write_bytes(content: bytes, file: IO[bytes]) -> None:
    file.write(content)
