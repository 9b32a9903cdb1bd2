"""Optimizers over a model's parameters by role."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT


def skips_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer reads `found_inf` from the device's memory, as loss scaling wants it: fused ones.

    Whether those for MPS do is not known.
    """
    on_device = all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])
    return on_device and device.type != "mps" and getattr(optimizer, "_step_supports_amp_scaling", False)


def update_unless(skipped: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's update unless `skipped`, a scalar on the device, is 1.0; then nothing changes.

    Only an optimizer that cannot skip on the device has to wait for it.
    """
    if skips_on_device(optimizer, skipped.device):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()


def make_optimizer(model: "GPT", config: "TrainConfig") -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) with weight decay on matrices and embeddings, not on vectors."""
    roles = model.parameters_by_role()
    groups = [
        {"params": roles["embedding"] + roles["matrix"] + roles["head"], "weight_decay": config.weight_decay},
        {"params": roles["vector"], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=config.adam_eps, fused=True)
