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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import tiktoken
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hellaswag_eval
from convert_hf import check_fits, read_weights
from dataloader import BatchLoader, Data, RowStream, open_data
from generate import sample_texts
from model import GPT, GPTConfig
from optim import make_optimizer, skips_on_device, update_unless
from steadygpt.base.options import run_cli, shown_options
from steadygpt.base.retry import brief
from steadygpt.checkpoint.files import FORMAT_VERSION, Captured, TrainState, check_weights, git_commit
from steadygpt.checkpoint.host_copy import HostCopy, fill, restore_optimizer
from steadygpt.checkpoint.saves import Saves
from steadygpt.checkpoint.table import print_checkpoints
from steadygpt.config import TrainConfig, parse_args, preset_named
from steadygpt.data.tokenizer import tokenizer_on_all
from steadygpt.log.runlog import RunLog
from steadygpt.machine import parallel
from steadygpt.machine.device import autocast, evaluating, profiled, use_fp8
from steadygpt.machine.loss import IGNORED_TARGET
from steadygpt.machine.ranks import Ranks, Stopped, StopSignal, end_with_torchrun, joined
from steadygpt.run.forecast import measure_step_s
from steadygpt.run.memory import out_of_memory_explained
from steadygpt.run.outputs import open_outputs, verified
from steadygpt.run.plan import Plan, settle, validation_rows
from steadygpt.run.results import Diverged, Judge, Pending, Results
from steadygpt.run.schedule import Schedule, learning_rate
from steadygpt.run.start import Start, find_start
from steadygpt.run.summary import summarize

SAMPLE_TOKENS = 100

# ---------------------------------------------------------------------------------------------------------------------
# a run


@dataclass(frozen=True)
class Run:
    """A run in progress. `model` is the bare GPT, `forward` the same model after compile and DDP."""

    config: TrainConfig
    ranks: Ranks
    data: Data
    schedule: Schedule
    model: GPT
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    state: TrainState
    judge: Judge
    host_copy: HostCopy
    results: Results
    stop: StopSignal
    log: RunLog
    saves: Saves
    fingerprint: dict | None = None  # of the shards, on rank 0
    tokenizer: tiktoken.Encoding | None = None  # for samples and tasks
    tasks: Mapping[str, list[hellaswag_eval.Tree]] = field(default_factory=dict)  # to score, by name

    def autocast(self):
        return autocast(self.ranks.device, self.config.precision)

    def batches(self, rows: RowStream, first_row: int = 0) -> BatchLoader:
        """Return this rank's batches of a stream of rows."""
        ranks = self.ranks
        return BatchLoader(rows, self.config.mini_batch_size, first_row, ranks.rank, ranks.world_size, ranks.device)


def build_model(config: TrainConfig, shape: GPTConfig, ranks: Ranks) -> GPT:
    """Build the model on the device of each rank; restore() sets its weights."""
    fsdp = config.sharding == "fsdp"
    with torch.device("meta") if fsdp else ranks.device:  # FSDP allocates only this rank's shards
        model = GPT(shape, config.activation_checkpointing, config.loss_chunk_size, initialize=False)
    if config.precision == "fp8":
        use_fp8(model.h, ranks.device)
    if fsdp:
        shards = config.shards(ranks.world_size)
        parallel.shard(model, model.h, ranks, shards, config.precision, config.cpu_offload)
    model.fill_rotary(ranks.device)
    return model


