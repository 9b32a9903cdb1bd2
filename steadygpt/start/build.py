"""Building of a run: the last checks, model, optimizer, state, and the objects that the loop uses."""

import secrets
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataloader import Mixture
from evaluation import validation_rows
from model import GPT, sketch_of
from optim import make_optimizer, state_shapes
from steadygpt.base.options import RankError, git_commit
from steadygpt.checkpoint.files import FORMAT_VERSION, LATEST, DataRecord, TrainState, check_tensors
from steadygpt.config import FIELDS, STORED, TrainConfig
from steadygpt.convert.weights import check_fits, load_cropped
from steadygpt.data.tokenizer import load_tokenizer, tokenizer_on_all
from steadygpt.inference.scoring import hellaswag_of_run
from steadygpt.log.runlog import RunLog
from steadygpt.log.wandb_sink import check_wandb
from steadygpt.machine import parallel
from steadygpt.machine.device import autocast, be_deterministic, device_name, is_out_of_memory
from steadygpt.machine.host import check_compiler
from steadygpt.machine.parallel import HostCopy, fill, restore_optimizer
from steadygpt.machine.ranks import Ranks, Requests
from steadygpt.run.run import Run
from steadygpt.start.data import Data, by_name
from steadygpt.start.find import Start
from steadygpt.start.settle import Settled, rows_per_epoch

# Options of these groups determine a step, except for the time limit and for what a launch records in another form.
STEP_GROUPS = ("model", "memory", "optimization", "steps", "run", "data", "distributed")
NOT_OF_A_STEP = ("max_hours", "device", "data_dir", "mix", "val", "tokenizer")


def check_start(start: Start, config: TrainConfig, data: Data) -> list[str]:
    """Check on rank 0 that checkpoint, weights and tokenizer fit the run, without reading the shards.

    Returns: lines for the plan.
    """
    notes = []
    shape = config.shape(config.vocab_size)
    if config.use_wandb and not config.eval_only:
        check_wandb(Path(config.checkpoint_dir))
    if start.weights:
        note = check_fits(start.weights, config.init_from, shape, data.tokenizer_record)
        notes += [note] if note else []
    if data.sources and data.tokenizer_record.is_file:
        load_tokenizer(data.tokenizer_record, Path(data.folder))
    if start.checkpoint:
        shapes = state_shapes(shape, config.optimizer)
        check_tensors(start.checkpoint, start.path, sketch_of(shape), shapes)
    return notes


