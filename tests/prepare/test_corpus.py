"""Tests of what a corpus is: the same tokens whatever stands beside the text, or a line that names the file."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import refusal
from prepared import files_of, ids_expected, ids_of, npy, prepare, refused, small_units  # noqa: F401
from standin import parquet

import prepare_dataset
import train
from steadygpt.base.options import UserError
from steadygpt.prepare import writer
from steadygpt.prepare.advice import converted
from steadygpt.prepare.source_files import local_files

TEXTS = [f"{number} {'word ' * (number % 7)}\u00e9\nline" for number in range(60)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def arrow(texts: list[str]) -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(file, table.schema) as written:
        written.write_table(table)
    return file.getvalue()


def write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


# ---------------------------------------------------------------------------------------------------------------------
# random trees

FORMATS = {
    "jsonl": lines,
    "jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "ndjson.zst": lambda texts: pyarrow.compress(lines(texts), "zstd", asbytes=True),
    "json": lines,
    "parquet": parquet,
    "arrow": arrow,
    "txt": lambda texts: "".join(texts).encode(),
    "txt.gz": lambda texts: gzip.compress("".join(texts).encode()),
    "md": lambda texts: "".join(texts).encode(),
    "py": lambda texts: "".join(texts).encode(),
}
BESIDE = {
    "README.md": b"# A card\n", "LICENSE": b"MIT", "LICENSE.txt": b"MIT", "load.py": b"import datasets\n",
    "notes.csv": b"text,label\na,1\n", "old.tar": b"tar", "image.png": b"\x89PNG\0",
    ".hidden.jsonl": b'{"text": "no"}\n',
    "dataset_infos.json": b"{}", "cache-0123.arrow": arrow(["no"]), "a.jsonl.xz": lzma.compress(b"no"),
    "a.idx": b"MMIDIDX",
}  # fmt: skip


def add(choice: random.Random, path: Path, content: bytes, kind: str) -> str:
    """Put a link or a twin of a file beside it, or something that is no text; return its name."""
    what = choice.choice(["link", "hard link", "linked folder", "packed", "other format", *BESIDE])
    if what in ("link", "hard link"):
        other = path.with_name(f"z{path.name}")
        other.symlink_to(path.absolute()) if what == "link" else other.hardlink_to(path)
    elif what == "linked folder":
        other = path.parent / "linked"
        other.symlink_to(Path("t").absolute())
    elif what == "packed":
        other = path.with_name(f"{path.name}.gz")
        other.write_bytes(gzip.compress(content))
    elif what == "other format":
        other = path.with_name(path.name.removesuffix(kind) + choice.choice(["parquet", "jsonl", "arrow"]))
        if not other.exists():
            other.write_bytes(FORMATS[other.suffix[1:]](["Quite the same text"]))
    else:
        other = path.with_name(what)
        other.write_bytes(BESIDE[what])
    return str(other)


@pytest.mark.parametrize("seed", range(40))
def test_what_stands_beside_the_text_changes_no_token_or_is_named(seed, capsys):
    choice = random.Random(seed)
    kind = choice.choice([*FORMATS])
    files = {}
    for number in range(choice.randint(1, 4)):
        name = choice.choice([f"t/{number}.{kind}", f"t/sub/{number}.{kind}"])
        files[name] = FORMATS[kind](TEXTS[number * 10 : number * 10 + 10])
    write(files)
    prepare("t", "alone")
    expected = ids_of("alone")
    capsys.readouterr()
    added = []
    for _ in range(choice.randint(1, 4)):
        name = choice.choice([*files])
        if not os.path.lexists(target := Path(name)):
            continue
        try:
            added.append(add(choice, target, files[name], kind))
        except FileExistsError:
            continue
    source = choice.choice(["t", "t/", "t/**/*", "t*", "./t"])
    try:
        prepare(source, "out")
        found = Counter(ids_of("out"))
        said = capsys.readouterr().err
    except UserError as error:
        found = Counter()
        said = f"{capsys.readouterr().err} {error}"
    for name in added:
        is_hidden = Path(name).name.startswith(".") or Path(name).is_symlink() or Path(name).stat().st_nlink > 1
        # Two files are named, and the others after the choice.
        is_open = re.search(r" --source '\S+' \S+ --source '", said) or f"*{Path(name).suffix}'" in said
        is_read = found[ord("Q")]
        assert is_hidden or is_open or is_read or Path(name).name in said or "more file" in said, (name, said)
    assert found >= Counter(expected) or any(name in said for name in [*added, *files])


def test_each_real_file_is_found_once_and_loops_end():
    write({"t/a/0.txt": b"a", "t/1.txt": b"b", "elsewhere/2.txt": b"c"})
    Path("t/a/up").symlink_to(Path("t").absolute())
    Path("t/out").symlink_to(Path("elsewhere").absolute())
    Path("t/z.txt").hardlink_to("t/1.txt")
    for source in ("t", "t/", "t/**/*.txt", "**/t/**/*.txt"):
        files, left_out = local_files(source)
        assert [Path(file.path).name for file in files] == ["1.txt", "0.txt"], left_out
    _, [links] = local_files("t")
    found = re.fullmatch(r"t/a/up, t/out: links to folders; to read them too: --source '(.*)'", str(links))
    assert found
    assert "2.txt" in {Path(file.path).name for file in local_files("t/*")[0]}


# ---------------------------------------------------------------------------------------------------------------------
# made inputs, one for each fault that was once silent


CARD = ": cards, licences, descriptions, caches, or converted"


@pytest.mark.parametrize(("files", "read", "said"), [
    ({"train.json": lines(["a"]), "README.md": b"card"}, ["a"], f"left out t/README.md{CARD}"),
    ({"0.parquet": parquet(["a"]), "README.md": b"c", "load.py": b"p"}, ["a"], "left out t/load.py (1 bytes): .py be"),
    ({"a.txt": b"a", "clean.py": b"p"}, ["a"], ".py beside other text; to read them: --source 't/**/*.py'"),
    ({"a.txt": b"a" * 99, "b.json": lines(["b"])}, ["a" * 99], ".json beside other text; to read them: --source 't/**"),
    ({"notice_1.txt": b"a", "NOTICE.txt": b"b"}, ["a"], f"left out t/NOTICE.txt{CARD}"),
    ({"a.py": b"a", "README.md": b"card"}, ["a"], f"left out t/README.md{CARD}"),
    ({"a.jsonl": lines(["a"]), "b.txt": b"b", "c.parquet": parquet(["c"]), "d.md": b"d"}, [*"abcd"], "4 files"),
    ({"a.jsonl": lines(["a"]), "b.csv": b"text\nb\n"}, ["a"], "left out t/b.csv (7 bytes): of a format that is not"),
    ({"b.jsonl": lines(["b"]), "b.csv": b"text\nb\n"}, ["b"], f"left out t/b.csv{CARD}"),
    ({"b.lines.jsonl": lines(["b"]), "b.jsonl.original": b"[" * 99}, ["b"], f"left out t/b.jsonl.original{CARD}"),
    ({"a.arrow": arrow(["a"]), "cache-1.arrow": arrow(["b"])}, ["a"], f"left out t/cache-1.arrow{CARD}"),
])  # fmt: skip
def test_a_corpus_is_what_its_user_means(files, read, said, capsys):
    write({f"t/{name}": content for name, content in files.items()})
    prepare("t")
    assert ids_of() == ids_expected(read)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("files", "facts"), [
    ({"a.csv": b"text\na\n", "README.md": b"c"}, ("t/a.csv (7 bytes): ", "('csv', usecols=['text'], converters=")),
    ({"a.tar": b"tar", "README.md": b"c"}, ("t/a.tar (3 bytes): ", " python -m tarfile -e t/a.tar t/a,")),
    ({"README.md": b"c"}, (" t/README.md: ", ".txt")),
    ({"a.parquet": parquet(["a"]), "a.jsonl": lines(["a"])}, (" t/a.jsonl ", " t/a.parquet,")),
    ({"a.jsonl": lines(["a"]), "a.jsonl.gz": gzip.compress(lines(["b"]))}, (" t/a.jsonl ", " t/a.jsonl.gz,")),
    ({"a.txt": b"a", "b.csv": b"text\nb\n"}, ("88% of its 8 bytes", " t/b.csv (7 bytes)", "--source 't/**/*.txt'")),
    ({"a.npy": npy(np.arange(9)), "a.txt": b"a"}, (" t/a.npy (200 bytes): token ids; train.py", "docs/data.md#tok")),
])  # fmt: skip
def test_a_corpus_that_is_not_clear_is_refused(files, facts):
    write({f"t/{name}": content for name, content in files.items()})
    refused("--source t", "--source t: ", *facts)


def test_what_is_named_itself_is_read():
    write({"t/README.md": b"card", "t/load.py": b"code", "t/a.jsonl": lines(["a"])})
    prepare("t/README.md", "card")
    prepare("t/load.py", "code")
    assert (ids_of("card"), ids_of("code")) == (ids_expected(["card"]), ids_expected(["code"]))


def test_caches_of_datasets_are_left_out(capsys):
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk("saved", num_shards=2)
    saved = datasets.load_from_disk("saved")
    saved.map(lambda row: {"text": row["text"].upper()}, cache_file_name="saved/mapped.arrow")
    saved.shuffle(seed=0, indices_cache_file_name="saved/cache-indices.arrow")
    saved.filter(lambda row: len(row["text"]) > 9)
    assert len([*Path("saved").glob("*.arrow")]) >= 5
    prepare("saved")
    assert ids_of() == ids_expected(TEXTS)
    said = capsys.readouterr().err
    assert "saved/mapped.arrow: not among the files that state.json of the data set names" in said
    refused("--source saved/cache-indices.arrow --out new", "saved/cache-indices.arrow: ", "save_to_disk()")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt", "a.md"])
@pytest.mark.parametrize("pack", [
    lambda text: text.encode(), lambda text: text.encode("utf-16"), lambda text: gzip.compress(text.encode("utf-16")),
    lambda text: gzip.compress(gzip.compress(text.encode())),
    lambda text: pyarrow.compress(text.encode(), "zstd", asbytes=True),
])  # fmt: skip
def test_a_text_is_read_by_what_it_is(name, pack):
    Path(name).write_bytes(pack(TEXTS[5]))
    prepare(name)
    assert ids_of() == ids_expected([TEXTS[5]])


# ---------------------------------------------------------------------------------------------------------------------
# damaged files

DAMAGED = {
    "jsonl": b"\0" * 100 + lines(TEXTS), "jsonl.gz": gzip.compress(lines(TEXTS))[:-50], "parquet": parquet(TEXTS)[:-9],
    "json": lines(TEXTS).replace(b"{", b"\xff\xfe\xfa", 40),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_before_the_first_shard_a_damaged_file_is_named_and_the_files_may_change(kind):
    write({f"t/{number:02d}.jsonl": lines([f"{number} {text}" for text in TEXTS]) for number in range(30)})
    write({f"t/20x.{kind}": DAMAGED[kind]})
    refused("--source t", f"t/20x.{kind}: ")
    Path(f"t/20x.{kind}").unlink()
    prepare("t")
    assert len(ids_of()) == sum(len(ids_expected([f"{number} {text}" for text in TEXTS])) for number in range(30))


@pytest.mark.usefixtures("small_units")
def test_after_the_first_shard_few_damaged_files_are_skipped_and_counted(capsys):
    def good(numbers) -> list[str]:
        return [f"{number} {text}" for number in numbers for text in TEXTS]

    write({f"t/{number:02d}.jsonl": lines(good([number])) for number in range(10)})
    content = gzip.compress(lines([f"{number}{os.urandom(30).hex()}" for number in range(200)]))
    for number in range(3):
        write({f"t/05{number}.jsonl.gz": content[: -100 - number]})
    flags = "--val_share 0 --shard_size 4000"
    manifest = prepare("t", "one", flags)
    said = capsys.readouterr()
    assert len(manifest["damaged"]) == 3
    assert re.search(r"^warning: t/050\.jsonl\.gz: .*EOFError: ", said.err, re.MULTILINE)
    assert "skipped the rest of it. Once it is repaired, prepare all files in another --out" in said.err
    assert "then run this again" not in said.err  # the changed list would be refused
    assert "3 damaged files skipped" in said.out
    for workers in (2, 4):
        prepare("t", f"with{workers}", f"{flags} --num_workers {workers}")
        assert files_of(f"with{workers}") == files_of("one")
    write({"t/053.jsonl.gz": content[:-99]})
    refused(f"--source t {flags} --out more", "t/053.jsonl.gz: ", " 4 ", " 14 ", "--out")


def test_a_folder_that_grows_is_found_at_the_end(monkeypatch):
    write({f"t/{number}.jsonl": lines(TEXTS) for number in range(2)} | {"t/1.jsonl": lines(TEXTS[1:])})
    save_shards = writer.save_shards

    def grow(*arguments):
        write({"t/2.jsonl": lines(TEXTS[2:])})
        return save_shards(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "save_shards", grow)
        refused("--source t", "t/2.jsonl: ")


# ---------------------------------------------------------------------------------------------------------------------
# advice: each command that a refusal prints is run, until the original command succeeds


def table_of(rows: int, dialect: str) -> bytes:
    file = io.StringIO(newline="")
    written = csv.writer(file, dialect)
    written.writerow(["id", "text"])
    written.writerows([number, f'{TEXTS[number % 60]}, "quoted"\nand\tmore {number}'] for number in range(rows))
    return file.getvalue().encode()


def tar_of(content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_of(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


ARRAY = json.dumps([{"text": text} for text in TEXTS])
INDENTED = "".join(json.dumps({"text": text}, indent=1) + "\n" for text in TEXTS)
LARGE = 40_000  # rows of a table of two blocks
ADVICES = {
    "a.csv": table_of(200, "excel"),
    "a.tsv": table_of(200, "excel-tab"),
    "a.csv.gz": gzip.compress(table_of(200, "excel")),
    "large.csv": table_of(LARGE, "excel"),
    "a.jsonl.xz": lzma.compress(lines(TEXTS)),
    "a.txt.bz2": bz2.compress("".join(TEXTS).encode()),
    "a.tar.gz": tar_of(lines(TEXTS)),
    "a.zip": zip_of(lines(TEXTS)),
    "array.json": ARRAY.encode(),
    "array.jsonl": ARRAY.encode(),
    "array.json.gz": gzip.compress(ARRAY.encode()),
    "large.json": json.dumps([{"text": text * 200} for text in TEXTS * 20]).encode(),
    "indented.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "indented.jsonl": INDENTED.encode(),
    "with a space.jsonl": INDENTED.encode(),
    "cr.jsonl": lines(TEXTS).replace(b"\n", b"\r"),
    "a.txt": "".join(TEXTS).encode("utf-16-le"),
    "b.txt": "".join(TEXTS).encode("utf-16-be"),
}


def commands_in(message: str) -> tuple[str, str]:
    """Return the command and the --source that a message advises; "" for none."""
    command = re.search(r"(?:type|Try:|:) ((?:python|iconv|zstd|mv) .*?)(?:, then |; expected|$)", message)
    source = re.search(r" --source ('.*?'|[^\s;]+)", message)
    return command[1] if command else "", shlex.split(source[1])[0] if source else ""


def run_in_shell(command: str) -> None:
    """Run a command of a message; Python's in this process, which has `datasets` already."""
    match shlex.split(command):
        case ["python", "-c", code, *then]:
            exec(code)
            subprocess.run([*then[1:], *["true"][: not then]], check=True)
        case _:
            subprocess.run(re.sub("^python ", f"{sys.executable} ", command), shell=True, check=True)


