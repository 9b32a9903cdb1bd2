"""Predict the validation loss of a run from two finished runs of narrower models.

    python train.py --config modern --embd_size 192 --num_heads 3 --checkpoint_dir checkpoints/narrow
    python train.py --config modern --embd_size 384 --num_heads 6 --checkpoint_dir checkpoints/wide
    python predict.py checkpoints/narrow checkpoints/wide --embd_size 768 --num_heads 12

Data, recipe, steps and depth are the same in all three runs. At each step that both narrower runs have validated, the
loss is extrapolated along a straight line in log loss and log size.
"""

import errno
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from model import GPT
from steadygpt.base.durable import replace_file
from steadygpt.base.options import UserError, option, parse_options, run_cli
from steadygpt.base.text import counted, labelled
from steadygpt.base.typed import read_json, typed
from steadygpt.checkpoint.evaluations import EVALUATIONS, Evaluations, scores_of_run
from steadygpt.checkpoint.files import Launch, checkpoint_files, config_of, launches_of
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.log.metrics import STATUS, read_status
from steadygpt.run.expected import LOSSES, Prediction, compared_options
from steadygpt.run.launches import difference

INTERVAL = 0.15  # 18 of 20 recorded runs ended this close to their prediction (benchmarks/RESULTS.md)
MEASURED_RATIO = 4  # the largest recorded run had 4 times the FLOPs of the wider of its two
WIDTH = ("embd_size", "num_heads", "num_kv_heads", "intermediate_size")  # the options in which the runs may differ


@dataclass(frozen=True)
class PredictOptions:
    first_run: str = option(MISSING, "folder of a finished run", positional=True)
    second_run: str = option(MISSING, "folder of a finished run of another width", positional=True)
    embd_size: int | None = option(None, "width of the larger model")
    num_heads: int | None = option(None, "attention heads of the larger model")
    num_kv_heads: int = option(0, "its heads of keys and values; 0 = num_heads")
    intermediate_size: int = option(0, "its MLP width, as in train.py; 0 = default")
    out: str = option("prediction.json", "file to write, for train.py --expect")


class FinishedRun(NamedTuple):
    folder: Path
    config: TrainConfig  # settled
    options: dict[str, Any]  # as the user set them
    settings: dict[str, Any]  # see settings_of()
    losses: dict[int, float]  # step -> validation loss, ascending


def flops_per_token(config: TrainConfig) -> float:
    """Return the FLOPs of training a settled run on one token: six times the size N of its model."""
    with torch.device("meta"):
        return GPT(config.shape(config.vocab_size), config, initialize=False).flops_per_token()


