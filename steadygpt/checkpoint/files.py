"""Checkpoint files: their names, content, verification and choice.

    latest.pt  latest_backup.pt     the last save, and the one before it
    rolling_step_XXXXXX.pt          the newest keep_checkpoints
    epoch_XXXXX.pt                  the end of an epoch: the newest keep_epochs, by default all
    stable.pt                       the last step before the cool-down of --schedule wsd
    best_model.pt                   the best validation loss so far

A file is torch.save of plain types and tensors, the same for any topology that it was trained on.
"""

import errno
import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from steadygpt.base.foreign import what_it_holds, what_it_is
from steadygpt.base.opening import open_to_read, regular
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.text import bytes_text
from steadygpt.base.typed import Count, Loss, typed
from steadygpt.checkpoint.evaluations import LaunchId, origin
from steadygpt.config import KEPT, GPTConfig, TrainConfig
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.machine.digests import check_digests
from steadygpt.machine.host import process_age_s

FORMAT_VERSION = 5
LATEST, BACKUP, BEST, STABLE = "latest.pt", "latest_backup.pt", "best_model.pt", "stable.pt"
NAMED = {"best": BEST, "stable": STABLE}  # what commands take besides latest and files
ROLLING, EPOCH = "rolling_step_{:06d}.pt", "epoch_{:05d}.pt"
NOT_OURS = "not a checkpoint of SteadyGPT; convert_hf.py reads those of nanoGPT and Hugging Face"
ADVICE = "take another checkpoint, or the version of SteadyGPT that wrote it"
MOST_PARTS = 2**12  # of a tuple
LARGEST_PICKLE = 2**26  # bytes of what a file holds besides tensors, such as a tokenizer.json
CONTAINERS = (b"}", b"]", b")")  # the codes that make an empty one; a text may have these bytes too
MOST_CONTAINERS = 2**22
Format = Annotated[int, FORMAT_VERSION, FORMAT_VERSION]

# What the first launch decides where the options leave it open. With --deterministic also mini_batch_size.
DECIDED = ("precision", "total_batch_size", "warmup_steps", "tokenizer", "vocab_size")
# What weights hold that no run can resume from.
WITHOUT_RUN = {
    "optimizer": {},
    "scaler": {},
    "lr": 0.0,
    "epoch": 0.0,
    "launches": [],
    "data_fingerprint": {},
    "digests": {},
}


class FirstStep(TypedDict):
    """Where a launch began."""

    id: LaunchId  # of the launch, random
    step: Count  # the first one of the launch


class Launch(FirstStep):
    """What one launch of a run trained on, and how."""

    row: Count  # of the first step
    options: dict[str, Any]  # of KEPT, as they were asked for
    decisions: dict[str, Any]  # the values of DECIDED that hold in their place
    sources: dict[str, tuple[str, str]]  # name -> folder, identity of the shards
    val_sets: dict[str, tuple[str, str]]  # the same; the first one stays the first one
    shares: dict[str, Count]  # identity -> rows of BLOCK_ROWS
    given: dict[str, Count]  # identity -> rows of the source before this launch, also of sources that now give none
    ranks: Annotated[int, 1, 2**20]
    threads: Annotated[int, 1, 2**12]
    device: str
    torch: str
    commit: str


class CheckpointContent(TypedDict):
    """The content of a checkpoint, besides TrainState and TokenizerRecord."""

    format_version: Format
    model: dict[str, Tensor]  # by name of the parameter, fp32
    model_config: dict[str, Any]  # of a GPTConfig
    optimizer: dict[str, dict[str, Tensor]]  # name of the parameter -> kind -> tensor; empty before the first step
    scaler: dict[str, float]  # the state of the loss scaler; empty without fp16
    lr: Loss  # of the last step
    epoch: Loss
    launches: list[Launch]  # of the run, this one last
    data_fingerprint: dict[str, list[tuple[str, int, int, str]]]  # see ShardSet.check
    saved_at: Annotated[float, 0, 2**41]  # seconds since 1970
    digests: dict[str, int]  # of the weights and the optimizer's state on the device that trained them


def config_of(entry: Launch) -> TrainConfig:
    """Return the configuration that a launch trained with, but for what belongs to a launch or a place."""
    return TrainConfig(**entry["options"] | entry["decisions"])


