"""Token shards and their manifest.json, from text or token ids of the Hugging Face Hub, object stores or files.

    python prepare_dataset.py                                      # FineWeb-Edu, 10 B tokens, GPT-2's vocabulary
    python prepare_dataset.py --source stdlib --tokenizer bytes    # nothing to download
    python prepare_dataset.py --source 'corpus/*.jsonl.gz' --text_field content --out data/corpus
    python prepare_dataset.py --source corpus/ --tokenizer bpe:32768               # trains a tokenizer first
    python prepare_dataset.py --source 'gs://bucket/*.npz' --tokenizer gpt2        # token ids, or text, of a store

A source is cut into units, which depend only on its files. Workers encode units, and a shard or the validation split
ends with a unit. So the shards are byte-identical for any number of workers, the same text is in the validation split
for every tokenizer, and after a kill the same command resumes with the unit after the last shard.
"""

import dataclasses
import glob
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np

from steadygpt.base.disk import disks, existing
from steadygpt.base.durable import lock_folder, replace_file
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar, say
from steadygpt.base.text import bytes_text, counted
from steadygpt.base.typed import Count, read_json
from steadygpt.data.documents import LINES, NO_TEXT, Part, cut_document, read_documents, repair, suffix_of
from steadygpt.data.shards import (
    DEFAULT_FOLDER,
    MANIFEST,
    ShardEntry,
    check_vocabulary,
    open_shard,
    token_dtype,
    write_shard,
)
from steadygpt.data.sources import FINEWEB_EDU, STDLIB, Source, find_source, fingerprint
from steadygpt.data.tokenizer import (
    END_OF_TEXT,
    GPT2_TOKENIZER,
    TOKENIZER_JSON,
    TokenizerRecord,
    fetch_json,
    load_tokenizer,
    record_named,
    vocab_size_of,
    vocab_size_to_train,
)
from steadygpt.data.train_tokenizer import TRAINING_BYTES, train_tokenizer
from steadygpt.data.workers import map_in_order
from steadygpt.machine.host import usable_cores

DESCRIPTION = (
    "Write token shards from text or token ids in files, object stores, the Hugging Face Hub or Python's library. The "
    "default, 10 B tokens of FineWeb-Edu, downloads 27 GB and needs 24 GB of disk at peak, 20 GB afterwards, and "
    "0.5 GB of memory plus 0.14 GB per worker. After an interruption, run the same command again to resume."
)
IN_USE = "wait until it has finished, or use a different --out"
DOWNLOADS = ".download"  # in the folder of the shards
NAMED_SKIPS = 5  # skipped rows that are named on stderr; empty ones are only counted
VAL_BYTES = 400_000_000  # of text in val, at most; then the unit is completed
SAMPLE_BYTES = 2**20  # of text that is encoded to estimate the number of tokens
SMALL_TOKENS = 50_000_000  # below this, the proposed next command trains the quickstart's model


@dataclass(frozen=True)
class PrepareOptions:
    source: str = option(
        "fineweb-edu",
        "fineweb-edu, stdlib, hf:NAME[@REVISION][:CONFIG], or a file, folder or glob, on this machine or in an object "
        "store ('gs://bucket/*.npz'); .npz, .npy and .bin files hold token ids",
        no_password=True,
    )
    max_files: int | None = option(None, "use the first N files, sorted by name (default: all)", at_least=1)
    tokenizer: str = option(
        "",
        "gpt2, bytes or another tiktoken name; bpe:N to train one of N tokens on the source; hf:NAME[@REVISION] "
        "or the path of a byte-level BPE tokenizer.json (default: gpt2; for token ids, name the one that wrote them)",
    )
    tokenizer_bytes: int | None = option(
        None,
        f"bytes of text to train bpe:N on, spread evenly over the source (default: {TRAINING_BYTES:,})",
        at_least=1,
    )
    document_token: str = option("", f"special token to put before each document (default: {END_OF_TEXT})")
    shard_size: int = option(100_000_000, "tokens per shard, at most", at_least=1, at_most=2**31)
    val_tokens: int | None = option(
        None,
        "tokens of the val split, from the start of the source, at least (default: 1/40 of the source, at most 400 MB)",
        at_most=2**31,
    )
    num_workers: int | None = option(
        None, "number of worker processes (default: one per core; 1 for token ids)", at_least=1, at_most=1024
    )
    out: str = option("", f"folder for the shards (default: data/NAME; for fineweb-edu {DEFAULT_FOLDER})")
    name: str = option("", "prefix of the shards' file names (default: the last part of --source)")
    text_field: str = option("text", "JSON field or column with a document's text, or array in an .npz file")
    streaming: bool = option(
        False, "read a Hub data set or an object store over the network, without downloading files to disk"
    )
    keep_download: bool = option(
        False,
        "keep a Hub data set in the Hub's cache, instead of deleting each file once its tokens are in shards",
    )


