"""Choices that are functions: each table's keys are the choices of an option, so that none is half added."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

# ---------------------------------------------------------------------------------------------------------------------
# --activation


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute the approximation of GELU that GPT-2 uses (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """Compute ReLU squared (So et al. 2021)."""
    x = F.relu(x)
    return x * x  # not x.square(), which autocast computes in fp32


def swiglu(x: Tensor) -> Tensor:
    """Compute SwiGLU (Shazeer 2020): the first half of the features, as SiLU, times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Activation(NamedTuple):
    """Of an MLP: from (..., matrices * F) to (..., F)."""

    function: Callable[[Tensor], Tensor]
    matrices: int = 1  # before it, in one weight


ACTIVATIONS = {
    "gelu_tanh": Activation(gelu_tanh),
    "gelu": Activation(F.gelu),
    "relu2": Activation(relu2),
    "swiglu": Activation(swiglu, matrices=2),
}

# ---------------------------------------------------------------------------------------------------------------------
# --norm


class NormKind(NamedTuple):
    """What the norms of a model compute."""

    is_layernorm: bool = False  # with the mean subtracted, and a bias if the model has biases; otherwise RMSNorm
    has_weight: bool = True
    of_embedding: bool = False  # also normalizes the embedding


NORMS = {
    "layernorm": NormKind(is_layernorm=True),
    "rmsnorm": NormKind(),
    "rmsnorm_no_weight": NormKind(has_weight=False, of_embedding=True),
}

# ---------------------------------------------------------------------------------------------------------------------
# --schedule


def half_cosine(progress: float) -> float:
    """Return what is left of the learning rate after a part of its decay (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def line(progress: float) -> float:
    """Return what is left of the learning rate after a part of its cool-down (Hu et al. 2024)."""
    return 1 - progress


class Decay(NamedTuple):
    """How the learning rate falls from max_lr to min_lr."""

    left: Callable[[float], float]  # part of the decay that is over -> part of max_lr - min_lr that is left
    part: float = 1.0  # of the run's steps, its last ones
    cools_down: bool = False  # --cooldown is this part, and stable.pt is saved before it


SCHEDULES = {
    "cosine": Decay(half_cosine),
    "wsd": Decay(line, cools_down=True),
    "constant": Decay(line, part=0.0),
}
