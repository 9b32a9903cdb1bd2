"""Checkpoints: one file each, written once and linked into every tier it belongs to, verified before it is trusted.

    latest.pt  latest_backup.pt     the last save, and the one before it
    rolling_step_XXXXXX.pt          the newest keep_checkpoints
    epoch_XXXXX.pt                  the end of each epoch, all kept
    best_model.pt                   the best validation loss so far

A file is torch.save of plain types and tensors, the same whatever the topology it was trained on.
"""

import copy
import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import nn

from steadygpt.cli import UserError
from steadygpt.distributed import Ranks
from steadygpt.durable import fsync_folder, link_file, replace_file, write_temporary
from steadygpt.runlog import duration_text

FORMAT_VERSION = 2
LATEST, BACKUP, BEST = "latest.pt", "latest_backup.pt", "best_model.pt"
ROLLING, EPOCH = "rolling_step_{:06d}.pt", "epoch_{:05d}.pt"
STATUS = "status.json"
KINDS = {
    **dict.fromkeys(("format_version", "step", "rows_consumed"), int),
    **dict.fromkeys(("model", "optimizer", "model_config", "train_config"), dict),
    "tokenizer": str,
}

# ---------------------------------------------------------------------------------------------------------------------
# the state of a run <-> plain tensors


def capture_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Copy weights and optimizer state to host memory: {"model": ..., "optimizer": ...} keyed by parameter name.

    Every rank takes part (FSDP gathers); the result is whole on rank 0 and empty on the others. `model` is the bare
    module, not its DDP or torch.compile wrapper.
    """
    from torch.distributed.checkpoint import state_dict  # here, since it takes half a second that --help need not wait

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = state_dict.get_model_state_dict(model, options=options), {}
    if optimizer.state:  # before its first step, asking for its state would make it count one
        moments = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    if weights:  # FSDP gathers a tensor with two names, as the tied head, twice
        first_name: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            weights[name] = weights[first_name.setdefault(id(parameter), name)]
    state = {"model": weights, "optimizer": moments}
    if next(model.parameters()).device.type == "cpu":
        state = copy.deepcopy(state)  # "offloading" to the CPU copies nothing there; training would write into the save
    return state


def restore_weights(model: nn.Module, weights: dict, ranks: Ranks) -> None:
    """Load a checkpoint's "model" into the bare model; only rank 0 needs the weights, it sends them to the others.

    Raises: UserError on every rank when they are not this model's.
    """
    weights = weights if ranks.is_main else {}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def check() -> None:
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise UserError(f"the checkpoint's {name} is {found.get(name)}; this model's is {expected.get(name)}")

    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    ranks.on_main(check)
    set_model_state_dict(model, weights, options=_load_options(ranks))


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, moments: dict, ranks: Ranks) -> None:
    """Load a checkpoint's "optimizer" (only rank 0 needs it); the options, such as weight decay, stay as they are."""
    if not ranks.broadcast(bool(moments.get("state"))):
        return  # saved before the first step
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, moments if ranks.is_main else {}, options=_load_options(ranks))
    if ranks.device.type == "cpu":  # still mapped to the file, which the first step would copy page by page
        for state in optimizer.state.values():
            state.update({name: tensor.clone() for name, tensor in state.items()})
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def _load_options(ranks: Ranks):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    # Weights and moments in two calls: set_state_dict with {} on the other ranks hangs (torch 2.13).
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks.world_size > 1)


# ---------------------------------------------------------------------------------------------------------------------
# writing


