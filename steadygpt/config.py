"""The options of train.py: flags, help, TOML keys, what a checkpoint stores.

TrainConfig has all options; model.py and optim.py declare those that they use. Flags override --config
NAME|FILE.toml, which overrides the defaults. On resume, the checkpoint's values replace the defaults.
"""

import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from dataloader import Order
from model import GPTConfig, GPTOptions
from optim import OptimConfig
from steadygpt.base.options import OptionError, UserError, check_options, option, options_of, read_flags
from steadygpt.base.text import MAX_NAME, printable
from steadygpt.data.shards import parse_folders

WEBHOOK = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d+)?(/[!-~]*)?", re.ASCII | re.IGNORECASE)
PRESETS = Path(__file__).resolve().parent.parent / "configs"
FINEWEB_EDU_TOKENS = 18795 * 524288  # per epoch of the default data, for plans before it is prepared

# Options by their group in --help.
_steps, _run, _data, _saves, _evals, _logs, _ranks = (
    partial(option, group=group)
    for group in ("steps", "run", "data", "checkpoints", "evaluation", "logging", "distributed")
)


@dataclass(frozen=True)
class TrainConfig(OptimConfig, GPTOptions, GPTConfig):
    """A model's shape and how to train it. The defaults train GPT-2 124M on FineWeb-Edu 10B."""

    # fmt: off
    total_batch_size: int = _steps(524288, "tokens per step, over all ranks", at_least=1, at_most=2**40,
                                   on_resume="ask")
    micro_steps: int = _steps(0, "of a new run, micro-steps per step on each rank, in place of total_batch_size",
                              on_resume="launch")
    mini_batch_size: int = _steps(32, "micro-batch size: most rows per micro-step on each rank; auto: as many as fit",
                                  spellings={"auto": "0"}, at_most=2**24)
    num_epochs: int = _steps(5, "passes over the data")
    steps_per_epoch: int = _steps(0, "steps per epoch; 0 = from the size of the data")
    tokens_per_parameter: float = _steps(0.0, "length of the run, in place of max_steps; 20 is about compute-optimal")
    max_bad_steps: int = _steps(5, "stop after this many consecutive NaN or infinite steps; 0 = off")
    spike_z: float = _steps(6.0, "warn of a loss this many standard deviations above the mean; 0 = off")
    skip_spikes: bool = _steps(False, "skip updates with a loss spike")
    max_hours: float = _steps(0.0, "save and stop after this many hours of a launch; 0 = off")

    config: str = _run("", "preset in configs/, or a TOML file of options", on_resume="launch")
    init_from: str = _run("scratch", "scratch, or weights: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face "
                          "folder, a checkpoint or its folder",
                          no_password=True, on_resume="never")
    run_name: str = _run("", "name of the run, if not that of its folder", on_resume="launch")
    seed: int = _run(1337, "seed of weights, data order and dropout", at_most=2**63 - 1, on_resume="never")
    device: str = _run("auto", "auto (CUDA if available), cpu, cuda or mps")
    precision: str = _run("auto", "auto: bf16 if supported, else fp16 on a GPU, fp32 elsewhere",
                          choices=("auto", "fp32", "bf16", "fp16"), aliases=("mixed_precision",),
                          spellings={"no": "fp32"})
    compile: str = _run("auto", "use torch.compile; auto: on CUDA only",
                        choices=("auto", "on", "off"), spellings={"True": "on", "False": "off"}, bare="on")
    deterministic: bool = _run(False, "deterministic kernels: a GPU repeats the same bits; slower")
    profile: int = _run(0, "steps to trace for Perfetto, after the first 3; 0 = off", on_resume="launch")
    dry_run: bool = _run(False, "print the plan and exit", on_resume="launch")

    data_dir: str = _data("data/edu_fineweb10B", "folder of token shards")
    mix: str = _data("", "mixture of folders, instead of data_dir: [NAME=]FOLDER[:WEIGHT],...")
    val: str = _data("", "validation sets, if not the data's val shards: [NAME=]FOLDER,...")
    tokenizer: str = _data("auto", "tokenizer, where the data does not name one; auto: gpt2", on_resume="never")
    shuffle_shards: bool = _data(True, "shuffle the shards in each epoch", on_resume="never")
    shuffle_rows: bool = _data(True, "shuffle the rows of a shard, cut elsewhere in each epoch", on_resume="never")

    checkpoint_dir: str = _saves("checkpoints", "folder of the run: checkpoints, logs and curves", on_resume="launch")
    checkpoint_freq: int = _saves(250, "steps between rolling checkpoints; 0 = off")
    checkpoint_minutes: float = _saves(1.0, "minutes between timed saves; more if saves are slow; 0 = off")
    keep_checkpoints: int = _saves(10, "newest rolling checkpoints to keep", at_least=1)
    keep_epochs: int = _saves(0, "newest epoch checkpoints to keep; 0 = all")
    resume: str = _saves("", "latest, auto (latest, or a new run), best, stable (before wsd's cool-down), a file "
                         "or a folder", bare="latest", spellings={"True": "latest", "true": "latest"},
                         aliases=("resume_from_checkpoint",), on_resume="launch")
    allow_changes: bool = _saves(False, "on resume, allow the recipe and the data to change", on_resume="launch")
    list_checkpoints: bool = _saves(False, "list the checkpoints in checkpoint_dir and exit", on_resume="launch")
    verbose: bool = _saves(False, "with --list_checkpoints, verify each; alias: -v", on_resume="launch", aliases=("v",))
    mirror: str = _saves("", "object store to copy the run to, such as s3://BUCKET/RUN", on_resume="launch",
                         no_password=True)
    background_upload: bool = _saves(True, "upload during training; off: each save waits for its upload")

    eval_freq: int = _evals(250, "steps between validations; 0 = off")
    eval_tokens: int = _evals(10485760, "validation tokens, equally many of each set", at_least=1)
    hellaswag_freq: int = _evals(500, "steps between evaluations on HellaSwag; 0 = off")
    hellaswag_file: str = _evals("", "HellaSwag as a .jsonl file, if not from the Hub")
    sample_freq: int = _evals(250, "steps between text samples; 0 = off")
    sample_prompt: str = _evals("", "prompt of the text samples, if not the start of a document")
    eval_only: bool = _evals(False, "evaluate --resume (default: latest) or --init_from, and exit", on_resume="launch")

    use_tensorboard: bool = _logs(False, "write curves, histograms and samples for TensorBoard")
    log_freq: int = _logs(1, "steps between log lines", at_least=1)
    use_wandb: bool = _logs(False, "also log to Weights & Biases", on_resume="launch")
    gpu_hour_cost: float = _logs(0.0, "price of a GPU-hour, to show the cost of the run")
    alert_url: str = _logs("", "webhook for alerts: Slack, Discord, ntfy or your own",
                           on_resume="launch", secret=True)

    sharding: str = _ranks("ddp", "ddp: a replica on each rank; fsdp: parameters and optimizer sharded",
                           choices=("ddp", "fsdp"))
    shard_size: int = _ranks(0, "with fsdp, ranks that share one full copy; 0 = all")
    timeout_minutes: float = _ranks(10.0, "end the run if a rank hangs this long", at_least=0.01, on_resume="launch")
    # fmt: on

    def __post_init__(self):
        check_options(self)
        if self.alert_url and not WEBHOOK.fullmatch(self.alert_url):  # a secret: the error must not show it
            expected = "http:// or https://, a server and a path, without a user name (ntfy takes ?auth=... instead)"
            raise OptionError("alert_url", "not the URL of a webhook", expected)
        if len(self.run_name) > MAX_NAME or not self.run_name.isprintable():
            expected = f"at most {MAX_NAME} printable characters"
            raise OptionError("run_name", repr(self.run_name[:MAX_NAME]), expected)
        parse_folders("mix", self.mix), parse_folders("val", self.val)

    def check_together(self) -> None:
        """Check that the options fit together; on resume, after the checkpoint's values are filled in."""
        self.check_shape()
        evaluates = self.eval_freq or self.hellaswag_freq or self.sample_freq
        for is_wrong, problem in (
            (self.min_lr > self.max_lr, f"--min_lr {self.min_lr} is above --max_lr {self.max_lr}"),
            (
                not (self.max_steps or self.tokens_per_parameter or self.num_epochs),
                "--max_steps, --num_epochs and --tokens_per_parameter are all 0; give one of them",
            ),
            (self.skip_spikes and not self.spike_z, "--skip_spikes needs a --spike_z above 0, which defines a spike"),
            # Muon's learning rate is a ratio to max_lr.
            (self.optimizer == "muon" and not self.max_lr, "--optimizer muon needs a --max_lr above 0"),
            (
                self.eval_only and not evaluates,
                "--eval_only needs --eval_freq, --hellaswag_freq or --sample_freq of 1",
            ),
            (self.eval_only and self.dry_run, "--eval_only and --dry_run cannot be combined; drop one"),
            (self.shard_size and not self.is_fsdp, "--shard_size needs --sharding fsdp"),
        ):
            if is_wrong:
                raise UserError(problem)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_name or printable(Path(os.path.realpath(self.checkpoint_dir)).name)[:MAX_NAME]

    @property
    def trains(self) -> bool:
        """False for --dry_run and --eval_only, which write nothing."""
        return not (self.dry_run or self.eval_only)

    def sources(self) -> dict[str, tuple[str, Fraction]]:
        """Return name -> (folder, weight) of the training data, from mix, or else data_dir alone."""
        name = Path(self.data_dir).absolute().name or "data"
        return parse_folders("mix", self.mix) if self.mix else {name: (self.data_dir, Fraction(1))}

    @property
    def order(self) -> Order:
        """The options that determine the order of the training rows."""
        return Order(self.seed, self.shuffle_shards, self.shuffle_rows)

    def with_tokens_of_step(self, world_size: int) -> "TrainConfig":
        """Return the configuration of a new run, with total_batch_size computed from micro_steps, if given."""
        if not self.micro_steps:
            return self
        if not self.mini_batch_size:
            raise UserError("--micro_steps needs a number of rows as --mini_batch_size; or give --total_batch_size")
        tokens = self.mini_batch_size * self.context_length * world_size * self.micro_steps
        return dataclasses.replace(self, total_batch_size=tokens)

    def shape(self, vocab_size: int) -> GPTConfig:
        """Return the shape of the model, with the data's vocabulary."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(GPTConfig)}
        return GPTConfig(**fields | {"vocab_size": vocab_size})

    def compiles(self, device_type: str) -> bool:
        return {"auto": device_type == "cuda", "on": True, "off": False}[self.compile]

    @property
    def is_fsdp(self) -> bool:
        return {"ddp": False, "fsdp": True}[self.sharding]

    def repeats_bits(self, device_type: str) -> bool:
        """Return whether an identical launch reproduces the same bits."""
        return self.deterministic or device_type == "cpu"

    def ranks_per_copy(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the weights and the optimizer state."""
        if not self.is_fsdp:
            return 1
        if self.shard_size and world_size % self.shard_size:
            raise UserError(f"--shard_size {self.shard_size} is not a divisor of the number of processes, {world_size}")
        return self.shard_size or world_size

    @property
    def rows_per_step(self) -> int:
        return max(1, self.total_batch_size // self.context_length)  # possible_rows() refuses 0

    def possible_rows(self, world_size: int) -> list[int]:
        """Return every mini_batch_size that splits the tokens of a step evenly, in ascending order."""
        tokens_per_row = self.context_length * world_size
        if self.total_batch_size % tokens_per_row:
            such_as = f"{(self.total_batch_size // tokens_per_row + 1) * tokens_per_row:,}"
            expected = f"a multiple of --context_length x processes = {tokens_per_row:,} tokens, such as {such_as}"
            if self.total_batch_size % self.context_length == 0:
                fitting = math.gcd(self.total_batch_size // self.context_length, world_size)
                expected += f", or another number of processes, such as {fitting}"
            raise OptionError("total_batch_size", f"{self.total_batch_size:,}", expected)
        rows = self.total_batch_size // tokens_per_row
        divisors = set()
        for divisor in range(1, math.isqrt(rows) + 1):
            if rows % divisor == 0:
                divisors.add(divisor)
                divisors.add(rows // divisor)
        return sorted(divisors)

    def with_even_rows(self, world_size: int) -> "TrainConfig":
        """Return the configuration with the largest mini_batch_size, up to its own, that splits a step evenly."""
        possible = self.possible_rows(world_size)
        if not self.mini_batch_size:  # auto
            return self
        fitting = max(rows for rows in possible if rows <= self.mini_batch_size)
        return dataclasses.replace(self, mini_batch_size=fitting)

    def grad_accum_steps(self, world_size: int) -> int:
        """Return the number of micro-steps in a step."""
        return self.total_batch_size // (self.mini_batch_size * self.context_length * world_size)


FIELDS = options_of(TrainConfig)
# The options that checkpoints store; the others belong to one launch.
STORED = [name for name, f in FIELDS.items() if f.metadata["on_resume"] in ("never", "ask", "free")]
# Alternatives: an option replaces the other one in a preset or a checkpoint.
EXCLUSIVE = {"total_batch_size": "micro_steps", "data_dir": "mix", "max_steps": "tokens_per_parameter"}
EXCLUSIVE |= {other: name for name, other in EXCLUSIVE.items()}
ABOUT = (
    "Train a GPT; on 4 GPUs: torchrun --nproc_per_node=4 train.py. Flags override --config, --flag-name is --flag_name."
)


# ---------------------------------------------------------------------------------------------------------------------
# where values come from


def parse_args(
    argv: Sequence[str], kind: type[TrainConfig] = TrainConfig, about: str = ABOUT
) -> tuple[TrainConfig, dict[str, str]]:
    """Return the configuration of a command line, and the options that were given: name -> "flag" or "preset"."""
    flags = read_flags(kind, argv, about)
    options = _on_preset(flags)
    for name in ("resume", "init_from", "mix", "val", "checkpoint_dir"):
        if options.get(name) == "":  # an unset variable in a script must not start a new run
            raise UserError(f"--{name} is empty; expected a value, or drop the flag")
    word = options.get("init_from")
    if word in ("resume", "latest", "auto", "best", "stable"):
        raise UserError(f"--init_from {word}: expected weights; to resume a run, use --resume")
    if options.get("eval_only") and options.get("init_from", "scratch") == "scratch":
        options.setdefault("resume", "latest")
    config = kind(**options)
    if not config.resume:
        config.check_together()
    set_by = {}
    for name in options:
        set_by[name] = "flag" if name in flags else "preset"
    return config, set_by


def _on_preset(flags: dict, read_by: tuple[str, ...] = ()) -> dict:
    """Return flags on top of the preset or TOML file that --config names; the files `read_by` include that file."""
    for name in flags:
        excluded = EXCLUSIVE.get(name)
        if excluded in flags:
            raise UserError(f"--{name} and --{excluded} cannot be combined; give one of them")
    if "config" not in flags:
        return flags
    name = flags["config"]
    path = PRESETS / f"{name}.toml"
    if name.endswith(".toml"):
        path = Path(name)
    if not path.is_file():
        presets = sorted(p.stem for p in PRESETS.glob("*.toml"))
        expected = f"a .toml file (see docs/from-other-trainers.md) or one of: {', '.join(presets)}"
        hint = "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(name, presets, n=1))
        problem = "not TOML" if Path(name).is_file() else "no such file or preset"
        raise UserError(f"--config {name}: {problem}; expected {expected}{hint}")
    try:
        if name in read_by:
            raise UserError("the file includes itself")
        text = path.read_text("utf-8-sig")  # editors on Windows write a byte order mark
        written = tomllib.loads(text)
        written.pop("description", "")  # which ./start_training.sh shows
        for option, value in written.items():
            if not isinstance(value, bool | int | float | str) or "\0" in str(value):
                raise UserError(f"{option} is {value!r:.50}; expected NAME = VALUE, a text without NUL or a number")
        argv = [f"--{option}={value}" for option, value in written.items()]
        preset = _on_preset(read_flags(TrainConfig, argv, ABOUT), (*read_by, name))
    except (ValueError, RecursionError) as error:  # a ValueError: invalid TOML or UTF-8, or too large a number
        raise UserError(f"{path}: not TOML: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    options = {}
    for name, value in preset.items():
        if EXCLUSIVE.get(name) not in flags:
            options[name] = value
    return options | flags
