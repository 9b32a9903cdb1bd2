"""Checkpoint files: their names, content, verification and choice.

    latest.pt  latest_backup.pt     the last save, and the one before it
    rolling_step_XXXXXX.pt          the newest keep_checkpoints
    epoch_XXXXX.pt                  the end of an epoch: the newest keep_epochs, by default all
    stable.pt                       the last step before the cool-down of --schedule wsd
    best_model.pt                   the best validation loss so far
    best_model_step_XXXXXX.pt       the best on earlier validation rows, before these changed

A file is torch.save of plain types and tensors, the same for any number of ranks and any sharding.
"""

import errno
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from msgspec import Meta
from torch import Tensor, nn

from model import GPT, GPTConfig
from optim import state_shapes
from steadygpt.base.foreign import what_it_holds, what_it_is
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.typed import Count, Id, Loss, Number, typed
from steadygpt.config import FIELDS, STORED, TrainConfig
from steadygpt.data.order import Phase
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.machine.host import process_age_s

FORMAT_VERSION = 7
LATEST, BACKUP, BEST, STABLE = "latest.pt", "latest_backup.pt", "best_model.pt", "stable.pt"
NAMED = {"best": BEST, "stable": STABLE}  # words that commands accept besides latest and names of files
NOT_YET = {
    "best": "the run had no validation yet, or the file was removed",
    "stable": "--schedule wsd saves it before the cool-down",
}
ROLLING, EPOCH = "rolling_step_{:06d}.pt", "epoch_{:05d}.pt"
NOT_OURS = "not a checkpoint of SteadyGPT; convert_hf.py reads those of nanoGPT and Hugging Face"
PICKLE = (
    "a pickle of Python objects, which could run code; convert_hf.py reads those of nanoGPT, build-nanogpt and "
    "gpt2-from-scratch. In other programs, save a Hugging Face folder (save_pretrained)"
)
ADVICE = "take another checkpoint, or the version of SteadyGPT that wrote it"

Scores = dict[str, Number | None]  # such as val_loss; None: not finite
# Fields of converted weights, from which no run can resume.
WITHOUT_RUN = {
    "optimizer": {},
    "scaler": {},
    "epoch": 0.0,
    "options": {},
    "data": None,
    "launch": None,
    "metrics_bytes": 0,
}


class DataRecord(TypedDict):
    """The data that a run trains on, and how each step maps to its rows."""

    phase: Phase  # the current one
    sources: dict[str, tuple[str, str]]  # name -> folder, digest of the shards
    first_step: Count  # first step with the current batch size and mixture
    first_row: Count  # of that step
    shards: list[tuple[str, int, int]]  # verified shards: see stamp()


class LaunchRecord(TypedDict):
    """The launch that wrote a checkpoint, as in its line of metrics.jsonl (LaunchLine)."""

    id: Id
    parent: str
    settings: dict[str, Any]  # what determines a step besides the checkpoint, by name


class CheckpointContent(TypedDict):
    """The content of a checkpoint, besides TrainState and TokenizerRecord."""

    format_version: int
    model: dict[str, Tensor]  # by name of the parameter, fp32
    model_config: dict[str, Any]  # of a GPTConfig
    optimizer: dict[str, dict[str, Tensor]]  # name of the parameter -> kind -> tensor; empty before the first step
    scaler: dict[str, int | Number]  # the state of the loss scaler; empty without fp16
    epoch: Loss
    options: dict[str, Any]  # STORED options, see Settled.of_run
    data: DataRecord | None
    launch: LaunchRecord | None
    metrics_bytes: Count  # size of metrics.jsonl at the save: a resumed run repeats the steps after it
    saved_at: Annotated[float, Meta(ge=0, le=2**41)]  # seconds since 1970


