"""Token shards as an endless, shuffled, resumable stream of rows, alone or mixed, and as batches on the device.

The data order is a pure function of (seed, position). A *row* is context_length + 1 consecutive tokens of one shard, an
epoch is every row of every shard once, and any position is reached in O(1). A resume therefore needs only the number
of rows consumed, and the rows of a step do not depend on the number of ranks. A mixture interleaves the streams of
several sources, each in its own order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.data.order import BLOCK_ROWS, Phase, key_of, permute
from steadygpt.data.shards import MANIFEST, Recorded, Shard, ShardSet, parse_folders, read_manifest, shard_files
from steadygpt.data.tokenizer import TOKENIZER_JSON, TokenizerRecord, record_named, vocab_size_of

READ_TOKENS = 2**18  # tokens that the thread reads at a time

# ---------------------------------------------------------------------------------------------------------------------
# the rows


class Rows:
    """An endless sequence of rows, located a block at a time, because one row alone costs nearly as much."""

    context_length: int
    tokens: list[np.ndarray]  # of each shard
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
                positions = np.arange(number * self.block_rows, (number + 1) * self.block_rows)
                block = self._block = number, np.stack(self.locate(positions))
            end = min(count, filled + self.block_rows - within)
            found[:, filled:end] = block[1][:, within : within + end - filled]
            filled = end
        return found[0], found[1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Read rows start, start + 1, ...: (count, context_length + 1) int64 tokens."""
        T, rows = self.context_length, np.empty((count, self.context_length + 1), np.int64)
        shards, firsts = self.find(start, count)
        for i, (shard, first) in enumerate(zip(shards.tolist(), firsts.tolist(), strict=True)):
            rows[i] = self.tokens[shard][first : first + T + 1]
        return rows


