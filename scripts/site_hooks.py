"""The hooks of the documentation site (mkdocs.yml)."""

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/RESULTS.md"
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)]+)\)")
INLINE_CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")  # unlike a block, it follows no empty span
WORD = re.compile(r"(?<=[\s>])[^\s<>]{1,32}(?=[\s<])")  # a longer word may be wider than a phone


def on_files(files, config, **_):
    """Add benchmarks/RESULTS.md to the pages of docs/."""
    file_class = type(next(iter(files)))  # of mkdocs, which setup.sh does not install
    files.append(file_class.generated(config, RESULTS.name, abs_src_path=str(RESULTS)))
    return files


def with_results_inside(markdown: str, name: str) -> str:
    """Return a page with its links to or from the page of results as those between pages of one folder."""
    if name == RESULTS.name:
        return re.sub(r"\]\((?=\w+\.toml\))", "](../benchmarks/", markdown.replace("](../docs/", "]("))
    return markdown.replace("](../benchmarks/RESULTS.md", "](RESULTS.md")


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Point links to files outside docs/ to the repository; without a repo_url in mkdocs.yml, keep only their text."""
    markdown = with_results_inside(markdown, page.file.src_uri)
    return OUTSIDE.sub(rf"[\1]({config.repo_url}/blob/main/\2)" if config.repo_url else r"\1", markdown)


def on_page_content(html: str, **_) -> str:
    """Mark the words of inline code, which docs/site.css keeps on one line."""
    return INLINE_CODE.sub(lambda code: WORD.sub(r'<span class="word">\g<0></span>', code[0]), html)
