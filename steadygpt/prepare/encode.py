"""Encoding of units of a source to token ids, in worker processes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadygpt.data.shards import check_vocabulary, token_dtype
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.prepare.documents import NO_TEXT, Block, Skipped, cut_document, read_documents, repair


class Encoded(NamedTuple):
    """The ids of a unit, in pieces; each piece belongs to one split."""

    ids: np.ndarray  # (n,), of the shards' dtype
    ends: list[int]  # where each piece ends in the ids
    sizes: list[int]  # of each piece: bytes of text, or the number of token ids where a file or row has ids
    skipped: Sequence[tuple[str, str]] = ()  # skipped rows, as FILE:NUMBER, with the reasons
    documents: int = 0  # how many
    repaired: int = 0  # characters U+FFFD that replace invalid Unicode
    special_texts: Mapping[str, int] = {}  # special token -> how often texts contain its characters


def ids_of_row(row: list, where: str, vocab_size: int, document_id: int | None) -> np.ndarray:
    """Return the token ids (n,) of a document, for a row that has ids in place of text.

    The document token is put before the ids, unless they already begin or end with it.

    Raises: ValueError if the row is no list of token ids; UserError for an id outside the vocabulary.
    """
    if not row:
        raise ValueError(NO_TEXT)
    try:
        ids = np.array(row)
    except ValueError:  # lists of different lengths
        ids = np.array(None)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError("a list, but not of token ids")
    check_vocabulary(where, ids, vocab_size)
    if document_id in (None, ids[0], ids[-1]):
        return ids
    return np.concatenate([[document_id], ids])


def encode(
    unit: list[Block], record: TokenizerRecord, out: Path, vocab_size: int, text_field: str, piece_bytes: int
) -> Encoded:
    """Encode the documents of a unit, with the document token before each document and nowhere else.

    Files and rows may have token ids in place of text. These are not encoded, but checked against the vocabulary.

    Args:
        record: of the tokenizer; its file, if any, is in the folder `out`.
        piece_bytes: longer documents are cut into pieces of about this size.
    """
    dtype = token_dtype(vocab_size)
    if isinstance(unit[0].data, np.ndarray):  # then all blocks are arrays: a source holds either text or ids
        for block in unit:
            check_vocabulary(block.name, block.data, vocab_size)
        array = np.concatenate([block.data.astype(dtype) for block in unit])
        ends = [*range(piece_bytes, len(array), piece_bytes), len(array)]
        return Encoded(array, ends, np.diff(ends, prepend=0).tolist())
    document_id = None
    if not record.is_number:
        document_id = load_tokenizer(record, out).document_id
    ids = bytearray()
    ends = []
    sizes = []
    skipped = []
    documents = 0
    repaired = 0
    special_texts = Counter[str]()
    for block in unit:
        for row, text, is_begin in read_documents(block, text_field):
            where = f"{block.name}:{row + 1}"
            if isinstance(text, list):
                try:
                    array = ids_of_row(text, where, vocab_size, document_id).astype(dtype)
                except ValueError as error:
                    skipped.append((where, str(error)))
                    continue
                documents += 1
                for start in range(0, len(array), piece_bytes):
                    part = array[start : start + piece_bytes]
                    ids += part.tobytes()
                    ends.append(len(ids) // dtype.itemsize)
                    sizes.append(len(part))
                continue
            if isinstance(text, Skipped):
                skipped.append((where, str(text)))
                continue
            tokenizer = load_tokenizer(record, out)
            clean = repair(text)
            if clean is not text:
                repaired += clean.count("\ufffd") - text.count("\ufffd")
            special_texts += tokenizer.count_special_texts(clean)
            if is_begin:
                documents += 1
                ids += np.array([document_id], dtype).tobytes()
            for piece, size in cut_document(clean, piece_bytes):
                ids += tokenizer.encode_to_numpy(piece).astype(dtype).tobytes()
                ends.append(len(ids) // dtype.itemsize)
                sizes.append(size)
    return Encoded(np.frombuffer(ids, dtype), ends, sizes, skipped, documents, repaired, special_texts)
