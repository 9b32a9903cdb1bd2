"""Attention, initialization, dropout, forward and loss. convert/test_families.py compares with transformers."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig, LayerArgs, Norm
from optim import make_optimizer
from steadygpt.config import TrainConfig
from steadygpt.machine.attention import OPERATORS, attention_in_blocks
from steadygpt.machine.ranks import Ranks

ALONE = Ranks(torch.device("cpu"))
SMALL = GPTConfig(vocab_size=101, context_length=12, num_layers=3, num_heads=2, embd_size=16)
NEOX = {"rotary_pct": 0.25, "parallel_residual": True, "tied_head": False, "activation": "gelu"}
both_families = pytest.mark.parametrize("family", [{}, NEOX], ids=["gpt2", "gpt_neox"])


def small(seed=0, **changes) -> GPT:
    """Return a small model with large random weights, so that its output depends on the tokens."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(SMALL, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def ids(rows: int, tokens: int, seed=0) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# attention, parameters, initialization, optimizer


@pytest.mark.parametrize("num_tokens", [2, 127, 128, 129, 300])
def test_attention_in_blocks_equals_attention(num_tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, num_tokens, 8, requires_grad=True) for _ in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    blocks = attention_in_blocks(q, k, v, dropout=0.0)
    assert torch.allclose(whole, blocks, atol=1e-6)
    direction = torch.randn_like(whole)
    expected, found = (torch.autograd.grad(y, (q, k, v), direction) for y in (whole, blocks))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found, strict=True))


def test_dropout_of_attention_in_blocks_keeps_the_mean():
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4), torch.ones(1, 1, 200, 4)
    sums = attention_in_blocks(q, k, v, dropout=0.5)[0, 0, 100:, 0]  # means of 100 to 200 ones
    assert sums.std() > 0.01
    assert abs(sums.mean() - 1) < 0.03


def test_gpt2_has_124_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig(), initialize=False)
    assert model.num_parameters() == 124_439_808
    assert model.wte.weight.shape == (50304, 768)
    # 6 FLOPs per parameter of a matrix product, and 12 * layers * width * context for attention
    assert model.flops_per_token() == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_initial_weights_and_loss():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, embd_size=256))
    loss = model(ids(4, 12), ids(4, 12, seed=1))["loss"].mean()
    assert loss.item() == pytest.approx(math.log(101), abs=0.1)  # of a uniform guess
    assert model.wte.weight[:101].all() and not model.wte.weight[101:].any()  # the padding of the vocabulary
    for block in model.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    vectors = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 1}
    assert len(vectors) == 3 * (4 + 4) + 2  # a block has two norms and four linear layers
    for name, parameter in vectors.items():
        assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
    taps = GPT(dataclasses.replace(SMALL, embd_size=256, layer_pattern="C")).h[0].conv.taps  # of three tokens
    assert taps.abs().max().item() == pytest.approx(3**-0.5, rel=0.01)
    assert taps.std().item() == pytest.approx(1 / 3, rel=0.1)  # uniform
    untied = GPT(dataclasses.replace(SMALL, tied_head=False))
    assert untied(ids(4, 12), ids(4, 12, seed=1))["loss"].mean().item() == pytest.approx(math.log(101), abs=1e-6)


