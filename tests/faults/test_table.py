"""The table of docs/RELIABILITY.md against the tests."""

import re
from collections.abc import Iterable
from pathlib import Path

from record import TABLE, TEST

HERE = Path(__file__).parent


def names_in(paths: Iterable[Path]) -> set[str]:
    return {
        f"{path.name}::{name}"
        for path in paths
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        if path != Path(__file__)
    }


def test_the_table_names_every_test_of_this_folder_and_none_that_does_not_exist():
    named = set(TEST.findall(TABLE.read_text()))
    assert names_in(HERE.glob("test_*.py")) <= named <= names_in(HERE.parent.rglob("test_*.py"))
