"""Tests that the ids of a tokenizer.json are those of the `tokenizers` library, by random tokenizers and texts."""

import dataclasses
import json
import random
import re
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from steadygpt.base.options import UserError
from steadygpt.data.encoders import Library, Tiktoken
from steadygpt.data.tokenizer import (
    END_OF_TEXT,
    GPT2_TOKENIZER,
    TokenizerRecord,
    load_tokenizer,
    record_named,
)
from steadygpt.data.tokenizer_json import GPT2_PATTERN, PATTERNS, to_json
from steadygpt.prepare import documents
from steadygpt.prepare.documents import cut_at, cut_document
from steadygpt.prepare.train_tokenizer import train_bpe

LLAMA3 = PATTERNS["Llama 3"]
TEXT = (
    Path(documents.__file__).read_text() + "naïve café, 12345 67; I'll we'VE THEY'RE it's 你好 \n\n\t x  y ...\n/" * 9
)
TRAPS = (
    " \n\t\r'sSdtlLvVrRe1290.!/\u00a0\u0085\u2003\u3000é漢\u0301\u0308\u0327aA\u017fK\u212b\u0e33\u1e9b<|endoftext|>"
)
# As in the files of Qwen 3 and GPT-NeoX, with traps: parts of each other, and characters that NFC changes.
LITERALS = ("<think>", "</think>", "cafe\u0301", "e\u0301")
NORMALIZED_LITERALS = (*(" " * count for count in range(2, 9)), "\t\t", "|||EMAIL|||", "e\u0301!")


def pattern_tokenizer(pattern: str, nfc: bool = False, literals: bool = False) -> str:
    """Return the tokenizer.json of a small BPE with a pattern, special tokens, and perhaps other added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", END_OF_TEXT)])
    if literals:
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in LITERALS])
        tokenizer.add_tokens([AddedToken(t, normalized=True) for t in NORMALIZED_LITERALS])
    return tokenizer.to_str()


def byte_tokenizer(special: dict[str, int], first_id: int = 0, **changes) -> str:
    """Return the tokenizer.json of a tokenizer of bytes; `changes` replace its parts."""
    ranks = {bytes([byte]): first_id + byte for byte in range(256)}
    base = load_tokenizer(TokenizerRecord("bytes")).encoding
    content = json.loads(to_json(type(base)("", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})))
    content["model"]["vocab"] |= special  # so that the library accepts gaps between their ids
    content["added_tokens"] = [added_token(token, i, special=True) for token, i in special.items()]
    return json.dumps(content | changes)


def added_token(text: str, i: int, **changes) -> dict:
    """Return an entry of added_tokens that is not special."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": text, "id": i} | flags | changes


def loaded(text: str):
    """Return the tokenizer of a tokenizer.json."""
    return load_tokenizer(TokenizerRecord("x.json", tokenizer_json=text))


@cache
def both(name: str):
    """Return our tokenizer and the library's."""
    text = train_bpe([TEXT], 700)  # with ByteLevel's own pattern
    if name != "trained":
        pattern = PATTERNS[name.removesuffix(" literals").removesuffix(" NFC")]
        text = pattern_tokenizer(pattern, nfc="NFC" in name, literals="literals" in name)
    ours = loaded(text)
    assert isinstance(ours, Tiktoken)
    return ours, library_of(text)


def library_of(text: str) -> Tokenizer:
    library = Tokenizer.from_str(text)
    library.encode_special_tokens = True  # as text
    return library


def ids_of_library(library: Tokenizer, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["trained", "Qwen NFC", *PATTERNS])
@given(st.text() | st.text(TRAPS, max_size=60))
@settings(max_examples=60)
def test_ids_are_those_of_the_library(name, text):
    ours, library = both(name)
    ids = ours.encode(text)
    assert ids == ids_of_library(library, text)
    assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if "NFC" in name else text)


@pytest.mark.parametrize("name", ["Llama 3 literals", "Qwen NFC literals"])
@given(st.lists(st.sampled_from([*LITERALS, *NORMALIZED_LITERALS, "<|im_start|>", END_OF_TEXT, *TRAPS])).map("".join))
@settings(max_examples=60)
def test_added_tokens_that_are_not_special_are_one_id_as_in_the_library(name, text):
    ours, library = both(name)
    ids = ours.encode(text)
    assert ids == ids_of_library(library, text) == ours.encode_to_numpy(text).tolist()
    if unicodedata.is_normalized("NFC", text) and "é!" not in text:  # decoded as that token is written
        assert ours.decode(ids) == text
        assert ours.num_bytes[ids].sum() == len(text.encode())


