"""Optimizers over a model's parameters by role."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT


def skips_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether an optimizer reads `found_inf` from the device's memory, as fused ones do for loss scaling.

    It cannot when its parameters, all in one place, are in host memory. On MPS this was never tried.
    """
    parameter = optimizer.param_groups[0]["params"][0]
    on_device = parameter.device.type == device.type != "mps"
    return on_device and getattr(optimizer, "_step_supports_amp_scaling", False)


def update_unless(skipped: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's update unless `skipped`, a scalar on the device, is 1.0; then nothing changes.

    The host waits for `skipped` only if the optimizer cannot skip on the device.
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
