"""When a run saves, and a writer that makes saves durable in the background."""

import concurrent.futures
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from steadygpt.base.durable import fsync_folder, link_file, replace_file, write_temporary
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, duration_text
from steadygpt.checkpoint.files import (
    BACKUP,
    BEST,
    EVALUATIONS,
    LATEST,
    Captured,
    Evaluations,
    TrainState,
    aside,
    check_numbers,
    named_tensors,
    read_checkpoint,
    read_evaluations,
    scan,
    too_old,
)
from steadygpt.checkpoint.uploads import Uploads
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.ranks import Ranks, StopSignal

PAUSE_SHARE = 0.01  # of the time, at most, that timed saves may pause training
MAX_FAILED = 10  # consecutive saves, and intervals of timed saves without a good one, before a run stops
STALE = ".*.tmp*"  # files left by killed writers and downloads


class Saves:
    """Decides when a run saves, and waits for saves and uploads. Every rank calls each method; only rank 0 writes.

    Args:
        writer: of rank 0 in a run; None on the other ranks, and where nothing is written.
        step: of the save that the run resumes from, if it has all of its names.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        log: RunLog,
        stop: StopSignal,
        writer: "CheckpointWriter | None" = None,
        step: int | None = None,
    ):
        self.config, self.ranks, self.log, self.stop, self.writer = config, ranks, log, stop, writer
        self.captured_step, self.captured_at_s = step, time.monotonic()  # of the newest save, perhaps still in flight
        self.longest_pause_s: float | None = None  # but for the first, which also allocates the host memory
        self.paused_s = 0.0  # in this start

    def is_due(self, step: int, is_special: bool) -> bool:
        """Return whether a save is due after `step` updates: by time, or because the step is special."""
        patience_s = MAX_FAILED * self.interval_s() * bool(self.config.checkpoint_minutes)
        if self.writer and self.writer.failed >= MAX_FAILED and time.monotonic() - self.writer.saved_at_s >= patience_s:
            self.stop.ask("saves failed")
        is_late = self.ranks.any(step > 0 and self._is_late())  # rank 0 decides: on the others it never is
        return (is_late or is_special) and step != self.captured_step

    def _is_late(self) -> bool:
        late = time.monotonic() - self.captured_at_s >= self.interval_s()
        return self.writer is not None and self.config.checkpoint_minutes > 0 and late and self.writer.wait(timeout_s=0)

    def interval_s(self) -> float:
        """Return the seconds between timed saves: longer where the pause of a save would exceed 1 % of them."""
        return max(60 * self.config.checkpoint_minutes, (self.longest_pause_s or 0) / PAUSE_SHARE)

    def save(self, step: int, capture: Callable[[], Captured], tiers: list[str]) -> None:
        """Save the state of the run after `step` updates; return once it is copied to host memory.

        Args:
            tiers: further names of the checkpoint, besides latest.pt.
        """
        start_s, interval_s = time.monotonic(), self.interval_s()
        self.wait()  # the capture reuses the memory that the writer reads
        # Not counted in the interval of timed saves, because these begin only when no save is in flight.
        waited_s = time.monotonic() - start_s
        captured = capture()
        self.log.flush()  # a checkpoint must not be newer than the log of the steps that led to it
        if self.writer:
            self.writer.save(captured, tiers)
        if not self.config.background_upload:
            self.wait()
            self._wait_for_uploads(lambda: bool(self.stop.asked))
        self.captured_step, self.captured_at_s = step, time.monotonic()
        pause_s = self.captured_at_s - start_s
        self.paused_s += pause_s
        longest_s = self.longest_pause_s
        self.longest_pause_s = 0.0 if longest_s is None else max(longest_s, pause_s - waited_s)
        if self.config.checkpoint_minutes and self.interval_s() > interval_s:
            self.log.say(
                f"a save paused training for {pause_text(self.longest_pause_s)}; from now on "
                f"{interval_text(self.interval_s(), num_bytes(captured.content))}"
            )

    def evaluated(self, state: TrainState, scores: dict[str, float], save: Callable[[], object]) -> bool:
        """Record what an evaluation found, and return whether its val_loss, if it has one, is the lowest so far.

        Then best_model.pt becomes a link to the save of this step, which `save` makes if there is none yet.

        Raises: what `save` raises.
        """
        val_loss = scores.get("val_loss", math.inf)
        best = self.config.trains and val_loss < (math.inf if state.best_val_loss is None else state.best_val_loss)
        if "val_loss" in scores:
            state.val_loss = val_loss if math.isfinite(val_loss) else None
        if best:
            state.best_val_loss = val_loss
            if self.captured_step != state.step:
                save()
        if self.writer:
            self.writer.record(state.step, scores, best)
        return best

    def best_val_loss(self, saved: float | None) -> float | None:
        """Return the lowest of the known validation losses and the one that a checkpoint has saved.

        A checkpoint is captured before the evaluation of its step.
        """
        known = self.writer.evaluations.values() if self.writer else ()
        losses = [saved, *(scores.get("val_loss") for scores in known)]
        return self.ranks.broadcast(min((loss for loss in losses if loss is not None), default=None))

    def is_saved(self, step: int) -> bool:
        """Wait for the save in flight, and return whether `step` is durable."""
        self.wait()
        return not self.ranks.any(step != self.captured_step or (self.writer is not None and self.writer.failed > 0))

    def wait(self) -> None:
        """Wait until no save is in flight; renew status.json, so that a slow disk does not look like a hang."""
        while self.writer and not self.writer.wait(timeout_s=1):
            self.log.beat()

    def close(self) -> None:
        """Wait for the save in flight and the jobs after it."""
        self.wait()
        if self.writer:
            self.writer.close()

    def finish_uploads(self) -> None:
        """Wait for the uploads to the mirror, until they make no progress or the user stops again."""
        uploads = self.writer and self.writer.uploads
        if uploads:
            uploads.start(is_last=True)
        self.stop.again()  # forget the signal that has ended the run
        self._wait_for_uploads(self.stop.again)
        if uploads and (left := uploads.left()):
            self.log.warn(f"not uploaded: {left}; upload them with scripts/upload_manager.py upload-all")

    def _wait_for_uploads(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until nothing is left to upload, no upload makes progress, or is_stopped(). All ranks wait together."""
        uploads = self.writer.uploads if self.writer else None
        start_s, told = time.monotonic(), False
        while self.ranks.any(uploads is not None and uploads.is_busy()) and not self.ranks.any(is_stopped()):
            time.sleep(0.1)
            self.log.beat()
            if not told and time.monotonic() - start_s > 1:
                told = True
                self.log.say("waiting for uploads; Ctrl-C skips them. All checkpoints are in the local folder")


