"""Token shards and their manifest.json, from text or token ids of the Hugging Face Hub, object stores or files.

    python prepare_dataset.py                                      # FineWeb-Edu, 10 B tokens, GPT-2's vocabulary
    python prepare_dataset.py --source stdlib --tokenizer bytes    # nothing to download
    python prepare_dataset.py --source 'corpus/*.jsonl.gz' --text_field content --out data/corpus
    python prepare_dataset.py --source corpus/ --tokenizer bpe:32768               # trains a tokenizer first
    python prepare_dataset.py --source 'gs://bucket/*.npz' --tokenizer gpt2        # token ids, or text, of a store

Workers encode units of text, which depend only on the files. About every fortieth piece of text goes to the validation
split, whatever the tokenizer. So the shards are byte-identical for any number of workers, and after a kill the same
command resumes with the unit after the last one that was saved.
"""

import dataclasses
import glob
import json
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
from typing import IO, Annotated, Any, NamedTuple

import numpy as np

from steadygpt.base.disk import existing
from steadygpt.base.durable import fsync, lock_folder, no_link, replace_file
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar, say
from steadygpt.base.text import bytes_text, counted
from steadygpt.base.typed import Count, read_json
from steadygpt.data import hub
from steadygpt.data.documents import NO_TEXT, PIECE_BYTES, Block, cut_document, read_documents, repair, suffix_of
from steadygpt.data.shards import (
    DEFAULT_FOLDER,
    MANIFEST,
    ShardEntry,
    check_vocabulary,
    open_shard,
    token_dtype,
    write_shard,
)
from steadygpt.data.sources import FINEWEB_EDU, STDLIB, Place, Source, find_source, fingerprint
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
from steadygpt.data.tokenizer_check import check_against_library
from steadygpt.data.train_tokenizer import TRAINING_BYTES, train_tokenizer
from steadygpt.data.workers import map_in_order
from steadygpt.machine.host import usable_cores

DESCRIPTION = (
    "Write token shards from text or token ids in files, object stores, the Hugging Face Hub or Python's library. The "
    "default, 10 B tokens of FineWeb-Edu, reads 27 GB over the network and needs 20 GB of disk, and "
    "0.5 GB of memory plus 0.14 GB per worker. After an interruption, run the same command again to resume."
)
IN_USE = "wait until it has finished, or use a different --out"
SAVE_S = 1.0  # between saves of the manifest, at least: each waits for the disk
MOST_WAITING = 64  # units that are encoded but not saved; then a slow disk holds the workers up
NAMED_SKIPS = 5  # skipped rows that are named on stderr; empty ones are only counted
VAL_SHARE = 1 / 40
LARGE_SHARE = 1 / 10  # until val has --val_tokens, where the size of the source is not known
VAL_BYTES = 400_000_000  # of text in val, at most
VAL_PIECES = 10  # of the text of val, at least
LEAST_TOKENS = 100  # of a source with a val split
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
        "tokens of the val split, about, spread over the source (default: 1/40 of the source, at most 400 MB)",
        at_most=2**31,
    )
    num_workers: int | None = option(
        None, "number of worker processes (default: one per core; 1 for token ids)", at_least=1, at_most=1024
    )
    out: str = option("", f"folder for the shards (default: data/NAME; for fineweb-edu {DEFAULT_FOLDER})")
    name: str = option("", "prefix of the shards' file names (default: the last part of --source)")
    text_field: str = option("text", "JSON field or column with a document's text, or array in an .npz file")
    keep_download: bool = option(
        False, "download the files of a Hub data set to the Hub's cache first, instead of reading them over the network"
    )


# ---------------------------------------------------------------------------------------------------------------------
# units -> ids


class Encoded(NamedTuple):
    """The ids of a unit, in pieces that belong to one split each."""

    ids: np.ndarray  # (n,), of the shards' dtype
    ends: list[int]  # where each piece ends in the ids
    sizes: list[int]  # bytes of text of each piece; of token ids, how many
    skipped: Sequence[tuple[str, str]] = ()  # rows that are skipped, as FILE:NUMBER, and the reasons
    documents: int = 0
    repaired: int = 0  # characters U+FFFD that replace invalid Unicode
    spelled: int = 0  # how often texts contain the characters of the document token


