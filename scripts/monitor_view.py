"""The monitor's view of a snapshot: lines that fit into a terminal."""

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from steadygpt.curves import Chart, Curve
from steadygpt.disk import bytes_text
from steadygpt.liveness import State
from steadygpt.units import duration_text, scaled_text

COLOURS = {"running": "green", "starting": "cyan", "finished": "green", "stopped": "yellow", "not reachable": "yellow"}
CURVE_COLOURS = ("cyan", "magenta")
HOT_CELSIUS = 85
LABEL_WIDTH = 8  # of the values beside a chart
GPU_WIDTH, MAX_GPU_ROWS = 58, 4  # GPUs stand in as many columns as there is room for, more if there are many GPUs
MIN_CHART_ROWS = 5
MAX_WRAPPED_ROWS = 4
WARNING = ("warning ", "yellow")
ROOMY_ROWS = 30  # of a terminal that has room for more empty lines


def view(
    snapshot: Mapping[str, Any], curves: Mapping[str, Curve], state: State, width: int, height: int, hint: str = ""
) -> list[Text]:
    """Return the view as at most `height` lines of at most `width` characters.

    Args:
        curves: points (step, value) of loss and val_loss.
        hint: for the last line.
    """
    status, latest = snapshot["status"], snapshot["latest"]
    # What was measured at last says nothing about a run that has ended.
    machine = [*gpu_lines(latest, width), *host_lines(snapshot, latest)] if state.is_alive else host_lines(snapshot, {})
    *older, newest = snapshot["warnings"] or [""]
    older_warnings = [row for line in older for row in wrapped(line, width, WARNING, max_rows=1)]
    newest_warning = wrapped(newest, width, WARNING, max_rows=1 if state.is_alive else MAX_WRAPPED_ROWS)
    chart: list[Text] = []
    blank = [Text()] if height >= ROOMY_ROWS else []

    def lines() -> list[Text]:
        sections = [
            [*heading(status, state, width), *blank, progress(snapshot, state, width)],
            grid(facts(snapshot, curves, state), width),
            chart,
            machine,
            [Text(printable(line)) for line in status.get("summary", ())],
            [
                *older_warnings,
                *newest_warning,
                *(blank if newest else []),
                Text(f"{snapshot['folder']}   {hint}".rstrip(), style="dim"),
            ],
        ]
        return [line for section in sections if section for line in (*section, Text())][:-1]

    # Where there is little room, the newest warning comes before the chart, and the chart before older warnings.
    while older_warnings and len(lines()) + 1 + MIN_CHART_ROWS > height:
        del older_warnings[0]
    rows = height - len(lines()) - 1
    if rows >= MIN_CHART_ROWS and any(curves.values()):
        chart = chart_lines(curves, width, rows)
    *above, last = lines()
    fitting = [*above[: height - 1], last]
    for line in fitting:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return fitting


def heading(status: Mapping[str, Any], state: State, width: int) -> list[Text]:
    """Return the lines that come first: whether the run is alive, which run it is, and what to do."""
    colour = COLOURS.get(state.name, "red")
    left = Text.assemble((f"● {state.name}", f"bold {colour}"), "  ", (status.get("run_name", ""), "bold"))
    device = " x ".join(str(status[key]) for key in ("ranks", "device") if key in status)
    right = Text("  ".join(part for part in (device, status.get("host", "")) if part), style="dim")
    return [
        apart(left, right, width),
        *wrapped(state.why, width, style="" if state.is_well else colour),
        *wrapped(state.command, width, ("next: ", "dim")),
    ]


def wrapped(
    text: str, width: int, name: tuple[str, str] = ("", ""), style: str = "", max_rows: int = MAX_WRAPPED_ROWS
) -> list[Text]:
    """Return a text as lines, none if it is empty. Its name and the name's style stand before the first one."""
    margin = " " * len(name[0])
    parts = wrap(printable(text), width - len(margin), max_lines=max_rows, placeholder=" …", break_on_hyphens=False)
    return [Text.assemble((margin, "") if number else name, (part, style)) for number, part in enumerate(parts)]


