"""Conversion of weights from and to Hugging Face folders, and from nanoGPT's checkpoints.

The families of steadygpt/convert/families.py are known: GPT-2, GPT-NeoX, Llama, Qwen 3 and NanoChat.

    python convert_hf.py latest exported                 # a folder for AutoModelForCausalLM.from_pretrained
    python convert_hf.py average:10 exported             # with the mean weights of the newest ten rolling checkpoints
    python convert_hf.py exported weights.pt             # and back
    python convert_hf.py gpt2-medium weights.pt          # from the Hugging Face Hub
    python convert_hf.py out/ckpt.pt exported            # from nanoGPT, build-nanogpt or gpt2-from-scratch

The conversion is exact: weights are renamed, split, reordered or negated, but never rounded. A converted checkpoint
holds only weights: generate.py, hellaswag_eval.py and train.py --init_from accept it.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generate import load_model
from model import GPT, GPTConfig
from steadygpt.base.disk import check_pulled
from steadygpt.base.durable import fsync, fsync_folder, replace_file
from steadygpt.base.options import OptionError, UserError, kind_of, option, parse_options, run_cli
from steadygpt.base.progress import say
from steadygpt.base.text import labelled, printable
from steadygpt.base.typed import read_json
from steadygpt.checkpoint.files import FORMAT_VERSION, NAMED, as_checkpoint, load_verified, open_checkpoint
from steadygpt.convert import families
from steadygpt.convert.families import FAMILIES, NANOGPT, TABLES, Family, foreign_names, resolved, to_foreign, to_own
from steadygpt.data import hub
from steadygpt.data.tokenizer import GPT2, TOKENIZER_JSON, TokenizerRecord, load_tokenizer, record_named, vocab_size_of
from steadygpt.data.tokenizer_json import to_json

# Of the vocab.json of GPT-2, as json.dumps writes it with sorted keys.
GPT2_VOCAB_SHA256 = "855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2"
GPT2_ROWS = GPTConfig.vocab_size, GPTConfig().padded_vocab_size  # the latter with the unused rows of nanoGPT
NEEDS = "needs safetensors and tokenizers; pip install safetensors tokenizers"


@dataclass(frozen=True)
class ConvertOptions:
    source: str = option(
        MISSING,
        "latest, best, stable, average:N, a file (also nanoGPT's), a folder (also Hugging Face's) or a name on the Hub",
        positional=True,
        no_password=True,
    )
    target: str = option(MISSING, "a new Hugging Face folder, or a new checkpoint file: NAME.pt", positional=True)
    checkpoint_dir: str = option("checkpoints", "folder of latest, best, stable and average:N")
    tokenizer: str = option(
        "", "tokenizer of the weights, if the source does not name it: a name, hf:NAME, or the path of a tokenizer.json"
    )


# ---------------------------------------------------------------------------------------------------------------------
# other formats -> a checkpoint


def read_weights(source: str, tokenizer: str = "", download: bool = True) -> dict:
    """Read weights as a checkpoint without optimizer; its "tokenizer" is "" if unknown.

    Args:
        source: a checkpoint file (also nanoGPT's or build-nanogpt's), a folder of checkpoints for its latest, a Hugging
            Face folder, or NAME[@REVISION] on the Hub.
        tokenizer: of these weights, if the source does not name it.
        download: False leaves "model" empty if the source is on the Hub; "source" then names it with its commit.
    """
    if not source:
        raise UserError("no source; expected a checkpoint file, a Hugging Face folder, or a name such as gpt2")
    path, given = Path(source), record_named(tokenizer)
    if path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.pt")):
        path, checkpoint = open_checkpoint(source, path)
        return with_tokenizer(checkpoint, given, path)
    if path.is_dir():
        return _read_folder(path, source, given)
    if path.suffix == ".pt" or path.is_file():
        return _read_file(path, given)
    try:
        folder, repo = hub.fetch_model(source, download)
    except OSError as error:
        raise UserError(f"{source}: {error}; fix it and run this again") from error
    except UserError as error:
        is_unknown = isinstance(error, (hub.NoAnswer, hub.NotFound))
        raise UserError(f"{error}{'; there is no such file or folder either' * is_unknown}") from error
    if download or not repo.online:
        return _read_folder(folder, source, given)
    return _read_folder(folder, source, given, with_weights=False) | {"source": f"{repo.name}@{repo.commit}"}


def _read_file(path: Path, given: TokenizerRecord) -> dict:
    # build-nanogpt pickles its GPTConfig; an empty class replaces it, so that no code of the file runs.
    stand_in = type("GPTConfig", (), {})
    modules = ("__main__", "model", "train_gpt2")
    with torch.serialization.safe_globals([(stand_in, f"{module}.GPTConfig") for module in modules]):
        content = load_verified(path)
    content = content if isinstance(content, dict) else {}
    shape = content.get("model_args", content.get("config"))
    if isinstance(shape, dict) and "model_args" in content:
        found = {"activation": "gelu"} | shape  # nanoGPT
    elif isinstance(shape, stand_in):
        found = {"activation": "gelu_tanh"} | vars(shape)  # build-nanogpt, and gpt2-from-scratch with our names
    else:
        return with_tokenizer(as_checkpoint(content, path), given, path)
    names = {ours: theirs for ours, theirs in families.NANOGPT_SHAPE.items() if ours not in found}
    fields = {f.name: names.get(f.name, f.name) for f in dataclasses.fields(GPTConfig)}
    config = _config({ours: found[name] for ours, name in fields.items() if name in found}, names, path)
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path}: model is not a dict of tensors; expected the weights of a GPT")
    record = given if given.tokenizer else _assumed_gpt2(config, path)
    return _converted(config, _unwrapped(weights), NANOGPT, record, path)


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of torch.compile and DDP, which are in the order in which these wrapped the model."""
    return {re.sub(r"^((_orig_mod|module)\.)+", "", name): tensor for name, tensor in weights.items()}


