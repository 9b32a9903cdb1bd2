"""Tokens and time until a loss: the recipe (--config modern) beside GPT-2, nanoGPT, nanochat and modded-nanogpt.

    git clone https://github.com/karpathy/nanoGPT
    git clone https://github.com/karpathy/nanochat
    python -m benchmarks.tokens_to_loss --nanogpt nanoGPT --nanochat nanochat    # 1 M parameters: a day on two cores
    python -m benchmarks.tokens_to_loss --nanochat nanochat --plot docs/recipe.svg
    python -m benchmarks.tokens_to_loss --list                                   # all runs and their losses
    python -m benchmarks.tokens_to_loss --only 'sweep/gpt2*' time                # some of them
    python -m benchmarks.tokens_to_loss --only 'piece*' --change qk_norm=off activation=relu2,muon_lr=0.005
    python -m benchmarks.tokens_to_loss --scale 1m-short 1m-batch 1m-wide --only 'sweep/modern*' --plot-rates rates.svg

    git clone https://github.com/KellerJordan/modded-nanogpt                     # 124 M parameters, on a GPU of 80 GB:
    python -m benchmarks.linux_text linux-6.12.tar.xz linux.jsonl.gz             # linux_text says where to get it
    python -m benchmarks.tokens_to_loss --scale 124m --text linux.jsonl.gz --nanogpt nanoGPT --modded modded-nanogpt \
        --minutes 25 --plot proof.svg

sweep    several learning rates for each side; one seed
piece    the recipe, and with each --change again; three seeds
final    the references with three seeds, and nanoGPT with its own, at the best learning rate of their sweeps; the
         recipe in several lengths, with three seeds
time     seconds per step of the sides, which alternate; it alone needs a machine without other work

All sides train on the same files, with the same rows, and below 124 M with the same heads. GPT-2 and nanoGPT warm up
for 1/30 of their steps. The references keep their weight decay and clipping; only their learning rates are tuned. The
final losses are those of our evaluation, on the same held-out rows. nanoGPT is its own train.py, in its own precision;
the points of its curve before the last one are its own estimates. nanochat and modded-nanogpt's simple baseline are
their models, optimizers and schedules, in ours, by nanochat_run.py and modded_run.py, where "factor" is explained.

The losses behind the tables of RESULTS.md are in benchmarks/losses: with --out benchmarks/losses/recipe (1 M, beside
GPT-2 and nanochat) or --out benchmarks/losses (the rest) this command makes the tables and pictures from them, and
trains only what is missing there. The rest was measured before 08305b8, on the first rows of the held-out text. Today's
validation spreads its rows: train all sides of a new table in another --out.

The same command continues after an interruption. A finished run is not repeated: its losses are kept, its weights are
removed. An interrupted run of ours resumes; those of the others start again. The name of a run's folder ends in a hash
of its options, so a run whose options have changed is trained again. On small models two commands at once, each with
OMP_NUM_THREADS=1 and other runs, take less time than one after the other.

The timing comes first, then the runs in the order of --list: each side once, then the other rates, then the other
seeds. With --minutes, no run is started that would not end in time, judged by the finished ones; --minutes 0 only makes
the tables and pictures. To continue on another machine, copy the files *.json and tokens.sha256 of --out to it; it
makes the tokens again.
"""

import argparse
import gzip
import importlib.util
import json
import math
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import cycle, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import numpy as np
import torch

from benchmarks import picture
from benchmarks.compare import (
    REPO,
    HeldProgram,
    ProgramEnded,
    die_with_parent,
    exit_on_signals,
    flags,
    held_programs,
    in_turn,
    median_text,
    ratio_text,
    ratios,
    reason_of,
)
from benchmarks.modded_run import SCRIPT
from steadygpt.base.durable import sha256_of
from steadygpt.base.options import UserError, run_cli
from steadygpt.base.text import counted, duration_text
from steadygpt.config import FIELDS, parse_args
from steadygpt.data.tokenizer import TOKENIZER_JSON
from steadygpt.log.metrics import METRICS, read_records
from steadygpt.machine.device import choose_precision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---------------------------------------------------------------------------------------------------------------------
# the experiments, as data

