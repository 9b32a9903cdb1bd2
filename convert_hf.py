"""Weights in and out of other formats: Hugging Face folders, nanoGPT's and build-nanogpt's checkpoint files.

    python convert_hf.py latest exported                 # a folder for AutoModelForCausalLM.from_pretrained
    python convert_hf.py exported weights.pt             # and back
    python convert_hf.py gpt2-medium weights.pt          # from the Hugging Face Hub
    python convert_hf.py out/ckpt.pt exported            # nanoGPT's, build-nanogpt's

What is computed stays bit by bit: a weight is renamed, transposed or reordered, never rounded. A converted checkpoint
holds weights only: generate.py, hellaswag_eval.py and train.py --init_from take it, --resume does not.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from config import FIELDS, TrainConfig
from model import GPT, GPTConfig
from steadygpt.checkpoint import FORMAT_VERSION, as_checkpoint, load_verified, open_checkpoint
from steadygpt.cli import OneLineParser, UserError, run_cli
from steadygpt.durable import fsync_folder, replace_file
from steadygpt.sources import hub_is_there
from steadygpt.tokenizer import END_OF_TEXT, get_tokenizer, hugging_face_tokenizer, vocab_size_of

NEEDS = "needs safetensors and tokenizers; pip install safetensors tokenizers"
GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "exact"}
ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct", "rope_type": "rope_type"}
# Constants of attention that older files keep among the weights.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Family:
    """How another model class says what GPTConfig and GPT say."""

    names: dict[str, str]  # parts of a weight's name, ours -> theirs
    architecture: str = ""  # the Hugging Face class
    fields: dict[str, tuple] = field(default_factory=dict)  # ours -> theirs, its value where config.json has none
    required: dict[str, object] = field(default_factory=dict)  # theirs -> what GPT computes, which is their default
    transposed: bool = False  # linear layers keep (in, out)
    by_head: bool = False  # c_attn has q, k and v of a head beside each other; ours has the q of all heads first


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
            "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
            "gelu": ("activation_function", "gelu_new"),
            "tied_head": ("tie_word_embeddings", True),
        },
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
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
            "layer_norm_eps": ("layer_norm_eps", 1e-5),
            "gelu": ("hidden_act", "gelu"),
            "tied_head": ("tie_word_embeddings", False),
            "rotary_pct": ("rotary_pct", 0.25),
            "rotary_base": ("rotary_emb_base", 10000.0),
            "parallel_residual": ("use_parallel_residual", True),
        },
        required={"attention_bias": True, "rope_scaling": None, "rope_type": "default"},
        names={
            "wte.": "gpt_neox.embed_in.",
            "ln_f.": "gpt_neox.final_layer_norm.",
            "lm_head.": "embed_out.",
            "h.": "gpt_neox.layers.",
            ".ln_1.": ".input_layernorm.",
            ".ln_2.": ".post_attention_layernorm.",
            ".attn.c_attn.": ".attention.query_key_value.",
            ".attn.c_proj.": ".attention.dense.",
            ".mlp.c_fc.": ".mlp.dense_h_to_4h.",
            ".mlp.c_proj.": ".mlp.dense_4h_to_h.",
        },
        by_head=True,
    ),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# weights -> ours


def read_weights(source: str, tokenizer: str = "") -> dict:
    """The weights of `source` as a checkpoint without optimizer, its "tokenizer" "" where nothing tells which.

    Args:
        source: a checkpoint file (ours, nanoGPT's, build-nanogpt's), a Hugging Face folder, or a name on the Hub.
        tokenizer: of these weights, where the source does not say it.

    Raises: UserError that names the field or the weight, what was found and what was expected.
    """
    if not source:
        raise UserError("no source; expected a checkpoint file, a Hugging Face folder, or a name such as gpt2")
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, source, tokenizer)
    if path.suffix == ".pt" or path.is_file():
        return _read_file(path, tokenizer)
    return _read_folder(_download(source), source, tokenizer)


def _read_file(path: Path, tokenizer: str) -> dict:
    # build-nanogpt pickles its GPTConfig; a class with nothing in it stands in, and nothing of theirs is run.
    stand_in = type("GPTConfig", (), {})
    with torch.serialization.safe_globals([(stand_in, "__main__.GPTConfig")]):
        content = load_verified(path)
    theirs = content.get("model_args", content.get("config")) if isinstance(content, dict) else None
    if isinstance(theirs, dict) and "model_args" in content:
        found = {"gelu": "exact"} | theirs  # nanoGPT
    elif isinstance(theirs, stand_in):
        found = {"gelu": "tanh"} | vars(theirs)  # build-nanogpt
    else:
        return with_tokenizer(as_checkpoint(content, path), tokenizer, path)
    names = {"context_length": "block_size", "num_layers": "n_layer", "num_heads": "n_head", "embd_size": "n_embd"}
    names = {f.name: names.get(f.name, f.name) for f in dataclasses.fields(GPTConfig)}
    config = _config({ours: found[theirs] for ours, theirs in names.items() if theirs in found}, names, path)
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path}: model is no dict of tensors; expected the weights of a GPT")
    weights = {name.removeprefix("module.").removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    return _import(config, weights, NANOGPT, tokenizer or _gpt2_if_it_fits(config), path)


def with_tokenizer(checkpoint: dict, tokenizer: str, path: Path) -> dict:
    """A checkpoint whose tokenizer is named, if it has none yet.

    Raises: UserError when it has another one, or a vocabulary of another size.
    """
    if not tokenizer or checkpoint["tokenizer"] == tokenizer:
        return checkpoint
    found, expected = vocab_size_of(tokenizer), checkpoint["model_config"]["vocab_size"]
    if checkpoint["tokenizer"] or found != expected:
        known = checkpoint["tokenizer"] or "unknown"
        raise UserError(
            f"--tokenizer {tokenizer}, of {found:,} ids; {path} has {expected:,}, its tokenizer is {known}; drop it"
        )
    return checkpoint | {"tokenizer": tokenizer}


def _read_folder(folder: Path, source: str, tokenizer: str) -> dict:
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: not a Hugging Face model: config.json cannot be read ({error})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{source}: config.json is a {type(stored).__name__}; expected an object")
    kind = stored.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{source}: model_type in config.json is {kind!r}; expected {' or '.join(FAMILIES)}")
    family = FAMILIES[kind]
    # transformers 5 puts together what was two fields before.
    rope = stored.get("rope_parameters")
    for newer, older in ROPE.items() if isinstance(rope, dict) else ():
        stored[older] = rope.get(newer, stored.get(older))
    for name, expected in family.required.items():
        if stored.get(name) not in (None, expected):
            raise UserError(f"{source}: {name} in config.json is {stored[name]!r}; expected {expected!r}")
    names = {ours: theirs for ours, (theirs, _) in family.fields.items()}
    found = {ours: stored.get(theirs, default) for ours, (theirs, default) in family.fields.items()}
    if str(found["gelu"]) not in GELUS:
        raise UserError(f"{source}: {names['gelu']} is {found['gelu']!r}; expected one of {', '.join(GELUS)}")
    found |= {"gelu": GELUS[found["gelu"]], "intermediate_size": found["intermediate_size"] or 0}
    config = _config(found, names, source)
    if config.intermediate_size == 4 * config.embd_size:
        config = dataclasses.replace(config, intermediate_size=0)
    own = stored.get("steadygpt")  # what their config.json has no field for
    own = own if isinstance(own, dict) and own.get("vocab_size") == config.vocab_size else {}
    tokenizer = tokenizer or str(own.get("tokenizer", "")) or (_gpt2_if_it_fits(config) if kind == "gpt2" else "")

    weights = _read_safetensors(folder, source)
    base = family.names["wte."].split(".")[0]
    if not any(name.startswith(base) for name in weights):  # saved without its head, as the Hub's gpt2
        weights = {name if name == "lm_head.weight" else f"{base}.{name}": weights[name] for name in weights}
    checkpoint = _import(config, weights, family, tokenizer, source)
    biases = [name for name in checkpoint["model"] if name.endswith(".bias")]
    if own.get("bias") is False and not any(checkpoint["model"][name].any() for name in biases):
        checkpoint["model_config"]["bias"] = False  # theirs has to have some
        for name in biases:
            del checkpoint["model"][name]
    return checkpoint


def _config(found: dict, names: dict[str, str], source) -> GPTConfig:
    """The shape that `found` says, by our names; `names` has what the source calls them."""
    for f in dataclasses.fields(GPTConfig):
        value = found.get(f.name, f.default)
        if type(value) not in ((int, float) if f.type is float else (f.type,)):
            expected = "true or false" if f.type is bool else f"{f.type.__name__}, such as {f.default}"
            raise UserError(f"{source}: {names[f.name]} is {value!r}; expected {expected}")
    if not 1 <= (vocab_size := found.get("vocab_size", 1)) <= 2**24:
        raise UserError(f"{source}: {names['vocab_size']} is {vocab_size:,}; expected 1 to {2**24:,}")
    try:
        TrainConfig(**{name: value for name, value in found.items() if name in FIELDS}).check_together()
    except UserError as error:
        said = re.sub(r"--(\w+)", lambda flag: names.get(flag[1], flag[0]), str(error))
        raise UserError(f"{source}: {said}") from None
    return GPTConfig(**found)


def _gpt2_if_it_fits(config: GPTConfig) -> str:
    """nanoGPT and build-nanogpt pad GPT-2's vocabulary to 50,304 rows; no text has the last 47."""
    return "gpt2" if config.vocab_size in (GPTConfig.vocab_size, GPTConfig().padded_vocab_size) else ""


