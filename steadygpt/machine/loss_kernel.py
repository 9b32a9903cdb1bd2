"""Losses and the gradients of their logits in one kernel for GPUs, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = 4096  # columns that are computed at a time
NUM_WARPS = 8


def losses_and_gradients(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float, gradients: Tensor) -> Tensor:
    """Return the losses of softcapped logits, (N,) fp32; overwrite `gradients` with the gradients of the logits.

    Args:
        logits, gradients: (N, P), in rows without gaps; perhaps the same tensor.
        targets: (N,) int64. The loss of a target outside the vocabulary is infinite.
        softcap: 0 for none.
    """
    N, P = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    _row[(N,)](
        logits, targets, losses, gradients, P, vocab_size, CAP=softcap, BLOCK=BLOCK, num_warps=NUM_WARPS
    )  # fmt: skip
    return losses


@triton.jit
def _row(
    logits_ptr, targets_ptr, losses_ptr, gradients_ptr, P, vocab_size, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute a row, which is read twice: for its largest logit and the sum, then, from the L2 cache, for the gradient.

    The sum is of exp(x - largest so far) (Milakov and Gimelshein 2018). Loads are masked at P, which the model pads to
    a multiple of 64, rather than at vocab_size, so that several numbers are loaded at once.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * P
    gradients_ptr += row * P
    block = tl.arange(0, BLOCK)

    # Before the reductions, for which all threads wait: later, another thread may have overwritten this logit.
    target = tl.load(targets_ptr + row)
    is_in_vocabulary = (target >= 0) & (target < vocab_size)
    at_target = tl.load(logits_ptr + target, is_in_vocabulary, 0.0).to(tl.float32)
    if CAP > 0:
        at_target = CAP * _tanh(at_target / CAP)

    largest = -1e30  # finite, because -inf - -inf is NaN
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, P, BLOCK):
        columns = start + block
        x = tl.load(logits_ptr + columns, columns < P, 0.0).to(tl.float32)
        if CAP > 0:
            x = CAP * _tanh(x / CAP)
        x = tl.where(columns < vocab_size, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        totals = totals * _exp(largest - larger) + _exp(x - larger)
        largest = larger
    total = tl.sum(totals, 0)
    inverse = 1 / total  # a division of each number would take several instructions

    loss = tl.log(total) + (largest - at_target)
    tl.store(losses_ptr + row, tl.where(is_in_vocabulary, loss, float("inf")))

    for start in range(0, P, BLOCK):
        columns = start + block
        x = tl.load(logits_ptr + columns, columns < P, 0.0).to(tl.float32)
        slope = 1.0
        if CAP > 0:
            tanh = _tanh(x / CAP)
            x = CAP * tanh
            slope = 1 - tanh * tanh
        gradient = _exp(x - largest) * inverse
        gradient = tl.where(columns == target.to(tl.int32), gradient - 1, gradient) * slope
        gradient = tl.where(columns < vocab_size, gradient, 0.0)
        tl.store(gradients_ptr + columns, gradient.to(gradients_ptr.dtype.element_ty), columns < P)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
