"""Train a GPT. The run can be killed at any instant and resumes from its last save, usually about a minute old.

    python train.py --config quickstart                          # a laptop CPU or one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # continue, perhaps on another number of GPUs
    python train.py --help                                       # all options

A step runs total_batch_size tokens forward and backward in micro-steps, averages the gradients over the ranks and
makes one update. Learning rate, data order and dropout masks follow from the configuration and the step, so they are
not stored. A checkpoint holds everything else: model, optimizer, loss scaler and TrainState.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dataloader import BatchLoader, Mixture
from evaluation import Evaluation
from guard import Guard
from hellaswag_eval import Suite, load_suites
from model import GPT, GPTConfig
from optim import make_optimizer, state_shapes
from steadygpt.base.options import run_cli
from steadygpt.base.retry import brief
from steadygpt.checkpoint.files import TrainState, check_tensors
from steadygpt.checkpoint.host_copy import HostCopy
from steadygpt.checkpoint.saves import Saves
from steadygpt.checkpoint.table import print_checkpoints
from steadygpt.config import TrainConfig, parse_args
from steadygpt.convert.weights import load_cropped
from steadygpt.data.tokenizer import tokenizer_on_all
from steadygpt.log.runlog import RunLog
from steadygpt.log.tensorboard import FOLDER as TENSORBOARD
from steadygpt.machine import parallel
from steadygpt.machine.device import profiled
from steadygpt.machine.parallel import Corrupted
from steadygpt.machine.ranks import Ranks, Stopped, StopSignal, end_with_torchrun, joined, lost_rank
from steadygpt.run.capture import Capture, restore
from steadygpt.run.history import open_data, open_history
from steadygpt.run.launches import phase_of
from steadygpt.run.memory import out_of_memory_explained
from steadygpt.run.outputs import open_outputs
from steadygpt.run.plan import Plan, forecast, set_up, settle
from steadygpt.run.repeats import Repeats
from steadygpt.run.results import Diverged, Results, StepResult
from steadygpt.run.summary import summarize

# ---------------------------------------------------------------------------------------------------------------------
# a run


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its model and data, and the objects that guard, evaluate, log and save its steps."""

    plan: Plan
    rows: Mixture  # to train on
    model: GPT  # with the weights: not compiled, not wrapped
    forward: nn.Module  # the same model after compile and DDP
    optimizer: torch.optim.Optimizer
    state: TrainState  # the step, the rows consumed, losses: everything else that a checkpoint needs
    guard: Guard  # stops, seeds, sums over ranks, bad steps
    evaluation: Evaluation
    capture: Capture  # what a checkpoint holds
    saves: Saves  # when to save, and the thread that writes checkpoints
    results: Results  # logs what steps measured, and updates the state's losses
    log: RunLog

    @property
    def config(self) -> TrainConfig:
        return self.plan.config

    @property
    def ranks(self) -> Ranks:
        return self.plan.ranks

    def autocast(self):
        return self.plan.autocast()

    def training_batches(self) -> BatchLoader:
        """Return this rank's batches from the next step on."""
        return self.plan.batches(self.rows, self.config.steps_from(self.state.rows_consumed))


def build_model(config: TrainConfig, shape: GPTConfig, ranks: Ranks) -> GPT:
    """Build the model on the device of each rank; restore() sets its weights."""
    device = ranks.device
    if config.is_fsdp:  # which allocates only the shards of this rank
        device = torch.device("meta")
    with device:
        model = GPT(shape, config, initialize=False)
    if config.is_fsdp:
        parallel.shard(model, model.h, ranks, config.shards(ranks.world_size), config.precision)
    model.fill_rotary(ranks.device)  # a buffer, which to_empty() in parallel.shard left undefined
    return model


def check_start(plan: Plan) -> None:
    """Check on rank 0 that the checkpoint that a run resumes from, or the weights of --init_from, fit its model."""
    history = plan.history
    shape = plan.sketch.config
    if history.weights:  # loaded here, so that a plan needs no download
        load_cropped(history.weights, shape)
    content = history.checkpoint or history.weights
    if content:
        source = history.path or plan.config.init_from
        check_tensors(content, source, plan.sketch, state_shapes(shape, plan.config.optimizer))