def settings_of(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """Return the options and the data that the losses of a run depend on, apart from its width."""
    settings = compared_options(config)
    for name in WIDTH:
        del settings[name]
    # The folders of the data may have been moved, so their content identifies the data.
    settings["training data"] = [f"{identity[:12]} {rows}" for identity, rows in sorted(launch["shares"].items())]
    settings["validation data"] = [identity[:12] for _, identity in launch["val_sets"].values()]
    return settings


def read_run(folder: Path) -> FinishedRun:
    """Read a finished run.

    Raises: UserError if it has not finished, was resumed with other options, or was not validated at its last step.
    """
    if not checkpoint_files(folder):
        raise UserError(f"{folder}: no checkpoints; expected the folder of a finished run")
    last_step, launches = launches_of(folder)
    status = read_status(folder).get("status")
    if status is None:
        raise UserError(f"{folder / STATUS}: missing or unreadable; expected that of a finished run. Restore the file")
    if status != "finished":
        raise UserError(f"{folder}: the status of the run is {status}; expected finished. Resume it to its end first")
    settings = []
    for launch in launches:
        config = config_of(launch)
        if not config.max_steps:  # --num_epochs decided
            config = replace(config, max_steps=last_step)
        settings.append(settings_of(config, launch))
    for earlier in settings:
        changed = difference(earlier, settings[-1])
        if changed:
            raise UserError(f"{folder}: resumed with other options ({changed:.200}); expected the same for all steps")
    file = folder / EVALUATIONS
    evaluations = read_json(file, Evaluations, "restore the file") if file.exists() else {}
    losses = {}
    for step, scores in scores_of_run(evaluations, launches).items():
        loss = scores.get("val_loss")
        if loss is not None:
            losses[step] = typed(
                loss, Annotated[float, *LOSSES], f"{file}: val_loss of step {step:,}", "restore the file"
            )
    if last_step not in losses:
        raise UserError(f"{file}: no validation at step {last_step:,}, the last one; train the run with --eval_freq")
    return FinishedRun(folder, config, launch["options"], settings[-1], losses)


def extrapolate(narrow: dict[int, float], wide: dict[int, float], times: float) -> list[tuple[int, float]]:
    """Return steps and predicted losses, from step -> loss of two runs.

    Args:
        times: the log of the size ratio of the larger to the wider model, divided by that of the wider to the narrower
            model.
    """
    curve = []
    for step, loss in wide.items():
        if step in narrow:
            # Early in training a wider model can be worse. This says nothing about a model that is wider still.
            gain = min(1.0, loss / narrow[step])
            curve.append((step, loss * gain**times))
    return curve


def check_proportions(run: FinishedRun, config: TrainConfig) -> None:
    """Check that the larger model has heads of the same size as a narrower run, and sets the same options of width."""
    if config.head_size != run.config.head_size:
        heads = f"--num_heads {config.embd_size // run.config.head_size}"
        size = f"a head has {config.head_size} dimensions; expected {run.config.head_size}, as in {run.folder}"
        raise UserError(f"--num_heads {config.num_heads}: {size}. Try {heads}")
    for name in ("num_kv_heads", "intermediate_size"):
        if getattr(run.config, name) and not getattr(config, name):
            raise UserError(f"{run.folder} has --{name} {getattr(run.config, name)}; give that of the larger model too")


def train_command(options: Mapping[str, Any], prediction: str) -> str:
    """Return the command of a run with these options, to copy."""
    words = ["python", "train.py"]
    for name, value in options.items():
        if value != FIELDS[name].default and name != "expect":
            if isinstance(value, bool):
                value = "on" if value else "off"
            words.append(f"--{name}={value}")
    return shlex.join([*words, f"--expect={prediction}"])


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(
        PredictOptions, argv, "Predict the loss of a run from two finished runs of narrower models."
    )
    if not (options.embd_size and options.num_heads):
        raise UserError("expected the --embd_size and the --num_heads of the larger model")
    first = read_run(Path(options.first_run))
    second = read_run(Path(options.second_run))
    narrow, wide = sorted((first, second), key=lambda run: flops_per_token(run.config))
    changed = difference(narrow.settings, wide.settings)
    if changed:
        raise UserError(f"{narrow.folder} and {wide.folder}: expected to differ in width alone ({changed:.200})")
    width = {name: getattr(options, name) for name in WIDTH}
    config = replace(wide.config, **width)
    config.check_shape()
    for run in (narrow, wide):
        check_proportions(run, config)
    narrow_flops = flops_per_token(narrow.config)
    wide_flops = flops_per_token(wide.config)
    flops = flops_per_token(config)
    if not narrow_flops < wide_flops < flops:
        widths = f"{narrow.config.embd_size}, {wide.config.embd_size} and {config.embd_size}"
        raise UserError(f"the models are {widths} wide; expected two different ones, and --embd_size above both")

    ratio = flops / wide_flops
    curve = extrapolate(narrow.losses, wide.losses, math.log(ratio) / math.log(wide_flops / narrow_flops))
    last_step, loss = curve[-1]
    for run in (narrow, wide):
        print(labelled("from", f"loss {run.losses[last_step]:.3f}, {run.config.embd_size:,} wide, {run.folder}"))
    print(labelled("run", f"{config.embd_size:,} wide, {ratio:.1f} times the FLOPs, {counted(last_step, 'step')}"))
    print(labelled("loss", f"{loss:.3f}, probably {(1 - INTERVAL) * loss:.3f} to {(1 + INTERVAL) * loss:.3f}"))
    if ratio > MEASURED_RATIO:
        print(labelled("caution", f"beyond {MEASURED_RATIO} times the FLOPs, predictions were not compared with runs"))

    content = json.dumps(Prediction(compared_options(config), curve)._asdict(), indent=1).encode()
    out = Path(options.out)
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, lambda file: file.write(content))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}); give another path") from None
    print(f"\nnext: {train_command(wide.options | width, options.out)}")


if __name__ == "__main__":
    run_cli(main)
