"""Write the lists of docs/options.md from the options of train.py: python -m docs.options_page"""

from itertools import groupby
from pathlib import Path

from steadygpt.base.options import kind_of
from steadygpt.config import FIELDS

PAGE = Path(__file__).with_name("options.md")
MARK = "<!-- written by docs/options_page.py -->\n"


def with_lists(page: str) -> str:
    """Return the text of the page with its lists replaced: for each group of options, a heading and their lines."""
    page = page.partition(MARK)[0] + MARK
    for group, fields in groupby(FIELDS.items(), key=lambda item: item[1].metadata["group"]):
        page += f"\n## {group.capitalize()}\n\n"
        for name, field in fields:
            default = str(field.default)
            if kind_of(field) is bool:
                default = "on" if field.default else "off"
            text = field.metadata["text"].replace("*", "\\*")
            on_resume = field.metadata["on_resume"]
            if on_resume != "free":
                text += f" (*{on_resume}*)"
            page += f"- `{f'--{name} {default}'.strip()}`: {text}\n"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
