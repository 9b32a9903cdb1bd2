"""Retries of network requests, with growing pauses; each retry is reported."""

import textwrap
from collections.abc import Callable
from http import HTTPStatus
from time import monotonic, sleep
from typing import TypeVar

from steadygpt.base.options import UserError
from steadygpt.base.progress import say

Result = TypeVar("Result")
# A failing request is retried for this long. In a run, other ranks wait only --timeout_minutes for rank 0.
PATIENCE_S = 25 * 60.0
FIRST_PATIENCE_S = 6.0  # the same until the service has answered once, because there may be no network
LONGEST_PAUSE_S = 60.0
SILENCE_S = 20  # a connection without data for this long is closed

# Errors are recognized by the names of their classes and libraries, because importing the libraries takes a second.
LIBRARIES = {"httpx", "httpx2", "httpcore", "requests", "aiohttp"}
PASSING = {"ConnectionError", "TimeoutError", "gaierror", "HTTPClientError", "IncompleteReadError", "TransportError"}
PASSING |= {"ChecksumError", "FlexibleChecksumError"}
HOPELESS = {"UserError", "OfflineModeIsEnabled", "UnsupportedProtocol", "InvalidURL"}


class NoAnswer(UserError):
    """The network failed for longer than the retries last."""


class Service:
    """A service on the network, and whether it has answered this process yet.

    Args:
        explain: returns the UserError for the name of a request and an error that a retry cannot help.
    """

    def __init__(self, explain: Callable[[object, Exception], UserError]):
        self.explain = explain
        self.answered = False

    def persistently(self, name: object, action: Callable[[], Result]) -> Result:
        """Return action(), retried while it fails because of the network, with growing pauses; each retry is reported.

        Args:
            name: of what is requested, for messages.

        Raises: UserError when a retry cannot help; an OSError of this machine, such as a full disk.
        """
        pause_s = 1.0
        begun_s = monotonic()
        while True:
            try:
                result = action()
                self.answered = True
                return result
            except Exception as error:  # each library raises its own types
                cause = passing_cause(error)
                if cause is None:
                    if isinstance(error, UserError) or is_local(error):
                        raise
                    raise self.explain(name, error) from error
                self.answered |= status_of(cause) != 0
                patience_s = PATIENCE_S if self.answered else FIRST_PATIENCE_S
                if monotonic() - begun_s >= patience_s:
                    advice = "check the network, then run this again"
                    raise NoAnswer(f"{name}: no answer ({brief(cause)}); {advice}") from error
                wait_s = max(pause_s, min(asked_pause_s(cause), PATIENCE_S))
                say(f"{name}: {brief(cause)}; retrying in {wait_s:.0f} s")
                sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def passing_cause(error: BaseException | None) -> BaseException | None:
    """Return the error or the cause that a retry may help: a lost connection, a server error, too many requests."""
    while error is not None and not HOPELESS & kinds(error):
        status = status_of(error)
        if status:
            return error if status in (408, 425, 429) or status >= 500 else None
        if _is_passing(error):
            return error
        if is_local(error):
            return None
        error = error.__cause__ or error.__context__
    return None


def is_local(error: BaseException) -> bool:
    """Return whether an error is this machine's, such as a full disk."""
    # s3fs also raises an OSError with an errno for the status of a response.
    is_remote = _is_passing(error) or status_of(error) or (error.__cause__ and status_of(error.__cause__))
    return isinstance(error, OSError) and error.errno is not None and not is_remote


def _is_passing(error: BaseException) -> bool:
    return bool(PASSING & kinds(error)) or type(error).__module__.partition(".")[0] in LIBRARIES


def kinds(error: BaseException) -> set[str]:
    """Return the names of an error's classes."""
    return {kind.__name__ for kind in type(error).__mro__}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error, 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        timed_out = response.get("Error", {}).get("Code") == "RequestTimeout"  # S3 sends it with status 400
        return 408 if timed_out else response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # Of httpx and requests; aiohttp; azure; gcsfs.
    statuses = [getattr(response, "status_code", 0), *(getattr(error, key, 0) for key in ("status", "status_code"))]
    statuses.append(getattr(error, "code", 0) if "HttpError" in kinds(error) else 0)
    for status in statuses:
        if status and str(status).isdigit():
            return int(status)
    return 0


def asked_pause_s(error: BaseException) -> float:
    """Return the seconds that a server asks to wait before the next request; 0 if it does not ask."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = {key.title(): value for key, value in response["ResponseMetadata"].get("HTTPHeaders", {}).items()}
    else:
        headers = getattr(response or error, "headers", None) or {}
    asked_s = headers.get("Retry-After", "")
    return float(asked_s) if asked_s.isdigit() else 0.0


def brief(error: BaseException) -> str:
    """Return an error in a few words."""
    status = status_of(error)
    if status:
        phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        return f"HTTP {status} {phrase}".rstrip()
    line = textwrap.shorten(str(error), 120, placeholder=" ...")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