def pause_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def interval_text(interval_s: float, checkpoint_bytes: float) -> str:
    """Return how often timed saves write latest.pt, and how much they write."""
    per_day = bytes_text(checkpoint_bytes * 86400 / interval_s)
    return f"{LATEST} every {duration_text(interval_s)} or less; writes up to {per_day} a day"


def num_bytes(checkpoint: dict) -> int:
    """Return the bytes of a checkpoint's tensors; tied ones count once."""
    return sum({t.data_ptr(): t.nbytes for t in named_tensors(checkpoint).values()}.values())


class CheckpointWriter:
    """Writes in the background, one job at a time, and reports to the log how each ended; used on rank 0 only.

    Args:
        keep, keep_epochs: newest rolling checkpoints and checkpoints of epochs that are kept; 0 epochs: all.
    """

    def __init__(
        self,
        folder: Path,
        log: RunLog,
        keep: int,
        keep_epochs: int = 0,
        uploads: Uploads | None = None,
    ):
        self.folder, self.log, self.uploads = folder, log, uploads
        for stale in folder.glob(STALE):
            stale.unlink()
        self.keep, self.keep_epochs = keep, keep_epochs
        # Of each file whose head was read or written here. Others are never deleted.
        self.orders = {file.path.name: file.head.order for file in scan(folder) if file.head}
        self.latest_step: int | None = None  # of latest.pt; None: it is missing or corrupt, and never the backup
        self.evaluations: Evaluations = {}
        self.room: int | None = None  # checkpoints that fit on the disk, if fewer than two
        self.unlinked: tuple[str, int] | None = None  # arguments of _record() for the best model, until it is linked
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.in_flight: Future | None = None
        self.saved = self.failures = 0  # saves of this start
        self.failed, self.saved_at_s = 0, time.monotonic()  # consecutive failures; the last good save, or the start

    def resume(self, checkpoint: dict, path: Path | None) -> None:
        """Make the checkpoint that the run resumes from the newest: a kill before the first save keeps the choice.

        Args:
            path: of the checkpoint in the folder, None in another one.
        """
        step, order = checkpoint["step"], (checkpoint["saved_at"], checkpoint["step"])
        latest, linked = self.folder / LATEST, self.folder / ".linked.tmp"
        is_latest = path is not None and latest.exists() and latest.samefile(path)
        try:
            self.latest_step = step if is_latest else read_checkpoint(latest)["step"]
        except UserError:  # it is damaged, cannot be read at this moment, or does not exist
            with suppress(FileNotFoundError):
                new = latest.rename(aside(latest)).name
                self.log.warn(f"{latest}: not a readable checkpoint; renamed {new}")
        # The run begins in a folder of its own, or goes back: the state is newer than what comes after it.
        if path is None or order < max(self.orders.values(), default=order):
            self._write(checkpoint, [])
        elif not is_latest:
            link_file(path, linked)
            self._replace_latest(linked, order, [])
        evaluations, warnings = read_evaluations(self.folder / EVALUATIONS, (self.folder / EVALUATIONS).read_bytes)
        for line in warnings:
            self.log.warn(line)
        losses = [(loss, at) for at, found in evaluations.items() if (loss := found.get("val_loss")) is not None]
        val_loss, best = min(losses, default=(0.0, 0))
        if best > step and (self.folder / BEST).exists():
            self.log.warn(
                f"{self.folder / BEST} is step {best} (val loss {val_loss:.4f}), after step {step}. The best model of "
                "this run will replace it; copy it to keep it"
            )
        self.evaluations = {at: found for at, found in evaluations.items() if at <= step}
        for scores in self.evaluations.values():
            self.log.note(**scores)  # for the monitor, until the next evaluation
        if self.uploads:
            self.uploads.start()  # also of a choice to go back

    def save(self, captured: Captured, tiers: list[str]) -> None:
        """Write a checkpoint as latest.pt and under the file names in `tiers`; return before that is done.

        Waits for the job before it.
        """
        self.wait()
        self.in_flight = self.pool.submit(self._save, captured, tiers)

    def record(self, step: int, scores: dict[str, float], best: bool) -> None:
        """Write evaluations.json after the save in flight; if the step is best, first link best_model.pt to it."""
        plain = {name: value if math.isfinite(value) else None for name, value in scores.items()}  # JSON has no NaN
        self.evaluations.setdefault(step, {}).update(plain)
        self.log.note(**plain)
        content = json.dumps({str(at): found for at, found in self.evaluations.items()}, indent=1)
        self.pool.submit(self._record, content, step if best else None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight, and return whether that is so."""
        return not concurrent.futures.wait([self.in_flight], timeout_s).not_done if self.in_flight else True

    def close(self) -> None:
        """Wait for all jobs but uploads."""
        self.pool.shutdown()

    def _save(self, captured: Captured, tiers: list[str]) -> None:
        checkpoint, start_s = captured.content, time.monotonic()
        step, names = checkpoint["step"], [LATEST, *tiers]
        try:
            check_numbers(captured.wait())
            self._write(captured.content, tiers)
            size = (self.folder / LATEST).stat().st_size
        except Exception as error:  # training continues, and an exception in this thread would be lost
            self.failed, self.failures = self.failed + 1, self.failures + 1
            text = f"{self.folder / LATEST}: step {step} was not saved: {str(error) or type(error).__name__}"
            with suppress(OSError):  # the folder is gone
                free = shutil.disk_usage(self.folder).free
                text += f"; needs {bytes_text(num_bytes(checkpoint))}, {bytes_text(free)} free; older saves are intact"
            self.log.warn(text, event="save failed" if self.failed == 1 else "")
            return
        self.failed, self.saved, self.saved_at_s = 0, self.saved + 1, time.monotonic()
        took_s = self.saved_at_s - start_s
        self.log.say(f"saved step {step} as {', '.join(names)} ({bytes_text(size)} in {took_s:.1f} s)")
        with suppress(OSError):  # the folder is gone; the next save reports it
            self._check_room(size)
        if self.unlinked and self.unlinked[1] == step:  # its first save failed
            self._record(*self.unlinked)
        if self.uploads:
            self.uploads.start()

    def _check_room(self, size: int) -> None:
        """Report when the disk has room for fewer than two more checkpoints, before a save fails."""
        free = shutil.disk_usage(self.folder).free
        room = free // size if free < 2 * size else None
        if room is not None and room != self.room:
            text = f"{self.folder}: {bytes_text(free)} free, room for {counted(room, 'more checkpoint')}"
            self.log.warn(f"{text}; free some space, or saves will fail", event="no disk")
        self.room = room

    def _write(self, content: dict, tiers: list[str]) -> None:
        # Later than all other checkpoints, also if the clock was set back.
        newest_s, _ = max(self.orders.values(), default=(0.0, 0))
        checkpoint = content | {"saved_at": max(time.time(), newest_s + 0.001)}
        temporary = write_temporary(self.folder / LATEST, lambda file: torch.save(checkpoint, file), cached=False)
        self._replace_latest(temporary, (checkpoint["saved_at"], checkpoint["step"]), tiers)

    def _replace_latest(self, temporary: Path, order: tuple[float, int], tiers: list[str]) -> None:
        """Rename a checkpoint to latest.pt, keep the one before as the backup, and delete older ones of each tier."""
        latest, (_, step) = self.folder / LATEST, order
        try:
            for name in tiers:
                link_file(temporary, self.folder / name)
            # The user may have moved latest.pt.
            if self.latest_step not in (None, step) and latest.exists():
                link_file(latest, self.folder / BACKUP)
            os.replace(temporary, latest)
        except BaseException:
            temporary.unlink(missing_ok=True)  # or the next save would overwrite the files that are linked to it
            raise
        fsync_folder(self.folder)  # only now is it durable, so only now may older files go
        self.latest_step = step
        self.orders |= dict.fromkeys([LATEST, *tiers], order)
        there = {name: at for name, at in self.orders.items() if (self.folder / name).exists()}
        for name in too_old(there, self.keep, self.keep_epochs):
            (self.folder / name).unlink(missing_ok=True)

    def _record(self, content: str, best: int | None) -> None:
        try:
            if best is not None:
                self.unlinked = content, best
                if self.latest_step != best:
                    raise OSError(f"step {best} was not saved")
                link_file(self.folder / LATEST, self.folder / BEST)
                fsync_folder(self.folder)
                self.unlinked = None
            # Last: a best model is linked again after a kill in between, because its validation is not recorded.
            replace_file(self.folder / EVALUATIONS, lambda file: file.write(f"{content}\n".encode()))
        except Exception as error:  # as in _save
            self.log.warn(f"{self.folder}: {EVALUATIONS} or {BEST} was not written: {error}")
            return
        if best is not None and self.uploads:
            self.uploads.start()
