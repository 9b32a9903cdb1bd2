"""Checkpoint files: their names, content, verification and choice.

    latest.pt  latest_backup.pt     the last save, and the one before it
    rolling_step_XXXXXX.pt          the newest keep_checkpoints
    epoch_XXXXX.pt                  the end of an epoch: the newest keep_epochs, by default all
    stable.pt                       the last step before the cool-down of --schedule wsd
    best_model.pt                   the best validation loss so far

A file is torch.save of plain types and tensors, the same for any topology that it was trained on.
"""

import dataclasses
import errno
import io
import math
import os
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from steadygpt.base.disk import check_pulled
from steadygpt.base.durable import check_regular
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.text import STAMP, counted
from steadygpt.base.typed import Count, Loss, parse_json, typed
from steadygpt.config import KEPT, GPTConfig, TrainConfig
from steadygpt.data.order import BLOCK_ROWS
from steadygpt.data.tokenizer import TokenizerRecord
from steadygpt.machine.host import process_age_s

FORMAT_VERSION = 4
LATEST, BACKUP, BEST, STABLE = "latest.pt", "latest_backup.pt", "best_model.pt", "stable.pt"
NAMED = {"best": BEST, "stable": STABLE}  # what commands take besides latest and files
ROLLING, EPOCH = "rolling_step_{:06d}.pt", "epoch_{:05d}.pt"
EVALUATIONS = "evaluations.json"
LLM_C = (20240326).to_bytes(4, "little")  # begins a model of llm.c
Evaluations = dict[int, dict[str, Loss | None]]  # step -> {"val_loss": ..., "val_bpb": ..., "hellaswag_acc": ...}

# ---------------------------------------------------------------------------------------------------------------------
# content


# What the first start decides where the options leave it open. With --deterministic also mini_batch_size.
DECIDED = ("precision", "total_batch_size", "warmup_steps", "tokenizer", "vocab_size")


class Entry(TypedDict):
    """What one start of a run trained on, and how."""

    id: Annotated[str, r"[0-9a-f]{16}"]  # of the start, random
    step: Count  # the first one of the start
    row: Count  # of the first step
    options: dict[str, Any]  # of KEPT, as they were asked for
    decisions: dict[str, Any]  # the values of DECIDED that hold in their place
    sources: dict[str, tuple[str, str]]  # name -> folder, identity of the shards
    val_sets: dict[str, tuple[str, str]]  # the same; the first one stays the first one
    shares: dict[str, Count]  # identity -> rows of BLOCK_ROWS
    given: dict[str, Count]  # identity -> rows of the source before this start, also of sources that now give none
    ranks: Annotated[int, 1, 2**20]
    threads: Annotated[int, 1, 2**12]
    device: str
    torch: str
    commit: str


class Group(TypedDict):
    """A group of parameters, by name."""

    params: list[str]
    lr: float


class Optimizer(TypedDict, total=False):
    """The state of an optimizer; empty before the first step, and with weights only."""

    state: dict[str, dict[str, torch.Tensor]]  # name of the parameter -> kind -> tensor
    param_groups: list[Group]


class Weights(TypedDict):
    """The content of every checkpoint, besides TrainState and TokenizerRecord."""

    format_version: int
    model: dict[str, torch.Tensor]  # by name of the parameter, fp32
    model_config: dict[str, Any]  # of a GPTConfig
    optimizer: Optimizer
    starts: list[Entry]  # of the run, this one last; none without a run
    torch_version: str
    saved_at: Annotated[float, 0, 2**33]  # seconds since 1970


