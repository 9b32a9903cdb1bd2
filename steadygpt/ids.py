"""Token ids in `.npz`, `.npy` and `.bin` files of other programs: read in blocks, and checked against a vocabulary."""

import zipfile
from collections.abc import Iterator
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from steadygpt.cli import UserError
from steadygpt.shards import Header, read_header, token_dtype

ID_SUFFIXES = (".npz", ".npy", ".bin")
MASK = "attention_mask"  # an array beside the ids, 0 where they are padding
BLOCK_BYTES = 2**20  # of ids in memory at once; a multiple of each dtype's size


class Ids(NamedTuple):
    """A block of an array of token ids."""

    values: np.ndarray | bytes  # (n,) integers; bytes if the tokenizer implies their dtype
    mask: np.ndarray | None = None  # (n,) bool, False where the ids are padding


class _Array(NamedTuple):
    stream: IO[bytes]  # at the first value
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, num_bytes: int) -> np.ndarray:
        block = self.stream.read(num_bytes)
        if len(block) < num_bytes:
            raise ValueError("the file ends before its array")
        return np.frombuffer(block, self.dtype)

    def seek(self, offset: int) -> None:
        self.stream.seek(offset, 1)


def read_ids(file: BinaryIO, suffix: str, name: str, offset: int, size: int) -> Iterator[tuple[int, int, float, Ids]]:
    """Read the ids of a file in blocks of BLOCK_BYTES, from a byte of their array on.

    Rows of a 2-D array are read one after the other.

    Args:
        name: of the array in an `.npz` file that has several.
        size: of the file, in bytes.

    Returns: of each block where it begins and how many bytes it has, the fraction of the array that is read, its ids.

    Raises: UserError when the file holds no array of ids; ValueError when it is damaged.
    """
    if suffix == ".npz":
        ids, mask = _open_npz(file, name)
    else:
        ids, mask = _open(file, suffix, file.name, size), None
    ids.seek(offset)
    if mask:
        mask.seek(offset // ids.dtype.itemsize * mask.dtype.itemsize)
    while (count := min(BLOCK_BYTES, ids.num_bytes - offset)) > 0:
        values = ids.read(count)
        keep = mask.read(len(values) * mask.dtype.itemsize) != 0 if mask else None
        no_dtype = ids.dtype.kind == "V"
        yield offset, count, (offset + count) / ids.num_bytes, Ids(values.tobytes() if no_dtype else values, keep)
        offset += count


def _open_npz(file: BinaryIO, name: str) -> tuple[_Array, _Array | None]:
    """Open the only array that is no mask, or the one with the name, and its mask."""
    archive = zipfile.ZipFile(file)
    arrays = {member.removesuffix(".npy"): member for member in archive.namelist()}
    others = [array for array in arrays if "mask" not in array]
    if name in arrays:
        others = [name]
    if len(others) != 1:
        found = ", ".join(arrays) or "no arrays"
        raise UserError(f"{file.name}: found {found}; expected one array of token ids, or its name as --text_field")
    ids = _open(archive.open(arrays[others[0]]), ".npy", f"{file.name}: {others[0]}")
    if MASK not in arrays or others[0] == MASK:
        return ids, None
    mask = _open(archive.open(arrays[MASK]), ".npy", f"{file.name}: {MASK}")
    if mask.shape != ids.shape:
        raise UserError(f"{file.name}: {MASK} has shape {mask.shape}, expected {ids.shape}, that of {others[0]}")
    return ids, mask


def _open(stream: IO[bytes], suffix: str, name: str, size: int = 0) -> _Array:
    """Open an array; `size` is that of a `.bin` file."""
    header = read_header(stream, suffix)
    if header is None:  # nanoGPT's: only ids
        stream.seek(0)
        header = Header((size,), False, np.dtype("V1"))
    ids = _Array(stream, header.shape, header.dtype)
    if suffix == ".bin" and stream.tell() + ids.num_bytes != size:
        raise ValueError(f"its header says {ids.shape[0]:,} tokens, but it has {size:,} bytes")
    if ids.dtype.kind not in "iubV" or len(ids.shape) not in (1, 2) or (header.is_fortran and len(ids.shape) == 2):
        order = " in Fortran order" * header.is_fortran
        raise UserError(
            f"{name}: holds {ids.dtype} of shape {ids.shape}{order}; expected one row or rows of integer token ids"
        )
    return ids


def check_ids(name: str, offset: int, ids: Ids, vocab_size: int) -> np.ndarray:
    """Return the ids of a block without padding, in the dtype of shards.

    Args:
        offset: where the block begins in its array, in bytes.

    Raises: UserError that names the first id outside the vocabulary.
    """
    values, mask = ids
    dtype = token_dtype(vocab_size)
    if isinstance(values, bytes):
        if len(values) % dtype.itemsize:
            raise UserError(f"{name}: not a whole number of {dtype.name} token ids; copy it again, or see --tokenizer")
        values = np.frombuffer(values, dtype)
    is_bad = (values < 0) | (values >= vocab_size)
    if mask is not None:
        is_bad &= mask
    if is_bad.any():
        at = int(is_bad.argmax())
        raise UserError(
            f"{name}: token {offset // values.itemsize + at:,} is {values[at]}, outside the vocabulary of "
            f"{vocab_size:,}; name the tokenizer that wrote it with --tokenizer"
        )
    return (values if mask is None else values[mask]).astype(dtype)
