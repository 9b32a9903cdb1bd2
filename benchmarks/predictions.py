"""How far predictions of predict.py are from the losses of real runs, and which mistakes in a run its band shows.

    python -m benchmarks.predictions                        # the tables, from benchmarks/losses/predictions.json
    python -m benchmarks.predictions --train --file new.json --workers 16      # all runs again, on a GPU in minutes

Two texts: sources of packages (BPE of 4,096 tokens, steps of 8,192) and Python's library (bytes, steps of 4,096), both
with the recipe and GPT-2. A target's ladder are the recorded runs of its depth with a sixth to half of its width and a
quarter to all of its steps. The losses are those of bf16, not compiled, on 65,536 tokens of held-out text.
"""

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.compare import REPO, flags
from benchmarks.tokens_to_loss import Study, make_data
from steadygpt.base.options import UserError, run_cli
from steadygpt.run.expected import IN_A_ROW, NINETY, TOLERANCE, Points, predicted

FILE = REPO / "benchmarks/losses/predictions.json"
VAL_TOKENS = 65536
CORPORA = {
    "packages": ("10m", 32, 4096, 2e-3),
    "stdlib": ("1m", 16, 320, 3e-3),
}  # scale, rows, vocabulary, GPT-2's rate
CONTEXT = 256
SIDES = ("modern", "gpt2")
STOP = 160  # steps of a run with a mistake
MISTAKES = {  # of the recipe's and of GPT-2's options; the others are in broken()
    "10 x the learning rates": ("--max_lr=0.04 --muon_lr=0.1", "--max_lr=0.02 --min_lr=0.002"),
    "a tenth of the learning rates": ("--max_lr=0.0004 --muon_lr=0.001", "--max_lr=0.0002 --min_lr=0.00002"),
    "no shuffling": ("--shuffle_rows=off --shuffle_shards=off",) * 2,
    "targets shifted by two": ("", ""),
    "attention that sees ahead": ("", ""),
    "half of the text twice, the rest missing": ("", ""),
    "dropout 0.5": ("--dropout=0.5",) * 2,
    "10 x the warm-up": ("--warmup_steps=400",) * 2,
    "labels of another tokenizer": ("", ""),
    "weight decay of 10": ("--weight_decay=10",) * 2,
}
PARTS = 40  # points of a curve