# ---------------------------------------------------------------------------------------------------------------------
# units -> ids


class Encoded(NamedTuple):
    """The ids of a unit."""

    ids: np.ndarray  # (n,), of the shards' dtype
    rows: list[int]  # documents of each part, with the skipped ones; a text is one, in its first part
    skipped: list[list[tuple[int, str]]]  # of each part the rows, counted from 0, and the reasons
    documents: int = 0
    repaired: int = 0  # characters U+FFFD that replace invalid Unicode
    text_bytes: int = 0
    spelled: int = 0  # how often texts contain the characters of the document token


def encode(unit: list[Part], record: TokenizerRecord, out: Path, vocab_size: int, text_field: str) -> Encoded:
    """Encode the documents of a unit, with the document token before each and nowhere else.

    Token ids are checked instead.

    Args:
        record: of the tokenizer, whose file is in the folder `out`, if it has one.
    """
    dtype = token_dtype(vocab_size)
    blocks = [part.data for part in unit if isinstance(part.data, np.ndarray)]
    if blocks:  # then all parts are: a source holds text or ids
        for part, block in zip(unit, blocks, strict=True):
            check_vocabulary(part.name, block, vocab_size)
        return Encoded(np.concatenate([block.astype(dtype) for block in blocks]), [0] * len(unit), [[]] * len(unit))
    tokenizer = load_tokenizer(record, out)
    begin = np.array([tokenizer.document_id], dtype).tobytes()
    ids, rows, skipped = bytearray(), list[int](), list[list[tuple[int, str]]]()
    documents, repaired, text_bytes, spelled = 0, 0, 0, 0
    for part in unit:
        rows.append(0)
        skipped.append([])
        for text, is_begin in read_documents(part, text_field):
            rows[-1] += is_begin
            if not isinstance(text, str):
                kind = "null" if text is None else type(text).__name__
                reason = str(text) if isinstance(text, ValueError) else f"{kind}, not a string"
                skipped[-1].append((rows[-1] - 1, reason))
                continue
            clean = repair(text)
            repaired += clean.count("\ufffd") - text.count("\ufffd") if clean is not text else 0
            documents += is_begin
            spelled += clean.count(tokenizer.document_token)
            text_bytes += len(clean.encode())
            ids += begin * is_begin
            for piece in cut_document(clean):
                ids += tokenizer.encode_to_numpy(piece).astype(dtype).tobytes()
    return Encoded(np.frombuffer(ids, dtype), rows, skipped, documents, repaired, text_bytes, spelled)


# ---------------------------------------------------------------------------------------------------------------------
# the tokenizer


def obtain_tokenizer(options: PrepareOptions, source: Source, out: Path) -> tuple[TokenizerRecord, int]:
    """Return the record of --tokenizer and its number of ids, and write its tokenizer.json, if it has one, to `out`."""
    name = options.tokenizer or "gpt2"
    record = TokenizerRecord(name, document_token=options.document_token or END_OF_TEXT)
    is_trained, path = name.startswith("bpe:"), out / TOKENIZER_JSON
    if options.tokenizer_bytes and not is_trained:
        raise UserError(f"--tokenizer_bytes is for --tokenizer bpe:N, found {name}; drop it")
    if is_trained and record.document_token != END_OF_TEXT:
        raise UserError(f"--document_token is {record.document_token!r}, but {name} has only {END_OF_TEXT}; drop it")
    if source.holds_ids and record == TokenizerRecord("gpt2"):
        return GPT2_TOKENIZER, vocab_size_of(GPT2_TOKENIZER)  # needs no vocabulary
    if record.is_file:
        text = trained_json(options, source, out) if is_trained else fetch_json(name)
        record = record._replace(tokenizer_json=text)
        _ = load_tokenizer(record).document_id  # refuses it before it is written
        if path.exists() and not (out / MANIFEST).exists() and path.read_bytes() != text.encode():
            raise UserError(
                f"{path}: not the file of --tokenizer {name}, and it would be replaced; move it, or give its path "
                "with --tokenizer"
            )
        replace_file(path, lambda file: file.write(text.encode()))
    tokenizer = load_tokenizer(record)
    _ = tokenizer.document_id  # raises if it has no such token
    return record._replace(tokenizer_sha256=tokenizer.sha256), tokenizer.n_vocab


