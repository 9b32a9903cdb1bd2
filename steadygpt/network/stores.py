"""Files in object stores and other file systems of fsspec: listed, and read in place."""

import glob
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.base.retry import Service, brief, kinds, status_of
from steadygpt.network.remote import RemoteFile

BLOCK_BYTES = 9_000_000  # of one request, at most; a lost connection loses one block
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
LOG_IN = {
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcsfs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
VERSIONS = ("generation", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")
DENIED = {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "GoogleAuthError"}


class Store:
    """The files that a URL such as s3://bucket/folder or gs://bucket/*.npz matches.

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
        """List the file, the files below the folder or those that match the glob, in the order of local files."""

        def ask() -> list[dict]:
            find = self.fs.glob if glob.has_magic(self.path) else self.fs.find
            infos = find(self.path, detail=True).items()
            return [info if info.get("size") is not None else self.fs.info(path) for path, info in infos]

        files = []
        for info in self.service.persistently(self.url, ask):
            if info["type"] == "file":
                url = self.fs.unstrip_protocol(info["name"])
                version = version_of(info)
                request = partial(self._request, url, version)
                files.append(RemoteFile(url, url, info["size"], self.service, request, version))
        return sorted(files, key=lambda file: PurePosixPath(file.path))

    def _request(self, url: str, version: str, start: int, end: int) -> Iterator[bytes]:
        """Request the bytes [start, end) of a file, and check that it has not changed."""
        while start < end:
            block = self.fs.cat_file(url, start=start, end=min(start + BLOCK_BYTES, end))
            if not block:
                break
            yield block
            start += len(block)
        if version_of(self.fs.info(url)) != version:
            raise UserError(f"{url}: changed in the store while it was read; run this again")

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
    """Return the options of a file system that close silent connections."""
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