@dataclass
class TrainState:
    """Everything that changes during training, besides the model, the optimizer and the loss scaler."""

    step: Count = 0  # steps taken, skipped updates included
    rows_consumed: Count = 0
    best_val_loss: Loss | None = None
    val_loss: Loss | None = None  # of the last validation
    loss: Loss | None = None  # of the last step that was finite
    elapsed_s: Loss = 0.0  # wall-clock of the earlier launches of this run
    recent_losses: list[float] = field(default_factory=list)  # the last SPIKE_WINDOW finite losses
    bad_steps: Count = 0  # consecutive bad steps so far

    def total_s(self) -> float:
        """Return the wall-clock seconds of the run so far, over all launches."""
        return self.elapsed_s + process_age_s()


def named_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights and optimizer state by name; a tied head is one tensor under two names."""
    state = checkpoint["optimizer"].items()
    return checkpoint["model"] | {f"{name}.{kind}": t for name, kept in state for kind, t in kept.items()}


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


def check_tensors(checkpoint: dict, source: object, model: nn.Module, kept: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has the weights of a model and the state that its optimizer keeps, see state_shapes()."""
    found = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named_tensors(checkpoint).items()}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    if len(found) > len(checkpoint["model"]):  # otherwise it is older than the first update
        # --allow_changes may have changed muon_beta2.
        shapes |= {name: shape for name, shape in kept.items() if name in found or "mean_squares" not in name}
    for name in sorted(found.keys() | shapes.keys()):
        wanted = f"{shapes[name]} torch.float32" if name in shapes else "no such tensor"
        if found.setdefault(name, "missing") != wanted:
            raise UserError(f"{source}: {name} is {found[name]}; expected {wanted}. Try another checkpoint")


@dataclass(frozen=True, kw_only=True)
class Head:
    """What puts checkpoints in order, and what tables and mirrors show of them."""

    saved_at: Annotated[float, 0, 2**40]  # less than CheckpointContent allows, so that there is room for later ones
    step: Count
    origin: str = ""  # the id of the launch that took the step, see evaluations.origin()
    epoch: Loss | None = None
    loss: Loss | None = None
    val_loss: Loss | None = None
    format_version: Format = FORMAT_VERSION

    @property
    def order(self) -> tuple[float, int]:
        """Return what is larger for the newer of two checkpoints, and the same for copies of one save."""
        return self.saved_at, self.step


