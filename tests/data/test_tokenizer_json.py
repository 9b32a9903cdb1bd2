"""Tests of steadygpt/data/tokenizer_json.py: the ids of a tokenizer.json are those of the `tokenizers` library."""

import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from steadygpt.base.options import UserError
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, fetch_json, get_tokenizer, load_tokenizer
from steadygpt.data.tokenizer_json import GPT2_PATTERN, to_json
from steadygpt.prepare import documents
from steadygpt.prepare.documents import cut_document
from steadygpt.prepare.train_tokenizer import train_bpe

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama3": LLAMA3,
    "qwen": LLAMA3.replace("{1,3}", ""),
    "gpt4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
TEXT = Path(documents.__file__).read_text() + "naïve café, 12345 67; I'll we'VE THEY'RE it's 你好 \n\n\t x  y ..." * 9
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
    base = get_tokenizer("bytes").encoding
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
    text = train_bpe([TEXT], 700)  # with GPT-2's pattern
    if name != "trained":
        text = pattern_tokenizer(PATTERNS[name.split()[0]], nfc="nfc" in name, literals="literals" in name)
    library = Tokenizer.from_str(text)
    library.encode_special_tokens = True  # as text
    return loaded(text), library


@pytest.mark.parametrize("name", ["trained", "llama3", "qwen nfc", "gpt4o"])
@given(st.text() | st.text(TRAPS, max_size=60))
@settings(max_examples=100, deadline=None)
def test_ids_are_those_of_the_library(name, text):
    ours, library = both(name)
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text)) == (unicodedata.normalize("NFC", text) if "nfc" in name else text)


@pytest.mark.parametrize("name", ["llama3 literals", "qwen nfc literals"])
@given(st.lists(st.sampled_from([*LITERALS, *NORMALIZED_LITERALS, "<|im_start|>", END_OF_TEXT, *TRAPS])).map("".join))
@settings(max_examples=100, deadline=None)
def test_added_tokens_that_are_not_special_are_one_id_as_in_the_library(name, text):
    ours, library = both(name)
    ids = ours.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids == ours.encode_to_numpy(text).tolist()
    if unicodedata.is_normalized("NFC", text) and "é!" not in text:  # decoded as that token is written
        assert ours.decode(ids) == text
        assert ours.num_bytes[ids].sum() == len(text.encode())


def test_only_special_tokens_can_begin_documents():
    content = json.loads(byte_tokenizer({END_OF_TEXT: 300}))
    content["added_tokens"][0]["special"] = False
    ours = loaded(json.dumps(content))
    assert ours.encode(f"a{END_OF_TEXT}") == [97, 300]
    with pytest.raises(UserError, match=r"no special token '<\|endoftext\|>'; found none; add one"):
        _ = ours.document_id


@pytest.mark.parametrize("name", ["trained", "gpt4o"])
def test_ids_of_every_character_are_those_of_the_library(name):
    """Between letters, after an apostrophe and after spaces, where categories and case matter."""
    ours, library = both(name)
    characters = [chr(i) for i in range(0x3400) if chr(i).isprintable() or chr(i).isspace()]
    text = "".join(f"a{c}b '{c} a'{c} 1{c}  {c}\n" for c in characters)
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["trained", "qwen nfc", "gpt4o"])
@given(st.text("ab1 \n\t.'é你\u3000\xa0\u0301", max_size=200), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_pieces_of_a_document_have_the_ids_of_the_whole(name, text, length):
    ours, _ = both(name)
    pieces = [piece for piece, _ in cut_document(text, length)]
    assert "".join(pieces) == text
    # A piece without the end of a word is cut anywhere, and its ids may differ.
    if all(piece[-1:].strip() and after[:1] == " " for piece, after in pairwise(pieces)):
        assert [i for piece in pieces for i in ours.encode(piece)] == ours.encode(text)


def test_a_trained_tokenizer_depends_on_the_text_only():
    text = train_bpe([TEXT[:3000], TEXT[3000:]], 500)
    assert text == train_bpe([TEXT[:3000], TEXT[3000:]], 500)
    ours = loaded(text)
    assert (ours.n_vocab, ours.document_id, ours.encoding._pat_str) == (500, 499, GPT2_PATTERN)


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
        identity(pre_tokenizer=json.loads(pattern_tokenizer(PATTERNS["qwen"]))["pre_tokenizer"]),
        loaded(train_bpe([TEXT], 500)).sha256,
    ]
    assert len({identity(), *others}) == 6


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    text = byte_tokenizer({END_OF_TEXT: 256})
    (tmp_path / "with.json").write_text(text, encoding="utf-8-sig")
    assert fetch_json(str(tmp_path / "with.json")) == text


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


