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
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np

from steadygpt.base.durable import existing, lock_folder, replace_file
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar, say
from steadygpt.base.text import bytes_text, counted
from steadygpt.base.typed import read_json
from steadygpt.data.shards import DEFAULT_FOLDER, MANIFEST, token_dtype
from steadygpt.data.tokenizer import (
    END_OF_TEXT,
    GPT2_TOKENIZER,
    TOKENIZER_JSON,
    TokenizerRecord,
    file_of,
    load_tokenizer,
    record_named,
    vocab_size_of,
    vocab_size_to_train,
)
from steadygpt.machine.host import usable_cores
from steadygpt.network import hub
from steadygpt.prepare.documents import (
    NO_TEXT,
    PIECE_BYTES,
    TEXTS,
    Block,
    Document,
    Skipped,
    json_of,
    read_documents,
    suffix_of,
)
from steadygpt.prepare.encode import Encoded
from steadygpt.prepare.manifest import VAL_SHARE, Manifest
from steadygpt.prepare.source_files import is_in
from steadygpt.prepare.sources import FINEWEB_EDU, Place, Source, find_source, fingerprint
from steadygpt.prepare.train_tokenizer import TRAINING_BYTES, train_tokenizer
from steadygpt.prepare.workers import map_in_order
from steadygpt.prepare.writer import write_shards

DESCRIPTION = (
    "Write token shards from text or token ids in files, object stores, the Hugging Face Hub or Python's library. The "
    "default, 10 B tokens of FineWeb-Edu, reads 27 GB over the network and needs 20 GB of disk, and "
    "0.5 GB of memory plus 0.14 GB per worker. After an interruption, run the same command again to resume."
)
IN_USE = "wait until it has finished, or use a different --out"
LARGE_SHARE = 1 / 10  # until val has --val_tokens, where the size of the source is not known
VAL_BYTES = 400_000_000  # of text in val, at most
LEAST_PIECE = 64  # bytes of a piece: cuts within words cost tokens
VAL_PIECES = 10  # of the text of val, at least
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
        "or the path of a tokenizer.json or its folder (default: gpt2). For token ids, the one that wrote them, or "
        "ids:N if only the number of ids is known",
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
# the tokenizer


def obtain_tokenizer(options: PrepareOptions, source: Source, out: Path) -> tuple[TokenizerRecord, int]:
    """Return the record of --tokenizer and its number of ids, and write its tokenizer.json, if it has one, to `out`."""
    name = options.tokenizer or "gpt2"
    record = TokenizerRecord(name, document_token=options.document_token or END_OF_TEXT)
    is_trained = name.startswith("bpe:")
    path = out / TOKENIZER_JSON
    if options.tokenizer_bytes and not is_trained:
        raise UserError(f"--tokenizer_bytes is for --tokenizer bpe:N, found {name}; drop it")
    if is_trained and record.document_token != END_OF_TEXT:
        raise UserError(f"--document_token is {record.document_token!r}, but {name} has only {END_OF_TEXT}; drop it")
    if source.holds_ids and record == TokenizerRecord("gpt2"):
        return GPT2_TOKENIZER, vocab_size_of(GPT2_TOKENIZER)  # needs no vocabulary
    if is_trained:
        record = replace(record, tokenizer_json=trained_json(options, source, out))
    else:
        record = replace(record_named(name), document_token=record.document_token)
    if record.is_number and (source.holds_ids or rows_hold_ids(source, options.text_field)):
        return record, vocab_size_of(record)
    tokenizer = load_tokenizer(record)
    if not source.holds_ids:
        _ = tokenizer.document_id  # raises if it has no such token
        if not tokenizer.encoding:
            say(f"{name}: the library tokenizers encodes, about 6 times slower than tiktoken with GPT-2's or Llama 3's")
    if record.is_file:
        if path.exists() and not (out / MANIFEST).exists() and path.read_bytes() != tokenizer.json.encode():
            raise UserError(
                f"{path}: not the file of --tokenizer {name}, and it would be replaced; move it, or give its path "
                "with --tokenizer"
            )
        replace_file(path, lambda file: file.write(tokenizer.json.encode()))
    return replace(record, tokenizer_sha256=tokenizer.sha256), tokenizer.n_vocab


