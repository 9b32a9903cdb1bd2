"""Token shards as an endless, shuffled, resumable stream of rows, alone or mixed, and as batches on the device.

The data order is a pure function of (seed, position). A *row* is context_length + 1 consecutive tokens of one shard, an
epoch is every row of every shard once, and any position is reached in O(1). A resume therefore needs only the number
of rows consumed, and the rows of a step do not depend on the number of ranks. A mixture interleaves the streams of
several sources, each in its own order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import numpy as np
import torch

from steadygpt.base.options import UserError
from steadygpt.data.order import BLOCK_ROWS, Phase, key_of, permute
from steadygpt.data.shards import MAPPED, Shard

READ_TOKENS = 2**18  # tokens that the thread reads at a time

# ---------------------------------------------------------------------------------------------------------------------
# the rows


class Rows:
    """An endless sequence of rows, located a block at a time, because one row alone costs nearly as much."""

    context_length: int
    shards: Sequence[Shard]
    block_rows = BLOCK_ROWS
    _block: tuple[int, np.ndarray] | None = None  # the number of the block found last, and what locate() found

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and the first tokens of the rows at the positions of a block, each (block_rows,) int64."""
        raise NotImplementedError

    def find(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and the first tokens of rows start, start + 1, ..., each (count,) int64."""
        found, filled = np.empty((2, count), np.int64), 0
        while filled < count:
            number, within = divmod(start + filled, self.block_rows)
            block = self._block  # read once, because another loader's thread may replace it
            if block is None or number != block[0]:
                positions = number * self.block_rows + np.arange(self.block_rows)
                block = self._block = number, np.stack(self.locate(positions))
            end = min(count, filled + self.block_rows - within)
            found[:, filled:end] = block[1][:, within : within + end - filled]
            filled = end
        return found[0], found[1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Read rows start, start + 1, ...: (count, context_length + 1) int64 tokens."""
        T, rows = self.context_length, np.empty((count, self.context_length + 1), np.int64)
        shards, firsts = self.find(start, count)
        numbers = shards.tolist()
        for number in set(numbers):
            self.shards[number].check_whole()
        for i, (shard, first) in enumerate(zip(numbers, firsts.tolist(), strict=True)):
            rows[i] = self.shards[shard].tokens()[first : first + T + 1]
        return rows


@dataclass(eq=False)
class RowStream(Rows):
    """The endless stream of the rows of some shards."""

    shards: Sequence[Shard]  # at least one; those with fewer than context_length + 1 tokens have no row and are skipped
    context_length: int
    _: KW_ONLY  # so that no field that is put in between turns a shuffle off
    seed: int = 0  # of both shuffles
    shuffle_shards: bool = False  # in an order that is drawn for each epoch
    shuffle_rows: bool = False  # in an order that is drawn for each epoch and shard

    def __post_init__(self):
        T, longest = self.context_length, max(self.shards, key=lambda shard: shard.num_tokens)
        if longest.num_tokens <= T:
            raise UserError(
                f"{longest.path}: the longest shard of its split; found {longest.num_tokens:,} tokens, "
                f"expected {T + 1:,}, one row of --context_length {T:,} and its last target"
            )
        self.shards = [shard for shard in self.shards if shard.num_tokens > T]
        for shard in self.shards[:MAPPED]:
            shard.tokens()  # mapped now, so that the run can read files that are deleted or replaced while it goes on
        self.num_rows = np.array([(shard.num_tokens - 1) // T for shard in self.shards], np.int64)
        self.rows_per_epoch = int(self.num_rows.sum())

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and the first tokens of the rows at ascending positions (n,), each (n,) int64."""
        epochs = np.arange(positions[0] // self.rows_per_epoch, positions[-1] // self.rows_per_epoch + 1)[:, None]
        order = np.tile(np.arange(len(self.shards)), (len(epochs), 1))
        if self.shuffle_shards:
            order = permute(order, len(self.shards), key_of(self.seed, epochs))
        ends = (self.num_rows[order].cumsum(1) + epochs * self.rows_per_epoch).ravel()  # in the stream
        place = np.searchsorted(ends, positions, side="right")
        shard = order.ravel()[place]
        row = positions - (ends[place] - self.num_rows[shard])
        if self.shuffle_rows:
            row = permute(row, self.num_rows[shard], key_of(self.seed, positions // self.rows_per_epoch, shard))
        return shard, row * self.context_length


class Spread(Rows):
    """Rows of a stream that are spread evenly over an epoch, `count` of them, in order."""

    def __init__(self, stream: RowStream, count: int):
        self.stream, self.count, self.block_rows = stream, count, min(BLOCK_ROWS, count)
        self.context_length, self.shards = stream.context_length, stream.shards

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.stream.locate(positions * self.stream.rows_per_epoch // self.count)


class Mixture(Rows):
    """The rows of a phase, by their positions in the run, from the first row of the phase on.

    Args:
        streams: source -> its rows.
    """

    def __init__(self, streams: Mapping[str, RowStream], phase: Phase, seed: int):
        self.streams, self.phase, self.seed = [streams[source] for source in sorted(phase.shares)], phase, seed
        self.context_length = self.streams[0].context_length
        self.shards = [shard for stream in self.streams for shard in stream.shards]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = int(positions[0]) // BLOCK_ROWS
        given, order = self.phase.rows_used_before_block(number), self.phase.order(number, self.seed)
        shards, firsts = np.empty((2, BLOCK_ROWS), np.int64)
        first_shard = 0
        for i, (source, share) in enumerate(sorted(self.phase.shares.items())):
            here = order == i
            shards[here], firsts[here] = self.streams[i].find(given[source], share)
            shards[here] += first_shard
            first_shard += len(self.streams[i].shards)
        return shards, firsts

    def find(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return super().find(start - self.phase.first_row, count)


# ---------------------------------------------------------------------------------------------------------------------
# the batches


@dataclass(eq=False)
class BatchLoader:
    """Micro-batches of one rank, read ahead by a thread into pinned memory.

    Each rank has an equal part of the rows of each step, and takes mini_batch_size of them at a time. So all ranks
    together have the same micro-batches in a step, whatever their number.
    """

    stream: Rows
    steps: Iterable[range]  # of rows
    mini_batch_size: int
    device: torch.device | str = "cpu"
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        self.first_rows = self._first_rows()  # of the micro-batches
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        # The thread reads several small micro-batches at a time, because waking it takes longer than reading one.
        self.at_once = min(32, max(1, READ_TOKENS // (self.mini_batch_size * self.stream.context_length)))
        self.ready: deque[torch.Tensor] = deque()
        self.pending: deque[Future] = deque()
        for _ in range(2):
            self._submit()

    def _first_rows(self) -> Iterator[int]:
        for step in self.steps:
            count = len(step) // self.world_size
            yield from step[self.rank * count :][: count : self.mini_batch_size]

    def _submit(self) -> None:
        first_rows = [*islice(self.first_rows, self.at_once)]
        self.pending.append(self.pool.submit(lambda: [*map(self._read, first_rows)]))

    def _read(self, start: int) -> torch.Tensor:
        rows = torch.from_numpy(self.stream.read(start, self.mini_batch_size))
        return rows.pin_memory() if torch.device(self.device).type == "cuda" else rows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next inputs and targets on the device, each (mini_batch_size, context_length) int64."""
        if not self.ready:
            self._submit()
            self.ready.extend(self.pending.popleft().result())
        rows = self.ready.popleft()
        # Pageable memory could be reused while it is copied (on MPS); CUDA keeps pinned memory until the copy is done.
        rows = rows.to(self.device, non_blocking=rows.is_pinned())
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """Stop reading ahead."""
        self.pool.shutdown(cancel_futures=True)
