"""What a run will do, worked out before anything is built: data, steps, precision, memory, disk."""

import dataclasses
import math
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from config import TrainConfig
from dataloader import RowStream
from model import GPT, GPTConfig
from steadygpt.checkpoint import checkpoint_files
from steadygpt.cli import UserError
from steadygpt.device import choose_precision, device_name
from steadygpt.distributed import Ranks
from steadygpt.shards import MANIFEST, Shard, check_shards, find_shards, read_manifest
from steadygpt.tokenizer import vocab_size_of


@dataclass(frozen=True)
class Data:
    """The shards of a run, their rows, and what their tokens mean."""

    train_shards: list[Shard]
    val_shards: list[Shard]
    train: RowStream
    val: RowStream | None
    manifest: dict | None
    tokenizer: str
    model_config: GPTConfig


def open_data(config: TrainConfig) -> Data:
    """Find the shards and map them.

    Raises: UserError for missing or contradictory data.
    """
    folder = Path(config.data_dir)
    train = find_shards(folder, "train")
    val = find_shards(folder, "val") if config.eval_freq else []
    manifest = read_manifest(folder)
    name = config.tokenizer
    if manifest and name not in ("auto", manifest["tokenizer"]):
        raise UserError(f"--tokenizer {name}, but {folder} was prepared with {manifest['tokenizer']!r}; drop the flag")
    if name == "auto":
        name = manifest["tokenizer"] if manifest else "gpt2"
    vocab_size = manifest["vocab_size"] if manifest else vocab_size_of(name)
    if name in ("gpt2", "bytes") and vocab_size < vocab_size_of(name):  # to know others may take a network
        raise UserError(
            f"{folder / MANIFEST}: vocab_size is {vocab_size:,}, but the tokenizer {name!r} has "
            f"{vocab_size_of(name):,}; prepare the data again"
        )
    shape = {f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig) if f.name != "vocab_size"}
    return Data(
        train_shards=train,
        val_shards=val,
        train=RowStream(train, config.context_length, config.seed, config.shuffle_shards, config.shuffle_rows),
        val=RowStream(val, config.context_length) if val else None,
        manifest=manifest,
        tokenizer=name,
        model_config=GPTConfig(vocab_size=vocab_size, **shape),
    )


@dataclass(frozen=True)
class Schedule:
    """How many steps there are, and where the epochs end."""

    rows_per_step: int
    rows_per_epoch: int
    steps_per_epoch: int  # 0: an epoch ends when every row was seen
    max_steps: int

    def epochs(self, rows: int) -> float:
        """Epochs in the first `rows` rows."""
        return rows / (self.steps_per_epoch * self.rows_per_step or self.rows_per_epoch)


def make_schedule(config: TrainConfig, data: Data, world_size: int, step: int = 0, rows: int = 0) -> Schedule:
    """The schedule of a run that is at `step` and has consumed `rows`, perhaps in steps of another size.

    Raises: UserError when the batch cannot be split, the warm-up does not fit, or the run is further already.
    """
    config.check_together()
    config.grad_accum_steps(world_size)
    rows_per_step = config.total_batch_size // config.context_length
    max_steps = config.max_steps or config.num_epochs * config.steps_per_epoch
    if not max_steps:  # as many as the rest of the rows takes
        max_steps = step + max(0, math.ceil((config.num_epochs * data.train.rows_per_epoch - rows) / rows_per_step))
    if step > max_steps:
        raise UserError(f"the checkpoint is at step {step:,}, past the run's {max_steps:,}; give a larger --max_steps")
    if config.warmup_steps >= max_steps:
        raise UserError(
            f"--warmup_steps {config.warmup_steps} is not shorter than the run of {max_steps} steps; "
            f"try --warmup_steps {max_steps // 20}"
        )
    return Schedule(rows_per_step, data.train.rows_per_epoch, config.steps_per_epoch, max_steps)