def rows_hold_ids(source: Source, text_field: str) -> bool:
    """Return whether the first row that is not skipped has token ids in place of text."""
    for block in source.blocks(text_field, 0, Place()):
        for document in read_documents(block, text_field):
            if not isinstance(document.text, Skipped):
                return isinstance(document.text, list)
    return False


def trained_json(options: PrepareOptions, source: Source, out: Path) -> str:
    """Return the tokenizer.json that bpe:N gives, from the folder if an earlier command has finished it there."""
    vocab_size = vocab_size_to_train(options.tokenizer)
    limit = options.tokenizer_bytes or TRAINING_BYTES
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
# a new preparation


def begin(options: PrepareOptions, source: Source, out: Path) -> Manifest:
    """Return the manifest of a new preparation, and train, download or copy the tokenizer.json that it asks for."""
    if source.holds_ids and not options.tokenizer:
        raise which_tokenizer(source.names[0])
    with ExitStack() as stack:
        if TokenizerRecord(options.tokenizer).is_file:  # which is written now
            stack.enter_context(lock_folder(out, IN_USE))
        check_unchanged(options, out, None)
        record, vocab_size = obtain_tokenizer(options, source, out)
        manifest = new_manifest(options, source, record, vocab_size)
        if record.is_file:
            manifest.save(out)  # for trained_json, if this preparation ends before its first shard
    return manifest


def new_manifest(options: PrepareOptions, source: Source, record: TokenizerRecord, vocab_size: int) -> Manifest:
    """Return the manifest of a new preparation with a tokenizer."""
    tokenizer_bytes = 0
    if record.tokenizer.startswith("bpe:"):
        tokenizer_bytes = options.tokenizer_bytes or TRAINING_BYTES
    return Manifest(
        source=options.source,
        name=options.name,
        tokenizer=record.tokenizer,
        tokenizer_sha256=record.tokenizer_sha256,
        tokenizer_bytes=tokenizer_bytes,
        document_token=record.document_token,
        shard_size=options.shard_size,
        val_tokens=options.val_tokens,
        text_field=options.text_field,
        commit=source.commit,
        files=fingerprint(source.identities),
        times=source.times,
        vocab_size=vocab_size,
        dtype=token_dtype(vocab_size).name,
    )


def which_tokenizer(name: str) -> UserError:
    return UserError(f"{name}: holds token ids; name the tokenizer that wrote them with --tokenizer, such as gpt2")


def check_unchanged(options: PrepareOptions, out: Path, manifest: Manifest | None) -> None:
    """Check that a folder still has the manifest that was read before the folder was locked; None: none."""
    if Manifest.load(out, vars(options)) != manifest:
        raise UserError(f"{out}: another command has written shards meanwhile; run this again")


# ---------------------------------------------------------------------------------------------------------------------
# the command


def parse_args(argv: Sequence[str] | None) -> PrepareOptions:
    """Parse the command line; fill in name and folder."""
    options = parse_options(PrepareOptions, argv, DESCRIPTION)
    source = options.source
    if "://" not in source:
        source = source.rstrip("/") or source  # the root folder stays
    is_default = source == "fineweb-edu"
    name = options.name
    if not name:
        name = "edufineweb" if is_default else default_name(source)
    if not re.fullmatch(r"[\w.-]+", name):
        raise OptionError("name", repr(name), "only letters, digits and . _ -")
    out = options.out
    if not out:
        out = str(DEFAULT_FOLDER) if is_default else str(Path("data", name))
    return dataclasses.replace(options, source=source, name=name, out=out, tokenizer=file_of(options.tokenizer))


