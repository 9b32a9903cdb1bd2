"""Generation speed beside nanoGPT, in tokens per second: GPT-2 124M with the same weights, text and precision.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.generation_speed --nanogpt nanoGPT [--tokens 512] [--precision bf16]

Ours is the generate() behind generate.py, with a KV cache; theirs is the generate() behind sample.py, from nanoGPT's
model.py. Both sample with top_k 200, start from one token and have their weights in memory. On a CPU sample.py
generates in fp32 only; the bf16 side calls the same method under autocast.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.compare import figure, in_turn, load_module, ratio, report_precisions, synchronize, write_json
from generate import generate
from model import GPT, GPTConfig
from steadygpt.device import autocast, choose_precision, evaluating
from steadygpt.distributed import joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--precision", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"), help="default: bf16 fp32"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="fewer are for trying this command (default: 12)")
    parser.add_argument("--json", type=Path, help="file for the result of the first --precision")
    args = parser.parse_args()
    torch.manual_seed(0)
    with joined("auto") as ranks:
        ours = GPT(GPTConfig(vocab_size=50304, activation="gelu", num_layers=args.layers))
        samplers = {"SteadyGPT": partial(generate, ours)}
        if args.nanogpt:
            theirs = load_module(args.nanogpt / "model.py")
            nano = theirs.GPT(theirs.GPTConfig(n_layer=args.layers)).eval()
            nano.load_state_dict({
                name if name == "lm_head.weight" else f"transformer.{name}": tensor
                for name, tensor in ours.state_dict().items()
            })  # fmt: skip
            samplers["nanoGPT"] = nano.to(ranks.device).generate
        ours.to(ranks.device)
        start = torch.zeros(1, 1, dtype=torch.int64, device=ranks.device)

        def tokens_per_second(sample, precision: str) -> float:
            synchronize(ranks.device)
            begun = time.perf_counter()
            with torch.no_grad(), autocast(ranks.device, precision):
                sample(start, args.tokens, temperature=0.8, top_k=200)
            synchronize(ranks.device)
            return args.tokens / (time.perf_counter() - begun)

        measured = {}
        for precision in args.precision:
            for name, sample in samplers.items():
                measured[f"{name}, {precision}"] = partial(tokens_per_second, sample, precision)
        with evaluating(ours):
            for measure in measured.values():
                measure()  # the first call chooses kernels and allocates memory
            figures = in_turn(measured, args.rounds, "tokens/s")
    print(f"{args.tokens} tokens, GPT-2 124M, {ranks.device}")
    default = choose_precision("auto", ranks.device, ours.config, 1)[0]
    defaults = f"SteadyGPT, {default}", f"nanoGPT, {'fp32' if ranks.device.type == 'cpu' else 'bf16'}"
    report_precisions(figures, "tokens/s", defaults)
    found = {name: figure(figures[f"{name}, {args.precision[0]}"], "tokens/s") for name in samplers}
    sides = (f"{name}, {args.precision[0]}" for name in ("SteadyGPT", "nanoGPT"))
    found["ratio"] = ratio(figures, *sides, "x nanoGPT")
    write_json(args.json, found, [f"{args.tokens} tokens, one text, {args.precision[0]}"])


if __name__ == "__main__":
    main()
