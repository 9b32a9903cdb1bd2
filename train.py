"""Train a GPT, killable at any instant.

    python train.py --config quickstart                          # a laptop CPU, one GPU
    torchrun --nproc_per_node=4 train.py --use_tensorboard       # four GPUs
    torchrun --nproc_per_node=4 train.py --resume latest         # go on, on any number of GPUs
    python train.py --help                                       # every option

A step is: total_batch_size tokens forward and backward in micro-steps, gradients averaged over the ranks, one AdamW
update. What follows from (config, step) is never stored: learning rate, data order, dropout. The rest is TrainState,
the model and the optimizer, and all of it is in each checkpoint.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config import TrainConfig, initial_config, parse_args, resume_config
from convert_hf import read_weights
from dataloader import BatchLoader
from evaluation import Evaluation
from model import GPT
from plan import (
    Data,
    Schedule,
    check_initial,
    check_start,
    describe,
    learning_rate,
    make_schedule,
    open_data,
)
from steadygpt.checkpoint import (
    BEST,
    EPOCH,
    FORMAT_VERSION,
    ROLLING,
    CheckpointWriter,
    capture_state,
    checkpoint_table,
    read_on_main,
    read_status,
    restore_optimizer,
    restore_weights,
    share,
    write_status,
)
from steadygpt.cli import UserError, run_cli
from steadygpt.device import autocast, choose_precision, peak_flops, peak_memory_bytes, profiled, use_fp8
from steadygpt.distributed import (
    Ranks,
    StopSignal,
    end_with_torchrun,
    full_tensor,
    gradient_sync,
    joined,
    world_size_of_environment,
)
from steadygpt.durable import lock_folder
from steadygpt.runlog import RunLog, duration_text
from steadygpt.stability import SPIKE_WINDOW, StepResult, loss_z

# ---------------------------------------------------------------------------------------------------------------------
# set-up: from a configuration to things that train


@dataclass
class TrainState:
    """All that changes while training, beside the model, the optimizer and the loss scaler."""

    step: int = 0  # updates made
    rows_consumed: int = 0
    best_val_loss: float | None = None
    val_loss: float | None = None  # of the last validation
    loss: float | None = None  # of the last step
    elapsed_s: float = 0.0  # in training steps, over all starts
    recent_losses: list[float] = field(default_factory=list)  # the last SPIKE_WINDOW, finite ones
    bad_steps: int = 0  # running, up to now


@dataclass(frozen=True)
class Trainer:
    """The parts of a step. `model` is the bare GPT; `forward` is it as compiled and wrapped for its ranks."""

    config: TrainConfig
    ranks: Ranks
    model: GPT
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: str

    def autocast(self):
        return autocast(self.ranks.device, self.precision)


def build_trainer(
    config: TrainConfig, data: Data, ranks: Ranks, checkpoint: dict | None, initial: dict | None
) -> Trainer:
    """Build the model and its optimizer, with the state of `checkpoint` or the weights of `initial`.

    Their tensors are needed on rank 0 only; None on every rank where there is no such checkpoint.
    """
    precision = choose_precision(config.precision, ranks.device)
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(config.seed)
    with ranks.device:
        model = GPT(data.model_config, initialize=checkpoint is None and initial is None)
    model.activation_checkpointing = config.activation_checkpointing
    model.loss_chunk_size = config.loss_chunk_size
    if precision == "fp8":
        use_fp8(model.h, ranks.device)
    sharded = config.sharding == "fsdp" and ranks.world_size > 1
    if sharded:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
        for block in model.h:
            fully_shard(block, offload_policy=offload)
        fully_shard(model, offload_policy=offload)
    optimizer = torch.optim.AdamW(
        model.optimizer_groups(config.weight_decay), lr=config.max_lr, betas=(0.9, 0.95), fused=True
    )
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=precision == "fp16")
    if checkpoint is not None:
        restore_weights(model, checkpoint["model"], ranks)
        restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
        if checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
    elif initial is not None:
        restore_weights(model, initial["model"], ranks)
    forward = model
    if config.compiles(ranks.device.type):
        forward = model.compiled()
    if ranks.world_size > 1 and not sharded:
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        forward = DistributedDataParallel(forward, device_ids=devices, gradient_as_bucket_view=True)
    return Trainer(config, ranks, model, forward, optimizer, scaler, precision)


# ---------------------------------------------------------------------------------------------------------------------
# step


def train_step(
    trainer: Trainer, loader: BatchLoader, lr: float, state: TrainState, stop: StopSignal
) -> StepResult | None:
    """One optimizer step; None, with nothing changed, when asked to stop."""
    config, ranks = trainer.config, trainer.ranks
    micro_steps = config.grad_accum_steps(ranks.world_size)
    # Dropout's randomness follows from (seed, step, rank): a resumed step draws what the lost one drew.
    torch.manual_seed(((config.seed * 1_000_003 + state.step) * 65_537 + ranks.rank) % 2**63)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    trainer.optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=ranks.device)
    for micro_step in range(micro_steps):
        if stop.agreed():
            trainer.optimizer.zero_grad(set_to_none=True)
            return None
        inputs, targets = loader.next()
        with gradient_sync(trainer.forward, last=micro_step == micro_steps - 1):
            with trainer.autocast():
                loss = trainer.forward(inputs, targets) / micro_steps
            trainer.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    trainer.scaler.unscale_(trainer.optimizer)
    grad_norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), config.grad_clip or math.inf)
    # Both are of all ranks, so that what one rank's NaN or spike decides, every rank decides.
    loss, grad_norm = ranks.sum(loss_sum).item() / ranks.world_size, full_tensor(grad_norm).item()
    z = loss_z(state.recent_losses, loss)
    spike = z is not None and 0 < config.spike_z < z
    updated = math.isfinite(loss) and math.isfinite(grad_norm) and not (spike and config.skip_spikes)
    if updated:
        trainer.scaler.step(trainer.optimizer)
    else:
        trainer.optimizer.zero_grad(set_to_none=True)  # nobody is to draw a histogram of NaN
    trainer.scaler.update()
    loss_scale = trainer.scaler.get_scale() if trainer.scaler.is_enabled() and not updated else None
    return StepResult(loss, grad_norm, z, spike, updated, loss_scale)


# ---------------------------------------------------------------------------------------------------------------------
# main


class Run:
    """A run in progress. `log` and `writer` are rank 0's; the other ranks have None."""

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        schedule: Schedule,
        checkpoint: dict | None,
        fingerprint: dict | None,
        log: RunLog | None,
        writer: CheckpointWriter | None,
    ):
        self.trainer, self.data, self.schedule, self.fingerprint = trainer, data, schedule, fingerprint
        self.log, self.writer = log, writer
        self.config, self.ranks = trainer.config, trainer.ranks
        self.state = TrainState()
        if checkpoint:
            self.state = TrainState(**{f.name: checkpoint[f.name] for f in dataclasses.fields(TrainState)})
        self.saved_step = self.state.step if checkpoint else -1
        self.saved_at = time.monotonic()
        self.save_failed = False
        self.stop = StopSignal(self.ranks, self.config.max_hours)
        model, forward, precision = trainer.model, trainer.forward, trainer.precision
        self.evaluation = Evaluation(self.config, data, self.ranks, model, forward, precision, self.warn)

    def until_it_ends(self) -> int:
        """Run the loop and tell how it ended, also when that is an exception; returns the exit status."""
        ended, reason = "failed", "an error; see stderr"
        self.tell_status("running")
        try:
            trace = f"rank{self.ranks.rank}.pt.trace.json.gz"
            path = Path(self.config.tensorboard_dir, self.config.run_name, trace)
            with profiled(self.config.profile, path, self.say) as step_ended:
                ended, reason = self.loop(step_ended)
        finally:
            if self.writer:
                self.writer.close()
                self.report_saves()
                if self.save_failed:
                    ended, reason = "failed", "the last save failed"
                self.tell_status(ended, reason)
                why, took = reason and f" ({reason})", duration_text(self.state.elapsed_s)
                steps, folder = self.state.step, self.config.checkpoint_dir
                self.log.say(f"{ended}{why} after {steps:,} steps, {took} of training, in {folder}")
        return 0 if ended != "failed" else 1

    def tell_status(self, status: str, reason: str = "") -> None:
        if self.writer:
            steps = {"step": self.state.step, "max_steps": self.schedule.max_steps}
            try:
                write_status(self.writer.folder, status=status, reason=reason, **steps, pid=os.getpid())
            except OSError as error:
                self.log.warn(f"cannot write {status!r} to status.json: {error}")

    def loop(self, step_ended: Callable[[], None]) -> tuple[str, str]:
        """Save, evaluate, step, until the last step; returns how that ended, and why if it was earlier."""
        config, state, schedule = self.config, self.state, self.schedule
        loader = BatchLoader(
            self.data.train,
            config.mini_batch_size,
            state.rows_consumed,
            self.ranks.rank,
            self.ranks.world_size,
            self.ranks.device,
        )
        epoch_ended = diverged = False
        while True:
            self.report_saves()
            # First the save, so that nothing is lost to a long evaluation. After a resume from here, what this step
            # evaluates is evaluated again: it may not have been finished.
            tiers = self.tiers_due(epoch_ended)
            finished = state.step >= schedule.max_steps
            if (tiers or finished) and state.step != self.saved_step:
                self.save(tiers)
            evaluated = self.evaluate(tiers, finished)
            if finished or not evaluated or self.stop.agreed():
                break
            lr = learning_rate(config, state.step, schedule.max_steps)
            start = time.perf_counter()
            result = train_step(self.trainer, loader, lr, state, self.stop)
            if result is None:
                break
            step_s = time.perf_counter() - start
            epochs_before = schedule.epochs(state.rows_consumed)
            state.elapsed_s += step_s
            state.rows_consumed += schedule.rows_per_step
            if self.log:
                self.log_step(result, lr, step_s)
            if warning := result.warning(state.recent_losses):
                self.warn(f"step {state.step}: {warning}")
            state.bad_steps = state.bad_steps + 1 if result.bad else 0
            if result.finite:
                state.loss = result.loss
                state.recent_losses = [*state.recent_losses, result.loss][-SPIKE_WINDOW:]
            step_ended()
            state.step += 1
            epoch_ended = int(schedule.epochs(state.rows_consumed)) > int(epochs_before)
            if diverged := state.bad_steps >= config.max_bad_steps > 0:
                break
        loader.close()
        if diverged:
            self.go_back()
        if self.writer:
            self.writer.wait()
            self.report_saves()
        if self.ranks.any(state.step != self.saved_step or self.save_failed):  # there may be room by now
            self.save([])
        if diverged:
            return "failed", f"{config.max_bad_steps} steps running without a finite loss and gradient"
        return ("finished", "") if finished and evaluated else ("stopped", self.stop.agreed())

    def go_back(self) -> None:
        """To the step before the bad ones, whose weights these still are, and tell how to go on from there."""
        state, config = self.state, self.config
        state.step -= state.bad_steps
        state.rows_consumed -= state.bad_steps * self.schedule.rows_per_step
        lower = f"--allow_changes --max_lr {config.max_lr / 2:g} --min_lr {min(config.min_lr, config.max_lr / 2):g}"
        self.warn(
            f"stopping after {state.bad_steps} bad steps, at step {state.step} before them. Go on with --resume latest "
            f"{lower}{' or --precision fp32' * (self.trainer.precision != 'fp32')}, or past these tokens with a "
            "larger --max_bad_steps. If that fails at once, the weights were ruined before: --resume best, or an "
            "older file of ./list_checkpoints.sh"
        )
        state.bad_steps = 0

    def tiers_due(self, epoch_ended: bool) -> list[str]:
        """The names, beside latest.pt, under which the state of this step is to be kept."""
        config, step = self.config, self.state.step
        minutes = (time.monotonic() - self.saved_at) / 60
        late = self.ranks.any(self.ranks.is_main and 0 < config.checkpoint_minutes <= minutes)
        tiers = (
            [ROLLING.format(step)] if late or (config.checkpoint_freq and step % config.checkpoint_freq == 0) else []
        )
        if epoch_ended:
            tiers.append(EPOCH.format(int(self.schedule.epochs(self.state.rows_consumed))))
        return tiers if step else []

    def save(self, tiers: list[str]) -> None:
        """Copy the state to host memory and let rank 0 write it in the background."""
        state = capture_state(self.trainer.model, self.trainer.optimizer)
        self.saved_step, self.saved_at = self.state.step, time.monotonic()
        if self.writer:
            self.log.flush()
            self.writer.save(
                {
                    "format_version": FORMAT_VERSION,
                    **dataclasses.asdict(self.state),
                    **state,
                    "scaler": self.trainer.scaler.state_dict(),
                    "model_config": dataclasses.asdict(self.trainer.model.config),
                    "train_config": dataclasses.asdict(self.config),
                    "epoch": self.schedule.epochs(self.state.rows_consumed),
                    "world_size": self.ranks.world_size,
                    "data_fingerprint": self.fingerprint,
                    "tokenizer": self.data.tokenizer,
                    "torch_version": str(torch.__version__),
                    "saved_at": time.time(),
                },
                tiers,
            )

    def report_saves(self) -> None:
        """Tell how saves ended in the background since the last call."""
        for outcome, what in self.writer.take_reports() if self.writer else ():
            self.log.say(what) if outcome == "saved" else self.log.warn(what)
            if outcome != "not mirrored":
                self.save_failed = outcome == "not saved"

    def evaluate(self, tiers: list[str], finished: bool) -> bool:
        """Validation, HellaSwag and a text sample, those that are due at this step; False when asked to stop within."""
        config, state, evaluation = self.config, self.state, self.evaluation
        at = f"step {state.step}/{self.schedule.max_steps} |"

        def due(freq: int) -> bool:
            return freq > 0 and state.step > 0 and (finished or state.step % freq == 0)

        if due(config.eval_freq):
            val_loss = evaluation.validate(self.stop)
            if val_loss is None:
                return False
            state.val_loss = val_loss if math.isfinite(val_loss) else None
            best = val_loss < (math.inf if state.best_val_loss is None else state.best_val_loss)  # never NaN
            if best:
                state.best_val_loss = val_loss
                self.save([*tiers, BEST])
            if self.log:
                line = f"{at} val loss {val_loss:.4f}{' (best so far)' if best else ''}"
                self.log.record(state.step, line, val_loss=val_loss)
                self.log.histograms(state.step, self.trainer.model)
        if due(config.hellaswag_freq) and evaluation.examples:
            scores = evaluation.hellaswag(self.stop)
            if scores is None:
                return False
            if self.log:
                self.log.record(state.step, f"{at} {scores}", **scores.metrics())
        if due(config.sample_freq) and evaluation.tokenizer:
            text = evaluation.sample(state.step)
            if self.log:
                self.log.text(state.step, f"{at} sample:", text)
        return True

    def say(self, line: str) -> None:
        if self.log:
            self.log.say(line)

    def warn(self, line: str) -> None:
        if self.log:
            self.log.warn(line)

    def log_step(self, result: StepResult, lr: float, step_s: float) -> None:
        config, ranks = self.config, self.ranks
        tokens_per_second = config.total_batch_size / step_s
        peak = peak_flops(ranks.device)
        self.log.step(
            self.state.step,
            self.schedule.max_steps,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            loss_z=result.loss_z,
            step_ms=step_s * 1000,
            tokens_per_second=tokens_per_second,
            mfu=tokens_per_second * self.trainer.model.flops_per_token() / (peak * ranks.world_size) if peak else None,
            cost=self.state.elapsed_s / 3600 * ranks.world_size * config.gpu_hour_cost
            if config.gpu_hour_cost
            else None,
            memory_gb=peak_memory_bytes(ranks.device) / 1e9,
            epoch=self.schedule.epochs(self.state.rows_consumed),
        )


