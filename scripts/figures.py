"""Put the figures of benchmarks/results.toml into the pages: python -m scripts.figures

A measurement of the file has rows of figures, such as "541 (503 to 684)". The pages show them in two ways:

    <!-- results: train_cpu ratio -->      a table with these columns, or all of them, up to <!-- end -->
    trains at {train_cpu.gpt2_bf16.ours}   a fragment in [pages] of the file, which stands in the page with a number

A fragment takes the value without its range, {...+} with it, and {...~3} rounded to three digits. A
row may name figures of other rows in the same way.
"""

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/RESULTS.md"
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
RANGE = rf" \({NUMBER} to {NUMBER}\)"
FIGURE = re.compile(rf"(?<![\w.])(?P<value>{NUMBER})(?:[^()\d]*?(?P<range>{RANGE})|.*)")
BLOCK = re.compile(r"(<!-- results: (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = r"\s+(?:> )?"  # between words: a line may end there, also in a quotation
PLACE = re.compile(r"\{([\w.-]+?)([+]|~\d)?\}")


def read() -> dict:
    """Return the content of the file of results."""
    results = tomllib.loads((REPO / "benchmarks/results.toml").read_text())
    for found in results.values():
        for row in found.get("rows", {}).values():  # a cell may name another one
            row[:] = [PLACE.sub(lambda place: figure(results, place[1], place[2]), cell) for cell in row]
    return results


def figure(results: dict, name: str, form: str | None = None) -> str:
    """Return the figure MEASUREMENT.ROW.COLUMN as a page shows it: its value, the range with "+", or "~3" digits."""
    measurement, row, column = name.split(".")
    found = results[measurement]
    cell = found["rows"][row][1 + found["columns"].index(column)]
    parts = FIGURE.search(cell)
    assert parts, f"{name} is {cell!r}, which is no figure"
    if form == "+":
        return parts["value"] + (parts["range"] or "")
    if form:
        rounded = float(f"{float(parts['value'].replace(',', '')):.{form[1:]}g}")
        return f"{rounded:,}".removesuffix(".0")
    return parts["value"]


def table(results: dict, name: str, columns: list[str]) -> str:
    """Return the table of a measurement; with all columns, the command and where it ran follow."""
    if name == "machines":
        rows = [f"| {name} | {machine} |\n" for name, machine in results["machines"].items()]
        return f"\n| name | machine |\n|---|---|\n{''.join(rows)}\n"
    found = results[name]
    shown = [0, *(1 + found["columns"].index(column) for column in columns or found["columns"])]
    rows = [found["head"], ["---"] * len(found["head"]), *found["rows"].values()]
    lines = ["", *("| " + " | ".join(row[at] for at in shown) + " |" for row in rows), ""]
    if not columns:
        commit = f", {found['commit']}" if found["commit"] else ""
        command = f": `{found['command']}`" if found["command"].startswith("python") else ""
        lines += [f"{found['machine']}, {found['date']}{commit}{command}", ""]
    return "\n".join(lines).replace("| --- |", "|---|").replace("| --- ", "|---") + "\n"


def pattern(fragment: str) -> re.Pattern:
    """Return what finds a fragment in a page, at any line breaks, with any number in its places, which are groups."""
    words = [WORDS.join(map(re.escape, re.split(r"\s+", part))) for part in re.split(PLACE.pattern, fragment)[::3]]
    return re.compile(rf"({NUMBER}(?:{RANGE.replace(' ', WORDS)})?)".join(words))


def with_figures(results: dict, page: str, text: str) -> str:
    """Return the text of a page with the figures of the results in its tables and fragments.

    Raises:
        LookupError: The page does not have a fragment once.
    """
    text = BLOCK.sub(lambda block: block[1] + table(results, block[2], block[3].split()) + block[4], text)
    for fragment in results["pages"].get(page, ()):
        found = [*pattern(fragment).finditer(text)]
        if len(found) != 1:
            raise LookupError(f"{page}: found {len(found)} texts like {fragment!r}, expected one; see [pages]")
        for at, place in reversed([*enumerate(PLACE.findall(fragment), 1)]):
            value = figure(results, *place)
            if found[0][at].split() != value.split():
                text = text[: found[0].start(at)] + value + text[found[0].end(at) :]
    return text


def without_figures(results: dict, page: str, text: str) -> str:
    """Return the text of a page without its tables of results, its fragments, and what is allowed."""
    text = BLOCK.sub("", text)
    for found in (*map(pattern, results["pages"].get(page, ())), *map(allowed_pattern, allowed(results, page))):
        text = found.sub("", text)
    return text


def allowed_pattern(text: str) -> re.Pattern:
    """Return what finds a text, or with "TABLE ..." the table with this head."""
    head = text.removeprefix("TABLE ")
    return pattern(text) if head == text else re.compile(rf"^{re.escape(head)}.*\n(?:\|.*\n)+", re.MULTILINE)


def allowed(results: dict, page: str) -> list[str]:
    """Return the texts of a page that look like figures of ours but are not."""
    return [text for pages in results["allowed"].values() for text in pages.get(page, ())]


if __name__ == "__main__":
    results = read()
    for page in (RESULTS, *results["pages"]):
        path = REPO / page
        path.write_text(with_figures(results, page, path.read_text()))
