"""The copy of a run in an object store: its layout, uploads and downloads, through fsspec.

    step_000250-1795329120.123456.pt          a checkpoint, uploaded once: its step and saved_at
    evaluations.json  logs/  tensorboard/     of the run
    index.json                                the run, and the checkpoint that each name refers to

The index is written last. Only the files in it are checkpoints, so an incomplete upload is never taken for one.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import dropwhile
from operator import methodcaller
from pathlib import Path
from typing import Annotated, TypeVar

from steadygpt.base.durable import no_link, replace_file
from steadygpt.base.options import UserError
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import bytes_text
from steadygpt.base.typed import Count, parse_json, typed
from steadygpt.checkpoint.files import BACKUP, LATEST, Head, read_checkpoint, too_old
from steadygpt.config import TrainConfig
from steadygpt.data.stores import Store

Result = TypeVar("Result")
INDEX = "index.json"
# Besides checkpoints. Nothing else is restored, because a mirror may be a stranger's.
FILES = re.compile(r"evaluations\.json|logs/(log\.txt|metrics\.jsonl)|tensorboard/events\.out\.tfevents\.[\w.-]+")
Name = Annotated[str, r"(latest|latest_backup|best_model|stable|rolling_step_\d{6,}|epoch_\d{5,})\.pt"]
PARTS = 4  # of 50 MB each, in memory and under way at once
SILENCE_S = 60  # a store may take this long to put the parts of a large file together
RETRIES = 5  # of a part, before the whole upload is repeated


@dataclass(frozen=True, kw_only=True)
class Entry(Head):
    """What the index says of a checkpoint."""

    file: Annotated[str, r"step_\d{6,}-\d+\.\d{6}\.pt"]
    size: Count  # in bytes

    @classmethod
    def of(cls, path: Path, head: Head) -> "Entry":
        """Describe a checkpoint file."""
        file = f"step_{head.step:06d}-{head.saved_at:.6f}.pt"
        return cls(file=file, size=path.stat().st_size, **vars(head))


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    run: Annotated[str, "[0-9a-f]{16}"]  # its id; "" in an empty folder
    name: str  # of the run
    writer: Annotated[str, "[0-9a-f]{16}"]  # the start that uploads
    checkpoints: dict[Name, Entry]  # newest first


class Damaged(UserError):
    """A checkpoint in the store is missing, incomplete or corrupt."""


class Mirror:
    """A folder of an object store. Methods raise what the store's fsspec back end raises, unless they say otherwise.

    patiently() repeats a request while the network fails, and raises UserErrors only; see Service.persistently.

    Args:
        url: of the folder, for fsspec.
        run: the id of the run that uploads, "" for any.
        name: of that run.
    """

    def __init__(self, url: str, run: str = "", name: str = ""):
        scheme, separator, rest = url.partition("://")
        if ":" in scheme or not (rest.strip("/") if separator else url.startswith("/")) or set(url) & set("*?["):
            raise UserError(f"--mirror {url!r}: expected a URL such as s3://bucket/run, or an absolute path")
        self.url, self.run, self.name = url.rstrip("/"), run, name
        self.writer, self.is_claimed = secrets.token_hex(8), False
        self.sent: dict[str, tuple[int, int]] = {}  # other files -> size and time of what was uploaded
        self.connect()

    def connect(self) -> None:
        """Open the store with the credentials that are valid now."""
        self.store = Store(self.url, SILENCE_S)
        self.fs, self.folder = self.store.fs, self.store.path
        self.fs.retries, self.fs.auto_mkdir = RETRIES, True

    def patiently(self, request: Callable[[], Result]) -> Result:
        return self.store.service.persistently(self.url, request)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name in the folder; complete files only, in object stores."""
        found = self.fs.find(self.folder, detail=True)
        return {path.removeprefix(f"{self.folder}/"): info["size"] for path, info in found.items()}

    def index(self) -> Index:
        """Read the index; it is empty if there is none. That of a mirror of another run is an error."""
        advice = (
            "the checkpoints there are the files step_*.pt: download one, resume from it with --resume FILE, and give "
            "the run another --mirror"
        )
        try:
            index = parse_json(self.read(INDEX), Index, f"{self.url}/{INDEX}", advice)
            typed({"run_name": index.name}, TrainConfig, f"{self.url}/{INDEX}", advice)
        except FileNotFoundError:
            if any(name.startswith("step_") for name in self.sizes()):
                raise UserError(f"{self.url}/{INDEX}: missing; {advice}") from None
            return Index("", "", "", {})
        if index.checkpoints and self.run not in ("", index.run):
            raise UserError(
                f"--mirror {self.url} belongs to the run {index.name} ({index.run}); give this run another --mirror, "
                "or resume that one in an empty --checkpoint_dir"
            )
        return index

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.folder}/{name}")

    def download(self, entry: Entry, target: Path) -> dict:
        """Download a checkpoint to `target`, verify it, and return its content.

        Raises: Damaged when it is missing or corrupt; `target` is unchanged, as after any other UserError.
        """
        free = shutil.disk_usage(target.parent).free
        if free < entry.size:
            raise UserError(f"{target}: {bytes_text(entry.size)} needed, {bytes_text(free)} free; free some space")
        url, downloaded = f"{self.url}/{entry.file}", target.with_name(f".{entry.file}.tmp")
        path = self.fs.unstrip_protocol(f"{self.folder}/{entry.file}")
        file = next((file for file in self.store.files() if file.path == path), None)
        if file is None or file.size != entry.size:
            found = f"incomplete ({file.size:,} of {entry.size:,} bytes)" if file else "missing"
            raise Damaged(f"{url}: {found}")
        with ProgressBar(desc=entry.file, total=entry.size, unit="B") as bar:
            file.download(downloaded, bar.show_from(0))
        try:
            checkpoint = read_checkpoint(downloaded)
        except UserError as error:
            downloaded.unlink()
            raise Damaged(str(error).replace(str(downloaded), url)) from error
        os.replace(downloaded, target)
        return checkpoint

    def claim(self) -> Index:
        """Reserve the folder for this start of the run, unless that is done, and return the index."""
        index = self.index()
        if self.is_claimed and index.writer not in ("", self.writer):
            raise UserError(f"{self.url}: a later start, of the run {index.name}, uploads there now")
        if index.writer != self.writer:
            self._write(index.checkpoints)
        self.is_claimed = True
        return index

    def upload(
        self, path: Path, entry: Entry, names: Iterable[str], config: TrainConfig, progress: Callable[..., object]
    ) -> None:
        """Upload a checkpoint unless it is there, the other files of the run, and the index; delete what is too old.

        Args:
            names: of the checkpoint. The newest in the mirror is also latest.pt, and the one before it the backup.
            progress: is called whenever bytes are uploaded.
        """
        import fsspec

        sizes = self.sizes()
        if sizes.get(entry.file) != entry.size:
            callback = fsspec.Callback(hooks={"progress": progress})
            self.fs.put_file(str(path), f"{self.folder}/{entry.file}", callback=callback, max_concurrency=PARTS)
        there = dict(self.claim().checkpoints)  # again: another start may have claimed it meanwhile
        self.upload_files(config)
        # Uploads that fall behind begin with the newest, so the one before it may come later.
        newest, *older = sorted({entry, *there.values()}, key=lambda entry: entry.order, reverse=True)
        there |= dict.fromkeys(names, entry) | {LATEST: newest} | ({BACKUP: older[0]} if older else {})
        there = dict(sorted(there.items(), key=lambda item: (item[1].order, item[0] == LATEST, item[0]), reverse=True))
        orders = {name: entry.order for name, entry in there.items()}
        dropped = too_old(orders, config.mirror_keep, config.keep_epochs)
        kept = [name for name in there if name not in dropped]
        self._write({name: there[name] for name in kept})
        for name in sizes.keys() - {there[name].file for name in kept}:
            if name.startswith("step_"):
                self.fs.rm_file(f"{self.folder}/{name}")

    def upload_files(self, config: TrainConfig) -> None:
        """Upload the logs and the evaluations of the run, those that have changed since they were uploaded last."""
        paths = {f"{place}{path.name}": path for place, of in folders_of(config).items() for path in of.glob("*")}
        for name in filter(FILES.fullmatch, paths):
            stat = paths[name].stat()
            if self.sent.get(name) != (stat.st_size, stat.st_mtime_ns):
                self.fs.pipe_file(f"{self.folder}/{name}", paths[name].read_bytes())  # taken once: the file may grow
                self.sent[name] = stat.st_size, stat.st_mtime_ns

    def _write(self, checkpoints: dict[Name, Entry]) -> None:
        index = Index(self.run, self.name, self.writer, checkpoints)
        path, data = f"{self.folder}/{INDEX}", f"{json.dumps(asdict(index), indent=1)}\n".encode()
        if not self.folder.startswith("/"):  # an object store, whose paths begin with the bucket, writes atomically
            self.fs.pipe_file(path, data)
        else:
            self.fs.pipe_file(f"{path}.tmp", data)
            self.fs.mv(f"{path}.tmp", path)


