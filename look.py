"""Statistics and samples of token shards, and the rows that a step of a run trained on.

python look.py data/edu_fineweb10B                    # size, documents, duplicates, some rows as text
python look.py data/openwebtext --tokenizer gpt2 --rows 10 --context_length 1024     # shards of another project
python look.py --checkpoint_dir checkpoints --step 48213 --by loss                   # worst rows first
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from dataloader import Mixture
from hellaswag_eval import TOKENS_PER_BATCH
from steadygpt.base.options import UserError, option, options_of, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.base.text import printable
from steadygpt.checkpoint.files import checkpoint_files, intact_checkpoints, open_checkpoint, scan, trained_with
from steadygpt.convert.weights import ModelOptions, load_model
from steadygpt.data.shards import Shard, ShardSet, shard_files
from steadygpt.data.survey import Survey, read_tokens, repeated, survey_split
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.machine.device import autocast, choose_precision, evaluating
from steadygpt.machine.ranks import joined
from steadygpt.run.data import recorded_sources, tokenizer_of
from steadygpt.run.starts import phase_of

BAR_WIDTH = 50  # characters of the longest bar
NAMED_DUPLICATES = 5
NAME_TOKENS, NAME_WIDTH = 32, 60  # of a duplicate's beginning: tokens read, characters shown


@dataclass(frozen=True)
class LookOptions(ModelOptions):
    folder: str = option("", "folder of token shards; with --step, of checkpoints", positional=True)
    rows: int = option(3, "rows to print; 0 = none of a folder, all of a step", at_most=10**6)
    tokenizer: str = option("auto", "auto: from the data's manifest, or gpt2 without one", "with FOLDER")
    context_length: int = option(256, "tokens per row", "with FOLDER", at_least=1)
    seed: int = option(1337, "seed of the random choice of rows", "with FOLDER")
    step: int | None = option(None, "print the rows of this step of the run in --checkpoint_dir", "with --step")
    by: str = option(
        "order", "order: as in training; loss: highest first, by the checkpoint nearest to the step", "with --step",
        choices=("order", "loss"),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# rows as text


def visible(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return ids as text, safe to print on a terminal; a document token begins a new line as ⟨document⟩."""
    parts: list[str] = []
    for is_text, run in groupby(ids, lambda i: i < tokenizer.n_vocab and tokenizer.num_bytes[i] > 0):
        if is_text:  # characters may have bytes of several tokens
            parts.append(_safe(b"".join(tokenizer.bytes_of[i] for i in run)))
            continue
        for i in run:
            is_edge = i == tokenizer.document_id
            name = "document" if is_edge else _safe(tokenizer.bytes_of.get(i, b"id %d" % i))
            parts.append("\n" * (is_edge and bool(parts)) + f"⟨{name}⟩")
    return "".join(parts)


def _safe(text: bytes) -> str:
    return printable(text.decode(errors="surrogateescape"), keep="\n\t")


# ---------------------------------------------------------------------------------------------------------------------
# a folder of shards


def sizes(splits: dict[str, list[Shard]], surveys: Sequence[Survey], num_bytes: np.ndarray) -> Iterator[str]:
    """Yield a line for each split and for their total; documents come last."""
    rows = {
        split: np.array([len(shards), counts.sum(), counts @ num_bytes, len(lengths), np.sum(lengths == 0)])
        for (split, shards), (counts, _, lengths, _) in zip(splits.items(), surveys, strict=True)
    }
    yield f"{'':<7}{'files':>8}{'tokens':>17}{'bytes/token':>14}{'documents':>14}{'empty':>12}"
    for name, (files, tokens, size, documents, empty) in (rows | {"total": np.sum([*rows.values()], axis=0)}).items():
        yield f"{name:<7}{files:>8,}{tokens:>17,}{size / max(1, tokens):>14.2f}{documents:>14,}{empty:>12,}"


def histogram(lengths: np.ndarray) -> Iterator[str]:
    """Yield a line for each power of two from the least to the largest of the lengths (n,)."""
    powers = np.frexp(lengths)[1]  # 0 for length 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7
    counts = np.bincount(powers)
    for power in range(powers.min(), len(counts)):
        low, high, count = 2**power // 2, max(0, 2**power - 1), int(counts[power])
        span = f"{low:,} to {high:,}" if low < high else f"{low}"
        bar = "#" * round(BAR_WIDTH * count / counts.max())
        yield f"{span:>27}{count:>14,}{count / len(lengths):>8.1%}  {bar}".rstrip()


