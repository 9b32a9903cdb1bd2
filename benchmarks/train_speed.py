"""Training speed beside nanoGPT as it ships, of the same shape and batch; tokens per second and share of GEMM.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.train_speed --nanogpt nanoGPT                   # GPT-2 124M
    python -m benchmarks.train_speed --nanogpt nanoGPT --shape 10m       # 6 layers, 384 wide, vocabulary of bytes
    python -m benchmarks.train_speed --shape 124m --activation_checkpointing     # ours alone, with flags of train.py

Both run their own train.py on the same random tokens, in turn: one is stopped while the other goes on. A step is timed
from line to line of what they print, so all that a step costs is in it. Both compile; on a CPU nanoGPT has fp32 only.
"""

import argparse
import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.compare import REPO, HeldProgram, flags, gemm_flops, held_programs, in_turn, plot, report
from model import GPT, GPTConfig

SHAPES = {"124m": (12, 12, 768, 50304), "10m": (6, 6, 384, 320)}  # layers, heads, width, vocabulary
BATCHES = {  # rows, context, micro-steps
    ("124m", "cpu"): (4, 256, 4),
    ("10m", "cpu"): (16, 256, 4),
    ("124m", "cuda"): (64, 1024, 8),
    ("10m", "cuda"): (64, 256, 8),
}
WARM_UP = 4  # steps


def write_tokens(folder: Path, vocab_size: int) -> None:
    """Random tokens in files that both read, and nanoGPT's note of the vocabulary."""
    tokens = np.random.default_rng(0).integers(0, 50257 if vocab_size > 50257 else 257, 2**22).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def nanogpt(checkout: Path, folder: Path, shape: str, device: str) -> HeldProgram:
    layers, heads, width, _ = SHAPES[shape]
    rows, context, micro_steps = BATCHES[shape, device]
    options = flags(
        n_layer=layers, n_head=heads, n_embd=width, block_size=context, batch_size=rows,
        gradient_accumulation_steps=micro_steps, dataset=folder, out_dir=folder / "nanogpt", device=device,
        eval_iters=1, eval_interval=10**9, log_interval=1,
    )  # fmt: skip
    return HeldProgram([sys.executable, "-u", "train.py", *options], checkout, r"iter \d+: loss")


def steadygpt(folder: Path, shape: str, device: str, further: list[str]) -> HeldProgram:
    layers, heads, width, _ = SHAPES[shape]
    rows, context, micro_steps = BATCHES[shape, device]
    options = flags(
        num_layers=layers, num_heads=heads, embd_size=width, context_length=context, bias="off", gelu="exact",
        mini_batch_size=rows, total_batch_size=rows * context * micro_steps, device=device, compile="on",
        tokenizer="gpt2" if shape == "124m" else "bytes", data_dir=folder, logdir=folder / "logs",
        checkpoint_dir=folder / "checkpoints", max_steps=10**6, warmup_steps=2000, eval_freq=0, hellaswag_freq=0,
        sample_freq=0, checkpoint_freq=0, checkpoint_minutes=0,
    )  # fmt: skip
    return HeldProgram([sys.executable, "train.py", *options, *further], REPO, r"step +\d+/")


def flops_per_token(shape: str, context: int) -> float:
    layers, heads, width, vocab_size = SHAPES[shape]
    config = GPTConfig(vocab_size, context, layers, heads, width, bias=False)
    with torch.device("meta"):
        return GPT(config).flops_per_token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--shape", default="124m", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="timed in each round")
    parser.add_argument("--plot", type=Path, help="a picture of the result (pip install matplotlib)")
    args, further = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, context, micro_steps = BATCHES[args.shape, device.type]
    tokens, flops = rows * context * micro_steps, flops_per_token(args.shape, context)
    with tempfile.TemporaryDirectory() as name, held_programs() as programs:
        folder = Path(name)
        write_tokens(folder, SHAPES[args.shape][-1])
        programs["SteadyGPT"] = steadygpt(folder, args.shape, device.type, further)
        programs["SteadyGPT"].seconds_per_step(WARM_UP)
        if args.nanogpt:
            programs["nanoGPT"] = nanogpt(args.nanogpt, folder, args.shape, device.type)
            programs["nanoGPT"].seconds_per_step(WARM_UP)
        sides = {name: lambda p=p: tokens / p.seconds_per_step(args.steps) for name, p in programs.items()}
        sides["GEMM limit"] = lambda: gemm_flops(device) / flops
        figures = in_turn(sides, args.rounds, "tokens/s")
    print(f"{args.shape}: {rows} x {context} tokens x {micro_steps}, {flops / 1e9:.3f} GFLOP a token, {device}")
    report(figures, "tokens/s")
    if args.plot:
        title = f"Training {args.shape.upper()}, {rows} x {context} tokens x {micro_steps} a step, {device}"
        plot(figures, "tokens/s", title, args.plot)


if __name__ == "__main__":
    main()
