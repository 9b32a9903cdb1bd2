"""Weights of SteadyGPT, nanoGPT and Hugging Face: reading, comparing with a run, loading into a model."""

import dataclasses
import difflib
import hashlib
import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from model import GPT, TABLES, GPTConfig, sketch_of
from steadygpt.base.foreign import ADAPTER, what_it_begins_as, what_it_is
from steadygpt.base.options import OptionError, UserError, kind_of, option
from steadygpt.base.progress import say
from steadygpt.base.text import command, counted, labelled, some
from steadygpt.base.typed import Count, parse_json, read_json
from steadygpt.checkpoint.files import (
    FORMAT_VERSION,
    NAMED,
    WITHOUT_RUN,
    as_checkpoint,
    check_tensors,
    checkpoint_files,
    load_verified,
    open_checkpoint,
)
from steadygpt.convert import families
from steadygpt.convert.families import NANOGPT, Family, foreign_names, to_foreign, to_own
from steadygpt.data.tokenizer import (
    GPT2_TOKENIZER,
    TOKENIZER_JSON,
    TokenizerRecord,
    load_tokenizer,
    record_named,
)
from steadygpt.network import hub

# The hash of GPT-2's vocab.json, as json.dumps writes it with sorted keys.
GPT2_VOCAB_SHA256 = "855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2"
GPT2_ROWS = GPTConfig.vocab_size, GPTConfig().padded_vocab_size  # the second includes nanoGPT's padding rows
UNKNOWN = TokenizerRecord("")
FLAGS_OF_SHAPE = ("num_layers", "num_heads", "embd_size", "context_length")
# Classes in the pickled state of NumPy's random numbers; NumPy 1 has them in other modules.
NUMPY = ("ndarray", "dtype", "core.multiarray._reconstruct", "_core.multiarray._reconstruct")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ADD_ROWS = (
    'python -c "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); '
    "m.resize_token_embeddings({rows}); m.save_pretrained('resized'); "
    "t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained('resized')\" {folder}"
)


def read_weights(source: str, tokenizer: str = "", download: bool = True) -> dict:
    """Read weights in the form of a checkpoint; its "tokenizer" is "" if unknown.

    Args:
        source: a checkpoint file (also of nanoGPT or build-nanogpt), a folder of checkpoints (the latest one is read),
            a Hugging Face folder, or NAME[@REVISION] on the Hub.
        tokenizer: of these weights, if the source does not name it.
        download: False leaves "model" empty if the weights are on the Hub; "source" then names them with the commit.
    """
    if not source:
        raise UserError("no source; expected a checkpoint file, a Hugging Face folder, or a name such as gpt2")
    if "://" in source:
        to_download = f"{command('scripts/upload_manager.py')} download latest --mirror {source}"
        raise UserError(f"{source}: expected a file, a folder or a name on the Hub; download a run with {to_download}")
    path = Path(source)
    user_record = record_named(tokenizer)
    if path.is_dir():
        if (path / ADAPTER).exists():
            raise UserError(f"{path}: {what_it_is(path / ADAPTER)}")
        if not (path / "config.json").exists() and checkpoint_files(path):
            path, checkpoint = open_checkpoint(source, path)
            return with_tokenizer(checkpoint, user_record, path)
        return _read_folder(path, source, user_record)
    if path.suffix == ".pt" or path.is_file():
        return _read_file(path, user_record)
    try:
        folder, repo = hub.fetch_model(source, download)
    except (hub.NoAnswer, hub.NotFound) as error:
        raise UserError(f"{error}; there is no such file or folder either") from error
    except OSError as error:
        raise UserError(f"{source}: {error}; fix it and run this again") from error
    if download or not repo.online:
        return _read_folder(folder, source, user_record)
    checkpoint = _read_folder(folder, source, user_record, with_weights=False)
    return checkpoint | {"source": f"{repo.name}@{repo.commit}"}


