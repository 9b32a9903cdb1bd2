"""The plan of a run in words: model, data, steps, device; and with --dry_run also validation, disk, memory and time."""

import math
import platform
import shutil
from pathlib import Path

import torch

from evaluation import validation_rows
from model import GPT, sketch_of
from steadygpt.base.durable import existing
from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.files import LATEST, checkpoint_bytes
from steadygpt.choices import SCHEDULES
from steadygpt.config import TrainConfig
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import AUTOCAST, PEAK_FLOPS, device_name, memory_bytes
from steadygpt.machine.host import available_memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.run.schedule import epochs
from steadygpt.start.data import Data
from steadygpt.start.find import Start
from steadygpt.start.settle import rows_per_epoch
from steadygpt.version import version_text

SHARE_OF_PEAK = 0.4  # of a GPU's peak FLOP/s, assumed where no step is measured
ASSUMED_GPU = "NVIDIA H100 80GB HBM3"  # where the GPU's peak is not known
WORTH_A_GPU_S = 60  # on the assumed GPU; its time says nothing about a shorter run, which is meant for this device
HELLASWAG_TOKENS = 1_600_000  # with GPT-2's tokenizer
TOKENS_PER_PARAMETER = 20
MUCH = 0.1  # share of the training time
MANY_EPOCHS = 4  # up to which repeated text is worth about as much as new text (Muennighoff et al. 2023)


def plan_lines(start: Start, config: TrainConfig, data: Data, ranks: Ranks) -> list[str]:
    """Return what a run is going to do, a line for each subject, and a line for each surprising choice."""
    world_size = ranks.world_size
    model = sketch_of(config.shape(config.vocab_size))
    parameters = model.num_parameters()
    lines = {"run": config.name}
    lines["version"] = f"{version_text()}, torch {torch.__version__}, Python {platform.python_version()}"
    lines["model"] = (
        f"{parameters / 1e6:,.2f} M parameters: {counted(config.num_layers, 'layer')}, "
        f"{counted(config.num_heads, 'head')}, {config.embd_size:,} wide, context {config.context_length:,}, "
        f"vocabulary {data.vocab_size:,} ({data.tokenizer_record.tokenizer})"
    )
    lines["data"] = f"\n{labelled('data', '')}".join(data_texts(start, config, data))

    steps = (
        f"{config.max_steps:,}, each of {config.total_batch_size:,} tokens "
        f"({counted(config.mini_batch_size, 'row')} x {config.context_length:,} tokens x "
        f"{counted(world_size, 'rank')} x {counted(config.grad_accum_steps(world_size), 'micro-step')})"
    )
    last = last_row(start, config)
    rows = rows_per_epoch(config, data)
    if rows:
        passes = f"{last / rows:,.2f}" if last >= 0.1 * rows else f"{last / rows:.1g}"
        steps_per_epoch = rows / config.rows_per_step
        epoch = f"{steps_per_epoch:,.0f}" if steps_per_epoch >= 10 else f"{steps_per_epoch:,.2f}"
        steps += f"; {passes} epochs (1 epoch = {epoch} steps)"
    lines["steps"] = f"{steps}; warm-up {counted(config.warmup_steps, 'step')}"

    tokens = last * config.context_length
    optimal = f"--tokens_per_parameter {TOKENS_PER_PARAMETER} is about compute-optimal (Hoffmann et al. 2022)"
    lines["tokens"] = f"{tokens:,}, {tokens / parameters:,.1f} per parameter; {optimal}"

    lines["device"] = f"{world_size} x {device_name(ranks.device)}, {config.precision}"
    if world_size > 1 or config.is_fsdp:
        lines["device"] += f", {config.sharding}"
    shape = (1, config.num_heads, config.context_length, config.head_size)
    kernel = kernel_name(shape, AUTOCAST[config.precision], ranks.device, config.dropout)
    if kernel:
        lines["device"] += f", attention by {kernel}"
    if config.mirror:
        lines["mirror"] = config.mirror
    return [*(labelled(name, text) for name, text in lines.items()), *start.notes]