def trained_json(options: PrepareOptions, source: Source, out: Path) -> str:
    """Return the tokenizer.json that bpe:N gives, from the folder if an earlier start has finished it there."""
    vocab_size, limit = vocab_size_to_train(options.tokenizer), options.tokenizer_bytes or TRAINING_BYTES
    if source.holds_ids:
        raise UserError(
            f"{source.names[0]}: holds token ids; --tokenizer is {options.tokenizer}, expected the one that wrote them"
        )
    asked = {"tokenizer": options.tokenizer, "tokenizer_bytes": limit, "text_field": options.text_field}
    asked |= {"commit": source.commit, "files": fingerprint(source.identities)}
    with suppress(OSError, UserError):  # nothing finished
        earlier = read_json(out / MANIFEST, dict, "")
        if asked.items() <= earlier.items():
            return load_tokenizer(TokenizerRecord.of(earlier), out).json
    return train_tokenizer(source, options.text_field, vocab_size, limit)


# ---------------------------------------------------------------------------------------------------------------------
# ids -> shards


class Next(TypedDict):
    """Where the unit after the last shard begins."""

    file: Count
    part: Count
    row: Count  # of the file


@dataclass(kw_only=True)
class Manifest:
    """The content of manifest.json: the options, the shards so far, and where an unfinished preparation resumes."""

    source: str
    name: str
    tokenizer: str
    tokenizer_sha256: str = ""  # its identity
    tokenizer_bytes: Count = 0  # of text that it was trained on here, at most
    document_token: str = END_OF_TEXT
    shard_size: Annotated[int, 1]
    val_tokens: Count | None  # None if val_bytes decides
    val_bytes: Count = 0  # of text in val, at least
    text_field: str
    commit: str  # of a data set of the Hub
    files: str  # the source's fingerprint
    complete: bool = False
    vocab_size: Count
    dtype: Annotated[str, "uint16|uint32"]
    documents: Count = 0
    repaired: Count = 0
    spelled: Count = 0
    skipped: dict[str, Count] = field(default_factory=dict)  # reason -> rows
    text_bytes: Count = 0
    tokens: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    next: Next = field(default_factory=lambda: Next(file=0, part=0, row=0))  # unless complete

    @staticmethod
    def begin(options: PrepareOptions, source: Source, out: Path) -> "Manifest":
        """Return the manifest of a new preparation, and train, download or copy the tokenizer.json that it asks for.

        Options that are not given depend on the source.
        """
        if source.holds_ids and not options.tokenizer:
            raise UserError(
                f"{source.names[0]}: holds token ids; name the tokenizer that wrote them with --tokenizer, such as gpt2"
            )
        with lock_folder(out, IN_USE) if TokenizerRecord(options.tokenizer).is_file else nullcontext():
            check_not_overtaken(options, out, [])
            record, vocab_size = obtain_tokenizer(options, source, out)
            manifest = Manifest.of(options, source, record, vocab_size)
            if record.is_file:
                manifest.save(out)  # for trained_json, if this preparation ends before its first shard
        return manifest

    @staticmethod
    def of(options: PrepareOptions, source: Source, record: TokenizerRecord, vocab_size: int) -> "Manifest":
        """Return the manifest of a new preparation with a tokenizer."""
        val_by_bytes = options.val_tokens is None and not source.holds_ids
        asked = {key: getattr(options, key) for key in ("source", "name", "shard_size", "val_tokens", "text_field")}
        found: dict[str, Any] = {
            "commit": source.commit,
            "files": fingerprint(source.identities),
            "dtype": token_dtype(vocab_size).name,
            "val_bytes": min(VAL_BYTES, math.ceil(source.stored_bytes / 40) or VAL_BYTES) if val_by_bytes else 0,
            **{key: getattr(record, key) for key in ("tokenizer", "tokenizer_sha256", "document_token")},
        }
        if record.tokenizer.startswith("bpe:"):
            found["tokenizer_bytes"] = options.tokenizer_bytes or TRAINING_BYTES
        return Manifest(**asked, **found, vocab_size=vocab_size)

    @staticmethod
    def load(out: Path, options: PrepareOptions) -> "Manifest | None":
        """Read the manifest that an earlier run of the same preparation left; None if there is no shard to keep."""
        advice = f"use a different --out, or empty {out}"
        try:
            manifest = read_json(out / MANIFEST, Manifest, f"so it is not a manifest; {advice}")
        except FileNotFoundError:
            if foreign := sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin")):
                raise UserError(f"{out}: holds {foreign[0]} but no {MANIFEST}; {advice}") from None
            return None
        except NotADirectoryError:
            raise UserError(f"--out {out} is a file; expected a folder") from None
        if not manifest.shards:
            return None
        asked, path = dict(vars(options)), Path(options.tokenizer)
        if path.suffix == ".json" and path.exists():  # the content counts, not the name
            is_same = record_named(options.tokenizer).tokenizer_sha256 == manifest.tokenizer_sha256
            asked["tokenizer"] = manifest.tokenizer if is_same else f"a different one in {path}"
        differ = [
            f"{key} {getattr(manifest, key)!r}, but now it is {now!r}"
            for key, now in asked.items()
            if hasattr(manifest, key) and now not in (None, "", getattr(manifest, key))
        ]
        if differ:
            raise UserError(f"{out}: prepared with {'; '.join(differ)}; {advice}")
        for path, num_tokens in ((out / shard["file"], shard["tokens"]) for shard in manifest.shards):
            if not path.exists() or open_shard(path).num_tokens != num_tokens:
                raise UserError(
                    f"{path}: missing or damaged, though {MANIFEST} lists it; empty {out} and prepare it again"
                )
        return manifest

    def encoder(self, out: Path) -> Callable[[list[Part]], Encoded]:
        """Return the function that encodes a unit, for workers."""
        record = TokenizerRecord.of(vars(self))
        return partial(encode, record=record, out=out, vocab_size=self.vocab_size, text_field=self.text_field)

    def save(self, out: Path) -> None:
        """Replace the manifest atomically."""
        content = {key: value for key, value in vars(self).items() if key != "next" or not self.complete}
        replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))

    def split_of(self, found: Encoded) -> str:
        """Return the split of the next unit. Val comes first, until it has val_tokens or val_bytes.

        A unit that would make it four times val_bytes is left to train, unless it is the first.
        """
        there = self.text_bytes
        is_val = there < self.val_bytes and (there == 0 or there + found.text_bytes < 4 * self.val_bytes)
        if self.val_tokens is not None:
            is_val = self.tokens < self.val_tokens
        return "val" if is_val else "train"

    def add(self, found: Encoded) -> None:
        """Count a unit."""
        self.documents += found.documents
        self.repaired += found.repaired
        self.spelled += found.spelled
        self.text_bytes += found.text_bytes
        self.tokens += len(found.ids)
        self.skipped = Counter(self.skipped) + Counter(reason for rows in found.skipped for _, reason in rows)

    def write(self, out: Path, split: str, units: list[np.ndarray]) -> None:
        """Write the ids of units (n,) as the next shard, or as several if one unit has more than shard_size."""
        if len(units) > 1:
            shards = [units]
        else:
            shards = [[ids] for ids in np.split(units[0], range(self.shard_size, len(units[0]), self.shard_size))]
        for parts in shards:
            name = f"{self.name}_{split}_{len(self.shards):06d}.npy"
            digest = write_shard(out / name, *parts)
            self.shards.append({"file": name, "split": split, "tokens": sum(map(len, parts)), "sha256": digest})

    def counts(self) -> str:
        """Return what was read, in words."""
        notes = [counted(self.documents, "document")] if self.documents else []  # not known of token ids
        notes += [f"{count:,} skipped ({reason})" for reason, count in self.skipped.items()]
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        if self.spelled:
            notes.append(f"{self.spelled:,} {self.document_token} inside texts encoded as text")
        return ", ".join([*notes, f"{self.tokens:,} tokens"])


