"""Conversion of weights from and to Hugging Face folders, and from nanoGPT's checkpoints.

steadygpt/convert/families.py lists the supported families, such as GPT-2, Llama, Qwen 3 and LFM2.

    python convert_hf.py latest exported                 # a folder for AutoModelForCausalLM.from_pretrained
    python convert_hf.py exported weights.pt             # from the folder back to a checkpoint
    python convert_hf.py gpt2-medium weights.pt          # from the Hugging Face Hub
    python convert_hf.py out/ckpt.pt exported            # from nanoGPT, build-nanogpt or gpt2-from-scratch

The conversion is exact, except that --dtype rounds, and weights in fp64 become fp32. A converted checkpoint holds only
weights: generate.py, hellaswag_eval.py and train.py --init_from accept it.
"""

import steadygpt.preflight  # noqa: F401  # before all others

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from model import GPTConfig, sketch_of
from steadygpt.base.durable import fsync, fsync_folder, replace_file
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.progress import say
from steadygpt.base.text import command, printable
from steadygpt.checkpoint.files import WITHOUT_RUN, CheckpointContent
from steadygpt.convert.families import FAMILIES, find_family, to_foreign, write_config
from steadygpt.convert.weights import (
    SPECIAL_IDS,
    import_safetensors,
    load_model,
    open_weights,
    read_kept,
)
from steadygpt.data.tokenizer import TOKENIZER_JSON, TokenizerRecord, load_tokenizer

# Suffix of a file -> the program that makes it from a Hugging Face folder, and its command.
MADE_FROM_FOLDERS = {
    ".gguf": ("llama.cpp", "python llama.cpp/convert_hf_to_gguf.py exported --outfile {target}"),
    ".onnx": ("optimum", "optimum-cli export onnx --model exported --task text-generation NEW_FOLDER"),
}


@dataclass(frozen=True)
class ConvertOptions:
    source: str = option(
        MISSING,
        "latest, best, stable, a file (also nanoGPT's), a folder (also Hugging Face's) or a name on the Hub",
        positional=True,
        no_password=True,
    )
    target: str = option(MISSING, "a new Hugging Face folder, or a new checkpoint file: NAME.pt", positional=True)
    checkpoint_dir: str = option("checkpoints", "folder of latest, best and stable")
    dtype: str = option(
        "float32",
        "of the weights in a Hugging Face folder; float32 is exact, the others take half the size",
        choices=("float32", "bfloat16", "float16"),
    )
    tokenizer: str = option(
        "", "tokenizer of the weights, if the source does not name it: a name, hf:NAME, or the path of a tokenizer.json"
    )


def as_json(content: dict) -> str:
    return f"{json.dumps(content, indent=2)}\n"


