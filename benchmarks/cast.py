"""A terminal cast of a run that is killed with kill -9 and resumed, as an animated SVG without scripts.

    python -m benchmarks.cast                       # records the run, about a minute, and draws docs/cast.svg
    python -m benchmarks.cast --data cast.json      # keeps the recording; with the file, draws it again

The program's output is recorded from a real run of `--config test`. Only its pace is changed: the animation shows steps
faster, and stops soon after the line that compares the repeated steps. Long lines end in an ellipsis.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.compare import REPO, die_with_parent, exit_on_signals, flags

COMMANDS = (
    "python train.py --config test --sample_freq 0",
    "python train.py --resume latest",
)
KILLED_AFTER = 60  # the step of the kill
STEPS_AFTER = 6  # the steps shown after the comparison
COLUMNS, ROWS, ROWS_BELOW = 72, 16, 3
CHARACTER, LINE, MARGIN, BAR = 8.4, 20, 18, 38  # width and heights in pixels
STEP = re.compile(r"(?P<before>step +(?P<step>[\d,]+)\b(?!.*val loss).*?\bloss +)(?P<loss>[\d.]+)(?P<after>.*)")
COMPARISON = re.compile(r"repeated [\d,]+ steps?\b.*bit for bit")
STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;
fill:#c9d1d9;white-space:pre}
.dim{fill:#8b949e}.bold{fill:#f0f6fc;font-weight:600}.red{fill:#ff7b72;font-weight:600}
.green{fill:#56d364;font-weight:600}.blue{fill:#79c0ff}.cover{fill:#0d1117}
"""


# ---------------------------------------------------------------------------------------------------------------------
# recording


def record() -> dict[str, Any]:
    """Train, kill the run with kill -9, and resume it; return the lines of both lives, and the killed process."""
    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        data = flags(source="stdlib", tokenizer="bytes", out=f"{name}/data/stdlib")
        prepare = [sys.executable, "prepare_dataset.py", *data]
        subprocess.run(prepare, cwd=REPO, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        Path(name, "train.py").symlink_to(REPO / "train.py")
        lives = []
        for command, last in zip(COMMANDS, (KILLED_AFTER, KILLED_AFTER + STEPS_AFTER), strict=True):
            print(f"$ {command}", flush=True)
            process = subprocess.Popen(
                [sys.executable, "-u", *command.split()[1:]], cwd=name, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent,
            )  # fmt: skip
            lines = []
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line.rstrip())
                if step_of(line) >= last:
                    process.kill()
                    break
            if process.wait() != -9:
                sys.exit(f"train.py ended before step {last}; see above")
            lives.append({"lines": lines, "pid": process.pid})
    return {"lives": lives}


def step_of(line: str) -> int:
    """Return the number of a step's line; -1 for other lines."""
    match = STEP.match(line)
    return int(match["step"].replace(",", "")) if match else -1


# ---------------------------------------------------------------------------------------------------------------------
# drawing


@dataclass
class Pane:
    """Lines of a terminal, and the instants at which its cursor moves: all after and below the cursor is hidden."""

    rows: int
    lines: list[str] = field(default_factory=list)  # as SVG
    moves: list[tuple[float, int, int]] = field(default_factory=list)  # second, row, column

    def show(self, instant: float, *tspans: str) -> None:
        """Show a line at once, with the cursor on the next one."""
        self.lines.append("".join(tspans))
        self.moves.append((instant, len(self.lines), 0))

    def prompt(self, instant: float) -> None:
        """Show a prompt, with the cursor behind it."""
        self.lines.append(tspan("$ ", "green"))
        self.moves.append((instant, len(self.lines) - 1, 2))

    def type(self, instant: float, command: str, random: Random) -> float:
        """Type a command at the prompt and return the instant after it."""
        self.lines[-1] = typed(command)
        for column in range(3, 3 + len(command)):
            instant += random.uniform(0.012, 0.036)
            self.moves.append((instant, len(self.lines) - 1, column))
        return instant + 0.35

    def svg(self, name: str, top: float, duration: float) -> str:
        """Return the pane with its two animations, which scroll the lines and move the cursor."""
        scroll = []  # keyframes
        cursor = []
        for instant, row, column in sorted(self.moves):
            hidden = max(0, row + 1 - self.rows)
            scrolled = f"translate(0,{-hidden * LINE}px)"
            moved = f"translate({column * CHARACTER:.1f}px,{row * LINE}px)"
            percent = f"{100 * instant / duration:.2f}%"
            scroll.append(f"{percent}{{transform:{scrolled}}}")
            cursor.append(f"{percent}{{transform:{moved}}}")
        style = ""
        # After the last move, the transforms of the last keyframes stay.
        for kind, keyframes, transform in (("s", scroll, scrolled), ("c", cursor, moved)):
            style += f"@keyframes {name}{kind}{{{''.join(keyframes)}}}"
            style += f".{name}{kind}{{transform:{transform};animation:{name}{kind} {duration:.2f}s step-end infinite}}"
        texts = "".join(f'<text y="{LINE * row + 15}">{line}</text>' for row, line in enumerate(self.lines))
        width = COLUMNS * CHARACTER + 2
        height = self.rows * LINE
        return (
            f'<style>{style}</style><svg y="{top}" width="{width}" height="{height}">'
            f'<g class="{name}s">{texts}<g class="{name}c"><rect class="cover" width="{width}" height="{LINE}"/>'
            f'<rect class="cover" x="{-width}" y="{LINE}" width="{2 * width}" height="{2 * height}"/>'
            f'<rect width="{CHARACTER}" height="17" y="2" fill="#8b949e"/></g></g></svg>'
        )


