"""Token shards and their manifest.json, from text on the Hugging Face Hub, in object stores or in local files.

    python prepare_dataset.py                                      # FineWeb-Edu, 10 B tokens, GPT-2's vocabulary
    python prepare_dataset.py --source stdlib --tokenizer bytes    # nothing to download
    python prepare_dataset.py --source 'corpus/*.jsonl.gz' --text_field content --out data/corpus
    python prepare_dataset.py --source corpus/ --tokenizer bpe:32768               # trains a tokenizer first
    python prepare_dataset.py --source stories.txt --separator '<|endoftext|>'     # many documents in one text

Workers encode units of text, which depend only on the files. So the shards are byte-identical for any number of
workers, and after a kill the same command resumes with the unit after the last shard. About a fortieth of the text, in
pieces that are the same for every tokenizer, goes to the validation split.
"""

import steadygpt.preflight  # noqa: F401  # before all others

import dataclasses
import glob
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path

from steadygpt.base.durable import existing, lock_folder, replace_file
from steadygpt.base.options import OptionError, UserError, option, parse_options, run_cli
from steadygpt.base.progress import ProgressBar, say
from steadygpt.base.text import bytes_text, command, counted
from steadygpt.data.encoders import Library
from steadygpt.data.shards import DEFAULT_FOLDER, MANIFEST, token_dtype
from steadygpt.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_JSON,
    TokenizerRecord,
    check_known,
    file_of,
    load_tokenizer,
    record_named,
    vocab_size_to_train,
)
from steadygpt.machine.host import usable_cores
from steadygpt.prepare.documents import PIECE_BYTES, Block, suffix_of
from steadygpt.prepare.encode import Encoded, encode
from steadygpt.prepare.manifest import CorpusOptions, Manifest
from steadygpt.prepare.sources import FINEWEB_EDU, Source, find_source
from steadygpt.prepare.train_tokenizer import TRAINING_BYTES, train_tokenizer
from steadygpt.prepare.validation import ValidationSample
from steadygpt.prepare.workers import map_in_order
from steadygpt.prepare.writer import write_shards

DESCRIPTION = (
    "Write token shards from text in files, object stores, the Hugging Face Hub or Python's library. The "
    "default, 10 B tokens of FineWeb-Edu, reads 27 GB over the network and needs 20 GB of disk, and "
    "0.5 GB of memory plus 0.14 GB per worker. After an interruption, run the same command again to resume."
)
SPLITS = ("train", "val")
IN_USE = "wait until it has finished, or use a different --out"
VAL_SHARE = 1 / 40
VAL_BYTES = 400_000_000  # most bytes of the source in val
PIECES = 400  # least number of pieces of the source, so that val has about ten
LEAST_PIECE = 64  # least bytes of a piece: cuts within words cost tokens
SMALL_TOKENS = 50_000_000  # below this, the proposed next command trains the quickstart's model
CONTEXT = 256  # of the quickstart's model, in tokens
LARGE_CONTEXT = 1024  # of the default model


@dataclass(frozen=True)
class PrepareOptions(CorpusOptions):
    num_workers: int | None = option(
        None, "number of worker processes (default: one per core)", at_least=1, at_most=1024
    )
    out: str = option("", f"folder for the shards (default: data/NAME; for fineweb-edu {DEFAULT_FOLDER})")


def parse_args(argv: Sequence[str] | None) -> PrepareOptions:
    """Parse the command line; fill in name and folder."""
    options = parse_options(PrepareOptions, argv, DESCRIPTION)
    source = options.source
    if "://" not in source:
        source = os.path.normpath(source) if source else source
    is_default = source == "fineweb-edu"
    name = options.name
    if not name:
        name = "edufineweb" if is_default else default_name(source)
    if not re.fullmatch(r"[\w.-]+", name):
        raise OptionError("name", repr(name), "only letters, digits and . _ -")
    out = options.out
    if not out:
        out = str(DEFAULT_FOLDER) if is_default else str(Path("data", name))
    tokenizer = file_of(options.tokenizer)
    check_known(tokenizer)
    return dataclasses.replace(options, source=source, name=name, out=out, tokenizer=tokenizer)


def default_name(source: str) -> str:
    """Return the last part of a source before any wildcard, without its suffix."""
    if source.startswith("hf:"):
        source = re.split("[:@]", source)[1]
    parts = takewhile(lambda part: not glob.has_magic(part), Path(source).parts)
    last = Path(os.path.realpath(Path(*parts))).name
    return re.sub(r"[^\w.-]+", "_", last.removesuffix(suffix_of(last))) or "corpus"


