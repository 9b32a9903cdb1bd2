"""docs/walkthrough.md quotes what docs/walkthrough.py prints, and names functions that exist."""

import importlib
import re
import runpy
from operator import attrgetter

from conftest import REPO
from test_imports import FILES

PAGE = (REPO / "docs/walkthrough.md").read_text()
FILE_NAMES = ("pt", "py", "json", "jsonl", "md", "tmp")  # `latest.pt` is no attribute of a module


def test_the_page_quotes_the_output_of_the_script(capsys):
    runpy.run_path(str(REPO / "docs/walkthrough.py"))["main"]()
    quoted = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "\n".join(quoted) == capsys.readouterr().out


def test_the_functions_that_the_page_names_exist():
    names = [name for name in re.findall(r"`(\w+(?:\.\w+)+)`", PAGE) if not name.endswith(FILE_NAMES)]
    assert len(names) > 30
    for name in names:
        parts = name.split(".")
        split = 2 if parts[0] == "prepare" else 1  # where two files have the same name, the page also names the folder
        [module] = [module for module in FILES if f".{module}".endswith(f".{'.'.join(parts[:split])}")]
        attrgetter(".".join(parts[split:]))(importlib.import_module(module))  # raises AttributeError
