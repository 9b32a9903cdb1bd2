"""docs/RELIABILITY.md promises what is tested here, no more and no less."""

import re
from pathlib import Path

from record import TABLE, TEST


def test_the_table_names_each_test_and_no_other():
    there = {
        f"{path.name}::{name}"
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        if path != Path(__file__)
    }
    assert set(TEST.findall(TABLE.read_text())) == there