class File(NamedTuple):
    """A name of a checkpoint in a folder."""

    path: Path
    head: Head | None  # None: it cannot be read
    problem: str  # why not, or ""
    inode: int = 0
    size: int = 0  # in bytes

    @property
    def order(self) -> tuple[float, int]:
        """Return that of its head, or less than all others if it cannot be read."""
        return self.head.order if self.head else (0.0, -1)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the names of all checkpoints in a folder, without opening them."""
    files = [folder / LATEST, folder / STABLE, *folder.glob("rolling_step_*.pt")]
    files += [folder / BACKUP, *folder.glob("epoch_*.pt"), folder / BEST]
    return [file for file in files if os.path.lexists(file)]  # a link to nothing is a damaged checkpoint


def scan(folder: Path) -> list[File]:
    """Return all names of checkpoints in a folder, newest first by what each file contains; its date says nothing.

    A file without a readable head may be newer than all others. Where latest.pt has one, it comes after that, because
    every save replaces latest.pt. Names of one save are in the order of checkpoint_files().
    """
    files = []
    for path in checkpoint_files(folder):
        head, problem, inode, size = None, "", 0, 0
        try:
            stat = path.stat()
            inode, size = stat.st_ino, stat.st_size
            head = _head(path, stat.st_dev, inode, size, stat.st_mtime_ns)
        except (UserError, OSError) as error:
            if not os.path.lexists(path):  # training has deleted it meanwhile
                continue
            problem = str(error).removeprefix(f"{path}: ")
        files.append(File(path, head, problem, inode, size))
    latest = next((file.order for file in files if file.head and file.path.name == LATEST), (math.inf, 0))
    return sorted(files, key=lambda file: (file.order if file.head else latest, bool(file.head)), reverse=True)


def too_old(orders: Mapping[str, tuple[float, int]], keep: int, keep_epochs: int) -> list[str]:
    """Return the names of rolling checkpoints and epochs that are not among the newest of so many; 0 keeps all."""
    names: list[str] = []
    for tier, count in {"rolling": keep, "epoch": keep_epochs}.items():
        newest_first = sorted((name for name in orders if name.startswith(tier)), key=orders.__getitem__, reverse=True)
        names += newest_first[count:] if count else []
    return names


def no_checkpoints(folder: Path) -> UserError:
    """Return the error of a folder without checkpoints, which names the subfolder that has the newest ones."""
    there = [(file.order, file.path.parent) for subfolder in folder.glob("*/") for file in scan(subfolder)]
    found = f"--checkpoint_dir {max(there)[1]}" if there else "another --checkpoint_dir"
    return UserError(f"no checkpoints in {folder}; try {found}")


def check_folder(folder: Path, resumed_from: Path | None) -> None:
    """Check that a run may write its checkpoints into a folder."""
    there = checkpoint_files(folder)
    if there and (resumed_from is None or not resumed_from.parent.samefile(folder)):
        advice = "resume from them with --resume latest, or use another --checkpoint_dir"
        raise UserError(f"{folder} already holds checkpoints; {advice}")


def open_checkpoint(which: str, folder: Path) -> tuple[Path, dict]:
    """Return the checkpoint that a command asks for: "latest", "best", "stable", "average:N", a file or a folder."""
    if number := re.fullmatch(r"average:([1-9]\d{0,5})", which):
        return folder / which, average(folder, int(number[1]))
    found = find_checkpoint(which, folder)
    for line in found.damaged.values():
        say(f"warning: skipped {line}")
    if not (found.path and found.checkpoint):  # which only "auto" accepts
        raise no_checkpoints(folder)
    return found.path, found.checkpoint


def average(folder: Path, count: int) -> dict:
    """Return the mean of the weights of the newest rolling checkpoints, taken in fp64; no run resumes from it."""
    rolling = (file for file in scan(folder) if file.path.name.startswith("rolling"))
    contents = [content for _, content in islice(intact_checkpoints(rolling), count)]
    if len(contents) < count:
        found = f"found {len(contents)} intact rolling checkpoints in {folder}"
        raise UserError(f"average:{count}: {found}, expected {count}; give a smaller number")
    names = contents[0]["model"]
    model = {name: (sum(content["model"][name].double() for content in contents) / count).float() for name in names}
    if contents[0]["model_config"]["tied_head"]:
        model["lm_head.weight"] = model["wte.weight"]
    return contents[0] | WITHOUT_RUN | {"model": model}


def intact_checkpoints(files: Iterable[File]) -> Iterator[tuple[Path, dict]]:
    """Yield each intact save once, of whatever names. Skipped files are named on stderr."""
    seen = set()
    for file in files:
        if file.order in seen:
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


class Unreadable(UserError):
    """A file cannot be read at this moment; it may be intact."""


class _Parts(tuple):
    """A tuple of a pickle, and how many parts it stands for: those of a tuple that it holds twice count twice."""

    size = 1


def _bounded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a step of an unpickler that makes a tuple, with a limit to its parts.

    A key is hashed part by part, and a thousand bytes can stand for a tuple of 2**60 parts.
    """

    def load_tuple(self: Any) -> None:
        load(self)
        parts = _Parts(self.stack[-1])
        parts.size = sum(getattr(part, "size", 1) for part in parts)
        if parts.size > MOST_PARTS:
            raise ValueError(f"a tuple of {parts.size:,} parts")
        self.stack[-1] = parts

    return load_tuple


class _Plain(pickle._Unpickler):
    """Puts an empty dictionary in the place of each tensor, and of all else that would run code of the file.

    In Python, because pickle's C code lets five bytes of a file allocate 64 GB (Python 3.13).
    """

    def find_class(self, module: str, name: str) -> type:
        return type("StandIn", (dict,), {"__init__": lambda *_: None})

    def persistent_load(self, storage: object) -> None: ...

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[code[0]] = _bounded(dispatch[code[0]])


class Lineage(TypedDict):
    """The part of a checkpoint's content that identifies its weights."""

    step: Count
    launches: list[FirstStep]


def read_head(path: Path) -> Head:
    """Return the head of a file without reading its tensors."""
    content = load_verified(path, only_plain=True)
    head = typed(content, Head, path, ADVICE)
    lineage = typed(content, Lineage, path, ADVICE)
    return replace(head, origin=origin(lineage["launches"], head.step))


# Reads a file only once, because thousands of files take seconds.
_head = lru_cache(maxsize=2**14)(lambda path, *identity: read_head(path))


