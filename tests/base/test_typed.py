"""Content of files that fits the declared types, or one line that says where it does not."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, FileName, Id, Loss, Number, parse_json, typed


class Place(NamedTuple):
    file: FileName
    row: Count = 0


@dataclass
class File:
    name: str
    places: list[Place]
    losses: dict[str, Loss | None] = field(default_factory=dict)
    scale: int | Number = 0


class Saved(TypedDict):
    weights: dict[str, torch.Tensor]
    anything: Any


def test_content_becomes_an_object_of_its_type():
    text = '{"name": "x", "places": [["a.npy"]], "losses": {"7": 2, "8": null}, "more": 1}'
    assert parse_json(text, File, "f", "a") == File("x", [Place("a.npy")], {"7": 2.0, "8": None})
    weights = {"w": torch.zeros(1)}
    assert typed({"weights": weights, "anything": {1, 2}, "more": 0}, Saved, "f", "a") == {
        "weights": weights,
        "anything": {1, 2},
    }
    assert type(typed(2000, int | Number, "f", "a")) is int  # as a GradScaler needs it


@pytest.mark.parametrize(
    ("text", "error"),
    {
        "[1]": "Expected `object`, got `array`",
        "{}": "Object missing required field `name`",
        '{"name": 1, "places": []}': "Expected `str`, got `int` - at `$.name`",
        '{"name": "x", "places": {}}': "Expected `array`, got `object` - at `$.places`",
        '{"name": "x", "places": [["../a"]]}': "Expected `str` matching regex",
        '{"name": "x", "places": [["a\\n"]]}': "Expected `str` matching regex",
        '{"name": "x", "places": [["a", -1]]}': "Expected `int` >= 0 - at `$.places[0][1]`",
        '{"name": "x", "places": [["a", true]]}': "Expected `int`, got `bool`",
        '{"name": "x", "places": [["a", 1' + 25 * "0" + "]]}": "Expected `int` <= 9223372036854775807",
        '{"name": "x", "places": [], "losses": {"1": NaN}}': "JSON is malformed",
        '{"name": "x", "places": [], "losses": {"1": 1e999}}': "Number out of range",
        '{"name": "x", "places": [], "losses": {"1": -1}}': "Expected `float` >= 0.0 - at `$.losses[...]`",
        '{"name": "x", "places": [], "more": ' + "[" * 100_000: "JSON (maximum recursion depth",
        "9" * 10_000: "Number out of range",
        "": "JSON (Input data was truncated",
        "\udc80": "JSON (JSON is malformed",
    }.items(),
)
def test_what_does_not_fit_is_named_with_its_place(text, error):
    with pytest.raises(UserError) as raised:
        parse_json(text.encode(errors="surrogateescape"), File, "f.json", "copy it again")
    assert str(raised.value).startswith("f.json: ")
    assert error in str(raised.value)
    assert str(raised.value).endswith("; copy it again")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value):
    for kind in (Number, Loss):
        with pytest.raises(UserError, match="Expected `float`"):
            typed(value, kind, "f", "a")


def test_an_id_is_one_line():
    assert typed("0123456789abcdef", Id, "f", "a")
    with pytest.raises(UserError, match="matching regex"):
        typed("0123456789abcdef\n", Id, "f", "a")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
)
GOOD = {"name": "x", "places": [["a", 1]], "losses": {"1": 0.5}, "scale": 1}


@given(st.sampled_from(list(GOOD)), VALUES, st.integers(0, 400))
@settings(max_examples=30)
def test_any_content_fits_or_is_refused_in_one_line(key, value, zeros):
    for found in (value, GOOD | {key: value}, GOOD | {key: 10**zeros}):
        try:
            assert isinstance(typed(found, File, "f.json", "copy it again"), File)
        except UserError as error:
            assert len(str(error)) < 1000