def check_not_overtaken(options: PrepareOptions, out: Path, shards: Sequence[ShardEntry]) -> None:
    """Check that a folder, which is now locked, has the shards that it had before."""
    if (there := Manifest.load(out, options)) and there.shards != shards:
        raise UserError(f"{out}: another command has written shards meanwhile; run this again")


def write_shards(
    encoded: Iterable[tuple[list[Part], Encoded]], out: Path, manifest: Manifest, release: Callable[[int], object]
) -> None:
    """Write the missing shards; after each, save in the manifest which unit comes next. Name the first skipped rows.

    Args:
        encoded: units and their ids, from the unit at manifest.next on.
        release: is called with a file number once all files before it are in shards.
    """
    held, split, row, named = list[np.ndarray](), "val", manifest.next["row"], 0

    def save_shard(before: Manifest, split: str, units: list[np.ndarray]) -> None:
        before.write(out, split, units)
        before.save(out)
        release(before.next["file"])

    with ThreadPoolExecutor(1) as writer:  # so that workers get units while a shard is written
        saved: Future = writer.submit(bool)  # the last one; at first, nothing
        for unit, found in encoded:
            is_full = sum(map(len, held)) + len(found.ids) > manifest.shard_size
            if held and (is_full or manifest.split_of(found) != split):
                saved.result()
                place = Next(file=unit[0].file, part=unit[0].number, row=row if unit[0].number else 0)
                saved = writer.submit(save_shard, dataclasses.replace(manifest, next=place), split, held)
                held = []
            if len(found.ids):
                split = manifest.split_of(found)
                held.append(found.ids)
            manifest.add(found)
            for part, rows, skipped in zip(unit, found.rows, found.skipped, strict=True):
                row = row if part.number else 0
                for at, reason in [skip for skip in skipped if skip[1] != NO_TEXT][: NAMED_SKIPS - named]:
                    say(f"skipped {part.name.removeprefix(f'{STDLIB}{os.sep}')}:{row + at + 1}: {reason}")
                    named += 1
                row += rows
        saved.result()
    if split == "val" and all(shard["split"] == "val" for shard in manifest.shards):
        written = [out / shard["file"] for shard in manifest.shards]
        dataclasses.replace(manifest, shards=[]).save(out)  # after a kill in between, the same command begins again
        for path in [*written, out / MANIFEST]:
            path.unlink()
        if not manifest.tokens:
            raise UserError(f"{manifest.source}: found nothing ({manifest.counts()}); expected text or token ids")
        val = f"--val_tokens {manifest.val_tokens}"
        if manifest.val_tokens is None:
            val = f"a val split of {counted(manifest.val_bytes, 'byte')}"
        raise UserError(
            f"{manifest.source}: {manifest.counts()}, and {val} leaves none for train; give a smaller --val_tokens, or "
            "0, because rows are not split"
        )
    if held:
        manifest.write(out, split, held)
    manifest.complete = True
    manifest.save(out)