def last_row(start: Start, config: TrainConfig) -> int:
    """Return the rows that the run will have consumed at its last step."""
    return start.state.rows_consumed + (config.max_steps - start.state.step) * config.rows_per_step


def data_texts(start: Start, config: TrainConfig, data: Data) -> list[str]:
    """Return a text for each source of the training data."""
    if not data.sources:
        folders = " or ".join(folder for folder, _ in config.sources().values())
        name = data.tokenizer_record.tokenizer
        text = f"no shards in {folders} yet; planned with the vocabulary of --tokenizer {name}"
        if config.steps_per_epoch:
            text += f" and {config.steps_per_epoch:,} steps per epoch"
        return [text]
    texts = []
    for shards, rows, identity in data.sources:
        count = counted(len(shards.shards), "shard")
        text = f"{shards.num_tokens:,} training tokens in {count} of {shards.folder}"
        if len(data.sources) > 1:
            share = data.phase.shares[identity] / BLOCK_ROWS
            used = data.phase.rows_used_at(last_row(start, config), config.seed)  # identity -> rows
            passes = used[identity] / rows.rows_per_epoch
            text = f"{shards.name}, {share:.1%} of the rows: {text}; {passes:,.2f} epochs by the end"
            if passes > MANY_EPOCHS:
                text += f" -- MORE THAN {MANY_EPOCHS}, of little benefit"
        texts.append(text)
    return some(texts, "source")


# ---------------------------------------------------------------------------------------------------------------------
# what only --dry_run says


def forecast(start: Start, config: TrainConfig, data: Data, ranks: Ranks) -> list[str]:
    """Return lines for the plan: validation, disk, memory, time and cost, and what a start also checks."""
    from steadygpt.start.memory import estimate_memory

    model = sketch_of(config.shape(config.vocab_size))
    lines = []
    if val_rows(config, data):
        lines.append(labelled("validation", validation_text(config, data)))
    lines.append(labelled("checkpoints", checkpoints_text(start, config, data, model)))
    if config.checkpoint_minutes:
        lines.append(labelled("saves", saves_text(config, model)))
    memory, host = estimate_memory(config, model, ranks)
    # The monitor shows a GPU's tensors, but the whole process on a CPU.
    where = "per rank" if ranks.device.type == "cuda" else "per rank, besides Python and its libraries"
    lines += [
        labelled("memory", uses_text(memory, where, memory_bytes(ranks.device), "--mini_batch_size auto")),
        labelled("host memory", uses_text(host, "on rank 0", available_memory_bytes(), "a larger host")),
        *time_lines(start, config, data, model, ranks),
    ]
    if data.sets:
        tokens = sum(shards.num_tokens for shards in data.sets)
        lines.append(labelled("not checked", f"the content of the shards, {tokens:,} tokens, which a start reads"))
    return lines


def val_rows(config: TrainConfig, data: Data) -> int:
    """Return the rows of a validation over all of its sets; before the data is prepared, those of --eval_tokens."""
    if not data.sources and config.eval_freq:
        return config.eval_tokens // config.context_length
    return sum(validation_rows(config, val.rows, len(data.val_sets)) for val in data.val_sets)


def validation_text(config: TrainConfig, data: Data) -> str:
    rows = val_rows(config, data)
    total = sum(val.rows.rows_per_epoch for val in data.val_sets)
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


