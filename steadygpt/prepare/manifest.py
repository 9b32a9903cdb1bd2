"""The manifest of prepared shards: the options, what was written, and where an interrupted preparation continues."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

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
    spelled: dict[str, Count] = field(default_factory=dict)  # special token -> how often texts contain its characters
    skipped: dict[str, Count] = field(default_factory=dict)  # reason -> rows
    read: Count = 0  # bytes of text so far, or token ids
    read_for_val: Count = 0  # of these, in val
    tokens: Count = 0
    tokens_for_val: Count = 0
    shards: list[ShardEntry] = field(default_factory=list)
    # Until the preparation is complete:
    times: str = ""  # a fingerprint of when the source's files were changed
    next: Place = field(default_factory=Place)  # of the unit after the last one that is saved
    begun: dict[str, Count] = field(default_factory=dict)  # split -> tokens of its next shard that are saved

    @staticmethod
    def load(out: Path, asked: Mapping[str, Any]) -> "Manifest | None":
        """Read the manifest that an earlier run of the same preparation left; None if it has saved nothing.

        Args:
            asked: the options of this run; None and "" are those that it leaves open.

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
        asked = dict(asked)
        path = Path(asked["tokenizer"])
        if path.suffix == ".json" and path.exists():  # the content counts, not the name
            is_same = record_named(asked["tokenizer"]).tokenizer_sha256 == manifest.tokenizer_sha256
            asked["tokenizer"] = manifest.tokenizer if is_same else f"a different one in {path}"
        differ = [
            f"{key} {getattr(manifest, key)!r}, but now it is {value!r}"
            for key, value in asked.items()
            if hasattr(manifest, key) and value not in (None, "", getattr(manifest, key))
        ]
        if differ:
            raise UserError(f"{out}: prepared with {'; '.join(differ)}; {advice}")
        for shard in manifest.shards:
            path = out / shard["file"]
            if not path.exists() or open_shard(path).num_tokens != shard["tokens"]:
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
            del content["times"], content["next"], content["begun"]
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
        self.spelled = Counter(self.spelled) + Counter(found.spelled)
        self.tokens += len(found.ids)
        self.skipped = Counter(self.skipped) + Counter(reason for _, reason in found.skipped)
        return ids

    def counts(self) -> str:
        """Return what was read, in words."""
        notes = [counted(self.documents, "document")] if self.documents else []  # not known of token ids
        notes += [f"{count:,} skipped ({reason})" for reason, count in self.skipped.items()]
        if self.repaired:
            notes.append(f"{counted(self.repaired, 'invalid character')} replaced")
        notes += [f"{count:,} {token} inside texts encoded as text" for token, count in self.spelled.items()]
        return ", ".join([*notes, f"{self.tokens:,} tokens"])
