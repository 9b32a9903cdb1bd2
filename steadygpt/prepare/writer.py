"""Writing of token ids to the shards of a folder, which can be resumed after a kill.

Ids are gathered in memory until they fill a shard of train. One save writes this shard, then the validation ids so far
as another one, then the manifest. After a kill, a preparation resumes from the last manifest.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from steadygpt.base.durable import replace_file, sha256_of
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.data.shards import ShardEntry
from steadygpt.prepare.documents import NO_TEXT, REPAIR, Block
from steadygpt.prepare.encode import Encoded
from steadygpt.prepare.manifest import Manifest
from steadygpt.prepare.validation import ValidationSample

NAMED_SKIPS = 5  # skipped rows that are named on stderr; empty rows are only counted
DAMAGED_FILES = 3  # most that are skipped, or one in a hundred
Gathered = dict[str, bytearray]  # split -> ids, which are written without a copy in memory


def save_shards(out: Path, manifest: Manifest, gathered: Gathered) -> list[ShardEntry]:
    """Write the gathered ids as new shards, and then the manifest; return the shards so far.

    Raises: OSError with errno and path, for example on a full disk.
    """
    for split, buffer in gathered.items():
        ids = np.frombuffer(buffer, manifest.dtype)
        count = -(-len(ids) // manifest.options.shard_size)  # more than one only if a unit is larger than a shard
        for tokens in np.array_split(ids, count) if count else []:
            number = sum(shard["split"] == split for shard in manifest.shards)
            path = out / f"{manifest.options.name}_{split}_{number:06d}.npy"
            replace_file(path, partial(np.save, arr=tokens))
            entry = ShardEntry(file=path.name, split=split, tokens=len(tokens), sha256=sha256_of(path))
            manifest.shards.append(entry)
    manifest.save(out)
    return manifest.shards


def write_shards(
    encoded: Iterable[tuple[list[Block], Encoded]], out: Path, manifest: Manifest, num_files: int
) -> Manifest:
    """Write the missing shards, report what is skipped, and return the manifest, which is not complete yet.

    Args:
        encoded: units and their ids, from the unit at manifest.next on.
        num_files: of the source.
    """
    gathered: Gathered = {"train": bytearray(), "val": bytearray()}
    shard_size = manifest.options.shard_size
    num_named = 0
    with ThreadPoolExecutor(1) as writer:  # so that the workers get units during a save
        saving: Future[list[ShardEntry]] | None = None
        for unit, ids in encoded:
            num_gathered = len(gathered["train"]) // ids.ids.itemsize
            if num_gathered and num_gathered + len(ids.ids) > shard_size:
                if saving:
                    manifest.shards = saving.result()
                elif not manifest.shards:
                    manifest.check_losses()
                saving = writer.submit(save_shards, out, deepcopy(manifest), gathered)
                gathered = {"train": bytearray(), "val": bytearray()}
            check_unit(ids, manifest, num_files, is_written=saving is not None or bool(manifest.shards))
            for token, file in ids.spelled_in.items():
                if token not in manifest.spelled:
                    explain_special_token(file, token, manifest.document_token)
            for split, part in divided(ids, manifest.validation):
                gathered[split] += part.tobytes()
            manifest.count(unit, ids)
            for row, reason in ids.skipped:
                if reason != NO_TEXT and num_named < NAMED_SKIPS:
                    say(f"skipped {row}: {reason}")
                    num_named += 1
        if saving:
            manifest.shards = saving.result()
    if not manifest.tokens:
        counts = manifest.counts().splitlines()[-1]
        raise UserError(f"{manifest.options.source}: found nothing ({counts}); expected text")
    manifest.check_losses()
    manifest.shards = save_shards(out, manifest, gathered)
    return manifest


def check_unit(unit: Encoded, manifest: Manifest, num_files: int, is_written: bool) -> None:
    """Check the beginning of a source for rows with text, and that few files are damaged.

    Before the first shard is written, a damaged file ends the command, because it can still be repaired or removed.

    Args:
        is_written: whether a shard is written.
    """
    if not (manifest.documents or manifest.tokens or len(unit.ids)):
        for row, reason in unit.skipped:
            if reason != NO_TEXT:
                raise UserError(f"{row}: {reason}")
    most = max(DAMAGED_FILES, num_files // 100)
    for number, error in enumerate(unit.damaged, start=len(manifest.damaged) + 1):
        if not is_written:
            raise error
        problem = str(error).removesuffix(f"; {REPAIR}")
        if number > most:
            raise UserError(f"{problem}; {number} files of {num_files} are damaged. Prepare the rest in another --out")
        say(f"warning: {problem}; skipped the rest of it. Once it is repaired, prepare all files in another --out")


def divided(encoded: Encoded, validation: ValidationSample) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the ids of a unit in consecutive parts, each with its split."""
    begin = 0
    for is_val, pieces in groupby(zip(validation.choose(encoded.sizes), encoded.ends, strict=True), itemgetter(0)):
        *_, (_, end) = pieces
        yield "val" if is_val else "train", encoded.ids[begin:end]
        begin = end


def explain_special_token(name: str, token: str, document_token: str) -> None:
    """Report that a file contains the characters of a special token, and what to do if it means the token."""
    advice = "If it means the token, write the shards yourself, see docs/data.md#token-ids"
    if token == document_token:
        advice = f"If it separates documents, use --separator '{token}'"
    say(f"{name}: contains {token}, which is encoded as text. {advice}")
