"""Encoding of units of a source to token ids, in worker processes."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadygpt.data.shards import token_dtype
from steadygpt.data.tokenizer import Tokenizer, TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import NO_TEXT, Block, Damaged, Skipped, Wanted, cut_document, read_documents, repair

# About one character in SAMPLED is decoded again, at most SAMPLE of them in each EVERY characters of a document.
SAMPLED = 500
SAMPLE = 500
EVERY = 50_000


@dataclass
class Encoded:
    """The ids of a unit, in pieces; each piece belongs to one split."""

    ids: np.ndarray  # (n,), of the shards' dtype
    ends: list[int] = field(default_factory=list)  # where each piece ends in the ids
    sizes: list[int] = field(default_factory=list)  # of each piece, in bytes of text
    skipped: list[tuple[str, str]] = field(default_factory=list)  # skipped rows, as FILE:POSITION, with the reasons
    skipped_bytes: int = 0  # of the skipped rows that are lines; without those that only have no text
    damaged: list[Damaged] = field(default_factory=list)  # of each file that cannot be read further: why
    documents: int = 0
    parts: int = 0  # documents of texts that a separator divides
    repaired: int = 0  # characters U+FFFD that replace invalid Unicode
    sampled_bytes: int = 0  # of text that was decoded again
    changed_bytes: int = 0  # of this text, the bytes of lost characters
    special_texts: Counter[str] = field(default_factory=Counter)  # special token -> how often texts contain it
    spelled_in: dict[str, str] = field(default_factory=dict)  # special token -> the first file that contains it


def encode(
    unit: list[Block], record: TokenizerRecord, out: Path, vocab_size: int, wanted: Wanted, piece_bytes: int
) -> Encoded:
    """Encode the documents of a unit, with the document token before each document and nowhere else.

    Args:
        record: of the tokenizer; its file, if any, is in the folder `out`.
        piece_bytes: longer documents are cut into pieces of about this size.
    """
    dtype = token_dtype(vocab_size)
    tokenizer = load_tokenizer(record, out)
    document_token = np.array([tokenizer.document_id], dtype).tobytes()
    ids = bytearray()
    encoded = Encoded(np.empty(0, dtype))
    characters = 0  # so far
    for block in unit:
        if isinstance(block.data, Damaged):
            encoded.damaged.append(block.data)
            continue
        for at, text, is_begin, row_bytes, is_part in read_documents(block, wanted):
            if isinstance(text, Skipped):
                counted_in = "byte" if isinstance(block.data, bytes) else "row"
                encoded.skipped.append((f"{block.name}, {counted_in} {at:,}", str(text)))
                encoded.skipped_bytes += row_bytes if str(text) != NO_TEXT else 0
                continue
            encoded.parts += is_part
            clean = repair(text)
            if clean is not text:
                encoded.repaired += clean.count("\ufffd") - text.count("\ufffd")
            for token, count in tokenizer.count_special_texts(clean).items():
                encoded.special_texts[token] += count
                encoded.spelled_in.setdefault(token, block.name)
            if is_begin:
                encoded.documents += 1
                ids += document_token
            for start in range(0, len(clean), EVERY):
                if encoded.sampled_bytes * SAMPLED <= characters:
                    sample = clean[start : start + SAMPLE]
                    encoded.sampled_bytes += len(sample.encode())
                    encoded.changed_bytes += changed_bytes(sample, tokenizer)
                characters += min(EVERY, len(clean) - start)
            for piece, size in cut_document(clean, piece_bytes):
                ids += tokenizer.encode_to_numpy(piece).astype(dtype).tobytes()
                encoded.ends.append(len(ids) // dtype.itemsize)
                encoded.sizes.append(size)
    encoded.ids = np.frombuffer(ids, dtype)
    return encoded


def changed_bytes(text: str, tokenizer: Tokenizer) -> int:
    """Return the bytes of the characters that a text loses when encoded and decoded, regardless of their order."""
    known = [i for i in tokenizer.encode(text) if i != tokenizer.unknown_id]
    lost = Counter(text) - Counter(tokenizer.decode(known))
    return sum(count * len(character.encode()) for character, count in lost.items())
