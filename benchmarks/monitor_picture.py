"""The monitor's view of a run as an SVG of a terminal.

    python -m benchmarks.monitor_picture               # trains 150 steps of the quickstart, then draws docs/monitor.svg
    python -m benchmarks.monitor_picture RUN_FOLDER    # draws the run in this folder as it is now

Here the quickstart logs every step and validates every 25 steps, for detailed curves. The name of the machine is left
out.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from benchmarks.cast import frame
from benchmarks.compare import REPO, die_with_parent, exit_on_signals, flags
from steadygpt.base.options import UserError, run_cli
from steadygpt.monitor.snapshot import Snapshot, watch
from steadygpt.monitor.view import view

COLUMNS, LINES, STEPS = 84, 31, 150
RUN = "checkpoints/quickstart"
COLOURS = ["#484f58", "#ff7b72", "#56d364", "#e3b341", "#58a6ff", "#d2a8ff", "#56d4dd", "#c9d1d9"]
RGB = [tuple(bytes.fromhex(colour[1:])) for colour in COLOURS]
THEME = TerminalTheme((13, 17, 23), (201, 209, 217), RGB, RGB)
FORMAT = """<style>.{unique_id}-matrix text{{font-size:{char_height}px}}{styles}</style>
<g class="{unique_id}-matrix">{backgrounds}{matrix}</g>"""
CHARACTER_HEIGHT = 20  # of rich's SVG
CHARACTER, LINE = CHARACTER_HEIGHT * 0.61, CHARACTER_HEIGHT * 1.22


def svg_of(snapshot: Snapshot) -> str:
    """Return the view of a snapshot."""
    snapshot.status["host"] = "localhost"
    if snapshot.owner:
        snapshot.owner = f"{snapshot.status['pid']} on localhost"
    console = Console(
        record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True, color_system="standard",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(view(snapshot, console, "Ctrl-C closes the monitor"))
    body = console.export_svg(theme=THEME, code_format=FORMAT, unique_id="m")
    body = re.sub(r' clip-path="[^"]*"', "", body)
    return frame("./monitor_training.sh", round(COLUMNS * CHARACTER), round(LINES * LINE), body)


def snapshot_of(folder: str) -> Snapshot:
    return next(watch(folder))


def train_and_draw(file: Path) -> None:
    """Train the quickstart, and draw its view while it runs."""
    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        prepare = [sys.executable, "prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes")]
        out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*prepare, f"--out={name}/data/stdlib"], cwd=REPO, check=True, **out)
        Path(name, "train.py").symlink_to(REPO / "train.py")
        options = flags(config="quickstart", run_name="quickstart", log_freq=1, eval_freq=25, eval_tokens=8192)
        process = subprocess.Popen(
            [sys.executable, "train.py", *options], cwd=name, env=os.environ, preexec_fn=die_with_parent, **out
        )
        try:
            with chdir(name):
                while process.poll() is None:
                    if Path(RUN, "status.json").exists():
                        snapshot = snapshot_of(RUN)
                        if snapshot.status.get("step", 0) >= STEPS:
                            break
                    time.sleep(1)
                if process.poll() is not None:
                    raise UserError("the quickstart ended early; run train.py --config quickstart to see why")
                file.write_text(svg_of(snapshot))
        finally:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", help="folder of a run's checkpoints")
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "monitor.svg")
    args = parser.parse_args()
    file = args.plot.absolute()
    if args.run:
        file.write_text(svg_of(snapshot_of(args.run)))
    else:
        train_and_draw(file)
    return 0


if __name__ == "__main__":
    run_cli(main)
