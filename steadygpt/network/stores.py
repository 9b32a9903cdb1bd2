"""Files in object stores and other file systems of fsspec: listed, and read in place."""

import glob
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.base.retry import Service, brief, kinds, status_of

BLOCK_BYTES = 2**24  # a request has at most two: services limit the rate of requests, and a lost connection loses one
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
LOG_IN = {
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcsfs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
VERSIONS = ("generation", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")
DENIED = {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "GoogleAuthError"}


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, or of the Hub at a commit."""

    path: str  # its URL
    size: int  # in bytes
    version: str  # changes with the content; "" if the store has none
    service: Service = field(compare=False)
    request: Callable[..., bytes] = field(compare=False)  # returns the bytes [start, end), given by name

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) in blocks; after a lost connection, request the block again."""
        most = 2 * BLOCK_BYTES  # open() asks for a block and the next one
        for at in range(start, end, most):
            size = min(most, end - at)
            block = self.service.persistently(self.path, partial(self.request, start=at, end=at + size))
            if len(block) != size:
                raise UserError(
                    f"{self.path}: found {len(block):,} bytes, expected {size:,}; it has changed, or its server gives "
                    "no parts of files. Copy it, and prepare the copy"
                )
            yield block

    def open(self) -> BinaryIO:
        """Open the file, which is read in blocks without a copy on the disk; it has peek() and a name."""
        from fsspec.spec import AbstractBufferedFile

        class InPlace(AbstractBufferedFile):
            def _fetch_range(file, start: int, end: int) -> bytes:  # noqa: N805
                return b"".join(self.read(start, end))

        file = InPlace(None, self.path, block_size=BLOCK_BYTES, size=self.size)
        file.name = self.path
        return io.BufferedReader(file, 2**16)


class Store:
    """The files that a URL such as s3://bucket/folder or gs://bucket/*.parquet matches.

    Args:
        silence_s: a connection without data for this long is closed; 0: after retry.SILENCE_S.
    """

    def __init__(self, url: str, silence_s: float = 0):
        import fsspec

        protocol = url.partition("://")[0]
        self.url = url
        self.package = PACKAGES.get(protocol, "")
        self.service = Service(self._refusal)
        try:
            # Without caches, which would keep old credentials and old listings.
            self.fs, self.path = fsspec.core.url_to_fs(
                url,
                skip_instance_cache=True,
                use_listings_cache=False,
                **_options(self.package, silence_s or retry.SILENCE_S),
            )
        except ImportError as error:
            advice = f"pip install {self.package}" if self.package else f"install it ({brief(error)})"
            raise UserError(f"{url}: needs a package that is not installed; {advice}") from error
        except ValueError as error:
            raise UserError(
                f"{url}: {brief(error)}; expected a URL that fsspec knows, such as s3://... or gs://..."
            ) from error
        if self.package == "s3fs":
            self.fs.retries = 1  # because persistently() retries, and reports each retry
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs logs a traceback for each retry; we print a line

    def files(self) -> list[RemoteFile]:
        """List the file, the files below the folder or the matches of the glob, sorted like local files."""

        def ask() -> list[dict]:
            find = self.fs.glob if glob.has_magic(self.path) else self.fs.find
            infos = find(self.path, detail=True).items()
            return [info if info.get("size") is not None else self.fs.info(path) for path, info in infos]

        infos = self.service.persistently(self.url, ask)
        files = []
        for info in infos:
            if info["type"] == "file":
                url = self.fs.unstrip_protocol(info["name"])
                request = partial(self.fs.cat_file, url)
                files.append(RemoteFile(url, info["size"], version_of(info), self.service, request))
        return sorted(files, key=lambda file: PurePosixPath(file.path))

    def _refusal(self, subject: object, error: Exception) -> UserError:
        """Explain an error that a retry cannot help."""
        status = status_of(error) or (status_of(error.__cause__) if error.__cause__ else 0)
        if status in (401, 403) or DENIED & kinds(error) or str(error).startswith("Forbidden"):
            log_in = LOG_IN.get(self.package, "log in")
            return UserError(f"{subject}: access denied ({brief(error)}); check the URL, or {log_in}")
        if isinstance(error, FileNotFoundError) or status == 404:
            return UserError(f"{subject}: no such bucket or file; check the URL")
        return UserError(f"{subject}: {brief(error)}; check the URL, then run this again")


def _options(package: str, silence_s: float) -> dict[str, Any]:
    """Return file system options that close silent connections."""
    if package == "s3fs":
        silence = {"connect_timeout": silence_s, "read_timeout": silence_s}
        return {"config_kwargs": silence | {"retries": {"max_attempts": 0}}}
    if package == "gcsfs":
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)
        return {"requests_timeout": timeout}
    return {}


def version_of(info: dict) -> str:
    """Return a value that changes with a file's content, from fsspec's description of it; "" if the store has none."""
    return str(next((info[key] for key in VERSIONS if info.get(key)), ""))
