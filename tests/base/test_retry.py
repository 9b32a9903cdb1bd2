"""Tests of steadygpt/base/retry.py: which errors of the libraries may pass. Hub and stores test the retries."""

import errno

import aiohttp
import botocore.exceptions
import gcsfs.retry
import google.auth.exceptions
import pytest

from steadygpt.base.options import UserError
from steadygpt.base.retry import brief, is_local, passing_cause, status_of


def s3_error(status: int, code: str = "") -> Exception:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "GetObject")


def http_error(status: int) -> Exception:
    return aiohttp.ClientResponseError(None, (), status=status)


def translated(error: Exception, cause: Exception) -> Exception:
    """Return an error as s3fs raises it."""
    error.__cause__ = cause
    return error


PASSING = [
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    s3_error(503, "SlowDown"),
    s3_error(400, "RequestTimeout"),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://s3"),
    botocore.exceptions.ReadTimeoutError(endpoint_url="http://s3"),
    botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    translated(OSError(errno.EBUSY, "reduce your request rate"), s3_error(503, "SlowDown")),
    aiohttp.ClientOSError(errno.ECONNREFUSED, "refused"),
    aiohttp.ServerDisconnectedError(),
    http_error(429),
    gcsfs.retry.HttpError({"code": "503"}),
    gcsfs.retry.ChecksumError(),
    google.auth.exceptions.TransportError(),
]
FINAL = [
    OSError(errno.ENOSPC, "No space left on device"),
    PermissionError("Forbidden"),
    FileNotFoundError("no such bucket"),
    UserError("changed"),
    s3_error(403, "AccessDenied"),
    botocore.exceptions.NoCredentialsError(),
    translated(OSError(errno.EIO, "Unauthorized"), s3_error(401)),
    http_error(404),
    aiohttp.InvalidURL("x"),
    gcsfs.retry.HttpError({"code": 401}),
    google.auth.exceptions.DefaultCredentialsError(),
]


@pytest.mark.parametrize("error", [*PASSING, *FINAL], ids=repr)
def test_only_errors_of_the_network_may_pass(error):
    assert bool(passing_cause(error)) == (error in PASSING)
    assert is_local(error) == (error is FINAL[0])  # a full disk


def test_a_full_disk_during_a_lost_connection_is_not_retried():
    try:
        try:
            raise ConnectionResetError
        except ConnectionResetError:
            raise OSError(errno.ENOSPC, "No space left on device")  # noqa: B904
    except OSError as error:
        assert passing_cause(error) is None


def test_an_error_is_named_by_its_status():
    assert (status_of(s3_error(503)), brief(s3_error(503))) == (503, "HTTP 503 Service Unavailable")
    assert brief(TimeoutError("no\nanswer")) == "TimeoutError: no answer"
