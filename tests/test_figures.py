"""Figures of ours in the pages: all are in benchmarks/results.toml, and the same there."""

import copy
import re

import figures
import pytest
from conftest import REPO

RESULTS = figures.read()
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", figures.RESULTS]
PAGES += [f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))]

# What was measured: speeds, durations, sizes, shares, factors, ranges, and losses or ratios such as 1.27.
NUMBER = r"(?<![\w.-])[-+]?\d[\d,]*(?:\.\d+)?"
SPEEDS = r"(?:tokens|examples|steps|MB|GB)/s|TFLOP/s|TB per day"
UNITS = rf"{SPEEDS}|(?:ms|s|min|h)\b|(?:second|minute|hour)s?\b|[kMGT]B\b|%|times\b"
DECIMAL = r"(?<![\w.-])\d\.\d\d+\b(?! M\b)"  # not of parameters
MEASURED = re.compile(rf"{NUMBER}(?: [kMG])?[ -]?(?:{UNITS})|{NUMBER} \({NUMBER} to {NUMBER}\)|{DECIMAL}")
SOFTWARE = "version|torch|PyTorch|Python|python|CUDA|cuDNN|triton|transformers|wandb|lm-evaluation-harness|Llama"
VERSION = rf"\b(?:{SOFTWARE})[`@ ]*(?:[a-z]+ of )?[\d.]+\d(?: to [\d.]+\d| or later)?"


def text_of(page: str) -> str:
    return (REPO / page).read_text()


def prose(text: str) -> str:
    """Return the text of a page without code, addresses, and versions of software."""
    text = re.sub(VERSION, "", text)
    text = re.sub(r"^```.*?^```|^ {4}[^\n]*$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)|^\[[^]]+\]: .*$|<[^>]*>", "", text, flags=re.MULTILINE)


def allowed(page: str) -> list[str]:
    """Return the texts of a page that look like figures of ours but are not."""
    return [text for pages in RESULTS["allowed"].values() for text in pages.get(page, ())]


def allowed_pattern(text: str) -> re.Pattern:
    """Return what finds a text, or with "TABLE ..." the table with this head."""
    head = text.removeprefix("TABLE ")
    if head == text:
        return figures.pattern(text)
    return re.compile(rf"^{re.escape(head)}.*\n(?:\|.*\n)+", re.MULTILINE)


def unknown_figures(page: str, text: str) -> list[str]:
    """Return the figures in the text of a page outside its tables of results, its fragments, and what is allowed."""
    text = figures.BLOCK.sub("", text)
    for fragment in RESULTS["pages"].get(page, ()):
        text = figures.pattern(fragment).sub("", text)
    for part in allowed(page):
        text = allowed_pattern(part).sub("", text)
    return MEASURED.findall(prose(text))


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_of_a_page_are_those_of_the_results(page):
    text = text_of(page)
    assert figures.with_figures(RESULTS, page, text) == text, "run python -m docs.figures"
    assert not unknown_figures(page, text), "neither in [pages] nor in [allowed] of benchmarks/results.toml"


@pytest.mark.parametrize("page", sorted(RESULTS["pages"]))
def test_a_figure_that_changes_in_a_page_is_seen_and_put_right(page):
    text = text_of(page)
    for fragment in RESULTS["pages"][page]:
        [found] = figures.pattern(fragment).finditer(text)
        for at in range(1, len(found.groups()) + 1):
            wrong = text[: found.start(at)] + "0.12345" + text[found.end(at) :]
            assert figures.with_figures(RESULTS, page, wrong) == text, fragment


def test_a_figure_that_changes_in_the_results_changes_all_pages_that_have_it():
    results = copy.deepcopy(RESULTS)
    results["train_cpu"]["rows"]["gpt2_bf16"][3] = "1.99 (1.98 to 2.00)"
    results["recipe_1m"]["rows"]["gpt2"][2] = "0.19"
    pages = {page for page in PAGES if figures.with_figures(results, page, text_of(page)) != text_of(page)}
    assert pages == {figures.RESULTS, "README.md", "docs/RECIPE.md"}


