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
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from statistics import median
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
from steadygpt.log.metrics import METRICS, read_records, read_status
from steadygpt.machine.device import PEAK_FLOPS
from steadygpt.machine.ranks import joined
from steadygpt.run.expected import NINETY, Points, Prediction, compared, fitted, predicted
from steadygpt.run.history import open_data, open_history
from steadygpt.run.plan import MANY_EPOCHS, SHARE_OF_PEAK, Plan, forecast, settle
from steadygpt.run.starts import difference, new_start

WIDTHS = (1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the ladder's models, as parts of the run's
LENGTHS = (0, 1 / 4, 1 / 2, 1)  # of the rounds, as parts of the longest; the first one has PROBE_STEPS
POINTS = 40  # validations of a run at most, and points of the predicted curve
PROBE_STEPS = 40
EVAL_TOKENS = 2**17  # of a validation at most: sampling error well below 1 %, and the same rows in all runs
EVAL_SHARE = 1 / 6  # of the work of a run, at most
FAR, TOO_FAR = 30, 10_000  # times the ladder's FLOPs: an interval twice as wide; no prediction
UNITS = ("", " k", " M", " B", " T")
SHAPE = ("embd_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
OUT = "out.txt"
NOTHING_ELSE = {  # that a run of the ladder has no use for
    "checkpoint_freq": 0, "log_freq": 1, "hellaswag_freq": 0, "core_freq": 0, "core_dir": "", "sample_freq": 0,
    "audit_steps": 0, "use_tensorboard": False, "use_wandb": False, "mirror": "", "max_hours": 0, "sharding": "ddp",
    "shard_size": 0, "cpu_offload": False, "expect": "", "alert_url": "",
}  # fmt: skip
NOT_PASSED_ON = ("micro_steps", "alert_url")  # to the runs of the ladder; the latter is a secret
OF_OTHER_RUNS = ("resume", "init_from", "batch_ramp", "eval_only", "dry_run", "list_checkpoints", "profile")
ABOUT = "Predict the loss of the run that the options of train.py describe, from a ladder of small runs."


@dataclass(frozen=True)
class PredictOptions(TrainConfig):
    minutes: float = option(0.0, "time for the ladder altogether; 0 = it is trained already", "prediction")
    ladder: str = option("", "folder of the ladder (default: ladder in the folder of the data)", "prediction")
    gpu_hours: float = option(0.0, "find the best size and tokens for so many hours of --gpu; 0 = off", "prediction")
    gpu: str = option("H100", "GPU, by a part of its name", "prediction")


# ---------------------------------------------------------------------------------------------------------------------
# the ladder


def nearest(wanted: float, possible: Sequence[int]) -> int:
    return min(possible, key=lambda n: (abs(n - wanted), -n))


def scaled(config: TrainConfig, width: int, num_layers: int) -> TrainConfig:
    """Return a run of another shape, with heads of about the same size that share keys alike."""
    share, part = width / config.embd_size, config.rotary_pct  # of a head; rotary positions need an even number

    def fits(size: int) -> bool:
        return not part or int(size * part) in range(2, size + 1, 2)

    divisors = [n for n in range(1, width + 1) if width % n == 0 and fits(width // n)]
    heads = nearest(config.num_heads * share, range(1, width + 1) if config.head_dim else divisors or [1])
    shared = [n for n in range(1, heads + 1) if heads % n == 0]
    return replace(
        config, embd_size=width, num_heads=heads, num_layers=num_layers,
        num_kv_heads=config.num_kv_heads and nearest(config.num_kv_heads * heads / config.num_heads, shared),
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
def curve_of(folder: Path, last: int) -> dict[int, tuple[float, float]]:
    """Return step -> validation loss and bits per byte, NaN if unknown, of a run that ends at step `last`."""
    found = read_json(folder / EVALUATIONS, Evaluations, f"remove {folder}")
    losses = {step: (of.get("val_loss"), of.get("val_bpb") or math.nan) for step, of in sorted(found.items())}
    curve = {step: (loss, bits) for step, (loss, bits) in losses.items() if loss}
    if last not in curve:
        raise UserError(f"{folder / EVALUATIONS}: no loss at step {last}, where the run ends; remove {folder}")
    return curve


class State(NamedTuple):
    """The content of ladder.json."""

    target: dict[str, Any]  # its options, see compared(), and its data
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

    Args:
        data: what identifies the target's data.

    Raises: UserError if the folder has the ladder of another target.
    """

    def __init__(self, target: TrainConfig, data: dict[str, Any], folder: Path):
        self.target, self.folder, self.file = target, folder, folder / "ladder.json"
        self.state = State(compared(target) | data, [], {})
        if self.file.exists():
            found = read_json(self.file, State, f"remove {folder}, or give another --ladder")
            if differs := difference(found.target, self.state.target):
                raise UserError(f"{folder}: is the ladder of another run ({differs:.200}); give another --ladder")
            self.state = found
        unit, widths = max(8, 2 ** int(math.log2(target.embd_size / 12))), [0]  # of widths that kernels are fast at
        for share in WIDTHS:
            widths.append(max(round(target.embd_size * share / unit) * unit, widths[-1] + unit))
        if widths[-1] > 0.7 * target.embd_size:
            raise UserError(f"--embd_size {target.embd_size}: too narrow for a ladder; expected 48 or more")
        shapes = [scaled(target, width, target.num_layers) for width in widths[1:]]
        for shape in shapes:
            shape.check_shape()
        self.shapes = [(shape, size_of(shape)) for shape in shapes]

    def round(self, number: int) -> list[Rung]:
        return [Rung(*shape, self.state.steps[number]) for shape in self.shapes]

    def rungs(self) -> list[Rung]:
        """Return all runs but those of the first round, from the shortest to the longest."""
        return [rung for number in range(1, len(self.state.steps)) for rung in self.round(number)]

    def train(self, flags: Sequence[str], minutes: float) -> None:
        """Train what is missing, in so many minutes altogether, with the target's flags of train.py.

        Raises: UserError if a run fails, or if the time is too short.
        """
        if not (minutes or self.rungs()):
            raise UserError(f"{self.folder}: no ladder is there; give the --minutes that it may take")
        for number in count():
            if len(self.state.steps) == number:
                steps = self.affordable(number, 60 * minutes)
                if number and steps <= self.state.steps[-1] and self.rungs():
                    return
                self.state.steps.append(steps)
            for rung in self.round(number):
                if (name := str(rung)) not in self.state.seconds or not (self.folder / name / EVALUATIONS).exists():
                    if not minutes:
                        raise UserError(f"{self.folder / name}: not trained yet; give --minutes")
                    left_s = max(0.0, 60 * minutes - sum(self.state.seconds.values()))
                    print(f"{name}: training, {duration_text(left_s)} left for the ladder", flush=True)
                    self.state.seconds[name] = self.run(rung, flags)
                    write_json(self.file, self.state)
                    print(f"{name}: loss {self.curve(rung)[rung.steps][0]:.4f}", flush=True)

    def affordable(self, number: int, seconds: float) -> int:
        """Return the steps of a round, by the time that the rounds before it have taken, of so many in all.

        Raises: UserError if there is too little time for the first round that counts.
        """
        lengths = LENGTHS[number:] or LENGTHS[-1:]
        most = math.ceil((lengths[0] or 1) * self.target.max_steps)
        if not number:
            return min(PROBE_STEPS, most)
        steps = self.state.steps
        took_s = [sum(self.state.seconds[str(rung)] for rung in self.round(earlier)) for earlier in range(number)]
        if number == 1 or steps[-1] == steps[-2]:  # most of the time is that of the starts
            step_s = sum(self.step_s(rung) for rung in self.round(number - 1)) / (1 - EVAL_SHARE)
        else:
            step_s = max(0.0, took_s[-1] - took_s[-2]) / max(1, steps[-1] - steps[-2]) or took_s[-1] / steps[-1]
        start_s = max(0.0, took_s[-1] - step_s * steps[-1])
        left_s = seconds - sum(self.state.seconds.values()) - len(lengths) * start_s
        possible = math.floor(lengths[0] / sum(lengths) * left_s / step_s)
        if number == 1 and possible < min(steps[-1], most):
            needed_s = seconds - left_s + steps[-1] / lengths[0] * sum(lengths) * step_s
            raise UserError(
                f"--minutes {seconds / 60:g}: too few; expected at least {math.ceil(needed_s / 60)}. "
                "The runs so far are kept"
            )
        return min(possible, most)

    def step_s(self, rung: Rung) -> float:
        """Return the median seconds of a step of a finished run."""
        folder = self.folder / str(rung)
        if not (found := [of["step_ms"] for of in read_records(folder / METRICS, "step_ms") if of["step_ms"]]):
            raise UserError(f"{folder / METRICS}: has no times of steps; remove {folder}")
        return median(found) / 1000

    def run(self, rung: Rung, flags: Sequence[str]) -> float:
        """Train a run to its end, or continue it; return its seconds, those before an interruption included.

        Raises: UserError if it fails, KeyboardInterrupt once it has saved after a signal.
        """
        target, folder, steps = self.target, self.folder / str(rung), rung.steps
        eval_tokens = min(target.eval_tokens, EVAL_TOKENS)
        every = math.ceil(eval_tokens / (3 * EVAL_SHARE * target.total_batch_size))  # a forward pass: a third of a step
        options = {name: getattr(rung.config, name) for name in SHAPE} | {
            "max_steps": steps, "warmup_steps": round(target.warmup_steps * steps / target.max_steps), "run_name": rung,
            "total_batch_size": target.total_batch_size, "eval_tokens": eval_tokens, "resume": "auto",
            "eval_freq": max(1, steps // POINTS, every), "checkpoint_dir": folder, "logdir": folder, **NOTHING_ELSE,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, str(Path(__file__).with_name("train.py"))]
        command = [*program, *flags, *(f"--{name}={value}" for name, value in options.items())]
        # A terminal sends Ctrl-C to this process alone, which passes it on once; the run then saves.
        with (
            open(folder / OUT, "w") as out,
            subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as process,
        ):
            try:
                status = process.wait()
            finally:
                process.terminate()
                process.wait()
        ended = read_status(folder)
        if status or ended.get("status") != "finished":
            said = (folder / OUT).read_text(errors="replace").strip().splitlines() or [""]
            *_, line = [line for line in said if line.startswith(("error: ", "failed "))] or said
            raise UserError(f"{folder}: the run ended with status {status}: {line}; see {OUT} there")
        return ended.get("elapsed_s", 0.0)

    def curve(self, rung: Rung) -> dict[int, tuple[float, float]]:
        return curve_of(self.folder / str(rung), rung.steps)

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
        if (times := 6 * size * tokens / self.flops()) > TOO_FAR:
            raise UserError(f"{times:,.0f} times the ladder's FLOPs; expected at most {TOO_FAR:,}. Train a longer one")
        loss, deviation = predicted(self.points(part), size, tokens)
        return loss, math.exp(NINETY * deviation * (2 if times > FAR else 1))


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
    return Prediction(compared(target), [(step, *of) for step, of in curve.items()])


def answer(ladder: Ladder, found: Prediction) -> Iterator[str]:
    """Yield lines about the target."""
    target, rungs, (_, *losses) = ladder.target, ladder.rungs(), found.curve[-1]
    tokens = target.max_steps * target.total_batch_size
    share = ladder.flops() / (6 * size_of(target) * tokens)
    widths = " to ".join(f"{rungs[i].config.embd_size}" for i in (0, -1))
    taken = duration_text(sum(ladder.state.seconds.values()))
    about = f"{counted(len(rungs), 'run')}, {widths} wide, up to {counted(rungs[-1].steps, 'step')}, in {taken}"
    yield labelled("run", f"{parameters_text(target)}, {tokens_text(target, tokens)}")
    yield labelled("ladder", f"{about}; {100 * share:.3g}% of the run's FLOPs")
    yield labelled("loss", "{:.3f}, in 9 of 10 cases {:.3f} to {:.3f}".format(*losses))
    last, bits = ladder.curve(rungs[-1])[rungs[-1].steps]
    if not math.isnan(bits):
        yield labelled("bits/byte", "{:.3f}, {:.3f} to {:.3f}".format(*(bits / last * loss for loss in losses)))
    if share * FAR < 1:
        yield labelled("caution", f"more than {FAR} times the ladder's FLOPs: an interval twice as wide")
    if (times := target.max_steps / rungs[-1].steps) > 1:
        yield labelled("caution", f"{times:.1f} times the steps of the ladder, which knows nothing of later ones")


def parameters_text(config: TrainConfig) -> str:
    number = scaled_text(sketch_of(config).num_parameters(), UNITS)
    return f"{number} parameters ({counted(config.num_layers, 'layer')}, {config.embd_size} wide)"


def tokens_text(config: TrainConfig, tokens: float) -> str:
    return f"{scaled_text(tokens, UNITS)} tokens in {counted(round(tokens / config.total_batch_size), 'step')}"


def budget(ladder: Ladder, plan: Plan, hours: float, gpu: str, price: float) -> Iterator[str]:
    """Yield lines about the best size for so many hours of a GPU, and what half and twice of it lose."""
    target, heads = ladder.target, 1
    found = list[tuple[TrainConfig, float, float, float, float]]()
    flops = 3600 * hours * SHARE_OF_PEAK * PEAK_FLOPS[gpu] * (0.5 if target.precision == "fp32" else 1.0)
    while not found or found[-1][1] < 4 * min(found, key=lambda of: of[3])[1]:
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
    yield labelled("budget", f"{hours:,g} h of one {gpu} at {SHARE_OF_PEAK:.0%} of its peak, {flops:.2g} FLOPs{cost}")
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
    for length in sorted({*points.tokens, float(ladder.target.max_steps * tokens)}):
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


def interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options, given = parse_args(argv, PredictOptions, ABOUT)
    assert isinstance(options, PredictOptions)
    gpu = next((name for name in PEAK_FLOPS if options.gpu.lower() in name.lower()), "")
    if wrong := [name for name in OF_OTHER_RUNS if name in given]:
        raise UserError(f"--{wrong[-1]}: expected the options of a new run")
    if not gpu:
        raise UserError(f"--gpu {options.gpu}: no such GPU; expected a part of one of {', '.join(PEAK_FLOPS)}")
    if ("gpu" in given) > bool(options.gpu_hours):
        raise UserError("--gpu needs --gpu_hours")
    if options.mix and not options.ladder:
        raise UserError("--mix needs --ladder FOLDER, because it has no folder of its own")
    config = TrainConfig(**{name: getattr(options, name) for name in FIELDS})
    data = Path(options.ladder or config.data_dir)
    folder = data if options.ladder else data / "ladder"
    config = replace(config, checkpoint_dir=str(folder / "run"), dry_run="plan", expect="", alert_url="")
    config = replace(config, sharding="ddp", shard_size=0, cpu_offload=False)  # for models this small
    config = replace(config, eval_freq=config.eval_freq or 1)  # the ladder validates in any case
    with joined(config.device, config.timeout_minutes) as ranks, ExitStack() as held:
        if ranks.world_size > 1:
            raise UserError("the ladder has small models; expected python predict.py, without torchrun")
        history = open_history(config, {n: source for n, source in given.items() if n in FIELDS}, ranks, held)
        plan = settle(history, open_data(history, ranks), ranks)
        if not (plan.data.sources and plan.data.val_sets):
            raise UserError(f"{data}: found no shards to train and validate on; see prepare_dataset.py")
        held.enter_context(lock_folder(folder, "wait for it to end, or give another --ladder"))
        known = {shards.key: shards.check(plan.config.vocab_size, plan.fingerprint) for shards in plan.data.sets}
        entry = new_start(history, plan.data, known, ranks)
        sets = {"data": sorted(entry["shares"].items()), "validation": [of for _, of in entry["val_sets"].values()]}
        ladder = Ladder(plan.config, {name: str(of) for name, of in sets.items()} | {"seed": config.seed}, folder)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the latter
                signal.signal(number, interrupt)
        names = [name for name in FIELDS if given.get(name) == "flag" and name not in NOT_PASSED_ON]
        ladder.train([f"--{name}={getattr(config, name)}" for name in names], options.minutes)
        if options.gpu_hours:
            print("\n".join(budget(ladder, plan, options.gpu_hours, gpu, config.gpu_hour_cost)))
            return
        found, file = expected(ladder), data / "prediction.json"
        print("\n".join([*answer(ladder, found), *forecast(plan)]))
        write_json(file, found)
        print(labelled("file", f"{file}, for train.py --expect"))
        print(labelled("picture", draw(ladder, found, data / "prediction.svg")))


if __name__ == "__main__":
    run_cli(main)
