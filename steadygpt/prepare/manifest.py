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
from steadygpt.prepare.documents import PIECE_BYTES, Block
from steadygpt.prepare.encode import Encoded, encode
from steadygpt.prepare.sources import Place

VAL_SHARE = 1 / 40


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
    val_tokens: Count | None  # the option
    val_share: Annotated[float, Meta(ge=0, le=1)] = VAL_SHARE  # of the text, at most
    # About the size of a piece, which is in one split: bytes, or token ids.
    piece_bytes: Annotated[int, Meta(ge=1)] = PIECE_BYTES
    text_field: str
    commit: str  # of a data set of the Hub
    files: str  # the source's fingerprint
    complete: bool = False
    vocab_size: Count
    dtype: Annotated[str, Meta(pattern=r"^uint(16|32)\Z")]
    documents: Count = 0
    repaired: Count = 0
    spelled: dict[str, Count] = field(default_factory=dict)  # special token -> how often texts contain its characters
    skipped: dict[str, Count] = field(default_factory=dict)  # reason -> rows
    read: Count = 0  # bytes of text so far, or token ids
    read_for_val: Count = 0  # the part of `read` that is in val
    tokens: Count = 0
    tokens_for_val: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    # Only until the preparation is complete:
    times: str = ""  # a fingerprint of the modification times of the source's files
    next: Place = field(default_factory=Place)  # where the first unit begins that is not saved
    begun: dict[str, Count] = field(default_factory=dict)  # split -> tokens saved of its next shard

    @staticmethod
    def load(out: Path, options: Mapping[str, Any]) -> "Manifest | None":
        """Read the manifest of an earlier run of the same preparation; None if that has saved nothing.

        Args:
            options: of this run; None and "" match any value.

        Raises: UserError if the earlier run had different options, or if its shards are damaged.
        """
        advice = f"use a different --out, or empty {out}"
        try:
            manifest = read_json(out / MANIFEST, Manifest, f"so it is not a manifest; {advice}")
        except FileNotFoundError:
            foreign = sorted(path.name for path in out.glob("*") if path.suffix in (".npy", ".bin"))
            if foreign:
                raise UserError(f"{out}: holds {foreign[0]} but no {MANIFEST}; {advice}") from None
            return None
        except NotADirectoryError:
            raise UserError(f"--out {out} is a file; expected a folder") from None
        if not (manifest.shards or manifest.next != Place()):
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
            del content["times"], content["next"], content["begun"]
        replace_file(out / MANIFEST, lambda file: file.write(f"{json.dumps(content, indent=2)}\n".encode()))

    def add(self, unit: Encoded) -> dict[str, list[np.ndarray]]:
        """Count a unit, and return the ids of each split.

        A piece of text goes to val if val then still has at most its share of all the text so far. So val is spread
        over the source, and never exceeds its share.
        """
        ids: dict[str, list[np.ndarray]] = {"val": [], "train": []}
        begin = 0
        for end, size in zip(unit.ends, unit.sizes, strict=True):
            self.read += size
            is_val = self.read_for_val + size <= self.val_share * self.read
            if self.val_tokens is not None and self.tokens_for_val >= self.val_tokens:
                is_val = False
            if is_val:
                self.read_for_val += size
                self.tokens_for_val += end - begin
            ids["val" if is_val else "train"].append(unit.ids[begin:end])
            begin = end
        self.documents += unit.documents
        self.repaired += unit.repaired
        self.spelled = Counter(self.spelled) + Counter(unit.special_texts)
        self.tokens += len(unit.ids)
        self.skipped = Counter(self.skipped) + Counter(reason for _, reason in unit.skipped)
        return ids

    def counts(self) -> str:
        """Return a line with the counts of documents, skipped rows, repairs and tokens."""
        notes = [counted(self.documents, "document")] if self.documents else []  # unknown if the source holds token ids
        notes += [f"{count:,} skipped ({reason})" for reason, count in self.skipped.items()]
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        notes += [f"{count:,} {token} inside texts encoded as text" for token, count in self.spelled.items()]
        return ", ".join([*notes, f"{self.tokens:,} tokens"])
