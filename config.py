"""Every option of train.py, once: the flags, their help, the TOML keys and a checkpoint's train_config come from here.

Defaults < --config NAME|FILE.toml < flags; on resume the checkpoint's own values stand between defaults and --config.
"""

import argparse
import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from steadygpt.cli import OneLineParser, UserError

PRESETS = Path(__file__).resolve().parent / "configs"


def option(
    group: str,
    default,
    text: str,
    choices: tuple = (),
    bare=None,
    fixed: bool = False,
    deliberate: bool = False,
    launch: bool = False,
):
    """A field of TrainConfig.

    Args:
        bare: the value of the flag without one (`--resume`).
        fixed: part of what a checkpoint is; it cannot be changed on resume.
        deliberate: decides what is learned; on resume it changes with --allow_changes only.
        launch: belongs to this start of the script alone; a checkpoint's value is not taken over on resume.
    """
    metadata = {"group": group, "help": text, "choices": choices, "bare": bare}
    return field(default=default, metadata=metadata | {"fixed": fixed, "deliberate": deliberate, "launch": launch})


@dataclass(frozen=True)
class TrainConfig:
    """What a run is. The defaults train GPT-2 124M on FineWeb-Edu 10B."""

    # fmt: off
    config: str = option("run", "", "preset in configs/ or TOML file to start from", launch=True)
    run_name: str = option("run", "", "name of the run in TensorBoard and W&B (default: from the start time)")
    seed: int = option("run", 1337, "of weights, data order and dropout", fixed=True)
    device: str = option("run", "auto", "auto (CUDA if there is one), cpu, cuda, mps")
    precision: str = option("run", "auto", "auto is bf16 where the device computes in it, else fp32; --mixed_precision "
                            "no/fp16/bf16 says the same; fp8: the blocks' products, by torchao",
                            ("auto", "fp32", "bf16", "fp16", "fp8"))
    compile: str = option("run", "auto", "torch.compile the model; auto: on CUDA", ("auto", "on", "off"))
    deterministic: bool = option("run", False, "bitwise repeatable on CUDA too, slower")
    profile: int = option("run", 0, "steps to record, after 3 others, as a trace for Perfetto and TensorBoard; 0: none",
                          launch=True)
    dry_run: bool = option("run", False, "print the plan (sizes, memory, steps, disk) and exit", launch=True)

    data_dir: str = option("data", "data/edu_fineweb10B", "folder of token shards")
    tokenizer: str = option("data", "auto", "auto: what the data's manifest says, gpt2 where there is none", fixed=True)
    shuffle_shards: bool = option("data", True, "a new order of the shards each epoch", fixed=True)
    shuffle_rows: bool = option("data", True, "a new order of each shard's rows each epoch", fixed=True)

    num_layers: int = option("model", 12, "transformer blocks", fixed=True)
    num_heads: int = option("model", 12, "attention heads; divides embd_size", fixed=True)
    embd_size: int = option("model", 768, "width of the residual stream", fixed=True)
    context_length: int = option("model", 1024, "tokens a row", fixed=True)
    intermediate_size: int = option("model", 0, "width inside the MLP; 0: 4 * embd_size", fixed=True)
    bias: bool = option("model", True, "biases in linear layers and LayerNorms, as GPT-2", fixed=True)
    layer_norm_eps: float = option("model", 1e-5, "added to the variance in LayerNorms", fixed=True)
    gelu: str = option("model", "tanh", "GELU's tanh approximation, as GPT-2, or exact, as nanoGPT and GPT-NeoX",
                       ("tanh", "exact"), fixed=True)
    rotary_pct: float = option("model", 0.0, "rotary positions on this share of each head's dimensions, 0.25 in "
                               "GPT-NeoX; 0: learned positions, as GPT-2", fixed=True)
    rotary_base: float = option("model", 10000.0, "of the rotations' wavelengths", fixed=True)
    parallel_residual: bool = option("model", False, "attention and MLP read the same input, as GPT-NeoX", fixed=True)
    tied_head: bool = option("model", True, "the head is the embedding table, as GPT-2", fixed=True)
    dropout: float = option("model", 0.0, "probability, in [0, 1)", deliberate=True)
    init_from: str = option("model", "scratch", "scratch, or weights to start from: gpt2, gpt2-medium, gpt2-large, "
                            "gpt2-xl, a Hugging Face folder, a checkpoint file (also nanoGPT's)", fixed=True)

    total_batch_size: int = option("optimization", 524288, "tokens a step, over all ranks and micro-steps",
                                   deliberate=True)
    mini_batch_size: int = option("optimization", 32, "rows a rank computes at once")
    max_lr: float = option("optimization", 1e-3, "peak learning rate, after the warm-up", deliberate=True)
    min_lr: float = option("optimization", 1e-4, "learning rate at the last step of the cosine", deliberate=True)
    warmup_steps: int = option("optimization", 715, "steps of linear warm-up", deliberate=True)
    weight_decay: float = option("optimization", 0.1, "AdamW's, on matrices and embeddings", deliberate=True)
    grad_clip: float = option("optimization", 1.0, "largest gradient norm; 0: no clipping", deliberate=True)
    num_epochs: int = option("optimization", 5, "passes over the data")
    steps_per_epoch: int = option("optimization", 0, "0: from the shards (19073 is FineWeb-Edu 10B)")
    max_steps: int = option("optimization", 0, "steps of the run; 0: num_epochs * steps_per_epoch")
    max_bad_steps: int = option("optimization", 5, "stop after so many steps running whose loss or gradient is not "
                                "finite; their updates are skipped; 0: never")
    spike_z: float = option("optimization", 6.0, "warn of a loss this many standard deviations above the last 128's; "
                            "0: off")
    skip_spikes: bool = option("optimization", False, "and skip its update")
    max_hours: float = option("optimization", 0.0, "stop and save after this long in this start; 0: never")

    checkpoint_dir: str = option("checkpoints", "checkpoints", "folder of this run's checkpoints", launch=True)
    checkpoint_freq: int = option("checkpoints", 250, "steps between checkpoints; 0: off")
    checkpoint_minutes: float = option("checkpoints", 10.0, "save at least this often; 0: off")
    keep_checkpoints: int = option("checkpoints", 10, "newest rolling checkpoints that are kept")
    resume: str = option("checkpoints", "", "continue: latest, auto (latest, or afresh where there is none), best, "
                         "or a file; bare --resume is latest", bare="latest", launch=True)
    allow_changes: bool = option("checkpoints", False, "on resume: let batch size, learning rates, warm-up, weight "
                                 "decay, clipping and dropout differ from the checkpoint's", launch=True)
    list_checkpoints: bool = option("checkpoints", False, "print a table of checkpoint_dir and exit", launch=True)
    mirror: str = option("checkpoints", "", "fsspec URL of a folder that gets a copy of each save (s3://..., file://...)")

    eval_freq: int = option("evaluation", 250, "steps between validations; 0: off")
    eval_tokens: int = option("evaluation", 10485760, "validation tokens, the same ones each time")
    hellaswag_freq: int = option("evaluation", 250, "steps between HellaSwag evaluations; 0: off")
    hellaswag_file: str = option("evaluation", "", "hellaswag_val.jsonl; default: Rowan/hellaswag from the Hub")
    sample_freq: int = option("evaluation", 250, "steps between text samples; 0: off")
    sample_prompt: str = option("evaluation", "", "what samples continue (default: the start of a document)")

    use_tensorboard: bool = option("logging", False, "write curves, histograms and samples to tensorboard_dir")
    tensorboard_dir: str = option("logging", "runs", "folder of TensorBoard runs")
    logdir: str = option("logging", "logs", "folder of log.txt and metrics.jsonl")
    log_freq: int = option("logging", 1, "steps between log lines")
    use_wandb: bool = option("logging", False, "log to Weights & Biases too (pip install wandb)")
    gpu_hour_cost: float = option("logging", 0.0, "price of one GPU hour; shows the run's cost so far; 0: off")

    sharding: str = option("distributed", "ddp", "ddp: a replica a rank; fsdp: parameters and optimizer sharded",
                           ("ddp", "fsdp"))
    timeout_minutes: float = option("distributed", 30.0, "end the run when a rank is waited for so long", launch=True)
    cpu_offload: bool = option("distributed", False, "with fsdp: parameters and optimizer live in host memory")
    activation_checkpointing: bool = option("distributed", False, "recompute blocks in backward: less memory, slower")
    loss_chunk_size: int = option("distributed", 0, "tokens whose logits exist at once, recomputed in backward: less "
                                  "memory for long contexts; 0: all")
    # fmt: on

    def __post_init__(self):
        """Raises: UserError for a value no run can have."""
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise UserError(f"--{f.name} is {value!r}; expected one of {', '.join(choices)}")
            if f.type in (int, float) and not 0 <= value < float("inf"):
                raise UserError(f"--{f.name} is {value}; expected 0 or more")
        for name in (
            *("num_layers", "num_heads", "embd_size", "context_length"),
            *("total_batch_size", "mini_batch_size", "log_freq", "keep_checkpoints", "eval_tokens"),
        ):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; expected at least 1")
        for name in ("num_layers", "num_heads", "embd_size", "context_length", "intermediate_size"):
            most = 2**12 if name == "num_layers" else 2**24
            if getattr(self, name) > most:
                raise UserError(f"--{name} is {getattr(self, name):,}; expected at most {most:,}")
        if not self.init_from:
            raise UserError("--init_from is empty; expected scratch, a folder, a checkpoint file or gpt2")
        for name in ("layer_norm_eps", "rotary_base", "timeout_minutes"):
            if not getattr(self, name):
                raise UserError(f"--{name} is {getattr(self, name)}; expected more than 0")
        if self.rotary_pct > 1:
            raise UserError(f"--rotary_pct is {self.rotary_pct}; expected a share, at most 1")
        if self.dropout >= 1:
            raise UserError(f"--dropout is {self.dropout}; expected a probability below 1")
        if self.seed >= 2**63:
            raise UserError(f"--seed is {self.seed}; expected less than 2**63")

    def check_together(self) -> None:
        """Raises: UserError for values that do not go together; on resume, once the checkpoint's are among them."""
        if self.embd_size % self.num_heads:
            raise UserError(f"--embd_size {self.embd_size} is not divisible by --num_heads {self.num_heads}")
        rotary_dim = int(self.embd_size // self.num_heads * self.rotary_pct)
        if self.rotary_pct and (rotary_dim % 2 or not rotary_dim):
            raise UserError(
                f"--rotary_pct {self.rotary_pct} of {self.embd_size // self.num_heads} dimensions a head is "
                f"{rotary_dim}; expected an even number: they rotate in pairs"
            )
        if self.min_lr > self.max_lr:
            raise UserError(f"--min_lr {self.min_lr} is above --max_lr {self.max_lr}")
        if not self.max_steps and not self.num_epochs:
            raise UserError("--max_steps and --num_epochs are both 0; give one of them")
        if self.skip_spikes and not self.spike_z:
            raise UserError("--skip_spikes needs a --spike_z above 0, which says what a spike is")
        if self.cpu_offload and self.sharding != "fsdp":
            raise UserError("--cpu_offload needs --sharding fsdp")

    def compiles(self, device_type: str) -> bool:
        return self.compile == "on" or (self.compile == "auto" and device_type == "cuda")

    def grad_accum_steps(self, world_size: int) -> int:
        """Micro-steps a step.

        Raises: UserError naming batch sizes that work, when the tokens of a step cannot be split evenly.
        """
        rows, remainder = divmod(self.total_batch_size, self.context_length)
        if not remainder and rows % (self.mini_batch_size * world_size) == 0:
            return rows // (self.mini_batch_size * world_size)
        micro_step = self.mini_batch_size * self.context_length * world_size
        below = self.total_batch_size // micro_step * micro_step
        message = (
            f"--total_batch_size {self.total_batch_size:,} is not a multiple of --mini_batch_size "
            f"{self.mini_batch_size} x --context_length {self.context_length} x {world_size} processes = "
            f"{micro_step:,} tokens; --total_batch_size "
            f"{f'{below:,} or ' if below else ''}{below + micro_step:,} would work"
        )
        if not remainder and (fits := [b for b in range(self.mini_batch_size, 0, -1) if rows % (b * world_size) == 0]):
            message += f", or --mini_batch_size {fits[0]}"
        raise UserError(message)


FIELDS = {f.name: f for f in dataclasses.fields(TrainConfig)}


def parse_args(argv: list[str]) -> tuple[TrainConfig, frozenset[str]]:
    """The configuration of a command line, and the names of the options it gave, itself or through --config.

    Raises: UserError for a flag, key or value that does not exist or fit.
    """
    flags = _parse_flags(argv)
    if not flags.get("resume", "latest"):  # an unset variable of a script must not start afresh
        raise UserError("--resume is empty; expected latest, auto, best or a checkpoint file")
    preset = _read_toml(flags["config"]) if "config" in flags else {}
    given = preset | flags
    config = TrainConfig(**given)
    if not config.resume:
        config.check_together()
    return config, frozenset(given)


def resume_config(saved: dict, config: TrainConfig, given: frozenset[str]) -> tuple[TrainConfig, list[str]]:
    """The configuration of a resumed run, and a line for each value that is not the checkpoint's any more.

    Raises: UserError when a given option contradicts what the checkpoint is.
    """
    taken, changes = {}, []
    saved = {name: f.default for name, f in FIELDS.items()} | saved  # of a version that had fewer options
    for name, f in FIELDS.items():
        if f.metadata["launch"]:
            continue
        if name not in given:
            taken[name] = saved[name]
        elif getattr(config, name) != saved[name]:
            if f.metadata["fixed"]:
                raise UserError(
                    f"--{name} is {getattr(config, name)!r}, but the checkpoint was trained with {saved[name]!r}; "
                    f"drop the flag, or start another run in another --checkpoint_dir"
                )
            if f.metadata["deliberate"] and not config.allow_changes:
                raise UserError(
                    f"--{name} is {getattr(config, name)!r}, but the checkpoint was trained with {saved[name]!r}; "
                    f"drop the flag, or go on with the new value by adding --allow_changes"
                )
            changes.append(f"{name}: {saved[name]!r} -> {getattr(config, name)!r}")
    return dataclasses.replace(config, **taken), changes


def initial_config(shape: dict, config: TrainConfig, given: frozenset[str]) -> TrainConfig:
    """The configuration of a run that starts from weights of this model_config: what was not given is theirs."""
    taken = {name: value for name, value in shape.items() if name in FIELDS and name not in {*given, "dropout"}}
    return dataclasses.replace(config, **taken)


def _parse_flags(argv: list[str]) -> dict:
    """The flags that are in argv, as field name -> value."""

    parser = OneLineParser(
        prog="train.py",
        argument_default=argparse.SUPPRESS,
        description="Train a GPT. Defaults < --config < flags. --flag_name and --flag-name are the same.",
        epilog="torchrun --nproc_per_node=4 train.py --use_tensorboard      (one process per GPU)",
    )
    groups = {}
    for name, f in FIELDS.items():
        group = groups.setdefault(f.metadata["group"], parser.add_argument_group(f.metadata["group"]))
        kind, bare = (f.type, f.metadata["bare"]) if f.type is not bool else (_on_off, True)
        shown = {True: "on", False: "off", "": None}.get(f.default, f.default) if f.type in (bool, str) else f.default
        group.add_argument(
            f"--{name}",
            type=kind,
            nargs="?" if bare is not None else None,
            const=bare,
            metavar="|".join(f.metadata["choices"]) or ("on|off" if f.type is bool else f.type.__name__.upper()),
            help=f.metadata["help"] + (f" (default: {shown})" if shown is not None else ""),
        )
    parser.add_argument("--mixed_precision", dest="precision", type=_precision, help=argparse.SUPPRESS)
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{name}" for name in FIELDS]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        raise UserError(f"unknown argument {unknown[0]!r}; {f'did you mean {close[0]}?' if close else 'see --help'}")
    return vars(flags)


def _on_off(text: str) -> bool:
    try:
        return {
            "on": True,
            "true": True,
            "1": True,
            "yes": True,
            "off": False,
            "false": False,
            "0": False,
            "no": False,
        }[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected on or off") from None


def _precision(text: str) -> str:
    return "fp32" if text == "no" else text


def _read_toml(name: str, read_by: tuple[str, ...] = ()) -> dict:
    """The options of a preset name or TOML file, on top of those of the one that its own `config` names."""
    said = f"{read_by[-1]}: config = {name!r}" if read_by else f"--config {name}"
    if name in read_by:
        raise UserError(f"{said}: on top of itself")
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        presets = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
        raise UserError(f"{said}: there is no {path}; expected a .toml file or one of: {presets}")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from error
    for key, value in values.items():
        if key not in FIELDS:
            close = difflib.get_close_matches(key, FIELDS, n=1)
            raise UserError(f"{path}: unknown option {key!r}{f'; did you mean {close[0]}?' if close else ''}")
        kind = FIELDS[key].type
        if kind is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not kind:
            raise UserError(f"{path}: {key} is {value!r} ({type(value).__name__}); expected {kind.__name__}")
    return (_read_toml(values["config"], (*read_by, name)) if values.get("config") else {}) | values
