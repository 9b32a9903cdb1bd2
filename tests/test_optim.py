"""Muon: what it computes, which parameters it moves, and how ranks share its work."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from conftest import in_ranks

import optim
from model import GPT, GPTConfig
from optim import OPTIMIZERS, Muon, make_optimizer, newton_schulz, orthogonalized, state_shapes
from steadygpt.config import FIELDS, TrainConfig
from steadygpt.machine.ranks import Ranks, joined

ALONE = Ranks(torch.device("cpu"))
SMALL = GPTConfig(
    vocab_size=101, context_length=12, num_layers=2, num_heads=4, num_kv_heads=2, embd_size=16, activation="swiglu"
)
TOKENS = torch.arange(24).view(2, 12)
MUON = TrainConfig(precision="fp32", optimizer="muon", weight_decay=0.1, max_lr=1e-2, muon_lr=0.02)


def muon_of(model: torch.nn.Module, parts: list[tuple[int, ...]], precision: str = "fp32", **options) -> Muon:
    group = {"params": list(model.parameters()), "parts": parts, "momentum": 0.95, "beta2": 0.0, "lr_ratio": 1.0}
    return Muon([group | options], ALONE, precision, lr=0.1, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4)])
def test_newton_schulz_makes_all_singular_values_about_one(shape):
    torch.manual_seed(0)
    (matrix,) = orthogonalized([torch.randn(shape)], ALONE)
    assert matrix.shape == shape
    singular_values = torch.linalg.svdvals(matrix)
    assert singular_values.min() > 0.6 and singular_values.max() < 1.25
    assert not newton_schulz(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8)])
def test_the_update_of_one_matrix_is_that_of_pytorchs_muon(shape):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(*shape, bias=False), torch.nn.Linear(*shape, bias=False)
    theirs.load_state_dict(ours.state_dict())
    ours_optimizer = muon_of(ours, [ours.weight.shape[:1]], "bf16")
    torch_optimizer = torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        ours.weight.grad = theirs.weight.grad = torch.randn_like(ours.weight)
        ours_optimizer.step()
        torch_optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=0.02)  # both round to bf16
    moments = ours_optimizer.state[ours.weight], torch_optimizer.state[theirs.weight]
    assert torch.equal(*(state["momentum_buffer"] for state in moments))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_two_updates_of_a_matrix_are_those_of_the_formula(shape):
    """Each number alone: rate, decay, momentum with Nesterov's step, and the factor of a tall matrix."""
    torch.manual_seed(0)
    rows, columns = shape
    module = torch.nn.Linear(columns, rows, bias=False)
    weight = module.weight.detach().clone()
    optimizer = muon_of(module, [(rows,)], lr=0.05, weight_decay=0.2, momentum=0.8)
    average = torch.zeros(shape)
    for _ in range(2):
        gradient = torch.randn(shape)
        module.weight.grad = gradient.clone()
        optimizer.step()
        average = 0.8 * average + 0.2 * gradient
        momentum = 0.2 * gradient + 0.8 * average
        matrix = momentum if rows <= columns else momentum.mT
        [direction] = newton_schulz(matrix[None])
        direction = direction if rows <= columns else direction.mT
        weight = weight * (1 - 0.05 * 0.2) - 0.05 * math.sqrt(max(1, rows / columns)) * direction
        assert torch.allclose(module.weight, weight, rtol=1e-5, atol=1e-6)


def test_the_matrices_of_one_shape_are_one_batch_over_all_layers(monkeypatch):
    batches = []
    monkeypatch.setattr(optim, "newton_schulz", lambda x: batches.append(tuple(x.shape)) or x)
    model = GPT(SMALL)
    model(TOKENS, TOKENS)["loss"].mean().backward()
    make_optimizer(model, MUON, ALONE).step()
    # In each layer q and attention's projection; k and v; gate, up and down.
    assert sorted(batches) == [(2 * 2, 8, 16), (2 * 2, 16, 16), (2 * 3, 16, SMALL.resolved().intermediate_size)]


