"""Token shards: file formats, the manifest, and the checks before training."""

import hashlib
import os
import re
import resource
import shlex
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypedDict

import numpy as np
from msgspec import Meta

from steadygpt.base.durable import sha256_of
from steadygpt.base.foreign import what_it_is
from steadygpt.base.options import OptionError, RankError, UserError
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import command
from steadygpt.base.typed import Count, FileName, read_json, typed

TEXTS = (".txt", ".md", ".jsonl", ".parquet", ".csv")  # suffixes of files that users may pass as shards
DEFAULT_FOLDER = Path("data", "edu_fineweb10B")  # of train.py, and of prepare_dataset.py without --source
MANIFEST = "manifest.json"
SAMPLES = 16  # places in a shard of other tools
SAMPLE_TOKENS = 1024  # tokens at each place
NO_MANIFEST = "so it is not a manifest; prepare the data again"
# Files of llm.c and modded-nanogpt begin with 256 int32: magic number, version, token count. The magic number implies
# the dtype.
LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES: dict[int, np.dtype] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}


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


@cache  # computed at the first use, because importing must have no effect
def most_mapped() -> int:
    """Return how many shards may be mapped at once; each keeps a file open."""
    return most_open_files() // 2


class ShardEntry(TypedDict):
    """A shard in the manifest."""

    file: FileName
    split: Annotated[str, Meta(pattern=r"^(train|val)\Z")]
    tokens: Count
    sha256: str


class _Manifest(TypedDict):  # the keys that training reads
    complete: bool
    tokenizer: str
    vocab_size: Count
    shards: list[ShardEntry]


class Header(NamedTuple):
    """The header of a file of token ids."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype


@dataclass(frozen=True, eq=False)  # the cache of tokens() tells shards apart by object identity
class Shard:
    """One file of token ids."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first token; 0 without a header
    num_tokens: int

    def tokens(self) -> np.ndarray:
        """Return the ids, mapped into memory, (num_tokens,)."""
        return _mapped()(self)[0]

    def map(self) -> tuple[np.ndarray, os.stat_result]:
        """Map the ids into memory, and return them with the state of their file."""
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if not self.num_tokens:  # mmap refuses an empty range
                return np.empty(0, self.dtype), stat
            mapped = np.memmap(file, self.dtype, mode="r", offset=self.offset, shape=(self.num_tokens,))
            # A view, because slicing a memmap costs more than copying a row.
            return mapped.view(np.ndarray), stat

    def check_unchanged(self) -> None:
        """Check that the mapped file has neither become shorter nor been written to.

        Reading past its end would kill the process (SIGBUS), and changed tokens would go unnoticed.
        """
        _, mapped = _mapped()(self)
        with suppress(OSError):  # a mapping stays intact when its file is deleted or replaced
            now = self.path.stat()
            if now.st_ino == mapped.st_ino and (now.st_size, now.st_mtime_ns) != (mapped.st_size, mapped.st_mtime_ns):
                change = "modified"
                if now.st_size != mapped.st_size:
                    change = f"found {now.st_size:,} bytes, expected {mapped.st_size:,}"
                raise RankError(
                    f"{self.path}: changed while the run reads it; {change}. Restore the file, then resume with "
                    "--resume latest"
                )


