"""The hooks of the documentation site (mkdocs.yml)."""

import re
from itertools import groupby
from pathlib import Path

from steadygpt.base.options import help_of
from steadygpt.config import FIELDS

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/RESULTS.md"
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)]+)\)")


def on_files(files, config, **_):
    """Add benchmarks/RESULTS.md to the pages of docs/."""
    file_class = type(next(iter(files)))  # of mkdocs, which setup.sh does not install
    files.append(file_class.generated(config, RESULTS.name, abs_src_path=str(RESULTS)))
    return files


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Add the options to their page, and point links to files outside docs/ to the repository.

    Without a repo_url in mkdocs.yml, only their text stays.
    """
    if page.file.src_uri == "options.md":
        markdown += lists_of_options()
    if page.file.src_uri == RESULTS.name:  # whose links start from benchmarks/
        markdown = markdown.replace("](../docs/", "](")
        markdown = re.sub(r"\]\((?=\w+\.toml\))", "](../benchmarks/", markdown)
    markdown = markdown.replace("](../benchmarks/RESULTS.md", "](RESULTS.md")
    return OUTSIDE.sub(rf"[\1]({config.repo_url}/blob/main/\2)" if config.repo_url else r"\1", markdown)


def lists_of_options() -> str:
    """Return the options of train.py as --help shows them: for each group, a heading and their lines."""
    lists = ""
    for group, fields in groupby(FIELDS.items(), key=lambda item: item[1].metadata["group"]):
        lists += f"\n## {group.capitalize()}\n\n"
        for name, field in fields:
            text = help_of(field).replace("*", "\\*")
            lists += f"- `--{name}`: {text}\n"
    return lists
