"""The hook of the documentation site (mkdocs.yml)."""

import re

OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Let links to files outside docs/ lead to the repository."""
    return OUTSIDE.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)