# ---------------------------------------------------------------------------------------------------------------------
# the command


def parse_args(argv: Sequence[str] | None) -> PrepareOptions:
    """Parse the command line; fill in name and folder."""
    options = parse_options(PrepareOptions, argv, DESCRIPTION)
    source = options.source if "://" in options.source else options.source.rstrip("/") or options.source
    is_default = source == "fineweb-edu"
    name = options.name or ("edufineweb" if is_default else default_name(source))
    if not re.fullmatch(r"[\w.-]+", name):
        raise OptionError("name", repr(name), "only letters, digits and . _ -")
    out = options.out or str(DEFAULT_FOLDER if is_default else Path("data", name))
    return dataclasses.replace(options, source=source, name=name, out=out)


def default_name(source: str) -> str:
    """Return the last part of a source without wildcards and suffix."""
    path = Path(re.split("[:@]", source)[1]) if source.startswith("hf:") else Path(source)
    last = Path(os.path.realpath(Path(*takewhile(lambda part: not glob.has_magic(part), path.parts)))).name
    return re.sub(r"[^\w.-]+", "_", last.removesuffix(suffix_of(last))) or "corpus"


def expected(source: Source, manifest: Manifest, out: Path) -> tuple[float, float] | None:
    """Encode some of the next text, and extrapolate its tokens and bytes to all files.

    Returns: None if the size of the files is not known.
    """
    first, total = manifest.next["file"], sum(source.sizes)
    sample, num_bytes = list[Part](), 0
    for part in source.parts(manifest.text_field, manifest.vocab_size, first, in_place=True):
        sample.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= SAMPLE_BYTES:
            break
    read = sum(source.sizes[first : sample[-1].file]) + sample[-1].end if sample else 0
    if not (read and total):
        return None
    encode, token = manifest.encoder(out), manifest.document_token
    found = encode(sample)
    if suffix_of(source.names[first]) in LINES:  # a line may be much longer than its part
        read = max(read, found.text_bytes)
    if found.spelled:
        name = source.names[next((part.file for part in sample if encode([part]).spelled), first)]
        code = f"import json, sys; [print(json.dumps({{'text': t}})) for t in sys.stdin.read().split({token!r})]"
        how = f'line of JSON: python -c "{code}" < TEXT > documents.jsonl'
        how = how if suffix_of(name) in (".txt", ".md", ".py") else "row of its own"
        text = f"{name}: contains {token}, which is encoded as text"
        say(f"{text}. If it separates documents, write each as a {how}")
    reasons = {reason for rows in found.skipped for _, reason in rows if "not a string" in reason}
    if reasons and not found.documents and not manifest.shards:
        raise UserError(
            f"{source.names[first]}: the field {manifest.text_field!r} holds no text ({', '.join(sorted(reasons))}); "
            "set --text_field to the field with the text"
        )
    return len(found.ids) / read * total, found.text_bytes / read * total