def load_verified(path: Path, only_plain: bool = False) -> object:
    """Return what torch.save wrote to a file, after verifying its checksums; no code in it is run.

    With only_plain, tensors are neither read nor verified.
    """
    try:
        with open_to_read(path) as file, zipfile.ZipFile(file) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            member = archive.getinfo(name)
            if member.file_size > LARGEST_PICKLE or member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed, or larger than {bytes_text(LARGEST_PICKLE)}")
            pickled = archive.read(name)
            if sum(map(pickled.count, CONTAINERS)) > MOST_CONTAINERS:
                raise ValueError(f"{name} has more than {MOST_CONTAINERS:,} containers")
            plain = _Plain(io.BytesIO(pickled)).load()
            if only_plain:
                return plain
            if bad := archive.testzip():  # torch.load does not verify the checksums
                raise zipfile.BadZipFile(f"checksum of record {bad}")
        return torch.load(regular(path), map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; try another --checkpoint_dir") from None
    except Exception as error:  # on arbitrary bytes a parser may raise anything, and the next file may be intact
        cause = error.__context__ if isinstance(error, zipfile.BadZipFile) else error  # zipfile replaces an OSError
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:  # which a wrong offset in the file causes
            problem = f"{path}: cannot be read ({cause.strerror or cause})"
            raise Unreadable(f"{problem}; fix the disk or the permissions, or give an older file") from error
        is_code = isinstance(error, pickle.UnpicklingError)
        reason = (
            "more than tensors and plain types" if is_code else str(error).partition("\n")[0] or type(error).__name__
        )
        raise UserError(f"{path}: {what_it_is(path) or f'corrupt ({reason})'}") from error


def as_checkpoint(content: Any, path: Path) -> dict:
    """Return the content of a file, which must be a checkpoint of this format."""
    if isinstance(content, dict) and "format_version" not in content:
        raise UserError(f"{path}: {what_it_holds(content, path) or what_it_is(path) or NOT_OURS}")
    read = partial(typed, content, name=path, advice=ADVICE)
    found = read(CheckpointContent) | vars(read(TrainState)) | read(TokenizerRecord)._asdict()
    shape = typed(found["model_config"], GPTConfig, f"{path}: model_config", ADVICE)
    if unknown := found["model_config"].keys() - vars(shape).keys():
        raise UserError(f"{path}: model_config has {min(unknown)!r}, unknown to this version; update SteadyGPT")
    found["model_config"] = vars(shape)
    try:
        shape.check_shape()
        check_numbers(found)
        check_digests(named_tensors(found), found["digests"])
    except UserError as error:
        raise UserError(f"{path}: corrupt ({error})") from None
    rows = found["rows_consumed"]
    expected = rows
    for entry in found["launches"]:
        name = f"{path}: options at step {entry['step']:,}"
        # Options that were added since the file was written have their defaults.
        asked = typed(entry["options"], TrainConfig, name, ADVICE)
        config = typed(entry["options"] | entry["decisions"], TrainConfig, name, ADVICE)
        entry["options"] = {name: getattr(asked, name) for name in KEPT}
        entry["decisions"] = {name: getattr(config, name) for name in vars(config) if name in entry["decisions"]}
        expected = entry["row"] + (found["step"] - entry["step"]) * config.rows_per_step
    if rows != expected:
        raise UserError(f"{path}: rows_consumed is {rows:,}, which does not fit its steps and launches; {ADVICE}")
    return found


@dataclass(frozen=True)
class Found:
    """The checkpoint that --resume or a command asks for."""

    path: Path | None = None  # None: there is none
    checkpoint: dict | None = None
    damaged: dict[Path, str] = field(default_factory=dict)  # files that were skipped: why
    skipped: Sequence[str] = ()  # lines about the mirror
    downloaded: Path | None = None  # from the mirror, under another name than `path`


def find_checkpoint(which: str, folder: Path) -> Found:
    """Find and verify the checkpoint that "latest", "auto", a word of NAMED or a file name refers to.

    The name of another folder means its latest checkpoint. Only "auto" accepts that there is none.
    """
    if which not in ("latest", "auto", *NAMED) and Path(which).is_dir():
        which, folder = "latest", Path(which)
    if which not in ("latest", "auto"):
        path = folder / NAMED[which] if which in NAMED else Path(which)
        return Found(path, read_checkpoint(path))
    damaged: dict[Path, str] = {}
    for file in scan(folder):
        try:
            return Found(file.path, read_checkpoint(file.path), damaged)
        except Unreadable:
            raise
        except UserError as error:
            step = f", step {file.head.step:,}" if file.head else ""
            damaged[file.path] = f"{file.path}{step}: {str(error).removeprefix(f'{file.path}: ')}"
    if damaged:
        files = "; ".join(damaged.values())
        raise UserError(f"{folder}: all checkpoints are corrupt: {files}. Restore a copy, or resume with --mirror")
    if which == "auto":
        return Found()
    raise no_checkpoints(folder)


def aside(path: Path) -> Path:
    """Return an unused name for a damaged file, so that it is kept but not taken for a checkpoint."""
    return path.with_name(f"{path.name}.skipped-{datetime.now():%Y%m%d-%H%M%S-%f}")
