"""Train a GPT. The run can be killed at any instant and resumes from its last checkpoint, at most a minute old.

    python train.py --config quickstart                          # a laptop CPU or one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # continue, perhaps on another number of GPUs
    python train.py --help                                       # every option

A step runs total_batch_size tokens forward and backward in micro-steps, averages the gradients over the ranks and
makes one update. Learning rate, data order and dropout masks follow from the configuration and the position, so
they are never stored. A checkpoint holds everything else: model, optimizer, loss scaler and TrainState.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hellaswag_eval
from config import TrainConfig, parse_args, preset_named
from convert_hf import check_fits, read_weights
from dataloader import BatchLoader, Data, RowStream, open_data
from generate import sample_texts
from model import GPT
from steadygpt import checkpoint as checkpoints
from steadygpt import distributed
from steadygpt.cli import run_cli
from steadygpt.device import autocast, evaluating, process_age_s, profiled, use_fp8
from steadygpt.distributed import Ranks, Silent, Stopped, StopSignal
from steadygpt.forecast import forecast, measure_step_s
from steadygpt.loss import IGNORED_TARGET
from steadygpt.mirror import Mirror
from steadygpt.optim import make_optimizer, skips_on_device, update_unless
from steadygpt.plan import describe, out_of_memory_explained
from steadygpt.retry import brief
from steadygpt.runlog import Printed
from steadygpt.saves import Saves
from steadygpt.schedule import Schedule, learning_rate, make_schedule
from steadygpt.stability import SPIKE_WINDOW, Diverged, Judge, Pending
from steadygpt.start import Start, find_start, folder_of_resumed_file, open_outputs, settled
from steadygpt.state import HostCopy, fill, restore_optimizer
from steadygpt.summary import summarize
from steadygpt.table import checkpoint_table, mirror_table
from steadygpt.tokenizer import tokenizer_on_all

SAMPLE_TOKENS = 100

# ---------------------------------------------------------------------------------------------------------------------
# setup


@dataclass(frozen=True)
class Training:
    """What a step needs. `model` is the bare GPT, `forward` the same model after compile and DDP."""

    config: TrainConfig
    ranks: Ranks
    model: GPT
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    judge: Judge
    host_copy: HostCopy
    late: int  # steps whose results are read later, so that a GPU need not wait for the host

    def autocast(self):
        return autocast(self.ranks.device, self.config.precision)


def build_training(start: Start, data: Data, ranks: Ranks) -> Training:
    """Build the model and its optimizer, and load the checkpoint or the weights that the run starts from, if any."""
    config, device = start.config, ranks.device
    checkpoint, loaded = start.checkpoint, start.checkpoint or start.weights
    fsdp = config.sharding == "fsdp"
    with torch.device("meta") if fsdp else device:  # FSDP allocates only this rank's shards
        shape, lean = config.shape(start.vocab_size(data)), (config.activation_checkpointing, config.loss_chunk_size)
        model = GPT(shape, False, *lean)
    if config.precision == "fp8":
        use_fp8(model.h, device)
    if fsdp:
        shards = config.shards(ranks.world_size)
        distributed.shard(model, model.h, ranks, shards, config.precision, config.cpu_offload)
    if loaded:
        checkpoints.check_weights(loaded["model"], model, ranks)
        fill(model, loaded["model"].__getitem__, ranks)
    else:
        torch.manual_seed(config.seed)
        fill(model, model.initial_weight, ranks)
    optimizer = make_optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    if checkpoint:
        restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
        if checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
    forward: nn.Module = model.compiled() if config.compiles(device.type) else model
    if ranks.world_size > 1 and not fsdp:
        forward = distributed.replicate(forward, ranks)
    past = checkpoint or {"recent_losses": [], "bad_steps": 0}
    judge = Judge(config, device, past["recent_losses"], past["bad_steps"])
    late = int(device.type == "cuda" and skips_on_device(optimizer, device))
    return Training(config, ranks, model, forward, optimizer, scaler, judge, HostCopy(device), late)


# ---------------------------------------------------------------------------------------------------------------------
# step


def train_step(training: Training, batches: BatchLoader, lr: float, step: int, stop: StopSignal) -> Pending:
    """Take one optimizer step; its update is skipped if loss or gradient is not finite. On CUDA the host never waits.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    t, config, ranks = training, training.config, training.ranks
    micro_steps = config.grad_accum_steps(ranks.world_size)
    # Seeded by (seed, step, rank), so a resumed step repeats its dropout masks.
    torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + ranks.rank) % 2**63)
    for group in t.optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    t.optimizer.zero_grad(set_to_none=not isinstance(t.forward, DistributedDataParallel))  # DDP: kept in its buckets
    loss_sum = torch.zeros((), device=ranks.device)
    for micro_step in range(micro_steps):
        stop.check()
        inputs, targets = batches.next()
        with distributed.gradient_sync(t.forward, last=micro_step == micro_steps - 1):
            with t.autocast():
                loss = t.forward(inputs, targets) / micro_steps
            t.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    t.scaler.unscale_(t.optimizer)
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), config.grad_clip or math.inf)
    t.scaler.update()
    loss_scale = t.scaler.scale(torch.ones((), device=ranks.device)) if t.scaler.is_enabled() else None
    # Loss and norm are global, so all ranks make the same decision when one of them has a NaN or a spike.
    mean_loss = ranks.sum(loss_sum) / ranks.world_size
    skipped, numbers = t.judge(mean_loss, distributed.full_tensor(norm).to(ranks.device), loss_scale)
    t.host_copy.wait_before_update()
    update_unless(skipped, t.optimizer)
    return Pending(step, lr, numbers, t.scaler.is_enabled())