class Scaler(TypedDict, total=False):
    """The state of the loss scaler; empty without fp16."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


class Course(TypedDict):
    """What the checkpoint of a run holds further: how the run has come here."""

    scaler: Scaler
    epoch: Loss
    world_size: Count
    data_fingerprint: dict[str, list[tuple[str, int, int, str]]]  # see ShardSet.check
    git_commit: str
    peak_memory_bytes: Count


def trained_with(entry: Entry) -> TrainConfig:
    """Return the configuration that a start trained with, but for what belongs to a launch or a place."""
    return TrainConfig(**entry["options"] | entry["decisions"])


@dataclass
class TrainState:
    """Everything that changes during training, besides the model, the optimizer and the loss scaler."""

    step: Count = 0  # steps taken, skipped updates included
    rows_consumed: Count = 0
    best_val_loss: Loss | None = None
    val_loss: Loss | None = None  # of the last validation
    loss: Loss | None = None  # of the last step that was finite
    elapsed_s: Loss = 0.0  # wall-clock of the earlier starts of this run
    recent_losses: list[float] = field(default_factory=list)  # the last SPIKE_WINDOW finite losses
    bad_steps: Count = 0  # consecutive bad steps so far

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any] | None) -> "TrainState":
        """Return the state that a checkpoint holds; without one, that of a new run."""
        return cls(**{f.name: checkpoint[f.name] for f in dataclasses.fields(cls)}) if checkpoint else cls()

    def total_s(self) -> float:
        """Return the wall-clock seconds of the run so far, over all starts."""
        return self.elapsed_s + process_age_s()


@dataclass(frozen=True)
class Captured:
    """The content of a checkpoint, whole on rank 0."""

    content: dict
    copied: torch.cuda.Event | None = None  # ends the copy of its tensors, if they are still on their way

    def wait(self) -> dict:
        """Return the content once all of its tensors are in host memory."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.content


def named_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights and optimizer state by name; a tied head is one tensor under two names."""
    state = checkpoint["optimizer"].get("state", {})
    return checkpoint["model"] | {f"{name}.{kind}": t for name, kept in state.items() for kind, t in kept.items()}


def check_numbers(checkpoint: Mapping[str, Any]) -> None:
    """Check that all tensors hold finite fp32 numbers, and that counts and mean squares are not negative."""
    for name, t in named_tensors(checkpoint).items():
        is_plain = t.device.type == "cpu" and not t.is_nested and t.layout == torch.strided
        if not (is_plain and t.dtype == torch.float32 and t.is_contiguous()):
            raise UserError(f"{name} has {t.dtype} numbers, or gaps between them")
        low, high = torch.aminmax(t) if t.numel() else (torch.zeros(()), torch.zeros(()))
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


# ---------------------------------------------------------------------------------------------------------------------
# reading


@dataclass(frozen=True, kw_only=True)
class Head:
    """What puts checkpoints in order, and what tables and mirrors show of them."""

    saved_at: Annotated[float, 0, 2**32]  # less than Weights allow, so that there is room for later ones
    step: Count
    epoch: Loss | None = None
    loss: Loss | None = None
    val_loss: Loss | None = None

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

    def skipped(self, error: object) -> str:
        """Return a line about a file that is not taken, with its step as far as it is known."""
        step = f", step {self.head.step:,}" if self.head else ""
        return f"{self.path}{step}: {str(error).removeprefix(f'{self.path}: ')}"


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the names of all checkpoints in a folder, without opening them."""
    files = [folder / LATEST, folder / BACKUP, folder / STABLE, folder / BEST]
    files += [*folder.glob("rolling_step_*.pt"), *folder.glob("epoch_*.pt")]
    return [file for file in files if os.path.lexists(file)]  # a link to nothing is a damaged checkpoint


