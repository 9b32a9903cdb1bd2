"""Token shards on disk -> an endless, shuffled, resumable stream of rows -> batches on the device.

The data order is a pure function of (seed, position): a *row* is context_length + 1 consecutive tokens of one shard,
an epoch is every row of every shard once, and any position of the stream is reached in O(1). So the only thing to
remember of the loader is how many rows were consumed, and the rows of a step do not depend on the number of ranks.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:
    import torch

from durable import replace_file
from errors import UserError

MANIFEST = "manifest.json"
# What training needs of it.
MANIFEST_KINDS = {"complete": bool, "tokenizer": str, "vocab_size": int, "shards": list}
SHARD_KINDS = {"file": str, "split": str, "tokens": int, "sha256": str}
# llm.c's and modded-nanogpt's header is 256 int32: magic, version, token count. The magic tells the dtype.
LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
READ_AT_ONCE = 2**18  # tokens
PLACES = 4096  # rows whose places in the shards are drawn at once, at most

# ---------------------------------------------------------------------------------------------------------------------
# shards in and out


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


# ---------------------------------------------------------------------------------------------------------------------
# the order of the rows


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): scrambles uint64, the same on every platform for ever."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*parts: int) -> np.ndarray:
    """One uint64 (of shape (1,)) that depends on every part and on their order."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(part))
    return key


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where the key's pseudo-random permutation of range(n) sends each element of i (int64); O(1) an element.

    A Feistel network over the next power of 4, walked until it lands below n (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"). No table, and unlike NumPy's shuffles it stays the same from release to release.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    round_keys = [_mix(key + np.uint64(r)) for r in range(6)]
    x = i.astype(np.uint64)
    outside = np.ones(x.shape, bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        x[outside] = (left << half) | right
        outside = x >= np.uint64(n)
    return x.astype(np.int64)


class RowStream:
    """The endless stream of rows: position -> (context_length + 1) tokens.

    Args:
        shards: those with fewer than context_length + 1 tokens have no row and are passed over.
        seed: of both shuffles; the shards' order is drawn per epoch, the rows' per epoch and shard.

    Raises: UserError when no shard has a whole row.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        context_length: int,
        seed: int = 0,
        shuffle_shards: bool = False,
        shuffle_rows: bool = False,
    ):
        self.context_length, self.seed = context_length, seed
        self.shuffle_shards, self.shuffle_rows = shuffle_shards, shuffle_rows
        # As plain arrays: each slice of a memmap costs more than copying a row.
        self.tokens = [shard.tokens().view(np.ndarray) for shard in shards if shard.num_tokens > context_length]
        self.num_rows = np.array([(len(tokens) - 1) // context_length for tokens in self.tokens], np.int64)
        self.rows_per_epoch = int(self.num_rows.sum())
        if not self.rows_per_epoch:
            raise UserError(
                f"{shards[0].path.parent}: no shard has {context_length + 1:,} tokens, one row of --context_length "
                f"{context_length:,} and its last target; the longest has {max(s.num_tokens for s in shards):,}"
            )
        self._epoch_plan = lru_cache(maxsize=2)(self._epoch_plan)
        self.block = min(PLACES, self.rows_per_epoch)
        self._places = lru_cache(maxsize=2)(self._places)

    def _epoch_plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of the shards, and how many rows come before the end of each."""
        order = np.arange(len(self.tokens))
        if self.shuffle_shards:
            order = permute(order, len(order), _key(self.seed, epoch))
        return order, self.num_rows[order].cumsum()

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(shard, row in the shard) of each position (n,) int64 of the stream."""
        shard, row = np.empty_like(positions), np.empty_like(positions)
        epochs, within = np.divmod(positions, self.rows_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order, ends = self._epoch_plan(int(epoch))
            place = np.searchsorted(ends, within[here], side="right")
            shard[here] = order[place]
            row[here] = within[here] - (ends - self.num_rows[order])[place]
            for s in np.unique(shard[here]) if self.shuffle_rows else ():
                of_shard = here & (shard == s)
                row[of_shard] = permute(row[of_shard], int(self.num_rows[s]), _key(self.seed, int(epoch), int(s)))
        return shard, row

    def _places(self, number: int) -> list[tuple[int, int]]:
        """(shard, first token) of one block of rows: drawing the order of many at once costs little."""
        shard, row = self.locate(np.arange(number * self.block, (number + 1) * self.block))
        return list(zip(shard.tolist(), (row * self.context_length).tolist(), strict=True))

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens of rows start, start + 1, ... of the stream, (count, context_length + 1) int64."""
        T, rows, filled = self.context_length, np.empty((count, self.context_length + 1), np.int64), 0
        while filled < count:
            number, within = divmod(start + filled, self.block)
            for s, first in self._places(number)[within : within + count - filled]:
                rows[filled] = self.tokens[s][first : first + T + 1]
                filled += 1
        return rows


class BatchLoader:
    """Micro-batches of one rank, read ahead on a thread into pinned memory.

    Micro-batch m of the run's ranks takes rows [m * world_size * mini_batch_size, ...) after start_row, the ranks side
    by side, so the rows of a step are the same set for any number of ranks.
    """

    def __init__(
        self,
        stream: RowStream,
        mini_batch_size: int,
        start_row: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: "torch.device | str" = "cpu",
    ):
        import torch  # here, since prepare_dataset.py does without it

        self.stream, self.mini_batch_size, self.device = stream, mini_batch_size, torch.device(device)
        self.next_row = start_row + rank * mini_batch_size
        self.stride = world_size * mini_batch_size
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        # Several micro-batches at a time: waking the thread takes longer than reading a small one.
        self.at_once = min(32, max(1, READ_AT_ONCE // (mini_batch_size * stream.context_length)))
        self.ready: deque[torch.Tensor] = deque()
        self.pending: deque[Future] = deque()
        for _ in range(2):
            self._submit()

    def _submit(self) -> None:
        starts = range(self.next_row, self.next_row + self.at_once * self.stride, self.stride)
        self.pending.append(self.pool.submit(lambda: [self._read(start) for start in starts]))
        self.next_row = starts.stop

    def _read(self, start: int) -> "torch.Tensor":
        import torch

        rows = torch.from_numpy(self.stream.read(start, self.mini_batch_size))
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def next(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """The next micro-batch on the device: inputs and targets, each (mini_batch_size, context_length) int64."""
        if not self.ready:
            self._submit()
            self.ready.extend(self.pending.popleft().result())
        rows = self.ready.popleft().to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