@dataclass
class TrainState:
    """Everything that changes during training, besides the model, the optimizer and the loss scaler."""

    step: Count = 0  # steps taken, skipped updates included
    rows_consumed: Count = 0
    loss: Loss | None = None  # of the last finite step
    recent_losses: list[Number] = field(default_factory=list)  # the last SPIKE_WINDOW finite losses
    bad_steps: Count = 0  # consecutive bad steps so far
    cooled_down: bool = False  # the weights had updates in a cool-down
    elapsed_s: Loss = 0.0  # wall-clock of the earlier launches of this run
    scores: Scores = field(default_factory=dict)  # of the evaluations of these weights
    validated_on: str = ""  # the rows that val_loss was measured on: losses on other rows are not comparable

    def total_s(self) -> float:
        """Return the wall-clock seconds of the run so far, over all launches."""
        return self.elapsed_s + process_age_s()


class Unreadable(UserError):
    """A file cannot be read at this moment; it may be intact."""


def named_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights and optimizer state by name; a tied head is one tensor under two names."""
    tensors = dict(checkpoint["model"])
    for name, state in checkpoint["optimizer"].items():
        for kind, tensor in state.items():
            tensors[f"{name}.{kind}"] = tensor
    return tensors


def checkpoint_bytes(model: GPT, optimizer: str, page_locked: bool = False) -> int:
    """Return the bytes of the weights and of the optimizer's state.

    Args:
        page_locked: round each tensor up to a power of two, as PyTorch does in page-locked memory.
    """
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    shapes += state_shapes(model.config, optimizer).values()
    sizes = [4 * math.prod(shape) for shape in shapes]
    if page_locked:
        sizes = [2 ** (size - 1).bit_length() for size in sizes]
    return sum(sizes)


def check_numbers(checkpoint: Mapping[str, Any]) -> None:
    """Check that all tensors hold finite fp32 numbers, and that counts and mean squares are not negative."""
    for name, t in named_tensors(checkpoint).items():
        is_plain = t.is_cpu and not t.is_nested and t.layout == torch.strided and t.is_contiguous() and t.numel()
        if not is_plain or t.dtype != torch.float32:
            raise UserError(f"{name} is not a tensor of fp32 numbers without gaps")
        low, high = torch.aminmax(t)
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{name} has a NaN or an infinite number")
        if low < 0 and name.endswith((".step", ".exp_avg_sq", ".mean_squares")):
            raise UserError(f"{name} has a negative number")


def check_tensors(
    checkpoint: dict, source: object, model: nn.Module, optimizer_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a checkpoint has the weights of a model and the state of its optimizer.

    Args:
        source: the name of the checkpoint, for errors.
        optimizer_shapes: see state_shapes().
    """
    saved = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named_tensors(checkpoint).items()}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    if len(saved) > len(checkpoint["model"]):  # otherwise it is older than the first update
        for name, shape in optimizer_shapes.items():
            # A checkpoint may lack mean squares, because --allow_changes may have changed muon_beta2.
            if name in saved or "mean_squares" not in name:
                shapes[name] = shape
    for name in sorted(saved.keys() | shapes.keys()):
        expected = f"{shapes[name]} torch.float32" if name in shapes else "no such tensor"
        actual = saved.get(name, "missing")
        if actual != expected:
            raise UserError(f"{source}: {name} is {actual}; expected {expected}. Try another checkpoint")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields of a checkpoint that order saves by age, and those that tables and mirrors show."""

    # At most half of what CheckpointContent allows, so that later ones fit.
    saved_at: Annotated[float, Meta(ge=0, le=2**40)]
    step: Count
    epoch: Loss | None = None
    loss: Loss | None = None
    scores: Scores = field(default_factory=dict, compare=False)
    validated_on: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def recency(self) -> tuple[float, int]:
        """Return a key that is larger for the newer of two checkpoints, and equal for copies of one save."""
        return self.saved_at, self.step


class File(NamedTuple):
    """One name of a checkpoint in a folder; a save may have several."""

    path: Path
    head: Head | None  # None: it cannot be read
    problem: str  # why it cannot be read, or ""
    inode: int = 0
    size: int = 0  # in bytes

    @property
    def recency(self) -> tuple[float, int]:
        """Return Head.recency, or a key smaller than all others if the head cannot be read."""
        return self.head.recency if self.head else (0.0, -1)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a folder, without opening them; [] if there is no such folder.

    Raises: Unreadable if the folder exists but cannot be listed.
    """
    try:
        found = sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problem = f"{folder}: cannot be read ({error.strerror})"
        raise Unreadable(f"{problem}; fix the disk or the permissions, or give another path") from error
    rolling = [name for name in found if re.fullmatch(r"rolling_step_.*\.pt", name)]
    epochs = [name for name in found if re.fullmatch(r"epoch_.*\.pt", name)]
    best = [name for name in found if re.fullmatch(r"best_model(_step_.*)?\.pt", name)]
    names = [LATEST, STABLE, *rolling, BACKUP, *epochs, *best]
    return [folder / name for name in names if name in found]  # also a broken link, as a damaged checkpoint


