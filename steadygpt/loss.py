"""Cross-entropy of logits whose last columns pad the vocabulary, whose gradient needs little memory."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED_TARGET = -1  # no loss is computed for this target
LOG2_E = math.log2(math.e)


def token_losses(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute the cross-entropy of each token in nats: log(sum_j exp(x_j)) - x_target, over j < vocab_size.

    Its gradient is softmax(x) - one_hot(target) (Bridle 1990).

    Args:
        logits: (N, P) with P >= vocab_size, fp16, bf16, fp32 or fp64. Columns from vocab_size on are padding: they take
            no part in the sum, and their gradient is zero.
        targets: (N,) int64 below vocab_size, or IGNORED_TARGET, where the loss and its gradient are zero.

    Returns: (N,) losses in fp32, or in fp64 for fp64 logits.
    """
    return _TokenLosses.apply(logits, targets, vocab_size)


class _TokenLosses(torch.autograd.Function):
    """Keeps the logits as they are and two numbers per token for backward, in place of softmax(x) in fp32.

    Padding is overwritten rather than cut off, which would leave rows of odd length: compiled code would load their
    numbers one by one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        x[:, vocab_size:] = -torch.inf
        scored = targets != IGNORED_TARGET
        at_target = torch.arange(len(x), device=x.device), targets * scored
        losses = -x.log_softmax(-1)[at_target]
        ctx.save_for_backward(logits, targets, losses, x[at_target] + losses)
        ctx.vocab_size = vocab_size
        return torch.where(scored, losses, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, losses, log_sum = ctx.saved_tensors
        scored = targets != IGNORED_TARGET
        weights = gradient * scored
        x = logits.to(log_sum.dtype, copy=True).sub_(log_sum[:, None])
        x = x.mul_(LOG2_E).exp2_()  # exp_() takes three times as long on a CPU (torch 2.13)
        x = x.mul_(weights[:, None]).to(logits.dtype)
        x[:, ctx.vocab_size :] = 0
        # softmax - 1 at the target, without cancellation. Set last, so that compiled code stores no gradient in fp32.
        x[torch.arange(len(x), device=x.device), targets * scored] = (torch.expm1(-losses) * weights).to(x.dtype)
        return x, None, None
