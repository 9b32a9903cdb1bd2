"""The hooks of the documentation site (mkdocs.yml)."""

import re

OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)]+)\)")
INLINE_CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")  # unlike a block, it follows no empty span
WORD = re.compile(r"(?<=[\s>])[^\s<>]{1,32}(?=[\s<])")  # a longer word may be wider than a phone


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """Point links to files outside docs/ to the repository; without a repo_url in mkdocs.yml, keep only their text."""
    return OUTSIDE.sub(rf"[\1]({config.repo_url}/blob/main/\2)" if config.repo_url else r"\1", markdown)


def on_page_content(html: str, **_) -> str:
    """Mark the words of inline code, which docs/site.css keeps on one line."""
    return INLINE_CODE.sub(lambda code: WORD.sub(r'<span class="word">\g<0></span>', code[0]), html)
