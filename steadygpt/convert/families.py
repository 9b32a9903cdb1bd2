"""Models of other projects, called foreign, in terms of GPT: shapes, names and layouts of weights."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model import ATTENTION, CONV_WIDTH, CONVOLUTION, TABLES, GPTConfig
from steadygpt.base.options import UserError

# Activations of transformers -> GPTConfig's. PLAIN: the MLP has one matrix before the activation; GATED: two, gate and
# up.
PLAIN = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"), "gelu": "gelu", "relu2": "relu2",
}  # fmt: skip
GATED = {"silu": "swiglu", "swish": "swiglu"}  # two names of one function
# Name endings of attention's constants, which older files store with the weights.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Family:
    """Another model class in terms of GPT and GPTConfig."""

    names: dict[str, str | tuple[str, ...]]  # parts of GPT's weight names -> foreign parts, a tuple if GPT stacks them
    architecture: str = ""  # the Hugging Face class
    fields: dict[str, str] = field(default_factory=dict)  # field of GPTConfig -> foreign field
    defaults: dict[str, Any] = field(
        default_factory=dict
    )  # field of GPTConfig -> foreign value if config.json has none
    fixed: dict[str, Any] = field(default_factory=dict)  # other fields of GPTConfig -> value that is not the default
    required: dict[str, object] = field(default_factory=dict)  # foreign field -> the only value that GPT supports
    activations: dict[str, str] = field(default_factory=lambda: PLAIN)  # foreign -> GPTConfig's
    dropouts: tuple[str, ...] = ()  # foreign fields for dropout besides the one in `fields`
    any_heads: bool = False  # num_heads need not divide embd_size
    transposed: bool = False  # linear layers are stored as (in, out)
    by_head: bool = False  # c_attn has q, k and v of the first head, then of the next; GPT's has q of all heads first
    rotates_back: bool = False  # rotary positions rotate by the opposite angle
    flat: Callable[[dict], dict] = dict  # config.json -> the same with one value for each field of GPTConfig
    written: dict[str, Any] = field(default_factory=dict)  # more foreign fields that an export needs


# Field of GPTConfig -> its name in most classes of transformers.
USUAL = {
    "vocab_size": "vocab_size", "context_length": "max_position_embeddings", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "embd_size": "hidden_size", "intermediate_size": "intermediate_size",
    "activation": "hidden_act", "tied_head": "tie_word_embeddings",
}  # fmt: skip
NANOGPT = Family(
    fields={"context_length": "block_size", "num_layers": "n_layer", "num_heads": "n_head", "embd_size": "n_embd"},
    names={f"{part}.": f"transformer.{part}." for part in ("wte", "wpe", "h", "ln_f")},
)
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": "vocab_size", "context_length": "n_positions", "num_layers": "n_layer", "num_heads": "n_head",
        "embd_size": "n_embd", "intermediate_size": "n_inner", "dropout": "resid_pdrop",
        "norm_eps": "layer_norm_epsilon", "activation": "activation_function", "tied_head": "tie_word_embeddings",
    },
    defaults={
        "vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12, "embd_size": 768,
        "intermediate_size": None, "dropout": 0.1, "norm_eps": 1e-5, "activation": "gelu_new", "tied_head": True,
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    names=NANOGPT.names,
    dropouts=("embd_pdrop", "attn_pdrop"),
    transposed=True,
)  # fmt: skip
GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    fields=USUAL | {
        "dropout": "hidden_dropout", "norm_eps": "layer_norm_eps", "rotary_pct": "rotary_pct",
        "rotary_base": "rotary_emb_base", "parallel_residual": "use_parallel_residual",
    },
    defaults={
        "vocab_size": 50432, "context_length": 2048, "num_layers": 44, "num_heads": 64, "embd_size": 6144,
        "intermediate_size": 24576, "dropout": 0.0, "norm_eps": 1e-5, "activation": "gelu", "tied_head": False,
        "rotary_pct": 0.25, "rotary_base": 10000.0, "parallel_residual": True,
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
    fields=USUAL | {
        "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "dropout": "attention_dropout",
        "norm_eps": "rms_norm_eps", "rotary_base": "rope_theta",
    },
    defaults={
        "vocab_size": 32000, "context_length": 2048, "num_layers": 32, "num_heads": 32, "num_kv_heads": None,
        "head_dim": None, "embd_size": 4096, "intermediate_size": 11008, "dropout": 0.0, "norm_eps": 1e-6,
        "activation": "silu", "tied_head": False, "rotary_base": 10000.0,
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
    defaults=LLAMA.defaults | {
        "vocab_size": 151936, "context_length": 32768, "num_kv_heads": 32, "head_dim": 128, "intermediate_size": 22016,
    },
    fixed=LLAMA.fixed | {"qk_norm": True},
    required=LLAMA.required | {"use_sliding_window": False},
    names=LLAMA.names | {".attn.q_norm.": ".self_attn.q_norm.", ".attn.k_norm.": ".self_attn.k_norm."},
    any_heads=True,
)  # fmt: skip
NANOCHAT = replace(
    LLAMA,
    architecture="NanoChatForCausalLM",
    fields=LLAMA.fields | {"logit_softcap": "final_logit_softcapping"},
    defaults=LLAMA.defaults | {
        "vocab_size": 50304, "num_layers": 12, "num_heads": 6, "embd_size": 768, "intermediate_size": 8192,
        "activation": "relu2", "logit_softcap": 15.0,
    },
    fixed=LLAMA.fixed | {"norm": "rmsnorm_no_weight", "qk_norm": True},
    names=LLAMA.names | {".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2."},
    activations=PLAIN,
    any_heads=True,
    rotates_back=True,
)  # fmt: skip
LAYER_TYPES = {"full_attention": ATTENTION, "conv": CONVOLUTION}


def lfm2_fields(stored: dict) -> dict:
    """Return LFM2's config.json as the class reads it: with older names of fields, and a derived width of the MLP."""
    fields = {"num_hidden_layers": 32, "intermediate_size": 12288} | stored
    old_names = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    fields |= {new: stored[old] for old, new in old_names.items() if old in stored}
    if fields.get("block_auto_adjust_ff_dim", True):
        multiple = fields.get("block_multiple_of", 256)
        size = int(fields.get("block_ffn_dim_multiplier", 1.0) * int(2 * fields["intermediate_size"] / 3))
        fields["intermediate_size"] = math.ceil(size / multiple) * multiple
    if fields.get("layer_types") is None:
        layers = range(fields["num_hidden_layers"])
        with_attention = fields.get("full_attn_idxs")
        if with_attention is None:
            with_attention = layers
        fields["layer_types"] = ["full_attention" if layer in with_attention else "conv" for layer in layers]
    return fields


