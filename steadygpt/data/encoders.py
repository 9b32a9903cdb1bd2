"""Conversion of text to token ids and back, by tiktoken or by the library `tokenizers`."""

import hashlib
import json
import re
from collections import Counter
from functools import cached_property
from textwrap import shorten
from typing import TYPE_CHECKING
from unicodedata import is_normalized

import numpy as np
import tiktoken

from steadygpt.base.options import UserError
from steadygpt.data.tokenizer_json import Literals, bytes_of_tokens, read_library, to_json

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"  # begins every document, unless --document_token names another token
# A text to test whether tokens preserve the bytes of a text: case, white space, Unicode.
PROBE = "Ab  cD \n\n\tx\r\n\u00e9 \u017f\u212a\ufb01 \u6f22\u5b57 \U0001f642 1\u00b2 don't <x> ... \x01 z"


class Tokenizer:
    """The base of both encoders. Text that spells a special token is encoded as ordinary text."""

    document_token: str  # begins every document
    added_space: int | None  # how many spaces it puts before each text; None if tokens do not show the bytes of a text
    unknown_id: int | None  # id of all text that no other token covers

    @property
    def special(self) -> dict[str, int]:
        """The ids of the special tokens."""
        raise NotImplementedError

    @property
    def bytes_of(self) -> dict[int, bytes]:
        """The bytes of each id, as far as they are known; added tokens have those of their text."""
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        """The identity: the SHA-256 in hex of everything that determines ids."""
        raise NotImplementedError

    def encode_to_numpy(self, text: str, with_special: bool = False) -> np.ndarray:
        """Return the ids of a text without lone surrogates, (n,) uint32; with_special also encodes special tokens."""
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; skip ids without a token, which a model can still predict."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the text of its tokenizer.json, for Hugging Face folders."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        return self.encode_to_numpy(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text, with names of special tokens encoded as these tokens."""
        return self.encode_to_numpy(text, with_special=bool(self._special_pattern.search(text))).tolist()

    @cached_property
    def n_vocab(self) -> int:
        """The largest id + 1."""
        return max(self.bytes_of, default=0) + 1

    @property
    def document_id(self) -> int:
        """The id of the token that begins every document."""
        if self.document_token not in self.special:
            tokens = shorten(" ".join(sorted(self.special, key=self.special.__getitem__)), 1000)
            if tokens:
                advice = "name the one that begins each document with --document_token of prepare_dataset.py"
            else:
                advice = "add one to its added_tokens, because one begins each document"
            raise UserError(
                f"the tokenizer has no special token {self.document_token!r}; found {tokens or 'none'}; {advice}"
            )
        return self.special[self.document_token]

    def count_special_texts(self, text: str) -> Counter[str]:
        """Count how often a text spells each special token; at each place, only the longest match counts."""
        return Counter(self._special_pattern.findall(text))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """The number of bytes of each id, (n_vocab,) int64; 0 for special tokens and unused ids.

        All are 0 if the tokens of a text do not show its bytes. If the tokenizer puts a space before each text, the
        document token has -1, so that the sum for a document is right.
        """
        sizes = np.zeros(self.n_vocab, np.int64)
        if self.added_space is None:
            return sizes
        sizes[np.fromiter(self.bytes_of, np.int64)] = np.fromiter(map(len, self.bytes_of.values()), np.int64)
        sizes[[*self.special.values()]] = 0
        if self.document_token in self.special:
            sizes[self.document_id] = -self.added_space
        return sizes


class Library(Tokenizer):
    """Any tokenizer.json, by the library `tokenizers`.

    Args:
        text: of the file.
        where: the file, for errors.
    """

    def __init__(self, text: str, where: str = "", document_token: str = END_OF_TEXT):
        self.text = text
        self.where = where
        self.document_token = document_token

    @cached_property
    def library(self) -> "tokenizers.Tokenizer":
        return read_library(self.text, self.where)

    @cached_property
    def special(self) -> dict[str, int]:
        return {token.content: i for i, token in self.library.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        return bytes_of_tokens(self.text, self.library)

    @cached_property
    def added_space(self) -> int | None:  # type: ignore[override]
        shown = b"".join(self.bytes_of[i] for i in self.encode(PROBE))
        expected = PROBE.encode()
        return {expected: 0, b" " + expected: 1}.get(shown)

    @cached_property
    def unknown_id(self) -> int | None:  # type: ignore[override]
        model = json.loads(self.text)["model"]
        return model.get("unk_id", self.library.token_to_id(model.get("unk_token") or ""))

    @cached_property
    def sha256(self) -> str:
        # White space and the order of keys do not matter.
        return hashlib.sha256(json.dumps(json.loads(self.text), sort_keys=True).encode()).hexdigest()

    def encode_to_numpy(self, text: str, with_special: bool = False) -> np.ndarray:
        self.library.encode_special_tokens = not with_special
        try:
            return np.array(self.library.encode(text, add_special_tokens=False).ids, np.uint32)
        except Exception as error:  # the library raises no other type
            raise UserError(f"{self.where}: the library tokenizers cannot encode a text with it ({error})") from error

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        return self.text


class Tiktoken(Tokenizer):
    """A byte-level BPE by tiktoken; the library encodes the texts for which tiktoken may give different ids.

    Args:
        pattern: of the encoding, or a name that stands for it.
        is_nfc: the encoding gives the library's ids for texts in Unicode's form NFC only.
        literals: added tokens that are not special, which the encoding lacks; each is encoded as its id.
        library: of the tokenizer.json that the encoding comes from, if any.
    """

    added_space = 0
    unknown_id = None

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        pattern: str,
        is_nfc: bool = False,
        literals: Literals = ({}, {}),
        library: Library | None = None,
        document_token: str = END_OF_TEXT,
    ):
        self.encoding = encoding
        self.pattern = pattern
        self.is_nfc = is_nfc
        self.literals = literals
        self.library = library
        self.document_token = document_token

    @property
    def special(self) -> dict[str, int]:
        return self.encoding._special_tokens

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        added = self.special | self.literals[0] | self.literals[1]
        texts = {i: token.encode() for token, i in added.items()}
        return texts | {i: token for token, i in self.encoding._mergeable_ranks.items()}

    @cached_property
    def sha256(self) -> str:
        tokens = sorted((i, token.hex()) for i, token in self.bytes_of.items())
        content = [self.is_nfc, self.pattern, tokens, sorted(self.special.items())]
        if any(self.literals):
            content += [sorted(texts.items()) for texts in self.literals]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def encode_to_numpy(self, text: str, with_special: bool = False) -> np.ndarray:
        if self.library and (with_special or self._needs_library(text)):
            return self.library.encode_to_numpy(text, with_special)
        if with_special:
            return np.array(self.encoding.encode(text, allowed_special="all"), np.uint32)
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def _needs_library(self, text: str) -> bool:
        """Return whether a text has a literal, or changes by NFC, where releases of Unicode differ."""
        if self.is_nfc and not is_normalized("NFC", text):
            return True
        return any(literal in text for literals in self.literals for literal in literals)

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.bytes_of.get(i, b"") for i in ids).decode(errors="replace")

    def to_json(self) -> str:
        return self.library.text if self.library else to_json(self.encoding)
