"""Saves of a run: when, what, and the waits for saves and uploads. Every rank calls each function."""

import time
from collections.abc import Callable
from dataclasses import asdict

from steadygpt.base.text import command
from steadygpt.checkpoint.files import BEST
from steadygpt.log.metrics import METRICS
from steadygpt.log.runlog import RunLog
from steadygpt.machine.ranks import Ranks, Requests
from steadygpt.mirror.uploads import Uploads
from steadygpt.run.run import Run
from steadygpt.run.schedule import epochs, names_of_save


def ask_for_save(run: Run) -> None:
    """On rank 0, ask for a timed save if one is due, and ask to stop if saves can no longer succeed."""
    if not run.writer:
        return
    reason = run.writer.reason_to_stop()
    if reason:
        run.requests.ask(reason)
    run.requests.save = run.state.step > 0 and run.writer.is_due()


def is_best(run: Run) -> bool:
    """Return whether the current weights have the lowest validation loss; False on ranks other than 0."""
    state = run.state
    if run.writer is None or state.validated_on != run.validated_on:
        return False
    return run.writer.is_best(state.scores.get("val_loss"), state.validated_on)


def save_if_due(run: Run, is_due: bool) -> None:
    """Save the run if `is_due`, or if a named checkpoint is due at its step, under all names that are due."""
    state = run.state
    names = names_of_save(run.config, run.rows_per_epoch, state)
    is_resumed_here = state.step > 0 and not run.meter.steps
    if run.writer and is_resumed_here:  # only names that a kill prevented; the others stay
        names = run.writer.missing(names)
    if is_best(run):
        names.append(BEST)
    # Without scores, is_best() is False on all ranks.
    if is_resumed_here or state.scores:  # otherwise all ranks have the same names
        names = run.ranks.broadcast(names)
    if is_due or names:
        save(run, names)


def save(run: Run, names: list[str]) -> None:
    """Copy the run to host memory, and write it in the background as latest.pt and under further names."""
    start_s = time.monotonic()
    wait_for_save(run)  # the copy reuses the memory that the writer reads
    ready_s = time.monotonic()
    content = content_of(run)
    run.log.flush()  # a checkpoint must not be newer than the log of the steps that led to it
    if run.writer:
        content["metrics_bytes"] = run.log.size_of(METRICS)
        run.writer.start(content, names)
    if not run.config.background_upload:
        wait_for_save(run)
    if run.writer and run.saved:  # the first save also allocates memory, so its pause does not count
        run.writer.note_pause(time.monotonic() - ready_s)
    if not run.config.background_upload:
        wait_for_uploads(run.uploads, lambda: bool(run.requests.asked), run.ranks, run.log)
    run.saved = (run.state.step, dict(run.state.scores))
    run.requests.save = False
    run.meter.paused_s += time.monotonic() - start_s


def content_of(run: Run) -> dict:
    """Copy a checkpoint's content to rank 0's host memory; the copy is valid until the next call."""
    return {
        **run.fixed_content,
        **asdict(run.state),
        **run.host_copy.copy(run.model, run.optimizer),
        "elapsed_s": run.state.total_s(),
        "scaler": run.scaler.state_dict(),
        "epoch": epochs(run.state.rows_consumed, run.rows_per_epoch),
    }


def is_saved(run: Run) -> bool:
    """Wait for the save in flight, and return whether the current step is durable."""
    wait_for_save(run)
    is_newest = run.saved == (run.state.step, run.state.scores)
    return is_newest and not run.ranks.any(run.writer is not None and run.writer.failed > 0)


def wait_for_save(run: Run) -> None:
    """Wait on all ranks until no save is in flight.

    The ranks communicate every second, so a save may take longer than their time-out. Meanwhile status.json is renewed,
    so a slow disk does not look like a hang.
    """
    while run.ranks.any(_is_writing(run)):
        run.log.beat()


def wait_on_this_rank(run: Run) -> None:
    """Wait on this rank only, after an error that other ranks may not have had."""
    while _is_writing(run):
        run.log.beat()


def _is_writing(run: Run) -> bool:
    """Wait for up to a second, and return whether a save of this rank is still in flight."""
    return run.writer is not None and not run.writer.wait(timeout_s=1)


def finish_uploads(uploads: Uploads | None, requests: Requests, log: RunLog) -> None:
    """Upload all that is left at the end of a run, until uploads make no progress or the user stops them.

    Args:
        uploads: None on ranks other than 0, and without a mirror.
    """
    requests.take_interrupt()  # forget the signal that has ended the run
    if uploads:
        uploads.start(is_last=True)
        log.say("waiting for uploads; Ctrl-C skips them. All checkpoints are in the local folder")
    wait_for_uploads(uploads, requests.take_interrupt, requests.ranks, log)
    if uploads and not uploads.is_done():
        advice = "an earlier warning says why"
        if uploads.thread.is_alive():
            rest = f"{command('scripts/upload_manager.py')} upload-all --mirror {uploads.mirror.url}"
            advice = f"upload the rest with {rest}"
        log.warn(f"not everything is uploaded; {advice}")


def wait_for_uploads(uploads: Uploads | None, is_stopped: Callable[[], bool], ranks: Ranks, log: RunLog) -> None:
    """Wait on all ranks until nothing is left to upload, no upload makes progress, or is_stopped() on a rank."""
    while ranks.any(bool(uploads and uploads.is_busy())) and not ranks.any(is_stopped()):
        time.sleep(0.02)
        log.beat()
