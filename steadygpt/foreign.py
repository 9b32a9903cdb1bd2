"""Models and runs of other projects, called foreign here, in terms of ours: weights, options, optimizer state."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygpt.cli import UserError

if TYPE_CHECKING:
    from model import GPTConfig

# Activations of transformers -> ours, of an MLP with one matrix before the activation, and with two, gate and up.
PLAIN = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"), "gelu": "gelu", "relu2": "relu2",
}  # fmt: skip
GATED = {"silu": "swiglu"}
# Constants of attention that older files store with the weights.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
TABLES = ("wte.weight", "lm_head.weight")  # one row per token of the vocabulary


@dataclass(frozen=True)
class Family:
    """Another model class in terms of GPT and GPTConfig."""

    names: dict[str, str | tuple[str, ...]]  # parts of GPT's weight names -> foreign ones, a tuple if GPT stacks them
    architecture: str = ""  # the Hugging Face class
    fields: dict[str, tuple] = field(default_factory=dict)  # of GPTConfig -> (foreign field, its default)
    fixed: dict[str, Any] = field(default_factory=dict)  # other fields of GPTConfig -> value, unless its default
    required: dict[str, object] = field(default_factory=dict)  # foreign field -> its default, which GPT computes
    activations: dict[str, str] = field(default_factory=lambda: PLAIN)  # foreign -> GPTConfig's
    dropouts: tuple[str, ...] = ()  # foreign fields for dropout besides the one in `fields`
    any_heads: bool = False  # num_heads need not divide embd_size
    transposed: bool = False  # linear layers are stored as (in, out)
    by_head: bool = False  # c_attn holds q, k and v of one head after another; GPT's has the q of all heads first
    rotates_back: bool = False  # rotary positions rotate by the opposite angle


NANOGPT = Family(
    names={"wte.": "transformer.wte.", "wpe.": "transformer.wpe.", "h.": "transformer.h.", "ln_f.": "transformer.ln_f."}
)
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": ("vocab_size", 50257),
        "context_length": ("n_positions", 1024),
        "num_layers": ("n_layer", 12),
        "num_heads": ("n_head", 12),
        "embd_size": ("n_embd", 768),
        "intermediate_size": ("n_inner", None),
        "dropout": ("resid_pdrop", 0.1),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
        "tied_head": ("tie_word_embeddings", True),
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names=NANOGPT.names,
    dropouts=("embd_pdrop", "attn_pdrop"),
    transposed=True,
)
GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    fields={
        "vocab_size": ("vocab_size", 50432),
        "context_length": ("max_position_embeddings", 2048),
        "num_layers": ("num_hidden_layers", 44),
        "num_heads": ("num_attention_heads", 64),
        "embd_size": ("hidden_size", 6144),
        "intermediate_size": ("intermediate_size", 24576),
        "dropout": ("hidden_dropout", 0.0),
        "norm_eps": ("layer_norm_eps", 1e-5),
        "activation": ("hidden_act", "gelu"),
        "tied_head": ("tie_word_embeddings", False),
        "rotary_pct": ("rotary_pct", 0.25),
        "rotary_base": ("rotary_emb_base", 10000.0),
        "parallel_residual": ("use_parallel_residual", True),
    },
    required={"attention_bias": True, "rope_scaling": None, "rope_type": "default"},
    names={
        "wte.": "gpt_neox.embed_in.", "h.": "gpt_neox.layers.",
        "ln_f.": "gpt_neox.final_layer_norm.", "lm_head.": "embed_out.",
        ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": ".attention.query_key_value.", ".attn.c_proj.": ".attention.dense.",
        ".mlp.c_fc.": ".mlp.dense_h_to_4h.", ".mlp.c_proj.": ".mlp.dense_4h_to_h.",
    },
    dropouts=("attention_dropout",),
    by_head=True,
)  # fmt: skip
LLAMA = Family(
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": ("vocab_size", 32000),
        "context_length": ("max_position_embeddings", 2048),
        "num_layers": ("num_hidden_layers", 32),
        "num_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "embd_size": ("hidden_size", 4096),
        "intermediate_size": ("intermediate_size", 11008),
        "dropout": ("attention_dropout", 0.0),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "activation": ("hidden_act", "silu"),
        "tied_head": ("tie_word_embeddings", False),
        "rotary_base": ("rope_theta", 10000.0),
    },
    fixed={"norm": "rmsnorm", "rotary_pct": 1.0, "bias": False},
    required={"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "rope_type": "default"},
    names={
        "wte.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.c_fc.": (".mlp.gate_proj.", ".mlp.up_proj."), ".mlp.c_proj.": ".mlp.down_proj.",
    },
    activations=GATED,
)  # fmt: skip
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    fields=LLAMA.fields | {
        "vocab_size": ("vocab_size", 151936),
        "context_length": ("max_position_embeddings", 32768),
        "num_kv_heads": ("num_key_value_heads", 32),
        "head_dim": ("head_dim", 128),
        "intermediate_size": ("intermediate_size", 22016),
    },
    fixed=LLAMA.fixed | {"qk_norm": True},
    required=LLAMA.required | {"use_sliding_window": False},
    names=LLAMA.names | {".attn.q_norm.": ".self_attn.q_norm.", ".attn.k_norm.": ".self_attn.k_norm."},
    any_heads=True,
)  # fmt: skip
NANOCHAT = replace(
    LLAMA,
    architecture="NanoChatForCausalLM",
    fields=LLAMA.fields | {
        "vocab_size": ("vocab_size", 50304),
        "num_layers": ("num_hidden_layers", 12),
        "num_heads": ("num_attention_heads", 6),
        "embd_size": ("hidden_size", 768),
        "intermediate_size": ("intermediate_size", 8192),
        "activation": ("hidden_act", "relu2"),
        "logit_softcap": ("final_logit_softcapping", 15.0),
    },
    fixed=LLAMA.fixed | {"norm": "rmsnorm_no_weight", "qk_norm": True},
    names=LLAMA.names | {".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2."},
    activations=PLAIN,
    any_heads=True,
    rotates_back=True,
)  # fmt: skip
FAMILIES = {"gpt2": GPT2, "gpt_neox": GPT_NEOX, "llama": LLAMA, "qwen3": QWEN3, "nanochat": NANOCHAT}

# ---------------------------------------------------------------------------------------------------------------------
# config.json

# transformers 5 stores these older fields in "rope_parameters", under other names.
ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
ABSENT = ("intermediate_size", "num_kv_heads", "head_dim", "logit_softcap")  # fields that are 0 for null


def resolved(config: "GPTConfig") -> dict[str, Any]:
    """Return the fields of a model's shape, with the values that 0 stands for."""
    sizes = {"intermediate_size": config.mlp_size, "num_kv_heads": config.kv_heads, "head_dim": config.head_size}
    return dataclasses.asdict(config) | sizes