def lfm3_fields(stored: dict) -> dict:
    """Return LFM3's config.json with the rotary positions of its layers of full attention."""
    rope = stored.get("rope_parameters") or {}
    return stored | {"rope_parameters": rope.get("full_attention", {})}


LFM2 = replace(
    LLAMA,
    architecture="Lfm2ForCausalLM",
    fields=USUAL | {
        "num_kv_heads": "num_key_value_heads", "dropout": "attention_dropout", "norm_eps": "norm_eps",
        "rotary_base": "rope_theta", "layer_pattern": "layer_types",
    },
    defaults={
        "vocab_size": 65536, "context_length": 128000, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
        "embd_size": 2560, "intermediate_size": None, "dropout": 0.0, "norm_eps": 1e-5, "activation": "silu",
        "tied_head": True, "rotary_base": 1000000.0, "layer_pattern": None,
    },
    fixed=LLAMA.fixed | {"qk_norm": True},
    required={"conv_L_cache": CONV_WIDTH, "conv_bias": False, "rope_scaling": None, "rope_type": "default"},
    names={
        "wte.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.embedding_norm.",
        ".ln_1.": ".operator_norm.", ".ln_2.": ".ffn_norm.",
        ".attn.c_attn.": (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
        ".attn.c_proj.": ".self_attn.out_proj.",
        ".attn.q_norm.": ".self_attn.q_layernorm.", ".attn.k_norm.": ".self_attn.k_layernorm.",
        ".conv.c_in.": ".conv.in_proj.", ".conv.taps": ".conv.conv.weight", ".conv.c_proj.": ".conv.out_proj.",
        ".mlp.c_fc.": (".feed_forward.w1.", ".feed_forward.w3."), ".mlp.c_proj.": ".feed_forward.w2.",
    },
    flat=lfm2_fields,
    # llama.cpp's converter reads them all.
    written={
        "conv_L_cache": CONV_WIDTH, "conv_bias": False, "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 1,
    },
)  # fmt: skip
LFM3 = replace(
    LFM2,
    architecture="Lfm3ForCausalLM",
    fields=LFM2.fields | {"head_dim": "head_dim", "attention_gate": "use_attention_gate"},
    defaults=LFM2.defaults | {
        "vocab_size": 128000, "num_layers": 24, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "embd_size": 2048,
        "intermediate_size": 7680, "rotary_base": 10000.0, "attention_gate": True,
    },
    required=LFM2.required | {"attention_bias": False, "use_sandwich_norm": False},
    names=LFM2.names | {
        ".attn.c_proj.": ".self_attn.o_proj.", ".attn.c_gate.": ".self_attn.gate_proj.",
        ".attn.q_norm.": ".self_attn.q_norm.", ".attn.k_norm.": ".self_attn.k_norm.",
    },
    any_heads=True,
    flat=lfm3_fields,
    written={"conv_L_cache": CONV_WIDTH, "conv_bias": False, "use_sandwich_norm": False},
)  # fmt: skip
FAMILIES = {
    "gpt2": GPT2, "gpt_neox": GPT_NEOX, "llama": LLAMA, "qwen3": QWEN3, "nanochat": NANOCHAT, "lfm2": LFM2,
    "lfm3": LFM3,
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# config.json

# Names in the "rope_parameters" of transformers 5 -> names of the older fields.
ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
ABSENT = ("intermediate_size", "num_kv_heads", "head_dim", "logit_softcap")  # fields of GPTConfig that are 0 for null


def read_config(stored: dict, source: str) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json, and the fields of GPTConfig that the file describes."""
    kind = stored.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{source}: model_type in config.json is {json.dumps(kind)}; expected one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    stored = family.flat(stored)
    scaling = stored.get("rope_scaling")
    rope = stored.get("rope_parameters")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default":  # no scaling
        if rope is None:
            rope = scaling
        stored = stored | {"rope_scaling": None}
    if isinstance(rope, dict):
        if any(isinstance(value, dict) for value in rope.values()):
            raise UserError(
                f"{source}: rope_parameters in config.json differ by layer; expected one set for all layers"
            )
        old_names = {old: rope[new] for new, old in ROPE.items() if new in rope}
        stored = stored | rope | old_names
    for name, expected in family.required.items():
        if stored.get(name) not in (None, expected):
            raise UserError(
                f"{source}: {name} in config.json is {json.dumps(stored[name])}; expected {json.dumps(expected)}"
            )
    shape = {name: stored.get(family.fields[name], default) for name, default in family.defaults.items()}
    activation = shape["activation"]
    if str(activation) not in family.activations:
        raise UserError(
            f"{source}: {family.fields['activation']} is {json.dumps(activation)}; expected one of "
            f"{', '.join(family.activations)}"
        )
    for name in ABSENT:
        if name in shape and shape[name] is None:
            shape[name] = 0
    if "layer_pattern" in shape:
        shape["layer_pattern"] = read_layer_types(shape["layer_pattern"], source)
    return family, family.fixed | shape | {"activation": family.activations[activation]}


def read_layer_types(types: Sequence[str] | None, source: str) -> str:
    """Return the --layer_pattern of LFM2's layer_types."""
    unknown = [name for name in types or ("null",) if name not in LAYER_TYPES]
    if unknown:
        raise UserError(
            f"{source}: layer_types in config.json has {unknown[0]}; expected only {' and '.join(LAYER_TYPES)}"
        )
    return "".join(LAYER_TYPES[name] for name in types or ())


def write_config(config: GPTConfig, kind: str) -> dict[str, Any]:
    """Return the fields of config.json for a model's shape; the inverse of read_config.

    Args:
        kind: the model_type, a key of FAMILIES.
    """
    family = FAMILIES[kind]
    values = dataclasses.asdict(config.resolved())
    values["activation"] = next(name for name, ours in family.activations.items() if ours == config.activation)
    values["logit_softcap"] = config.logit_softcap or None
    names = {letter: name for name, letter in LAYER_TYPES.items()}
    values["layer_pattern"] = [names[letter] for letter in values["layer_pattern"]]
    stored = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{family.fields[name]: values[name] for name in family.defaults},
        **dict.fromkeys(family.dropouts, config.dropout),
        **family.written,
    }
    if family is GPT2:
        stored["n_ctx"] = config.context_length  # llama.cpp's converter reads it
    if family is LFM3:  # which has no name for a base of all layers
        rope = {"rope_type": "default", "rope_theta": stored.pop("rope_theta")}
        stored["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    return stored


def find_family(config: GPTConfig) -> str:
    """Return the model_type of a class of transformers that computes the same as GPT with this shape."""
    unfit = {kind: _unfit_fields(config, family) for kind, family in FAMILIES.items()}
    kind = min(unfit, key=lambda kind: len(unfit[kind]))
    if unfit[kind]:
        raise UserError(
            f"no class of transformers computes this model; {FAMILIES[kind].architecture} is the closest, but "
            f"{', '.join(unfit[kind])}. generate.py and hellaswag_eval.py read the checkpoint itself"
        )
    return kind


def _unfit_fields(config: GPTConfig, family: Family) -> list[str]:
    """Return the values of a model's shape that a family cannot have, each as "NAME is FOUND, expected EXPECTED"."""
    values = dataclasses.asdict(config.resolved())
    num_heads = config.num_heads
    expected = {f.name: f.default for f in dataclasses.fields(config) if f.name not in family.fields}
    # A family without these fields divides its width among the heads, and does not rotate. Missing biases are exported
    # as zeros.
    implied: dict[str, Any] = {"num_kv_heads": num_heads, "head_dim": config.embd_size // num_heads}
    implied |= {"layer_pattern": ATTENTION * config.num_layers}
    implied |= {"bias": config.bias, "rotary_base": config.rotary_base} | family.fixed
    expected |= {name: value for name, value in implied.items() if name in expected}
    unfit = [f"{name} is {values[name]}, expected {value}" for name, value in expected.items() if values[name] != value]
    if config.activation not in family.activations.values():
        activations = dict.fromkeys(family.activations.values())
        unfit.append(f"activation is {config.activation}, expected {' or '.join(activations)}")
    if "rotary_pct" in family.fields and not config.rotary_pct:
        unfit.append("rotary_pct is 0.0, expected more")
    if config.embd_size % num_heads and not family.any_heads:
        unfit.append(f"num_heads is {num_heads}, expected a divisor of embd_size {config.embd_size}")
    return unfit


# ---------------------------------------------------------------------------------------------------------------------
# names and layouts of weights


def foreign_names(name: str, family: Family) -> tuple[str, ...]:
    """Return the foreign name of a weight, or the names of the foreign matrices that GPT stacks in it."""
    names = [name]
    for part, foreign in family.names.items():
        if name.startswith(part) or (part.startswith(".") and part in name):
            foreign_parts = foreign if isinstance(foreign, tuple) else (foreign,)
            replaced = []
            for old in names:
                replaced += [old.replace(part, new, 1) for new in foreign_parts]
            names = replaced
    return tuple(names)


def to_foreign(name: str, tensor: Tensor, config: GPTConfig, family: Family) -> dict[str, Tensor]:
    """Convert a weight of GPT to the equivalent foreign weights, by name; tables lose their padding."""
    names = foreign_names(name, family)
    if name in TABLES:
        tensor = tensor[: config.vocab_size]
    tensor = _other_layout(name, tensor, config, family, (3, config.num_heads))
    parts = tensor.split(config.parts(name)) if len(names) > 1 else (tensor,)
    return {foreign: part.contiguous() for foreign, part in zip(names, parts, strict=True)}


def to_own(name: str, parts: Sequence[Tensor], config: GPTConfig, family: Family) -> Tensor:
    """Convert foreign weights, in the order of foreign_names, to the equivalent weight of GPT.

    The padding rows of tables become zero, as in training.
    """
    tensor = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if name in TABLES:
        tensor = F.pad(tensor[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return _other_layout(name, tensor, config, family, (config.num_heads, 3)).contiguous()


def _other_layout(name: str, tensor: Tensor, config: GPTConfig, family: Family, dims: tuple[int, int]) -> Tensor:
    """Convert a weight between the layouts of GPT and a family, in either direction.

    Args:
        dims: the first two dimensions of c_attn before the conversion: (3, num_heads) in GPT's layout.
    """
    if family.transposed and name.endswith("weight") and ".c_" in name:
        tensor = tensor.T
    if family.by_head and ".c_attn." in name:  # (3, num_heads, head_dim, ...) <-> (num_heads, 3, head_dim, ...)
        tensor = tensor.unflatten(0, (*dims, -1)).transpose(0, 1).flatten(0, 2)
    if name.endswith("conv.taps"):  # (width, C) <-> (C, 1, width)
        tensor = tensor.T[:, None] if tensor.dim() == 2 else tensor[:, 0].T
    if family.rotates_back and ".c_attn." in name:  # negate the second half of each query and key
        queries, keys, _ = config.parts(name)
        signs = tensor.new_ones(len(tensor), 1)
        signs[: queries + keys].view(-1, 2, config.resolved().head_dim // 2)[:, 1] = -1
        tensor = tensor * signs
    return tensor
