"""What torch.compile makes of the model. A backend records the graphs and runs them as they are."""

import dataclasses
from functools import partial

import pytest
import torch
from conftest import in_ranks
from test_distributed import batch, sharded
from test_model import SMALL, ids, small

from model import GPT
from steadygpt.device import evaluating
from steadygpt.distributed import joined, replicate
from steadygpt.loss import IGNORED_TARGET

ROTARY = {"rotary_pct": 1.0, "qk_norm": True}


def recorded(graphs: list[str], graph: torch.fx.GraphModule, inputs) -> torch.fx.GraphModule:
    """Add the graph's code to `graphs`."""
    graphs.append("".join(part.code for part in graph.modules() if isinstance(part, torch.fx.GraphModule)))
    return graph


def test_rotations_are_looked_up_in_compiled_code():
    """Computed there, each kernel that rotates would compute cosines again, in every layer."""
    graphs: list[str] = []
    model = small(**ROTARY)
    expected = model(ids(2, 12), ids(2, 12, seed=1))
    loss = torch.compile(model, backend=partial(recorded, graphs))(ids(2, 12), ids(2, 12, seed=1))
    assert torch.allclose(loss, expected)
    (code,) = graphs
    assert code.count("scaled_dot_product_attention") == 3
    assert "rotary" in code
    assert not any(f"{function}(" in code for function in ("cos", "sin", "pow"))


@pytest.mark.parametrize("chunk_size", [8, 10], ids=["even chunks", "a shorter last chunk"])
def test_loss_in_chunks_is_compiled_chunk_by_chunk(monkeypatch, chunk_size):
    graphs: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=partial(recorded, graphs)))
    gradients, tokens, targets = [], ids(2, 12), ids(2, 12, seed=1)
    for compiled in (False, True):
        model = small(**ROTARY)
        model.loss_chunk_size = chunk_size
        (model.compiled() if compiled else model)(tokens, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))
    contents = [("attention" in code, "lm_head" in code) for code in graphs]
    assert contents == [(True, False), (False, True), (False, False)]  # blocks, full chunks of one shape, the mean


def test_tasks_with_many_numbers_of_targets_compile_no_more_graphs(monkeypatch):
    """They score the bare model. Were each number of targets compiled, compilation would soon be given up for all."""
    graphs: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=partial(recorded, graphs)))
    model, targets = small(), torch.full((2, 12), IGNORED_TARGET)
    model.loss_chunk_size = 8
    model.compiled()
    with evaluating(model):
        for number in range(24):
            targets.view(-1)[number] = 1
            assert model(ids(2, 12), targets, reduction="none").shape == (number + 1,)
    assert len(graphs) <= 1


def train_in_compiled_chunks() -> None:
    with joined("cpu") as ranks:
        losses = []
        for compiled in (False, True):
            model = sharded(ranks, 2)
            model.loss_chunk_size = 8
            loss = (model.compiled() if compiled else model)(*batch(ranks.rank))
            loss.backward()
            losses.append(
                (loss.item(), *(parameter.grad.full_tensor().norm().item() for parameter in model.parameters()))
            )
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def compile_without_a_compiler() -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")
    train_in_compiled_chunks()


def test_sharded_models_compile_the_loss_in_chunks():
    in_ranks(2, compile_without_a_compiler)


def count_graphs_under_ddp() -> None:
    graphs: list[str] = []
    with joined("cpu") as ranks:
        shape = dataclasses.replace(SMALL, num_layers=6, num_heads=12, embd_size=768)
        model = GPT(shape, initialize=False)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        forward = replicate(torch.compile(model, backend=partial(recorded, graphs)), ranks)
        forward(ids(1, 12), ids(1, 12, seed=1))
        assert len(graphs) == 3, len(graphs)  # of 170 MB of gradients; 7 with buckets of 25 MB, the default


def test_ddp_cuts_compiled_models_into_few_graphs():
    """Every cut stores the residual stream in fp32."""
    in_ranks(2, count_graphs_under_ddp)