def encode(
    unit: list[Block], record: TokenizerRecord, out: Path, vocab_size: int, text_field: str, piece_bytes: int
) -> Encoded:
    """Encode the documents of a unit, with the document token before each and nowhere else.

    Token ids are checked instead.

    Args:
        record: of the tokenizer, whose file is in the folder `out`, if it has one.
        piece_bytes: longer documents are cut into pieces of about so many bytes.
    """
    dtype = token_dtype(vocab_size)
    if isinstance(unit[0].data, np.ndarray):  # then all blocks are: a source holds text or ids
        for block in unit:
            check_vocabulary(block.name, block.data, vocab_size)
        array = np.concatenate([block.data.astype(dtype) for block in unit])
        ends = [*range(piece_bytes, len(array), piece_bytes), len(array)]
        return Encoded(array, ends, np.diff(ends, prepend=0).tolist())
    tokenizer = load_tokenizer(record, out)
    begin = np.array([tokenizer.document_id], dtype).tobytes()
    ids = bytearray()
    ends = []
    sizes = []
    skipped = []
    documents = 0
    repaired = 0
    spelled = 0
    for block in unit:
        for row, text, is_begin in read_documents(block, text_field):
            if not isinstance(text, str):
                kind = "null" if text is None else type(text).__name__
                reason = str(text) if isinstance(text, ValueError) else f"{kind}, not a string"
                skipped.append((f"{block.name}:{row + 1}", reason))
                continue
            clean = repair(text)
            if clean is not text:
                repaired += clean.count("\ufffd") - text.count("\ufffd")
            spelled += clean.count(tokenizer.document_token)
            if is_begin:
                documents += 1
                ids += begin
            for piece, size in cut_document(clean, piece_bytes):
                ids += tokenizer.encode_to_numpy(piece).astype(dtype).tobytes()
                ends.append(len(ids) // dtype.itemsize)
                sizes.append(size)
    return Encoded(np.frombuffer(ids, dtype), ends, sizes, skipped, documents, repaired, spelled)


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
    val_tokens: Count | None  # as asked for
    val_share: Annotated[float, 0, 1] = VAL_SHARE  # of the text, at most
    piece_bytes: Annotated[int, 1] = PIECE_BYTES  # of text, or token ids, that are in one split together
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
    read: Count = 0  # bytes of text so far, or token ids
    read_for_val: Count = 0  # of these, in val
    tokens: Count = 0
    tokens_for_val: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    # Until the preparation is complete:
    next: Place = field(default_factory=Place)  # of the unit after the last one that is saved
    begun: dict[str, Count] = field(default_factory=dict)  # split -> tokens of its next shard that are saved

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
            check_not_overtaken(options, out, None)
            record, vocab_size = obtain_tokenizer(options, source, out)
            manifest = Manifest.of(options, source, record, vocab_size)
            if record.is_file:
                manifest.save(out)  # for trained_json, if this preparation ends before its first shard
        return manifest

    @staticmethod
    def of(options: PrepareOptions, source: Source, record: TokenizerRecord, vocab_size: int) -> "Manifest":
        """Return the manifest of a new preparation with a tokenizer."""
        asked = {key: getattr(options, key) for key in ("source", "name", "shard_size", "val_tokens", "text_field")}
        found: dict[str, Any] = {
            "commit": source.commit,
            "files": fingerprint(source.identities),
            "dtype": token_dtype(vocab_size).name,
            **{key: getattr(record, key) for key in ("tokenizer", "tokenizer_sha256", "document_token")},
        }
        if record.tokenizer.startswith("bpe:"):
            found["tokenizer_bytes"] = options.tokenizer_bytes or TRAINING_BYTES
        return Manifest(**asked, **found, vocab_size=vocab_size)

    @staticmethod
    def load(out: Path, options: PrepareOptions) -> "Manifest | None":
        """Read the manifest that an earlier run of the same preparation left; None if it has saved nothing."""
        advice = f"use a different --out, or empty {out}"
        try:
            manifest = read_json(out / MANIFEST, Manifest, f"so it is not a manifest; {advice}")
        except FileNotFoundError:
            if foreign := sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin")):
                raise UserError(f"{out}: holds {foreign[0]} but no {MANIFEST}; {advice}") from None
            return None
        except NotADirectoryError:
            raise UserError(f"--out {out} is a file; expected a folder") from None
        if not (manifest.shards or manifest.next != Place()):
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

    def encoder(self, out: Path) -> Callable[[list[Block]], Encoded]:
        """Return the function that encodes a unit, for workers."""
        return partial(
            encode, record=TokenizerRecord.of(vars(self)), out=out, vocab_size=self.vocab_size,
            text_field=self.text_field, piece_bytes=self.piece_bytes,
        )  # fmt: skip

    def save(self, out: Path) -> None:
        """Replace the manifest atomically."""
        content = vars(self) | {"next": self.next._asdict()}
        if self.complete:
            del content["next"], content["begun"]
        replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))

    def add(self, found: Encoded) -> dict[str, list[np.ndarray]]:
        """Count a unit, and return the ids of each split.

        A piece of text goes to val if val then still has at most its share of all that was read. So val is spread over
        the source, and never larger.
        """
        ids: dict[str, list[np.ndarray]] = {"val": [], "train": []}
        begin = 0
        for end, size in zip(found.ends, found.sizes, strict=True):
            self.read += size
            is_val = self.read_for_val + size <= self.val_share * self.read
            if self.val_tokens is not None and self.tokens_for_val >= self.val_tokens:
                is_val = False
            if is_val:
                self.read_for_val += size
                self.tokens_for_val += end - begin
            ids["val" if is_val else "train"].append(found.ids[begin:end])
            begin = end
        self.documents += found.documents
        self.repaired += found.repaired
        self.spelled += found.spelled
        self.tokens += len(found.ids)
        self.skipped = Counter(self.skipped) + Counter(reason for _, reason in found.skipped)
        return ids

    def counts(self) -> str:
        """Return what was read, in words."""
        notes = [counted(self.documents, "document")] if self.documents else []  # not known of token ids
        notes += [f"{count:,} skipped ({reason})" for reason, count in self.skipped.items()]
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        if self.spelled:
            notes.append(f"{self.spelled:,} {self.document_token} inside texts encoded as text")
        return ", ".join([*notes, f"{self.tokens:,} tokens"])


