"""A stand-in for the Hugging Face Hub in this process: repositories as dicts of files, faults, a log."""

import hashlib
import io
import json
import random
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet

BLOCK_BYTES = 2**14  # a body is sent in blocks, between which a fault can act
CONVERTED = "converted"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes close() send a RST


@dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match (-1: to all)."""

    match: str
    times: int = 1
    status: int = 0
    headers: dict = field(default_factory=dict)
    drop_after: int = -1  # bytes of the body, then the connection is reset
    stall_after: int = -1  # bytes of the body, then nothing for `stall_s`
    stall_s: float = 5
    bytes_per_s: float = 0
    damaged: bool = False  # the body has other bytes


class Server:
    """A server on loopback with faults and a log."""

    def serve(self, handler: type) -> str:
        """Begin to answer, in a thread; return the address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfServer", (handler,), {"hub": self}))
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # the other side was killed
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    def forget(self) -> None:
        self.faults: list[Fault] = []
        self.log: list[list] = []  # "METHOD path range", bytes of the answer's body

    def fail(self, match: str, **how) -> None:
        """Let the next requests that match fail as a Fault."""
        self.faults.append(Fault(match, **how))

    def sent(self, match: str = "") -> int:
        """Return the bytes that were sent in answer to matching requests."""
        return sum(count for line, count in self.log if re.search(match, line))


class StandIn(Server):
    """Answers as huggingface.co does, as far as huggingface_hub and datasets ask."""

    def __init__(self):
        self.clear()

    def start(self) -> str:
        return self.serve(Handler)

    def clear(self) -> None:
        self.forget()
        self.heads: dict[str, str] = {}  # "datasets/OWNER/NAME" -> commit
        self.converted: dict[str, str] = {}  # the same of the revision refs/convert/parquet
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.renamed: dict[str, str] = {}

    def put(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Commit a repository, such as "datasets/some/corpus"; return the commit. Older commits stay."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name, commit] = files
        (self.heads if revision == "main" else self.converted)[name] = commit
        return commit


class Handler(BaseHTTPRequestHandler):
    hub: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for the client's acknowledgement of its head

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        self.query, path = parse_qs(url.query), unquote(url.path)
        self.note(path)
        if self.fault.status:
            self.answer(self.fault.status, b"", self.fault.headers)
        elif found := re.fullmatch(r"/api/((?:datasets|models)/.+?)(?:/(revision|tree)/(.+))?", path):
            self.api(*found.groups())
        elif found := re.fullmatch(r"/(datasets/)?(.+?)/resolve/(\w+)/(.+)", path):
            self.resolve(f"{found[1] or 'models/'}{found[2]}", found[3], found[4])
        else:
            self.answer(404, b"")

    do_HEAD = do_GET  # noqa: N815

    def note(self, path: str) -> None:
        """Note the request, and the fault that it meets."""
        self.log = self.hub.log  # a late answer is not part of the next test's
        if path == "/api/agent-harnesses":  # which huggingface_hub asks for once a process, in whichever test is first
            self.log = []
        self.line = f"{self.command} {path} {self.headers.get('Range', '')}".rstrip()
        self.fault = next((f for f in self.hub.faults if f.times and re.search(f.match, self.line)), Fault(""))
        self.fault.times -= self.fault.times > 0

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        commit = self.hub.heads.get(name, "") if revision in ("", "main") else revision
        if commit == CONVERTED:
            commit = self.hub.converted.get(name, "")
        if name not in self.hub.heads:
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif (name, commit) not in self.hub.commits:
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return commit, self.hub.commits.get((name, commit))

    def api(self, name: str, what: str | None, rest: str | None) -> None:
        if name in self.hub.renamed:
            location = self.path.replace(name, self.hub.renamed[name])
            return self.answer(307, b"", {"Location": location})
        revision, _, below = (rest or "").replace("refs/convert/parquet", CONVERTED).partition("/")
        commit, files = self.files(name, revision)
        if files is None:
            return None
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} | lfs(path, data)
            for path, data in sorted(files.items())
        ]
        if what == "tree":
            recursive = "rue" in self.query.get("recursive", [""])[0]
            entries = [e for e in entries if e["path"].startswith(f"{below}/" if below else "")]
            if below and not entries:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            depth = below.count("/") + bool(below)
            folders = {"/".join(e["path"].split("/")[: depth + 1]) for e in entries if e["path"].count("/") > depth}
            entries = entries if recursive else [e for e in entries if e["path"].count("/") == depth]
            entries += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        else:
            siblings = [{"rfilename": e["path"], "size": e["size"]} for e in entries]
            _, _, identity = name.partition("/")
            found = {"_id": "0", "id": identity, "sha": commit, "private": False, "siblings": siblings, "tags": []}
            return self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        return self.answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def resolve(self, name: str, revision: str, path: str) -> None:
        name = self.hub.renamed.get(name, name)
        commit, files = self.files(name, revision)
        if files is None:
            return None
        if path not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if name in self.hub.gated and "Authorization" not in self.headers:
            return self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        data = files[path]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if lfs(path, data):
            headers["X-Linked-Etag"] = etag
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.answer(200, data, headers)
        start, end = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return self.answer(206, data[start:end], headers)

    def answer(self, status: int, body: bytes, headers: dict | None = None) -> None:
        fault = self.fault
        entry = [self.line, 0]
        self.log.append(entry)  # before the answer, after which a test may read it
        try:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = bytes(reversed(body)) if fault.damaged else body
            for start in range(0, len(body) if self.command != "HEAD" else 0, BLOCK_BYTES):
                block = body[start : start + BLOCK_BYTES]
                if 0 <= fault.drop_after <= start:
                    self.reset()
                    break
                if 0 <= fault.stall_after <= start:
                    self.wfile.flush()
                    time.sleep(fault.stall_s)
                if fault.bytes_per_s:
                    time.sleep(len(block) / fault.bytes_per_s)
                entry[1] += len(block)
                self.wfile.write(block)
        except OSError:  # the other side has gone
            self.close_connection = True

    def reset(self) -> None:
        time.sleep(0.02)  # a reset overtakes what has not been read
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        for part in (self.rfile, self.wfile, self.connection):
            part.close()
        self.wfile = io.BytesIO()  # what follows would be written here
        self.close_connection = True


def lfs(path: str, data: bytes) -> dict:
    """Return what the Hub adds about large files."""
    if not path.endswith((".parquet", ".safetensors")):
        return {}
    return {"lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}


# ---------------------------------------------------------------------------------------------------------------------
# a data set

CORPUS = "datasets/some/corpus"
CARD = "---\nconfigs:\n- config_name: part\n  data_files:\n  - split: train\n    path: part/*\n---\n"
TEXTS = [f"document {number}: {random.Random(number).randbytes(150).hex()}" for number in range(3000)]


def parquet(texts: list, column: str = "text", row_group_size: int = 100) -> bytes:
    """Return a Parquet file with a column that nobody needs."""
    table = pyarrow.table({"id": [str(n) * 9 for n in range(len(texts))], column: texts})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=row_group_size)
    return file.getvalue()


def corpus(texts: list[str] = TEXTS, factor: int = 1) -> dict[str, bytes]:
    """Return a repository with six files in the configuration "part", and one outside of it; `factor` repeats them."""
    size = len(texts) // 6
    files = [parquet(texts[n * size : (n + 1) * size]) for n in range(6)] * factor
    parts = {f"part/{n}.parquet": file for n, file in enumerate(files)}
    return {"README.md": CARD.encode(), "other/0.parquet": parquet(["other"] * 9), **parts}
