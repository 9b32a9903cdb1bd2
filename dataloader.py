"""Token shards as an endless, shuffled, resumable stream of rows, and as batches on the device.

The data order is a pure function of (seed, position). A *row* is context_length + 1 consecutive tokens of one shard, an
epoch is every row of every shard once, and any position is reached in O(1). A resume therefore needs only the number
of rows consumed, and the rows of a step do not depend on the number of ranks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.data.shards import MANIFEST, Shard, find_shards, read_manifest, shard_files
from steadygpt.data.tokenizer import TOKENIZER_JSON, TokenizerRecord, record_named, vocab_size_of

READ_TOKENS = 2**18  # tokens that the thread reads at a time
BLOCK_ROWS = 4096  # rows located at a time: one row alone costs nearly as much

# ---------------------------------------------------------------------------------------------------------------------
# the order of the rows


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(*parts: int) -> np.ndarray:
    """Hash the parts, in this order, to a (1,) uint64."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key + np.uint64(0x9E3779B97F4A7C15) + np.uint64(part))
    return key


def permute(i: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Apply the pseudo-random permutation of range(n) that the key selects to i (int64), in O(1) per element.

    A Feistel network over the next power of 4, repeated until the result is below n (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains"). Unlike NumPy's shuffles, it needs no table and never changes between releases.
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
    """The endless stream of rows.

    Args:
        shards: shards with fewer than context_length + 1 tokens have no row and are skipped. Without any shard, of data
            that is not prepared yet, the stream has no rows.
        seed: of both shuffles; the order of the shards is drawn for each epoch, that of the rows for each shard too.
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
        # Plain arrays, because slicing a memmap costs more than copying a row.
        self.tokens = [shard.tokens().view(np.ndarray) for shard in shards if shard.num_tokens > context_length]
        self.num_rows = np.array([(len(tokens) - 1) // context_length for tokens in self.tokens], np.int64)
        self.rows_per_epoch = int(self.num_rows.sum())
        if shards and not self.rows_per_epoch:
            raise UserError(
                f"{shards[0].path.parent}: no shard has {context_length + 1:,} tokens, one row of --context_length "
                f"{context_length:,} and its last target; the longest has {max(s.num_tokens for s in shards):,}"
            )
        self.block_rows = min(BLOCK_ROWS, self.rows_per_epoch)
        self._block: tuple[int, list] = (-1, [])  # the block read last, see _locate_block

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and the rows within them of positions (n,) in the stream, each (n,) int64."""
        shard, row = np.empty_like(positions), np.empty_like(positions)
        epochs, within = np.divmod(positions, self.rows_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = np.arange(len(self.tokens))
            if self.shuffle_shards:
                order = permute(order, len(order), _key(self.seed, int(epoch)))
            ends = self.num_rows[order].cumsum()
            place = np.searchsorted(ends, within[here], side="right")
            shard[here] = order[place]
            row[here] = within[here] - (ends - self.num_rows[order])[place]
            for s in np.unique(shard[here]) if self.shuffle_rows else ():
                of_shard = here & (shard == s)
                row[of_shard] = permute(row[of_shard], int(self.num_rows[s]), _key(self.seed, int(epoch), int(s)))
        return shard, row

    def _locate_block(self, number: int) -> list[tuple[int, int]]:
        """Return (shard, first token) of each row of a block of block_rows rows; the last block stays in memory."""
        last, places = self._block
        if last != number:
            shard, row = self.locate(np.arange(number * self.block_rows, (number + 1) * self.block_rows))
            places = list(zip(shard.tolist(), (row * self.context_length).tolist(), strict=True))
            self._block = number, places
        return places

    def read(self, start: int, count: int) -> np.ndarray:
        """Read rows start, start + 1, ... of the stream: (count, context_length + 1) int64 tokens."""
        T, rows, filled = self.context_length, np.empty((count, self.context_length + 1), np.int64), 0
        while filled < count:
            number, within = divmod(start + filled, self.block_rows)
            for shard, first in self._locate_block(number)[within : within + count - filled]:
                rows[filled] = self.tokens[shard][first : first + T + 1]
                filled += 1
        return rows


# ---------------------------------------------------------------------------------------------------------------------
# the batches


class BatchLoader:
    """Micro-batches of one rank, read ahead by a thread into pinned memory.

    Micro-batch m of all ranks is the world_size * mini_batch_size rows from start_row + m * world_size *
    mini_batch_size on, split among the ranks in order, so a step has the same rows on any number of ranks.
    """

    def __init__(
        self,
        stream: RowStream,
        mini_batch_size: int,
        start_row: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.stream, self.mini_batch_size, self.device = stream, mini_batch_size, torch.device(device)
        self.next_row = start_row + rank * mini_batch_size
        self.stride = world_size * mini_batch_size
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        # The thread reads several small micro-batches at a time, because waking it takes longer than reading one.
        self.at_once = min(32, max(1, READ_TOKENS // (mini_batch_size * stream.context_length)))
        self.ready: deque[torch.Tensor] = deque()
        self.pending: deque[Future] = deque()
        for _ in range(2):
            self._submit()

    def _submit(self) -> None:
        starts = range(self.next_row, self.next_row + self.at_once * self.stride, self.stride)
        self.pending.append(self.pool.submit(lambda: [self._read(start) for start in starts]))
        self.next_row = starts.stop

    def _read(self, start: int) -> torch.Tensor:
        rows = torch.from_numpy(self.stream.read(start, self.mini_batch_size))
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next inputs and targets on the device, each (mini_batch_size, context_length) int64."""
        if not self.ready:
            self._submit()
            self.ready.extend(self.pending.popleft().result())
        rows = self.ready.popleft().to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """Stop reading ahead."""
        self.pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# the data of a run


@dataclass(frozen=True)
class Data:
    """The shards of a run and their rows, tokenizer and vocabulary."""

    train_shards: list[Shard]
    val_shards: list[Shard]
    train: RowStream
    val: RowStream | None
    manifest: dict | None
    tokenizer_record: TokenizerRecord
    vocab_size: int

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_record.tokenizer


def open_data(config: TrainConfig, saved: TokenizerRecord | None = None) -> Data:
    """Find the shards of a run and map them into memory. A plan of a known number of steps does without them.

    Args:
        saved: the tokenizer of the checkpoint that the run resumes from.
    """
    folder = Path(config.data_dir)
    manifest = read_manifest(folder)
    name = config.tokenizer
    if config.plans_without_data and manifest is None and not shard_files(folder, "train"):
        record = TokenizerRecord(name) if name.startswith("bpe:") else record_named("gpt2" if name == "auto" else name)
        stream = RowStream([], config.context_length)
        return Data([], [], stream, stream if config.eval_freq else None, None, record, vocab_size_of(record))
    try:
        train = find_shards(folder, "train", manifest)
    except UserError as error:
        if config.dry_run == "off" or config.resume:
            raise
        raise UserError(f"{error}. A plain --dry_run with --max_steps N needs no data") from error
    val = find_shards(folder, "val", manifest) if config.eval_freq else []
    if manifest is None:
        beside = folder / TOKENIZER_JSON
        record = saved or record_named(name if name != "auto" else str(beside) if beside.exists() else "gpt2")
    else:
        record = TokenizerRecord.of(manifest).with_json(folder)
        if not saved and name not in ("auto", record.tokenizer):
            raise UserError(f"--tokenizer is {name!r}; {folder} was prepared with {record.tokenizer!r}; drop the flag")
    vocab_size = manifest["vocab_size"] if manifest else vocab_size_of(record)
    # Other tokenizers are not checked, because loading them may require a network.
    if record.tokenizer in ("gpt2", "bytes") and vocab_size < vocab_size_of(record):
        raise UserError(
            f"{folder / MANIFEST}: vocab_size is {vocab_size:,}, but the tokenizer {record.tokenizer!r} has "
            f"{vocab_size_of(record):,}; prepare the data again"
        )
    return Data(
        train_shards=train,
        val_shards=val,
        train=RowStream(train, config.context_length, config.seed, config.shuffle_shards, config.shuffle_rows),
        val=RowStream(val, config.context_length) if val else None,
        manifest=manifest,
        tokenizer_record=record,
        vocab_size=vocab_size,
    )
