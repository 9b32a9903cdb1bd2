"""The plan of a run, settled before anything is built: data, steps, precision, memory, disk, time."""

import math
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dataloader import RowStream
from model import GPT, new_model
from steadygpt import version_text
from steadygpt.base.disk import existing
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.files import DECIDED, LATEST, Start, trained_with
from steadygpt.config import FINEWEB_EDU_TOKENS, KEPT, TrainConfig
from steadygpt.convert.weights import check_fits
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.data.tasks import load_core
from steadygpt.data.tokenizer import load_tokenizer
from steadygpt.log.metrics import read_status
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import AUTOCAST, PEAK_FLOPS, be_deterministic, choose_precision, device_name, memory_bytes
from steadygpt.machine.host import available_memory_bytes, check_compiler
from steadygpt.machine.ranks import Ranks
from steadygpt.run.data import Data
from steadygpt.run.expected import Expected
from steadygpt.run.history import History
from steadygpt.run.memory import checkpoint_bytes, estimate_memory, with_fitting_rows
from steadygpt.run.schedule import Schedule, with_steps
from steadygpt.run.starts import epochs_of_sources, mixture_text, new_start, phase_of

SHARE_OF_PEAK = 0.4  # that a GPU is assumed to reach, where nothing is measured
WELL_KNOWN = "NVIDIA H100 80GB HBM3"
HELLASWAG_TOKENS = 1_600_000  # with GPT-2's tokenizer
CHARACTERS_PER_TOKEN = 4  # of English, about
TOKENS_PER_PARAMETER = 20
MUCH = 0.1  # share of the training time
MANY_EPOCHS = 4  # up to which repeated text is worth about as much as new text (Muennighoff et al. 2023)


