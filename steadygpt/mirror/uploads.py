"""Uploads to a mirror in the background, the newest checkpoint first."""

import math
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from steadygpt.base.durable import link_file
from steadygpt.base.options import UserError
from steadygpt.base.retry import LONGEST_PAUSE_S, brief
from steadygpt.checkpoint.files import BACKUP, LATEST, File, Unreadable, read_checkpoint, read_head, scan, too_old
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import compute_alone
from steadygpt.mirror.store import KEEP, Entry, Mirror

TIMED_S = 600.0  # between uploads of timed saves
GIVE_UP_S = 600.0  # a run no longer waits for uploads that have failed for this long


def open_uploads(run_id: str, config: TrainConfig, log: RunLog) -> "Uploads":
    """Return the uploads of a run that is not training.

    Raises: UserError if the mirror has a newer checkpoint than the folder.
    """
    mirror = Mirror(config.mirror, run_id, config.name)
    newest = next(iter(scan(Path(config.checkpoint_dir))))
    uploaded = mirror.patiently(mirror.index).checkpoints.get(LATEST)
    if uploaded and uploaded.recency > newest.recency:
        raise UserError(
            f"{config.mirror} has a newer checkpoint than {config.checkpoint_dir}, of step {uploaded.step:,}; resume "
            "from it"
        )
    return Uploads(mirror, config, log)


class Uploads:
    """A thread that uploads what the mirror lacks of a run's folder, and repeats failed uploads until they succeed."""

    def __init__(self, mirror: Mirror, config: TrainConfig, log: RunLog):
        self.mirror = mirror
        self.config = config
        self.log = log
        # Absolute, because the thread may outlive the working directory.
        self.copy = Path(config.checkpoint_dir, ".upload.tmp").absolute()
        self.requests: Queue[None] = Queue(maxsize=1)  # a waiting request covers all later ones
        self.is_last = False
        self.corrupt: set[tuple[float, int]] = set()  # File.recency of local saves
        self.uploaded_at_s = -math.inf  # when the last upload of a checkpoint began
        self.failing_since_s = math.inf
        self.thread = Thread(target=self._work, name="uploads", daemon=True)
        self.thread.start()

    def start(self, is_last: bool = False) -> None:
        """Request uploads of all that the mirror lacks, and return at once.

        Args:
            is_last: at the end of a run: also upload its logs and its last timed save.
        """
        self.is_last |= is_last
        with suppress(Full):
            self.requests.put_nowait(None)

    def is_done(self) -> bool:
        """Return whether nothing is left to upload."""
        return not self.requests.unfinished_tasks

    def is_busy(self) -> bool:
        """Return whether uploads are left, and have not failed for the last GIVE_UP_S seconds."""
        return not self.is_done() and self.thread.is_alive() and time.monotonic() - self.failing_since_s < GIVE_UP_S

    def _work(self) -> None:
        compute_alone()
        pause_s = 0.0
        while True:
            self.requests.get()
            try:
                if pause_s:
                    self.mirror.connect()
                try:
                    self._upload_newest()
                finally:
                    self.copy.unlink(missing_ok=True)
                pause_s = 0.0
                self.failing_since_s = math.inf
            except Exception as error:  # every fsspec back end has exceptions of its own
                if isinstance(error, UserError) and not isinstance(error, Unreadable):
                    self.log.warn(f"uploads have stopped: {error}")
                    return
                if not pause_s:
                    self.failing_since_s = time.monotonic()
                    self.log.warn(f"uploads to {self.mirror.url} fail: {brief(error)}; retrying until they succeed")
                pause_s = min(2 * pause_s or 1.0, LONGEST_PAUSE_S)
                time.sleep(pause_s)
                self.start()
            self.requests.task_done()

    def _upload_newest(self) -> None:
        """Upload the newest checkpoint that the mirror lacks, and request the next one."""
        entries = self.mirror.claim().checkpoints
        sizes = self.mirror.sizes()
        complete = {name: entry.recency for name, entry in entries.items() if sizes.get(entry.file) == entry.size}
        files = self._newest_missing(complete)
        if not files:
            if self.is_last:
                self.mirror.upload_files(self.config, sizes)
            return
        self.start()
        start_s = time.monotonic()
        path = files[0].path
        names = [file.path.name for file in files]
        try:
            link_file(path, self.copy)  # keeps the file when training replaces it
            head = read_head(self.copy)
            if head != files[0].head:  # training has replaced it
                return
            if head.recency not in {entry.recency for entry in entries.values()}:
                read_checkpoint(self.copy)
        except FileNotFoundError:  # training has deleted it
            return
        except Unreadable:
            raise
        except UserError as error:
            self.log.warn(f"not uploaded: {error}".replace(str(self.copy), str(path)))
            self.corrupt.add(files[0].recency)
            return
        file = f"step_{head.step:06d}-{head.saved_at:.6f}.pt"
        entry = Entry(file=file, size=self.copy.stat().st_size, **vars(head))
        self.mirror.upload(self.copy, entry, names, self.config, sizes)
        self.uploaded_at_s = start_s
        self.log.note(mirrored_at=time.time())
        self.log.say(f"uploaded step {head.step:,} as {', '.join(names)} to {self.mirror.url}")

    def _newest_missing(self, complete: dict[str, tuple[float, int]]) -> list[File]:
        """Return the newest checkpoint to upload, under all its names; [] if there is none.

        Args:
            complete: Head.recency of each name whose file is complete in the mirror.
        """
        files = [file for file in scan(Path(self.config.checkpoint_dir)) if file.path.name != BACKUP]
        newer = [file for file in files if file.recency > complete.get(file.path.name, (0.0, -1))]
        recencies = complete | {file.path.name: file.recency for file in newer}
        dropped = too_old(recencies, KEEP, self.config.keep_epochs)
        missing = [file for file in newer if file.path.name not in dropped and file.recency not in self.corrupt]
        # Timed saves belong to no tier, so latest.pt is their only name.
        takes_timed_saves = self.is_last or time.monotonic() - self.uploaded_at_s >= TIMED_S
        for _, group in groupby(missing, lambda file: file.recency):
            save = list(group)
            is_timed = [file.path.name for file in save] == [LATEST]
            if takes_timed_saves or not is_timed:
                return save
        return []
