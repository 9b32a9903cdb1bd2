"""The plan of a run, settled before anything is built: data, steps, precision, memory, disk, time."""

import math
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dataloader import Data, RowStream
from model import GPT
from steadygpt import version_text
from steadygpt.base.disk import existing
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, labelled
from steadygpt.checkpoint.files import DECIDED, Entry, trained_with
from steadygpt.checkpoint.saves import interval_text
from steadygpt.config import FINEWEB_EDU_TOKENS, KEPT, TrainConfig
from steadygpt.convert.weights import check_fits
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.data.tokenizer import load_tokenizer
from steadygpt.log.status import read_status
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import AUTOCAST, choose_precision, device_name, memory_bytes
from steadygpt.machine.host import available_memory_bytes, check_compiler
from steadygpt.machine.ranks import Ranks
from steadygpt.run.history import History
from steadygpt.run.memory import checkpoint_bytes, estimate_memory, with_fitting_rows
from steadygpt.run.schedule import Schedule, make_schedule, notes_of_decay
from steadygpt.run.starts import epochs_of_sources, new_entry, note_of_mixture, phase_of

FEWER_ROWS = "--mini_batch_size auto or a smaller model"
MANY_EPOCHS = 4  # up to which repeated text is worth about as much as new text (Muennighoff et al. 2023)


