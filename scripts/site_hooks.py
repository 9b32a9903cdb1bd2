"""Hooks of the documentation site (mkdocs.yml): the table of options, and links to files outside docs/."""

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs does not look for modules there

from steadygpt.base.options import kind_of
from steadygpt.config import FIELDS

OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Fill in the table of options; let links to files outside docs/ lead to the repository."""
    if page.file.src_uri == "options.md":
        markdown = markdown.replace("<!-- options -->", "\n".join(option_tables()))
    return OUTSIDE.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)


def option_tables() -> Iterator[str]:
    """Yield the lines of a table for each group of train.py's options."""
    for group, fields in groupby(FIELDS.items(), key=lambda item: item[1].metadata["group"]):
        yield f"\n## {group.capitalize()}\n"
        yield "| option | default | | on resume |\n|---|---|---|---|"
        for name, field in fields:
            about = field.metadata
            default = ("on" if field.default else "off") if kind_of(field) is bool else f"{field.default}"
            text = about["text"].replace("|", "\\|")
            yield f"| `--{name}` | {f'`{default}`' if default else ''} | {text} | {about['on_resume']} |"
