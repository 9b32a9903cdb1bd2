"""When a run saves, and a writer that makes saves durable in the background."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from steadygpt.checkpoint import (
    BACKUP,
    BEST,
    EVALUATIONS,
    LATEST,
    ROLLING,
    Captured,
    newest_first,
    read_checkpoint,
    summary,
)
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks, Silent, StopSignal
from steadygpt.durable import fsync_folder, link_file, replace_file, write_temporary
from steadygpt.units import duration_text

if TYPE_CHECKING:
    from config import TrainConfig

PAUSE_SHARE = 0.01  # of the time, at most, that saves by the clock may pause training
EVENTS = {"not saved": "save failed", "low disk": "no disk"}  # alerts by the outcome of a save


class Saves:
    """Decides when a run saves and under which names. Every rank calls each method; only rank 0 writes.

    Args:
        capture: copies the state to host memory. All ranks call it together, with the results of all steps read.
        log, writer: rank 0's RunLog and CheckpointWriter, Silent on the others.
        step: of the checkpoint that the run resumes from, if any.
        evaluations: those up to that step.
    """

    def __init__(
        self,
        config: "TrainConfig",
        ranks: Ranks,
        capture: Callable[[], Captured],
        log: Any,
        writer: Any,
        step: int | None = None,
        evaluations: dict[int, dict] | None = None,
    ):
        self.config, self.ranks, self.capture, self.log, self.writer = config, ranks, capture, log, writer
        self.uploads = writer.uploads if ranks.is_main else Silent()
        self.evaluations = evaluations or {}
        self.saved_step, self.saved_at_s = step, time.monotonic()
        self.longest_pause_s: float | None = None  # but for the first, which also allocates the host memory
        self.failed = False  # the newest save
        self.saved, self.failures, self.paused_s = 0, 0, 0.0  # of this start
        self.stop: StopSignal | None = None  # once training has begun

    def save_if_due(self, step: int, milestones: list[str], last: bool, read_results: Callable[[], None]) -> None:
        """Start a save if one is due after `step` updates.

        Args:
            milestones: names of the checkpoints for what ended with the last step, such as an epoch.
            last: whether this is the end of the run.
            read_results: waits for the results of all steps; called only if a save is due.
        """
        self.report()
        freq = self.config.checkpoint_freq
        tiers = [ROLLING.format(step)] if freq and step and step % freq == 0 else []
        tiers += milestones
        by_the_clock = self.ranks.any(bool(step) and self._is_late())  # rank 0 decides: on the others it never is
        if (tiers or by_the_clock or last) and step != self.saved_step:
            read_results()
            self._save(step, tiers)

    def record(self, step: int, scores: dict[str, float], best: bool = False) -> None:
        """Keep what an evaluation found in evaluations.json, and mark the model of this step as the best if it is."""
        known = self.evaluations.setdefault(step, {})
        known |= {name: value if math.isfinite(value) else None for name, value in scores.items()}  # JSON has no NaN
        if best and self.saved_step != step:
            self._save(step, [])
        self.writer.record({step: dict(found) for step, found in self.evaluations.items()}, step if best else None)

    def best_val_loss(self, saved: float | None) -> float | None:
        """Return the lowest of the validation losses in evaluations.json and the one that a checkpoint has saved."""
        losses = [saved, *(found.get("val_loss") for found in self.evaluations.values())]
        return min((loss for loss in losses if loss is not None), default=None)

    def finish(self, step: int) -> None:
        """Save the last step unless it is saved, and wait until it is durable; a failed save is tried again."""
        self._wait()
        self.report()
        if self.ranks.any(step != self.saved_step or self.failed):
            self._save(step, [])
        self.close()

    def close(self) -> None:
        """Wait for the save in flight and report how it ended."""
        self._wait()
        self.writer.close()
        self.report()

    def finish_uploads(self, stop: StopSignal) -> None:
        """Wait for the uploads to the mirror, until they make no progress or the user stops again."""
        self.writer.upload([LATEST])
        stop.again()  # forget the signal that has ended the run
        self._wait_for_uploads(stop.again)
        if left := self.uploads.left():
            self.log.warn(f"not uploaded: {', '.join(left)}; scripts/upload_manager.py upload-all does that")

    def _wait(self) -> None:
        """Wait until no save is in flight; a slow disk is no reason to take the run for dead."""
        while self.writer.is_busy():
            self.log.beat()
            time.sleep(0.01)
        self.writer.wait()

    def _wait_for_uploads(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until nothing is left to upload, no upload makes progress, or is_stopped(). All ranks wait together."""
        start_s, told = time.monotonic(), False
        while self.ranks.any(bool(self.uploads.is_busy())) and not self.ranks.any(is_stopped()):
            time.sleep(0.1)
            self.report()
            if not told and time.monotonic() - start_s > 1:
                told = True
                self.log.say("waiting for the uploads; Ctrl-C ends this. All checkpoints are in the local folder")
        self.report()

    def report(self) -> None:
        """Report the saves that ended in the background since the last call."""
        for outcome, text in self.writer.take_reports() or ():
            self.log.say(text) if outcome in ("saved", "done") else self.log.warn(text, event=EVENTS.get(outcome, ""))
            if outcome in ("saved", "not saved"):
                self.failed = outcome == "not saved"
                self.saved, self.failures = self.saved + (not self.failed), self.failures + self.failed
        self.log.note(**self.uploads.mirrored() or {})

    def interval_s(self) -> float:
        """Return the seconds between saves by the clock: longer where the pause of a save is more than 1 % of them."""
        return max(60 * self.config.checkpoint_minutes, (self.longest_pause_s or 0) / PAUSE_SHARE)

    def _is_late(self) -> bool:
        late = time.monotonic() - self.saved_at_s >= self.interval_s()
        return self.ranks.is_main and self.config.checkpoint_minutes > 0 and late and not self.writer.is_busy()

    def _save(self, step: int, tiers: list[str]) -> None:
        start_s, interval_s = time.monotonic(), self.interval_s()
        self._wait()  # before the capture, which reuses the memory that the writer reads
        captured = self.capture()
        self.log.flush()  # a checkpoint must not be newer than the log of the steps that led to it
        self.writer.save(captured, tiers)
        if not self.config.background_upload and self.config.mirror:
            self._wait()
            self._wait_for_uploads(lambda: self.stop is not None and bool(self.stop.asked))
        self.saved_step, self.saved_at_s = step, time.monotonic()
        pause_s = self.saved_at_s - start_s
        self.paused_s += pause_s
        self.longest_pause_s = 0.0 if self.longest_pause_s is None else max(self.longest_pause_s, pause_s)
        if self.config.checkpoint_minutes and self.interval_s() > interval_s:
            self.log.say(
                f"a save paused training for {pause_text(pause_s)}, so "
                f"{interval_text(self.interval_s(), num_bytes(captured.content))}"
            )


