"""Conversion of byte-level BPE between tiktoken and a tokenizer.json of the library `tokenizers`."""

import json
import math
import re
from itertools import pairwise
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import normalize

import tiktoken

from steadygpt.base.options import UserError

if TYPE_CHECKING:
    import tokenizers

MOST_IDS = 2**24
# The added tokens that are not special, text -> id: those matched before NFC, and those matched after it.
Literals = tuple[dict[str, int], dict[str, int]]
# ByteLevel's regular expression as tiktoken writes it. It is a constant, because it is part of the identity.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
# Regular expressions that split a text in the same way in both libraries, as a tokenizer.json has them.
PATTERNS = {
    "GPT-2": GPT2_PATTERN.replace("$", r"\z"),
    "Qwen": _WORDS % r"\p{N}",
    "two digits": _WORDS % r"\p{N}{1,2}",
    "Llama 3": _WORDS % r"\p{N}{1,3}",
    "GPT-4": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|"
        r"\s+(?!\S)|\s"
    ),
    "GPT-4o": (
        rf"{_UPPER}*{_LOWER}+{_SUFFIX}?|{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
        rf"{_SPACES}"
    ),
    "bytes": r"[\s\S]",
}
# GPT-2 writes each printable byte as its character, and the other bytes as the characters from code point 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE = {character: byte for byte, character in _CHARACTER.items()}
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece


class ByteLevelBpe(NamedTuple):
    """The byte-level BPE of a tokenizer.json, for tiktoken."""

    encoding: tiktoken.Encoding  # lacks the literals
    is_nfc: bool  # text is first normalized to Unicode's form NFC
    literals: Literals


def read_library(text: str, where: object) -> "tokenizers.Tokenizer":
    """Return the library's tokenizer of a tokenizer.json, set to encode the text of special tokens as ordinary text.

    Args:
        where: the file, for errors.
    """
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{where}: needs the library tokenizers. Try: pip install tokenizers") from None
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no other type
        problem = shorten(str(error), 300)
        raise UserError(f"{where}: not a tokenizer.json that the library tokenizers reads ({problem})") from error
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None  # otherwise the ids would be random
    return library


def read_bpe(text: str) -> ByteLevelBpe | None:
    """Return the byte-level BPE of a tokenizer.json for tiktoken; None if it is of another kind.

    The ids of a text without literals, in the form NFC if is_nfc, are equal if gives_ids_of confirms the merges.
    """
    try:
        content = json.loads(text)
        pattern = _pattern_of(content["pre_tokenizer"])
        if pattern and content["model"].get("type", "BPE") == "BPE":
            return _read_bpe(content, pattern)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):  # the library reports why
        pass
    return None


def _pattern_of(pre_tokenizer: dict) -> str:
    """Return the pattern of a pre-tokenizer that is known to split as tiktoken does, or ""."""
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "add_prefix_space": False, **rest}] if rest.get("use_regex", True):
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if regex in PATTERNS.values():
            return regex.replace(r"\z", "$")
    return ""


def _read_bpe(content: dict, pattern: str) -> ByteLevelBpe | None:
    model = content["model"]
    normalizer = content.get("normalizer") or {"normalizers": []}
    normalizers = [step["type"] for step in normalizer.get("normalizers", [normalizer])]
    if normalizers not in ([], ["NFC"]) or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    special: dict[str, int] = {}
    literals: Literals = {}, {}
    for token in content.get("added_tokens") or []:
        added = token["content"]
        if token.get("special"):
            special[added] = token["id"]
        elif token.get("normalized"):
            literals[1][normalize("NFC", added) if normalizers else added] = token["id"]
        else:
            literals[0][added] = token["id"]
    merged = {"".join(merge) for merge in merges_of(model)}
    added_ids = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    ranks: dict[bytes, int] = {}
    for token, i in model["vocab"].items():
        if token in merged or added_ids.get(token) != i:  # the vocabulary may also list added tokens, without a merge
            ranks[bytes(_BYTE[character] for character in token)] = i
    if any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    ids = [*ranks.values(), *(i for token, i in added_ids.items() if ranks.get(token.encode()) != i)]
    if len({*ids}) < len(ids) or max(ids) >= MOST_IDS:
        return None
    encoding = tiktoken.Encoding("tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return ByteLevelBpe(encoding, bool(normalizers), literals)


def merges_of(model: dict) -> list[list[str]]:
    """Return the pairs of tokens that a BPE merges, in order; older files have them as strings."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def gives_ids_of(bpe: ByteLevelBpe, text: str, library: "tokenizers.Tokenizer") -> bool:
    """Return whether tiktoken, which merges the lowest id first, gives the ids of the library, which follows the list.

    It does under two conditions: ids never decrease along the list of merges, and the library merges the bytes of each
    token to this token. Then the same pair forms each token in both, because the bytes inside a token merge as they do
    alone. The ids of added tokens are compared too.

    Args:
        text: of the tokenizer.json.
    """
    content = json.loads(text)
    model = content["model"]
    merged = [model["vocab"]["".join(merge)] for merge in merges_of(model)]
    if merged != sorted(merged):
        return False
    for token in content.get("added_tokens") or []:
        if library.token_to_id(token["content"]) != token["id"]:
            return False
    for special in bpe.encoding._special_tokens:  # which may be in the vocabulary
        if library.encode(special, add_special_tokens=False).ids != bpe.encoding.encode_ordinary(special):
            return False
    library.model.ignore_merges = False  # if true, a piece that is one token would not be merged from its bytes
    merges_agree = True
    for token, i in bpe.encoding._mergeable_ranks.items():
        if [part.id for part in library.model.tokenize(to_characters(token))] != [i]:
            merges_agree = False
            break
    library.model.ignore_merges = bool(model.get("ignore_merges"))
    return merges_agree


def bytes_of_tokens(text: str, library: "tokenizers.Tokenizer") -> dict[int, bytes]:
    """Return the bytes of each id of any tokenizer.json, as far as its decoder shows them."""
    decoder = json.dumps(json.loads(text).get("decoder"), ensure_ascii=False)
    bytes_of = {}
    for token, i in library.get_vocab(with_added_tokens=False).items():
        if '"ByteLevel"' in decoder and _BYTE.keys() >= {*token}:
            bytes_of[i] = bytes(_BYTE[character] for character in token)
        elif '"ByteFallback"' in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token):
            bytes_of[i] = bytes([int(token[3:5], 16)])
        elif SPACE in decoder:
            bytes_of[i] = token.replace(SPACE, " ").encode()
        else:
            bytes_of[i] = token.encode()
    for i, added in library.get_added_tokens_decoder().items():
        bytes_of[i] = added.content.encode()
    return bytes_of


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