def scan(folder: Path) -> list[File]:
    """Return all names of checkpoints in a folder, newest first by what each file contains; its date says nothing.

    A file without a readable head may be newer than all others. Where latest.pt has one, it comes after that, because
    every save replaces latest.pt.
    """
    files = []
    for path in checkpoint_files(folder):
        stat, head, problem = None, None, ""
        try:
            stat = path.stat()
            head = _head(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except (UserError, OSError) as error:
            if not os.path.lexists(path):  # training has deleted it meanwhile
                continue
            problem = str(getattr(error, "strerror", error)).removeprefix(f"{path}: ")
        files.append(File(path, head, problem, *((stat.st_ino, stat.st_size) if stat else ())))
    latest = next((file.order for file in files if file.head and file.path.name == LATEST), (math.inf, 0))

    def key(file: File) -> tuple:
        return file.order if file.head else latest, file.head is not None, file.path.name == LATEST, file.path.name

    return sorted(files, key=key, reverse=True)


def too_old(orders: Mapping[str, tuple[float, int]], keep: int, keep_epochs: int) -> list[str]:
    """Return the names of rolling checkpoints and epochs that are not among the newest of so many; 0 keeps all."""
    names: list[str] = []
    for tier, count in {"rolling": keep, "epoch": keep_epochs}.items():
        newest_first = sorted((name for name in orders if name.startswith(tier)), key=orders.__getitem__, reverse=True)
        names += newest_first[count:] if count else []
    return names


def no_checkpoints(folder: Path) -> UserError:
    """Return the error of a folder without checkpoints, which names the subfolder that has the newest ones."""
    there = [(file.order, file.path) for subfolder in folder.glob("*/") for file in scan(subfolder)]
    hint = f"--checkpoint_dir {max(there)[1].parent}" if there else "another --checkpoint_dir"
    if (folder / "config.json").exists():  # of a Hugging Face model
        hint = f"python convert_hf.py {folder} weights.pt, or train with --init_from {folder}"
    return UserError(f"no checkpoints in {folder}; try {hint}")


def check_folder(folder: Path, resumed_from: Path | None) -> None:
    """Check that a run may write its checkpoints into a folder."""
    there = checkpoint_files(folder)
    if there and (resumed_from is None or not resumed_from.parent.samefile(folder)):
        raise UserError(
            f"{folder} already holds checkpoints ({there[0].name} and {len(there) - 1} more); resume from them with "
            "--resume latest, or use another --checkpoint_dir"
        )


def open_checkpoint(which: str, folder: Path) -> tuple[Path, dict]:
    """Return the checkpoint that a command asks for: "latest", "best", "stable", "average:N", a file or a folder.

    Skipped files are named on stderr.
    """
    if number := re.fullmatch(r"average:([1-9]\d{0,5})", which):
        return folder / which, average(folder, int(number[1]))
    if which == "auto":
        raise UserError("checkpoint: auto is for training only; expected latest, best, stable or a checkpoint file")
    found = find_checkpoint(which, folder)
    assert found.path and found.checkpoint  # only "auto" finds none
    for line in found.damaged.values():
        say(f"warning: skipped {line}")
    return found.path, found.checkpoint


def average(folder: Path, count: int) -> dict:
    """Return the mean of the weights of the newest rolling checkpoints, taken in fp64; no run resumes from it."""
    rolling = (file for file in scan(folder) if file.path.name.startswith("rolling"))
    contents = [content for _, content in islice(intact_checkpoints(rolling), count)]
    if len(contents) < count:
        raise UserError(
            f"average:{count}: found {len(contents)} intact rolling checkpoints in {folder}, expected {count}; give "
            "a smaller number, or another --checkpoint_dir"
        )
    steps = sorted(content["step"] for content in contents)
    say(f"averaging {counted(count, 'checkpoint')}, of steps {steps[0]:,} to {steps[-1]:,}")
    names = contents[0]["model"]
    model = {name: (sum(content["model"][name].double() for content in contents) / count).float() for name in names}
    if contents[0]["model_config"]["tied_head"]:
        model["lm_head.weight"] = model["wte.weight"]
    return contents[0] | {"model": model, "optimizer": {}, "starts": []}


def nearest_checkpoint(folder: Path, step: int) -> tuple[Path, dict]:
    """Return the intact checkpoint of a folder whose step is nearest; of two, the earlier one."""

    def distance(file: File) -> tuple[int, int]:
        found = file.head.step if file.head else step  # first, so that intact_checkpoints says what is wrong
        return abs(found - step), found

    if nearest := next(intact_checkpoints(sorted(scan(folder), key=distance)), None):
        return nearest
    raise UserError(f"no intact checkpoint in {folder}; try another --checkpoint_dir")


def intact_checkpoints(files: Iterable[File]) -> Iterator[tuple[Path, dict]]:
    """Yield each intact save once, of whatever names. Skipped files are named on stderr."""
    seen = set()
    for file in files:
        if file.order in seen:
            continue
        try:
            content = read_checkpoint(file.path)
        except (UserError, OSError) as error:  # an OSError: training has deleted the file meanwhile
            say(f"warning: skipped {file.skipped(error)}")
            continue
        seen.add((content["saved_at"], content["step"]))
        yield file.path, content


def read_checkpoint(path: Path) -> dict:
    """Verify a checkpoint file and map it into memory; its tensors, all of them finite, are on the CPU."""
    return as_checkpoint(load_verified(path), path)


class Unreadable(UserError):
    """A file cannot be read at this moment; it may be intact."""


class _Plain(pickle.Unpickler):
    """Puts an empty dictionary in the place of each tensor, and of all else that would run code of the file."""

    def find_class(self, module: str, name: str) -> type:
        return type("StandIn", (dict,), {"__init__": lambda *_: None})

    def persistent_load(self, storage: object) -> None: ...


def read_head(path: Path) -> Head:
    """Return the head of a file without reading its tensors."""
    content = load_verified(path, only_plain=True)
    check_format(content, path)
    return typed(content, Head, path, "take another checkpoint")


@lru_cache(maxsize=2**14)
def _head(path: Path, *identity: int) -> Head:
    """Return read_head(), which reads a file only once: thousands of files take seconds."""
    return read_head(path)


def load_verified(path: Path, only_plain: bool = False) -> object:
    """Return what torch.save wrote to a file, after verifying its checksums; no code in it is run.

    With only_plain, tensors are neither read nor verified.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if only_plain:
                [plain] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return _Plain(io.BytesIO(archive.read(plain))).load()
            if bad := archive.testzip():  # torch.load does not verify the checksums
                raise UserError(f"{path}: corrupt (checksum of record {bad})")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; try another --checkpoint_dir") from None
    except (OSError, zipfile.BadZipFile) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # an OSError that zipfile has replaced
        if isinstance(cause, OSError) and cause.errno != errno.EINVAL:  # which a wrong offset in the file causes
            advice = "fix the disk or the permissions, then start again; or give an older file, such as --resume FILE"
            raise Unreadable(
                f"{path}: cannot be read ({cause.strerror or cause}); nothing was changed; {advice}"
            ) from error
        with open(path, "rb") as file:
            beginning = file.read(64)
        check_pulled(path, beginning)
        if path.suffix == ".safetensors":
            raise UserError(f"{path}: part of a Hugging Face folder; give the folder to convert_hf.py") from None
        if beginning.startswith(LLM_C):
            advice = "run llm.c's dev/eval/export_hf.py, and use the folder that it writes"
            raise UserError(f"{path}: a model of llm.c; expected a torch.save file. First {advice}") from None
        raise UserError(
            f"{path}: corrupt or not a checkpoint ({path.stat().st_size:,} bytes, not a complete torch.save file)"
        ) from None
    except pickle.UnpicklingError:
        advice = f"if it is build-nanogpt's, first run python convert_hf.py {path} weights.pt"
        raise UserError(f"{path}: holds more than tensors and plain types; it was not loaded; {advice}") from None
    except UserError:
        raise
    except Exception as error:  # on arbitrary bytes a parser may raise anything, and the next file may be intact
        raise UserError(f"{path}: corrupt or cannot be read ({f'{error!r}'.splitlines()[0]})") from error


def check_format(content: Any, path: Path) -> None:
    """Check that the content of a file is that of a checkpoint, and of this format."""
    content = content if isinstance(content, dict) else {}
    if "format_version" not in content:
        advice = "expected a file that train.py or convert_hf.py has written"
        if "model_args" in content:
            advice = f"if it is nanoGPT's, first run python convert_hf.py {path} weights.pt"
        elif content and all(isinstance(value, Tensor) for value in content.values()):
            advice = "its weights lack the model's shape; save them as nanoGPT does, with model and model_args"
        raise UserError(f"{path}: not a SteadyGPT checkpoint; {advice}")
    if (found := typed(content["format_version"], int, path, "take another checkpoint")) != FORMAT_VERSION:
        advice = "update SteadyGPT" if found > FORMAT_VERSION else "use the commit that wrote it, its git_commit"
        raise UserError(f"{path}: format {found}; expected {FORMAT_VERSION}: {advice}")


def as_checkpoint(content: Any, path: Path) -> dict:
    """Return the content of a file, which must be a checkpoint of this format."""
    check_format(content, path)
    advice = "take another checkpoint"
    found = typed(content, Weights, path, advice)
    found |= vars(typed(content, TrainState, path, advice)) | typed(content, TokenizerRecord, path, advice)._asdict()
    shape = typed(found["model_config"], GPTConfig, f"{path}: model_config", advice)
    if unknown := sorted(found["model_config"].keys() - vars(shape).keys()):
        raise UserError(f"{path}: model_config has {unknown[0]!r}, unknown to this version; update SteadyGPT")
    try:
        shape.check_shape()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    found["model_config"] = vars(shape)
    try:
        check_numbers(found)
    except UserError as error:
        raise UserError(f"{path}: corrupt ({error})") from None
    return found | _course_of(content, found, path, advice) if found["starts"] else found


def _course_of(content: dict, found: dict, path: Path, advice: str) -> Any:
    """Return the Course of a run, whose options, starts and progress must fit each other."""
    course, step, rows, expected = typed(content, Course, path, advice), found["step"], found["rows_consumed"], -1
    for entry in found["starts"]:
        decided = entry["decisions"]
        config = typed(entry["options"] | decided, TrainConfig, f"{path}: options at step {entry['step']:,}", advice)
        # Options that were added since the file was written have their defaults.
        asked = typed(entry["options"], TrainConfig, f"{path}: options at step {entry['step']:,}", advice)
        entry["options"] = {name: getattr(asked, name) for name in KEPT}
        entry["decisions"] = {name: getattr(config, name) for name in (*DECIDED, "mini_batch_size") if name in decided}
        shares, named = entry["shares"], {identity for _, identity in entry["sources"].values()}
        if not named <= shares.keys() <= entry["given"].keys() or sum(shares.values()) != BLOCK_ROWS:
            raise UserError(f"{path}: shares of the data at step {entry['step']:,} do not fit its sources; {advice}")
        expected = entry["row"] + (step - entry["step"]) * (config.total_batch_size // config.context_length)
    if rows != expected or step < found["starts"][-1]["step"]:
        raise UserError(f"{path}: rows_consumed is {rows:,} at step {step:,}, which does not fit its starts; {advice}")
    return course


@dataclass(frozen=True)
class Found:
    """The checkpoint that --resume or a command asks for."""

    path: Path | None = None  # None: there is none
    checkpoint: dict | None = None
    damaged: dict[Path, str] = field(default_factory=dict)  # files that were skipped: why
    skipped: Sequence[str] = ()  # lines about the mirror
    restored: bool = False  # from the mirror


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
            damaged[file.path] = file.skipped(error)
    if damaged:
        raise UserError(
            f"{folder}: all checkpoints are corrupt: {'; '.join(damaged.values())}; nothing was changed. "
            "Restore a copy, or resume with --mirror"
        )
    if which == "auto":
        return Found()
    raise no_checkpoints(folder)


def aside(path: Path) -> Path:
    """Return an unused name for a damaged file, so that it is kept but not taken for a checkpoint."""
    while os.path.lexists(unused := path.with_name(f"{path.name}.skipped-{time.strftime(STAMP)}")):
        time.sleep(0.1)
    return unused


def read_evaluations(name: object, read: Callable[[], bytes]) -> tuple[Evaluations, list[str]]:
    """Return the content of an evaluations.json, {} if there is none, and a warning if it cannot be read."""
    try:
        return parse_json(read(), Evaluations, name, "its validation losses are ignored"), []
    except FileNotFoundError:
        return {}, []
    except (UserError, OSError) as error:
        return {}, [str(error)]


def validation_of(
    evaluations: Mapping[Any, Mapping[str, float | None]], val_loss: float | None
) -> Mapping[str, float | None]:
    """Return the evaluation that found this validation loss; empty if there is none."""
    return next((scores for scores in evaluations.values() if scores.get("val_loss") == val_loss), {})