def typed(command: str) -> str:
    """Return a prompt with a command as SVG."""
    return tspan("$ ", "green") + tspan(command, "bold", 2)


def tspan(text: str, style: str = "", column: int = 0) -> str:
    """Return text as SVG, as wide as its characters in any font."""
    width = f'x="{column * CHARACTER:.1f}" textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<tspan {width} class="{style}">{escape(text)}</tspan>' if text.strip() else ""


def cropped(line: str) -> str:
    """Return a line that fits: without the last fields of a step, or with an ellipsis."""
    if len(line) <= COLUMNS:
        return line
    if step_of(line) >= 0:
        return line[:COLUMNS].rpartition(" | ")[0]
    return line[: COLUMNS - 1].rstrip() + "…"


def show_step(pane: Pane, instant: float, line: str, style: str) -> None:
    """Show the line of a step with its loss in colour."""
    step = STEP.match(cropped(line))
    assert step, line
    texts = [(step["before"], ""), (step["loss"], style), (step["after"], "")]
    pane.show(instant, *(tspan(text, style, step.start(i)) for (text, style), i in zip(texts, (1, 3, 4), strict=True)))


def show_life(pane: Pane, instant: float, lines: Sequence[str], pace: float, loss_style: str) -> float:
    """Show the output of a life, `pace` seconds per step at first; return the instant after it."""
    for line in lines:
        if COMPARISON.search(line):
            for part in textwrap.wrap(line, COLUMNS):
                pane.show(instant, tspan(part, "green"))
            instant += 2.2
            pace = 0.3
            loss_style = "blue"
        elif step_of(line) >= 0:
            show_step(pane, instant, line, loss_style)
            instant += pace
        else:
            pane.show(instant, tspan(cropped(line), "dim"))
            instant += 0.05
    return instant


def draw(recorded: dict[str, Any]) -> str:
    """Return the animation."""
    first, second = recorded["lives"]
    if not any(map(COMPARISON.search, second["lines"])):
        sys.exit("the recording has no line which says that the repeated steps are the same; see COMPARISON")
    random = Random(0)
    pane = Pane(ROWS)
    below = Pane(ROWS_BELOW)
    pane.show(0, typed(COMMANDS[0]))  # typed before, so that output comes at once
    below.prompt(0)
    killed = show_life(pane, 0, first["lines"], 0.045, "blue")
    kill = f"kill -9 {first['pid']}"
    killed = max(killed, below.type(killed - 1.1, kill, random))
    below.prompt(killed)
    pane.show(killed, tspan("Killed", "red"))
    pane.prompt(killed)
    duration = show_life(pane, pane.type(killed + 1.4, COMMANDS[1], random), second["lines"], 0.13, "green") + 2.5
    divider = ROWS * LINE + 12
    panes = pane.svg("a", 0, duration) + below.svg("b", divider + 18, duration)
    line = f'<path d="M{1 - MARGIN} {divider}H{COLUMNS * CHARACTER + MARGIN - 1}" stroke="#3d444d"/>'
    title = "<title>A run is killed, resumes, and repeats its steps bit for bit</title>"
    still = "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    height = divider + 18 + ROWS_BELOW * LINE
    return frame("kill -9, then resume", COLUMNS * CHARACTER, height, f"{title}<style>{still}</style>{panes}{line}")


def frame(title: str, width: float, height: float, content: str) -> str:
    """Return an SVG of a dark terminal's window, for both colour schemes, with content of this size in pixels."""
    across, down = round(width + 2 * MARGIN), round(height + BAR + 24)
    dots = "".join(
        f'<circle cx="{22 + 20 * i}" cy="{BAR / 2}" r="6" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}" height="{down}"'
        f' xml:space="preserve"><style>{STYLE}</style>'
        f'<rect x=".5" y=".5" width="{across - 1}" height="{down - 1}" rx="10" fill="#0d1117" stroke="#3d444d"/>'
        f'<path d="M.5 {BAR}V10.5a10 10 0 0 1 10-10H{across - 10.5}a10 10 0 0 1 10 10V{BAR}z" fill="#21262d"/>{dots}'
        f'<text x="{across / 2}" y="{BAR / 2 + 5}" text-anchor="middle" class="dim">{title}</text>'
        f'<g transform="translate({MARGIN} {BAR + 12})">{content}</g></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="file for the recording; if it exists, nothing is run")
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "cast.svg")
    args = parser.parse_args()
    if args.data and args.data.exists():
        recorded = json.loads(args.data.read_text())
    else:
        recorded = record()
        if args.data:
            args.data.write_text(json.dumps(recorded, indent=1))
    args.plot.write_text(draw(recorded))


if __name__ == "__main__":
    main()
