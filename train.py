"""Train a GPT. The run can be killed at any instant and resumes from its last save, usually about a minute old.

    python train.py --config quickstart                          # a laptop CPU or one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # continue, perhaps on another number of GPUs
    python train.py --help                                       # all options

A step runs total_batch_size tokens forward and backward in micro-steps, averages the gradients over the ranks and
makes one update. Learning rate, data order and dropout masks follow from the configuration and the step, so they are
not stored. A checkpoint holds everything else: model, optimizer, loss scaler and TrainState.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataloader import BatchLoader, Mixture, Rows, RowStream, Spread
from generate import sample_texts
from hellaswag_eval import Suite, load_suites
from model import GPT, GPTConfig, new_model
from optim import make_optimizer, state_shapes
from steadygpt.base.options import UserError, run_cli
from steadygpt.base.progress import say
from steadygpt.base.retry import brief
from steadygpt.base.text import some
from steadygpt.checkpoint.files import FORMAT_VERSION, TrainState, check_tensors, trained_with
from steadygpt.checkpoint.host_copy import HostCopy, fill, restore_optimizer
from steadygpt.checkpoint.saves import Saves
from steadygpt.checkpoint.table import print_checkpoints
from steadygpt.config import TrainConfig, parse_args
from steadygpt.convert.weights import load_cropped
from steadygpt.data.tokenizer import Tokenizer, tokenizer_on_all
from steadygpt.log.runlog import RunLog
from steadygpt.log.tensorboard import FOLDER as TENSORBOARD
from steadygpt.machine import parallel
from steadygpt.machine.device import autocast, evaluating, profiled, seed
from steadygpt.machine.digests import Corrupted, combined, compare_replicas
from steadygpt.machine.gradient_sum import GradientSum
from steadygpt.machine.ranks import Ranks, Stopped, StopSignal, end_with_torchrun, joined, lost_rank
from steadygpt.run.history import WITHOUT_TENSORS, open_data, open_history
from steadygpt.run.memory import out_of_memory_explained
from steadygpt.run.outputs import open_outputs
from steadygpt.run.plan import Plan, forecast, set_up, settle, validation_rows
from steadygpt.run.repeats import Repeats
from steadygpt.run.results import Diverged, Results, StepResult, judge
from steadygpt.run.starts import epochs_of_sources, phase_of
from steadygpt.run.summary import summarize, validation_text

SAMPLE_TOKENS = 100
GO_ON = 75  # exit status: EX_TEMPFAIL of sysexits.h
MEASURE_S = 10.0  # of measured steps

# ---------------------------------------------------------------------------------------------------------------------
# a run


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of a run: model, data, optimizer, and the objects that log and save them."""

    plan: Plan
    config: TrainConfig  # the plan's
    ranks: Ranks
    rows: Mixture  # to train on
    model: GPT  # with the weights: not compiled, not wrapped
    forward: nn.Module  # the same model after compile and DDP
    gradient_sum: GradientSum | None  # with --deterministic
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of the loss, enabled with fp16 only
    state: TrainState  # the step, the rows consumed, losses: everything else that a checkpoint needs
    results: Results  # logs what steps measured, and updates the state's losses
    host_copy: HostCopy  # the memory that saves copy weights and optimizer state to
    stop: StopSignal  # raises Stopped on all ranks together
    log: RunLog
    saves: Saves  # when to save, and the thread that writes checkpoints
    tokenizer: Tokenizer | None  # for samples, tasks and bits per byte
    suites: list[tuple[int, Suite]]  # of tasks to score, each with the steps between two evaluations

    def autocast(self):
        return autocast(self.ranks.device, self.config.precision)

    def batches(self, rows: Rows, steps: Iterable[range]) -> BatchLoader:
        """Return this rank's batches of the rows of steps."""
        ranks, size = self.ranks, self.config.mini_batch_size
        return BatchLoader(rows, steps, size, ranks.device, ranks.rank, ranks.world_size)

    def training_batches(self) -> BatchLoader:
        """Return this rank's batches from the next step on."""
        return self.batches(self.rows, self.config.steps_from(self.state.rows_consumed))


