"""The manifest of prepared shards."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError
from steadygpt.base.text import counted
from steadygpt.base.typed import Count, read_json
from steadygpt.data.shards import MANIFEST, ShardEntry, open_shard
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, record_named
from steadygpt.prepare.documents import PIECE_BYTES, Block, Damaged
from steadygpt.prepare.encode import Encoded, encode
from steadygpt.prepare.sources import Place


@dataclass(kw_only=True)
class Manifest:
    """The content of manifest.json: the options, the shards so far, and where an unfinished preparation resumes."""

    source: str
    name: str
    tokenizer: str
    tokenizer_sha256: str = ""  # the identity of the tokenizer
    tokenizer_bytes: Count = 0  # at most so much text trained the tokenizer, if this preparation trained it
    document_token: str = END_OF_TEXT
    shard_size: Annotated[int, Meta(ge=1)]
    val_share: Annotated[float, Meta(ge=0, le=1)]  # of the text, at most
    piece_bytes: Annotated[int, Meta(ge=1)] = PIECE_BYTES  # about the size of a piece, which is in one split
    text_field: str
    commit: str  # of a data set of the Hub
    files: str  # a fingerprint of the names and sizes of the source's files
    versions: str = ""  # a fingerprint of their versions, until the preparation is complete
    complete: bool = False
    vocab_size: Count
    dtype: Annotated[str, Meta(pattern=r"^uint(16|32)\Z")]
    documents: Count = 0
    skipped: Count = 0  # rows
    damaged: list[str] = field(default_factory=list)  # files that were not read to their end, and why
    repaired: Count = 0
    spelled: dict[str, Count] = field(default_factory=dict)  # special token -> how often texts contain its characters
    read: Count = 0  # bytes of text so far, or token ids
    read_for_val: Count = 0  # the part of `read` that is in val
    tokens: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    next: Place = field(default_factory=Place)  # where the first unit begins that is not in the shards

    @staticmethod
    def load(out: Path, options: Mapping[str, Any]) -> "Manifest | None":
        """Read the manifest of an earlier run of the same preparation, if there is one.

        Args:
            options: of this run; None and "" match any value.

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
        options = dict(options)
        path = Path(options["tokenizer"])
        if path.suffix == ".json" and path.exists():  # compare the content, not the path
            is_same = record_named(options["tokenizer"]).tokenizer_sha256 == manifest.tokenizer_sha256
            options["tokenizer"] = manifest.tokenizer if is_same else f"a different one in {path}"
        differences = []
        for key, value in options.items():
            if hasattr(manifest, key) and value not in (None, "", getattr(manifest, key)):
                differences.append(f"{key} {getattr(manifest, key)!r}, but now it is {value!r}")
        if differences and not manifest.shards:
            return None
        if differences:
            raise UserError(f"{out}: prepared with {'; '.join(differences)}; {advice}")
        for shard in manifest.shards:
            path = out / shard["file"]
            if not path.exists() or open_shard(path).num_tokens != shard["tokens"]:
                raise UserError(
                    f"{path}: missing or damaged, though {MANIFEST} lists it; empty {out} and prepare it again"
                )
        return manifest

    def tokenizer_record(self) -> TokenizerRecord:
        return TokenizerRecord(self.tokenizer, self.tokenizer_sha256, self.document_token)

    def encoder(self, out: Path) -> Callable[[list[Block]], Encoded]:
        """Return the function with which workers encode a unit."""
        return partial(
            encode, record=self.tokenizer_record(), out=out, vocab_size=self.vocab_size,
            text_field=self.text_field, piece_bytes=self.piece_bytes,
        )  # fmt: skip

    def save(self, out: Path) -> None:
        """Replace the manifest atomically."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.complete:
            del content["versions"], content["next"]
        replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))

    def add(self, unit: list[Block], encoded: Encoded) -> list[tuple[str, np.ndarray]]:
        """Count a unit, and return its ids in parts, each with its split.

        A piece of text goes to val if val then still has at most its share of all the text so far. So val is spread
        over the source, and never exceeds its share.
        """
        parts = []
        begin = 0  # of consecutive pieces that are in one split
        end = 0
        split = "train"
        for piece_end, size in zip(encoded.ends, encoded.sizes, strict=True):
            self.read += size
            piece_split = "train"
            if self.read_for_val + size <= self.val_share * self.read:
                self.read_for_val += size
                piece_split = "val"
            if piece_split != split:
                parts.append((split, encoded.ids[begin:end]))
                begin = end
                split = piece_split
            end = piece_end
        parts.append((split, encoded.ids[begin:end]))
        self.documents += encoded.documents
        self.repaired += encoded.repaired
        self.spelled = dict(Counter(self.spelled) + encoded.special_texts)
        self.skipped += len(encoded.skipped)
        self.damaged += [str(error) for error in encoded.damaged]
        self.tokens += len(encoded.ids)
        last = unit[-1]
        self.next = Place(last.file, last.end)
        if isinstance(last.data, Damaged):
            self.next = Place(last.file + 1)
        return parts

    def tokens_of(self, split: str) -> int:
        """Return the number of tokens in the shards of a split."""
        return sum(shard["tokens"] for shard in self.shards if shard["split"] == split)

    def counts(self) -> str:
        """Return a line with the counts of documents, skipped rows, repairs and tokens."""
        notes = [counted(self.documents, "document")]
        if self.skipped:
            notes.append(f"{counted(self.skipped, 'row')} skipped")
        if self.damaged:
            notes.append(f"{counted(len(self.damaged), 'damaged file')} skipped")
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        notes += [f"{count:,} {token} inside texts encoded as text" for token, count in self.spelled.items()]
        return ", ".join([*notes, f"{self.tokens:,} tokens"])
