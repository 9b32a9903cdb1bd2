"""Reading of token ids in blocks, from `.npz`, `.npy` and `.bin` files of other programs."""

import math
import zipfile
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from steadygpt.base.options import UserError
from steadygpt.data.shards import Header, headerless_dtype, read_header

ID_SUFFIXES = (".npz", ".npy", ".bin")
MASK = "attention_mask"  # the name of an array beside the ids that is 0 where these are padding


class _Array(NamedTuple):
    stream: IO[bytes]  # at the first value
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, num_bytes: int) -> np.ndarray:
        block = self.stream.read(num_bytes)
        if len(block) < num_bytes:
            raise ValueError("the file ends before its array")
        return np.frombuffer(block, self.dtype)


def read_ids(
    file: BinaryIO, suffix: str, name: str, vocab_size: int, at: int, block_bytes: int, size: int
) -> Iterator[tuple[int, float, np.ndarray]]:
    """Read the ids of a file in blocks, from the element `at` of its array on.

    Rows of a 2-D array are read one after the other. Padding is left out.

    Args:
        name: of the array in an `.npz` file that has several.
        vocab_size: implies the dtype of a file without a header.
        block_bytes: size of each block but the last, a multiple of the size of every dtype.
        size: of the file, in bytes.

    Returns: for each block, the element after it, the fraction of the array read so far, and its ids (n,).
    """
    mask: _Array | None = None
    if suffix == ".npz":
        ids, mask = _open_npz(file, name)
    else:
        ids = _open(file, suffix, file.name, size, vocab_size)
    if ids.dtype.kind == "b":
        raise UserError(f"{file.name}: holds bool; expected integer token ids")
    for array in filter(None, (ids, mask)):
        array.stream.seek(at * array.dtype.itemsize, 1)
    total = math.prod(ids.shape)
    while at < total:
        values = ids.read(min(block_bytes, (total - at) * ids.dtype.itemsize))
        at += len(values)
        if mask:
            values = values[mask.read(len(values) * mask.dtype.itemsize) != 0]
        yield at, at / total, values


def _open_npz(file: BinaryIO, name: str) -> tuple[_Array, _Array | None]:
    """Open the array with the name, or else the only array that is no mask; and the mask of this array."""
    archive = zipfile.ZipFile(file)
    members = {member.removesuffix(".npy"): member for member in archive.namelist()}
    names = [array for array in members if "mask" not in array]
    if name in members:
        names = [name]
    if len(names) != 1:
        arrays = ", ".join(members) or "no arrays"
        raise UserError(f"{file.name}: found {arrays}; expected one array of token ids, or its name as --text_field")
    ids = _open(archive.open(members[names[0]]), ".npy", f"{file.name}: {names[0]}")
    if MASK not in members or names[0] == MASK:
        return ids, None
    mask = _open(archive.open(members[MASK]), ".npy", f"{file.name}: {MASK}")
    if mask.shape != ids.shape:
        raise UserError(f"{file.name}: {MASK} has shape {mask.shape}, expected {ids.shape}, that of {names[0]}")
    return ids, mask


def _open(stream: Any, suffix: str, name: str, size: int = 0, vocab_size: int = 0) -> _Array:
    """Open an array; a `.bin` file needs its `size` in bytes and the `vocab_size` of its ids."""
    header = read_header(stream, suffix)
    if header is None:  # a file of nanoGPT: only ids
        dtype = headerless_dtype(stream, size, vocab_size)
        header = Header((size // dtype.itemsize,), False, dtype)
    ids = _Array(stream, header.shape, header.dtype)
    is_shape = len(ids.shape) in (1, 2) and all(type(size) is int and size >= 0 for size in ids.shape)
    if header.dtype.kind not in "iub" or not is_shape or (header.is_fortran and len(ids.shape) == 2):
        order = " in Fortran order" if header.is_fortran else ""
        raise UserError(
            f"{name}: holds {ids.dtype} of shape {ids.shape}{order}; expected one row or rows of integer token ids"
        )
    return ids
