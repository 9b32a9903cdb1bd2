#!/usr/bin/env python
"""Upload checkpoints to a mirror (train.py --mirror), list or download them.

scripts/upload_manager.py upload-all --mirror s3://bucket/run       # files of checkpoints/ that the mirror lacks
scripts/upload_manager.py list --mirror s3://bucket/run
scripts/upload_manager.py download best --mirror s3://bucket/run
"""

import sys

sys.path.insert(0, f"{sys.path[0]}/..")

import steadygpt.preflight  # noqa: F401  # before all others

import os
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

import torch

from steadygpt.base.durable import lock_folder
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import LATEST, NAMED, find_checkpoint
from steadygpt.config import TrainConfig
from steadygpt.log.metrics import RUN, read_run
from steadygpt.log.runlog import RunLog
from steadygpt.machine.ranks import Ranks
from steadygpt.mirror.store import Mirror
from steadygpt.mirror.uploads import open_uploads
from steadygpt.monitor.table import print_checkpoints


@dataclass(frozen=True)
class ManagerOptions:
    action: str = option(
        MISSING, "upload-all, list or download", choices=("upload-all", "list", "download"), positional=True
    )
    name: str = option("latest", "to download: latest, best, stable or one in the list; else a folder", positional=True)
    mirror: str = option("", "URL of the mirror", no_password=True)
    checkpoint_dir: str = option("checkpoints", "local folder of checkpoints")


def upload_all(url: str, folder: Path) -> None:
    """Upload the intact checkpoints of a folder that the mirror lacks, and the logs of the run."""
    with lock_folder(folder, "it uploads its checkpoints itself"):
        newest = find_checkpoint("latest", folder)
        assert newest.path and newest.checkpoint  # only "auto" finds none
        if not newest.checkpoint["launch"]:
            raise UserError(f"{newest.path}: converted weights; expected a checkpoint of a run")
        run = read_run(folder)
        if run.copied_from:
            advice = "it has no mirror: resume from it with a --mirror of its own, which uploads it"
            raise UserError(f"{folder}: a copy of {run.copied_from}; {advice}")
        config = TrainConfig(**newest.checkpoint["options"])
        config = replace(config, checkpoint_dir=str(folder), run_name=run.name, mirror=url)
        uploads = open_uploads(run.id, config, RunLog(config, Ranks(torch.device("cpu"))))
        uploads.start(is_last=True)
        while uploads.is_busy():
            time.sleep(0.1)
        if not uploads.is_done():
            raise UserError(f"{folder}: not everything is uploaded; run this again")
    print(printable(f"{url} has the checkpoints of {folder}"))


def download(mirror: Mirror, name: str, folder: Path) -> None:
    """Download a checkpoint and verify it."""
    index = mirror.patiently(mirror.index)
    if (folder / RUN).exists() and read_run(folder).id != index.run:
        raise UserError(f"{folder}: holds another run than {mirror.url}; give an empty --checkpoint_dir")
    name = {"latest": LATEST, **NAMED}.get(name, name)
    if name not in index.checkpoints:
        names = ", ".join(index.checkpoints) or "none: the mirror is empty"
        raise UserError(f"{mirror.url}: no {name}; expected one of {names}")
    target = folder / name
    if target.exists():
        raise UserError(f"{target} exists; rename it, or give another --checkpoint_dir")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = index.checkpoints[name]
    temporary, *_ = mirror.download(checkpoint, folder)
    os.replace(temporary, target)
    print(printable(f"{target}: step {checkpoint.step:,}, verified"))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(ManagerOptions, argv, __doc__.splitlines()[0])
    is_folder = options.action != "download" and Path(options.name).is_dir()
    folder = Path(options.name if is_folder else options.checkpoint_dir)
    if options.name != "latest" and options.action != "download" and not is_folder:
        raise UserError(f"{options.action} {options.name}: expected no name; it acts on all checkpoints")
    if not options.mirror:  # not taken from run.json, because the folder may come from elsewhere
        raise OptionError("mirror", "missing", "a URL such as s3://bucket/run")
    if options.action == "list":
        return print_checkpoints(folder, options.mirror)
    if options.action == "download":
        download(Mirror(options.mirror), options.name, folder)
    else:
        upload_all(options.mirror, folder)
    return 0


if __name__ == "__main__":
    run_cli(main)