def train(config: TrainConfig, given: frozenset[str], ranks: Ranks) -> int:
    """Train from the start or from a checkpoint until the last step or a stop signal; returns the exit status."""
    folder = Path(config.checkpoint_dir)
    if config.resume not in ("", "auto") and not folder.is_dir():
        raise UserError(f"no checkpoints in {folder}; name their folder with --checkpoint_dir")
    with ExitStack() as held:
        if not config.dry_run:
            advice = "wait for it to end, or give this run another --checkpoint_dir"
            ranks.on_main(lambda: held.enter_context(lock_folder(folder, advice)))
        notes, path, checkpoint = [], None, None
        if config.resume:
            path, passed_over, checkpoint = read_on_main(config.resume, folder, ranks)
            notes += [f"passed over {line}" for line in passed_over]
        if checkpoint and not checkpoint["train_config"]:
            raise UserError(
                f"{path} holds converted weights, no run to resume; start from them with --init_from {path}"
            )
        if checkpoint:
            config, changes = resume_config(checkpoint["train_config"], config, given)
            notes += [f"resumed from {path} at step {checkpoint['step']:,}", *(f"changed {line}" for line in changes)]
        initial = None
        if checkpoint is None and config.init_from != "scratch":
            initial = share(ranks.on_main(lambda: read_weights(config.init_from)), ranks)
            config = initial_config(initial["model_config"], config, given)
            notes.append(f"weights from {config.init_from}")
        data = open_data(config)
        if initial:
            check_initial(initial, config.init_from, data)
            if "wpe.weight" in initial["model"]:  # a context may be cropped
                initial["model"]["wpe.weight"] = initial["model"]["wpe.weight"][: config.context_length]
        run_name = ranks.broadcast(config.run_name or f"{time.strftime('gpt-%Y%m%d-%H%M%S')}-{os.getpid()}")
        config = dataclasses.replace(config, tokenizer=data.tokenizer, run_name=run_name)
        at = (checkpoint["step"], checkpoint["rows_consumed"]) if checkpoint else (0, 0)
        schedule = make_schedule(config, data, ranks.world_size, *at)
        plan = [*describe(config, data, schedule, ranks), *notes]
        if config.dry_run:
            if ranks.is_main:
                print(*plan, sep="\n")
            return 0
        fingerprint = ranks.on_main(lambda: check_start(folder, path, checkpoint, data))
        ended_before = ranks.broadcast(read_status(folder).get("status") == "finished")
        if checkpoint and checkpoint["step"] >= schedule.max_steps and ended_before:
            if ranks.is_main:
                print(f"{folder}: this run is finished, at step {checkpoint['step']:,}; a larger --max_steps goes on")
            return 0
        advice = "give this run another --logdir"
        ranks.on_main(lambda: held.enter_context(lock_folder(Path(config.logdir), advice)))
        # First the writer: it makes the checkpoint to resume from the latest, and the log forgets what came after it.
        writer = ranks.on_main(lambda: CheckpointWriter(folder, config.keep_checkpoints, config.mirror, path))
        log = ranks.on_main(lambda: held.enter_context(closing(RunLog(config, checkpoint and checkpoint["step"]))))
        if log:
            log.say("\n".join(plan))
        trainer = build_trainer(config, data, ranks, checkpoint, initial)
        return Run(trainer, data, schedule, checkpoint, fingerprint, log, writer).until_it_ends()


def main(argv: list[str] | None = None) -> int:
    end_with_torchrun()
    config, given = parse_args(sys.argv[1:] if argv is None else argv)
    if config.list_checkpoints:
        for line in checkpoint_table(Path(config.checkpoint_dir)):
            print(line, flush=True)
        return 0
    if config.resume not in ("", "latest", "auto", "best"):
        if not Path(config.resume).is_file():
            found = "a folder" if Path(config.resume).is_dir() else "no such file"
            raise UserError(f"--resume {config.resume}: {found}; expected latest, auto, best or a checkpoint file")
        if "checkpoint_dir" not in given:
            config = dataclasses.replace(config, checkpoint_dir=str(Path(config.resume).parent))
    if not config.resume and config.init_from == "scratch":  # else the model's shape is in a file
        make_schedule(config, open_data(config), world_size_of_environment())
    with joined(config.device, config.timeout_minutes) as ranks:
        return train(config, given, ranks)


if __name__ == "__main__":
    run_cli(main)
