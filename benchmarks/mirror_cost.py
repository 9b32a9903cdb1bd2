"""Cost of --mirror: the extra time of 40 steps during which a checkpoint of GPT-2 124M (1.5 GB) is uploaded to S3.

    python -m benchmarks.mirror_cost [--rows 1] [--rounds 5]

The server is another process, which reads what it is sent and discards it. With four cores or more it has one of its
own; otherwise the steps also pay for the server's time. The share is of the ten minutes between uploads of saves by the
clock (--mirror_minutes).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from benchmarks.checkpoint_cost import gpt2_step
from benchmarks.compare import in_turn, median_text, synchronize
from steadygpt.distributed import joined
from steadygpt.mirror import Mirror
from steadygpt.state import HostCopy
from steadygpt.uploads import Uploads
from steadygpt.workers import usable_cores

STEPS = 40
INTERVAL_S = 600


class Discard(BaseHTTPRequestHandler):
    """As much of S3 as an upload needs; nothing is kept."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self.skip(size + 2)
            self.rfile.readline()
        else:
            self.skip(int(self.headers.get("Content-Length", 0)))
        body = b""
        if self.command == "POST":
            kind = "Initiate" if "uploads" in self.path else "Complete"
            body = f"<{kind}MultipartUploadResult><UploadId>1</UploadId></{kind}MultipartUploadResult>".encode()
        if self.command == "GET":
            body = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET = do_DELETE = do_PUT  # noqa: N815

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.rfile.read(min(size, 2**20)))

    def log_message(self, *_):
        pass


def serve() -> None:
    """Print the port and serve until killed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Discard)
    print(server.server_port, flush=True)
    server.serve_forever()


def own_core() -> set[int]:
    """Take a core away from this process for the server, if there are enough; return the server's cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 4:
        os.sched_setaffinity(0, cores[:-1])
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    return {cores[-1]} if len(cores) >= 4 else set(cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1, help="rows of 256 tokens in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    server_cores = own_core()
    server = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(server.pid, server_cores)
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with tempfile.TemporaryDirectory() as folder, joined("auto") as ranks:
            model, optimizer, step = gpt2_step(args.rows, ranks.device, HostCopy(ranks.device))
            step()  # which creates Adam's moments
            checkpoint = Path(folder, "latest.pt")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            reports: list[tuple[str, str]] = []
            uploads = Uploads(Mirror("s3://bucket/run"), None, 1, 0, dict, lambda *report: reports.append(report))
            uploaded_s: list[float] = []

            def seconds(upload: bool) -> float:
                synchronize(ranks.device)
                start = time.perf_counter()
                if upload:
                    os.utime(checkpoint)  # as if it were written again
                    uploads.add(checkpoint, {"step": len(uploaded_s)}, ["latest.pt"])
                for _ in range(STEPS):
                    step()
                    if upload and not uploads.is_busy() and len(uploaded_s) == len(reports) - 1:
                        uploaded_s.append(time.perf_counter() - start)
                synchronize(ranks.device)
                elapsed_s = time.perf_counter() - start
                while uploads.is_busy():
                    time.sleep(0.01)
                assert all(outcome == "done" for outcome, _ in reports), reports
                return elapsed_s

            seconds(True)
            sides = {"no upload": lambda: seconds(False), "upload": lambda: seconds(True)}
            figures = in_turn(sides, args.rounds, f"s for {STEPS} steps")
            size = checkpoint.stat().st_size
    finally:
        server.kill()
    extra = [with_s - without_s for with_s, without_s in zip(figures["upload"], figures["no upload"], strict=True)]
    print(f"{size / 1e9:.2f} GB, steps of {statistics.median(figures['no upload']) / STEPS:.2f} s, {ranks.device}")
    print(f"uploaded after: {median_text(uploaded_s[1:], 's')}, within {STEPS} steps in {len(uploaded_s) - 1} rounds")
    print(f"extra wall-clock: {median_text(extra, 's')}, {statistics.median(extra) / INTERVAL_S:.2%} of ten minutes")


if __name__ == "__main__":
    main()
