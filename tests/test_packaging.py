"""What pip installs from the clone: dependencies and no module."""

import re
import subprocess
import sys
from importlib.metadata import PathDistribution
from zipfile import Path as ZipPath

import pytest
from conftest import REPO

from steadygpt import __version__

PAGES = [REPO / "mkdocs.yml", *REPO.glob("*.md"), *REPO.glob("docs/*.md")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> ZipPath:
    """The wheel of the clone, built in a folder of links, because a build leaves files."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE", "steadygpt", *(path.name for path in REPO.glob("*.py"))):
        (folder / name).symlink_to(REPO / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"  # setuptools comes with PyTorch
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return ZipPath(path)


def test_a_wheel_has_no_module(wheel):
    """The package imports files of the root, so that it cannot be imported without the clone."""
    assert [path.name for path in wheel.iterdir()] == [f"steadygpt-{__version__}.dist-info"]


def test_a_wheel_has_the_dependencies_and_each_extra_that_a_page_names(wheel):
    distribution = PathDistribution(wheel / f"steadygpt-{__version__}.dist-info")
    extras = {*distribution.metadata.get_all("Provides-Extra")}
    named = {extra for page in PAGES for extra in re.findall(r"\.\[(\w+)\]['\"]", page.read_text())}
    assert {"docs", "hf", "s3"} <= named <= extras
    assert any(line.startswith("torch>=") for line in distribution.requires)
    [of_test] = [line for line in distribution.requires if line.startswith("steadygpt[")]  # the extras that tests need
    assert {*re.findall(r"\w+", of_test.partition("]")[0])} - {"steadygpt"} <= extras


def test_modules_of_the_clone_are_run_from_it():
    """pip installs no module, so mkdocs finds those of its hooks in the current folder, which python -m adds."""
    commands = [line for page in PAGES for line in page.read_text().splitlines() if "mkdocs serve" in line]
    assert len(commands) == 2 and all("python -m mkdocs serve" in line for line in commands)
    files = [*PAGES, *REPO.glob("*.py"), *REPO.glob("steadygpt/**/*.py"), *REPO.glob("scripts/*")]
    assert not [path for path in files if re.search(r"-m steadygpt\b", path.read_text())]
