"""Training speed beside nanoGPT, for the same shape, batch and precision: tokens per second, share of a GEMM, memory.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.train_speed --nanogpt nanoGPT                     # GPT-2 124M in bf16 and fp32: four programs
    python -m benchmarks.train_speed --nanogpt nanoGPT --precision bf16    # two programs, half the memory
    python -m benchmarks.train_speed --nanogpt nanoGPT --precision default # each side as a user starts it
    python -m benchmarks.train_speed --nanogpt nanoGPT --shape 10m         # 6 layers, 384 wide, vocabulary of bytes
    python -m benchmarks.train_speed --shape 124m --activation_checkpointing     # ours alone, with flags of train.py
    python -m benchmarks.train_speed --config small_32k --micro_steps 4          # ours alone, a preset of configs/
    python -m benchmarks.train_speed --beside ../before                    # beside another checkout of ours

Each side runs its own train.py on the same random tokens. The sides alternate: while one trains, the others are
stopped, but stay in memory (124M: 3 to 5 GB each). All sides compile the model. A step is timed from one printed line
to the next, so its whole cost is included. On a GPU, the peak memory of our sides is printed too; for a preset, its
optimizer steps per hour on this one device.

With --precision default each side chooses its precision and whether it compiles. On a CPU nanoGPT compiles and computes
in fp32; SteadyGPT does not compile, and computes in bf16 where the processor has instructions for it.

On a CPU nanoGPT trains in fp32 only. Its bf16 side is the same train.py with autocast in place of the null context.
"""

import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.compare import (
    REPO,
    HeldProgram,
    ProgramEnded,
    benchmark_parser,
    flags,
    held_programs,
    in_turn,
    number_text,
    pairs_of_equal_precision,
    report,
    summary,
    synchronize,
    write_json,
)
from model import GPT, GPTConfig
from steadygpt.config import parse_args

# layers, heads, width, vocabulary; "tiny" is for trying this command
SHAPES = {"124m": (12, 12, 768, 50304), "10m": (6, 6, 384, 320), "tiny": (2, 2, 64, 320)}


class Batch(NamedTuple):
    """A step of rows x context x micro_steps tokens."""

    rows: int
    context: int
    micro_steps: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.context} tokens x {self.micro_steps}"

    @property
    def tokens(self) -> int:
        return self.rows * self.context * self.micro_steps


BATCHES = {
    ("124m", "cpu"): Batch(4, 256, 4),
    ("10m", "cpu"): Batch(16, 256, 4),
    ("tiny", "cpu"): Batch(2, 64, 2),
    ("124m", "cuda"): Batch(64, 1024, 8),
    ("10m", "cuda"): Batch(64, 256, 8),
    ("tiny", "cuda"): Batch(64, 64, 2),
}
WARM_UP = 4  # steps

# Run in a checkout of nanoGPT. The null context surrounds the forward pass there, as autocast does on a GPU.
NANOGPT_BF16_ON_CPU = """
from pathlib import Path
source = Path("train.py").read_text()
assert source.count("nullcontext()") == 1, "train.py: expected one nullcontext() to replace with autocast"
source = source.replace("nullcontext()", "torch.autocast('cpu', torch.bfloat16)")
exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
"""


def write_tokens(folder: Path, vocab_size: int) -> None:
    """Write random tokens that both projects read, and nanoGPT's note of the vocabulary.

    They are enough that no epoch ends during a measurement, because we save at the end of an epoch.
    """
    tokens = np.random.default_rng(0).integers(0, 50257 if vocab_size > 50257 else 257, 2**26, np.uint16)
    for split, count in (("train", 2**26), ("val", 2**22)):
        tokens[:count].tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def nanogpt(checkout: Path, folder: Path, shape: str, batch: Batch, device: str, further: list[str]) -> HeldProgram:
    """Start nanoGPT, whose own dtype option is ignored on a CPU."""
    layers, heads, width, _ = SHAPES[shape]
    options = flags(
        n_layer=layers, n_head=heads, n_embd=width, block_size=batch.context, batch_size=batch.rows,
        gradient_accumulation_steps=batch.micro_steps, dataset=folder, out_dir=folder / "nanogpt", device=device,
        eval_iters=1, eval_interval=10**9, log_interval=1,
    )  # fmt: skip
    script = ["-c", NANOGPT_BF16_ON_CPU] if device == "cpu" and "--dtype=bfloat16" in further else ["train.py"]
    return HeldProgram([sys.executable, "-u", *script, *options, *further], checkout, r"iter \d+: loss")


def steadygpt(
    checkout: Path, folder: Path, shape: list[str], batch: Batch, device: str, further: list[str]
) -> HeldProgram:
    """Start our train.py."""
    outputs = Path(tempfile.mkdtemp(dir=folder))
    if "logdir" in (checkout / "steadygpt/config.py").read_text():  # an earlier version, with --beside
        further = [*further, f"--logdir={outputs}"]
    options = flags(
        context_length=batch.context, mini_batch_size=batch.rows, total_batch_size=batch.tokens, device=device,
        data_dir=folder, checkpoint_dir=outputs, max_steps=10**6, warmup_steps=2000, eval_freq=0, hellaswag_freq=0,
        sample_freq=0, checkpoint_freq=0, checkpoint_minutes=0, log_freq=1,
    )  # fmt: skip
    program = HeldProgram([sys.executable, "train.py", *shape, *options, *further], checkout, r"step +\d+/")
    program.metrics = outputs / "metrics.jsonl"
    return program