# ---------------------------------------------------------------------------------------------------------------------
# a new preparation


def obtain_tokenizer(options: PrepareOptions, source: Source, out: Path) -> tuple[TokenizerRecord, int]:
    """Return the record of --tokenizer and its number of ids, and write its tokenizer.json, if it has one, to `out`."""
    name = options.tokenizer
    document_token = options.document_token
    is_trained = name.startswith("bpe:")
    if options.tokenizer_bytes and not is_trained:
        raise UserError(f"--tokenizer_bytes is for --tokenizer bpe:N, found {name}; drop it")
    if is_trained and document_token != END_OF_TEXT:
        raise UserError(f"--document_token is {document_token!r}, but {name} has only {END_OF_TEXT}; drop it")
    if is_trained:
        limit = options.tokenizer_bytes or TRAINING_BYTES
        text = train_tokenizer(source, options.wanted, vocab_size_to_train(name), limit)
        record = TokenizerRecord(name, tokenizer_json=text)
    else:
        record = replace(record_named(name), document_token=document_token)
    tokenizer = load_tokenizer(record)
    _ = tokenizer.document_id  # raises if it has no such token
    if isinstance(tokenizer, Library):
        say(f"{name}: the library tokenizers encodes, about 6 times slower than tiktoken with GPT-2's or Llama 3's")
    record = replace(record, tokenizer_sha256=tokenizer.sha256)
    if record.is_file:
        path = out / TOKENIZER_JSON
        content = record.tokenizer_json.encode()
        if path.exists() and not (out / MANIFEST).exists() and path.read_bytes() != content:
            raise UserError(
                f"{path}: not the file of --tokenizer {name}, and it would be replaced; move it, or give its path "
                "with --tokenizer"
            )
        replace_file(path, lambda file: file.write(content))
    return record, tokenizer.n_vocab


