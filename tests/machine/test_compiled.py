"""What torch.compile makes of the model. A backend records the graphs and runs them as they are."""

from functools import partial

import pytest
import torch
from conftest import in_ranks
from test_model import ids, small
from test_ranks import batch, sharded

from steadygpt.machine.device import evaluating
from steadygpt.machine.ranks import joined

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
    assert torch.allclose(loss["loss"], expected["loss"])
    (code,) = graphs
    assert code.count("scaled_dot_product_attention") == 3
    assert "rotary" in code
    assert not any(f"{function}(" in code for function in ("cos", "sin", "pow"))


@pytest.mark.parametrize(("pattern", "layers"), [("A", 3), ("CA", 1), ("C", 0)])
def test_short_rows_of_bf16_on_a_cpu_are_one_graph(pattern, layers):
    """Their attention is computed in blocks of queries."""
    graphs: list[str] = []
    model = small(layer_pattern=pattern)
    compiled = torch.compile(model, backend=partial(recorded, graphs))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(ids(2, 12), ids(2, 12, seed=1))["loss"].mean().backward()
    (code,) = graphs
    assert code.count(".softmax(") == layers
    assert "scaled_dot_product_attention" not in code


def test_loss_in_chunks_is_compiled_chunk_by_chunk(monkeypatch):
    graphs: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=partial(recorded, graphs)))
    gradients, tokens, targets = [], ids(2, 12), ids(2, 12, seed=1)
    for compiled in (False, True):
        model = small(**ROTARY)
        model.loss_chunk_size = 10  # of 24 tokens: two full chunks, and a shorter one that is not compiled
        (model.compiled() if compiled else model)(tokens, targets)["loss"].mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))
    contents = [("attention" in code, "lm_head" in code) for code in graphs]
    assert contents == [(True, False), (False, True)]  # blocks, full chunks of one shape


def test_tasks_with_many_numbers_of_targets_compile_no_more_graphs(monkeypatch):
    """They score the bare model. Were each number of targets compiled, compilation would soon be given up for all."""
    graphs: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=partial(recorded, graphs)))
    model, is_target = small(), torch.zeros(2, 12, dtype=torch.bool)
    positions, mask = torch.arange(12).expand(2, 12), torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    model.loss_chunk_size = 8
    model.compiled()
    with evaluating(model):
        for number in range(24):
            is_target.view(-1)[number] = True
            scores = model.answer_scores(ids(2, 12), ids(2, 12), is_target, positions, mask)
            assert scores.shape == (number + 1, 2)
    assert len(graphs) <= 1


def compile_shards() -> None:
    graphs: list[str] = []
    torch.compile = partial(torch.compile, backend=partial(recorded, graphs))
    with joined("cpu") as ranks:
        for recompute in (False, True):
            found = []
            for compiled in (False, True):
                model = sharded(ranks, 1, recompute=recompute)
                model.loss_chunk_size = 8
                loss = (model.compiled() if compiled else model)(*batch(ranks.rank))["loss"].mean()
                loss.backward()
                norms = (parameter.grad.full_tensor().norm().item() for parameter in model.parameters())
                found.append([loss.item(), *norms])
            assert found[1] == pytest.approx(found[0], rel=1e-5)
            attentions = [code.count("scaled_dot_product_attention") for code in graphs]
            assert attentions.count(1) == 1, attentions  # one graph of a block, which all blocks share
            graphs.clear()
            torch._dynamo.reset()


@pytest.mark.storm
def test_sharded_models_compile_their_blocks_and_the_loss_in_chunks():
    in_ranks(1, compile_shards)
