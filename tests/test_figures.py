"""Figures of ours in the pages: all are in benchmarks/results.toml, and as they are there."""

import re

import figures
import pytest
from conftest import REPO

RESULTS = figures.read()
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", figures.RESULTS]
PAGES += [f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md")) if path.name != "options.md"]
# What was measured: speeds, durations, sizes, shares, factors, ranges, and losses or ratios such as 1.27.
NUMBER = r"(?<![\w.-])[-+]?\d[\d,]*(?:\.\d+)?"
UNITS = r"(?:tokens|examples|steps|MB|GB)/s|TFLOP/s|TB per day|(?:ms|s|min|h)\b|(?:second|minute|hour)s?\b|[kMGT]B\b|%|times\b"
MEASURED = re.compile(rf"{NUMBER}(?: [kMG])?[ -]?(?:{UNITS})|{NUMBER} \({NUMBER} to {NUMBER}\)|(?<![\w.-])\d\.\d\d+\b(?! M\b)")
NAMES = "torch|PyTorch|Python|python|CUDA|cuDNN|triton|transformers|wandb|lm-evaluation-harness|Llama"
VERSION = rf"\b(?:{NAMES})[`@ ]*(?:[a-z]+ of )?[\d.]+\d(?: to [\d.]+\d| or later)?"


def prose(text: str) -> str:
    """Return the text of a page without code, addresses, and versions of software."""
    text = re.sub(VERSION, "", text)
    text = re.sub(r"^```.*?^```|^ {4}.*?$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)|^\[[^]]+\]: .*$|<[^>]*>", "", text, flags=re.MULTILINE)


def unknown_figures(results: dict, page: str, text: str) -> list[str]:
    return MEASURED.findall(prose(figures.without_figures(results, page, text)))


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_of_a_page_are_those_of_the_results(page):
    text = (REPO / page).read_text()
    assert figures.with_figures(RESULTS, page, text) == text, "python -m scripts.figures"
    assert not unknown_figures(RESULTS, page, text), "not in benchmarks/results.toml"
