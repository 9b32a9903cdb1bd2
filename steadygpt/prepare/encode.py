"""Units of a source to token ids, in worker processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadygpt.data.shards import check_vocabulary, token_dtype
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import Block, cut_document, read_documents, repair


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