@dataclass(frozen=True)
class Plan:
    """A run before it is built; the same on every rank but for `data`, `ranks` and the tensors in `history`."""

    config: TrainConfig  # settled
    starts: list[Start]  # the last one is this start
    schedule: Schedule
    fingerprint: dict[str, list]  # of the shards
    notes: tuple[str, ...]  # further lines, one per surprising choice
    writes: bool  # logs and checkpoints: it is no dry run or evaluation
    is_finished: bool  # the run in the folder has taken all its steps
    expected: Expected | None  # of --expect
    history: History
    data: Data
    sketch: GPT  # on the meta device
    ranks: Ranks

    def lines(self) -> list[str]:
        """Return the plan in words, a line for each subject."""
        config, data, schedule, sketch, ranks = self.config, self.data, self.schedule, self.sketch, self.ranks
        T, world_size, micro_steps = config.context_length, ranks.world_size, config.grad_accum_steps(ranks.world_size)
        memory, host = estimate_memory(config, sketch, ranks)
        checkpoint, epochs, interval_s = checkpoint_bytes(sketch, config.optimizer), 0.0, 60 * config.checkpoint_minutes
        emulated = ", emulated slowly" * (config.precision == "fp8" and ranks.device.type != "cuda")
        sharding = f", {config.sharding}" * (world_size > 1 or config.sharding == "fsdp")
        dtype = AUTOCAST.get(config.precision, torch.float32)
        kernel = kernel_name((1, config.num_heads, T, sketch.config.head_size), dtype, ranks.device, config.dropout)
        rows = self.last_row()
        tokens = rows * T
        length = ""
        if per_epoch := schedule.rows_per_epoch / config.rows_per_step:
            epochs = schedule.epochs(rows)
            length = f"; {epochs:{',.2f' if epochs >= 0.1 else '.1g'}} epochs "
            length += f"(1 epoch = {per_epoch:,{'.0f' if per_epoch >= 10 else '.2f'}} steps)"
        lines = [
            ("version", f"{version_text()}, torch {torch.__version__}, Python {platform.python_version()}"),
            ("model", f"{sketch.num_parameters() / 1e6:,.2f} M parameters: {counted(config.num_layers, 'layer')}, "
             f"{counted(config.num_heads, 'head')}, {config.embd_size:,} wide, context {T:,}, "
             f"vocabulary {data.vocab_size:,} ({data.tokenizer})"),
            *self._data_lines(),
            ("validation", self._validation_text()),
            ("steps", f"{config.max_steps:,}, each of {config.total_batch_size:,} tokens "
             f"({counted(config.mini_batch_size, 'row')} x {T:,} tokens x {counted(world_size, 'rank')} x "
             f"{counted(micro_steps, 'micro-step')}){length}; warm-up {counted(config.warmup_steps, 'step')}"),
            ("tokens", f"{tokens:,}, {tokens / sketch.num_parameters():,.1f} per parameter; about "
             f"{TOKENS_PER_PARAMETER} is compute-optimal (Hoffmann et al. 2022)"),
            ("device", f"{world_size} x {device_name(ranks.device)}, {config.precision}{emulated}{sharding}"
             f"{f', attention by {kernel}' * bool(kernel)}"),
            ("memory", uses_text(memory, "per rank", memory_bytes(ranks.device), "--mini_batch_size auto")),
            ("host memory", uses_text(host, "on rank 0", available_memory_bytes(), "a larger host")),
            ("checkpoints", self._checkpoints_text(checkpoint, math.ceil(epochs))),
            ("mirror", config.mirror),
            ("saves", f"{LATEST} every {duration_text(interval_s)} or less; writes up to "
             f"{bytes_text(checkpoint * 86400 / interval_s)} a day" if interval_s else ""),
        ]  # fmt: skip
        return [*(labelled(label, text) for label, text in lines if text), *self.notes]

    def last_row(self) -> int:
        """Return the rows that the run will have consumed at its last step."""
        steps = self.config.max_steps - self.history.step
        return self.history.rows_consumed + steps * self.config.rows_per_step

    def _data_lines(self) -> list[tuple[str, str]]:
        """Return a line for each source of the training data."""
        config, data, lines = self.config, self.data, list[str]()
        if not data.sources:
            folders = " or ".join(folder for folder, _ in config.sources().values())
            text = f"no shards in {folders} yet; planned with the vocabulary of --tokenizer {data.tokenizer}"
            per_epoch = "" if self.history.config.max_steps else f" and {config.steps_per_epoch:,} steps per epoch"
            return [("data", text + per_epoch)]
        entry = self.starts[-1]
        end = epochs_of_sources(data, self.starts, self.last_row())
        for shards, _, _ in data.sources:
            count, name = counted(len(shards.shards), "shard"), shards.name
            text = f"{shards.num_tokens:,} training tokens in {count} of {shards.folder}"
            if end:
                share = entry["shares"][entry["sources"][name][1]] / BLOCK_ROWS
                many = f" -- MORE THAN {MANY_EPOCHS}, of little benefit" * (end[name] > MANY_EPOCHS)
                text = f"{name}, {share:.1%} of the rows: {text}; {end[name]:,.2f} epochs by the end{many}"
            lines.append(text)
        return [("data", text) for text in some(lines, "source")]

    def val_rows(self) -> int:
        """Return the rows of a validation, over all of its sets; of data that is not there yet, eval_tokens."""
        if not self.data.sources and self.config.eval_freq:
            return self.config.eval_tokens // self.config.context_length
        sets = self.data.val_sets
        return sum(validation_rows(self.config, val.rows, len(sets)) for val in sets)

    def _validation_text(self) -> str:
        config, rows = self.config, self.val_rows()
        total = sum(val.rows.rows_per_epoch for val in self.data.val_sets)
        of_all = f" of {total * config.context_length:,}" * (rows < total)
        text = f"{rows * config.context_length:,}{of_all} tokens"
        if not rows or config.eval_freq > config.max_steps:
            return f"{text} at the end" * bool(rows)
        # A forward pass is a third of a step's work.
        cost = rows / (3 * config.eval_freq * config.rows_per_step)
        advice = " -- MUCH; try a larger --eval_freq or a smaller --eval_tokens" * (cost > MUCH)
        return f"{text} every {counted(config.eval_freq, 'step')}: about {cost:.1%} of the training time{advice}"

    def _checkpoints_text(self, size: int, epochs: int) -> str:
        """Return the disk space of the checkpoints, each of `size` bytes, and the flag that lets them fit."""
        config, folder = self.config, Path(self.config.checkpoint_dir)
        free = shutil.disk_usage(existing(folder)).free
        # latest.pt, its backup, the best one, and the one that is being written; one stays until it is uploaded.
        others = config.keep_checkpoints + 4 + (config.schedule == "wsd") + bool(config.mirror)
        files = others + min(filter(None, (epochs, config.keep_epochs)), default=0)
        text = f"{bytes_text(size)} each, at most {files:,} in {folder}: {bytes_text(files * size)}; "
        advice = " -- NOT ENOUGH; try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
        return f"{text}{bytes_text(free)} free{advice * (files * size > free)}"


