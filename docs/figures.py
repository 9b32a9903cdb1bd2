"""Put the figures of benchmarks/results.toml into the pages: python -m docs.figures

A measurement of the file has rows of figures, such as "541 (503 to 684)". The pages show them in two ways:

    <!-- results: train_cpu -->            its table, and where it comes from, up to <!-- end -->
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
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = r"\s+(?:> )?"  # between words: a line may end there, also in a quotation
PLACE = re.compile(r"\{([\w.-]+?)([+]|~\d)?\}")


def read() -> dict:
    """Return the content of the file of results."""
    results = tomllib.loads((REPO / "benchmarks/results.toml").read_text())
    for found in results.values():
        for row in found.get("rows", {}).values():  # a cell may name another one
            row[:] = [PLACE.sub(lambda place: figure(results, *place.groups()), cell) for cell in row]
    return results


def figure(results: dict, name: str, form: str | None) -> str:
    """Return the figure MEASUREMENT.ROW.COLUMN as a page shows it: its value, the range with "+", or "~3" digits."""
    measurement, row, column = name.split(".")
    found = results[measurement]
    cell = found["rows"][row][1 + found["columns"].index(column)]
    parts = FIGURE.search(cell)
    assert parts, f"{name} is {cell!r}, which is no figure"
    if not form:
        return parts["value"]
    if form == "+":
        return parts["value"] + (parts["range"] or "")
    rounded = float(f"{float(parts['value'].replace(',', '')):.{form[1:]}g}")
    return f"{rounded:,}".removesuffix(".0")


def table(results: dict, name: str) -> str:
    """Return the table of a measurement, the command, and where it ran."""
    found = results[name]
    if name == "machines":
        rows = [["name", "machine"], ["---", "---"], *found.items()]
        return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows).replace(" --- ", "---") + "\n"
    rows = [found["head"], ["---"] * len(found["head"]), *found["rows"].values()]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows).replace(" --- ", "---")
    commit = f", {found['commit']}" if found["commit"] else ""
    command = f": `{found['command']}`" if found["command"].startswith("python") else ""
    return f"\n{text}\n{found['machine']}, {found['date']}{commit}{command}\n\n"


def pattern(fragment: str) -> re.Pattern:
    """Return what finds a fragment in a page, at any line breaks, with any number in its places, which are groups."""
    words = [WORDS.join(map(re.escape, re.split(r"\s+", part))) for part in re.split(PLACE.pattern, fragment)[::3]]
    return re.compile(rf"({NUMBER}(?:{RANGE.replace(' ', WORDS)})?)".join(words))


def with_figures(results: dict, page: str, text: str) -> str:
    """Return the text of a page with the figures of the results in its tables and fragments.

    Raises:
        LookupError: The page does not have a fragment once.
    """
    text = BLOCK.sub(lambda block: block[1] + table(results, block[2]) + block[3], text)
    for fragment in results["pages"].get(page, ()):
        found = list(pattern(fragment).finditer(text))
        if len(found) != 1:
            raise LookupError(f"{page}: found {len(found)} texts like {fragment!r}, expected one; see [pages]")
        places = list(enumerate(PLACE.findall(fragment), 1))
        for at, (name, form) in reversed(places):  # from the end, because a figure may change its length
            value = figure(results, name, form)
            if found[0][at].split() != value.split():  # a line break within a range stays
                text = text[: found[0].start(at)] + value + text[found[0].end(at) :]
    return text


if __name__ == "__main__":
    results = read()
    for page in (RESULTS, *results["pages"]):
        path = REPO / page
        path.write_text(with_figures(results, page, path.read_text()))
