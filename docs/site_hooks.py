"""The hooks of the documentation site (mkdocs.yml)."""

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/RESULTS.md"
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)]+)\)")


def on_files(files, config, **_):
    """Add benchmarks/RESULTS.md to the pages of docs/."""
    file_class = type(next(iter(files)))  # of mkdocs, which setup.sh does not install
    files.append(file_class.generated(config, RESULTS.name, abs_src_path=str(RESULTS)))
    return files


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Point links to files outside docs/ to the repository; without a repo_url in mkdocs.yml, keep only their text."""
    if page.file.src_uri == RESULTS.name:  # whose links start from benchmarks/
        markdown = markdown.replace("](../docs/", "](")
        markdown = re.sub(r"\]\((?=\w+\.toml\))", "](../benchmarks/", markdown)
    markdown = markdown.replace("](../benchmarks/RESULTS.md", "](RESULTS.md")
    return OUTSIDE.sub(rf"[\1]({config.repo_url}/blob/main/\2)" if config.repo_url else r"\1", markdown)
