"""Reading of token ids in blocks, from `.npz`, `.npy` and `.bin` files of other programs."""

import io
import math
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from steadygpt.data.shards import Header, headerless_dtype, read_header

ID_SUFFIXES = (".npz", ".npy", ".bin")


def read_ids(
    file: BinaryIO, suffix: str, name: str, vocab_size: int, at: int, block_bytes: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Read the ids of a file in blocks, from the element `at` of its array on.

    Rows of a 2-D array are read one after the other.

    Args:
        name: of the array in an `.npz` file that has several.
        vocab_size: implies the dtype of a file without a header.
        block_bytes: size of each block but the last, a multiple of the size of every dtype.

    Returns: for each block, the element after it, and its ids (n,).

    Raises: ValueError if the file holds no token ids.
    """
    stream: Any = file
    array = ""
    if suffix == ".npz":
        stream, array = _open_member(file, name)
    header = read_header(stream, ".npy" if suffix == ".npz" else suffix)
    if header is None:  # a file of nanoGPT: only ids
        size = file.seek(0, io.SEEK_END)
        dtype = headerless_dtype(file, size, vocab_size)
        header = Header((size // dtype.itemsize,), False, dtype)
    is_shape = len(header.shape) in (1, 2) and all(type(size) is int and size >= 0 for size in header.shape)
    if header.dtype.kind not in "iu" or not is_shape or (header.is_fortran and len(header.shape) == 2):
        order = " in Fortran order" if header.is_fortran else ""
        raise ValueError(
            f"{array}holds {header.dtype} of shape {header.shape}{order}; expected one row or rows of integer token ids"
        )
    itemsize = header.dtype.itemsize
    stream.seek(at * itemsize, io.SEEK_CUR)
    total = math.prod(header.shape)
    while at < total:
        wanted = min(block_bytes, (total - at) * itemsize)
        block = stream.read(wanted)
        if len(block) < wanted:
            raise ValueError("the file ends before its array")
        at += wanted // itemsize
        yield at, np.frombuffer(block, header.dtype)


def _open_member(file: BinaryIO, name: str) -> tuple[Any, str]:
    """Open the array with the name, or else the only array of an `.npz` file; return it and its name with a colon."""
    archive = zipfile.ZipFile(file)
    members = {member.removesuffix(".npy"): member for member in archive.namelist()}
    names = [name] if name in members else [*members]
    if len(names) != 1:
        arrays = ", ".join(members) or "no arrays"
        raise ValueError(f"found {arrays}; expected one array of token ids, or its name as --text_field")
    return archive.open(members[names[0]]), f"{names[0]}: "