def test_only_special_tokens_can_begin_documents():
    content = json.loads(byte_tokenizer({END_OF_TEXT: 300}))
    content["added_tokens"][0]["special"] = False
    ours = loaded(json.dumps(content))
    assert ours.encode(f"a{END_OF_TEXT}") == [97, 300]
    with pytest.raises(UserError, match=r"'<\|endoftext\|>'.*\badded_tokens\b"):
        _ = ours.document_id


@pytest.mark.parametrize("name", ["trained", *PATTERNS])
def test_ids_of_every_character_are_those_of_the_library(name):
    """Between letters, after an apostrophe and after spaces, where categories and case matter."""
    ours, library = both(name)
    characters = map(chr, [*range(0x2000), *range(0x3000, 0x3100)])
    text = "".join(f"a{c}b '{c} a'{c} 1{c}  {c}\n{c}" for c in characters)
    assert ours.encode(text) == ids_of_library(library, text)


@pytest.mark.parametrize("name", ["trained", "Qwen NFC", *PATTERNS])
@given(st.text("ab1 \n\r\t.'/é你\u3000\xa0\u0301", max_size=40))
@example("...\n/ b")
@settings(max_examples=60)
def test_a_text_cut_at_the_end_of_a_word_has_the_ids_of_the_whole(name, text):
    ours, _ = both(name)
    data = text.encode()
    for cut in {cut_at(data, at, 4000) for at in range(len(data))}:
        assert ours.encode(data[:cut].decode()) + ours.encode(data[cut:].decode()) == ours.encode(text)


def test_a_text_of_lines_without_spaces_is_cut_between_lines_only():
    text = "".join(f"x<gene>{number}\n" for number in range(400))
    pieces = [piece for piece, _ in cut_document(text, 64)]
    assert len(pieces) > 40 and all(piece.endswith("\n") for piece in pieces)


# ---------------------------------------------------------------------------------------------------------------------
# random tokenizers

PARTS = (
    r"\p{L}+ | ?\p{L}+|[^\r\n\p{L}\p{N}]?\p{L}+|[ab]+|\p{N}{1,3}|\p{N}|\d+|\s+(?!\S)|\s*[\r\n]+| ?[^\s\p{L}\p{N}]+|"
    r"(?i:'t)|(?i:'ll)|a{2,3}|(?:ab)+|a$|\w+|\p{M}|'|b(?=c)|[^a]+?c|ac*+"
).split("|")


def random_text(choice: random.Random) -> str:
    return "".join(choice.choices("aaaabbbbcccdd1122  \n\t'.-éA你\u0301\u00a0", k=choice.randrange(60)))


def random_tokenizer(choice: random.Random) -> dict:
    """Return the content of the tokenizer.json of a small BPE with many tokens that compete for the same characters."""
    pattern = choice.choice([*PATTERNS.values()])
    if choice.random() < 0.3:
        pattern = "|".join(choice.sample(PARTS, choice.randrange(1, 4)))
    tokenizer = Tokenizer(models.BPE(ignore_merges=choice.random() < 0.3))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + choice.randrange(60), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([random_text(choice) for _ in range(50)], trainer)
    return json.loads(tokenizer.to_str())


def change_merges(content: dict, choice: random.Random) -> None:
    """Swap two merges, drop one, add another pair that forms the same token, or swap the ids of two tokens."""
    vocab = content["model"]["vocab"]
    merges = content["model"]["merges"]
    kind = choice.choice(["none", "none", "swap", "drop", "add", "ids", "byte ids"]) if len(merges) > 1 else "none"
    if kind == "swap":
        at = choice.randrange(len(merges) - 1)
        merges[at], merges[at + 1] = merges[at + 1], merges[at]
    elif kind == "drop":
        merges.pop(choice.randrange(len(merges)))
    elif kind == "add":
        left, right = choice.choice(merges)
        merges.append([left[:1], left[1:] + right])
        merges.sort(key=lambda pair: vocab.get("".join(pair), 999))
    elif kind != "none":
        first, second = choice.sample([token for token in vocab if len(token) == 1 or kind == "ids"], 2)
        vocab[first], vocab[second] = vocab[second], vocab[first]


