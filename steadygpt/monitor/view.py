"""The monitor's view of a snapshot, for a terminal; curves are drawn with braille characters of 2 x 4 dots."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from steadygpt.base.text import bytes_text, counted, duration_text, printable, scaled_text
from steadygpt.monitor.snapshot import Curve, Snapshot, State, state_of

COLOURS = {"running": "green", "starting": "cyan", "finished": "green", "stopped": "yellow"}
CURVE_COLOURS = ("cyan", "magenta")
HOT_CELSIUS = 85
FACTS: list[dict[str, str]] = [  # learning; speed; time and money; safety
    {"loss": "{loss:.4f}", "val loss": "{val_loss:.4f}", "best": "{best:.4f}", "bits/byte": "{val_bpb:.4f}",
     "HellaSwag": "{hellaswag_acc_norm:.1%}", "grad norm": "{grad_norm:.2f}"},
    {"tokens/s": "{tokens_per_second:,.0f}", "step": "{step_ms:,.0f} ms", "MFU": "{mfu:.1%}", "tokens": "{tokens}",
     "lr": "{lr:.2e}"},
    {"elapsed": "{elapsed}", "cost": "{cost:,.2f}", "cost left": "{cost_to_go:,.2f}"},
    {"saved": "{saved}", "mirror": "{mirrored}", "memory": "{memory}", "epoch": "{epoch:.2f}"},
]  # fmt: skip
GPU_FORMS = {
    "percent": "{:4.0f}%", "memory_gb": "{:4.0f} of", "memory_total_gb": "{:4.0f} GB", "celsius": "{:4.0f} °C",
    "watts": "{:5.0f} W",
}  # fmt: skip
COUNT_UNITS = ("", " k", " M", " B", " T")
LABEL_WIDTH = 8  # of the values beside a chart
MIN_CHART_ROWS = 5
ROOMY_ROWS = 30  # of a terminal that has room for older warnings
WARNING = ("warning ", "yellow")
# The bits of a braille character's dots, from the top to the bottom of its left and its right column.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def view(snapshot: Snapshot, console: Console, hint: str = "") -> Group:
    """Return the view with a chart as high as the console has room for, and with `hint` in its last line."""
    state = state_of(snapshot)
    above: list[RenderableType] = [heading(snapshot, state), facts(snapshot, state)]
    # The last measurements say nothing about a run that has ended.
    below: list[RenderableType] = [machine(snapshot, snapshot.latest if state.is_alive else {})]
    unread = [f"{counted(snapshot.unread, 'line')} of metrics.jsonl cannot be read"] * bool(snapshot.unread)
    known = snapshot.status.get("warnings", [])[0 if console.height >= ROOMY_ROWS else -1 :]
    if warnings := unread + known:
        *older, newest = warnings
        # After the end the newest one is advice, so it may take several lines.
        newest_line = line_of(WARNING, newest, no_wrap=state.is_alive)
        below.append(Group(*(line_of(WARNING, line) for line in older), newest_line))
    summary = map(line_of, snapshot.status.get("summary", ()))
    below.append(Group(*summary, line_of((f"{snapshot.folder}   {hint}", "dim"))))
    rows = console.height - len(console.render_lines(spaced(*above, *below))) - 1
    if rows >= MIN_CHART_ROWS and any(snapshot.curves.values()):
        above.append(chart(snapshot, console.width, rows))
    return spaced(*above, *below)


def spaced(*sections: RenderableType) -> Group:
    """Return sections with an empty line between them."""
    first, *further = sections
    return Group(first, *(Padding(section, (1, 0, 0, 0)) for section in further))


def line_of(*parts: str | tuple[str, str], no_wrap: bool = True) -> Text:
    """Return texts, some with a style, as one line; control characters, which would move the cursor, are escaped."""
    safe = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    return Text.assemble(*safe, no_wrap=no_wrap, overflow="ellipsis")


def apart(left: RenderableType, right: Text) -> Table:
    """Return a line with one part at its left and one at its right end."""
    line = Table.grid(Column(ratio=1, no_wrap=True), Column(no_wrap=True), expand=True, padding=(0, 2))
    line.add_row(left, right)
    return line


def heading(snapshot: Snapshot, state: State) -> Group:
    """Return the header: the run's state and the evidence for it, its name, what to do, and its progress."""
    status, colour = snapshot.status, COLOURS.get(state.name, "red")
    name = line_of((f"● {state.name}", f"bold {colour}"), "  ", (status.get("run_name", ""), "bold"))
    device = f"{status.get('ranks', 1)} x {status.get('device', 'unknown')}  {status.get('host', '')}"
    lines: list[RenderableType] = [
        apart(name, line_of((device, "dim"))),
        line_of((state.why, "" if state.is_well else colour), no_wrap=False),
    ]
    if state.command:
        lines.append(line_of(("next: ", "dim"), state.command, no_wrap=False))
    step, max_steps = step_of(snapshot), max(1, status.get("max_steps", 1))
    done = f"{step / max_steps:.1%}  {step:,} of {counted(max_steps, 'step')}"
    if state.is_alive and "eta_s" in status:
        done += f"  {duration_text(status['eta_s'])} remaining"
    lines.append(apart(ProgressBar(max_steps, step), line_of(done)))
    if "resume" in status:  # whether the steps that it repeated are the same as before
        lines.append(line_of((status["resume"], "dim")))
    return Group(*lines)