def pause_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def interval_text(interval_s: float, checkpoint_bytes: float) -> str:
    """Return how often latest.pt is saved by the clock, and how much is written that way."""
    per_day = checkpoint_bytes * 86400 / interval_s
    unit, size = ("TB", 1e12) if per_day >= 1e12 else ("GB", 1e9)
    return f"{LATEST} is saved at least every {duration_text(interval_s)}, {per_day / size:,.1f} {unit} a day"


def num_bytes(checkpoint: dict) -> int:
    """Return the bytes of a checkpoint's tensors; tied ones count once."""
    moments = [tensor for state in checkpoint["optimizer"].get("state", {}).values() for tensor in state.values()]
    return sum({t.data_ptr(): t.nbytes for t in [*checkpoint["model"].values(), *moments]}.values())


class CheckpointWriter:
    """Writes in the background, one job at a time; used on rank 0 only.

    Args:
        keep, keep_epochs: newest rolling checkpoints and checkpoints of epochs that are kept; 0 epochs: all.
        resumed_from: the verified checkpoint in the folder that the run resumes from. It becomes latest.pt, so that a
            kill before the first save does not undo a choice to resume from an older one.
        latest: summary() of that checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        resumed_from: Path | None = None,
        latest: Mapping[str, Any] | None = None,
        keep_epochs: int = 0,
    ):
        self.folder, self.keep, self.keep_epochs = folder, keep, keep_epochs
        self.latest_is_intact = resumed_from is not None  # a corrupt file never becomes the backup
        self.latest = latest or {"step": None}  # summary() of latest.pt
        self.room: int | None = None  # checkpoints that fit on the disk, if hardly any
        self.uploads: Any = Silent()  # or Uploads
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.in_flight: Future | None = None
        self.reports: SimpleQueue[tuple[str, str]] = SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob(".*.tmp"), *folder.glob(".*.tmp.part")):
            stale.unlink()  # left by a killed writer or download
        if resumed_from is not None and resumed_from.resolve() != (folder / LATEST).resolve():
            self._adopt(resumed_from)

    def _adopt(self, path: Path) -> None:
        latest, adopted = self.folder / LATEST, self.folder / ".adopted.tmp"
        if latest.exists() and latest.samefile(path):
            return
        link_file(path, adopted)  # first, because `path` may be the backup
        os.utime(adopted)  # the choice is newer than any checkpoint in a mirror
        with suppress(UserError):
            read_checkpoint(latest)  # raises if latest.pt is corrupt
            link_file(latest, self.folder / BACKUP)
        os.replace(adopted, latest)
        fsync_folder(self.folder)

    def save(self, captured: Captured, tiers: list[str]) -> None:
        """Write a checkpoint as latest.pt and under the file names in `tiers`; return before that is done.

        Waits for the job before it.
        """
        self.wait()
        self.in_flight = self.pool.submit(self._save, captured, tiers)

    def record(self, evaluations: dict[int, dict], best: int | None) -> None:
        """Write evaluations.json behind the save in flight, after linking best_model.pt to the file of step `best`."""
        self.pool.submit(self._record, evaluations, best)

    def is_busy(self) -> bool:
        """Return whether a save is in flight."""
        return self.in_flight is not None and not self.in_flight.done()

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self.in_flight is not None:
            self.in_flight.result()

    def take_reports(self) -> Iterator[tuple[str, str]]:
        """Yield (outcome, text) of what ended since the last call.

        Outcomes are saved, not saved and low disk, and of everything else done and failed.
        """
        while not self.reports.empty():
            yield self.reports.get()

    def close(self) -> None:
        """Wait for all jobs but uploads; take_reports still yields their outcomes."""
        self.pool.shutdown()

    def upload(self, names: list[str]) -> None:
        """Add latest.pt, under some names, and the logs to the uploads."""
        if not self.latest_is_intact:
            return
        try:
            self.uploads.add(self.folder / LATEST, self.latest, names)
        except OSError as error:  # the link is a copy where the file system has no links, and the disk may be full
            self.reports.put(("failed", f"step {self.latest['step']} is not uploaded: {error}"))

    def _save(self, captured: Captured, tiers: list[str]) -> None:
        checkpoint, start_s = captured.content, time.monotonic()
        step, names = checkpoint["step"], [LATEST, *tiers]
        try:
            self._write(captured.wait(), tiers)
            size = (self.folder / LATEST).stat().st_size
        except Exception as error:  # training continues, and an exception in this thread would be lost
            text = f"{self.folder / LATEST}: step {step} was not saved: {str(error) or type(error).__name__}"
            with suppress(OSError):  # the folder is gone
                free = shutil.disk_usage(self.folder).free
                text += f"; it takes {num_bytes(checkpoint):,} bytes, {free:,} are free; older saves are intact"
            self.reports.put(("not saved", text))
            return
        took_s = time.monotonic() - start_s
        self.reports.put(("saved", f"saved step {step} as {', '.join(names)} ({size / 1e6:,.1f} MB in {took_s:.1f} s)"))
        with suppress(OSError):  # the folder is gone; the next save reports it
            self._check_room(size)
        if tiers or self.uploads.is_due():
            self.upload(names)

    def _check_room(self, size: int) -> None:
        """Report when the disk has room for fewer than two more checkpoints, before a save fails."""
        free = shutil.disk_usage(self.folder).free
        room = free // size if free < 2 * size else None
        if room is not None and room != self.room:
            text = f"{self.folder}: {free:,} bytes are free, room for {room} more checkpoint{'s' * (room != 1)}"
            self.reports.put(("low disk", f"{text}; free some space, or saves will fail"))
        self.room = room

    def _write(self, checkpoint: dict, tiers: list[str]) -> None:
        latest = self.folder / LATEST
        temporary = write_temporary(latest, lambda file: torch.save(checkpoint, file), cached=False)
        for name in tiers:
            link_file(temporary, self.folder / name)
        if self.latest_is_intact and checkpoint["step"] != self.latest["step"]:
            link_file(latest, self.folder / BACKUP)
        os.replace(temporary, latest)
        fsync_folder(self.folder)  # only now is it durable, so only now may older files go
        self.latest_is_intact, self.latest = True, summary(checkpoint)
        epochs = newest_first(self.folder, "epoch_*.pt")[self.keep_epochs :] if self.keep_epochs else []
        for old in (*newest_first(self.folder, "rolling_step_*.pt")[self.keep :], *epochs):
            old.unlink(missing_ok=True)

    def _record(self, evaluations: dict[int, dict], best: int | None) -> None:
        try:
            if best is not None:
                if self.latest["step"] != best:
                    raise OSError(f"step {best} was not saved")
                link_file(self.folder / LATEST, self.folder / BEST)
                fsync_folder(self.folder)
                val_loss = evaluations[best]["val_loss"]
                self.reports.put(("done", f"{BEST} is step {best} (val loss {val_loss:.4f})"))
            # Last: a best model is linked again after a kill in between, because its validation is not recorded.
            content = json.dumps({str(step): found for step, found in evaluations.items()}, indent=1)
            replace_file(self.folder / EVALUATIONS, lambda file: file.write(f"{content}\n".encode()))
        except Exception as error:  # as in _save
            self.reports.put(("failed", f"{self.folder}: {EVALUATIONS} or {BEST} was not written: {error}"))
            return
        if best is not None:
            self.upload([LATEST, BEST])