def change_the_rest(content: dict, choice: random.Random) -> None:
    """Add a token with random flags, also one whose id the library does not keep, or a normalizer."""
    if choice.random() < 0.5:
        text = "".join(choice.choices("ab <'é", k=choice.randrange(1, 4)))
        flags = {flag: choice.random() < 0.2 for flag in ("lstrip", "rstrip", "single_word", "special", "normalized")}
        token = added_token(text, len(content["model"]["vocab"]) + choice.choice([0, 0, 1]), **flags)
        content["added_tokens"] = [token]
        if choice.random() < 0.3:
            content["model"]["vocab"].setdefault(text, token["id"])
    if choice.random() < 0.3:
        content["normalizer"] = {"type": choice.choice(["NFC", "NFC", "NFD", "Lowercase"])}


@pytest.mark.parametrize("change", [change_merges, change_the_rest])
def test_random_tokenizers_give_the_ids_of_the_library(change):
    by_tiktoken = []
    for seed in range(60):
        choice = random.Random(seed)
        content = random_tokenizer(choice)
        change(content, choice)
        try:
            library = library_of(json.dumps(content))
        except Exception:  # a merge of a token that does not exist
            continue
        ours = loaded(json.dumps(content))
        by_tiktoken.append(isinstance(ours, Tiktoken))
        for text in [random_text(choice) for _ in range(60)]:
            assert ours.encode(text) == ids_of_library(library, text), (text, content)
    assert 15 < sum(by_tiktoken) < len(by_tiktoken) - 10


def test_a_trained_tokenizer_depends_on_the_text_only():
    text = train_bpe([TEXT[:3000], TEXT[3000:]], 500)
    assert text == train_bpe([TEXT[:3000], TEXT[3000:]], 500)
    ours = loaded(text)
    assert (ours.n_vocab, ours.document_id, ours.pattern) == (500, 499, GPT2_PATTERN)


def test_the_identity_depends_on_what_determines_ids_only():
    text = pattern_tokenizer(LLAMA3)
    content = json.loads(text)

    def identity(**changes) -> str:
        return loaded(json.dumps(content | changes)).sha256

    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    assert identity(truncation=truncation, post_processor=None) == identity()
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    assert identity(model=content["model"] | {"merges": pairs}) == identity()
    others = [
        identity(normalizer={"type": "NFC"}),
        identity(added_tokens=content["added_tokens"][:1]),
        identity(added_tokens=[token | {"special": False} for token in content["added_tokens"]]),
        identity(pre_tokenizer=json.loads(pattern_tokenizer(PATTERNS["Qwen"]))["pre_tokenizer"]),
        loaded(train_bpe([TEXT], 500)).sha256,
    ]
    assert len({identity(), *others}) == 6


# Identities, as shards and checkpoints record them.
BYTES_SHA256 = "e4da8d7b32a38c5f456719442cdb0b799153942aeaad5872f41bcd8655f39c10"
LITERALS_SHA256 = "8b049c6edbec6663d0388aabfd4bd8de05e9fbf607fa408d48f6f7038bf28f96"


def test_the_identities_in_shards_and_checkpoints_stay():
    literals = [added_token("<x>", 257), added_token("e\u0301", 258, normalized=True)]
    content = json.loads(byte_tokenizer({END_OF_TEXT: 256}, normalizer={"type": "NFC"}))
    content["added_tokens"] += literals
    assert load_tokenizer(TokenizerRecord("gpt2")).sha256 == GPT2_TOKENIZER.tokenizer_sha256
    assert load_tokenizer(TokenizerRecord("bytes")).sha256 == BYTES_SHA256
    assert loaded(byte_tokenizer({END_OF_TEXT: 256})).sha256 == BYTES_SHA256
    assert loaded(json.dumps(content)).sha256 == LITERALS_SHA256


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    text = byte_tokenizer({END_OF_TEXT: 256})
    (tmp_path / "with.json").write_text(text, encoding="utf-8-sig")
    assert record_named(str(tmp_path / "with.json")).tokenizer_json == text


