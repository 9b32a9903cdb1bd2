#!/usr/bin/env python
"""Watch a run in the terminal: state, progress, curves, speed, cost, GPUs and disk.

scripts/monitor_training.py                               # the run in checkpoints/
scripts/monitor_training.py checkpoints/quickstart
scripts/monitor_training.py --once || echo "unhealthy"     # one view; for cron and scripts
ssh -t me@gpu-host 'cd project && ./monitor_training.sh'  # a run on another machine
"""

import sys

sys.path.insert(0, f"{sys.path[0]}/..")

import steadygpt.preflight  # noqa: F401  # before all others

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.monitor.snapshot import HEALTHY, state_of, watch
from steadygpt.monitor.view import view

COLUMNS, LINES = 100, 40  # the size of a view that is not printed on a terminal


@dataclass(frozen=True)
class MonitorOptions:
    checkpoint_dir: str = option("checkpoints", "folder of a run", positional=True, aliases=("checkpoint_dir",))
    once: bool = option(
        False, "print one view and exit: with 0 if the run is healthy, with 1 if it failed, hangs or was killed"
    )
    interval_s: float = option(2.0, "seconds between updates", at_least=0.1)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(MonitorOptions, argv, __doc__.splitlines()[0])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit restores the terminal
    console = Console(highlight=False)
    try:
        snapshots = watch(options.checkpoint_dir)
        if options.once or not console.is_terminal:
            if not console.is_terminal:
                console.size = ConsoleDimensions(COLUMNS, LINES)
            snapshot = next(snapshots)
            console.print(view(snapshot, console))
            return 0 if state_of(snapshot).name in HEALTHY else 1
        with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False, console=console) as live:
            for snapshot in snapshots:
                live.update(view(snapshot, console, "Ctrl-C closes the monitor"), refresh=True)
                time.sleep(options.interval_s)
    except OSError as error:  # the folder was removed, or cannot be read
        raise UserError(str(error)) from None
    return 0


if __name__ == "__main__":
    run_cli(main)
