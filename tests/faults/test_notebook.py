"""docs/quickstart.ipynb, which trains, kills and resumes a run."""

import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from conftest import REPO
from nbclient import NotebookClient


@pytest.mark.storm
def test_the_notebook_resumes_its_killed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, target, follow_symlinks=False)
    (tmp_path / ".venv").symlink_to(REPO / ".venv")
    monkeypatch.setenv("PATH", str(REPO / ".venv/bin"), prepend=":")
    notebook = nbformat.read(Path(REPO, "docs/quickstart.ipynb"), as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": tmp_path}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "exit status -9" in said
    assert "bit for bit the same losses" in said
    assert "finished after 300 steps" in said
    assert "class Queue:" in said
