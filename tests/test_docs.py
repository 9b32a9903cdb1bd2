"""Statements of the documentation that the code or another page contradicts easily."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import record
import site_hooks
from conftest import REPO
from mutations import MUTATIONS
from test_refused import CHECKPOINTS, FLAGS, SHARDS

from steadygpt import __version__
from steadygpt.base.foreign import CONTENTS
from steadygpt.checkpoint.files import FORMAT_VERSION, CheckpointContent, TrainState
from steadygpt.config import FIELDS


def text(page: str) -> str:
    return (REPO / page).read_text()


def names_in(paths: Iterable[Path]) -> set[str]:
    names = ((path, name) for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return {f"{path.name}::{name}" for path, name in names}


def test_the_rows_of_faults_have_every_test_of_the_folder_and_none_that_does_not_exist():
    tests, named = REPO / "tests", {test for row in record.ROWS.values() for test in row}
    assert names_in(tests.glob("faults/test_*.py")) <= named <= names_in(tests.rglob("test_*.py"))


def test_the_page_of_reliability_counts_the_faults_and_the_mutations():
    page = text("docs/RELIABILITY.md")
    assert f" has {len(record.ROWS)} faults, " in page
    assert f" in {len(MUTATIONS)} places, " in page


def test_each_fault_has_its_number_and_its_tests():
    assert [*record.ROWS] == [str(row) for row in range(1, len(record.ROWS) + 1)]
    assert all(record.ROWS.values())


def test_the_results_of_the_storm_get_into_the_rows_whose_tests_all_ran(monkeypatch):
    page = '[1]\nfault = "a"\nresult = "no"\n\n[2]\nresult = "1 passed"\n'
    rows = {"1": ["t.py::test_b", "t.py::test_c"], "2": ["t.py::test_d"]}
    monkeypatch.setattr(record, "cases", Counter({"t.py::test_b": 2, "t.py::test_c": 1, "t.py::test_d": 2}))
    monkeypatch.setattr(record, "outcomes", {"t.py::test_b": Counter(passed=2), "t.py::test_d": Counter(passed=1)})
    monkeypatch.setattr(record, "counts", {"t.py::test_b": Counter(kills=1234), "t.py::test_c": Counter()})
    assert record.with_results(page, rows) == (page, False)  # neither test_c nor the second case of test_d ran

    record.outcomes["t.py::test_c"] = Counter(failed=1)
    first = page.replace("no", "1 failed, 2 passed (1,234 kills){}")
    assert record.with_results(page, rows) == (first.format(" *"), False)
    record.outcomes["t.py::test_d"] = Counter(passed=2)
    record.counts["t.py::test_d"] = Counter()
    assert record.with_results(page, rows) == (first.format("").replace("1 passed", "2 passed"), True)

    before = "a\nLast complete run: 2026-01-01, old.\nb\n"
    assert re.fullmatch(
        r"a\nLast complete run: .*: 1 failed, 4 passed in \d+ minutes\.\nb\n", record.with_last_run(before)
    )


def test_the_keys_of_a_checkpoint_that_its_page_names_are_there():
    named = re.findall(r"content\[\"(\w+)\"\]", text("docs/checkpoints.md"))
    assert {*named} > {"model"}
    assert {*named} <= {*get_type_hints(CheckpointContent), *get_type_hints(TrainState)}


def test_format_version_and_address_are_the_same_everywhere():
    assert f"The `format_version` is {FORMAT_VERSION};" in text("docs/checkpoints.md")
    assert f"writes and reads format {FORMAT_VERSION}, " in text("CHANGELOG.md")
    assert f"\n## {__version__} (" in text("CHANGELOG.md")
    # The repository has no public address yet: then mkdocs.yml has no repo_url, and no page a link to one.
    addresses = {*re.findall(r"^repo_url: (\S+)$", text("mkdocs.yml"), re.MULTILINE)}
    for page in (
        "README.md",
        "mkdocs.yml",
        "pyproject.toml",
        "docs/index.md",
        "docs/install.md",
        "docs/quickstart.ipynb",
    ):
        assert {*re.findall(r"https://[\w.]+/[\w./-]+/steadygpt", text(page))} <= addresses, page
        assert "OWNER" not in text(page), page


def test_the_site_lists_every_option_with_its_default_and_what_a_resume_does():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="options.md"))
    shown = site_hooks.on_page_markdown(text("docs/options.md"), page, SimpleNamespace(repo_url=""))
    assert re.findall(r"^- `--(\w+)", shown, re.MULTILINE) == [*FIELDS]
    assert "\n- `--num_layers`: number of transformer blocks (default: 12, on resume: never)\n" in shown
    assert "share the embedding table with the head, as in GPT-2 (default: on, on resume: never)\n" in shown


def test_messages_that_the_page_of_troubleshooting_quotes_are_said():
    """In the parts on starts and resumes. One message is torchrun's, one a warning that test_repeats.py provokes."""
    parts = re.findall(r"^## (?:Starting|Stopping.*?)\n(.*?)(?=^## |\Z)", text("docs/troubleshooting.md"), re.M | re.S)
    quoted = {message for part in parts for message in re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)}
    said = "\n".join([*CONTENTS.values()] + [row[1] for row in (*FLAGS, *SHARDS, *CHECKPOINTS)])

    def is_said(message: str) -> bool:
        return bool(re.search(re.escape(message).replace(r"\.\.\.", ".*").replace("N", r"\S+"), said))

    assert {message for message in quoted if not is_said(message)} == {
        "SignalException",
        "repeated step N has loss ...",
    }


def test_links_out_of_the_site_lead_to_the_repository_or_are_text_while_it_has_no_address():
    link = "see [the step](../train.py#a), [a page](data.md)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    for url, shown in (
        ("", "see the step, [a page](data.md)"),
        ("https://x.org/r", "see [the step](https://x.org/r/blob/main/train.py#a), [a page](data.md)"),
    ):
        assert site_hooks.on_page_markdown(link, page, SimpleNamespace(repo_url=url)) == shown


def test_the_notebook_is_stored_with_the_outputs_of_its_commands():
    cells = json.loads(text("docs/quickstart.ipynb"))["cells"]
    last = {"exit status -9": "the kill", "bit for bit the same losses": "the resume", "class Queue:": "the sample"}
    shown = "".join(line for cell in cells for output in cell.get("outputs", []) for line in output.get("text", []))
    assert not [what for words, what in last.items() if words not in shown]
    assert not re.search(r"/(home|tmp|root|work)/|\\x1b|\r", shown)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page, and those that it names itself."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain} | set(
        re.findall(r'<a id="([^"]+)">', page)
    )


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md"]
    + [f"docs/{path.name}" for path in sorted((REPO / "docs").glob("*.md"))]
)  # fmt: skip
def test_links_of_a_page_lead_somewhere_on_github(page):
    """Also those that leave docs/, which mkdocs does not check."""
    links = re.findall(r"\]\(([^)\s]+)\)", text(page))
    for link in (link for link in links if not re.match(r"https?:", link)):
        target, _, anchor = link.partition("#")
        file = (REPO / page).parent / target if target else REPO / page
        assert file.exists(), link
        assert not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()), link