def with_tokenizer(checkpoint: dict, given: TokenizerRecord, path: Path) -> dict:
    """Return the checkpoint with its tokenizer filled in."""
    known = TokenizerRecord.of(checkpoint)
    known = known if known.tokenizer else given
    if given.tokenizer not in ("", known.tokenizer):
        raise UserError(f"{path}: its tokenizer is {known}; drop --tokenizer {given.tokenizer}")
    _without_padding(GPTConfig(**checkpoint["model_config"]), given, path)  # checks it
    return checkpoint | known._asdict()


def _read_folder(folder: Path, source: str, given: TokenizerRecord, with_weights: bool = True) -> dict:
    if not (folder / "config.json").exists():
        raise UserError(f"{source}: not a Hugging Face model; expected config.json in it")
    stored = read_json(folder / "config.json", dict, "expected that of a Hugging Face model")
    kind, found = families.read_config(stored, source)
    family = FAMILIES[kind]
    config = _config(found, family.fields, source)
    own = stored.get("steadygpt")  # written by write_folder
    own = own if isinstance(own, dict) and own.get("vocab_size") == config.vocab_size else {}
    record = given if given.tokenizer else _tokenizer_of(folder, source, own, config, stored)
    weights = _read_safetensors(folder, source, family) if with_weights else {}
    biases = {name for name in weights if name.endswith(".bias") and not name.endswith(families.CONSTANTS)}
    if own.get("bias") is False and not any(weights[name].any() for name in biases):  # write_folder added zeros
        config = dataclasses.replace(config, bias=False)
        weights = {name: tensor for name, tensor in weights.items() if name not in biases}
    return _converted(config, weights if with_weights else None, family, record, source)


