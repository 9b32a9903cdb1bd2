"""Free space on disks, the limit of open files, and files that are not there."""

import os
import resource
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from steadygpt.base.options import UserError


def disks(*needs: Mapping[Path, int]) -> dict[Path, tuple[int, int]]:
    """Return, for an existing folder of each disk, the bytes that are free and the bytes that are needed."""
    found: dict[int, tuple[Path, int]] = {}
    for folder, size in chain.from_iterable(need.items() for need in needs):
        disk = existing(folder).stat().st_dev
        first, needed = found.get(disk, (existing(folder), 0))
        found[disk] = first, needed + size
    return {folder: (shutil.disk_usage(folder).free, needed) for folder, needed in found.values()}


def most_open_files() -> int:
    """Raise this process's limit of open files as far as the system lets it, but not above 2**16; return it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (2**16 if limit == resource.RLIM_INFINITY else min(2**16, limit) for limit in limits)
    if soft == most:
        return most
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    except (OSError, ValueError):  # macOS has a lower limit that it does not tell
        return soft
    return most


def check_pulled(name: object, beginning: bytes) -> None:
    """Refuse a file that begins as a Git LFS pointer does; a clone without Git LFS has one in place of the file."""
    if beginning.startswith(b"version https://git-lfs"):
        raise UserError(f"{name}: found a Git LFS pointer, expected the file. Try: git lfs pull")


def existing(path: Path) -> Path:
    """Return a path or the first folder above it that exists."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if os.path.exists(place))  # noqa: PTH110 (Path.exists may raise)
