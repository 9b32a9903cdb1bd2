"""Tests of steadygpt/data/documents.py: chunks cut anywhere and read anywhere, with the documents of the whole."""

import gzip
import io
import json
import random
from itertools import pairwise

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadygpt.base.options import UserError
from steadygpt.data import documents as chunks
from steadygpt.data import tokenizer
from steadygpt.data.documents import Position, cut_document, read_documents
from steadygpt.data.sources import Source
from steadygpt.data.tokenizer import get_tokenizer

SMALL = {"CHUNK_BYTES": 60, "PIECE_BYTES": 40, "TABLE_BYTES": 100, "ROWS_AT_ONCE": 3}
in_small_chunks = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder, kind: str, texts: list[str]) -> Source:
    """Write texts as files of a kind, and open them as a source."""
    chunks._open_table.cache_clear()  # other files had the same names
    for file in folder.iterdir():
        file.unlink()
    for number, half in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        path = folder / f"{number}.{kind}"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in half).encode()
        if kind == "jsonl":
            path.write_bytes(lines)
        elif kind == "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        elif kind == "jsonl.zst":
            path.write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
        elif kind == "utf16.jsonl":
            path.write_bytes(lines.decode().encode("utf-16") if half else b"")
        elif kind == "txt":
            path.write_text("".join(half), newline="")
        else:
            table = pyarrow.table({"id": range(len(half)), "text": pyarrow.array(half, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=7)
    return Source("files", sorted(folder.iterdir()))


def documents(source: Source, start: Position) -> list[tuple[int, int, str]]:
    """Read (file, row, text) of all documents from `start` on; the parts of a text are joined."""
    found: list[tuple[int, int, str]] = []
    for chunk in source.chunks("text", start):
        for row, text, is_begin in read_documents(chunk, "text"):
            if not is_begin and found and found[-1][0] == chunk.at.file:
                text = found.pop()[2] + text
            found.append((chunk.at.file, row, text if isinstance(text, str) else repr(text)))
    return found


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "jsonl.zst", "utf16.jsonl", "parquet"])
@given(st.lists(st.text("ab \n\té你", min_size=1, max_size=60), min_size=1, max_size=40))
@in_small_chunks
def test_chunks_hold_every_document_and_reading_can_begin_at_any_of_them(kind, tmp_path, texts):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(chunks, name, value)
        source = write(tmp_path, kind, texts)
        whole = documents(source, Position())
        found = list(source.chunks("text", Position()))
        ends = [sum(source.sizes[: chunk.at.file]) + chunk.end for chunk in found]
        assert ends == sorted(ends)
        assert ends[-1] == sum(source.sizes)
        for chunk in found:
            rest = documents(source, chunk.at)
            if kind == "txt":  # begins within a text
                at = len(whole) - len(rest)
                assert whole[at][2].endswith(rest[0][2])
                assert whole[at + 1 :] == rest[1:]
            else:
                assert rest == [found for found in whole if found[:2] >= (chunk.at.file, chunk.at.row)]
    texts = [t if t.strip() else "ValueError('no text')" for t in texts]
    if kind == "txt":
        halves = ["".join(texts[: len(texts) // 2]), "".join(texts[len(texts) // 2 :])]
        texts = [text if text.strip() else "ValueError('no text')" for text in halves]
        assert all(a[2] == b or not b.strip() for a, b in zip(whole, texts, strict=True)) or "ValueError" in str(texts)
    else:
        assert [text for _, _, text in whole] == texts


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@given(st.text(st.sampled_from("ab1 \n\t.'é你\u3000\xa0"), max_size=200), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_pieces_of_a_document_have_the_ids_of_the_whole(name, text, length):
    if name == "gpt2" and tokenizer._offline_gpt2_folder() is None:
        pytest.skip("the extra with GPT-2's vocabulary is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PIECE_BYTES", length)
        pieces = list(cut_document(text))
    assert "".join(pieces) == text
    encoding = get_tokenizer(name)
    # A piece without the end of a word is cut anywhere, and its ids may differ.
    if all(piece[-1:].strip() and after[:1] == " " for piece, after in pairwise(pieces)):
        assert [i for piece in pieces for i in encoding.encode(piece)] == encoding.encode(text)


@given(st.text(st.sampled_from("ab \n'é你\u3000𝄞"), max_size=100), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_a_text_is_cut_at_the_same_places_from_wherever_reading_begins(text, length):
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PIECE_BYTES", length)
        whole = list(chunks.cut_pieces(io.BytesIO(data)))
        for number, (offset, _) in enumerate(whole):
            assert list(chunks.cut_pieces(io.BytesIO(data[offset:]), offset)) == whole[number:]
    assert b"".join(piece for _, piece in whole) == data


def test_a_byte_order_mark_and_line_ends_are_read_as_before(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\u2028b"}\r\n{"text": "c"}')
    found = documents(Source("files", sorted(tmp_path.iterdir())), Position())
    assert [text for _, _, text in found] == ["first\r\nsecond\r", "a\r\u2028b", "c"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz"])
def test_a_damaged_file_is_named(kind, tmp_path):
    source = write(tmp_path, kind, [random.Random(n).randbytes(500).hex() for n in range(40)])
    path, offset = tmp_path / f"1.{kind}", 0
    if kind == "parquet":
        column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(1)
        offset = column.dictionary_page_offset or column.data_page_offset
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 20)
    with pytest.raises(UserError, match=rf"1\.{kind}: cannot be read, .*; repair or remove it, then run this again"):
        documents(source, Position())


def test_a_million_spaces_are_cut(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" " * 2_000_000)
    sizes = [chunk.num_bytes for chunk in Source("files", [tmp_path / "a.txt"]).chunks("text", Position())]
    assert sum(sizes) == 2_000_000
    assert max(sizes) <= chunks.PIECE_BYTES
    assert max(map(len, cut_document(" " * 2_000_000))) <= 2 * chunks.PIECE_BYTES


def test_invalid_utf8_in_parquet_is_read_as_in_other_files(tmp_path):
    column = pyarrow.array([b"good", b"bad \xff", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found = documents(Source("files", [tmp_path / "a.parquet"]), Position())
    assert [text for _, _, text in found] == ["good", "bad \udcff", "None"]


@pytest.mark.parametrize("field", ["text", "data.text"])
def test_empty_row_groups_and_columns_with_a_dot_are_read(field, tmp_path):
    halves = [pyarrow.table({field: pyarrow.array(texts, pyarrow.string())}) for texts in (["a"], [], ["b", "c"], [])]
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", halves[0].schema) as writer:
        for half in halves:
            writer.write_table(half)
    found = list(Source("files", [tmp_path / "a.parquet"]).chunks(field, Position()))
    assert [text for chunk in found for _, text, _ in read_documents(chunk, field)] == ["a", "b", "c"]
    assert all(chunk.num_bytes > 0 for chunk in found)