def test_stacked_matrices_are_orthogonalized_apart():
    torch.manual_seed(0)
    gradient, stacked = torch.randn(12, 6), torch.nn.Linear(6, 12, bias=False)
    apart = [torch.nn.Linear(6, rows, bias=False) for rows in (6, 3, 3)]
    for part, linear in zip(stacked.weight.split([6, 3, 3]), apart, strict=True):
        linear.weight.data.copy_(part)
    stacked.weight.grad = gradient
    muon_of(stacked, [(6, 3, 3)]).step()
    for grad, linear in zip(gradient.split([6, 3, 3]), apart, strict=True):
        linear.weight.grad = grad
        muon_of(linear, [linear.weight.shape[:1]]).step()
    assert torch.allclose(stacked.weight, torch.cat([linear.weight for linear in apart]), atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_normuon_divides_the_update_of_each_neuron_by_its_root_mean_square(shape):
    """Computed here one neuron after the other. The neurons are the rows of a tall matrix, else the columns."""
    torch.manual_seed(0)
    rows, columns = shape
    plain, ours = (torch.nn.Linear(columns, rows, bias=False) for _ in range(2))
    optimizers = muon_of(plain, [(rows,)], weight_decay=0.0), muon_of(ours, [(rows,)], weight_decay=0.0, beta2=0.9)
    mean_squares = [0.0] * max(shape)
    for step in range(3):
        plain.weight.grad = ours.weight.grad = torch.randn(shape) * torch.rand(shape)
        before = plain.weight.clone(), ours.weight.clone()
        for optimizer in optimizers:
            optimizer.step()
        update, found = before[0] - plain.weight, before[1] - ours.weight
        neurons = list(update if rows > columns else update.T)
        for i, neuron in enumerate(neurons):
            mean_squares[i] = 0.9 * mean_squares[i] + 0.1 * neuron.square().mean().item()
        expected = torch.stack([neuron / mean**0.5 for neuron, mean in zip(neurons, mean_squares, strict=True)])
        expected *= update.norm() / expected.norm()
        assert torch.allclose(found, expected if rows > columns else expected.T, rtol=1e-3, atol=1e-6), step
    assert ours.weight.ndim == 2 and not torch.allclose(found, update, rtol=0.01)
    kept = optimizers[1].state[ours.weight]["mean_squares"] * (0.1**2 * max(1, rows / columns))  # as in the update
    assert kept.tolist() == pytest.approx(mean_squares, rel=1e-3)


def test_neurons_without_gradients_stay():
    linear = torch.nn.Linear(4, 8, bias=False)
    before = linear.weight.clone()
    linear.weight.grad = torch.randn(8, 4) * torch.tensor([1.0] * 7 + [0.0])[:, None]
    muon_of(linear, [(8,)], weight_decay=0.0, beta2=0.9).step()
    assert torch.equal(linear.weight[7], before[7]) and linear.weight.isfinite().all()
    linear.weight.grad = torch.zeros(8, 4)
    muon_of(linear, [(8,)], weight_decay=0.0, beta2=0.9).step()
    assert linear.weight.isfinite().all()


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = GPT(SMALL)
    optimizer = make_optimizer(model, MUON, ALONE)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw, vectors, muon = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert adamw == ["wte.weight", "wpe.weight"]
    assert sorted(adamw + vectors + muon) == sorted(names.values())
    assert muon[:4] == [f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert optimizer.param_groups[2]["parts"][:4] == [(16, 8, 8), (16,), (48, 48), (16,)]
    assert [group["lr_ratio"] for group in optimizer.param_groups] == [1.0, 1.0, 2.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    model(TOKENS, TOKENS)["loss"].mean().backward()
    optimizer.step()
    kinds = {names[id(p)]: set(state) for p, state in optimizer.state.items()}
    assert {tuple(sorted(kinds[name])) for name in muon} == {("momentum_buffer",)}
    assert {tuple(sorted(kinds[name])) for name in adamw + vectors} == {("exp_avg", "exp_avg_sq", "step")}


@pytest.mark.parametrize(("at_once", "expected"), [(6144 - 1, [7, 1]), (1, [1] * 8)])
def test_gathering_in_chunks_changes_nothing(monkeypatch, at_once, expected):
    update, batches = Muon._update, []

    def trained(numbers_at_once: int) -> list[torch.Tensor]:
        monkeypatch.setattr(optim, "MAX_GATHERED", numbers_at_once)
        batches.clear()
        torch.manual_seed(0)
        model = GPT(SMALL)
        optimizer = make_optimizer(model, MUON, ALONE)
        model(TOKENS, TOKENS)["loss"].mean().backward()
        optimizer.step()
        return [*model.parameters()]

    monkeypatch.setattr(Muon, "_update", lambda *a, **kw: (batches.append(len(a[1])), update(*a, **kw))[1])
    whole = trained(10**9)
    assert batches == [8]
    assert all(map(partial(torch.allclose, atol=1e-6), whole, trained(at_once)))
    assert batches == expected


def compare_with_one_rank() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(shape).bfloat16() for shape in [(4, 4), (4, 8), (4, 4), (8, 4), (4, 4)]]
    with joined("cpu") as ranks:
        for found, expected in zip(orthogonalized(matrices, ranks), orthogonalized(matrices, ALONE), strict=True):
            assert torch.allclose(found, expected, atol=0.02)


def test_ranks_share_the_matrices_and_all_get_all_results():
    in_ranks(3, compare_with_one_rank)


@pytest.mark.parametrize("optimizer", FIELDS["optimizer"].metadata["choices"])
def test_state_shapes_are_those_that_an_optimizer_keeps(optimizer):
    """With a beta2: test_contract.py."""
    model = GPT(SMALL)
    made = make_optimizer(model, dataclasses.replace(MUON, optimizer=optimizer), ALONE)
    model(TOKENS, TOKENS)["loss"].mean().backward()
    made.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {f"{names[p]}.{kind}": t for p, state in made.state.items() for kind, t in state.items()}
    assert {t.dtype for t in kept.values()} == {torch.float32}
    shapes = state_shapes(model.config, optimizer).items()
    assert {name: tuple(t.shape) for name, t in kept.items()} == {n: s for n, s in shapes if "mean_squares" not in n}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_gradients_vectors_stay_and_all_others_decay(name):
    model = GPT(dataclasses.replace(SMALL, bias=True, tied_head=False, activation="swiglu"))
    config = TrainConfig(optimizer=name, weight_decay=0.1, max_lr=0.2, muon_lr=0.3, muon_beta2=0.9)
    optimizer = make_optimizer(model, config, ALONE)
    decay = {}
    for group in optimizer.param_groups:
        group["lr"] = config.max_lr * group["lr_ratio"]
        decay |= dict.fromkeys(group["params"], 1 - 0.1 * group["lr"])
    before = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for role, parameters in model.parameters_by_role().items():
        for parameter in parameters.values():
            factor = 1 if role == "vector" else decay[parameter]
            assert factor == 1 or factor < 0.99
            assert torch.allclose(parameter, factor * before[parameter], rtol=1e-6, atol=0), role


@pytest.mark.parametrize(("groups", "wrong"), [
    (["vector", "matrix", "head"], "wte.weight"), (["vector", "embedding", "matrix", "head", "head"], "lm_head.weight"),
])  # fmt: skip
def test_an_optimizer_without_a_parameter_or_with_one_twice_is_refused(monkeypatch, groups, wrong):
    """Its gradient would be counted in the norm that clips all others, and never be reset."""

    def make(model, *_):
        roles = model.parameters_by_role()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.param_groups = [{"params": list(roles[role].values())} for role in groups]
        return optimizer

    monkeypatch.setitem(OPTIMIZERS, "adamw", make)
    with pytest.raises(ValueError, match=rf"^adamw: .* {wrong}$"):
        make_optimizer(GPT(dataclasses.replace(SMALL, tied_head=False)), TrainConfig(), ALONE)


def test_a_state_that_checkpoints_cannot_hold_is_refused_before_training(monkeypatch):
    class Half(torch.optim.AdamW):
        def step(self):
            super().step()
            for state in self.state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()

    monkeypatch.setitem(OPTIMIZERS, "adamw", lambda model, *_: Half(model.parameters()))
    with pytest.raises(TypeError, match=r"^adamw: .*\bexp_avg\b.*\bwte\.weight\b.*\bfp32\b"):
        state_shapes(dataclasses.replace(SMALL, context_length=11), "adamw")
