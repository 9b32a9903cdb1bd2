"""Token shards and their manifest.json, from text of the Hugging Face Hub, files or Python's own library.

    python prepare_dataset.py                                      # FineWeb-Edu, 10 B tokens, GPT-2's vocabulary
    python prepare_dataset.py --source stdlib --tokenizer bytes    # nothing to download
    python prepare_dataset.py --source 'corpus/*.jsonl.gz' --text_field content --out data/corpus

Source -> rows -> pieces -> batches -> ids -> shards. Each depends only on the source and a position in it, so the
shards have the same bytes for any number of workers, and after a kill the same command continues.
"""

import dataclasses
import glob
import io
import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from steadygpt.cli import OptionError, UserError, option, parse_options, run_cli
from steadygpt.device import usable_cores
from steadygpt.durable import lock_folder, replace_file
from steadygpt.shards import DEFAULT_FOLDER, MANIFEST, open_shard, token_dtype, write_shard
from steadygpt.sources import STDLIB, Position, Row, file_rows, find_files, fingerprint, hub_rows, load_hub, suffix_of
from steadygpt.tokenizer import END_OF_TEXT, get_tokenizer

FORMAT_VERSION = 1
FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # --source fineweb-edu
BATCH_CHARS = 2**20  # characters in one call of the tokenizer
# Longer documents are cut into pieces of up to twice this. tiktoken's regex fails on a million consecutive spaces.
PIECE_CHARS = 400_000
RUN_AHEAD = 32  # batches beyond one per worker, to keep the workers busy while a shard is written
NAMED_SKIPS = 5  # skipped rows that are named on stderr
SMALL_TOKENS = 50_000_000  # below this, the proposed next command trains the quickstart's model


@dataclass(frozen=True)
class PrepareOptions:
    """The options of prepare_dataset.py."""

    source: str = option("fineweb-edu", "fineweb-edu, stdlib, hf:NAME[:CONFIG], or a file, folder or glob")
    tokenizer: str = option("gpt2", "gpt2, bytes, or any other tokenizer of tiktoken")
    shard_size: int = option(100_000_000, "tokens per shard", at_least=1, at_most=2**31)
    val_tokens: int | None = option(
        None, "tokens of val, taken from the start (default: a shard; of files at most bytes / 40)", at_most=2**31
    )
    num_workers: int | None = option(None, "threads that tokenize (default: one per core)", at_least=1, at_most=2**31)
    out: str = option("", f"folder for the shards (default: data/NAME; for fineweb-edu {DEFAULT_FOLDER})")
    name: str = option("", "prefix of the shards' file names (default: the last part of --source)")
    text_field: str = option("text", "JSON field or column that holds a document's text")
    streaming: bool = option(False, "read a Hub data set while it downloads")


# ---------------------------------------------------------------------------------------------------------------------
# rows -> pieces -> batches -> ids


class Piece(NamedTuple):
    """A document, a part of a long one, or a skipped row."""

    at: Position
    amount_read: int  # how far the file is read, as in Row
    text: str = ""
    skipped: str = ""  # the reason
    repaired: bool = False  # the first piece of its document in which U+FFFD replaces invalid Unicode


Batch = list[Piece]
_BEFORE_LAST_CUT = re.compile(r"(?s:.*)\S(?= )")


def split_text(file: io.TextIOBase) -> Iterator[str]:
    """Cut a text into pieces of about PIECE_CHARS whose ids, concatenated, are the ids of the whole text.

    Cuts come before a space that follows a non-space, where pre-tokenizers such as GPT-2's always begin a new word. A
    text without such a space is cut anywhere, and its ids may differ.
    """
    text = file.read(PIECE_CHARS)
    while more := file.read(PIECE_CHARS):
        text += more
        match = _BEFORE_LAST_CUT.match(text)
        cut = match.end() if match else len(text)
        yield text[:cut]
        text = text[cut:]
    yield text


def read_pieces(rows: Iterable[Row], start: Position) -> Iterator[Piece]:
    """Cut rows into pieces, from `start` on."""
    for at, value, amount_read in rows:
        file = io.StringIO(value) if isinstance(value, str) else value
        if not isinstance(file, io.TextIOBase):
            reason = str(value) if isinstance(value, ValueError) else f"{type(value).__name__}, not a string"
            yield Piece(at, amount_read(), skipped=reason)
            continue
        is_repaired = False
        for number, text in enumerate(split_text(file)):
            at = at._replace(piece=number)
            # U+FFFD replaces lone surrogates, which stand for invalid UTF-8 or come from escapes in JSON.
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if number == 0 and len(text) < PIECE_CHARS and not text.strip():
                yield Piece(at, amount_read(), skipped="no text")
            elif at >= start:
                yield Piece(at, amount_read(), clean, repaired=clean != text and not is_repaired)
            is_repaired |= clean != text