def begin(options: PrepareOptions, source: Source, out: Path) -> Manifest:
    """Train, download or copy the tokenizer of a new preparation; save and return its manifest."""
    record, vocab_size = obtain_tokenizer(options, source, out)
    if (out / MANIFEST).exists():  # of a preparation that was killed before its first shard was in the manifest
        for path in out.glob("*_*_??????.npy"):
            path.unlink()
    val_share = options.val_share
    if val_share is None:
        val_share = min(VAL_SHARE, VAL_BYTES / max(1, source.size))
    piece_bytes = PIECE_BYTES
    if val_share:
        piece_bytes = max(LEAST_PIECE, min(PIECE_BYTES, source.size // PIECES))
    manifest = Manifest(
        options=CorpusOptions(**{f.name: getattr(options, f.name) for f in dataclasses.fields(CorpusOptions)}),
        tokenizer=record.tokenizer,
        tokenizer_sha256=record.tokenizer_sha256,
        document_token=record.document_token,
        vocab_size=vocab_size,
        dtype=token_dtype(vocab_size).name,
        piece_bytes=piece_bytes,
        validation=ValidationSample(val_share),
        commit=source.commit,
        files=source.fingerprint,
        versions=source.versions,
        size=source.size,
        left_out={lost.reason: lost.num_bytes for lost in source.left_out if lost.num_bytes},
    )
    manifest.save(out)  # before any shard, because shards without a manifest are refused
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# the command


def show_progress(
    encoded: Iterable[tuple[list[Block], Encoded]], bar: ProgressBar, source: Source
) -> Iterator[tuple[list[Block], Encoded]]:
    """Yield the same units, and show how much of the source is done."""
    num_tokens = 0
    amount_before = list(accumulate((file.size for file in source.files), initial=0))  # bytes before each file
    for unit, encoding in encoded:
        yield unit, encoding
        num_tokens += len(encoding.ids)
        rate = bar.format_sizeof(num_tokens / (bar.format_dict["elapsed"] or 1))  # 0 with TQDM_DISABLE
        bar.set_postfix_str(f"{rate} tokens/s", refresh=False)
        bar.update(amount_before[unit[-1].file] + unit[-1].progress - bar.n)


def prepare(options: PrepareOptions, out: Path) -> Manifest:
    """Begin or resume a preparation, and return its manifest when it is complete."""
    name = options.source
    if name == "fineweb-edu":
        name = FINEWEB_EDU
    begun = Manifest.load(out, options)
    if begun and begun.complete and begun.commit:  # no need to ask the Hub
        print(f"{out}: already complete")
        return begun
    commit = begun.commit if begun and begun.shards else ""
    source = find_source(name, commit, options.max_files, out, options.text_field)
    for left_out in source.left_out:
        say(f"{source.name}: left out {left_out}")
    begun = continued(begun, source, out)
    if begun and begun.complete:
        print(f"{out}: already complete")
        return begun
    at = f" at commit {source.commit[:7]}" if source.commit else ""
    say(f"source: {name}{at}, {counted(len(source.files), 'file')}, {bytes_text(source.size)}")
    if not begun:
        source.check(options.text_field)
    had_tokenizer = (out / TOKENIZER_JSON).exists() and not (out / MANIFEST).exists()
    try:
        manifest = begun or begin(options, source, out)
        manifest = write_missing(source, manifest, out, options.num_workers or usable_cores())
        if not name.startswith("hf:"):  # a commit of the Hub does not change
            check_unchanged(source, find_source(name, "", options.max_files, out, options.text_field), out)
    except UserError:
        kept = Manifest.load(out, options)
        if kept is None or not kept.shards:  # no shard is written, so the next command may differ
            (out / MANIFEST).unlink(missing_ok=True)
            if not had_tokenizer:
                (out / TOKENIZER_JSON).unlink(missing_ok=True)
        raise
    manifest.complete = True
    manifest.save(out)
    return manifest


def continued(begun: Manifest | None, source: Source, out: Path) -> Manifest | None:
    """Return the manifest to resume; None to begin again, because the files changed before the first shard."""
    if not begun:
        return None
    now = source.fingerprint
    is_modified = not begun.complete and begun.versions != source.versions
    if begun.files == now and not is_modified:
        return begun
    if not begun.shards:
        return None
    if is_modified:
        now = "other versions of them"
    raise UserError(
        f"{out}: prepared with {begun.files} of {source.name}, but now found {now}; restore the files, use a different "
        f"--out, or empty {out}"
    )


def check_unchanged(source: Source, now: Source, out: Path) -> None:
    """Check that a source has the same files after it was read."""
    changed = {*source.files} ^ {*now.files}
    if changed:
        path = min(file.path for file in changed)
        raise UserError(f"{path}: changed while the source was read; empty {out}, and prepare it again")


def write_missing(source: Source, manifest: Manifest, out: Path, workers: int) -> Manifest:
    """Write the shards that a manifest lacks, and return the manifest, which is not complete yet."""
    initial = sum(file.size for file in source.files[: manifest.next.file])
    wanted = manifest.options.wanted
    units = source.units(wanted, manifest.next)
    encode_unit = partial(
        encode, record=manifest.tokenizer_record(), out=out, vocab_size=manifest.vocab_size, wanted=wanted,
        piece_bytes=manifest.piece_bytes,
    )  # fmt: skip
    with (
        ProgressBar(desc="tokenizing", total=source.size, initial=initial, unit="B") as bar,
        closing(map_in_order(encode_unit, units, workers)) as encoded,
    ):
        return write_shards(show_progress(encoded, bar, source), out, manifest, len(source.files))


def next_command(manifest: Manifest, out: Path) -> str:
    """Return a command that trains on the shards; warn if there are too few tokens for it or for validation."""
    flags = f"--data_dir {shlex.quote(str(out))}"
    is_small = manifest.tokens < SMALL_TOKENS
    context = CONTEXT if is_small else LARGE_CONTEXT
    least = max((shard["tokens"] for shard in manifest.shards if shard["split"] == "train"), default=0)
    if least <= context:
        context = 2 ** max(0, (least - 1).bit_length() - 1)
        say(f"warning: only {least:,} tokens to train on; expected millions. The command below has a short context")
        flags += f" --context_length {context}"
    if not any(shard["split"] == "val" and shard["tokens"] > context for shard in manifest.shards):
        if manifest.validation.share:
            say(f"warning: fewer tokens for validation than a row of {context}; the command below does without it")
        flags += " --eval_freq 0"
    if is_small:
        run = shlex.quote(out.absolute().name)
        flags = f"--config quickstart {flags} --checkpoint_dir checkpoints/{run}"
    return f"next: {command('train.py')} {flags}"


def main(argv: Sequence[str] | None = None) -> int:
    start_s = time.monotonic()
    options = parse_args(argv)
    out = Path(options.out)
    try:
        with lock_folder(out, IN_USE):
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
    shards = [counted(sum(shard["split"] == split for shard in manifest.shards), f"{split} shard") for split in SPLITS]
    print(
        f"{manifest.counts()}\n{shards[1]} ({manifest.tokens_of('val') / manifest.tokens:.1%} of the tokens) and "
        f"{shards[0]} in {out} ({time.monotonic() - start_s:.1f} s)\n{next_command(manifest, out)}"
    )
    for warning in manifest.warnings():
        say(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C
    run_cli(main)