def scan(folder: Path) -> list[File]:
    """Return all names of checkpoints in a folder, newest first by their content; the dates of files are ignored.

    A file without a readable head comes first, because it may be the newest, but after a readable latest.pt, which
    every save replaces. Names of one save are in the order of checkpoint_files().
    """
    files = []
    latest_recency: tuple[float, int] = (math.inf, 0)
    for path in checkpoint_files(folder):
        head = None
        problem = ""
        inode = 0
        size = 0
        try:
            stat = path.stat()
            inode = stat.st_ino
            size = stat.st_size
            head = _head(path, stat.st_dev, inode, size, stat.st_mtime_ns)
        except (UserError, OSError) as error:
            if not os.path.lexists(path):  # training has deleted it
                continue
            problem = str(error).removeprefix(f"{path}: ")
        if head and path.name == LATEST:
            latest_recency = head.recency
        files.append(File(path, head, problem, inode, size))

    def key(file: File) -> tuple[tuple[float, int], bool]:
        return file.recency if file.head else latest_recency, file.head is not None

    return sorted(files, key=key, reverse=True)


def too_old(recencies: Mapping[str, tuple[float, int]], keep: int, keep_epochs: int) -> list[str]:
    """Return the names of all but the `keep` newest rolling checkpoints and `keep_epochs` newest epochs; 0 keeps all.

    Args:
        recencies: Head.recency of each checkpoint, by name.
    """
    names: list[str] = []
    for tier, count in {"rolling": keep, "epoch": keep_epochs}.items():
        of_tier = [name for name in recencies if name.startswith(tier)]
        newest_first = sorted(of_tier, key=recencies.__getitem__, reverse=True)
        names += newest_first[count:] if count else []
    return names


class Best(NamedTuple):
    """The model with the lowest validation loss."""

    val_loss: float
    step: int
    validated_on: str  # see TrainState

    @classmethod
    def of(cls, head: Head) -> "Best | None":
        """Return a checkpoint's validation loss, step and rows; None if it was not validated."""
        val_loss = head.scores.get("val_loss")
        return None if val_loss is None else cls(val_loss, head.step, head.validated_on)


def newest_below(folder: Path) -> Path | None:
    """Return the subfolder with the newest checkpoint, if any has one."""
    found = []
    for subfolder in folder.glob("*/"):
        with suppress(Unreadable):
            found += [(file.recency, file.path.parent) for file in scan(subfolder)]
    return max(found)[1] if found else None


def no_checkpoints(folder: Path) -> UserError:
    """Return the error for a folder without checkpoints."""
    if Path(folder, "config.json").exists():
        return UserError(f"{folder}: a Hugging Face folder, not one of a run; start a run with --init_from {folder}")
    below = newest_below(folder)
    advice = f", such as {below}" if below else ""
    return UserError(f"no checkpoints in {folder}; give another folder{advice}")