# ---------------------------------------------------------------------------------------------------------------------
# evaluation: every rank calls these functions; they restore the model's mode, and every step seeds its own randomness


def validation_rows(config: TrainConfig, val: RowStream | None) -> int:
    """Return the number of rows of a validation: eval_tokens, or all rows if there are fewer."""
    wanted = max(1, config.eval_tokens // config.context_length)
    return min(wanted, val.rows_per_epoch or wanted) if val else 0


def validate(training: Training, val: RowStream, stop: StopSignal) -> float:
    """Return the mean loss of the first eval_tokens of the val shards, independent of the number of ranks.

    Raises: Stopped.
    """
    config, ranks = training.config, training.ranks
    rows, B, losses = validation_rows(config, val), config.mini_batch_size, []
    rows_at_once = B * ranks.world_size
    loader = BatchLoader(val, B, 0, ranks.rank, ranks.world_size, ranks.device)
    with closing(loader) as batches, evaluating(training.forward), training.autocast():
        for turn in range(math.ceil(rows / rows_at_once)):
            stop.check()
            inputs, targets = batches.next()
            targets = targets.clone()  # inputs and targets are views of one buffer
            first_row = turn * rows_at_once + ranks.rank * B
            targets[max(0, rows - first_row) :] = IGNORED_TARGET  # masked, not cut: a new shape would recompile
            losses.append(training.forward(inputs, targets, reduction="sum"))
    return ranks.sum(torch.stack(losses).cpu().double().sum()).item() / (rows * config.context_length)


def evaluate(run: "Run", last: bool) -> None:
    """Run whichever of validation, tasks and sampling is due.

    Raises: Stopped.
    """
    t, state, config, ranks = run.training, run.state, run.training.config, run.training.ranks

    def due(freq: int) -> bool:
        return freq > 0 and (last or (state.step > 0 and state.step % freq == 0))

    if not any(map(due, (config.eval_freq, config.hellaswag_freq, config.sample_freq))):
        return
    run.read_results()
    run.log.note(doing="evaluating")
    if due(config.eval_freq) and run.data.val:
        val_loss = validate(t, run.data.val, run.stop)
        best = val_loss < (math.inf if state.best_val_loss is None else state.best_val_loss)  # False for NaN
        state.val_loss = val_loss if math.isfinite(val_loss) else None
        state.best_val_loss = val_loss if best else state.best_val_loss
        run.log.evaluation(state.step, f"val loss {val_loss:.4f}{' (best so far)' * best}", val_loss=val_loss)
        run.log.histograms(state.step, t.model)
        run.saves.record(state.step, {"val_loss": val_loss}, best)
    for task, trees in run.tasks.items() if due(config.hellaswag_freq) else ():
        with t.autocast():
            scores = hellaswag_eval.evaluate(t.model, trees, ranks, run.stop.check)
        run.log.evaluation(state.step, f"{hellaswag_eval.TASKS[task].title} {scores}", **scores.metrics(task))
        run.saves.record(state.step, scores.metrics(task))
    if due(config.sample_freq) and run.tokenizer:
        generator = torch.Generator(ranks.device).manual_seed(config.seed + state.step)
        with t.autocast():
            texts = sample_texts(t.model, run.tokenizer, config.sample_prompt, SAMPLE_TOKENS, generator, top_k=50)
        run.log.text(state.step, texts[0])
    run.clock_s = time.perf_counter()  # the next step's time does not include this


# ---------------------------------------------------------------------------------------------------------------------
# the loop


@dataclass
class TrainState:
    """Everything that changes during training, besides the model, the optimizer and the loss scaler."""

    step: int = 0  # steps taken, skipped updates included
    rows_consumed: int = 0
    best_val_loss: float | None = None
    val_loss: float | None = None  # of the last validation
    loss: float | None = None  # of the last step that was finite
    elapsed_s: float = 0.0  # wall-clock of the earlier starts of this run
    recent_losses: list[float] = field(default_factory=list)  # the last SPIKE_WINDOW finite losses
    bad_steps: int = 0  # consecutive bad steps so far


@dataclass
class Run:
    """A run in progress: model, data, progress and outputs."""

    training: Training
    data: Data
    schedule: Schedule
    state: TrainState
    stop: StopSignal
    log: Any  # a RunLog on rank 0, a Silent object on the others
    saves: Saves
    fingerprint: dict | None  # of the shards, on rank 0
    tokenizer: Any  # None if there are no samples and no tasks
    tasks: dict[str, list[hellaswag_eval.Tree]]  # to score, by name
    unread: deque[Pending] = field(default_factory=deque)  # of the last Training.late steps
    clock_s: float = 0.0  # when the last step or evaluation ended

    def read_results(self, late: int = 0) -> None:
        """Log the results of all steps but the last `late`, and update the state that depends on them.

        Raises: Diverged after too many bad steps, with step and rows as before them; they never changed the weights.
        """
        state, rows_per_step = self.state, self.schedule.rows_per_step
        while len(self.unread) > late:
            result = self.unread.popleft().result()
            now_s = time.perf_counter()
            rows = state.rows_consumed - (state.step - result.step - 1) * rows_per_step
            self.log.step(result, now_s - self.clock_s, self.elapsed_s(), self.schedule.epochs(rows))
            self.clock_s = now_s
            if warning := result.warning(state.recent_losses):
                self.log.warn(warning, event="bad steps" if result.bad else "spike" if result.spike else "")
            state.bad_steps = state.bad_steps + 1 if result.bad else 0
            if result.finite:
                state.loss = result.loss
                state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
            if state.bad_steps >= self.training.config.max_bad_steps > 0:
                bad_steps, state.bad_steps = state.bad_steps, 0
                state.step, state.rows_consumed = result.step + 1 - bad_steps, rows - bad_steps * rows_per_step
                self.unread.clear()
                raise Diverged(bad_steps, state.step)

    def elapsed_s(self) -> float:
        """Return the wall-clock seconds of the run so far, over all starts."""
        return self.state.elapsed_s + process_age_s()


def train(run: Run, step_ended: Callable[[], None]) -> None:
    """Save, evaluate and take steps, up to the last step.

    Raises: Stopped or Diverged, on all ranks together.
    """
    t, state, schedule, ranks = run.training, run.state, run.schedule, run.training.ranks
    first_row, B = state.rows_consumed, t.config.mini_batch_size
    run.clock_s = time.perf_counter()
    with closing(BatchLoader(run.data.train, B, first_row, ranks.rank, ranks.world_size, ranks.device)) as batches:
        milestones: list[str] = []
        while True:
            last = state.step >= schedule.max_steps
            # The save comes first, so that writing it overlaps the evaluation. A run that is resumed from this save
            # repeats the evaluation, because it may not have finished.
            run.saves.save_if_due(state.step, milestones, last, run.read_results)
            evaluate(run, last)
            if last:
                return run.read_results()
            lr = learning_rate(t.config, state.step, schedule.max_steps)
            try:
                run.unread.append(train_step(t, batches, lr, state.step, run.stop))
            except Stopped:
                run.read_results()
                raise
            epochs_before = int(schedule.epochs(state.rows_consumed))
            state.step += 1
            state.rows_consumed += schedule.rows_per_step
            epochs = int(schedule.epochs(state.rows_consumed))
            milestones = [checkpoints.EPOCH.format(epochs)] * (epochs > epochs_before)
            milestones += [checkpoints.STABLE] * (state.step == schedule.stable_steps)
            run.read_results(t.late)
            step_ended()


# ---------------------------------------------------------------------------------------------------------------------
# main


@dataclass(frozen=True)
class Plan:
    """A run before it is built."""

    start: Start
    data: Data
    schedule: Schedule
    sketch: GPT  # on the meta device
    ranks: Ranks
    precision_elsewhere: str  # that the forecast assumes for well-known GPUs

    def describe(self) -> list[str]:
        config, data = self.start.config, self.data
        lines = describe(config, data, self.schedule, self.ranks, self.sketch, validation_rows(config, data.val))
        return [*lines, *self.start.notes]

    def forecast(self, step_s: float | None = None) -> list[str]:
        config, val_rows = self.start.config, validation_rows(self.start.config, self.data.val)
        step, elsewhere = self.start.step or 0, self.precision_elsewhere
        return forecast(config, self.schedule, self.ranks, self.sketch, step, val_rows, step_s, elsewhere)


def make_plan(config: TrainConfig, given: Mapping[str, str], ranks: Ranks, data: Data | None, held: ExitStack) -> Plan:
    """Find where a run starts and what it will do. `held` keeps its folder locked, and explains a lack of memory.

    Raises: UserError.
    """
    precision_elsewhere = config.precision if "precision" in given and config.precision != "auto" else "bf16"
    start = find_start(config, given, ranks, held, read_weights)
    data = data or ranks.on_each(lambda: open_data(start.config))
    shape = start.config.shape(start.vocab_size(data))
    if start.weights:
        check_fits(start.weights, config.init_from, shape, data.tokenizer)
    with torch.device("meta"):
        sketch = GPT(shape, initialize=False)
    start, schedule = settled(start, given, data, sketch, ranks, held)
    held.enter_context(out_of_memory_explained(start.config, sketch, ranks))
    return Plan(start, data, schedule, sketch, ranks, precision_elsewhere)


def build_run(plan: Plan, held: ExitStack) -> Run:
    """Build what a plan describes; `held` closes the files of a run that trains."""
    start, data, schedule, ranks, config = plan.start, plan.data, plan.schedule, plan.ranks, plan.start.config
    state = TrainState(**start.saved(TrainState))
    log: Any = Printed() if ranks.is_main else Silent()
    saves: Any = Silent()
    shards = None

    def capture() -> checkpoints.Captured:  # called once there is a run
        return checkpoints.capture(run)

    if config.trains:
        if ranks.is_main:  # whose log says how the run has ended, also before its first step
            StopSignal.interrupt()
        log, saves, shards = open_outputs(start, data, schedule.max_steps, plan.sketch, ranks, held, capture)
        log.say("\n".join(plan.describe()))
        state.best_val_loss = saves.best_val_loss(state.best_val_loss)
    else:  # without the optimizer's state
        log.say(f"{start.path or config.init_from} at step {state.step:,}:")
        start = replace(start, checkpoint=None, weights=start.checkpoint or start.weights)
        state.best_val_loss = -math.inf  # only a run has a best model
    reads_text = config.sample_freq or config.hellaswag_freq
    tokenizer = tokenizer_on_all(data.tokenizer, ranks, log) if reads_text else None
    tasks = hellaswag_eval.load(config, tokenizer, ranks, log) if tokenizer and config.hellaswag_freq else {}
    training = build_training(start, data, ranks)
    saves.stop = stop = StopSignal(ranks, config.max_hours if config.trains else 0, log.beat)
    run = Run(training, data, schedule, state, stop, log, saves, shards, tokenizer, tasks)  # capture() names it
    return run


def measure(training: Training, data: Data) -> float:
    """Return the seconds of a step of the run, from a few steps with fewer micro-steps."""
    t, ranks, B, stop = training, training.ranks, training.config.mini_batch_size, StopSignal(training.ranks, 0)
    with closing(BatchLoader(data.train, B, 0, ranks.rank, ranks.world_size, ranks.device)) as batches:

        def seconds_of(micro_steps: int) -> float:
            tokens = micro_steps * B * t.config.context_length * ranks.world_size
            start_s = time.perf_counter()
            shorter = replace(t, config=replace(t.config, total_batch_size=tokens))
            train_step(shorter, batches, t.config.min_lr, 0, stop).result()
            return time.perf_counter() - start_s

        return measure_step_s(seconds_of, t.config.grad_accum_steps(ranks.world_size), ranks)


def run_to_end(run: Run) -> int:
    """Train until the run finishes, stops or diverges, save, and report how it ended; return the exit status."""
    t, log, saves = run.training, run.log, run.saves
    trace = Path(t.config.tensorboard_dir, t.config.run_name, f"rank{t.ranks.rank}.pt.trace.json.gz")
    status, reason = "failed", "interrupted"
    log.status("running")
    log.measure_system()
    try:
        try:
            with profiled(t.config.profile, trace, log.say) as step_ended:
                train(run, step_ended)
            ending = "finished", ""
        except Stopped as stopped:
            ending = "stopped", stopped.reason
        except Diverged as diverged:
            ending = "failed", f"{diverged.bad_steps} consecutive steps with a non-finite loss or gradient"
            log.warn(diverged.advice(t.config))
        saves.finish(run.state.step)
        status, reason = ("failed", "the last save failed") if t.ranks.any(saves.failed) else ending
    except Exception as error:
        reason = brief(error)
        raise
    finally:
        saves.close()
        end, *summary = summarize(run, status, reason) if t.ranks.is_main else [""]
        log.status(status, reason, summary, step=run.state.step)
        log.say("\n".join([end, *summary]))
    saves.finish_uploads(run.stop)
    return 0 if status != "failed" else 1


def launch(config: TrainConfig, given: Mapping[str, str], ranks: Ranks, data: Data | None) -> int:
    """Train, or do what is asked instead: print the plan, measure a step, evaluate; return the exit status."""
    with ExitStack() as held:
        plan = make_plan(config, given, ranks, data, held)
        start, config, log = plan.start, plan.start.config, Printed() if ranks.is_main else Silent()
        if not config.eval_only and start.is_finished(plan.schedule.max_steps, ranks):
            log.say(f"{config.checkpoint_dir}: this run is finished, at step {start.step}. Try a larger --max_steps.")
            return 0
        if config.dry_run == "plan":
            log.say("\n".join([*plan.describe(), *plan.forecast()]))
            return 0
        start = start.downloaded(ranks, read_weights)
        if start.weights:
            check_fits(start.weights, config.init_from, plan.sketch.config, plan.data.tokenizer)
        plan = replace(plan, start=start)
        if config.dry_run == "measure":
            log.say("\n".join([*plan.describe(), "measuring the time of a step ..."]))
            step_s = measure(build_training(start, plan.data, ranks), plan.data)
            log.say("\n".join(plan.forecast(step_s)))
            return 0
        run = build_run(plan, held)
        if config.trains:
            return run_to_end(run)
        evaluate(run, last=True)
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    distributed.end_with_torchrun()
    config, given = parse_args(sys.argv[1:] if argv is None else argv)
    if config.list_checkpoints:
        folder = Path(config.checkpoint_dir)
        table = mirror_table(Mirror(config.mirror)) if config.mirror else checkpoint_table(folder, config.verbose)
        for line in table:
            print(line, flush=True)
        return 0
    config = folder_of_resumed_file(config, given)
    data = None
    with preset_named(config.config, given):
        # Report mistakes before waiting for other ranks, unless they are on other nodes, where they would wait in vain.
        if not config.resume and config.init_from == "scratch" and distributed.is_on_one_node():
            data = open_data(config)
            strict_warmup = given.get("warmup_steps") == "flag"
            world_size = distributed.world_size_of_environment()
            first = config.with_tokens_of_step(world_size).with_even_rows(given, world_size)
            make_schedule(first, data, world_size, strict_warmup=strict_warmup)
        with distributed.joined(config.device, config.timeout_minutes) as ranks:
            try:
                return launch(config, given, ranks, data)
            except Stopped:  # in a measurement or an evaluation; a run has its own end
                return 130


if __name__ == "__main__":
    run_cli(main)
