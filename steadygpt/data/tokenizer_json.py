"""Byte-level BPE as a tokenizer.json of the `tokenizers` library, and as a tiktoken.Encoding with the same ids."""

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
    "by a regular expression, decoder ByteLevel, ids in the order of the merges, no "
    "added tokens with single_word, lstrip or rstrip unless special"
)
# Of the added tokens that are not special those to find in a text first, and those to find after NFC: text -> id.
Literals = tuple[dict[str, int], dict[str, int]]
# tiktoken's spelling of what ByteLevel's regular expression matches; a constant, because it is part of the identity.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# What means the same in the regular expressions of both libraries; ^, $, \w, (?i:ss) and {1,3}+, for example, do not.
_ESCAPE = r"\\[pP]\{\w+\}|\\[sSdDrnt\\/.'\-\[\](){}|+*?^$]"
_CLASS = rf"\[\^?(?:{_ESCAPE}|(?!--)[^\\\[\]&~])+\]"
_CONTRACTIONS = r"\(\?i:(?:'?(?:[sdmt]|\[sdmt\]|ll|ve|re)(?:\||(?=\))))+\)"
_COMMON = re.compile(
    rf"(?:{_ESCAPE}|{_CLASS}|{_CONTRACTIONS}|\\z|\(\?!\\S\)|\(\?:|\((?!\?)|[)|]|[?*+][?+]?|"
    r"\{\d+(?:,\d*)?\}(?![?+])|[^\\\[\](){}|?*+.^$])+"
)
# GPT-2 writes printable bytes as themselves, and the others as the characters from code point 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE = {character: byte for byte, character in _CHARACTER.items()}
# Characters of every kind that patterns tell apart.
_PROBE = "".join(map(chr, range(0x3400))) + "a😀b"


def from_json(text: str, where: object, is_known: bool) -> tuple[tiktoken.Encoding, bool, Literals]:
    """Convert a tokenizer.json to an encoding with the same ids; text that spells a special token is ordinary text.

    Args:
        where: the file, for errors.
        is_known: skips the slow checks; the caller compares the result with one that has passed them.

    Returns: the encoding, which lacks the literals; whether text is brought to Unicode's form NFC first; the literals.
    """
    try:
        return _convert(json.loads(text), is_known)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        problem = str(error) if type(error) is ValueError else f"not a tokenizer.json ({error!r})"
        raise UserError(f"{where}: {shorten(problem, 300)}; expected {ACCEPTED}") from error


def _convert(content: dict, is_known: bool) -> tuple[tiktoken.Encoding, bool, Literals]:
    model = content["model"]
    found = {
        key: model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)
    }
    if model.get("type", "BPE") != "BPE" or found:
        raise ValueError(f"found model {model['type']} {json.dumps(found) if found else ''}".rstrip())
    steps = {}
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        step = content.get(key)
        steps[key] = next((step[name] for name in step if name.endswith("ers")), [step]) if step else []

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
        added[text := token["content"]] = token["id"]
        if not token.get("special"):
            unfit = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
            unfit += ["a space within, or no text"] * bool(not text or re.search(r"\S ", text))  # as in _check_merges
            if unfit:
                raise ValueError(f"found the added token {text!r} with {', '.join(unfit)}, but without special")
            in_nfc = bool(token.get("normalized") and steps["normalizer"])
            literals[bool(token.get("normalized"))][normalize("NFC", text) if in_nfc else text] = token["id"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    made = {left + right for left, right in merges}
    # Added tokens may be in the vocabulary too, without a merge.
    vocab = {token: rank for token, rank in model["vocab"].items() if token in made or added.get(token) != rank}
    if foreign := next((token for token in vocab if not _BYTE.keys() >= {*token}), ""):
        raise ValueError(f"found the token {foreign!r}, which is not written in the characters of bytes")
    ranks = {bytes(map(_BYTE.__getitem__, token)): rank for token, rank in vocab.items()}
    ids = [*ranks.values(), *(i for token, i in added.items() if ranks.get(token.encode()) != i)]
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"found no token for the byte {missing[0]}")
    if len({*ids}) < len(ids) or min(ids) < 0 or max(ids) >= 2**24:
        raise ValueError(
            f"found ids from {min(ids):,} to {max(ids):,} for {len(ids):,} tokens, not unique or out of range"
        )
    if not is_known:
        _check_merges(ranks, vocab, merges)
    special = {text: i for text, i in added.items() if not any(i in found.values() for found in literals)}
    encoding = tiktoken.Encoding("tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    if encoding.decode(encoding.encode_ordinary(_PROBE)) != _PROBE:  # tiktoken drops what the pattern does not match
        raise ValueError(f"found a pattern that some characters do not match: {pattern}")
    return encoding, bool(steps["normalizer"]), literals


def _check_merges(ranks: dict[bytes, int], vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Check that merging the pair that gives the lowest id first, as tiktoken does, equals merging in the order listed.

    It does if merging the bytes of each token so ends with a listed pair, and these pairs are in the order of the ids:
    a pair that is not listed, or comes earlier in the list, would have to be formed from these bytes too.

    Raises: ValueError.
    """
    order: dict[tuple[str, ...], int] = {merge: number for number, merge in reversed([*enumerate(merges)])}
    before = -1
    for rank, token in sorted((rank, token) for token, rank in vocab.items() if len(token) > 1):
        raw = bytes(map(_BYTE.__getitem__, token))
        place = order.get(tuple(map(_text, _last_merge(ranks, raw))), -1)
        if place <= before:
            raise ValueError(f"found the token {token!r} (id {rank}) without a merge in the order of the ids")
        # Long texts are cut before such a space, see documents.cut_text.
        if re.search(r"\S ", raw.decode(errors="ignore")):
            raise ValueError(f"found the token {raw.decode(errors='replace')!r}, which has a space within")
        before = place


def _text(token: bytes) -> str:
    return "".join(_CHARACTER[byte] for byte in token)


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two tokens that byte-pair encoding merges last to form `token`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def to_json(encoding: tiktoken.Encoding) -> str:
    """Convert an encoding without NFC to a tokenizer.json, for Hugging Face folders."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = encoding._mergeable_ranks
    special = encoding._special_tokens
    merges = [_last_merge(ranks, token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    tokenizer = Tokenizer(
        models.BPE(
            {_text(token): rank for token, rank in ranks.items()} | special,  # their ids may leave gaps
            [(_text(left), _text(right)) for left, right in merges],
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
