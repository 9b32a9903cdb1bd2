"""Text from the Hub, from files or from Python's own library -> token shards and their manifest.json.

    python prepare_dataset.py                                      # FineWeb-Edu, 10 B tokens, GPT-2's vocabulary
    python prepare_dataset.py --source stdlib --tokenizer bytes    # nothing to download
    python prepare_dataset.py --source 'corpus/*.jsonl.gz' --text_field content --out data/corpus

source -> rows -> pieces -> batches -> ids -> shards. Each follows from the source and a position in it alone, so the
shards are the same bytes for any number of workers, and after a kill the same command continues.
"""

import argparse
import glob
import io
import json
import os
import re
import shlex
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import tiktoken
from tqdm import tqdm

from steadygpt.cli import OneLineParser, UserError, run_cli
from steadygpt.durable import lock_folder, replace_file
from steadygpt.shards import MANIFEST, open_shard, token_dtype, write_shard
from steadygpt.sources import READERS, STDLIB, Position, Row, file_rows, find_files, fingerprint, hub_rows, load_hub
from steadygpt.tokenizer import END_OF_TEXT, get_tokenizer

FORMAT_VERSION = 1
FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
BATCH_CHARS = 2**20  # for one call of the tokenizer
# Longer documents are cut. A piece may be twice as long, and tiktoken's regex gives up on a run of a million spaces.
PIECE_CHARS = 400_000
RUN_AHEAD = 32  # batches beyond one per worker, so that none is idle while a shard is written
NAMED_SKIPS = 5  # skipped rows that are named on stderr
SMALL_TOKENS = 50_000_000  # for fewer the quickstart's model is proposed

# ---------------------------------------------------------------------------------------------------------------------
# rows -> pieces -> batches -> ids


class Piece(NamedTuple):
    """A document, or a part of a long one; or a row that was skipped."""

    at: Position
    amount_read: int  # see Row
    text: str = ""
    skipped: str = ""  # why, if it was
    repaired: bool = False  # the first of its document with U+FFFD for what was no Unicode


Batch = list[Piece]
_BEFORE_LAST_CUT = re.compile(r"(?s:.*)\S(?= )")


def split_text(file: TextIO) -> Iterator[str]:
    """A text in pieces of about PIECE_CHARS whose ids, one after the other, are those of the whole.

    Cut before a space that follows a non-space: pre-tokenizers in the line of GPT-2's begin a new word there,
    whatever stands around. Cut anywhere where there is no such space.
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
    """The pieces of the rows, from `start` on."""
    for at, value, amount_read in rows:
        file = io.StringIO(value) if isinstance(value, str) else value
        if not isinstance(file, io.TextIOBase):
            reason = str(value) if isinstance(value, ValueError) else f"{type(value).__name__}, not a string"
            yield Piece(at, amount_read(), skipped=reason)
            continue
        is_repaired = False
        for number, text in enumerate(split_text(file)):
            at = at._replace(piece=number)
            # U+FFFD for lone surrogates: bytes that are no UTF-8, or escapes in JSON
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if number == 0 and len(text) < PIECE_CHARS and not text.strip():
                yield Piece(at, amount_read(), skipped="no text")
            elif at >= start:
                yield Piece(at, amount_read(), clean, repaired=clean != text and not is_repaired)
            is_repaired |= clean != text


def gather_batches(pieces: Iterable[Piece]) -> Iterator[Batch]:
    """Consecutive pieces, together BATCH_CHARS or a little more."""
    batch, size = [], 0
    for piece in pieces:
        # A later piece of a document begins a batch: next to the one before, the cut between them would be undone.
        if size >= BATCH_CHARS or (batch and piece.at.piece > 0):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.text) + 64  # a skipped row takes memory too
    if batch:
        yield batch


def encode(tokenizer: tiktoken.Encoding, batch: Batch) -> np.ndarray:
    """The ids of a batch, (n,) uint32: <|endoftext|> before each document, all the rest is ordinary text."""
    pieces = [piece for piece in batch if not piece.skipped]
    joined = "".join(END_OF_TEXT * (piece.at.piece == 0) + piece.text for piece in pieces)
    if joined.count(END_OF_TEXT) == sum(piece.at.piece == 0 for piece in pieces):
        # One long call does without the GIL nearly all of its time, a call per document does not.
        return tokenizer.encode_to_numpy(joined, allowed_special={END_OF_TEXT}, disallowed_special=())
    ids = []  # a document speaks of <|endoftext|>
    for piece in pieces:
        ids += [tokenizer.eot_token] * (piece.at.piece == 0) + tokenizer.encode_ordinary(piece.text)
    return np.array(ids, np.uint32)


def encode_all(
    batches: Iterable[Batch], tokenizer: tiktoken.Encoding, num_workers: int
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Each batch and its ids (n,), in order; at most num_workers + RUN_AHEAD batches are in memory."""
    pending: deque[tuple[Batch, Future]] = deque()
    own = threading.local()

    def copy_tokenizer() -> None:
        # Threads that share a tokenizer contend for its regex's scratch space, at worst for half of their time.
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
    """The manifest of an earlier run of the same preparation; None for a folder without shards.

    Raises: UserError when the folder holds anything else.
    """
    advice = f"use another --out, or empty {out}"
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        differ = [f"{k} {manifest[k]!r}, now it is {new!r}" for k, new in identity.items() if manifest[k] != new]
        shards = {out / shard["file"]: shard["tokens"] for shard in manifest["shards"]}
    except FileNotFoundError:
        if foreign := sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin")):
            raise UserError(f"{out} holds {foreign[0]} but no {MANIFEST}; {advice}") from None
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / MANIFEST}: not a manifest ({error!r}); {advice}") from error
    if not shards:
        return None  # a command that came to nothing, as one with the wrong --text_field, binds nobody
    if differ:
        raise UserError(f"{out} was begun with {'; '.join(differ)}; {advice}")
    for path, num_tokens in shards.items():
        if not path.exists() or open_shard(path).num_tokens != num_tokens:
            raise UserError(f"{path}: missing or not whole, though {MANIFEST} lists it; empty {out} and start again")
    return manifest


