"""The loss beside cross_entropy of logits without padding: in PyTorch's operators, and in the kernel for GPUs.

Triton's interpreter runs the kernel on the CPU.
"""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, REPO
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from steadygpt.machine import loss
from steadygpt.machine.loss import linear_losses, softcapped, token_losses

OPERATORS = [("operators", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
WAYS = [*OPERATORS, ("kernel", torch.float32), ("kernel", torch.bfloat16)]  # it has no other dtypes
# The relative distance to the next number.
STEPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6, torch.float64: 1e-6}


@pytest.fixture
def kernel(monkeypatch):
    """Compute losses and gradients in the kernel."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    if os.environ[DEVICE] != "cpu":
        pytest.skip("test_on_device.py runs the kernel on a GPU")
    from steadygpt.machine import loss_kernel

    monkeypatch.setattr(loss_kernel, "BLOCK", 64)  # so that most rows have several
    monkeypatch.setattr(
        loss, "_has_kernel", lambda logits: logits.is_contiguous() and logits.dtype in (torch.bfloat16, torch.float32)
    )


@pytest.fixture(params=["operators", "kernel"])
def way(request):
    """Compute them in both ways."""
    if request.param == "kernel":
        request.getfixturevalue("kernel")


def examples(dtype: torch.dtype, scale: float = 3.0, vocab_size: int = 101, padded: int = 128):
    """Return logits (20, 128), whose padding must not matter, and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(20, padded, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab_size, (20,), generator=generator)
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
@pytest.mark.parametrize(("way", "dtype"), WAYS, ids=str, indirect=["way"])
def test_losses_and_gradients_equal_those_without_padding(way, dtype, scale, offset):
    """Were the largest logit and the log of the sum added up, an offset would round the result."""
    logits, targets = examples(dtype, scale)
    logits = (logits.detach() + offset).requires_grad_()
    losses, gradient = losses_and_gradient(token_losses, logits, targets, 101)
    expected, exact = losses_and_gradient(plain, logits.detach().double().requires_grad_(), targets, 101)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(losses.double(), expected, rtol=1e-6, atol=2e-6)
    assert gradient.dtype == dtype
    # Rounded twice, and cut off rather than rounded by Triton's interpreter.
    assert torch.allclose(gradient.double(), exact, rtol=3 * STEPS[dtype], atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize(("way", "dtype"), WAYS, ids=str, indirect=["way"])
@given(
    N=st.integers(1, 6), C=st.integers(1, 9), vocab_size=st.integers(1, 300), padding=st.integers(0, 70),
    seed=st.integers(0, 2**32), is_mean=st.booleans(),
)  # fmt: skip
@settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],  # a smaller example would take minutes in the interpreter
)  # fmt: skip
def test_gradients_of_a_linear_layer_are_those_of_its_losses(
    way, dtype, softcap, N, C, vocab_size, padding, seed, is_mean
):
    """Whatever share each token has in the loss, and whatever is in the padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, generator=generator, dtype=torch.float64).to(dtype)
    weight = (0.3 * torch.randn(vocab_size + padding, C, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab_size, (N,), generator=generator)
    shares = torch.randn(N, generator=generator, dtype=torch.float64)
    if is_mean:
        shares = torch.full((N,), 1 / N, dtype=torch.float64)

    def results(x, weight, compute):
        x = x.clone().requires_grad_()
        weight = weight.clone().requires_grad_()
        losses = compute(x, weight)
        (losses * shares).sum().backward()
        return losses.detach().double()[:, None], x.grad.double(), weight.grad.double()

    found = results(x, weight, lambda x, weight: linear_losses(x, weight, targets, vocab_size, softcap))
    exact = results(
        x.double(), weight.double(), lambda x, weight: plain(softcapped(x @ weight.T, softcap), targets, vocab_size)
    )
    # A rounded logit changes softmax in relation to the logit. A row of softmax - one_hot is at most sqrt(2) long.
    error = 2 * STEPS[dtype] * (1 + (x.double() @ weight.double().T).abs().max())
    length_of_shares = shares.norm()
    scales = (
        1.0,
        length_of_shares * weight.double().norm(dim=1).max(),
        length_of_shares * x.double().norm(dim=1).max(),
    )
    for one, other, scale in zip(found, exact, scales, strict=True):
        assert (one - other).norm(dim=-1).max() <= error * scale
    assert not found[2][vocab_size:].any()


@pytest.mark.parametrize("scale", [2**exponent for exponent in range(0, 17, 4)])
def test_gradients_in_fp16_are_as_exact_as_those_of_cross_entropy(scale):
    """Whatever GradScaler's factor of the loss is, here of a step of 524,288 tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=generator)
    weight = 0.3 * torch.randn(1024, 32, generator=generator)
    targets = torch.randint(0, 1000, (512,), generator=generator)

    def error(compute) -> list[float]:
        """Return the errors of both gradients, relative to their size."""
        both = [tensor.half().requires_grad_() for tensor in (x, weight)]
        (compute(*both) * (scale / 524_288)).sum().backward()
        exact = [tensor.half().double().requires_grad_() for tensor in (x, weight)]
        (plain(exact[0] @ exact[1].T, targets, 1000) * (scale / 524_288)).sum().backward()
        pairs = zip(both, exact, strict=True)
        return [((one.grad.double() - other.grad).norm() / other.grad.norm()).item() for one, other in pairs]

    ours = error(lambda x, weight: linear_losses(x, weight, targets, 1000))
    theirs = error(lambda x, weight: plain(F.linear(x, weight), targets, 1000))
    assert all(one <= 1.1 * other for one, other in zip(ours, theirs, strict=True))


