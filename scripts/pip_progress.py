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
    part = whole = 0  # bytes of this file
    shown_s = time.monotonic()
    for line in lines:
        start = DOWNLOADING.match(line)
        progress = PROGRESS.match(line)
        if start:
            name = start[1]
            done += part
            part = 0
        elif progress:
            part, whole = int(progress[1]), int(progress[2])
        elif line.startswith("Installing collected packages"):
            text = f"downloaded {(done + part) / 1e6:,.0f} MB; unpacking"
            print(f"\r{text:<78}" if is_terminal else text, flush=True)
        now_s = time.monotonic()
        if progress and (is_terminal or now_s - shown_s >= INTERVAL_S):
            text = f"downloaded {(done + part) / 1e6:,.0f} MB; {name} {part / whole:.0%} of {whole / 1e6:,.0f} MB"
            print(f"\r{text:<78}" if is_terminal else text, end="" if is_terminal else "\n", flush=True)
            shown_s = now_s


if __name__ == "__main__":
    show(sys.stdin, sys.stdout.isatty())
