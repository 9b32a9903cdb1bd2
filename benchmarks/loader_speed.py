"""Loader tokens per second, of a mixture too, beside nanoGPT's get_batch; and the share of a step spent waiting.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.loader_speed --nanogpt nanoGPT

get_batch is taken from nanoGPT's train.py and reads the same file of 100 M random tokens. The mixture has the four
quarters of this file as sources, with the weights 4, 3, 2 and 1.
"""

import re
import tempfile
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from benchmarks.compare import benchmark_parser, compare, synchronize
from dataloader import BatchLoader, Mixture, Order, RowStream
from model import GPT, GPTConfig
from steadygpt.data.order import Phase, shares_of_block
from steadygpt.data.shards import Shard, open_shard
from steadygpt.machine.device import autocast, choose_precision

TOKENS = 100_000_000
SHUFFLED = Order(shuffle_shards=True, shuffle_rows=True)


def nanogpt_get_batch(checkout: Path, data_dir: Path, rows: int, context: int, device: str):
    """Compile get_batch from nanoGPT's train.py, with the global names that it reads."""
    text = (checkout / "train.py").read_text()
    body = re.search(r"^def get_batch\(split\):\n(?:[ \t]+.*\n|\n)+", text, re.MULTILINE)[0]
    names = {"os": __import__("os"), "np": np, "torch": torch, "data_dir": str(data_dir), "device": device}
    names |= {"batch_size": rows, "block_size": context, "device_type": device}
    exec(body, names)
    return lambda: names["get_batch"]("train")


def four_sources(shard: Shard, context: int) -> Mixture:
    """Return a mixture of the quarters of a shard."""
    size = shard.num_tokens // 4
    streams = {}
    for i in range(4):
        quarter = replace(shard, offset=i * size * shard.dtype.itemsize, num_tokens=size)
        streams[str(i)] = RowStream([quarter], context, SHUFFLED)
    shares = shares_of_block({str(i): Fraction(4 - i) for i in range(4)})
    return Mixture(streams, Phase(0, 0, shares, rows_used_before={}), seed=0)


def tokens_per_second(get, tokens: int, seconds: float, device: torch.device) -> float:
    get()
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        get()
        count += 1
    synchronize(device)
    return tokens * count / (time.perf_counter() - start)


def percent_waiting(loader: BatchLoader, model: GPT, micro_steps: int) -> float:
    """Train, and return the share of the time that is spent in loader.next, in percent."""
    start = time.perf_counter()
    waited_s = 0.0
    for _ in range(micro_steps):
        wait_start = time.perf_counter()
        inputs, targets = loader.next()
        waited_s += time.perf_counter() - wait_start
        with autocast(loader.device, choose_precision("auto", loader.device)):
            loss = model(inputs, targets)["loss"]
        loss.mean().backward()
        model.zero_grad()
    synchronize(loader.device)
    return 100 * waited_s / (time.perf_counter() - start)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it, no get_batch")
    parser.add_argument("--rows", type=int, default=12, help="rows in a batch (default: 12, as nanoGPT)")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--micro_steps", type=int, default=1, help="micro-steps in each round that measures waiting")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side in each round")
    args = parser.parse_args()
    B, T = args.rows, args.context
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(0)
        random.integers(0, 50257, TOKENS).astype(np.uint16).tofile(folder / "train.bin")
        stream = RowStream([open_shard(folder / "train.bin")], T, SHUFFLED)
        loader = BatchLoader(stream, [range(2**40)], B, device)
        mixed = BatchLoader(four_sources(open_shard(folder / "train.bin"), T), [range(2**40)], B, device)
        sides = {"SteadyGPT": loader.next, "SteadyGPT, 4 sources": mixed.next}
        if args.nanogpt:
            sides["nanoGPT"] = nanogpt_get_batch(args.nanogpt, folder, B, T, device.type)
        measured = {
            name: lambda get=get: tokens_per_second(get, B * T, args.seconds, loader.device)
            for name, get in sides.items()
        }
        print(f"batches of {B} x {T} on {device}")
        compare(measured, "tokens/s", args)
        model = GPT(GPTConfig(context_length=T, num_layers=6, num_heads=6, embd_size=384)).to(device)
        print(f"a model of {model.num_parameters() / 1e6:.0f} M parameters, {args.micro_steps} micro-steps:")
        args.plot = None  # it is of the speeds
        compare({"waiting": lambda: percent_waiting(loader, model, args.micro_steps)}, "% of a step", args)
        loader.close()
        mixed.close()


if __name__ == "__main__":
    main()
