"""Optimizers over a model's parameters by role."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT


def make_optimizer(model: "GPT", config: "TrainConfig") -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) with weight decay on matrices and embeddings, not on vectors."""
    roles = model.parameters_by_role()
    groups = [
        {"params": roles["embedding"] + roles["matrix"] + roles["head"], "weight_decay": config.weight_decay},
        {"params": roles["vector"], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=config.adam_eps, fused=True)
