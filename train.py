"""Train a GPT. The run can be killed at any instant and resumes from its last save, usually about a minute old.

    python train.py --config quickstart                          # a laptop CPU or one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # resume, on any number of GPUs
    python train.py --help                                       # all options

A step runs total_batch_size tokens forward and backward in micro-steps, averages the gradients over the ranks and
makes one update. Learning rate, data order and dropout masks follow from the configuration and the step, so they are
not stored. A checkpoint holds everything else: model, optimizer, loss scaler and TrainState.
"""

import steadygpt.preflight  # noqa: F401  # before all others

import math
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataloader import BatchLoader
from evaluation import evaluate
from optim import set_rates
from steadygpt.base.durable import lock_folder
from steadygpt.base.options import run_cli
from steadygpt.base.retry import brief
from steadygpt.config import TrainConfig, parse_args
from steadygpt.log.metrics import read_status
from steadygpt.log.runlog import RunLog
from steadygpt.log.tensorboard import FOLDER as TENSORBOARD
from steadygpt.machine.device import profiled, seed
from steadygpt.machine.loss import mean_terms
from steadygpt.machine.parallel import full_tensor, gradient_sync
from steadygpt.machine.ranks import Ranks, Requests, Stopped, end_with_torchrun, joined, lost_rank
from steadygpt.mirror.uploads import open_uploads
from steadygpt.monitor.table import print_checkpoints
from steadygpt.run.repeats import report
from steadygpt.run.run import Run
from steadygpt.run.saving import ask_for_save, finish_uploads, is_saved, save_if_due, wait_on_this_rank
from steadygpt.run.step import Diverged, StepResult, count_step, judge, log_step, restart_clock
from steadygpt.run.summary import summarize
from steadygpt.start.build import build, check_start, out_of_memory_explained
from steadygpt.start.data import Data, open_data
from steadygpt.start.find import IN_USE, Start, agreed_command, find_start
from steadygpt.start.folder import open_folder
from steadygpt.start.plan import forecast, plan_lines
from steadygpt.start.settle import Settled, settle

# ---------------------------------------------------------------------------------------------------------------------
# a step


