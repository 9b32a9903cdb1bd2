"""The model is GPT-2: equal to its reference, padded where nobody sees it, cached without a difference."""

import dataclasses
import math

import pytest
import torch

from model import GPT, IGNORED_TARGET, GPTConfig, evaluating, sample

SMALL = GPTConfig(vocab_size=101, context_length=12, num_layers=3, num_heads=2, embd_size=16)


def small(seed=0, **changes) -> GPT:
    """A small random model with larger weights than at the start of training, so that tokens matter."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(SMALL, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def ids(rows: int, tokens: int, seed=0) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# equal to the reference


@pytest.fixture(scope="module")
def reference():
    """(ours, transformers' GPT2LMHeadModel) with the same random weights; a vocabulary that ours pads."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=1000, n_positions=64, n_embd=64, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    ours = GPT(GPTConfig(vocab_size=1000, context_length=64, num_layers=3, num_heads=4, embd_size=64))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            source = theirs.get_parameter("transformer." + name)
            source += 0.02 * torch.randn_like(source)  # biases are zero at the start: a forgotten one would not show
            if name == "wte.weight":
                parameter[:1000] = source
            else:  # theirs keeps the transposed matrix in its linear layers
                parameter.copy_(source.T if ".c_" in name and name.endswith("weight") else source)
    return ours, theirs


def test_logits_are_gpt2s(reference):
    ours, theirs = reference
    tokens = torch.randint(0, 1000, (3, 64))
    with torch.no_grad():
        assert ours(tokens).shape == (3, 64, 1000)
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)


def test_loss_and_gradients_are_gpt2s(reference):
    ours, theirs = reference
    tokens = torch.randint(0, 1000, (3, 65))
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    expected = torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        gradient = theirs.get_parameter("transformer." + name).grad
        gradient = gradient.T if ".c_" in name and name.endswith("weight") else gradient
        found = parameter.grad[:1000] if name == "wte.weight" else parameter.grad
        assert torch.allclose(found, gradient, atol=1e-5), name
    assert not ours.wte.weight.grad[1000:].any()  # the padding learns nothing


# ---------------------------------------------------------------------------------------------------------------------
# shape and start


def test_gpt2_has_124_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert model.num_parameters() == 124_439_808
    assert model.wte.weight.shape == (50304, 768)
    # 6 FLOPs a parameter that multiplies, and 12 * layers * width * context for attention
    assert model.flops_per_token() == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, embd_size=64))
    assert model(ids(4, 12), ids(4, 12, seed=1)).item() == pytest.approx(math.log(101), abs=0.05)


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, embd_size=256))
    for block in model.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.05)


def test_matrices_and_embeddings_decay_and_nothing_else():
    model = GPT(SMALL)
    decayed, others = model.optimizer_groups(0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)  # each once, the tied head too
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {"wte", "wpe", "c_attn", "c_proj", "c_fc"}
    assert all(names[id(p)].endswith("bias") or ".ln_" in "." + names[id(p)] for p in others["params"])


def test_without_bias_there_is_none():
    assert not [name for name, _ in small(bias=False).named_parameters() if name.endswith("bias")]


def test_dropout_is_for_training_only():
    model = small(dropout=0.5)
    with evaluating(model):
        assert torch.equal(model(ids(1, 12)), model(ids(1, 12)))
    assert not torch.equal(model(ids(1, 12)), model(ids(1, 12)))


# ---------------------------------------------------------------------------------------------------------------------
# forward


def test_a_token_sees_only_what_was_before_it():
    model, tokens = small(), ids(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 101
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7:], after[:, 7:])


def test_losses_one_by_one_are_those_of_the_targets_that_count():
    model, tokens, targets = small(), ids(3, 12), ids(3, 12, seed=1)
    targets[0, :5] = targets[2, 3] = IGNORED_TARGET
    logits, counts = model(tokens), targets != IGNORED_TARGET
    expected = -logits.log_softmax(-1)[counts].gather(1, targets[counts][:, None])[:, 0]
    losses = model(tokens, targets, reduction="none")
    assert losses.shape == (30,) and torch.allclose(losses, expected, atol=1e-5)
    assert torch.allclose(model(tokens, targets, reduction="sum"), losses.sum(), atol=1e-4)
    assert torch.allclose(model(tokens, targets), losses.mean(), atol=1e-5)


def test_activation_checkpointing_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        model = small(dropout=0.2)
        model.activation_checkpointing = recompute
        torch.manual_seed(5)
        model(ids(2, 12), ids(2, 12, seed=1)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# generation


@torch.no_grad()
def generate_plainly(model: GPT, idx: torch.Tensor, count: int, **options) -> torch.Tensor:
    """Everything computed anew for each token."""
    model.eval()
    for _ in range(count):
        logits = model(idx[:, -model.config.context_length :])
        idx = torch.cat([idx, sample(logits[:, -1], **options)], dim=1)
    return idx


@pytest.mark.parametrize("prompt_length", [1, 5, 12, 20])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_the_cache_changes_no_token_within_the_context_and_past_it(prompt_length, temperature):
    model, prompt = small(), ids(3, prompt_length)
    random = [torch.Generator().manual_seed(7) for _ in range(2)]
    cached = model.generate(prompt, 25, temperature, top_k=20, generator=random[0])
    plain = generate_plainly(model, prompt, 25, temperature=temperature, top_k=20, generator=random[1])
    assert cached.shape == (3, prompt_length + 25) and torch.equal(cached, plain)


def test_the_likeliest_token_is_that_of_temperature_0_and_of_top_k_1():
    model = small()
    assert torch.equal(model.generate(ids(2, 3), 8, temperature=0), model.generate(ids(2, 3), 8, top_k=1))


def test_padding_is_never_sampled():
    model = small()
    with torch.no_grad():
        model.wte.weight[101:] = 100 * model.wte.weight[:27]  # very likely, if anybody could see it
    assert model.generate(ids(8, 1), 11, temperature=5.0).max() < 101


def test_generating_disturbs_neither_the_mode_nor_the_random_state():
    model = small(dropout=0.1)
    model.train()
    state = torch.get_rng_state()
    model.generate(ids(1, 1), 5, generator=torch.Generator().manual_seed(0))
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_brings_its_model_back():
    model = small()
    checkpoint = {"model_config": dataclasses.asdict(model.config), "model": model.state_dict()}
    assert torch.equal(GPT.from_checkpoint(checkpoint)(ids(1, 4)), model(ids(1, 4)))
