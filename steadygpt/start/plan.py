"""The printed plan of a run: model, data, steps, device; with --dry_run also saves, memory and time."""

import platform
import shutil
from pathlib import Path

import torch

from model import CONVOLUTION, GPT, sketch_of
from steadygpt.base.durable import existing
from steadygpt.base.options import version_text
from steadygpt.base.text import bytes_text, counted, duration_text, labelled, some
from steadygpt.checkpoint.files import LATEST, checkpoint_bytes, scan
from steadygpt.config import TrainConfig
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.machine.attention import kernel_name
from steadygpt.machine.device import AUTOCAST, PEAK_FLOPS, device_name, memory_bytes
from steadygpt.machine.host import available_memory_bytes
from steadygpt.machine.ranks import Ranks
from steadygpt.start.data import Data
from steadygpt.start.find import Start
from steadygpt.start.settle import rows_per_epoch

SHARE_OF_PEAK = 0.4  # of a GPU's peak FLOP/s, assumed where no step is measured
ASSUMED_GPU = "NVIDIA H100 80GB HBM3"  # where the GPU's peak is not known
WORTH_A_GPU_S = 60  # on the assumed GPU; a shorter run is meant for this device
TOKENS_PER_PARAMETER = 20
MANY_EPOCHS = 4  # up to which repeated text is worth about as much as new text (Muennighoff et al. 2023)


def plan_lines(start: Start, config: TrainConfig, data: Data, ranks: Ranks) -> list[str]:
    """Return the plan of a run, a line for each subject."""
    world_size = ranks.world_size
    model = sketch_of(config.shape(config.vocab_size))
    parameters = model.num_parameters()
    lines = {"run": config.name}
    lines["version"] = f"{version_text()}, torch {torch.__version__}, Python {platform.python_version()}"
    convolutions = model.config.resolved().layer_pattern.count(CONVOLUTION)
    layers = counted(config.num_layers, "layer")
    if convolutions:
        layers += f" ({convolutions} with short convolutions)"
    lines["model"] = (
        f"{parameters / 1e6:,.2f} M parameters: {layers}, "
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
    queries = (1, config.num_heads, config.context_length, model.config.resolved().head_dim)
    kernel = kernel_name(queries, AUTOCAST[config.precision], ranks.device, config.dropout)
    if kernel and convolutions < config.num_layers:
        lines["device"] += f", attention by {kernel}"
    if config.mirror:
        lines["mirror"] = config.mirror
    note = note_of_disk(start, config, data, checkpoint_bytes(model, config.optimizer))
    return [labelled(name, text) for name, text in lines.items()] + [note] * bool(note)


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
    for shards, rows, digest in data.sources:
        count = counted(len(shards.shards), "shard")
        text = f"{shards.num_tokens:,} training tokens in {count} of {shards.folder}"
        if len(data.sources) > 1:
            share = data.phase.shares[digest] / BLOCK_ROWS
            used = data.phase.rows_used_at(last_row(start, config), config.seed)  # digest -> rows
            passes = used[digest] / rows.rows_per_epoch
            text = f"{shards.name}, {share:.1%} of the rows: {text}; {passes:,.2f} epochs by the end"
            if passes > MANY_EPOCHS:
                text += f" -- MORE THAN {MANY_EPOCHS}, of little benefit"
        texts.append(text)
    return some(texts, "source")


def note_of_disk(start: Start, config: TrainConfig, data: Data, size: int) -> str:
    """Return a warning if the checkpoints that a run keeps may not fit on the disk of its folder; "" if they do.

    Args:
        size: of a checkpoint, in bytes.
    """
    folder = Path(config.checkpoint_dir)
    disk = shutil.disk_usage(existing(folder))
    files = 3 + bool(config.eval_freq) + config.cools_down  # latest, backup, the one being written, best, stable
    if config.checkpoint_freq:
        files += min(config.keep_checkpoints, config.max_steps // config.checkpoint_freq)
    rows = rows_per_epoch(config, data)
    if rows:
        epochs = last_row(start, config) // rows
        files += min(config.keep_epochs or epochs, epochs)
    there = {file.inode: file.size for file in scan(folder)}
    available = disk.free + sum(there.values())
    if not disk.total or files * size <= available:  # a total of 0: the file system does not report its size
        return ""
    text = f"{bytes_text(available)} for up to {files} checkpoints of {bytes_text(size)}, {bytes_text(files * size)}"
    return labelled("disk", f"{text} -- NOT ENOUGH: free some space, or lower --keep_checkpoints")


# ---------------------------------------------------------------------------------------------------------------------
# the forecast of --dry_run


def forecast(start: Start, config: TrainConfig, data: Data, ranks: Ranks) -> list[str]:
    """Return lines for the plan: saves, memory, and time with its cost."""
    from steadygpt.start.memory import estimate_memory

    model = sketch_of(config.shape(config.vocab_size))
    memory, host = estimate_memory(config, model, ranks)
    # The monitor shows a GPU's tensors, but the whole process on a CPU.
    where = "per rank" if ranks.device.type == "cuda" else "per rank, besides Python and its libraries"
    return [
        labelled("saves", saves_text(config, model)),
        labelled("memory", uses_text(memory, where, memory_bytes(ranks.device), "--mini_batch_size auto")),
        labelled("host memory", uses_text(host, "on rank 0", available_memory_bytes(), "a larger host")),
        labelled("time", time_text(start, config, model, ranks)),
    ]


def saves_text(config: TrainConfig, model: GPT) -> str:
    """Return the size of a checkpoint, and how much timed saves write in a day, as text."""
    size = checkpoint_bytes(model, config.optimizer)
    text = f"{bytes_text(size)} each"
    if config.checkpoint_minutes:
        interval_s = 60 * config.checkpoint_minutes
        a_day = bytes_text(size * 86400 / interval_s)
        text += f"; {LATEST} every {duration_text(interval_s)} or less, up to {a_day} a day"
    return text


def uses_text(memory: dict[str, float], where: str, available: int, remedy: str) -> str:
    """Return the uses of memory as text, with advice if less is available."""
    total = sum(memory.values())
    parts = [f"{use} {bytes_text(size)}" for use, size in memory.items() if size >= 0.005 * total]
    text = f"about {bytes_text(total)} {where}: {', '.join(parts)}"
    if available < total:
        text += f" -- NOT ENOUGH: {bytes_text(available)} available; try {remedy} or a smaller model"
    return text


def time_text(start: Start, config: TrainConfig, model: GPT, ranks: Ranks) -> str:
    """Return time and cost of the remaining steps as text, at SHARE_OF_PEAK of this GPU or of ASSUMED_GPU."""
    gpu = device_name(ranks.device)
    gpus = ranks.world_size
    unknown = ""
    if gpu not in PEAK_FLOPS:
        gpu = ASSUMED_GPU
        gpus = 1
        unknown = "unknown here; "
    peak = PEAK_FLOPS[gpu]
    if config.precision == "fp32":
        peak /= 2  # as TF32
    steps = config.max_steps - start.state.step
    seconds = steps * config.total_batch_size * model.flops_per_token() / (SHARE_OF_PEAK * peak * gpus)
    if unknown and seconds < WORTH_A_GPU_S:
        return f"unknown here; the first of {counted(steps, 'step')} show the speed"
    text = f"{unknown}{counted(steps, 'step')} take {duration_text(seconds)} on {gpus} x {gpu}, at {SHARE_OF_PEAK:.0%} "
    text += f"of the peak in {config.precision}"
    if config.gpu_hour_cost:
        text += f"; they cost {gpus * seconds / 3600 * config.gpu_hour_cost:,.2f}"
    return text
