"""Training speed beside nanoGPT, for the same shape, batch and precision: tokens per second and share of a GEMM.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.train_speed --nanogpt nanoGPT                     # GPT-2 124M in bf16 and fp32: four programs
    python -m benchmarks.train_speed --nanogpt nanoGPT --precision bf16    # two programs, half the memory
    python -m benchmarks.train_speed --nanogpt nanoGPT --shape 10m         # 6 layers, 384 wide, vocabulary of bytes
    python -m benchmarks.train_speed --shape 124m --activation_checkpointing     # ours alone, with flags of train.py

Each side runs its own train.py on the same random tokens. The sides alternate: while one trains, the others are
stopped, but stay in memory (124M: 3 to 5 GB each). All sides compile the model. A step is timed from one printed line
to the next, so its whole cost is included.

On a CPU nanoGPT trains in fp32 only. Its bf16 side is the same train.py with autocast in place of the null context.
"""

import argparse
import pickle
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.compare import REPO, HeldProgram, flags, gemm_flops, held_programs, in_turn, plot, report_precisions
from model import GPT, GPTConfig
from steadygpt.device import choose_precision

SHAPES = {"124m": (12, 12, 768, 50304), "10m": (6, 6, 384, 320)}  # layers, heads, width, vocabulary
BATCHES = {  # rows, context, micro-steps
    ("124m", "cpu"): (4, 256, 4),
    ("10m", "cpu"): (16, 256, 4),
    ("124m", "cuda"): (64, 1024, 8),
    ("10m", "cuda"): (64, 256, 8),
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
    """Write random tokens that both projects read, and nanoGPT's note of the vocabulary."""
    tokens = np.random.default_rng(0).integers(0, 50257 if vocab_size > 50257 else 257, 2**22).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def nanogpt(folder: Path, shape: str, device: str, precision: str, checkout: Path) -> HeldProgram:
    """Start nanoGPT. Its own dtype option is ignored on a CPU."""
    layers, heads, width, _ = SHAPES[shape]
    rows, context, micro_steps = BATCHES[shape, device]
    options = flags(
        n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=rows,
        gradient_accumulation_steps=micro_steps, dataset=folder, out_dir=folder / "nanogpt", device=device,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[precision], eval_iters=1, eval_interval=10**9, log_interval=1,
    )  # fmt: skip
    script = ["-c", NANOGPT_BF16_ON_CPU] if (device, precision) == ("cpu", "bf16") else ["train.py"]
    return HeldProgram([sys.executable, "-u", *script, *options], checkout, r"iter \d+: loss")


def steadygpt(folder: Path, shape: str, device: str, precision: str, further: list[str]) -> HeldProgram:
    """Start our train.py, with the architecture of nanoGPT."""
    layers, heads, width, _ = SHAPES[shape]
    rows, context, micro_steps = BATCHES[shape, device]
    options = flags(
        num_layers=layers, num_heads=heads, embd_size=width, context_length=context, bias="off", gelu="exact",
        mini_batch_size=rows, total_batch_size=rows * context * micro_steps, device=device, precision=precision,
        compile="on", tokenizer="gpt2" if shape == "124m" else "bytes", data_dir=folder,
        logdir=folder / f"logs-{precision}", checkpoint_dir=folder / f"checkpoints-{precision}", max_steps=10**6,
        warmup_steps=2000, eval_freq=0, hellaswag_freq=0, sample_freq=0, checkpoint_freq=0, checkpoint_minutes=0,
    )  # fmt: skip
    return HeldProgram([sys.executable, "train.py", *options, *further], REPO, r"step +\d+/")


def flops_per_token(shape: str, context: int) -> float:
    layers, heads, width, vocab_size = SHAPES[shape]
    config = GPTConfig(
        vocab_size=vocab_size, context_length=context, num_layers=layers, num_heads=heads, embd_size=width, bias=False
    )
    with torch.device("meta"):
        return GPT(config).flops_per_token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--shape", default="124m", choices=SHAPES)
    parser.add_argument(
        "--precision", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"), help="default: bf16 fp32"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps timed in each round")
    parser.add_argument("--plot", type=Path, help="file for a plot of the result (pip install matplotlib)")
    args, further = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, context, micro_steps = BATCHES[args.shape, device.type]
    tokens, flops = rows * context * micro_steps, flops_per_token(args.shape, context)
    measured = {}
    with tempfile.TemporaryDirectory() as name, held_programs() as programs:
        folder = Path(name)
        write_tokens(folder, SHAPES[args.shape][-1])
        for precision in args.precision:
            common = (folder, args.shape, device.type, precision)
            starts = {f"SteadyGPT, {precision}": partial(steadygpt, *common, further)}
            if args.nanogpt:
                starts[f"nanoGPT, {precision}"] = partial(nanogpt, *common, args.nanogpt)
            for side, start in starts.items():
                programs[side] = start()
                programs[side].seconds_per_step(WARM_UP)  # before the next program starts and competes for the cores
                measured[side] = lambda program=programs[side]: tokens / program.seconds_per_step(args.steps)
            measured[f"GEMM limit, {precision}"] = lambda precision=precision: gemm_flops(device, precision) / flops
        figures = in_turn(measured, args.rounds, "tokens/s")
    print(f"{args.shape}: {rows} x {context} tokens x {micro_steps}, {flops / 1e9:.3f} GFLOP a token, {device}")
    theirs = "bf16" if device.type == "cuda" else "fp32"
    defaults = f"SteadyGPT, {choose_precision('auto', device)}", f"nanoGPT, {theirs}"
    report_precisions(figures, "tokens/s", defaults)
    if args.plot:
        title = (
            f"Training {args.shape.upper()}, {rows} x {context} tokens x {micro_steps} a step, {device.type.upper()}"
        )
        plot(figures, "tokens/s", title, args.plot)


if __name__ == "__main__":
    main()