@pytest.mark.parametrize(
    "sentence",
    [
        "It trains at 812,345 tokens/s.", "A save takes 1.4 s.", "It needs 3 GB of memory.", "It is 4.2 times as fast.",
        "The loss ends at 1.29.", "The ratio is 0.9 (0.8 to 1.1).", "It costs 3 % of a step.", "It took 8 min 45 s.",
    ],
)  # fmt: skip
def test_a_figure_that_the_results_lack_is_seen(sentence):
    assert not unknown_figures("docs/walkthrough.md", "With torch 2.13 or Python 3.11 to 3.13, a model of 0.84 M.\n")
    assert unknown_figures("docs/walkthrough.md", f"A model.\n\n{sentence}\n")


def test_no_fragment_has_a_figure_of_its_own_and_nothing_is_allowed_without_need():
    own = [
        part for parts in RESULTS["pages"].values() for part in parts if MEASURED.search(figures.PLACE.sub("", part))
    ]
    assert not own
    for page in {page for pages in RESULTS["allowed"].values() for page in pages}:
        missing = [part for part in allowed(page) if not allowed_pattern(part).search(text_of(page))]
        assert not missing, page


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in ("machines", "pages", "allowed")])
def test_a_measurement_says_where_it_comes_from_and_its_figures_lie_within_their_ranges(name):
    found = RESULTS[name]
    assert found["machine"] and found["date"] and found["command"]
    assert len(found["head"]) == 1 + len(found["columns"])
    for row in found["rows"].values():
        assert len(row) == len(found["head"]), row
        for value, low, high in re.findall(r"([-\d.,]+)[^(\d]*\(([-\d.,]+) to ([-\d.,]+)\)", " ".join(row[1:])):
            assert float(low.replace(",", "")) <= float(value.replace(",", "")) <= float(high.replace(",", "")), row
        ratio = dict(zip(found["columns"], row[1:], strict=True)).get("ratio", "")
        if given := re.search(r"\((\S+) to (\S+)\)", ratio):
            assert ratio.startswith("equal: ") == (float(given[1]) <= 1 <= float(given[2])), ratio


CORE = [f"{name}.py" for name in ("train", "evaluation", "model", "dataloader", "optim")]


def lines_of(*patterns: str, blank: bool = True) -> int:
    """Return the lines of files, with or without the blank ones."""
    total = 0
    for pattern in patterns:
        files = [*REPO.glob(pattern)]
        assert files, pattern
        for file in files:
            total += sum(1 for line in file.read_text().splitlines() if blank or line.strip())
    return total


def test_readme_has_the_lines_of_today():
    """Within a tenth."""
    readme = text_of("README.md")
    core = dict(re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", readme, re.MULTILINE))
    assert {*core} == {*CORE}
    for name, lines in core.items():
        assert int(lines) == pytest.approx(lines_of(name), rel=0.1), name
    commands = lines_of("*.py", "*.sh", "scripts/*.py", "scripts/slurm.sh", "steadygpt/**/*.*[yl]")
    expected = [lines_of(*CORE), commands, lines_of("tests/**/*.py")]
    sentence = r"five files, has ([\d,]+) lines; .* there are ([\d,]+)\. Tests have ([\d,]+) more"
    [shown] = re.findall(sentence, " ".join(readme.split()))
    assert [int(number.replace(",", "")) for number in shown] == pytest.approx(expected, rel=0.1)
    [package] = re.findall(r"^\| `steadygpt/` \| ([\d,]+) \|", readme, re.MULTILINE)
    assert int(package.replace(",", "")) == pytest.approx(lines_of("steadygpt/**/*.py"), rel=0.1)


def test_the_comparison_has_the_lines_of_today():
    """Within a tenth."""
    every = ("*.py", "steadygpt/**/*.py", "scripts/*.py")
    [shown] = re.findall(r"([\d,]+) in the core \(five files\), ([\d,]+) in all", text_of("docs/comparison.md"))
    for number, patterns in zip(shown, (CORE, every), strict=True):
        assert int(number.replace(",", "")) == pytest.approx(lines_of(*patterns, blank=False), rel=0.1)
