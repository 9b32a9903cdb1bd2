"""Token shards as an endless, shuffled, resumable stream of rows, alone or mixed, and as batches on the device.

The data order is a pure function of (seed, position). A *row* is context_length + 1 consecutive tokens of one shard, an
epoch is every row of every shard once, and any position is reached in O(1). A resume therefore needs only the number
of rows consumed, and the rows of a step do not depend on the number of ranks. A mixture interleaves the streams of
several sources, each in its own order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from steadygpt.base.options import UserError
from steadygpt.data.order import BLOCK_ROWS, Phase, key_of, permute
from steadygpt.data.shards import Shard, most_mapped

READ_TOKENS = 2**18  # tokens that the thread reads at a time


@dataclass(frozen=True)
class Order:
    """The options that determine the order of a stream's rows."""

    seed: int = 0
    shuffle_shards: bool = False
    shuffle_rows: bool = False


IN_ORDER = Order()

# ---------------------------------------------------------------------------------------------------------------------
# the rows


class Rows:
    """An endless sequence of rows, located a block at a time: locating one row costs nearly as much as a block."""

    context_length: int
    shards: Sequence[Shard]
    block_rows = BLOCK_ROWS
    _block: tuple[int, np.ndarray] | None = None  # the last block: its number, shards and first tokens

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard index and first token of the rows at a block's positions, each (block_rows,) int64."""
        raise NotImplementedError

    def find(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return shard index and first token of rows start, start + 1, ..., each (count,) int64."""
        places = np.empty((2, count), np.int64)
        filled = 0
        while filled < count:
            number, first = divmod(start + filled, self.block_rows)
            block = self._block  # read once, because the thread of another loader may replace it
            if block is None or block[0] != number:
                positions = number * self.block_rows + np.arange(self.block_rows)
                block = (number, np.stack(self.locate(positions)))
                self._block = block
            rows = min(self.block_rows - first, count - filled)
            places[:, filled : filled + rows] = block[1][:, first : first + rows]
            filled += rows
        shards, firsts = places
        return shards, firsts

    def read(self, start: int, count: int) -> np.ndarray:
        """Read rows start, start + 1, ...: (count, context_length + 1) int64 tokens."""
        row_tokens = self.context_length + 1
        rows = np.empty((count, row_tokens), np.int64)
        shards, firsts = self.find(start, count)
        for number in set(shards.tolist()):
            self.shards[number].check_unchanged()
        for row, number, first in zip(rows, shards.tolist(), firsts.tolist(), strict=True):
            row[:] = self.shards[number].tokens()[first : first + row_tokens]
        return rows


@dataclass(eq=False)
class RowStream(Rows):
    """An endless stream of rows from shards."""

    shards: Sequence[Shard]  # at least one; shards with fewer than context_length + 1 tokens are skipped
    context_length: int
    order: Order = IN_ORDER

    def __post_init__(self):
        T = self.context_length
        longest = max(self.shards, key=lambda shard: shard.num_tokens)
        if longest.num_tokens <= T:
            raise UserError(
                f"{longest.path}: the longest shard of its split; found {longest.num_tokens:,} tokens, "
                f"expected {T + 1:,}, one row of --context_length {T:,} and its last target"
            )
        self.shards = [shard for shard in self.shards if shard.num_tokens > T]
        for shard in self.shards[: most_mapped()]:
            shard.tokens()  # map it now, so that the run can read it after it is deleted or replaced
        targets = np.array([shard.num_tokens - 1 for shard in self.shards], np.int64)
        self.num_rows = targets // T
        self.leftover = (targets % T).astype(np.uint64)  # tokens of each shard that are in no row of an epoch
        self.rows_per_epoch = int(self.num_rows.sum())

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard index and first token of the rows at ascending positions (n,), each (n,) int64."""
        seed = self.order.seed
        epochs = np.arange(positions[0] // self.rows_per_epoch, positions[-1] // self.rows_per_epoch + 1)[:, None]
        order = np.tile(np.arange(len(self.shards)), (len(epochs), 1))
        if self.order.shuffle_shards:
            order = permute(order, len(self.shards), key_of(seed, epochs))
        ends = (self.num_rows[order].cumsum(1) + epochs * self.rows_per_epoch).ravel()  # in the stream
        place = np.searchsorted(ends, positions, side="right")
        shard = order.ravel()[place]
        row = positions - (ends[place] - self.num_rows[shard])
        offset: int | np.ndarray = 0
        if self.order.shuffle_rows:
            epoch = positions // self.rows_per_epoch
            row = permute(row, self.num_rows[shard], key_of(seed, epoch, shard))
            # Cut the text elsewhere in each epoch, which lowers the loss over many epochs (benchmarks/RESULTS.md).
            offset = (key_of(seed, epoch, shard, 1) % (self.leftover[shard] + np.uint64(1))).astype(np.int64)
        return shard, offset + row * self.context_length


class EvenlySpaced(Rows):
    """`count` rows of a stream, evenly spaced over an epoch, in order."""

    def __init__(self, stream: RowStream, count: int):
        self.stream = stream
        self.count = count
        self.block_rows = min(BLOCK_ROWS, count)
        self.context_length = stream.context_length
        self.shards = stream.shards

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.stream.locate(positions * self.stream.rows_per_epoch // self.count)


class Mixture(Rows):
    """The rows of a mixture of sources; positions count from the start of the run.

    Args:
        streams: source -> its rows.
        phase: the current part of the run, in which the share of each source is fixed.
    """

    def __init__(self, streams: Mapping[str, RowStream], phase: Phase, seed: int):
        self.phase = phase
        self.seed = seed
        self.streams: list[RowStream] = []
        self.shards: list[Shard] = []
        for source in sorted(phase.shares):
            self.streams.append(streams[source])
            self.shards += streams[source].shards
        self.context_length = self.streams[0].context_length

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = int(positions[0]) // BLOCK_ROWS
        rows_used = self.phase.rows_used_before_block(number)
        order = self.phase.order(number, self.seed)  # index of the source of each row in the block
        shards, firsts = np.empty((2, BLOCK_ROWS), np.int64)
        first_shard = 0  # index in self.shards of the source's first shard
        for i, source in enumerate(sorted(self.phase.shares)):
            is_of_source = order == i
            source_shards, source_firsts = self.streams[i].find(rows_used[source], self.phase.shares[source])
            shards[is_of_source] = first_shard + source_shards
            firsts[is_of_source] = source_firsts
            first_shard += len(self.streams[i].shards)
        return shards, firsts

    def find(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return super().find(start - self.phase.first_row, count)


# ---------------------------------------------------------------------------------------------------------------------
# the batches


@dataclass(eq=False)
class BatchLoader:
    """Micro-batches of one rank, read ahead by a thread, into pinned memory on CUDA.

    Each rank has an equal part of the rows of each step, and takes mini_batch_size of them at a time. So a step has the
    same micro-batches for any number of ranks.
    """

    stream: Rows
    steps: Iterable[range]  # the rows of each step
    mini_batch_size: int
    device: torch.device | str = "cpu"
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        self.first_rows = self._first_rows()  # of each micro-batch
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        # The thread reads several small micro-batches at a time, because waking it takes longer than reading one.
        tokens = self.mini_batch_size * self.stream.context_length
        self.micro_batches_per_read = min(32, max(1, READ_TOKENS // tokens))
        self.ready: deque[torch.Tensor] = deque()
        self.pending: deque[Future] = deque()
        for _ in range(2):
            self._submit()

    def _first_rows(self) -> Iterator[int]:
        for step in self.steps:
            rows_per_rank = len(step) // self.world_size
            rows = step[self.rank * rows_per_rank : (self.rank + 1) * rows_per_rank]
            yield from rows[:: self.mini_batch_size]

    def _submit(self) -> None:
        first_rows = list(islice(self.first_rows, self.micro_batches_per_read))
        self.pending.append(self.pool.submit(self._read, first_rows))

    def _read(self, first_rows: Sequence[int]) -> list[torch.Tensor]:
        micro_batches = []
        for first_row in first_rows:
            rows = torch.from_numpy(self.stream.read(first_row, self.mini_batch_size))
            if torch.device(self.device).type == "cuda":
                rows = rows.pin_memory()
            micro_batches.append(rows)
        return micro_batches

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next inputs and targets on the device, each (mini_batch_size, context_length) int64."""
        if not self.ready:
            self._submit()
            self.ready.extend(self.pending.popleft().result())
        rows = self.ready.popleft()
        # On MPS, pageable memory could be reused during an asynchronous copy. CUDA keeps pinned memory until then.
        rows = rows.to(self.device, non_blocking=rows.is_pinned())
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """Stop reading ahead."""
        self.pool.shutdown(cancel_futures=True)