def test_unused_ids_and_added_tokens_inside_the_vocabulary_are_accepted():
    ours = loaded(byte_tokenizer({END_OF_TEXT: 300, "<|a|>": 999}))
    assert (ours.n_vocab, ours.document_id) == (1000, 300)
    assert ours.encode(f"a{END_OF_TEXT}") == list(f"a{END_OF_TEXT}".encode())
    assert ours.decode([97, 500, 999, 98]) == "a<|a|>b"


def changed(**changes) -> str:
    """Return a small tokenizer.json; a change of the model replaces keys of it."""
    content = json.loads(pattern_tokenizer(LLAMA3))
    return json.dumps(content | changes | {"model": content["model"] | changes.get("model", {})})


def split(pattern: str, **changes) -> dict:
    parts = json.loads(pattern_tokenizer(LLAMA3))["pre_tokenizer"]["pretokenizers"]
    parts[0] |= {"pattern": {"Regex": pattern}} | changes
    return {"type": "Sequence", "pretokenizers": parts}


def swapped_merges() -> list:
    merges = json.loads(pattern_tokenizer(LLAMA3))["model"]["merges"]
    return [merges[1], merges[0], *merges[2:]]


def swapped_ids() -> str:
    """Return a tokenizer that merges b and c before a and b, which has the lower id."""
    content = json.loads(byte_tokenizer({}, pre_tokenizer=split(LLAMA3)))
    content["model"] |= {"merges": [["b", "c"], ["a", "b"]]}
    content["model"]["vocab"] |= {"ab": 256, "bc": 257}
    return json.dumps(content)


def special_word() -> str:
    """Return a tokenizer with a word as a special token, which is also in its vocabulary, without a merge."""
    special = {"zzzz": 256}
    return byte_tokenizer(special, pre_tokenizer=split(LLAMA3))


@pytest.mark.parametrize("change", [
    lambda: changed(model={"dropout": 0.9}),
    lambda: changed(normalizer={"type": "NFKC"}),
    lambda: changed(pre_tokenizer=None),
    lambda: changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}),
    lambda: changed(pre_tokenizer=split(r"\p{N}{1,3}+|[\s\S]")),
    lambda: changed(pre_tokenizer=split(r"\p{L}+|\s+")),
    lambda: changed(pre_tokenizer=split(LLAMA3, behavior="Removed")),
    lambda: changed(decoder=None),
    lambda: changed(model={"merges": swapped_merges()}),
    lambda: changed(model={"merges": []}),
    lambda: changed(model={"merges": [], "ignore_merges": True}),
    lambda: changed(added_tokens=[added_token("<x>", 900)]),
    lambda: changed(added_tokens=[added_token("<x>", 700, lstrip=True, rstrip=True)]),
    lambda: changed(added_tokens=[added_token("café", 700, single_word=True)]),
    lambda: changed(added_tokens=[added_token("x, 1", 700)]),
    lambda: pattern_tokenizer(r"[^\n]+|\n"),
    swapped_ids,
    special_word,
])  # fmt: skip
def test_any_byte_level_bpe_gives_the_ids_of_the_library(change):
    library = library_of(change())
    if library.model.dropout:
        library.model.dropout = None
    text = f"{TEXT} abc\nzzzz <x>"
    assert loaded(change()).encode(text) == ids_of_library(library, text)


def test_the_ids_of_added_tokens_are_those_of_the_library():
    ours = loaded(changed(added_tokens=[added_token(END_OF_TEXT, 900, special=True)]))
    assert ours.document_id == library_of(ours.to_json()).token_to_id(END_OF_TEXT) == 700