def default_name(source: str) -> str:
    """Return the last part of a source without wildcards and suffix."""
    if source.startswith("hf:"):
        source = re.split("[:@]", source)[1]
    parts = takewhile(lambda part: not glob.has_magic(part), Path(source).parts)
    last = Path(os.path.realpath(Path(*parts))).name
    return re.sub(r"[^\w.-]+", "_", last.removesuffix(suffix_of(last))) or "corpus"


def estimate(source: Source, manifest: Manifest, out: Path, options: PrepareOptions) -> tuple[float, float]:
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
        if not options.tokenizer and any(isinstance(row.text, list) for row in rows_of(sample[:1], manifest)):
            raise which_tokenizer(source.names[0])
        check_names(sample)
    if not (sample and total):
        return 0.0, 0.0
    last = sample[-1]
    read = sum(source.sizes[first.file : last.file]) + last.progress - first.progress
    if not read:  # the end of a packed file, of which all bytes were read before
        return 0.0, 0.0
    encode = manifest.encoder(out)
    encoding = encode(sample)
    if encoding.special_texts:
        names = dict[str, str]()  # token -> the first file that contains it
        for block in sample:
            for token in encode([block]).special_texts:
                names.setdefault(token, block.name)
        for token, name in names.items():
            explain_special_token(name, token, manifest.document_token)
    if first == Place() and not encoding.documents and not source.holds_ids:
        check_rows(sample, manifest)
    return len(encoding.ids) / read * total, sum(encoding.sizes) / read * total


def check_rows(sample: list[Block], manifest: Manifest) -> None:
    """Explain why no row of the beginning of a source has text."""
    for block in sample:
        for row, text, _ in read_documents(block, manifest.text_field):
            reason = "a list, but not of token ids"
            advice = "set --text_field to the field with the text"
            if isinstance(text, Skipped):
                reason = str(text)
                advice = text.advice
            if reason != NO_TEXT:
                raise UserError(f"{block.name}:{row + 1}: {reason}{advice and '; '}{advice}")


def check_names(sample: list[Block]) -> None:
    """Warn of a file whose name says text, and whose content is lines of JSON."""
    for block in sample:
        if block.at == 0 and suffix_of(block.name) in TEXTS and block.data.lstrip().startswith(b"{"):
            line = block.data.lstrip().partition(b"\n")[0].decode(errors="replace")
            if isinstance(json_of(line, block.name), dict):
                say(
                    f"warning: {block.name}: contains lines of JSON, but is read as one document, because of its name; "
                    "if each line is one, rename it: NAME.jsonl"
                )
                return


def explain_special_token(name: str, token: str, document_token: str) -> None:
    """Tell that a file contains the characters of a special token, and what to do if it means the token."""
    advice = "If it means the token, encode the text with the library tokenizers and prepare the ids, see docs/data.md"
    if token == document_token:
        code = f"import json, sys; [print(json.dumps({{'text': t}})) for t in sys.stdin.read().split({token!r})]"
        row = "row of its own"
        if suffix_of(name) in (".txt", ".md", ".py"):
            row = f'line of JSON: python -c "{code}" < TEXT > documents.jsonl'
        advice = f"If it separates documents, write each as a {row}"
    say(f"{name}: contains {token}, which is encoded as text. {advice}")


def rows_of(sample: list[Block], manifest: Manifest) -> Iterator[Document]:
    """Read the documents of blocks."""
    for block in sample:
        yield from read_documents(block, manifest.text_field)


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
        if not size:
            return VAL_SHARE
        return min(VAL_SHARE, most / size)
    if not tokens:
        return LARGE_SHARE
    # A little more, because the estimate may be too high; val is full once it has val_tokens.
    return min(1.0, 1.1 * manifest.val_tokens / tokens)