def uses_text(memory: dict[str, float], where: str, available: int, instead: str) -> str:
    """Return the uses of memory, and what to try instead if there is less."""
    total = sum(memory.values())
    parts = ", ".join(f"{what} {bytes_text(size)}" for what, size in memory.items() if size >= 0.005 * total)
    advice = f" -- NOT ENOUGH: {bytes_text(available)} available; try {instead} or a smaller model"
    return f"about {bytes_text(total)} {where}: {parts}{advice * (available < total)}"


def settle(history: History, data: Data, ranks: Ranks) -> Plan:
    """Settle on rank 0 every option that the data, the machine or the length of the run decides; tell the others."""
    with torch.device("meta"):
        sketch = new_model(history.config, history.config.shape(data.vocab_size))
    memory = -ranks.max(-memory_bytes(ranks.device))
    settled = ranks.from_main(lambda: _settle_on_main(history, data, sketch, memory, ranks))
    return Plan(**settled, history=history, data=data, sketch=sketch, ranks=ranks)


def _settle_on_main(history: History, data: Data, sketch: GPT, memory: int, ranks: Ranks) -> dict[str, Any]:
    """Return the fields of a Plan that do not depend on the rank."""
    asked, before, decided, fingerprint = history.config, history.starts, history.decisions, history.fingerprint
    config, world_size, threads = replace(asked, **decided), ranks.world_size, torch.get_num_threads()
    notes = [*history.notes]
    config.check_together()
    config.shards(world_size)

    # The weights that the run starts from; and the tokenizer, because without it no checkpoint could be sampled.
    if history.weights:
        fits = check_fits(history.weights, config.init_from, sketch.config, data.tokenizer_record)
        notes += [labelled("weights", f"from {config.init_from}"), fits]
    if data.sources and data.tokenizer_record.is_file:
        load_tokenizer(data.tokenizer_record, Path(data.folder))
    if config.core_freq:
        load_core(config.core_dir, config.core_examples or None)  # a mistake in it is known before anything is written

    # What the machine decides: threads, precision and the rows of a micro-step.
    if config.deterministic and before and ranks.device.type == "cpu" and threads != (used := before[-1]["threads"]):
        torch.set_num_threads(used)
        notes.append(labelled("threads", f"{threads} -> {used}, as before: --deterministic needs the same number"))
    config = config if "total_batch_size" in decided else config.with_tokens_of_step(world_size)
    config = config.with_even_rows(1 if config.deterministic else world_size)
    sizes = (config.mini_batch_size or 1) * config.context_length, config.embd_size, sketch.config.mlp_size
    precision, of_precision = choose_precision(config.precision, ranks.device, *sizes)
    config = replace(config, precision=precision)
    set_up(config, ranks.device, torch.get_num_threads())
    config, of_memory = with_fitting_rows(config, sketch, memory, ranks)
    notes += [of_precision, of_memory]
    if config.deterministic:
        notes.append(note_of_processes(config, before, ranks))
    if asked.mini_batch_size not in (0, config.mini_batch_size):
        where = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
        found = f"{config.mini_batch_size} per micro-step instead of --mini_batch_size {asked.mini_batch_size}"
        notes.append(
            labelled("rows", f"{found}: a step has {counted(config.rows_per_step // world_size, 'row')} on {where}")
        )

    # The record of this start, and the number of steps, which may follow from its data.
    starts: list[Start] = []
    if data.sources:
        starts = [*before, new_start(history, data, fingerprint, ranks)]
        if before and before[-1]["shares"] != starts[-1]["shares"]:
            changed = " -> ".join(map(mixture_text, starts[-2:]))
            notes.append(labelled("changed", f"training data: {changed}"))
    if not (data.sources or config.mix or config.max_steps or config.steps_per_epoch):
        config = replace(config, steps_per_epoch=max(1, FINEWEB_EDU_TOKENS // config.total_batch_size))
    has_epochs = data.rows_per_epoch and not phase_of(starts).number if starts else not config.mix
    rows_per_epoch = (config.steps_per_epoch * config.rows_per_step or data.rows_per_epoch) if has_epochs else 0
    config = with_steps(config, rows_per_epoch, history)

    config = replace(config, tokenizer=data.tokenizer, vocab_size=sketch.config.vocab_size)
    schedule = Schedule(config, rows_per_epoch)
    notes += schedule.notes(history.checkpoint)

    # The shards, last because all of them may have to be read. Then their content identifies them in the record.
    writes = config.trains
    if writes:
        checked = {shards.key: shards.check(config.vocab_size, fingerprint) for shards in data.sets}
        fingerprint = fingerprint | checked
        starts[-1] = new_start(history, data, fingerprint, ranks)
    if starts:
        # The rows that memory has room for are chosen once, and --deterministic needs the same ones.
        sticky = (*DECIDED, "mini_batch_size") if config.deterministic or not asked.mini_batch_size else DECIDED
        starts[-1]["options"] = {name: getattr(asked, name) for name in KEPT}
        starts[-1]["decisions"] = {name: getattr(config, name) for name in sticky} | dict(decided)
    ended = history.checkpoint and read_status(Path(config.checkpoint_dir)).get("status") == "finished"
    return {
        "config": config,
        "starts": starts,
        "schedule": schedule,
        "fingerprint": fingerprint,
        "notes": tuple(filter(None, notes)),
        "writes": writes,
        "is_finished": bool(ended) and history.step >= config.max_steps,
        "expected": Expected.load(config) if config.expect and writes else None,
    }


def note_of_processes(config: TrainConfig, before: Sequence[Start], ranks: Ranks) -> str:
    """Return the numbers of processes that compute the same bits, as a line for the plan."""
    count, step = config.virtual_ranks(), f"a step has {counted(config.grad_accum_steps(1), 'micro-batch')}"
    *others, most = [str(2**n) for n in range(count.bit_length())]
    possible = f"{', '.join(others)} or {most} processes" if others else "1 process"
    if not config.eval_only and count % ranks.world_size:
        advice = "or start a new run with a smaller --mini_batch_size"
        raise UserError(f"--deterministic: {step}, so expected {possible}; found {ranks.world_size}; {advice}")
    if before and (began := trained_with(before[-1]).virtual_ranks()) != count:
        found = f"--deterministic: --total_batch_size {config.total_batch_size:,} fits {possible}"
        raise UserError(f"{found}, but the run began with one that fits {began}; drop the flag")
    threads = torch.get_num_threads()
    each = f" of {counted(threads, 'thread')}{' each' * bool(others)}" * (ranks.device.type == "cpu")
    return labelled("same bits", f"on {possible}{each}, because {step}")


def set_up(config: TrainConfig, device: torch.device, threads: int) -> None:
    """Prepare a rank for a run whose precision is chosen, before its first matrix product.

    Args:
        threads: of a CPU; with --deterministic all ranks and starts need the same number.
    """
    precision = config.precision
    if config.compiles(device.type):
        check_compiler(device.type)
    if config.cpu_offload and precision == "fp16" and device.type == "cuda":
        # GradScaler copies the scale to the host without waiting, and reads it there at once (torch 2.13).
        raise UserError("--cpu_offload: PyTorch cannot scale fp16 gradients in host memory; try --precision fp32")
    if device.type == "cuda" and precision == "fp32":  # else HellaSwag's close calls would be scored in TF32 too
        torch.set_float32_matmul_precision("high")
    if config.deterministic:
        be_deterministic(device, threads, config.compiles(device.type))


def validation_rows(config: TrainConfig, val: RowStream, sets: int = 1) -> int:
    """Return the rows of a validation set, one of `sets`: its share of eval_tokens, or all rows if there are fewer."""
    return min(max(1, config.eval_tokens // (sets * config.context_length)), val.rows_per_epoch)


# ---------------------------------------------------------------------------------------------------------------------
# the time and the cost, from measured steps or from the GPU's peak throughput


def work_per_token(config: TrainConfig, model: GPT) -> tuple[float, float]:
    """Return the FLOPs of a token in training, in which recomputed parts count again, and in evaluation."""
    everything, head = model.flops_per_token(), 6 * model.config.vocab_size * model.config.embd_size
    chunked = 0 < config.loss_chunk_size < config.mini_batch_size * config.context_length
    recomputed = (everything - head) * config.activation_checkpointing + head * chunked
    return everything + recomputed / 3, everything / 3  # a forward pass is a third of the work


def forecast(plan: Plan, step_s: float | None = None) -> list[str]:
    """Return as lines of the plan the time that is left, with what it assumes, and its cost.

    Args:
        step_s: measured seconds of a step.
    """
    config, price, asked = plan.config, plan.config.gpu_hour_cost, plan.history.config.precision
    steps, precision = config.max_steps - plan.history.step, config.precision
    count, gpu = plan.ranks.world_size, device_name(plan.ranks.device)
    tasks = load_core(config.core_dir, config.core_examples or None) if config.core_freq else []
    kinds = [
        (config.eval_freq, plan.val_rows() * config.context_length),
        (config.hellaswag_freq, HELLASWAG_TOKENS),
        (config.core_freq, sum(task.num_characters for task in tasks) // CHARACTERS_PER_TOKEN),
    ]
    evaluated = sum(size * math.ceil(steps / freq) for freq, size in kinds if freq)  # the last step too
    trained = steps * config.total_batch_size
    in_training, in_evaluation = work_per_token(config, plan.sketch)
    evaluation = evaluated * in_evaluation / (in_training * max(1, trained))
    work, is_known = f"{counted(steps, 'step')}, plus {evaluation:.1%} for evaluation", gpu in PEAK_FLOPS
    if step_s is None and not is_known:
        count, gpu, precision = 1, WELL_KNOWN, "bf16" if asked == "auto" else asked
    peak = count * PEAK_FLOPS.get(gpu, 0.0) * (0.5 if precision == "fp32" else 1.0)  # fp32 as TF32 (set_up)
    speed = config.total_batch_size / step_s if step_s else SHARE_OF_PEAK * peak / in_training
    seconds = trained / speed * (1 + evaluation)
    time = f"{duration_text(seconds)}: {work}, at {speed:,.0f} tokens/s, measured here"
    if step_s is None:
        there = f"{'unknown here; ' * (not is_known)}on {count} x {gpu} {duration_text(seconds)}"
        time = f"{there}, at {SHARE_OF_PEAK:.0%} of the peak in {precision}: {work}; run --dry_run measure"
    cost = f"{count * seconds / 3600 * price:,.2f}: {count} x {seconds / 3600:,.1f} h at {price:,.2f} per hour"
    return [labelled("time", time), *[labelled("cost", cost)] * bool(price)]
