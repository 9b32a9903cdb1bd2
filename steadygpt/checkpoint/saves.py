"""When a run saves, and a writer that makes saves durable in the background."""

import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from steadygpt.base.durable import fsync_folder, link_file, replace_file, write_temporary
from steadygpt.base.options import UserError
from steadygpt.checkpoint import files
from steadygpt.checkpoint.evaluations import (
    EVALUATIONS,
    Evaluations,
    Scores,
    content_of,
    every_score,
    origin,
    read_evaluations,
    scores_of_run,
)
from steadygpt.checkpoint.uploads import Uploads
from steadygpt.config import TrainConfig
from steadygpt.log.runlog import RunLog
from steadygpt.machine.device import compute_alone
from steadygpt.machine.ranks import Ranks, StopSignal

PAUSE_SHARE = 0.01  # of the time that timed saves may pause training; slower saves are further apart
MAX_FAILED = 10  # consecutive failed saves, and intervals of timed saves without a good one, after which a run stops
# Temporary files that killed writers and downloads have left.
STALE = re.compile(
    r"\.((latest|latest_backup|best_model|stable|rolling_step_\d+|epoch_\d+|step_\d+-[\d.]+)\.pt|(evaluations|run|status)"
    r"\.json|upload)\.tmp"
)


class Saves:
    """Decides when a run saves, and waits for saves and uploads. Every rank calls each method; rank 0 has a writer."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, log: RunLog, stop: StopSignal, writer: "CheckpointWriter | None" = None
    ):
        self.config = config
        self.ranks = ranks
        self.log = log
        self.stop = stop
        self.writer = writer
        self.uploads = writer.uploads if writer else None
        self.step = -1  # of the newest save, perhaps still in flight
        self.captured_at_s = time.monotonic()  # when the newest save was copied to host memory
        self.count = 0  # saves in this launch
        self.interval_s = 60 * config.checkpoint_minutes  # between timed saves; 0: there are none
        self.paused_s = 0.0  # in this launch

    def poll(self, step: int, is_special: bool) -> bool:
        """Return whether the ranks save now, after `step` updates: because they agreed on it, or the step is special.

        Rank 0 first asks the ranks for a timed save if it is time for one, and to stop if saves keep failing. Several
        ranks agree on such a request at a later step, see StopSignal.
        """
        if self.writer:  # rank 0 decides
            now_s = time.monotonic()
            longest_s = MAX_FAILED * self.interval_s  # without a good save
            if self.writer.failed >= MAX_FAILED and now_s - self.writer.saved_at_s >= longest_s:
                self.stop.ask("saves failed")
            is_time = step > 0 and 0 < self.interval_s <= now_s - self.captured_at_s
            if is_time and self.writer.wait(timeout_s=0):
                self.stop.ask_save(self.count + 1)
        is_agreed = self.stop.saves_agreed > self.count
        return (is_agreed or is_special) and step != self.step

    def save(self, step: int, capture: Callable[[], dict], tiers: list[str]) -> None:
        """Save the run after `step` updates, as latest.pt and under the names in `tiers`; return once it is copied.

        Args:
            capture: copies the content of the checkpoint to host memory; called on all ranks.
        """
        start_s = time.monotonic()
        self.wait()  # the capture reuses the memory that the writer reads
        ready_s = time.monotonic()
        content = capture()
        self.log.flush()  # a checkpoint must not be newer than the log of the steps that led to it
        if self.writer:
            self.writer.submit(self.writer.save, step, content, tiers)
        if not self.config.background_upload:
            self.wait()
        # The pause excludes the wait, because timed saves begin only when none is in flight. The first save does not
        # count, because it also allocates memory.
        if self.count and self.interval_s:
            pause_s = time.monotonic() - ready_s
            self.interval_s = max(60 * self.config.checkpoint_minutes, pause_s / PAUSE_SHARE)
        if not self.config.background_upload:
            self._wait_for_uploads(lambda: bool(self.stop.asked))
        self.step = step
        self.captured_at_s = time.monotonic()
        self.count += 1
        self.paused_s += self.captured_at_s - start_s

    def record_evaluation(self, state: files.TrainState, scores: dict[str, float], save: Callable[[], object]) -> bool:
        """Record the scores of an evaluation, and return whether its val_loss, if it has one, is the lowest so far.

        If it is, best_model.pt becomes a link to the save of this step. `save` makes this save if there is none yet.
        """
        val_loss = scores.get("val_loss", math.inf)
        lowest = math.inf if state.best_val_loss is None else state.best_val_loss
        best = self.config.trains and val_loss < lowest
        if "val_loss" in scores:
            state.val_loss = val_loss if math.isfinite(val_loss) else None
        if best:
            # The save still has the lowest loss before: after a kill between this save and the link, the evaluation is
            # repeated, and its loss must be the lowest again.
            if self.step != state.step:
                save()
            state.best_val_loss = val_loss
            self.log.note(best_val_loss=val_loss)
        if self.writer:
            self.writer.submit(self.writer.record, state.step, scores, best)
        return best

    def best_val_loss(self, saved: float | None) -> float | None:
        """Return the lowest validation loss of the folder, also of steps that a return to an older checkpoint undoes.

        The loss in a checkpoint, `saved`, may be higher, because the checkpoint was saved before the evaluation of its
        step. Without a best_model.pt, which the user may have removed, there is no lowest loss.
        """
        losses = []
        if self.writer and self.writer.has_best():
            losses = [saved, *(scores.get("val_loss") for _, scores in every_score(self.writer.evaluations))]
        best = self.ranks.broadcast(min((loss for loss in losses if loss is not None), default=None))
        self.log.note(best_val_loss=best)
        return best

    def is_saved(self, step: int) -> bool:
        """Wait for the save in flight, and return whether `step` is durable."""
        self.wait()
        return step == self.step and not self.ranks.any(self.writer is not None and self.writer.failed > 0)

    def wait(self) -> None:
        """Wait on all ranks until no save is in flight.

        The ranks communicate every second, so a save may take longer than their time-out. Meanwhile status.json is
        renewed, so a slow disk does not look like a hang.
        """
        while self.ranks.any(self._is_writing()):
            self.log.beat()

    def wait_alone(self) -> None:
        """Wait on this rank only, after an error that other ranks may not have had."""
        while self._is_writing():
            self.log.beat()

    def _is_writing(self) -> bool:
        """Wait for up to a second, and return whether a save of this rank is still in flight."""
        return self.writer is not None and not self.writer.wait(timeout_s=1)

    def finish_uploads(self) -> None:
        """Upload all that is left at the end of a run, until uploads make no progress or the user stops them."""
        self.stop.take_interrupt()  # forget the signal that has ended the run
        if self.uploads:
            self.uploads.start(is_last=True)
            self.log.say("waiting for uploads; Ctrl-C skips them. All checkpoints are in the local folder")
        self._wait_for_uploads(self.stop.take_interrupt)
        if self.uploads and self.uploads.thread.is_alive() and not self.uploads.is_done():
            self.log.warn("not everything is uploaded; upload the rest with scripts/upload_manager.py upload-all")

    def _wait_for_uploads(self, is_stopped: Callable[[], bool]) -> None:
        """Wait on all ranks until nothing is left to upload, no upload makes progress, or is_stopped() on a rank."""
        while self.ranks.any(bool(self.uploads and self.uploads.is_busy())) and not self.ranks.any(is_stopped()):
            time.sleep(0.1)
            self.log.beat()


def stale_files(folder: Path) -> list[Path]:
    """Return the temporary files of killed writers in a folder."""
    paths = []
    for path in folder.glob(".*.tmp*"):
        if STALE.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            paths.append(path)
    return paths


class CheckpointWriter:
    """Writes in the background, one job at a time; used on rank 0 only."""

    def __init__(self, config: TrainConfig, launches: list[files.Launch], log: RunLog, uploads: Uploads | None = None):
        self.config = config
        self.launches = launches
        self.log = log
        self.uploads = uploads
        self.folder = Path(config.checkpoint_dir)
        for stale in stale_files(self.folder):
            stale.unlink()
        # Head.order of each checkpoint whose head can be read; other files are never deleted. The folder is scanned
        # once, because a save changes few names.
        self.orders = {file.path.name: file.order for file in files.scan(self.folder) if file.head}
        self.evaluations: Evaluations = {}
        self.failed = 0  # consecutive saves
        self.saved_at_s = time.monotonic()  # when the last good save ended, or when this writer was made
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=compute_alone)
        self.job: Future | None = None  # the newest one, which ends last

    def resume(self, checkpoint: dict, path: Path | None) -> None:
        """Make the checkpoint that the run resumes from the newest; its `path` is None if it is in another folder."""
        latest = self.folder / files.LATEST
        order = (checkpoint["saved_at"], checkpoint["step"])
        is_latest = path is not None and latest.exists() and latest.samefile(path)
        if not is_latest and os.path.lexists(latest):
            try:
                files.read_checkpoint(latest)
            except UserError:  # it is damaged, or cannot be read at this moment
                self.log.warn(f"{latest}: not a readable checkpoint; renamed {latest.rename(files.aside(latest)).name}")
        # The run begins in a new folder, or goes back to an older checkpoint. This choice must survive a kill before
        # the first save.
        if not is_latest or order < max(self.orders.values(), default=order):
            self._write(checkpoint, [])
        if path:  # a fork has no evaluations yet
            self.evaluations = read_evaluations(self.folder)
        for scores in self.evaluations_of_run().values():
            self.log.note(**scores)  # for the monitor, until the next evaluation
        if self.uploads:
            self.uploads.start()  # the choice of an older checkpoint is uploaded too

    def has_best(self) -> bool:
        """Return whether there is a best model, in the folder or in the mirror."""
        mirrored = self.uploads is not None and files.BEST in self.uploads.mirrored
        return mirrored or (self.folder / files.BEST).exists()

    def evaluations_of_run(self) -> dict[int, Scores]:
        """Return step -> scores of the steps that have led to the current one."""
        return scores_of_run(self.evaluations, self.launches)

    def submit(self, job: Callable[..., None], *args: object) -> None:
        """Queue a call of save() or record(), and return at once."""
        self.job = self.pool.submit(job, *args)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is in flight, or for `timeout_s`, and return whether all jobs are done."""
        return self.job is None or not wait([self.job], timeout_s).not_done

    def save(self, step: int, content: dict, tiers: list[str]) -> None:
        """Write the checkpoint of a step as latest.pt and under the file names in `tiers`."""
        start_s = time.monotonic()
        try:
            files.check_numbers(content)
            self._write(content, tiers)
        except Exception as error:  # training continues, and an exception in this thread would be lost
            self.failed += 1
            text = f"{self.folder / files.LATEST}: step {step} was not saved: {str(error) or type(error).__name__}"
            if not self.orders:
                text += "; nothing is saved yet"
            elif tiers:
                text += f"; older saves are intact, but there is no {' or '.join(tiers)}"
            else:
                text += "; older saves are intact"
            self.log.warn(text, event="save failed" if self.failed == 1 else "")
            return
        self.failed = 0
        self.saved_at_s = time.monotonic()
        self.log.say(f"saved step {step} as {', '.join([files.LATEST, *tiers])} in {self.saved_at_s - start_s:.1f} s")
        if self.uploads:
            self.uploads.start()

    def record(self, step: int, scores: dict[str, float], best: bool) -> None:
        """Write evaluations.json; if the step is the best one, first link best_model.pt to its save."""
        plain = {name: value if math.isfinite(value) else None for name, value in scores.items()}  # JSON has no NaN
        scores_by_step = self.evaluations.setdefault(origin(self.launches, step), {})
        scores_by_step.setdefault(step, {}).update(plain)
        self.log.note(**plain)
        try:
            if best:
                if files.read_head(self.folder / files.LATEST).step != step:
                    raise OSError(f"step {step} was not saved")
                link_file(self.folder / files.LATEST, self.folder / files.BEST)
                fsync_folder(self.folder)
            # Written last: after a kill in between, the evaluation is not recorded. So it is repeated, and the best
            # model is linked again.
            self._write_evaluations()
            if best and self.uploads:
                self.uploads.start()
        except Exception as error:  # as in save()
            self.log.warn(f"{self.folder}: {EVALUATIONS} or {files.BEST} was not written: {error}")

    def _write_evaluations(self) -> None:
        content = content_of(self.evaluations)
        replace_file(self.folder / EVALUATIONS, lambda file: file.write(content))

    def _write(self, content: dict, tiers: list[str]) -> None:
        """Write a checkpoint to latest.pt, keep the one before as the backup, and delete older ones of each tier."""
        latest = self.folder / files.LATEST
        step = content["step"]
        orders = self.orders
        # Later than all other checkpoints, even if the clock was set back.
        newest_s, _ = max(orders.values(), default=(0.0, 0))
        saved_at = max(time.time(), newest_s + 0.001)
        order = (saved_at, step)
        checkpoint = content | {"saved_at": saved_at}
        temporary = write_temporary(latest, lambda file: torch.save(checkpoint, file), cached=False)
        try:
            for name in tiers:
                link_file(temporary, self.folder / name)
                orders[name] = order
            # The user may have moved latest.pt meanwhile.
            if orders.get(files.LATEST, (0.0, step))[1] != step and latest.exists():
                link_file(latest, self.folder / files.BACKUP)
            os.replace(temporary, latest)
        except BaseException:
            temporary.unlink(missing_ok=True)  # a file of gigabytes, which would stay until the next save
            raise
        fsync_folder(self.folder)  # only now is it durable, so only now may older files go
        orders[files.LATEST] = order
        for name in files.too_old(orders, self.config.keep_checkpoints, self.config.keep_epochs):
            (self.folder / name).unlink(missing_ok=True)
            del orders[name]
