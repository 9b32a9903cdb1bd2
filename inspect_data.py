"""Sizes and samples of token shards, and the rows that a step of a run trained on.

python inspect_data.py data/edu_fineweb10B                    # sizes, and some rows as text
python inspect_data.py data/openwebtext --tokenizer gpt2 --rows 10 --context_length 1024     # shards of another project
python inspect_data.py --checkpoint_dir checkpoints --step 48213                             # rows of a step
"""

import steadygpt.preflight  # noqa: F401  # before all others

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from dataloader import Mixture, RowStream
from steadygpt.base.options import UserError, option, options_of, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import checkpoint_files, intact_checkpoints, open_checkpoint, scan
from steadygpt.config import TrainConfig
from steadygpt.data.shards import Shard, ShardSet, shard_files
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.run.schedule import with_steps
from steadygpt.start.data import tokenizer_of

BLOCK_TOKENS = 2**22  # tokens in memory at once


@dataclass(frozen=True)
class InspectOptions:
    folder: str = option("", "folder of token shards; with --step, of checkpoints", positional=True)
    rows: int = option(3, "rows to print; 0 = none of a folder, all of a step", at_most=10**6)
    tokenizer: str = option("auto", "auto: from the data's manifest, or gpt2 without one", "with FOLDER")
    context_length: int = option(256, "tokens per row", "with FOLDER", at_least=1)
    seed: int = option(1337, "seed of the random choice of rows", "with FOLDER")
    step: int | None = option(None, "print the rows of this step of the run in --checkpoint_dir", "with --step")
    checkpoint_dir: str = option("checkpoints", "folder of checkpoints", "with --step")


# ---------------------------------------------------------------------------------------------------------------------
# rows as text


