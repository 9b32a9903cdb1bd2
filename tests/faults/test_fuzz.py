"""2,000 mutated files for each reader: it reads them or raises a one-line UserError, never another exception."""

import contextlib
import io
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import run_here, write_data

from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import read_checkpoint
from steadygpt.checkpoint.table import checkpoint_table
from steadygpt.data.shards import ShardSet, open_shard

FEW, MANY = 300, 2000  # files in the fast suite, and in the fault storm


def mutate(content: bytes, rng: random.Random, header: int | None = None) -> bytes:
    """Make a few random changes, most of them within the first `header` bytes."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(1 + min(len(content), header if header and rng.random() < 0.8 else len(content)))
        length = rng.choice([1, 2, 4, 8, 100, 5000])
        match rng.choice("flip flip flip flip noise zeros digits cut insert truncate".split()):
            case "flip":
                content[at : at + 1] = bytes(byte ^ (1 << rng.randrange(8)) for byte in content[at : at + 1])
            case "noise":
                content[at : at + length] = rng.randbytes(length)
            case "zeros":
                content[at : at + length] = bytes(length)
            case "digits":
                content[at : at + length] = b"9" * length
            case "cut":
                del content[at : at + length]
            case "insert":
                content[at:at] = content[:length]
            case "truncate":
                del content[at:]
    return bytes(content)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(300, dtype=np.uint16))
    return file.getvalue()


def llmc() -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 300
    return header.tobytes() + np.arange(300, dtype="<u2").tobytes()


SHARDS = {
    "x_train_000000.npy": (npy(), 128),
    "x_train_000000.bin": (llmc(), 16),
    "train.bin": (np.arange(300, dtype="<u2").tobytes(), None),
}


@pytest.mark.parametrize("files", [FEW, pytest.param(MANY, marks=pytest.mark.storm)])
@pytest.mark.parametrize("name", SHARDS)
def test_mutated_shards_are_read_or_refused(tmp_path, name, files):
    original, header = SHARDS[name]
    path, rng, read = tmp_path / name, random.Random(name), 0
    for _ in range(files):
        path.write_bytes(mutate(original, rng, header))
        try:
            shard = open_shard(path)
            ShardSet("", "", "train", [shard], None).check(vocab_size=300)
            assert shard.num_tokens == len(shard.tokens())
            read += 1
        except UserError as error:
            assert "\n" not in str(error)
            assert name in str(error)
    assert 0 < read < files  # some mutations only change tokens, within the vocabulary


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("fuzz")
    write_data(folder / "data")
    with contextlib.chdir(folder):
        assert run_here("--max_steps", "3", "--num_layers", "1") == 0
        return Path("checkpoints/latest.pt").read_bytes()


def rezipped(content: bytes, rng: random.Random) -> bytes:
    """Mutate one record and give it a valid checksum, so that torch.load reads the mutated record."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        names = old.namelist()
        victim = rng.choice([name for name in names if name.endswith("data.pkl")] * 5 + names)
        for name in names:
            new.writestr(name, mutate(old.read(name), rng) if name == victim else old.read(name))
    return file.getvalue()


@pytest.mark.parametrize("files", [FEW, pytest.param(MANY, marks=pytest.mark.storm)])
@pytest.mark.parametrize(("change", "share"), [(mutate, 0.9), (rezipped, 0.1)])
def test_mutated_checkpoints_are_read_or_refused(tmp_path, checkpoint, change, share, files):
    path, rng, read, files = tmp_path / "latest.pt", random.Random(1), 0, round(share * files)
    for number in range(files):
        path.write_bytes(change(checkpoint, rng))
        try:
            assert read_checkpoint(path)["model"]
            read += 1
        except UserError as error:
            assert "\n" not in str(error)
            assert str(error).startswith(f"{path}: ")
        if number % 10 == 0:
            assert len(list(checkpoint_table(tmp_path))) == 3  # header, this file and the summary
    assert 0 < read < files
