"""The monitor's view of a snapshot, for a terminal; curves are drawn with braille characters of 2 x 4 dots."""

import math
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from steadygpt.base.text import bytes_text, counted, duration_text, printable, scaled_text
from steadygpt.log.metrics import Status
from steadygpt.monitor.snapshot import Curve, Snapshot, State, state_of

COLOURS = {"running": "green", "finished": "green", "stopped": "yellow"}
CURVES = {"loss": ("loss", "cyan"), "val_loss": ("validation loss", "magenta")}  # title and colour
FACTS: list[dict[str, str]] = [  # learning; speed; time, money and machine; safety and memory
    {"loss": "{loss:.4f}", "val loss": "{val_loss:.4f}", "best": "{best_val_loss:.4f}", "bits/byte": "{val_bpb:.4f}",
     "HellaSwag": "{hellaswag_acc_norm:.1%}", "grad norm": "{grad_norm:.2f}"},
    {"tokens/s": "{tokens_per_second:,.0f}", "step": "{step_ms:,.0f} ms", "MFU": "{mfu:.1%}", "tokens": "{tokens}",
     "lr": "{lr:.2e}", "epoch": "{epoch:.2f}"},
    {"elapsed": "{elapsed}", "cost": "{cost:,.2f}", "cost left": "{cost_to_go:,.2f}",
     "RAM": "{ram_gb:.0f} of {ram_total_gb:.0f} GB"},
    {"saved": "{saved}", "mirror": "{mirrored}", "disk": "{disk} free", "memory": "{memory_gb:,.3g} GB"},
]  # fmt: skip
GPU_FORMS = {
    "percent": "{:4.0f}%", "memory_gb": "{:4.0f} of", "memory_total_gb": "{:4.0f} GB", "celsius": "{:4.0f} °C",
    "watts": "{:5.0f} W",
}  # fmt: skip
COUNT_UNITS = ("", " k", " M", " B", " T")
LABEL_WIDTH = 8  # of the values beside a chart
MIN_CHART_ROWS = 5
FACT_ROWS = (99, 4, 3, 2)  # of FACTS; fewer where the chart would have no room
MAX_OTHERS = 8  # other runs that are listed
# The bits of a braille character's dots, from the top to the bottom of its left and its right column.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def view(snapshot: Snapshot, console: Console, hint: str = "") -> Group:
    """Return the view with a chart as high as the console has room for, and with `hint` in its last line.

    Facts, other runs and the middle of the summary are left out if that makes room for the chart.
    """
    for most in FACT_ROWS:
        above, below = around_chart(snapshot, hint, most)
        rows = console.height - len(console.render_lines(Group(*above, *below))) - 2  # with an empty line
        if rows >= MIN_CHART_ROWS and any(snapshot.curves.values()):
            return Group(*above, *chart(snapshot.curves, console.width, rows), "", *below)
    above, below = around_chart(snapshot, hint, FACT_ROWS[0])
    return Group(*above, *below)


def around_chart(snapshot: Snapshot, hint: str, most: int) -> tuple[list[RenderableType], list[RenderableType]]:
    """Return what is above and below the chart, with at most `most` rows of facts and of other runs."""
    status = snapshot.status
    state = state_of(snapshot)
    is_running = state.name == "running"
    # The last measurements say nothing about a run that has ended.
    load = status.get("load", {}) if is_running else {}
    # After the end the newest warning is advice, so it may take several lines.
    warnings = [line_of(("warning ", "yellow"), line, no_wrap=is_running) for line in status.get("warnings", [])[-3:]]
    summary = status.get("summary", [])
    if most < FACT_ROWS[0]:
        summary = summary[:1] + summary[1:][-1:]  # the time, and what to do next
    above = [*heading(status, state), "", facts(snapshot, load, most), "", *gpus(load), *other_runs(snapshot, most)]
    below: list[RenderableType] = [*warnings, *map(line_of, summary), line_of((f"{snapshot.folder}   {hint}", "dim"))]
    return above, below


def line_of(*parts: str | tuple[str, str], no_wrap: bool = True) -> Text:
    """Return texts, some with a style, as one line; control characters, which would move the cursor, are escaped."""
    safe = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    return Text.assemble(*safe, no_wrap=no_wrap, overflow="ellipsis")


def apart(left: RenderableType, right: Text) -> Table:
    """Return a line with one part at the left end and one at the right."""
    line = Table.grid(Column(ratio=1, no_wrap=True), Column(no_wrap=True), expand=True, padding=(0, 2))
    line.add_row(left, right)
    return line


def heading(status: Status, state: State) -> list[RenderableType]:
    """Return the header: the run's state and the evidence for it, its name, what to do, and its progress."""
    colour = COLOURS.get(state.name, "red")
    name = line_of((f"● {state.name}", f"bold {colour}"), "  ", (status.get("run_name", ""), "bold"))
    device = f"{status.get('ranks', 1)} x {status.get('device', 'unknown')}  {status.get('host', '')}"
    lines: list[RenderableType] = [apart(name, line_of((device, "dim"))), line_of((state.why, colour), no_wrap=False)]
    if state.command:
        lines.append(line_of(("next: ", "dim"), state.command, no_wrap=False))
    step = status.get("step", 0)
    max_steps = max(1, status.get("max_steps", 1))
    done = f"{step / max_steps:.1%}  {step:,} of {counted(max_steps, 'step')}"
    if state.name == "running" and "eta_s" in status:
        done += f"  {duration_text(status['eta_s'])} remaining"
    lines.append(apart(ProgressBar(max_steps, step), line_of(done)))
    if "resume" in status:  # whether the repeated steps were the same as before the resume
        lines.append(line_of((status["resume"], "dim")))
    return lines


