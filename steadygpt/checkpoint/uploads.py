"""Uploads to a mirror in the background, the newest checkpoint first."""

import math
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import groupby
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
from steadygpt.machine.device import compute_alone

GIVE_UP_S = 600.0  # without progress, after which nothing waits for an upload any more


class Uploads:
    """A thread that uploads what the mirror lacks of a run's folder. Failed uploads are repeated until they succeed."""

    def __init__(self, mirror: Mirror, config: TrainConfig, log: RunLog, mirrored: Collection[str] = ()):
        self.mirror, self.config, self.log = mirror, config, log
        self.mirrored = mirrored  # names of the checkpoints that the mirror had at the launch
        # Absolute, because the thread may outlive the working directory.
        self.copy = Path(config.checkpoint_dir, ".upload.tmp").absolute()
        self.requests: Queue[None] = Queue(maxsize=1)  # one serves all that come before it is taken
        self.is_last = False
        self.corrupt: set[tuple[float, int]] = set()  # File.order of local saves
        self.uploaded_at_s, self.progress_at_s = -math.inf, time.monotonic()
        self.thread = Thread(target=self._work, name="uploads", daemon=True)
        self.thread.start()

    def start(self, is_last: bool = False) -> None:
        """Upload what the mirror lacks, and return at once; at the end of a run also its logs and last timed save."""
        self.is_last |= is_last
        if self.is_done():
            self._note_progress()
        with suppress(Full):
            self.requests.put_nowait(None)

    def is_done(self) -> bool:
        """Return whether nothing is left to upload."""
        return not self.requests.unfinished_tasks

    def is_busy(self) -> bool:
        """Return whether uploads are left, and have made progress within the last minutes."""
        return not self.is_done() and self.thread.is_alive() and time.monotonic() - self.progress_at_s < GIVE_UP_S

    def _note_progress(self, *_, **__) -> None:
        self.progress_at_s = time.monotonic()

    def _work(self) -> None:
        compute_alone()
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
                    self.log.warn(f"uploads to {self.mirror.url} fail: {brief(error)}; retrying until they succeed")
                pause_s = min(2 * pause_s or 1.0, LONGEST_PAUSE_S)
                time.sleep(pause_s)
                self.start()
            finally:
                self.copy.unlink(missing_ok=True)
            self.requests.task_done()

    def _upload_newest(self) -> None:
        """Upload the newest checkpoint that the mirror lacks, and request the next one."""
        known, sizes = self.mirror.claim().checkpoints, self.mirror.sizes()
        there = {name: entry.order for name, entry in known.items() if sizes.get(entry.file) == entry.size}
        if not (files := self._newest_missing(there)):
            if self.is_last:
                self.mirror.upload_files(self.config)
            return
        self.start()
        start_s, path, names = time.monotonic(), files[0].path, [file.path.name for file in files]
        try:
            link_file(path, self.copy)  # keeps the file when training replaces it
            if (head := read_head(self.copy)) != files[0].head:  # it already has
                return
            if head.order not in {entry.order for entry in known.values()}:
                read_checkpoint(self.copy)
        except FileNotFoundError:  # training has deleted it
            return
        except UserError as error:
            self.log.warn(f"not uploaded: {error}".replace(str(self.copy), str(path)))
            self.corrupt.add(files[0].order)
            return
        file = f"step_{head.step:06d}-{head.saved_at:.6f}.pt"
        entry = Entry(file=file, size=self.copy.stat().st_size, **vars(head))
        self.mirror.upload(self.copy, entry, names, self.config, self._note_progress)
        self._note_progress()
        self.uploaded_at_s = start_s
        self.log.note(mirrored_at=time.time())
        self.log.say(f"uploaded step {head.step:,} as {', '.join(names)} to {self.mirror.url}")

    def _newest_missing(self, there: dict[str, tuple[float, int]]) -> list[File]:
        """Return the names of the newest checkpoint to upload, given Head.order of each name that the mirror has."""
        files = [file for file in scan(Path(self.config.checkpoint_dir)) if file.path.name != BACKUP]
        newer = [file for file in files if file.order > there.get(file.path.name, (0.0, -1))]
        orders = there | {file.path.name: file.order for file in newer}
        dropped = too_old(orders, self.config.mirror_keep, self.config.keep_epochs)
        wanted = [file for file in newer if file.path.name not in dropped and file.order not in self.corrupt]
        saves = (list(names) for _, names in groupby(wanted, lambda file: file.order))
        # Timed saves belong to no tier.
        is_due = self.is_last or time.monotonic() - self.uploaded_at_s >= 60 * self.config.mirror_minutes
        return next((names for names in saves if is_due or [file.path.name for file in names] != [LATEST]), [])