def gather_batches(pieces: Iterable[Piece]) -> Iterator[Batch]:
    """Gather consecutive pieces into batches of BATCH_CHARS or a little more."""
    batch, size = Batch(), 0
    for piece in pieces:
        # A later piece of a document begins a batch, because encoding it with the piece before would undo the cut.
        if size >= BATCH_CHARS or (batch and piece.at.piece > 0):
            yield batch
            batch, size = Batch(), 0
        batch.append(piece)
        size += len(piece.text) + 64  # 64: skipped rows take memory too
    if batch:
        yield batch


def encode(tokenizer: tiktoken.Encoding, batch: Batch) -> np.ndarray:
    """Encode a batch as (n,) uint32 ids, with <|endoftext|> before each document and nowhere else."""
    pieces = [piece for piece in batch if not piece.skipped]
    joined = "".join(END_OF_TEXT * (piece.at.piece == 0) + piece.text for piece in pieces)
    if joined.count(END_OF_TEXT) == sum(piece.at.piece == 0 for piece in pieces):
        # One long call releases the GIL for nearly all of its time, a call per document does not.
        return tokenizer.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
    ids = []  # the text of a document contains <|endoftext|>
    for piece in pieces:
        ids += [tokenizer.eot_token] * (piece.at.piece == 0) + tokenizer.encode_ordinary(piece.text)
    return np.array(ids, np.uint32)


