"""Weights and optimizer state on the device and on the host. FSDP: tests/machine/test_ranks.py."""

import torch

from model import GPT, GPTConfig
from steadygpt.checkpoint.files import named_tensors
from steadygpt.checkpoint.host_copy import HostCopy, fill, restore_optimizer
from steadygpt.machine.ranks import Ranks

RANKS = Ranks(torch.device("cpu"))
SMALL = GPTConfig(vocab_size=257, num_layers=1, num_heads=2, embd_size=16, context_length=16)


def model_and_optimizer(seed: int, steps: int = 0):
    torch.manual_seed(seed)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=seed / 10, fused=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    tokens = torch.arange(34).view(2, 17)
    optimizer.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()


def test_a_copy_keeps_its_values_while_training_continues_and_the_next_one_reuses_its_memory():
    model, optimizer = model_and_optimizer(0, steps=2)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    host_copy = HostCopy(RANKS)
    content = host_copy.start(model, optimizer)
    step(model, optimizer)
    assert host_copy.copied is None  # on a CPU there is nothing to wait for
    assert list(content["model"]) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in content["model"].items())
    assert not torch.equal(model.wte.weight, expected["wte.weight"])
    assert content["model"]["wte.weight"] is content["model"]["lm_head.weight"]  # so the file holds it once
    places = {name: tensor.data_ptr() for name, tensor in named_tensors(content).items()}
    content = host_copy.start(model, optimizer)
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(content).items()} == places
    assert all(torch.equal(content["model"][name], tensor) for name, tensor in model.state_dict().items())


def test_a_restored_run_continues_as_the_first_one():
    model, optimizer = model_and_optimizer(1, steps=2)
    content = HostCopy(RANKS).start(model, optimizer)
    other, other_optimizer = model_and_optimizer(3)
    fill(other, content["model"].__getitem__, RANKS)
    restore_optimizer(other, other_optimizer, content["optimizer"], RANKS)
    assert other_optimizer.param_groups[0]["weight_decay"] == 0.3  # options are the new run's
    other_optimizer.param_groups[0]["weight_decay"] = 0.1
    step(model, optimizer)
    step(other, other_optimizer)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
