"""Atomic file writes, folder locks, and lines from the end of a file."""

import errno
import fcntl
import os
import stat

import pytest

from steadygpt.base import durable
from steadygpt.base.durable import fsync, lock_folder, replace_file
from steadygpt.base.options import UserError


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


# ---------------------------------------------------------------------------------------------------------------------
# file systems that lack something


def failing(number: int):
    """Return a function that raises the OSError of a system call, which names no path."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_fsync_folders_is_told_once(tmp_path, monkeypatch, capsys, number):
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (failing(number) if stat.S_ISDIR(os.fstat(file).st_mode) else real)(file)
    )
    for text in (b"one", b"two"):
        replace_file(tmp_path / "file", lambda file, text=text: file.write(text))
    assert (tmp_path / "file").read_bytes() == b"two"
    warning = f"warning: {tmp_path}: its file system cannot fsync a folder, so after a power cut the newest files may"
    assert capsys.readouterr().err.count(warning) == 1


def test_other_errors_of_an_fsync_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError) as raised:
        durable.fsync_folder(tmp_path)
    assert raised.value.filename == str(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(UserError) as raised:
        lock_folder(tmp_path, "wait")
    message = f"cannot write to {tmp_path}/.lock: {os.strerror(number)}; expected a writable folder"
    assert str(raised.value).startswith(message)