def visible(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return ids as text, safe to print on a terminal; a document token begins a new line as ⟨document⟩."""
    parts: list[str] = []
    for is_text, group in groupby(ids, lambda i: i < tokenizer.n_vocab and tokenizer.num_bytes[i] > 0):
        if is_text:  # decode the group together, because a character may have bytes of several tokens
            parts.append(_safe(b"".join(tokenizer.bytes_of[i] for i in group)))
            continue
        for i in group:
            if i != tokenizer.document_id:
                name = _safe(tokenizer.bytes_of.get(i, b"id %d" % i))
                parts.append(f"⟨{name}⟩")
                continue
            if parts:
                parts.append("\n")
            parts.append("⟨document⟩")
    return "".join(parts)


def _safe(text: bytes) -> str:
    return printable(text.decode(errors="surrogateescape"), keep="\n\t")


# ---------------------------------------------------------------------------------------------------------------------
# a folder of shards


def count_split(shards: Sequence[Shard], tokenizer: Tokenizer, advance: Callable[[int], object]) -> np.ndarray:
    """Return how often each id occurs in the shards of a split, (n_vocab,) int64.

    Args:
        shards: already verified by ShardSet.check, so all ids are in the vocabulary.
        advance: called with the number of tokens of each block.
    """
    counts = np.zeros(tokenizer.n_vocab, np.int64)
    for shard in shards:
        for offset in range(0, shard.num_tokens, BLOCK_TOKENS):
            block = shard.tokens()[offset : offset + BLOCK_TOKENS]
            counts += np.bincount(block, minlength=len(counts))
            advance(len(block))
    return counts


def size_line(name: str, files: int, counts: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the line of the table for a split, or for the total.

    Args:
        counts: how often each id occurs, (n_vocab,).
    """
    tokens = counts.sum()
    bytes_per_token = counts @ tokenizer.num_bytes / max(1, tokens)
    return f"{name:<7}{files:>8,}{tokens:>17,}{bytes_per_token:>14.2f}{counts[tokenizer.document_id]:>18,}"


def read_tokens(shards: Sequence[Shard], start: int, count: int) -> np.ndarray:
    """Return at most `count` ids of a split, from position `start` on, (n,)."""
    parts = []
    for shard in shards:
        parts.append(shard.tokens()[max(0, start) : max(0, start + count)])
        start -= shard.num_tokens
    return np.concatenate(parts)


def show_folder(options: InspectOptions) -> None:
    """Print the sizes of the splits of a folder, and random rows of its train split."""
    folder = Path(options.folder)
    splits = ["train", "val"] if shard_files(folder, "val") else ["train"]
    sets = [ShardSet.find(split, options.folder, split) for split in splits]
    record, _ = tokenizer_of(sets, options.tokenizer)
    tokenizer = load_tokenizer(record, folder)
    sets = [shard_set.for_vocab(tokenizer.n_vocab) for shard_set in sets]
    for shard_set in sets:
        shard_set.check(tokenizer.n_vocab)
    total = sum(shard.num_tokens for shard_set in sets for shard in shard_set.shards)
    with ProgressBar(desc="reading", total=total, unit=" tokens", delay=3) as bar:
        counts = [count_split(shard_set.shards, tokenizer, bar.update) for shard_set in sets]
    token = f"{tokenizer.document_token} (id {tokenizer.document_id})"
    print(printable(f"{folder}: tokenizer {record.tokenizer}, {tokenizer.n_vocab:,} ids, document token {token}"))
    print(f"\n{'':<7}{'files':>8}{'tokens':>17}{'bytes/token':>14}{'document tokens':>18}")
    for shard_set, split_counts in zip(sets, counts, strict=True):
        print(size_line(shard_set.split, len(shard_set.shards), split_counts, tokenizer))
    files = sum(len(shard_set.shards) for shard_set in sets)
    print(size_line("total", files, np.sum(counts, axis=0), tokenizer))
    train = sets[0].shards
    last = sum(shard.num_tokens for shard in train) - options.context_length
    for start in np.random.default_rng(options.seed).integers(0, max(0, last) + 1, options.rows).tolist():
        ids = read_tokens(train, start, options.context_length)
        print(f"\n--- train, {len(ids):,} tokens from {start:,} on\n{visible(ids.tolist(), tokenizer)}")


# ---------------------------------------------------------------------------------------------------------------------
# the rows of a step


def find_step(folder: Path, step: int) -> tuple[dict, Path]:
    """Return the newest checkpoint that determines the rows of a step, and its path.

    An older one may be needed, because a later launch may have changed the mixture or the batch size.
    """
    path, checkpoint = open_checkpoint("latest", folder)
    if not checkpoint["data"]:
        raise UserError(f"{path}: converted weights; expected a checkpoint of a run, which has taken the step")
    if step >= checkpoint["data"]["first_step"]:
        return checkpoint, path
    for older_path, older in intact_checkpoints(scan(folder)):
        if older["data"]["first_step"] <= step < older["step"]:
            return older, older_path
    first = checkpoint["data"]["first_step"]
    raise UserError(
        f"--step is {step:,}; expected {first:,} or more, because there the batch size or the data changed and no "
        f"older checkpoint is left in {folder}"
    )


def rows_of_step(checkpoint: dict, path: Path, step: int) -> tuple[Mixture, range, dict[Shard, str]]:
    """Return the rows that a step of a checkpoint's run trained on, or will train on.

    Returns: the mixture; the range of the step's rows in it; the source and the file of each shard, as text.
    """
    config = TrainConfig(**checkpoint["options"], vocab_size=checkpoint["model_config"]["vocab_size"])
    data = checkpoint["data"]
    order = config.order
    streams = {}  # digest of a source -> its rows
    files: dict[Shard, str] = {}
    for name, (folder, expected) in data["sources"].items():
        if not Path(folder).is_dir():
            raise UserError(
                f"{folder}: no such folder here, but step {step:,} trained on its shards; start in the folder where "
                "training did, or put a link to their new place there"
            )
        shards = ShardSet.find(name, folder, "train").for_vocab(checkpoint["model_config"]["vocab_size"])
        found = shards.digest()
        if found != expected:
            raise UserError(
                f"{folder}: not the shards that step {step:,} trained on; found SHA-256 {found[:12]}..., expected "
                f"{expected[:12]}...; copy those back"
            )
        shards.check(checkpoint["model_config"]["vocab_size"], data["shards"])  # reads those that have changed since
        streams[expected] = RowStream(shards.shards, config.context_length, order)
        files |= {shard: printable(f"{name}, {shard.path.name}") for shard in shards.shards}
    epoch_rows = config.steps_per_epoch * config.rows_per_step or sum(rows.rows_per_epoch for rows in streams.values())
    end = with_steps(config, epoch_rows, checkpoint["step"], checkpoint["rows_consumed"]).max_steps
    if step >= end:
        raise UserError(f"--step is {step:,}; expected less than {end:,}, because the run of {path} ends there")
    first = data["first_row"] + (step - data["first_step"]) * config.rows_per_step
    return Mixture(streams, data["phase"], config.seed), range(first, first + config.rows_per_step), files


def show_step(options: InspectOptions, step: int) -> None:
    checkpoint, path = find_step(Path(options.checkpoint_dir), step)
    tokenizer = load_tokenizer(TokenizerRecord.of(checkpoint))
    mixture, step_rows, files = rows_of_step(checkpoint, path, step)
    first = step_rows.start
    last = step_rows.stop - 1
    count = len(step_rows)
    print(f"step {step:,}: rows {first:,} to {last:,}, with options of {path} at step {checkpoint['step']:,}")
    rows = mixture.read(first, count)
    shards, first_tokens = mixture.find(first, count)
    for i in range(min(options.rows or count, count)):
        print(f"\n--- row {i:,}: {files[mixture.shards[shards[i]]]} from token {first_tokens[i]:,} on")
        print(visible(rows[i].tolist(), tokenizer))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(
        InspectOptions, argv, "Inspect a folder of token shards, or the rows that a step trained on."
    )
    if options.folder and checkpoint_files(Path(options.folder)):
        options = replace(options, checkpoint_dir=options.folder, folder="")
    if not options.folder and options.step is None:
        raise UserError(
            "nothing to show; expected a folder of token shards, or --step N of the run in --checkpoint_dir"
        )
    if options.folder:
        group, unused_group = "with FOLDER", "with --step"
    else:
        group, unused_group = "with --step", "with FOLDER"
    for name, f in options_of(options).items():
        if f.metadata["group"] == unused_group and getattr(options, name) != f.default:
            raise UserError(f"--{name} cannot be combined {group}; drop one of them")
    if options.step is None:
        show_folder(options)
    else:
        show_step(options, options.step)
    return 0


if __name__ == "__main__":
    run_cli(main)
