"""The plan of a run, settled before anything is built: data, steps, precision, memory, disk, time."""

import math
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dataloader import BatchLoader, Rows, RowStream
from model import GPT
from steadygpt import version_text
from steadygpt.base.disk import existing
from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.files import DECIDED, LATEST, Launch
from steadygpt.config import FINEWEB_EDU_TOKENS, STORED, TrainConfig
from steadygpt.convert.weights import check_fits
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.data.tokenizer import check_recorded
from steadygpt.log.metrics import read_status
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import (
    AUTOCAST,
    PEAK_FLOPS,
    autocast,
    be_deterministic,
    choose_precision,
    device_name,
    memory_bytes,
)
from steadygpt.machine.host import available_memory_bytes, check_compiler
from steadygpt.machine.ranks import Ranks
from steadygpt.run.data import Data
from steadygpt.run.history import History
from steadygpt.run.launches import epochs_of_sources, mixture_text, new_launch, phase_of
from steadygpt.run.memory import checkpoint_bytes, estimate_memory, with_fitting_rows
from steadygpt.run.schedule import Schedule, with_steps

SHARE_OF_PEAK = 0.4  # of a GPU's peak FLOP/s, assumed
ASSUMED_GPU = "NVIDIA H100 80GB HBM3"  # where the GPU's peak is not known
WORTH_A_GPU_S = 60  # on the assumed GPU; its time says nothing about a shorter run, which is meant for this device
SAMPLED_IDS = 2**20  # read from a shard without a manifest, to check that they look like GPT-2's
HELLASWAG_TOKENS = 1_600_000  # with GPT-2's tokenizer
TOKENS_PER_PARAMETER = 20
MUCH = 0.1  # share of the training time
MANY_EPOCHS = 4  # up to which repeated text is worth about as much as new text (Muennighoff et al. 2023)


