"""Summary of a trace of train.py --profile: kernels, idle time of the GPU, what the host did meanwhile.

    python -m benchmarks.trace_summary runs/NAME/rank0.pt.trace.json.gz

A trace without GPU kernels is summarized by the self time of the CPU's operators.
"""

import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = {"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation", "python_function"}
WAITS = ("Synchronize", "cudaMemcpy")  # cudaMemcpyAsync to pageable memory waits too
TOP, LONGEST_GAPS = 15, 5


def summarize(file: Path) -> tuple[dict[str, tuple[float, str]], str]:
    """Return figures, name -> (value, unit), and a text of about 30 lines. Times in a trace are microseconds."""
    with gzip.open(file, "rt") as opened:
        events = [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]
    host = [event for event in events if event.get("cat") in HOST]
    steps = [event for event in host if event["name"].startswith("ProfilerStep#")]
    host = [event for event in host if not event["name"].startswith("ProfilerStep#")]
    gpu = sorted((event for event in events if event.get("cat") in GPU), key=lambda event: event["ts"])
    step_ms = statistics.median(event["dur"] for event in steps) / 1000
    found, lines = {"step": (step_ms, "ms a step")}, [f"{len(steps)} steps of {step_ms:,.1f} ms on the host"]
    if gpu:
        waited_ms = sum(event["dur"] for event in host if is_wait(event)) / 1000 / len(steps)
        busy_us, gaps = busy_and_gaps(gpu)
        span_us = busy_us + sum(end - start for start, end in gaps)
        found["idle"] = (100 * (1 - busy_us / span_us), "% of the time the GPU is idle")
        found["host"] = (step_ms - waited_ms, "ms a step that the host works")
        lines += [
            f"host: waits for the GPU {waited_ms:,.1f} ms a step, works {step_ms - waited_ms:,.1f} ms",
            f"GPU: {span_us / 1000:,.1f} ms from the first kernel to the last, idle {found['idle'][0]:.2f} % of them",
            "",
            *table(((event["name"], event["dur"]) for event in gpu), "GPU kernels and copies"),
            "",
            "longest gaps between kernels, and what the host did most of that time",
        ]
        for start, end in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:LONGEST_GAPS]:
            at_ms = (start - gpu[0]["ts"]) / 1000
            lines.append(f"{end - start:9,.0f} us at {at_ms:9,.1f} ms  {during(host, start, end)}")
    else:
        lines += ["no GPU kernels in this trace", "", *table(self_times(host), "CPU operators by self time")]
    return found, "\n".join(lines) + "\n"


def is_wait(event: dict) -> bool:
    return event["cat"].startswith("cuda_") and any(word in event["name"] for word in WAITS)


def busy_and_gaps(gpu: list[dict]) -> tuple[float, list[tuple[float, float]]]:
    """Merge the kernels of all streams, sorted by start; return their total time and the gaps between them."""
    busy, gaps, end = 0.0, [], gpu[0]["ts"]
    for event in gpu:
        if event["ts"] > end:
            gaps.append((end, event["ts"]))
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return busy, gaps


def table(times: Iterable[tuple[str, float]], title: str) -> list[str]:
    """Return the names with the largest total time, with share and count."""
    totals: dict[str, list[float]] = defaultdict(list)
    for name, us in times:
        totals[name].append(us)
    whole = sum(map(sum, totals.values()))
    lines = [f"{'ms':>9} {'share':>6} {'count':>7}  {title}"]
    for name, us in sorted(totals.items(), key=lambda item: -sum(item[1]))[:TOP]:
        lines.append(f"{sum(us) / 1000:9,.1f} {sum(us) / whole:6.1%} {len(us):7,}  {name[:90]}")
    return lines


def during(host: list[dict], start: float, end: float) -> str:
    """Return the names of the two events of the host that cover most of a gap, the shorter one first."""

    def covered(event: dict) -> float:
        return min(end, event["ts"] + event["dur"]) - max(start, event["ts"])

    inside = [event for event in host if covered(event) > 0.3 * (end - start)]
    inside.sort(key=lambda event: event["dur"])
    return " in ".join(event["name"][:60] for event in inside[:2]) or "nothing recorded, perhaps Python"


def self_times(events: list[dict]) -> Iterable[tuple[str, float]]:
    """Yield each event's name and its time without the events inside it."""
    for thread in {event["tid"] for event in events}:
        stack: list[list] = []  # [event, time of the events inside]
        own = [event for event in events if event["tid"] == thread]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while stack and event["ts"] >= stack[-1][0]["ts"] + stack[-1][0]["dur"]:
                ended, inside = stack.pop()
                yield ended["name"], ended["dur"] - inside
            if stack:
                stack[-1][1] += event["dur"]
            stack.append([event, 0.0])
        yield from ((event["name"], event["dur"] - inside) for event, inside in stack)


if __name__ == "__main__":
    print(summarize(Path(sys.argv[1]))[1])
