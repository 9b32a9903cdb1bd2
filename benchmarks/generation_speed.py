"""Generation speed beside nanoGPT, in tokens per second: GPT-2 124M with the same weights, text and precision.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.generation_speed --nanogpt nanoGPT [--tokens 512] [--precision bf16]

Ours is the generate() behind generate.py, with a KV cache; theirs is the generate() behind sample.py, from nanoGPT's
model.py. Both sample with top_k 200, start from one token and have their weights in memory. On a CPU sample.py
generates in fp32 only; the bf16 side calls the same method under autocast.
"""

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.compare import benchmark_parser, in_turn, pairs_of_equal_precision, report, synchronize
from model import GPT, GPTConfig
from steadygpt.inference.sampling import generate
from steadygpt.machine.device import autocast, evaluating
from steadygpt.machine.ranks import joined


def nanogpt_model(file: Path) -> ModuleType:
    """Import nanoGPT's model.py, under a name that no module of ours has."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, ours alone")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--precision", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"), help="default: bf16 fp32"
    )
    parser.add_argument("--layers", type=int, default=12, help="fewer are for trying this command (default: 12)")
    args = parser.parse_args()
    torch.manual_seed(0)
    with joined("auto") as ranks:
        ours = GPT(GPTConfig(vocab_size=50304, activation="gelu", num_layers=args.layers))
        samplers = {"SteadyGPT": partial(generate, ours)}
        if args.nanogpt:
            theirs = nanogpt_model(args.nanogpt / "model.py")
            nano = theirs.GPT(theirs.GPTConfig(n_layer=args.layers)).eval()
            nano.load_state_dict({
                name if name == "lm_head.weight" else f"transformer.{name}": tensor
                for name, tensor in ours.state_dict().items()
            })  # fmt: skip
            samplers["nanoGPT"] = nano.to(ranks.device).generate
        ours.to(ranks.device)
        idx = torch.zeros(1, 1, dtype=torch.int64, device=ranks.device)

        def tokens_per_second(sample, precision: str) -> float:
            synchronize(ranks.device)
            start = time.perf_counter()
            with torch.no_grad(), autocast(ranks.device, precision):
                sample(idx, args.tokens, temperature=0.8, top_k=200)
            synchronize(ranks.device)
            return args.tokens / (time.perf_counter() - start)

        measured = {}
        for precision in args.precision:
            for name, sample in samplers.items():
                measured[f"{name}, {precision}"] = partial(tokens_per_second, sample, precision)
        with evaluating(ours):
            for measure in measured.values():
                measure()  # the first call chooses kernels and allocates memory
            figures = in_turn(measured, args.rounds, "tokens/s")
    print(f"{args.tokens} tokens, GPT-2 124M, {ranks.device}")
    report(figures, "tokens/s", args, pairs_of_equal_precision(figures))


if __name__ == "__main__":
    main()