def facts(snapshot: Snapshot, load: Mapping[str, float], most: int) -> Columns:
    """Return the columns of FACTS, names and values, in at most `most` rows. Unknown values are left out."""
    status = snapshot.status
    values: dict[str, Any] = {**status, **load, "disk": bytes_text(shutil.disk_usage(snapshot.folder).free)}
    times = {"saved": snapshot.saved_at}
    if status.get("mirror"):
        times["mirrored"] = status.get("mirrored_at")
    for name, then_s in times.items():
        values[name] = "not yet" if then_s is None else f"{duration_text(max(0.0, time.time() - then_s))} ago"
    if "tokens" in status:
        values["tokens"] = scaled_text(status["tokens"], COUNT_UNITS)
    if "elapsed_s" in status:
        values["elapsed"] = duration_text(status["elapsed_s"])
    columns = []
    for forms in FACTS:
        column = Table.grid(Column(style="dim", no_wrap=True), Column(no_wrap=True), padding=(0, 1))
        for name, form in forms.items():
            with suppress(KeyError):
                if column.row_count < most:
                    column.add_row(name, form.format_map(values))
        columns.append(column)
    return Columns(columns, expand=True, padding=(0, 2))


def gpus(load: Mapping[str, float]) -> list[RenderableType]:
    """Return the measured load of each GPU, followed by an empty line; [] without GPUs."""
    numbers = []
    for name in load:
        match = re.match(r"gpu(\d+)_", name)
        if match and match[1] not in numbers:
            numbers.append(match[1])
    lines = []
    for number in numbers:
        values = {form: load.get(f"gpu{number}_{kind}") for kind, form in GPU_FORMS.items()}
        texts = [form.format(value) for form, value in values.items() if value is not None]
        lines.append(line_of((f"GPU {number}", "dim"), *texts))
    return [Columns(lines, column_first=True, padding=(0, 2)), ""] if lines else []


def other_runs(snapshot: Snapshot, most: int) -> list[RenderableType]:
    """Return a table of the newest other runs in the folder, at most `most`, and an empty line; [] without any."""
    if not snapshot.other_runs:
        return []
    columns = [Column("other runs", no_wrap=True), *(Column(no_wrap=True, justify="right") for _ in range(4))]
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    most = min(most, MAX_OTHERS)
    for name, other in list(snapshot.other_runs.items())[:most]:
        status = other.status
        state = state_of(other).name
        step = f"step {status.get('step', 0):,} of {status.get('max_steps', 0):,}"
        loss = f"loss {status['loss']:.4f}" if "loss" in status else ""
        val_loss = f"val loss {status['val_loss']:.4f}" if "val_loss" in status else ""
        table.add_row(line_of(name), line_of((state, COLOURS.get(state, "red"))), step, loss, val_loss)
    left_out = len(snapshot.other_runs) - most
    if left_out > 0:
        table.add_row(f"and {left_out:,} more")
    return [table, ""]


def chart(curves: Mapping[str, Curve], width: int, height: int) -> list[RenderableType]:
    """Return the lines of a chart: a title, curves with values beside them, and the first and the last step.

    The first losses and extreme spikes are cut off at the top, so that the rest of the curve is not flat.
    """
    steps: list[int] = []
    values: list[float] = []
    for curve in curves.values():
        steps += [step for step, _ in curve]
        values += [value for _, value in curve]
    first = min(steps)
    last = max(steps)
    low = min(values)
    middle = median(values)
    high = max(min(max(values), middle + 3 * (middle - low)), low + 1e-3 * max(1.0, abs(low)))
    rows = height - 2  # of characters, as columns
    columns = width - LABEL_WIDTH - 2
    dots_per_step = (2 * columns - 1) / max(1, last - first)
    dots_per_unit = (4 * rows - 1) / (high - low)
    cells: dict[tuple[int, int], tuple[int, str]] = {}  # row, column -> bits of the dots, colour of the last curve
    title = Text(" " * (LABEL_WIDTH + 1))
    for name, (noun, colour) in CURVES.items():
        points = [
            ((step - first) * dots_per_step, max(-1.0, (high - value) * dots_per_unit)) for step, value in curves[name]
        ]
        title.append(f"━━ {noun}  " if points else "", style=colour)  # no title without a curve
        for (x, y), (next_x, next_y) in pairwise(points[:1] + points):
            count = math.ceil(max(1, abs(next_x - x), abs(next_y - y)))  # of dots from one point to the next
            for i in range(count + 1):
                column = round(x + (next_x - x) * i / count)
                row = round(y + (next_y - y) * i / count)
                if row >= 0:
                    cell = (row // 4, column // 2)
                    bits, _ = cells.get(cell, (0, ""))
                    cells[cell] = (bits | DOTS[column % 2][row % 4], colour)
    decimals = max(0, 2 - math.floor(math.log10(high - low)))
    lines: list[RenderableType] = [title]
    for row in range(rows):
        value = high + (low - high) * row / max(1, rows - 1)
        is_labelled = row % 4 == 0 or row == rows - 1
        label = f"{value:{LABEL_WIDTH}.{decimals}f} ┤" if is_labelled else " " * LABEL_WIDTH + " │"
        parts = [(label, "dim")]
        for column in range(columns):
            bits, colour = cells.get((row, column), (0, ""))
            parts.append((chr(0x2800 | bits) if bits else " ", colour))
        lines.append(Text.assemble(*parts))
    steps_below = apart(line_of((f"{'':{LABEL_WIDTH}} step {first:,}", "dim")), line_of((f"{last:,}", "dim")))
    return [*lines, steps_below]