@dataclass(eq=False)
class RowStream(Rows):
    """The endless stream of the rows of some shards."""

    shards: Sequence[Shard]  # at least one; those with fewer than context_length + 1 tokens have no row and are skipped
    context_length: int
    seed: int = 0  # of both shuffles
    shuffle_shards: bool = False  # in an order that is drawn for each epoch
    shuffle_rows: bool = False  # in an order that is drawn for each epoch and shard

    def __post_init__(self):
        T, longest = self.context_length, max(self.shards, key=lambda shard: shard.num_tokens)
        if longest.num_tokens <= T:
            raise UserError(
                f"{longest.path.parent}: no shard has {T + 1:,} tokens, one row of --context_length {T:,} and its last "
                f"target; the longest has {longest.num_tokens:,}"
            )
        self.shards = [shard for shard in self.shards if shard.num_tokens > T]
        # Plain arrays, because slicing a memmap costs more than copying a row.
        self.tokens = [shard.tokens().view(np.ndarray) for shard in self.shards]
        self.num_rows = np.array([(len(tokens) - 1) // T for tokens in self.tokens], np.int64)
        self.rows_per_epoch = int(self.num_rows.sum())
        self.block_rows = min(BLOCK_ROWS, self.rows_per_epoch)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards and the first tokens of the rows at positions (n,) in the stream, each (n,) int64."""
        shard, row = np.empty_like(positions), np.empty_like(positions)
        epochs, within = np.divmod(positions, self.rows_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = np.arange(len(self.tokens))
            if self.shuffle_shards:
                order = permute(order, len(order), key_of(self.seed, int(epoch)))
            ends = self.num_rows[order].cumsum()
            place = np.searchsorted(ends, within[here], side="right")
            shard[here] = order[place]
            row[here] = within[here] - (ends - self.num_rows[order])[place]
            for s in np.unique(shard[here]) if self.shuffle_rows else ():
                of_shard = here & (shard == s)
                row[of_shard] = permute(row[of_shard], int(self.num_rows[s]), key_of(self.seed, int(epoch), int(s)))
        return shard, row * self.context_length


class Spread(Rows):
    """Rows of a stream that are spread evenly over an epoch, `count` of them, in order."""

    def __init__(self, stream: RowStream, count: int):
        self.stream, self.count, self.block_rows = stream, count, min(BLOCK_ROWS, count)
        self.context_length, self.tokens = stream.context_length, stream.tokens

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
        self.tokens = [tokens for stream in self.streams for tokens in stream.tokens]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = int(positions[0]) // BLOCK_ROWS
        given, order = self.phase.given_before(number), self.phase.order(number, self.seed)
        shards, firsts = np.empty((2, BLOCK_ROWS), np.int64)
        first_shard = 0
        for i, (source, share) in enumerate(sorted(self.phase.shares.items())):
            here = order == i
            shards[here], firsts[here] = self.streams[i].find(given[source], share)
            shards[here] += first_shard
            first_shard += len(self.streams[i].tokens)
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


# ---------------------------------------------------------------------------------------------------------------------
# the data of a run


class Source(NamedTuple):
    """Shards that a run trains on or validates with."""

    shards: ShardSet
    rows: RowStream
    weight: Fraction = Fraction(1)


@dataclass(frozen=True)
class Data:
    """What a run trains on and validates with, and the tokenizer and vocabulary of it all."""

    sources: tuple[Source, ...]  # none in a plan of data that is not prepared yet
    val_sets: tuple[Source, ...]  # the first one tells which model is best
    tokenizer_record: TokenizerRecord
    vocab_size: int

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_record.tokenizer

    @property
    def folder(self) -> str:
        """The folder that may have the tokenizer.json."""
        return self.sources[0].shards.folder

    @property
    def sets(self) -> list[ShardSet]:
        return [source.shards for source in (*self.sources, *self.val_sets)]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the only source; 0 of a mixture, whose sources have epochs of their own."""
        return self.sources[0].rows.rows_per_epoch if len(self.sources) == 1 else 0


def find_data(
    config: TrainConfig,
    saved: TokenizerRecord | None = None,
    first_set: Recorded | None = None,
    known: Mapping[str, Sequence[list]] = {},
) -> Data:
    """Find the shards of a run and map them into memory. A plan of a known number of steps does without them.

    Args:
        saved: the tokenizer of the checkpoint that the run resumes from.
        first_set: the first validation set of that run, if it has one.
        known: the fingerprint of that run.
    """
    places, T = config.sources(), config.context_length
    for folder, _ in places.values():
        if f"{folder}:train" in known and not Path(folder).is_dir():
            option = "--mix" if config.mix else "--data_dir"
            raise UserError(
                f"{folder}: no such folder, but the checkpoint was trained on its shards; put them back, or give their "
                f"new place with {option}"
            )
    folders = [Path(folder) for folder, _ in places.values()]
    is_new_plan = config.dry_run == "plan" and not config.resume
    if is_new_plan and not any(read_manifest(f) or shard_files(f, "train") for f in folders):
        name = config.tokenizer
        record = TokenizerRecord(name) if name.startswith("bpe:") else record_named("gpt2" if name == "auto" else name)
        return Data((), (), record, vocab_size_of(record))
    try:
        found = [ShardSet.find(name, folder, "train") for name, (folder, _) in places.items()]
    except UserError as error:
        if config.dry_run == "measure" and not config.resume:
            raise UserError(f"{error}. --dry_run without measure plans without data") from error
        raise
    val_sets = find_val_sets(config, found, first_set, known) if config.eval_freq else []
    record, vocab_size = tokenizer_of([*found, *val_sets], config.tokenizer, saved)
    seed, shuffled = config.seed, (config.shuffle_shards, config.shuffle_rows)
    found = [s.for_vocab(vocab_size) for s in found]
    val_sets = [s.for_vocab(vocab_size) for s in val_sets]
    sources = tuple(Source(s, RowStream(s.shards, T, seed, *shuffled), places[s.name][1]) for s in found)
    return Data(sources, tuple(Source(s, RowStream(s.shards, T)) for s in val_sets), record, vocab_size)


def recorded_sources(
    config: TrainConfig, recorded: Mapping[str, tuple[str, str]], step: int, known: Mapping[str, Sequence[list]]
) -> tuple[Source, ...]:
    """Find the shards that a step trained on, and check that they are the same.

    Args:
        recorded: name -> (folder, identity) of the start of that step.
        known: the fingerprint of the run.
    """
    sources, any_id = [], 2**32  # the ids were checked before training
    for name, (folder, identity) in recorded.items():
        if not Path(folder).is_dir():
            raise UserError(
                f"{folder}: no such folder here, but step {step:,} trained on its shards; start in the folder where "
                "training did, or put a link to their new place there"
            )
        shards = ShardSet.find(name, folder, "train").for_vocab(config.vocab_size)
        if (found := shards.identity({shards.key: shards.check(any_id, known)}, reads=False)) != identity:
            raise UserError(
                f"{folder}: not the shards that step {step:,} trained on; found SHA-256 {found[:12]}..., expected "
                f"{identity[:12]}...; copy those back"
            )
        shuffled = config.shuffle_shards, config.shuffle_rows
        rows = RowStream(shards.shards, config.context_length, config.seed, *shuffled)
        sources.append(Source(shards, rows))
    return tuple(sources)


def find_val_sets(
    config: TrainConfig, sources: Sequence[ShardSet], first: Recorded | None, known: Mapping[str, Sequence[list]]
) -> list[ShardSet]:
    """Find the validation sets that --val names, or else the val shards of the sources; put the first one first."""
    places = {name: folder for name, (folder, _) in parse_folders("val", config.val).items()}
    if not places:
        with_val = [s for s in sources if len(sources) == 1 or shard_files(Path(s.folder), "val")] or sources
        places = {s.name: s.folder for s in with_val}
    sets = [ShardSet.find(name, folder, "val") for name, folder in places.items()]
    if first is None:
        return sets
    same = [s for s in sets if s.identity(known, reads=True) == first.identity]
    if not same:
        same = [ShardSet.find(first.name, first.folder, "val")]
        if (identity := same[0].identity(known, reads=True)) != first.identity:
            raise UserError(
                f"{first.folder}: not the val shards of the first start, by which best_model.pt is chosen; found "
                f"SHA-256 {identity[:12]}..., expected {first.identity[:12]}...; copy them back, or train "
                "without validation: --eval_freq 0"
            )
    rest = [s for s in sets if s.key != same[0].key]
    if any(s.name == first.name for s in rest):
        raise UserError(
            f"--val: the name {first.name} belongs to the first validation set, of {first.folder}; give the other one "
            "another name: NAME=FOLDER"
        )
    return [replace(same[0], name=first.name), *rest]


def tokenizer_of(sets: Sequence[ShardSet], name: str, saved: TokenizerRecord | None) -> tuple[TokenizerRecord, int]:
    """Return the tokenizer of shards, and the size of their vocabulary.

    Args:
        name: --tokenizer, for shards of other tools.
        saved: of the checkpoint that the run resumes from.
    """
    record, sizes = None, []
    for shards in sets:
        if shards.manifest is None:
            continue
        folder = Path(shards.folder)
        found = TokenizerRecord.of(shards.manifest, folder / MANIFEST).with_json(folder)
        if not saved and name not in ("auto", found.tokenizer):
            raise UserError(f"--tokenizer is {name!r}; {folder} was prepared with {found.tokenizer!r}; drop the flag")
        if record and not (record.fits(found) and found.fits(record)):
            raise UserError(
                f"{folder}: prepared with the tokenizer {found}, but {sets[0].folder} with {record}; expected the same "
                "one. Prepare one of them again"
            )
        # Other tokenizers are not checked, because loading them may require a network.
        if found.tokenizer in ("gpt2", "bytes") and shards.manifest["vocab_size"] < vocab_size_of(found):
            raise UserError(
                f"{folder / MANIFEST}: vocab_size is {shards.manifest['vocab_size']:,}, but the tokenizer "
                f"{found.tokenizer!r} has {vocab_size_of(found):,}; prepare the data again"
            )
        record = record or found
        sizes.append(shards.manifest["vocab_size"])
    if record is None:
        beside, characters = (Path(sets[0].folder, file) for file in (TOKENIZER_JSON, "meta.pkl"))
        if not saved and name == "auto" and characters.exists() and not beside.exists():
            raise UserError(
                f"{characters}: the ids are of nanoGPT's own vocabulary of characters, expected a known tokenizer; "
                "prepare the text again: python prepare_dataset.py --source input.txt --tokenizer bytes"
            )
        record = saved or record_named(name if name != "auto" else str(beside) if beside.exists() else "gpt2")
    return record, max(sizes, default=0) or vocab_size_of(record)
