"""Models and runs of other projects, called foreign here, in terms of ours: weights, options, optimizer state."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from steadygpt.cli import UserError

if TYPE_CHECKING:
    from model import GPTConfig

ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"), "gelu": "gelu",
}  # fmt: skip
ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct", "rope_type": "rope_type"}
# Constants of attention that older files store with the weights.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
TABLES = ("wte.weight", "lm_head.weight")  # one row per token of the vocabulary


@dataclass(frozen=True)
class Family:
    """Names and layouts of another model class in terms of GPT and GPTConfig."""

    names: dict[str, str]  # parts of GPT's weight names -> foreign ones
    architecture: str = ""  # the Hugging Face class
    fields: dict[str, tuple] = field(default_factory=dict)  # of GPTConfig -> (foreign field, its default)
    required: dict[str, object] = field(default_factory=dict)  # foreign field -> its default, which GPT computes
    transposed: bool = False  # linear layers are stored as (in, out)
    by_head: bool = False  # c_attn holds q, k and v of one head after another; GPT's has the q of all heads first


NANOGPT = Family(
    names={"wte.": "transformer.wte.", "wpe.": "transformer.wpe.", "h.": "transformer.h.", "ln_f.": "transformer.ln_f."}
)
FAMILIES = {
    "gpt2": Family(
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
        transposed=True,
    ),
    "gpt_neox": Family(
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
        by_head=True,
    ),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# names and layouts of weights


def foreign_name(name: str, family: Family) -> str:
    """Return the foreign name of a weight."""
    for part, foreign in family.names.items():
        if name.startswith(part) or (part.startswith(".") and part in name):
            name = name.replace(part, foreign, 1)
    return name


def foreign_layout(name: str, tensor: Tensor, config: "GPTConfig", family: Family) -> Tensor:
    """Return a weight in the foreign layout."""
    if family.transposed and name.endswith("weight") and ".c_" in name:
        return tensor.T
    if family.by_head and ".c_attn." in name:  # (3, num_heads, head_dim, ...) -> (num_heads, 3, head_dim, ...)
        return tensor.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


def own_layout(name: str, tensor: Tensor, config: "GPTConfig", family: Family) -> Tensor:
    """Return a weight of the foreign layout in GPT's."""
    if family.by_head and ".c_attn." in name:  # (num_heads, 3, head_dim, ...) -> (3, num_heads, head_dim, ...)
        return tensor.unflatten(0, (config.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    if name in TABLES:  # padding rows are zero, as in training
        return F.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return foreign_layout(name, tensor, config, family).contiguous()


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
            moments[kind] = own_layout(name, moments[kind].float(), config, NANOGPT)
    return state, {"weight_decay": decays[0], "adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}