def print_forecast(source: Source, manifest: Manifest, out: Path, tokens: float) -> None:
    """Print how many tokens and how much disk to expect; check the disk."""
    needed = int(max(0, tokens - manifest.tokens)) * np.dtype(manifest.dtype).itemsize
    at = ""
    if source.commit:
        at = f" at commit {source.commit[:7]}"
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
    num_tokens = 0
    amount_before = list(accumulate(source.sizes, initial=0))  # each file
    for unit, encoding in encoded:
        yield unit, encoding
        num_tokens += len(encoding.ids)
        rate = bar.format_sizeof(num_tokens / (bar.format_dict["elapsed"] or 1))  # 0 with TQDM_DISABLE
        bar.set_postfix_str(f"{rate} tokens/s", refresh=False)
        bar.update(amount_before[unit[-1].file] + unit[-1].progress - bar.n)


def write_missing(
    source: Source, manifest: Manifest, out: Path, options: PrepareOptions, begun: Manifest | None
) -> Manifest:
    """Write the shards that `manifest` lacks, and return the complete manifest.

    Args:
        begun: the manifest that the folder had at the start of the command.
    """
    total = sum(source.sizes)
    before = sum(source.sizes[: manifest.next.file]) + manifest.next.progress
    with ExitStack() as stack:
        stack.enter_context(lock_folder(out, IN_USE))
        check_unchanged(options, out, begun)
        manifest.save(out)  # before any shard, because shards without a manifest are refused
        desc = "reading ids" if source.holds_ids else "tokenizing"
        bar = ProgressBar(desc=desc, total=total or None, initial=before, unit=source.progress_unit)
        units = source.units(manifest.text_field, manifest.vocab_size, manifest.next)
        workers = options.num_workers
        if not workers:  # ids are checked as fast as a worker would receive them
            workers = 1 if source.holds_ids else usable_cores()
        encode = manifest.encoder(out)
        encoded = stack.enter_context(closing(map_in_order(encode, units, workers)))
        return write_shards(show_progress(encoded, stack.enter_context(bar), source), out, manifest)


def prepare(options: PrepareOptions, out: Path) -> Manifest:
    """Begin or continue a preparation, and return its manifest when it is complete."""
    name = options.source
    if name == "fineweb-edu":
        name = FINEWEB_EDU
    begun = Manifest.load(out, vars(options))
    if not (begun and begun.complete and name.startswith("hf:")):  # the Hub is not asked without need
        if options.keep_download and not name.startswith("hf:"):
            raise UserError(
                "--keep_download is for data sets of the Hub; copy the files and name their folder as --source"
            )
        commit = begun.commit if begun else ""
        source = find_source(name, commit, options.max_files, out)
        path_in_folder = {path.parent: path for path in source.paths}
        for folder, path in path_in_folder.items():
            if is_in(folder, out):
                raise UserError(f"{path}: a file of --source in the folder for the shards, {out}; give another --out")
        files = fingerprint(source.identities)
        if begun and begun.files != files:
            raise UserError(
                f"{out}: prepared with {begun.files} of {source.name}, but now found {files}; "
                f"restore the files, use a different --out, or empty {out}"
            )
        if begun and not begun.complete and begun.times != source.times:
            raise UserError(
                f"{out}: begun with other content of {source.name}, whose files were modified since then; use a "
                f"different --out, or empty {out}"
            )
        if not (begun and begun.complete):
            source.check(options.text_field)
            manifest = begun or begin(options, source, out)
            tokens, size = estimate(source, manifest, out, options)
            if not begun:
                most = manifest.shard_size if source.holds_ids else VAL_BYTES
                manifest.val_share = choose_val_share(manifest, most, tokens, size)
                val_size = manifest.val_share * size
                if val_size:
                    manifest.piece_bytes = min(PIECE_BYTES, max(LEAST_PIECE, int(val_size / VAL_PIECES)))
            if tokens:
                print_forecast(source, manifest, out, tokens)
            if options.keep_download and source.repo:
                say(f"{source.name}: downloading the files that are not in the Hub's cache, {source.repo.cache}")
                for file in source.remote:
                    hub.fetch(source.repo, file.path)
            return write_missing(source, manifest, out, options, begun)
    assert begun, "the folder has a manifest"
    print(f"{out}: already complete")
    return begun


def main(argv: Sequence[str] | None = None) -> int:
    start_s = time.monotonic()
    options = parse_args(argv)
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
