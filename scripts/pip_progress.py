"""Progress of `pip install --progress-bar raw`, read from standard input: bytes downloaded, and the file of the moment.

A line that moves on a terminal, a line every ten seconds in a file or a pipe.
"""

import re
import sys
import time
from collections.abc import Iterable

INTERVAL_S = 10.0  # between lines that are not on a terminal
DOWNLOADING = re.compile(r"\s*Downloading (?:\S*/)?([^-\s]+)\S*\.(?:whl|tar\.gz)\b")  # not its .whl.metadata
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def show(lines: Iterable[str], is_terminal: bool) -> None:
    name = ""
    done = 0  # bytes of the files before
    part = 0  # bytes of this file
    shown_s = time.monotonic()
    for line in lines:
        start = DOWNLOADING.match(line)
        progress = PROGRESS.match(line)
        is_last = line.startswith("Installing collected packages")
        now_s = time.monotonic()
        if start:
            name = start[1]
            done += part
            part = 0
        if progress:
            part = int(progress[1])
            whole = int(progress[2])
        if is_last:
            state = "unpacking"
        elif progress and (is_terminal or now_s - shown_s >= INTERVAL_S):
            state = f"{name} {part / whole:.0%} of {whole / 1e6:,.0f} MB"
        else:
            continue
        text = f"downloaded {(done + part) / 1e6:,.0f} MB; {state}"
        if is_terminal:
            print(f"\r{text:<78}", end="\n" if is_last else "", flush=True)
        else:
            print(text, flush=True)
        shown_s = now_s


if __name__ == "__main__":
    show(sys.stdin, sys.stdout.isatty())