def learning_rate(config: TrainConfig, step: int, max_steps: int) -> float:
    """Linear warm-up to max_lr, then half a cosine down to min_lr (Loshchilov and Hutter 2017)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


def check_start(folder: Path, path: Path | None, checkpoint: dict | None, data: Data) -> dict[str, list]:
    """Make sure that the run may write into its folder and that the data is sound; returns the data's fingerprint.

    Raises: UserError when another run's checkpoints would be mixed with this one's, or the data is damaged or another.
    """
    there = checkpoint_files(folder)
    if there and (path is None or path.resolve().parent != folder.resolve()):
        raise UserError(
            f"{folder} already holds checkpoints ({there[0].name} and {len(there) - 1} more); continue them with "
            "--resume latest, or give this run another --checkpoint_dir"
        )
    fingerprint = dict(checkpoint["data_fingerprint"]) if checkpoint else {}
    for split, shards in (("train", data.train_shards), ("val", data.val_shards)):
        known = fingerprint.get(split, [])
        if not shards:
            continue  # no validation in this start
        found = check_shards(shards, data.manifest, data.model_config.vocab_size, known)
        for ours, theirs in zip_longest(found, known if known else found):
            if ours is None or theirs is None or ours[-1] != theirs[-1]:
                ours, theirs = (
                    f"{entry[0]} ({entry[1]:,} bytes, SHA-256 {entry[-1][:12]}...)" if entry else "nothing"
                    for entry in (ours, theirs)
                )
                raise UserError(
                    f"the {split} shards in {shards[0].path.parent} are not those that the checkpoint was trained on: "
                    f"found {ours}, expected {theirs}; name the right folder with --data_dir"
                )
        fingerprint[split] = found
    return fingerprint


def check_initial(initial: dict, source: str, data: Data) -> None:
    """Make sure that the weights of --init_from are for this run's model and tokenizer; their context may be longer.

    Raises: UserError naming the field that differs.
    """
    theirs, ours = GPTConfig(**initial["model_config"]), data.model_config
    of_data = {"vocab_size": (theirs.vocab_size, ours.vocab_size)}
    if initial["tokenizer"]:
        of_data["tokenizer"] = initial["tokenizer"], data.tokenizer
    for name, (found, expected) in of_data.items():
        if found != expected:
            raise UserError(f"--init_from {source}: its {name} is {found}; the data's is {expected}")
    for f in dataclasses.fields(GPTConfig):
        name = "mlp_size" if f.name == "intermediate_size" else f.name
        found, expected = getattr(theirs, name), getattr(ours, name)
        longer = name == "context_length" and found >= expected
        if name != "dropout" and found != expected and not longer:
            raise UserError(f"--init_from {source}: its {f.name} is {found}; this run's is {expected}")


def estimate_memory(config: TrainConfig, model: GPT, precision: str, compiled: bool, ranks: int) -> dict[str, float]:
    """Bytes that a rank needs, by what they are for; benchmarks/memory.py has them beside measured ones.

    Args:
        ranks: among which weights and optimizer are sharded.
    """
    tokens, C, layers = config.mini_batch_size * config.context_length, config.embd_size, config.num_layers
    each = 4 if precision == "fp32" else 2
    # What a block keeps for backward, counted in model.py: the inputs of both LayerNorms in fp32; their outputs, q, k,
    # v and attention's output twice; the MLP's hidden layer before and after GELU. (The attention matrix is never
    # stored.) Recomputing keeps one block's, and the fp32 inputs of all.
    block = tokens * (8 * C + each * (7 * C + 2 * model.config.mlp_size))
    blocks = layers * tokens * 4 * C + block if config.activation_checkpointing else layers * block
    # Eager cross-entropy holds its fp32 output and two gradients at once; compiled, the logits and their gradient.
    chunked = 0 < config.loss_chunk_size < tokens
    logits = (config.loss_chunk_size if chunked else tokens) * model.config.vocab_size
    return {
        "weights, gradients and Adam": 16 * model.num_parameters() / ranks,
        "activations": blocks,
        "logits": logits * (2 * each if compiled and not chunked else 12),
    }


def describe(config: TrainConfig, data: Data, schedule: Schedule, ranks: Ranks) -> list[str]:
    """The plan of a run, as lines."""
    with torch.device("meta"):
        model = GPT(data.model_config, initialize=False)
    N, T, B = model.num_parameters(), config.context_length, config.mini_batch_size
    precision = choose_precision(config.precision, ranks.device)
    sharing = ranks.world_size if config.sharding == "fsdp" else 1
    memory = estimate_memory(config, model, precision, config.compiles(ranks.device.type), sharing)
    checkpoint = 12 * N
    folder = Path(config.checkpoint_dir)
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    files = config.keep_checkpoints + 3 + math.ceil(schedule.epochs(schedule.max_steps * schedule.rows_per_step))
    val_rows = validation_rows(config, data.val) if data.val else 0
    return [
        f"model        {N / 1e6:,.2f} M parameters: {config.num_layers} layers, {config.num_heads} heads, "
        f"{config.embd_size} wide, context {T:,}, vocabulary {data.model_config.vocab_size:,} ({data.tokenizer})",
        f"data         {sum(shard.num_tokens for shard in data.train_shards):,} training tokens in "
        f"{len(data.train_shards)} shard{'s' * (len(data.train_shards) > 1)} of {config.data_dir}; "
        f"{val_rows * T:,} validation tokens",
        f"steps        {schedule.max_steps:,} of {config.total_batch_size:,} tokens = {B} rows x {T:,} tokens x "
        f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)} x "
        f"{config.grad_accum_steps(ranks.world_size)} micro-steps; "
        f"{schedule.rows_per_epoch / schedule.rows_per_step:,.1f} steps an epoch, "
        f"{schedule.epochs(schedule.max_steps * schedule.rows_per_step):.2f} epochs",
        f"device       {ranks.world_size} x {device_name(ranks.device)}, {precision}, {config.sharding}",
        f"memory       about {sum(memory.values()) / 1e9:.2f} GB a rank: "
        + ", ".join(f"{what} {size / 1e9:.2f}" for what, size in memory.items()),
        f"checkpoints  {checkpoint / 1e9:.2f} GB each, at most {files} in {folder}: {files * checkpoint / 1e9:.1f} GB; "
        f"{free / 1e9:.1f} GB free" + (" -- NOT ENOUGH" if files * checkpoint > free else ""),
    ]


def validation_rows(config: TrainConfig, val: RowStream) -> int:
    """Rows of each validation: those of the first eval_tokens, as far as there are."""
    return max(1, min(config.eval_tokens // config.context_length, val.rows_per_epoch))