def sentence_piece(**changes) -> str:
    """Return a tokenizer.json as Llama 2 has it: spaces as U+2581, one before each text, and bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(["hello the world of cats", "the cats and hats"] * 9, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return json.dumps(content | changes)


@given(st.text() | st.text("ht ecas\n<0x>", max_size=60))
@settings(max_examples=60)
def test_tokens_of_sentence_piece_are_decoded_and_their_bytes_are_counted(text):
    text = text.replace("\u2581", "_")  # which is decoded as a space
    ours = both_of_sentence_piece()
    ids = [ours.document_id, *ours.encode(text)]
    assert ids[1:] == ids_of_library(library_of(sentence_piece()), text)
    assert ours.decode(ids[1:]) == text
    assert not text or ours.num_bytes[ids].sum() == len(text.encode())


@cache
def both_of_sentence_piece():
    record = TokenizerRecord("x.json", document_token="<s>", tokenizer_json=sentence_piece())
    ours = load_tokenizer(record)
    assert isinstance(ours, Library) and ours.n_vocab == ours.library.get_vocab_size()
    return ours


@pytest.mark.parametrize("name", ["WordPiece", "WordLevel", "Unigram", "lowercase"])
def test_other_kinds_are_encoded_by_the_library_and_have_no_bytes(name):
    vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}
    kinds = {
        "WordPiece": models.WordPiece(vocabulary, unk_token="[UNK]"),
        "WordLevel": models.WordLevel(vocabulary, unk_token="[UNK]"),
        "Unigram": models.Unigram([(token, -1.0) for token in vocabulary], 0),
    }
    tokenizer = Tokenizer(kinds.get(name, models.BPE(vocabulary, [], unk_token="[UNK]")))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = tokenizer.to_str()
    if name == "lowercase":
        text = changed(normalizer={"type": "Lowercase"})
    ours = loaded(text)
    library = library_of(text)
    assert ours.encode("The cats and THE cat") == ids_of_library(library, "The cats and THE cat")
    assert ours.decode([1, 2]) == library.decode([1, 2])
    assert not ours.num_bytes.any() and len(ours.num_bytes) == ours.n_vocab


@pytest.mark.parametrize(("text", "problem"), [
    ("{", r"\(EOF while parsing"),
    ("[]", r"\(invalid type: sequence"),
    ("[" * 100_000, r"\(invalid type: sequence"),
    ('{"model": 3}', r"\(data did not match"),
    (changed(version="9"), r"\(Unknown tokenizer version '9'"),
    (byte_tokenizer({"<x>": 2**24}), r"\b16,777,216\b.*\b16,777,216\b"),
])  # fmt: skip
def test_a_broken_file_is_refused_in_one_line(text, problem):
    with pytest.raises(UserError) as raised:
        loaded(text)
    message = str(raised.value)
    assert re.match(rf"x\.json: .*{problem}", message)
    assert "\n" not in message and len(message) < 700


def test_a_text_that_the_library_cannot_encode_is_refused_in_one_line():
    ours = loaded(Tokenizer(models.Unigram([("a", -1.0)], None)).to_str())
    with pytest.raises(UserError, match=r"^x\.json: .*\(.*unk_id"):
        ours.encode("b")


def test_without_the_library_only_a_recorded_byte_level_bpe_is_loaded(monkeypatch):
    text = pattern_tokenizer(LLAMA3)
    record = TokenizerRecord("x.json", loaded(text).sha256, tokenizer_json=text)
    slow = TokenizerRecord("x.json", loaded(sentence_piece()).sha256, tokenizer_json=sentence_piece())
    ids = loaded(text).encode(TEXT)
    load_tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(record).encode(TEXT) == ids
    for needs_it in (slow, dataclasses.replace(record, tokenizer_sha256="")):
        with pytest.raises(UserError, match=r"(?i)^x\.json: .*: pip install tokenizers\b"):
            load_tokenizer(needs_it)


def test_an_exported_pattern_means_the_same_in_the_library():
    """As in cl100k_base, where {1,3}+ would repeat {1,3} in the library."""
    base = load_tokenizer(TokenizerRecord("bytes")).encoding
    pattern = r"\p{N}{1,3}+| ?\p{L}++|\s++$|\s+(?!\S)|[\s\S]"
    ranks = base._mergeable_ranks | {b"12": 257, b"34": 258, b"123": 259, b" \n": 260}
    special = {"<|after unused ids|>": 270, END_OF_TEXT: 265}
    encoding = type(base)("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    library = Tokenizer.from_str(to_json(encoding))
    assert {token: library.token_to_id(token) for token in special} == special
    assert library.encode(f"1{END_OF_TEXT}2").ids == [49, 265, 50]
    for text in ("1234567", "12345 \n\n", "a \n b"):
        assert library.encode(text).ids == encoding.encode_ordinary(text)
