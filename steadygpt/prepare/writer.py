"""Writing of token ids to the shards of a folder, which can be continued after a kill."""

import dataclasses
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from steadygpt.base.durable import fsync, sha256_of
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.data.shards import MANIFEST, ShardEntry, npy_header
from steadygpt.prepare.documents import NO_TEXT, Block
from steadygpt.prepare.encode import Encoded
from steadygpt.prepare.manifest import Manifest
from steadygpt.prepare.source_files import STDLIB
from steadygpt.prepare.sources import Place

SAVE_S = 1.0  # least time between saves of the manifest, because each waits for the disk
MOST_WAITING = 64  # units that are encoded but not saved; at this number the workers wait for the disk
NAMED_SKIPS = 5  # skipped rows that are named on stderr; empty rows are only counted
LEAST_TOKENS = 100  # of a source with a val split


class Shards:
    """The shards of a folder.

    The next shard of each split is a file NAME.part. It only grows until it is renamed, so the last saved manifest
    always fits the files. save() runs in a thread, so that workers get units meanwhile.
    """

    def __init__(self, out: Path, manifest: Manifest):
        self.out = out
        self.name = manifest.name
        self.shard_size = manifest.shard_size
        self.dtype = np.dtype(manifest.dtype)
        self.done = list(manifest.shards)
        self.begun = {"val": 0, "train": 0} | manifest.begun
        self.parts = {split: self._open(split) for split in self.begun}
        in_use = {shard["file"] for shard in self.done} | {Path(part.name).name for part in self.parts.values()}
        pattern = re.compile(rf"{re.escape(self.name)}_(val|train)_\d{{6,}}\.npy(\.part)?")
        for path in out.iterdir():
            if pattern.fullmatch(path.name) and path.name not in in_use:
                path.unlink()  # left by a command that was killed before it could save the manifest

    def _path(self, split: str) -> Path:
        """Return the path of the next shard of a split."""
        number = sum(shard["split"] == split for shard in self.done)
        return self.out / f"{self.name}_{split}_{number:06d}.npy"

    def _part(self, split: str) -> Path:
        """Return the path of the next shard of a split while it grows."""
        return self._path(split).with_suffix(".npy.part")

    def _size(self, split: str) -> int:
        """Return how many bytes the next shard of a split has so far, with its header."""
        return len(npy_header(self.dtype, 0)) + self.begun[split] * self.dtype.itemsize

    def _open(self, split: str) -> IO[bytes]:
        path = self._part(split)
        shard = self._path(split)
        if shard.exists():  # renamed by a command that was killed before it could save the manifest
            shard.rename(path)
        file = path.open("r+b" if path.exists() else "x+b")
        if self.begun[split] and file.seek(0, os.SEEK_END) < self._size(split):
            raise UserError(f"{path}: missing or damaged; {MANIFEST} lists it. Empty {self.out} and prepare it again")
        file.truncate(self._size(split))
        file.seek(0, os.SEEK_END)
        return file

    def save(self, manifest: Manifest, units: list[dict[str, list[np.ndarray]]]) -> None:
        """Append the ids of units to the splits, and save the manifest, whose `next` is the unit after them.

        Raises: OSError with errno and path, for example on a full disk.
        """
        for ids_of_split in units:
            for split, blocks in ids_of_split.items():
                for ids in blocks:
                    while len(ids):
                        # A full shard is finished only when more ids come, so that no shard is empty.
                        if self.begun[split] == self.shard_size:
                            self._finish(split)
                            self.parts[split] = self._open(split)
                        fitting = ids[: self.shard_size - self.begun[split]]
                        with naming_file(self.parts[split]) as file:
                            file.write(fitting.tobytes())
                        self.begun[split] += len(fitting)
                        ids = ids[len(fitting) :]
        for part in self.parts.values():
            with naming_file(part) as file:
                file.flush()
                fsync(file.fileno())
        dataclasses.replace(manifest, shards=list(self.done), begun=dict(self.begun)).save(self.out)

    def _finish(self, split: str) -> None:
        """Turn the part file of a split into a shard."""
        path = self._path(split)
        with naming_file(self.parts[split]) as file:
            file.truncate(self._size(split))  # removes the ids that give_to_val() has moved
            file.seek(0)
            file.write(npy_header(self.dtype, self.begun[split]))
            file.flush()
            fsync(file.fileno())
            file.close()
        self._part(split).rename(path)
        entry: ShardEntry = {"file": path.name, "split": split, "tokens": self.begun[split], "sha256": sha256_of(path)}
        self.done.append(entry)
        self.begun[split] = 0

    def complete(self, manifest: Manifest) -> Manifest:
        """Turn the part files into shards, and return the complete manifest."""
        for split in self.parts:
            if self.begun[split]:
                self._finish(split)
            else:
                self._part(split).unlink()
        manifest = dataclasses.replace(manifest, shards=self.done, complete=True)
        manifest.save(self.out)
        return manifest

    def give_to_val(self, count: int) -> None:
        """Move the last `count` ids of train to val, which is empty."""
        file = self.parts["train"]
        file.flush()
        file.seek(-count * self.dtype.itemsize, os.SEEK_END)
        self.parts["val"].write(file.read())
        self.begun["val"] += count
        self.begun["train"] -= count  # the train file still has these ids, because the saved manifest counts them

    def discard(self) -> None:
        """Remove all written files."""
        parts = [self._part(split) for split in self.parts]
        for path in [*parts, *(self.out / shard["file"] for shard in self.done), self.out / MANIFEST]:
            path.unlink()

    def close(self) -> None:
        for file in self.parts.values():
            file.close()