def encode_all(
    batches: Iterable[Batch], tokenizer: tiktoken.Encoding, num_workers: int
) -> Generator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its ids (n,), in order; at most num_workers + RUN_AHEAD batches are in memory."""
    pending: deque[tuple[Batch, Future]] = deque()
    own = threading.local()

    def copy_tokenizer() -> None:
        # Threads that share a tokenizer wait for its regex's scratch space, up to half of their time.
        own.tokenizer = tiktoken.Encoding(
            tokenizer.name,
            pat_str=tokenizer._pat_str,
            mergeable_ranks=tokenizer._mergeable_ranks,
            special_tokens=tokenizer._special_tokens,
        )

    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="encode", initializer=copy_tokenizer)
    try:
        for batch in batches:
            pending.append((batch, pool.submit(lambda batch: encode(own.tokenizer, batch), batch)))
            while pending and (len(pending) >= num_workers + RUN_AHEAD or pending[0][1].done()):
                oldest, ids = pending.popleft()
                yield oldest, ids.result()
        for oldest, ids in pending:
            yield oldest, ids.result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# ids -> shards


def load_manifest(out: Path, identity: dict) -> dict | None:
    """Read the manifest that an earlier run of the same preparation left; None for a folder without shards.

    Raises: UserError when the folder holds any other shards.
    """
    advice = f"use a different --out, or empty {out}"
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        differ = [f"{k} {manifest[k]!r}, but now it is {new!r}" for k, new in identity.items() if manifest[k] != new]
        shards = {out / shard["file"]: shard["tokens"] for shard in manifest["shards"]}
    except FileNotFoundError:
        if foreign := sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin")):
            raise UserError(f"{out}: holds {foreign[0]} but no {MANIFEST}; {advice}") from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / MANIFEST}: not a manifest ({error!r}); {advice}") from error
    if not shards:
        return None  # left by a command that failed early, for example with the wrong --text_field
    if differ:
        raise UserError(f"{out}: prepared with {'; '.join(differ)}; {advice}")
    for path, num_tokens in shards.items():
        if not path.exists() or open_shard(path).num_tokens != num_tokens:
            raise UserError(f"{path}: missing or damaged, though {MANIFEST} lists it; empty {out} and prepare it again")
    return manifest


def save_manifest(out: Path, manifest: dict) -> None:
    """Replace the manifest atomically."""
    replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(manifest, indent=2)}\n".encode()))


def next_shard(manifest: dict) -> tuple[str, int]:
    """Return the split and the size in tokens of the next shard; val comes first."""
    val_left = manifest["val_tokens"] - manifest["tokens"]
    return ("val", min(val_left, manifest["shard_size"])) if val_left > 0 else ("train", manifest["shard_size"])


def finish_shard(out: Path, manifest: dict, ids: np.ndarray) -> None:
    """Write ids (n,) as the next shard and add it to the manifest."""
    split, _ = next_shard(manifest)
    name = f"{manifest['name']}_{split}_{len(manifest['shards']):06d}.npy"
    digest = write_shard(out / name, ids)
    manifest["shards"].append({"file": name, "split": split, "tokens": len(ids), "sha256": digest})
    manifest["tokens"] += len(ids)


def write_shards(encoded: Iterable[tuple[Batch, np.ndarray]], out: Path, manifest: dict) -> None:
    """Write the missing shards; after each, save in the manifest where the next one begins.

    Args:
        encoded: batches and their ids, from the batch at manifest["next"] on.

    Raises: UserError when val leaves no tokens for train; OSError when a shard cannot be written.
    """
    buffer = np.empty(manifest["shard_size"], token_dtype(manifest["vocab_size"]))
    filled, taken = 0, manifest["next"]["skip_tokens"]
    for batch, ids in encoded:
        while taken < len(ids):
            _, size = next_shard(manifest)
            count = min(size - filled, len(ids) - taken)
            buffer[filled : filled + count] = ids[taken : taken + count]
            filled, taken = filled + count, taken + count
            if filled == size:
                finish_shard(out, manifest, buffer[:filled])
                manifest["next"] = batch[0].at._asdict() | {"skip_tokens": taken}
                save_manifest(out, manifest)
                filled = 0
        # Counted after the save above, because a resumed run starts with this batch and counts it again.
        manifest["documents"] += sum(piece.at.piece == 0 and not piece.skipped for piece in batch)
        manifest["repaired"] += sum(piece.repaired for piece in batch)
        manifest["skipped"] = Counter(manifest["skipped"]) + Counter(p.skipped for p in batch if p.skipped)
        taken = 0
    if (num_tokens := manifest["tokens"] + filled) <= manifest["val_tokens"]:
        for path in [*(out / shard["file"] for shard in manifest["shards"]), out / MANIFEST]:
            path.unlink()
        raise UserError(
            f"{manifest['source']}: {num_tokens:,} tokens ({_counts(manifest)}), and --val_tokens "
            f"{manifest['val_tokens']} leaves none for train; try "
            f"{f'--val_tokens {num_tokens // 10} or ' if num_tokens else ''}more text"
        )
    if filled:
        finish_shard(out, manifest, buffer[:filled])
    del manifest["next"]
    manifest["complete"] = True
    save_manifest(out, manifest)


def _counts(manifest: dict) -> str:
    notes = {"with invalid UTF-8 repaired": manifest["repaired"]}
    notes |= {f"skipped ({reason})": count for reason, count in manifest["skipped"].items()}
    return _plural(manifest["documents"], "document") + "".join(f", {n:,} {what}" for what, n in notes.items() if n)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# ---------------------------------------------------------------------------------------------------------------------
# the command


def parse_args(argv: Sequence[str] | None) -> PrepareOptions:
    """Parse the command line; fill in name and folder.

    Raises: UserError.
    """
    options = parse_options(PrepareOptions, argv, __doc__.partition("\n")[0])
    name = options.name or default_name(options.source)
    if not re.fullmatch(r"[\w.-]+", name):
        raise OptionError("name", repr(name), "only letters, digits and . _ -")
    out = options.out or str(DEFAULT_FOLDER if options.source == "fineweb-edu" else Path("data", name))
    return dataclasses.replace(options, name=name, out=out)


def default_name(source: str) -> str:
    """Return the last part of a source without wildcards and suffix."""
    if source == "fineweb-edu":
        return "edufineweb"
    path = Path(source.split(":")[1]) if source.startswith("hf:") else Path(source)
    last = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts)).resolve().name
    return re.sub(r"[^\w.-]+", "_", last.removesuffix(suffix_of(last))) or "corpus"


def show_progress(
    encoded: Iterable[tuple[Batch, np.ndarray]], bar: tqdm, names: Sequence[str], amount_before: Sequence[int]
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Pass batches on, show the share of the source that is done, and name the first skipped rows on stderr."""
    num_tokens, num_named = 0, 0
    for batch, ids in encoded:
        yield batch, ids
        num_tokens += len(ids)
        bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed'] / 1e6:.1f} M tokens/s", refresh=False)
        bar.update(amount_before[batch[-1].at.file] + batch[-1].amount_read - bar.n)
        for piece in [piece for piece in batch if piece.skipped][: NAMED_SKIPS - num_named]:
            name = names[piece.at.file].removeprefix(f"{STDLIB}{os.sep}")
            bar.write(f"skipped {name}:{piece.at.row + 1}: {piece.skipped}", file=sys.stderr)
            num_named += 1