@pytest.mark.parametrize(("change", "problem"), [
    (lambda: "{", "not a tokenizer.json"),
    (lambda: "[]", "not a tokenizer.json"),
    (lambda: "[" * 100_000, "not a tokenizer.json"),
    (lambda: '{"model": 3}', "not a tokenizer.json"),
    (lambda: changed(version="9"), "the library tokenizers cannot read it (Unknown tokenizer version '9'"),
    (lambda: changed(model={"type": "WordPiece"}), "found model WordPiece"),
    (lambda: changed(model={"type": "Unigram"}), "found model Unigram"),
    (lambda: changed(model={"dropout": 0.1}), 'found model BPE {"dropout": 0.1}'),
    (lambda: changed(normalizer={"type": "NFKC"}), 'found normalizer {"type": "NFKC"}'),
    (lambda: changed(normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend"}]}), "found normalizer"),
    (lambda: changed(pre_tokenizer=None), "found pre_tokenizer null"),
    (lambda: changed(pre_tokenizer={"type": "Metaspace", "split": True}), 'found pre_tokenizer {"type": "Metaspace"'),
    (lambda: changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), '"add_prefix_space": true'),
    (lambda: changed(pre_tokenizer=split(r"\w+|\s")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(r"\p{N}{1,3}+|[\s\S]")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(r"a$|[\s\S]")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(r"(?i:ss)|[\s\S]")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(r"a(?=b)|[\s\S]")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(LLAMA3, behavior="Removed")), "found pre_tokenizer"),
    (lambda: changed(pre_tokenizer=split(r"\p{L}+|\s+")), "other ids than in the library tokenizers for "),
    (lambda: changed(decoder=None), "found decoder null"),
    (lambda: changed(model={"merges": swapped_merges()}), "without a merge in the order of the ids"),
    (lambda: changed(model={"merges": []}), "which its merges in their order do not give"),
    (lambda: changed(model={"merges": [], "ignore_merges": True}), "which its merges in their order do not give"),
    (lambda: changed(model={"vocab": {"a": 1}, "merges": []}), "found no token for the byte 0"),
    (lambda: changed(added_tokens=[added_token("x", 3)]), "not unique or out of range"),
    (lambda: byte_tokenizer({"<x>": 2**24}), "not unique or out of range"),
    (lambda: changed(added_tokens=[added_token("<x>", 900)]), "'<x>' has the id 900, but 700 in the library"),
    (lambda: changed(added_tokens=[added_token("", 700)]), "'' has the id 700, but None in the library"),
    (lambda: changed(added_tokens=[added_token("<x>", 700, lstrip=True)]), "other ids than in the library"),
    (lambda: changed(added_tokens=[added_token("<x>", 700, rstrip=True)]), "other ids than in the library"),
    (lambda: changed(added_tokens=[added_token("<x>", 700, single_word=True)]), "for 'a<x>b <x>': found"),
    (lambda: changed(added_tokens=[added_token("a b", 700)]), "'a b' with a space within"),
    (lambda: pattern_tokenizer(r"[^\n]+|\n"), "which has a space within"),
])  # fmt: skip
def test_what_cannot_be_converted_exactly_is_refused_in_one_line(change, problem):
    with pytest.raises(UserError) as raised:
        loaded(change())
    message = str(raised.value)
    assert message.startswith("x.json: ") and problem in message
    assert "; expected byte-level BPE" in message and "\n" not in message and len(message) < 700


def test_an_exported_pattern_means_the_same_in_the_library():
    """As in cl100k_base, where {1,3}+ would repeat {1,3} in the library."""
    base = get_tokenizer("bytes").encoding
    pattern = r"\p{N}{1,3}+| ?\p{L}++|\s++$|\s+(?!\S)|[\s\S]"
    ranks = base._mergeable_ranks | {b"12": 257, b"34": 258, b"123": 259, b" \n": 260}
    special = {"<|after unused ids|>": 270, END_OF_TEXT: 265}
    encoding = type(base)("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    library = Tokenizer.from_str(to_json(encoding))
    assert {token: library.token_to_id(token) for token in special} == special
    assert library.encode(f"1{END_OF_TEXT}2").ids == [49, 265, 50]
    for text in ("1234567", "12345 \n\n", "a \n b"):
        assert library.encode(text).ids == encoding.encode_ordinary(text)
