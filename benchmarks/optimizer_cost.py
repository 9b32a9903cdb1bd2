"""Share of Muon in a training step, beside forward and backward and beside AdamW's update.

    python -m benchmarks.optimizer_cost [--shape 10m] [--tokens 16384] [--rounds 5]

The model is --config modern's, with the GPT-2 tokenizer's vocabulary and rows of 256 tokens. A step takes as many
micro-steps as it needs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.compare import figure, in_turn, median_text, synchronize, write_json
from config import parse_args
from model import GPT, GPTConfig
from steadygpt.device import autocast, native_precision
from steadygpt.distributed import joined
from steadygpt.optim import Muon, make_optimizer

SHAPES = {"1m": (4, 4, 128), "10m": (6, 3, 384), "124m": (12, 6, 768)}  # layers, heads, width
ROWS, CONTEXT = 16, 256  # of a micro-step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="10m")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    layers, heads, width = SHAPES[args.shape]
    shape = ["--num_layers", layers, "--num_heads", heads, "--embd_size", width, "--context_length", CONTEXT]
    config, _ = parse_args(["--config", "modern", *map(str, shape)])
    with joined("auto") as ranks:
        device = ranks.device
        precision = native_precision(device)
        model = GPT(config.shape(GPTConfig.vocab_size)).to(device)
        forward = model.compiled() if args.compile == "on" else model
        optimizer = make_optimizer(model, replace(config, precision=precision), ranks)
        assert isinstance(optimizer, Muon)
        tokens = torch.randint(0, GPTConfig.vocab_size, (ROWS, CONTEXT + 1), device=device)
        micro_steps = max(1, args.tokens // (ROWS * CONTEXT))

        def compute() -> None:
            for _ in range(micro_steps):
                with autocast(device, precision):
                    loss = forward(tokens[:, :-1], tokens[:, 1:]) / micro_steps
                loss.backward()

        def seconds(work: Callable[[], object]) -> float:
            synchronize(device)
            start_s = time.perf_counter()
            work()
            synchronize(device)
            return time.perf_counter() - start_s

        for _ in range(2):
            compute()
            optimizer.step()
        sides = {
            "forward and backward": lambda: seconds(compute),
            "AdamW": lambda: seconds(optimizer.step_adamw),
            "Muon": lambda: seconds(optimizer.step_muon),
        }
        found = in_turn(sides, args.rounds, "s")
    shares = [muon / (rest + adamw + muon) for rest, adamw, muon in zip(*found.values(), strict=True)]
    N = sum(p.numel() for p in model.h.parameters()) / 1e6
    setting = f"{N:,.1f} M parameters in blocks, {micro_steps * ROWS * CONTEXT:,} tokens a step, {precision}, {device}"
    print(setting)
    for name, figures in found.items():
        print(f"{name}: {median_text(figures, 's')}")
    print(f"Muon's share of a step: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})")
    percent = figure([100 * share for share in shares], "% of a step")
    write_json(args.json, {"Muon": percent, "update": figure([1e3 * s for s in found["Muon"]], "ms")}, [setting])


if __name__ == "__main__":
    main()