def follow(source: str) -> None:
    """Run what the refusals of a source advise until it is prepared."""
    for _ in range(4):
        try:
            prepare(source)
            return
        except UserError as error:
            command, advised = commands_in(str(error))
            assert command or advised, str(error)
        if command:
            run_in_shell(command)
        source = advised or source
    pytest.fail(f"{source}: four advices were not enough")


ADVICES |= {"rows's [final].csv": table_of(200, "excel"), "rows in $x.csv": table_of(200, "excel")}
NAMED = ("a.csv", "a.zip", "array.json", "indented.jsonl", "with a space.jsonl", "a.txt")


@pytest.mark.parametrize(("name", "is_folder"), [
    *((name, True) for name in ADVICES), *((name, False) for name in NAMED),
])  # fmt: skip
def test_each_advice_makes_the_command_succeed(name, is_folder):
    write({f"t/{name}": ADVICES[name], "t/README.md": b"card"})
    follow("t" if is_folder else f"t/{name}")
    text = bytes(i for i in ids_of() if i < 256).decode()
    if "large" not in name:
        assert text.count("line") == 200 if "sv" in name else text == "".join(TEXTS)
    elif "sv" in name:
        assert text.count("more") == LARGE
        assert f'line, "quoted"\nand\tmore {LARGE - 1}' in text


