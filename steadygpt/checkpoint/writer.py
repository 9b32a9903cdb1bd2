"""The writer that makes checkpoints durable in the background."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import torch

from steadygpt.base.durable import fsync_folder, is_gone, leads_to_lock, link_file, write_temporary
from steadygpt.base.options import UserError
from steadygpt.base.retry import brief
from steadygpt.checkpoint import files
from steadygpt.checkpoint.files import Best
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import compute_alone

PAUSE_SHARE = 0.01  # of the time; timed saves become rarer if they would pause training for more
LONGEST_S = 600.0  # longest interval of timed saves, also after a save during which the machine was suspended
MAX_FAILED = 10  # a run stops after this many consecutive failed saves, if as many intervals had no good save
# Temporary files that killed writers and downloads have left.
STALE = re.compile(
    r"\.((latest|latest_backup|best_model|stable|rolling_step_\d+|epoch_\d+|step_\d+-[\d.]+)\.pt|(run|status)"
    r"\.json|upload)\.tmp"
)


class FolderLost(OSError):
    """The run's folder was moved or deleted, and another run may use its path."""


def stale_files(folder: Path) -> list[Path]:
    """Return the temporary files of killed writers in a folder."""
    paths = []
    for path in folder.glob(".*.tmp*"):
        if STALE.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            paths.append(path)
    return paths