def peak_gb(metrics: Path) -> float:
    """Return the peak memory of our train.py, from its log."""
    records = map(json.loads, metrics.read_text().splitlines())
    return [record["memory_gb"] for record in records if "loss" in record][-1]


def flags_of_shape(name: str) -> list[str]:
    """Return the flags of train.py that give the architecture of nanoGPT."""
    layers, heads, width, vocab_size = SHAPES[name]
    tokenizer = "gpt2" if vocab_size > 50257 else "bytes"
    return flags(
        num_layers=layers, num_heads=heads, embd_size=width, bias="off", activation="gelu", tokenizer=tokenizer
    )  # fmt: skip


def gemm_flops(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """Measure the FLOP/s of a matrix product, an upper limit for training: 2048^3, on a GPU 8192^3."""
    n = 8192 if device.type == "cuda" else 2048
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as in training
    a, b = torch.randn(2, n, n, device=device, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    times: list[float] = []
    while sum(times) < seconds:
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--beside", type=Path, help="another checkout of SteadyGPT, such as the commit before")
    parser.add_argument("--shape", default="124m", choices=SHAPES)
    parser.add_argument("--config", help="a preset of ours in place of --shape; ours alone")
    parser.add_argument("--rows", type=int, help="rows in a micro-step; a step keeps its tokens (default: by --shape)")
    parser.add_argument("--micro_steps", type=int, help="in a step (default: by --shape)")
    parser.add_argument("--eager", action="store_true", help="do not compile either side")
    parser.add_argument(
        "--precision", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32", "default"),
        help="default: bf16 fp32; the word default leaves precision and compilation to each side",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="steps timed in each round")
    args, further = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = flags_of_shape(args.shape)
    vocab_size = SHAPES[args.shape][-1]
    batch = BATCHES[args.shape, device.type]
    if args.config:
        preset, _ = parse_args([f"--config={args.config}"])
        shape = [f"--config={args.config}", "--tokenizer=gpt2"]
        vocab_size = GPTConfig().vocab_size
        batch = Batch(preset.mini_batch_size, preset.context_length, 8)
    rows = args.rows or batch.rows
    batch = Batch(rows, batch.context, args.micro_steps or batch.rows * batch.micro_steps // rows)
    config, _ = parse_args([*shape, f"--context_length={batch.context}"])
    with torch.device("meta"):
        flops = GPT(config.shape(vocab_size), initialize=False).flops_per_token()
    if args.nanogpt:  # both stay in GPU memory, so neither may lose much of it to fragments
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    discarded = 2 if device.type == "cuda" else 1
    measured = {}
    with tempfile.TemporaryDirectory() as name, held_programs() as programs:
        folder = Path(name)
        write_tokens(folder, vocab_size)
        for precision in args.precision:
            ours = list(further)
            theirs = []
            if precision != "default":
                ours += flags(precision=precision, compile="off" if args.eager else "on")
                theirs += flags(dtype="bfloat16" if precision == "bf16" else "float32", compile=not args.eager)
                measured[f"GEMM limit, {precision}"] = lambda p=precision: gemm_flops(device, p) / flops
            starts = {"SteadyGPT": partial(steadygpt, REPO, folder, shape, batch, device.type, ours)}
            if args.beside:
                checkout = args.beside.absolute()
                starts["beside"] = partial(steadygpt, checkout, folder, shape, batch, device.type, ours)
            if args.nanogpt and not args.config:
                starts["nanoGPT"] = partial(nanogpt, args.nanogpt, folder, args.shape, batch, device.type, theirs)
            for project, start in starts.items():
                side = f"{project}, {precision}"
                programs[side] = start()
                try:  # before the next program starts and competes for the cores
                    programs[side].seconds_per_step(WARM_UP)
                except ProgramEnded as ended:
                    if project == "SteadyGPT":
                        raise
                    print(f"{ended}\n{side} is not measured", flush=True)
                    continue
                program = programs[side]
                measured[side] = lambda p=program: batch.tokens / p.seconds_per_step(args.steps, discarded)
        figures = in_turn(measured, args.rounds, "tokens/s")
        peaks = {}
        if device.type == "cuda":
            for side, program in programs.items():
                if program.metrics:
                    peaks[side] = peak_gb(program.metrics)
    print(f"{args.config or args.shape}: {batch}, {flops / 1e9:.3f} GFLOP a token, {device}")
    report(figures, "tokens/s", args, pairs_of_equal_precision(figures))
    extra = {f"peak of {side}": summary([peak], "GB") for side, peak in peaks.items()}
    if args.config:
        tokens_of_step = preset.with_tokens_of_step(1).total_batch_size
        hourly = [3600 * tokens_per_s / tokens_of_step for tokens_per_s in figures[next(iter(programs))]]
        extra["optimizer steps"] = summary(hourly, "an hour")
    for name, figure in extra.items():
        print(f"{name}: {number_text(figure['median'])} {figure['unit']}")
    write_json(args.json, extra)


if __name__ == "__main__":
    main()
