"""The loss of the quickstart over time, as docs/quickstart.svg, and what the model writes after minutes of training.

    python -m benchmarks.quickstart_curve

This runs the commands of ./scripts/quickstart.sh in a temporary folder, with more frequent log lines and checkpoints,
and prints the beginning of the sample from the first checkpoints after one, two and three minutes, and from the last.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import picture
from benchmarks.compare import REPO, exit_on_signals, flags
from steadygpt.base.options import run_cli
from steadygpt.base.text import duration_text
from steadygpt.checkpoint.files import ROLLING

EVERY = 25  # steps between checkpoints
MORE = flags(log_freq=5, checkpoint_freq=EVERY, keep_checkpoints=100)
MINUTES = 1, 2, 3  # of training, after which the model writes
SAMPLE = flags(temperature=0.7, max_tokens=260, prompt='class Queue:\n    """A queue."""\n\n    def __init__(self')
SMOOTH = 10  # log lines whose mean is drawn


class Curve(NamedTuple):
    """Of one run: the seconds and the training loss at logged steps, and the validation losses."""

    seconds: dict[int, float]  # step -> since the start
    losses: dict[int, float]
    val_losses: dict[int, float]


def read_curve(metrics: Path) -> Curve:
    """Return the curve of a run that was started once."""
    start, *records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Curve(
        {record["step"]: record["time"] - start["time"] for record in records},
        {record["step"]: record["loss"] for record in records if "loss" in record},
        {record["step"]: record["val_loss"] for record in records if "val_loss" in record},
    )


def draw(curve: Curve, file: Path) -> None:
    """Draw the losses over the minutes since the start; large letters, because the picture is small in README.md."""
    from matplotlib import pyplot

    picture.set_style(16)
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    minutes = {step: seconds / 60 for step, seconds in curve.seconds.items()}
    steps = [*curve.losses]
    axes.plot([minutes[step] for step in steps], [curve.losses[step] for step in steps], color=picture.PALE)
    means = []
    for end in range(1, len(steps) + 1):
        latest = steps[max(0, end - SMOOTH) : end]
        means.append(sum(curve.losses[step] for step in latest) / len(latest))
    axes.plot([minutes[step] for step in steps], means, color=picture.BLUE, linewidth=2.5, label="training")
    val = {"color": picture.ORANGE, "markersize": 10, "label": "validation"}
    axes.plot([minutes[step] for step in curve.val_losses], [*curve.val_losses.values()], "o", **val)
    axes.set(xlabel="minutes", ylabel="loss, nats per byte", xlim=(0, None), ylim=(0, 4))
    axes.legend()
    picture.save(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", type=Path, default=REPO / "docs" / "quickstart.svg")
    file = parser.parse_args().plot.absolute()

    def run(folder: str, script: str, *options: str, **pipes) -> str:
        words = [sys.executable, str(REPO / script), *options]
        return subprocess.run(words, cwd=folder, check=True, text=True, **pipes).stdout

    with tempfile.TemporaryDirectory() as name, exit_on_signals():
        run(name, "prepare_dataset.py", *flags(source="stdlib", tokenizer="bytes", out="data/stdlib"))
        run(name, "train.py", "--config", "quickstart", *MORE)
        curve = read_curve(Path(name, "checkpoints/quickstart/metrics.jsonl"))
        draw(curve, file)
        last = max(curve.seconds)
        steps = []  # of the checkpoints
        for minute in MINUTES:
            later = [step for step in curve.losses if curve.seconds[step] >= 60 * minute]
            if later:  # a fast machine has finished before
                steps.append(EVERY * round(min(later) / EVERY))
        for step in [*steps, last]:
            nearest = min(curve.seconds, key=lambda other: abs(other - step))
            checkpoint = f"checkpoints/quickstart/{ROLLING.format(step)}"
            text = run(name, "generate.py", checkpoint, *SAMPLE, stdout=subprocess.PIPE)
            print(f"\n== step {step:,}, after {duration_text(curve.seconds[nearest])}\n{text}")
    return 0


if __name__ == "__main__":
    run_cli(main)
