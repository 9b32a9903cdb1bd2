"""The runs of benchmarks.tokens_to_loss: scales, settings and seeds as data, their commands, folders and text."""

import importlib.metadata
import json
import math
import pickle
import re
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.compare import REPO, flags
from config import FIELDS, parse_args
from steadygpt.checkpoint import read_evaluations
from steadygpt.cli import UserError
from steadygpt.device import native_precision
from steadygpt.durable import replace_file

# ---------------------------------------------------------------------------------------------------------------------
# the experiments, as data

SIDES = {"gpt2": "GPT-2", "nanogpt": "nanoGPT", "modern": "the recipe"}
REFERENCES = ("gpt2", "nanogpt")
SEEDS = (1337, 1338, 1339)  # nanoGPT's own is 1337
Settings = tuple[tuple[str, object], ...]


def each(name: str, *values: float) -> list[Settings]:
    return [((name, value),) for value in values]


SWEEP: dict[str, list[Settings]] = {
    "gpt2": each("max_lr", 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "nanogpt": each("learning_rate", 6e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "modern": [(), *each("muon_lr", 0.0025, 0.005, 0.02), *each("max_lr", 2e-3, 8e-3, 16e-3)],
}
SWEPT_LENGTH = 0.3  # of the recipe's runs in the sweep, in steps of the references
LENGTHS = (0.2, 0.3, 0.7, 1.0)  # of the recipe's runs, in steps of the references
# What takes a piece away from the recipe, and what puts it into GPT-2.
PIECES: dict[str, tuple[Settings, Settings]] = {
    "rotary positions": ((("rotary_pct", 0),), (("rotary_pct", 1),)),
    "RMSNorm": ((("norm", "layernorm"),), (("norm", "rmsnorm"),)),
    "QK-norm": ((("qk_norm", "off"),), (("qk_norm", "on"),)),
    "SwiGLU": ((("activation", "gelu_tanh"),), (("activation", "swiglu"),)),
    "untied head": ((("tied_head", "on"),), (("tied_head", "off"),)),
    "no biases": ((("bias", "on"),), (("bias", "off"),)),
    "Muon": ((("optimizer", "adamw"),), (("optimizer", "muon"),)),
    "linear cool-down to 0": ((("schedule", "cosine"),), (("schedule", "wsd"), ("min_lr", 0))),
    "no weight decay": ((("weight_decay", 0.1),), (("weight_decay", 0),)),
}
ADDITIONS: dict[str, Settings] = {  # what the recipe does without
    "ReLU^2": (("activation", "relu2"),),
    "norms without weights": (("norm", "rmsnorm_no_weight"),),
    "soft-cap of the logits": (("logit_softcap", 15),),
}


@dataclass(frozen=True)
class Scale:
    """A shape, which gives all sides the same blocks, its data, and the length of its runs."""

    data: str
    layers: int
    heads: int
    width: int
    context: int
    rows: int  # in a micro-step
    micro_steps: int
    steps: int  # of the references
    piece_steps: int
    eval_tokens: int
    timed_steps: int  # in each round of the timing
    tuned: tuple[str, ...] = ("gpt2",)  # sides with a sweep; elsewhere nanoGPT has one seed and GPT-2's learning rate
    compiled: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.context * self.micro_steps


SCALES = {
    "1m": Scale("stdlib", 4, 4, 128, 128, 8, 1, 3000, 1000, 131072, 40, tuple(SIDES), compiled=False),
    "10m": Scale("packages", 6, 6, 384, 256, 8, 4, 400, 150, 65536, 2),
    "124m": Scale("packages", 12, 12, 768, 1024, 16, 8, 800, 200, 1048576, 10),  # needs a GPU
}
TINY = Scale("stdlib", 1, 2, 16, 16, 2, 1, 20, 10, 64, 2, tuple(SIDES), compiled=False)  # --quick
POINTS = 20  # of a curve, at least
WARM_UP = 30  # the warm-up is 1 / WARM_UP of the steps


@dataclass(frozen=True)
class Run:
    """A training run; `changes` are the options that differ from those of its side."""

    side: str
    changes: Settings
    steps: int
    seed: int = SEEDS[0]

    def __str__(self) -> str:
        return f"{self.side}{self.settings()}, {self.steps} steps, seed {self.seed}"

    def settings(self) -> str:
        return "".join(f" {name} {value}" for name, value in self.changes)


@dataclass(frozen=True)
class Bench:
    """A scale, where its runs are, and a checkout of nanoGPT."""

    name: str
    scale: Scale
    out: Path
    nanogpt: Path | None = None

    @property
    def data(self) -> Path:
        return self.out / "data" / self.scale.data

    @property
    def time_file(self) -> Path:
        return self.out / self.name / "time.json"

    def folder(self, run: Run) -> Path:
        return self.out / self.name / re.sub(r"[ ,]+", "-", str(run))

    def losses(self, run: Run) -> dict[int, float]:
        """Return step -> validation loss, inf where the run has diverged."""
        found = {step: at["val_loss"] for step, at in read_evaluations(self.folder(run)).items()}
        return {step: math.inf if loss is None or math.isnan(loss) else loss for step, loss in found.items()}

    def loss(self, run: Run) -> float | None:
        """Return the loss at the end of a run; None if it has not finished."""
        return self.losses(run).get(run.steps)

    def tuned(self, side: str) -> Settings | None:
        """Return the settings with the lowest loss in the sweep of a reference; None while one beside it is unfinished.

        Where nanoGPT has no sweep, it takes the learning rate of our GPT-2, which differs in biases and GELU only.
        """
        if side == "nanogpt" and side not in self.scale.tuned:
            return tuple(("learning_rate", rate) for _, rate in self.tuned("gpt2") or ()) or None
        losses = [self.loss(run) for run in sweep_runs(self) if run.side == side]
        best = min(range(len(losses)), key=lambda i: math.inf if losses[i] is None else losses[i])
        return None if None in losses[max(best - 1, 0) : best + 2] else SWEEP[side][best]

    def seconds_per_step(self) -> dict[str, list[float]]:
        """Return side -> seconds a step in each round of the timing, {} before it."""
        return json.loads(self.time_file.read_text()) if self.time_file.exists() else {}


def sweep_runs(bench: Bench) -> list[Run]:
    """Return one run for each value, with the other settings of its side; short ones for the recipe."""
    return [
        Run(side, changes, round((1 if side in REFERENCES else SWEPT_LENGTH) * bench.scale.steps))
        for side in SIDES if side in bench.scale.tuned
        for changes in SWEEP[side]
    ]  # fmt: skip


def final_runs(bench: Bench) -> list[Run]:
    """Return the references at the best settings of their sweeps, once known, and the recipe in each length."""
    tuned = {side: bench.tuned(side) for side in REFERENCES}
    references = [
        Run(side, changes, bench.scale.steps, seed)
        for side, changes in tuned.items() if changes is not None
        for seed in (SEEDS if side in bench.scale.tuned else SEEDS[:1])
    ]  # fmt: skip
    lengths = [round(share * bench.scale.steps) for share in LENGTHS]
    return references + [Run("modern", (), steps, seed) for steps, seed in product(lengths, SEEDS)]


def piece_runs(bench: Bench) -> list[Run]:
    """Return both sides as they are and with each of their changes; GPT-2 once its best setting is known."""
    sides = {"modern": (), "gpt2": bench.tuned("gpt2")}
    return [
        Run(side, base + change, bench.scale.piece_steps)
        for (side, base), index in zip(sides.items(), (0, 1), strict=True) if base is not None
        for change in [(), *(piece[index] for piece in PIECES.values()), *ADDITIONS.values()]
    ]  # fmt: skip


GROUPS: dict[str, Callable[[Bench], list[Run]]] = {"sweep": sweep_runs, "final": final_runs, "pieces": piece_runs}

# ---------------------------------------------------------------------------------------------------------------------
# commands

# Run in a checkout of nanoGPT, for other seeds than its own.
NANOGPT_SEED = """
from pathlib import Path
source = Path("train.py").read_text()
assert source.count("manual_seed(1337 ") == 1, "train.py: expected one manual_seed(1337 to replace"
exec(compile(source.replace("manual_seed(1337 ", "manual_seed(SEED "), "train.py", "exec"), {"__name__": "__main__"})
"""


def options_of(scale: Scale, run: Run) -> list[str]:
    """Return the flags of train.py, ours or nanoGPT's, that decide the losses of a run."""
    changes, warm_up, every = dict(run.changes), run.steps // WARM_UP, points_every(run.steps)
    if run.side == "nanogpt":
        cuda = torch.cuda.is_available()
        return flags(
            n_layer=scale.layers, n_head=scale.heads, n_embd=scale.width, block_size=scale.context,
            batch_size=scale.rows, gradient_accumulation_steps=scale.micro_steps, max_iters=run.steps,
            lr_decay_iters=run.steps, warmup_iters=warm_up, min_lr=changes["learning_rate"] / 10, **changes,
            eval_interval=every, eval_iters=50, device="cuda" if cuda else "cpu", compile=scale.compiled,
        )  # fmt: skip
    if run.side == "gpt2":
        changes = {"min_lr": changes["max_lr"] / 10} | changes
    return flags(
        config=run.side, num_layers=scale.layers, num_heads=scale.heads, embd_size=scale.width,
        context_length=scale.context, mini_batch_size=scale.rows, total_batch_size=scale.tokens, max_steps=run.steps,
        warmup_steps=warm_up, seed=run.seed, compile="on" if scale.compiled else "off",
        eval_freq=every, eval_tokens=scale.eval_tokens, hellaswag_freq=0, sample_freq=0, **changes,
    )  # fmt: skip


def points_every(steps: int) -> int:
    """Return the steps between two points of a curve: a divisor, because nanoGPT has its last point only at one."""
    return next(every for every in range(max(1, steps // POINTS), steps + 1) if steps % every == 0)


def command_of(bench: Bench, run: Run, folder: Path, **further) -> tuple[list[str], Path]:
    """Return the command of a run with the given folder and further options, and where to start it."""
    options = options_of(bench.scale, run)
    if run.side == "nanogpt":
        assert bench.nanogpt
        program = ["train.py"] if run.seed == SEEDS[0] else ["-c", NANOGPT_SEED.replace("SEED", str(run.seed))]
        own = {"dataset": bench.data, "out_dir": folder, "log_interval": 100}
        return [sys.executable, "-u", *program, *options, *flags(**own | further)], bench.nanogpt
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = {
        "precision": native_precision(device), "data_dir": bench.data, "checkpoint_dir": folder,
        "tokenizer": DATA[bench.scale.data].tokenizer,
        "logdir": folder / "logs", "checkpoint_freq": 0, "keep_checkpoints": 1, "log_freq": 100, "resume": "auto",
    }  # fmt: skip
    return [sys.executable, "train.py", *options, *flags(**own | further)], REPO


def recorded_options(scale: Scale, run: Run) -> dict[str, object]:
    """Return the options that decide the losses of a run, those of a preset included and defaults left out."""
    options = options_of(scale, run)
    if run.side == "nanogpt":
        return dict(option.removeprefix("--").split("=") for option in [*options, f"--seed={run.seed}"])
    config, groups = parse_args(options)[0], ("model", "optimization", "evaluation")
    names = [name for name, f in FIELDS.items() if f.metadata["group"] in groups or name == "seed"]
    return {name: getattr(config, name) for name in names if getattr(config, name) != FIELDS[name].default}


# ---------------------------------------------------------------------------------------------------------------------
# text


@dataclass(frozen=True)
class Data:
    """A tokenizer, its vocabulary, and the number of rows that nanoGPT gives its embedding table for it."""

    tokenizer: str
    vocab_size: int
    rows: int


DATA = {"stdlib": Data("bytes", 257, 257), "packages": Data("gpt2", 50257, 50304)}
HELD_OUT = 10  # of the packages, about one of so many is validation data


def make_data(name: str, folder: Path) -> None:
    """Write train.bin and val.bin, which both projects read, and nanoGPT's note of the vocabulary, if missing.

    stdlib: Python's own library; its first files are validation data. packages: the sources of the installed packages,
    shuffled; all files of a package are on the same side.

    Raises: UserError when the preparation fails.
    """
    if (folder / "meta.pkl").exists():
        return
    if name == "stdlib":
        prepare(folder / "shards", source="stdlib", tokenizer="bytes")
        for split in ("train", "val"):
            join(sorted(folder.glob(f"shards/*_{split}_*.npy")), folder / f"{split}.bin")
    else:
        link_packages(folder / "sources")
        for split in ("train", "val"):
            prepare(folder / split, source=folder / "sources" / split, tokenizer="gpt2", val_tokens=0)
            join(sorted((folder / split).glob("*.npy")), folder / f"{split}.bin")
    note = pickle.dumps({"vocab_size": DATA[name].rows})
    replace_file(folder / "meta.pkl", lambda file: file.write(note))


def prepare(out: Path, **options) -> None:
    command = [sys.executable, "prepare_dataset.py", *flags(out=out, name="data", **options)]
    if subprocess.run(command, cwd=REPO, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"{out}: prepare_dataset.py failed; see above")


def join(shards: list[Path], file: Path) -> None:
    """Write the tokens of all shards to one file without a header."""
    tokens = np.concatenate([np.load(shard) for shard in shards])
    assert tokens.dtype == np.uint16
    replace_file(file, lambda out: out.write(tokens.tobytes()))


def link_packages(folder: Path) -> None:
    """Link each installed module in folder/train or folder/val, under a name that begins with a hash: they shuffle."""
    root = Path(sysconfig.get_path("purelib"))
    for package, module in modules(root):
        split = "train" if zlib.crc32(package.encode()) % HELD_OUT else "val"
        shuffled = f"{zlib.crc32(bytes(module.relative_to(root))):08x}_{module.name}"
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / shuffled).unlink(missing_ok=True)
        (folder / split / shuffled).symlink_to(module)


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of an installed distribution and a module of it, for all of them."""
    for top, distributions in importlib.metadata.packages_distributions().items():
        for path in (root / f"{top}.py", *sorted((root / top).rglob("*.py"))):
            if path.is_file():
                yield min(distributions), path
