"""Uploads to a mirror in the background, in the order of the saves."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygpt.cli import UserError
from steadygpt.durable import link_file
from steadygpt.mirror import Entry, Mirror
from steadygpt.runlog import RunLog
from steadygpt.units import timestamp

if TYPE_CHECKING:
    from config import TrainConfig

WAITING = 2  # uploads behind the current one; each keeps a checkpoint on the disk
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
GIVE_UP_S = 600.0  # without progress, after which nothing waits for an upload any more


@dataclass
class Upload:
    """A checkpoint that the mirror is to have under some names."""

    entry: Entry
    copy: Path  # a link that keeps the file when training replaces it
    names: dict[str, None]  # an ordered set

    def __str__(self) -> str:
        return f"step {self.entry.step:,}"


class Uploads:
    """A queue and the thread that empties it. Failed uploads are tried again until they succeed.

    Args:
        config: of the run.
        log: of the run, where the thread reports what it did.
    """

    def __init__(self, mirror: Mirror, config: "TrainConfig", log: RunLog):
        self.mirror, self.config, self.log = mirror, config, log
        self.added, self.added_at_s = 0, -math.inf
        self.queue: list[Upload] = []  # the first one is under way
        self.changed = threading.Condition()
        self.progress_at_s = time.monotonic()
        self.is_refused = False
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    def is_due(self) -> bool:
        """Return whether the last checkpoint was added long enough ago for one that belongs to no tier."""
        return time.monotonic() - self.added_at_s >= 60 * self.config.mirror_minutes

    def add(self, path: Path, about: Mapping[str, Any], names: Iterable[str]) -> None:
        """Upload a checkpoint under `names`, after those that were added before, and the logs; return at once.

        If too many are waiting, the oldest is dropped.
        """
        entry = Entry.of(path, about)
        with self.changed:
            if self.is_refused:
                return
            for upload in self.queue[1:]:
                if upload.entry.file == entry.file:
                    upload.names |= dict.fromkeys(names)
                    return
            if not self.queue:
                self._note_progress()
            self.added += 1
            copy = path.with_name(f".{entry.file}.{self.added}.tmp")
            link_file(path, copy)
            self.queue.append(Upload(entry, copy, dict.fromkeys(names)))
            self.added_at_s = time.monotonic()
            if len(self.queue) > 1 + WAITING:
                dropped = self.queue.pop(1)
                dropped.copy.unlink(missing_ok=True)
                why = f"{WAITING} newer checkpoints are waiting"
                self.log.warn(f"{dropped} is not uploaded to {self.mirror.url}: {why}")
            self.changed.notify_all()

    def is_busy(self) -> bool:
        """Return whether uploads are left, and have made progress within the last minutes."""
        stuck = time.monotonic() - self.progress_at_s > GIVE_UP_S
        return bool(self.queue) and not (stuck or self.is_refused)

    def left(self) -> list[str]:
        """Return what is not uploaded yet."""
        with self.changed:
            return list(dict.fromkeys(map(str, self.queue)))

    def _work(self) -> None:
        while not self.is_refused:
            with self.changed:
                self.changed.wait_for(lambda: self.queue)
            try:
                self._send(self.queue[0])
            except UserError as error:
                self.log.warn(f"nothing is uploaded: {error}")
                with self.changed:
                    self.is_refused = True
                    for upload in self.queue:
                        upload.copy.unlink(missing_ok=True)
            else:
                with self.changed:
                    self.queue.pop(0).copy.unlink(missing_ok=True)

    def _send(self, upload: Upload) -> None:
        """Upload a checkpoint, however many attempts that takes.

        Raises: UserError when the mirror belongs to another run.
        """
        url, pause_s, start_s = self.mirror.url, 0.0, time.monotonic()
        while True:
            try:
                if pause_s:
                    self.mirror.connect()
                is_new = self.mirror.upload(
                    upload.copy, upload.entry, upload.names, self.config, lambda sent: self._note_progress()
                )
                break
            except UserError:
                raise
            except Exception as error:  # every fsspec back end has exceptions of its own
                if not pause_s:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    self.log.warn(f"{upload} is not uploaded to {url} yet: {reason}; trying until it succeeds")
                pause_s = min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                time.sleep(pause_s)
        self._note_progress()
        self.log.note(mirrored_step=upload.entry.step, mirrored_at=timestamp())
        if is_new or pause_s:  # otherwise the checkpoint got another name, or the logs were uploaded
            cost = f"{upload.entry.size / 1e6:,.1f} MB in {time.monotonic() - start_s:.1f} s"
            self.log.say(f"uploaded {upload} as {', '.join(upload.names)} to {url} ({cost})")

    def _note_progress(self) -> None:
        self.progress_at_s = time.monotonic()