def write_folder(checkpoint: dict, folder: Path, dtype: str = "float32") -> list[str]:
    """Write a checkpoint atomically as a folder that transformers loads.

    Args:
        dtype: of the weights, a name in torch.

    Returns: warnings for the user.
    """
    safetensors = import_safetensors(folder)
    config = load_model(checkpoint).config
    kind = find_family(config)
    family = FAMILIES[kind]

    record = TokenizerRecord.of(checkpoint)
    notes = []
    end_of_text = None
    tokenizer_json = record.tokenizer_json
    try:
        tokenizer = load_tokenizer(record)
        end_of_text = tokenizer.document_id
        tokenizer_json = tokenizer.to_json()
    except UserError as error:
        notes.append(f"no tokenizer in {folder}: {error}")

    # Classes with biases require them, so write missing biases as zeros.
    has_biases = family.fixed.get("bias", True)
    weights: dict[str, Tensor] = {}
    for name, sketch in sketch_of(dataclasses.replace(config, bias=has_biases)).named_parameters():
        weight = checkpoint["model"].get(name, torch.zeros(sketch.shape)).to(getattr(torch, dtype))
        if not weight.isfinite().all():
            raise UserError(f"{folder}: {name} has numbers beyond {dtype}; try --dtype bfloat16")
        weights |= to_foreign(name, weight, config, family)

    own = {"bias": config.bias, "vocab_size": config.vocab_size, **asdict(record)}
    del own["tokenizer_json"], own["tokenizer_files"]  # the folder has them as files
    source_folder = read_kept(record, config.vocab_size)
    # None overrides NanoChat's default pad_token_id, an id whose embedding training would skip.
    ids: dict = dict.fromkeys(SPECIAL_IDS) | source_folder["ids"]
    if not record.tokenizer_files:
        ids |= dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text)
    stored = write_config(config, kind) | ids | {"torch_dtype": dtype, "steadygpt": own}
    texts = {"config.json": as_json(stored), "generation_config.json": as_json(ids)}
    if tokenizer_json:
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length}
        if end_of_text is not None:
            tokenizer_config |= dict.fromkeys(("bos_token", "eos_token"), record.document_token)
        # By default, transformers 4 would pass more inputs to generate().
        tokenizer_config["model_input_names"] = ["input_ids", "attention_mask"]
        texts |= {"tokenizer_config.json": as_json(tokenizer_config), TOKENIZER_JSON: tokenizer_json}
    texts |= source_folder["files"]
    temporary = folder.absolute().with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        temporary.mkdir(parents=True)
        for name, text in texts.items():
            (temporary / name).write_bytes(text.encode())
        safetensors.torch.save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        # safetensors lets only the owner read its file, so give it the mode of the other files.
        shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        for file in temporary.iterdir():
            with file.open("rb") as written:
                fsync(written.fileno())
        temporary.rename(folder)
        fsync_folder(folder.absolute().parent)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(ConvertOptions, argv, "Convert weights from and to Hugging Face folders, and from nanoGPT.")
    target = Path(options.target)
    notes: list[str] = []
    if target.suffix in (".safetensors", ".bin", ".pth", ".ckpt"):
        raise UserError(f"{target}: expected the name of a new folder, or of a checkpoint file: NAME.pt")
    if target.suffix in MADE_FROM_FOLDERS:
        program, its_command = MADE_FROM_FOLDERS[target.suffix]
        raise UserError(
            f"{target}: expected a new folder, such as exported, from which {program} makes such a file: "
            f"{its_command.format(target=target)}"
        )
    if target.exists():
        raise UserError(f"{target}: already exists; expected the name of a new file or folder")
    source, checkpoint = open_weights(options.source, Path(options.checkpoint_dir), options.tokenizer)
    if target.suffix == ".pt" and options.dtype != "float32":
        raise UserError(f"--dtype is for a Hugging Face folder, and {target} is a checkpoint, in float32; drop it")
    if target.suffix == ".pt":
        # Without the fields of TrainState that only a run needs.
        keys = (*CheckpointContent.__annotations__, "step", "rows_consumed", *TokenizerRecord.__annotations__)
        content = {key: checkpoint[key] for key in keys} | WITHOUT_RUN
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, lambda file: torch.save(content, file))
        except OSError as error:
            raise UserError(f"{target}: cannot be written ({error})") from error
        use = f"{command('generate.py')} {target}, or {command('train.py')} --init_from {target} --data_dir FOLDER"
        record = TokenizerRecord.of(checkpoint)
        if record.is_file and not record.tokenizer_json:
            notes.append(
                f"no tokenizer in {target}: the {TOKENIZER_JSON} of {record.tokenizer} is missing; to add it, convert "
                f"again with --tokenizer PATH/{TOKENIZER_JSON}"
            )
    else:
        notes = write_folder(checkpoint, target, options.dtype)
        install = "" if importlib.util.find_spec("transformers") else "pip install transformers, then "
        use = f"{install}AutoModelForCausalLM.from_pretrained({str(target)!r})"
    config = GPTConfig(**checkpoint["model_config"])
    parameters = f"{sketch_of(config).num_parameters() / 1e6:,.2f} M parameters, context {config.context_length:,}"
    vocabulary = f"vocabulary {config.vocab_size:,} ({checkpoint['tokenizer'] or 'tokenizer unknown'})"
    print(printable(f"{source} -> {target}: {parameters}, {vocabulary}"))
    print(printable(f"next: {use}"))
    for note in notes:
        say(f"warning: {note}")
    return 0


if __name__ == "__main__":
    run_cli(main)
