"""The machinery of SteadyGPT: everything that train.py, model.py, dataloader.py and config.py rely on."""

import hashlib
import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.9.0"


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" outside a checkout."""
    git = ["git", "-C", __path__[0], "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def code_digest() -> str:
    """Return the beginning of the SHA-256 of the code: this package, and the programs beside it that import it."""
    package = Path(__path__[0])
    programs = [text for path in sorted(package.parent.glob("*.py")) if b"steadygpt" in (text := path.read_bytes())]
    modules = [path.read_bytes() for path in sorted(package.rglob("*.py"))]
    return hashlib.sha256(b"".join(programs + modules)).hexdigest()[:12]


def version_text() -> str:
    """Return the version and, in a checkout, the beginning of its commit."""
    commit = git_commit()
    return __version__ + f", commit {commit[:12]}{commit[40:]}" * bool(commit)