def check_not_overtaken(options: PrepareOptions, out: Path, manifest: Manifest | None) -> None:
    """Check that a folder, which is now locked, has what it had before."""
    if Manifest.load(out, options) != manifest:
        raise UserError(f"{out}: another command has written shards meanwhile; run this again")


class Shards:
    """The shards of a folder. The ids of the next shard of each split are in a file NAME.part, which only grows.

    So the last saved manifest always fits the files. save() runs in a thread, so that workers get units meanwhile.
    """

    def __init__(self, out: Path, manifest: Manifest):
        self.out = out
        self.name = manifest.name
        self.shard_size = manifest.shard_size
        self.dtype = np.dtype(manifest.dtype)
        self.done = list(manifest.shards)
        self.begun = {"val": 0, "train": 0} | manifest.begun
        self.parts = {split: self._open(split) for split in self.begun}
        kept = {shard["file"] for shard in self.done} | {Path(part.name).name for part in self.parts.values()}
        pattern = re.compile(rf"{re.escape(self.name)}_(val|train)_\d{{6,}}\.npy(\.part)?")
        for path in out.iterdir():
            if pattern.fullmatch(path.name) and path.name not in kept:
                path.unlink()  # left by a start that was killed before it could save the manifest

    def _path(self, split: str) -> Path:
        """Return the path of the next shard of a split."""
        number = sum(shard["split"] == split for shard in self.done)
        return self.out / f"{self.name}_{split}_{number:06d}.npy"

    def _part(self, split: str) -> Path:
        """Return the path of the ids that the next shard of a split has so far."""
        return self._path(split).with_suffix(".npy.part")

    def _open(self, split: str) -> IO[bytes]:
        path = self._part(split)
        file = open(path, "a+b", opener=no_link)  # noqa: SIM115 (closed with the shard)
        num_bytes = self.begun[split] * self.dtype.itemsize
        if file.seek(0, os.SEEK_END) < num_bytes:
            raise UserError(f"{path}: missing or damaged; {MANIFEST} lists it. Empty {self.out} and prepare it again")
        file.truncate(num_bytes)
        return file

    def save(self, manifest: Manifest, units: list[dict[str, list[np.ndarray]]]) -> None:
        """Append the ids of units to the splits, and save the manifest, whose `next` is the unit after them."""
        finished = []
        for ids_of_split in units:
            for split, blocks in ids_of_split.items():
                for ids in blocks:
                    while len(ids):
                        if self.begun[split] == self.shard_size:  # not before there is more, so that no shard is empty
                            finished.append(self._finish(split))
                            self.parts[split] = self._open(split)
                        fitting = ids[: self.shard_size - self.begun[split]]
                        self.parts[split].write(fitting.tobytes())
                        self.begun[split] += len(fitting)
                        ids = ids[len(fitting) :]
        for file in self.parts.values():
            file.flush()
            fsync(file.fileno())
        dataclasses.replace(manifest, shards=list(self.done), begun=dict(self.begun)).save(self.out)
        for path in finished:
            path.unlink()

    def _finish(self, split: str) -> Path:
        """Make a shard of the ids that a split has so far; return their file, which the saved manifest still needs."""
        path = self._path(split)
        part = self._part(split)
        self.parts[split].close()
        ids = np.memmap(part, self.dtype, "r", shape=(self.begun[split],))
        digest = write_shard(path, ids)
        self.done.append({"file": path.name, "split": split, "tokens": len(ids), "sha256": digest})
        self.begun[split] = 0
        return part

    def complete(self, manifest: Manifest) -> Manifest:
        """Make shards of the rest, and return the complete manifest."""
        parts = [self._part(split) for split in self.parts]
        for split in self.parts:
            if self.begun[split]:
                self._finish(split)
        manifest = dataclasses.replace(manifest, shards=self.done, complete=True)
        manifest.save(self.out)
        for path in parts:
            path.unlink()
        return manifest

    def give_to_val(self, count: int) -> None:
        """Move the last ids of train to val, which is empty."""
        file = self.parts["train"]
        file.flush()
        file.seek(-count * self.dtype.itemsize, os.SEEK_END)
        self.parts["val"].write(file.read())
        self.begun["val"] += count
        self.begun["train"] -= count  # the file keeps them: the saved manifest counts them

    def discard(self) -> None:
        """Remove all that was written."""
        parts = [self._part(split) for split in self.parts]
        for path in [*parts, *(self.out / shard["file"] for shard in self.done), self.out / MANIFEST]:
            path.unlink()

    def close(self) -> None:
        for file in self.parts.values():
            file.close()


