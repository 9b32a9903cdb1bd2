"""The manifest of prepared shards."""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError, option
from steadygpt.base.text import bytes_text, counted
from steadygpt.base.typed import Count, read_json
from steadygpt.data.shards import MANIFEST, ShardEntry, open_shard
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, record_named
from steadygpt.prepare.documents import NO_TEXT, PIECE_BYTES, Block, Damaged, Wanted
from steadygpt.prepare.encode import Encoded
from steadygpt.prepare.sources import Place
from steadygpt.prepare.train_tokenizer import TRAINING_BYTES
from steadygpt.prepare.validation import ValidationSample

MOST_LOST = 0.5  # share of a source that may be left out, skipped or changed
LOSS_TO_WARN_OF = 0.1


@dataclass(frozen=True)
class CorpusOptions:
    """The options that decide the content of the shards."""

    source: str = option(
        "fineweb-edu",
        "fineweb-edu, stdlib, hf:NAME[@REVISION][:CONFIG], or a file, folder or glob, on this machine or in an object "
        "store ('gs://bucket/*.parquet')",
        no_password=True,
    )
    max_files: int | None = option(None, "use the first N files, sorted by name (default: all)", at_least=1)
    text_field: str = option("text", "JSON field or column with the text")
    separator: str = option(
        "",
        "what stands between the documents of a text, such as '<|endoftext|>' or '\\n\\n' (default: a text is one "
        "document)",
    )
    tokenizer: str = option(
        "gpt2",
        "gpt2, bytes or another tiktoken name; bpe:N to train one of N tokens on the source; hf:NAME[@REVISION] "
        "or the path of a tokenizer.json or its folder",
    )
    tokenizer_bytes: int | None = option(
        None,
        f"bytes of text to train bpe:N on, from the beginnings of the files (default: {TRAINING_BYTES:,})",
        at_least=1,
    )
    document_token: str = option(END_OF_TEXT, "special token to put before each document")
    shard_size: int = option(100_000_000, "tokens per shard, at most", at_least=1, at_most=2**31)
    val_share: float | None = option(
        None, "share of the val split, spread over the source; 0 for none (default: 1/40, at most 400 MB)",
        at_least=0, at_most=0.5,
    )  # fmt: skip
    name: str = option("", "prefix of the shards' file names (default: the last part of --source)")

    @property
    def wanted(self) -> Wanted:
        """What to read in the files; the escapes \\n, \\r, \\t and \\\\ in the separator are decoded."""
        escapes = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}
        return Wanted(self.text_field, re.sub(r"\\[nrt\\]", lambda match: escapes[match[0]], self.separator))