def read_config(stored: dict, source: str) -> tuple[str, dict[str, Any]]:
    """Return the model_type of a config.json, and its fields of GPTConfig.

    Raises: UserError for a model that GPT does not compute.
    """
    kind = stored.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{source}: model_type in config.json is {kind!r}; expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    if isinstance(rope := stored.get("rope_parameters"), dict):
        if any(isinstance(value, dict) for value in rope.values()):
            raise UserError(
                f"{source}: rope_parameters in config.json differ by layer; expected one set for all layers"
            )
        stored = stored | rope | {older: rope[newer] for newer, older in ROPE.items() if newer in rope}
    for name, expected in family.required.items():
        if stored.get(name) not in (None, expected):
            raise UserError(f"{source}: {name} in config.json is {stored[name]!r}; expected {expected!r}")
    found = {name: stored.get(foreign, default) for name, (foreign, default) in family.fields.items()}
    if str(found["activation"]) not in family.activations:
        raise UserError(
            f"{source}: {family.fields['activation'][0]} is {found['activation']!r}; expected one of "
            f"{', '.join(family.activations)}"
        )
    found = {name: 0 if value is None and name in ABSENT else value for name, value in found.items()}
    return kind, family.fixed | found | {"activation": family.activations[found["activation"]]}


def write_config(config: "GPTConfig", kind: str) -> dict[str, Any]:
    """Return what config.json has about the shape of a model of a family; the inverse of read_config."""
    family, values = FAMILIES[kind], resolved(config)
    values["activation"] = next(name for name, ours in family.activations.items() if ours == config.activation)
    values["logit_softcap"] = config.logit_softcap or None
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{foreign: values[name] for name, (foreign, _) in family.fields.items()},
        **dict.fromkeys(family.dropouts, config.dropout),
    }