class CheckpointWriter:
    """Saves in the background, one at a time; used on rank 0 only.

    Args:
        keep: rolling checkpoints that stay.
        mirror: fsspec URL of a folder that gets a copy of each save, or "".
        resumed_from: the verified checkpoint of the folder that the run goes on from. It becomes latest.pt, so that a
            kill before the first save does not undo a choice to go back.
    """

    def __init__(self, folder: Path, keep: int, mirror: str = "", resumed_from: Path | None = None):
        self.folder, self.keep, self.mirror = folder, keep, mirror
        self.latest_is_whole = resumed_from is not None  # a damaged file never becomes the backup
        self.latest_step = -1
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.in_flight: Future | None = None
        self.reports: SimpleQueue[tuple[str, str]] = SimpleQueue()
        if mirror:
            _open_mirror(mirror)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.tmp"):
            stale.unlink()  # a killed writer's
        if resumed_from is not None and resumed_from.name != LATEST:
            self._adopt(resumed_from)

    def _adopt(self, path: Path) -> None:
        latest, adopted = self.folder / LATEST, self.folder / ".adopted.tmp"
        if latest.exists() and latest.samefile(path):
            return
        link_file(path, adopted)  # it may be the backup
        with suppress(UserError):
            read_checkpoint(latest)  # which was not asked for, or is damaged
            link_file(latest, self.folder / BACKUP)
        os.replace(adopted, latest)
        fsync_folder(self.folder)

    def save(self, checkpoint: dict, tiers: list[str]) -> None:
        """Write `checkpoint` as latest.pt and under the file names in `tiers`; returns before that is done.

        Waits for the save before it: one is in flight at most.
        """
        self.wait()
        self.in_flight = self.pool.submit(self._save, checkpoint, tiers)

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self.in_flight is not None:
            self.in_flight.result()

    def take_reports(self) -> Iterator[tuple[str, str]]:
        """("saved", "not saved" or "not mirrored", what happened) of the saves that ended since the last call."""
        while not self.reports.empty():
            yield self.reports.get()

    def close(self) -> None:
        """Wait for the save in flight; take_reports still tells how it ended."""
        self.pool.shutdown()

    def _save(self, checkpoint: dict, tiers: list[str]) -> None:
        step, names, start = checkpoint["step"], [LATEST, *tiers], time.monotonic()
        try:
            self._write(checkpoint, tiers)
            size = (self.folder / LATEST).stat().st_size
        except Exception as error:  # whatever it is, training goes on; an exception of this thread nobody would see
            what = f"{self.folder / LATEST}: step {step} was not saved: {str(error) or type(error).__name__}"
            with suppress(OSError):  # the folder is gone
                free = shutil.disk_usage(self.folder).free
                what += f"; it takes {_num_bytes(checkpoint):,} bytes, {free:,} are free; older saves are whole"
            self.reports.put(("not saved", what))
            return
        took = time.monotonic() - start
        self.reports.put(("saved", f"saved step {step} as {', '.join(names)} ({size / 1e6:,.1f} MB in {took:.1f} s)"))
        if self.mirror:
            try:
                copy_to_mirror(self.folder / LATEST, self.mirror, names)
            except Exception as error:  # each fsspec back end has exceptions of its own
                self.reports.put(("not mirrored", f"step {step} was saved, but not mirrored to {self.mirror}: {error}"))

    def _write(self, checkpoint: dict, tiers: list[str]) -> None:
        latest = self.folder / LATEST
        temporary = write_temporary(latest, lambda file: torch.save(checkpoint, file), cached=False)
        for name in tiers:
            link_file(temporary, self.folder / name)
        if self.latest_is_whole and checkpoint["step"] != self.latest_step:
            link_file(latest, self.folder / BACKUP)
        os.replace(temporary, latest)
        fsync_folder(self.folder)  # only now is it durable, and only then may older ones go
        self.latest_is_whole, self.latest_step = True, checkpoint["step"]
        for old in _newest_first(self.folder, "rolling_step_*.pt")[self.keep :]:
            old.unlink(missing_ok=True)


def _num_bytes(checkpoint: dict) -> int:
    """Bytes of its tensors; of tied ones once."""
    moments = [tensor for state in checkpoint["optimizer"].get("state", {}).values() for tensor in state.values()]
    return sum({t.data_ptr(): t.nbytes for t in [*checkpoint["model"].values(), *moments]}.values())


def copy_to_mirror(file: Path, url: str, names: list[str]) -> None:
    """Copy a file to the fsspec folder `url` under each of the names, whole or not at all."""
    fs, folder = _open_mirror(url)
    fs.makedirs(folder, exist_ok=True)
    for name in names:
        fs.put_file(str(file), f"{folder}/{name}.part")
        fs.mv(f"{folder}/{name}.part", f"{folder}/{name}")


def _open_mirror(url: str):
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"--mirror {url}: {error}; expected a URL that fsspec knows, its back end installed") from error


