"""prepare_dataset.py in this process: to run, to interrupt and to refuse it, and to read what it has written."""

import hashlib
import io
import json
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from conftest import refusal

import prepare_dataset
from steadygpt.base.options import UserError
from steadygpt.data.shards import read_manifest
from steadygpt.prepare import documents, sources, writer

END = 256  # <|endoftext|> of the byte tokenizer
DEFAULTS = ("--tokenizer", "bytes", "--num_workers", "1")  # one worker is this process


def prepare(source: str, out="out", flags="--val_share 0") -> dict:
    """Run the command and return the manifest; of an option that is given twice, the last one counts."""
    assert prepare_dataset.main(["--source", source, "--out", out, *DEFAULTS, *shlex.split(flags)]) == 0
    return read_manifest(Path(out))


def prepare_stopped(source: str, out: str, flags: str, at="sha256_of", before=0) -> None:
    """Press Ctrl-C in a function of writer.py or prepare_dataset.py, once it has been called `before` times."""
    module = writer if hasattr(writer, at) else prepare_dataset
    function = Mock(wraps=getattr(module, at), side_effect=[*[DEFAULT] * before, KeyboardInterrupt])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, at, function)
        prepare(source, out, flags)


def prepare_interrupted(source: str, out: str, flags: str) -> int:
    """Press Ctrl-C after each shard, when it is written but not in the manifest; return how often."""
    sha256_of, seen = writer.sha256_of, set()

    def write_then_stop(path):
        digest = sha256_of(path)
        if path.name not in seen:
            seen.add(path.name)
            raise KeyboardInterrupt
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "sha256_of", write_then_stop)
        while True:
            with suppress(KeyboardInterrupt):
                prepare(source, out, flags)
                return len(seen)


@pytest.fixture
def small_units(monkeypatch) -> None:
    """Read files in units of about 2 kB."""
    for module in (documents, sources):
        monkeypatch.setattr(module, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(documents, "CUT_WINDOW", 20)


def refused(flags: str, *facts: str, kind: type[Exception] = UserError) -> None:
    """Check that a command ends with one line that has these facts."""
    with refusal(*facts, kind=kind):
        prepare_dataset.main([*DEFAULTS, "--out", "out", *shlex.split(flags)])


def ids_of(out="out", split="*") -> list[int]:
    """Return all tokens of a folder's shards, train before val."""
    paths = sorted(Path(out).glob(f"*_{split}_*.npy"))
    return [int(token) for path in paths for token in np.load(path)]


def ids_expected(texts: Iterable[str]) -> list[int]:
    return [token for text in texts for token in (END, *text.encode())]


def files_of(out: str) -> dict[str, str]:
    """Return name -> SHA-256 of the shards, the manifest and the tokenizer in a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(out).iterdir() if p.name != ".lock"}


def write_rows(path: str, texts: Iterable[object]) -> None:
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
