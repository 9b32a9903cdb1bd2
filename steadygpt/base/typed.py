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

from steadygpt.base.opening import LARGEST_JSON, read_file
from steadygpt.base.options import UserError

Count = Annotated[int, 0]
Loss = Annotated[float, 0]
NAMES = {int: "an integer of 64 bits", float: "a finite number", str: "a string", bool: "true or false"}
NAMES |= {list: "a list", tuple: "a list", dict: "an object"}


def read_json(path: Path, kind: Any, advice: str) -> Any:
    """Read a JSON file of a declared type, as typed(); FileNotFoundError if there is none."""
    return parse_json(read_file(path, LARGEST_JSON), kind, path, advice)


def parse_json(text: str | bytes, kind: Any, name: object, advice: str) -> Any:
    """Parse JSON of a declared type, as typed()."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON ({error}); {advice}") from None
    return typed(found, kind, name, advice)


def typed(found: object, kind: Any, name: object, advice: str) -> Any:
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
        return _typed(found, kind, "")
    except (_Misfit, UserError) as error:  # which the constructor of a record may raise
        raise UserError(f"{name}: {error}; {advice}") from None


class _Misfit(Exception):
    def __init__(self, at: str, found: object, expected: str):
        super().__init__(f"{at or 'the content'} is {_brief(found)}; expected {expected}")


def _brief(found: object) -> str:
    if isinstance(found, int) and found.bit_length() > 200:  # Python refuses to write long ones
        return f"an integer of {found.bit_length():,} bits"
    return repr(found)[:80] if isinstance(found, str | int | float | None) else f"a {type(found).__name__}"


def _typed(found: Any, kind: Any, at: str) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _limited(_typed(found, parts[0], at), at, *parts[1:])
    if origin in (types.UnionType, typing.Union):
        *others, last = (part for part in parts if part is not type(None) or found is None)
        for part in others:
            with suppress(_Misfit):
                return _typed(found, part, at)
        return _typed(found, last, at)
    expected = NAMES.get(origin or kind, getattr(kind, "__name__", ""))
    if origin in (list, tuple) and isinstance(found, list | tuple):
        kinds = parts * len(found) if origin is list else parts
        expected = f"{len(parts)} values"
        if len(kinds) == len(found):
            return origin(_typed(found[n], of, f"{at}[{n}]") for n, of in enumerate(kinds))
    elif origin is dict and isinstance(found, dict):
        of_key, of = parts
        return {_key(key, of_key, at): _typed(value, of, f"{at}[{_brief(key)}]") for key, value in found.items()}
    elif not origin and (declared := _declared(kind)):
        expected = NAMES[dict]
        if isinstance(found, dict):
            return _record(found, kind, at, *declared)
    elif kind is Any or (not origin and _is_plain(found, kind)):
        return found
    raise _Misfit(at, found, expected)


def _is_plain(found: Any, kind: type) -> bool:
    if kind in (int, float) and type(found) is int:
        return found.bit_length() < 64
    return kind is not int and isinstance(found, kind) and (kind is not float or math.isfinite(found))  # type: ignore


def _limited(found: Any, at: str, limit: Any, largest: float = math.inf) -> Any:
    if isinstance(found, str):
        if not re.fullmatch(limit, found):
            raise _Misfit(at, found, f"a string like {limit}")
    elif not limit <= found <= largest:
        limits = f"{limit}" if limit == largest else f"{limit:,} to {largest:,}"
        raise _Misfit(at, found, f"{limit} or more" if largest == math.inf else limits)
    return found


def _key(key: Any, kind: type, at: str) -> object:
    if kind is int and isinstance(key, str) and key.isdecimal() and len(key) < 19:
        return int(key)  # JSON has keys that are strings only
    return _typed(key, kind, f"a key of {at or 'the content'}")


def _record(found: dict, kind: Any, at: str, declared: dict[str, Any], optional: frozenset[str]) -> Any:
    values, dot = {}, "." if at else ""
    for name, of in declared.items():
        if name in found:
            values[name] = _typed(found[name], of, f"{at}{dot}{name}")
        elif name not in optional:
            raise _Misfit(f"{at}{dot}{name}", None, "a value")
    return values if typing.is_typeddict(kind) else kind(**values)


@cache
def _declared(kind: Any) -> tuple[dict[str, Any], frozenset[str]] | None:
    """Return the types that a record declares, by name, and the names that may be missing; None for other kinds."""
    if typing.is_typeddict(kind):
        optional = kind.__optional_keys__
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):  # the latter of a NamedTuple
        optional = {name for name, of in inspect.signature(kind).parameters.items() if of.default is not of.empty}
    else:
        return None
    return typing.get_type_hints(kind, include_extras=True), frozenset(optional)
