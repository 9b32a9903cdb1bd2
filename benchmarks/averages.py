"""The mean of ten rolling checkpoints beside a cool-down from the same step, at 1 M parameters with three seeds.

    python -m benchmarks.averages
    OMP_NUM_THREADS=1 python -m benchmarks.averages --seeds 1338        # in another terminal: faster on small models

The recipe trains at its highest learning rates, without a cool-down, and saves often. At two steps of this run its loss
is compared with that of the mean of ten checkpoints (average:10) which are 20, 60 or 100 steps apart. From the first of
these steps it also cools down. A cool-down trains on further tokens, an average does not.

The same command continues after an interruption. Text, shape and losses are those of tokens_to_loss.py.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.compare import REPO, exit_on_signals
from benchmarks.tokens_to_loss import SEEDS, Run, Study, evaluate, make_data, output_of, spread
from steadygpt.base.options import run_cli
from steadygpt.checkpoint.files import ROLLING, average

STEPS = 1800, 3000  # of the averages
APART = 20, 60, 100  # steps between the checkpoints of an average
COOLDOWNS = 600, 1200  # steps, after the first of STEPS


def losses(study: Study, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the name and the loss of each measurement with a seed; train what is missing."""
    stable = Run("average", "modern", (("schedule", "constant"), ("eval_freq", 600)), STEPS[1], seed)
    folder = study.folder(stable)
    if study.loss(stable) is None:
        train(study, stable, checkpoint_freq=APART[0], keep_checkpoints=STEPS[1] // APART[0], checkpoint_minutes=0)
    for step in STEPS:
        yield f"step {step:,}", study.losses(stable)[step]
        for apart in APART:
            yield (
                f"step {step:,}, mean of ten checkpoints {apart} steps apart",
                loss_of_mean(study, folder, step, apart),
            )
    for cooldown in COOLDOWNS:
        steps = STEPS[0] + cooldown
        cooled = Run("average", "modern", (("schedule", "wsd"), ("cooldown", cooldown / steps)), steps, seed)
        if study.loss(cooled) is None:
            train(study, cooled, resume=folder / ROLLING.format(STEPS[0]), allow_changes=True)
        yield f"step {steps:,}, after a cool-down from step {STEPS[0]:,}", study.losses(cooled)[steps]


def train(study: Study, run: Run, **options) -> None:
    folder = study.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{run}: training ...", flush=True)
    output_of(*study.command(run, folder, **options), folder / "out.txt")


def loss_of_mean(study: Study, checkpoints: Path, step: int, apart: int) -> float:
    """Return the validation loss of the mean of ten checkpoints, the last one of them that of a step."""
    with tempfile.TemporaryDirectory() as name:
        for earlier in range(10):
            file = ROLLING.format(step - earlier * apart)
            Path(name, file).symlink_to(checkpoints / file)
        torch.save(average(Path(name), 10), Path(name, "mean.pt"))
        return evaluate(study, Path(name, "mean.pt"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help=f"default: {' '.join(map(str, SEEDS))}")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/out/tokens_to_loss", help="folder for the runs")
    args = parser.parse_args()
    study = Study("1m", args.out.absolute(), {})
    with exit_on_signals():
        make_data(study)
        found = [dict(losses(study, seed)) for seed in args.seeds]
    print("\n| the recipe | validation loss | below the stable loss of step 1,800 |\n|---|---|---|")
    for name in found[0]:
        values = [of_seed[name] for of_seed in found]
        gains = [of_seed[f"step {STEPS[0]:,}"] - of_seed[name] for of_seed in found]
        print(f"| {name} | {spread(values)} | {spread(gains) if statistics.mean(gains) else ''} |")
    return 0


if __name__ == "__main__":
    run_cli(main)