def folders_of(config: TrainConfig) -> dict[str, Path]:
    """Return the folders of the FILES of a run, by what their names begin with in the mirror."""
    tensorboard = Path(config.tensorboard_dir, config.run_name)
    return {"": Path(config.checkpoint_dir), "logs/": Path(config.logdir), "tensorboard/": tensorboard}


def restore_files(mirror: Mirror, config: TrainConfig) -> None:
    """Download what is missing here of the logs, the TensorBoard files and the evaluations of a run.

    To a log that is here, the starts on other machines are appended.
    """
    folders = folders_of(config)
    for name in filter(FILES.fullmatch, mirror.sizes()):
        folder, slash, file = name.rpartition("/")
        target = folders[folder + slash] / file
        if not target.exists():
            content = mirror.read(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, methodcaller("write", content))
        elif folder == "logs":  # a file of events belongs to one start: one of its name may be another run's
            with open(target, "r+b", opener=no_link) as log:
                log.write(missing_lines(log.read(), mirror.read(name)))


def missing_lines(here: bytes, there: bytes) -> bytes:
    """Return what a log lacks of its copy in the mirror: all after the lines that both begin with, or nothing.

    Where both go on differently, what the mirror has begins with a start. Records before it are of a start that lost
    them in a power cut, and has repeated them since.
    """
    own, lines = here.splitlines(keepends=True)[::-1], there.splitlines(keepends=True)[::-1]
    while own and own[-1:] == lines[-1:]:
        own.pop(), lines.pop()
    if any(line.endswith(b"\n") for line in own) and there.startswith(b"{"):
        lines = [*dropwhile(lambda line: b', "start": ' not in line, lines[::-1])][::-1]
    missing = b"".join(lines[::-1])
    return b"" if missing in here else b"\n" * (not here.endswith(b"\n") and here != b"") + missing
