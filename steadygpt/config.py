"""The options of train.py, declared once, in TrainConfig: flags, help, TOML keys, what a checkpoint stores.

Flags override --config NAME|FILE.toml, which overrides the defaults. On resume, the checkpoint's values replace the
defaults.
"""

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

from steadygpt.base.options import OTHER_CONFIGS, OptionError, UserError, check_options, option, options_of, read_flags
from steadygpt.base.text import counted
from steadygpt.base.typed import typed
from steadygpt.data.shards import parse_folders
from steadygpt.data.tasks import EXPECTED, parse_tasks

WEBHOOK = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d+)?(/[!-~]*)?", re.ASCII | re.IGNORECASE)
VALUE = bool | int | float | Annotated[str, "[^\0]*"]  # in TOML
PRESETS = Path(__file__).resolve().parent.parent / "configs"
FINEWEB_EDU_TOKENS = 18795 * 524288  # of an epoch of the default data: what a plan assumes until it is there
MAX_VIRTUAL_RANKS = 8  # the most processes that compute the same bits

# Options by their group in --help.
_shape = partial(option, group="model", on_resume="never")
_run, _data, _optim, _saves, _evals, _logs, _ranks = (
    partial(option, group=group)
    for group in ("run", "data", "optimization", "checkpoints", "evaluation", "logging", "distributed")
)
_recipe = partial(_optim, on_resume="ask")  # of an update, so that no resume changes it by accident


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. The defaults are GPT-2 124M; configs/gpt-neox-1.2b.toml has GPT-NeoX's values.

    All fields but vocab_size, which comes from the data, are options of train.py.
    """

    # fmt: off
    vocab_size: int = 50257
    num_layers: int = _shape(12, "number of transformer blocks", at_least=1, at_most=2**12)
    num_heads: int = _shape(12, "number of attention heads", at_least=1, at_most=2**24)
    num_kv_heads: int = _shape(0, "number of key and value heads, each shared by a group of attention heads; 0 = "
                               "num_heads", at_most=2**24)
    embd_size: int = _shape(768, "width of the residual stream", at_least=1, at_most=2**24)
    head_dim: int = _shape(0, "dimensions per head; 0 = embd_size / num_heads", at_most=2**24)
    context_length: int = _shape(1024, "tokens per row", at_least=1, at_most=2**24)
    intermediate_size: int = _shape(0, "width of the MLP; 0 = 4 * embd_size, or with swiglu 8/3 * embd_size, for as "
                                    "many parameters", at_most=2**24)
    bias: bool = _shape(True, "biases in linear layers and LayerNorms, as in GPT-2")
    norm: str = _shape("layernorm", "layernorm, as in GPT-2; rmsnorm, as in Llama; rmsnorm_no_weight, also applied to "
                       "the embedding, as in NanoChat", choices=("layernorm", "rmsnorm", "rmsnorm_no_weight"))
    norm_eps: float = _shape(1e-5, "epsilon of the norms, added to the variance", above=0)
    qk_norm: bool = _shape(False, "apply RMSNorm to each head's queries and keys, as in Qwen 3 and NanoChat")
    activation: str = _shape("gelu_tanh", "activation of the MLP: gelu_tanh, as in GPT-2; gelu, as in nanoGPT and "
                             "GPT-NeoX; relu2, as in NanoChat; swiglu, as in Llama",
                             choices=("gelu_tanh", "gelu", "relu2", "swiglu"))
    rotary_pct: float = _shape(0.0, "fraction of each head's dimensions with rotary positions, 0.25 in GPT-NeoX; 0 = "
                               "learned positions, as in GPT-2", at_most=1)
    rotary_base: float = _shape(10000.0, "base of the rotary wavelengths", above=0, at_most=1e15)
    parallel_residual: bool = _shape(False, "attention and MLP read the same input, as in GPT-NeoX")
    tied_head: bool = _shape(True, "share the embedding table with the head, as in GPT-2")
    logit_softcap: float = _shape(0.0, "cap logits smoothly at c, by c * tanh(logits / c); 15 in NanoChat; 0 = no cap")
    dropout: float = _shape(0.0, "dropout probability", below=1, on_resume="ask")
    # fmt: on

    def check_shape(self) -> None:
        """Check the fields and whether they fit each other."""
        check_options(self)
        if not 1 <= self.vocab_size <= 2**24:
            raise OptionError("vocab_size", f"{self.vocab_size:,}", f"1 to {2**24:,}")
        if not self.head_dim and self.embd_size % self.num_heads:
            raise OptionError("num_heads", self.num_heads, f"a divisor of embd_size, {self.embd_size}")
        if self.num_heads % self.kv_heads:
            raise OptionError("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads, {self.num_heads}")
        if self.rotary_pct and (self.rotary_dim % 2 or not self.rotary_dim):
            found = f"{self.rotary_pct}, {self.rotary_dim} of {self.head_size} dimensions per head"
            raise OptionError("rotary_pct", found, "an even number of dimensions: they rotate in pairs")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: matrix products are fastest at multiples of 64."""
        return math.ceil(self.vocab_size / 64) * 64

    @property
    def head_size(self) -> int:
        return self.head_dim or self.embd_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.rotary_pct)

    @property
    def mlp_size(self) -> int:
        if self.activation == "swiglu" and not self.intermediate_size:
            return math.ceil(self.embd_size / 3) * 8  # a multiple of 8
        return self.intermediate_size or 4 * self.embd_size

    def parts(self, name: str) -> tuple[int, ...]:
        """Return the rows of the matrices that a weight of a block stacks, by its name."""
        if "c_attn" in name:  # queries, keys and values
            return tuple(self.head_size * heads for heads in (self.num_heads, self.kv_heads, self.kv_heads))
        if "c_fc" in name:  # with SwiGLU the gate's, then the other one's
            return (self.mlp_size,) * (2 if self.activation == "swiglu" else 1)
        return (self.embd_size,)


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    """A model's shape and how to train it. The defaults train GPT-2 124M on FineWeb-Edu 10B."""

    # fmt: off
    init_from: str = _shape("scratch", "scratch, or weights to start from: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a "
                            "Hugging Face folder, or a checkpoint file (including nanoGPT's) or folder")

    config: str = _run("", "preset in configs/ or TOML file of options, which flags override", on_resume="launch")
    run_name: str = _run("", "name of the run in TensorBoard and W&B (default: the start time)", on_resume="place")
    seed: int = _run(1337, "seed of weights, data order and dropout", below=2**63, on_resume="never")
    device: str = _run("auto", "auto (CUDA if available), cpu, cuda or mps")
    precision: str = _run("auto", "auto: on a GPU bf16 if supported, else fp16; on a CPU the faster of bf16 and fp32, "
                          "measured at the first start; fp8: block matmuls via torchao; alias: --mixed_precision no, "
                          "fp16 or bf16", choices=("auto", "fp32", "bf16", "fp16", "fp8"), aliases=("mixed_precision",),
                          spellings={"no": "fp32"})
    compile: str = _run("auto", "compile the model with torch.compile; auto: on CUDA only",
                        choices=("auto", "on", "off"), spellings={"True": "on", "False": "off"})
    deterministic: bool = _run(False, "bit-identical results on each number of processes that the plan names; slower",
                               on_resume="never")
    profile: int = _run(0, "steps to record as a trace for Perfetto and TensorBoard, after the first 3 steps; 0 = off",
                        on_resume="launch")
    dry_run: str = _run("off", "print the plan (sizes, memory, steps, disk, time, cost) and exit; measure: time some "
                        "micro-steps for it", choices=("off", "plan", "measure"), bare="plan",
                        spellings={"on": "plan", "True": "plan"}, on_resume="launch")

    data_dir: str = _data("data/edu_fineweb10B", "folder of token shards")
    mix: str = _data("", "mixture of folders with weights, instead of data_dir: [NAME=]FOLDER[:WEIGHT],...")
    val: str = _data("", "folders of validation sets: [NAME=]FOLDER,... (default: val shards of the training data)")
    tokenizer: str = _data("auto", "auto: from the manifest of the data, its tokenizer.json, or gpt2; or a name, "
                           "hf:NAME, or the path of a tokenizer.json", on_resume="never")
    shuffle_shards: bool = _data(True, "shuffle the shards in each epoch", on_resume="never")
    shuffle_rows: bool = _data(True, "shuffle the rows of each shard in each epoch", on_resume="never")

    total_batch_size: int = _recipe(524288, "tokens per step, over all ranks and micro-steps", at_least=1,
                                    at_most=2**40)
    micro_steps: int = _optim(0, "micro-steps per step on each rank, instead of total_batch_size, which the first "
                              "start derives from them; 0 = total_batch_size decides", on_resume="never")
    mini_batch_size: int = _optim(32, "micro-batch size: rows per micro-step on each rank, or fewer if they do not "
                                  "divide a step evenly; 0 or auto: as many as fit in memory", spellings={"auto": "0"},
                                  at_most=2**24)
    optimizer: str = _optim("adamw", "adamw, or muon for the matrices of the blocks with AdamW for the rest",
                            choices=("adamw", "muon"), on_resume="never")
    max_lr: float = _recipe(1e-3, "peak learning rate, after the warm-up")
    min_lr: float = _recipe(1e-4, "learning rate at the end of the decay")
    schedule: str = _recipe("cosine", "learning rate after the warm-up: cosine; wsd: stable, then a linear cool-down; "
                            "constant", choices=("cosine", "wsd", "constant"))
    cooldown: float = _recipe(0.4, "fraction of the steps in wsd's cool-down", at_most=1)
    warmup_steps: int = _recipe(715, "steps of linear warm-up; capped at a tenth of the run unless set by flag")
    muon_lr: float = _recipe(0.01, "peak learning rate of Muon, on the same schedule", above=0)
    muon_momentum: float = _recipe(0.95, "momentum of Muon", below=1)
    muon_beta2: float = _recipe(0.0, "decay of the mean square of each neuron's updates in Muon, as in NorMuon; 0 = "
                                "off", below=1)
    weight_decay: float = _recipe(0.1, "weight decay of matrices and embeddings")
    adam_beta1: float = _recipe(0.9, "AdamW beta1, the decay of the mean of gradients", below=1)
    adam_beta2: float = _recipe(0.95, "AdamW beta2, the decay of the mean of squared gradients", below=1)
    adam_eps: float = _recipe(1e-8, "AdamW epsilon", above=0)
    grad_clip: float = _recipe(1.0, "maximum gradient norm; 0 = no clipping")
    num_epochs: int = _optim(5, "passes over the data")
    steps_per_epoch: int = _optim(0, "steps per epoch; 0 = from the size of the data (18795 for FineWeb-Edu 10B)")
    max_steps: int = _optim(0, "steps of the run; 0 = num_epochs * steps_per_epoch")
    max_bad_steps: int = _optim(5, "stop after this many consecutive steps with a NaN or infinite loss or gradient, "
                                "whose updates are always skipped; 0 = off")
    spike_z: float = _optim(6.0, "warn of a loss spike, this many standard deviations above the mean of the last 128 "
                            "losses; 0 = off")
    skip_spikes: bool = _optim(False, "skip updates with a loss spike")
    max_hours: float = _optim(0.0, "stop and save this many hours after the start of the process; 0 = off")

    checkpoint_dir: str = _saves("checkpoints", "folder for the checkpoints of this run", on_resume="launch")
    checkpoint_freq: int = _saves(250, "steps between rolling checkpoints; 0 = off")
    checkpoint_minutes: float = _saves(1.0, "minutes between timed saves of latest.pt, longer if saving would cost "
                                       "more than 1% of training time; 0 = off")
    keep_checkpoints: int = _saves(10, "rolling checkpoints to keep, the newest", at_least=1)
    keep_epochs: int = _saves(0, "epoch checkpoints to keep, the newest; 0 = all")
    resume: str = _saves("", "resume from latest, auto (latest, or start a new run if there is none), best, stable "
                         "(before wsd's cool-down, to train longer), a file or a folder; --resume alone means latest; "
                         "alias: --resume_from_checkpoint", bare="latest",
                         spellings={"True": "latest", "true": "latest"}, aliases=("resume_from_checkpoint",),
                         on_resume="launch")
    allow_changes: bool = _saves(False, "on resume, allow the batch size, learning rates, schedule, dropout, optimizer "
                                 "constants and training data to differ from the checkpoint's", on_resume="launch")
    list_checkpoints: bool = _saves(False, "list the checkpoints in checkpoint_dir and exit", on_resume="launch")
    verbose: bool = _saves(False, "with --list_checkpoints, verify each checkpoint and show its contents; alias: -v",
                           on_resume="launch", aliases=("v",))
    mirror: str = _saves("", "folder of an object store to copy the run to: s3://BUCKET/RUN, gs://BUCKET/RUN, or "
                         "another fsspec URL", on_resume="place", no_password=True)
    mirror_keep: int = _saves(10, "rolling checkpoints to keep in the mirror, the newest; 0 = all")
    mirror_minutes: float = _saves(10.0, "minutes between uploads of timed saves")
    background_upload: bool = _saves(True, "upload to the mirror while training continues; off: each save waits for "
                                     "its upload")

    eval_freq: int = _evals(250, "steps between validations; 0 = off")
    eval_tokens: int = _evals(10485760, "validation tokens to use, spread evenly over the split", at_least=1)
    eval_tasks: str = _evals("hellaswag", EXPECTED)
    hellaswag_freq: int = _evals(500, "steps between evaluations of eval_tasks; 0 = off")
    sample_freq: int = _evals(250, "steps between text samples; 0 = off")
    sample_prompt: str = _evals("", "prompt of the text samples (default: the start of a document)")
    eval_only: bool = _evals(False, "evaluate a checkpoint (--resume; default: latest) or the weights of --init_from: "
                             "print validation loss, task scores and a sample, and exit", on_resume="launch")

    use_tensorboard: bool = _logs(False, "write curves, histograms and samples to tensorboard_dir", on_resume="place")
    tensorboard_dir: str = _logs("runs", "folder for TensorBoard runs", on_resume="place")
    logdir: str = _logs("logs", "folder for log.txt and metrics.jsonl", on_resume="place")
    log_freq: int = _logs(1, "steps between log lines", at_least=1)
    use_wandb: bool = _logs(False, "also log to Weights & Biases (pip install wandb)", on_resume="place")
    gpu_hour_cost: float = _logs(0.0, "price of a GPU-hour, to show the cost of the run; 0 = not shown")
    system_metrics_s: float = _logs(10.0, "seconds between measurements of GPUs, CPU, memory and disk; 0 = off")
    alert_url: str = _logs("", "webhook of Slack, Discord or ntfy, or another URL that accepts a JSON POST, to send "
                           "alerts to: start, resume, end, failure, loss spikes, bad steps, failed saves, "
                           "repeated steps that differ", on_resume="launch", secret=True)

    sharding: str = _ranks("ddp", "ddp: a replica on each rank; fsdp: parameters and optimizer sharded across ranks",
                           choices=("ddp", "fsdp"))
    shard_size: int = _ranks(0, "with fsdp, shard within groups of this many ranks, each with a full copy; 0 = across "
                             "all ranks")
    timeout_minutes: float = _ranks(30.0, "end the run if a rank does not respond for this many minutes", above=0,
                                    on_resume="launch")
    cpu_offload: bool = _ranks(False, "with fsdp, keep parameters and optimizer in host memory")
    activation_checkpointing: bool = _ranks(False, "recompute blocks in the backward pass: less memory, slower")
    loss_chunk_size: int = _ranks(0, "tokens per chunk of logits, which is recomputed in the backward pass: less "
                                  "memory with long contexts; 0 = all at once")
    # fmt: on

    def __post_init__(self):
        check_options(self)
        if self.alert_url and not WEBHOOK.fullmatch(self.alert_url):  # whose error does not repeat it: it is a secret
            raise UserError(
                "--alert_url: not the URL of a webhook; expected http:// or https://, a server and a path, without a "
                "user name (ntfy takes ?auth=... instead). Copy the URL of the webhook again"
            )
        is_path = bool(self.run_name) and {"", ".", ".."} & {*self.run_name.split("/")}
        if is_path or len(self.run_name) > 200 or not self.run_name.isprintable():
            expected = "at most 200 printable characters, which name a folder in --tensorboard_dir"
            raise OptionError("run_name", repr(self.run_name[:200]), expected)
        parse_folders("mix", self.mix), parse_folders("val", self.val)
        if not self.init_from:
            raise UserError("--init_from is empty; expected scratch, a folder, a checkpoint file or gpt2")

    def check_together(self) -> None:
        """Check options against each other; on resume, once the checkpoint's values are among them."""
        self.check_shape()
        if self.min_lr > self.max_lr:
            raise UserError(f"--min_lr {self.min_lr} is above --max_lr {self.max_lr}")
        if not self.max_steps and not self.num_epochs:
            raise UserError("--max_steps and --num_epochs are both 0; give one of them")
        if parse_tasks(self.eval_tasks).keys() - {"hellaswag"} and not self.hellaswag_freq:
            raise UserError(f"--eval_tasks {self.eval_tasks} needs a --hellaswag_freq above 0; or take hellaswag alone")
        if self.skip_spikes and not self.spike_z:
            raise UserError("--skip_spikes needs a --spike_z above 0, which defines a spike")
        if self.optimizer == "muon" and not self.max_lr:
            raise UserError("--optimizer muon needs a --max_lr above 0: Muon's learning rate follows the same curve")
        if self.eval_only and not (self.eval_freq or self.hellaswag_freq or self.sample_freq):
            raise UserError("--eval_only: --eval_freq, --hellaswag_freq and --sample_freq are all 0; set one to 1")
        if self.eval_only and self.dry_run != "off":
            raise UserError("--eval_only and --dry_run cannot be combined; give one of them")
        for name in ("cpu_offload", "shard_size"):
            if getattr(self, name) and self.sharding != "fsdp":
                raise UserError(f"--{name} needs --sharding fsdp")
        if self.deterministic and self.sharding == "fsdp":
            raise UserError("--deterministic needs --sharding ddp: FSDP sums gradients in an order of its own")

    @property
    def trains(self) -> bool:
        """Whether this is a run, which writes; a dry run and --eval_only only read."""
        return self.dry_run == "off" and not self.eval_only

    def sources(self) -> dict[str, tuple[str, Fraction]]:
        """Return name -> (folder, weight) of the training data: those of mix, or data_dir alone."""
        name = Path(self.data_dir).absolute().name or "data"
        return parse_folders("mix", self.mix) if self.mix else {name: (self.data_dir, Fraction(1))}

    def with_tokens_of_step(self, world_size: int) -> "TrainConfig":
        """Return the configuration of a first start, in which micro_steps, if any, set total_batch_size."""
        if not self.micro_steps:
            return self
        if not self.mini_batch_size:
            raise UserError(
                f"--mini_batch_size auto needs the tokens of a step, which --micro_steps {self.micro_steps} derives "
                "from the rows; give --total_batch_size instead, or a number of rows"
            )
        tokens = self.mini_batch_size * self.context_length * world_size * self.micro_steps
        return dataclasses.replace(self, total_batch_size=tokens)

    def shape(self, vocab_size: int) -> GPTConfig:
        """Return the shape of the model, with the data's vocabulary."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(GPTConfig)}
        return GPTConfig(**fields | {"vocab_size": vocab_size})

    def compiles(self, device_type: str) -> bool:
        return self.compile == "on" or (self.compile == "auto" and device_type == "cuda")

    def shards(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the weights and the optimizer state."""
        if self.sharding != "fsdp":
            return 1
        if self.shard_size and world_size % self.shard_size:
            raise UserError(f"--shard_size {self.shard_size} is not a divisor of the number of processes, {world_size}")
        return self.shard_size or world_size

    def possible_rows(self, world_size: int) -> list[int]:
        """Return every mini_batch_size that splits the tokens of a step evenly, in ascending order."""
        row = self.context_length * world_size
        rows, remainder = divmod(self.total_batch_size, row)
        if remainder or not rows:
            raise UserError(
                f"--total_batch_size {self.total_batch_size:,} is not a multiple of --context_length "
                f"{self.context_length} x {counted(world_size, 'process')} = {row:,} tokens; "
                f"--total_batch_size {f'{rows * row:,} or ' if rows else ''}{(rows + 1) * row:,} would work"
            )
        # With fp8, gradients of weights are sums over the tokens of a micro-step, 16 at a time.
        multiple = 16 if self.precision == "fp8" else 1
        small = [B for B in range(1, math.isqrt(rows) + 1) if rows % B == 0]
        return sorted(B for B in {*small, *(rows // B for B in small)} if B * self.context_length % multiple == 0)

    def with_even_rows(self, world_size: int) -> "TrainConfig":
        """Return the configuration with the largest mini_batch_size, up to its own, that splits a step evenly."""
        wanted = self.mini_batch_size  # 0: auto
        possible = self.possible_rows(world_size)
        rows = max((size for size in possible if not wanted or size <= wanted), default=0)
        if not rows:
            raise UserError(
                f"--precision fp8: --mini_batch_size {wanted or 'auto'} x --context_length {self.context_length}; "
                "expected rows that split a step into micro-steps of a multiple of 16 tokens"
            )
        return dataclasses.replace(self, mini_batch_size=rows) if wanted else self

    def grad_accum_steps(self, world_size: int) -> int:
        """Return the number of micro-steps in a step."""
        return self.total_batch_size // (self.mini_batch_size * self.context_length * world_size)

    def virtual_ranks(self) -> int:
        """Return among how many virtual ranks --deterministic divides the micro-batches of a step evenly."""
        return math.gcd(self.grad_accum_steps(1), MAX_VIRTUAL_RANKS)


FIELDS = options_of(TrainConfig)
# The options that checkpoints store: the others belong to one launch, or say where one run writes.
KEPT = [name for name, f in FIELDS.items() if f.metadata["on_resume"] in ("never", "ask", "free")]
EXCLUSIVE = (("total_batch_size", "micro_steps", "set the tokens of a step"), ("data_dir", "mix", "name the data"))
ABOUT = (
    "Train a GPT. On several GPUs, start one process for each: torchrun --nproc_per_node=4 train.py. Flags override "
    "--config, which overrides the defaults. --flag_name and --flag-name are the same."
)
# What other trainers call our options (nanoGPT, build-nanogpt, transformers, accelerate, DeepSpeed).
THEIRS = {
    "--checkpoint_freq": "save_steps save_interval save_every",
    "--keep_checkpoints": "save_total_limit keep_last_n",
    "--checkpoint_dir": "output_dir out_dir save_dir",
    "--resume": "resume_from load_checkpoint ckpt_path",
    "--max_lr": "learning_rate lr",
    "--activation": "hidden_act activation_function",
    "--activation gelu_tanh or gelu": "gelu",
    "--norm_eps": "layer_norm_eps layer_norm_epsilon rms_norm_eps",
    "--num_kv_heads": "num_key_value_heads n_kv_heads n_kv_head",
    "--schedule": "lr_scheduler_type lr_scheduler",
    "--warmup_steps": "warmup_iters num_warmup_steps",
    "--warmup_steps, in steps; by default the warm-up is at most a tenth of the run": "warmup_ratio",
    "--max_steps": "max_iters lr_decay_iters max_train_steps num_iterations train_steps",
    "--num_epochs": "epochs num_train_epochs max_epochs",
    "--mini_batch_size": "batch_size micro_batch_size per_device_train_batch_size device_batch_size",
    "--micro_steps, counted on each GPU (nanoGPT counts those of all GPUs)": "gradient_accumulation_steps "
    "gradient_accumulation grad_accum_steps",
    "--context_length": "block_size seq_len sequence_length max_seq_len max_seq_length",
    "--num_layers": "n_layer num_hidden_layers depth",
    "--num_heads": "n_head num_attention_heads",
    "--embd_size": "n_embd hidden_size d_model",
    "--precision": "dtype",
    "--precision bf16": "bf16",
    "--precision fp16": "fp16",
    "--eval_freq": "eval_interval eval_steps eval_every",
    "--eval_tokens": "eval_iters",
    "--compile off": "no_compile",
    "--log_freq": "log_interval logging_steps",
    "--grad_clip": "max_grad_norm clip_grad gradient_clipping",
    "--adam_beta1": "beta1 adam_beta_1",
    "--adam_beta2": "beta2 adam_beta_2",
    "--adam_eps": "adam_epsilon epsilon eps",
    "--sharding fsdp": "deepspeed fsdp zero_stage",
    "--sharding": "strategy",
    "--device": "accelerator",
    "--tokenizer": "tokenizer_name tokenizer_path",
    "torchrun sets it; drop the flag": "local_rank rank world_size backend",
    "--activation_checkpointing": "gradient_checkpointing grad_checkpointing",
    "--data_dir": "dataset data data_path train_file train_data input input_bin tokenized_dir",
    "--init_from": "model_name_or_path model",
    "--use_wandb": "wandb wandb_log",
    "--run_name": "wandb_run_name",
    "the environment names the project: WANDB_PROJECT=NAME": "wandb_project",
    "--use_tensorboard": "tensorboard",
    "--use_tensorboard, --use_wandb or neither": "report_to",
    "--max_files of prepare_dataset.py; a run reads all shards of --data_dir, up to --max_steps": "max_files",
    # What has no equivalent.
    "torchrun starts one process for each GPU: torchrun --nproc_per_node=N train.py": "devices gpus num_gpus "
    "n_gpus ngpus num_processes nproc_per_node nproc",
    "scripts/multinode.sh starts several machines (docs/multi-node.md)": "num_nodes num_machines",
    "convert_hf.py exports a checkpoint to a folder, and 'hf upload' uploads it": "push_to_hub hub_model_id",
    "batches are read ahead by one thread, for a GPU into pinned memory; drop the flag": "num_workers "
    "dataloader_num_workers persistent_workers dataloader_persistent_workers prefetch_factor "
    "dataloader_prefetch_factor pin_memory dataloader_pin_memory",
    "checkpoints are not compressed, because fp32 weights hardly shrink; drop the flag": "checkpoint_compression",
}
ELSEWHERE = {name: ours for ours, names in THEIRS.items() for name in names.split()}


# ---------------------------------------------------------------------------------------------------------------------
# where values come from


def parse_args(argv: Sequence[str]) -> tuple[TrainConfig, dict[str, str]]:
    """Return the configuration of a command line, and the options that were given: name -> "flag" or "preset"."""
    flags = read_flags(TrainConfig, argv, ABOUT, ELSEWHERE)
    if flags.get("resume") == "":  # an unset variable in a script must not start a new run
        raise UserError("--resume is empty; expected latest, auto, best, stable or a checkpoint file")
    if empty := [name for name in ("mix", "val") if flags.get(name) == ""]:  # as above
        raise UserError(f"--{empty[0]} is empty; expected folders, or drop the flag")
    if (word := flags.get("init_from")) in ("resume", "latest", "auto", "best", "stable"):
        raise UserError(f"--init_from {word}: expected weights; to resume a run, use --resume")
    options = _on_preset(flags)
    if options.get("eval_only") and options.get("init_from", "scratch") == "scratch":
        options.setdefault("resume", "latest")
    given = {name: "flag" if name in flags else "preset" for name in options}
    with preset_named(flags.get("config", ""), given):
        config = TrainConfig(**options)
        if not config.resume:
            config.check_together()
    return config, given


@contextmanager
def preset_named(preset: str, given: Mapping[str, str]) -> Iterator[None]:
    """Add to a UserError which of the options that it names come from --config, so not from the command line."""
    try:
        yield
    except UserError as error:
        named = re.findall(r"\b\w+_\w+|(?<=--)\w+", str(error))
        if stated := [f"--{name}" for name, source in given.items() if source == "preset" and name in named]:
            error.args = (f"{error} (--config {preset} sets {', '.join(stated)})",)
        raise


def _on_preset(options: dict, read_by: tuple[str, ...] = ()) -> dict:
    """Return options on top of those of the preset or TOML file that their own `config` names."""
    preset = _read_toml(options["config"], read_by) if "config" in options else {}
    for one, other, what in EXCLUSIVE:
        if {one, other} <= options.keys():
            raise UserError(f"--{one} and --{other} both {what}; give one of them")
        if {one, other} & options.keys():
            preset = {name: value for name, value in preset.items() if name not in (one, other)}
    return preset | options


def _read_toml(name: str, read_by: tuple[str, ...]) -> dict:
    """Return the options of a preset or TOML file, which the files `read_by` include."""
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        presets = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
        kind = "file" if name.endswith(".toml") else "preset"
        advice = " (docs/from-other-trainers.md says how to write its options)" * name.endswith(OTHER_CONFIGS)
        raise UserError(f"--config {name}: no such {kind}; expected a .toml file{advice} or one of: {presets}")
    try:
        if name in read_by:
            raise UserError("the file includes itself")
        written = typed(tomllib.loads(path.read_text()), dict[str, VALUE], "its content", "write NAME = VALUE")
        written.pop("description", "")  # for ./start_training.sh
        argv = [f"--{option}={value}" for option, value in written.items()]
        return _on_preset(read_flags(TrainConfig, argv, ABOUT, ELSEWHERE), (*read_by, name))
    except (ValueError, RecursionError) as error:  # a ValueError: TOML or UTF-8 that is none, or too large a number
        raise UserError(f"{path}: not TOML: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