def build_run(plan: Plan, log: RunLog, held: ExitStack) -> Run:
    """Build what a plan describes; `held` closes the files of a run that trains."""
    start, data, schedule, ranks = plan.start.downloaded(plan.ranks, read_weights), plan.data, plan.schedule, plan.ranks
    config, device = start.config, ranks.device
    stop = StopSignal(ranks, config.max_hours if config.trains else 0, log.beat)
    fingerprint = verified(data, start, ranks) if config.trains else None
    saves = open_outputs(start, plan.sketch, log, stop, held) if config.trains else Saves(config, ranks, log, stop)
    if not config.eval_only:
        log.say("\n".join(plan.lines()))
    reads_text = config.dry_run == "off" and (config.sample_freq or config.hellaswag_freq)
    tokenizer = tokenizer_on_all(data.tokenizer, ranks, log.warn) if reads_text else None
    tasks = hellaswag_eval.load(config, tokenizer, ranks, log.warn) if tokenizer and config.hellaswag_freq else {}
    model = build_model(config, plan.sketch.config, ranks)
    optimizer = make_optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = restore(start, model, optimizer, scaler, ranks)
    state.best_val_loss = saves.best_val_loss(state.best_val_loss)
    forward: nn.Module = model.compiled() if config.compiles(device.type) else model
    if ranks.world_size > 1 and config.sharding == "ddp":
        forward = parallel.replicate(forward, ranks)
    judge = Judge(config, device, state.recent_losses, state.bad_steps)
    late = int(device.type == "cuda" and skips_on_device(optimizer, device))
    results = Results(config, ranks, schedule, state, log, plan.sketch.flops_per_token(), late)
    stop.listen()
    return Run(
        config, ranks, data, schedule, model, forward, optimizer, scaler, state, judge, HostCopy(device), results,
        stop, log, saves, fingerprint, tokenizer, tasks,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# step


def train_step(run: Run, batches: BatchLoader) -> Pending:
    """Take one optimizer step; its update is skipped if loss or gradient is not finite. On CUDA the host never waits.

    Raises: Stopped on all ranks together; the weights are unchanged.
    """
    config, ranks, step = run.config, run.ranks, run.state.step
    micro_steps = config.grad_accum_steps(ranks.world_size)
    # Seeded by (seed, step, rank), so a resumed step repeats its dropout masks.
    torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + ranks.rank) % 2**63)
    lr = learning_rate(config, step, run.schedule.max_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    keeps_gradients = isinstance(run.forward, DistributedDataParallel)  # in its buckets
    run.optimizer.zero_grad(set_to_none=not keeps_gradients)
    loss_sum = torch.zeros((), device=ranks.device)
    for micro_step in range(micro_steps):
        run.stop.check()
        inputs, targets = batches.next()
        with parallel.gradient_sync(run.forward, last=micro_step == micro_steps - 1):
            with run.autocast():
                loss = run.forward(inputs, targets) / micro_steps
            run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    run.scaler.unscale_(run.optimizer)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.grad_clip or math.inf)
    run.scaler.update()
    loss_scale = run.scaler.scale(torch.ones((), device=ranks.device)) if run.scaler.is_enabled() else None
    # Loss and norm are global, so all ranks make the same decision when one of them has a NaN or a spike.
    mean_loss = ranks.sum(loss_sum) / ranks.world_size
    skipped, numbers = run.judge(mean_loss, parallel.full_tensor(norm).to(ranks.device), loss_scale)
    run.host_copy.wait_before_update()
    update_unless(skipped, run.optimizer)
    rows = run.state.rows_consumed + run.schedule.rows_per_step
    return Pending(step, rows, lr, numbers, run.scaler.is_enabled())


# ---------------------------------------------------------------------------------------------------------------------
# evaluation: every rank calls these functions; they restore the model's mode, and every step seeds its own randomness


def validate(run: Run, val: RowStream) -> float:
    """Return the mean loss of the first eval_tokens of the val shards, independent of the number of ranks.

    Raises: Stopped.
    """
    config, ranks = run.config, run.ranks
    rows, B, losses = validation_rows(config, val), config.mini_batch_size, []
    rows_at_once = B * ranks.world_size
    with closing(run.batches(val)) as batches, evaluating(run.forward), run.autocast():
        for turn in range(math.ceil(rows / rows_at_once)):
            run.stop.check()
            inputs, targets = batches.next()
            targets = targets.clone()  # inputs and targets are views of one buffer
            first_row = turn * rows_at_once + ranks.rank * B
            targets[max(0, rows - first_row) :] = IGNORED_TARGET  # masked, not cut: a new shape would recompile
            losses.append(run.forward(inputs, targets, reduction="sum"))
    return ranks.sum(torch.stack(losses).cpu().double().sum()).item() / (rows * config.context_length)


