"""Token ids in `.npz`, `.npy` and `.bin` files of other programs: read in blocks, and checked against a vocabulary."""

import math
import zipfile
from collections.abc import Iterator
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.data.shards import Header, headerless_ids, read_header, token_dtype

ID_SUFFIXES = (".npz", ".npy", ".bin")
MASK = "attention_mask"  # an array beside the ids, 0 where they are padding
BLOCK_BYTES = 2**20  # of ids in memory at once; a multiple of each dtype's size


class _Array(NamedTuple):
    stream: IO[bytes]  # at the first value
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, num_bytes: int) -> np.ndarray:
        block = self.stream.read(num_bytes)
        if len(block) < num_bytes:
            raise ValueError("the file ends before its array")
        return np.frombuffer(block, self.dtype)


def read_ids(
    file: BinaryIO, suffix: str, name: str, offset: int, size: int
) -> Iterator[tuple[int, int, float, np.ndarray]]:
    """Read the ids of a file in blocks of BLOCK_BYTES, from a byte of their array on.

    Rows of a 2-D array are read one after the other. Padding is left out.

    Args:
        name: of the array in an `.npz` file that has several.
        size: of the file, in bytes.

    Returns: of each block where it begins and how many bytes it has, the fraction of the array that is read, its ids
        (n,); single bytes of void dtype if the vocabulary implies the dtype.
    """
    if suffix == ".npz":
        ids, mask = _open_npz(file, name)
    else:
        ids, mask = _open(file, suffix, file.name, size), None
    for array in filter(None, (ids, mask)):
        array.stream.seek(offset // ids.dtype.itemsize * array.dtype.itemsize, 1)
    while (count := min(BLOCK_BYTES, ids.num_bytes - offset)) > 0:
        values = ids.read(count)
        if mask:
            values = values[mask.read(len(values) * mask.dtype.itemsize) != 0]
        yield offset, count, (offset + count) / ids.num_bytes, values
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
    is_integer = header is None or header.dtype.kind in "iub"
    if header is None:  # nanoGPT's: only ids
        stream.seek(0)
        header = Header((size,), False, np.dtype("V1"))
    ids = _Array(stream, header.shape, header.dtype)
    is_shape = len(ids.shape) in (1, 2) and all(type(size) is int and size >= 0 for size in ids.shape)
    if not is_integer or not is_shape or (header.is_fortran and len(ids.shape) == 2):
        order = " in Fortran order" * header.is_fortran
        raise UserError(
            f"{name}: holds {ids.dtype} of shape {ids.shape}{order}; expected one row or rows of integer token ids"
        )
    return ids


def check_ids(name: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the ids of a block in the dtype of shards."""
    if ids.dtype.kind == "V":
        ids = headerless_ids(name, ids, vocab_size)
    is_bad = (ids < 0) | (ids >= vocab_size)
    if is_bad.any():
        raise UserError(
            f"{name}: holds token id {ids[is_bad][0]}, outside the vocabulary of {vocab_size:,}; name the tokenizer "
            "that wrote it with --tokenizer"
        )
    return ids.astype(token_dtype(vocab_size))
