"""The limit of open files, and paths that do not exist."""

import os
import resource
from pathlib import Path


def most_open_files() -> int:
    """Raise this process's limit of open files as far as the system allows, but not above 2**16; return the limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (2**16 if limit == resource.RLIM_INFINITY else min(2**16, limit) for limit in limits)
    if soft == most:
        return most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    except (OSError, ValueError):  # macOS has a lower limit that it does not report
        return soft
    return most


def existing(path: Path) -> Path:
    """Return a path or the first folder above it that exists."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if os.path.exists(place))  # noqa: PTH110 (Path.exists may raise)