@contextmanager
def out_of_memory_explained(config: TrainConfig, ranks: Ranks):
    """Raise a RankError with advice in place of an out-of-memory error."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        from steadygpt.start.memory import memory_advice

        advice = memory_advice(config, ranks)
        if Path(config.checkpoint_dir, LATEST).exists():
            advice += f". The checkpoints in {config.checkpoint_dir} are intact: add --resume latest"
        raise RankError(f"out of memory on rank {ranks.rank}: {advice}") from error


def set_up(config: TrainConfig, device: torch.device) -> None:
    """Prepare a rank, before its first matrix product, for a run whose precision is settled."""
    if config.compiles(device.type):
        check_compiler(device.type)
    # TF32 is for fp32 runs. In other precisions, autocast computes the model's products in bf16 or fp16.
    if device.type == "cuda" and config.precision == "fp32":
        torch.set_float32_matmul_precision("high")
    if config.deterministic:
        be_deterministic(config.compiles(device.type))


def build(start: Start, settled: Settled, data: Data, ranks: Ranks, log: RunLog) -> Run:
    """Build a run. It writes nothing until its folder is opened (folder.open_folder)."""
    config = settled.of_launch
    device = ranks.device
    set_up(config, device)
    stamps: list[tuple[str, int, int]] = []
    with ranks.sharing_errors():
        if ranks.is_main:
            stamps = check_shards(start, config, data)
            if start.weights:
                load_weights(start.weights, config)
    tokenizer = None
    if config.sample_freq or config.hellaswag_freq or data.val_sets:
        tokenizer = tokenizer_on_all(data.tokenizer_record, ranks, log.warn)
    hellaswag = None
    if tokenizer and config.hellaswag_freq:
        hellaswag = hellaswag_of_run(config, tokenizer, ranks, log.warn)

    model = build_model(config, ranks)
    optimizer = make_optimizer(model, config, ranks, config.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = restore(start, config, model, optimizer, scaler, data, ranks)
    forward: nn.Module = model
    if config.compiles(device.type):
        forward = model.compiled()
    if ranks.world_size > 1 and not config.is_fsdp:
        forward = parallel.replicate(forward, ranks)
        if config.trains:
            shape = (config.mini_batch_size, config.context_length)
            parallel.settle_buckets(forward, device, shape, autocast(device, config.precision))
    validated_on = ""
    if data.val_sets:
        first = data.val_sets[0]
        validated_on = f"{validation_rows(config, first.rows, len(data.val_sets))} rows of {first.digest}"
    return Run(
        config=config,
        ranks=ranks,
        log=log,
        model=model,
        forward=forward,
        optimizer=optimizer,
        scaler=scaler,
        state=state,
        rows=Mixture({source.digest: source.rows for source in data.sources}, data.phase, config.seed),
        sources={source.shards.name: (source.digest, source.rows) for source in data.sources},
        rows_per_epoch=rows_per_epoch(config, data),
        val_sets={val_set.shards.name: val_set.rows for val_set in data.val_sets},
        validated_on=validated_on,
        tokenizer=tokenizer,
        hellaswag=hellaswag,
        requests=Requests(ranks, config.max_hours if config.trains else 0, log.beat),
        fixed_content=fixed_content(start, settled, data, model, stamps, ranks),
        host_copy=HostCopy(ranks),
        last_scores=dict(state.scores),
    )


def check_shards(start: Start, config: TrainConfig, data: Data) -> list[tuple[str, int, int]]:
    """Verify the shards that a run uses, on rank 0, except those unchanged since an earlier launch verified them.

    Returns: their stamps.
    """
    known = start.data["shards"] if start.data else []
    used = data.sets if config.trains else [val_set.shards for val_set in data.val_sets]
    stamps: list[tuple[str, int, int]] = []
    for shards in used:
        stamps += shards.check(config.vocab_size, known)
    return stamps


def load_weights(weights: dict, config: TrainConfig) -> None:
    """Load the tensors of the weights of --init_from, which may come from the Hub, and check them."""
    shape = config.shape(config.vocab_size)
    load_cropped(weights, shape)
    check_tensors(weights | {"optimizer": {}}, config.init_from, sketch_of(shape), {})


def build_model(config: TrainConfig, ranks: Ranks) -> GPT:
    """Build the model on the device of each rank; restore() sets its weights."""
    device = ranks.device
    if config.is_fsdp:  # which allocates only the shards of this rank
        device = torch.device("meta")
    with device:
        model = GPT(config.shape(config.vocab_size), config, initialize=False)
    if config.is_fsdp:
        parallel.shard_model(model, model.h, ranks, config.ranks_per_copy(ranks.world_size), config.precision)
    model.fill_rotary(ranks.device)  # a buffer, which to_empty() in parallel.shard_model left undefined
    return model


def restore(
    start: Start,
    config: TrainConfig,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    data: Data,
    ranks: Ranks,
) -> TrainState:
    """Load the state of the checkpoint, or only the weights of --init_from, or draw new weights; return the state."""
    checkpoint = start.checkpoint
    saved = checkpoint or start.weights
    if saved:
        fill(model, saved["model"].__getitem__, ranks)
    else:
        torch.manual_seed(config.seed)
        fill(model, model.initial_weight, ranks)
    state = start.state
    if checkpoint:
        if not config.eval_only:
            restore_optimizer(model, optimizer, checkpoint["optimizer"], ranks)
            if checkpoint["scaler"]:
                scaler.load_state_dict(scaler.state_dict() | checkpoint["scaler"])
        if has_new_steps(start, config, data):
            state.bad_steps = 0  # it counts only steps of one batch size and mixture
    return state


def has_new_steps(start: Start, config: TrainConfig, data: Data) -> bool:
    """Return whether mixture or batch size has changed since the checkpoint; True without one."""
    if not (start.checkpoint and start.data):
        return True
    before = TrainConfig(**start.checkpoint["options"])
    return before.rows_per_step != config.rows_per_step or start.data["phase"] != data.phase


def fixed_content(
    start: Start, settled: Settled, data: Data, model: GPT, stamps: list[tuple[str, int, int]], ranks: Ranks
) -> dict[str, Any]:
    """Return the content that all checkpoints of this launch share: all but tensors and state."""
    config = settled.of_launch
    first_step = start.state.step
    first_row = start.state.rows_consumed
    if start.data and not has_new_steps(start, config, data):
        first_step = start.data["first_step"]
        first_row = start.data["first_row"]
    record: DataRecord = {
        "phase": asdict(data.phase),  # type: ignore[typeddict-item]  # plain types only
        "sources": by_name(data.sources),
        "first_step": first_step,
        "first_row": first_row,
        "shards": stamps,
    }
    parent = start.checkpoint["launch"]["id"] if start.checkpoint else ""
    return {
        "format_version": FORMAT_VERSION,
        "model_config": asdict(model.config),
        "options": {name: getattr(settled.of_run, name) for name in STORED},
        "data": record,
        "launch": {"id": secrets.token_hex(8), "parent": parent, "settings": settings_of(config, data, ranks)},
        **asdict(data.tokenizer_record),
    }


def settings_of(config: TrainConfig, data: Data, ranks: Ranks) -> dict[str, Any]:
    """Return all that determines a step besides the checkpoint, by name."""
    commit = git_commit()
    settings: dict[str, Any] = {
        "ranks": ranks.world_size,
        "device": device_name(ranks.device),  # with the number of threads of a CPU
        "torch": str(torch.__version__),
        "commit": f"{commit[:12]}{commit[40:]}",  # after the 40 digits, whether files are changed
        "data": ", ".join(f"{digest[:12]} {rows}" for digest, rows in sorted(data.phase.shares.items())),
    }
    for name in STORED:
        if FIELDS[name].metadata["group"] in STEP_GROUPS and name not in NOT_OF_A_STEP:
            settings[name] = getattr(config, name)
    return settings
