"""The table of docs/RELIABILITY.md against the tests in this folder."""

import re
from pathlib import Path

from record import TABLE, TEST


def test_the_table_names_exactly_the_tests_of_this_folder():
    tests = {
        f"{path.name}::{name}"
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        if path != Path(__file__)
    }
    assert set(TEST.findall(TABLE.read_text())) == tests
