"""The copy of a run in an object store: its layout, uploads and downloads, through fsspec.

    step_000250-1795329120.123456.pt          a checkpoint, uploaded once: its step and saved_at
    log.txt  metrics.jsonl  tensorboard/      as in the folder of the run
    index.json                                the run, and the checkpoint that each name refers to

The index is written last. Only the files in it are checkpoints, so an incomplete upload is never taken for one.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from steadygpt.base.durable import fsync
from steadygpt.base.options import UserError
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import bytes_text
from steadygpt.base.typed import Count, Id, parse_json, typed
from steadygpt.checkpoint.files import BACKUP, LATEST, Head, read_checkpoint, too_old
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import LOGS
from steadygpt.log.tensorboard import FOLDER as TENSORBOARD
from steadygpt.network.stores import Store

Result = TypeVar("Result")
INDEX = "index.json"
# Files besides checkpoints. Nothing else is restored, because a mirror may come from a stranger.
OF_FOLDER = "|".join(map(re.escape, LOGS))
FILES = re.compile(rf"{OF_FOLDER}|{TENSORBOARD}/events\.out\.tfevents\.[\w.-]+")
NAME = r"^(latest|latest_backup|best_model(_step_\d{6,})?|stable|rolling_step_\d{6,}|epoch_\d{5,})\.pt\Z"
Name = Annotated[str, Meta(pattern=NAME)]
PARTS = 4  # uploaded at once, 50 MB each, all in memory
SILENCE_S = 60  # a store may take this long to join the parts of a large file
RETRIES = 5  # of a part, before the whole upload is repeated
KEEP = 10  # newest rolling checkpoints in a mirror


@dataclass(frozen=True, kw_only=True)
class Entry(Head):
    """A checkpoint in the index."""

    file: Annotated[str, Meta(pattern=r"^step_\d{6,}-\d+\.\d{6}\.pt\Z")]
    size: Count  # in bytes


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    run: Id  # its id; "" in an empty folder
    name: str  # of the run
    writer: Id  # the launch that uploads
    checkpoints: dict[Name, Entry]  # newest first


class Damaged(UserError):
    """A checkpoint in the store is missing, incomplete or corrupt."""


class Mirror:
    """A folder of an object store.

    A run that uploads gives its id and name. Without an id, the mirror of any run can be read.

    Methods raise what the store's fsspec back end raises, but patiently() raises UserErrors (see Service.persistently).
    """

    def __init__(self, url: str, run: str = "", name: str = ""):
        scheme, separator, rest = url.partition("://")
        has_folder = bool(rest.strip("/")) if separator else url.startswith("/")
        if ":" in scheme or not has_folder or set(url) & set("*?["):
            raise UserError(f"--mirror {url!r}: expected a URL such as s3://bucket/run, or an absolute path")
        self.url = url.rstrip("/")
        self.run = run
        self.name = name
        self.writer = secrets.token_hex(8)
        self.is_claimed = False
        self.connect()

    def connect(self) -> None:
        """Open the store with the credentials that are valid now."""
        self.store = Store(self.url, SILENCE_S)
        self.fs = self.store.fs
        self.folder = self.store.path
        if "file" in self.fs.protocol and Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise UserError(f"--mirror {self.url}: not a folder; give that of the mirror")
        self.fs.retries = RETRIES
        self.fs.auto_mkdir = True

    def patiently(self, request: Callable[[], Result]) -> Result:
        return self.store.service.persistently(self.url, request)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name in the folder. Object stores have complete files only."""
        infos = self.fs.find(self.folder, detail=True)
        return {path.removeprefix(f"{self.folder}/"): info["size"] for path, info in infos.items()}

    def index(self) -> Index:
        """Read the index; return an empty one if there is none. The index of a different run is an error."""
        advice = "download one of the files step_*.pt, resume from it with --resume FILE, and use another --mirror"
        try:
            index = parse_json(self.read(INDEX), Index, f"{self.url}/{INDEX}", advice)
            typed({"run_name": index.name}, TrainConfig, f"{self.url}/{INDEX}", advice)
        except FileNotFoundError:
            for name in self.sizes():
                if name.startswith("step_"):
                    raise UserError(f"{self.url}/{INDEX}: missing; {advice}") from None
                if FILES.fullmatch(name) or name.endswith(".pt"):
                    raise UserError(f"--mirror {self.url}: holds {name}, but no mirror; give an empty folder") from None
            return Index("", "", "", {})
        if index.checkpoints and self.run not in ("", index.run):
            raise UserError(
                f"--mirror {self.url} belongs to the run {index.name} ({index.run}); give this run another --mirror, "
                f"or resume {index.name} in an empty --checkpoint_dir"
            )
        return index

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.folder}/{name}")

    def download(self, entry: Entry, folder: Path) -> tuple[Path, dict]:
        """Download a checkpoint to a temporary file in a folder; return the file and its content.

        Raises: Damaged when the checkpoint is missing, incomplete or corrupt.
        """
        url = f"{self.url}/{entry.file}"
        downloaded = folder / f".{entry.file}.tmp"
        downloaded.unlink(missing_ok=True)  # of a launch that was killed
        free = shutil.disk_usage(folder).free
        if free < entry.size:
            raise UserError(f"{folder}: {bytes_text(entry.size)} needed, {bytes_text(free)} free; free some space")
        path = self.fs.unstrip_protocol(f"{self.folder}/{entry.file}")
        file = next((file for file in self.store.files() if file.path == path), None)
        if file is None or file.size != entry.size:
            raise Damaged(f"{url}: {'incomplete' if file else 'missing'}")
        with downloaded.open("xb") as target, ProgressBar(desc=entry.file, total=entry.size, unit="B") as bar:
            for block in file.read(0, entry.size):
                target.write(block)
                bar.update(len(block))
            target.flush()
            fsync(target.fileno())
        try:
            return downloaded, read_checkpoint(downloaded)
        except UserError as error:
            downloaded.unlink()
            raise Damaged(str(error).replace(str(downloaded), url)) from error

    def claim(self) -> Index:
        """Reserve the folder for this launch of the run, unless it is reserved already, and return the index."""
        index = self.index()
        if index.writer != self.writer:
            if self.is_claimed and index.writer:
                raise UserError(f"{self.url}: a later launch, of the run {index.name}, uploads there now")
            self._write(index.checkpoints)
        self.is_claimed = True
        return index

    def upload(self, path: Path, entry: Entry, names: list[str], config: TrainConfig, sizes: Mapping[str, int]) -> None:
        """Upload a checkpoint unless the mirror has it, then the run's logs and the index; delete old checkpoints.

        The newest checkpoint of the mirror is also its latest.pt, and the one before it the backup.

        Args:
            sizes: of the files in the mirror, see sizes().
        """
        if sizes.get(entry.file) != entry.size:
            self.fs.put_file(str(path), f"{self.folder}/{entry.file}", max_concurrency=PARTS)
        entries = dict(self.claim().checkpoints)  # claim again: another launch may have claimed the mirror meanwhile
        self.upload_files(config, sizes)
        # Uploads that fall behind begin with the newest checkpoint, so older ones may come later.
        newest, *older = sorted({entry, *entries.values()}, key=lambda entry: entry.recency, reverse=True)
        entries |= dict.fromkeys(names, entry)
        entries[LATEST] = newest
        if older:
            entries[BACKUP] = older[0]
        newest_first = sorted(
            entries.items(), key=lambda item: (item[1].recency, item[0] == LATEST, item[0]), reverse=True
        )
        entries = dict(newest_first)
        recencies = {name: entry.recency for name, entry in entries.items()}
        for name in too_old(recencies, KEEP, config.keep_epochs):
            del entries[name]
        self._write(entries)
        for name in sizes.keys() - {entry.file for entry in entries.values()}:
            if name.startswith("step_"):
                self.fs.rm_file(f"{self.folder}/{name}")

    def upload_files(self, config: TrainConfig, sizes: Mapping[str, int]) -> None:
        """Upload the logs whose size differs from the mirror's; a run only appends to them."""
        folder = Path(config.checkpoint_dir)
        for path in [*folder.iterdir(), *folder.glob(f"{TENSORBOARD}/*")]:
            name = path.relative_to(folder).as_posix()
            if FILES.fullmatch(name) and path.stat().st_size != sizes.get(name):
                self.fs.pipe_file(f"{self.folder}/{name}", path.read_bytes())  # read once, because the file may grow

    def _write(self, checkpoints: dict[Name, Entry]) -> None:
        index = Index(self.run, self.name, self.writer, checkpoints)
        path = f"{self.folder}/{INDEX}"
        data = f"{json.dumps(asdict(index), indent=1)}\n".encode()
        if path.startswith("/"):
            self.fs.pipe_file(f"{path}.tmp", data)
            self.fs.mv(f"{path}.tmp", path)
        else:  # an object store, whose paths begin with the bucket, writes atomically
            self.fs.pipe_file(path, data)
