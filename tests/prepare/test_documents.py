"""Tests of steadygpt/prepare/documents.py: blocks that continue from any of them, with the documents of the whole."""

import contextlib
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.prepare import documents as chunks
from steadygpt.prepare.documents import Block, Damaged, Wanted, cut_document, read_documents
from steadygpt.prepare.source_files import LocalFile
from steadygpt.prepare.sources import Place, Source

PACKED = {
    "jsonl": bytes,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": lambda lines: pyarrow.compress(lines, "zstd", asbytes=True),
    "utf16.jsonl": lambda lines: lines.decode().encode("utf-16") if lines else b"",
}


def write(folder, kind: str, texts: list[str]) -> Source:
    """Write texts as two files of a kind, and open them as a source."""
    for number, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        path = folder / f"{number}.{kind}"
        if kind == "txt":
            path.write_text("".join(half), newline="")
        elif kind == "parquet":
            table = pyarrow.table({"id": range(len(half)), "text": pyarrow.array(half, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=7)
        else:
            path.write_bytes(PACKED[kind]("".join(json.dumps({"text": text}) + "\n" for text in half).encode()))
    return source_of(sorted(folder.iterdir()))


def source_of(paths: list[Path]) -> Source:
    return Source("files", [LocalFile(str(path), path.stat().st_size, "") for path in paths])


def blocks_from(source: Source, first: Place = Place()) -> list[Block]:  # noqa: B008 (a tuple)
    return list(source.blocks(Wanted("text"), first))


def documents(source: Source) -> list[tuple[int, str]]:
    """Read (file, text) of all documents; what a text has in several blocks is joined."""
    found: list[tuple[int, str]] = []
    for block in blocks_from(source):
        for _, text, is_begin, *_ in read_documents(block, Wanted("text")):
            if not is_begin:
                text = found.pop()[1] + text
            found.append((block.file, text if isinstance(text, str) else repr(text)))
    return found


@contextlib.contextmanager
def blocks_of(num_bytes: int) -> Iterator[pytest.MonkeyPatch]:
    """Read files in small blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK_BYTES", num_bytes)
        patch.setattr(chunks, "CUT_WINDOW", 20)
        patch.setattr(chunks, "ROWS_AT_ONCE", 3)
        yield patch


@pytest.mark.parametrize("kind", ["txt", "parquet", *PACKED])
@given(
    st.lists(st.text("ab \n\té你", min_size=1, max_size=60), min_size=1, max_size=40), st.sampled_from([24, 64, 10_000])
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_hold_every_document_wherever_reading_begins(kind, tmp_path, texts, num_bytes):
    halves = [texts[: len(texts) // 2], texts[len(texts) // 2 :]]
    expected = [["".join(half)] for half in halves if "".join(half)] if kind == "txt" else halves
    with blocks_of(num_bytes):
        source = write(tmp_path, kind, texts)
        whole = documents(source)
        blocks = blocks_from(source)
        for number, block in enumerate(blocks):
            for place in (Place(block.file, block.at), Place(block.file, block.end)):
                rest = blocks[number + (place.at == block.end) :]
                assert [repr(found) for found in blocks_from(source, place)] == [repr(found) for found in rest]
    skipped = "Skipped('no text')"
    if kind == "txt":  # of a text with more than one block, the first block's spaces are kept
        assert [text for _, text in whole if text.strip() and text != skipped] == [
            text for [text] in expected if text.strip()
        ]
    else:
        assert whole == [(n, text if text.strip() else skipped) for n, half in enumerate(expected) for text in half]
    places = [sum(file.size for file in source.files[: block.file]) + block.progress for block in blocks]
    assert places == sorted(places) and (places[-1] == source.size or kind in ("parquet", "arrow"))


def test_a_line_that_is_too_long_ends_its_file(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"b" * n}"}}\n' for n in (1, 3000, 1)))
    with blocks_of(24) as patch:
        patch.setattr(chunks, "LONGEST_LINE", 450)
        *_, last = blocks_from(source_of([tmp_path / "a.jsonl"]))
    assert isinstance(last.data, Damaged)
    assert re.search(r"/a\.jsonl: .* 450 .* 0;", str(last.data))


TEXT = st.text(st.sampled_from("ab \n'é你\u3000𝄞"), max_size=300).map(str.encode)


@given(TEXT | st.binary(max_size=300) | st.lists(TEXT | st.just(b"\x80" * 50)).map(b"".join), st.integers(8, 40))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_is_whole_and_no_character_is_cut(tmp_path, data, num_bytes):
    path = Path(tmp_path, "a.txt")
    path.write_bytes(data)
    with blocks_of(num_bytes) as patch:
        patch.setattr(chunks, "check_text", lambda *_: None)
        patch.setattr(chunks, "unpacked", lambda text, head: text)
        patch.setattr(chunks, "encoding_of", lambda _: "utf-8")
        blocks = [block.data for block in blocks_from(source_of([path]))]
    assert b"".join(blocks) == data
    with contextlib.suppress(UnicodeDecodeError):
        assert "".join(block.decode() for block in blocks if data.decode()) == data.decode()


@given(st.text(st.sampled_from("ab \n'é你\u3000𝄞"), max_size=3000), st.integers(1, 400))
@settings(max_examples=100)
def test_pieces_of_a_document_are_short_and_whole(text, piece_bytes):
    pieces = list(cut_document(text, piece_bytes))
    assert "".join(piece for piece, _ in pieces) == text
    window = max(chunks.LEAST_WINDOW, piece_bytes)
    assert all(size == len(piece.encode()) <= piece_bytes + window for piece, size in pieces)


def test_a_byte_order_mark_and_line_ends_are_read_as_before(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\u2028b"}\r\n{"text": "c"}')
    found = documents(source_of(sorted(tmp_path.iterdir())))
    assert [text for _, text in found] == ["first\r\nsecond\r", "a\r\u2028b", "c"]


def test_a_damaged_file_is_named(tmp_path):
    source = write(tmp_path, "parquet", [random.Random(n).randbytes(500).hex() for n in range(40)])
    column = pyarrow.parquet.ParquetFile(tmp_path / "1.parquet").metadata.row_group(0).column(1)
    with open(tmp_path / "1.parquet", "r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * 20)
    *_, last = blocks_from(source)
    assert isinstance(last.data, Damaged)
    assert "/1.parquet: " in str(last.data)


def test_a_million_spaces_are_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" " * 2_000_000)
    source = source_of([tmp_path / "a.txt"])
    texts = [text for block in blocks_from(source) for _, text, *_ in read_documents(block, Wanted("text"))]
    assert sum(map(len, texts)) == 2_000_000
    assert max(map(len, texts)) <= chunks.BLOCK_BYTES + chunks.CUT_WINDOW
    assert max(size for _, size in cut_document(" " * 2_000_000)) <= 2 * chunks.PIECE_BYTES


def test_invalid_utf8_in_parquet_is_read_as_in_other_files(tmp_path):
    column = pyarrow.array([b"good", b"bad \xff", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found = documents(source_of([tmp_path / "a.parquet"]))
    assert [text for _, text in found] == [
        "good",
        "bad \udcff",
        "Skipped('null, not a string; set --text_field to the field with the text')",
    ]


@pytest.mark.parametrize("field", ["text", "data.text"])
def test_empty_row_groups_and_columns_with_a_dot_are_read(field, tmp_path):
    halves = [pyarrow.table({field: pyarrow.array(texts, pyarrow.string())}) for texts in (["a"], [], ["b", "c"], [])]
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", halves[0].schema) as writer:
        for half in halves:
            writer.write_table(half)
    found = list(source_of([tmp_path / "a.parquet"]).blocks(Wanted(field)))
    assert [text for block in found for _, text, *_ in read_documents(block, Wanted(field))] == ["a", "b", "c"]
    assert all(block.num_bytes > 0 for block in found)
