"""SVG pictures that follow the reader's light or dark colour scheme, for the scripts that draw docs/*.svg."""

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = {  # name -> in light mode, in dark mode; scripts draw in light mode, and all values differ
    "ink": ("#1f2329", "#e6edf3"),
    "dim": ("#656d76", "#8d96a0"),
    "line": ("#d1d5da", "#3d444d"),
    "blue": ("#0b5cad", "#58a6ff"),
    "pale": ("#a8c7ea", "#234c7d"),
    "orange": ("#c2570c", "#ffa657"),
    "sand": ("#f3c9a0", "#6e4318"),
    "green": ("#1a7f37", "#4ac26b"),
    "red": ("#cf222e", "#ff7b72"),
    "grey": ("#8c959f", "#768390"),
}
INK, DIM, LINE, BLUE, PALE, ORANGE, SAND, GREEN, RED, GREY = (light for light, _ in COLOURS.values())


def css() -> str:
    """Return a style sheet with a variable for each colour."""
    light = "".join(f"--{name}:{colour};" for name, (colour, _) in COLOURS.items())
    dark = "".join(f"--{name}:{colour};" for name, (_, colour) in COLOURS.items())
    return f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"


def set_style(size: float = 12) -> None:
    """Set matplotlib's colours and font size, in points."""
    from matplotlib import pyplot

    pyplot.rcParams.update({
        "font.size": size, "axes.titlesize": size, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GREY,
        "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": LINE,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "axes.titlelocation": "left",
        "axes.grid": True, "axes.axisbelow": True, "svg.fonttype": "none", "svg.hashsalt": "steadygpt",
    })  # fmt: skip


def save(figure: "Figure", file: Path) -> None:
    """Write a figure with a transparent background. SVG follows the colour scheme; other formats are in light mode."""
    if file.suffix != ".svg":
        figure.savefig(file, dpi=120)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", f"font-family: {FONT}", svg)
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(f": {light}", f": var(--{name}, {light})")
    svg = re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + css(), svg, count=1)
    file.write_text(re.sub(r" +$", "", svg, flags=re.MULTILINE))