def build_model(config: TrainConfig, shape: GPTConfig, ranks: Ranks) -> GPT:
    """Build the model on the device of each rank; restore() sets its weights."""
    with torch.device("meta") if config.is_fsdp else ranks.device:  # FSDP allocates only this rank's shards
        model = new_model(config, shape)
    if config.is_fsdp:
        parallel.shard(model, model.h, ranks, config.shards(ranks.world_size), config.precision)
    model.fill_rotary(ranks.device)  # a buffer, which to_empty() in parallel.shard left undefined
    return model


def build(plan: Plan, log: RunLog, held: ExitStack) -> Run:
    """Build the run that a plan describes. If it trains, `held` closes its files at the end."""
    config, data, ranks, device, history = plan.config, plan.data, plan.ranks, plan.ranks.device, plan.history
    set_up(config, device, plan.starts[-1]["threads"])
    if weights := history.weights:  # only here, so that a plan needs no download
        ranks.on_main(lambda: load_cropped(weights, plan.sketch.config))
    if loaded := history.checkpoint or weights:  # before any file is written
        kept, source = state_shapes(plan.sketch.config, config.optimizer), history.path or config.init_from
        ranks.on_main(lambda: check_tensors(loaded, source, plan.sketch, kept))
    max_hours, in_step = config.max_hours if plan.writes else 0, config.grad_accum_steps(ranks.world_size)
    stop = StopSignal(ranks, max_hours, log.beat, in_step)
    if plan.writes and ranks.is_main:  # its log also says when a signal has ended the run before the first step
        stop.raise_until_listen()
    opened = ranks.on_main(lambda: open_outputs(plan, log, held)) if plan.writes else None
    writer, repeats = opened or (None, Repeats(log))  # without a writer, saves do nothing
    saves = Saves(config, ranks, log, stop, writer)
    if not config.eval_only:
        ranks.on_main(lambda: log.say("\n".join(plan.lines())))
    reads_text = config.sample_freq or config.hellaswag_freq or config.core_freq or data.val_sets
    reads_text = reads_text and (plan.writes or config.eval_only)
    tokenizer = tokenizer_on_all(data.tokenizer_record, ranks, log.warn) if reads_text else None
    suites = load_suites(config, tokenizer, ranks, log.warn) if tokenizer else []
    model = build_model(config, plan.sketch.config, ranks)
    optimizer = make_optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = restore(plan, model, optimizer, scaler)
    state.best_val_loss = saves.best_val_loss(state.best_val_loss)
    forward: nn.Module = model.compiled() if config.compiles(device.type) else model
    gradient_sum = GradientSum(list(model.parameters()), ranks) if config.deterministic else None
    if ranks.world_size > 1 and not config.is_fsdp and not gradient_sum:
        forward = parallel.replicate(forward, ranks)
    identities = plan.starts[-1]["sources"]
    streams = {identities[shards.name][1]: stream for shards, stream, _ in data.sources}
    flops = plan.sketch.flops_per_token()
    run = Run(
        plan=plan, config=config, ranks=ranks, rows=Mixture(streams, phase_of(plan.starts), config.seed), model=model,
        forward=forward, gradient_sum=gradient_sum, optimizer=optimizer, scaler=scaler, state=state,
        results=Results(config, ranks, plan.schedule, state, log, flops, repeats), host_copy=HostCopy(ranks),
        stop=stop, log=log, saves=saves, tokenizer=tokenizer, suites=suites,
    )  # fmt: skip
    stop.listen()
    return run


# ---------------------------------------------------------------------------------------------------------------------
# step