def step_of(snapshot: Snapshot) -> int:
    """Return the number of steps that the run has taken. Until it ends, its logs are newer than status.json."""
    step = snapshot.status.get("step", 0)
    return max(step, int(snapshot.latest.get("step", 0))) if snapshot.status.get("status") == "running" else step


def facts(snapshot: Snapshot, state: State) -> Columns:
    """Return the columns of FACTS, names and values. What is unknown is not there."""
    status = snapshot.status
    known: dict[str, Any] = {**status, **snapshot.latest}
    ages = {"saved": snapshot.saved_age_s} | ({"mirrored": snapshot.mirrored_age_s} if status.get("mirror") else {})
    for name, age_s in ages.items():
        known[name] = "not yet" if age_s is None else f"{duration_text(age_s)} ago"
    if not state.is_alive:
        known.pop("cost_to_go", None)
    if validations := [value for _, value in snapshot.curves["val_loss"]]:
        known["best"] = min(validations)
    if tokens_per_step := status.get("tokens_per_step"):
        known["tokens"] = scaled_text(step_of(snapshot) * tokens_per_step, COUNT_UNITS)
    if "elapsed_s" in status:
        known["elapsed"] = duration_text(status["elapsed_s"])
    if "memory_gb" in known:
        known["memory"] = bytes_text(1e9 * known["memory_gb"])
    columns = []
    for forms in FACTS:
        column = Table.grid(Column(style="dim", no_wrap=True), Column(no_wrap=True), padding=(0, 1))
        for name, form in forms.items():
            with suppress(KeyError):
                value = form.format_map(known)
                column.add_row(name, Text(value, "red" if value.startswith("nan") else ""))
        columns += [column] * bool(column.rows)
    return Columns(columns, expand=True, padding=(0, 2))


