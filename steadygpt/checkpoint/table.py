"""Tables of checkpoints, in a folder and in a mirror, and the contents of a checkpoint."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, counted, duration_text, printable
from steadygpt.checkpoint.files import (
    EVALUATIONS,
    Head,
    no_checkpoints,
    read_checkpoint,
    read_evaluations,
    scan,
    validation_of,
)
from steadygpt.checkpoint.mirror import Entry, Mirror

_ROW = "{:<26} {:>8} {:>7} {:>8} {:>8} {:>9}{} {:>12} {:>12}  {}".format


def print_checkpoints(folder: Path, mirror: str = "", verbose: bool = False) -> int:
    """Print the checkpoints of a folder, or of a mirror if one is given, and return the exit status."""
    for line in mirror_table(Mirror(mirror)) if mirror else checkpoint_table(folder, verbose):
        print(printable(line), flush=True)
    return 0


def _table(name: object, read: Callable[[], bytes], rows: Iterable[tuple[str, Head | None, int, str]]) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        name, read: of evaluations.json.
        rows: name, head, bytes and state of each file.
    """
    evaluations, warnings = read_evaluations(name, read)
    yield from (f"warning: {line}" for line in warnings)
    names = [key.removeprefix("val_loss/") for found in evaluations.values() for key in found if "val_loss/" in key]
    sets = [*dict.fromkeys(names)][1:]  # the first one is val loss
    columns = "".join(f" {of_set:>8}" for of_set in sets)
    yield _ROW("file", "step", "epoch", "loss", "last val", "bits/byte", columns, "size", "age", "state")
    forms = {"step": "d", "epoch": ".2f", "loss": ".4f", "val_loss": ".4f", "val_bpb": ".4f"}
    forms |= {f"val_loss/{of_set}": f">{max(8, len(of_set))}.4f" for of_set in sets}
    for file, head, size, state in rows:
        about = dict(vars(head)) if head else {}
        if head:
            # A checkpoint is captured before the evaluation of its step; without one, it has the last one before it.
            about["val_loss"] = evaluations.get(head.step, {}).get("val_loss", head.val_loss)
            about |= validation_of(evaluations, about["val_loss"])
        shown = ["-" if about.get(key) is None else format(about[key], form) for key, form in forms.items()]
        losses = "".join(f" {text:>{max(8, len(of_set))}}" for text, of_set in zip(shown[5:], sets, strict=True))
        age = duration_text(time.time() - head.saved_at) if head else "-"
        yield _ROW(file, *shown[:5], losses, bytes_text(size), age, state)


def checkpoint_table(folder: Path, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of --list_checkpoints; verbose ones are of verified files, and say what each file holds."""
    files = scan(folder)
    if not files:
        raise no_checkpoints(folder)
    states: dict[int, str] = {}  # by inode, so that a file with several names is verified once
    further: list[str] = []

    def verified() -> Iterator[tuple[str, Head | None, int, str]]:
        for file in list(files):
            if file.inode not in states and not os.path.lexists(file.path):
                files.remove(file)  # training has deleted it meanwhile
                continue
            if verbose and file.head and file.inode not in states:
                try:
                    of_file = ["", str(file.path), *details(read_checkpoint(file.path))]
                    further.extend(of_file)
                    states[file.inode] = "intact"
                except UserError as error:
                    states[file.inode] = str(error).removeprefix(f"{file.path}: ")
            yield file.path.name, file.head, file.size, states.get(file.inode, file.problem or "complete")

    yield from _table(folder / EVALUATIONS, (folder / EVALUATIONS).read_bytes, verified())
    distinct = len({file.inode or file.path for file in files})
    links = f", {counted(distinct, 'distinct file')} (the others are hard links)" * (len(files) > distinct)
    yield f"{counted(len(files), 'name')}{links} in {folder}"
    yield from further


def mirror_table(mirror: Mirror) -> Iterator[str]:
    """Yield the lines of --list_checkpoints --mirror; files are compared with their sizes, but not read."""
    there = mirror.patiently(mirror.index).checkpoints
    if not there:
        raise UserError(f"no checkpoints in {mirror.url}; expected the URL that --mirror had")
    sizes = mirror.patiently(mirror.sizes)
    read = partial(mirror.read, EVALUATIONS) if EVALUATIONS in sizes else lambda: b"{}"

    def state(entry: Entry) -> str:
        found = sizes.get(entry.file)
        return "complete" if found == entry.size else "missing" if found is None else f"incomplete: {found:,} bytes"

    rows = ((name, entry, entry.size, state(entry)) for name, entry in there.items())
    yield from _table(f"{mirror.url}/{EVALUATIONS}", partial(mirror.patiently, read), rows)
    yield f"{counted(len(there), 'name')} of {counted(len(set(there.values())), 'file')} in {mirror.url}"


def details(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about what a checkpoint holds: progress, losses, origin, options, and the shapes of its tensors."""
    moments, starts = checkpoint["optimizer"].get("state", {}).values(), checkpoint["starts"]
    options = starts[-1]["options"] | starts[-1]["decisions"] if starts else {}
    tokens = checkpoint["rows_consumed"] * checkpoint["model_config"]["context_length"]
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint["saved_at"]))
    lrs = {f"{group['lr']:.3g}": 0 for group in checkpoint["optimizer"].get("param_groups", ())}
    elapsed_s, memory = checkpoint.get("elapsed_s") or 0, bytes_text(checkpoint.get("peak_memory_bytes", 0))
    steps_per_s, tokens_per_s = (count / elapsed_s if elapsed_s else 0 for count in (checkpoint["step"], tokens))
    losses = {"loss": "training", "val_loss": "last validation before", "best_val_loss": "best validation before"}
    alike = Counter(
        f"{re.sub(r'^h[.][0-9]+', 'h.*', name)} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in checkpoint["model"].items()
    )
    found = {
        "progress": f"step {checkpoint['step']:,}, epoch {checkpoint.get('epoch') or 0:.2f}, {tokens:,} tokens seen, "
        f"{duration_text(elapsed_s)} of training",
        "speed": f"{steps_per_s:.3g} steps/s, {tokens_per_s:,.0f} tokens/s with evaluations, "
        f"peak memory {memory} on rank 0",
        "losses": ", ".join(
            f"{text} {checkpoint[key]:.4f}" for key, text in losses.items() if checkpoint.get(key) is not None
        ),
        "written": f"{saved_at} by rank 0 of {checkpoint.get('world_size', '?')}, torch "
        f"{checkpoint.get('torch_version', '?')}, commit {checkpoint.get('git_commit') or '?'}",
        "tokenizer": checkpoint["tokenizer"],
        "options": ", ".join(f"{name} {value}" for name, value in options.items() if value != ""),
        "optimizer": f"{', '.join({kind: 0 for state in moments for kind in state})} of {len(moments)} tensors, "
        f"last learning rate {', '.join(lrs) or 'unknown'}",
        "weights": f"{sum({t.data_ptr(): t.numel() for t in checkpoint['model'].values()}.values()):,} numbers",
    }
    for name, text in found.items():
        yield from wrap(f"{name:<10} {text}", 118, initial_indent="  ", subsequent_indent=" " * 13)
    yield from (f"{count:>11} x {text}" for text, count in alike.items())
