"""The version and the commit of the code."""

import subprocess
from functools import cache
from pathlib import Path

from steadygpt import __version__

PACKAGE = Path(__file__).resolve().parent


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" outside a checkout."""
    git = ["git", "-C", str(PACKAGE), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def version_text() -> str:
    """Return the version and, in a checkout, the beginning of its commit."""
    commit = git_commit()
    return __version__ + f", commit {commit[:12]}{commit[40:]}" * bool(commit)