def print_forecast(source: Source, manifest: Manifest, out: Path, tokens: float, text_bytes: float) -> None:
    """Print how many tokens and how much disk to expect; check the disk, and the share of val in the text."""
    first, total = manifest.next["file"], sum(source.sizes)
    if 0 < text_bytes < 10 * manifest.val_bytes and not manifest.shards:
        raise UserError(
            f"{source.name}: about {bytes_text(text_bytes)} of text in {bytes_text(total)} of files, too little for a "
            f"val of the usual size; choose its size, such as --val_tokens {int(tokens / 40)}"
        )
    shards = {out: int(max(0, tokens - manifest.tokens)) * np.dtype(manifest.dtype).itemsize}
    downloads = source.needs(first, manifest.shard_size * total / max(tokens, 1))
    what = f"{bytes_text(shards[out])} of shards in {out}"
    what += "".join(f", up to {bytes_text(size)} of downloads in {place}" for place, size in downloads.items() if size)
    at = f" at commit {source.commit[:7]}" if source.commit else ""
    print(
        f"source: {source.name}{at}, {counted(len(source.names), 'file')}, {bytes_text(total)}, about "
        f"{float(f'{tokens:.3g}'):,.0f} tokens\ndisk: about {what}",
        file=sys.stderr,
    )
    or_stream = "use --streaming, which needs no disk for downloads, " if downloads else ""
    for disk, (free, needed) in disks(shards, downloads).items():
        if needed > free:
            raise UserError(
                f"{disk}: {bytes_text(free)} free, {bytes_text(needed)} needed ({what}); free some space, "
                f"{or_stream}or give another --out"
            )


def show_progress(
    encoded: Iterable[tuple[list[Part], Encoded]], bar: ProgressBar, source: Source
) -> Iterator[tuple[list[Part], Encoded]]:
    """Pass units on, and show how much of the source is done."""
    num_tokens, amount_before = 0, [*accumulate(source.sizes, initial=0)]
    for unit, found in encoded:
        yield unit, found
        num_tokens += len(found.ids)
        rate = bar.format_sizeof(num_tokens / (bar.format_dict["elapsed"] or 1))  # 0 with TQDM_DISABLE
        bar.set_postfix_str(f"{rate} tokens/s", refresh=False)
        bar.update(amount_before[unit[-1].file] + unit[-1].end - bar.n)
    source.check_whole()