def test_small_gradients_are_not_lost_in_fp16():
    """A confident prediction leaves 3e-7 to each other token, for which fp16 has two bits. GradScaler scales losses."""
    weight = torch.zeros(50_000, 1, dtype=torch.float16)
    weight[0] = 15
    weight.requires_grad_()
    x = torch.ones(2, 1, dtype=torch.float16)
    losses = linear_losses(x, weight, torch.zeros(2, dtype=torch.int64), 50_000)
    (1024 * losses).sum().backward()
    probability = 1 / (math.exp(15) + 49_999)
    assert weight.grad[1:].double() == pytest.approx(2 * 1024 * probability, rel=2e-3)


def test_logits_with_gaps_between_their_rows_are_not_for_the_kernel(monkeypatch):
    """As a term of one's own may cut off the padding first."""
    monkeypatch.setattr(loss, "HAS_TRITON", True)
    logits = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    whole = torch.zeros(4, 128)
    for part, expected in ((whole, True), (whole[:, :101], False), (whole.T, False)):
        logits.is_contiguous = part.is_contiguous
        assert loss._has_kernel(logits) is expected


@pytest.mark.parametrize("target", [-100, -1, 128])
def test_targets_that_are_no_columns_are_refused(target):
    logits, targets = examples(torch.float32)
    targets[4] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(logits, targets, 101)


@pytest.mark.parametrize("target", [-100, -1, 101, 128, 10**12])
def test_the_loss_of_a_target_outside_of_the_vocabulary_is_infinite_in_the_kernel(kernel, target):
    """So it is noticed like any loss that is not finite, without waiting for the device."""
    logits, targets = examples(torch.bfloat16)
    targets[4] = target
    losses = token_losses(logits, targets, 101)
    assert losses[4] == torch.inf
    assert torch.isfinite(losses).sum() == 19


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_loss_of_a_row_that_is_not_finite_is_not_finite(way, value):
    logits, targets = examples(torch.bfloat16)
    with torch.no_grad():
        logits[4, (targets[4] + 1) % 101] = value
        logits[5] = -torch.inf
    losses = token_losses(logits, targets, 101)
    assert not torch.isfinite(losses[4:6]).any()
    assert torch.isfinite(losses).sum() == 18


def test_padding_has_no_gradient(way):
    logits, targets = examples(torch.bfloat16)
    with torch.no_grad():
        logits[:, 101:] = 1000
    losses, gradient = losses_and_gradient(token_losses, logits, targets, 101)
    assert torch.isfinite(losses).all()
    assert not gradient[:, 101:].any()
    assert gradient[:, :101].any(dim=1).all()


def test_a_confident_prediction_keeps_its_small_gradient(way):
    """In bf16, its probability of 0.9994 rounds to 1."""
    logits = torch.zeros(1, 128, dtype=torch.bfloat16)
    logits[0, 3] = 12
    losses, gradient = losses_and_gradient(token_losses, logits.requires_grad_(), torch.tensor([3]), 101)
    exact, exact_gradient = losses_and_gradient(
        plain, logits.detach().double().requires_grad_(), torch.tensor([3]), 101
    )
    assert losses.item() == pytest.approx(exact.item(), abs=1e-6)
    assert gradient[0, 3].item() == pytest.approx(exact_gradient[0, 3].item(), rel=0.01)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from steadygpt.machine import loss_kernel
pointers = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32", "gradients_ptr": "*bf16"}
signature = pointers | {"P": "i32", "vocab_size": "i32", "CAP": "constexpr", "BLOCK": "constexpr"}
for cap, architecture in ((0.0, 80), (15.0, 90)):
    source = ASTSource(loss_kernel._row, signature, {"CAP": cap, "BLOCK": loss_kernel.BLOCK})
    compiled = triton.compile(source, GPUTarget("cuda", architecture, 32), {"num_warps": loss_kernel.NUM_WARPS})
    assert "st.local" not in compiled.asm["ptx"], (cap, architecture)
"""


def test_the_kernel_compiles_for_gpus(tmp_path):
    """The interpreter accepts more than the compiler, which needs no GPU."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_tensor_of_the_size_of_the_logits_is_kept_for_the_backward_pass(way):
    x = torch.randn(20, 8).requires_grad_()
    weight = torch.randn(128, 8).requires_grad_()
    _, targets = examples(torch.bfloat16)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        linear_losses(x, weight, targets, 101)
    sizes = sorted((tensor.numel() * tensor.itemsize for tensor in kept), reverse=True)
    assert sizes == [20 * 128 * 2, 128 * 8 * 2, 20 * 8 * 2]


def test_autocast_decides_the_dtype_of_the_products():
    x = torch.randn(20, 8).requires_grad_()
    weight = torch.randn(128, 8).requires_grad_()
    _, targets = examples(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_losses(x, weight, targets, 101)
        with torch.no_grad():
            evaluated = linear_losses(x, weight, targets, 101)
        expected = token_losses(F.linear(x, weight), targets, 101)
    assert torch.equal(losses, expected)
    assert torch.equal(evaluated, expected)
    losses.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_compiled_losses_are_the_same(softcap):
    def compute(x, weight):
        return linear_losses(x, weight, targets, 101, softcap)

    x = torch.randn(20, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128, 8, dtype=torch.bfloat16, requires_grad=True)
    _, targets = examples(torch.bfloat16)
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    for of in (x, weight):
        expected = losses_and_gradient(lambda _: compute(x, weight), of)
        assert all(map(torch.equal, losses_and_gradient(lambda _: compiled(x, weight), of), expected))
