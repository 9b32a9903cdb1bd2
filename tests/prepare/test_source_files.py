"""Tests of steadygpt/prepare/source_files.py: each real file once, through whatever links."""

import os
import random
from pathlib import Path

import pytest

from steadygpt.base.options import UserError
from steadygpt.prepare.source_files import find_files


def reachable(folder: Path) -> set[str]:
    """Return the real paths of the .txt files that links and folders lead to."""
    seen = set[str]()
    files = set[str]()
    waiting = [folder]
    while waiting:
        path = Path(os.path.realpath(waiting.pop()))
        if str(path) in seen or not path.exists():
            continue
        seen.add(str(path))
        if path.is_dir():
            waiting += path.iterdir()
        elif path.suffix == ".txt":
            files.add(str(path))
    return files


def make_tree(choice: random.Random) -> None:
    """Make folders with files, with links to files, to folders beside and above, to nothing, and hard links."""
    folders = [Path("t")]
    folders[0].mkdir()
    for number in range(choice.randint(0, 6)):
        folders.append(choice.choice(folders) / f"f{number}")
        folders[-1].mkdir()
    files = [choice.choice(folders) / f"{number}.txt" for number in range(choice.randint(1, 8))]
    for file in files:
        file.write_text(file.name)
    for number in range(choice.randint(0, 8)):
        place = choice.choice(folders) / f"{choice.choice('ax')}{number}"
        target = choice.choice([*folders, *files, Path("nothing")]).absolute()
        if target.suffix == ".txt":
            place = place.with_suffix(".txt")
        if target in map(Path.absolute, files) and choice.random() < 0.5:
            place.hardlink_to(target)
        else:
            place.symlink_to(target)


@pytest.mark.parametrize("seed", range(60))
def test_each_real_file_is_found_once_and_loops_end(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    make_tree(random.Random(seed))
    expected = {os.stat(path).st_ino for path in reachable(Path("t"))}
    for source in (
        "t",
        "t/",
        "t/**",
        "t/**/*.txt",
        "**/*.txt",
        "./t/**",
        "t*",
        "**/t/**/*.txt",
        str(tmp_path / "t/**/*"),
    ):
        found = find_files(source)
        assert sorted(path.stat().st_ino for path in found) == sorted(expected), source
        assert found == sorted(found)


def test_the_number_of_repeated_names_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t/sub").mkdir(parents=True)
    for number in range(10):
        Path(f"t/sub/{number}.txt").write_text("a")
    Path("t/sub/up").symlink_to(tmp_path / "t")
    Path("t/other.txt").hardlink_to("t/sub/3.txt")
    assert len(find_files("t/**/*.txt")) == 10
    assert capsys.readouterr().err == "t/**/*.txt: left out 1 link to files and folders that have another name here\n"
    Path("d/a").mkdir(parents=True)
    Path("d/a/0.txt").write_text("a")
    Path("d/latest").symlink_to("a")
    assert find_files("d/*") == [Path("d/a/0.txt")]
    assert "left out 1 link to" in capsys.readouterr().err


def test_a_glob_stays_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c/1.txt", "a/b/2.txt", "a/.hidden/3.txt", "a/x[1]/4.txt", "a/b/5.jsonl", "6.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("a")
    for pattern, names in {
        "a/**/*.txt": "a/b/2.txt a/b/c/1.txt a/x[1]/4.txt",
        "**/b/*.txt": "a/b/2.txt",
        "a/**/c/**/*.txt": "a/b/c/1.txt",
        "a/*/*.txt": "a/b/2.txt a/x[1]/4.txt",
        "**/*.txt": "6.txt a/b/2.txt a/b/c/1.txt a/x[1]/4.txt",
        "a**/*/2.txt": "a/b/2.txt",
        "a/x[[]1]/**": "a/x[1]/4.txt",
        "a/?/**/[15].*": "a/b/5.jsonl a/b/c/1.txt",
    }.items():
        assert [str(path) for path in find_files(pattern)] == names.split(), pattern


def test_a_pipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("a.txt")
    for source in ("a.txt", "*.txt"):
        with pytest.raises(UserError, match=r"a\.txt: not a regular file"):
            find_files(source)