def save_manifest(out: Path, manifest: dict) -> None:
    """Replace the manifest, durably."""
    replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(manifest, indent=2)}\n".encode()))


def next_shard(manifest: dict) -> tuple[str, int]:
    """The split and the size in tokens of the shard after the finished ones; the stream begins with val."""
    val_left = manifest["val_tokens"] - manifest["tokens"]
    return ("val", min(val_left, manifest["shard_size"])) if val_left > 0 else ("train", manifest["shard_size"])


def finish_shard(out: Path, manifest: dict, ids: np.ndarray) -> None:
    """Write ids (n,) as the next shard, durably, and enter it in the manifest."""
    split, _ = next_shard(manifest)
    name = f"{manifest['name']}_{split}_{len(manifest['shards']):06d}.npy"
    digest = write_shard(out / name, ids)
    manifest["shards"].append({"file": name, "split": split, "tokens": len(ids), "sha256": digest})
    manifest["tokens"] += len(ids)


def write_shards(encoded: Iterable[tuple[Batch, np.ndarray]], out: Path, manifest: dict) -> None:
    """Write the shards that are missing; after each, the manifest on the disk says where the next one begins.

    Args:
        encoded: batches and their ids, beginning with the batch at manifest["next"].

    Raises: UserError when the val split leaves no token for train; OSError when a shard cannot be written.
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
        # Only now: what is saved above counts the batches before "next", where a resumed run begins to count.
        manifest["documents"] += sum(piece.at.piece == 0 and not piece.skipped for piece in batch)
        manifest["repaired"] += sum(piece.repaired for piece in batch)
        manifest["skipped"] = Counter(manifest["skipped"]) + Counter(p.skipped for p in batch if p.skipped)
        taken = 0
    if (num_tokens := manifest["tokens"] + filled) <= manifest["val_tokens"]:
        for path in [*(out / shard["file"] for shard in manifest["shards"]), out / MANIFEST]:
            path.unlink()
        raise UserError(
            f"{manifest['source']}: {num_tokens:,} tokens ({_counts(manifest)}), and --val_tokens "
            f"{manifest['val_tokens']} leaves none for train; use "
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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with a name and a folder where none are given.

    Raises: UserError.
    """
    parser = OneLineParser(description=__doc__.partition("\n")[0])

    def option(name: str, kind: type, default: object, meaning: str) -> None:
        meaning += f" (default: {default})" if default is not None else ""
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__.upper(), help=meaning)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    option("source", str, "fineweb-edu", "fineweb-edu, stdlib, hf:NAME[:CONFIG], or a file, folder or glob")
    option("tokenizer", str, "gpt2", "gpt2, bytes, or any other of tiktoken's")
    option("shard_size", int, 100_000_000, "tokens per shard")
    option("val_tokens", int, None, "size of val, the source's start (default: a shard; of files at most bytes / 40)")
    option("num_workers", int, cores, "threads that tokenize")
    option("out", Path, None, "folder of the shards (default: data/NAME; of fineweb-edu data/edu_fineweb10B)")
    option("name", str, None, "what the shards' file names begin with (default: the last part of --source)")
    option("text_field", str, "text", "JSON field or column that holds a document's text")
    parser.add_argument("--streaming", action="store_true", help="read a Hub data set as it downloads (default: off)")
    args = parser.parse_args(argv)
    for name, least in (("shard_size", 1), ("num_workers", 1), ("val_tokens", 0)):
        if (value := getattr(args, name)) is not None and not least <= value <= 2**31:
            raise UserError(f"--{name} is {value}; expected {least} to {2**31}")
    args.name = args.name or default_name(args.source)
    if not re.fullmatch(r"[\w.-]+", args.name):
        raise UserError(f"--name is {args.name!r}; expected letters, digits and . _ - only")
    args.out = args.out or Path("data", "edu_fineweb10B" if args.source == "fineweb-edu" else args.name)
    return args


