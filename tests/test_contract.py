"""What each value of each option of the block must keep: a new option needs values here and no test of its own."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_ranks
from ground import weights_content
from test_model import SMALL, ids, small

from convert_hf import write_folder
from model import ACTIVATIONS, GPT, TABLES, Attention, GPTConfig, KVCache, sketch_of
from optim import make_optimizer, state_shapes
from steadygpt.base.options import UserError
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.convert.weights import load_model, read_weights
from steadygpt.inference.scoring import Question, score
from steadygpt.machine.device import evaluating
from steadygpt.machine.parallel import fill, shard_model
from steadygpt.machine.ranks import Ranks, joined

ALONE = Ranks(torch.device("cpu"))
SIZES = {"vocab_size", "num_layers", "num_heads", "embd_size", "context_length"}  # of every test
VALUES = {
    "num_kv_heads": [1], "head_dim": [12], "intermediate_size": [24], "bias": [False],
    "norm": ["rmsnorm", "rmsnorm_no_weight"], "norm_eps": [1e-3], "qk_norm": [True], "activation": [*ACTIVATIONS],
    "attention_gate": [True], "layer_pattern": ["CA", "AACC", "C"],
    "rotary_pct": [0.25, 1.0], "rotary_base": [500.0], "parallel_residual": [True], "tied_head": [False],
    "logit_softcap": [2.0], "dropout": [0.1],
}  # fmt: skip
SHAPES = [{name: value} for name, values in VALUES.items() for value in values]
SHAPES += [
    {"rotary_pct": 0.25, "parallel_residual": True, "tied_head": False, "activation": "gelu"},  # GPT-NeoX
    {"norm": "rmsnorm", "qk_norm": True, "rotary_pct": 1.0, "activation": "swiglu", "bias": False, "num_kv_heads": 1},
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.items())))
LONGEST = max(map(len, VALUES.values()))
MIXED = [{name: values[i % len(values)] for name, values in VALUES.items()} for i in range(LONGEST)]  # each value
each_mixture = pytest.mark.parametrize("shape", [{}, *MIXED, *SHAPES[-2:]])


def test_each_option_of_the_shape_has_values_here():
    assert {*VALUES} == {f.name for f in dataclasses.fields(GPTConfig)} - SIZES
    choices = {name: {*FIELDS[name].metadata["choices"]} for name in VALUES if FIELDS[name].metadata["choices"]}
    assert all(options <= {*VALUES[name], FIELDS[name].default} for name, options in choices.items())


@each_mixture
def test_a_cache_computes_the_same(shape):
    model, tokens = small(**shape).eval(), ids(2, 12)
    cache = KVCache(model.config)
    with torch.no_grad():
        expected = model(tokens)
        found = [model(tokens[:, :5], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(5, 12))]
    assert torch.allclose(torch.cat(found, 1), expected[:, 4:], atol=1e-5)


@each_mixture
def test_endings_of_a_tree_are_scored_as_alone(shape):
    model, answers = small(**shape), [np.array([1, 2, 3, *ending]) for ending in ([4, 5], [6], [7, 8, 9])]
    [scores] = score(model, [Question(answers, [2, 1, 3], 0)], ALONE)
    with evaluating(model):
        for answer, (loss, _) in zip(answers, scores, strict=True):
            tokens = torch.from_numpy(answer)[None]
            found = model(tokens[:, :-1], tokens[:, 1:])["loss"][2:].sum()
            assert found.item() == pytest.approx(loss, rel=1e-5)


def gradients(model: GPT, answers: bool = False) -> list[torch.Tensor]:
    """Return the losses of tokens or answers, and the gradients of their sum, with the same dropout in each call."""
    tokens, targets = ids(3, 12), ids(3, 12, seed=1)
    torch.manual_seed(0)
    if answers:
        is_target, positions = ids(3, 12, seed=2) % 3 > 0, torch.arange(12).expand(3, 12)
        losses = model.answer_scores(tokens, targets, is_target, positions, torch.ones(3, 1, 12, 12).bool().tril())
    else:
        losses = model(tokens, targets)["loss"]
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert all(torch.allclose(one, other, atol=1e-5, rtol=1e-4) for one, other in zip(expected, found, strict=True))


LOSSES = [({}, False), *((shape, False) for shape in MIXED), ({"logit_softcap": 2.0}, False), ({}, True)]


@pytest.mark.parametrize(("shape", "answers"), LOSSES)
def test_the_loss_in_chunks_and_with_recomputed_blocks_is_the_loss(shape, answers):
    """Some of these chunks are smaller than others."""
    expected = gradients(small(**shape), answers)
    for chunk_size, recompute in ((7, False), (1, False), (36, True), (100, False)):
        model = small(**shape)
        model.loss_chunk_size = chunk_size
        for block in model.h:
            block.recompute = recompute
        assert_equal(expected, gradients(model, answers))


def compare_shards() -> None:
    with joined("cpu") as ranks:
        for shape in ({}, *MIXED):
            whole = small(**shape | {"dropout": 0.0})
            with torch.device("meta"):
                model = GPT(whole.config, initialize=False)
            shard_model(model, model.h, ranks, 2, "fp32")
            model.fill_rotary(ranks.device)
            fill(model, whole.state_dict().__getitem__, ranks)
            found, expected = gradients(model), gradients(whole)
            assert_equal(expected, [found[0], *(gradient.full_tensor() for gradient in found[1:])])


def test_shards_on_two_ranks_compute_the_same():
    in_ranks(2, compare_shards)


def rows_of(model: GPT, name: str) -> int:
    """Return the rows of a parameter that are no padding of the vocabulary."""
    return model.config.vocab_size if name in TABLES else len(model.get_parameter(name))


@each_mixture
def test_each_parameter_has_a_role_a_state_and_flops_if_it_is_multiplied(shape):
    model = GPT(dataclasses.replace(SMALL, **shape))
    roles = model.parameters_by_role()
    assert sorted(id(p) for role in roles.values() for p in role.values()) == sorted(id(p) for p in model.parameters())
    multiplied = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda linear, *_: multiplied.update({linear.weight: linear}))
    model(ids(1, 1))
    sizes = {p: p[: rows_of(model, name)].numel() for name, p in model.named_parameters()}
    layers = sum(isinstance(module, Attention) for module in model.modules())
    attention = 12 * layers * model.config.num_heads * model.config.resolved().head_dim * 12
    vectors = roles["vector"].values()
    products = sum(size for p, size in sizes.items() if p in multiplied or any(p is vector for vector in vectors))
    assert model.flops_per_token() == 6 * products + attention, "change flops_per_token, or what is expected here"
    assert model.num_parameters() == sum(sizes.values())
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", max_lr=0.1, muon_beta2=0.9), ALONE)
    for _ in range(2):  # a head that is zero passes no gradient on
        model(ids(2, 12), ids(2, 12, seed=1))["loss"].mean().backward()
        optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {f"{names[p]}.{kind}": tuple(t.shape) for p, kept in optimizer.state.items() for kind, t in kept.items()}
    assert found == state_shapes(model.config, "muon")
    for of, parameter in model.named_parameters():
        rows = rows_of(model, of)
        assert parameter[:rows].any() and not parameter[rows:].any(), of  # the padding of a vocabulary stays zero


@each_shape
def test_an_export_is_refused_or_exact(shape, tmp_path):
    model = small(**shape)
    for name, parameter in model.named_parameters():
        parameter.data[rows_of(model, name) :] = 0
    content = weights_content(model.state_dict(), model.config, tokenizer="")
    try:
        write_folder(content, Path(tmp_path, "out"))
    except UserError as error:
        assert any(f" {name} " in str(error) for name in shape) and "generate.py" in str(error)
        return
    imported = load_model(read_weights(str(tmp_path / "out"))).eval()
    assert sketch_of(imported.config).num_parameters() >= model.num_parameters()  # missing biases are zeros
    with torch.no_grad():
        assert torch.equal(imported(ids(2, 12)), model.eval()(ids(2, 12)))


def test_a_parameter_of_an_unknown_module_has_no_role():
    model = small()
    model.h[0].mlp.gate = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(TypeError, match=r"^h\.0\.mlp\.gate\.weight: .*\bBilinear\b"):
        model.parameters_by_role()
