"""Conversion to JSON Lines as a command: what it cannot convert is one line, and leaves the file and its folder."""

from pathlib import Path

import pytest
from conftest import refusal

from steadygpt.prepare import lines


@pytest.mark.parametrize(("name", "content", "facts"), [
    ("none.csv", None, ["none.csv"]),
    ("a.jsonl.gz", b"x", ["a.jsonl.gz", "BadGzipFile"]),
    ("a.csv.xz", b"x", ["a.csv.xz", "LZMAError"]),
    ("a.jsonl", b'{"text": 1}\n{"text": }\n', ["a.jsonl", "line 2"]),
])  # fmt: skip
def test_what_cannot_be_converted_is_named(tmp_path, name, content, facts):
    if content is not None:
        Path(name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with refusal(*facts):
        lines.main([name])
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_target_is_kept(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "a.jsonl").write_text("mine")
    with refusal(str(tmp_path / "a.jsonl")):
        lines.main([str(tmp_path / "a.csv")])
    assert (tmp_path / "a.jsonl").read_text() == "mine"
