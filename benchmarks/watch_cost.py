"""Cost of --system_metrics_s and --alert_url: training steps with and without them, and what their threads compute.

    python -m benchmarks.watch_cost [--steps 20] [--rounds 41] [further flags of train.py]

Three runs of the quickstart model alternate: one without metrics and alerts, one with metrics every 10 seconds (which
also measures whenever its turn comes), and one that measures a hundred times as often, because the cost of the default
is too small to see. A hundredth of what the third run loses is the cost of the default. The turns are short, so that
other programs on the machine slow down all three alike.

The threads hold Python's lock (GIL) at most as long as they compute.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.compare import REPO, HeldProgram, flags, held_programs, in_turn, median_text, report
from benchmarks.train_speed import write_tokens
from steadygpt.alerts import REPEAT_S, Alerts
from steadygpt.device import choose_device
from steadygpt.system import SystemMetrics, gpu_uuids

WARM_UP = 20  # steps
INTERVAL_S = 10.0  # the default of --system_metrics_s
MEASUREMENTS, MESSAGES = 200, 50
EVENTS = 9  # of which each is sent at most once in REPEAT_S


class Accept(BaseHTTPRequestHandler):
    """A webhook that takes everything."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def computed_s(thread: threading.Thread) -> float:
    """Return the processor time of a thread (Linux)."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measurement_s(device: torch.device, count: int = MEASUREMENTS) -> list[float]:
    """Return the processor time of each of `count` measurements."""
    marks: list[float] = []
    done = threading.Event()

    def record(_) -> None:
        marks.append(time.thread_time())
        if len(marks) > count:
            done.set()

    metrics = SystemMetrics(0.01, REPO, gpu_uuids(device), record, print)
    done.wait()
    metrics.close()
    return [after - before for before, after in pairwise(marks)]


def alert_s(url: str, count: int = MESSAGES) -> tuple[list[float], float]:
    """Return the wall-clock seconds of each call of send(), and the processor time for each message."""
    alerts, calls = Alerts(url, "benchmark", print), []
    before_s = computed_s(alerts.thread)
    for number in range(count):
        start = time.perf_counter()
        alerts.send(f"event {number}", "loss 8.12 at step 1,200; 4.5 standard deviations above the mean", step=1200)
        calls.append(time.perf_counter() - start)
        while alerts.waiting:
            time.sleep(0.001)
    time.sleep(0.1)  # for the last message
    computed = computed_s(alerts.thread) - before_s
    alerts.close()
    return calls, computed / count


def training(folder: Path, name: str, further: list[str], **options) -> HeldProgram:
    """Start the quickstart model."""
    common = flags(
        config="quickstart", data_dir=folder, tokenizer="bytes", logdir=folder / name / "logs",
        checkpoint_dir=folder / name, tensorboard_dir=folder / name / "runs", max_steps=10**6, eval_freq=0,
        sample_freq=0, checkpoint_freq=0, checkpoint_minutes=0, log_freq=1, **options,
    )  # fmt: skip
    return HeldProgram([sys.executable, "train.py", *common, *further], REPO, r"step +\d+/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run in a round")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--device", default="auto")
    args, further = parser.parse_known_args()
    device = choose_device(args.device)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Accept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"

    found = measurement_s(device)
    print(f"a measurement computes {median_text([1000 * s for s in found], 'ms')}, ", end="")
    print(f"{statistics.median(found) / INTERVAL_S:.4%} of {INTERVAL_S:.0f} s")
    calls, message_s = alert_s(url)
    print(f"send() returns after {median_text([1e6 * s for s in calls], 'us')}")
    print(f"a message computes {1000 * message_s:.2f} ms, ", end="")
    print(f"{EVENTS} in {REPEAT_S:.0f} s are {EVENTS * message_s / REPEAT_S:.4%}")

    watched = {"without": 0.0, "every 10 s": INTERVAL_S, "every 0.1 s": INTERVAL_S / 100}
    with tempfile.TemporaryDirectory() as temporary, held_programs() as programs:
        folder = Path(temporary)
        write_tokens(folder, 257)
        for name, interval_s in watched.items():
            alerts = {"alert_url": url} if interval_s else {}
            options = {"system_metrics_s": interval_s, "device": args.device} | alerts
            programs[name] = training(folder, name.replace(" ", "-"), further, **options)
            programs[name].seconds_per_step(WARM_UP)
        sides = {
            name: lambda program=program: 1000 * program.seconds_per_step(args.steps)
            for name, program in programs.items()
        }
        figures = in_turn(sides, args.rounds, "ms a step")
    report(figures, "ms a step", [(name, "without") for name in list(watched)[1:]])
    pairs = zip(figures["every 0.1 s"], figures["without"], strict=True)
    lost = [(often / never - 1) / 100 for often, never in pairs]
    print(f"cost of the default: {statistics.median(lost):.3%} ({min(lost):.3%} to {max(lost):.3%})")


if __name__ == "__main__":
    main()
