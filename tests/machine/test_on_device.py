"""Tests that have a meaning on each device: pytest --device cuda proves CUDA right, by default they run on the CPU.

The reference is the same model in fp64 on the CPU, so the tests can also fail there.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE, FSDP, folders, in_ranks
from ground import metrics, options_in
from harness import Run, run_to_end

from model import GPT, GPTConfig, KVCache
from optim import make_optimizer
from steadygpt.config import TrainConfig
from steadygpt.inference import scoring as scores
from steadygpt.inference.sampling import generate
from steadygpt.machine import parallel
from steadygpt.machine.device import autocast
from steadygpt.machine.ranks import Ranks

SHAPE = GPTConfig(vocab_size=257, context_length=32, num_layers=2, num_heads=2, embd_size=128)
NEOX = {"rotary_pct": 0.25, "parallel_residual": True, "tied_head": False, "activation": "gelu"}
ROTARY = {"rotary_pct": 1.0, "qk_norm": True, "bias": False, "tied_head": False}
NANOCHAT = ROTARY | {"norm": "rmsnorm_no_weight", "activation": "relu2", "logit_softcap": 15.0}
QWEN3 = ROTARY | {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 1, "head_dim": 32}
LFM3 = QWEN3 | {"layer_pattern": "CA", "attention_gate": True}
families = pytest.mark.parametrize(
    "family", [{}, NEOX, NANOCHAT, QWEN3, LFM3], ids=["gpt2", "gpt_neox", "nanochat", "qwen3", "lfm3"]
)


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ[DEVICE])


@pytest.fixture(autouse=True)
def fp32_products():
    """Multiply fp32 numbers without TF32, also after a test that allowed it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def build(device: torch.device, **changes) -> GPT:
    """Return a model with the same large weights on each device, so that its output depends on the tokens."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SHAPE, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device)


def tokens(device: torch.device, rows: int = 3, length: int = 32, seed: int = 0) -> torch.Tensor:
    numbers = torch.randint(0, SHAPE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    return numbers.to(device)


def gradients(model: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Return the loss and all gradients of one batch."""
    loss = model(tokens(device), tokens(device, seed=1))["loss"].mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the expected values.

    The logits of the padding are -inf on both sides.
    """
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    found, expected = found[found != -torch.inf], expected[expected != -torch.inf]
    return ((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    errors = [error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < tolerance, errors


# ---------------------------------------------------------------------------------------------------------------------
# the model


@families
def test_model_in_fp32_has_the_logits_and_gradients_of_fp64_on_the_cpu(device, family):
    model, reference = build(device, **family), build(torch.device("cpu"), **family).double()
    assert_close([model(tokens(device))], [reference(tokens(torch.device("cpu")))], 1e-5)
    assert_close(gradients(model, device), gradients(reference, torch.device("cpu")), 1e-4)


@pytest.mark.parametrize("family", [{}, NANOCHAT], ids=["gpt2", "nanochat"])
@pytest.mark.parametrize(("precision", "least", "most"), [("bf16", 1e-4, 3e-2), ("fp16", 1e-5, 4e-3)])
def test_model_in_reduced_precision_stays_close_to_fp32(device, family, precision, least, most):
    reference = build(device, **family)
    expected = gradients(reference, device)
    model = build(device, **family)
    with autocast(device, precision):
        found = gradients(model, device)
    assert least < error(torch.cat([g.flatten() for g in found]), torch.cat([g.flatten() for g in expected])) < most


@families
def test_model_compiled_computes_the_same(device, family):
    if device.type == "cpu":
        pytest.skip("compiling for a CPU takes too long; tests/test_train.py does it")
    expected = gradients(build(device, **family), device)
    model = build(device, **family)
    assert_close(gradients(model.compiled(), device), expected, 1e-4)


@families
@pytest.mark.parametrize("saving", [{"chunk": 20}, {"recompute": True}], ids=str)
def test_model_that_saves_memory_computes_the_same_gradients(device, family, saving):
    found = []
    for chosen in ({}, saving):
        model = build(device, dropout=0.2, **family)
        model.loss_chunk_size = chosen.get("chunk", 0)
        for block in model.h:
            block.recompute = chosen.get("recompute", False)
        torch.manual_seed(5)  # the same dropout masks
        found.append(gradients(model, device))
    assert_close(found[1], found[0], 1e-5)
    model = build(device, dropout=0.2, **family)
    torch.manual_seed(6)
    assert error(gradients(model, device)[1], found[0][1]) > 1e-2  # other masks change the gradients


@families
def test_model_with_a_cache_or_a_mask_computes_the_same(device, family):
    model, idx = build(device, **family), tokens(device, rows=2)
    with torch.no_grad():
        expected = model(idx)
        cache = KVCache(model.config)
        found = [model(idx[:, :20], cache=cache), *(model(idx[:, i : i + 1], cache=cache) for i in range(20, 32))]
        assert cache.length == 32
        assert_close(found, list(expected[:, 19:].split(1, dim=1)), 1e-5)
        causal = torch.ones(32, 32, dtype=torch.bool, device=device).tril().expand(2, 1, 32, 32)
        assert_close([model(idx, mask=causal)], [expected], 1e-5)
        blind = causal.clone()
        blind[:, :, 1:, 0] = False  # no token but the first sees the first
        assert error(model(idx, mask=blind)[:, 1:], expected[:, 1:]) > 1e-2


def test_muon_computes_the_same_as_on_the_cpu(device):
    config, models = TrainConfig(precision="fp32", optimizer="muon", max_lr=1e-2), []
    for where in (device, torch.device("cpu")):
        model = build(where, **NANOCHAT)
        optimizer = make_optimizer(model, config, Ranks(where))
        for _ in range(3):
            optimizer.zero_grad()
            gradients(model, where)
            optimizer.step()
        models.append(model)
    on_device, on_cpu = ([p.detach().cpu() for p in model.parameters()] for model in models)
    assert_close(on_device, on_cpu, 1e-3)


@families
def test_model_generates_the_text_that_fp64_generates_on_the_cpu(device, family):
    texts = []
    for model, where in ((build(device, **family), device), (build(torch.device("cpu"), **family).double(), "cpu")):
        texts.append(generate(model, tokens(where, length=4), 40, temperature=0).cpu())
    assert torch.equal(*texts)
    assert len(set(texts[0][0].tolist())) > 5


def test_model_scores_hellaswag_like_fp64_on_the_cpu(device):
    random = np.random.default_rng(0)
    questions = []
    for _ in range(12):
        context, lengths = random.integers(0, 257, 8), random.integers(3, 8, 4).tolist()
        answers = [np.append(context, random.integers(0, 257, length)) for length in lengths]
        questions.append(scores.Question(answers, lengths, 0))
        questions.append(scores.Question(answers[:1], lengths[:1], None))
    cpu = torch.device("cpu")
    expected = scores.score(build(cpu).double(), questions, Ranks(cpu))
    model = build(device)
    found = scores.score(model, questions, Ranks(device))
    assert np.abs(found - expected).max() < 1e-3
    with autocast(device, "bf16"):
        found = scores.score(model, questions, Ranks(device))
    assert 1e-4 < np.abs(found - expected).max() < 2e-2


# ---------------------------------------------------------------------------------------------------------------------
# whole runs; those that are killed, stopped or skip bad steps are in test_kill.py, test_stop.py and test_divergence.py


@pytest.fixture
def whole_run(request, device) -> None:
    """Leave tests of whole runs on a CPU to the fault storm, because other tests have such runs."""
    if device.type == "cpu" and "storm or" not in request.config.option.markexpr:
        pytest.skip("on a CPU a test of the fault storm")


def test_run_with_default_precision_and_compile_learns(workdir, device):
    flags = ["--precision", "auto", "--max_steps", "30", "--max_lr", "1e-2"]
    if device.type == "cuda":
        flags += ["--compile", "auto", "--deterministic", "off"]
    run_to_end(*flags, *folders("run"))
    losses, memory_gb = metrics("run", "loss"), metrics("run", "memory_gb")
    assert losses[29] < losses[0] - 0.5
    assert all(0 < used < 200 for used in memory_gb.values())


def test_run_moves_between_the_device_and_the_cpu(workdir, whole_run, device):
    run_to_end(*folders("reference"))
    for name, there, back in (("to the device", "cpu", device.type), ("to the CPU", device.type, "cpu")):
        run_to_end(*folders(name), "--device", there, "--checkpoint_freq", "4")
        Path(name, "latest.pt").unlink()
        run_to_end(*folders(name), "--device", back, "--resume", f"{name}/rolling_step_000004.pt")
        assert options_in(f"{name}/latest.pt").device == back
        assert metrics(f"{name}", "loss") == pytest.approx(metrics("reference", "loss"), abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# ranks


@pytest.mark.parametrize(
    ("sharding", "one_gpu"), [("ddp", False), ("fsdp", False), ("ddp", True)], ids=["ddp", "fsdp", "ddp on one GPU"]
)
def test_ranks_compute_the_same_as_one_process(workdir, whole_run, device, sharding, one_gpu):
    """With one GPU, its own process group of one rank; NCCL needs a GPU for each rank, so two ranks use gloo.

    Gathering FSDP's shards crashes gloo on a GPU (torch 2.11).
    """
    ranks = 2 if one_gpu else max(1, torch.cuda.device_count())
    if device.type == "cpu":
        if one_gpu:
            pytest.skip("ranks on a CPU always share it")
        ranks = 2
    flags = (*(FSDP if sharding == "fsdp" else ()), "--total_batch_size", str(2 * 16 * max(2, ranks)))
    run_to_end(*flags, "--sharding", "ddp", *folders("one"))
    run = Run(*flags, *folders("ranks"), ranks=ranks, one_gpu=one_gpu)
    assert set(run.wait()) == {0}, run.text()
    for key in ("loss", "grad_norm"):
        assert metrics("ranks", key) == pytest.approx(metrics("one", key), abs=2e-5), key


def test_ranks_one_process_in_ddp_has_the_same_gradients(device):
    """A process group of one rank, with NCCL on a GPU."""
    in_ranks(1, replicate_alone, device.type)


def replicate_alone(device_type: str) -> None:
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    torch.set_float32_matmul_precision("highest")
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    expected = gradients(build(device), device)
    model = build(device)
    forward = parallel.replicate(model, Ranks(device))
    loss = forward(tokens(device), tokens(device, seed=1))["loss"].mean()
    loss.backward()
    assert_close([loss, *(parameter.grad for parameter in model.parameters())], expected, 1e-5)
    dist.destroy_process_group()