def open_weights(source: str, folder: Path, tokenizer: str = "") -> tuple[str, dict]:
    """Return the name and the weights that a command asks for.

    Args:
        source: latest, best or stable of the folder; for others see read_weights.
    """
    words = ("latest", *NAMED)
    close = difflib.get_close_matches(source, words, n=1, cutoff=0.7)
    if close and source not in words and not Path(source).exists():  # not asked of the Hub
        raise UserError(f"{source}: no such file or folder; did you mean {close[0]}?")
    if source not in words:
        return source, read_weights(source, tokenizer)
    path, checkpoint = open_checkpoint(source, folder)
    return str(path), with_tokenizer(checkpoint, record_named(tokenizer), path)


class Kept(TypedDict):
    """Parts of the weights' Hugging Face folder that an export writes back."""

    ids: dict[str, Count | list[Count]]  # special ids of config.json
    files: dict[str, str]  # name -> text


@dataclass(frozen=True)
class ModelOptions:
    """Options of all commands that use a trained model."""

    checkpoint_dir: str = option("checkpoints", "folder of checkpoints")
    device: str = option("auto", "auto (CUDA if available), cpu, cuda or mps")
    precision: str = option(
        "auto",
        "auto: bf16 if the device has instructions for it, else fp16 on a GPU, fp32 on a CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )


@dataclass(frozen=True)
class CheckpointOptions(ModelOptions):
    """Options of the commands that use one checkpoint."""

    checkpoint: str = option(
        "latest",
        "latest, best, stable, a file, a folder for its latest, or weights as for train.py --init_from, such as gpt2",
        positional=True,
    )


def load_model(checkpoint: dict) -> GPT:
    """Return the model of a checkpoint, on the CPU."""
    config = GPTConfig(**checkpoint["model_config"])
    # Check before memory is allocated.
    check_tensors(checkpoint | {"optimizer": {}}, "the checkpoint", sketch_of(config), {})
    model = GPT(config, initialize=False)
    model.load_state_dict(checkpoint["model"])
    return model


def load_cropped(weights: dict, shape: GPTConfig) -> None:
    """Load the tensors of the weights of --init_from, cropped to the context and the vocabulary of a run."""
    model = weights["model"] or read_weights(weights["source"])["model"]
    weights["model"] = model
    if "wpe.weight" in model:
        model["wpe.weight"] = model["wpe.weight"][: shape.context_length]
    if weights["model_config"]["vocab_size"] > shape.vocab_size:
        for name in TABLES:
            model[name] = model[name][: shape.padded_vocab_size].clone()
            model[name][shape.vocab_size :] = 0  # padding rows, as in training


def check_fits(initial: dict, source: str, config: GPTConfig, record: TokenizerRecord) -> str:
    """Check that the weights of --init_from fit the model and the data of a run.

    The context of the weights may be longer. If they have the tokenizer of the data, they may also have more rows.

    Returns: a line for the plan if the tokenizers cannot be compared, else "".
    """
    record_of_weights = TokenizerRecord.of(initial)
    shape = dataclasses.asdict(config.resolved())
    advice = "prepare the text with the tokenizer of the weights"
    is_same = bool(record.tokenizer_sha256) and record.tokenizer_sha256 == record_of_weights.tokenizer_sha256
    for name, value in dataclasses.asdict(GPTConfig(**initial["model_config"]).resolved()).items():
        may_be_larger = name == "context_length" or (name == "vocab_size" and is_same)
        if name == "dropout" or value == shape[name] or (may_be_larger and value > shape[name]):
            continue
        problem = f"--init_from {source}: {name} is {value}"
        if name == "vocab_size":
            raise UserError(f"{problem}, but the data has {shape[name]}; {advice}")
        raise UserError(f"{problem}, but this run has {shape[name]}")
    if not record_of_weights.fits(record):
        raise UserError(f"--init_from {source}: tokenizer is {record_of_weights}, but the data has {record}; {advice}")
    is_file_alone = record_of_weights.is_file and not record_of_weights.tokenizer_sha256
    if not record_of_weights.tokenizer or is_file_alone:
        return labelled("weights", f"{source} names no tokenizer: only the vocabulary size was compared")
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# files and folders


class _Ignored:
    """Replaces pickled objects that are not needed, so that no code of the file runs."""

    def __init__(self, *arguments: object): ...

    def __setstate__(self, state: object) -> None: ...


def _read_file(path: Path, user_record: TokenizerRecord) -> dict:
    # A file of build-nanogpt contains its pickled GPTConfig. An empty class replaces it, so no code of the file runs.
    stand_in = type("GPTConfig", (), {})
    modules = ("__main__", "model", "train_gpt2")
    stand_ins: list = [(stand_in, f"{module}.GPTConfig") for module in modules]
    with torch.serialization.safe_globals(stand_ins + [(_Ignored, f"numpy.{name}") for name in NUMPY]):
        content = load_verified(path)
    content = content if isinstance(content, dict) else {}
    shape = content.get("model_args", content.get("config"))
    flags = content.get("args")
    if isinstance(shape, dict) and "block_size" not in shape:
        shape = None  # the file is from another program, see as_checkpoint
    fields: dict[str, Any]
    if isinstance(shape, dict) and "model_args" in content:
        fields = {"activation": "gelu"} | shape  # nanoGPT
    elif isinstance(shape, stand_in):
        fields = {"activation": "gelu_tanh"} | vars(shape)  # build-nanogpt; gpt2-from-scratch has names of GPTConfig
    elif isinstance(flags, dict) and "embd_size" in flags and isinstance(content.get("model"), dict):
        tables = [table for name, table in content["model"].items() if str(name).endswith("wte.weight")]
        rows = len(tables[0]) if tables and isinstance(tables[0], Tensor) else None
        shape = {name: flags.get(name) for name in FLAGS_OF_SHAPE} | {"vocab_size": rows}
        fields = {"activation": "gelu_tanh"} | shape  # train_improved.py
    else:
        return with_tokenizer(as_checkpoint(content, path), user_record, path)
    names = {ours: theirs for ours, theirs in NANOGPT.fields.items() if ours not in fields}
    fields |= {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    config = _config(fields, names, path)
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path}: model is not a dict of tensors; expected the weights of a GPT")
    record = user_record if user_record.tokenizer else _assume_gpt2(config, path)
    return _as_own_checkpoint(config, _own_names(weights), NANOGPT, record, path)


def _own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove attention's constants, and the name prefixes that torch.compile and DDP add, in any order."""
    cleaned = {}
    for name, tensor in weights.items():
        if not name.endswith(families.CONSTANTS):
            cleaned[re.sub(r"^((_orig_mod|module)\.)+", "", name)] = tensor
    return cleaned


def _read_folder(folder: Path, source: str, user_record: TokenizerRecord, with_weights: bool = True) -> dict:
    if not (folder / "config.json").exists():
        problem = (
            what_it_is(folder) or "no checkpoints and no config.json in it; expected a run or a Hugging Face model"
        )
        raise UserError(f"{source}: {problem}")
    stored = read_json(folder / "config.json", dict, "expected that of a Hugging Face model")
    family, fields = families.read_config(stored, source)
    config = _config(fields, family.fields, source)
    own = stored.get("steadygpt")  # written by write_folder of convert_hf.py
    if not isinstance(own, dict) or own.get("vocab_size") != config.vocab_size:
        own = {}
    record = user_record if user_record.tokenizer else _tokenizer_of(folder, source, own, config, stored)
    record = replace(record, tokenizer_files=kept_files(folder, stored))
    weights = _read_safetensors(folder, source, family) if with_weights else {}
    biases = {name for name in weights if name.endswith(".bias")}
    if own.get("bias") is False and not any(weights[name].any() for name in biases):  # write_folder added zeros
        config = dataclasses.replace(config, bias=False)
        weights = {name: tensor for name, tensor in weights.items() if name not in biases}
    return _as_own_checkpoint(config, weights if with_weights else None, family, record, source)


def import_safetensors(path: object) -> Any:
    """Import and return safetensors, which only Hugging Face folders need; the error names `path`."""
    try:
        import safetensors.torch
        import tokenizers  # noqa: F401 (checks and writes a tokenizer.json)
    except ImportError:
        raise UserError(f"{path}: needs safetensors and tokenizers; pip install safetensors tokenizers") from None
    return safetensors


def _read_safetensors(folder: Path, source: str, family: Family) -> dict[str, Tensor]:
    safetensors = import_safetensors(source)
    weights: dict[str, Tensor] = {}
    for file in hub.weight_files(folder):
        if file.name == hub.WEIGHTS and not file.exists():
            reasons = filter(None, (what_it_is(path) for path in sorted(folder.glob("*.bin"))))
            reason = next(reasons, "other formats are refused, because loading them can run code")
            raise UserError(f"{source}: no {hub.WEIGHTS} and no {hub.INDEX}; {reason}")
        try:
            weights |= _own_names(safetensors.torch.load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file}: {what_it_begins_as(file) or f'cannot be read ({error})'}") from error
    base = foreign_names("wte.weight", family)[0].partition(".")[0]
    if not any(name.startswith(base) for name in weights):  # the model without its head was saved, as gpt2 on the Hub
        weights = {name if name == "lm_head.weight" else f"{base}.{name}": weights[name] for name in weights}
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# shapes and weights


def _config(fields: dict, names: dict[str, str], source: Path | str) -> GPTConfig:
    """Build a model's shape from fields of GPTConfig; errors name a field as the source does, see `names`."""
    shape = {}
    for f in dataclasses.fields(GPTConfig):
        value = fields.get(f.name, f.default)
        expected = kind_of(f)
        if type(value) not in ((int, float) if expected is float else (expected,)):
            example = "true or false" if expected is bool else f"{expected.__name__}, such as {f.default}"
            found_text = json.dumps(value, default=repr)
            raise UserError(f"{source}: {names.get(f.name, f.name)} is {found_text}; expected {example}")
        shape[f.name] = value
    try:
        config = GPTConfig(**shape)
        config.check_shape()
    except OptionError as error:
        name = names.get(error.name, error.name)
        raise UserError(f"{source}: {name} is {error.found}; expected {error.expected}") from None
    return config


def _as_own_checkpoint(
    config: GPTConfig, weights: dict[str, Tensor] | None, family: Family, record: TokenizerRecord, source: Path | str
) -> dict:
    """Convert foreign weights to a checkpoint in GPT's names and layouts; without weights its "model" is empty."""
    rows = config.vocab_size  # of the tables, with padding
    config = _without_padding(config, record, source)
    model: dict[str, Tensor] = {}
    checkpoint = {
        "format_version": FORMAT_VERSION,
        "model": model,
        "model_config": dataclasses.asdict(config),
        **asdict(record),
        "saved_at": time.time(),
        **{"step": 0, "rows_consumed": 0},
        **WITHOUT_RUN,
    }
    if weights is None:
        return checkpoint
    head = foreign_names("lm_head.weight", family)[0]
    table = foreign_names("wte.weight", family)[0]
    if config.tied_head and table not in weights and head in weights:  # a tied table may have either name
        weights[table] = weights[head]
    for name, sketch in sketch_of(config).named_parameters():  # without a tied head
        parts = []
        for foreign, foreign_sketch in to_foreign(name, sketch, config, family).items():
            expected = (rows, config.embd_size) if name in TABLES else tuple(foreign_sketch.shape)
            tensor = weights.pop(foreign, None)
            if tensor is None or tuple(tensor.shape) != expected:
                shape = "missing" if tensor is None else tuple(tensor.shape)
                raise UserError(f"{source}: the weight {foreign} is {shape}; expected {expected}")
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # such as scaled float8
                raise UserError(f"{source}: the weight {foreign} is {tensor.dtype}; expected fp64, fp32, fp16 or bf16")
            if not tensor.isfinite().all():
                raise UserError(f"{source}: the weight {foreign} has NaN or infinite values; expected finite ones")
            parts.append(tensor.float())
        model[name] = to_own(name, parts, config, family)
    if config.tied_head:
        model["lm_head.weight"] = model["wte.weight"]
        stored = weights.pop(head, model["wte.weight"])[: config.vocab_size].float()
        if not torch.equal(stored, model["wte.weight"][: config.vocab_size]):
            raise UserError(f"{source}: weights {head} and {table} differ; expected equal ones: the head is tied")
    if weights:
        raise UserError(f"{source}: unexpected weight {min(weights)}; expected {len(model)} weights")
    return checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def with_tokenizer(checkpoint: dict, user_record: TokenizerRecord, path: Path) -> dict:
    """Return the checkpoint with its own tokenizer, or else with the one that the user names."""
    record = TokenizerRecord.of(checkpoint)
    if not record.tokenizer:
        record = user_record
    if user_record.tokenizer not in ("", record.tokenizer):
        raise UserError(f"{path}: its tokenizer is {record}; drop --tokenizer {user_record.tokenizer}")
    _without_padding(GPTConfig(**checkpoint["model_config"]), user_record, path)  # checks the number of ids
    return checkpoint | asdict(record)


def _tokenizer_of(folder: Path, source: str, own: dict, config: GPTConfig, stored: dict) -> TokenizerRecord:
    """Return the record of the tokenizer of a Hugging Face folder, as far as it is known.

    Args:
        own: the part of config.json that write_folder in convert_hf.py added.
        stored: config.json.
    """
    record = TokenizerRecord.of({"tokenizer": ""} | own, f"{source}: steadygpt in config.json")
    if own.get("tokenizer_sha256") or (record.tokenizer and not record.is_file):
        return record.with_json(folder)
    has_rows_of_gpt2 = config.vocab_size in GPT2_ROWS
    path = folder / TOKENIZER_JSON
    if not path.exists():
        if stored["model_type"] == "gpt2" and not (folder / "vocab.json").exists():
            return _assume_gpt2(config, source)
        return GPT2_TOKENIZER if has_rows_of_gpt2 and _is_gpt2(folder / "vocab.json") else UNKNOWN
    try:
        record = record_named(str(path))
    except UserError as error:
        say(f"warning: {source}: no tokenizer: {error}")
        return UNKNOWN
    if has_rows_of_gpt2 and record.tokenizer_sha256 == GPT2_TOKENIZER.tokenizer_sha256:
        return GPT2_TOKENIZER
    tokenizer = load_tokenizer(record)
    if not Path(source).is_dir():
        record = replace(record, tokenizer=f"hf:{source}")
    special = {str(i): token for token, i in tokenizer.special.items()}
    document_token = record.document_token
    if document_token not in special.values():
        document_token = special.get(str(stored.get("bos_token_id")), document_token)
    return replace(record, document_token=document_token)


def _is_gpt2(vocabulary: Path) -> bool:
    """Return whether a vocab.json, which older folders have, is GPT-2's."""
    with suppress(OSError, UserError):
        content = json.dumps(read_json(vocabulary, dict, ""), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest() == GPT2_VOCAB_SHA256
    return False


def kept_files(folder: Path, stored: dict) -> str:
    """Return the JSON of a Kept: special ids of config.json, and the texts of other small files of the folder.

    Args:
        stored: config.json.
    """
    ids: dict[str, int | list[int]] = {}
    for name in SPECIAL_IDS:
        value: Any = stored.get(name)
        values = value if isinstance(value, list) else [value]
        if all(type(i) is int and 0 <= i < 2**32 for i in values):
            ids[name] = value
    files = {}
    for name in hub.KEPT_FILES:
        path = folder / name
        with suppress(OSError, UserError, ValueError, RecursionError):  # broken files are left out
            text = path.read_bytes().decode()
            # With an empty generation_config.json, transformers would not know how a text ends.
            if path.suffix != ".json" or json.loads(text):
                files[name] = text
    return json.dumps({"ids": ids, "files": files})


def read_kept(record: TokenizerRecord, vocab_size: int) -> Kept:
    """Return the Kept of a record, without ids outside the vocabulary and without files other than KEPT_FILES."""
    advice = "convert the weights again"
    content = parse_json(record.tokenizer_files or '{"ids": {}, "files": {}}', Kept, "tokenizer_files", advice)
    ids = {name: value for name, value in content["ids"].items() if name in SPECIAL_IDS}
    for name, value in list(ids.items()):
        values = value if isinstance(value, list) else [value]
        if any(i >= vocab_size for i in values):
            del ids[name]
    return Kept(ids=ids, files={name: text for name, text in content["files"].items() if name in hub.KEPT_FILES})


def end_ids(record: TokenizerRecord, vocab_size: int) -> list[int]:
    """Return the ids that end a text, as transformers reads them from the weights' Hugging Face folder; [] if none."""
    kept = read_kept(record, vocab_size)
    generation = json.loads(kept["files"].get("generation_config.json", "{}"))
    ends = generation.get("eos_token_id") if isinstance(generation, dict) else None
    ends = kept["ids"].get("eos_token_id") if ends is None else ends
    ends = ends if isinstance(ends, list) else [ends]
    return [i for i in ends if isinstance(i, int)]


def _assume_gpt2(config: GPTConfig, source: Path | str) -> TokenizerRecord:
    """Assume gpt2, with a warning, for weights that name no tokenizer and have its number of rows."""
    if config.vocab_size not in GPT2_ROWS:
        return UNKNOWN
    problem = f"names no tokenizer; assumed gpt2, because it has {config.vocab_size:,} rows"
    say(f"warning: {source}: {problem}. For another one, use --tokenizer of convert_hf.py")
    return TokenizerRecord("gpt2")


def _without_padding(config: GPTConfig, record: TokenizerRecord, source: Path | str) -> GPTConfig:
    """Return the shape with the vocabulary of the tokenizer, if its size is known, instead of the padded one.

    The padding of a tokenizer from a file stays, because data prepared without the tokenizer counts the padding.
    """
    if not record.tokenizer or (record.is_file and not record.tokenizer_json):
        return config
    rows = config.vocab_size
    vocab_size = record.vocab_size
    if record.is_file and vocab_size <= rows:
        return config
    if record.is_file:
        bytes_of = load_tokenizer(record).bytes_of
        beyond = [f"{i} {bytes_of[i].decode(errors='replace')!r}" for i in sorted(bytes_of) if i >= rows]
        folder = "FOLDER" if Path(source).is_file() else shlex.quote(str(source))
        raise UserError(
            f"{source}: the tokenizer {record.tokenizer!r} has {counted(len(beyond), 'id')} beyond the {rows:,} rows "
            f"of the weights: {', '.join(some(beyond, 'id', 3))}; expected none. If it is the right tokenizer, remove "
            "unused tokens from the tokenizer.json, or add rows to the weights and use the folder resized: "
            f"{ADD_ROWS.format(rows=vocab_size, folder=folder)}"
        )
    if not vocab_size <= rows < vocab_size + 128:
        raise UserError(
            f"{source}: vocab_size is {rows:,}; expected the {vocab_size:,} of the tokenizer {record.tokenizer!r}, "
            "or a few rows of padding more; name the right one with --tokenizer"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)