def find_family(config: "GPTConfig") -> str:
    """Return the model_type of a class of transformers that computes the same as GPT.

    Raises: UserError with the fields that the closest class lacks.
    """
    unfit = {kind: _unfit_fields(config, family) for kind, family in FAMILIES.items()}
    kind = min(unfit, key=lambda kind: len(unfit[kind]))
    if unfit[kind]:
        raise UserError(
            f"no class of transformers computes this model; {FAMILIES[kind].architecture} is the closest, but "
            f"{', '.join(unfit[kind])}. generate.py and hellaswag_eval.py read the checkpoint itself"
        )
    return kind


def _unfit_fields(config: "GPTConfig", family: Family) -> list[str]:
    """Return the fields of a model's shape that a family does not have, each as "NAME is FOUND, expected EXPECTED"."""
    values, num_heads = resolved(config), config.num_heads
    allowed: dict[str, list] = {f.name: [f.default] for f in dataclasses.fields(config)}
    # A family without these fields divides its width among the heads, and does not rotate. Missing biases become zeros.
    allowed |= {"num_kv_heads": [num_heads], "head_dim": [config.embd_size // num_heads], "bias": [True, False]}
    allowed |= {"rotary_base": [config.rotary_base]} | {name: [value] for name, value in family.fixed.items()}
    allowed = {name: some for name, some in allowed.items() if name not in family.fields}
    allowed["activation"] = list(dict.fromkeys(family.activations.values()))
    unfit = [
        f"{name} is {values[name]}, expected {' or '.join(map(str, some))}"
        for name, some in allowed.items()
        if values[name] not in some
    ]
    if "rotary_pct" in family.fields and not config.rotary_pct:
        unfit.append("rotary_pct is 0.0, expected more")
    if config.embd_size % num_heads and not family.any_heads:
        unfit.append(f"num_heads is {num_heads}, expected a divisor of embd_size {config.embd_size}")
    return unfit


# ---------------------------------------------------------------------------------------------------------------------
# names and layouts of weights


def foreign_names(name: str, family: Family) -> tuple[str, ...]:
    """Return the foreign name of a weight, or the names of the matrices that GPT stacks in it."""
    names: tuple[str, ...] = (name,)
    for part, foreign in family.names.items():
        if name.startswith(part) or (part.startswith(".") and part in name):
            several = foreign if isinstance(foreign, tuple) else (foreign,)
            names = tuple(old.replace(part, new, 1) for old in names for new in several)
    return names


def to_foreign(name: str, tensor: Tensor, config: "GPTConfig", family: Family) -> dict[str, Tensor]:
    """Return a weight as the foreign weights that hold the same, by name."""
    names, tensor = foreign_names(name, family), _other_layout(name, tensor, config, family, (3, config.num_heads))
    parts = tensor.split(config.parts(name)) if len(names) > 1 else (tensor,)
    return {foreign: part.contiguous() for foreign, part in zip(names, parts, strict=True)}


def to_own(name: str, parts: Sequence[Tensor], config: "GPTConfig", family: Family) -> Tensor:
    """Return the weight of GPT that holds the same as foreign weights, in the order of foreign_names."""
    tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if name in TABLES:  # padding rows are zero, as in training
        tensor = F.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return _other_layout(name, tensor, config, family, (config.num_heads, 3)).contiguous()


def _other_layout(name: str, tensor: Tensor, config: "GPTConfig", family: Family, by_head: tuple[int, int]) -> Tensor:
    """Convert a weight between the layouts of GPT and a family; `by_head` is (3, num_heads) for a weight of GPT."""
    if family.transposed and name.endswith("weight") and ".c_" in name:
        tensor = tensor.T
    if family.by_head and ".c_attn." in name:  # (3, num_heads, head_dim, ...) <-> (num_heads, 3, head_dim, ...)
        tensor = tensor.unflatten(0, (*by_head, -1)).transpose(0, 1).flatten(0, 2)
    if family.rotates_back and ".c_attn." in name:  # negates the second half of each query and key
        queries, keys, _ = config.parts(name)
        signs = tensor.new_ones(len(tensor), 1)
        signs[: queries + keys].view(-1, 2, config.head_size // 2)[:, 1] = -1
        tensor = tensor * signs
    return tensor


# ---------------------------------------------------------------------------------------------------------------------
# runs of nanoGPT and its descendants

# Fields of GPTConfig and options of train.py -> nanoGPT's. Weight decay, betas and epsilon come from the optimizer.
NANOGPT_SHAPE = {"context_length": "block_size", "num_layers": "n_layer", "num_heads": "n_head", "embd_size": "n_embd"}
NANOGPT_OPTIONS = {
    "max_lr": "learning_rate",
    "min_lr": "min_lr",
    "warmup_steps": "warmup_iters",
    "max_steps": "lr_decay_iters",
    "grad_clip": "grad_clip",
    "mini_batch_size": "batch_size",
    "eval_freq": "eval_interval",
}
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def state_of_run(
    content: dict, shapes: dict[str, tuple[int, ...]], config: "GPTConfig", path: Path
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return what a checkpoint holds of a run besides weights and rows, its options, and a line for each difference.

    Args:
        content: of a checkpoint of nanoGPT, build-nanogpt or gpt2-from-scratch.
        shapes: of the stored parameters by our names, in the order of named_parameters().

    Raises: UserError when there is no optimizer state, or something does not fit.
    """
    if not content.get("optimizer"):
        raise UserError(
            f"{path}: no optimizer state, so no run to resume. Start from its weights with --init_from {path}"
        )
    state, options = _optimizer_by_name(content["optimizer"], shapes, config, path)
    step, stored = content.get("iter_num", content.get("step")), content.get("config")
    if type(step) is not int or step < 0:
        raise UserError(f"{path}: its step is {step!r}; expected the number of steps so far")
    lines: list[str] = []
    if isinstance(stored, dict):  # nanoGPT's; the others store the shape of the model under this name
        found, lines = _options_of_nanogpt(stored, step)
        options |= found
        for folder in (root / "data" / str(stored.get("dataset")) for root in (path.parent.parent, Path())):
            if folder.is_dir():
                options["data_dir"] = str(folder)
    else:  # their loaders read the shards in order
        options |= {"shuffle_shards": False, "shuffle_rows": False}
        lines.append(f"the last learning rate was {content['optimizer']['param_groups'][0].get('lr')}")
    updates = int(max(moments["step"] for moments in state.values()))
    if updates != step:
        lines.append(f"the file is at step {step:,}, but its optimizer has made {updates:,} updates")
    best = content.get("best_val_loss", content.get("val_loss"))
    best = float(best) if isinstance(best, (float, Tensor)) else math.nan
    run = {"step": step, "optimizer": {"state": state}, "scaler": {}, "data_fingerprint": {}}
    run |= {"best_val_loss": best if math.isfinite(best) else None, "val_loss": None, "loss": None}
    return run | {"recent_losses": [], "bad_steps": 0, "elapsed_s": 0.0}, options, lines


def _options_of_nanogpt(config: dict, step: int) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a run at `step` from nanoGPT's "config", and a line for each difference that remains."""
    options = {ours: config[name] for ours, name in NANOGPT_OPTIONS.items() if name in config}
    # On several GPUs too, gradient_accumulation_steps counts the micro-steps of all of them.
    batch = [config.get(name) for name in ("gradient_accumulation_steps", "batch_size", "block_size")]
    if all(type(size) is int for size in batch):
        options["total_batch_size"] = math.prod(batch)
    if config.get("device") == "cpu":
        options["precision"] = "fp32"  # nanoGPT ignores its dtype there
    elif config.get("dtype") in PRECISIONS:
        options["precision"] = PRECISIONS[config["dtype"]]
    notes, end = [], config.get("max_iters")
    last = config.get("lr_decay_iters", end)
    if config.get("decay_lr") is False:  # constant, without a warm-up
        options |= {"min_lr": options.get("max_lr"), "warmup_steps": 0, "max_steps": end}
    elif last != end:
        notes.append(
            f"max_steps is lr_decay_iters {last}, where the learning rate reaches min_lr, not max_iters {end}; "
            "another --max_steps stretches or shortens the curve"
        )
    warmup = options.get("warmup_steps")
    if isinstance(warmup, int) and step < warmup:
        notes.append(f"until step {warmup}, the learning rate is {warmup + 1}/{warmup} of nanoGPT's; then it is equal")
    return options, notes


def _optimizer_by_name(
    saved: Any, shapes: dict[str, tuple[int, ...]], config: "GPTConfig", path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the state of nanoGPT's AdamW by our parameter names, and the optimizer's options.

    Args:
        saved: its state_dict, by index: first the parameters with two or more dimensions, which have weight decay,
            then the others, both in the order of named_parameters().
        shapes: of the stored parameters by our names, in the order of named_parameters().

    Raises: UserError when this is not AdamW's state, or does not fit the parameters.
    """
    decayed = [name for name, shape in shapes.items() if len(shape) >= 2]
    names = decayed + [name for name in shapes if name not in decayed]
    sizes = [len(decayed), len(names) - len(decayed)]
    try:
        groups = saved["param_groups"]
        found = [len(group["params"]) for group in groups]
        decays = [group["weight_decay"] for group in groups]
        if found != sizes or decays[1]:
            raise UserError(
                f"{path}: the optimizer's groups have {found} parameters with weight decay {decays}; expected {sizes}"
                ": matrices and embeddings with weight decay, then vectors without"
            )
        indices = [index for group in groups for index in group["params"]]
        state = {name: dict(saved["state"][index]) for name, index in zip(names, indices, strict=True)}
        (beta1, beta2), eps = groups[0]["betas"], groups[0]["eps"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{path}: optimizer is not a state_dict of AdamW ({error!r})") from None
    for name, moments in state.items():
        expected = {"step": (), "exp_avg": shapes[name], "exp_avg_sq": shapes[name]}
        shapes_found = {kind: tuple(t.shape) if isinstance(t, Tensor) else t for kind, t in moments.items()}
        if shapes_found != expected:
            raise UserError(f"{path}: the optimizer's state of {name} is {shapes_found}; expected {expected}")
        if not all(tensor.isfinite().all() for tensor in moments.values()):
            raise UserError(f"{path}: the optimizer has NaN or infinite values for {name}; expected finite ones")
        for kind in ("exp_avg", "exp_avg_sq"):
            moments[kind] = to_own(name, [moments[kind].float()], config, NANOGPT)
    return state, {"weight_decay": decays[0], "adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}
