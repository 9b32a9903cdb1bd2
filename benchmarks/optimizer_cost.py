"""Share of Muon in a training step of the recipe, beside forward and backward and beside AdamW's update.

    python -m benchmarks.optimizer_cost                                  # 10 M parameters in the blocks
    python -m benchmarks.optimizer_cost --width 768 --layers 12 --tokens 524288                             # on a GPU

--config modern with GPT-2's vocabulary, in rows of 256 tokens, 16 rows at a time.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.compare import benchmark_parser, compare, median_text, synchronize
from model import GPT, GPTConfig
from optim import Muon, make_optimizer
from steadygpt.config import parse_args
from steadygpt.machine.device import autocast, native_precision
from steadygpt.machine.ranks import joined

ROWS, CONTEXT = 16, 256


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 6 (default: 384)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step (default: 16384)")
    args = parser.parse_args()
    shape = f"--num_layers {args.layers} --embd_size {args.width} --context_length {CONTEXT}".split()
    config, _ = parse_args(["--config", "modern", *shape])
    with joined("auto") as ranks:
        device, precision = ranks.device, native_precision(ranks.device)
        model = GPT(config.shape(GPTConfig.vocab_size)).to(device)
        forward = model.compiled() if device.type == "cuda" else model
        optimizer = make_optimizer(model, config, ranks)
        assert isinstance(optimizer, Muon)
        tokens = torch.randint(0, GPTConfig.vocab_size, (ROWS, CONTEXT + 1), device=device)

        def compute() -> None:
            for _ in range(max(1, args.tokens // (ROWS * CONTEXT))):
                with autocast(device, precision):
                    loss = forward(tokens[:, :-1], tokens[:, 1:])
                loss.backward()

        def seconds(work: Callable[[], object]) -> float:
            synchronize(device)
            start_s = time.perf_counter()
            work()
            synchronize(device)
            return time.perf_counter() - start_s

        sides = {"Muon": optimizer.step_muon, "forward and backward": compute, "AdamW": optimizer.step_adamw}
        for work in (compute, *sides.values()):  # gradients first, and nothing is measured the first time
            work()
        figures = compare({name: partial(seconds, work) for name, work in sides.items()}, "s", args)
    shares = [muon / sum(rest) for muon, *rest in zip(figures["Muon"], *figures.values(), strict=True)]
    print(f"Muon's share of a step, {precision}: {median_text(shares, 'of its time')}")


if __name__ == "__main__":
    main()
