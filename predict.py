"""Predict the validation loss of a run from small models, before the run is paid for.

    python predict.py --config modern --data_dir data/web --minutes 40
    python predict.py --config modern --data_dir data/web --gpu_hours 100 --gpu H100      # which size, how many tokens
    python train.py --config modern --data_dir data/web --expect data/web/prediction.json

The options of train.py describe the run. Its ladder is the same run with narrower models of the same depth, each for a
quarter, a half and all of the most steps that --minutes has time for, at most those of the run. The same command
continues an interrupted ladder.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from model import GPT, new_model
from steadygpt.base.durable import lock_folder, replace_file
from steadygpt.base.options import UserError, option, run_cli
from steadygpt.base.text import counted, duration_text, labelled, scaled_text
from steadygpt.base.typed import read_json
from steadygpt.checkpoint.files import EVALUATIONS, Evaluations
from steadygpt.config import FIELDS, TrainConfig, parse_args
from steadygpt.log.metrics import read_status
from steadygpt.machine.device import PEAK_FLOPS
from steadygpt.machine.ranks import joined
from steadygpt.run.expected import NINETY, Points, Prediction, compared, fitted, predicted
from steadygpt.run.history import open_data, open_history
from steadygpt.run.plan import MANY_EPOCHS, SHARE_OF_PEAK, Plan, forecast, settle
from steadygpt.run.starts import difference

WIDTHS = (1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the ladder's models, as parts of the run's
LENGTHS = (0, 1 / 4, 1 / 2, 1)  # of the rounds, as parts of the longest; the first one has PROBE_STEPS
POINTS = 40  # validations of a run at most, and points of the predicted curve
PROBE_STEPS = 40
EVAL_TOKENS = 2**17  # of a validation at most: sampling error well below 1 %, and the same rows in all runs
FAR = 30  # times the ladder's FLOPs, beyond which an interval is twice as wide
UNITS = ("", " k", " M", " B", " T")
SHAPE = ("embd_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
OUT = "out.txt"
NOTHING_ELSE = {  # that a run of the ladder has no use for
    "checkpoint_freq": 0, "hellaswag_freq": 0, "core_freq": 0, "core_dir": "", "sample_freq": 0, "audit_steps": 0,
    "use_tensorboard": False, "use_wandb": False, "mirror": "", "alert_url": "", "expect": "", "max_hours": 0,
    "sharding": "ddp", "cpu_offload": False,
}  # fmt: skip
ABOUT = "Predict the loss of the run that the options of train.py describe, from a ladder of small runs."


@dataclass(frozen=True)
class PredictOptions(TrainConfig):
    minutes: float = option(0.0, "time for the ladder; 0 = it is trained already", "prediction")
    ladder: str = option("", "folder of the ladder (default: ladder in the folder of the data)", "prediction")
    gpu_hours: float = option(0.0, "find the best size and tokens for so many hours of --gpu; 0 = off", "prediction")
    gpu: str = option("H100", "GPU, by a part of its name", "prediction")


# ---------------------------------------------------------------------------------------------------------------------
# the ladder


def scaled(config: TrainConfig, width: int, num_layers: int) -> TrainConfig:
    """Return a run of another shape, with heads of about the same size that share keys alike."""
    share = width / config.embd_size
    heads = max(1, round(config.num_heads * share))
    while not config.head_dim and (width % heads or (width // heads) % 2):
        heads += 1
    return replace(
        config, embd_size=width, num_heads=heads, num_layers=num_layers,
        num_kv_heads=math.gcd(heads, config.num_kv_heads) if config.num_kv_heads else 0,
        intermediate_size=math.ceil(config.intermediate_size * share / 8) * 8,
    )  # fmt: skip


def sketch_of(config: TrainConfig) -> GPT:
    """Return the model of a settled run, without weights."""
    with torch.device("meta"):
        return new_model(config, config.shape(config.vocab_size))


def size_of(config: TrainConfig) -> float:
    """Return N of a settled run: its FLOPs per token / 6."""
    return sketch_of(config).flops_per_token() / 6


@cache
def curve_of(folder: Path) -> dict[int, tuple[float, float]]:
    """Return step -> validation loss and bits per byte, NaN if they are not known, of a finished run."""
    found = read_json(folder / EVALUATIONS, Evaluations, "remove its folder")
    return {step: (of["val_loss"], of.get("val_bpb", math.nan)) for step, of in sorted(found.items()) if of["val_loss"]}


class State(NamedTuple):
    """The content of ladder.json."""

    options: dict[str, Any]  # of the target, see compared()
    minutes: Annotated[float, 0]
    steps: list[Annotated[int, 1]]  # of the runs of each round, as decided before it
    seconds: dict[str, Annotated[float, 0]]  # of the runs that have finished


def write_json(path: Path, record: State | Prediction) -> None:
    replace_file(path, lambda file: file.write(json.dumps(record._asdict(), indent=1).encode()))


class Rung(NamedTuple):
    """A run of the ladder."""

    config: TrainConfig  # with its shape, and otherwise the target's
    size: float  # N
    steps: int

    def __str__(self) -> str:
        return f"width-{self.config.embd_size}-steps-{self.steps}"


class Ladder:
    """Small runs of a target, in rounds of the same length; the first one, of a few steps, only measures their speed.

    Raises: UserError if the folder has the ladder of another target.
    """

    def __init__(self, target: TrainConfig, folder: Path, minutes: float):
        self.target, self.folder, self.file = target, folder, folder / "ladder.json"
        self.state = State(compared(target), minutes, [], {})
        if self.file.exists():
            was = read_json(self.file, State, "remove it, or give another --ladder")
            now = self.state.options | {"minutes": minutes or was.minutes}
            if differs := difference(was.options | {"minutes": was.minutes}, now):
                raise UserError(f"{folder}: is the ladder of another run ({differs}); give another --ladder")
            self.state = was
        elif not minutes:
            raise UserError(f"{folder}: no ladder is there; give the --minutes that it may take")
        widths = sorted({max(8, round(target.embd_size * share / 8) * 8) for share in WIDTHS})
        if len(widths) < len(WIDTHS):
            raise UserError(f"--embd_size {target.embd_size}: too narrow for a ladder; expected 64 or more")
        shapes = [scaled(target, width, target.num_layers) for width in widths]
        self.shapes = [(shape, size_of(shape)) for shape in shapes]

    def round(self, number: int) -> list[Rung]:
        return [Rung(*shape, self.state.steps[number]) for shape in self.shapes]

    def rungs(self) -> list[Rung]:
        """Return all runs but those of the first round, from the shortest to the longest."""
        return [rung for number in range(1, len(self.state.steps)) for rung in self.round(number)]

    def train(self, flags: Sequence[str]) -> None:
        """Train what is missing, with the target's flags of train.py."""
        for number in range(len(LENGTHS)):
            if len(self.state.steps) == number:
                self.state.steps.append(self.affordable(number))
            for rung in self.round(number):
                if (name := str(rung)) not in self.state.seconds:
                    left_s = 60 * self.state.minutes - sum(self.state.seconds.values())
                    print(f"{name}: training, {duration_text(max(0, left_s))} left for the ladder", flush=True)
                    self.state.seconds[name] = self.run(rung, flags)
                    write_json(self.file, self.state)
                    print(f"{name}: loss {self.curve(rung)[rung.steps][0]:.4f}", flush=True)

    def affordable(self, number: int) -> int:
        """Return the steps of a round, by the time that the rounds before it have taken.

        Raises: UserError if there is too little time for it.
        """
        most = math.ceil((LENGTHS[number] or 1) * self.target.max_steps)
        if not number:
            return min(PROBE_STEPS, most)
        steps, lengths = self.state.steps, LENGTHS[number:]
        took_s = [sum(self.state.seconds[str(rung)] for rung in self.round(earlier)) for earlier in range(number)]
        start_s, step_s = 0.0, took_s[-1] / steps[-1]
        if number > 1 and steps[-1] > steps[-2] and took_s[-1] > took_s[-2]:
            step_s = (took_s[-1] - took_s[-2]) / (steps[-1] - steps[-2])
            start_s = max(0.0, took_s[-1] - step_s * steps[-1])
        left_s = 60 * self.state.minutes - sum(took_s) - len(lengths) * start_s
        possible = math.floor(lengths[0] / sum(lengths) * left_s / step_s)
        if number == 1 and possible < min(steps[-1], most):
            needed_s = 60 * self.state.minutes - left_s + steps[-1] / lengths[0] * sum(lengths) * step_s
            raise UserError(f"--minutes {self.state.minutes:g}: too few; expected at least {math.ceil(needed_s / 60)}")
        return max(1, min(possible, most))

    def run(self, rung: Rung, flags: Sequence[str]) -> float:
        """Train a run to its end, or continue it; return its seconds.

        Raises: UserError if it fails.
        """
        target, folder, steps, begun_s = self.target, self.folder / str(rung), rung.steps, time.monotonic()
        eval_tokens = min(target.eval_tokens, EVAL_TOKENS)
        options = {name: getattr(rung.config, name) for name in SHAPE} | {
            "max_steps": steps, "warmup_steps": min(target.warmup_steps, steps // 10), "eval_tokens": eval_tokens,
            "total_batch_size": target.total_batch_size, "run_name": rung, "checkpoint_dir": folder, "logdir": folder,
            # Validations take at most a sixth of the work.
            "eval_freq": max(1, steps // POINTS, 2 * eval_tokens // target.total_batch_size), "resume": "auto",
            **NOTHING_ELSE,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, str(Path(__file__).with_name("train.py"))]
        command = [*program, *flags, *(f"--{name}={value}" for name, value in options.items())]
        with open(folder / OUT, "a") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                process.wait()  # the terminal has sent Ctrl-C to it too, and it saves
                raise
        if status or read_status(folder).get("status") != "finished":
            *_, last = (folder / OUT).read_text(errors="replace").strip().splitlines() or [""]
            raise UserError(f"{folder}: the run ended with status {status}: {last}; see {OUT} there")
        return time.monotonic() - begun_s

    def curve(self, rung: Rung) -> dict[int, tuple[float, float]]:
        return curve_of(self.folder / str(rung))

    def flops(self) -> float:
        """Return the FLOPs of all runs."""
        return sum(6 * rung.size * rung.steps * self.target.total_batch_size for rung in self.rungs())

    def points(self, part: float = 1.0) -> Points:
        """Return the losses of the runs after a part of their steps, without runs not yet validated then."""
        found = []
        for rung in self.rungs():
            steps, losses = zip(*((step, loss) for step, (loss, _) in self.curve(rung).items()), strict=True)
            if steps[0] <= part * rung.steps:
                loss = math.exp(np.interp(math.log(part * rung.steps), np.log(steps), np.log(losses)))
                found.append((rung.size, rung.steps * self.target.total_batch_size, loss))
        return Points(*np.array(found, float).T)

    def predict(self, size: float, tokens: float, part: float = 1.0) -> tuple[float, float]:
        """Return a loss after a part of a run, and by which factor it is at most higher or lower, in 9 of 10 cases."""
        loss, deviation = predicted(self.points(part), size, tokens)
        return loss, math.exp(NINETY * deviation * (2 if 6 * size * tokens > FAR * self.flops() else 1))


# ---------------------------------------------------------------------------------------------------------------------
# the answer


def expected(ladder: Ladder) -> Prediction:
    """Return what to expect of the target, from where all of the longest runs were validated."""
    target, size = ladder.target, size_of(ladder.target)
    tokens, curve = target.max_steps * target.total_batch_size, {}
    first = max(min(ladder.curve(rung)) / rung.steps for rung in ladder.rungs()[-len(WIDTHS) :])
    for number in range(max(1, math.ceil(first * POINTS)), POINTS + 1):
        loss, factor = ladder.predict(size, tokens, number / POINTS)
        curve[math.ceil(number / POINTS * target.max_steps)] = loss, loss / factor, loss * factor
    share = ladder.flops() / (6 * size * tokens)
    return Prediction(compared(target), [(step, *of) for step, of in curve.items()], tokens, share)


def answer(ladder: Ladder, found: Prediction) -> Iterator[str]:
    """Yield lines about the target."""
    rungs, steps, (_, *losses) = ladder.rungs(), ladder.target.max_steps, found.curve[-1]
    widths = " to ".join(f"{rungs[i].config.embd_size}" for i in (0, -1))
    taken = duration_text(sum(ladder.state.seconds.values()))
    about = f"{counted(len(rungs), 'run')}, {widths} wide, up to {counted(rungs[-1].steps, 'step')}, in {taken}"
    yield labelled("run", f"{parameters_text(ladder.target)}, {tokens_text(ladder.target, found.tokens)}")
    yield labelled("ladder", f"{about}; {found.ladder_compute:.2g} of the run's FLOPs")
    yield labelled("loss", "{:.3f}, in 9 of 10 cases {:.3f} to {:.3f}".format(*losses))
    last, bits = ladder.curve(rungs[-1])[rungs[-1].steps]
    if not math.isnan(bits):
        yield labelled("bits/byte", "{:.3f}, {:.3f} to {:.3f}".format(*(bits / last * loss for loss in losses)))
    if found.ladder_compute * FAR < 1:
        yield labelled("caution", f"more than {FAR} times the ladder's FLOPs: an interval twice as wide")
    if (times := steps / rungs[-1].steps) > 1:
        yield labelled("caution", f"{times:.1f} times the steps of the ladder, which knows nothing of later ones")


def parameters_text(config: TrainConfig) -> str:
    number = scaled_text(sketch_of(config).num_parameters(), UNITS)
    return f"{number} parameters ({counted(config.num_layers, 'layer')}, {config.embd_size} wide)"


def tokens_text(config: TrainConfig, tokens: float) -> str:
    return f"{scaled_text(tokens, UNITS)} tokens in {tokens / config.total_batch_size:,.0f} steps"


def budget(ladder: Ladder, plan: Plan, hours: float, gpu: str, price: float) -> Iterator[str]:
    """Yield lines about the best size for so many hours of a GPU, and what half and twice of it lose."""
    name = next((name for name in PEAK_FLOPS if gpu.lower() in name.lower()), "")
    if not name:
        raise UserError(f"--gpu {gpu}: no such GPU; expected a part of one of {', '.join(PEAK_FLOPS)}")
    flops, target, found, heads = 3600 * hours * PEAK_FLOPS[name] * SHARE_OF_PEAK, ladder.target, [], 1
    while True:
        width = heads * target.embd_size // target.num_heads
        config = scaled(target, width, max(1, round(target.num_layers * width / target.embd_size)))
        size = size_of(config)
        if (tokens := flops / (6 * size)) < PROBE_STEPS * target.total_batch_size:
            break
        found.append((config, size, tokens, *ladder.predict(size, tokens)))
        heads += 1 + heads // 8
    if not found:
        raise UserError(f"--gpu_hours {hours:g}: too few for {PROBE_STEPS} steps of the narrowest model")
    cost = f"; {hours * price:,.2f} at {price:,.2f} per hour" * bool(price)
    yield labelled("budget", f"{hours:,g} h of one {name} at {SHARE_OF_PEAK:.0%} of its peak, {flops:.2g} FLOPs{cost}")
    best = min(found, key=lambda of: of[3])
    chosen = [min(found, key=lambda of: abs(math.log(of[1] / best[1] / times))) for times in (0.5, 1, 2)]
    for of in dict.fromkeys(chosen):
        config, _, tokens, loss, factor = of
        epochs = tokens / config.context_length / (plan.data.rows_per_epoch or math.inf)
        repeats = f", {epochs:,.1f} EPOCHS, of little benefit beyond {MANY_EPOCHS}" * (epochs > MANY_EPOCHS)
        lost = f"{loss:.3f} ({loss / factor:.3f} to {loss * factor:.3f}){f', {loss - best[3]:+.3f}' * (of is not best)}"
        text = f"{parameters_text(config)}, {tokens_text(config, tokens)}{repeats}: loss {lost}"
        yield labelled("best" if of is best else "instead", text)
    if flops > FAR * ladder.flops():
        yield labelled("caution", f"{flops / ladder.flops():,.0f} times the ladder's FLOPs: intervals twice as wide")


def draw(ladder: Ladder, found: Prediction, file: Path) -> str:
    """Draw the ladder's losses and the predicted one by size, and the predicted curve; return where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "none; pip install matplotlib"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_size, by_step = figure.subplots(1, 2, sharey=True)
    size, (_, loss, low, high) = size_of(ladder.target), found.curve[-1]
    tokens, points = ladder.target.total_batch_size, ladder.points()
    sizes = np.geomspace(points.sizes.min(), size)
    for length in sorted({*points.tokens, float(found.tokens)}):
        of_length = points.of(points.tokens == length)
        by_size.plot(sizes, fitted(points)(sizes, length), color="0.8", zorder=0)
        by_size.plot(of_length.sizes, of_length.losses, "o", label=f"{length / tokens:,.0f} steps")
    by_size.errorbar([size], [loss], [[loss - low], [high - loss]], fmt="ks", capsize=4, label="the run")
    by_size.set(xscale="log", xlabel="FLOPs per token / 6", ylabel="validation loss")
    steps, middle, lower, upper = zip(*found.curve, strict=True)
    for i, rung in enumerate(ladder.rungs()[-len(WIDTHS) :]):
        curve, grey = ladder.curve(rung), f"{0.8 - 0.15 * i}"
        by_step.plot([*curve], [of[0] for of in curve.values()], color=grey, label=f"{rung.config.embd_size} wide")
    by_step.plot(steps, middle, "k", label="the run")
    by_step.fill_between(steps, lower, upper, color="k", alpha=0.15, lw=0)
    by_step.set(xlabel="steps", xscale="log")
    for axes in (by_size, by_step):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
    return str(file)


def main(argv: Sequence[str] | None = None) -> None:
    options, given = parse_args(sys.argv[1:] if argv is None else argv, PredictOptions, ABOUT)
    assert isinstance(options, PredictOptions)
    config = TrainConfig(**{name: getattr(options, name) for name in FIELDS})
    given = {name: source for name, source in given.items() if name in FIELDS}
    if config.resume or config.init_from != "scratch" or config.batch_ramp:
        raise UserError("expected the options of a new run, without --resume, --init_from and --batch_ramp")
    data = Path(next(iter(config.sources().values()))[0])
    folder = Path(options.ladder or data / "ladder")
    config = replace(config, checkpoint_dir=str(folder / "run"), dry_run="plan", expect="")
    config = replace(config, eval_freq=config.eval_freq or 1)  # the ladder validates in any case
    with joined(config.device, config.timeout_minutes) as ranks, ExitStack() as held:
        if ranks.world_size > 1:
            raise UserError("the ladder has small models; expected python predict.py, without torchrun")
        history = open_history(config, given, ranks, held)
        plan = settle(history, open_data(history, ranks), ranks)
        if not (plan.data.sources and plan.data.val_sets):
            raise UserError(f"{data}: found no shards to train and validate on; see prepare_dataset.py")
        held.enter_context(lock_folder(folder, "wait for it to end, or give another --ladder"))
        ladder = Ladder(plan.config, folder, options.minutes)
        names = [name for name, source in given.items() if source == "flag" and name != "micro_steps"]
        ladder.train([f"--{name}={getattr(config, name)}" for name in names])
        if options.gpu_hours:
            lines = [*budget(ladder, plan, options.gpu_hours, options.gpu, config.gpu_hour_cost)]
        else:
            found, file = expected(ladder), data / "prediction.json"
            write_json(file, found)
            lines = [*answer(ladder, found), *forecast(plan), labelled("file", f"{file}, for train.py --expect")]
            lines.append(labelled("picture", draw(ladder, found, data / "prediction.svg")))
        print("\n".join(lines))


if __name__ == "__main__":
    run_cli(main)
