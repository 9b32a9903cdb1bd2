"""Uploads to a mirror in the background, the newest checkpoint first."""

import math
import time
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from steadygpt.base.durable import link_file
from steadygpt.base.options import UserError
from steadygpt.base.retry import LONGEST_PAUSE_S, brief
from steadygpt.checkpoint.files import BACKUP, LATEST, File, read_checkpoint, read_head, scan, too_old
from steadygpt.checkpoint.mirror import Entry, Mirror
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog

GIVE_UP_S = 600.0  # without progress, after which nothing waits for an upload any more


class Uploads:
    """A thread that uploads what the mirror lacks of a run's folder. Failed uploads are repeated until they succeed."""

    def __init__(self, mirror: Mirror, config: TrainConfig, log: RunLog):
        self.mirror, self.config, self.log = mirror, config, log
        # Absolute, because the thread may outlive the working directory.
        self.copy = Path(config.checkpoint_dir, ".upload.tmp").absolute()
        self.requests: Queue[None] = Queue(maxsize=1)  # one serves all that come before it is taken
        self.is_last = False
        self.there: dict[str, tuple[float, int]] = {}  # Head.order of the complete checkpoints in the mirror, by name
        self.corrupt: set[object] = set()  # local files: their order, or the path of one without a head
        self.uploaded_at_s = -math.inf
        self._note_progress()
        self.thread = Thread(target=self._work, name="uploads", daemon=True)
        self.thread.start()

    def start(self, is_last: bool = False) -> None:
        """Upload what the mirror lacks, and return at once; at the end of a run also its logs and last timed save."""
        self.is_last |= is_last
        if not self.requests.unfinished_tasks:
            self._note_progress()
        with suppress(Full):
            self.requests.put_nowait(None)

    def is_busy(self) -> bool:
        """Return whether uploads are left, and have made progress within the last minutes."""
        is_stuck = time.monotonic() - self.progress_at_s > GIVE_UP_S
        return bool(self.requests.unfinished_tasks) and self.thread.is_alive() and not is_stuck

    def left(self) -> str:
        """Return which checkpoints are not uploaded as far as is known, "" for none."""
        names = [file.path.name for files in self._missing() for file in files]
        return f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}" if names else ""

    def _missing(self) -> list[list[File]]:
        """Return the checkpoints to upload, newest first: the names of each."""
        files = [file for file in scan(Path(self.config.checkpoint_dir)) if file.path.name != BACKUP]
        for file in files:
            if file.problem and file.path not in self.corrupt:
                self.corrupt.add(file.path)
                self.log.warn(f"not uploaded: {file.path}: {file.problem}")
        newer = [file for file in files if file.order > self.there.get(file.path.name, (0.0, -1))]
        orders = self.there | {file.path.name: file.order for file in newer}
        dropped = too_old(orders, self.config.mirror_keep, self.config.keep_epochs)
        wanted = [file for file in newer if file.path.name not in dropped and file.order not in self.corrupt]
        saves = [list(names) for _, names in groupby(wanted, attrgetter("order"))]
        # Timed saves belong to no tier.
        is_due = self.is_last or time.monotonic() - self.uploaded_at_s >= 60 * self.config.mirror_minutes
        return [names for names in saves if is_due or [file.path.name for file in names] != [LATEST]]

    def _note_progress(self, *_, **__) -> None:
        self.progress_at_s = time.monotonic()

    def _work(self) -> None:
        pause_s = 0.0
        while True:
            self.requests.get()
            try:
                if pause_s:
                    self.mirror.connect()
                self._upload_newest()
                pause_s = 0.0
            except UserError as error:
                self.log.warn(f"uploads have stopped: {error}")
                return
            except Exception as error:  # every fsspec back end has exceptions of its own
                if not pause_s:
                    problem = f"uploads to {self.mirror.url} fail: {brief(error)}"
                    self.log.warn(f"{problem}; retrying until they succeed")
                pause_s = min(2 * pause_s or 1.0, LONGEST_PAUSE_S)
                time.sleep(pause_s)
                self.start()
            finally:
                self.copy.unlink(missing_ok=True)
            self.requests.task_done()

    def _upload_newest(self) -> None:
        """Upload the newest checkpoint that the mirror lacks, and request the next one."""
        known, sizes = self.mirror.claim().checkpoints, self.mirror.sizes()
        self.there = {name: entry.order for name, entry in known.items() if sizes.get(entry.file) == entry.size}
        if not (missing := self._missing()):
            if self.is_last:
                self.mirror.upload_files(self.config)
            return
        self.start()
        start_s, (file, *_), names = time.monotonic(), missing[0], [file.path.name for file in missing[0]]
        try:
            link_file(file.path, self.copy)  # keeps the file when training replaces it
            if not file.head or read_head(self.copy) != file.head:  # it already has
                return
            entry = next((entry for entry in known.values() if entry.order == file.order), None)
            if not entry:
                read_checkpoint(self.copy)
                entry = Entry.of(self.copy, file.head)
        except FileNotFoundError:  # training has deleted it
            return
        except UserError as error:
            self.log.warn(f"not uploaded: {error}".replace(str(self.copy), str(file.path)))
            self.corrupt.add(file.order)
            return
        self.mirror.upload(self.copy, entry, names, self.config, self._note_progress)
        self._note_progress()
        self.uploaded_at_s = start_s
        took = f"in {time.monotonic() - start_s:.1f} s"
        self.log.note(mirrored_at=time.time())
        self.log.say(f"uploaded step {entry.step:,} as {', '.join(names)} to {self.mirror.url} {took}")
