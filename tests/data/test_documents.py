"""Tests of steadygpt/data/documents.py: parts that any process can read, with the documents of the whole."""

import contextlib
import gzip
import io
import json
import random
from collections.abc import Iterator

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.data import documents as chunks
from steadygpt.data import sources
from steadygpt.data.documents import Cut, OnDisk, cut_document, read_documents
from steadygpt.data.sources import Source

PACKED = {
    "jsonl": bytes,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": lambda lines: pyarrow.compress(lines, "zstd", asbytes=True),
    "utf16.jsonl": lambda lines: lines.decode().encode("utf-16") if lines else b"",
}


def write(folder, kind: str, texts: list[str]) -> Source:
    """Write texts as two files of a kind, and open them as a source."""
    chunks._open_table.cache_clear()  # other files had the same names
    for number, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        path = folder / f"{number}.{kind}"
        if kind == "txt":
            path.write_text("".join(half), newline="")
        elif kind == "parquet":
            table = pyarrow.table({"id": range(len(half)), "text": pyarrow.array(half, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=7)
        else:
            path.write_bytes(PACKED[kind]("".join(json.dumps({"text": text}) + "\n" for text in half).encode()))
    return Source("files", sorted(folder.iterdir()))


def documents(source: Source, file: int = 0, number: int = 0) -> list[tuple[int, str]]:
    """Read (file, text) of all documents from a part on; the pieces of a text are joined."""
    found: list[tuple[int, str]] = []
    for part in source.parts("text", 0, file, number):
        for text, is_begin in read_documents(part, "text"):
            if not is_begin and found and found[-1][0] == part.file:
                text = found.pop()[1] + text
            found.append((part.file, text if isinstance(text, str) else repr(text)))
    return found


@contextlib.contextmanager
def units_of(num_bytes: int) -> Iterator[pytest.MonkeyPatch]:
    """Divide files into small units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "UNITS", 1)
        patch.setattr(sources, "UNIT_BYTES", num_bytes)
        patch.setattr(chunks, "CUT_WINDOW", 20)
        patch.setattr(chunks, "ROWS_AT_ONCE", 3)
        yield patch


@pytest.fixture(params=[24, 10_000])
def patch(request) -> Iterator[pytest.MonkeyPatch]:
    """Small units, and the patch that makes them."""
    with units_of(request.param) as patch:
        yield patch


def read_over_a_network(patch: pytest.MonkeyPatch) -> None:
    """Cut files as if they were not on this machine."""
    patch.setattr(sources, "Cut", lambda *about: Cut(*about[:-1], None))


@pytest.mark.parametrize("kind", ["txt", "parquet", *PACKED])
@given(
    st.lists(st.text("ab \n\té你", min_size=1, max_size=60), min_size=1, max_size=40), st.sampled_from([24, 64, 10_000])
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_hold_every_document_wherever_reading_begins_and_the_file_is(kind, tmp_path, texts, unit):
    halves = [texts[: len(texts) // 2], texts[len(texts) // 2 :]]
    expected = [["".join(half)] for half in halves] if kind == "txt" else halves
    with units_of(unit) as patch:
        source = write(tmp_path, kind, texts)
        whole, found = documents(source), list(source.parts("text", 0))
        for begin, part in enumerate(found):
            assert list(source.parts("text", 0, part.file, part.number)) == found[begin:]
        read_over_a_network(patch)
        sent = list(source.parts("text", 0))
        of_both = [[repr(list(read_documents(part, "text"))) for part in parts] for parts in (found, sent)]
    skipped = "ValueError('no text')"
    assert whole == [(n, text if text.strip() else skipped) for n, half in enumerate(expected) for text in half] or (
        # Of a text with more than one part, the first part's spaces are kept.
        kind == "txt" and [text for _, text in whole if text.strip()] == [text for [text] in expected if text.strip()]
    )
    ends = [sum(source.sizes[: part.file]) + part.end for part in found]
    assert ends == sorted(ends) and (not ends or ends[-1] == sum(source.sizes))
    assert not any(isinstance(part.data, OnDisk) for part in sent)
    assert [part._replace(data=0) for part in found] == [part._replace(data=0) for part in sent]
    assert of_both[0] == of_both[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_line_that_is_too_long_is_skipped_and_not_read_whole(patch, tmp_path, in_place):
    patch.setattr(chunks, "LONGEST_LINE", 500)
    texts = ["a", "b" * 3000, "c", "d" * 400, "e" * 500]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    skipped = "ValueError('a line of 500 bytes or more')"
    if not in_place:
        read_over_a_network(patch)
    source = Source("files", [tmp_path / "a.jsonl"])
    assert [text for _, text in documents(source)] == ["a", skipped, "c", "d" * 400, skipped]
    for part in source.parts("text", 0) if not in_place else ():
        assert len(part.data) <= 500 + 2 * source.unit_bytes


TEXT = st.text(st.sampled_from("ab \n'é你\u3000𝄞"), max_size=300).map(str.encode)


@given(TEXT | st.binary(max_size=300) | st.lists(TEXT | st.just(b"\x80" * 50)).map(b"".join), st.integers(8, 40))
@settings(max_examples=80, deadline=None)
def test_a_text_is_cut_at_the_same_places_from_wherever_reading_begins(data, unit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CUT_WINDOW", 20)
        whole = list(chunks.cut_pieces(io.BytesIO(data), 0, 0, unit))
        for number in range(len(whole)):
            begin = max(0, number * unit - chunks.CUT_BEFORE)
            assert list(chunks.cut_pieces(io.BytesIO(data[begin:]), begin, number, unit)) == whole[number:]
    assert b"".join(whole) == data
    with contextlib.suppress(UnicodeDecodeError):  # of a text in UTF-8, no character is cut
        assert "".join(piece.decode() for piece in whole if data.decode()) == data.decode()


def test_a_byte_order_mark_and_line_ends_are_read_as_before(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\u2028b"}\r\n{"text": "c"}')
    found = documents(Source("files", sorted(tmp_path.iterdir())))
    assert [text for _, text in found] == ["first\r\nsecond\r", "a\r\u2028b", "c"]


def test_a_damaged_file_is_named(tmp_path):
    source = write(tmp_path, "parquet", [random.Random(n).randbytes(500).hex() for n in range(40)])
    column = pyarrow.parquet.ParquetFile(tmp_path / "1.parquet").metadata.row_group(0).column(1)
    with open(tmp_path / "1.parquet", "r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * 20)
    with pytest.raises(UserError, match=r"1\.parquet: cannot be read, .*; repair or remove it, then run this again"):
        documents(source)


def test_a_million_spaces_are_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" " * 2_000_000)
    source = Source("files", [tmp_path / "a.txt"])
    pieces = [text for part in source.parts("text", 0) for text, _ in read_documents(part, "text")]
    assert sum(map(len, pieces)) == 2_000_000
    assert max(map(len, pieces)) <= source.unit_bytes + chunks.CUT_WINDOW
    assert max(map(len, cut_document(" " * 2_000_000))) <= 2 * chunks.PIECE_BYTES


def test_invalid_utf8_in_parquet_is_read_as_in_other_files(tmp_path):
    column = pyarrow.array([b"good", b"bad \xff", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found = documents(Source("files", [tmp_path / "a.parquet"]))
    assert [text for _, text in found] == ["good", "bad \udcff", "None"]


@pytest.mark.parametrize("field", ["text", "data.text"])
def test_empty_row_groups_and_columns_with_a_dot_are_read(field, tmp_path):
    halves = [pyarrow.table({field: pyarrow.array(texts, pyarrow.string())}) for texts in (["a"], [], ["b", "c"], [])]
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", halves[0].schema) as writer:
        for half in halves:
            writer.write_table(half)
    found = list(Source("files", [tmp_path / "a.parquet"]).parts(field, 0))
    assert [text for part in found for text, _ in read_documents(part, field)] == ["a", "b", "c"]
    assert all(part.num_bytes > 0 for part in found)