@pytest.mark.parametrize(("name", "expected"), [
    ("corpus/rows.csv", "corpus/rows.jsonl"), ("/data/rows.jsonl", "/data/rows.lines.jsonl"), ("a.json", "a.jsonl"),
    ("./x.y/rows.jsonl.gz", "./x.y/rows.lines.jsonl"), ("rows 1.tsv.xz", "rows 1.jsonl"), ("part", "part.lines.jsonl"),
])  # fmt: skip
def test_a_converted_file_stands_beside_the_old_one(name, expected):
    assert converted(name) == expected


def test_an_archive_beside_its_content_and_an_original_beside_its_lines_are_not_missing(capsys):
    write({"t/r.zip": zip_of(lines(TEXTS)), "t/r/a.jsonl": lines(TEXTS), "t/b.jsonl.original": b"x" * 99})
    prepare("t")
    said = capsys.readouterr()
    assert "left out 99 bytes of other types" in said.out
    write({"t/b.lines.jsonl": lines(["b"])})
    prepare("t", "new")
    assert "left out" not in capsys.readouterr().out


def test_a_window_of_zstd_that_is_too_large_is_packed_again():
    Path("t").mkdir()
    # From a pipe, whose length zstd does not know, so that it does not reduce the window.
    subprocess.run(["zstd", "-q", "--long=28", "-o", "t/a.txt.zst"], input=b"some words " * 2000, check=True)
    with refusal("t/a.txt.zst", "128 MB", "zstd -d --long=31 -c t/a.txt.zst") as raised:
        prepare("t")
    subprocess.run(commands_in(str(raised.value))[0], shell=True, check=True)
    local_files("t")[0][0].open().close()
    prepare_dataset.find_source("t").check("text")


