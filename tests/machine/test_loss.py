"""The loss beside cross_entropy of logits without padding."""

import pytest
import torch
from torch.nn import functional as F

from steadygpt.machine.loss import token_losses

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def examples(dtype: torch.dtype, scale: float = 3.0, vocab_size: int = 101, padded: int = 128):
    """Return logits (50, 128), whose padding must not matter, and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(50, padded, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab_size, (50,), generator=generator)
    return logits.requires_grad_(), targets


def losses_and_gradient(compute, logits, *others):
    """Return the losses of compute(logits, ...), and the gradient of their sum in unequal shares."""
    losses = compute(logits, *others)
    (gradient,) = torch.autograd.grad(losses, logits, torch.linspace(-1, 2, len(losses), dtype=losses.dtype))
    return losses.detach(), gradient


def plain(logits, targets, vocab_size):
    logits = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 0.0), (3.0, 0.0), (100.0, 0.0), (3.0, 1e3), (3.0, -1e4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_equal_those_without_padding(dtype, scale, offset):
    """Were the largest logit and the log of the sum added up, an offset would round the result."""
    logits, targets = examples(dtype, scale)
    logits = (logits.detach() + offset).requires_grad_()
    losses, gradient = losses_and_gradient(token_losses, logits, targets, 101)
    expected, exact = losses_and_gradient(plain, logits.detach().double().requires_grad_(), targets, 101)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert gradient.dtype == dtype
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-6)  # to the next number of this dtype
    assert torch.allclose(gradient.double(), exact, rtol=step, atol=1e-6)


@pytest.mark.parametrize("target", [-100, -1, 128])
def test_targets_that_are_no_columns_are_refused(target):
    logits, targets = examples(torch.float32)
    targets[4] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(logits, targets, 101)


def test_padding_has_no_gradient():
    logits, targets = examples(torch.bfloat16)
    with torch.no_grad():
        logits[:, 101:] = 1000
    losses, gradient = losses_and_gradient(token_losses, logits, targets, 101)
    assert torch.isfinite(losses).all()
    assert not gradient[:, 101:].any()
    assert gradient[:, :101].any(dim=1).all()


def test_a_confident_prediction_keeps_its_small_gradient():
    """In bf16, its probability of 0.9994 rounds to 1."""
    logits = torch.zeros(1, 128, dtype=torch.bfloat16)
    logits[0, 3] = 12
    losses, gradient = losses_and_gradient(token_losses, logits.requires_grad_(), torch.tensor([3]), 101)
    exact, exact_gradient = losses_and_gradient(
        plain, logits.detach().double().requires_grad_(), torch.tensor([3]), 101
    )
    assert losses.item() == pytest.approx(exact.item(), abs=1e-6)
    assert gradient[0, 3].item() == pytest.approx(exact_gradient[0, 3].item(), rel=0.01)


def test_only_the_logits_are_kept_for_the_backward_pass():
    logits, targets = examples(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_losses(logits, targets, 101)
    large = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.numel() > len(targets)}
    assert large == {logits.untyped_storage().data_ptr()}


def test_compiled_loss_computes_the_same():
    logits, targets = examples(torch.bfloat16)
    compiled = torch.compile(token_losses, backend="aot_eager", fullgraph=True)
    expected = losses_and_gradient(token_losses, logits, targets, 101)
    assert all(map(torch.equal, losses_and_gradient(compiled, logits, targets, 101), expected))