def build(plan: Plan, log: RunLog, stack: ExitStack) -> Run:
    """Build the run that a plan describes. If it trains, `stack` closes its files at the end."""
    config = plan.config
    data = plan.data
    ranks = plan.ranks
    device = plan.ranks.device
    launch = plan.launches[-1]
    set_up(config, device)
    ranks.on_main(lambda: check_start(plan))  # before any file is written
    max_hours = config.max_hours if plan.writes else 0
    stop = StopSignal(ranks, max_hours, log.beat, config.grad_accum_steps(ranks.world_size))
    writer = None  # without which saves do nothing
    repeats = Repeats(log)
    if plan.writes:
        if ranks.is_main:  # so that the log also records a signal before the first step
            stop.raise_until_listen()
        outputs = ranks.on_main(lambda: open_outputs(plan, log, stack))
        if outputs:
            writer, repeats = outputs
    saves = Saves(config, ranks, log, stop, writer)
    if not config.eval_only:
        ranks.on_main(lambda: log.say("\n".join(plan.lines())))
    tokenizer = None
    suites: list[tuple[int, Suite]] = []
    needs_tokenizer = config.sample_freq or config.hellaswag_freq or data.val_sets
    if needs_tokenizer and (plan.writes or config.eval_only):
        tokenizer = tokenizer_on_all(data.tokenizer_record, ranks, log.warn)
    if tokenizer:
        suites = load_suites(config, tokenizer, ranks, log.warn)
    model = build_model(config, plan.sketch.config, ranks)
    optimizer = make_optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = restore(plan, model, optimizer, scaler)
    state.best_val_loss = saves.best_val_loss(state.best_val_loss)
    forward: nn.Module = model
    if config.compiles(device.type):
        forward = model.compiled()
    if ranks.world_size > 1 and not config.is_fsdp:
        forward = parallel.replicate(forward, ranks)
    streams = {}
    for source in data.sources:
        _, identity = launch["sources"][source.shards.name]
        streams[identity] = source.rows
    results = Results(config, ranks, plan.schedule, state, log, plan.sketch.flops_per_token(), repeats)
    run = Run(
        plan=plan,
        rows=Mixture(streams, phase_of(plan.launches), config.seed),
        model=model,
        forward=forward,
        optimizer=optimizer,
        state=state,
        guard=Guard(config, ranks, model, forward, optimizer, scaler, stop, state),
        evaluation=Evaluation(
            plan=plan, model=model, forward=forward, tokenizer=tokenizer, suites=suites, stop=stop, log=log, saves=saves
        ),
        capture=Capture(
            plan=plan,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            state=state,
            host_copy=HostCopy(ranks),
        ),
        saves=saves,
        results=results,
        log=log,
    )
    stop.listen()
    return run


# ---------------------------------------------------------------------------------------------------------------------
# step


