"""Token shards: file formats, the manifest, and the checks before training."""

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from steadygpt.cli import UserError
from steadygpt.durable import replace_file

MANIFEST = "manifest.json"
# What training needs of it.
MANIFEST_KINDS = {"complete": bool, "tokenizer": str, "vocab_size": int, "shards": list}
SHARD_KINDS = {"file": str, "split": str, "tokens": int, "sha256": str}
# llm.c's and modded-nanogpt's header is 256 int32: magic, version, token count. The magic tells the dtype.
LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes before the first token
    num_tokens: int

    def tokens(self) -> np.ndarray:
        """(num_tokens,) memory-mapped ids."""
        if not self.num_tokens:
            return np.empty(0, self.dtype)  # there is nothing to map
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.num_tokens,))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that shards of this vocabulary are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write ids (n,) as `.npy`, durably; returns the SHA-256 of the file in hex."""
    replace_file(path, lambda file: np.save(file, tokens, allow_pickle=False))
    return _sha256(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_shard(path: Path) -> Shard:
    """Read where the tokens of a `.npy`, a llm.c `.bin` or a nanoGPT `.bin` file are.

    Raises: UserError when the file is not whole or not a shard.
    """
    try:
        size, file = path.stat().st_size, open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a token shard") from error
    with file:
        if path.suffix == ".npy":
            try:
                version = np.lib.format.read_magic(file)
                read_header = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }
                shape, _, dtype = read_header[version](file)
            except Exception as error:  # what NumPy's parser raises on arbitrary bytes has no end
                reason = f"{error!r}".splitlines()[0]
                raise UserError(f"{path}: not a .npy file ({reason}); prepare or copy it again") from error
            if len(shape) != 1 or dtype.kind not in "ui" or dtype.itemsize not in (2, 4):
                raise UserError(
                    f"{path}: holds {dtype} of shape {shape}; expected one row of uint16 or uint32 token ids"
                )
            shard = Shard(path, dtype, file.tell(), shape[0])
        else:
            header = np.frombuffer(file.read(LLMC_HEADER_BYTES).ljust(LLMC_HEADER_BYTES, b"\0"), "<i4")
            if int(header[0]) in LLMC_DTYPES:
                shard = Shard(path, LLMC_DTYPES[int(header[0])], LLMC_HEADER_BYTES, int(header[2]))
            elif path.name in ("train.bin", "val.bin"):  # nanoGPT: nothing but uint16 tokens
                shard = Shard(path, np.dtype("<u2"), 0, size // 2)
                if size % 2:
                    raise UserError(f"{path}: {size} bytes is not a whole number of uint16 tokens; copy it again")
            else:
                raise UserError(
                    f"{path}: begins with {int(header[0])}; expected llm.c's magic number "
                    f"{' or '.join(map(str, LLMC_DTYPES))}, or nanoGPT's file names train.bin and val.bin"
                )
    expected = shard.offset + shard.num_tokens * shard.dtype.itemsize
    if size != expected or shard.num_tokens < 0:
        raise UserError(
            f"{path}: {size:,} bytes, but its header says {shard.num_tokens:,} tokens ({expected:,} bytes); "
            "the file is damaged, prepare or copy it again"
        )
    return shard


def read_manifest(data_dir: Path) -> dict | None:
    """What prepare_dataset.py wrote about its shards; None for shards from elsewhere.

    Raises: UserError when it cannot be read, or says that the preparation is not finished.
    """
    path = data_dir / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        complete = manifest["complete"]
        for entry, kinds in ((manifest, MANIFEST_KINDS), *((shard, SHARD_KINDS) for shard in manifest["shards"])):
            for key, kind in kinds.items():
                if not isinstance(entry[key], kind):
                    raise TypeError(f"{key} is {entry[key]!r}, expected {kind.__name__}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest ({error}); prepare the data again") from error
    if not complete:
        raise UserError(f"{data_dir}: its preparation was interrupted; run prepare_dataset.py again, it continues")
    return manifest


def find_shards(data_dir: Path, split: str) -> list[Shard]:
    """The shards of "train" or "val" in a folder, by name.

    Raises: UserError when there are none, one is damaged, or they are not the manifest's.
    """
    manifest = read_manifest(data_dir)
    files = sorted(data_dir.glob("*")) if data_dir.is_dir() else []
    files = [f for f in files if f.suffix in (".npy", ".bin") and split in re.split(r"[_.-]", f.name)]
    if manifest is not None:
        named = {entry["file"]: entry["tokens"] for entry in manifest["shards"] if entry["split"] == split}
        if missing := sorted(named.keys() - {f.name for f in files}):
            raise UserError(f"{data_dir / missing[0]}: missing, though {MANIFEST} lists it; prepare the data again")
        files = [f for f in files if f.name in named]
    if not files:
        without = ", or train without validation: --eval_freq 0" if split == "val" else ""
        raise UserError(
            f"no {split} shards in {data_dir} (*_{split}_*.npy or *{split}*.bin){without}; prepare some, for example "
            "with 'python prepare_dataset.py --source stdlib --tokenizer bytes --out data/stdlib' (no download), "
            "and name their folder with --data_dir"
        )
    shards = [open_shard(f) for f in files]
    for shard in shards if manifest is not None else []:
        if shard.num_tokens != named[shard.path.name]:
            raise UserError(
                f"{shard.path}: {shard.num_tokens:,} tokens, but {MANIFEST} says {named[shard.path.name]:,}; "
                "prepare the data again"
            )
    return shards


def check_shards(
    shards: Sequence[Shard], manifest: dict | None, vocab_size: int, known: Sequence[list] = ()
) -> list[list]:
    """Read the shards through: the checksums are the manifest's, and no token is outside the vocabulary.

    Args:
        known: what an earlier call returned; a file of the same name, size and time as then is not read again.

    Returns:
        Of each shard: [file name, bytes, modified at (ns), SHA-256 in hex].

    Raises: UserError naming the first bad file (and, of a bad token, its position).
    """
    digests = {entry["file"]: entry["sha256"] for entry in manifest["shards"]} if manifest else {}
    unchanged = {tuple(name_size_time): digest for *name_size_time, digest in known}

    def check(shard: Shard) -> list:
        stat = shard.path.stat()
        name_size_time = shard.path.name, stat.st_size, stat.st_mtime_ns
        if digest := unchanged.get(name_size_time):
            return [*name_size_time, digest]
        digest = _sha256(shard.path)
        if digest != digests.get(shard.path.name, digest):
            raise UserError(
                f"{shard.path}: SHA-256 {digest[:12]}..., but {MANIFEST} says {digests[shard.path.name][:12]}...; "
                "the file is damaged, prepare or copy it again"
            )
        tokens = shard.tokens()
        for start in range(0, len(tokens), 2**24):
            block = tokens[start : start + 2**24]
            if (block >= vocab_size).any() or (block.dtype.kind == "i" and (block < 0).any()):
                at = start + int(np.argmax((block >= vocab_size) | (block < 0)))
                raise UserError(
                    f"{shard.path}: token {at:,} is {tokens[at]}, outside the vocabulary of {vocab_size:,}; "
                    "was it written with another --tokenizer?"
                )
        return [*name_size_time, digest]

    # Shown only when it takes longer than anyone waits for without asking.
    with ThreadPoolExecutor() as pool, tqdm(desc="checking shards", total=len(shards), unit="shard", delay=3) as bar:
        found = []
        for entry in pool.map(check, shards):
            found.append(entry)
            bar.update()
    return found
