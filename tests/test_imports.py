"""Importing does nothing, and the imports are a tree with train.py on top."""

import ast
import subprocess
import sys

from conftest import REPO

MODULES = sorted(path.stem for path in REPO.glob("*.py"))


def imports_of(module: str) -> set[str]:
    """The modules of ours that one imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((REPO / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found & set(MODULES)


def test_importing_prints_nothing_starts_nothing_and_loads_no_extras():
    script = f"""
import sys
for name in {MODULES!r}: __import__(name)
import torch
heavy = {{"tensorboard", "wandb", "datasets", "transformers", "pyarrow", "fsspec", "torchao"}} & set(sys.modules)
assert not heavy, heavy
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_imports_train_and_no_two_modules_import_each_other():
    tree = {module: imports_of(module) for module in MODULES}
    assert not [module for module in MODULES if "train" in tree[module]]

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        for below in tree[module]:
            visit(below, (*path, module))

    for module in MODULES:
        visit(module, ())
