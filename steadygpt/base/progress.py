"""Progress bars: a moving line on a terminal, a line every 30 seconds in a log file."""

import os
import sys
from typing import Any

from tqdm import tqdm

from steadygpt.base.text import printable

LOG_INTERVAL_S = 30.0
LOG_FORMAT = (
    "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}, {elapsed} elapsed, {remaining} remaining, {rate_fmt}{postfix}"
)


def say(text: str) -> None:
    """Print a line on stderr, above the bars; control characters are escaped."""
    if sys.stderr.isatty():
        tqdm.write(printable(text), file=sys.stderr)
    else:
        print(printable(text), file=sys.stderr, flush=True)


class ProgressBar(tqdm):
    """tqdm's bar on stderr."""

    # Values for close(), in case Ctrl-C interrupts __init__().
    is_terminal = False
    disable = True
    n = 0
    initial = 0

    def __init__(self, *, desc: str, total: float | None, unit: str, **options: Any):
        self.is_terminal = sys.stderr.isatty()
        if not self.is_terminal:
            options |= {"bar_format": LOG_FORMAT if total else None, "smoothing": 0}  # 0: the rate is the average
        elif not os.get_terminal_size(sys.stderr.fileno()).columns:  # a terminal without a size, as in some containers
            options |= {"ncols": 80}
        # Without miniters, tqdm counts updates instead of looking at the clock, and shows nothing when they slow down.
        options |= {"miniters": 1, "dynamic_ncols": "ncols" not in options, "desc": printable(desc)}
        super().__init__(total=total, unit=unit, unit_scale=unit in ("B", " tokens"), **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.is_terminal:
            super().display(msg, pos)
        elif self.n > self.initial and self._time() >= self.start_t + self.delay:
            print(self, file=sys.stderr, flush=True)
            self.mininterval = LOG_INTERVAL_S  # only after the first line, which comes with the first amount

    def close(self) -> None:
        if not (self.is_terminal or self.disable):
            self.display()
            self.disable = True  # otherwise tqdm would clear a line of the terminal
        super().close()
