"""Files of other programs: what they are, and what to do with them."""

import re
import shlex
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ADAPTER = "adapter_config.json"  # a folder with this file is an adapter, whatever else it contains
BEGINNING = 4096  # bytes of a file that are compared


class Foreign(NamedTuple):
    """A kind of file that another program writes. In `advice`, FILE and FOLDER stand for its path and its folder."""

    description: str
    advice: str
    name: str = ""  # pattern of the whole file name; "": any name
    begins: bytes = b""  # first bytes of the file; b"": any


MERGE = (
    'merge it into its model first: python -c "import sys, peft; peft.AutoPeftModelForCausalLM.from_pretrained('
    "sys.argv[1]).merge_and_unload().save_pretrained('merged')\" FOLDER; then convert merged, with the tokenizer of "
    "the model: convert_hf.py merged weights.pt --tokenizer hf:MODEL, or its tokenizer.json"
)
FROM_PICKLE = (
    'loading it can run code; write safetensors: python -c "import sys, transformers; '
    "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained('converted')\" FOLDER"
)
TO_TABLE = (
    'write it as Parquet: python -c "import sys, pyarrow.csv as csv, pyarrow.parquet as parquet; '
    "parquet.write_table(csv.read_csv(sys.argv[1]), 'rows.parquet')\" FILE"
)
WITH_CONFIG = "give their folder, which needs their config.json too: FOLDER"
KINDS = (
    # weights
    Foreign("an adapter of peft", MERGE, r"adapter_config\.json|adapter_model\.(safetensors|bin)"),
    Foreign("weights of llama.cpp", "convert the Hugging Face folder that they were made from", begins=b"GGUF"),
    Foreign(
        "weights of llm.c", "export them there: python dev/eval/export_hf.py --input FILE --output NEW_FOLDER",
        begins=struct.pack("<i", 20240326),
    ),
    Foreign(
        "the optimizer's state of llm.c", "export the model_*.bin beside it: python dev/eval/export_hf.py",
        begins=struct.pack("<i", 20240527),
    ),
    Foreign("weights without their shape", WITH_CONFIG, r".*\.safetensors|.*\.safetensors\.index\.json"),
    Foreign("weights of transformers in a pickle", FROM_PICKLE, r"pytorch_model.*\.bin"),
    Foreign(
        "a checkpoint of litgpt",
        "convert it there: litgpt convert_from_litgpt FOLDER NEW_FOLDER; then load its model.pth with transformers, "
        "and save that",
        r"lit_model\.pth",
    ),
    Foreign(
        "a checkpoint of nanochat",
        "convert it with transformers' models/nanochat/convert_nanochat_checkpoints.py --input_dir FOLDER --output_dir "
        "NEW_FOLDER",
        r"(model|optim)_\d{6}(_rank\d+)?\.pt|meta_\d{6}\.json",
    ),
    Foreign("a checkpoint of torch.distributed", "write one file from it: python -m torch.distributed.checkpoint."
            "format_utils dcp_to_torch FOLDER NEW.pt", r"\.metadata|__\d+_\d+\.distcp"),
    Foreign(
        "a part of a Hugging Face folder", "give the folder: FOLDER",
        r"(config|tokenizer|tokenizer_config|generation_config)\.json|dataset_info\.json|state\.json",
    ),
    Foreign("weights for other libraries", "give those for PyTorch", r".*\.(h5|msgpack|onnx|ot|tflite)"),
    # token ids
    *(
        Foreign("token ids of llm.c", "train on their folder with --data_dir FOLDER", begins=struct.pack("<i", magic))
        for magic in (20240520, 20240801)
    ),
    # text
    Foreign("an archive", "unpack it, and give its folder", r".*\.(zip|tar|tgz|7z|rar)|.*\.tar\.\w+"),
    Foreign("packed in another way", "pack it with gzip or zstd instead", r".*\.(xz|bz2|lz4|lzma|br|Z)"),
    Foreign("a table of text", TO_TABLE, r".*\.(csv|tsv)"),
    Foreign("a document with a layout", "write its text into a .txt file", r".*\.(pdf|docx?|odt|epub|rtf|html?)"),
)  # fmt: skip
# A key of the content of a file of torch.save, or of a dictionary in it -> what the file is, what to do.
CONTENTS = {
    "model_args.dim": (
        "a checkpoint of llama2.c",
        "export it there: python export.py NEW_FOLDER --checkpoint FILE --version -1",
    ),
    "dataloader_state.train_curr_pos": (
        "a checkpoint of train_improved.py",
        "start a new run from its weights, in another --checkpoint_dir: --init_from FILE; or convert them: "
        "convert_hf.py FILE weights.pt",
    ),
    "config.num_eigenstates": (
        "a checkpoint of a temporal eigenstate network",
        "its architecture is not offered, so train a new model",
    ),
    "pytorch-lightning_version": (
        "a checkpoint of Lightning",
        "take the weights out of it, and give them with their config.json",
    ),
    "wte.weight": ("weights without their shape", WITH_CONFIG),
    "embed_tokens.weight": ("weights without their shape", WITH_CONFIG),
    "model_state_dict": (
        "a checkpoint of another trainer",
        "its model is not known; give a Hugging Face folder of it, or train a new one",
    ),
    "param_groups": ("the state of an optimizer", "give the weights beside it"),
}


def what_it_is(path: Path) -> str:
    """Return what a file or folder of another program is, and what to do with it; "" if its kind is unknown."""
    files = [path]
    if path.is_dir():
        files = sorted(path.iterdir())
    for file in files:
        beginning = b""
        if file.is_file():
            with file.open("rb") as opened:
                beginning = opened.read(BEGINNING)
        for kind in KINDS:
            is_named = bool(kind.name) and re.fullmatch(kind.name, file.name)
            if is_named or (kind.begins and beginning.startswith(kind.begins)):
                subject = f"{file.name} is " if path.is_dir() else ""
                return f"{subject}{kind.description}; {_filled(kind.advice, file)}"
    return ""


def what_it_holds(content: Mapping[Any, Any], path: Path) -> str:
    """Return what a file of torch.save with this content is, and what to do with it; "" if its kind is unknown."""
    names = [str(key) for key in content]
    for outer, inner in content.items():
        if isinstance(inner, Mapping):
            names += [f"{outer}.{key}" for key in inner]
    for key, (description, advice) in CONTENTS.items():
        if any(f".{name}".endswith(f".{key}") for name in names):
            return f"{description}; {_filled(advice, path)}"
    return ""


def _filled(advice: str, file: Path) -> str:
    """Replace FILE and FOLDER in an advice by the path of a file and its folder, quoted for a shell."""
    filled = re.sub(r"(?<!\w)FOLDER\b", lambda _: shlex.quote(str(file.parent)), advice)
    return re.sub(r"(?<!\w)FILE\b", lambda _: shlex.quote(str(file)), filled)