@cache
def _mapped() -> Callable[[Shard], tuple[np.ndarray, os.stat_result]]:
    """Return Shard.map() with a cache of the last most_mapped() shards."""
    return lru_cache(most_mapped())(Shard.map)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype of shards that can hold every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def headerless_dtype(path: Path, vocab_size: int) -> np.dtype:
    """Return token_dtype() for a file without a header, after a check that a sample of its ids has this width."""
    dtype = token_dtype(vocab_size)
    size = path.stat().st_size
    ids = np.memmap(path, dtype, mode="r", shape=(size // dtype.itemsize,)) if size else np.empty(0, dtype)
    # From all over the file, which may begin with padding; as many odd places as even ones.
    sample = ids[: len(ids) // 2 * 2].reshape(-1, 2)[:: max(1, len(ids) // 2**15)]
    is_wider = len(sample) and sample[:, 0].any() and (sample[:, 1] == 0).mean() > 0.9
    if size % dtype.itemsize or (sample >= vocab_size).any() or is_wider:
        raise UserError(
            f"{path}: {size:,} bytes without a header are not ids in {dtype.name}, which the vocabulary of "
            f"{vocab_size:,} implies. Name the tokenizer that wrote them with --tokenizer, or save them with "
            f"numpy.save('{path.with_suffix('')}', ids.astype('u4'))"
        )
    return dtype


def check_vocabulary(path: object, ids: np.ndarray, vocab_size: int, first: int | None = None) -> None:
    """Check that ids (n,) of a file are in the vocabulary; errors count positions from `first`, if it is not None."""
    is_bad = (ids < 0) | (ids >= vocab_size) if ids.dtype.kind == "i" else ids >= vocab_size
    if is_bad.any():
        at = int(is_bad.argmax())
        where = "" if first is None else f" at position {first + at:,}"
        raise UserError(
            f"{path}: holds token id {ids[at]}{where}, outside the vocabulary of {vocab_size:,}; name the tokenizer "
            "that wrote it with --tokenizer"
        )


def open_shard(path: Path) -> Shard:
    """Return the shard in a `.npy` file, an llm.c `.bin` file or a nanoGPT `.bin` file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = read_header(file, path.suffix)
            offset = file.tell()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a token shard") from error
    except Exception as error:  # NumPy's parser raises many types on arbitrary bytes
        reason = f"{error!r}".splitlines()[0]
        problem = what_it_is(path) or f"not a .npy file ({reason}); prepare or copy it again"
        raise UserError(f"{path}: {problem}") from error
    if header is None:  # a file of nanoGPT; ShardSet.for_vocab() sets the dtype
        problem = what_it_is(path)
        if path.name not in ("train.bin", "val.bin"):
            problem = problem or (
                f"no header of llm.c; expected its magic number {' or '.join(map(str, LLMC_DTYPES))}, or nanoGPT's "
                "file names train.bin and val.bin"
            )
        if problem:
            raise UserError(f"{path}: {problem}")
        return Shard(path, np.dtype("<u2"), 0, size // 2)
    shape, _, dtype = header
    if [*map(type, shape)] != [int] or dtype.kind not in "ui" or dtype.itemsize not in (2, 4):
        raise UserError(f"{path}: holds {dtype} of shape {shape}; expected one row of uint16 or uint32 token ids")
    expected = offset + shape[0] * dtype.itemsize
    if size != expected or shape[0] < 0:
        raise UserError(
            f"{path}: {size:,} bytes, but its header says {shape[0]:,} tokens ({expected:,} bytes); "
            "the file is damaged, prepare or copy it again"
        )
    return Shard(path, dtype, offset, shape[0])


def read_header(file: IO[bytes], suffix: str) -> Header | None:
    """Read the header of a `.npy` file or of llm.c's `.bin`, which leaves the file at its first value.

    Returns: None for a `.bin` without llm.c's header.
    """
    if suffix == ".npy":
        magic = file.read(8)
        if not magic.startswith(np.lib.format.MAGIC_PREFIX):
            raise UserError(
                f"{file.name}: not a .npy file; found {magic!r}, expected its header. If it holds only ids, name it "
                ".bin (train.bin or val.bin for training); or copy it again"
            )
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        return Header(*readers[magic[6], magic[7]](file))
    header = file.read(LLMC_HEADER_BYTES)
    if len(header) < LLMC_HEADER_BYTES:
        return None
    magic, _, num_tokens = np.frombuffer(header[:12], "<i4").tolist()
    return Header((num_tokens,), False, LLMC_DTYPES[magic]) if magic in LLMC_DTYPES else None


def read_manifest(data_dir: Path) -> dict | None:
    """Read the manifest that prepare_dataset.py wrote; return None for shards of other tools."""
    path = data_dir / MANIFEST
    if not path.exists():
        return None
    manifest = read_json(path, dict, NO_MANIFEST)
    if not typed(manifest, _Manifest, path, NO_MANIFEST)["complete"]:
        raise UserError(
            f"{data_dir}: its preparation was interrupted; run the same prepare_dataset.py command again to resume it"
        )
    return manifest


def shard_files(data_dir: Path, split: str) -> list[Path]:
    """Return the files of a folder that are named as shards of a split, "train" or "val", sorted by name.

    Raises: UserError if a name contains both splits.
    """
    found = []
    for file in sorted(data_dir.glob("*")) if data_dir.is_dir() else []:
        words = re.split(r"[_.-]", file.name)
        if file.suffix in (".npy", ".bin") and split in words:
            if {"train", "val"} <= {*words}:
                raise UserError(f"{file}: its name says train and val; expected one of them. Rename it")
            found.append(file)
    return found


def distinct_files(files: Sequence[Path]) -> list[Path]:
    """Return each file under its first name only; a broken link stays, so that opening it reports the link."""
    first_of: dict[tuple[int, int], Path] = {}
    for file in files:
        stat = file.stat() if file.exists() else file.lstat()
        first_of.setdefault((stat.st_dev, stat.st_ino), file)
    return list(first_of.values())


@dataclass(frozen=True)
class ShardSet:
    """The shards of a split of a folder."""

    name: str  # of a source or a validation set
    folder: str
    split: str  # "train" or "val"
    shards: list[Shard]
    manifest: dict | None

    @classmethod
    def find(cls, name: str, folder: str, split: str) -> "ShardSet":
        """Find the shards in a folder, sorted by name; with a manifest, only those it lists."""
        data_dir = Path(folder)
        manifest = read_manifest(data_dir)
        files = shard_files(data_dir, split)
        listed: dict[str, int] = {}  # file name -> tokens, as the manifest says
        if manifest is not None:
            listed = {entry["file"]: entry["tokens"] for entry in manifest["shards"] if entry["split"] == split}
            missing = sorted(listed.keys() - {f.name for f in files})
            if missing:
                raise UserError(f"{data_dir / missing[0]}: missing, though {MANIFEST} lists it; prepare the data again")
            files = [f for f in files if f.name in listed]
        else:
            files = distinct_files(files)
        if not files:
            folder = shlex.quote(str(data_dir))
            arguments = "" if data_dir == DEFAULT_FOLDER else f" --source ... --out {folder}"
            if data_dir.suffix in TEXTS or any(path.suffix in TEXTS for path in data_dir.glob("*")):
                arguments = f" --source {folder}"
            prepare = command("prepare_dataset.py")
            stdlib = f"{prepare} --source stdlib --tokenizer bytes --out data/stdlib"
            no_val = "; or train without validation: --eval_freq 0" if split == "val" else ""
            raise UserError(
                f"no {split} shards in {data_dir} (*_{split}_*.npy or *{split}*.bin); prepare some with "
                f"'{prepare}{arguments}', or without a download with '{stdlib}' and --data_dir "
                f"data/stdlib{no_val}"
            )
        shards = [open_shard(f) for f in files]
        for shard in shards:
            expected = listed.get(shard.path.name, shard.num_tokens)
            if shard.num_tokens != expected:
                raise UserError(
                    f"{shard.path}: {shard.num_tokens:,} tokens, but {MANIFEST} says {expected:,}; "
                    "prepare the data again"
                )
        return cls(name, folder, split, shards, manifest)

    def for_vocab(self, vocab_size: int) -> "ShardSet":
        """Return this set with the dtype that the vocabulary implies for the files without a header."""

        def sized(shard: Shard) -> Shard:
            dtype = headerless_dtype(shard.path, vocab_size)
            return replace(shard, dtype=dtype, num_tokens=shard.path.stat().st_size // dtype.itemsize)

        shards = [shard if shard.offset or not shard.num_tokens else sized(shard) for shard in self.shards]
        return replace(self, shards=shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file that the manifest lists."""
        return {entry["file"]: entry["sha256"] for entry in self.manifest["shards"]} if self.manifest else {}

    def digest(self) -> str:
        """Return the SHA-256 of this set: over its files' sums in the manifest, or else over samples of the files."""
        sums = self.digests
        descriptions = [sums[shard.path.name] if sums else sample_of(shard) for shard in self.shards]
        return hashlib.sha256("\n".join(descriptions).encode()).hexdigest()

    def check(self, vocab_size: int, known: Collection[tuple[str, int, int]] = ()) -> list[tuple[str, int, int]]:
        """Read every shard; verify its checksum in the manifest, and that each token is in the vocabulary.

        Args:
            known: stamps of files that are not read again.

        Returns: the stamp of each shard.
        """
        digests = self.digests

        def check_shard(shard: Shard) -> tuple[str, int, int]:
            name_size_time = stamp(shard.path)
            if name_size_time in known:
                return name_size_time
            expected = digests.get(shard.path.name)
            digest = sha256_of(shard.path) if expected else expected
            if digest != expected:
                raise UserError(
                    f"{shard.path}: SHA-256 {digest:.12}..., but {MANIFEST} says {expected:.12}...; "
                    "the file is damaged, prepare or copy it again"
                )
            for start in range(0, shard.num_tokens, 2**24):
                check_vocabulary(shard.path, shard.tokens()[start : start + 2**24], vocab_size, start)
            return name_size_time

        with ThreadPoolExecutor() as pool:
            stamps = pool.map(check_shard, self.shards)
            # The delay hides the bar when the check is quick.
            bar = ProgressBar(iterable=stamps, total=len(self.shards), desc="checking shards", unit="shard", delay=3)
            return [*bar]


def sample_of(shard: Shard) -> str:
    """Describe a shard by its size and by some of its tokens."""
    tokens = shard.tokens()
    places = np.linspace(0, max(0, shard.num_tokens - SAMPLE_TOKENS), SAMPLES, dtype=int)
    sample = b"".join(tokens[at : at + SAMPLE_TOKENS].tobytes() for at in places)
    return f"{shard.path.name}, {shard.num_tokens} in {shard.dtype}: {hashlib.sha256(sample).hexdigest()}"


def stamp(path: Path) -> tuple[str, int, int]:
    """Return the name, the size in bytes and the modification time (ns) of a file."""
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns


def parse_folders(option: str, text: str) -> dict[str, tuple[str, Fraction]]:
    """Return name -> (folder, weight) of "[NAME=]FOLDER[:WEIGHT],..."; without NAME, it is the last part of the path.

    Args:
        option: "mix" or "val", whose value the text is; val has no weights.
    """
    folders: dict[str, tuple[str, Fraction]] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, folder_and_weight = item.rpartition("=")
        parts = folder_and_weight.rsplit(":", 1) if option == "mix" else [folder_and_weight]
        folder, weight = map(str.strip, (*parts, "1")[:2])
        if not equals:
            name = Path(folder).absolute().name
        if not re.fullmatch(r"[\w.-]+", name) or not folder:
            form = "[NAME=]FOLDER[:WEIGHT]" if option == "mix" else "[NAME=]FOLDER"
            expected = f"{form}, the name in letters, digits, dots, - and _: "
            expected += (re.sub(r"[^\w.-]+", "_", name) or "web") + "=" + (folder_and_weight or "data/web")
            raise OptionError(option, repr(item), expected)
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?|\.\d{1,9}", weight) or not Fraction(weight):
            expected = "a number above 0 with at most nine digits, such as 7 or 0.25"
            raise OptionError(option, f"{item!r}, with the weight {weight!r}", expected)
        if name in folders:
            raise OptionError(option, f"two folders named {name}", "different names: NAME=FOLDER")
        folders[name] = folder, Fraction(weight)
    if text and not folders:
        raise OptionError(option, repr(text), "one folder or more")
    return folders