def default_name(source: str) -> str:
    """The last part of a source that is no wildcard, without its suffix."""
    if source == "fineweb-edu":
        return "edufineweb"
    path = Path(source.split(":")[1]) if source.startswith("hf:") else Path(source)
    last = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts)).resolve().name
    suffix = next((suffix for suffix in READERS if last.lower().endswith(suffix)), "")
    return re.sub(r"[^\w.-]+", "_", last.removesuffix(suffix)) or "corpus"


def show_progress(
    encoded: Iterable[tuple[Batch, np.ndarray]], bar: tqdm, names: Sequence[object], amount_before: Sequence[int]
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Pass batches on; the bar shows how much of the source is done, stderr names the first skipped rows."""
    num_tokens, num_named = 0, 0
    for batch, ids in encoded:
        yield batch, ids
        num_tokens += len(ids)
        bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed'] / 1e6:.1f} M tokens/s", refresh=False)
        bar.update(amount_before[batch[-1].at.file] + batch[-1].amount_read - bar.n)
        for piece in [piece for piece in batch if piece.skipped][: NAMED_SKIPS - num_named]:
            name = str(names[piece.at.file]).removeprefix(f"{STDLIB}{os.sep}")
            bar.write(f"skipped {name}:{piece.at.row + 1}: {piece.skipped}", file=sys.stderr)
            num_named += 1


def prepare(args: argparse.Namespace, hub: str, files: Sequence[Path], manifest: dict) -> None:
    """Bring the shards that `manifest` lacks into args.out.

    Raises: UserError; OSError when a shard cannot be written.
    """
    start = Position(*(manifest["next"][field] for field in Position._fields))
    if hub:
        dataset = load_hub(hub, streaming=args.streaming)
        rows = hub_rows(dataset, hub, args.text_field, start)
        names, amount_before, total, unit = [hub], [0], getattr(dataset, "num_rows", None), " documents"
    else:
        rows, names, unit = file_rows(files, args.text_field, start), files, "B"
        *amount_before, total = accumulate((file.stat().st_size for file in files), initial=0)
    batches = gather_batches(read_pieces(rows, start))
    every_s = 0.1 if sys.stderr.isatty() else 60
    with (
        tqdm(desc="tokenizing", total=total, unit=unit, unit_scale=True, mininterval=every_s) as bar,
        closing(encode_all(batches, get_tokenizer(args.tokenizer), args.num_workers)) as encoded,
    ):
        write_shards(show_progress(encoded, bar, names, amount_before), args.out, manifest)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare what the command line asks for; returns the exit status.

    Raises: UserError.
    """
    begun_s, args = time.monotonic(), parse_args(argv)
    hub = (
        "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
        if args.source == "fineweb-edu"
        else args.source * args.source.startswith("hf:")
    )
    files = [] if hub else find_files(args.source)
    if args.val_tokens is None:
        num_bytes = sum(file.stat().st_size for file in files)
        args.val_tokens = args.shard_size if hub else min(args.shard_size, num_bytes // 40)
    same = ("source", "name", "tokenizer", "shard_size", "val_tokens", "text_field")
    identity = {"format_version": FORMAT_VERSION, "files": None if hub else fingerprint(files)}
    identity |= {key: getattr(args, key) for key in same}
    manifest = load_manifest(args.out, identity)
    if manifest and manifest["complete"]:
        print(f"{args.out} is complete, nothing is left to do")
    else:
        vocab_size = get_tokenizer(args.tokenizer).n_vocab
        manifest = manifest or (
            identity
            | {"complete": False, "vocab_size": vocab_size, "dtype": token_dtype(vocab_size).name}
            | {"documents": 0, "repaired": 0, "skipped": {}, "tokens": 0, "shards": []}
            | {"next": Position()._asdict() | {"skip_tokens": 0}}
        )
        with lock_folder(args.out, "wait until it is done, or use another --out"):
            try:
                save_manifest(args.out, manifest)  # first: shards without one are taken for someone else's
                prepare(args, hub, files, manifest)
            except OSError as error:
                raise UserError(f"{args.out}: {error}; make room, and the same command continues") from error
            except KeyboardInterrupt:
                print("stopped; run the same command again and it continues", file=sys.stderr)
                raise
    splits = Counter(shard["split"] for shard in manifest["shards"])
    flags = f"--data_dir {shlex.quote(str(args.out))}"
    if manifest["tokens"] < SMALL_TOKENS:
        flags = f"--config quickstart {flags} --checkpoint_dir checkpoints/{args.name} --logdir logs/{args.name}"
    print(
        f"{_counts(manifest)}, {manifest['tokens']:,} tokens\n{_plural(splits['val'], 'val shard')} and "
        f"{_plural(splits['train'], 'train shard')} in {args.out} ({time.monotonic() - begun_s:.1f} s)\n"
        f"next: python train.py {flags}"
    )
    return 0


if __name__ == "__main__":
    run_cli(main)
