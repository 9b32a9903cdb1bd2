"""The code of docs/data.md: every way to convert a file of rows, and the lines that write token ids as shards."""

import csv
import gzip
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import REPO
from prepared import ids_expected, ids_of, prepare

from steadygpt.data.shards import ShardSet

PAGE = (REPO / "docs/data.md").read_text()
ROWS = re.findall(r"^\| ((?:CSV|TSV|JSON)[^|]*?) \| (.*) \|$", PAGE, re.MULTILINE)
CONVERSION, TOKEN_IDS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def calls_of(cell: str) -> list[str]:
    """Return the arguments that a cell of the table gives, once for each way."""
    codes = re.findall(r"`(.*?)`", cell)
    if "data_files" in codes[0]:
        return codes
    return [f'"csv", data_files="rows.csv", **csv, {code}' for code in codes]


TEXTS = [
    "007",
    "",
    'a "quoted", text',
    "two\nlines\tand a tab",
    "None",
    "NA",
    "12",
    "",
    "  spaces ",
    "né 1'2",
    '"',
    "x" * 300_000,
]


def table(texts: list[str], **options) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, **options)
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])
    return file.getvalue()


OF_ONE_LINE = [text for text in TEXTS if not re.search(r"[\n\t]", text)]
CONTENTS: dict[str, tuple[list[str], list[str | bytes]]] = {  # of the file of each row of the page
    "CSV": (TEXTS, [table(TEXTS), table(TEXTS).replace("\r\n", "\n")]),
    "TSV, or CSV with semicolons": (TEXTS, [table(TEXTS, delimiter="\t"), table(TEXTS, delimiter=";")]),
    "TSV in which quotes are text": (
        OF_ONE_LINE, ["id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(OF_ONE_LINE))],
    ),
    "CSV in another encoding": (TEXTS, [table(TEXTS).encode("cp1252")]),
    "JSON: an array, indented, or one value after another": (TEXTS, [
        json.dumps([{"text": text} for text in TEXTS]), json.dumps([{"text": text} for text in TEXTS], indent=2),
        "\n".join(json.dumps({"text": text}, indent=1) for text in TEXTS),
    ]),
    "JSON: an array in a field of an object": (
        TEXTS, [json.dumps({"version": 1, "data": [{"text": text} for text in TEXTS]})],
    ),
}  # fmt: skip


def test_the_page_has_a_row_for_each_kind():
    assert [kind for kind, _ in ROWS] == [*CONTENTS]


def convert(arguments: str) -> None:
    exec(CONVERSION.replace('"csv", data_files="rows.csv", **csv', arguments), {})


@pytest.mark.parametrize(("kind", "cell"), ROWS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_rows_are_converted_without_a_loss(kind, cell, pack):
    texts, contents = CONTENTS[kind]
    calls = calls_of(cell)
    for number, content in enumerate(contents):
        # Another name each time, because `datasets` unpacks a name once.
        arguments = calls[number % len(calls)].replace('data_files="', f'data_files="{number}')
        name = re.search(r'data_files="(.*?)"', arguments)[1]
        Path(name).write_bytes(pack(content.encode() if isinstance(content, str) else content))
        convert(arguments)
        prepare("rows.jsonl", f"out{number}")
        assert ids_of(f"out{number}") == ids_expected(text for text in texts if text.strip())


def test_columns_that_change_their_type_do_not_end_a_conversion():
    """After 10,000 rows, whose type `datasets` takes for that of all."""
    texts = [f"{n:05d}" if n % 20_000 > 10_000 else f"comment {n}" for n in range(30_000)]
    rows = [[text, "" if n == 15_000 else "A1B" if n == 25_000 else n] for n, text in enumerate(texts)]
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "likes"], *rows])
    convert(calls_of(ROWS[0][1])[0])
    prepare("rows.jsonl")
    assert ids_of() == ids_expected(texts)


def test_the_lines_for_token_ids_write_shards_that_are_read(tmp_path):
    rows = [list(range(n, n + 50)) for n in range(100)]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": rows}), "ids.parquet")
    Path("data").mkdir()
    exec(TOKEN_IDS, {})
    tokens = {}
    for split in ("train", "val"):
        (shard,) = ShardSet.find("ids", "data", split).shards
        tokens[split] = np.split(shard.tokens(), np.flatnonzero(shard.tokens() == 50256))[1:]
    assert [row.tolist()[1:] for row in tokens["val"]] == rows[::40]
    assert sorted(row.tolist()[1:] for row in tokens["train"]) == [row for n, row in enumerate(rows) if n % 40]
