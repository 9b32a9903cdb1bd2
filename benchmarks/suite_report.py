"""The report of benchmarks.gpu_suite: rows and targets as JSON and as Markdown."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import number_text
from steadygpt.durable import replace_file

PARTS = ("right", "fast", "fits", "trace")


@dataclass(frozen=True)
class Target:
    """A figure that a row should reach on a GPU whose name contains `gpu`; from the first of `keys` that has it."""

    what: str
    keys: tuple[str, ...]
    figure: str
    bound: float
    at_most: bool = False
    gpu: str = ""


ALONE, BESIDE_NANOGPT = ("fast/124m",), ("fast/124m_nanogpt", "fast/124m_half")
TARGETS = (
    Target("124 M on one H100, at least 500,000 tokens/s", ALONE, "SteadyGPT", 500_000, gpu="H100"),
    Target("124 M on one H200, at least 550,000 tokens/s", ALONE, "SteadyGPT", 550_000, gpu="H200"),
    Target("124 M, at least 1.2 x nanoGPT compiled", BESIDE_NANOGPT, "ratio", 1.2),
    Target("124 M, at least 0.55 of the measured GEMM", ALONE, "share of a GEMM", 0.55),
    Target("1.4 B, at least 0.50 of the measured GEMM", ("fast/1.4b",), "share of a GEMM", 0.5),
    Target("HellaSwag, at least 25 x build-nanogpt's loop", ("fast/hellaswag",), "ratio", 25),
    Target("generation, at least 0.9 x nanoGPT", ("fast/generation",), "ratio", 0.9),
    Target("a checkpoint costs at most one step", ("fast/checkpoint",), "cost", 1, at_most=True),
)


def figure_text(figure: dict) -> str:
    spread = f" ({number_text(figure['low'])} to {number_text(figure['high'])})"
    return f"{number_text(figure['median'])} {figure['unit']}{spread * (figure['low'] != figure['high'])}"


def row_text(row: dict) -> str:
    """Return a row's figures, or why it has none, in one line."""
    named = row.get("figures", {}).items()
    shown = [f"{name} {figure_text(f)}" if name in ("SteadyGPT", "nanoGPT", "build-nanogpt") else figure_text(f)
             for name, f in named]  # fmt: skip
    parts = [] if row["status"] == "ok" else [f"{row['status']}: {row['reason']}"]
    return "; ".join([*parts, *shown, *row.get("notes", [])])


def target_rows(content: dict) -> Iterator[tuple[str, str, str]]:
    """Yield each target, what was measured and whether that reaches it."""
    for target in TARGETS:
        rows = [content["rows"].get(key, {}) for key in target.keys]
        figure = next((row["figures"][target.figure] for row in rows if target.figure in row.get("figures", {})), None)
        if target.gpu not in content["machine"]["device"]:
            yield target.what, "", "a different device"
        elif content["machine"]["quick"] or figure is None:
            yield target.what, "", "not measured"
        else:
            reached = figure["median"] <= target.bound if target.at_most else figure["median"] >= target.bound
            yield target.what, figure_text(figure), "reached" if reached else "missed"


def markdown(content: dict) -> str:
    """Return the section for RESULTS.md."""
    machine, rows = content["machine"], content["rows"]
    commits, dates = ({row[key]: None for row in rows.values() if row.get(key)} for key in ("commit", "date"))
    lines = [
        f"### {machine['device']}" + " (--quick: tiny shapes, no figures to publish)" * machine["quick"],
        "",
        f"Driver {machine['driver']}, {machine['software']}; commit {', '.join(commits)}; {', '.join(dates)}.",
        "A figure is the median of the rounds, with the smallest and the largest in parentheses.",
        "",
        "| part | row | result | s |",
        "|---|---|---|---|",
    ]
    for key, row in rows.items():
        cells = key.partition("/")[0], row["title"], row_text(row), f"{row.get('seconds', 0):.0f}"
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    for part in PARTS:
        if not any(key.startswith(f"{part}/") for key in rows):
            lines.append(f"| {part} | all rows | not run: `--parts {part}` was not called | 0 |")
    lines += ["", "| target | measured | |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in target_rows(content)]
    for row in rows.values():
        if row.get("text"):
            lines += ["", f"{row['title'][0].upper()}{row['title'][1:]}:", "", "```", row["text"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


class Report:
    """gpu_suite.json and gpu_suite.md, rewritten after every row."""

    def __init__(self, out: Path, machine: dict):
        self.json, self.markdown = out / "gpu_suite.json", out / "gpu_suite.md"
        self.content = {"machine": machine, "rows": {}}
        if self.json.exists():
            self.content = json.loads(self.json.read_text())
            for key, value in machine.items():
                if (found := self.content["machine"].get(key)) != value:
                    sys.exit(
                        f"error: {self.json} has figures with {key} {found}; here it is {value}. Try another --out."
                    )

    def add(self, key: str, title: str, result: dict) -> None:
        """Add or replace a row, and rewrite both files."""
        self.content["rows"][key] = {**result, "title": title}
        order = {part: number for number, part in enumerate(PARTS)}
        rows = sorted(self.content["rows"].items(), key=lambda item: order[item[0].partition("/")[0]])
        self.content |= {"rows": dict(rows)}
        self.content["targets"] = [list(cells) for cells in target_rows(self.content)]
        for path, text in ((self.json, json.dumps(self.content, indent=1)), (self.markdown, markdown(self.content))):
            replace_file(path, lambda file, text=text: file.write(text.encode()))

    def failed(self, key: str) -> dict | None:
        """Return the result of a row that an earlier call ran without success."""
        row = self.content["rows"].get(key, {})
        return row if row.get("status") == "failed" else None

    def has(self, key: str, figure: str = "") -> bool:
        row = self.content["rows"].get(key, {})
        return figure in row.get("figures", {}) if figure else row.get("status") == "ok"