SIDES = {
    "gpt2": "GPT-2", "nanogpt": "nanoGPT", "nanochat": "nanochat", "modded": "modded-nanogpt's simple baseline",
    "modern": "the recipe",
}  # fmt: skip
COLORS = {
    "gpt2": picture.GREY, "nanogpt": picture.ORANGE, "nanochat": picture.GREEN, "modded": picture.RED,
    "modern": picture.BLUE,
}  # fmt: skip
CHECKOUTS = {"nanogpt": "train.py", "nanochat": "scripts/base_train.py", "modded": SCRIPT}  # a file of each
RUNNERS = {"nanochat": "benchmarks.nanochat_run", "modded": "benchmarks.modded_run"}
SEEDS = (1337, 1338, 1339)  # nanoGPT's own is 1337
Settings = tuple[tuple[str, object], ...]  # options that differ from those of the side
Sweep = Mapping[str, Sequence[Settings]]  # by side
SWEEP: Sweep = {
    "gpt2": [(("max_lr", rate),) for rate in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)],
    "nanogpt": [(("learning_rate", rate),) for rate in (6e-4, 1e-3, 2e-3, 4e-3, 8e-3)],
    "nanochat": [(("factor", factor),) for factor in (1, 2, 4, 8, 16, 32)],
    "modded": [(("factor", factor),) for factor in (0.25, 0.5, 1, 2, 4)],
    "modern": [(), *((("muon_lr", rate),) for rate in (0.0025, 0.005, 0.02, 0.04)),
               *((("max_lr", rate),) for rate in (1e-3, 2e-3, 8e-3, 16e-3))],
}  # fmt: skip
# A run takes minutes of a GPU, so there are three rates, and one for nanoGPT, which is the same model as GPT-2.
SWEEP_124M: Sweep = {
    "gpt2": [(("max_lr", rate),) for rate in (5e-4, 1e-3, 2e-3)],
    "nanogpt": [(("learning_rate", 1e-3),)],
    "nanochat": [(("factor", factor),) for factor in (1, 2, 4)],
    "modded": [(("factor", factor),) for factor in (0.5, 1, 2)],
    "modern": [(), *((("muon_lr", rate),) for rate in (0.005, 0.02)), *((("max_lr", rate),) for rate in (2e-3, 8e-3))],
}
LENGTHS = (0.2, 0.3, 0.7, 1.0)  # of the recipe's final runs, in steps of the references
PACKAGES = REPO / "benchmarks/packages.txt"
HELD_OUT = ("nltk-", "pylint-", "scrapy-", "sphinx-")
LOSSES = "losses.json"  # of a finished run: step -> validation loss, null where it is not finite
POINTS = 20  # of a curve, at least
WARM_UP = 30  # the warm-up of GPT-2 and nanoGPT is 1 / WARM_UP of the steps
ROUNDS = 7  # of the timing


@dataclass(frozen=True)
class Scale:
    """A shape, which gives all sides the same blocks, its tokenizer, and the length of its runs."""

    tokenizer: str  # bytes for Python's library; bpe:N, trained on them, for the sources of PACKAGES or for --text
    layers: int
    heads: int
    width: int
    context: int
    rows: int  # in a micro-step
    micro_steps: int
    steps: int  # of the references
    eval_tokens: int
    timed_steps: int  # in each round of the timing
    compiled: bool = True
    sweep: Sweep = field(default_factory=lambda: SWEEP)
    lengths: Sequence[float] = LENGTHS
    wide_heads: int | None = None  # of the sides whose heads have 128 dimensions by default; None: as the others
    own_text: bool = False  # whether it trains on --text
    needs_gpu: bool = False

    @property
    def step_tokens(self) -> int:
        return self.rows * self.context * self.micro_steps


OF_124M = {"sweep": SWEEP_124M, "lengths": (0.2, 0.3, 1.0), "wide_heads": 6, "own_text": True, "needs_gpu": True}
SCALES = {
    "1m": Scale("bytes", 4, 4, 128, 128, 8, 1, 3000, 131072, 40, compiled=False),
    "1m-short": Scale("bytes", 4, 4, 128, 128, 8, 1, 600, 131072, 40, compiled=False),
    "1m-batch": Scale("bytes", 4, 4, 128, 128, 32, 1, 600, 131072, 10, compiled=False),
    "1m-wide": Scale("bytes", 4, 4, 384, 128, 8, 1, 600, 131072, 10, compiled=False),
    "10m": Scale("bpe:4096", 6, 6, 384, 256, 32, 1, 1200, 65536, 2),
    # GPT-2 has 111 M parameters with this vocabulary. The steps are one pass over most of the text. The rows let the
    # programs of all sides fit into a GPU of 80 GB for the timing.
    "124m": Scale("bpe:32768", 12, 12, 768, 1024, 16, 8, 460, 1048576, 10, **OF_124M),
    "124m-batch": Scale("bpe:32768", 12, 12, 768, 1024, 16, 32, 115, 1048576, 3, **OF_124M),
    "tiny": Scale("bytes", 1, 2, 32, 16, 2, 1, 20, 64, 2, compiled=False),  # tries this command
    "tiny-text": Scale("bpe:300", 1, 2, 16, 16, 2, 1, 20, 64, 2, False, SWEEP_124M, (0.3, 1.0), own_text=True),
}


@dataclass(frozen=True)
class Run:
    """A training run."""

    group: str
    side: str
    changes: Settings
    steps: int
    seed: int = SEEDS[0]

    def __str__(self) -> str:
        return f"{self.group}/{self.side}{self.settings()}, {self.steps} steps, seed {self.seed}"

    def settings(self) -> str:
        return "".join(f" {name} {value}" for name, value in self.changes)


