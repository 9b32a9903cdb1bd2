"""Tables of checkpoints, in a folder and in a mirror, and the contents of a checkpoint."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, duration_text, printable
from steadygpt.checkpoint import files
from steadygpt.checkpoint.evaluations import EVALUATIONS, Evaluations, parse_evaluations, read_evaluations
from steadygpt.checkpoint.mirror import Mirror
from steadygpt.machine.digests import combined

_LINE = "{:<26} {:>8} {:>7} {:>8} {:>8} {:>9} {:>7} {:>12} {:>12}  {}".format
_TITLE = _LINE("file", "step", "epoch", "loss", "last val", "bits/byte", "CORE", "size", "age", "state")


def print_checkpoints(folder: Path, mirror: str = "", verbose: bool = False) -> int:
    """Print the checkpoints of a folder, or of a mirror if one is given, and return the exit status."""
    for line in mirror_table(Mirror(mirror)) if mirror else checkpoint_table(folder, verbose):
        print(printable(line), flush=True)
    return 0


def _line(name: str, head: files.Head | None, size: int, state: str, evaluations: Evaluations) -> str:
    """Return the line of a file; its size is in bytes."""
    values: dict[str, Any] = {}
    if head:
        # A checkpoint is captured before the evaluation of its step. So its head has the scores of an earlier step,
        # which are shown only if its own step was not evaluated.
        values = vars(head) | evaluations.get(head.origin, {}).get(head.step, {})
    forms = {"step": ".0f", "epoch": ".2f", "loss": ".4f", "val_loss": ".4f", "val_bpb": ".4f", "core": ".4f"}
    shown = ["-" if values.get(key) is None else format(values[key], form) for key, form in forms.items()]
    age = duration_text(max(0.0, time.time() - head.saved_at)) if head else "-"
    return _LINE(name, *shown, bytes_text(size), age, state)


def checkpoint_table(folder: Path, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of --list_checkpoints. With `verbose`, verify the files, and add what each of them contains."""
    checkpoints = files.scan(folder)
    if not checkpoints:
        raise files.no_checkpoints(folder)
    evaluations = read_evaluations(folder)
    states: dict[int, str] = {}  # by inode, so that a file with several names is verified once
    further: list[str] = []
    yield _TITLE
    for file in checkpoints:
        if verbose and file.head and file.inode not in states:
            try:
                further += ["", str(file.path), *details(files.read_checkpoint(file.path))]
                states[file.inode] = "intact"
            except UserError as error:
                states[file.inode] = str(error).removeprefix(f"{file.path}: ")
        state = states.get(file.inode, file.problem or "complete")
        yield _line(file.path.name, file.head, file.size, state, evaluations)
    yield f"{counted(len(checkpoints), 'name')} in {folder}"
    yield from further


def mirror_table(mirror: Mirror) -> Iterator[str]:
    """Yield the lines of --list_checkpoints --mirror; compare the sizes of files with the index, but read no file."""
    entries = mirror.patiently(mirror.index).checkpoints
    if not entries:
        raise UserError(f"no checkpoints in {mirror.url}; expected the URL that --mirror had")
    sizes = mirror.patiently(mirror.sizes)
    evaluations: Evaluations = {}
    if EVALUATIONS in sizes:
        content = mirror.patiently(lambda: mirror.read(EVALUATIONS))
        evaluations = parse_evaluations(content, f"{mirror.url}/{EVALUATIONS}")
    yield _TITLE
    for name, entry in entries.items():
        state = "complete" if sizes.get(entry.file) == entry.size else "missing or incomplete"
        yield _line(name, entry, entry.size, state, evaluations)
    yield f"{counted(len(entries), 'name')} of {counted(len(set(entries.values())), 'file')} in {mirror.url}"


def details(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the content of a checkpoint: numbers, last launch, options, and the shapes of its tensors."""
    digest = combined(checkpoint["digests"]) if checkpoint["digests"] else ""
    parts = {"content": {**checkpoint, "digest": digest}}
    launches = checkpoint["launches"]
    if launches:
        parts |= {"last launch": launches[-1], "options": launches[-1]["options"] | launches[-1]["decisions"]}
    for part, values in parts.items():
        shown = {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}
        for name in ("tokenizer_json", "tokenizer_files"):
            shown.pop(name, None)  # thousands of lines; the SHA-256 of the tokenizer is shown instead
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        yield from wrap(f"{part:<10} {text}", 118, initial_indent="  ", subsequent_indent=" " * 13)
    tensors = files.named_tensors(checkpoint).items()
    alike = Counter(f"{re.sub('^h[.][0-9]+', 'h.*', name)} {tuple(tensor.shape)}" for name, tensor in tensors)
    yield from (f"{count:>11} x {text}" for text, count in alike.items())