@dataclass(frozen=True)
class Plan:
    """A run before it is built; the same on every rank but for `data`, `ranks` and the tensors in `history`."""

    config: TrainConfig  # settled
    launches: list[Launch]  # the last one is this launch
    schedule: Schedule
    fingerprint: dict[str, list]  # of the shards
    notes: tuple[str, ...]  # further lines, one per surprising choice
    writes: bool  # whether it writes logs and checkpoints, which a dry run or an evaluation does not
    is_finished: bool  # the run in the folder has taken all its steps
    history: History
    data: Data
    sketch: GPT  # on the meta device
    ranks: Ranks

    def batches(self, rows: Rows, steps: Iterable[range]) -> BatchLoader:
        """Return a loader of this rank's micro-batches, for steps given by their rows."""
        ranks = self.ranks
        return BatchLoader(rows, steps, self.config.mini_batch_size, ranks.device, ranks.rank, ranks.world_size)

    def autocast(self):
        """Return a context in which operations have the precision of the run."""
        return autocast(self.ranks.device, self.config.precision)

    def lines(self) -> list[str]:
        """Return the plan in words, a line for each subject."""
        config = self.config
        ranks = self.ranks
        memory, host = estimate_memory(config, self.sketch, ranks)
        versions = f"{version_text()}, torch {torch.__version__}, Python {platform.python_version()}"
        lines = [
            labelled("version", versions),
            labelled("model", self._model_text()),
            *self._data_lines(),
        ]
        if self.val_rows():
            lines.append(labelled("validation", self._validation_text()))
        lines += [
            labelled("steps", self._steps_text()),
            labelled("tokens", self._tokens_text()),
            labelled("device", self._device_text()),
            labelled("memory", uses_text(memory, "per rank", memory_bytes(ranks.device), "--mini_batch_size auto")),
            labelled("host memory", uses_text(host, "on rank 0", available_memory_bytes(), "a larger host")),
            labelled("checkpoints", self._checkpoints_text()),
        ]
        if config.mirror:
            lines.append(labelled("mirror", config.mirror))
        if config.checkpoint_minutes:
            lines.append(labelled("saves", self._saves_text()))
        return [*lines, *self.notes]

    def _model_text(self) -> str:
        config = self.config
        return (
            f"{self.sketch.num_parameters() / 1e6:,.2f} M parameters: {counted(config.num_layers, 'layer')}, "
            f"{counted(config.num_heads, 'head')}, {config.embd_size:,} wide, context {config.context_length:,}, "
            f"vocabulary {self.data.vocab_size:,} ({self.data.tokenizer})"
        )

    def _steps_text(self) -> str:
        config = self.config
        world_size = self.ranks.world_size
        text = (
            f"{config.max_steps:,}, each of {config.total_batch_size:,} tokens "
            f"({counted(config.mini_batch_size, 'row')} x {config.context_length:,} tokens x "
            f"{counted(world_size, 'rank')} x {counted(config.grad_accum_steps(world_size), 'micro-step')})"
        )
        steps_per_epoch = self.schedule.rows_per_epoch / config.rows_per_step
        if steps_per_epoch:
            epochs = self.schedule.epochs(self.last_row())
            epochs_text = f"{epochs:,.2f}" if epochs >= 0.1 else f"{epochs:.1g}"
            steps_text = f"{steps_per_epoch:,.0f}" if steps_per_epoch >= 10 else f"{steps_per_epoch:,.2f}"
            text += f"; {epochs_text} epochs (1 epoch = {steps_text} steps)"
        return f"{text}; warm-up {counted(config.warmup_steps, 'step')}"

    def _tokens_text(self) -> str:
        tokens = self.last_row() * self.config.context_length
        per_parameter = tokens / self.sketch.num_parameters()
        optimal = f"about {TOKENS_PER_PARAMETER} is compute-optimal (Hoffmann et al. 2022)"
        return f"{tokens:,}, {per_parameter:,.1f} per parameter; {optimal}"

    def _device_text(self) -> str:
        config = self.config
        ranks = self.ranks
        text = f"{ranks.world_size} x {device_name(ranks.device)}, {config.precision}"
        if ranks.world_size > 1 or config.is_fsdp:
            text += f", {config.sharding}"
        shape = (1, config.num_heads, config.context_length, self.sketch.config.head_size)
        dtype = AUTOCAST[config.precision]
        kernel = kernel_name(shape, dtype, ranks.device, config.dropout)
        if kernel:
            text += f", attention by {kernel}"
        return text

    def _saves_text(self) -> str:
        """Return how often the run saves, and how many bytes that writes."""
        config = self.config
        interval_s = 60 * config.checkpoint_minutes
        bytes_per_save = checkpoint_bytes(self.sketch, config.optimizer)
        bytes_a_day = bytes_per_save * 86400 / interval_s
        text = f"{LATEST} every {duration_text(interval_s)} or less, up to {bytes_text(bytes_a_day)} a day"
        if config.checkpoint_freq:
            text += f"; {bytes_text(bytes_per_save)} more every {counted(config.checkpoint_freq, 'step')}"
        return text

    def last_row(self) -> int:
        """Return the rows that the run will have consumed at its last step."""
        steps = self.config.max_steps - self.history.step
        return self.history.rows_consumed + steps * self.config.rows_per_step

    def _data_lines(self) -> list[str]:
        """Return a line for each source of the training data."""
        config = self.config
        data = self.data
        if not data.sources:
            folders = " or ".join(folder for folder, _ in config.sources().values())
            text = f"no shards in {folders} yet; planned with the vocabulary of --tokenizer {data.tokenizer}"
            if not self.history.config.max_steps:
                text += f" and {config.steps_per_epoch:,} steps per epoch"
            return [labelled("data", text)]
        entry = self.launches[-1]
        epochs = epochs_of_sources(data, self.launches, self.last_row())
        texts = []
        for shards, _, _ in data.sources:
            name = shards.name
            count = counted(len(shards.shards), "shard")
            text = f"{shards.num_tokens:,} training tokens in {count} of {shards.folder}"
            if epochs:
                share = entry["shares"][entry["sources"][name][1]] / BLOCK_ROWS
                text = f"{name}, {share:.1%} of the rows: {text}; {epochs[name]:,.2f} epochs by the end"
                if epochs[name] > MANY_EPOCHS:
                    text += f" -- MORE THAN {MANY_EPOCHS}, of little benefit"
            texts.append(text)
        return [labelled("data", text) for text in some(texts, "source")]

    def val_rows(self) -> int:
        """Return the rows of a validation over all of its sets; before the data is prepared, those of --eval_tokens."""
        if not self.data.sources and self.config.eval_freq:
            return self.config.eval_tokens // self.config.context_length
        sets = self.data.val_sets
        return sum(validation_rows(self.config, val.rows, len(sets)) for val in sets)

    def _validation_text(self) -> str:
        config = self.config
        rows = self.val_rows()
        total = sum(val.rows.rows_per_epoch for val in self.data.val_sets)
        text = f"{rows * config.context_length:,}"
        if rows < total:
            text += f" of {total * config.context_length:,}"
        text += " tokens"
        if config.eval_freq > config.max_steps:
            return f"{text} at the end"
        # A forward pass is a third of a step's work.
        cost = rows / (3 * config.eval_freq * config.rows_per_step)
        text += f" every {counted(config.eval_freq, 'step')}: about {cost:.1%} of the training time"
        if cost > MUCH:
            text += " -- MUCH; try a larger --eval_freq or a smaller --eval_tokens"
        return text

    def _checkpoints_text(self) -> str:
        """Return the disk space of the checkpoints, and the flags that let them fit."""
        config = self.config
        folder = Path(config.checkpoint_dir)
        size = checkpoint_bytes(self.sketch, config.optimizer)
        # latest.pt, its backup, the best one, and the one that is being written.
        files = config.keep_checkpoints + 4
        if self.schedule.decay.cools_down:
            files += 1
        if config.mirror:  # one stays until it is uploaded
            files += 1
        epochs = math.ceil(self.schedule.epochs(self.last_row()))
        files += min(epochs, config.keep_epochs) if config.keep_epochs else epochs
        free = shutil.disk_usage(existing(folder)).free
        text = f"{bytes_text(size)} each, at most {files:,} in {folder}: {bytes_text(files * size)}; "
        text += f"{bytes_text(free)} free"
        if files * size > free:
            text += " -- NOT ENOUGH; try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
        return text