@dataclass(kw_only=True)
class Manifest:
    """The content of manifest.json: the options, the shards so far, and where an unfinished preparation resumes."""

    options: CorpusOptions  # as given, or their defaults
    tokenizer: str
    tokenizer_sha256: str = ""  # the identity of the tokenizer
    document_token: str = END_OF_TEXT
    vocab_size: Count
    dtype: Annotated[str, Meta(pattern=r"^uint(16|32)\Z")]
    piece_bytes: Annotated[int, Meta(ge=1)] = PIECE_BYTES  # about the size of a piece, which is in one split
    validation: ValidationSample
    commit: str  # of a data set of the Hub
    files: str  # a fingerprint of the names and sizes of the source's files
    versions: str = ""  # a fingerprint of their versions, until the preparation is complete
    size: Count  # bytes of the source's files
    left_out: dict[str, Count] = field(default_factory=dict)  # why files are left out -> their bytes
    complete: bool = False
    documents: Count = 0
    parts: Count = 0  # documents of texts that the separator divides
    empty: Count = 0  # rows without text
    skipped: Count = 0  # other rows without a document
    skipped_bytes: Count = 0  # of those that are lines
    read_bytes: Count = 0  # of all lines and texts, and of the texts in tables
    damaged: list[str] = field(default_factory=list)  # files that were not read to their end, and why
    damaged_bytes: Count = 0  # of these files
    repaired: Count = 0
    sampled_bytes: Count = 0  # of text that was decoded again
    changed_bytes: Count = 0  # of this text, the bytes of lost characters
    spelled: dict[str, Count] = field(default_factory=dict)  # special token -> how often texts contain its characters
    tokens: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    next: Place = field(default_factory=Place)  # where the first unit begins that is not in the shards

    @staticmethod
    def load(out: Path, options: CorpusOptions) -> "Manifest | None":
        """Read the manifest of an earlier run of the same preparation, if there is one.

        Raises: UserError if the earlier run wrote shards with different options, or if its shards are damaged.
        """
        advice = f"use a different --out, or empty {out}"
        try:
            manifest = read_json(out / MANIFEST, Manifest, f"so it is not a manifest; {advice}")
        except FileNotFoundError:
            foreign = sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin"))
            if foreign:
                raise UserError(f"{out}: holds {foreign[0]} but no {MANIFEST}; {advice}") from None
            return None
        differences = []
        for name, before in asdict(manifest.options).items():
            value = getattr(options, name)
            is_same = value == before
            if name == "tokenizer" and Path(str(value)).suffix == ".json" and Path(str(value)).exists():
                # Compare the content, not the path.
                is_same = record_named(str(value)).tokenizer_sha256 == manifest.tokenizer_sha256
            if not is_same:
                differences.append(f"--{name} {shown(before)}, and now {shown(value)}")
        if differences and not manifest.shards:
            return None
        if differences:
            raise UserError(f"{out}: prepared with {'; '.join(differences)}. Give the same options, {advice}")
        for shard in manifest.shards:
            path = out / shard["file"]
            if not path.exists() or open_shard(path).num_tokens != shard["tokens"]:
                raise UserError(
                    f"{path}: missing or damaged, though {MANIFEST} lists it; empty {out} and prepare it again"
                )
        return manifest

    def tokenizer_record(self) -> TokenizerRecord:
        return TokenizerRecord(self.tokenizer, self.tokenizer_sha256, self.document_token)

    def save(self, out: Path) -> None:
        """Replace the manifest atomically."""
        content = asdict(self)
        if self.complete:
            del content["versions"], content["next"]
        replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))

    def count(self, unit: list[Block], encoded: Encoded) -> None:
        """Add the counts of a unit, and advance to the next unit."""
        empty = sum(reason == NO_TEXT for _, reason in encoded.skipped)
        self.documents += encoded.documents
        self.parts += encoded.parts
        self.empty += empty
        self.skipped += len(encoded.skipped) - empty
        self.skipped_bytes += encoded.skipped_bytes
        self.read_bytes += sum(block.num_bytes for block in unit)
        self.damaged += [str(error) for error in encoded.damaged]
        self.repaired += encoded.repaired
        self.sampled_bytes += encoded.sampled_bytes
        self.changed_bytes += encoded.changed_bytes
        self.spelled = dict(Counter(self.spelled) + encoded.special_texts)
        self.tokens += len(encoded.ids)
        last = unit[-1]
        self.next = Place(last.file, last.end)
        if isinstance(last.data, Damaged):
            self.damaged_bytes += last.progress
            self.next = Place(last.file + 1)

    def tokens_of(self, split: str) -> int:
        """Return the number of tokens in the shards of a split."""
        return sum(shard["tokens"] for shard in self.shards if shard["split"] == split)

    def losses(self) -> dict[str, float]:
        """Return kind of loss -> its share of the source, as a phrase after a percentage: 5% of ..."""
        total = max(1, self.size + sum(self.left_out.values()))
        num_bytes = self.validation.num_bytes - 2 * self.repaired  # before each bad byte became three, U+FFFD
        by_rows = self.skipped / max(1, self.documents + self.skipped)
        by_bytes = self.skipped_bytes / max(1, self.read_bytes)
        return {
            "the files' bytes are left out": sum(self.left_out.values()) / total,
            "the files' bytes are in damaged files": self.damaged_bytes / total,
            "the rows are skipped": max(by_rows, by_bytes),
            "the text is not valid Unicode": self.repaired / max(1, num_bytes),
            f"the text changes by the tokenizer {self.tokenizer}": self.changed_bytes / max(1, self.sampled_bytes),
        }

    def check_losses(self) -> None:
        """Refuse a preparation of which more than half is lost."""
        for what, share in self.losses().items():
            if share > MOST_LOST:
                raise UserError(
                    f"{self.options.source}: {share:.0%} of {what}; expected at most {MOST_LOST:.0%}. Repair the "
                    "source, or choose another --tokenizer or --text_field"
                )

    def warnings(self) -> list[str]:
        """Return a line for each kind of loss that is large, and one for a separator that no text contains."""
        found = [f"{share:.0%} of {what}" for what, share in self.losses().items() if share > LOSS_TO_WARN_OF]
        if self.options.separator and not self.parts:
            found.append(f"no text contains the separator '{self.options.separator}'")
        return found

    def counts(self) -> str:
        """Return lines with what was read, and with the counts of documents, skipped rows, repairs and tokens."""
        read = f"read {bytes_text(self.size)}"
        if self.left_out:
            lost = ", ".join(f"{bytes_text(size)} {reason}" for reason, size in self.left_out.items())
            read += f" of {bytes_text(self.size + sum(self.left_out.values()))}; left out {lost}"
        notes = [counted(self.documents, "document")]
        if self.empty:
            notes.append(f"{counted(self.empty, 'row')} without text")
        if self.skipped:
            notes.append(f"{counted(self.skipped, 'row')} skipped")
        if self.damaged:
            notes.append(f"{counted(len(self.damaged), 'damaged file')} skipped")
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        if self.changed_bytes:
            notes.append(f"{self.changed_bytes / self.sampled_bytes:.1%} of a sample changed by the tokenizer")
        notes += [f"{count:,} {token} inside texts encoded as text" for token, count in self.spelled.items()]
        return "\n".join([read, ", ".join([*notes, f"{self.tokens:,} tokens"])])


def shown(value: object) -> str:
    return "not given" if value in (None, "") else repr(value)