def _tokenizer_of(folder: Path, source: str, own: dict, config: GPTConfig, stored: dict) -> TokenizerRecord:
    """Return what is known of the tokenizer of a Hugging Face folder.

    Args:
        own: what write_folder has added to config.json, which is `stored`.
    """
    record = TokenizerRecord.of({"tokenizer": ""} | own, f"{source}: steadygpt in config.json")
    if own.get("tokenizer_sha256") or (record.tokenizer and not record.is_file):
        return record.with_json(folder)
    record = TokenizerRecord(f"{folder}/{TOKENIZER_JSON}" if Path(source).is_dir() else f"hf:{source}")
    try:
        record = record.with_json(folder)
        tokenizer = load_tokenizer(record)
    except UserError:  # there is none, or it is not accepted
        if stored["model_type"] != "gpt2" or (folder / TOKENIZER_JSON).exists():
            return TokenizerRecord("")
        if not (folder / "vocab.json").exists():
            return _assumed_gpt2(config, source)
        with suppress(OSError, ValueError, RecursionError):
            text = json.dumps(json.loads((folder / "vocab.json").read_bytes()), sort_keys=True)
            if hashlib.sha256(text.encode()).hexdigest() == GPT2_VOCAB_SHA256 and config.vocab_size in GPT2_ROWS:
                return GPT2
        return TokenizerRecord("")
    if tokenizer.sha256 == GPT2.tokenizer_sha256 and config.vocab_size in GPT2_ROWS:
        return GPT2
    special = {str(i): token for token, i in tokenizer.encoding._special_tokens.items()}
    begins = record.document_token
    if begins not in special.values():
        begins = special.get(str(stored.get("bos_token_id")), begins)
    record = record._replace(tokenizer_sha256=tokenizer.sha256, document_token=begins)
    return record if tokenizer.n_vocab <= config.vocab_size else TokenizerRecord("")


def _config(found: dict, names: dict[str, str], source: Path | str) -> GPTConfig:
    """Build a model's shape from its fields; `names` has the names that errors report, as in the source."""
    for f in dataclasses.fields(GPTConfig):
        value, expected = found.get(f.name, f.default), kind_of(f)
        if type(value) not in ((int, float) if expected is float else (expected,)):
            example = "true or false" if expected is bool else f"{expected.__name__}, such as {f.default}"
            raise UserError(f"{source}: {names.get(f.name, f.name)} is {value!r}; expected {example}")
    try:
        config = GPTConfig(**found)
        config.check_shape()
    except OptionError as error:
        name = names.get(error.name, error.name)
        raise UserError(f"{source}: {name} is {error.found}; expected {error.expected}") from None
    return config


def check_fits(initial: dict, source: str, config: GPTConfig, record: TokenizerRecord) -> str:
    """Check that the weights of --init_from fit the model and the data of a run; their context may be longer.

    With the tokenizer of the data, they may also have rows for ids beyond it.

    Returns: a line for the plan if the tokenizers cannot be compared, else "".
    """
    of_weights = TokenizerRecord.of(initial)
    advice = "prepare the text with the tokenizer of the weights"
    is_same = bool(record.tokenizer_sha256) and record.tokenizer_sha256 == of_weights.tokenizer_sha256
    weights = GPTConfig(**initial["model_config"])
    of_run = resolved(config)
    for name, found in resolved(weights).items():
        longer = (name == "context_length" or (name == "vocab_size" and is_same)) and found >= of_run[name]
        if name != "dropout" and found != of_run[name] and not longer:
            other = f"the data has {of_run[name]}; {advice}" if name == "vocab_size" else f"this run has {of_run[name]}"
            raise UserError(f"--init_from {source}: {name} is {found}, but {other}")
    if not of_weights.fits(record):
        raise UserError(f"--init_from {source}: tokenizer is {of_weights}, but the data has {record}; {advice}")
    is_known = of_weights.tokenizer and (of_weights.tokenizer_sha256 or not of_weights.is_file)
    unknown = labelled("weights", f"{source} names no tokenizer: only the vocabulary size was compared")
    return "" if is_known else unknown


def _assumed_gpt2(config: GPTConfig, source: Path | str) -> TokenizerRecord:
    """Return gpt2, with a warning, for weights of its size without a tokenizer."""
    if config.vocab_size not in GPT2_ROWS:
        return TokenizerRecord("")
    found = f"names no tokenizer; assumed gpt2, because it has {config.vocab_size:,} rows"
    say(f"warning: {source}: {found}. For another one, use --tokenizer of convert_hf.py")
    return TokenizerRecord("gpt2")


def _without_padding(config: GPTConfig, record: TokenizerRecord, source: Path | str) -> GPTConfig:
    """Return the shape with the vocabulary of the tokenizer, if that is known by name.

    The padding of other vocabularies stays, because data that was prepared without their tokenizer counts it.
    """
    if not record.tokenizer or (record.is_file and not record.tokenizer_json):
        return config
    rows, vocab_size = config.vocab_size, vocab_size_of(record)
    if record.is_file and vocab_size <= rows:
        return config
    if not vocab_size <= rows < vocab_size + 128:
        raise UserError(
            f"{source}: vocab_size is {rows:,}; expected the {vocab_size:,} of the tokenizer {record.tokenizer!r}, "
            "or a few rows of padding more; name the right one with --tokenizer"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)