def problem_of(manifest: Manifest) -> str:
    """Return why the tokens of a source make no data set, "" if they do."""
    if not manifest.tokens:
        return f"found nothing ({manifest.counts()}); expected text or token ids"
    if manifest.val_share and manifest.tokens < LEAST_TOKENS:
        return f"{manifest.counts()}; expected {LEAST_TOKENS} or more, of which some are val. Try --val_tokens 0"
    if manifest.tokens_for_val == manifest.tokens:
        return f"{manifest.counts()}; --val_tokens {manifest.val_tokens} leaves none for train. Give a smaller number"
    return ""


def write_shards(encoded: Iterable[tuple[list[Block], Encoded]], out: Path, manifest: Manifest) -> Manifest:
    """Write the missing shards, and return the complete manifest; name the first skipped rows.

    Args:
        encoded: units and their ids, from the unit at manifest.next on.
    """
    named = 0
    saved_at_s = time.monotonic()
    waiting: list[dict[str, list[np.ndarray]]] = []  # ids of units that are not saved yet
    with closing(Shards(out, manifest)) as shards:
        with ThreadPoolExecutor(1) as writer:
            saved: Future = writer.submit(bool)  # the last save; at first, nothing
            for unit, found in encoded:
                last = unit[-1]
                place = Place(last.file, last.end, last.end_row, last.progress)
                manifest = dataclasses.replace(manifest, next=place)  # the writer may still use the one before
                waiting.append(manifest.add(found))
                for row, reason in found.skipped:
                    if reason != NO_TEXT and named < NAMED_SKIPS:
                        say(f"skipped {row.removeprefix(f'{STDLIB}{os.sep}')}: {reason}")
                        named += 1
                is_due = saved.done() and time.monotonic() - saved_at_s >= SAVE_S
                if is_due or len(waiting) == MOST_WAITING:
                    saved.result()
                    saved = writer.submit(shards.save, manifest, waiting)
                    saved_at_s = time.monotonic()
                    waiting = []
            saved.result()
        shards.save(manifest, waiting)
        problem = problem_of(manifest)
        if problem:
            shards.discard()
            raise UserError(f"{manifest.source}: {problem}")
        if manifest.val_share and not manifest.tokens_for_val:  # there is less text than its beginning has promised
            count = min(max(1, int(manifest.tokens * manifest.val_share)), shards.begun["train"] - 1)
            shards.give_to_val(count)
            manifest = dataclasses.replace(manifest, tokens_for_val=count)
        return shards.complete(manifest)


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