def test_adamw_has_the_given_options_and_decays_only_matrices_and_embeddings():
    model = GPT(SMALL)
    config = TrainConfig(weight_decay=0.1, max_lr=0.5, adam_beta1=0.8, adam_beta2=0.9)
    decayed, others = make_optimizer(model, config, ALONE).param_groups
    for group, weight_decay in ((decayed, 0.1), (others, 0.0)):
        found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        assert found == {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": weight_decay}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)  # the tied head counts once
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {"wte", "wpe", "c_attn", "c_proj", "c_fc"}
    assert all(names[id(p)].endswith("bias") or ".ln_" in "." + names[id(p)] for p in others["params"])


def test_dropout_is_in_the_same_places_as_in_gpt2():
    """It follows the embeddings, each residual projection and the attention weights. Without it: test_contract.py."""
    model, seen = small(dropout=0.5, embd_size=64), []
    block = model.h[0]
    block.register_forward_pre_hook(lambda block, arguments: seen.append(arguments[0]))
    torch.manual_seed(0)
    model(ids(8, 12))
    x, args = torch.randn(8, 12, 64), LayerArgs(torch.arange(12))
    for dropped in (seen[0], block.attn(x, args), block.mlp(x)):
        assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    after, before = block.attn(x, args), block.eval().attn(x, args)
    kept = after != 0
    assert not torch.allclose(after[kept], 2 * before[kept], atol=1e-2)  # because attention weights were dropped too


# ---------------------------------------------------------------------------------------------------------------------
# forward


# Of answer_scores(): which targets are scored, positions, and the mask.
EVERY_SECOND = (
    torch.arange(24).view(2, 12) % 2 == 0,
    torch.arange(12).expand(2, 12),
    torch.ones(2, 1, 12, 12, dtype=torch.bool).tril(),
)


def test_loss_is_fp32_for_bf16_weights():
    model = small().bfloat16()
    assert model(ids(2, 12)).dtype == torch.bfloat16
    assert model(ids(2, 12), ids(2, 12))["loss"].dtype == torch.float32
    assert model.answer_scores(ids(2, 12), ids(2, 12), *EVERY_SECOND).dtype == torch.float32


def test_the_loss_and_the_lead_of_tokens_are_those_of_their_logits():
    model, tokens, targets = small(), ids(2, 12), ids(2, 12, seed=1)
    logits = model(tokens)
    losses = -logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    largest_others = logits.scatter(2, targets[..., None], -torch.inf).amax(2)
    leads = logits.gather(2, targets[..., None])[..., 0] - largest_others
    assert torch.allclose(model(tokens, targets)["loss"], losses.flatten(), atol=1e-5)
    scores = model.answer_scores(tokens, targets, *EVERY_SECOND)
    is_target = EVERY_SECOND[0]
    assert torch.allclose(scores, torch.stack([losses[is_target], leads[is_target]], 1), atol=1e-5)


def test_loss_in_chunks_computes_logits_chunk_by_chunk(monkeypatch):
    model, sizes = small(), []
    model.loss_chunk_size = 5
    model.ln_f.register_forward_hook(lambda _, __, x: sizes.append(len(x)))
    model(ids(2, 12), ids(2, 12, seed=1))["loss"].mean().backward()
    assert sizes == [5, 5, 5, 5, 4, 4, 5, 5, 5, 5]  # forward, then recomputed in backward from last to first


class Attended(TorchDispatchMode):
    """Counts what computes attention."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator in OPERATORS
        return operator(*args, **(kwargs or {}))


def test_activation_checkpointing_recomputes_blocks_but_not_attention_and_only_in_training():
    model, norms = small(), []
    for block in model.h:
        block.ln_1.register_forward_pre_hook(lambda *_: norms.append(1))

    def computed() -> tuple[int, int]:
        norms.clear()
        with Attended() as attended:
            model(ids(2, 12), ids(2, 12, seed=1))["loss"].mean().backward()
        return len(norms), attended.count

    assert computed() == (3, 3)
    for block in model.h:
        block.recompute = True
    assert computed() == (6, 3)
    model.eval()
    assert computed() == (3, 3)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_the_residual_stream_is_in_bf16_under_bf16_and_in_fp32_under_fp16(dtype, expected):
    model, seen = small(), []
    for block in model.h:
        block.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    model.ln_f.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    with torch.autocast("cpu", dtype):
        model(ids(2, 12), ids(2, 12, seed=1))
    assert seen == [expected] * 4


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_of_a_bf16_residual_stream_are_rounded_once(norm):
    """Their weights, which FSDP may gather in bf16, and their sums are in fp32."""
    layer = Norm(dataclasses.replace(SMALL, norm=norm), 64, norm == "layernorm")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(50, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    exact = layer(x.float())
    assert found.dtype == torch.bfloat16
    half_ulp = 2**-8 * exact.abs()  # at most, of 8 bits
    assert ((found.float() - exact).abs() <= 1.001 * half_ulp + 1e-6).all()
