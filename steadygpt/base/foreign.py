"""Files of other programs: what they are, and what to do with them."""

import shlex
import struct
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ADAPTER = "adapter_config.json"  # a folder with this file is an adapter, whatever else it contains
LFS_POINTER = b"version https://git-lfs"

MERGE = (
    'an adapter of peft; merge it into its model first: python -c "import sys, peft; peft.AutoPeftModelForCausalLM.'
    "from_pretrained(sys.argv[1]).merge_and_unload().save_pretrained('merged')\" {folder}; then convert merged, with "
    "the tokenizer of the model: convert_hf.py merged weights.pt --tokenizer hf:MODEL, or its tokenizer.json"
)
FROM_PICKLE = (
    'weights of transformers in a pickle; loading it can run code; write safetensors: python -c "import sys, '
    "transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained('converted')\" "
    "{folder}"
)
NO_SHAPE = "weights without their shape; give their folder, which needs their config.json too: {folder}"
NANOCHAT = (
    "a checkpoint of nanochat; convert it with transformers' models/nanochat/convert_nanochat_checkpoints.py "
    "--input_dir {folder} --output_dir NEW_FOLDER"
)
DCP = (
    "a checkpoint of torch.distributed; write one file from it: python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch {folder} NEW.pt"
)
PART = "a part of a Hugging Face folder; give the folder: {folder}"
ZERO = (
    "a checkpoint of DeepSpeed; write its weights with the script in the folder that DeepSpeed saved to: "
    "python zero_to_fp32.py . NEW_FOLDER"
)
MEGATRON = "a checkpoint of Megatron-LM; write a Hugging Face folder with Megatron Bridge, and convert that"
OTHER_LIBRARY = "weights for other libraries; give those for PyTorch"
LLMC_IDS = "token ids of llm.c; train on their folder with --data_dir {folder}"
WEB_PAGE = "a web page; download the file itself, or write the text of the page into a .txt file"

# First bytes of a file -> what it is; what to do. {file} and {folder} stand for its path and its folder.
BEGINNINGS = {
    LFS_POINTER: "found a Git LFS pointer, expected the file. Try: git lfs pull",
    b"<!DOCTYPE html": WEB_PAGE,
    b"<!doctype html": WEB_PAGE,
    b"<html": WEB_PAGE,
    b"GGUF": "weights of llama.cpp; convert the Hugging Face folder that they were made from",
    struct.pack("<i", 20240326): (
        "weights of llm.c; export them there: python dev/eval/export_hf.py --input {file} --output NEW_FOLDER"
    ),
    struct.pack("<i", 20240527): (
        "the optimizer's state of llm.c; export the model_*.bin beside it: python dev/eval/export_hf.py"
    ),
    struct.pack("<i", 20240520): LLMC_IDS,
    struct.pack("<i", 20240801): LLMC_IDS,
}
# Pattern of a file's name -> the same. The first match applies.
NAMES = {
    ADAPTER: MERGE,
    "adapter_model.*": MERGE,
    "*.safetensors": NO_SHAPE,
    "*.safetensors.index.json": NO_SHAPE,
    "pytorch_model*.bin": FROM_PICKLE,
    "lit_model.pth": (
        "a checkpoint of litgpt; convert it there: litgpt convert_from_litgpt {folder} NEW_FOLDER; then load its "
        "model.pth with transformers, and save that"
    ),
    "consolidated.*.pth": (
        "weights of Llama from Meta; convert them with transformers' models/llama/convert_llama_weights_to_hf.py "
        "--input_dir {folder} --output_dir NEW_FOLDER"
    ),
    "model_[0-9][0-9][0-9][0-9][0-9][0-9].pt": NANOCHAT,
    "optim_[0-9][0-9][0-9][0-9][0-9][0-9]*.pt": NANOCHAT,
    "meta_[0-9][0-9][0-9][0-9][0-9][0-9].json": NANOCHAT,
    ".metadata": DCP,
    "*.distcp": DCP,
    "config.json": PART, "tokenizer.json": PART, "tokenizer_config.json": PART, "generation_config.json": PART,
    "dataset_info.json": PART, "state.json": PART, "trainer_state.json": PART, "training_args.bin": PART,
    "optimizer.pt": PART, "scheduler.pt": PART, "scaler.pt": PART, "rng_state*.pth": PART,
    "zero_to_fp32.py": ZERO, "*mp_rank_*_model_states.pt": ZERO, "*_optim_states.pt": ZERO,
    "model_optim_rng.pt": MEGATRON, "latest_checkpointed_iteration.txt": MEGATRON,
    "*.h5": OTHER_LIBRARY, "*.msgpack": OTHER_LIBRARY, "*.onnx": OTHER_LIBRARY, "*.ot": OTHER_LIBRARY,
    "*.tflite": OTHER_LIBRARY,
}  # fmt: skip
# A key of the content of a torch.save file, or of a dictionary in it -> the same.
CONTENTS = {
    "model_args.dim": (
        "a checkpoint of llama2.c; export it there: python export.py NEW_FOLDER --checkpoint {file} --version -1"
    ),
    "model_args.block_size": (
        "a checkpoint of nanoGPT; start a run from its weights with --init_from {file}, or convert it: "
        "python convert_hf.py {file} NEW.pt"
    ),
    "config.num_eigenstates": (
        "a checkpoint of a temporal eigenstate network; its architecture is not offered, so train a new model"
    ),
    "pytorch-lightning_version": (
        "a checkpoint of Lightning; take the weights out of it, and give them with their config.json"
    ),
    "wte.weight": NO_SHAPE,
    "embed_tokens.weight": NO_SHAPE,
    "model_state_dict": (
        "a checkpoint of another trainer; its model is not known; give a Hugging Face folder of it, or train a new one"
    ),
    "param_groups": "the state of an optimizer; give the weights beside it",
}


def what_it_is(path: Path) -> str:
    """Return what a file or folder of another program is, and what to do with it; "" if that is unknown."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            advice = what_it_is(file) if file.is_file() else ""
            if advice in (_filled(PART, file), _filled(NO_SHAPE, file)):
                return f"{file.name} is there, but no config.json; copy that of the model there"
            if advice:
                return f"{file.name} is {advice}"
        return ""
    advice = what_it_begins_as(path)
    if advice:
        return advice
    for pattern, advice in NAMES.items():
        if fnmatchcase(path.name, pattern):
            return _filled(advice, path)
    return ""


def what_it_begins_as(path: Path) -> str:
    """Return what a file is by its first bytes, and what to do with it; "" if that is unknown."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        beginning = file.read(100)
    for first_bytes, advice in BEGINNINGS.items():
        if beginning.startswith(first_bytes):
            return _filled(advice, path)
    return ""


def what_it_holds(content: Mapping[Any, Any], path: Path) -> str:
    """Return what a torch.save file with this content is, and what to do with it; "" if that is unknown."""
    names = [str(key) for key in content]
    for outer, inner in content.items():
        if isinstance(inner, Mapping):
            names += [f"{outer}.{key}" for key in inner]
    for key, advice in CONTENTS.items():
        if any(f".{name}".endswith(f".{key}") for name in names):
            return _filled(advice, path)
    return ""


def _filled(advice: str, file: Path) -> str:
    """Fill the paths of a file and its folder, quoted for a shell, into advice."""
    return advice.format(file=shlex.quote(str(file)), folder=shlex.quote(str(file.parent)))
