"""A look at token shards before training: their size, documents, duplicates, and some rows as text.

python look.py data/edu_fineweb10B
python look.py data/openwebtext --tokenizer gpt2 --rows 10 --context_length 1024     # shards of another project
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar
from steadygpt.data.shards import Shard, check_shards, find_shards, read_manifest, shard_files
from steadygpt.data.survey import Survey, read_tokens, repeated, survey_split
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer

BAR_WIDTH = 50  # characters of the longest bar
NAMED_DUPLICATES = 5
NAME_TOKENS, NAME_WIDTH = 32, 60  # of a duplicate's beginning: tokens read, characters shown


@dataclass(frozen=True)
class LookOptions:
    """The options of look.py."""

    folder: str = option(MISSING, "folder of token shards", positional=True)
    tokenizer: str = option("auto", "auto: from the data's manifest, or gpt2 without one")
    rows: int = option(3, "rows of train to print, taken at random")
    context_length: int = option(256, "tokens per row", at_least=1)
    seed: int = option(1337, "the same seed prints the same rows")


# ---------------------------------------------------------------------------------------------------------------------
# rows as text


def visible(ids: Sequence[int], tokenizer: Tokenizer, mark: Callable[[str], str] = str) -> str:
    """Return ids as text, safe to print on a terminal; a document token begins a new line as ⟨document⟩.

    Args:
        mark: highlights what is not text.
    """
    parts: list[str] = []
    for is_text, run in groupby(ids, lambda i: tokenizer.num_bytes[i] > 0):
        if is_text:  # characters may have bytes of several tokens
            parts.append(escape(b"".join(tokenizer.bytes_of[i] for i in run), mark))
            continue
        for i in run:
            is_edge = i == tokenizer.document_id
            name = "document" if is_edge else escape(tokenizer.bytes_of.get(i, b"id %d" % i))
            parts.append("\n" * (is_edge and bool(parts)) + mark(f"⟨{name}⟩"))
    return "".join(parts)


def escape(text: bytes, mark: Callable[[str], str] = str) -> str:
    """Return UTF-8 with \\x1b or \\u200b for characters that cannot be printed, except line breaks and tabs, and \\xff
    for bytes that are not UTF-8.
    """

    def shown(c: str) -> str:
        if c.isprintable() or c in "\n\t":
            return c
        if "\udc80" <= c <= "\udcff":  # a byte that is not UTF-8
            return mark(f"\\x{ord(c) - 0xDC00:02x}")
        return mark(f"\\u{ord(c):04x}" if "\x80" <= c <= "\xff" else c.encode("unicode_escape").decode())

    return "".join(map(shown, text.decode(errors="surrogateescape")))


def print_row(ids: np.ndarray, tokenizer: Tokenizer, label: str) -> None:
    """Print a row of ids (T,) as text, below its label."""
    mark = "\x1b[7m{}\x1b[0m".format if sys.stdout.isatty() else str  # reversed colours
    print(f"\n--- {label}\n{visible(ids.tolist(), tokenizer, mark)}")


# ---------------------------------------------------------------------------------------------------------------------
# a folder of shards


def open_folder(folder: Path, name: str) -> tuple[dict[str, list[Shard]], str, Tokenizer]:
    """Verify the shards of a folder; return them by split, and the name of their tokenizer with the tokenizer.

    Args:
        name: --tokenizer.

    Raises: UserError.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected one of token shards, as prepare_dataset.py writes them")
    manifest = read_manifest(folder)
    if manifest and name not in ("auto", manifest["tokenizer"]):
        raise UserError(
            f"--tokenizer is {name!r}; {folder} was prepared with {manifest['tokenizer']!r}, so drop the flag"
        )
    names = ["train", "val"] if shard_files(folder, "val") else ["train"]
    splits = {split: find_shards(folder, split, manifest) for split in names}
    record = TokenizerRecord.of(manifest or {"tokenizer": "gpt2" if name == "auto" else name})
    tokenizer = load_tokenizer(record.with_json(folder))
    for shards in splits.values():
        check_shards(shards, manifest, tokenizer.n_vocab)
    return splits, record.tokenizer, tokenizer


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


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a folder of shards holds.

    Raises: UserError.
    """
    options = parse_options(LookOptions, argv, "Show what a folder of token shards holds.")
    splits, name, tokenizer = open_folder(Path(options.folder), options.tokenizer)
    total = sum(shard.num_tokens for shards in splits.values() for shard in shards)
    with ProgressBar(desc="reading", total=total, unit=" tokens", delay=3) as bar:
        surveys = [survey_split(shards, tokenizer, bar.update) for shards in splits.values()]
    has_edges = any(survey.counts[tokenizer.document_id] for survey in surveys)
    token = f"{tokenizer.document_token} (id {tokenizer.document_id})"
    print(f"{options.folder}: tokenizer {name}, {tokenizer.n_vocab:,} ids, document token {token}\n")
    for line in sizes(splits, surveys, tokenizer.num_bytes):
        print(line if has_edges else line[:46])
    if has_edges:
        lengths = np.concatenate([survey.lengths for survey in surveys])
        print(
            f"\ntokens per document: shortest {lengths.min():,}, median {np.median(lengths):,.0f}, longest "
            f"{lengths.max():,}"
        )
        print(
            *histogram(lengths),
            "\nexact duplicates, and their share of the split:",
            *duplicates(splits, surveys, tokenizer),
            sep="\n",
        )
    else:
        print("\nno document edges: the document token does not occur, so documents and duplicates are unknown")
    last = sum(shard.num_tokens for shard in splits["train"]) - options.context_length
    for start in np.random.default_rng(options.seed).integers(0, max(0, last) + 1, options.rows).tolist():
        ids = read_tokens(splits["train"], start, options.context_length)
        print_row(ids, tokenizer, f"train, {len(ids):,} tokens from {start:,} on")
    return 0


if __name__ == "__main__":
    run_cli(main)
