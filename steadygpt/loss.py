"""Cross-entropy of logits whose last columns pad the vocabulary, with a gradient that needs little memory."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED_TARGET = -1  # no loss is computed for this target


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
    """Keeps the logits as they are and one number per token for backward, in place of softmax(x) in fp32.

    Padding is overwritten rather than cut off, which would copy the logits in eager mode. In compiled code it would
    leave rows of odd length, whose numbers are loaded one by one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        x[:, vocab_size:] = -torch.inf
        scored = targets != IGNORED_TARGET
        largest = x.amax(-1, keepdim=True)
        at_target = x.sub_(largest).gather(1, (targets * scored)[:, None])
        log_sum = x.exp_().sum(-1, keepdim=True).log()  # (N, 1)
        losses = torch.where(scored, (log_sum - at_target)[:, 0], 0)
        ctx.save_for_backward(logits, targets, largest, log_sum, losses)
        ctx.vocab_size = vocab_size
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, largest, log_sum, losses = ctx.saved_tensors
        scored = targets != IGNORED_TARGET
        weight = (gradient * scored)[:, None]
        x = logits.to(log_sum.dtype, copy=True).sub_(largest).sub_(log_sum).exp_().mul_(weight).to(logits.dtype)
        x[:, ctx.vocab_size :] = 0
        # softmax - 1 at the target, which is expm1(-loss) without cancellation.
        at_target = torch.expm1(-losses) * weight[:, 0]
        x[torch.arange(len(x), device=x.device), targets * scored] = at_target.to(x.dtype)
        return x, None, None