def _converted(
    config: GPTConfig, weights: dict[str, Tensor] | None, family: Family, record: TokenizerRecord, source: Path | str
) -> dict:
    """Return a checkpoint of weights only; without weights its "model" is empty."""
    rows, config = config.vocab_size, _without_padding(config, record, source)
    untrained = {"step": 0, "rows_consumed": 0, "optimizer": {}, "starts": []}
    return untrained | {
        "format_version": FORMAT_VERSION,
        "model": {} if weights is None else _import(config, rows, weights, family, source),
        "model_config": dataclasses.asdict(config),
        **record._asdict(),
        "torch_version": str(torch.__version__),
        "saved_at": time.time(),
    }


def _import(
    config: GPTConfig, rows: int, weights: dict[str, Tensor], family: Family, source: Path | str
) -> dict[str, Tensor]:
    """Convert weights from foreign names and layouts to GPT's.

    Args:
        rows: of the stored tables; those beyond config.vocab_size are padding.
    """
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(families.CONSTANTS)}
    model: dict[str, Tensor] = {}
    for name, empty in _unpadded(config).items():
        parts = []
        for foreign, like in to_foreign(name, empty, config, family).items():
            expected = (rows, config.embd_size) if name in TABLES else tuple(like.shape)
            tensor = weights.pop(foreign, None)
            if tensor is None or tuple(tensor.shape) != expected:
                found = "missing" if tensor is None else tuple(tensor.shape)
                raise UserError(f"{source}: the weight {foreign} is {found}; expected {expected}")
            if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # such as scaled float8
                raise UserError(f"{source}: the weight {foreign} is {tensor.dtype}; expected fp64, fp32, fp16 or bf16")
            if not tensor.isfinite().all():
                raise UserError(f"{source}: the weight {foreign} has NaN or infinite values; expected finite ones")
            parts.append(tensor[: config.vocab_size].float() if name in TABLES else tensor.float())
        model[name] = to_own(name, parts, config, family)
    if config.tied_head:
        model["lm_head.weight"] = model["wte.weight"]
        head, table = (foreign_names(name, family)[0] for name in ("lm_head.weight", "wte.weight"))
        stored = weights.pop(head, model["wte.weight"])[: config.vocab_size].float()
        if not torch.equal(stored, model["wte.weight"][: config.vocab_size]):
            raise UserError(f"{source}: weights {head} and {table} differ; expected equal ones: the head is tied")
    if weights:
        raise UserError(f"{source}: unexpected weight {min(weights)}; expected {len(model)} weights")
    return model


def _unpadded(config: GPTConfig) -> dict[str, Tensor]:
    """Return a model's weights on the meta device, without padding and without a tied head."""
    with torch.device("meta"):
        model = GPT(config, initialize=False).state_dict()
    if config.tied_head:
        del model["lm_head.weight"]
    return {name: tensor[: config.vocab_size] if name in TABLES else tensor for name, tensor in model.items()}


def _read_safetensors(folder: Path, source: str, family: Family) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{source}: {NEEDS}") from None
    weights: dict[str, Tensor] = {}
    for file in hub.weight_files(folder):
        if file.name == hub.WEIGHTS and not file.exists():
            found = f"{source}: no {hub.WEIGHTS} and no {hub.INDEX}"
            raise UserError(f"{found}; other formats are refused, because loading them can run code")
        try:
            with open(file, "rb") as opened:
                check_pulled(file, opened.peek(1))
            weights |= _unwrapped(load_file(file))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from error
    base = foreign_names("wte.weight", family)[0].partition(".")[0]
    if not any(name.startswith(base) for name in weights):  # saved without the head, as gpt2 on the Hub
        weights = {name if name == "lm_head.weight" else f"{base}.{name}": weights[name] for name in weights}
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# a checkpoint -> a Hugging Face folder


