"""The tables and the curves of benchmarks.tokens_to_loss, from what its runs have left; missing runs are left out."""

import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path

import torch

from benchmarks.compare import median_text, ratio_text
from benchmarks.loss_runs import (
    ADDITIONS,
    DATA,
    PIECES,
    REFERENCES,
    SIDES,
    SWEEP,
    Bench,
    Run,
    Scale,
    final_runs,
    options_of,
    piece_runs,
    sweep_runs,
)
from benchmarks.train_speed import described_model
from steadygpt.device import native_precision

COLORS = {"gpt2": "#9a9a9a", "nanogpt": "#e88b1a", "modern": "#1a4f8b"}


def markdown(bench: Bench) -> str:
    """Return the section of a scale for docs/RECIPE.md."""
    pieces = f"Pieces, {bench.scale.piece_steps:,} steps, one seed:"
    lengths = {SIDES[run.side]: f"{run.steps:,}" for run in sweep_runs(bench)}
    rates = f"Learning rates, one seed; steps: {', '.join(map(' '.join, lengths.items()))}:"
    tables = [
        table("Means, with the range over the seeds:", ("", "final loss", *RECIPE_COLUMNS), final_rows(bench)),
        table("Seconds a step:", ("", "seconds", "beside GPT-2"), time_rows(bench)),
        table(rates, ("", "setting", "final loss"), sweep_rows(bench)),
        table(pieces, ("", "the recipe without it", "GPT-2 with only it"), piece_rows(bench)),
    ]
    return "\n\n".join([heading(bench), *filter(None, tables)]) + "\n"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table below its title, or nothing if there are no rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) if lines else ""