def uses_text(memory: dict[str, float], where: str, available: int, remedy: str) -> str:
    """Return the uses of memory in words, and what to try if less is available."""
    total = sum(memory.values())
    parts = [f"{use} {bytes_text(size)}" for use, size in memory.items() if size >= 0.005 * total]
    text = f"about {bytes_text(total)} {where}: {', '.join(parts)}"
    if available < total:
        text += f" -- NOT ENOUGH: {bytes_text(available)} available; try {remedy} or a smaller model"
    return text


def settle(history: History, data: Data, ranks: Ranks) -> Plan:
    """Settle on rank 0, for all ranks, every option that the data, the machine or the length of the run decides."""
    with torch.device("meta"):
        sketch = GPT(history.config.shape(data.vocab_size), history.config, initialize=False)
    memory = -ranks.max(-memory_bytes(ranks.device))
    settled = ranks.from_main(lambda: _settle_on_main(history, data, sketch, memory, ranks))
    return Plan(**settled, history=history, data=data, sketch=sketch, ranks=ranks)


def _settle_on_main(history: History, data: Data, sketch: GPT, memory: int, ranks: Ranks) -> dict[str, Any]:
    """Return the fields of a Plan that do not depend on the rank."""
    requested = history.config
    decisions = history.decisions
    before = history.launches
    fingerprint = history.fingerprint
    world_size = ranks.world_size
    config = replace(requested, **decisions)
    notes = [*history.notes]
    config.check_together()
    config.shards(world_size)

    # The weights that the run starts from, and the tokenizer, without which no checkpoint could be sampled.
    if history.weights:
        fits = check_fits(history.weights, config.init_from, sketch.config, data.tokenizer_record)
        notes.append(labelled("weights", f"from {config.init_from}"))
        notes.append(fits)
    if data.sources and data.tokenizer_record.is_file:
        check_recorded(data.tokenizer_record, Path(data.folder))
    if config.tokenizer == "auto" and not before:
        notes.append(note_of_vocabulary(data))

    # What the machine decides: precision and the rows of a micro-step.
    if "total_batch_size" not in decisions:
        config = config.with_tokens_of_step(world_size)
    config = config.with_even_rows(world_size)
    config = replace(config, precision=choose_precision(config.precision, ranks.device))
    set_up(config, ranks.device)
    config, memory_note = with_fitting_rows(config, sketch, memory, ranks)
    notes.append(memory_note)
    if requested.mini_batch_size not in (0, config.mini_batch_size):
        where = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
        text = f"{config.mini_batch_size} per micro-step instead of --mini_batch_size {requested.mini_batch_size}"
        text += f": a step has {counted(config.rows_per_step // world_size, 'row')} on {where}"
        notes.append(labelled("rows", text))

    # The record of this launch, and the number of steps, which may follow from its data.
    launches: list[Launch] = []
    if data.sources:
        launches = [*before, new_launch(history, data, fingerprint, ranks)]
        if before and before[-1]["shares"] != launches[-1]["shares"]:
            text = f"training data: {mixture_text(before[-1])} -> {mixture_text(launches[-1])}"
            notes.append(labelled("changed", text))
    if not (data.sources or config.mix or config.max_steps or config.steps_per_epoch):
        config = replace(config, steps_per_epoch=max(1, FINEWEB_EDU_TOKENS // config.total_batch_size))
    has_epochs = not config.mix
    if launches:  # after a change of the data, a run has no epochs either
        has_epochs = data.rows_per_epoch > 0 and phase_of(launches).number == 0
    rows_per_epoch = 0
    if has_epochs:
        rows_per_epoch = config.steps_per_epoch * config.rows_per_step or data.rows_per_epoch
    config = with_steps(config, rows_per_epoch, history)

    config = replace(config, tokenizer=data.tokenizer, vocab_size=sketch.config.vocab_size)
    schedule = Schedule(config, rows_per_epoch)
    notes += schedule.notes(history.checkpoint)

    # The shards come last, because all of them may have to be read. Then the record identifies them by their content.
    writes = config.trains
    if writes:
        checked = {shards.key: shards.check(config.vocab_size, fingerprint) for shards in data.sets}
        fingerprint = fingerprint | checked
        launches[-1] = new_launch(history, data, fingerprint, ranks)
    if launches:
        kept_decisions = list(DECIDED)
        if not requested.mini_batch_size:  # the rows that fit into memory are chosen once for all launches
            kept_decisions.append("mini_batch_size")
        launches[-1]["options"] = {name: getattr(requested, name) for name in STORED}
        launches[-1]["decisions"] = {name: getattr(config, name) for name in kept_decisions} | dict(decisions)
    has_ended = False
    if history.checkpoint:
        has_ended = read_status(Path(config.checkpoint_dir)).get("status") == "finished"
    return {
        "config": config,
        "launches": launches,
        "schedule": schedule,
        "fingerprint": fingerprint,
        "notes": tuple(filter(None, notes)),
        "writes": writes,
        "is_finished": has_ended and history.step >= config.max_steps,
    }


def note_of_vocabulary(data: Data) -> str:
    """Return a warning if shards without a manifest, so assumed to have GPT-2's ids, have only small ones."""
    if not data.sources or data.tokenizer != "gpt2" or data.sources[0].shards.manifest:
        return ""
    largest = int(data.sources[0].shards.shards[0].tokens()[:SAMPLED_IDS].max(initial=0))
    if largest >= data.vocab_size // 2:
        return ""
    text = f"taken to be GPT-2's, but the largest of the first ids is {largest:,}"
    return labelled("vocabulary", f"{text}; name the tokenizer that wrote them: --tokenizer NAME, or ids:N")


def set_up(config: TrainConfig, device: torch.device) -> None:
    """Prepare a rank for a run whose precision is settled, before the first matrix product."""
    if config.compiles(device.type):
        check_compiler(device.type)
    # Only an fp32 run uses TF32. In other precisions HellaSwag scores close calls again, in true fp32.
    if device.type == "cuda" and config.precision == "fp32":
        torch.set_float32_matmul_precision("high")
    if config.deterministic:
        be_deterministic(config.compiles(device.type))


def validation_rows(config: TrainConfig, val: RowStream, sets: int = 1) -> int:
    """Return the rows of a validation set, one of `sets`: its share of eval_tokens, or all rows if there are fewer."""
    return min(max(1, config.eval_tokens // (sets * config.context_length)), val.rows_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# the time and the cost, from the GPU's peak throughput


def work_per_token(config: TrainConfig, model: GPT) -> tuple[float, float]:
    """Return the FLOPs per token of training and of evaluation. In training, recomputed parts count twice."""
    forward_and_backward = model.flops_per_token()
    forward = forward_and_backward / 3  # a forward pass is a third of the work
    head = 6 * model.config.vocab_size * model.config.embd_size
    training = forward_and_backward
    if config.activation_checkpointing:
        training += (forward_and_backward - head) / 3
    if 0 < config.loss_chunk_size < config.mini_batch_size * config.context_length:
        training += head / 3
    return training, forward


def evaluated_tokens(plan: Plan) -> int:
    """Return the tokens of all evaluations that are left; each kind of evaluation also runs at the last step."""
    config = plan.config
    steps = config.max_steps - plan.history.step
    tokens = 0
    if config.eval_freq:
        tokens += plan.val_rows() * config.context_length * math.ceil(steps / config.eval_freq)
    if config.hellaswag_freq:
        tokens += HELLASWAG_TOKENS * math.ceil(steps / config.hellaswag_freq)
    return tokens


def forecast(plan: Plan) -> list[str]:
    """Return lines for the plan: the time that is left, with the assumptions behind it, and its cost."""
    config = plan.config
    steps = config.max_steps - plan.history.step
    tokens = steps * config.total_batch_size
    in_training, in_evaluation = work_per_token(config, plan.sketch)
    evaluation = evaluated_tokens(plan) * in_evaluation / (in_training * max(1, tokens))  # as a share of training
    work = f"{counted(steps, 'step')}, plus {evaluation:.1%} for evaluation"
    count = plan.ranks.world_size
    gpu = device_name(plan.ranks.device)
    precision = config.precision
    where = ""
    if gpu not in PEAK_FLOPS:
        requested = plan.history.config.precision
        precision = "bf16" if requested == "auto" else requested
        count = 1
        gpu = ASSUMED_GPU
        where = "unknown here; "
    peak = count * PEAK_FLOPS[gpu]
    if precision == "fp32":
        peak /= 2  # as TF32 (set_up)
    seconds = tokens * in_training / (SHARE_OF_PEAK * peak) * (1 + evaluation)
    if where and seconds < WORTH_A_GPU_S:
        return [labelled("time", f"unknown here: {work}")]
    where += f"on {count} x {gpu} {duration_text(seconds)}"
    time = f"{where}, at {SHARE_OF_PEAK:.0%} of the peak in {precision}: {work}"
    lines = [labelled("time", time)]
    price = config.gpu_hour_cost
    if price:
        hours = seconds / 3600
        cost = f"{count * hours * price:,.2f}: {count} x {hours:,.1f} h at {price:,.2f} per hour"
        lines.append(labelled("cost", cost))
    return lines