class Trial(NamedTuple):
    corpus: str
    side: str
    width: int
    layers: int
    steps: int
    seed: int = 1337
    mistake: str = ""

    def __str__(self) -> str:
        shape = (
            f"{self.corpus} {self.side} {self.width} wide, {self.layers} layers, {self.steps} steps, seed {self.seed}"
        )
        return f"{shape}, {self.mistake}" if self.mistake else shape

    @property
    def heads(self) -> int:
        heads = max(1, round(self.width / 64))
        while self.width % heads or (self.width // heads) % 2:
            heads += 1
        return heads

    @property
    def size(self) -> float:
        """N: FLOPs per token / 6."""
        return self.layers * self.width * (12 * self.width + 2 * CONTEXT) + CORPORA[self.corpus][2] * self.width

    @property
    def tokens(self) -> float:
        return self.steps * CONTEXT * CORPORA[self.corpus][1]


TARGETS = [Trial("packages", side, 384, 6, 1200, seed) for side in SIDES for seed in (1337, 1338)]
HELD_OUT = [Trial("packages", "modern", 128, 6, 900), Trial("packages", "gpt2", 160, 6, 900)]
HELD_OUT += [
    Trial("packages", side, width, 6, steps) for side in SIDES for width, steps in product((96, 128), (600, 1200))
]
HELD_OUT += [Trial("stdlib", side, 192, 4, steps) for side in SIDES for steps in (400, 800, 1600)]
HELD_OUT += [Trial("stdlib", side, 128, 4, steps) for side in SIDES for steps in (800, 1600)]
GRID = [
    Trial("packages", side, w, 6, steps)
    for side in SIDES
    for steps in (150, 300, 600, 1200)
    for w in (64, 96, 128, 192)
]
GRID += [Trial("packages", side, width, 6, steps) for side in SIDES for steps in (600, 1200) for width in (32, 48)]
GRID += [Trial("stdlib", side, width, 4, steps) for side in SIDES for steps in (400, 800, 1600)
         for width in (32, 48, 64, 96, 128)]  # fmt: skip
BROKEN = [Trial("packages", side, 384, 6, 1200, mistake=mistake) for side in SIDES for mistake in MISTAKES]
SHALLOW = [
    Trial("packages", side, width, max(1, round(width / 64)), 1200) for side in SIDES for width in (64, 96, 128, 192)
]
SHALLOW += [Trial("packages", side, 128, 2, 1200, 1338) for side in SIDES]
ALL = [*dict.fromkeys(TARGETS + BROKEN + GRID + HELD_OUT + SHALLOW)]
Curves = dict[str, list[tuple[int, float]]]  # trial -> steps and losses

# ---------------------------------------------------------------------------------------------------------------------
# predictions from the recorded runs


def loss_at(curves: Curves, trial: Trial, part: float = 1.0) -> float:
    steps, losses = zip(*curves[str(trial)], strict=True)
    return math.exp(np.interp(math.log(part * trial.steps), np.log(steps), np.log(losses)))


def ladder_of(target: Trial, longest: float = 1.0) -> list[Trial]:
    """Return the recorded runs that a ladder of a target may have, the longest with a part of its steps."""
    same = [trial for trial in GRID if trial[:2] == target[:2] and trial.layers == target.layers]
    narrower = [trial for trial in same if target.width <= 6 * trial.width <= 3 * target.width]
    return [trial for trial in narrower if 0.25 <= trial.steps / (longest * target.steps) <= 1]


def predict(curves: Curves, target: Trial, ladder: list[Trial], part: float = 1.0) -> tuple[float, float]:
    found = [(trial.size, trial.tokens, loss_at(curves, trial, part)) for trial in ladder]
    return predicted(Points(*np.array(found, float).T), target.size, target.tokens)


def errors(curves: Curves, target: Trial, ladder: list[Trial]) -> list[float]:
    """Return how many ends of the 90 % interval a run is away from each point of its predicted curve."""
    found = []
    for part in (number / PARTS for number in range(1, PARTS + 1)):
        loss, deviation = predict(curves, target, ladder, part)
        found.append(abs(math.log(loss_at(curves, target, part) / loss)) / (NINETY * deviation))
    return found


def alarms(found: list[float]) -> bool:
    assert IN_A_ROW == 2
    return any(min(pair) > TOLERANCE for pair in pairwise(found))


def of_targets(curves: Curves) -> Iterator[str]:
    """Yield the table of the runs with 10 M parameters, whose ladder has a quarter, half or all of their steps."""
    yield "| the ladder's longest runs, of 1,200 steps | its FLOPs, of the run's | recipe | GPT-2 |\n|---|---|---|---|"
    for longest in (0.25, 0.5, 1.0):
        cells = []
        for side in SIDES:
            targets = [target for target in TARGETS if target.side == side and str(target) in curves]
            ladder = ladder_of(targets[0], longest)
            cost = sum(trial.size * trial.tokens for trial in ladder) / (targets[0].size * targets[0].tokens)
            texts = []
            for part in (1 / 3, 2 / 3, 1):
                loss, deviation = predict(curves, targets[0], ladder, part)
                real = statistics.mean(loss_at(curves, target, part) for target in targets)
                texts.append(f"{loss:.3f} ± {NINETY * deviation:.1%}, was {real:.3f} ({loss / real - 1:+.1%})")
            cells.append("; ".join(texts))
        yield f"| {1200 * longest:,.0f} | {cost:.2f} | {' | '.join(cells)} |"


def of_held_out(curves: Curves) -> Iterator[str]:
    yield "| held-out run | runs of the ladder | predicted | was | error | 90 % interval | alarm |"
    yield "|---|---|---|---|---|---|---|"
    wrong, covered, found = [], 0, []
    for target in HELD_OUT:
        ladder, real, curve = ladder_of(target), loss_at(curves, target), errors(curves, target, ladder_of(target))
        loss, deviation = predict(curves, target, ladder)
        found.append(curve)
        wrong.append(abs(loss / real - 1))
        covered += curve[-1] <= 1
        about = f"{str(target).rpartition(',')[0]} | {len(ladder)} | {loss:.3f} | {real:.3f} | {loss / real - 1:+.1%}"
        missed = ", missed" * (curve[-1] > 1)
        yield f"| {about} | ± {NINETY * deviation:.1%}{missed} | {'yes' if alarms(curve) else ''} |"
    found += [errors(curves, target, ladder_of(target)) for target in TARGETS if str(target) in curves]
    tenth = sum(alarms(curve[: PARTS // 10]) for curve in found)
    of_all = f"alarms in {sum(map(alarms, found))} of {len(found)} correct runs, {tenth} of them in the first tenth"
    yield f"\nMedian error {statistics.median(wrong):.1%}; {covered} of {len(HELD_OUT)} in the interval; {of_all}"


def of_mistakes(curves: Curves) -> Iterator[str]:
    yield "| mistake | recipe | GPT-2 |\n|---|---|---|"
    for mistake in MISTAKES:
        cells = []
        for side in SIDES:
            target = Trial("packages", side, 384, 6, 1200)
            found, ratio = [], 1.0
            for step, loss in curves[str(target._replace(mistake=mistake))]:
                if target.steps / PARTS <= step <= target.steps / 10:
                    middle, deviation = predict(curves, target, ladder_of(target), step / target.steps)
                    ratio = loss / middle
                    found.append(abs(math.log(ratio)) / (NINETY * deviation))
            cells.append(f"{'**yes**' if alarms(found) else 'no'} ({ratio - 1:+.0%})")
        yield f"| {mistake} | {' | '.join(cells)} |"


def of_depths(curves: Curves) -> Iterator[str]:
    """Yield the table of narrow models whose depth shrinks with their width, beside those of 6 layers."""
    yield "| width x layers, 1,200 steps | recipe | with 6 layers | GPT-2 | with 6 layers |\n|---|---|---|---|---|"
    for one, other in zip(*([trial for trial in SHALLOW if trial.side == side] for side in SIDES), strict=True):
        losses = [loss_at(curves, of) for trial in (one, other) for of in (trial, trial._replace(layers=6, seed=1337))]
        cells = " | ".join(f"{loss:.3f}" for loss in losses)
        yield f"| {one.width} x {one.layers}, seed {one.seed} | {cells} |"


# ---------------------------------------------------------------------------------------------------------------------
# training


class Enough(Exception):
    """A run with a mistake has gone as far as is needed."""


def broken(mistake: str, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of a loader with a mistake."""
    if mistake == "targets shifted by two":
        targets = torch.cat([targets[:, 1:], targets[:, -1:]], dim=1)
    if mistake == "labels of another tokenizer":
        targets = torch.randperm(4096, generator=torch.Generator().manual_seed(5)).to(targets.device)[targets]
    return inputs, targets


def train(trial: Trial, data: Path, tokenizer: str) -> list[tuple[int, float]]:
    """Train a trial in this process; return steps and validation losses."""
    from torch.nn import functional as F

    import train as program
    from dataloader import BatchLoader
    from steadygpt.machine import attention

    points: list[tuple[int, float]] = []
    validate, read, attend = program.validate, BatchLoader.next, F.scaled_dot_product_attention
    is_short = attention.is_short_on_cpu

    def recorded(run, val):
        scores = validate(run, val)
        points.append((run.state.step, round(scores["val_loss"], 4)))
        if trial.mistake and run.state.step >= STOP:
            raise Enough
        return scores

    _, rows, _, rate = CORPORA[trial.corpus]
    of_side = {"config": "modern"} if trial.side == "modern" else {
        "max_lr": rate, "min_lr": rate / 10, "warmup_steps": trial.steps // 30}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "num_layers": trial.layers, "num_heads": trial.heads, "embd_size": trial.width, "context_length": CONTEXT,
            "mini_batch_size": rows, "total_batch_size": rows * CONTEXT, "max_steps": trial.steps, "seed": trial.seed,
            "eval_freq": 20 if trial.mistake else max(5, trial.steps // 60), "eval_tokens": VAL_TOKENS,
            "data_dir": data, "tokenizer": tokenizer, "precision": "bf16", "compile": "off", "checkpoint_freq": 0,
            "checkpoint_minutes": 0,
            "hellaswag_freq": 0, "sample_freq": 0, "log_freq": 100, "max_bad_steps": 0, "check_steps": 0,
            "checkpoint_dir": folder, "logdir": folder, **of_side,
        }  # fmt: skip
        wrong = MISTAKES[trial.mistake][SIDES.index(trial.side)].split() if trial.mistake else []
        program.validate = recorded
        BatchLoader.next = lambda loader: broken(trial.mistake, *read(loader))
        if trial.mistake == "attention that sees ahead":
            F.scaled_dot_product_attention = lambda *args, **kwargs: attend(*args, **{**kwargs, "is_causal": False})
            attention.is_short_on_cpu = lambda _: False
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Enough):
                program.main([*flags(**options), *wrong])
        finally:
            program.validate, BatchLoader.next, F.scaled_dot_product_attention = validate, read, attend
            attention.is_short_on_cpu = is_short
    return points


def train_all(file: Path, out: Path, workers: int) -> None:
    """Train the trials that a file lacks, `workers` at a time, and add each one's curve to it."""
    curves: Curves = json.loads(file.read_text()) if file.exists() else {}
    folders = {}
    for corpus, (scale, *_) in CORPORA.items():
        study = Study(scale, out.absolute(), {})
        make_data(study)
        for name, parts in ((corpus, 1), (f"{corpus}-twice", 2)):
            folder = study.data / name
            folder.mkdir(exist_ok=True)
            text, val = (np.fromfile(study.data / f"{split}.bin", np.uint16) for split in ("train", "val"))
            np.tile(text[: len(text) // parts], parts).tofile(folder / "train.bin")
            val[: VAL_TOKENS + 1 if scale == "10m" else None].tofile(folder / "val.bin")
            folders[name] = folder, study.tokenizer
    os.environ["OMP_NUM_THREADS"] = "1"
    missing = [trial for trial in ALL if str(trial) not in curves]
    twice = "half of the text twice, the rest missing"
    places = [folders[f"{trial.corpus}{'-twice' * (trial.mistake == twice)}"] for trial in missing]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
        waiting = [pool.apply_async(train, (trial, *place)) for trial, place in zip(missing, places, strict=True)]
        for number, (trial, found) in enumerate(zip(missing, waiting, strict=True), start=1):
            curves[str(trial)] = found.get()
            file.write_text(json.dumps(curves))
            print(f"[{number}/{len(missing)}] {trial}: {curves[str(trial)][-1][1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=FILE, help=f"the losses (default: {FILE.relative_to(REPO)})")
    parser.add_argument("--train", action="store_true", help="train the runs that the file lacks")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/out", help="folder of the texts")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time (default: 1)")
    args = parser.parse_args()
    if args.train:
        train_all(args.file, args.out, args.workers)
    if not args.file.exists():
        raise UserError(f"{args.file}: no such file; --train writes it")
    curves = json.loads(args.file.read_text())
    print("\n\n".join("\n".join(table(curves)) for table in (of_targets, of_held_out, of_mistakes, of_depths)))


if __name__ == "__main__":
    run_cli(main)