def estimate(source: Source, manifest: Manifest, out: Path) -> tuple[float, float]:
    """Encode some of the next text, check the tokenizer on it, and return about the tokens and bytes of text of all.

    Both are 0 if the size of the files is not known. Of token ids, both are their number.
    """
    first = manifest.next
    total = sum(source.sizes)
    sample = list[Block]()
    num_bytes = 0
    for block in source.blocks(manifest.text_field, manifest.vocab_size, first):
        sample.append(block)
        num_bytes += block.num_bytes
        if num_bytes >= SAMPLE_BYTES:
            break
    if not (source.holds_ids or first != Place()):
        check_tokenizer_on(sample, manifest, out)
    if not (sample and total):
        return 0.0, 0.0
    last = sample[-1]
    read = sum(source.sizes[first.file : last.file]) + last.progress - first.progress
    if not read:  # the end of a packed file, of which all bytes were read before
        return 0.0, 0.0
    encode = manifest.encoder(out)
    found = encode(sample)
    if found.spelled:
        name = next(block.name for block in sample if encode([block]).spelled)
        token = manifest.document_token
        code = f"import json, sys; [print(json.dumps({{'text': t}})) for t in sys.stdin.read().split({token!r})]"
        how = f'line of JSON: python -c "{code}" < TEXT > documents.jsonl'
        how = how if suffix_of(name) in (".txt", ".md", ".py") else "row of its own"
        text = f"{name}: contains {token}, which is encoded as text"
        say(f"{text}. If it separates documents, write each as a {how}")
    reasons = {reason for _, reason in found.skipped if "not a string" in reason}
    if reasons and not found.documents and first == Place():
        raise UserError(
            f"{source.names[0]}: the field {manifest.text_field!r} holds no text ({', '.join(sorted(reasons))}); "
            "set --text_field to the field with the text"
        )
    return len(found.ids) / read * total, sum(found.sizes) / read * total


def check_tokenizer_on(sample: list[Block], manifest: Manifest, out: Path) -> None:
    """Check that a tokenizer of a file gives the ids of the library on texts of the source."""
    record = TokenizerRecord.of(vars(manifest))
    if not record.is_file:
        return
    texts = list[str]()
    num_bytes = 0
    for block in sample:
        for document in read_documents(block, manifest.text_field):
            if isinstance(document.text, str) and num_bytes < SAMPLE_BYTES:
                for piece, size in cut_document(repair(document.text)):
                    texts.append(piece)
                    num_bytes += size
    check_against_library(load_tokenizer(record, out), texts, record.tokenizer)


def choose_val_share(manifest: Manifest, most: float, tokens: float, size: float) -> float:
    """Return the share of val in the text.

    Args:
        most: bytes of text, or token ids, in val.
        tokens: of the source, estimated; 0 if that is not known.
        size: bytes of text, or token ids, of the source; likewise.
    """
    if manifest.val_tokens == 0:
        return 0.0
    if manifest.val_tokens is None:
        return min(VAL_SHARE, most / size) if size else VAL_SHARE
    # A little more, because the estimate may be too high; val is full once it has val_tokens.
    return min(1.0, 1.1 * manifest.val_tokens / tokens) if tokens else LARGE_SHARE


def print_forecast(source: Source, manifest: Manifest, out: Path, tokens: float) -> None:
    """Print how many tokens and how much disk to expect; check the disk."""
    missing = max(0, tokens - manifest.tokens) + min(tokens, manifest.shard_size)  # one shard is in its .part too
    needed = int(missing) * np.dtype(manifest.dtype).itemsize
    at = f" at commit {source.commit[:7]}" if source.commit else ""
    print(
        f"source: {source.name}{at}, {counted(len(source.names), 'file')}, {bytes_text(sum(source.sizes))}, about "
        f"{float(f'{tokens:.3g}'):,.0f} tokens\ndisk: about {bytes_text(needed)} of shards in {out}",
        file=sys.stderr,
    )
    disk = existing(out)
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise UserError(
            f"{disk}: {bytes_text(free)} free, {bytes_text(needed)} needed for the shards; free some space, or give "
            "another --out"
        )


