"""Statements of the documentation that the code or another page contradicts easily."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import options_page
from conftest import REPO
from record import TEST

from steadygpt.checkpoint.files import FORMAT_VERSION


def text(page: str) -> str:
    return (REPO / page).read_text()


def test_checkpoint_format_is_the_one_that_is_written():
    assert f"| `format_version` | {FORMAT_VERSION};" in text("docs/checkpoints.md")


def ratios(page: str) -> list[str]:
    """Return the ratios to nanoGPT in the tables of training and generation."""
    rows = re.findall(r"^\|.*\b(?:bf16|fp32)\b.*\|$", text(page), re.MULTILINE)
    cells = [row.split("|")[-2].strip() for row in rows]
    return [cell for cell in cells if re.match(r"(equal: )?\d", cell)]


def test_ratios_have_their_range_and_are_those_of_the_results():
    results = text("benchmarks/RESULTS.md")
    found = ratios("docs/speed.md")
    assert len(found) == 12
    for ratio in found:
        median, low, high = map(float, re.fullmatch(r"(?:equal: )?([\d.]+) \(([\d.]+) to ([\d.]+)\)", ratio).groups())
        assert f"| {median:.2f} ({low:.2f} to {high:.2f}) |" in results
        assert ratio.startswith("equal: ") == (low <= 1 <= high), ratio


def counts(results: str) -> Counter:
    """Return outcome -> number of tests, as a text such as "3 passed, 1 skipped" says."""
    return Counter({outcome: int(count) for count, outcome in re.findall(r"(\d+) (passed|skipped|failed)", results)})


def test_the_header_of_the_fault_storm_is_the_sum_of_its_rows():
    lines = text("docs/RELIABILITY.md").splitlines()
    [header] = [line for line in lines if line.startswith("Last complete run: ")]
    rows = [line.split("|")[-2] for line in lines if line.startswith("|") and ".py::" in line]
    totals: Counter = sum(map(counts, rows), Counter())
    assert counts(header) == totals


def names_in(paths: Iterable[Path]) -> set[str]:
    names = ((path, name) for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return {f"{path.name}::{name}" for path, name in names}


def test_the_table_of_faults_names_every_test_of_the_folder_and_none_that_does_not_exist():
    tests, named = REPO / "tests", set(TEST.findall(text("docs/RELIABILITY.md")))
    assert names_in(tests.glob("faults/test_*.py")) <= named <= names_in(tests.rglob("test_*.py"))


def test_the_address_of_the_repository_is_the_same_everywhere():
    [address] = re.findall(r"^repo_url: (\S+)$", text("mkdocs.yml"), re.MULTILINE)
    pages = ["README.md", "pyproject.toml", "docs/index.md", "docs/install.md"]
    for page in pages:
        assert set(re.findall(r"https://github\.com/[\w.-]+/steadygpt", text(page))) == {address}, page


def test_the_page_of_options_has_those_of_today():
    assert options_page.with_tables(text("docs/options.md")) == text("docs/options.md"), (
        "python -m scripts.options_page"
    )