@dataclass(frozen=True)
class Study:
    """The runs of a scale: their commands, folders and losses."""

    name: str
    out: Path
    checkouts: Mapping[str, Path]  # of other projects, by side
    changes: tuple[Settings, ...] = ()  # options of the recipe to try, one piece after the other
    text: Path | None = None  # compressed JSON lines with "split" and "text", for a scale with own_text

    @property
    def scale(self) -> Scale:
        return SCALES[self.name]

    @property
    def data(self) -> Path:
        return self.out / "data" / (self.scale.tokenizer.replace(":", "-") + "-text" * self.scale.own_text)

    @property
    def tokenizer(self) -> str:
        """Return --tokenizer for the files of this scale."""
        trained = self.scale.tokenizer.startswith("bpe:")
        return str(self.data / "train_shards" / TOKENIZER_JSON) if trained else self.scale.tokenizer

    @property
    def time_file(self) -> Path:
        return self.out / self.name / "time.json"

    def sides(self) -> list[str]:
        return [side for side in SIDES if side in ("gpt2", "modern", *self.checkouts)]

    def sweep(self) -> list[Run]:
        """Return one run for each setting."""
        sweep = self.scale.sweep
        return [Run("sweep", side, changes, self.scale.steps) for side in self.sides() for changes in sweep[side]]

    def pieces(self) -> list[Run]:
        """Return the recipe with each change, after the recipe as it is."""
        return [
            Run("piece", "modern", changes, self.scale.steps, seed) for changes in ((), *self.changes) for seed in SEEDS
        ]

    def finals(self) -> list[Run]:
        """Return the references at the best settings of their sweeps, once known, and the recipe in each length."""
        seeds = dict.fromkeys(SIDES, SEEDS) | {"nanogpt": SEEDS[:1]}  # which has no option for it
        tuned = {side: self.tuned(side) for side in self.sides() if side != "modern"}
        references = [
            Run("final", side, changes, self.scale.steps, seed)
            for side, changes in tuned.items() if changes is not None
            for seed in seeds[side]
        ]  # fmt: skip
        lengths = [round(share * self.scale.steps) for share in self.scale.lengths]
        return references + [Run("final", "modern", (), steps, seed) for steps, seed in product(lengths, SEEDS)]

    def runs(self) -> list[Run]:
        """Return all runs, the most valuable first; the rates of a reference come from the middle outwards."""

        def from_middle(run: Run) -> float:
            rates = self.scale.sweep[run.side]
            return abs(rates.index(run.changes) - (len(rates) - 1) / 2)

        references = [run for run in self.sweep() if run.side != "modern"]
        recipe, *variants = [run for run in self.sweep() if run.side == "modern"]
        finals = sorted(self.finals(), key=lambda run: (run.seed, -run.steps))
        pieces = sorted(self.pieces(), key=lambda run: run.seed)
        return [recipe, *sorted(references, key=from_middle), *finals, *variants, *pieces]

    def tuned(self, side: str) -> Settings | None:
        """Return the settings with the lowest loss in a sweep; None while one beside it is unfinished."""
        losses = [self.loss(run) for run in self.sweep() if run.side == side]
        best = min(range(len(losses)), key=lambda i: math.inf if losses[i] is None else losses[i])
        return None if None in losses[max(best - 1, 0) : best + 2] else self.scale.sweep[side][best]

    def options(self, run: Run) -> dict[str, object]:
        """Return the options of train.py, ours or nanoGPT's, that decide the losses of a run."""
        scale = self.scale
        changes = dict(run.changes)
        warm_up = run.steps // WARM_UP
        # A divisor of the steps, because nanoGPT has its last point only at one.
        every = next(n for n in range(max(1, run.steps // POINTS), run.steps + 1) if run.steps % n == 0)
        if run.side == "nanogpt":
            return {
                "n_layer": scale.layers, "n_head": scale.heads, "n_embd": scale.width, "block_size": scale.context,
                "batch_size": scale.rows, "gradient_accumulation_steps": scale.micro_steps, "max_iters": run.steps,
                "lr_decay_iters": run.steps, "warmup_iters": warm_up, "min_lr": changes["learning_rate"] / 10,
                "eval_interval": every, "eval_iters": 50, "device": "cuda" if torch.cuda.is_available() else "cpu",
                "compile": scale.compiled, **changes,
            }  # fmt: skip
        if run.side == "gpt2":
            changes = {"min_lr": changes["max_lr"] / 10, "warmup_steps": warm_up, **changes}
        changes.pop("factor", None)
        return {
            "config": "gpt2" if run.side == "gpt2" else "modern", "num_layers": scale.layers,
            "num_heads": scale.heads if run.side == "gpt2" else scale.wide_heads or scale.heads,
            "embd_size": scale.width,
            "context_length": scale.context, "mini_batch_size": scale.rows, "max_steps": run.steps,
            "total_batch_size": scale.step_tokens,
            "seed": run.seed, "compile": "on" if scale.compiled else "off", "eval_freq": every,
            "eval_tokens": scale.eval_tokens, "hellaswag_freq": 0, "sample_freq": 0, **changes,
        }  # fmt: skip

    def command(self, run: Run, folder: Path, **further) -> tuple[list[str], Path]:
        """Return the command of a run with the given folder and further options, and where to start it."""
        if run.side == "nanogpt":
            own = {"dataset": self.data, "out_dir": folder, "log_interval": 100, **further}
            return [sys.executable, "-u", "train.py", *flags(**(self.options(run) | own))], self.checkouts["nanogpt"]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        own = {
            "precision": choose_precision("auto", device), "data_dir": self.data, "tokenizer": self.tokenizer,
            "checkpoint_dir": folder, "checkpoint_freq": 0, "keep_checkpoints": 1,
            "log_freq": 100, "resume": "auto", **further,
        }  # fmt: skip
        program = ["train.py"]
        if run.side in RUNNERS:
            factor = dict(run.changes)["factor"]
            out = folder / LOSSES
            program = ["-m", RUNNERS[run.side], str(self.checkouts[run.side]), str(factor), str(out)]
        return [sys.executable, *program, *flags(**(self.options(run) | own))], REPO

    def folder(self, run: Run) -> Path:
        """Return the folder of a run, whose name ends in a hash of the options, those of a preset included."""
        options = self.options(run)
        if run.side != "nanogpt":
            config, _ = parse_args(flags(**options))
            groups = ("model", "optimization", "evaluation")
            names = ["seed", *(name for name, field in FIELDS.items() if field.metadata["group"] in groups)]
            options = {n: getattr(config, n) for n in names if getattr(config, n) != FIELDS[n].default}
            if run.side in RUNNERS:
                options |= dict(run.changes)
        name = re.sub(r"[ ,]+", "-", str(run).partition("/")[2])
        return self.out / self.name / f"{name}-{zlib.crc32(json.dumps(options, sort_keys=True).encode()):08x}"

    def losses(self, run: Run) -> dict[int, float]:
        """Return step -> validation loss, inf where the run has diverged."""
        file = self.folder(run) / LOSSES
        losses = json.loads(file.read_text()) if file.exists() else {}
        return {int(step): math.inf if loss is None or math.isnan(loss) else loss for step, loss in losses.items()}

    def loss(self, run: Run) -> float | None:
        """Return the loss at the end of a run; None if it has not finished."""
        return self.losses(run).get(run.steps)

    def durations(self) -> dict[Run, float]:
        """Return the seconds that finished runs took from start to end."""
        files = {run: self.folder(run) / "seconds.json" for run in self.runs()}
        return {run: json.loads(file.read_text()) for run, file in files.items() if file.exists()}

    def seconds(self) -> dict[str, list[float]]:
        """Return side -> seconds per step in each round of the timing, {} before it."""
        return json.loads(self.time_file.read_text()) if self.time_file.exists() else {}


# ---------------------------------------------------------------------------------------------------------------------
# training


def make_data(study: Study) -> None:
    """Write train.bin and val.bin, which all projects read, and nanoGPT's note of the vocabulary, if missing.

    Raises: UserError if earlier runs of the scale were trained on different tokens.
    """
    if not (study.data / "meta.pkl").exists():
        write_data(study)
    digest = sha256_of(study.data / "train.bin")
    record = study.out / study.name / "tokens.sha256"
    if record.exists() and record.read_text() != digest:
        raise UserError(f"{study.data}: found tokens that differ from those of {record.parent}. Try another --out")
    record.parent.mkdir(exist_ok=True)
    record.write_text(digest)


def write_data(study: Study) -> None:
    folder = study.data
    tokenizer = study.scale.tokenizer
    if tokenizer == "bytes":
        shards = prepare("stdlib", tokenizer, folder / "shards")
        splits = {split: [shard for shard in shards if f"_{split}_" in shard.name] for split in ("train", "val")}
    else:
        if study.scale.own_text:
            split_text(study.text, folder)
        else:
            fetch_packages(folder)
        files = "*.jsonl" if study.scale.own_text else "**/*.py"
        splits = {
            split: prepare(f"{folder}/{split}/{files}", name, folder / f"{split}_shards")
            for split, name in (("train", tokenizer), ("val", study.tokenizer))
        }
    for split, shards in splits.items():
        tokens = np.concatenate([np.load(shard) for shard in shards]).astype(np.uint16)
        if split == "val" and not (tokenizer == "bytes" or study.scale.own_text):
            tokens = spread_out(tokens)
        tokens.tofile(folder / f"{split}.bin")
    vocab_size = 257 if tokenizer == "bytes" else int(tokenizer.removeprefix("bpe:"))
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def split_text(text: Path, folder: Path) -> None:
    """Write the lines of --text to a file in train/ and one in val/, as their "split" says."""
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True, exist_ok=True)
    train_file, val_file = (folder / split / "text.jsonl" for split in ("train", "val"))
    with gzip.open(text) as lines, open(train_file, "wb") as train_lines, open(val_file, "wb") as val_lines:
        try:
            for line in lines:
                lines_of_split = val_lines if json.loads(line)["split"] == "val" else train_lines
                lines_of_split.write(line)
        except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
            raise UserError(f"--text {text}: found {error!r}, expected a file of benchmarks.linux_text") from None


def spread_out(tokens: np.ndarray, places: int = 64, block: int = 1024) -> np.ndarray:
    """Take blocks from equidistant places in turn, so that the first tokens, which are scored, are of all packages."""
    whole = len(tokens) // (places * block) * places * block
    return tokens[:whole].reshape(places, -1, block).transpose(1, 0, 2).flatten()


def prepare(source: str, tokenizer: str, out: Path) -> list[Path]:
    """Return all shards of a source, in its order; those of val come first."""
    options = flags(source=source, tokenizer=tokenizer, out=out, name="data")
    if subprocess.run([sys.executable, "prepare_dataset.py", *options], cwd=REPO, stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"{out}: prepare_dataset.py failed; see above")
    return sorted(out.glob("*_val_*.npy")) + sorted(out.glob("*_train_*.npy"))


def fetch_packages(folder: Path) -> None:
    """Download PACKAGES, and unpack their sources into val/ for those of HELD_OUT and into train/ for the others."""
    wheels = folder / "wheels"
    anywhere = "--no-deps --only-binary=:all: --platform=any --python-version=3.12 --implementation=py --abi=none"
    download = ["pip", "download", "--quiet", *anywhere.split(), "--require-hashes", f"--dest={wheels}"]
    if subprocess.run([sys.executable, "-m", *download, f"--requirement={PACKAGES}"]).returncode:
        raise UserError(f"{PACKAGES}: pip could not download these packages; see above")
    for wheel in sorted(wheels.glob("*.whl")):
        split = "val" if wheel.name.lower().startswith(HELD_OUT) else "train"
        with ZipFile(wheel) as archive:
            archive.extractall(folder / split, [name for name in archive.namelist() if name.endswith(".py")])


def train(study: Study, run: Run) -> None:
    """Train a run to its end unless it has finished, and remove its weights.

    Raises: UserError when it fails; a divergence is a result.
    """
    if study.loss(run) is not None:
        return
    folder = study.folder(run)
    resumes = (folder / "latest.pt").exists()
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    output = ""
    points: dict[int, float | None] = {}
    try:
        output = output_of(*study.command(run, folder), folder / "out.txt")
    except UserError:
        status = folder / "status.json"
        if not status.exists() or "non-finite" not in json.loads(status.read_text()).get("reason", ""):
            raise
        points = logged_losses(folder) | {run.steps: None}
    if run.side == "nanogpt":
        for step, text in re.findall(r"^step (\d+): .*val loss (\S+)", output, re.M)[1:]:
            loss = float(text)
            points[int(step)] = loss if math.isfinite(loss) else None
        if points[run.steps] is not None:
            points[run.steps] = evaluate(study, folder / "ckpt.pt")
    if not points and run.side not in RUNNERS:
        points = logged_losses(folder)
    if points:
        (folder / LOSSES).write_text(json.dumps(points, indent=1))
    if study.loss(run) is None:
        raise UserError(f"{folder}: stopped before step {run.steps}. Run the same command again")
    if not resumes:
        (folder / "seconds.json").write_text(json.dumps(round(time.monotonic() - start_s, 1)))
    for weights in folder.glob("*.pt"):
        weights.unlink()


def logged_losses(folder: Path) -> dict[int, float | None]:
    """Return step -> validation loss of a run of our train.py, None where it is not finite."""
    return {int(record["step"]): record["val_loss"] for record in read_records(folder / METRICS, "val_loss")}


def evaluate(study: Study, weights: Path) -> float:
    """Return our validation loss of a file of weights, also nanoGPT's; the output goes beside it."""
    scale = study.scale
    options = flags(
        init_from=weights, data_dir=study.data, tokenizer=study.tokenizer, mini_batch_size=scale.rows,
        total_batch_size=scale.rows * scale.context, eval_tokens=scale.eval_tokens, eval_freq=1, hellaswag_freq=0,
        sample_freq=0,
    )  # fmt: skip
    output = output_of([sys.executable, "train.py", "--eval_only", *options], REPO, weights.parent / "evaluated.txt")
    return float(re.findall(r"\bval loss ([^\s,]+)", output)[0])


def output_of(command: Sequence[str], cwd: Path, file: Path) -> str:
    """Run a program with its output in a file, and return that; stop the program when the caller is interrupted.

    Raises: UserError with the reason when it fails.
    """
    with open(file, "w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent,
            start_new_session=True,  # a terminal sends Ctrl-C to this process alone, which then stops the program
        )  # fmt: skip
    try:
        failed = process.wait()
    finally:
        process.terminate()  # our train.py saves
        process.wait()
    text = file.read_text(errors="replace")
    if failed:
        raise UserError(f"{file}: the run failed: {reason_of(text)}")
    return text


def expected_s(run: Run, durations: Mapping[Run, float]) -> float | None:
    """Return how many seconds a run takes at most, judged by the most similar finished runs; None without any.

    These are the runs of the same side, or of all sides if none of that one has finished, with the most similar number
    of steps. A shorter run is expected to take as long as they did, because its start takes as long.
    """
    known = {other: s for other, s in durations.items() if other.side == run.side} or durations
    distance = min((abs(other.steps - run.steps) for other in known), default=0)
    nearest = [other for other in known if abs(other.steps - run.steps) == distance]
    return max((known[other] * max(1.0, run.steps / other.steps) for other in nearest), default=None)


def first_in_time(runs: Sequence[Run], durations: Mapping[Run, float], left_s: float) -> Run | None:
    """Return the first run that is expected to end within the time left, or of which nothing is known."""
    if left_s > 0:
        for run in runs:
            if (expected_s(run, durations) or 0) <= left_s:
                return run
    return None


def train_all(study: Study, choose: Callable[[Sequence[Run]], list[Run]], deadline_s: float) -> int:
    """Train those chosen runs that have not finished, in the order of their value; return how many failed.

    Args:
        deadline_s: no run is started that would not end before, on the clock of time.monotonic().
    """
    failed: set[Path] = set()  # the folders of the runs
    while True:
        waiting: dict[Path, Run] = {}  # a run that is in two groups has one folder
        for run in choose(study.runs()):
            folder = study.folder(run)
            if study.loss(run) is None and folder not in failed:
                waiting.setdefault(folder, run)
        runs = list(waiting.values())
        durations = study.durations()
        next_run = first_in_time(runs, durations, deadline_s - time.monotonic())
        if next_run is None:
            if runs:
                print(f"{study.name}: no time for {left_text(runs, durations)}. Run the same command again", flush=True)
            return len(failed)
        make_data(study)
        print(f"{study.name} {next_run}: ", end="", flush=True)
        try:
            train(study, next_run)
            print(loss_text(study.loss(next_run)), end="")
        except UserError as error:
            print(error, end="")
            failed.add(study.folder(next_run))
        others = [run for run in runs if run is not next_run]
        print(f"; left: {left_text(others, study.durations())}", flush=True)


def left_text(runs: Sequence[Run], durations: Mapping[Run, float]) -> str:
    """Format how many runs are left, and how long they take if that is known."""
    seconds = [expected_s(run, durations) or 0 for run in runs]
    return counted(len(runs), "run") + (f", {duration_text(sum(seconds))}" if sum(seconds) else "")


def measure_time(study: Study, deadline_s: float) -> None:
    """Write the seconds per step of all sides in each round to time.json, unless it is there or there is no time."""
    steps = study.scale.timed_steps
    discarded = 2 if torch.cuda.is_available() else 1
    runs = [Run("time", side, (), ROUNDS * (steps + discarded)) for side in study.sides()]
    needed_s = sum(expected_s(run, study.durations()) or 0 for run in runs)
    left_s = deadline_s - time.monotonic()
    if study.time_file.exists() or left_s <= 0 or needed_s > left_s:
        return
    make_data(study)
    ours = {"eval_freq": 0, "checkpoint_minutes": 0, "log_freq": 1}
    theirs = {"eval_interval": 10**9, "eval_iters": 1, "log_interval": 1}
    with tempfile.TemporaryDirectory() as name, held_programs() as programs:
        for side in study.sides():
            run = Run("time", side, study.scale.sweep[side][0], steps=10**6)  # a learning rate does not change the time
            command, cwd = study.command(run, Path(name, side), **(theirs if side == "nanogpt" else ours))
            programs[side] = HeldProgram(command, cwd, r"step +\d+/|iter \d+:")
            programs[side].seconds_per_step(steps)  # before the next one competes for the cores
        measured = {side: partial(program.seconds_per_step, steps, discarded) for side, program in programs.items()}
        study.time_file.write_text(json.dumps(in_turn(measured, ROUNDS, "s per step")))


# ---------------------------------------------------------------------------------------------------------------------
# the report, from what the runs have left; missing runs are left out


def markdown(study: Study) -> str:
    """Return the tables of a scale."""
    scale = study.scale
    seconds = study.seconds()
    tables = {
        f"Steps of {scale.step_tokens:,} tokens; means, with the range over the seeds:": [
            ("", "final loss", "the recipe reaches it with this share of the tokens", "of the time"),
            *final_rows(study),
        ],
        "Until GPT-2's mean final loss; means, with the range over the seeds:": [
            ("", "million tokens", "minutes of training"), *until_rows(study),
        ],
        "Seconds per step:": [
            ("", "seconds", "beside GPT-2"),
            *((SIDES[side], median_text(values, "s"), ratio_text(seconds, side, "gpt2"))
              for side, values in seconds.items()),
        ],
        "Learning rates, one seed:": [("", "setting", "steps", "final loss"), *sweep_rows(study)],
        "Pieces; means, with the range over the seeds:": [
            ("the recipe", "final loss", "seed by seed beside the recipe"), *piece_rows(study),
        ],
    }  # fmt: skip
    shape = f"{scale.layers} layers, {scale.heads} heads, {scale.width} wide, context {scale.context}"
    lines = [f"### {study.name}: {shape}"]
    for title, (head, *rows) in tables.items():
        if rows:
            lines += ["", title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def final_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """Yield the losses of the references after each third, the recipe beside them, and its own final losses."""
    seconds = study.seconds()
    for (side, changes, steps), group in groupby(study.finals(), lambda run: (run.side, run.changes, run.steps)):
        runs = [run for run in group if study.loss(run) is not None]
        name = f"{SIDES[side]}{Run('', side, changes, steps).settings()}"
        title = f"{name}, {{}}{steps:,} steps, seeds: {len(runs)}".format
        final = [study.losses(run)[steps] for run in runs]
        if side == "modern" or math.inf in final:
            if runs:
                yield title(""), spread(final), "", ""
        elif runs:
            slower = statistics.median(ratios(seconds, "modern", side)) if side in seconds else None
            for end in (steps // 3, 2 * steps // 3, steps):
                losses = [float(np.interp(end, *zip(*study.losses(run).items(), strict=True))) for run in runs]
                shares = recipe_shares(study, losses, end)
                times = [share * slower for share in shares] if slower else []
                part = f"{end:,} of " if end < steps else ""
                yield title(part), spread(losses), spread(shares, 2), spread(times, 2)


def recipe_shares(study: Study, losses: Sequence[float], steps: int) -> list[float]:
    """Return for each seed the share of a reference's first `steps` in which the recipe reaches their mean loss.

    Takes the recipe's runs of all lengths; within a run of the reference, whose learning rate has not come down yet,
    only those of the same length.
    """
    fair = [run for run in study.finals() if run.side == "modern" and study.scale.steps in (steps, run.steps)]
    return [first / steps for first in first_steps(study, fair, statistics.mean(losses))]


def first_steps(study: Study, runs: Sequence[Run], loss: float) -> list[float]:
    """Return for each seed after how many steps one of its finished runs reached a loss first."""
    reached: dict[int, list[float]] = {seed: [] for seed in SEEDS}
    for run in runs:
        if study.loss(run) is not None:
            reached[run.seed].append(steps_to(study.losses(run), loss))
    return [min(steps_of_runs) for steps_of_runs in reached.values() if steps_of_runs]


def until_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """Yield after how many tokens and minutes of training each side reached GPT-2's mean final loss."""
    losses = final_losses(study, "gpt2")
    if not losses or math.inf in losses:
        return
    minutes = {side: statistics.median(values) / 60 for side, values in study.seconds().items()}
    for side in study.sides():
        runs = [run for run in study.finals() if run.side == side]
        steps = first_steps(study, runs, statistics.mean(losses))
        if side == "gpt2":
            steps = [float(study.scale.steps)]
        tokens = spread([step * study.scale.step_tokens / 1e6 for step in steps], 2)
        yield SIDES[side], tokens, spread([step * minutes[side] for step in steps if side in minutes], 2)


def final_losses(study: Study, side: str) -> list[float]:
    """Return the losses of the side's final runs that have finished."""
    losses = [study.loss(run) for run in study.finals() if run.side == side]
    return [loss for loss in losses if loss is not None]


def steps_to(curve: Mapping[int, float], loss: float) -> float:
    """Return after how many steps a curve, interpolated between its points, reached a loss; inf if it never did.

    Args:
        curve: step -> loss, in the order of the steps.
    """
    last_step = 0
    last_loss = math.nan  # nothing is known before the first point
    for step, step_loss in curve.items():
        if step_loss <= loss:
            if math.isnan(last_loss):
                return step
            return last_step + (step - last_step) * (last_loss - loss) / (last_loss - step_loss)
        last_step = step
        last_loss = step_loss
    return math.inf


def sweep_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """Yield the losses of the sweep, the lowest one of each side in bold."""
    for side, group in groupby(study.sweep(), lambda run: run.side):
        all_losses = {run: study.loss(run) for run in group}
        losses = {run: loss for run, loss in all_losses.items() if loss is not None}
        for run, loss in losses.items():
            text = loss_text(loss)
            if loss == min(losses.values()):
                text = f"**{text}**"
            yield SIDES[side], run.settings().strip() or "as it is", f"{run.steps:,}", text


def piece_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """Yield the losses of the recipe and of each change, and the differences between runs of the same seed."""
    recipe = {run.seed: study.loss(run) for run in study.pieces() if not run.changes}
    for _, group in groupby(study.pieces(), lambda run: run.changes):
        all_losses = {run: study.loss(run) for run in group}
        losses = {run: loss for run, loss in all_losses.items() if loss is not None}
        for run in [*losses][:1]:
            beside = [loss - recipe[run.seed] for run, loss in losses.items() if recipe[run.seed] is not None]
            yield (
                run.settings().strip() or "as it is",
                spread([*losses.values()]),
                spread(beside) if run.changes else "",
            )


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean and the range of several values; inf is a loss that diverged or was not reached."""
    if not values:
        return "not measured"
    missed = sum(value == math.inf for value in values)
    if missed:
        return f"not reached by {missed} of {len(values)} seeds"
    mean, low, high = (f"{x:.{digits}f}" for x in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def loss_text(loss: float | None) -> str:
    if loss is None:
        return "not finished"
    return "diverged" if loss == math.inf else f"{loss:.4f}"


def draw(studies: Sequence[Study], file: Path) -> None:
    """Draw the mean of the final runs and the range over their seeds, against the tokens of each scale.

    Below them is the time, if it was measured: side by side, the letters would be too small for a phone. An arrow leads
    from where GPT-2 ends to where the recipe reaches that loss.
    """
    from matplotlib import pyplot

    picture.set_style(14)
    columns = 2 if any(study.seconds() for study in studies) else 1
    size = (6.5, 4 * columns * len(studies))
    figure, grid = pyplot.subplots(columns * len(studies), 1, figsize=size, layout="constrained", squeeze=False)
    for study, row in zip(studies, grid.reshape(len(studies), columns), strict=True):
        scale = study.scale
        seconds = study.seconds()
        labels = dict(SIDES)  # the first curve of a side takes its label
        million_tokens = scale.rows * scale.context * scale.micro_steps / 1e6
        minutes = {side: statistics.median(values) / 60 for side, values in seconds.items()}
        for (side, _, _), group in groupby(study.finals(), lambda run: (run.side, run.changes, run.steps)):
            points = seeds_together([study.losses(run) for run in group if study.loss(run)])
            # The first steps would flatten the rest of the curve.
            points = [point for point in points if point[0] >= scale.steps / 20]
            if not points:
                continue
            steps, means, lows, highs = zip(*points, strict=True)
            label = labels.pop(side, None)
            for axes, per_step in zip(row, (million_tokens, minutes.get(side)), strict=False):
                if per_step:
                    x = [step * per_step for step in steps]
                    axes.fill_between(x, lows, highs, color=COLORS[side], alpha=0.25, linewidth=0)
                    axes.plot(x, means, color=COLORS[side], linewidth=1.8, label=label)
        row[0].set(
            title=f"{scale.layers} layers, {scale.width} wide", ylabel="validation loss", xlabel="million tokens"
        )
        if row[0].lines:
            row[0].legend()
        mark_savings(row[0], study, million_tokens, 1.0, "fewer tokens")
        if columns == 2:
            row[1].set(ylabel="validation loss", xlabel="minutes of training")
        if minutes.keys() >= {"gpt2", "modern"}:
            slower = statistics.median(ratios(seconds, "modern", "gpt2"))
            mark_savings(row[1], study, minutes["gpt2"], slower, "less time")
    picture.save(figure, file)


def seeds_together(runs: Sequence[Mapping[int, float]]) -> list[tuple[int, float, float, float]]:
    """Return the step, mean, lowest and highest loss of each step that all runs have."""
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    losses = {step: [run[step] for run in runs] for step in steps}
    return [(step, statistics.mean(values), min(values), max(values)) for step, values in losses.items()]


def mark_savings(axes: "Axes", study: Study, per_step: float, slower: float, noun: str) -> None:
    """Draw an arrow from GPT-2's last step to where the recipe reaches its mean final loss; the title gets the ratio.

    Args:
        per_step: tokens or minutes per step of GPT-2.
        slower: tokens or minutes per step of the recipe, divided by those of GPT-2.
    """
    losses = final_losses(study, "gpt2")
    shares = recipe_shares(study, losses, study.scale.steps) if losses and math.inf not in losses else []
    share = statistics.mean(shares) * slower if shares else math.inf
    if share < 1:
        loss = statistics.mean(losses)
        end = study.scale.steps * per_step
        style = {"arrowstyle": "-|>", "color": picture.INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (share * end, loss), (end, loss), arrowprops=style)
        axes.set_title(f"{axes.get_title('left')}\n← same loss, {1 / share:.2g} times {noun}".strip())


def draw_rates(studies: Sequence[Study], file: Path) -> None:
    """Draw the losses of the recipe's sweeps, above the lowest one of each scale, against both learning rates."""
    from matplotlib import pyplot

    picture.set_style(14)
    figure, row = pyplot.subplots(2, 1, figsize=(6.5, 8.5), layout="constrained", sharey=True)
    colours = (picture.BLUE, picture.ORANGE, picture.GREEN, picture.RED, picture.GREY)
    for study, colour in zip(studies, cycle(colours)):
        all_losses = {run: study.loss(run) for run in study.sweep() if run.side == "modern"}
        losses = {run: loss for run, loss in all_losses.items() if loss is not None}
        for axes, name in zip(row, ("muon_lr", "max_lr"), strict=True):
            of_recipe = getattr(parse_args(["--config", "modern"])[0], name)
            points = {
                dict(run.changes).get(name, of_recipe): loss
                for run, loss in losses.items() if not run.changes or name in dict(run.changes)
            }  # fmt: skip
            scale = study.scale
            label = f"{scale.width} wide, {scale.steps:,} steps of {scale.step_tokens:,} tokens"
            rates = sorted(points)
            above = [points[rate] - min(points.values()) for rate in rates]
            axes.plot(rates, above, "o-", color=colour, linewidth=1.8, label=label)
            axes.set(xscale="log", xlabel=f"--{name}", ylabel="validation loss above the lowest")
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.axvline(of_recipe, color=picture.LINE, zorder=0)
    row[0].legend()
    picture.save(figure, file)


# ---------------------------------------------------------------------------------------------------------------------
# main


def check(study: Study) -> None:
    """Raise UserError if a scale needs a GPU or a text and there is none."""
    option = f"--scale {study.name}"
    if study.scale.own_text and not study.text:
        raise UserError(f"{option}: found no --text FILE, expected one. Try python -m benchmarks.linux_text")
    if study.scale.own_text and not study.text.is_file():
        raise UserError(f"--text {study.text}: found no file. Try python -m benchmarks.linux_text")
    if study.scale.needs_gpu and not torch.cuda.is_available():
        raise UserError(f"{option}: found no CUDA GPU, expected one. Try --scale 10m")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", nargs="+", default=["1m"], choices=SCALES, help="default: 1m; 124m needs a GPU")
    parser.add_argument("--text", type=Path, help="file of benchmarks.linux_text, for --scale 124m")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would not end by then")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GROUP/RUN", help="patterns of what --list shows")
    parser.add_argument(
        "--change", nargs="+", default=[], metavar="NAME=VALUE[,NAME=VALUE]", help="options of the recipe to try"
    )
    for side in CHECKOUTS:
        parser.add_argument(f"--{side}", type=Path, help=f"a checkout of {side}; without it, that side is left out")
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/out/tokens_to_loss", help="folder for the runs")
    parser.add_argument("--list", action="store_true", help="print the runs and their losses, and train nothing")
    parser.add_argument("--plot", type=Path, help="file for the curves (pip install matplotlib)")
    parser.add_argument("--plot-rates", type=Path, help="file for the recipe's losses at each learning rate")
    args = parser.parse_args(argv)
    deadline_s = time.monotonic() + 60 * args.minutes
    checkouts = {}
    for side, file in CHECKOUTS.items():
        checkout = getattr(args, side)
        if checkout:
            if not (checkout / file).exists():
                raise UserError(f"--{side} {checkout}: found no {file}, expected a checkout of {SIDES[side]}")
            checkouts[side] = checkout.absolute()
    if (args.plot or args.plot_rates) and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot: matplotlib is missing. Try pip install matplotlib")
    for option, file in {"--plot": args.plot, "--plot-rates": args.plot_rates}.items():
        if file and not file.parent.is_dir():
            raise UserError(f"{option} {file}: found no folder {file.parent}. Make it first")
    for change in args.change:
        if not all("=" in option for option in change.split(",")):
            raise UserError(f"--change {change}: expected NAME=VALUE[,NAME=VALUE]")
    changes = tuple(tuple(tuple(option.split("=", 1)) for option in change.split(",")) for change in args.change)
    studies = [Study(name, args.out.absolute(), checkouts, changes, args.text) for name in args.scale]
    if args.minutes > 0 and not args.list:
        for study in studies:
            check(study)

    def choose(runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if any(fnmatch(str(run), pattern) for pattern in args.only)]

    timed = any(fnmatch("time", pattern) for pattern in args.only)
    if not timed and not any(choose(study.runs()) for study in studies):
        raise UserError(f"--only {' '.join(args.only)}: found no such run, expected names that --list shows")
    if args.list:
        for study in studies:
            for run in choose(study.runs()):
                print(f"{study.name} {run}: {loss_text(study.loss(run))}")
        return 0
    failed = 0
    with exit_on_signals():
        for study in studies:
            if timed:
                try:
                    measure_time(study, deadline_s)
                except ProgramEnded as error:
                    print(f"{study.name} time: {error}", flush=True)
                    failed += 1
            failed += train_all(study, choose, deadline_s)
    print("\n".join(map(markdown, studies)))
    if args.plot:
        draw(studies, args.plot)
    if args.plot_rates:
        draw_rates(studies, args.plot_rates)
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