def evaluate(run: Run, last: bool) -> None:
    """Run whichever of validation, tasks and sampling is due.

    Raises: Stopped.
    """
    config, ranks, state, log, saves = run.config, run.ranks, run.state, run.log, run.saves

    def due(freq: int) -> bool:
        return freq > 0 and (last or (state.step > 0 and state.step % freq == 0))

    if not any(map(due, (config.eval_freq, config.hellaswag_freq, config.sample_freq))):
        return
    run.results.flush()
    log.note(doing="evaluating")
    if due(config.eval_freq) and run.data.val:
        val_loss = validate(run, run.data.val)
        best = config.trains and val_loss < (math.inf if state.best_val_loss is None else state.best_val_loss)
        state.val_loss = val_loss if math.isfinite(val_loss) else None
        state.best_val_loss = val_loss if best else state.best_val_loss
        log.evaluation(state.step, f"val loss {val_loss:.4f}{' (best so far)' * best}", val_loss=val_loss)
        log.histograms(state.step, run.model)
        if best and saves.saved_step != state.step:
            save(run)
        saves.record(state.step, {"val_loss": val_loss}, best)
    for task, trees in run.tasks.items() if due(config.hellaswag_freq) else ():
        with run.autocast():
            scores = hellaswag_eval.evaluate(run.model, trees, ranks, run.stop.check)
        log.evaluation(state.step, f"{hellaswag_eval.TASKS[task].title} {scores}", **scores.metrics(task))
        saves.record(state.step, scores.metrics(task))
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

    Raises: Stopped or Diverged, on all ranks together.
    """
    state, schedule, saves, results = run.state, run.schedule, run.saves, run.results
    results.restart_clock()
    with closing(run.batches(run.data.train, state.rows_consumed)) as batches:
        while True:
            last = state.step >= schedule.max_steps
            # The save comes first, so that writing it overlaps the evaluation. A run that is resumed from this save
            # repeats the evaluation, because it may not have finished.
            milestones = schedule.milestones(state.step, state.rows_consumed)
            if saves.is_due(state.step, milestones, last):
                save(run, milestones)
            evaluate(run, last)
            if last:
                return results.flush()
            try:
                results.add(train_step(run, batches))
            except Stopped:
                results.flush()
                raise
            state.step += 1
            state.rows_consumed += schedule.rows_per_step
            step_ended()


def run_to_end(run: Run) -> int:
    """Train until the run finishes, stops or diverges, save, and report how it ended; return the exit status."""
    config, ranks, log, saves = run.config, run.ranks, run.log, run.saves
    trace = Path(config.tensorboard_dir, config.run_name, f"rank{ranks.rank}.pt.trace.json.gz")
    status, reason = "failed", "interrupted"
    log.status("running")
    log.measure_system()
    try:
        try:
            with profiled(config.profile, trace, log.say) as step_ended:
                train(run, step_ended)
            ending = "finished", ""
        except Stopped as stopped:
            ending = "stopped", stopped.reason
        except Diverged as diverged:
            ending = "failed", f"{diverged.bad_steps} consecutive steps with a non-finite loss or gradient"
            log.warn(diverged.advice(config))
        if not saves.is_saved(run.state.step):
            save(run)
        status, reason = ending if saves.is_saved(run.state.step) else ("failed", "the last save failed")
    except Exception as error:
        reason = brief(error)
        raise
    finally:
        saves.close()
        end, *summary = summarize(run.results, saves, run.model.num_parameters(), status, reason)
        log.status(status, reason, summary, step=run.state.step)
        log.say("\n".join([end, *summary]))
    saves.finish_uploads()
    return 0 if status != "failed" else 1


# ---------------------------------------------------------------------------------------------------------------------
# saving and resuming


def save(run: Run, milestones: Sequence[str] = ()) -> None:
    """Start to save the state of the run; a checkpoint belongs to the results of all of its steps."""
    run.results.flush()
    run.saves.save(run.state.step, lambda: capture(run), milestones)


def capture(run: Run) -> Captured:
    """Start to copy the content of a checkpoint to host memory, valid until the next capture. All ranks call this."""
    tensors, copied = run.host_copy.start(run.model, run.optimizer, run.ranks)
    content = {
        "format_version": FORMAT_VERSION,
        **asdict(run.state),
        **tensors,
        "elapsed_s": run.state.total_s(),
        "scaler": run.scaler.state_dict(),
        "model_config": asdict(run.model.config),
        "train_config": shown_options(run.config),
        "epoch": run.schedule.epochs(run.state.rows_consumed),
        "world_size": run.ranks.world_size,
        "data_fingerprint": run.fingerprint,
        "tokenizer": run.data.tokenizer,
        "torch_version": str(torch.__version__),
        "git_commit": git_commit(),
        "saved_at": time.time(),
    }
    return Captured(content, copied)


def restore(
    start: Start, model: GPT, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, ranks: Ranks
) -> TrainState:
    """Set what capture() saves, from the checkpoint or the weights that the run starts from, or draw new weights."""
    checkpoint, loaded = start.checkpoint, start.checkpoint or start.weights
    if loaded:
        check_weights(loaded["model"], model, ranks)
        fill(model, loaded["model"].__getitem__, ranks)
    else:
        torch.manual_seed(start.config.seed)
        fill(model, model.initial_weight, ranks)
    if checkpoint and start.config.trains:
        restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
        if checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
    return TrainState.of(checkpoint)


# ---------------------------------------------------------------------------------------------------------------------
# main


def make_plan(config: TrainConfig, given: Mapping[str, str], ranks: Ranks, held: ExitStack) -> Plan:
    """Find where a run starts, and settle what it will do. `held` keeps the folder of its checkpoints locked.

    Raises: UserError.
    """
    start = find_start(config, given, ranks, held, read_weights)
    data = ranks.on_each(lambda: open_data(start.config))
    shape = start.config.shape(data.vocab_size)
    if start.weights:
        check_fits(start.weights, config.init_from, shape, data.tokenizer)
    with torch.device("meta"):
        sketch = GPT(shape, initialize=False)
    return settle(start, given, data, sketch, ranks, held)


def measure(run: Run) -> float:
    """Return the seconds of a step of the run, from a few steps with fewer micro-steps."""

    def take_step(config: TrainConfig) -> None:
        train_step(replace(run, config=config), batches).result()

    run.log.say("measuring the time of a step ...")
    with closing(run.batches(run.data.train)) as batches:
        return measure_step_s(take_step, run.config, run.ranks)


def launch(plan: Plan, held: ExitStack) -> int:
    """Train, or do what is asked instead: print the plan, measure a step, evaluate; return the exit status."""
    start, config, max_steps = plan.start, plan.start.config, plan.schedule.max_steps
    log = RunLog(config, plan.ranks, max_steps)
    if not config.eval_only and start.is_finished(max_steps, plan.ranks):
        log.say(f"{config.checkpoint_dir}: this run is finished, at step {start.step}. Try a larger --max_steps.")
    elif config.dry_run == "plan":
        log.say("\n".join([*plan.lines(), *plan.forecast()]))
    elif config.dry_run == "measure":
        log.say("\n".join(plan.forecast(measure(build_run(plan, log, held)))))
    elif config.eval_only:
        log.say(f"{start.path or config.init_from} at step {start.step or 0:,}:")
        evaluate(build_run(plan, log, held), last=True)
    else:
        return run_to_end(build_run(plan, log, held))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    end_with_torchrun()
    config, given = parse_args(sys.argv[1:] if argv is None else argv)
    if config.list_checkpoints:
        return print_checkpoints(Path(config.checkpoint_dir), config.mirror, config.verbose)
    with (
        preset_named(config.config, given),
        joined(config.device, config.timeout_minutes) as ranks,
        ExitStack() as held,
    ):
        plan = make_plan(config, given, ranks, held)
        with out_of_memory_explained(plan.start.config, plan.sketch, ranks):
            try:
                return launch(plan, held)
            except Stopped:  # in a measurement or an evaluation; a run has its own end
                return 130


if __name__ == "__main__":
    run_cli(main)