def write_status(folder: Path, **status) -> None:
    """Say in status.json where the run stands: torchrun's exit status does not tell a clean stop from a crash."""
    status["updated_at"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    replace_file(folder / STATUS, lambda file: file.write(json.dumps(status, indent=2).encode() + b"\n"))


def read_status(folder: Path) -> dict:
    """What write_status wrote last; {} where it never did."""
    try:
        return json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# reading


def checkpoint_files(folder: Path) -> list[Path]:
    """All checkpoints of a folder in the order in which --resume latest tries them, then the best one."""
    rolling, epochs = _newest_first(folder, "rolling_step_*.pt"), _newest_first(folder, "epoch_*.pt")
    files = [folder / LATEST, folder / BACKUP, *rolling, *epochs, folder / BEST]
    return [file for file in files if file.exists()]


def open_checkpoint(which: str, folder: Path) -> tuple[Path, dict]:
    """The checkpoint that a command is to use, "latest", "best" or a file; files passed over are named on stderr."""
    if which == "auto":
        raise UserError("expected latest, best or a checkpoint file; auto is for training")
    path, checkpoint, passed_over = find_checkpoint(which, folder)
    for line in passed_over:
        print(f"warning: passed over {line}", file=sys.stderr)
    return path, checkpoint


def read_on_main(which: str, folder: Path, ranks: Ranks) -> tuple[Path | None, list[str], dict | None]:
    """find_checkpoint on rank 0: the path, what was passed over, and the shared content."""
    path, checkpoint, passed_over = ranks.on_main(lambda: find_checkpoint(which, folder)) or (None, None, [])
    return *ranks.broadcast((path, passed_over)), share(checkpoint, ranks)


def share(checkpoint: dict | None, ranks: Ranks) -> dict | None:
    """Rank 0's checkpoint, on the other ranks with empty "model" and "optimizer"."""
    without_tensors = ranks.broadcast(checkpoint and checkpoint | {"model": {}, "optimizer": {}})
    return checkpoint or without_tensors


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    # By time, not by step: after going back to an older checkpoint, higher steps can be the older files.
    def written(file: Path) -> tuple[int, str]:
        return (file.stat().st_mtime_ns if file.exists() else 0), file.name

    return sorted(folder.glob(pattern), key=written, reverse=True)


def read_checkpoint(path: Path) -> dict:
    """Verify a checkpoint file and map it into memory; its tensors are on the CPU, read when used.

    Raises: UserError that says what is wrong with the file.
    """
    return as_checkpoint(load_verified(path), path)


def load_verified(path: Path) -> object:
    """What torch.save wrote to a file, its checksums verified; nothing in it is run.

    Raises: UserError that says what is wrong with the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if bad := archive.testzip():  # torch.load never looks at the checksums
                raise UserError(f"{path}: damaged (checksum of record {bad})")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder; expected a checkpoint file") from None
    except zipfile.BadZipFile:
        size = path.stat().st_size
        raise UserError(f"{path}: damaged or not a checkpoint ({size:,} bytes, not a whole torch.save file)") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path}: holds more than tensors and plain types; it was not loaded") from None
    except UserError:
        raise
    except Exception as error:  # what a parser raises on arbitrary bytes has no end, and the next file may be whole
        raise UserError(f"{path}: damaged or cannot be read ({f'{error!r}'.splitlines()[0]})") from error


def as_checkpoint(content: object, path: Path) -> dict:
    """The content of a file, when it is a checkpoint of this version.

    Raises: UserError when it is none.
    """
    for key, kind in KINDS.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise UserError(f"{path}: not a SteadyGPT checkpoint (expected {key}, {kind.__name__})")
    if content["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"{path}: format {content['format_version']}; expected at most {FORMAT_VERSION}: update SteadyGPT"
        )
    if content["format_version"] == 1:  # its data was recognized otherwise, and nothing was told of the last losses
        content |= {"format_version": FORMAT_VERSION, "data_fingerprint": {}, "recent_losses": [], "bad_steps": 0}
    return content


def find_checkpoint(which: str, folder: Path) -> tuple[Path | None, dict | None, list[str]]:
    """The checkpoint that "latest", "auto", "best" or a file name means, verified.

    Returns:
        Its path and content (None, None for "auto" where there is nothing), and a line for each file passed over.

    Raises: UserError when it does not exist, is not whole, or files exist and none of them is whole.
    """
    if which not in ("latest", "auto"):
        path = folder / BEST if which == "best" else Path(which)
        return path, read_checkpoint(path), []
    passed_over = []
    for path in checkpoint_files(folder):
        if path.name == BEST:
            continue
        try:
            return path, read_checkpoint(path), passed_over
        except UserError as error:
            passed_over.append(str(error))
    if passed_over:
        raise UserError(f"no checkpoint in {folder} is whole: {'; '.join(passed_over)}; nothing was changed")
    if which == "auto":
        return None, None, []
    raise UserError(f"no checkpoints in {folder}; name their folder with --checkpoint_dir")


def checkpoint_table(folder: Path) -> Iterator[str]:
    """The lines of --list_checkpoints; each file is read whole to see whether it is."""
    files = checkpoint_files(folder)
    if not files:
        raise UserError(f"no checkpoints in {folder}; name their folder with --checkpoint_dir")
    row = "{:<26} {:>8} {:>7} {:>8} {:>8} {:>12} {:>12}  {}".format
    yield row("file", "step", "epoch", "loss", "val loss", "size", "age", "state")
    described: dict[int, tuple] = {}  # by inode: links of one file are read once
    for file in files:
        stat = file.stat()
        if stat.st_ino not in described:
            described[stat.st_ino] = _describe(file)
        *numbers, state = described[stat.st_ino]
        yield row(
            file.name, *numbers, f"{stat.st_size / 1e6:,.1f} MB", duration_text(time.time() - stat.st_mtime), state
        )
    yield f"{len(files)} names of {len(described)} files in {folder}"


def _describe(file: Path) -> tuple[str, str, str, str, str]:
    """Step, epoch, loss, validation loss and state of a checkpoint file, as text."""
    try:
        checkpoint = read_checkpoint(file)
    except UserError as error:
        return "-", "-", "-", "-", str(error).removeprefix(f"{file}: ")

    def number(key: str, form: str) -> str:
        return "-" if checkpoint.get(key) is None else format(checkpoint[key], form)

    return number("step", "d"), number("epoch", ".2f"), number("loss", ".4f"), number("val_loss", ".4f"), "whole"
