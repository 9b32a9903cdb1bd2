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

WIDTHS = (1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the ladder's models, as parts of the run's
LENGTHS = (1 / 4, 1 / 2, 1)  # of the rounds of the ladder, as parts of the longest
POINTS = 40  # validations of the longest runs, and points of the predicted curve
PROBE_STEPS, MIN_STEPS = 10, 40  # to measure the speed; of the shortest run
LEAST_EVAL_TOKENS = 65536
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


class Rung(NamedTuple):
    """A run of the ladder."""

    config: TrainConfig  # with its shape, and otherwise the target's
    size: float  # N
    steps: int

    def __str__(self) -> str:
        return f"width-{self.config.embd_size}-steps-{self.steps}"


class State(NamedTuple):
    """The content of ladder.json."""

    options: dict[str, Any]  # of the target, see compared()
    minutes: Annotated[float, 0]
    start_s: Annotated[float, 0]  # of the narrowest model: until its first step
    step_s: Annotated[float, 0]
    steps: list[Annotated[int, 1]]  # of each round, as decided before it
    seconds: dict[str, Annotated[float, 0]]  # of the runs that have finished


@dataclass
class Ladder:
    """Small runs of a target: a round for each of LENGTHS, from the narrowest model to the widest."""

    target: TrainConfig  # settled
    folder: Path
    state: State
    shapes: list[tuple[TrainConfig, float]]  # with their sizes

    @classmethod
    def open(cls, target: TrainConfig, folder: Path, minutes: float) -> "Ladder":
        """Continue the ladder of a folder, or begin one.

        Raises: UserError if it is that of another target.
        """
        state = State(compared(target), minutes, 0.0, 0.0, [], {})
        if (file := folder / "ladder.json").exists():
            found = read_json(file, State, "remove it, or give another --ladder")
            was, now = ({**of.options, "minutes": of.minutes} for of in (found, state))
            now["minutes"] = minutes or found.minutes
            if differs := [f"{name} {was.get(name)} (here {now[name]})" for name in now if was.get(name) != now[name]]:
                raise UserError(f"{folder}: is the ladder of a run with {', '.join(differs)}; give another --ladder")
            state = found
        elif not minutes:
            raise UserError(f"{folder}: no ladder is there; give the --minutes that it may take")
        widths = sorted({max(8, round(target.embd_size * share / 8) * 8) for share in WIDTHS})
        if len(widths) < len(WIDTHS) or widths[-1] > 0.7 * target.embd_size:
            raise UserError(f"--embd_size {target.embd_size}: too narrow for a ladder; expected 64 or more")
        shapes = [scaled(target, width, target.num_layers) for width in widths]
        return cls(target, folder, state, [(shape, size_of(shape)) for shape in shapes])

    def rungs(self) -> list[Rung]:
        """Return the runs of the rounds that are decided."""
        return [Rung(*shape, steps) for steps in self.state.steps for shape in self.shapes]

    def update(self, **changes: Any) -> None:
        self.state = self.state._replace(**changes)
        content = json.dumps(self.state._asdict(), indent=1).encode()
        replace_file(self.folder / "ladder.json", lambda file: file.write(content))

    def step_seconds(self) -> list[float]:
        """Return the seconds per step of each shape, as far as they are measured, else in proportion to its size."""
        found: list[float] = []
        for i, (shape, size) in enumerate(self.shapes):
            guess = found[-1] * size / self.shapes[i - 1][1] if found else self.state.step_s
            measured = [
                (self.state.seconds[str(rung)] - self.state.start_s) / rung.steps
                for rung in self.rungs() if rung.config is shape and str(rung) in self.state.seconds
            ]  # fmt: skip
            found.append(max(1e-6, measured[-1]) if measured else guess)
        return found

    def affordable(self, number: int) -> int:
        """Return the steps of a round, so that it and all later ones end in time.

        Raises: UserError if they are too few.
        """
        lengths, rates = LENGTHS[number:], sum(self.step_seconds())
        starts_s = len(lengths) * len(self.shapes) * self.state.start_s
        left_s = 60 * self.state.minutes - sum(self.state.seconds.values()) - starts_s
        longest = min(float(self.target.max_steps), left_s / (sum(lengths) * rates))
        if longest < (least := min(MIN_STEPS / LENGTHS[0], self.target.max_steps)) and not number:
            needed = (starts_s + least * sum(lengths) * rates) / 60
            raise UserError(f"--minutes {self.state.minutes:g}: too few; expected at least {math.ceil(needed)}")
        return max(1, round(lengths[0] * longest))

    def train(self, flags: Sequence[str]) -> None:
        """Train what is missing, with the target's flags of train.py."""
        if not self.state.step_s:
            print(f"{self.folder}: timing its narrowest model ...", flush=True)
            probe = Rung(*self.shapes[0], PROBE_STEPS)
            wall_s = self.run(probe, flags, 1.0)
            step_s = read_status(self.folder / str(probe)).get("step_ms", 100 * wall_s) / 1000
            self.update(start_s=max(0.0, wall_s - PROBE_STEPS * step_s), step_s=step_s)
        for number, length in enumerate(LENGTHS):
            if len(self.state.steps) == number:
                self.update(steps=[*self.state.steps, self.affordable(number)])
            for i, rung in enumerate(self.rungs()[number * len(self.shapes) :][: len(self.shapes)]):
                if str(rung) in self.state.seconds:
                    continue
                rates, longest = self.step_seconds(), rung.steps / length
                left_s = sum(self.state.start_s + rate * rung.steps for rate in rates[i:])
                for later in LENGTHS[number + 1 :]:
                    left_s += sum(self.state.start_s + rate * later * longest for rate in rates)
                about = f"{rung.config.embd_size} wide, {counted(rung.steps, 'step')}"
                print(f"{about}: about {duration_text(left_s)} left", flush=True)
                wall_s = self.run(rung, flags, length)
                self.update(seconds=self.state.seconds | {str(rung): wall_s})
                print(f"{about}: loss {self.curve(rung)[rung.steps][0]:.4f} after {duration_text(wall_s)}", flush=True)

    def run(self, rung: Rung, flags: Sequence[str], length: float) -> float:
        """Train a run to its end, or continue it; return its seconds.

        Raises: UserError if it fails, KeyboardInterrupt once it has stopped for a signal.
        """
        target, folder, tokens = self.target, self.folder / str(rung), rung.steps * self.target.total_batch_size
        options = {name: getattr(rung.config, name) for name in SHAPE} | {
            "max_steps": rung.steps, "warmup_steps": min(target.warmup_steps, rung.steps // 10),
            "total_batch_size": target.total_batch_size, "eval_freq": max(1, int(rung.steps / (POINTS * length))),
            "eval_tokens": min(target.eval_tokens, max(LEAST_EVAL_TOKENS, tokens // (4 * POINTS))),
            "checkpoint_dir": folder, "logdir": folder, "run_name": str(rung), "resume": "auto", **NOTHING_ELSE,
        }  # fmt: skip
        command = [*flags, *(f"--{name}={value}" for name, value in options.items())]
        folder.mkdir(parents=True, exist_ok=True)
        begun_s = time.monotonic()
        program = [sys.executable, str(Path(__file__).with_name("train.py")), *command]
        with open(folder / OUT, "a") as out, subprocess.Popen(program, stdout=out, stderr=out) as process:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                process.wait()  # the terminal has sent Ctrl-C to it too, and it saves
                raise
        if status or read_status(folder).get("status") != "finished":
            *_, last = (folder / OUT).read_text(errors="replace").strip().splitlines() or [""]
            raise UserError(f"{folder}: the run ended with status {status}: {last}; see {OUT} there")
        return time.monotonic() - begun_s

    def flops(self) -> float:
        """Return the FLOPs of all runs."""
        return sum(6 * rung.size * rung.steps * self.target.total_batch_size for rung in self.rungs())

    def curve(self, rung: Rung) -> dict[int, tuple[float, float]]:
        return curve_of(self.folder / str(rung))

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
    """Return what to expect of the target."""
    target, size = ladder.target, size_of(ladder.target)
    tokens, curve = target.max_steps * target.total_batch_size, {}
    share = ladder.flops() / (6 * size * tokens)
    for number in range(1, POINTS + 1):
        loss, factor = ladder.predict(size, tokens, number / POINTS)
        curve[math.ceil(number / POINTS * target.max_steps)] = loss, loss / factor, loss * factor
    return Prediction(compared(target), [(step, *of) for step, of in curve.items()], tokens, share)


def answer(ladder: Ladder, plan: Plan, found: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the lines about the target: label, text."""
    target, rungs, (_, *losses) = ladder.target, ladder.rungs(), found.curve[-1]
    widest = rungs[-1]
    yield (
        "run",
        (
            f"{scaled_text(plan.sketch.num_parameters(), UNITS)} parameters, {counted(target.max_steps, 'step')} of "
            f"{target.total_batch_size:,} tokens: {scaled_text(found.tokens, UNITS)} tokens"
        ),
    )
    yield (
        "ladder",
        (
            f"{counted(len(rungs), 'run')}, {rungs[0].config.embd_size} to {widest.config.embd_size} wide, up to "
            f"{counted(widest.steps, 'step')}, in {duration_text(sum(ladder.state.seconds.values()))}; "
            f"{found.ladder_compute:.2g} of the run's FLOPs"
        ),
    )
    yield "loss", "{:.3f}, in 9 of 10 cases {:.3f} to {:.3f}".format(*losses)
    last, bits = ladder.curve(widest)[widest.steps]
    if not math.isnan(bits):
        yield "bits/byte", "{:.3f}, {:.3f} to {:.3f}".format(*(bits / last * loss for loss in losses))
    if found.ladder_compute * FAR < 1:
        yield "beware", f"more than {FAR} times the ladder's FLOPs; the interval is twice as wide for it"
    if widest.steps < target.max_steps:
        times = target.max_steps / widest.steps
        yield (
            "beware",
            f"{times:.1f} times the steps of the ladder, which knows nothing of later ones; try more --minutes",
        )


def shapes_for(ladder: Ladder, flops: float) -> Iterator[tuple[TrainConfig, float, float, float, float]]:
    """Yield shapes like the target's, from narrow to wide, that a budget trains: with N, D, and predict()'s results."""
    target = ladder.target
    for heads in range(1, 8 * target.num_heads + 1):
        width = heads * (target.embd_size // target.num_heads)
        config = scaled(target, width, max(1, round(target.num_layers * width / target.embd_size)))
        size = size_of(config)
        if (tokens := flops / (6 * size)) < MIN_STEPS * target.total_batch_size:
            return
        yield config, size, tokens, *ladder.predict(size, tokens)


def budget(ladder: Ladder, plan: Plan, options: PredictOptions) -> Iterator[tuple[str, str]]:
    """Yield the lines about --gpu_hours: the best size, and what half and twice of it lose."""
    hours, price, names = options.gpu_hours, options.gpu_hour_cost, [*PEAK_FLOPS]
    gpu = next((name for name in names if options.gpu.lower() in name.lower()), "")
    if not gpu:
        raise UserError(f"--gpu {options.gpu}: no such GPU; expected a part of one of {', '.join(names)}")
    flops = 3600 * hours * PEAK_FLOPS[gpu] * SHARE_OF_PEAK
    cost = f"; {hours * price:,.2f} at {price:,.2f} per hour" * bool(price)
    yield "budget", f"{hours:,g} h of one {gpu} at {SHARE_OF_PEAK:.0%} of its peak, {flops:.2g} FLOPs{cost}"
    found = [*shapes_for(ladder, flops)]
    if not found:
        raise UserError(f"--gpu_hours {hours:g}: too few for {MIN_STEPS} steps of the narrowest model")
    best = min(found, key=lambda of: of[3])
    chosen = [min(found, key=lambda of: abs(math.log(of[1] / best[1] / times))) for times in (0.5, 1, 2)]
    for of in dict.fromkeys(chosen):
        config, _, tokens, loss, factor = of
        epochs = tokens / config.context_length / plan.data.rows_per_epoch if plan.data.rows_per_epoch else 0
        repeats = f", {epochs:,.1f} EPOCHS, of little benefit beyond {MANY_EPOCHS}" * (epochs > MANY_EPOCHS)
        yield (
            "best" if of is best else "instead",
            (
                f"{scaled_text(sketch_of(config).num_parameters(), UNITS)} parameters ({config.num_layers} layers, "
                f"{config.embd_size} wide), {scaled_text(tokens, UNITS)} tokens, "
                f"{tokens / config.total_batch_size:,.0f} steps{repeats}: loss {loss:.3f} "
                f"({loss / factor:.3f} to {loss * factor:.3f}){f', {loss - best[3]:+.3f}' * (of is not best)}"
            ),
        )
    if flops > FAR * ladder.flops():
        yield (
            "beware",
            f"{flops / ladder.flops():,.0f} times the ladder's FLOPs; the intervals are twice as wide",
        )


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
    for rung in ladder.rungs()[-len(ladder.shapes) :]:
        curve = ladder.curve(rung)
        by_step.plot([*curve], [of[0] for of in curve.values()], color="0.7", label=f"{rung.config.embd_size} wide")
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
    with joined(config.device, config.timeout_minutes) as ranks, ExitStack() as held:
        if ranks.world_size > 1:
            raise UserError("the ladder has small models; expected python predict.py, without torchrun")
        history = open_history(config, given, ranks, held)
        plan = settle(history, open_data(history, ranks), ranks)
        if not plan.data.sources:
            raise UserError(f"{data}: found no shards; prepare the data first, see prepare_dataset.py")
        held.enter_context(lock_folder(folder, "wait for it to end, or give another --ladder"))
        ladder = Ladder.open(plan.config, folder, options.minutes)
        ladder.train(
            [
                f"--{name}={getattr(config, name)}"
                for name, source in given.items()
                if source == "flag" and name in FIELDS
            ]
        )
        if options.gpu_hours:
            lines = [*budget(ladder, plan, options)]
        else:
            found = expected(ladder)
            content, file = json.dumps(found._asdict(), indent=1).encode(), data / "prediction.json"
            replace_file(file, lambda out: out.write(content))
            files = [
                ("file", f"{file}, for train.py --expect"),
                ("picture", draw(ladder, found, data / "prediction.svg")),
            ]
            lines = [*answer(ladder, plan, found), *files]
        print("\n".join([*(labelled(*line) for line in lines), *([] if options.gpu_hours else forecast(plan))]))


if __name__ == "__main__":
    run_cli(main)
