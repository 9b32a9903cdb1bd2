"""Content of files, compared with declared types: JSON, and the plain part of a checkpoint."""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from steadygpt.base.options import UserError

Count = Annotated[int, 0]
Loss = Annotated[float, 0]
NAMES = {int: "an integer of 64 bits", float: "a finite number", str: "a string", bool: "true or false"}
NAMES |= {list: "a list", tuple: "a list", dict: "an object"}


def read_json(path: Path, kind: Any, advice: str) -> Any:
    """Read a JSON file of a declared type, as typed() does; FileNotFoundError if there is none."""
    return parse_json(path.read_bytes(), kind, path, advice)


def parse_json(text: str | bytes, kind: Any, name: object, advice: str) -> Any:
    """Parse JSON of a declared type, as typed() does."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON ({error}); {advice}") from None
    return typed(content, kind, name, advice)


def typed(content: object, kind: Any, name: object, advice: str) -> Any:
    """Return the content of a file as an object of a declared type; a UserError says what does not fit.

    Integers have 64 bits, and floats are finite. Keys that a record does not declare are left out.

    Args:
        kind: Any or a class; `|`, list, dict and tuple of kinds, where a tuple may be a list of its length; a record:
            dataclass, NamedTuple or TypedDict; Annotated with the least number, perhaps also the largest, or with the
            pattern of a string.
        name: of the file, for errors.
        advice: what to do.
    """
    try:
        return _typed(content, kind, "")
    except (_Misfit, UserError) as error:  # the constructor of a record may raise a UserError
        raise UserError(f"{name}: {error}; {advice}") from None


class _Misfit(Exception):
    def __init__(self, place: str, value: object, expected: str):
        super().__init__(f"{place or 'the content'} is {_brief(value)}; expected {expected}")


def _brief(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to write long ones
        return f"an integer of {value.bit_length():,} bits"
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _typed(value: Any, kind: Any, place: str) -> Any:
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is Annotated:
        return _limited(_typed(value, parts[0], place), place, *parts[1:])
    if origin in (types.UnionType, typing.Union):
        *first_kinds, last_kind = (part for part in parts if part is not type(None) or value is None)
        for first_kind in first_kinds:
            with suppress(_Misfit):
                return _typed(value, first_kind, place)
        return _typed(value, last_kind, place)
    declared = None if origin else _declared(kind)
    expected = NAMES.get(origin or kind, getattr(kind, "__name__", ""))
    if origin in (list, tuple) and isinstance(value, list | tuple):
        kinds = parts * len(value) if origin is list else parts
        expected = f"{len(parts)} values"
        if len(kinds) == len(value):
            return origin(_typed(value[n], item_kind, f"{place}[{n}]") for n, item_kind in enumerate(kinds))
    elif origin is dict and isinstance(value, dict):
        key_kind, item_kind = parts
        items = {}
        for key, item in value.items():
            typed_key = _key(key, key_kind, place)
            items[typed_key] = _typed(item, item_kind, f"{place}[{_brief(key)}]")
        return items
    elif declared:
        expected = NAMES[dict]
        if isinstance(value, dict):
            return _record(value, kind, place, *declared)
    elif kind is Any or (not origin and _is_plain(value, kind)):
        return value
    raise _Misfit(place, value, expected)


def _is_plain(value: Any, kind: type) -> bool:
    if kind in (int, float) and type(value) is int:
        return value.bit_length() < 64
    if kind is int or not isinstance(value, kind):
        return False
    return kind is not float or math.isfinite(value)  # type: ignore[arg-type]


def _limited(value: Any, place: str, limit: Any, largest: float = math.inf) -> Any:
    if isinstance(value, str):
        if not re.fullmatch(limit, value):
            raise _Misfit(place, value, f"a string like {limit}")
    elif not limit <= value <= largest:
        if largest == math.inf:
            expected = f"{limit} or more"
        elif limit == largest:
            expected = f"{limit}"
        else:
            expected = f"{limit:,} to {largest:,}"
        raise _Misfit(place, value, expected)
    return value


def _key(key: Any, kind: type, place: str) -> object:
    if kind is int and isinstance(key, str) and key.isdecimal() and len(key) < 19:
        return int(key)  # because JSON has only strings as keys
    return _typed(key, kind, f"a key of {place or 'the content'}")


def _record(value: dict, kind: Any, place: str, declared: dict[str, Any], optional: frozenset[str]) -> Any:
    values = {}
    for name, value_kind in declared.items():
        value_place = f"{place}.{name}" if place else name
        if name in value:
            values[name] = _typed(value[name], value_kind, value_place)
        elif name not in optional:
            raise _Misfit(value_place, None, "a value")
    return values if typing.is_typeddict(kind) else kind(**values)


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], frozenset[str]] | None:
    """Return the types that a record declares, by name, and the names that may be missing; None for other kinds."""
    if typing.is_typeddict(kind):
        optional = kind.__optional_keys__
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):  # a NamedTuple has _fields
        parameters = inspect.signature(kind).parameters
        optional = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}
    else:
        return None
    return typing.get_type_hints(kind, include_extras=True), frozenset(optional)