def printable(text: str) -> str:
    """Return a text without control characters, which would move the terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def apart(left: Text, right: Text, width: int) -> Text:
    """Return a line with one text at its left and one at its right end, which goes where there is no room."""
    gap = width - left.cell_len - right.cell_len
    return Text.assemble(left, " " * gap, right) if gap > 1 else left


def progress(snapshot: Mapping[str, Any], state: State, width: int) -> Text:
    status, step = snapshot["status"], step_of(snapshot)
    max_steps = status.get("max_steps", 0)
    share = min(1.0, step / max_steps) if max_steps else 0.0
    text = f"  {share:.1%}  {step:,} of {max_steps:,} steps"
    if state.is_alive and "eta_s" in status:
        text += f"  {duration_text(status['eta_s'])} to go"
    return Text.assemble(bar(share, max(5, width - len(text))), text)


def step_of(snapshot: Mapping[str, Any]) -> int:
    """Return the number of steps that the run has taken. Until it ends, its logs are newer than status.json."""
    step = snapshot["status"].get("step", 0)
    return max(step, snapshot["latest"].get("step", 0)) if snapshot["status"].get("status") == "running" else step


def bar(share: float, width: int) -> Text:
    done = round(share * width)
    return Text.assemble(("━" * done, "cyan"), ("─" * (width - done), "dim"))


def facts(snapshot: Mapping[str, Any], curves: Mapping[str, Curve], state: State) -> list[list[tuple[str, Text]]]:
    """Return columns of (name, value): learning, speed, time and money, safety. What is unknown is not there."""
    status, measured = snapshot["status"], {**snapshot["status"], **snapshot["latest"]}
    tokens_per_step = status.get("tokens_per_step")

    def fact(name: str, value: float | None, form: Callable[[Any], str]) -> list[tuple[str, Text]]:
        return [] if value is None else [(name, Text(form(value)))]

    def metric(name: str, key: str, form: Callable[[Any], str]) -> list[tuple[str, Text]]:
        if key in measured and measured[key] is None:  # JSON has no NaN
            return [(name, Text("NaN", style="red"))]
        return fact(name, measured.get(key), form)

    def age(name: str, seconds: float | None) -> tuple[str, Text]:
        return name, Text("not yet" if seconds is None else f"{duration_text(seconds)} ago")

    return [
        [
            *metric("loss", "loss", "{:.4f}".format),
            *metric("val loss", "val_loss", "{:.4f}".format),
            *fact("best", min((value for _, value in curves["val_loss"]), default=None), "{:.4f}".format),
            *metric("HellaSwag", "hellaswag_acc_norm", "{:.1%}".format),
            *metric("grad norm", "grad_norm", "{:.2f}".format),
        ],
        [
            *metric("tokens/s", "tokens_per_second", "{:,.0f}".format),
            *metric("step", "step_ms", "{:,.0f} ms".format),
            *metric("MFU", "mfu", "{:.1%}".format),
            *fact("tokens", step_of(snapshot) * tokens_per_step if tokens_per_step else None, count_text),
            *metric("lr", "lr", "{:.2e}".format),
        ],
        [
            *fact("elapsed", status.get("elapsed_s"), duration_text),
            *metric("cost", "cost", "{:,.2f}".format),
            *fact("to go", status.get("cost_to_go") if state.is_alive else None, "{:,.2f}".format),
        ],
        [
            age("saved", snapshot["saved_age_s"]),
            *([age("mirror", snapshot["mirrored_age_s"])] if status.get("mirror") else []),
            *metric("memory", "memory_gb", "{:,.1f} GB".format),
            *metric("epoch", "epoch", "{:.2f}".format),
        ],
    ]


def count_text(count: float) -> str:
    """Return a count with three digits, such as 6.34 B."""
    return scaled_text(count, ("", " k", " M", " B", " T"))


def grid(columns: Sequence[Sequence[tuple[str, Text]]], width: int) -> list[Text]:
    """Return columns of (name, value) as lines."""
    columns = [column for column in columns if column]
    widths = [(max(len(name) for name, _ in column), max(value.cell_len for _, value in column)) for column in columns]
    room = width - sum(name_width + 1 + value_width for name_width, value_width in widths)
    gap = min(12, max(1, room // max(1, len(columns) - 1)))
    lines = []
    for row in range(max(map(len, columns), default=0)):
        line = Text()
        for column, (name_width, value_width) in zip(columns, widths, strict=True):
            name, value = column[row] if row < len(column) else ("", Text())
            line.append(f"{name:<{name_width}} ", style="dim").append(value)
            line.append(" " * (value_width - value.cell_len + gap))
        lines.append(line)
    return lines


def chart_lines(curves: Mapping[str, Curve], width: int, rows: int) -> list[Text]:
    """Return a chart with a title and its steps below, `rows` lines in all."""
    title = Text(" " * (LABEL_WIDTH + 1))
    for curve, name, colour in zip(curves.values(), ("loss", "validation loss"), CURVE_COLOURS, strict=True):
        title.append(f"━━ {name}  " if curve else "", style=colour)
    chart = Chart(list(curves.values()), max(1, width - LABEL_WIDTH - 2), rows - 2)
    decimals = max(0, 2 - math.floor(math.log10(chart.high - chart.low)))
    lines, last = [title], len(chart.cells) - 1
    for number, cells in enumerate(chart.cells):
        value = chart.high + (chart.low - chart.high) * number / max(1, last)
        is_labelled = number in (0, last) or (number % 4 == 0 and last - number >= 3)
        label = f"{value:{LABEL_WIDTH}.{decimals}f} ┤" if is_labelled else " " * LABEL_WIDTH + " │"
        line = Text.assemble((label, "dim"))
        for character, curve_number in cells:
            line.append(character, style=CURVE_COLOURS[curve_number])
        lines.append(line)
    left, right = Text(f"{'':{LABEL_WIDTH}} step {chart.first:,}", style="dim"), Text(f"{chart.last:,}", style="dim")
    lines.append(apart(left, right, width))
    return lines


def gpu_lines(latest: Mapping[str, Any], width: int) -> list[Text]:
    """Return the load, memory, temperature and power of each GPU, as far as they were measured."""
    kinds = ("percent", "memory_gb", "memory_total_gb", "celsius", "watts")
    gpus: list[list[float | None]] = []
    while any(f"gpu{len(gpus)}_{kind}" in latest for kind in kinds):
        gpus.append([latest.get(f"gpu{len(gpus)}_{kind}") for kind in kinds])
    if not gpus:
        return []
    rows = min(MAX_GPU_ROWS, math.ceil(len(gpus) / max(1, width // GPU_WIDTH)))
    columns = math.ceil(len(gpus) / rows)
    cell_width = (width - 3 * (columns - 1)) // columns
    lines = [Text() for _ in range(rows)]
    for number, (percent, memory, total, celsius, watts) in enumerate(gpus):
        texts = [
            "" if percent is None else f"{percent:.0f}%",
            "" if memory is None else f"{memory:.0f}/{total:.0f} GB" if total else f"{memory:.0f} GB",
            "" if celsius is None else f"{celsius:.0f} °C",
            "" if watts is None else f"{watts:.0f} W",
        ]
        end = Text(" ").join(Text(f"{text:>{size}}") for text, size in zip(texts, (4, 9, 5, 5), strict=True))
        if celsius is not None and celsius >= HOT_CELSIUS:
            end.highlight_regex(r"\d+ °C", "yellow")
        name = f"GPU {number} "
        line = lines[number % rows].append("   " if number >= rows else "").append(name, style="dim")
        bar_width = max(3, cell_width - len(name) - end.cell_len - 1)
        line.append(Text(" " * bar_width) if percent is None else bar(percent / 100, bar_width))
        line.append(" ").append(end)
    return lines


def host_lines(snapshot: Mapping[str, Any], latest: Mapping[str, Any]) -> list[Text]:
    """Return the line about the host's processor and memory, and about the disk of the checkpoints."""
    parts = []
    if latest.get("cpu_percent") is not None:
        parts.append(Text.assemble(("CPU ", "dim"), f"{latest['cpu_percent']:.0f}%"))
    if latest.get("ram_gb") is not None:
        total = f" of {latest['ram_total_gb']:.0f}" if latest.get("ram_total_gb") else ""
        parts.append(Text.assemble(("RAM ", "dim"), f"{latest['ram_gb']:.0f}{total} GB"))
    free, size = snapshot["disk_free_bytes"], snapshot["checkpoint_bytes"]
    room = int(free // size) if size else None
    text = f"{bytes_text(free)} free" + (f", room for {room:,} checkpoints" if room is not None else "")
    parts.append(Text.assemble(("disk ", "dim"), (text, "red" if room is not None and room < 3 else "")))
    return [Text("   ").join(parts)]