def train_step(run: Run, batches: BatchLoader) -> StepResult:
    """Take the next optimizer step.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    lr = run.plan.schedule.learning_rate(run.state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    for inputs, targets in run.guard.batches(batches):
        with run.autocast():
            loss_terms = run.forward(inputs, targets)
        run.guard.backward(loss_terms)
    grad_norm = run.guard.clip_gradients(run.config.grad_clip)
    return run.guard.update(lr, grad_norm)


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run, after_step: Callable[[], None]) -> None:
    """Save, evaluate and take steps, up to the last step.

    Raises: Stopped, Diverged or Corrupted, on all ranks together.
    """
    state = run.state
    saves = run.saves
    results = run.results
    micro_batch = (run.config.mini_batch_size, run.config.context_length)
    parallel.settle_buckets(run.forward, run.ranks.device, micro_batch, run.autocast())
    results.restart_clock()
    with closing(run.training_batches()) as batches:
        while True:
            is_last = state.step >= run.config.max_steps
            # The save comes first, so that writing it overlaps the evaluation. A run that is resumed from this save
            # repeats the evaluation, because it may not have finished.
            tiers = run.plan.schedule.tiers(state.step, state.rows_consumed)  # file names, such as that of an epoch
            if saves.poll(state.step, is_special=is_last or bool(tiers)):
                save(run)
            if run.evaluation.run(state, is_last, lambda: save(run)):
                results.restart_clock()
            if is_last:
                return
            results.add(train_step(run, batches))
            after_step()


def train_and_save(run: Run) -> tuple[str, str]:
    """Train until the run finishes, stops or diverges, and save; return how it ended and why, as in status.json.

    Raises: Corrupted; nothing of it is saved.
    """
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
        if reason == "saves failed":
            status = "failed"
            run.log.warn(f"{config.checkpoint_dir}: the run stops, because saves fail. Fix the disk, then resume")
    except Diverged as diverged:
        status = "failed"
        reason = str(diverged)
        run.state.step = diverged.step  # where the weights still are
        run.state.rows_consumed = diverged.row
        run.log.warn(diverged.advice(config))
    if not run.saves.is_saved(run.state.step):  # waits for the save in flight
        save(run)
    if not run.saves.is_saved(run.state.step):
        status = "failed"
        reason = f"{reason}; the last save failed".removeprefix("; ")
    return status, reason


def run_to_end(run: Run) -> int:
    """Train until the run finishes, stops or diverges; then save, report how it ended and return the exit status."""
    log = run.log
    saves = run.saves
    status = "failed"
    reason = "interrupted"
    log.status("running")
    try:
        status, reason = train_and_save(run)
    except Corrupted as corrupted:  # also by the last save
        reason = str(corrupted)
        advice = (
            "a memory or a chip is wrong. Nothing of this is saved; resume with --resume latest without that machine"
        )
        log.warn(f"step {run.state.step}: {reason}; {advice}", event="corruption")
        return 1
    except Exception as error:
        reason = lost_rank(error, run.ranks, run.config.timeout_minutes) or brief(error)
        raise
    finally:
        saves.wait_alone()
        run.results.repeats.report()
        end, *summary = summarize(run.results, saves, run.model.num_parameters(), status, reason)
        log.status(status, reason, summary, step=run.state.step)
        log.say("\n".join([end, *summary]))
    saves.finish_uploads()
    return 1 if status == "failed" else 0


def save(run: Run) -> None:
    """Copy the run to host memory, and write it in the background.

    Raises: Corrupted.
    """
    tiers = run.plan.schedule.tiers(run.state.step, run.state.rows_consumed)
    run.saves.save(run.state.step, run.capture.content, tiers)


# ---------------------------------------------------------------------------------------------------------------------
# main


def carry_out(plan: Plan, stack: ExitStack) -> int:
    """Train, or with --dry_run or --eval_only print the plan or evaluate; return the exit status."""
    config = plan.config
    history = plan.history
    log = RunLog(config, plan.ranks)
    if plan.is_finished and not config.eval_only:
        ended = f"this run is finished, at step {history.step:,}"
        log.say(f"{config.checkpoint_dir}: {ended}. To continue, raise --max_steps.")
    elif config.dry_run:
        plan.ranks.on_main(lambda: log.say("\n".join([*plan.lines(), *forecast(plan)])))
    elif config.eval_only:
        log.say(f"{history.path or config.init_from} at step {history.step:,}:")
        run = build(plan, log, stack)
        run.evaluation.run(run.state, True, lambda: save(run))
    else:
        return run_to_end(build(plan, log, stack))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    end_with_torchrun()
    if argv is None:
        argv = sys.argv[1:]
    config, set_by = parse_args(argv)
    if config.list_checkpoints:
        return print_checkpoints(Path(config.checkpoint_dir), config.mirror, config.verbose)
    with joined(config.device, config.timeout_minutes) as ranks, ExitStack() as stack:
        history = open_history(config, set_by, ranks, stack)
        data = open_data(history, ranks)
        plan = settle(history, data, ranks)
        with out_of_memory_explained(plan.config, plan.sketch, ranks):
            try:
                return carry_out(plan, stack)
            except Stopped as stopped:  # --eval_only: run_to_end() handles it in training
                return 128 + signal.Signals[stopped.reason]


if __name__ == "__main__":
    run_cli(main)
