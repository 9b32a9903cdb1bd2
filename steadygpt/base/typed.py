"""JSON, and the plain part of a checkpoint, as objects of declared types that msgspec checks."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steadygpt.base.options import UserError

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(ge=-1e308, le=1e308)]  # finite; msgspec makes it a float if it is an integer
Loss = Annotated[float, Meta(ge=0, le=1e308)]
Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
FileName = Annotated[str, Meta(pattern=r"^\w[\w.-]*\Z")]  # without a folder


def read_json(path: Path, kind: Any, advice: str) -> Any:
    """Read a JSON file of a declared type, as typed() does; FileNotFoundError if there is none."""
    return parse_json(path.read_bytes(), kind, path, advice)


def parse_json(text: str | bytes, kind: Any, name: object, advice: str) -> Any:
    """Parse JSON of a declared type, as typed() does."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.ValidationError, UserError) as error:  # the constructor of a record may raise a UserError
        raise UserError(f"{name}: {error}; {advice}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UserError(f"{name}: not JSON ({error}); {advice}") from None


def typed(content: object, kind: Any, name: object, advice: str) -> Any:
    """Return the content of a file as an object of a declared type; a UserError says what does not fit.

    Keys that a dataclass or a TypedDict does not declare are left out.

    Args:
        kind: any type that msgspec supports, perhaps Annotated with its Meta. A NamedTuple is a list in a file.
        name: of the file, for errors.
        advice: what to do.
    """
    try:
        return msgspec.convert(content, kind)
    # The constructor of a record may raise a UserError. msgspec takes a tensor for a mapping, and encodes texts.
    except (msgspec.ValidationError, UserError, AttributeError, UnicodeError) as error:
        raise UserError(f"{name}: {error}; {advice}") from None
