"""Tables of checkpoints, in a folder and in a mirror, and the contents of a checkpoint."""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, columns_of, counted, duration_text, printable
from steadygpt.checkpoint import files
from steadygpt.mirror.store import Mirror

TITLES = ("file", "step", "epoch", "loss", "val loss", "bits/byte", "size", "age", "state")
# Columns that a narrow terminal drops, the least important first.
EXPENDABLE = ("epoch", "bits/byte", "size", "loss", "age", "val loss", "step")
Row = Mapping[str, str]  # title -> cell


def print_checkpoints(folder: Path, mirror: str = "", verbose: bool = False) -> int:
    """Print the checkpoints of a folder, or of a mirror if one is given, and return the exit status."""
    columns = columns_of(sys.stdout)
    for line in mirror_table(Mirror(mirror), columns) if mirror else checkpoint_table(folder, verbose, columns):
        text = printable(line)
        if len(text) > columns:  # an error in the last column, a long path
            text = "\n".join(wrap(text, int(columns), subsequent_indent="    ", break_on_hyphens=False))
        print(text, flush=True)
    return 0


def _row(name: str, head: files.Head | None, size: int) -> Row:
    """Return the cells of a file, without its state; its size is in bytes."""
    values: dict[str, Any] = {}
    if head:
        values = {**asdict(head), **head.scores}
    forms = {"step": ".0f", "epoch": ".2f", "loss": ".4f", "val_loss": ".4f", "val_bpb": ".4f"}
    numbers = ["-" if values.get(key) is None else format(values[key], form) for key, form in forms.items()]
    age = duration_text(max(0.0, time.time() - head.saved_at)) if head else "-"
    return dict(zip(TITLES, (printable(name), *numbers, bytes_text(size), age), strict=False))


def _lines(rows: Sequence[Row], states: Iterator[str], columns: float, usual: str = "complete") -> Iterator[str]:
    """Yield the title and a line for each row, as soon as its state is known, with as many columns as fit.

    Args:
        usual: the state that columns leave room for. A longer state, such as an error, makes its line longer.
    """
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in TITLES[:-1]}
    for title in EXPENDABLE:
        if sum(widths.values()) + len(widths) + 1 + len(usual) > columns:
            del widths[title]
    first, *others = widths

    def line(row: Row, state: str) -> str:
        cells = [f"{row[first]:<{widths[first]}}", *(f"{row[title]:>{widths[title]}}" for title in others)]
        return f"{' '.join(cells)}  {state}"

    yield line(dict(zip(TITLES, TITLES, strict=True)), TITLES[-1])
    yield from map(line, rows, states)


def checkpoint_table(folder: Path, verbose: bool = False, columns: float = math.inf) -> Iterator[str]:
    """Yield the lines of --list_checkpoints. With `verbose`, verify the files, and describe the newest intact one.

    In place of a folder without checkpoints, show the one below it that has the newest, as the monitor does.

    Args:
        columns: of the terminal.
    """
    checkpoints = files.scan(folder)
    if not checkpoints:
        below = files.newest_below(folder)
        if not below:
            raise files.no_checkpoints(folder)
        folder = below
        checkpoints = files.scan(folder)
    further: list[str] = []

    def states() -> Iterator[str]:
        known: dict[int, str] = {}  # by inode, so that a file with several names is verified once
        for file in checkpoints:
            if verbose and file.head and file.inode not in known:
                try:
                    content = files.read_checkpoint(file.path)
                    if not further:
                        further.extend(["", str(file.path), *details(content, columns)])
                    known[file.inode] = "intact"
                except UserError as error:
                    known[file.inode] = str(error).removeprefix(f"{file.path}: ")
            yield known.get(file.inode, file.problem or "complete")

    rows = [_row(file.path.name, file.head, file.size) for file in checkpoints]
    yield from _lines(rows, states(), columns)
    yield f"{counted(len(checkpoints), 'name')} in {folder}"
    yield from further


def mirror_table(mirror: Mirror, columns: float = math.inf) -> Iterator[str]:
    """Yield the lines of --list_checkpoints --mirror; compare the sizes of files with the index, but read no file."""
    entries = mirror.patiently(mirror.index).checkpoints
    if not entries:
        raise UserError(f"no checkpoints in {mirror.url}; expected the URL that --mirror had")
    sizes = mirror.patiently(mirror.sizes)
    rows = [_row(name, entry, entry.size) for name, entry in entries.items()]
    is_whole = (sizes.get(entry.file) == entry.size for entry in entries.values())
    yield from _lines(rows, ("complete" if whole else "missing or incomplete" for whole in is_whole), columns)
    yield f"{counted(len(entries), 'name')} of {counted(len(set(entries.values())), 'file')} in {mirror.url}"


def details(checkpoint: Mapping[str, Any], columns: float = math.inf) -> Iterator[str]:
    """Yield lines about the content of a checkpoint: numbers, launch, options, and the shapes of its weights."""
    parts: dict[str, Mapping] = {"content": {**checkpoint, **checkpoint["scores"]}}
    if checkpoint["launch"]:
        settings = checkpoint["launch"]["settings"].items()
        other = {name: value for name, value in settings if str(checkpoint["options"].get(name)) != str(value)}
        parts |= {"launch": {**checkpoint["launch"], **other}, "options": checkpoint["options"]}
    for part, values in parts.items():
        shown = {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}
        for name in ("tokenizer_json", "tokenizer_files"):
            shown.pop(name, None)  # thousands of lines; the SHA-256 of the tokenizer is shown instead
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        yield from wrap(f"{part:<10} {text}", int(min(columns, 118)), initial_indent="  ", subsequent_indent=" " * 13)
    tensors = checkpoint["model"].items()
    alike = Counter(f"{re.sub('^h[.][0-9]+', 'h.*', name)} {tuple(tensor.shape)}" for name, tensor in tensors)
    yield from (f"{count:>11} x {text}" for text, count in alike.items())
    kept = sorted({kind for state in checkpoint["optimizer"].values() for kind in state})
    if kept:
        yield f"  {'optimizer':<10} {', '.join(kept)}"