@contextmanager
def naming_file(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Add the name of the file to errors of writing to it, which lack a name."""
    try:
        yield file
    except OSError as error:
        error.filename = file.name
        raise


def problem_of(manifest: Manifest) -> str:
    """Return why the tokens of a source cannot be a data set, or "" if they can."""
    if not manifest.tokens:
        return f"found nothing ({manifest.counts()}); expected text or token ids"
    if manifest.val_share and manifest.tokens < LEAST_TOKENS:
        return f"{manifest.counts()}; expected {LEAST_TOKENS} or more, of which some are val. Try --val_tokens 0"
    if manifest.tokens_for_val == manifest.tokens:
        return f"{manifest.counts()}; --val_tokens {manifest.val_tokens} leaves none for train. Give a smaller number"
    return ""


def write_shards(encoded: Iterable[tuple[list[Block], Encoded]], out: Path, manifest: Manifest) -> Manifest:
    """Write the missing shards, print the first skipped rows, and return the complete manifest.

    Args:
        encoded: units and their ids, from the unit at manifest.next on.
    """
    num_named = 0
    saved_at_s = time.monotonic()
    waiting: list[dict[str, list[np.ndarray]]] = []  # ids of units that are not saved yet
    with closing(Shards(out, manifest)) as shards:
        with ThreadPoolExecutor(1) as writer:
            last_save: Future | None = None
            for unit, ids in encoded:
                last = unit[-1]
                place = Place(last.file, last.end, last.end_row, last.progress)
                manifest = dataclasses.replace(manifest, next=place)  # the writer may still use the previous one
                waiting.append(manifest.add(ids))
                for row, reason in ids.skipped:
                    if reason != NO_TEXT and num_named < NAMED_SKIPS:
                        say(f"skipped {row.removeprefix(f'{STDLIB}{os.sep}')}: {reason}")
                        num_named += 1
                is_idle = last_save is None or last_save.done()
                is_due = is_idle and time.monotonic() - saved_at_s >= SAVE_S
                if is_due or len(waiting) == MOST_WAITING:
                    if last_save:
                        last_save.result()  # wait for it, and raise its error, if any
                    last_save = writer.submit(shards.save, manifest, waiting)
                    saved_at_s = time.monotonic()
                    waiting = []
            if last_save:
                last_save.result()
        shards.save(manifest, waiting)
        problem = problem_of(manifest)
        if problem:
            shards.discard()
            raise UserError(f"{manifest.source}: {problem}")
        # If there is much less text than its beginning has promised, val has got none of it.
        if manifest.val_share and not manifest.tokens_for_val:
            count = min(max(1, int(manifest.tokens * manifest.val_share)), shards.begun["train"] - 1)
            shards.give_to_val(count)
            manifest = dataclasses.replace(manifest, tokens_for_val=count)
            shards.save(manifest, [])
        return shards.complete(manifest)