def heading(bench: Bench) -> str:
    s, cuda = bench.scale, torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores"
    train, val = ((bench.data / f"{split}.bin").stat().st_size // 2 for split in ("train", "val"))
    theirs, compiled = "bf16" if cuda else "fp32", "compiled" if s.compiled else "not compiled"
    return (
        f"### {bench.name}: {s.layers} layers, {s.heads} heads, {s.width} wide, context {s.context}\n\n"
        f"{size_text(s, 'gpt2')}; {size_text(s, 'modern')}. "
        f"Steps of {s.tokens:,} tokens, {s.steps:,} steps for the references. Text: {s.data}, {train:,} tokens; "
        f"validation on {min(s.eval_tokens, val):,} held-out tokens. {machine}, torch {torch.__version__}, ours in "
        f"{native_precision(device)}, nanoGPT in {theirs}, {compiled}; {time.strftime('%Y-%m-%d')}."
    )


def size_text(scale: Scale, side: str) -> str:
    model = described_model(options_of(scale, Run(side, SWEEP[side][0], steps=100)), DATA[scale.data].vocab_size)
    blocks = sum(parameter.numel() for parameter in model.h.parameters())
    return f"{SIDES[side]}: {model.num_parameters() / 1e6:.2f} M parameters, {blocks / 1e6:.2f} M of them in the blocks"


# ---------------------------------------------------------------------------------------------------------------------
# the recipe beside the references

RECIPE_COLUMNS = (
    "the recipe reaches it with this share of the tokens",
    "of the time",
    "loss of the recipe in the same time",
)
Points = list[tuple[int, float]]  # step, validation loss


def recipe_points(bench: Bench) -> list[Points]:
    """Return, for each seed, the points of the recipe's runs of all lengths: losses that the recipe has reached."""
    points: dict[int, Points] = {}
    for run in final_runs(bench):
        if run.side == "modern" and bench.loss(run) is not None:
            points.setdefault(run.seed, []).extend(bench.losses(run).items())
    return list(points.values())


def steps_to(points: Points, loss: float) -> float:
    """Return the fewest steps after which the loss was at most this; inf if it never was."""
    return min((step for step, found in points if found <= loss), default=math.inf)


def loss_within(points: Points, steps: float) -> float:
    """Return the lowest loss after at most so many steps."""
    return min((loss for step, loss in points if step <= steps), default=math.inf)


def slowdown(bench: Bench, side: str) -> float:
    """Return the median of the recipe's seconds a step in those of a reference; NaN before the timing."""
    seconds = bench.seconds_per_step()
    if not {"modern", side} <= seconds.keys():
        return math.nan
    return statistics.median(ours / theirs for ours, theirs in zip(seconds["modern"], seconds[side], strict=True))


def final_rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    """Yield the final losses of the references, with the recipe beside them, and of each length of the recipe."""
    points = recipe_points(bench)
    for (side, changes, steps), group in groupby(final_runs(bench), lambda run: (run.side, run.changes, run.steps)):
        losses = [loss for loss in map(bench.loss, group) if loss is not None]
        if not losses:
            continue
        seeds = f"{len(losses)} seed{'s' * (len(losses) > 1)}"
        title = f"{SIDES[side]}{Run(side, changes, steps).settings()}, {steps:,} steps, {seeds}"
        if diverged := losses.count(math.inf):
            yield title, f"diverged: {diverged} of {seeds}", "", "", ""
            continue
        if side not in REFERENCES:
            yield title, spread(losses), "", "", ""
            continue
        ratio = slowdown(bench, side)
        shares = [steps_to(found, statistics.mean(losses)) / steps for found in points]
        same_time = [] if math.isnan(ratio) else [loss_within(found, steps / ratio) for found in points]
        times = [] if math.isnan(ratio) else [share * ratio for share in shares]
        yield title, spread(losses), spread(shares, 2), spread(times, 2), spread(same_time)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean, and the range of several values."""
    if not values:
        return "not measured"
    if missed := sum(value == math.inf for value in values):
        return f"not reached by {missed} of {len(values)} seeds"
    mean, low, high = (f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


# ---------------------------------------------------------------------------------------------------------------------
# the other tables


def time_rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    seconds = bench.seconds_per_step()
    for side, found in seconds.items():
        beside = ratio_text(seconds, side, "gpt2") if side != "gpt2" else ""
        yield SIDES[side], median_text(found, "s"), beside


def sweep_rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    """Yield the losses of the sweep, the lowest one of each side in bold."""
    for side, group in groupby(sweep_runs(bench), lambda run: run.side):
        losses = {run: loss for run in group if (loss := bench.loss(run)) is not None}
        for run, loss in losses.items():
            best = "**" * (loss == min(losses.values()))
            yield SIDES[side], run.settings().strip() or "as it is", f"{best}{loss_text(loss)}{best}"


def piece_rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    """Yield the losses of both sides with each piece changed, and the difference to the side as it is."""
    runs = piece_runs(bench)
    if not any(bench.loss(run) for run in runs):
        return
    columns = [changed_losses(bench, [run for run in runs if run.side == side]) for side in ("modern", "gpt2")]
    names = ("nothing changed", *PIECES, *(f"{name}, added to both" for name in ADDITIONS))
    yield from zip_longest(names, *columns, fillvalue=loss_text(None))


def changed_losses(bench: Bench, runs: Sequence[Run]) -> list[str]:
    """Format the losses of runs, each with its difference to the first one."""
    losses = [bench.loss(run) for run in runs]
    return [loss_text(loss, losses[0] if number else None) for number, loss in enumerate(losses)]


def loss_text(loss: float | None, beside: float | None = None) -> str:
    """Format the final loss of a run, and its difference to another one."""
    if loss is None:
        return "not finished"
    if loss == math.inf:
        return "diverged"
    return f"{loss:.4f}" if beside in (None, math.inf) else f"{loss:.4f} ({loss - beside:+.4f})"


# ---------------------------------------------------------------------------------------------------------------------
# the curves


def draw(benches: Sequence[Bench], file: Path) -> None:
    """Draw the losses of all final runs, against tokens and against time if that was measured; a row for each scale."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 12})
    figure, grid = pyplot.subplots(len(benches), 2, figsize=(12, 5 * len(benches)), layout="constrained", squeeze=False)
    for bench, (by_tokens, by_time) in zip(benches, grid, strict=True):
        seconds = bench.seconds_per_step()
        labels = dict(SIDES)  # each is taken by the first run of its side
        for run in filter(bench.loss, final_runs(bench)):
            # The first steps would flatten the rest of the curve.
            points = sorted((step, loss) for step, loss in bench.losses(run).items() if step >= bench.scale.steps / 20)
            style = {"color": COLORS[run.side], "linewidth": 1.2, "label": labels.pop(run.side, None)}
            minutes = statistics.median(seconds.get(run.side, [math.nan])) / 60
            for axes, of_a_step in ((by_tokens, bench.scale.tokens / 1e6), (by_time, minutes)):
                axes.plot([step * of_a_step for step, _ in points], [loss for _, loss in points], **style)
        by_tokens.set(title=f"{bench.scale.layers} layers, {bench.scale.width} wide", xlabel="million tokens")
        by_time.set(title="the same runs", xlabel="minutes of training")
        for axes in (by_tokens, by_time):
            axes.set_ylabel("validation loss")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
    figure.savefig(file, dpi=100)
