"""The version of SteadyGPT and the commit of its checkout."""

import subprocess
from functools import cache
from pathlib import Path

from steadygpt import __version__


@cache
def git_commit() -> str:
    """Return the commit of this checkout, with "+" if files have changed since; "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
        return commit + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def version_text() -> str:
    """Return the version and, in a checkout, the beginning of its commit."""
    commit = git_commit()
    return __version__ + f", commit {commit[:12]}{commit[40:]}" * bool(commit)
