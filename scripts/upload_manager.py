#!/usr/bin/env python
"""Upload, list, download and verify the checkpoints of a mirror, the URL that train.py --mirror has.

scripts/upload_manager.py upload-all                                # what the run in checkpoints could not upload
scripts/upload_manager.py list --mirror s3://bucket/run
scripts/upload_manager.py download best --mirror s3://bucket/run
scripts/upload_manager.py verify --mirror s3://bucket/run           # reads every checkpoint in the store
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from steadygpt.checkpoint import BACKUP, LATEST, NAMED, checkpoint_files, read_checkpoint, summary
from steadygpt.cli import OptionError, UserError, option, parse_options, run_cli
from steadygpt.durable import lock_folder
from steadygpt.mirror import Mirror, Pointer, files_of
from steadygpt.progress import ProgressBar
from steadygpt.runlog import STATUS, read_status
from steadygpt.table import mirror_table


@dataclass(frozen=True)
class ManagerOptions:
    """The options of upload_manager.py."""

    action: str = option(
        MISSING, "upload-all, list, download or verify", choices=("upload-all", "list", "download", "verify"),
        positional=True,
    )  # fmt: skip
    name: str = option(
        "latest", "of the checkpoint to download: latest, best, stable or a name in the list", positional=True
    )
    mirror: str = option("", "folder of the object store (default: that of the run in checkpoint_dir)")
    checkpoint_dir: str = option("checkpoints", "local folder")


def upload_all(mirror: Mirror, folder: Path) -> None:
    """Upload the intact checkpoints of a folder that the mirror lacks, the oldest first, and the logs of the run.

    Raises: UserError when there are none, a run is using the folder, or the mirror belongs to another run.
    """
    names: dict[int, list[Path]] = {}  # by inode
    for path in checkpoint_files(folder):
        if path.name != BACKUP:  # the mirror makes its own
            names.setdefault(path.stat().st_ino, []).append(path)
    if not names:
        raise UserError(f"no checkpoints in {folder}; name their folder with --checkpoint_dir")
    with lock_folder(folder, "it uploads its checkpoints itself"):
        there, _ = mirror.patiently(mirror.pointers)
        newest_ns = there[LATEST].mtime_ns if LATEST in there else 0
        # The run continued on another machine, whose logs are longer.
        is_behind = newest_ns > max(paths[0].stat().st_mtime_ns for paths in names.values())
        for paths in sorted(names.values(), key=lambda paths: paths[0].stat().st_mtime_ns):
            try:
                checkpoint = read_checkpoint(paths[0])
            except UserError as error:
                print(f"skipped {error}", flush=True)
                continue
            pointer, tiers = Pointer.of(paths[0], summary(checkpoint)), [path.name for path in paths]
            tiers = [name for name in tiers if name not in there or there[name].mtime_ns <= pointer.mtime_ns]
            if not tiers:
                print(f"the mirror has newer ones: {', '.join(path.name for path in paths)}", flush=True)
                continue
            is_new = _upload(mirror, paths[0], checkpoint["train_config"], pointer, tiers, not is_behind)
            print(f"{'uploaded' if is_new else 'already there'}: {', '.join(tiers)}", flush=True)


def _upload(mirror: Mirror, path: Path, options: dict, pointer: Pointer, names: list[str], with_logs: bool) -> bool:
    """Upload a checkpoint of the run with these options, perhaps with logs; return whether it was not there."""
    defaults = {"run_name": "", "mirror_keep": 0, "keep_epochs": 0}  # older checkpoints have fewer options
    config = SimpleNamespace(**defaults | options | {"checkpoint_dir": str(path.parent)})
    if not config.run_name:
        raise UserError(f"{path}: converted weights, not of a run")
    files = files_of(config) if with_logs else {}
    with ProgressBar(desc=path.name, total=pointer.size, unit="B") as bar:

        def upload() -> bool:
            mirror.claim(config.run_name, resumes=True)
            return mirror.upload(path, pointer, names, files, config.mirror_keep, bar.show_from(0), config.keep_epochs)

        return mirror.patiently(upload)


def download(mirror: Mirror, name: str, folder: Path) -> None:
    """Download a checkpoint and verify it.

    Raises: UserError when the mirror has none of that name, it is corrupt, or the file exists.
    """
    pointers, _ = mirror.patiently(mirror.pointers)
    name = {"latest": LATEST, **NAMED}.get(name, name)
    if name not in pointers:
        raise UserError(f"{mirror.url}: no {name}; expected one of {', '.join(pointers) or 'nothing: it is empty'}")
    target = folder / name
    if target.exists():
        raise UserError(f"{target} exists; rename it, or give another --checkpoint_dir")
    folder.mkdir(parents=True, exist_ok=True)
    mirror.download(pointers[name], target)
    print(f"{target}: step {pointers[name].step:,}, verified")


def verify(mirror: Mirror) -> int:
    """Read every checkpoint in the store, print its state, and return the exit status: 1 if one is not intact."""
    pointers, bad = mirror.patiently(mirror.pointers)
    if not pointers and not bad:
        raise UserError(f"no checkpoints in {mirror.url}; expected the URL that --mirror had")
    print(*bad.values(), sep="\n", end="\n" * bool(bad))
    files = {pointer.file: pointer for pointer in pointers.values()}
    with ProgressBar(desc="verifying", total=sum(pointer.size for pointer in files.values()), unit="B") as bar:
        for file, pointer in files.items():
            state = mirror.patiently(partial(mirror.verify, pointer))
            names = ", ".join(name for name, found in pointers.items() if found == pointer)
            bar.update(pointer.size)
            print(f"{file} ({names}): {state}", flush=True)
            bad |= {file: state} if state != "intact" else {}
    return int(bool(bad))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(ManagerOptions, argv, __doc__.splitlines()[0])
    folder = Path(options.checkpoint_dir)
    url = options.mirror or read_status(folder).get("mirror")
    if not url:
        found = f"missing, and {folder / STATUS} names none"
        raise OptionError("mirror", found, "the URL that train.py --mirror has, such as s3://bucket/run")
    mirror = Mirror(url)
    if options.action == "verify":
        return verify(mirror)
    if options.action == "list":
        for line in mirror_table(mirror):
            print(line)
    elif options.action == "download":
        download(mirror, options.name, folder)
    else:
        upload_all(mirror, folder)
    return 0


if __name__ == "__main__":
    run_cli(main)
