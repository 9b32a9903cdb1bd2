"""Tests that prepare_dataset.py loses nothing in silence: shares of the source, of rows, of text, and the options."""

import dataclasses
import gzip
import itertools
import json
import random
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.feather
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared import files_of, ids_expected, ids_of, prepare, refused, small_units, write_rows  # noqa: F401
from test_corpus import follow, lines, write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import prepare_dataset
from steadygpt.data.tokenizer import END_OF_TEXT, TokenizerRecord, load_tokenizer
from steadygpt.prepare.encode import changed_bytes
from steadygpt.prepare.manifest import CorpusOptions

NUMBERS = itertools.count()
TEXT = "un café, deux CAFÉS, 漢字 and some English words\n" * 40


def level_tokenizer(alphabet: bytes) -> str:
    """Return a byte-level tokenizer.json that knows only these bytes."""
    characters = [pre_tokenizers.ByteLevel(False).pre_tokenize_str(chr(b))[0][0] for b in alphabet if b < 128]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(dict.fromkeys(characters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer.to_str()


def word_tokenizer(words: list[str]) -> str:
    """Return a tokenizer.json that turns all other words into its unknown token."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer.to_str()


# ---------------------------------------------------------------------------------------------------------------------
# text that a tokenizer changes


def test_a_tokenizer_without_some_bytes_is_told_by_the_share_of_the_text_that_it_loses(capsys):
    Path("a.txt").write_text(TEXT)
    Path("ascii.json").write_text(level_tokenizer(bytes(range(10, 127))))
    prepare("a.txt", flags="--tokenizer ascii.json")
    said = capsys.readouterr()
    lost = re.search(r"([\d.]+)% of a sample changed by the tokenizer", said.out)
    of_text = [c for c in TEXT if ord(c) > 127]
    assert float(lost[1]) == pytest.approx(100 * len("".join(of_text).encode()) / len(TEXT.encode()), abs=1)
    assert said.err.splitlines()[-1] == "warning: 19% of the text changes by the tokenizer ascii.json"


def test_a_vocabulary_of_unknown_tokens_is_refused_and_leaves_no_shard():
    Path("a.txt").write_text(TEXT)
    Path("words.json").write_text(word_tokenizer(["and", "some"]))
    refused(
        "--source a.txt --tokenizer words.json", "a.txt: 8", "% of the text changes by the tokenizer words.json", "50%"
    )
    assert not [*Path("out").glob("*.npy")]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), st.sets(st.integers(0, 127)))
@settings(max_examples=60, deadline=None)
def test_the_bytes_that_do_not_come_back_are_counted(text, alphabet):
    record = TokenizerRecord("a.json", tokenizer_json=level_tokenizer(bytes({65, *alphabet})))
    lost = changed_bytes(text, load_tokenizer(record))
    # A character without a token is lost, and what is not ASCII has no token here.
    known = {chr(byte) for byte in {65, *alphabet}}
    assert lost == sum(len(c.encode()) for c in text if c not in known)
    assert changed_bytes(text, load_tokenizer(TokenizerRecord("bytes"))) == 0
    assert changed_bytes(text, load_tokenizer(TokenizerRecord("gpt2"))) == 0


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_beginning_that_a_tokenizer_knows_does_not_hide_the_rest(kind):
    Path("ascii.json").write_text(level_tokenizer(bytes(range(10, 127))))
    texts = ["the quick brown fox", *["你好 世界 这是一个测试文件"] * 3000]
    if kind == "jsonl":
        write_rows("a.jsonl", texts)
    else:
        Path("a.txt").write_text("\n".join(texts))
    refused(f"--source a.{kind} --tokenizer ascii.json", "% of the text changes by the tokenizer ascii.json")


# ---------------------------------------------------------------------------------------------------------------------
# rows and files


@given(st.lists(st.sampled_from(["text", "", None, 1, "bad"]), min_size=1, max_size=60))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_than_a_tenth_of_skipped_rows_is_a_warning_and_more_than_half_an_error(capsys, values):
    rows = ["{bad}" if value == "bad" else json.dumps({"text": value}) for value in ["first", *values]]
    Path("a.jsonl").write_text("\n".join(rows))
    skipped = sum(value in (None, 1, "bad") for value in values)
    rows_lost = skipped / (len(rows) - values.count(""))
    out = f"out{next(NUMBERS)}"
    if rows_lost > 0.51:
        refused(f"--source a.jsonl --out {out}", "a.jsonl: ", "of the rows are skipped")
    elif rows_lost < 0.4:  # between, it depends on the bytes
        assert prepare("a.jsonl", out)["skipped"] == skipped
        warned = f"{capsys.readouterr().err}".splitlines()[-1].endswith("of the rows are skipped")
        assert warned or rows_lost < 0.1


def test_what_is_left_out_is_a_share_of_the_bytes(capsys):
    write({"t/a.txt": b"a" * 7500, "t/b.csv": b"text\n" + b"b\n" * 500, "t/x.unknown": b"\0" * 500})
    prepare("t")
    said = capsys.readouterr()
    assert said.out.startswith(
        "read 7.5 kB of 9.01 kB; left out 1 kB of a format that is not read, 500 bytes of other types\n"
    )
    assert said.err.splitlines()[-1] == "warning: 17% of the files' bytes are left out"
    write({"u/a.txt": b"a" * 400, "u/b.csv": b"text\n" + b"b\n" * 500})
    refused("--source u --out u_out", "--source u: 72% of its 1.41 kB", "u/b.csv", "--source 'u/**/*.txt'")


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_of_a_mixed_folder_is_read_or_left_out(seed):
    """All kinds of text are read together; what is left out is counted."""
    choice = random.Random(seed)
    kinds = ["jsonl", "txt", "md", "jsonl.gz", "json", "py", "csv", "tar", "png"]
    read, others = {}, 0
    for number in range(choice.randint(1, 8)):
        kind = choice.choice(kinds)
        text = f"{number} {'word ' * choice.randint(1, 300)}"
        content = lines([text]) if "json" in kind else text.encode()
        content = gzip.compress(content) if kind.endswith("gz") else content
        write({f"t/{number}.{kind}": content})
        read.setdefault(kind if kind in ("json", "py") else "", {})[number] = text, len(content)
        if kind in ("csv", "tar", "png"):
            others += read[""].pop(number)[1]
    chosen = next((read.pop(kind) for kind in ("", "json", "py") if read.get(kind)), {})
    size = sum(num_bytes for _, num_bytes in chosen.values())
    others += sum(num_bytes for texts in read.values() for _, num_bytes in texts.values())
    if not chosen or others > size:
        refused("--source t", "--source t: ")
        return
    manifest = prepare("t")
    assert ids_of() == ids_expected(text for _, (text, _) in sorted(chosen.items()))
    assert (manifest["size"], sum(manifest["left_out"].values())) == (size, others)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.py"])
def test_json_lines_with_the_name_of_a_text_are_not_one_document(name):
    content = lines(["one", "two \N{SNOWMAN}"])
    write({f"t/{name}": gzip.compress(content) if name.endswith("gz") else content})
    refused("--source t", f"t/{name}: JSON Lines", f"Try: mv -n t/{name} t/a.jsonl")
    follow("t")
    assert ids_of() == ids_expected(["one", "two \N{SNOWMAN}"])


@pytest.mark.parametrize("content", [b"{a} set\n", b'{"a": 1} and text\n', b'"a"\n"b"\n', b"[1]\n[2]\n", b"{}\ntext\n"])
def test_a_text_with_braces_is_a_text(content):
    Path("a.txt").write_bytes(content)
    prepare("a.txt")
    assert ids_of() == ids_expected([content.decode()])


@pytest.mark.parametrize("name", ["a.jsonl.zstd", "a.jsonlines", "part-00000", "a.parq", "a.feather", "a.log", "a"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_name_that_would_be_read_is_suggested(name, is_folder):
    from test_corpus import arrow, parquet

    contents = {
        "a.jsonl.zstd": pyarrow.compress(lines(["x"]), "zstd", asbytes=True), "a.parq": parquet(["x"]), "a.log": b"x",
    }  # fmt: skip
    if name == "a.feather":
        pyarrow.feather.write_feather(pyarrow.table({"text": ["x"]}), "feather")
        contents[name] = Path("feather").read_bytes()
    write({f"t/{name}": contents.get(name, lines(["x"]) if arrow else b"")})
    follow("t" if is_folder else f"t/{name}")
    assert ids_of() == ids_expected(["x"])


def test_a_frame_of_zstd_that_is_to_be_skipped_is_no_reason_to_refuse_a_file():
    frame = bytes.fromhex("502a4d18 04000000 00000000")
    Path("a.txt.zst").write_bytes(frame + pyarrow.compress(b"a text", "zstd", asbytes=True))
    prepare("a.txt.zst")
    assert ids_of() == ids_expected(["a text"])


def test_the_cache_of_the_hub_is_read_by_the_names_of_its_snapshot():
    write({"datasets--a--b/blobs/0123": lines(["x"]), "datasets--a--b/refs/main": b"abc"})
    snapshot = Path("datasets--a--b/snapshots/abc/data")
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to("../../../blobs/0123")
    prepare("datasets--a--b")
    assert ids_of() == ids_expected(["x"])


# ---------------------------------------------------------------------------------------------------------------------
# separators


@given(
    st.lists(st.text("ab \n-", max_size=30), min_size=1, max_size=40),
    st.sampled_from(["<|end|>", "\n\n", " -- ", "|"]), st.sampled_from(["txt", "jsonl"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_separator_divides_a_text_wherever_its_blocks_end(small_units, texts, separator, kind):  # noqa: F811
    whole = separator.join([*texts, "x"] * 20)
    if kind == "txt":
        Path("a.txt").write_text(whole, newline="")
    else:
        write_rows("a.jsonl", [whole])
    typed = separator.replace("\n", "\\n")
    out = f"out{next(NUMBERS)}"
    manifest = prepare(f"a.{kind}", out, f"--val_share 0 --separator {shlex.quote(typed)}")
    documents = [text for text in whole.split(separator) if text.strip()]
    assert [text for text in split_ids(ids_of(out)) if text.strip()] == documents
    assert manifest["documents"] >= len(documents)  # spaces at the end of a block may be a document


def split_ids(ids: list[int]) -> list[str]:
    """Return the texts of the documents in the ids of the byte tokenizer."""
    return [part.decode() for part in bytes(min(i, 255) if i < 256 else 255 for i in ids).split(b"\xff")[1:]]


def test_a_separator_as_a_stream_gives_the_same_shards_on_two_workers_and_no_other_documents():
    texts = [f"{n} {'some words ' * random.Random(n).randrange(2000)}" for n in range(300)]
    Path("a.txt").write_text("<|endoftext|>".join(texts))
    flags = "--separator '<|endoftext|>' --shard_size 500000"
    manifest = prepare("a.txt", "one", flags)
    assert (manifest["documents"], manifest["spelled"]) == (300, {})
    prepare("a.txt", "two", f"{flags} --num_workers 2")
    assert files_of("one") == files_of("two")
    prepare("a.txt", "whole", f"{flags} --val_share 0")
    assert split_ids(ids_of("whole")) == texts


def test_a_separator_that_no_text_contains_is_told(capsys):
    write({"a.txt": b"one\r\n\r\ntwo"})
    prepare("a.txt", "split", flags=r"--separator '\n\n' --val_share 0")
    assert ids_of("split") == ids_expected(["one", "two"])
    Path("b.txt").write_text("one\\newpage two")
    prepare("b.txt", "tex", flags=r"--separator '\\newpage' --val_share 0")
    assert ids_of("tex") == ids_expected(["one", " two"])
    capsys.readouterr()
    prepare("a.txt", flags="--separator=---")
    assert capsys.readouterr().err.splitlines()[-1] == "warning: no text contains the separator '---'"


# ---------------------------------------------------------------------------------------------------------------------
# the same command means the same options

OTHER_VALUES = {
    "max_files": "1", "text_field": "body", "separator": "||", "tokenizer": "gpt2", "tokenizer_bytes": "1000",
    "document_token": "<s>", "shard_size": "1000", "val_share": "0.25", "name": "other",
}  # fmt: skip
CHANGED = ("max_files", "separator", "tokenizer", "shard_size", "val_share", "name")  # that a text of bytes may have


def test_every_option_that_decides_the_shards_is_in_the_manifest():
    Path("a.txt").write_text("text " * 99)
    manifest = prepare("a.txt", flags="")
    assert manifest["options"].keys() == {f.name for f in dataclasses.fields(CorpusOptions)}
    assert manifest["options"].keys() - {"source"} == OTHER_VALUES.keys()
    assert {f.name for f in dataclasses.fields(prepare_dataset.PrepareOptions)} - manifest["options"].keys() == {
        "num_workers", "out",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_options_that_are_left_out_mean_their_defaults(seed):
    """As `--max_files 1` and then the command without it, which once said "already complete"."""
    choice = random.Random(seed)
    for name in ("t/a.txt", "t/b.txt"):
        write({name: b"some|| text " * 99})
    options = {name: OTHER_VALUES[name] for name in choice.sample(CHANGED, choice.randint(1, 3))}
    flags = " ".join(f"--{name} {shlex.quote(value)}" for name, value in options.items())
    prepare("t", "out", flags)
    before = files_of("out")
    prepare("t", "out", flags)
    left_out = choice.choice([*options])
    others = {name: value for name, value in options.items() if name != left_out}
    rest = " ".join(f"--{name} {shlex.quote(value)}" for name, value in others.items())
    refused(f"--source t {rest}", f"out: prepared with --{left_out} ", "Give the same options")
    added = choice.choice([name for name in CHANGED if name not in options])
    refused(f"--source t {flags} --{added} {shlex.quote(OTHER_VALUES[added])}", f"out: prepared with --{added} ")
    assert files_of("out") == before
