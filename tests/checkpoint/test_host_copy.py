"""Copies of weights and optimizer state on the host. FSDP: machine/test_ranks.py; restored: faults/test_equal.py."""

import torch

from model import GPT, GPTConfig
from steadygpt.checkpoint.files import named_tensors
from steadygpt.machine.parallel import HostCopy
from steadygpt.machine.ranks import Ranks


def step(model, optimizer) -> None:
    tokens = torch.arange(34).view(2, 17)
    optimizer.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:])["loss"].mean().backward()
    optimizer.step()


def test_a_copy_keeps_its_values_while_training_continues_and_the_next_one_reuses_its_memory():
    model = GPT(GPTConfig(vocab_size=257, num_layers=1, num_heads=2, embd_size=16, context_length=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step(model, optimizer)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    host_copy = HostCopy(Ranks(torch.device("cpu")))
    content = host_copy.copy(model, optimizer)
    step(model, optimizer)
    assert list(content["model"]) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in content["model"].items())
    assert not torch.equal(model.wte.weight, expected["wte.weight"])
    assert content["model"]["wte.weight"] is content["model"]["lm_head.weight"]  # so the file holds it once
    places = {name: tensor.data_ptr() for name, tensor in named_tensors(content).items()}
    content = host_copy.copy(model, optimizer)
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(content).items()} == places
    assert all(torch.equal(content["model"][name], tensor) for name, tensor in model.state_dict().items())