@dataclass(frozen=True)
class Plan:
    """A run before it is built; the same on every rank but for the tensors in `history`."""

    config: TrainConfig  # settled
    starts: list[Entry]  # the last one is this start
    schedule: Schedule
    fingerprint: dict[str, list]  # of the shards
    notes: tuple[str, ...]  # further lines, one per surprising choice
    writes: bool  # logs and checkpoints: it is no dry run, evaluation or replay
    is_finished: bool  # the run in the folder has taken all its steps
    history: History
    data: Data
    sketch: GPT  # on the meta device
    ranks: Ranks

    def lines(self) -> list[str]:
        config, data, schedule, sketch, ranks = self.config, self.data, self.schedule, self.sketch, self.ranks
        T, world_size, micro_steps = config.context_length, ranks.world_size, config.grad_accum_steps(ranks.world_size)
        memory, host = estimate_memory(config, sketch, ranks)
        epochs = schedule.epochs(schedule.max_steps * schedule.rows_per_step)
        checkpoint = checkpoint_bytes(sketch, config.optimizer)
        emulated = ", emulated slowly" * (config.precision == "fp8" and ranks.device.type != "cuda")
        dtype = AUTOCAST.get(config.precision, torch.float32)
        kernel = kernel_name((1, config.num_heads, T, sketch.config.head_size), dtype, ranks.device, config.dropout)

        def uses(memory: dict[str, float], where: str, available: int, instead: str) -> str:
            total = sum(memory.values())
            parts = [f"{what} {bytes_text(size)}" for what, size in memory.items() if size >= 0.005 * total]
            text = ", ".join(parts) if len(parts) > 1 else parts[0].removesuffix(f" {bytes_text(total)}")
            advice = f" -- NOT ENOUGH: {bytes_text(available)} available; try {instead}"
            return f"about {bytes_text(total)} {where}: {text}{advice * (available < total)}"

        length = f"; {epochs:{',.2f' if epochs >= 0.1 else '.1g'}} epochs" * bool(epochs)
        if per_epoch := schedule.rows_per_epoch / schedule.rows_per_step:
            length += f" (1 epoch = {per_epoch:,{'.0f' if per_epoch >= 10 else '.2f'}} steps)"
        sharding = f", {config.sharding}" * (world_size > 1 or config.sharding == "fsdp")
        lines = [
            ("version", f"{version_text()}, torch {torch.__version__}, Python {platform.python_version()}"),
            ("model", f"{sketch.num_parameters() / 1e6:,.2f} M parameters: {counted(config.num_layers, 'layer')}, "
             f"{counted(config.num_heads, 'head')}, {config.embd_size:,} wide, context {T:,}, "
             f"vocabulary {data.vocab_size:,} ({data.tokenizer})"),
            *(("data", text) for text in self._data_texts()),
            ("validation", self._validation_text()),
            ("steps", f"{schedule.max_steps:,}, each of {config.total_batch_size:,} tokens "
             f"({counted(config.mini_batch_size, 'row')} x {T:,} tokens x {counted(world_size, 'rank')} x "
             f"{counted(micro_steps, 'micro-step')}){length}; warm-up {counted(schedule.warmup_steps, 'step')}"),
            ("device", f"{world_size} x {device_name(ranks.device)}, {config.precision}{emulated}{sharding}"
             f"{f', attention by {kernel}' * bool(kernel)}"),
            ("memory", uses(memory, "per rank", memory_bytes(ranks.device), FEWER_ROWS)),
            ("host memory", uses(host, "on rank 0", available_memory_bytes(), "a smaller model or a larger host")),
            ("checkpoints", self._checkpoints_text(checkpoint, math.ceil(epochs))),
            ("mirror", config.mirror),
            ("saves", interval_text(60 * config.checkpoint_minutes, checkpoint) if config.checkpoint_minutes else ""),
        ]  # fmt: skip
        return [*(labelled(label, text) for label, text in lines if text), *self.notes]

    def _data_texts(self) -> list[str]:
        """Return a description of each source of the training data."""
        config, data, schedule = self.config, self.data, self.schedule
        if not data.sources:
            folders = " or ".join(folder for folder, _ in config.sources().values())
            epochs = "" if config.max_steps else f" and {counted(config.steps_per_epoch, 'step')} per epoch"
            return [f"no shards in {folders} yet; planned with the vocabulary of --tokenizer {data.tokenizer}{epochs}"]
        of_sources = {}
        for shards, _, _ in data.sources:
            count = counted(len(shards.shards), "shard")
            of_sources[shards.name] = f"{shards.num_tokens:,} training tokens in {count} of {shards.folder}"
        if len(of_sources) > 1:
            steps, entry = schedule.max_steps - (self.history.step), self.starts[-1]
            end = epochs_of_sources(data, self.starts, entry["row"] + steps * schedule.rows_per_step)
            for name, text in of_sources.items():
                share = entry["shares"][entry["sources"][name][1]] / BLOCK_ROWS
                many = f" -- MORE THAN {MANY_EPOCHS}, of little benefit" * (end[name] > MANY_EPOCHS)
                of_sources[name] = f"{name}, {share:.1%} of the rows: {text}; {end[name]:,.2f} epochs by the end{many}"
        return [*of_sources.values()]

    def val_rows(self) -> dict[str, int]:
        """Return the rows of a validation by the names of the sets; of data that is not prepared yet, eval_tokens."""
        config = self.config
        if not self.data.sources and config.eval_freq:
            return {"": config.eval_tokens // config.context_length}
        return {val.shards.name: validation_rows(config, val.rows) for val in self.data.val_sets}

    def _validation_text(self) -> str:
        config, rows, T = self.config, self.val_rows(), self.config.context_length
        total = {val.shards.name: val.rows.rows_per_epoch for val in self.data.val_sets}
        sizes = [
            f"{name} " * (len(rows) > 1)
            + f"{count * T:,}"
            + f" of {total.get(name, 0) * T:,}" * (count < total.get(name, 0))
            for name, count in rows.items()
        ]
        if not sizes:
            return ""
        # A forward pass is a third of a step's work.
        cost = sum(rows.values()) * T / (3 * config.eval_freq * config.total_batch_size)
        steps, every = self.schedule.max_steps, counted(config.eval_freq, "step")
        if config.eval_freq > steps:
            return f"{', '.join(sizes)} tokens at the end"
        return f"{', '.join(sizes)} tokens every {every}: about {cost:.1%} of the training time"

    def _checkpoints_text(self, size: int, epochs: int) -> str:
        """Return the disk space of the checkpoints, each of `size` bytes, and the flag that lets them fit."""
        config, folder = self.config, Path(self.config.checkpoint_dir)
        free = shutil.disk_usage(existing(folder)).free
        # latest.pt, its backup, the best one, and the one that is being written.
        others = config.keep_checkpoints + 4 + (config.schedule == "wsd")
        others += bool(config.mirror)  # one stays until it is uploaded
        files = others + min(filter(None, (epochs, config.keep_epochs)), default=0)
        open_end = not (self.data.sources or epochs or config.keep_epochs)
        more = ", plus one per epoch (epoch length unknown until data exists)" * open_end
        text = f"{bytes_text(size)} each, at most {files:,} in {folder}: {bytes_text(files * size)}{more}; "
        text += f"{bytes_text(free)} free"
        if files * size <= free:
            return text
        advice = "try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
        if (fits := int(0.9 * free / size) - others) > 0:  # other files grow too
            advice = f"--keep_epochs {fits} keeps only the newest of {epochs:,} epochs"
        return f"{text} -- NOT ENOUGH; {advice}"


def settle(history: History, data: Data, ranks: Ranks, recorded: Sequence[Entry] = ()) -> Plan:
    """Settle on rank 0 every option that the data, the machine or the length of the run decides, and tell the others.

    Args:
        recorded: of a replay, the record of starts up to the one that it repeats, in place of a new one.
    """
    with torch.device("meta"):
        sketch = GPT(history.config.shape(data.vocab_size), initialize=False)
    memory = -ranks.max(-memory_bytes(ranks.device))
    settled = ranks.on_main(lambda: _settle_on_main(history, data, sketch, memory, ranks, recorded))
    return Plan(**ranks.broadcast(settled or {}), history=history, data=data, sketch=sketch, ranks=ranks)


def _settle_on_main(
    history: History, data: Data, sketch: GPT, memory: int, ranks: Ranks, recorded: Sequence[Entry]
) -> dict[str, Any]:
    """Return the fields of a Plan that do not depend on the rank."""
    asked, before, fingerprint, world_size = history.config, history.starts, history.fingerprint, ranks.world_size
    config, decided, notes = replace(asked, **history.decisions), history.decisions, []
    if history.weights:
        fits = check_fits(history.weights, config.init_from, sketch.config, data.tokenizer_record)
        notes += [labelled("weights", f"from {config.init_from}"), fits]
    if data.sources and data.tokenizer_record.is_file:  # without it, no checkpoint of the run could be sampled
        load_tokenizer(data.tokenizer_record, Path(data.folder))
    starts = [*recorded]
    if data.sources and not recorded:
        starts = [*before, new_entry(history, data, fingerprint, config.trains and bool(before), ranks)]
        notes.append(note_of_mixture(starts))

    if config.deterministic and before and ranks.device.type == "cpu":
        notes.append(keep_threads(before[-1]["threads"]))
    config = config if "total_batch_size" in decided else config.with_tokens_of_step(world_size)
    config = config.with_even_rows(1 if config.deterministic else world_size)
    sizes = (config.mini_batch_size or 1) * config.context_length, config.embd_size, sketch.config.mlp_size
    precision, of_precision = choose_precision(config.precision, ranks.device, *sizes)
    config = replace(config, precision=precision)
    if not (data.sources or config.mix or config.max_steps or config.steps_per_epoch):
        config = replace(config, steps_per_epoch=max(1, FINEWEB_EDU_TOKENS // config.total_batch_size))
    set_up(config, ranks.device, torch.get_num_threads())
    config, of_memory = with_fitting_rows(config, sketch, memory, ranks)
    if config.deterministic:
        notes.append(note_of_processes(config, before, ranks))
    notes += [note_of_rows(asked, config, world_size), of_precision]

    is_strict = "warmup_steps" in decided or history.given.get("warmup_steps") == "flag"
    has_epochs = data.rows_per_epoch and not phase_of(starts).number if starts else not config.mix
    rows_per_epoch = data.rows_per_epoch if has_epochs else None
    schedule = make_schedule(config, rows_per_epoch, world_size, history.step, history.rows_consumed, is_strict)
    config = replace(config, tokenizer=data.tokenizer, vocab_size=sketch.config.vocab_size)
    config = replace(config, warmup_steps=schedule.warmup_steps)
    notes += notes_of_decay(config, schedule, history.checkpoint)
    writes = config.trains and not recorded
    if writes:
        # Last, because it may read all shards.
        fingerprint |= {shards.key: shards.check(config.vocab_size, fingerprint) for shards in data.sets}
        starts[-1] = new_entry(history, data, fingerprint, True, ranks)
    if starts and not recorded:
        # The rows that memory has room for are tried once, and --deterministic needs the same ones.
        sticky = (*DECIDED, "mini_batch_size") if config.deterministic or not asked.mini_batch_size else DECIDED
        starts[-1]["options"] = {name: getattr(asked, name) for name in KEPT}
        starts[-1]["decisions"] = {name: getattr(config, name) for name in sticky} | dict(decided)
    ended = read_status(Path(config.checkpoint_dir)).get("status") == "finished"
    return {
        "config": config,
        "starts": starts,
        "schedule": schedule,
        "fingerprint": fingerprint,
        "notes": tuple(filter(None, [of_memory, *history.notes, *notes])),
        "writes": writes,
        "is_finished": ended and history.checkpoint is not None and history.step >= schedule.max_steps,
    }


def keep_threads(before: int) -> str:
    """Use as many threads on a CPU as the first start did; return a line for the plan if that is a change."""
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    changed = f"{threads} -> {before}, as before: --deterministic needs the same number"
    return labelled("threads", changed) if threads != before else ""


def note_of_processes(config: TrainConfig, before: Sequence[Entry], ranks: Ranks) -> str:
    """Return the numbers of processes that compute the same bits, as a line for the plan."""
    count, micro_batches = config.virtual_ranks(), config.grad_accum_steps(1)
    *others, most = [str(2**n) for n in range(count.bit_length())]
    possible = f"{', '.join(others)} or {most} processes" if others else "1 process"
    step = f"a step has {counted(micro_batches, 'micro-batch')}"
    if not config.eval_only and count % ranks.world_size:
        rows = config.total_batch_size // config.context_length
        fewer = ranks.world_size in (2, 4, 8) and rows % ranks.world_size == 0 and not before
        advice = "; or start a new run with a smaller --mini_batch_size" * fewer
        raise UserError(f"--deterministic: {step}, so expected {possible}; found {ranks.world_size}{advice}")
    if before and (began := trained_with(before[-1]).virtual_ranks()) != count:
        raise UserError(
            f"--deterministic: --total_batch_size {config.total_batch_size:,} fits {possible}, but "
            f"the run began with one that fits {began}; drop the flag"
        )
    threads = torch.get_num_threads()
    each = f" of {counted(threads, 'thread')}{' each' * bool(others)}" * (ranks.device.type == "cpu")
    return labelled("same bits", f"on {possible}{each}, because {step}")


def note_of_rows(before: TrainConfig, config: TrainConfig, world_size: int) -> str:
    """Return a line for the plan if the rows of a step do not divide evenly into the micro-batches asked for."""
    wanted, rows = before.mini_batch_size, config.total_batch_size // config.context_length // world_size
    if wanted in (0, config.mini_batch_size):
        return ""
    each = f"each of {world_size} ranks" if world_size > 1 else "1 rank"
    text = f"{config.mini_batch_size} per micro-step instead of --mini_batch_size {wanted}: a step has "
    return labelled("rows", f"{text}{counted(rows, 'row')} on {each}")


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
        if device.type == "cpu":
            torch.set_num_threads(threads)
        if config.compiles(device.type):  # else each process times a GPU's kernels, and the fastest one may differ
            torch._inductor.config.deterministic = True
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # without warn_only, which leaves attention as it is
        # Every tensor is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def validation_rows(config: TrainConfig, val: RowStream) -> int:
    """Return the number of rows of a validation: eval_tokens, or all rows if there are fewer."""
    return min(max(1, config.eval_tokens // config.context_length), val.rows_per_epoch)