def write_folder(checkpoint: dict, folder: Path) -> list[str]:
    """Write a checkpoint atomically as a folder that transformers loads.

    Returns: warnings for the user.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise UserError(f"{folder}: {NEEDS}") from None
    config = load_model(checkpoint).config
    kind = families.find_family(config)
    family = FAMILIES[kind]

    notes, record = [], TokenizerRecord.of(checkpoint)
    tokenizer = end_of_text = None
    try:
        found = load_tokenizer(record)
        tokenizer, end_of_text = found, found.document_id
    except UserError as error:
        notes.append(f"no tokenizer in {folder}: {error}")

    has_biases = family.fixed.get("bias", True)  # a class that has biases always has them: missing ones become zeros
    weights: dict[str, Tensor] = {}
    for name, empty in _unpadded(dataclasses.replace(config, bias=has_biases)).items():
        tensor = checkpoint["model"].get(name, torch.zeros(empty.shape))
        weights |= to_foreign(name, tensor[: config.vocab_size] if name in TABLES else tensor, config, family)

    own = {"bias": config.bias, "vocab_size": config.vocab_size, **record._asdict()}
    del own["tokenizer_json"]  # is a file of the folder
    stored = families.write_config(config, kind) | {
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,  # NanoChat's default is an id, whose embedding is then not trained
        "torch_dtype": "float32",
        "steadygpt": own,
    }
    temporary = folder.absolute().with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(stored, indent=2) + "\n")
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        # As readable as the others: safetensors lets only the owner read it.
        shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        if tokenizer:
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
            about |= dict.fromkeys(("bos_token", "eos_token"), record.document_token)
            about["model_input_names"] = ["input_ids", "attention_mask"]  # transformers 4 passes others to generate()
            (temporary / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
            (temporary / TOKENIZER_JSON).write_bytes((tokenizer.json or to_json(tokenizer.encoding)).encode())
        for file in temporary.iterdir():
            with open(file, "rb") as written:
                fsync(written.fileno())
        temporary.rename(folder)
        fsync_folder(folder.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return notes


def _weights_only(checkpoint: Mapping[str, Any]) -> dict:
    """Return a checkpoint without the optimizer, the options and the history of its run."""
    kept = ("format_version", "step", "rows_consumed", "model", "model_config", "torch_version", "saved_at")
    found = {key: checkpoint[key] for key in (*kept, *TokenizerRecord._fields) if key in checkpoint}
    return found | {"optimizer": {}, "starts": []}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(ConvertOptions, argv, "Convert weights from and to Hugging Face folders, and from nanoGPT.")
    source, target = options.source, Path(options.target)
    notes: list[str] = []
    if target.suffix in (".safetensors", ".bin", ".pth", ".ckpt"):
        raise UserError(f"{target}: expected the name of a new folder, or of a checkpoint file: NAME.pt")
    if target.exists():
        raise UserError(f"{target}: already exists; expected the name of a new file or folder")
    if source in ("latest", *NAMED) or source.startswith("average:"):
        path, checkpoint = open_checkpoint(source, Path(options.checkpoint_dir))
        source, checkpoint = str(path), with_tokenizer(checkpoint, record_named(options.tokenizer), path)
    else:
        checkpoint = read_weights(source, options.tokenizer)
    if target.suffix == ".pt":
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, lambda file: torch.save(_weights_only(checkpoint), file))
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error})") from error
        use, record = f"python train.py --init_from {target}", TokenizerRecord.of(checkpoint)
        if record.is_file and not record.tokenizer_json:
            notes.append(
                f"no tokenizer in {target}: the {TOKENIZER_JSON} of {record.tokenizer} is missing; to add it, convert "
                f"again with --tokenizer PATH/{TOKENIZER_JSON}"
            )
    else:
        notes = write_folder(checkpoint, target)
        use = f"AutoModelForCausalLM.from_pretrained({str(target)!r})"
    config = GPTConfig(**checkpoint["model_config"])
    parameters = sum(tensor.numel() for tensor in _unpadded(config).values())
    done = (
        f"{source} -> {target}: {parameters / 1e6:,.2f} M parameters, context {config.context_length:,}, vocabulary "
        f"{config.vocab_size:,} ({checkpoint['tokenizer'] or 'tokenizer unknown'}); {use}"
    )
    print(printable(done))
    for note in notes:
        say(f"warning: {note}")
    return 0


if __name__ == "__main__":
    run_cli(main)
