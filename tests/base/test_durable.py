"""Atomic file writes, and folder locks."""

import errno
import fcntl
import io
import os
import socket
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from steadygpt.base import durable
from steadygpt.base.durable import fsync, lock_folder, replace_file


def test_replace_file_keeps_the_old_content_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write(b"half of the new")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"


@pytest.mark.parametrize("supported", [True, False])
def test_fsync_on_macos_is_a_full_fsync_where_the_file_system_supports_it(supported, monkeypatch):
    calls = []

    def full_fsync(descriptor, command):
        calls.append((descriptor, command))
        if not supported:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_fsync)
    monkeypatch.setattr(os, "fsync", calls.append)
    fsync(7)
    assert calls == [(7, 51)] + [7] * (not supported)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=20_000), max_size=5))
def test_uncached_file_writes_the_same_bytes_in_pieces(chunks):
    for folder in filter(os.path.isdir, (tempfile.gettempdir(), "/dev/shm")):
        with tempfile.TemporaryDirectory(dir=folder) as name, mock.patch.object(durable, "PIECE_BYTES", 4096):
            with durable.open_new(Path(name, "file"), cached=False) as file:
                assert [file.write(chunk) for chunk in chunks] == [len(chunk) for chunk in chunks]
            assert Path(name, "file").read_bytes() == b"".join(chunks)


def test_a_large_file_leaves_the_page_cache_piece_by_piece(tmp_path, monkeypatch):
    calls = []
    for call in ("fdatasync", "posix_fadvise"):
        monkeypatch.setattr(os, call, lambda *_, call=call: calls.append(call))
    replace = durable.write_temporary(tmp_path / "file", lambda file: file.write(bytes(2**26)), cached=False)
    assert (replace.stat().st_size, calls) == (2**26, ["fdatasync", "posix_fadvise"] * 2)


def test_full_disk_during_an_uncached_write_is_an_oserror():
    with pytest.raises(OSError) as caught, io.BufferedWriter(durable.UncachedFile("/dev/full", "wb")) as file:
        torch.save({"weight": torch.zeros(2**23)}, file)
    assert caught.value.errno == errno.ENOSPC


def test_a_temporary_file_of_a_killed_process_is_replaced(tmp_path):
    (tmp_path / ".file.tmp").write_text("a part")
    replace_file(tmp_path / "file", lambda file: file.write(b"new"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize(("files", "left", "has_none"), [(9, 0, True), (9, 1, False), (0, 0, False)])
def test_a_file_system_without_inodes_is_named(tmp_path, monkeypatch, files, left, has_none):
    """One without a limit, such as btrfs, reports 0 of 0."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=files, f_favail=left))
    monkeypatch.setattr(Path, "open", failing(errno.ENOSPC))
    with pytest.raises(OSError) as caught:
        replace_file(tmp_path / "file", lambda file: file.write(b"new"))
    assert ("df -i" in str(caught.value)) == has_none


def test_lock_is_released_when_its_file_is_closed(tmp_path):
    lock = lock_folder(tmp_path, "wait")
    with refusal(f"{tmp_path}: ", f" {os.getpid()} ", socket.gethostname(), "; wait"):
        lock_folder(tmp_path, "wait")
    lock.close()
    lock_folder(tmp_path, "wait").close()


def test_a_lock_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    with refusal(f"{tmp_path}/.lock: "):
        lock_folder(tmp_path, "wait")
    assert (tmp_path / "precious").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------------------
# file systems that lack something


def failing(number: int):
    """Return a function that raises the OSError of a system call, which names no path."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_fsync_folders_still_replaces_files(tmp_path, monkeypatch, number):
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (failing(number) if stat.S_ISDIR(os.fstat(file).st_mode) else real)(file)
    )
    for text in (b"one", b"two"):
        replace_file(tmp_path / "file", lambda file, text=text: file.write(text))
    assert (tmp_path / "file").read_bytes() == b"two"


def test_other_errors_of_an_fsync_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError) as raised:
        durable.fsync_folder(tmp_path)
    assert raised.value.filename == str(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with refusal(f"{tmp_path}/.lock: {os.strerror(number)}; "):
        lock_folder(tmp_path, "wait")
