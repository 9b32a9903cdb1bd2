"""Comparison of a converted tokenizer with the `tokenizers` library, on its vocabulary and on texts."""

import json
import random
import string
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any, Protocol

import tiktoken

from steadygpt.base.options import UserError
from steadygpt.data.tokenizer_json import has_space_within, refusal, to_characters


class Tokenizer(Protocol):
    """A tokenizer of a file, see tokenizer.py."""

    @property
    def encoding(self) -> tiktoken.Encoding: ...

    @property
    def json(self) -> str: ...

    @property
    def added(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


# Texts that patterns and normalizers split and change in different ways.
HARD_TEXTS = (
    # contractions, with an apostrophe or U+2019, a long s and a Kelvin sign
    "I'll we'VE THEY'RE it's don't I'm I'D 'S 's 'tis O'Reilly x'll'd ' s '' \u2019s '\u017f 'st \u212a'K",
    # numbers
    "0 12 123 1234 12345678901234567890 3.14 -1,000,000 1a2b x² ½ Ⅷ ٣٤٥٦",
    # spaces, tabs, line ends and other white space
    " leading,  two   three    four\ttab\t\ttabs \t mixed\t  ",
    "a\nb\n\nc\r\nd\r\n\r\ne\rf \n g\n h \n\n\n  i\n\t\n\tj   \n",
    "\x0b\x0c\x1c\x1d\x85a\xa0b\u2003c\u2028d\u2029e\u3000f \u3000 g\u200bh \ufeffi\ufeff",
    # punctuation, also after a lone space
    ' . , ! ? ( ) a .b , c ...  !!!??? --- === ///\n a/b\\n $x ^y #z {} [] && || ~~ @ _a_b_ `c` "d"',
    # accents, composed and not
    "naïve cafe\u0301 café e\u0301\u0323 \u1e69 s\u0323\u0307 \u212b A\u030a \u0958 \ufb01 \uff21 \u0301a",
    # cases
    "straße STRASSE ẞ İ I\u0307 \u0131 ǅ ǆ σςΣ camelCase HTTPServer aB Ab",
    # other scripts, with vowel signs; from right to left
    "你好\uff0c世界。日本語テキスト 한국어 \u1112\u1161\u11ab ภาษาไทย हिन्दी தமிழ்",
    "שָׁלוֹם العربية \u200f\u202eabc\u202c",
    # emoji that are joined or modified
    "👩\u200d👧 👍🏽 🇺🇳 ❤\ufe0f 1\ufe0f\u20e3 a\u200db 😀!",
    # control characters
    "".join(map(chr, [*range(32), *range(127, 160)])),
    # code
    "def f(x):\n    return x  # comment\n\n\n\tif (a&&b)||c: {}\r\n        pass\n<a href='b'>c</a> http://d.e/f?g=h&i",
)


def check_tokenizer(tokenizer: Tokenizer, where: object) -> None:
    """Check the added tokens and the merges of a tokenizer's file, and the ids of its tokens and of hard texts.

    Args:
        where: the file, for errors.

    Raises: UserError.
    """
    library = _library(tokenizer, where)
    content = json.loads(tokenizer.json)
    for added in content.get("added_tokens") or []:
        token = added["content"]
        i = added["id"]
        expected = library.token_to_id(token)
        if expected != i:
            raise refusal(where, f"the added token {token!r} has the id {i}, but {expected} in the library tokenizers")
    _check_merges(tokenizer.encoding._mergeable_ranks, content["model"], library, where)
    _compare(tokenizer, library, _hard_texts(tokenizer), where)


def check_against_library(tokenizer: Tokenizer, texts: Iterable[str], where: object) -> None:
    """Check that a tokenizer of a file encodes texts to the same ids as the library.

    Raises: UserError.
    """
    _compare(tokenizer, _library(tokenizer, where), texts, where)


def _library(tokenizer: Tokenizer, where: object) -> Any:
    """Return the library's tokenizer of the same file, set to encode the text of special tokens as ordinary text."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{where}: to check it, tokenizers is needed; pip install tokenizers") from None
    try:
        library = tokenizers.Tokenizer.from_str(tokenizer.json)
    except Exception as error:  # the library raises no other type
        raise refusal(where, f"the library tokenizers cannot read it ({shorten(str(error), 200)})") from error
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    return library


def _compare(tokenizer: Tokenizer, library: Any, texts: Iterable[str], where: object) -> None:
    for text in texts:
        ids = tokenizer.encode(text)
        expected = library.encode(text, add_special_tokens=False).ids
        if ids == expected:
            continue
        shorter = min(len(ids), len(expected))
        first_difference = next((i for i in range(shorter) if ids[i] != expected[i]), shorter)
        part = slice(max(0, first_difference - 1), first_difference + 4)  # from the last common id on
        longest = max(map(tokenizer.decode, (ids[part], expected[part])), key=len)[:50]
        raise refusal(
            where,
            f"other ids than in the library tokenizers for {longest!r}: found {ids[part]}, "
            f"but {expected[part]} in the library",
        )


def _check_merges(ranks: dict[bytes, int], model: dict, library: Any, where: object) -> None:
    """Check that two orders of merging are equal: the lowest id first, as tiktoken does, and the order of the list.

    They are equal under two conditions: the ids never decrease in the order of the list, and the library merges the
    bytes of each token to this token. Then one pair forms each token, the same in both orders, because the bytes
    inside a token merge as they do alone. Comparing texts would not show this reliably: pairs that compete are rare.
    """
    previous = -1
    for merge in model["merges"]:
        token = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
        i = model["vocab"][token]
        if i < previous:
            raise refusal(where, f"found the token {token!r} (id {i}) without a merge in the order of the ids")
        previous = i
    library.model.ignore_merges = False  # if true, a piece that is one token would not be merged from its bytes
    for raw, i in ranks.items():
        text = raw.decode(errors="ignore")
        if [part.id for part in library.model.tokenize(to_characters(raw))] != [i]:
            raise refusal(where, f"found the token {text!r} (id {i}), which its merges in their order do not give")
        if has_space_within(text):
            raise refusal(where, f"found the token {text!r}, which has a space within")
    library.model.ignore_merges = bool(model.get("ignore_merges"))


def _hard_texts(tokenizer: Tokenizer) -> list[str]:
    """Return HARD_TEXTS, texts of all tokens, and texts of all kinds of characters beside each other."""
    rng = random.Random(0)
    characters = [chr(i) for i in range(0x3400)]  # most scripts and symbols
    kinds = _kinds(characters)
    runs = [rng.choice(kinds) * rng.choice((1, 1, 1, 2, 3, 9)) for _ in range(5_000)]
    joined = [rng.choice([*HARD_TEXTS, *kinds, *tokenizer.added]) for _ in range(500)]
    tokens = [token.decode(errors="ignore") for token in tokenizer.encoding._mergeable_ranks]
    return [
        *HARD_TEXTS,
        *(kind * 40 for kind in kinds),
        *(kind * 2_000 for kind in " \na0.é你"),
        *(f"a{token}b {token} \t{token}\n{token}{token}. {token[:-1]} {token[1:]}" for token in tokenizer.added),
        "1".join(characters),  # separated, because NFC in the library orders only the marks of Unicode 9
        "".join(left + right for left in kinds for right in kinds),
        "".join(runs),
        "".join(joined),
        "".join(rng.sample(tokens, len(tokens))),
    ]


def _kinds(characters: list[str]) -> list[str]:
    """Return characters of every kind that patterns tell apart: each category of Unicode, white space, punctuation."""
    by_category = defaultdict[str, list[str]](list)
    for character in characters:
        by_category[unicodedata.category(character)].append(character)
    kinds: list[str] = []
    for of_one_category in by_category.values():
        kinds += of_one_category[:2]
    kinds += [character for character in characters if character.isspace()]
    return [*dict.fromkeys([*kinds, *string.punctuation, *"aAsStTdmlLvVrReE12\ue000\U0001f600\U0001d400"])]
