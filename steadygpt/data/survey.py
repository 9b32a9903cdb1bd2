"""Documents of token shards, found and hashed in one pass."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from steadygpt.data.shards import Shard, token_dtype
from steadygpt.data.tokenizer import Tokenizer

BLOCK_TOKENS = 2**22  # tokens in memory at once
DIGEST_BYTES = 8  # among 10 million different documents, two have the same digest with a probability of 3e-6


class Survey(NamedTuple):
    """The ids of a split and its n documents, which document tokens separate."""

    counts: np.ndarray  # how often each id occurs, (n_vocab,) int64
    starts: np.ndarray  # the position of each document's first token in the split, (n,) int64
    lengths: np.ndarray  # tokens of each document, without its document token, (n,) int64
    digests: np.ndarray  # a hash of each document's ids, (n,) uint64


def survey_split(shards: Sequence[Shard], tokenizer: Tokenizer, advance: Callable[[int], object]) -> Survey:
    """Read the shards of a split as one sequence: a document may continue in the next shard.

    Args:
        shards: their ids are in the vocabulary, which ShardSet.check verifies.
        advance: is called with the number of tokens of each block.
    """
    dtype = token_dtype(tokenizer.n_vocab)  # one for all shards, because hashes depend on it
    counts, digests, edges = np.zeros(tokenizer.n_vocab, np.int64), bytearray(), [np.array([-1])]
    position, document = 0, hashlib.sha256()
    for shard in shards:
        for offset in range(0, shard.num_tokens, BLOCK_TOKENS):
            block = shard.tokens()[offset : offset + BLOCK_TOKENS].astype(dtype)
            counts += np.bincount(block, minlength=len(counts))
            ids, begin, ends = block.data, 0, np.flatnonzero(block == tokenizer.document_id)
            for end in ends.tolist():
                document.update(ids[begin:end])
                digests += document.digest()[:DIGEST_BYTES]
                document, begin = hashlib.sha256(), end + 1
            document.update(ids[begin:])
            edges.append(position + ends)
            position += len(block)
            advance(len(block))
    digests += document.digest()[:DIGEST_BYTES]
    around = np.concatenate([*edges, [position]])
    starts, lengths = around[:-1] + 1, np.diff(around) - 1
    # If the split begins with a document token, each one begins a document; nanoGPT's end one, also the last.
    kept = slice(1, None) if lengths[0] == 0 else slice(len(lengths) - int(lengths[-1] == 0))
    return Survey(counts, starts[kept], lengths[kept], np.frombuffer(digests, np.uint64)[kept])


def repeated(surveys: Sequence[Survey]) -> list[Survey]:
    """Keep the documents that occur more than once in all surveys together, except empty ones."""
    digests = np.sort(np.concatenate([survey.digests for survey in surveys]))
    digests = digests[1:][digests[1:] == digests[:-1]]
    kept = []
    for counts, *documents in surveys:
        _, lengths, found = documents
        is_kept = np.searchsorted(digests, found, "left") < np.searchsorted(digests, found, "right")
        kept.append(Survey(counts, *(column[is_kept & (lengths > 0)] for column in documents)))
    return kept


def read_tokens(shards: Sequence[Shard], start: int, count: int) -> np.ndarray:
    """Return the ids from a position of a split on, at most `count`, (n,)."""
    parts = []
    for shard in shards:
        parts.append(shard.tokens()[max(0, start) : max(0, start + count)])
        start -= shard.num_tokens
    return np.concatenate(parts)
