"""Object stores on loopback: S3 by moto, GCS by gcp-storage-emulator, each behind a proxy that injects faults."""

import functools
import http.client
import itertools
import os
import time
from collections.abc import Iterator
from urllib.parse import unquote

import pytest
from standin import Handler, Server

NUMBERS = itertools.count()
HOP_BY_HOP = {"connection", "content-length", "transfer-encoding", "date", "server"}


class Store(Server):
    """A server of objects behind a proxy; `url` is a new, empty bucket of it.

    drop_after=0 of a fault resets a request before the server acts. drop_after and bytes_per_s of an upload concern the
    body of the request.

    Args:
        port: of the server.
        scheme: of its URLs, "s3" or "gs".
    """

    def __init__(self, port: int, scheme: str):
        self.port, self.scheme = port, scheme
        self.address = self.serve(_Proxy)
        self.new_bucket()

    def new_bucket(self) -> None:
        """Begin with an empty bucket, no faults and an empty log."""
        self.forget()
        self.receiving = ""  # "METHOD path range" of a request whose body is on its way
        self.bucket = f"bucket-{os.getpid()}-{next(NUMBERS)}"
        self.url = f"{self.scheme}://{self.bucket}"
        path = f"/{self.bucket}" if self.scheme == "s3" else "/storage/v1/b?project=test"
        body = b"" if self.scheme == "s3" else b'{"name": "%s"}' % self.bucket.encode()
        self._request("PUT" if self.scheme == "s3" else "POST", path, body)

    def put(self, name: str, data: bytes) -> str:
        """Write an object and return its URL."""
        s3, gcs = f"/{self.bucket}/{name}", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}"
        self._request(*(("PUT", s3) if self.scheme == "s3" else ("POST", gcs)), data)
        return f"{self.url}/{name}"

    def _request(self, method: str, path: str, body: bytes) -> None:
        """Send a request to the server itself, without faults and log."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        kind = "application/octet-stream" if "/upload/" in path else "application/json"
        connection.request(method, path, body, {"Authorization": "AWS test:test", "Content-Type": kind})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        connection.close()


class _Proxy(Handler):
    def do_GET(self):  # noqa: N802
        self.note(unquote(self.path))
        if self.fault.drop_after == 0 or (self.fault.drop_after > 0 and self.command != "GET"):
            self.rfile.read(self.fault.drop_after)
            return self.reset()
        self.hub.receiving = self.line
        body = self._body()
        self.hub.receiving = ""
        if self.fault.status:
            return self.answer(self.fault.status, b"", self.fault.headers)
        upstream = http.client.HTTPConnection("127.0.0.1", self.hub.port)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for key, value in self.headers.items():
            if key.lower() not in HOP_BY_HOP:
                upstream.putheader(key, value)
        upstream.putheader("Content-Length", str(len(body)))
        upstream.endheaders(body)
        response = upstream.getresponse()
        headers = {k: v for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP}
        data = response.read()
        if self.command == "HEAD":  # answer() tells its length
            data = bytes(int(response.getheader("Content-Length", 0)))
        upstream.close()
        return self.answer(response.status, data, headers)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self._read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self._read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _read(self, size: int) -> bytes:
        data, rate = b"", self.fault.bytes_per_s
        while rate and len(data) < size and (part := self.rfile.read(min(2**12, size - len(data)))):
            data += part
            time.sleep(len(part) / rate)
        data += self.rfile.read(size - len(data))
        if len(data) < size:  # as with real stores, nothing of an incomplete request is kept
            raise ConnectionError("the client is gone")
        return data


@functools.cache
def _s3() -> Store:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    return Store(server.get_host_and_port()[1], "s3")


@functools.cache
def _gcs() -> Store:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True)
    server._api.daemon = True
    server.start()
    return Store(server._api._httpd.server_address[1], "gs")


@pytest.fixture
def s3(monkeypatch) -> Iterator[Store]:
    """An empty bucket of an S3 server, which the environment names."""
    store = _s3()
    store.new_bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield store
    store.faults.clear()


@pytest.fixture
def gcs(monkeypatch) -> Iterator[Store]:
    """An empty bucket of a GCS server, which the environment names."""
    store = _gcs()
    store.new_bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    yield store
    store.faults.clear()


@pytest.fixture
def store(request) -> Store:
    """An empty bucket: of S3, unless the test is parametrized with another fixture of these."""
    return request.getfixturevalue(getattr(request, "param", "s3"))