def check_folder(folder: Path, resumed_from: Path | None) -> None:
    """Check that a run may write its checkpoints into a folder."""
    has_checkpoints = bool(checkpoint_files(folder))
    if has_checkpoints and (resumed_from is None or not resumed_from.parent.samefile(folder)):
        advice = "resume from them with --resume latest, or use another --checkpoint_dir"
        raise UserError(f"{folder} already holds checkpoints; {advice}")


def open_checkpoint(which: str, folder: Path) -> tuple[Path, dict]:
    """Return the checkpoint that a command asks for: "latest", "best", "stable", a file or a folder."""
    selected = find_checkpoint(which, folder)
    for line in selected.damaged.values():
        say(f"warning: skipped {line}")
    if not (selected.path and selected.checkpoint):  # only "auto" allows no checkpoint
        raise no_checkpoints(folder)
    return selected.path, selected.checkpoint


def intact_checkpoints(files: Iterable[File]) -> Iterator[tuple[Path, dict]]:
    """Yield each intact save once, however many names it has. Skipped files are reported on stderr."""
    seen = set()
    for file in files:
        if file.recency in seen:
            continue
        try:
            content = read_checkpoint(file.path)
        except UserError as error:
            say(f"warning: skipped {error}")
            continue
        seen.add((content["saved_at"], content["step"]))
        yield file.path, content


def read_checkpoint(path: Path) -> dict:
    """Verify a checkpoint file and map it into memory; its tensors, all of them finite, are on the CPU."""
    return as_checkpoint(load_verified(path), path)


class NotOurs(UserError):
    """An intact file of another program."""


class OtherVersion(UserError):
    """An intact checkpoint that this version of the code cannot use, such as one with an unknown option."""


def read_head(path: Path) -> Head:
    """Return the head of a file without reading its tensors."""
    return _head_of(load_verified(path, only_head=True), path)


def _head_of(content: Any, path: Path) -> Head:
    check_ours(content, path)
    return typed(content, Head, path, ADVICE)


# Cached, because reading thousands of files takes seconds.
_head = lru_cache(maxsize=2**14)(lambda path, *identity: read_head(path))


