"""Token shards on disk -> an endless, shuffled, resumable stream of rows -> batches on the device.

The data order is a pure function of (seed, position): a *row* is context_length + 1 consecutive tokens of one shard,
an epoch is every row of every shard once, and any position of the stream is reached in O(1). So the only thing to
remember of the loader is how many rows were consumed, and the rows of a step do not depend on the number of ranks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from steadygpt.cli import UserError
from steadygpt.shards import Shard

if TYPE_CHECKING:
    import torch

READ_AT_ONCE = 2**18  # tokens
PLACES = 4096  # rows whose places in the shards are drawn at once, at most

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