def prepare(options: PrepareOptions, source: str, files: Sequence[Path], manifest: dict) -> None:
    """Write the shards that `manifest` lacks, from files, or from the Hub if there are none.

    Raises: UserError; OSError when a shard cannot be written.
    """
    start = Position(*(manifest["next"][field] for field in Position._fields))
    if not files:
        dataset = load_hub(source, streaming=options.streaming)
        rows = hub_rows(dataset, source, options.text_field, start)
        names, amount_before, total, unit = [source], [0], getattr(dataset, "num_rows", None), " documents"
    else:
        rows, names, unit = file_rows(files, options.text_field, start), [str(file) for file in files], "B"
        *amount_before, total = accumulate((file.stat().st_size for file in files), initial=0)
    batches = gather_batches(read_pieces(rows, start))
    num_workers = options.num_workers or usable_cores()
    interval_s = 0.1 if sys.stderr.isatty() else 60
    with (
        tqdm(desc="tokenizing", total=total, unit=unit, unit_scale=True, mininterval=interval_s) as bar,
        closing(encode_all(batches, get_tokenizer(options.tokenizer), num_workers)) as encoded,
    ):
        write_shards(show_progress(encoded, bar, names, amount_before), Path(options.out), manifest)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data that the command line asks for.

    Raises: UserError.
    """
    start_s, options = time.monotonic(), parse_args(argv)
    out, source = Path(options.out), FINEWEB_EDU if options.source == "fineweb-edu" else options.source
    files = [] if source.startswith("hf:") else find_files(source)
    if options.val_tokens is None:
        limit = sum(file.stat().st_size for file in files) // 40 if files else options.shard_size
        options = dataclasses.replace(options, val_tokens=min(options.shard_size, limit))
    same = ("source", "name", "tokenizer", "shard_size", "val_tokens", "text_field")
    identity: dict = {"format_version": FORMAT_VERSION, "files": fingerprint(files) if files else None}
    identity |= {key: getattr(options, key) for key in same}
    manifest = load_manifest(out, identity)
    if manifest and manifest["complete"]:
        print(f"{out}: already complete")
    else:
        vocab_size = get_tokenizer(options.tokenizer).n_vocab
        dtype = token_dtype(vocab_size)
        manifest = manifest or (
            identity
            | {"complete": False, "vocab_size": vocab_size, "dtype": dtype.name}
            | {"documents": 0, "repaired": 0, "skipped": {}, "tokens": 0, "shards": []}
            | {"next": Position()._asdict() | {"skip_tokens": 0}}
        )
        with lock_folder(out, "wait until it has finished, or use a different --out"):
            try:
                save_manifest(out, manifest)  # before any shard, because shards without a manifest are refused
                prepare(options, source, files, manifest)
            except OSError as error:
                shard_bytes = options.shard_size * dtype.itemsize
                raise UserError(
                    f"{error.filename or out}: {error.strerror or error}; {shutil.disk_usage(out).free:,} bytes are "
                    f"free, a shard takes {shard_bytes:,}; fix it and run the same command again to continue"
                ) from error
            except KeyboardInterrupt:
                print("stopped; run the same command again to continue", file=sys.stderr)
                raise
    splits = Counter(shard["split"] for shard in manifest["shards"])
    flags = f"--data_dir {shlex.quote(str(out))}"
    if manifest["tokens"] < SMALL_TOKENS:
        name = options.name
        flags = f"--config quickstart {flags} --checkpoint_dir checkpoints/{name} --logdir logs/{name}"
    print(
        f"{_counts(manifest)}, {manifest['tokens']:,} tokens\n{_plural(splits['val'], 'val shard')} and "
        f"{_plural(splits['train'], 'train shard')} in {out} ({time.monotonic() - start_s:.1f} s)\n"
        f"next: python train.py {flags}"
    )
    return 0


if __name__ == "__main__":
    run_cli(main)