def checkpoints_text(start: Start, config: TrainConfig, data: Data, model: GPT) -> str:
    """Return the disk space of the checkpoints, and the flags that let them fit."""
    folder = Path(config.checkpoint_dir)
    size = checkpoint_bytes(model, config.optimizer)
    # latest.pt, its backup, the best one, and the one that is being written.
    files = config.keep_checkpoints + 4
    if SCHEDULES[config.schedule].cools_down:
        files += 1
    if config.mirror:  # one stays until it is uploaded
        files += 1
    passes = math.ceil(epochs(last_row(start, config), rows_per_epoch(config, data)))
    passes = min(passes, config.max_steps)  # a step saves once, also if it ends several epochs
    files += min(passes, config.keep_epochs) if config.keep_epochs else passes
    free = shutil.disk_usage(existing(folder)).free
    text = f"{bytes_text(size)} each, at most {files:,} in {folder}: {bytes_text(files * size)}; "
    text += f"{bytes_text(free)} free"
    if files * size > free:
        text += " -- NOT ENOUGH; try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
    return text


def saves_text(config: TrainConfig, model: GPT) -> str:
    """Return how often the run saves, and how many bytes that writes."""
    interval_s = 60 * config.checkpoint_minutes
    bytes_per_save = checkpoint_bytes(model, config.optimizer)
    bytes_a_day = bytes_per_save * 86400 / interval_s
    text = f"{LATEST} every {duration_text(interval_s)} or less, up to {bytes_text(bytes_a_day)} a day"
    if config.checkpoint_freq:
        text += f"; {bytes_text(bytes_per_save)} more every {counted(config.checkpoint_freq, 'step')}"
    return text


def uses_text(memory: dict[str, float], where: str, available: int, remedy: str) -> str:
    """Return the uses of memory in words, and what to try if less is available."""
    total = sum(memory.values())
    parts = [f"{use} {bytes_text(size)}" for use, size in memory.items() if size >= 0.005 * total]
    text = f"about {bytes_text(total)} {where}: {', '.join(parts)}"
    if available < total:
        text += f" -- NOT ENOUGH: {bytes_text(available)} available; try {remedy} or a smaller model"
    return text


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


def evaluated_tokens(start: Start, config: TrainConfig, data: Data) -> int:
    """Return the tokens of all evaluations that are left; each kind of evaluation also runs at the last step."""
    steps = config.max_steps - start.state.step
    tokens = 0
    if config.eval_freq:
        tokens += val_rows(config, data) * config.context_length * math.ceil(steps / config.eval_freq)
    if config.hellaswag_freq:
        tokens += HELLASWAG_TOKENS * math.ceil(steps / config.hellaswag_freq)
    return tokens


def time_lines(start: Start, config: TrainConfig, data: Data, model: GPT, ranks: Ranks) -> list[str]:
    """Return lines for the time that is left at a usual share of the GPU's peak throughput, and its cost."""
    steps = config.max_steps - start.state.step
    tokens = steps * config.total_batch_size
    in_training, in_evaluation = work_per_token(config, model)
    # As a share of training:
    evaluation = evaluated_tokens(start, config, data) * in_evaluation / (in_training * max(1, tokens))
    work = f"{counted(steps, 'step')}, plus {evaluation:.1%} for evaluation"
    count = ranks.world_size
    gpu = device_name(ranks.device)
    precision = config.precision
    where = ""
    if gpu not in PEAK_FLOPS:
        if ranks.device.type != "cuda" and precision == "fp32":
            precision = "bf16"
        count = 1
        gpu = ASSUMED_GPU
        where = "unknown here; "
    peak = count * PEAK_FLOPS[gpu]
    if precision == "fp32":
        peak /= 2  # as TF32
    seconds = tokens * in_training / (SHARE_OF_PEAK * peak) * (1 + evaluation)
    if where and seconds < WORTH_A_GPU_S:
        return [labelled("time", f"unknown here: {work}; the first steps show the speed")]
    where += f"on {count} x {gpu} {duration_text(seconds)}"
    lines = [labelled("time", f"{where}, at {SHARE_OF_PEAK:.0%} of the peak in {precision}: {work}")]
    if config.gpu_hour_cost:
        hours = seconds / 3600
        cost = count * hours * config.gpu_hour_cost
        text = f"{cost:,.2f}: {count} x {hours:,.1f} h at {config.gpu_hour_cost:,.2f} per hour"
        lines.append(labelled("cost", text))
    return lines
