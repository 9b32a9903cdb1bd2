"""Cross-entropy of logits with a padded vocabulary, and its gradient, which overwrites the logits."""

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOG2_E = math.log2(math.e)  # for exp2, because exp takes three times as long on a CPU (torch 2.13)
HAS_TRITON = importlib.util.find_spec("triton") is not None


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


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) in fp32 at least (Gemma Team 2024, section 2); with 0, the logits as they are."""
    if not cap:
        return logits
    return cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)


def token_losses(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute the cross-entropy of each token in nats: log(sum_j exp(x_j)) - x_target, over j < vocab_size.

    Its gradient is softmax(x) - one_hot(target) (Bridle 1990).

    Args:
        logits: (N, P) with P >= vocab_size, fp16, bf16, fp32 or fp64. Columns from vocab_size on are padding: they take
            no part in the sum, and their gradient is zero.
        targets: (N,) int64 below vocab_size.

    Returns: (N,) losses in fp32, or in fp64 for fp64 logits.
    """
    if torch.is_grad_enabled():
        losses: Tensor = _TokenLosses.apply(logits, targets, vocab_size)
        return losses
    return _losses_and_exp(logits, targets, vocab_size)[0]


def linear_losses(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float = 0.0) -> Tensor:
    """Compute token_losses() of softcapped(x @ weight.T, softcap), with only one tensor of the size of the logits.

    Forward replaces the logits by the gradient of each token's own loss. Backward multiplies these gradients with the
    weight and with x; the incoming gradient of each token's loss scales the first product, and x in the second.

    Args:
        x: (N, C), the input of the last layer.
        weight: (P, C), the weight of the last layer. Under autocast, both are multiplied in its dtype.
        targets, vocab_size: as in token_losses().
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
    # In fp16, x times the incoming gradient of a token's loss would underflow.
    if torch.is_grad_enabled() and x.dtype != torch.float16:
        losses: Tensor = _LinearLosses.apply(x, weight, targets, vocab_size, softcap)
        return losses
    return token_losses(softcapped(F.linear(x, weight), softcap), targets, vocab_size)


def gradient_scale(dtype: torch.dtype) -> float:
    """Return the factor with which gradients of logits are stored, because most are too small for fp16."""
    return 1024.0 if dtype == torch.float16 else 1.0


class _TokenLosses(torch.autograd.Function):
    """Keeps the gradient of the logits for backward, instead of softmax(x) in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        gradients = torch.empty_like(logits)
        losses = _losses_and_gradients(logits, targets, vocab_size, 0.0, gradients)
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        factors = gradient / gradient_scale(gradients.dtype)
        return (gradients * factors[:, None]).to(gradients.dtype), None, None


class _LinearLosses(torch.autograd.Function):
    """Keeps the gradient of the logits in their place, see linear_losses()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
        logits = F.linear(x, weight)
        losses = _losses_and_gradients(logits, targets, vocab_size, softcap, logits)
        ctx.save_for_backward(x, weight, logits)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, gradients = ctx.saved_tensors
        factors = gradient[:, None]
        of_x = ((gradients @ weight) * factors).to(x.dtype)
        of_weight = gradients.mT @ (x * factors).to(x.dtype)
        return of_x, of_weight, None, None, None


def _losses_and_gradients(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float, gradients: Tensor
) -> Tensor:
    """Return the losses of softcapped logits; overwrite `gradients`, which may be the logits themselves.

    Args:
        gradients: (N, P); becomes the gradient of each token's own loss with respect to its logits, times
            gradient_scale(), and 0 in the padding.
    """
    if _has_kernel(logits):
        from steadygpt.machine.loss_kernel import losses_and_gradients  # Triton takes a while to import

        return losses_and_gradients(logits, targets, vocab_size, softcap, gradients)
    capped = softcapped(logits, softcap)
    losses, x, total = _losses_and_exp(capped, targets, vocab_size)
    scale = gradient_scale(logits.dtype)
    at_targets = scale * torch.expm1(-losses)  # softmax - 1, without cancellation
    x = x.mul_(scale / total)
    if softcap:
        slope = 1 - (capped / softcap).square()
        x = x.mul_(slope)
        at_targets = at_targets * slope.gather(1, targets[:, None])[:, 0]
    gradients.copy_(x)
    # Set last, so that compiled code stores no gradient in fp32.
    gradients[torch.arange(len(x), device=x.device), targets] = at_targets.to(gradients.dtype)
    return losses


def _has_kernel(logits: Tensor) -> bool:
    """Return whether the kernel computes these losses: in bf16, which implies a GPU recent enough for Triton."""
    return logits.is_cuda and logits.dtype == torch.bfloat16 and logits.is_contiguous() and HAS_TRITON


def _losses_and_exp(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (N,), exp(logits - the largest one of the row) (N, P), and its sums (N, 1).

    Padding is overwritten rather than cut off, which would leave rows of odd length: compiled code would load their
    numbers one by one.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    x[:, vocab_size:] = -torch.inf
    shift = -LOG2_E * x.amax(-1, keepdim=True)
    x = torch.add(shift, x, alpha=LOG2_E, out=x)  # log2 of exp(x - largest), in one pass
    at_target = x.gather(1, targets[:, None])
    total = x.exp2_().sum(-1, keepdim=True)
    losses = (total.log2() - at_target)[:, 0] / LOG2_E
    return losses, x, total
