"""Content of files that fits the declared types, or one line that says where it does not."""

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, Loss, parse_json, typed


class Shard(NamedTuple):
    file: Annotated[str, r"[\w.]+"]
    tokens: Count = 0


@dataclass
class File:
    name: str
    shards: list[Shard]
    losses: dict[int, Loss | None] = field(default_factory=dict)
    place: tuple[str, int] = ("", 0)


class Saved(TypedDict):
    weights: dict[str, torch.Tensor]
    anything: Any


def test_content_becomes_an_object_of_its_type():
    text = '{"name": "x", "shards": [{"file": "a.npy", "more": 1}], "losses": {"7": 2, "8": null}, "place": ["a", 1]}'
    assert parse_json(text, File, "f", "a") == File("x", [Shard("a.npy")], {7: 2, 8: None}, ("a", 1))
    weights = {"w": torch.zeros(1)}
    assert typed({"weights": weights, "anything": {1, 2}, "more": 0}, Saved, "f", "a") == {
        "weights": weights,
        "anything": {1, 2},
    }


@pytest.mark.parametrize(
    ("text", "error"),
    {
        "[1]": "the content is a list; expected an object",
        "{}": "name is None; expected a value",
        '{"name": 1, "shards": []}': "name is 1; expected a string",
        '{"name": "x", "shards": {}}': "shards is a dict; expected a list",
        '{"name": "x", "shards": [3]}': "shards[0] is 3; expected an object",
        '{"name": "x", "shards": [{"file": "../a"}]}': "shards[0].file is '../a'; expected a string like [\\w.]+",
        '{"name": "x", "shards": [{"file": "a", "tokens": -1}]}': "shards[0].tokens is -1; expected 0 or more",
        '{"name": "x", "shards": [{"file": "a", "tokens": true}]}': "tokens is True; expected an integer of 64 bits",
        '{"name": "x", "shards": [{"file": "a", "tokens": 1' + 25 * "0" + "}]}": "expected an integer of 64 bits",
        '{"name": "x", "shards": [], "losses": {"a": 1}}': "a key of losses is 'a'; expected an integer",
        '{"name": "x", "shards": [], "losses": {"1": NaN}}': "losses['1'] is nan; expected a finite number",
        '{"name": "x", "shards": [], "losses": {"1": -1e308}}': "losses['1'] is -1e+308; expected 0 or more",
        '{"name": "x", "shards": [], "place": ["a"]}': "place is a list; expected 2 values",
        "[" * 100_000: "not JSON (maximum recursion depth",
        "9" * 10_000: "not JSON (Exceeds the limit",
        "": "not JSON (Expecting value",
        "\udc80": "not JSON (",
    }.items(),
)
def test_what_does_not_fit_is_named_with_its_place(text, error):
    with pytest.raises(UserError) as raised:
        parse_json(text.encode(errors="surrogateescape"), File, "f.json", "copy it again")
    assert str(raised.value).startswith("f.json: ")
    assert error in str(raised.value)
    assert str(raised.value).endswith("; copy it again")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
)
GOOD = {"name": "x", "shards": [{"file": "a", "tokens": 1}], "losses": {"1": 0.5}, "place": ["a", 1]}


@given(st.sampled_from(list(GOOD)), VALUES, st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_any_content_fits_or_is_refused_in_one_line(key, value, zeros):
    for found in (value, GOOD | {key: value}, GOOD | {key: 10**zeros}):
        try:
            assert isinstance(typed(found, File, "f.json", "copy it again"), File)
        except UserError as error:
            assert len(str(error)) < 1000


def test_a_number_without_a_decimal_form_is_named():
    with pytest.raises(UserError, match=r"name is an integer of 99,658 bits; expected a string"):
        typed(GOOD | {"name": 10**30_000}, File, "f", "a")
