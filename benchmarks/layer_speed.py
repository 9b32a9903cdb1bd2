"""Time of a layer's attention and of a short convolution in its place, forward and backward, compiled, in bf16.

    python -m benchmarks.layer_speed                 # on a GPU: 32 rows of 1,024 tokens
    python -m benchmarks.layer_speed --rows 1        # on a CPU

The layers have the sizes of --config modern. "conv1d" is the convolution with PyTorch's operator in place of sums of
shifted tokens. Before the rounds, its results are compared with ours.
"""

import argparse
import time
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare import benchmark_parser, compare, synchronize
from model import Attention, GPTConfig, LayerArgs, ShortConvolution, rotary_table
from steadygpt.config import parse_args
from steadygpt.machine.device import autocast, choose_device

LARGEST_ERROR = 0.02  # of a result, relative to its size; a step of bf16 is 0.004


class Conv1d(ShortConvolution):
    """The same convolution by PyTorch's operator."""

    def forward(self, x: Tensor, args: LayerArgs) -> Tensor:
        b, c, u = self.c_in(x).chunk(3, dim=-1)
        width, features = self.taps.shape
        y = F.conv1d((b * u).mT, self.taps.T[:, None].type_as(u), padding=width - 1, groups=features)
        return self.c_proj(c * y[..., : x.size(1)].mT)


class Side:
    """A layer, and an input that is the same for all sides."""

    def __init__(self, layer: nn.Module, config: GPTConfig, args: argparse.Namespace, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.02 if parameter.size(0) > 8 else 0.5, generator=generator)
        x = torch.randn(args.rows, config.context_length, config.embd_size, generator=generator)
        self.device = device
        self.x = x.to(device, torch.bfloat16).requires_grad_()
        self.args = LayerArgs(torch.arange(config.context_length, device=device), rotary_table(config, device))
        self.layer = torch.compile(layer.to(device))

    def results(self) -> list[Tensor]:
        """Return the output, and the gradient of the input for an output's gradient of ones."""
        self.x.grad = None
        with autocast(self.device, "bf16"):
            y = self.layer(self.x, self.args)
        y.backward(torch.ones_like(y))
        return [y.detach(), self.x.grad]

    def milliseconds(self) -> float:
        synchronize(self.device)
        start_s = time.perf_counter()
        self.results()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start_s)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="per row (default: 1024)")
    args = parser.parse_args()
    device = choose_device("auto")
    shape = parse_args(["--config", "modern"])[0].shape(50257)
    config = replace(shape, context_length=args.tokens).resolved()
    layers = {
        "convolution": ShortConvolution(config, 0),
        "attention": Attention(replace(config, attention_gate=False), 0),
        "attention with a gate": Attention(replace(config, attention_gate=True), 0),
        "conv1d": Conv1d(config, 0),
    }
    sides = {name: Side(layer, config, args, device) for name, layer in layers.items()}
    results = {name: side.results() for name, side in sides.items()}  # compiles
    for found, wanted in zip(results["conv1d"], results["convolution"], strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert error <= LARGEST_ERROR, f"conv1d: differs by {error:.3f}"
    print(f"{args.rows} x {args.tokens:,} tokens, {config.embd_size} wide, bf16, {device}")
    compare({name: side.milliseconds for name, side in sides.items()}, "ms", args)


if __name__ == "__main__":
    main()
