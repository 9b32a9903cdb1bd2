"""Cross-entropy of logits that are padded to a larger vocabulary, with little memory for its gradient."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = math.log2(math.e)  # for exp2, because exp takes three times as long on a CPU (torch 2.13)


def mean_terms(terms: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of each term of a loss over the tokens, (terms,). Training minimizes their sum.

    Raises: ValueError if a term is not one number per token.
    """
    expected = terms["loss"].shape
    for name, term in terms.items():
        if term.shape != expected:
            raise ValueError(
                f"the term {name} of the loss has shape {tuple(term.shape)}; expected a number for each token, "
                f"{tuple(expected)}"
            )
    return torch.stack([term.mean() for term in terms.values()])


def token_losses(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute the cross-entropy of each token in nats: log(sum_j exp(x_j)) - x_target, over j < vocab_size.

    Its gradient is softmax(x) - one_hot(target) (Bridle 1990).

    Args:
        logits: (N, P) with P >= vocab_size, fp16, bf16, fp32 or fp64. Columns from vocab_size on are padding: they take
            no part in the sum, and their gradient is zero.
        targets: (N,) int64 below vocab_size.

    Returns: (N,) losses in fp32, or in fp64 for fp64 logits.
    """
    return _TokenLosses.apply(logits, targets, vocab_size)


class _TokenLosses(torch.autograd.Function):
    """Keeps the logits as they are and three numbers per token for backward, in place of softmax(x) in fp32.

    Backward repeats the arithmetic of forward, so the rounding of the shift cancels.

    Padding is overwritten rather than cut off, which would leave rows of odd length: compiled code would load their
    numbers one by one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        x[:, vocab_size:] = -torch.inf
        shift = -LOG2_E * x.amax(-1, keepdim=True)
        x = torch.add(shift, x, alpha=LOG2_E, out=x)  # log2 of exp(x - largest), in one pass
        at_target = x.gather(1, targets[:, None])
        total = x.exp2_().sum(-1, keepdim=True)  # of exp(x - largest), (N, 1)
        losses = (total.log2() - at_target)[:, 0] / LOG2_E
        ctx.save_for_backward(logits, targets, shift, total, losses)
        ctx.vocab_size = vocab_size
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, shift, total, losses = ctx.saved_tensors
        x = logits.to(total.dtype, copy=True)
        x = torch.add(shift, x, alpha=LOG2_E, out=x).exp2_()
        x = x.mul_(gradient[:, None] / total).to(logits.dtype)
        x[:, ctx.vocab_size :] = 0
        # softmax - 1 at the target, without cancellation. Set last, so that compiled code stores no gradient in fp32.
        x[torch.arange(len(x), device=x.device), targets] = (torch.expm1(-losses) * gradient).to(x.dtype)
        return x, None, None