def _import(config: GPTConfig, weights: dict[str, Tensor], family: Family, tokenizer: str, source) -> dict:
    """The checkpoint of a model in another class's names and layout."""
    rows = config.vocab_size  # of the tables, before those of their padding go
    if tokenizer:
        vocab_size = vocab_size_of(tokenizer)
        if not vocab_size <= rows < vocab_size + 128:
            raise UserError(
                f"{source}: vocab_size is {rows:,}; expected the {vocab_size:,} of the tokenizer {tokenizer!r}, "
                "or a few rows of padding more; name another one with --tokenizer"
            )
        config = dataclasses.replace(config, vocab_size=vocab_size)
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(CONSTANTS)}
    model = {}
    for name, empty in _unpadded(config).items():
        theirs, expected = _their_name(name, family), tuple(_their_layout(name, empty, config, family).shape)
        if name in TABLES:
            expected = (rows, config.embd_size)
        tensor = weights.pop(theirs, None)
        if tensor is None or tuple(tensor.shape) != expected:
            found = "missing" if tensor is None else tuple(tensor.shape)
            raise UserError(f"{source}: the weight {theirs} is {found}; expected {expected}")
        if not tensor.isfinite().all():
            raise UserError(f"{source}: the weight {theirs} has NaN or infinite values; it cannot be trained on")
        if name in TABLES:
            tensor = tensor[: config.vocab_size]
        model[name] = _our_layout(name, tensor.float(), config, family)
    if config.tied_head:
        model["lm_head.weight"] = model["wte.weight"]
        head, table = (_their_name(name, family) for name in ("lm_head.weight", "wte.weight"))
        stored = weights.pop(head, model["wte.weight"])[: config.vocab_size].float()
        if not torch.equal(stored, model["wte.weight"][: config.vocab_size]):
            raise UserError(f"{source}: the weight {head} is not {table}; expected the same: the head is tied")
    if weights:
        raise UserError(f"{source}: the weight {min(weights)} is one too many; expected {len(model)} weights")
    return {
        "format_version": FORMAT_VERSION,
        "step": 0,
        "rows_consumed": 0,
        "model": model,
        "optimizer": {},
        "model_config": dataclasses.asdict(config),
        "train_config": {},
        "tokenizer": tokenizer,
        "torch_version": str(torch.__version__),
        "saved_at": time.time(),
    }


