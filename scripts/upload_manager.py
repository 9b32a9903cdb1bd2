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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import TrainConfig
from steadygpt.checkpoint import BACKUP, LATEST, NAMED, checkpoint_files, read_checkpoint, summary
from steadygpt.cli import OptionError, UserError, option, parse_options, run_cli
from steadygpt.durable import lock_folder
from steadygpt.mirror import Entry, Mirror
from steadygpt.progress import ProgressBar
from steadygpt.start import resume_config
from steadygpt.status import STATUS, read_status
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


def upload_all(url: str, folder: Path) -> None:
    """Upload the intact checkpoints of a folder that the mirror lacks, the oldest first, and the logs of the run."""
    files: dict[int, list[Path]] = {}  # by inode
    for path in checkpoint_files(folder):
        if path.name != BACKUP:  # the mirror makes its own
            files.setdefault(path.stat().st_ino, []).append(path)
    if not files:
        raise UserError(f"no checkpoints in {folder}; name their folder with --checkpoint_dir")
    oldest_first = sorted(files.values(), key=lambda paths: paths[0].stat().st_mtime_ns)
    mirror = Mirror(url, resumes=True)
    with lock_folder(folder, "it uploads its checkpoints itself"):
        there = mirror.patiently(mirror.index).checkpoints
        if LATEST in there and there[LATEST].mtime_ns > oldest_first[-1][0].stat().st_mtime_ns:
            raise UserError(f"{url} has a newer checkpoint than {folder}, of step {there[LATEST].step:,}; resume that")
        for paths in oldest_first:
            try:
                checkpoint = read_checkpoint(paths[0])
            except UserError as error:
                print(f"skipped {error}", flush=True)
                continue
            config = TrainConfig(checkpoint_dir=str(folder))
            config, _ = resume_config(checkpoint["train_config"], config, {"checkpoint_dir": "flag"})
            if not config.run_name:
                raise UserError(f"{paths[0]}: converted weights, not of a run")
            entry, mirror.run = Entry.of(paths[0], summary(checkpoint)), config.run_name
            names = [path.name for path in paths]
            names = [name for name in names if name not in there or there[name].mtime_ns <= entry.mtime_ns]
            if not names:
                print(f"the mirror has newer ones: {', '.join(path.name for path in paths)}", flush=True)
                continue
            with ProgressBar(desc=paths[0].name, total=entry.size, unit="B") as bar:
                is_new = mirror.patiently(partial(mirror.upload, paths[0], entry, names, config, bar.show_from(0)))
            print(f"{'uploaded' if is_new else 'already there'}: {', '.join(names)}", flush=True)


def download(mirror: Mirror, name: str, folder: Path) -> None:
    """Download a checkpoint and verify it."""
    there = mirror.patiently(mirror.index).checkpoints
    name = {"latest": LATEST, **NAMED}.get(name, name)
    if name not in there:
        raise UserError(f"{mirror.url}: no {name}; expected one of {', '.join(there) or 'nothing: it is empty'}")
    target = folder / name
    if target.exists():
        raise UserError(f"{target} exists; rename it, or give another --checkpoint_dir")
    folder.mkdir(parents=True, exist_ok=True)
    mirror.download(there[name], target)
    print(f"{target}: step {there[name].step:,}, verified")


def verify(mirror: Mirror) -> int:
    """Read every checkpoint in the store, print its state, and return the exit status: 1 if one is not intact."""
    there, states = mirror.patiently(mirror.index).checkpoints, set()
    if not there:
        raise UserError(f"no checkpoints in {mirror.url}; expected the URL that --mirror had")
    entries = set(there.values())
    with ProgressBar(desc="verifying", total=sum(entry.size for entry in entries), unit="B") as bar:
        for entry in sorted(entries, key=lambda entry: entry.mtime_ns):
            states.add(state := mirror.patiently(partial(mirror.verify, entry)))
            names = ", ".join(name for name, found in there.items() if found == entry)
            bar.update(entry.size)
            print(f"{entry.file} ({names}): {state}", flush=True)
    return int(states != {"intact"})


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(ManagerOptions, argv, __doc__.splitlines()[0])
    folder = Path(options.checkpoint_dir)
    url = options.mirror or read_status(folder).get("mirror")
    if not url:
        found = f"missing, and {folder / STATUS} names none"
        raise OptionError("mirror", found, "the URL that train.py --mirror has, such as s3://bucket/run")
    if options.action == "verify":
        return verify(Mirror(url))
    if options.action == "list":
        print(*mirror_table(Mirror(url)), sep="\n")
    elif options.action == "download":
        download(Mirror(url), options.name, folder)
    else:
        upload_all(url, folder)
    return 0


if __name__ == "__main__":
    run_cli(main)