def duplicates(splits: dict[str, list[Shard]], surveys: Sequence[Survey], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield how many documents occur more than once, in a split or in both, and the beginnings of the largest."""
    surveys = repeated(surveys)  # without the many documents that occur once, what follows takes little memory
    _, starts, lengths, digests = map(np.concatenate, zip(*surveys, strict=True))
    different, first = np.unique(digests, return_index=True)
    starts, lengths = starts[first], lengths[first]
    which = [np.searchsorted(different, survey.digests) for survey in surveys]
    copies = np.stack([np.bincount(indices, minlength=len(different)) for indices in which])  # (splits, different)
    counts = {f"repeated in {split}": (i, (copies[i] - 1).clip(0)) for i, split in enumerate(splits)}
    if len(splits) > 1:
        counts["in val, also in train"] = 1, copies[1] * (copies[0] > 0)
    for what, (i, count) in counts.items():
        yield f"{what:>27}{count.sum():>14,}{count @ lengths / max(1, surveys[i].counts.sum()):>8.1%}"
    extra_tokens = (copies.sum(0) - 1).clip(0) * lengths
    for i in extra_tokens.argsort()[::-1][: min(NAMED_DUPLICATES, np.count_nonzero(extra_tokens))]:
        shards = [*splits.values()][np.argmax(copies[:, i] > 0)]  # where its first copy is
        ids = read_tokens(shards, int(starts[i]), min(NAME_TOKENS, int(lengths[i])))
        text = " ".join(visible(ids.tolist(), tokenizer).split())[:NAME_WIDTH]
        where = ", ".join(f"{count:,} in {split}" for split, count in zip(splits, copies[:, i], strict=True))
        yield f"  {where}, {lengths[i]:,} tokens each: {text}"


def look_at_folder(options: LookOptions) -> None:
    folder = Path(options.folder)
    names = ["train", "val"] if shard_files(folder, "val") else ["train"]
    sets = [ShardSet.find(split, options.folder, split) for split in names]
    record, _ = tokenizer_of(sets, options.tokenizer, saved=None)
    tokenizer = load_tokenizer(record, folder)
    sets = [found.for_vocab(tokenizer.n_vocab) for found in sets]
    for found in sets:
        found.check(tokenizer.n_vocab)
    splits = {found.split: found.shards for found in sets}
    total = sum(shard.num_tokens for shards in splits.values() for shard in shards)
    with ProgressBar(desc="reading", total=total, unit=" tokens", delay=3) as bar:
        surveys = [survey_split(shards, tokenizer, bar.update) for shards in splits.values()]
    has_edges = any(survey.counts[tokenizer.document_id] for survey in surveys)
    token = f"{tokenizer.document_token} (id {tokenizer.document_id})"
    about = f"{folder}: tokenizer {record.tokenizer}, {tokenizer.n_vocab:,} ids, document token {token}"
    print(printable(about), end="\n\n")
    for line in sizes(splits, surveys, tokenizer.num_bytes):
        print(line if has_edges else line[:46])
    if has_edges:
        lengths = np.concatenate([survey.lengths for survey in surveys])
        shortest, median, longest = lengths.min(), np.median(lengths), lengths.max()
        print(f"\ntokens per document: shortest {shortest:,}, median {median:,.0f}, longest {longest:,}")
        print(*histogram(lengths), "\nexact duplicates, and their share of the split:", sep="\n")
        print(*duplicates(splits, surveys, tokenizer), sep="\n")
    else:
        print("\nno document token occurs, so documents and duplicates are unknown")
    last = sum(shard.num_tokens for shard in splits["train"]) - options.context_length
    for start in np.random.default_rng(options.seed).integers(0, max(0, last) + 1, options.rows).tolist():
        ids = read_tokens(splits["train"], start, options.context_length)
        print(f"\n--- train, {len(ids):,} tokens from {start:,} on\n{visible(ids.tolist(), tokenizer)}")


# ---------------------------------------------------------------------------------------------------------------------
# the rows of a step


def find_step(checkpoint: dict, path: Path, step: int) -> tuple[Mixture, range, dict[Shard, str]]:
    """Find the rows that a step of the run of a checkpoint trained on, or will train on.

    Returns: the rows to read from; those of the step; the source and the file of each shard.
    """
    starts = checkpoint["starts"]
    number = max(n for n, start in enumerate(starts) if start["step"] <= step)
    start, is_last, config = starts[number], number + 1 == len(starts), trained_with(starts[number])
    streams, files = {}, dict[Shard, str]()
    for shards, rows, _ in recorded_sources(config, start["sources"], step, checkpoint["data_fingerprint"]):
        streams[start["sources"][shards.name][1]] = rows
        files |= {shard: printable(f"{shards.name}, {shard.path.name}") for shard in rows.shards}
    end = config.last_step(start["step"], start["row"], sum(rows.rows_per_epoch for rows in streams.values()))
    if is_last and step >= end:
        raise UserError(f"--step is {step:,}; expected less than {end:,}, because the run of {path} ends there")
    first = start["row"] + (step - start["step"]) * config.rows_per_step
    rows_of_step = range(first, first + config.rows_per_step)
    return Mixture(streams, phase_of(starts[: number + 1]), config.seed), rows_of_step, files


def row_losses(checkpoint: dict, rows: np.ndarray, options: LookOptions) -> np.ndarray:
    """Return the mean loss of each of the rows (n, T + 1) under the model of a checkpoint, (n,)."""
    losses, T = [], rows.shape[1] - 1
    with joined(options.device) as ranks, ProgressBar(desc="scoring", total=len(rows), unit="row", delay=3) as bar:
        model, device = load_model(checkpoint).to(ranks.device), ranks.device
        precision = choose_precision(options.precision, device)
        rows_at_once = max(1, TOKENS_PER_BATCH["cpu" if device.type == "cpu" else "gpu"] // T)
        with evaluating(model), autocast(device, precision):
            for batch in torch.from_numpy(rows).split(rows_at_once):
                ids = batch.to(device)
                losses.append(model(ids[:, :-1], ids[:, 1:], reduction="none").float().mean(1).cpu())
                bar.update(len(ids))
    return torch.cat(losses).numpy()


def look_at_step(options: LookOptions, step: int) -> None:
    path, checkpoint = open_checkpoint("latest", Path(options.checkpoint_dir))
    tokenizer = load_tokenizer(TokenizerRecord.of(checkpoint))
    mixture, of_step, files = find_step(checkpoint, path, step)
    first, count, last = of_step.start, len(of_step), of_step.stop - 1
    print(f"step {step:,}: rows {first:,} to {last:,}, with options of {path} at step {checkpoint['step']:,}")
    rows, order, losses = mixture.read(first, count), np.arange(count), [""] * count
    if options.by == "loss":
        nearest = sorted(scan(path.parent), key=lambda file: abs(file.head.step - step) if file.head else 0)
        path, checkpoint = next(intact_checkpoints(nearest), (path, checkpoint))
        found = row_losses(checkpoint, rows, options)
        order, losses = np.argsort(-found, kind="stable"), [f"loss {loss:.4f}, " for loss in found]
        print(f"mean loss {found.mean():.4f}, of {path} at step {checkpoint['step']:,}")
    shards, firsts = mixture.find(first, count)
    for i in order[: options.rows or count].tolist():
        print(f"\n--- row {i:,}: {losses[i]}{files[mixture.shards[shards[i]]]} from token {firsts[i]:,} on")
        print(visible(rows[i].tolist(), tokenizer))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(LookOptions, argv, "Inspect a folder of token shards, or the rows that a step trained on.")
    if options.folder and checkpoint_files(Path(options.folder)):
        options = replace(options, checkpoint_dir=options.folder, folder="")
    if not options.folder and options.step is None:
        raise UserError(
            "nothing to show; expected a folder of token shards, or --step N of the run in --checkpoint_dir"
        )
    mine, other = ("with FOLDER", "with --step") if options.folder else ("with --step", "with FOLDER")
    of_model = {f.name for f in fields(ModelOptions)} if options.folder else set()
    for name, f in options_of(options).items():
        if (name in of_model or f.metadata["group"] == other) and getattr(options, name) != f.default:
            raise UserError(f"--{name} cannot be combined {mine}; drop one of them")
    if options.step is None:
        look_at_folder(options)
    else:
        look_at_step(options, options.step)
    return 0


if __name__ == "__main__":
    run_cli(main)