def train_step(run: Run, batches: BatchLoader) -> StepResult:
    """Take the next optimizer step; its update is skipped if loss or gradient is not finite.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    config, ranks, state = run.config, run.ranks, run.state
    rows = config.step_at(state.rows_consumed)
    micro_batches = len(rows) // config.mini_batch_size
    micro_steps = micro_batches // ranks.world_size
    micro_batches_per_virtual_rank = micro_batches // config.virtual_ranks()
    # DDP and FSDP average the gradients over the ranks.
    loss_divisor = micro_batches if run.gradient_sum else micro_steps
    lr = run.plan.schedule.learning_rate(state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    # Gradients that are views (of DDP's buckets or of GradientSum) are set to zero in place.
    has_views = run.gradient_sum is not None or isinstance(run.forward, DistributedDataParallel)
    run.optimizer.zero_grad(set_to_none=not has_views)
    losses = []
    for micro_step in range(micro_steps):
        run.stop.check()
        # Seeded by (seed, step, micro-batch), so a resumed step repeats its dropout masks, also on other ranks.
        micro_batch = ranks.rank * micro_steps + micro_step
        seed(ranks.device, ((config.seed * 1_000_003 + state.step) * 65_537 + micro_batch) % 2**63)
        inputs, targets = batches.next()
        with parallel.gradient_sync(run.forward, last=micro_step == micro_steps - 1):
            with run.autocast():
                loss = run.forward(inputs, targets)
            run.scaler.scale(loss / loss_divisor).backward()
        losses.append(loss.detach())
        if run.gradient_sum and (micro_step + 1) % micro_batches_per_virtual_rank == 0:
            virtual_rank = micro_step // micro_batches_per_virtual_rank
            run.gradient_sum.end_virtual_rank(virtual_rank, micro_steps // micro_batches_per_virtual_rank)
    run.scaler.unscale_(run.optimizer)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)
    run.scaler.update()
    # Both numbers are of all ranks, so all ranks make the same decision when one of them has a NaN or a spike.
    measured = torch.stack([ranks.mean(torch.stack(losses)), parallel.full_tensor(norm)])
    mean_loss, grad_norm = measured.tolist()  # the host waits for the device, once a step
    loss_scale = run.scaler.get_scale() if run.scaler.is_enabled() else None
    result = judge(
        config, state.recent_losses, step=state.step, rows=rows, lr=lr, loss=mean_loss, grad_norm=grad_norm,
        loss_scale=loss_scale,
    )  # fmt: skip
    if result.updated:
        run.optimizer.step()  # in place of scaler.step(), which knows only of overflows
    state.step += 1
    state.rows_consumed = rows.stop
    return result


# ---------------------------------------------------------------------------------------------------------------------
# evaluation, on every rank; it restores the model's mode, and may use random numbers, because each step seeds its own


def validate(run: Run, val: RowStream) -> dict[str, float]:
    """Return the loss (val_loss) and the bits per byte (val_bpb) of a validation set, of rows that are spread over it.

    They do not depend on the number of ranks. Special tokens count in the loss, but not in the bits per byte, which
    are left out if no bytes are known.

    Raises: Stopped.
    """
    config, ranks = run.config, run.ranks
    B = config.mini_batch_size
    rows = validation_rows(config, val, len(run.plan.data.val_sets))
    rows_per_rank = math.ceil(rows / (B * ranks.world_size)) * B
    num_bytes = torch.zeros(0, dtype=torch.int64)
    if run.tokenizer:
        num_bytes = torch.from_numpy(run.tokenizer.num_bytes)
    bytes_of_token = nn.functional.pad(num_bytes, (0, run.model.config.padded_vocab_size - len(num_bytes)))
    bytes_of_token = bytes_of_token.to(ranks.device)
    one_step = [range(rows_per_rank * ranks.world_size)]
    sums = []
    with closing(run.batches(Spread(val, rows), one_step)) as batches, evaluating(run.forward), run.autocast():
        for first in range(ranks.rank * rows_per_rank, (ranks.rank + 1) * rows_per_rank, B):
            run.stop.check()
            inputs, targets = batches.next()
            losses = run.forward(inputs, targets, reduction="none")  # (B, T)
            sizes = bytes_of_token[targets]
            end = max(0, rows - first)
            losses[end:] = 0  # not cut from the inputs: a new shape would recompile the model
            sizes[end:] = 0
            sums.append(torch.stack([losses.sum(), losses.where(sizes > 0, 0).sum(), sizes.sum()]))
    sums_of_ranks = ranks.gather(torch.stack(sums).tolist())
    loss, nats, size = map(math.fsum, zip(*chain.from_iterable(sums_of_ranks), strict=True))  # rounded once
    scores = {"val_loss": loss / (rows * config.context_length)}
    if size:
        scores["val_bpb"] = nats / (math.log(2) * size)
    return scores


def evaluate(run: Run, everything: bool) -> None:
    """Run the evaluations that are due at this step: validation, tasks, a sample; or all of them.

    Raises: Stopped.
    """
    config, ranks, data, state, log, saves = run.config, run.ranks, run.plan.data, run.state, run.log, run.saves
    expected = run.plan.expected

    def due(freq: int) -> bool:
        return freq > 0 and (everything or (state.step > 0 and state.step % freq == 0))

    if not any(map(due, (config.eval_freq, config.hellaswag_freq, config.core_freq, config.sample_freq))):
        return
    log.note(doing="evaluating")
    if due(config.eval_freq) and data.val_sets:
        sets = {val.shards.name: validate(run, val.rows) for val in data.val_sets}
        found = {**next(iter(sets.values()))}  # the first set decides
        if len(sets) > 1:
            found |= {f"{key}/{name}": score for name, scores in sets.items() for key, score in scores.items()}
        epochs = epochs_of_sources(data, run.plan.starts, state.rows_consumed)
        best = saves.evaluated(state, found, lambda: save(run))
        text = validation_text(sets, best, epochs)
        band, warning = expected.compare(state.step, found["val_loss"]) if expected else ({}, "")
        if band:
            text += " | expected {expected_low:.4f} to {expected_high:.4f}".format_map(band)
        log.note(**band)
        log.evaluation(state.step, text, **found, **band, **{f"epoch/{name}": of for name, of in epochs.items()})
        if warning:
            log.warn(warning, event="off course")
        log.tell("histograms", state.step, run.model)
    for freq, suite in run.suites:
        if due(freq):
            with run.autocast():
                scores, text = suite.scored(run.model, ranks, run.stop.check)
            log.evaluation(state.step, text, **scores)
            saves.evaluated(state, scores, lambda: save(run))
    if due(config.sample_freq) and run.tokenizer:
        generator = torch.Generator(ranks.device).manual_seed(config.seed + state.step)
        with run.autocast():
            texts = sample_texts(run.model, run.tokenizer, config.sample_prompt, SAMPLE_TOKENS, generator, top_k=50)
        log.text(state.step, texts[0])
    run.results.restart_clock()


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run, step_ended: Callable[[], None]) -> None:
    """Save, evaluate and take steps, up to the last step.

    Raises: Stopped, Diverged or Corrupted, on all ranks together.
    """
    state, schedule, saves, results = run.state, run.plan.schedule, run.saves, run.results
    has_replicas = run.ranks.world_size > run.config.shards(run.ranks.world_size)
    results.restart_clock()
    with closing(run.training_batches()) as batches:
        while True:
            last = state.step >= run.config.max_steps
            # The save comes first, so that writing it overlaps the evaluation. A run that is resumed from this save
            # repeats the evaluation, because it may not have finished.
            tiers = schedule.tiers(state.step, state.rows_consumed)  # file names, such as that of an epoch
            if saves.is_due(state.step, is_special=last or bool(tiers)):
                save(run)
            elif has_replicas and run.config.check_steps and state.step % run.config.check_steps == 0:
                check_replicas(run)
            evaluate(run, everything=last)
            if last:
                return
            results.add(train_step(run, batches))
            step_ended()


def run_to_end(run: Run) -> int:
    """Train until the run finishes, stops or diverges; then save, report how it ended and return the exit status."""
    config, ranks, log, saves = run.config, run.ranks, run.log, run.saves
    trace = Path(config.checkpoint_dir, TENSORBOARD, f"rank{ranks.rank}.pt.trace.json.gz")
    status, reason = "failed", "interrupted"
    log.status("running")
    try:
        try:
            with profiled(config.profile, trace, log.say) as step_ended:
                train(run, step_ended)
            ending = "finished", ""
        except Stopped as stopped:
            ending = "stopped", stopped.reason
            if stopped.reason == "saves failed":
                ending = "failed", stopped.reason
                log.warn(f"{config.checkpoint_dir}: the run stops, because saves fail. Fix the disk, then resume")
        except Diverged as diverged:
            run.state.step, run.state.rows_consumed = diverged.step, diverged.row  # where the weights still are
            ending = "failed", str(diverged)
            log.warn(diverged.advice(config))
        if not saves.is_saved(run.state.step):  # waits for the save in flight
            save(run)
        status, reason = ending
        if not saves.is_saved(run.state.step):
            status, reason = "failed", f"{reason}; the last save failed".removeprefix("; ")
    except Corrupted as corrupted:  # also of the last save
        reason = str(corrupted)
        advice = (
            "a memory or a chip is wrong. Nothing of this is saved; resume with --resume latest without that machine"
        )
        log.warn(f"step {run.state.step}: {reason}; {advice}", event="corruption")
        return 1
    except Exception as error:
        reason = lost_rank(error, config.timeout_minutes) or brief(error)
        raise
    finally:
        saves.wait_alone()
        run.results.repeats.report()
        end, *summary = summarize(run.results, saves, run.model.num_parameters(), status, reason)
        log.status(status, reason, summary, step=run.state.step)
        log.say("\n".join([end, *summary]))
    is_for_others = status == "stopped" and run.stop.is_for_others()
    saves.finish_uploads()
    if is_for_others:  # else torchrun, and a loop around it, would take the run for finished here
        say(f"{reason} came to another machine; exit status {GO_ON}, so that torchrun starts this one again")
        return GO_ON
    return 0 if status != "failed" else 1


# ---------------------------------------------------------------------------------------------------------------------
# saving and resuming


def save(run: Run) -> None:
    """Copy the run to host memory, and write it in the background.

    Raises: Corrupted.
    """
    tiers = run.plan.schedule.tiers(run.state.step, run.state.rows_consumed)
    run.saves.save(run.state.step, lambda: capture(run), tiers)


def check_replicas(run: Run) -> dict[str, int]:
    """Compare the ranks that should have the same weights and optimizer state; return the digests of the whole.

    The step's record has one digest of them, which a repeated step is compared with.

    Raises: Corrupted.
    """
    digests = compare_replicas(run.model, run.optimizer, run.ranks, run.config.shards(run.ranks.world_size))
    run.results.digests[run.state.step] = combined(digests)
    return digests


def capture(run: Run) -> dict:
    """Copy a checkpoint's content to rank 0's host memory, on all ranks; it is valid until the next capture.

    Raises: Corrupted.
    """
    digests = check_replicas(run)
    return {
        "format_version": FORMAT_VERSION,
        **asdict(run.state),
        **run.host_copy.copy(run.model, run.optimizer),
        "elapsed_s": run.state.total_s(),
        "scaler": run.scaler.state_dict(),
        "model_config": asdict(run.model.config),
        "lr": run.optimizer.param_groups[0]["lr"],
        "epoch": run.plan.schedule.epochs(run.state.rows_consumed),
        "data_fingerprint": run.plan.fingerprint,
        "starts": run.plan.starts,
        "digests": digests,
        **run.plan.data.tokenizer_record._asdict(),
    }


def restore(plan: Plan, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> TrainState:
    """Load what capture() saved. With --init_from load only weights; otherwise draw new ones."""
    config, history, ranks = plan.config, plan.history, plan.ranks
    checkpoint = history.checkpoint
    saved = checkpoint or history.weights
    if saved:
        fill(model, saved["model"].__getitem__, ranks)
    else:
        torch.manual_seed(config.seed)
        fill(model, model.initial_weight, ranks)
    if checkpoint and not config.eval_only:
        restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
        if checkpoint["scaler"]:
            scaler.load_state_dict(scaler.state_dict() | checkpoint["scaler"])
        # Of what is now on the device: under FSDP, a rank has only its shards.
        on_device = compare_replicas(model, optimizer, ranks, config.shards(ranks.world_size))
        expected = checkpoint["digests"]
        changed = [name for name, number in on_device.items() if expected.get(name, number) != number]
        if changed:
            raise UserError(
                f"{history.path}: {', '.join(some(changed, 'tensor'))} changed on the way to {ranks.device}; "
                "its memory or the host's is wrong. Resume on another machine"
            )
    state = TrainState()
    if checkpoint:
        state = TrainState(**{name: checkpoint[name] for name in TrainState.__annotations__})
        before, now = history.starts[-1], plan.starts[-1]
        if trained_with(before).rows_per_step != config.rows_per_step or before["shares"] != now["shares"]:
            state.bad_steps = 0  # these count only steps of one batch size and mixture
    if saved:  # unmap the file: later saves replace it, and the disk has its space back
        saved |= WITHOUT_TENSORS
    if history.is_fork:  # the best model is in the other folder
        state.best_val_loss = None
    return state


# ---------------------------------------------------------------------------------------------------------------------
# main


def measure(run: Run) -> float:
    """Return the seconds per step, extrapolated from steps with one micro-step and steps with several."""
    config, ranks, micro_steps = run.config, run.ranks, run.config.grad_accum_steps(run.ranks.world_size)
    few = min(4, micro_steps)
    step_s: dict[int, list[float]] = {1: [], few: []}  # by the number of micro-steps

    def seconds_of(count: int) -> float:
        start_s = time.perf_counter()
        tokens = config.total_batch_size // micro_steps * count
        train_step(replace(run, config=replace(config, total_batch_size=tokens)), batches)
        return time.perf_counter() - start_s

    run.log.say("timing some steps ...")
    with closing(run.training_batches()) as batches:
        seconds_of(1)  # compiles, and allocates memory
        start_s = time.perf_counter()
        while ranks.broadcast(not step_s[few] or time.perf_counter() - start_s < MEASURE_S):  # by the clock of rank 0
            for count, seconds in step_s.items():
                seconds.append(seconds_of(count))
    one_s = fmean(step_s[1])
    few_s = fmean(step_s[few])
    return few_s + (micro_steps - few) * (few_s - one_s) / max(1, few - 1)


def launch(plan: Plan, held: ExitStack) -> int:
    """Train, or with --dry_run or --eval_only print the plan, time a step or evaluate; return the exit status."""
    config, history, log = plan.config, plan.history, RunLog(plan.config, plan.ranks)
    if plan.is_finished and not config.eval_only:
        ended = f"this run is finished, at step {history.step:,}"
        log.say(f"{config.checkpoint_dir}: {ended}. To continue, raise --max_steps.")
    elif config.dry_run == "plan":
        plan.ranks.on_main(lambda: log.say("\n".join([*plan.lines(), *forecast(plan)])))
    elif config.dry_run == "measure":
        log.say("\n".join(forecast(plan, measure(build(plan, log, held)))))
    elif config.eval_only:
        log.say(f"{history.path or config.init_from} at step {history.step:,}:")
        evaluate(build(plan, log, held), everything=True)
    else:
        return run_to_end(build(plan, log, held))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    end_with_torchrun()
    config, given = parse_args(sys.argv[1:] if argv is None else argv)
    if config.list_checkpoints:
        return print_checkpoints(Path(config.checkpoint_dir), config.mirror, config.verbose)
    with joined(config.device, config.timeout_minutes) as ranks, ExitStack() as held:
        history = open_history(config, given, ranks, held)
        data = open_data(history, ranks)
        plan = settle(history, data, ranks)
        with out_of_memory_explained(plan.config, plan.sketch, ranks):
            try:
                return launch(plan, held)
            except Stopped as stopped:  # --dry_run measure or --eval_only: run_to_end() handles it in training
                return 128 + signal.Signals[stopped.reason]


if __name__ == "__main__":
    run_cli(main)