def _read_safetensors(folder: Path, source: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{source}: {NEEDS}") from None
    # Large models come as several files with an index, which says nothing more than they do.
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        files = sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{source}: no model.safetensors in it; other formats can run code when they are loaded")
    weights = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
    return weights


def _download(name: str) -> Path:
    """A model of the Hub, as a folder of its cache."""
    online = hub_is_there()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["config.json", "*.safetensors"], local_files_only=not online)
        )
    except Exception as error:  # the Hub's HTTP library has kinds of its own
        reason = f"{error!r}".splitlines()[0] if online else "no network, and no copy of it from before"
        raise UserError(
            f"{name}: no such file or folder, and it cannot be had from the Hugging Face Hub ({reason}); "
            "expected a checkpoint file, a Hugging Face folder, or, with a network, a name such as gpt2"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# names and layouts

TABLES = ("wte.weight", "lm_head.weight")  # a row for each token of the vocabulary


def _unpadded(config: GPTConfig) -> dict[str, Tensor]:
    """A model's weights without data, padding and, where it is tied, the head."""
    with torch.device("meta"):
        model = GPT(config, initialize=False).state_dict()
    if config.tied_head:
        del model["lm_head.weight"]
    return {name: tensor[: config.vocab_size] if name in TABLES else tensor for name, tensor in model.items()}


def _their_name(name: str, family: Family) -> str:
    for ours, theirs in family.names.items():
        if name.startswith(ours) or (ours.startswith(".") and ours in name):
            name = name.replace(ours, theirs, 1)
    return name


def _their_layout(name: str, tensor: Tensor, config: GPTConfig, family: Family) -> Tensor:
    if family.transposed and name.endswith("weight") and ".c_" in name:
        return tensor.T
    if family.by_head and ".c_attn." in name:  # (3, num_heads, head_dim, ...) -> (num_heads, 3, head_dim, ...)
        return tensor.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


def _our_layout(name: str, tensor: Tensor, config: GPTConfig, family: Family) -> Tensor:
    if family.by_head and ".c_attn." in name:
        return tensor.unflatten(0, (config.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    if name in TABLES:  # padding rows are zero, as in training
        return F.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return _their_layout(name, tensor, config, family).contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# ours -> a Hugging Face folder


def write_folder(checkpoint: dict, folder: Path) -> list[str]:
    """Write a checkpoint as a folder that transformers loads; it is there whole or not at all.

    Returns: what the user should know about it, a line each.

    Raises: UserError when the folder is not empty, or no Hugging Face class computes what the model does.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UserError(f"{folder}: {NEEDS}") from None
    config = GPT.from_checkpoint(checkpoint).config
    kind = "gpt_neox" if config.rotary_dim else "gpt2"
    if kind == "gpt2" and config.parallel_residual:
        raise UserError("parallel_residual is True with learned positions; expected rotary ones: no class has both")
    family = FAMILIES[kind]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; expected the name of a new folder")

    # Theirs always has biases: zero is none.
    weights = {}
    for name, empty in _unpadded(dataclasses.replace(config, bias=True)).items():
        tensor = checkpoint["model"].get(name, torch.zeros(empty.shape))
        tensor = tensor[: config.vocab_size] if name in TABLES else tensor
        weights[_their_name(name, family)] = _their_layout(name, tensor, config, family).contiguous()

    notes, tokenizer = [], None
    try:
        tokenizer = get_tokenizer(checkpoint["tokenizer"])
    except UserError as error:
        notes.append(f"no tokenizer in {folder}: {error}")
    values = dataclasses.asdict(config) | {"intermediate_size": config.mlp_size}
    values["gelu"] = next(theirs for theirs, ours in GELUS.items() if ours == config.gelu)
    end_of_text = tokenizer.eot_token if tokenizer else None
    stored = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: values[ours] for ours, (theirs, _) in family.fields.items()},
        **dict.fromkeys(["embd_pdrop", "attn_pdrop"] if kind == "gpt2" else ["attention_dropout"], config.dropout),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
        "steadygpt": {
            "bias": config.bias,
            "tokenizer": checkpoint["tokenizer"],
            "vocab_size": config.vocab_size,
        },
    }
    temporary = folder.absolute().with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # a killed writer's
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        if tokenizer:
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
            about |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
            about["model_input_names"] = ["input_ids", "attention_mask"]  # transformers 4 would give generate() more
            (temporary / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
            hugging_face_tokenizer(tokenizer).save(str(temporary / "tokenizer.json"))
        for file in temporary.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # it is empty
        temporary.rename(folder)
        fsync_folder(folder.absolute().parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error}") from error
    return notes


def main() -> int:
    parser = OneLineParser(description="Convert weights between SteadyGPT, Hugging Face, nanoGPT and build-nanogpt.")
    parser.add_argument(
        "source", help="latest, best, a checkpoint file (also nanoGPT's, build-nanogpt's), a folder, a name on the Hub"
    )
    parser.add_argument("target", help="a new Hugging Face folder, or a new checkpoint file: NAME.pt")
    parser.add_argument(
        "--checkpoint_dir", default="checkpoints", help="where latest and best are (default: checkpoints)"
    )
    parser.add_argument("--tokenizer", default="", help="of the weights, where the source does not say it")
    args = parser.parse_args()
    if args.source in ("latest", "best"):
        path, checkpoint = open_checkpoint(args.source, Path(args.checkpoint_dir))
        checkpoint = with_tokenizer(checkpoint, args.tokenizer, path)
    else:
        path, checkpoint = args.source, read_weights(args.source, args.tokenizer)
    target, notes = Path(args.target), []
    if target.suffix == ".pt":
        if target.exists():
            raise UserError(f"{target} is there already; expected the name of a new file")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, lambda file: torch.save(checkpoint, file))
        except OSError as error:
            raise UserError(f"{target} cannot be written: {error}") from error
        use = f"python train.py --init_from {target}"
    else:
        notes = write_folder(checkpoint, target)
        use = f"AutoModelForCausalLM.from_pretrained({str(target)!r})"
    with torch.device("meta"):
        model = GPT(GPTConfig(**checkpoint["model_config"]), initialize=False)
    print(
        f"{path} -> {target}: {model.num_parameters() / 1e6:,.2f} M parameters, context "
        f"{model.config.context_length:,}, vocabulary {model.config.vocab_size:,} "
        f"({checkpoint['tokenizer'] or 'tokenizer unknown'}); {use}"
    )
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_cli(main)
