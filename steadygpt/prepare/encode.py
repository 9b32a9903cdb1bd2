"""Encoding of units of a source to token ids, in worker processes."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.data.shards import check_vocabulary, token_dtype
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import Block, Damaged, Skipped, cut_document, read_documents, repair


@dataclass
class Encoded:
    """The ids of a unit, in pieces; each piece belongs to one split."""

    ids: np.ndarray  # (n,), of the shards' dtype
    ends: list[int] = field(default_factory=list)  # where each piece ends in the ids
    sizes: list[int] = field(default_factory=list)  # of each piece: bytes of text, or the number of token ids
    skipped: list[tuple[str, str]] = field(default_factory=list)  # skipped rows, as FILE:POSITION, with the reasons
    damaged: list[Damaged] = field(default_factory=list)  # of each file that cannot be read further: why
    documents: int = 0  # how many
    repaired: int = 0  # characters U+FFFD that replace invalid Unicode
    special_texts: Counter[str] = field(default_factory=Counter)  # special token -> how often texts contain it
    spelled_in: dict[str, str] = field(default_factory=dict)  # special token -> the first file that contains it


def encode(
    unit: list[Block], record: TokenizerRecord, out: Path, vocab_size: int, text_field: str, piece_bytes: int
) -> Encoded:
    """Encode the documents of a unit, with the document token before each document and nowhere else.

    Blocks of token ids are not encoded, but checked against the vocabulary.

    Args:
        record: of the tokenizer; its file, if any, is in the folder `out`.
        piece_bytes: longer documents are cut into pieces of about this size.
    """
    dtype = token_dtype(vocab_size)
    ids = bytearray()
    encoded = Encoded(np.empty(0, dtype))
    for block in unit:
        if isinstance(block.data, Damaged):
            encoded.damaged.append(block.data)
            continue
        if isinstance(block.data, np.ndarray):
            check_vocabulary(block.name, block.data, vocab_size)
            encoded.documents += int((block.data == document_id_of(record, out)).sum())
            for start in range(0, len(block.data), piece_bytes):
                part = block.data[start : start + piece_bytes]
                ids += part.astype(dtype).tobytes()
                encoded.ends.append(len(ids) // dtype.itemsize)
                encoded.sizes.append(len(part))
            continue
        tokenizer = load_tokenizer(record, out)
        document_token = np.array([tokenizer.document_id], dtype).tobytes()
        for at, text, is_begin in read_documents(block, text_field):
            if isinstance(text, Skipped):
                counted_in = "byte" if isinstance(block.data, bytes) else "row"
                encoded.skipped.append((f"{block.name}, {counted_in} {at:,}", str(text)))
                continue
            clean = repair(text)
            if clean is not text:
                encoded.repaired += clean.count("\ufffd") - text.count("\ufffd")
            for token, count in tokenizer.count_special_texts(clean).items():
                encoded.special_texts[token] += count
                encoded.spelled_in.setdefault(token, block.name)
            if is_begin:
                encoded.documents += 1
                ids += document_token
            for piece, size in cut_document(clean, piece_bytes):
                ids += tokenizer.encode_to_numpy(piece).astype(dtype).tobytes()
                encoded.ends.append(len(ids) // dtype.itemsize)
                encoded.sizes.append(size)
    encoded.ids = np.frombuffer(ids, dtype)
    return encoded


def document_id_of(record: TokenizerRecord, out: Path) -> int:
    """Return the id of the token that begins every document; -1 if the tokenizer has none, or is not known."""
    try:
        return load_tokenizer(record, out).document_id
    except UserError:  # such a tokenizer is refused for text, and taken for token ids
        return -1