def show_progress(
    encoded: Iterable[tuple[list[Block], Encoded]], bar: ProgressBar, source: Source
) -> Iterator[tuple[list[Block], Encoded]]:
    """Pass units on, and show how much of the source is done."""
    num_tokens, amount_before = 0, [*accumulate(source.sizes, initial=0)]
    for unit, found in encoded:
        yield unit, found
        num_tokens += len(found.ids)
        rate = bar.format_sizeof(num_tokens / (bar.format_dict["elapsed"] or 1))  # 0 with TQDM_DISABLE
        bar.set_postfix_str(f"{rate} tokens/s", refresh=False)
        bar.update(amount_before[unit[-1].file] + unit[-1].progress - bar.n)
    source.check_whole()


def write_missing(source: Source, manifest: Manifest, out: Path, options: PrepareOptions, is_begun: bool) -> Manifest:
    """Write the shards that `manifest` lacks, and return the complete manifest."""
    total = sum(source.sizes)
    before = sum(source.sizes[: manifest.next.file]) + manifest.next.progress
    with ExitStack() as stack:
        stack.enter_context(lock_folder(out, IN_USE))
        check_not_overtaken(options, out, manifest if is_begun else None)
        manifest.save(out)  # before any shard, because shards without a manifest are refused
        desc = "reading ids" if source.holds_ids else "tokenizing"
        bar = ProgressBar(desc=desc, total=total or None, initial=before, unit=source.progress_unit)
        units = source.units(manifest.text_field, manifest.vocab_size, manifest.next)
        # Ids are checked as fast as a worker would receive them.
        workers = options.num_workers or (1 if source.holds_ids else usable_cores())
        encode = manifest.encoder(out)
        encoded = stack.enter_context(closing(map_in_order(encode, units, workers)))
        return write_shards(show_progress(encoded, stack.enter_context(bar), source), out, manifest)


def prepare(options: PrepareOptions, out: Path) -> Manifest:
    """Begin or continue a preparation, and return its manifest when it is complete."""
    name = FINEWEB_EDU if options.source == "fineweb-edu" else options.source
    begun = Manifest.load(out, options)
    if not (begun and begun.complete and name.startswith("hf:")):  # the Hub is not asked without need
        if options.keep_download and "://" in name:
            raise UserError(
                "--keep_download is for data sets of the Hub; copy the files and name their folder as --source"
            )
        source = find_source(name, begun.commit if begun else "", options.max_files)
        for folder, path in {path.parent: path for path in source.paths}.items():
            if folder.resolve().is_relative_to(out.resolve()):
                raise UserError(f"{path}: a file of --source in the folder for the shards, {out}; give another --out")
        files = fingerprint(source.identities)
        if begun and begun.files != files:
            raise UserError(
                f"{out}: prepared with {begun.files} of {source.name}, but now found {files}; "
                f"restore the files, use a different --out, or empty {out}"
            )
        if not (begun and begun.complete):
            source.check(options.text_field)
            manifest = begun or Manifest.begin(options, source, out)
            tokens, size = estimate(source, manifest, out)
            if not begun:
                most = manifest.shard_size if source.holds_ids else VAL_BYTES
                manifest.val_share = choose_val_share(manifest, most, tokens, size)
                val_size = manifest.val_share * size
                if val_size:
                    manifest.piece_bytes = min(PIECE_BYTES, max(1, int(val_size / VAL_PIECES)))
            if tokens:
                print_forecast(source, manifest, out, tokens)
            if options.keep_download and source.repo:
                say(f"{source.name}: downloading the files that are not in the Hub's cache, {source.repo.cache}")
                for file in source.remote:
                    hub.fetch(source.repo, file.path)
            return write_missing(source, manifest, out, options, begun is not None)
    assert begun, "the folder has a manifest"
    for path in out.glob(f"{begun.name}_*.npy.part"):  # left by a kill after the last shard
        path.unlink()
    print(f"{out}: already complete")
    return begun


def main(argv: Sequence[str] | None = None) -> int:
    start_s, options = time.monotonic(), parse_args(argv)
    out = Path(options.out)
    try:
        manifest = prepare(options, out)
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