def load_verified(path: Path, only_head: bool = False) -> object:
    """Return the content of a torch.save file, after verifying its checksums; no code in it is run.

    Tensors are mapped, so they are read when used; with only_head they are not verified.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # because torch.load does not verify the checksums
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise zipfile.BadZipFile("it was compressed after it was saved")  # torch.load would map wrong numbers
            if only_head:
                [pickled] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                archive.read(pickled)
            else:
                corrupt_record = archive.testzip()
                if corrupt_record:
                    raise zipfile.BadZipFile(f"checksum of record {corrupt_record}")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give that of a checkpoint") from None
    except Exception as error:  # on arbitrary bytes a parser may raise anything, and the next file may be intact
        cause = error.__context__ if isinstance(error, zipfile.BadZipFile) else error  # zipfile replaces an OSError
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:  # EINVAL comes from a wrong offset in the file
            problem = f"{path}: cannot be read ({cause.strerror or cause})"
            raise Unreadable(f"{problem}; fix the disk or the permissions, or give an older file") from error
        if isinstance(error, pickle.UnpicklingError):
            description = what_it_is(path) or PICKLE
            raise NotOurs(f"{path}: {description}") from error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: {what_it_is(path) or f'corrupt ({reason})'}") from error


def check_ours(content: Any, path: Path) -> None:
    """Refuse the content of a file of another program or format version, and say what to do with it."""
    if isinstance(content, dict) and "format_version" not in content:
        raise NotOurs(f"{path}: {what_it_is(path) or what_it_holds(content, path) or NOT_OURS}")
    version = content["format_version"] if isinstance(content, dict) else None
    if not isinstance(version, int) or version != FORMAT_VERSION:  # a tensor would compare its elements
        raise OtherVersion(f"{path}: format_version is {version!r:.50}; expected {FORMAT_VERSION}; {ADVICE}")


def as_checkpoint(content: Any, path: Path) -> dict:
    """Check that the content of a file is a checkpoint of this format, and return the checkpoint."""
    check_ours(content, path)
    read = partial(typed, content, name=path, advice=ADVICE)
    checkpoint = read(CheckpointContent) | asdict(read(TrainState)) | asdict(read(TokenizerRecord))
    # Options that were added since the file was written have their defaults.
    try:
        model_config = typed(checkpoint["model_config"], GPTConfig, f"{path}: model_config", ADVICE)
        config = typed(checkpoint["options"], TrainConfig, f"{path}: options", ADVICE)
    except UserError as error:
        raise OtherVersion(str(error)) from None
    try:
        model_config.check_shape()
    except UserError as error:
        raise OtherVersion(f"{path}: {error}; {ADVICE}") from None
    fields = asdict(model_config)
    unknown = (checkpoint["model_config"].keys() - fields.keys()) | (checkpoint["options"].keys() - FIELDS.keys())
    if unknown:
        raise OtherVersion(f"{path}: has the option {min(unknown)!r}, which this version does not know; {ADVICE}")
    checkpoint["model_config"] = fields
    try:
        check_numbers(checkpoint)
    except UserError as error:
        raise UserError(f"{path}: corrupt ({error})") from None
    if checkpoint["data"]:
        checkpoint["options"] = {name: getattr(config, name) for name in STORED}
        data = checkpoint["data"]
        rows = checkpoint["rows_consumed"]
        expected = data["first_row"] + (checkpoint["step"] - data["first_step"]) * config.rows_per_step
        if rows != expected:
            raise UserError(f"{path}: rows_consumed is {rows:,}, expected {expected:,} after its steps; {ADVICE}")
    return checkpoint


@dataclass(frozen=True)
class Found:
    """The checkpoint that --resume or a command asks for."""

    path: Path | None = None  # None: there is no checkpoint
    checkpoint: dict | None = None
    damaged: dict[Path, str] = field(default_factory=dict)  # skipped file -> a line that says why
    skipped: Sequence[str] = ()  # lines about the mirror
    downloaded: Path | None = None  # from the mirror, a temporary file for `path`


def find_checkpoint(which: str, folder: Path) -> Found:
    """Find and verify the checkpoint that "latest", "auto", a word of NAMED or a file name refers to.

    The name of another folder means its latest checkpoint. Only "auto" allows no checkpoint.
    """
    if which not in ("latest", "auto", *NAMED) and Path(which).is_dir():
        folder = Path(which)
        which = "latest"
    if which not in ("latest", "auto"):
        path = folder / NAMED[which] if which in NAMED else Path(which)
        if which in NAMED and checkpoint_files(folder) and not os.path.lexists(path):
            raise UserError(f"{path}: not there: {NOT_YET[which]}. Try latest")
        return Found(path, read_checkpoint(path))
    damaged: dict[Path, str] = {}
    foreign: list[NotOurs] = []
    for file in scan(folder):
        try:
            return Found(file.path, read_checkpoint(file.path), damaged)
        except (Unreadable, OtherVersion):
            raise
        except UserError as error:
            if isinstance(error, NotOurs):
                foreign.append(error)
            step = f", step {file.head.step:,}" if file.head else ""
            damaged[file.path] = f"{file.path}{step}: {str(error).removeprefix(f'{file.path}: ')}"
    if foreign and len(foreign) == len(damaged):
        raise foreign[0]
    if damaged:
        files = "; ".join(damaged.values())
        raise UserError(f"{folder}: all checkpoints are corrupt: {files}. Restore a copy, or resume with --mirror")
    if which == "auto":
        return Found()
    raise no_checkpoints(folder)


def aside(path: Path) -> Path:
    """Return an unused name for a damaged file, so that it is kept but not taken for a checkpoint."""
    return path.with_name(f"{path.name}.skipped-{datetime.now():%Y%m%d-%H%M%S-%f}")
