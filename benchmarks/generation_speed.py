"""Generated tokens per second beside nanoGPT's sample.py: GPT-2 124M with the same weights, one text, top-k sampling.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.generation_speed --nanogpt nanoGPT [--tokens 512]

sample.py calls generate() of nanoGPT's model.py, in fp32 on a CPU and in bf16 on a GPU; generate.py calls ours, in the
precision that it would choose. Both start from one token, and their models are loaded already.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.compare import in_turn, load_module, report, synchronize
from model import GPT, GPTConfig, evaluating
from steadygpt.device import autocast, choose_precision
from steadygpt.distributed import joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    theirs = load_module(args.nanogpt / "model.py")
    torch.manual_seed(0)
    with joined("auto") as ranks:
        ours = GPT(GPTConfig(vocab_size=50304, gelu="exact"))
        nano = theirs.GPT(theirs.GPTConfig()).eval()
        nano.load_state_dict({
            name if name == "lm_head.weight" else f"transformer.{name}": tensor
            for name, tensor in ours.state_dict().items()
        })  # fmt: skip
        ours, nano = ours.to(ranks.device), nano.to(ranks.device)
        precision = choose_precision("auto", ranks.device)
        start = torch.zeros(1, 1, dtype=torch.int64, device=ranks.device)

        def tokens_per_second(generate, precision: str) -> float:
            synchronize(ranks.device)
            begun = time.perf_counter()
            with torch.no_grad(), autocast(ranks.device, precision):
                generate(start, args.tokens, temperature=0.8, top_k=200)
            synchronize(ranks.device)
            return args.tokens / (time.perf_counter() - begun)

        with evaluating(ours):
            sides = {
                "SteadyGPT": lambda: tokens_per_second(ours.generate, precision),
                "nanoGPT": lambda: tokens_per_second(nano.generate, "fp32" if ranks.device.type == "cpu" else "bf16"),
            }
            figures = in_turn(sides, args.rounds, "tokens/s")
    print(f"{args.tokens} tokens, GPT-2 124M, {ranks.device}; ours in {precision}")
    report(figures, "tokens/s")


if __name__ == "__main__":
    main()