class CheckpointWriter:
    """Writes one checkpoint at a time in the background; used on rank 0 only.

    Args:
        lock: of the folder; each write checks that the folder's path still leads to it.
        best: the best model so far, in the folder or in the mirror.
        after_write: called when a checkpoint is durable, such as to upload it.
    """

    def __init__(
        self,
        config: TrainConfig,
        lock: IO[str],
        log: RunLog,
        best: Best | None = None,
        after_write: Callable[[], object] = lambda: None,
    ):
        self.config = config
        self.lock = lock
        self.log = log
        self.best = best
        self.best_in_flight: Best | None = None
        self.after_write = after_write
        self.folder = Path(config.checkpoint_dir)
        for stale in stale_files(self.folder):
            stale.unlink()
        # Head.recency of each checkpoint whose head can be read; other files are never deleted. The folder is scanned
        # once, because a save changes few names.
        self.recencies = {file.path.name: file.recency for file in files.scan(self.folder) if file.head}
        self.interval_s = 60 * config.checkpoint_minutes  # between timed saves; 0: no timed saves
        self.started_at_s = time.monotonic()  # when the newest save began, or when this writer was made
        self.saved_at_s = time.monotonic()  # when the last good save ended, or when this writer was made
        self.failed = 0  # consecutive failed saves
        self.is_lost = False  # see FolderLost
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=compute_alone)
        self.job: Future | None = None

    def is_due(self) -> bool:
        """Return whether it is time for a timed save, and none is in flight."""
        return 0 < self.interval_s <= time.monotonic() - self.started_at_s and self.wait(timeout_s=0)

    def note_pause(self, pause_s: float) -> None:
        """Set the interval of timed saves by how long a save has paused training."""
        if not self.config.checkpoint_minutes:
            return
        self.interval_s = max(60 * self.config.checkpoint_minutes, min(pause_s / PAUSE_SHARE, LONGEST_S))

    def reason_to_stop(self) -> str:
        """Return why to stop, one of Requests.REASONS, if saves can no longer succeed; else ""."""
        longest_s = MAX_FAILED * self.interval_s  # without a good save
        if self.is_lost:
            return "folder lost"
        if self.failed >= MAX_FAILED and time.monotonic() - self.saved_at_s >= longest_s:
            return "saves failed"
        return ""

    def is_best(self, val_loss: float | None, validated_on: str) -> bool:
        """Return whether a validation loss is below the best one saved or being saved, if that is on the same rows."""
        best = self.best_in_flight or self.best
        if val_loss is None:
            return False
        return best is None or best.validated_on != validated_on or val_loss < best.val_loss

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names that no checkpoint has."""
        return [name for name in names if name not in self.recencies]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight, at most `timeout_s`; return whether none is in flight."""
        return self.job is None or not wait([self.job], timeout_s).not_done

    def start(self, content: dict, names: Sequence[str]) -> None:
        """Begin to write a checkpoint as latest.pt and under further names; none must be in flight."""
        self.started_at_s = time.monotonic()
        if files.BEST in names:
            self.best_in_flight = Best(content["scores"]["val_loss"], content["step"], content["validated_on"])
        self.job = self.pool.submit(self._save, content, names)

    def _save(self, content: dict, names: Sequence[str]) -> None:
        step = content["step"]
        try:
            files.check_numbers(content)
            named = self.write(content, names)
        except Exception as error:  # training continues, and an exception in this thread would be lost
            self.failed += 1
            self.is_lost = isinstance(error, FolderLost)
            text = f"{self.folder / files.LATEST}: step {step} was not saved: {str(error) or type(error).__name__}"
            missing = f"there is no {' or '.join(names)}" if names else ""
            if not all(is_gone(self.folder / name) for name in self.recencies) and not self.is_lost:
                text += "; older saves are intact" + (f", but {missing}" if missing else "")
            elif not self.is_lost:
                text += "; no save is in the folder"
            self.log.warn(text, event="save failed" if self.failed == 1 else "")
            return
        finally:
            best = self.best_in_flight
            self.best_in_flight = None
        if best and files.BEST in named:
            self.best = best  # only now, so that the next model is compared with a durable one
        self.failed = 0
        self.saved_at_s = time.monotonic()
        took_s = self.saved_at_s - self.started_at_s
        self.log.say(f"saved step {step} as {', '.join([files.LATEST, *named])} in {took_s:.1f} s")
        self.after_write()

    def write(self, content: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """Write a checkpoint as latest.pt and `names`, keep the previous one as backup, delete old ones of each tier.

        Returns: the names besides latest.pt that it has got; the others are reported.

        Raises: FolderLost, OSError.
        """
        self.check_folder()
        latest = self.folder / files.LATEST
        step = content["step"]
        recencies = self.recencies
        # Later than all other checkpoints, even if the clock was set back.
        newest_s, _ = max(recencies.values(), default=(0.0, 0))
        saved_at = max(time.time(), newest_s + 0.001)
        recency = (saved_at, step)
        checkpoint = {**content, "saved_at": saved_at}
        temporary = write_temporary(latest, lambda file: torch.save(checkpoint, file), cached=False)
        try:
            self.check_folder()  # again: writing gigabytes takes a while
            named = [name for name in names if self._link(temporary, name)]
            recencies |= dict.fromkeys(named, recency)
            # The user may have moved latest.pt.
            if recencies.get(files.LATEST, (0.0, step))[1] != step and latest.exists():
                self._link(latest, files.BACKUP)
            os.replace(temporary, latest)
        except BaseException:
            temporary.unlink(missing_ok=True)  # a file of gigabytes, which would stay until the next save
            raise
        fsync_folder(self.folder)  # only now is it durable, so only now may older files go
        recencies[files.LATEST] = recency
        for name in files.too_old(recencies, self.config.keep_checkpoints, self.config.keep_epochs):
            (self.folder / name).unlink(missing_ok=True)
            del recencies[name]
        return named

    def _link(self, path: Path, name: str) -> bool:
        """Give a checkpoint a further name; return whether it has got it. The save itself does not depend on it."""
        try:
            link_file(path, self.folder / name)
        except OSError as error:  # such as no space for a copy, where the file system has no hard links
            self.log.warn(f"{self.folder / name}: not written: {brief(error)}", event="save failed")
            return False
        return True

    def check_folder(self) -> None:
        if not leads_to_lock(self.folder, self.lock):
            raise FolderLost(f"{self.folder} was moved or deleted; move it back, then resume there")

    def begin_at(self, checkpoint: Mapping[str, Any], path: Path | None, is_changed: bool) -> None:
        """Write the checkpoint that the run resumes from as latest.pt, unless it is latest.pt and the newest already.

        Args:
            path: of its file; None if that is in another folder.
            is_changed: the content differs from the file's.
        """
        latest = self.folder / files.LATEST
        recency = (checkpoint["saved_at"], checkpoint["step"])
        is_latest = path is not None and latest.exists() and latest.samefile(path)
        if not is_latest and os.path.lexists(latest):
            try:
                files.read_checkpoint(latest)
            except UserError:  # it is damaged, or cannot be read at this moment
                self.log.warn(f"{latest}: not a readable checkpoint; renamed {latest.rename(files.aside(latest)).name}")
        if is_changed or not is_latest or recency < max(self.recencies.values(), default=recency):
            self.write(checkpoint, [])
