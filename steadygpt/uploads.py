"""Uploads to a mirror in the background, in the order of the saves."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygpt.cli import UserError
from steadygpt.durable import link_file
from steadygpt.mirror import Mirror, Pointer
from steadygpt.units import timestamp

WAITING = 2  # uploads behind the current one; each keeps a checkpoint on the disk
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts
GIVE_UP_S = 600.0  # without progress, after which nothing waits for an upload any more


@dataclass
class Upload:
    """A checkpoint, or without one only the logs."""

    pointer: Pointer | None = None
    copy: Path | None = None  # a link that keeps the file when training replaces it
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"step {self.pointer.step:,}" if self.pointer else "the newest log"


class Uploads:
    """A queue and the thread that empties it. Failed uploads are tried again until they succeed.

    Args:
        claim: of the mirror, if that failed because of the network when the run started.
        keep, keep_epochs: newest rolling checkpoints and checkpoints of epochs that stay in the mirror; 0: all.
        minutes: at least, between checkpoints that belong to no tier.
        files: returns the other files of the run, by their names in the mirror.
        report: is called with an outcome (done, failed) and a line of text.
    """

    def __init__(
        self,
        mirror: Mirror,
        claim: Callable[[], object] | None,
        keep: int,
        minutes: float,
        files: Callable[[], Mapping[str, Path]],
        report: Callable[[str, str], object],
        keep_epochs: int = 0,
    ):
        self.mirror, self.claim, self.files, self.report = mirror, claim, files, report
        self.keep, self.keep_epochs = keep, keep_epochs
        self.interval_s, self.added_at_s, self.newest_ns = 60 * minutes, -float("inf"), 0
        self.waiting: deque[Upload] = deque()
        self.current: Upload | None = None
        self.changed = threading.Condition()
        self.progress_at_s = time.monotonic()
        self.is_refused = False
        self.newest: dict[str, Any] = {}  # checkpoint in the mirror, for status.json
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    def is_due(self) -> bool:
        """Return whether the last checkpoint was added long enough ago for one that belongs to no tier."""
        return time.monotonic() - self.added_at_s >= self.interval_s

    def add(self, path: Path, about: Mapping[str, Any], names: Sequence[str]) -> None:
        """Upload a checkpoint under `names`, after those that were added before; return at once.

        If too many are waiting, the oldest is dropped.
        """
        pointer = Pointer.of(path, about)
        with self.changed:
            if self.is_refused:
                return
            for upload in (self.current, *self.waiting):
                if upload and upload.pointer == pointer:
                    upload.names += [name for name in names if name not in upload.names]
                    return
            copy = path.with_name(f".{pointer.file}.tmp")
            link_file(path, copy)
            self._append(Upload(pointer, copy, list(names)))
            self.added_at_s, self.newest_ns = time.monotonic(), pointer.mtime_ns
            if len(self.waiting) > WAITING:
                self._drop(self.waiting.popleft())

    def has(self, path: Path) -> bool:
        """Return whether this file was added last."""
        return path.stat().st_mtime_ns == self.newest_ns

    def add_logs(self) -> None:
        """Upload the logs once more, behind everything else."""
        with self.changed:
            if not self.is_refused:
                self._append(Upload())

    def is_busy(self) -> bool:
        """Return whether uploads are left, and have made progress within the last minutes."""
        with self.changed:
            stuck = time.monotonic() - self.progress_at_s > GIVE_UP_S
            return bool(self.current or self.waiting) and not (stuck or self.is_refused)

    def left(self) -> list[str]:
        """Return what is not uploaded yet."""
        with self.changed:
            return [str(upload) for upload in (self.current, *self.waiting) if upload]

    def _append(self, upload: Upload) -> None:
        if not self.current and not self.waiting:
            self.progress_at_s = time.monotonic()
        self.waiting.append(upload)
        self.changed.notify_all()

    def _drop(self, upload: Upload) -> None:
        self._discard(upload)
        self.report("failed", f"{upload} is not uploaded to {self.mirror.url}: {WAITING} newer checkpoints are waiting")

    def _work(self) -> None:
        while not self.is_refused:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting)
                self.current = self.waiting.popleft()
            self._send(self.current)
        for upload in (self.current, *self.waiting):
            self._discard(upload)

    def _send(self, upload: Upload) -> None:
        url, pause_s, start_s, is_new = self.mirror.url, 0.0, time.monotonic(), False
        while self.current and not self.is_refused:
            names = list(upload.names)
            try:
                if pause_s:
                    self.mirror.connect()
                if self.claim:
                    self.claim()
                    self.claim = None
                files = self.files()
                if upload.pointer and upload.copy:
                    progress = self._note_progress
                    is_new |= self.mirror.upload(
                        upload.copy, upload.pointer, names, files, self.keep, progress, self.keep_epochs
                    )
                else:
                    self.mirror.upload_files(files)
            except UserError as error:
                self.is_refused = True
                self.report("failed", f"nothing is uploaded: {error}")
            except Exception as error:  # every fsspec back end has exceptions of its own
                if not pause_s:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    self.report("failed", f"{upload} is not uploaded to {url} yet: {reason}; trying until it succeeds")
                pause_s = min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                time.sleep(pause_s)
            else:
                self._note_progress()
                with self.changed:
                    if upload.names == names:  # names may have been added meanwhile
                        self._discard(upload)
                        self.current = None
        if upload.pointer and not self.is_refused:
            self.newest = {"mirrored_step": upload.pointer.step, "mirrored_at": timestamp()}
            cost = f"{upload.pointer.size / 1e6:,.1f} MB in {time.monotonic() - start_s:.1f} s"
            self.report("done", f"uploaded {upload} as {', '.join(names)} to {url} ({cost if is_new else 'was there'})")

    def _discard(self, upload: Upload | None) -> None:
        if upload and upload.copy:
            upload.copy.unlink(missing_ok=True)

    def _note_progress(self, sent: int = 0) -> None:
        self.progress_at_s = time.monotonic()
