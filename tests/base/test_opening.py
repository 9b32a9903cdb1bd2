"""What others may have made is opened by two functions: no pipe, no device, no link to write through, bounded sizes."""

import ast
import os
import socket

import pytest
from conftest import REPO

from steadygpt.base.opening import open_to_read, open_to_write, read_file
from steadygpt.base.options import UserError

# Calls that open a path, or may: of Python, NumPy, PyTorch, safetensors, Arrow. Others take an open file.
OPENING = {
    "open", "fdopen", "FileIO", "touch", "read_text", "read_bytes", "write_text", "write_bytes", "copyfile", "copy2",
    "memmap", "fromfile", "tofile", "loadtxt", "load", "save", "load_file", "save_file", "safe_open",
    "ZipFile", "ParquetFile", "memory_map",
}  # fmt: skip
OURS = r"""
    steadygpt/__init__.py: path.read_bytes()    # this program
    steadygpt/base/options.py: ELSEWHERE.read_text()
    scripts/options_page.py: PAGE.write_text(with_lists(PAGE.read_text()))
    scripts/options_page.py: PAGE.read_text()
    scripts/figures.py: (REPO / 'benchmarks/results.toml').read_text()
    scripts/figures.py: path.read_text()
    scripts/figures.py: path.write_text(with_figures(results, page, path.read_text()))

    steadygpt/log/system.py: path.read_text()    # of the system
    steadygpt/machine/host.py: (CGROUP / limit).read_text()
    steadygpt/machine/host.py: Path('/proc/self/stat').read_text()
    steadygpt/machine/host.py: Path('/proc/meminfo').read_text()
    steadygpt/machine/ranks.py: Path('/proc/1/cmdline').read_bytes()
    steadygpt/machine/device.py: cpu_flags.read_text()
    steadygpt/base/options.py: os.open(os.devnull, os.O_WRONLY)
    steadygpt/base/options.py: open(os.devnull, 'w')
    steadygpt/start/machines.py: mark.touch()    # a name that was just drawn
    steadygpt/base/durable.py: os.open(folder, os.O_RDONLY)    # to fsync a folder

    generate.py: Path(path).read_bytes()    # a prompt, named by the user, who may name a pipe
    convert_hf.py: (temporary / name).write_bytes(text.encode())    # in a folder that was just made
    convert_hf.py: safetensors.torch.save_file(weights, temporary / 'model.safetensors', metadata={'format': 'pt'})
    steadygpt/base/durable.py: shutil.copy2(source, temporary)    # a file that was just written

    convert_hf.py: torch.save(content, file)    # an open file, or an object of ours
    steadygpt/checkpoint/writer.py: torch.save(checkpoint, file)
    steadygpt/checkpoint/files.py: zipfile.ZipFile(file)
    steadygpt/checkpoint/files.py: _Plain(io.BytesIO(pickled)).load()
    steadygpt/checkpoint/files.py: load(self)
    steadygpt/data/shards.py: np.memmap(file, self.dtype, mode='r', offset=self.offset, shape=(self.num_tokens,))
    steadygpt/prepare/ids.py: zipfile.ZipFile(file)
    steadygpt/prepare/ids.py: archive.open(members[names[0]])
    steadygpt/prepare/ids.py: archive.open(members[MASK])
    steadygpt/prepare/documents.py: pq.ParquetFile(source.file)
    steadygpt/prepare/sources.py: self.remote[file].open()
"""
ALLOWED = {line.partition("  #")[0].strip() for line in OURS.splitlines() if line.strip()}
# With methods so named.
OBJECTS = {"Suite", "Manifest", "manifest", "log", "run.log", "self", "shards", "tl"}


def calls_that_open():
    """Yield FILE: CALL for each call in the product that may open a path without the two functions."""
    for path in [*REPO.glob("*.py"), *REPO.glob("steadygpt/**/*.py"), *REPO.glob("scripts/*.py")]:
        if path.name == "opening.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node)
            if isinstance(node.func, ast.Attribute):
                of_object = ast.unparse(node.func.value) in OBJECTS or text.startswith("dataclasses.replace(manifest")
                if node.func.attr not in OPENING or of_object:
                    continue
            elif not (isinstance(node.func, ast.Name) and node.func.id in {"open", *OPENING} - {"read_text", "save"}):
                continue
            if not any(isinstance(part, ast.Call) and ast.unparse(part.func) == "regular" for part in node.args):
                yield f"{path.relative_to(REPO)}: {text}"


def test_nothing_else_opens_the_path_of_a_run_data_a_bundle_a_mirror_or_a_preset():
    assert set(calls_that_open()) == ALLOWED


@pytest.fixture
def folder(tmp_path):
    """A folder with each kind of thing that may be in the place of a file."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to zeros").symlink_to("/dev/zero")
    (tmp_path / "to a terminal").symlink_to("/dev/tty")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    return tmp_path


NO_FILES = ("pipe", "to zeros", "to a terminal", "socket")


def test_only_files_are_read_also_behind_links(folder):
    found = {}
    for path in folder.iterdir():
        try:
            found[path.name] = read_file(path)
        except (UserError, OSError) as error:
            found[path.name] = str(error).removeprefix(f"{path}: ")
    refused = "a pipe or a device; expected a file. Remove it, or give another path"
    assert {name: found.pop(name) for name in ("file", "link")} == dict.fromkeys(("file", "link"), b"content")
    assert {name: found.pop(name) for name in NO_FILES} == dict.fromkeys(NO_FILES, refused)
    assert found.pop("sparse") == "1.1 TB; expected at most 1.07 GB. Move it away, or give another file"
    assert found.keys() == {"dangling", "folder"}  # errors of open()
    assert open_to_read(folder / "file").read() == b"content"


@pytest.mark.parametrize("mode", ["ab", "a+b", "r+b", "wb", "xb", "a+", "a"])
def test_nothing_is_written_through_a_link_or_into_a_pipe(folder, mode):
    for path in list(folder.iterdir()):
        if path.name in ("file", "sparse") and "x" not in mode:
            open_to_write(path, mode).close()
        else:
            with pytest.raises((UserError, OSError)):
                open_to_write(path, mode)
    assert not (folder / "nothing").exists()
    assert (folder / "file").read_bytes() == (b"" if mode == "wb" else b"content")
    assert "new" not in os.listdir(folder)
    if "r" not in mode:
        open_to_write(folder / "new", mode).close()
