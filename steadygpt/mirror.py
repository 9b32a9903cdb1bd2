"""Copies of checkpoints in an object store, through fsspec."""

from pathlib import Path

from steadygpt.cli import UserError


def open_mirror(url: str):
    """Return the file system and the folder of a URL.

    Raises: UserError when fsspec does not know the URL, or its back end is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"--mirror {url}: {error}; expected a URL that fsspec knows, its back end installed") from error


def upload(file: Path, url: str, names: list[str]) -> None:
    """Upload a file once to the folder `url` under the first name; the store copies it to the other names."""
    fs, folder = open_mirror(url)
    fs.makedirs(folder, exist_ok=True)
    fs.put_file(str(file), f"{folder}/{names[0]}.part")
    fs.mv(f"{folder}/{names[0]}.part", f"{folder}/{names[0]}")
    copy_name(url, names[0], names[1:])


def copy_name(url: str, name: str, others: list[str]) -> None:
    """Copy a file of the folder `url` to other names, each of which then exists completely or not at all."""
    fs, folder = open_mirror(url)
    for other in others:
        fs.cp_file(f"{folder}/{name}", f"{folder}/{other}.part")
        fs.mv(f"{folder}/{other}.part", f"{folder}/{other}")