def chart(snapshot: Snapshot, width: int, rows: int) -> Group:
    """Return a chart with a title and its steps below, `rows` lines in all."""
    curves = list(snapshot.curves.values())
    title = Text(" " * (LABEL_WIDTH + 1))
    for curve, name, colour in zip(curves, ("loss", "validation loss"), CURVE_COLOURS, strict=True):
        title.append(f"━━ {name}  " if curve else "", style=colour)
    drawn = Chart(curves, max(1, width - LABEL_WIDTH - 2), rows - 2)
    decimals = max(0, 2 - math.floor(math.log10(drawn.high - drawn.low)))
    lines, last = [title], len(drawn.cells) - 1
    for number, cells in enumerate(drawn.cells):
        value = drawn.high + (drawn.low - drawn.high) * number / max(1, last)
        is_labelled = number % 4 == 0 or number == last
        label = f"{value:{LABEL_WIDTH}.{decimals}f} ┤" if is_labelled else " " * LABEL_WIDTH + " │"
        points = ((character, CURVE_COLOURS[curve]) for character, curve in cells)
        lines.append(Text.assemble((label, "dim"), *points))
    steps = apart(line_of((f"{'':{LABEL_WIDTH}} step {drawn.first:,}", "dim")), line_of((f"{drawn.last:,}", "dim")))
    return Group(*lines, steps)


def machine(snapshot: Snapshot, latest: Mapping[str, float]) -> Group:
    """Return the load of the GPUs and of the host, as far as they were measured, and the space for checkpoints."""
    lines = []
    for number in dict.fromkeys(match[1] for name in latest if (match := re.match(r"gpu(\d+)_", name))):
        line = Text(no_wrap=True).append(f"GPU {number}", "dim")
        for kind, form in GPU_FORMS.items():
            if (value := latest.get(f"gpu{number}_{kind}")) is not None:
                line.append(form.format(value), "yellow" if kind == "celsius" and value >= HOT_CELSIUS else None)
        lines.append(line)
    host = line_of()
    if "cpu_percent" in latest:
        host.append("CPU ", "dim").append(f"{latest['cpu_percent']:.0f}%   ")
    if "ram_gb" in latest:
        host.append("RAM ", "dim").append(f"{latest['ram_gb']:.0f} of {latest.get('ram_total_gb', math.nan):.0f} GB   ")
    free, size = snapshot.disk_free_bytes, snapshot.status.get("checkpoint_bytes")
    room = f", room for {counted(free // size, 'checkpoint')}" if size else ""
    host.append("disk ", "dim").append(f"{bytes_text(free)} free{room}", "red" if size and free < 3 * size else None)
    return Group(Columns(lines, column_first=True, padding=(0, 2)), host)


class Chart:
    """Curves over steps, `width` x `height` characters large.

    cells: row -> characters with the index of the last curve that they belong to
    low, high, first, last: the values at the bottom and at the top, and the steps at the left and at the right
    """

    def __init__(self, curves: Sequence[Curve], width: int, height: int):
        steps = [step for curve in curves for step, _ in curve]
        self.first, self.last = min(steps, default=0), max(steps, default=0)
        self.low, self.high = value_range(curves)
        self.cells = [[(" ", 0)] * width for _ in range(height)]
        rows, columns = 4 * height, 2 * width
        for number, curve in enumerate(curves):
            dots = [
                (
                    (step - self.first) / max(1, self.last - self.first) * (columns - 1),
                    max(-1.0, (self.high - value) / (self.high - self.low) * (rows - 1)),
                )
                for step, value in curve
            ]
            for (x, y), (next_x, next_y) in pairwise(dots[:1] + dots):
                count = math.ceil(max(1, abs(next_x - x), abs(next_y - y)))  # of dots from one point to the next
                for i in range(count + 1):
                    self._draw(round(x + (next_x - x) * i / count), round(y + (next_y - y) * i / count), number)

    def _draw(self, column: int, row: int, number: int) -> None:
        if row >= 0:
            before = ord(self.cells[row // 4][column // 2][0])
            bits = DOTS[column % 2][row % 4] | (before if before >= 0x2800 else 0x2800)
            self.cells[row // 4][column // 2] = chr(bits), number


def value_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the values at the bottom and at the top of a chart.

    The first losses and extreme spikes lie above the top, so that the rest of the curve is not flat.
    """
    values = [value for curve in curves for _, value in curve]
    if not values:
        return 0.0, 1.0
    low, middle = min(values), median(values)
    return low, max(min(max(values), middle + 3 * (middle - low)), low + 1e-3 * max(1.0, abs(low)))