def write_missing(source: Source, manifest: Manifest, out: Path, options: PrepareOptions) -> None:
    """Write the shards that `manifest` lacks."""
    first, total = manifest.next["file"], sum(source.sizes)
    before = sum(source.sizes[:first])
    with ExitStack() as stack:
        stack.enter_context(lock_folder(out, IN_USE))
        check_not_overtaken(options, out, manifest.shards)
        for folder in (out / DOWNLOADS).glob("*"):
            if folder != source.folder:  # left by a preparation without a shard, which this one replaces
                shutil.rmtree(folder)
        manifest.save(out)  # before any shard, because shards without a manifest are refused
        stack.enter_context(closing(source))
        source.release(first)
        if source.needs(first, 0):
            bar = stack.enter_context(ProgressBar(desc="downloading", total=total, initial=before, unit="B"))
            source.progress = bar.show_from(0)
        desc = "reading ids" if source.holds_ids else "tokenizing"
        bar = ProgressBar(desc=desc, total=total or None, initial=before, unit=source.progress_unit)
        units = source.units(manifest.text_field, manifest.vocab_size, first, manifest.next["part"])
        # Ids are checked as fast as a worker would receive them.
        workers = options.num_workers or (1 if source.holds_ids else usable_cores())
        encoded = stack.enter_context(closing(map_in_order(manifest.encoder(out), units, workers)))
        write_shards(show_progress(encoded, stack.enter_context(bar), source), out, manifest, source.release)


def prepare(options: PrepareOptions, out: Path) -> Manifest:
    """Begin or continue a preparation, and return its manifest when it is complete."""
    name = FINEWEB_EDU if options.source == "fineweb-edu" else options.source
    manifest = Manifest.load(out, options)
    if not (manifest and manifest.complete and name.startswith("hf:")):  # the Hub is not asked without need
        folder = None if options.keep_download else out / DOWNLOADS
        commit = manifest.commit if manifest else ""
        source = find_source(name, commit, options.streaming, folder, options.max_files)
        for folder, path in {path.parent: path for path in source.paths if not source.remote}.items():
            if folder.resolve().is_relative_to(out.resolve()):
                raise UserError(f"{path}: a file of --source in the folder for the shards, {out}; give another --out")
        files = fingerprint(source.identities)
        if manifest and manifest.files != files:
            raise UserError(
                f"{out}: prepared with {manifest.files} of {source.name}, but now found {files}; "
                f"restore the files, use a different --out, or empty {out}"
            )
        if not (manifest and manifest.complete):
            source.check(options.text_field)
            manifest = manifest or Manifest.begin(options, source, out)
            if found := expected(source, manifest, out):
                if manifest.val_tokens is None and source.holds_ids:
                    manifest.val_tokens = min(manifest.shard_size, math.ceil(found[0] / 40))
                print_forecast(source, manifest, out, *found)
            write_missing(source, manifest, out, options)
            return manifest
    print(f"{out}: already complete")
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    start_s, options = time.monotonic(), parse_args(argv)
    out = Path(options.out)
    try:
        manifest = prepare(options, out)
        shutil.rmtree(out / DOWNLOADS, ignore_errors=True)  # those of a start that was killed after its last shard too
    except OSError as error:  # a full disk and the like
        where = Path(error.filename or out)
        raise UserError(
            f"{where}: {error.strerror or error}; {bytes_text(shutil.disk_usage(existing(where)).free)} free; "
            "fix it, then run the same command again to resume"
        ) from error
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        raise
    splits = Counter(shard["split"] for shard in manifest.shards)
    flags = f"--data_dir {shlex.quote(str(out))}"
    if not splits["val"]:
        flags += " --eval_freq 0"
    if manifest.tokens < SMALL_TOKENS:
        run = shlex.quote(out.absolute().name)
        flags = f"--config quickstart {flags} --checkpoint_dir checkpoints/{run}"
    print(
        f"{manifest.counts()}\n{counted(splits['val'], 'val shard')} "
        f"({sum(s['tokens'] for s in manifest.shards if s['split'] == 'val') / manifest.tokens:.1%} of the tokens) and "
        f"{counted(splits['train'], 'train shard')} in {out} ({time.monotonic() - start_s:.1f} s)\n"
        f"next: python train.py {flags}"
    )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    run_cli(main)
