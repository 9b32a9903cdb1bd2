"""Train a GPT. The run can be killed at any instant and resumes from its last save, usually about a minute old.

    python train.py --config quickstart                          # a laptop CPU or one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # continue, perhaps on another number of GPUs
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
from steadygpt.run.saving import agree, finish_uploads, is_saved, save_if_due, wait_alone
from steadygpt.run.step import Diverged, StepResult, count_step, judge, log_step, restart_clock
from steadygpt.run.summary import summarize
from steadygpt.start.build import build, check_start, out_of_memory_explained
from steadygpt.start.data import Data, open_data
from steadygpt.start.find import IN_USE, Start, agreed_command, find_start, with_checkpoint_dir
from steadygpt.start.folder import open_folder
from steadygpt.start.plan import forecast, plan_lines
from steadygpt.start.settle import settle

# ---------------------------------------------------------------------------------------------------------------------
# a step


def train_step(run: Run, batches: BatchLoader) -> StepResult:
    """Take the next optimizer step, unless its loss or gradient forbids it.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    config = run.config
    step = run.state.step
    micro_steps = config.grad_accum_steps(run.ranks.world_size)
    lr = set_rates(run.optimizer, config, step)
    # The gradients of DDP are views of its buckets, so they are set to zero in place.
    run.optimizer.zero_grad(set_to_none=not isinstance(run.forward, DistributedDataParallel))
    means: list[Tensor] = []  # of the terms of the loss, (terms,) of each micro-step
    for micro_step in range(micro_steps):
        run.requests.check()
        # Seeded by (seed, step, micro-batch), so a resumed step repeats its dropout masks, also on other ranks.
        micro_batch = run.ranks.rank * micro_steps + micro_step
        seed(run.ranks.device, ((config.seed * 1_000_003 + step) * 65_537 + micro_batch) % 2**63)
        inputs, targets = batches.next()
        with gradient_sync(run.forward, last=micro_step == micro_steps - 1):
            with run.autocast():
                terms = run.forward(inputs, targets)
            mean = mean_terms(terms)
            run.scaler.scale(mean.sum() / micro_steps).backward()  # DDP and FSDP average over the ranks
        means.append(mean.detach())
    run.scaler.unscale_(run.optimizer)
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)
    run.scaler.update()
    columns = dict(zip(terms, torch.stack(means, dim=1), strict=True))  # name -> (micro_steps,)
    columns |= {"grad_norm": grad_norm}  # a further scalar here is logged with the step
    columns = {name: full_tensor(column) for name, column in columns.items()}
    # The numbers are means over all ranks, so all make the same decision when one of them has a NaN or a spike.
    numbers, run.requests.agreed = run.ranks.step_numbers(columns, run.requests.own())
    loss_scale = run.scaler.get_scale() if run.scaler.is_enabled() else None
    result = judge(config, run.state.recent_losses, step, lr, loss_scale, **numbers)
    if result.updated:
        run.optimizer.step()  # in place of scaler.step(), which knows only of overflows
    return result


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run, after_step: Callable[[], None]) -> None:
    """Evaluate, save and take steps, up to the last step.

    Raises: Stopped or Diverged, on all ranks together.
    """
    restart_clock(run)
    with closing(run.training_batches()) as batches:
        while True:
            is_last = run.state.step >= run.config.max_steps
            is_time = agree(run)
            if evaluate(run, everything=is_last):
                restart_clock(run)
            save_if_due(run, is_time or is_last)
            if is_last:
                return
            result = train_step(run, batches)
            log_step(run, result)
            count_step(run, result)
            after_step()


def train_and_save(run: Run) -> tuple[str, str]:
    """Train until the run finishes, stops or diverges, and save; return how it ended and why, as in status.json."""
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
        if run.requests.asked and not run.meter.steps:  # the signal has ended a compiler, too
            status = "stopped"
            reason = run.requests.REASONS[run.requests.asked]
        else:
            reason = lost_rank(error, run.ranks, run.config.timeout_minutes) or brief(error)
            raise
    finally:
        wait_alone(run)
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
        command, set_by, notes = agreed_command(command, set_by, ranks)
        command = ranks.from_main(lambda: with_checkpoint_dir(command, set_by))
        lock = None
        if command.trains:
            lock = ranks.on_main(lambda: stack.enter_context(lock_folder(Path(command.checkpoint_dir), IN_USE)))
        start = find_start(command, set_by, ranks)  # only reads; skip it at first reading
        data = open_data(start, ranks)
        config = settle(start, data, ranks)
        start.notes += notes
        log = stack.enter_context(RunLog(config, ranks, lock))
        if start.checkpoint and not config.eval_only and start.state.step >= config.max_steps:
            status = ranks.from_main(lambda: read_status(Path(config.checkpoint_dir)))
            if status.get("status") == "finished":  # otherwise a kill has cut off its end
                return end_finished(start, config, ranks, log)
        ranks.on_main(lambda: check_start(start, config, data))
        if not config.eval_only:
            ranks.on_main(lambda: log.say("\n".join(plan_lines(start, config, data, ranks))))
        if config.dry_run:
            ranks.on_main(lambda: log.say("\n".join(forecast(start, config, data, ranks))))
            return 0
        if ranks.is_main and config.trains:
            Requests.raise_until_listen()
        with out_of_memory_explained(config, ranks):
            return build_and_train(start, config, data, ranks, log)


def build_and_train(start: Start, config: TrainConfig, data: Data, ranks: Ranks, log: RunLog) -> int:
    """Build the run and train it to its end, or only evaluate it; return the exit status.

    At its return the model is freed, before the ranks leave their process group. If DDP held the last reference to the
    group, it would wait for the threads of gloo while it holds the GIL, which they may need.
    """
    run = build(start, config, data, ranks, log)
    if config.eval_only:
        return evaluate_only(run, start)
    ranks.on_main(lambda: open_folder(run, start))
    # Unmapped, so that the disk space of the file is free once later saves replace it.
    start.checkpoint = start.weights = None
    return train_to_end(run)


def end_finished(start: Start, config: TrainConfig, ranks: Ranks, log: RunLog) -> int:
    """Say that the run is finished, and upload what its mirror lacks."""
    ended = f"this run is finished, at step {start.state.step:,}"
    log.say(f"{config.checkpoint_dir}: {ended}. To continue, raise --max_steps.")
    if config.mirror and config.trains:
        requests = Requests(ranks, max_hours=0)
        requests.listen()
        finish_uploads(ranks.on_main(lambda: open_uploads(start.run.id, config, log)), requests, log)
    return 0


def evaluate_only(run: Run, start: Start) -> int:
    """Evaluate the weights of a checkpoint, or of --init_from."""
    run.log.say(f"{start.path or run.config.init_from} at step {run.state.step:,}:")
    run.requests.listen()
    try:
        evaluate(run, everything=True)
    except Stopped as stopped:
        return 128 + signal.Signals[stopped.reason]
    return 0


if __name__ == "__main__":
    run_cli(main)
