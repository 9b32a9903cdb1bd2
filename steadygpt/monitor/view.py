"""The monitor's view of a snapshot, for a terminal."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from steadygpt.base.text import bytes_text, counted, duration_text, printable, scaled_text
from steadygpt.monitor.chart import Chart
from steadygpt.monitor.liveness import State, state_of
from steadygpt.monitor.snapshot import MAX_WARNINGS, Snapshot

COLOURS = {"running": "green", "starting": "cyan", "finished": "green", "stopped": "yellow"}
CURVE_COLOURS = ("cyan", "magenta")
HOT_CELSIUS = 85
GPU_FORMS = {
    "percent": "{:4.0f}%",
    "memory_gb": "{:4.0f} of",
    "memory_total_gb": "{:4.0f} GB",
    "celsius": "{:4.0f} °C",
    "watts": "{:5.0f} W",
}
COUNT_UNITS = ("", " k", " M", " B", " T")
LABEL_WIDTH = 8  # of the values beside a chart
MIN_CHART_ROWS = 5
ROOMY_ROWS = 30  # of a terminal that has room for older warnings
WARNING = ("warning ", "yellow")


def view(snapshot: Snapshot, console: Console, hint: str = "") -> Group:
    """Return the view with a chart as high as the console has room for, and with `hint` in its last line."""
    state = state_of(snapshot)
    above: list[RenderableType] = [heading(snapshot, state), facts(snapshot, state)]
    # The last measurements say nothing about a run that has ended.
    below: list[RenderableType] = [machine(snapshot, snapshot.latest if state.is_alive else {})]
    unread = [f"{counted(snapshot.unread, 'line')} of metrics.jsonl cannot be read"] * bool(snapshot.unread)
    if warnings := unread + snapshot.warnings[-MAX_WARNINGS if console.height >= ROOMY_ROWS else -1 :]:
        *older, newest = warnings
        # After the end the newest one is advice, so it may take several lines.
        newest_line = line_of(WARNING, newest, no_wrap=state.is_alive)
        below.append(Group(*(line_of(WARNING, line) for line in older), newest_line))
    below.append(
        Group(*map(line_of, snapshot.status.get("summary", ())), line_of((f"{snapshot.folder}   {hint}", "dim")))
    )
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
    """Return columns of names and values: learning, speed, time and money, safety. What is unknown is not there."""
    status = snapshot.status
    measured: dict[str, Any] = {**status, **snapshot.latest}
    tokens_per_step = status.get("tokens_per_step")
    validations = [value for _, value in snapshot.curves["val_loss"]]

    def metric(key: str, form: str) -> str | None:
        return form.format(measured[key]) if key in measured else None

    def ago(seconds: float | None) -> str:
        return "not yet" if seconds is None else f"{duration_text(seconds)} ago"

    columns: list[dict[str, str | None]] = [
        {
            "loss": metric("loss", "{:.4f}"),
            "val loss": metric("val_loss", "{:.4f}"),
            "best": f"{min(validations):.4f}" if validations else None,
            "bits/byte": metric("val_bpb", "{:.4f}"),
            "HellaSwag": metric("hellaswag_acc_norm", "{:.1%}"),
            "grad norm": metric("grad_norm", "{:.2f}"),
        },
        {
            "tokens/s": metric("tokens_per_second", "{:,.0f}"),
            "step": metric("step_ms", "{:,.0f} ms"),
            "MFU": metric("mfu", "{:.1%}"),
            "tokens": scaled_text(step_of(snapshot) * tokens_per_step, COUNT_UNITS) if tokens_per_step else None,
            "lr": metric("lr", "{:.2e}"),
        },
        {
            "elapsed": duration_text(status["elapsed_s"]) if "elapsed_s" in status else None,
            "cost": metric("cost", "{:,.2f}"),
            "cost left": metric("cost_to_go", "{:,.2f}") if state.is_alive else None,
        },
        {
            "saved": ago(snapshot.saved_age_s),
            "mirror": ago(snapshot.mirrored_age_s) if status.get("mirror") else None,
            "memory": bytes_text(1e9 * measured["memory_gb"]) if "memory_gb" in measured else None,
            "epoch": metric("epoch", "{:.2f}"),
        },
    ]
    return Columns([grid(column) for column in columns if any(column.values())], expand=True, padding=(0, 2))


def grid(values: Mapping[str, str | None]) -> Table:
    """Return names with their values, as far as they are known."""
    table = Table.grid(Column(style="dim", no_wrap=True), Column(no_wrap=True), padding=(0, 1))
    for name, value in values.items():
        if value is not None:
            table.add_row(name, Text(value, "red" if value.startswith("nan") else ""))
    return table


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
    gpus: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in latest.items():
        if match := re.fullmatch(r"gpu(\d+)_(\w+)", name):
            gpus[match[1]][match[2]] = value
    lines = []
    for number, gpu in gpus.items():
        line = Text(no_wrap=True).append(f"GPU {number}", "dim")
        for kind, form in GPU_FORMS.items():
            is_hot = kind == "celsius" and gpu.get(kind, 0) >= HOT_CELSIUS
            line.append(form.format(gpu[kind]) if kind in gpu else "", "yellow" if is_hot else None)
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
