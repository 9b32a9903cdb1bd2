"""Uploads to a mirror in the background, the newest checkpoint first."""

import math
import time
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from steadygpt.base.durable import link_file
from steadygpt.base.options import UserError
from steadygpt.base.retry import brief
from steadygpt.checkpoint.files import LATEST, read_checkpoint, summary
from steadygpt.checkpoint.mirror import Entry, Mirror, missing
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog

LONGEST_PAUSE_S = 60.0  # between attempts
GIVE_UP_S = 600.0  # without progress, after which nothing waits for an upload any more


class Uploads:
    """A thread that uploads what the mirror lacks of the run's folder. Failed uploads are repeated until they succeed.

    Args:
        config: of the run.
        log: of the run, where the thread reports what it did.
    """

    def __init__(self, mirror: Mirror, config: TrainConfig, log: RunLog):
        self.mirror, self.config, self.log = mirror, config, log
        # Absolute, because the thread may outlive the working directory.
        self.copy = Path(config.checkpoint_dir, ".upload.tmp").absolute()
        self.requests: Queue[None] = Queue(maxsize=1)  # one serves all that come before it is taken
        self.is_last = False
        self.there: dict[str, int] = {}  # times of the complete checkpoints in the mirror (ns), by name
        self.corrupt: set[int] = set()  # times of local files
        self.uploaded_at_s, self.progress_at_s = -math.inf, time.monotonic()
        self.thread = Thread(target=self._work, name="uploads", daemon=True)
        self.thread.start()

    def start(self, is_last: bool = False) -> None:
        """Upload what the mirror lacks, and return at once.

        Args:
            is_last: the run has ended, so its logs and the last timed save are uploaded too.
        """
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
        names = [path.name for paths in self._missing().values() for path in paths]
        return f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}" if names else ""

    def _missing(self) -> dict[int, list[Path]]:
        """Return what is to be uploaded; timed saves, which belong to no tier, only every mirror_minutes."""
        is_due = self.is_last or time.monotonic() - self.uploaded_at_s >= 60 * self.config.mirror_minutes
        return {
            mtime_ns: paths
            for mtime_ns, paths in missing(self.there, self.config).items()
            if mtime_ns not in self.corrupt and (is_due or [path.name for path in paths] != [LATEST])
        }

    def _note_progress(self) -> None:
        self.progress_at_s = time.monotonic()

    def _work(self) -> None:
        pause_s = 0.0
        while True:
            self.requests.get()
            try:
                if pause_s:
                    self.mirror.connect()
                if self._upload_newest():
                    self.start()  # there may be more
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

    def _upload_newest(self) -> bool:
        """Upload the newest checkpoint that the mirror lacks; return whether there was one."""
        known, sizes = self.mirror.claim().checkpoints, self.mirror.sizes()
        self.there = {name: entry.mtime_ns for name, entry in known.items() if sizes.get(entry.file) == entry.size}
        mtime_ns, paths = next(iter(self._missing().items()), (0, []))
        if not paths:
            if self.is_last:
                self.mirror.upload_files(self.config)
            return False
        start_s = time.monotonic()
        try:
            link_file(paths[0], self.copy)  # keeps the file when training replaces it
            if self.copy.stat().st_mtime_ns != mtime_ns:  # it already has
                return True
            entry = next((entry for entry in known.values() if entry.mtime_ns == mtime_ns), None)
            entry = entry or Entry.of(self.copy, summary(read_checkpoint(self.copy)))
        except FileNotFoundError:  # training has deleted it
            return True
        except UserError as error:
            self.log.warn(f"not uploaded: {error}".replace(str(self.copy), str(paths[0])))
            self.corrupt.add(mtime_ns)
            return True
        names = [path.name for path in paths]
        self.mirror.upload(self.copy, entry, names, self.config, lambda sent: self._note_progress())
        self._note_progress()
        self.uploaded_at_s = start_s
        took = f"in {time.monotonic() - start_s:.1f} s"
        self.log.note(mirrored_at=time.time())
        self.log.say(f"uploaded step {entry.step:,} as {', '.join(names)} to {self.mirror.url} {took}")
        return True