def train_step(run: Run, batches: BatchLoader) -> StepResult:
    """Compute the gradients of the next step, and update the weights unless judge() skips the update.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    config = run.config
    step = run.state.step
    grad_accum_steps = config.grad_accum_steps(run.ranks.world_size)
    # Set the learning rate of this step.
    lr = set_rates(run.optimizer, config, step)
    # Reset the gradients. Under DDP they are views of its buckets, so zero them in place.
    run.optimizer.zero_grad(set_to_none=not isinstance(run.forward, DistributedDataParallel))
    means: list[Tensor] = []  # mean of each loss term, (terms,) per micro-step
    for micro_step in range(grad_accum_steps):
        run.requests.agree()
        # Seed with (seed, step, micro-batch): a resumed step repeats its dropout masks, on any number of ranks.
        micro_batch = run.ranks.rank * grad_accum_steps + micro_step
        seed(run.ranks.device, ((config.seed * 1_000_003 + step) * 65_537 + micro_batch) % 2**63)
        inputs, targets = batches.next()
        # Only the last micro-step averages the gradients over the ranks (DDP and FSDP).
        with gradient_sync(run.forward, last=micro_step == grad_accum_steps - 1):
            # Compute the loss of the micro-batch.
            with run.autocast():
                terms = run.forward(inputs, targets)
            mean = mean_terms(terms)
            # Accumulate its gradients.
            run.scaler.scale(mean.sum() / grad_accum_steps).backward()
        means.append(mean.detach())
    run.scaler.unscale_(run.optimizer)
    measured = dict(zip(terms, torch.stack(means, dim=1), strict=True))  # name -> (grad_accum_steps,)
    # Code that reads unclipped gradients goes here. Each scalar in `measured` is logged with the step; under FSDP,
    # gather it with full_tensor().
    # Clip the gradients.
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)
    measured["grad_norm"] = full_tensor(grad_norm)
    run.scaler.update()
    # Average the measurements over micro-steps and ranks, so that all ranks judge the step alike.
    numbers, run.requests.agreed = run.ranks.step_numbers(measured, run.requests.of_this_rank())
    # Decide whether to apply the update.
    loss_scale = run.scaler.get_scale() if run.scaler.is_enabled() else None
    result = judge(config, run.state.recent_losses, step, lr, loss_scale, numbers)
    if result.updated:
        # Update the weights, not with scaler.step(): judge() also skips NaN and spikes.
        run.optimizer.step()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run, after_step: Callable[[], None]) -> None:
    """Evaluate, save and take steps until max_steps.

    Raises: Stopped or Diverged, on all ranks together.
    """
    restart_clock(run)
    with closing(run.training_batches()) as batches:
        while True:
            is_last = run.state.step >= run.config.max_steps
            ask_for_save(run)
            save_now = run.requests.agree()
            if evaluate(run, everything=is_last):
                restart_clock(run)
            save_if_due(run, save_now or is_last)
            if is_last:
                return
            result = train_step(run, batches)
            log_step(run, result)
            count_step(run, result)
            after_step()


def train_and_save(run: Run) -> tuple[str, str]:
    """Train until the run finishes, stops or diverges, then save; return status and reason, as in status.json."""
    config = run.config
    trace = Path(config.checkpoint_dir, TENSORBOARD, f"rank{run.ranks.rank}.pt.trace.json.gz")
    status = "finished"
    reason = ""
    try:
        with profiled(config.profile, trace, run.log.say) as after_step:
            train(run, after_step)
    except Stopped as stopped:
        status = "stopped"
        reason = stopped.reason
        if reason == "folder lost":
            return "failed", f"{config.checkpoint_dir} was moved or deleted"
        if reason == "saves failed":
            status = "failed"
            run.log.warn(f"{config.checkpoint_dir}: the run stops, because saves fail. Fix the disk, then resume")
    except Diverged as diverged:
        status = "failed"
        reason = str(diverged)
        run.log.warn(diverged.advice(config))
    if not is_saved(run):  # waits for the save in flight
        save_if_due(run, True)
    if not is_saved(run):
        status = "failed"
        reason = f"{reason}; the last save failed".removeprefix("; ")
    return status, reason


def train_to_end(run: Run) -> int:
    """Train until the run finishes, stops or diverges; then save, report how it ended and return the exit status."""
    log = run.log
    status = "failed"
    reason = "interrupted"
    run.requests.listen()
    log.status("running")
    try:
        status, reason = train_and_save(run)
    except Exception as error:
        if run.requests.asked and not run.meter.steps:  # the signal also ended a compiler process
            status = "stopped"
            reason = run.requests.REASONS[run.requests.asked]
        else:
            reason = lost_rank(error, run.ranks, run.config.timeout_minutes) or brief(error)
            raise
    finally:
        wait_on_this_rank(run)
        if run.repeats:
            report(run.repeats, log)
        end, *summary = summarize(run, status, reason)
        log.status(status, reason, summary, step=run.state.step)
        log.say("\n".join([end, *summary]))
    finish_uploads(run.uploads, run.requests, log)
    return 1 if status == "failed" else 0


# ---------------------------------------------------------------------------------------------------------------------
# main


def main(argv: Sequence[str] | None = None) -> int:
    end_with_torchrun()
    command, set_by = parse_args(sys.argv[1:] if argv is None else argv)
    if command.list_checkpoints:
        return print_checkpoints(Path(command.checkpoint_dir), command.mirror, command.verbose)
    with joined(command.device, command.timeout_minutes) as ranks, ExitStack() as stack:
        command, set_by, ignored = agreed_command(command, set_by, ranks)
        lock = None
        with ranks.sharing_errors():
            if ranks.is_main and command.trains:
                lock = stack.enter_context(lock_folder(Path(command.checkpoint_dir), IN_USE))
        # Decide what to do; skip it on a first reading. Nothing is written yet, except downloads.
        start, asked, found = find_start(command, set_by, ranks)
        data = open_data(start, asked, ranks)
        settled = settle(start, asked, data, ranks)
        config = settled.of_launch
        if has_finished(start, config, ranks):
            return end_finished(start, config, ranks)
        log = stack.enter_context(RunLog(config, ranks, lock))
        # Print the plan.
        with ranks.sharing_errors():
            if ranks.is_main:
                notes = [*found, *settled.notes, *ignored, *check_start(start, config, data)]
                if not config.eval_only:
                    log.say("\n".join([*plan_lines(start, config, data, ranks), *notes]))
                if config.dry_run:
                    log.say("\n".join(forecast(start, config, data, ranks)))
        if config.dry_run:
            return 0
        # Build and train.
        if ranks.is_main and config.trains:
            Requests.raise_until_listen()
        with out_of_memory_explained(config, ranks):
            return build_and_train(start, settled, data, ranks, log)


def build_and_train(start: Start, settled: Settled, data: Data, ranks: Ranks, log: RunLog) -> int:
    """Build the run and train it to its end, or only evaluate it; return the exit status.

    Returning frees the model before the ranks leave their process group. If DDP held the last reference to the group,
    freeing it would wait for gloo's threads while holding the GIL, which they may need.
    """
    run = build(start, settled, data, ranks, log)
    if run.config.eval_only:
        return evaluate_only(run, start)
    with ranks.sharing_errors():
        if ranks.is_main:
            open_folder(run, start)
    # Unmap the checkpoint, so that its disk space is freed once later saves replace the file.
    start.checkpoint = start.weights = None
    return train_to_end(run)


def has_finished(start: Start, config: TrainConfig, ranks: Ranks) -> bool:
    """Return whether all steps are taken and status.json says "finished", which a kill may have prevented."""
    if not start.checkpoint or start.downloaded or config.eval_only or start.state.step < config.max_steps:
        return False
    status = read_status(Path(config.checkpoint_dir)) if ranks.is_main else {}
    return ranks.broadcast(status.get("status") == "finished")


def end_finished(start: Start, config: TrainConfig, ranks: Ranks) -> int:
    """Report that the run is finished, upload what its mirror lacks, and return the exit status."""
    log = RunLog(config, ranks)  # without the folder's lock, so status.json stays as it is
    ended = f"this run is finished, at step {start.state.step:,}"
    log.say(f"{config.checkpoint_dir}: {ended}. To continue, raise --max_steps.")
    if config.mirror and config.trains:
        requests = Requests(ranks, max_hours=0)
        requests.listen()
        uploads = None
        with ranks.sharing_errors():
            if ranks.is_main:
                uploads = open_uploads(start.identity.id, config, log)
        finish_uploads(uploads, requests, log)
    return 0


def evaluate_only(run: Run, start: Start) -> int:
    """Evaluate the weights of a checkpoint, or of --init_from, and return the exit status."""
    run.log.say(f"{start.path or run.config.init_from} at step {run.state.step:,}:")
    run.requests.listen()
    try:
        evaluate(run, everything=True)
    except Stopped as stopped:
        return 128 + signal.Signals[stopped.reason]
    return 0


if __name__ == "__main__":
    run_cli(main)
