"""Conversion of byte-level BPE between a tokenizer.json of the library `tokenizers` and a tiktoken.Encoding."""

import json
import math
import re
from itertools import pairwise
from textwrap import shorten
from unicodedata import normalize

import tiktoken

from steadygpt.base.options import UserError

ACCEPTED = (
    "byte-level BPE: normalizer none or NFC, pre_tokenizer ByteLevel without a prefix space, perhaps after one Split "
    "by a regular expression, decoder ByteLevel, ids in the order of the merges, and the ids that the library "
    "tokenizers gives"
)
# The added tokens that are not special, text -> id: those to find before NFC, and those to find after it.
Literals = tuple[dict[str, int], dict[str, int]]
# ByteLevel's regular expression as tiktoken writes it. It is a constant, because it is part of the identity.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Regular expressions that mean the same in both libraries. The meanings of ^, $, \w, (?i:ss) and {1,3}+, for example,
# differ.
_ESCAPE = r"\\[pP]\{\w+\}|\\[sSdDrnt\\/.'\-\[\](){}|+*?^$]"
_CLASS = rf"\[\^?(?:{_ESCAPE}|(?!--)[^\\\[\]&~])+\]"
_CONTRACTIONS = r"\(\?i:(?:'?(?:[sdmt]|\[sdmt\]|ll|ve|re)(?:\||(?=\))))+\)"
_COMMON = re.compile(
    rf"(?:{_ESCAPE}|{_CLASS}|{_CONTRACTIONS}|\\z|\(\?!\\S\)|\(\?:|\((?!\?)|[)|]|[?*+][?+]?|"
    r"\{\d+(?:,\d*)?\}(?![?+])|[^\\\[\](){}|?*+.^$])+"
)
# GPT-2 writes each printable byte as its character, and the other bytes as the characters from code point 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE = {character: byte for byte, character in _CHARACTER.items()}


def from_json(text: str, where: object) -> tuple[tiktoken.Encoding, bool, Literals]:
    """Convert a tokenizer.json to an encoding.

    This function refuses only what a comparison of texts would not show reliably. tokenizer_check.py compares the ids
    with those of the library.

    Args:
        where: the file, for errors.

    Returns: the encoding, which lacks the literals; whether text is first normalized to Unicode's form NFC; the
        literals.
    """
    try:
        return _convert(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        problem = str(error) if type(error) is ValueError else f"not a tokenizer.json ({error!r})"
        raise refusal(where, shorten(problem, 300)) from error


class NotConvertible(UserError):
    """A tokenizer gives ids that tiktoken cannot give, so text can be neither encoded nor decoded."""


def refusal(where: object, problem: str) -> NotConvertible:
    """Return the error for a file that is not accepted."""
    return NotConvertible(f"{where}: {problem}; expected {ACCEPTED}")


def _convert(content: dict) -> tuple[tiktoken.Encoding, bool, Literals]:
    model = content["model"]
    unsupported = {}
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            unsupported[key] = model[key]
    if model.get("type", "BPE") != "BPE" or unsupported:
        raise ValueError(f"found model {model['type']} {json.dumps(unsupported) if unsupported else ''}".rstrip())
    steps = {}
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        step = content.get(key)
        if step:  # a Sequence has its steps in "normalizers", "pretokenizers" or "decoders"
            steps[key] = next((step[name] for name in step if name.endswith("ers")), [step])
        else:
            steps[key] = []

    def refused(key: str) -> ValueError:
        return ValueError(f"found {key} {shorten(json.dumps(content.get(key)), 200)}")

    match steps["pre_tokenizer"]:
        case [{"type": "ByteLevel", "add_prefix_space": False, **rest}] if rest.get("use_regex", True):
            pattern = GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if _COMMON.fullmatch(regex):
            pattern = regex.replace(r"\z", "$")
        case _:
            raise refused("pre_tokenizer")
    if [step["type"] for step in steps["normalizer"]] not in ([], ["NFC"]):
        raise refused("normalizer")
    if [step["type"] for step in steps["decoder"]] != ["ByteLevel"]:
        raise refused("decoder")

    added: dict[str, int] = {}
    literals: Literals = {}, {}
    for token in content.get("added_tokens") or []:
        text = token["content"]
        added[text] = token["id"]
        if token.get("special"):
            continue
        if has_space_within(text):
            raise ValueError(f"found the added token {text!r} with a space within, but without special")
        is_after_nfc = bool(token.get("normalized"))
        if is_after_nfc and steps["normalizer"]:
            text = normalize("NFC", text)
        literals[is_after_nfc][text] = token["id"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    merged = {left + right for left, right in merges}
    # The vocabulary may also list added tokens, without a merge.
    vocab = {token: rank for token, rank in model["vocab"].items() if token in merged or added.get(token) != rank}
    foreign = [token for token in vocab if not _BYTE.keys() >= {*token}]
    if foreign:
        raise ValueError(f"found the token {foreign[0]!r}, which is not written in the characters of bytes")
    ranks = {bytes(map(_BYTE.__getitem__, token)): rank for token, rank in vocab.items()}
    ids = [*ranks.values(), *(i for token, i in added.items() if ranks.get(token.encode()) != i)]
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"found no token for the byte {missing[0]}")
    if len({*ids}) < len(ids) or min(ids) < 0 or max(ids) >= 2**24:
        raise ValueError(
            f"found ids from {min(ids):,} to {max(ids):,} for {len(ids):,} tokens, not unique or out of range"
        )
    literal_ids = {*literals[0].values(), *literals[1].values()}
    special = {text: i for text, i in added.items() if i not in literal_ids}
    encoding = tiktoken.Encoding("tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return encoding, bool(steps["normalizer"]), literals


def has_space_within(token: str) -> bool:
    """Return whether a long text could be cut inside this token (see cut_at of steadygpt/prepare/documents.py)."""
    return bool(re.search(r"\S ", token))


def to_characters(token: bytes) -> str:
    """Return the characters that a tokenizer.json writes for the bytes of a token."""
    return "".join(_CHARACTER[byte] for byte in token)


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two tokens that byte-pair encoding merges last to form `token`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        lowest = pairs.index(min(pairs))
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    return parts[0], parts[1]


def to_json(encoding: tiktoken.Encoding) -> str:
    """Convert an encoding without NFC to a tokenizer.json, for Hugging Face folders."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = encoding._mergeable_ranks
    special = encoding._special_tokens
    merges = [_last_merge(ranks, token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    tokenizer = Tokenizer(
        models.BPE(
            # Special tokens are in the vocabulary, because their ids may leave gaps.
            {to_characters(token): rank for token, rank in ranks.items()} | special,
            [(to_characters(left), to_characters(right)) for left, right in merges],
            ignore_merges=True,  # a piece that is a token is not merged again, as in tiktoken
        )
    )
    # In this library $ also matches before every newline, and {1,3}+ repeats {1,3}.
    pattern = re.sub(r"(\{[\d,]+\})\+", r"\1", encoding._pat_str.replace("$", r"\z"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in sorted(special, key=special.__getitem__)]
    )
    return tokenizer.to_str(pretty=True)