@pytest.mark.parametrize("files", [
    {"a.parquet": parquet(TEXTS), "a.jsonl": lines(TEXTS)}, {"a.csv": b"text\n" * 9, "a.txt": b"text"},
    {"train/0.jsonl": lines(TEXTS), "test/0.jsonl": lines(TEXTS[1:])}, {"a.jsonl": lines(TEXTS), "a.jsonl.gz": b"text"},
])  # fmt: skip
@pytest.mark.parametrize("source", ["t", "t/*"])
def test_each_advised_glob_makes_the_command_succeed(files, source):
    write({f"t/{name}": content for name, content in files.items()})
    if source == "t/*" and "train/0.jsonl" in files:
        return
    follow(source)


def test_a_source_of_less_than_a_row_has_a_next_command_that_works(capsys):
    for number, size in enumerate((30_000, 3)):
        Path(f"{number}.txt").write_text("x" * size)
        capsys.readouterr()
        prepare(f"{number}.txt", f"out{number}", "")
        said = capsys.readouterr()
        assert ("warning: " in said.err) == (size < 30_000)
    command = said.out.splitlines()[-1].removeprefix("next: python ")
    flags = "--max_steps 1 --warmup_steps 0 --device cpu --compile off --use_tensorboard off --sample_freq 0"
    file, *given = shlex.split(command)
    assert file == "train.py"
    assert train.main([*given, *flags.split()]) == 0
