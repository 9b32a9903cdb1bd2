"""Time and memory of the last layer and the loss, forward and backward: kernel, operators, PyTorch's cross_entropy.

    python -m benchmarks.loss_speed                          # on a GPU: 65,536 tokens of GPT-2 in bf16
    python -m benchmarks.loss_speed --blocks 2048x4 4096x8 4096x16 8192x16     # columns x warps of the kernel
    python -m benchmarks.loss_speed --tokens 1024            # on a CPU, which has no kernel

All sides multiply the same hidden states with the same weight. cross_entropy is that of PyTorch over the logits, as
nanoGPT calls it; the other sides are linear_losses(), without and with its kernel. All are compiled. Before the rounds,
the losses and gradients of all sides are compared with those of cross_entropy.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.compare import benchmark_parser, in_turn, report, synchronize
from steadygpt.base.text import bytes_text
from steadygpt.machine import loss
from steadygpt.machine.device import autocast, choose_device, peak_memory_bytes

LARGEST_ERROR = 0.02  # of a gradient, relative to its size; a step of bf16 is 0.004


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute the losses as nanoGPT does, but without the padding of the vocabulary."""
    return F.cross_entropy(F.linear(x, weight)[:, :vocab_size].float(), targets, reduction="none")


@contextmanager
def kernel(blocks: str):
    """Compute losses with the kernel in this configuration, "" for none."""
    has_kernel = loss._has_kernel
    if blocks:
        from steadygpt.machine import loss_kernel

        loss_kernel.BLOCK, loss_kernel.NUM_WARPS = map(int, blocks.split("x"))
    else:
        loss._has_kernel = lambda logits: False
    try:
        yield
    finally:
        loss._has_kernel = has_kernel


class Side:
    """One way to compute the losses of the same hidden states."""

    def __init__(self, compute: Callable, blocks: str, args: argparse.Namespace, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        padded = -(-args.vocab_size // 128) * 128
        self.device = device
        self.blocks = blocks
        self.x = torch.randn(args.tokens, args.width, generator=generator).to(device).requires_grad_()
        self.weight = (0.05 * torch.randn(padded, args.width, generator=generator)).to(device).requires_grad_()
        self.targets = torch.randint(args.vocab_size, (args.tokens,), generator=generator).to(device)
        self.vocab_size = args.vocab_size
        # A function of its own, because compiled code is kept for each function.
        self.compiled = torch.compile(lambda *arguments: compute(*arguments))

    def results(self) -> list[Tensor]:
        """Return the mean loss and its gradients."""
        self.x.grad = None
        self.weight.grad = None
        with kernel(self.blocks), autocast(self.device, "bf16"):
            mean = self.compiled(self.x, self.weight, self.targets, self.vocab_size).mean()
        mean.backward()
        return [mean.detach(), self.x.grad, self.weight.grad]

    def milliseconds(self) -> float:
        synchronize(self.device)
        start_s = time.perf_counter()
        self.results()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start_s)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--blocks", nargs="+", default=["4096x8"], help="configurations of the kernel (GPU)")
    args = parser.parse_args()
    device = choose_device("auto")
    sides = {
        "cross_entropy": Side(cross_entropy, "", args, device),
        "operators": Side(loss.linear_losses, "", args, device),
    }
    if device.type == "cuda":
        sides |= {f"kernel {blocks}": Side(loss.linear_losses, blocks, args, device) for blocks in args.blocks}
    expected = sides["cross_entropy"].results()
    for name, side in sides.items():
        side.results()  # compiles, chooses kernels and allocates memory
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for found, wanted in zip(side.results(), expected, strict=True):
            error = (found - wanted).norm() / wanted.norm()
            assert error <= LARGEST_ERROR, f"{name}: wrong by {error:.3f}"
        if device.type == "cuda":
            print(f"{name}: peak {bytes_text(peak_memory_bytes(device))}")
    figures = in_turn({name: side.milliseconds for name, side in sides.items()}, args.rounds, "ms")
    print(f"{args.tokens:,} tokens, {args.width} wide, vocabulary of {args.vocab_size:,}, bf16, {device}")
    report(figures, "ms", args, [(name, "cross_entropy") for name in sides if name != "cross_entropy"])


if __name__ == "__main__":
    main()
