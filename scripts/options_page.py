"""Write the lists of docs/options.md from the options of train.py: python -m scripts.options_page"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from steadygpt.base.options import kind_of
from steadygpt.config import FIELDS

PAGE = Path(__file__).resolve().parent.parent / "docs/options.md"
MARK = "<!-- written by scripts/options_page.py -->\n"


def with_lists(page: str) -> str:
    """Return the text of the page with its lists replaced by the present ones."""
    return page.partition(MARK)[0] + MARK + "\n".join(lists()) + "\n"


def lists() -> Iterator[str]:
    """Yield the lines of a list for each group of options."""
    for group, fields in groupby(FIELDS.items(), key=lambda item: item[1].metadata["group"]):
        yield f"\n## {group.capitalize()}\n"
        for name, field in fields:
            default = str(field.default)
            if kind_of(field) is bool:
                default = "on" if field.default else "off"
            text = field.metadata["text"].replace("*", "\\*")
            on_resume = field.metadata["on_resume"]
            if on_resume != "free":
                text += f" (*{on_resume}*)"
            yield f"- `{f'--{name} {default}'.strip()}`: {text}"


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
