"""Learning rate schedules, and AdamW and Muon (optionally NorMuon) over parameters grouped by role."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT, GPTConfig, sketch_of
from steadygpt.base.options import option
from steadygpt.machine.parallel import full_tensor, local_parts
from steadygpt.machine.ranks import Ranks

Stacked = list[tuple[nn.Parameter, tuple[int, ...]]]  # parameters, each with the rows of the matrices it stacks
# Repeated five times, this odd polynomial maps all but the smallest singular values to 0.7..1.2 (Jordan et al. 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MUON_MOMENTUM = 0.85  # in runs of up to 3,000 steps, 0.95 ends higher and a rising momentum no lower: docs/LOG.md
ADAM_EPS = 1e-8
TINY = 1e-10  # floor of mean squares; below it a neuron had no gradient
MAX_GATHERED = 2**27  # most elements gathered at once under FSDP; a larger matrix is gathered alone

_optim = partial(option, group="optimization")
_recipe = partial(_optim, on_resume="ask")  # options of the update, which a resume must not change by accident

# ---------------------------------------------------------------------------------------------------------------------
# the learning rate


def cosine(config: "OptimConfig", step: int) -> float:
    """Return a learning rate that falls to min_lr along half a cosine (Loshchilov and Hutter 2017)."""
    left = 0.5 * (1 + math.cos(math.pi * progress(config, step, config.warmup_steps)))
    return config.min_lr + left * (config.max_lr - config.min_lr)


def wsd(config: "OptimConfig", step: int) -> float:
    """Return a learning rate that stays at max_lr, then falls linearly to min_lr (Hu et al. 2024)."""
    left = 1 - progress(config, step, cooldown_start(config))
    return config.min_lr + left * (config.max_lr - config.min_lr)


def constant(config: "OptimConfig", step: int) -> float:
    return config.max_lr


def progress(config: "OptimConfig", step: int, start: int) -> float:
    """Return the fraction of the steps from `start` to the end of the run that is done, 0 to 1."""
    return min(1.0, max(0, step - start) / max(1, config.max_steps - start))


class Schedule(NamedTuple):
    """The learning rate after the warm-up."""

    rate: Callable[["OptimConfig", int], float]  # options, step -> learning rate
    cools_down: bool = False  # over the last --cooldown of the steps; stable.pt is saved just before


SCHEDULES = {  # the choices of --schedule
    "cosine": Schedule(cosine),
    "wsd": Schedule(wsd, cools_down=True),
    "constant": Schedule(constant),
}


def cooldown_start(config: "OptimConfig") -> int:
    """Return the first step of the cool-down, if the schedule cools_down."""
    return max(config.warmup_steps, config.max_steps - round(config.cooldown * config.max_steps))


def learning_rate(config: "OptimConfig", step: int) -> float:
    """Return the learning rate of a step. It rises linearly to max_lr, then follows --schedule."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    return SCHEDULES[config.schedule].rate(config, step)


def set_rates(optimizer: torch.optim.Optimizer, config: "OptimConfig", step: int) -> float:
    """Set the learning rate of each parameter group for a step, and return the schedule's.

    Other group values that depend on the step, such as "weight_decay" or Muon's "momentum", belong here too.
    """
    lr = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    return lr


# ---------------------------------------------------------------------------------------------------------------------
# the optimizers


def make_adamw(model: GPT, config: "OptimConfig", ranks: Ranks, precision: str) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(adamw_groups(model, "embedding", "matrix", "head"), **adamw_options(model, config))


def make_muon(model: GPT, config: "OptimConfig", ranks: Ranks, precision: str) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the blocks and AdamW for the rest."""
    named = model.parameters_by_role()["matrix"]
    matrices = {
        "params": list(named.values()),
        "lr_ratio": config.muon_lr / config.max_lr,
        "parts": [model.config.parts(name) for name in named],
        "momentum": MUON_MOMENTUM,
        "beta2": config.muon_beta2,
    }
    groups = [*adamw_groups(model, "embedding", "head"), matrices]
    return Muon(groups, ranks, precision, **adamw_options(model, config))


def adamw_groups(model: GPT, *decayed: str) -> list[dict[str, Any]]:
    """Return a group of the roles that have weight decay, and a group of the vectors, which have none."""
    roles = model.parameters_by_role()
    with_decay: list[nn.Parameter] = []
    for role in decayed:
        with_decay += roles[role].values()
    return [
        {"params": with_decay},
        {"params": list(roles["vector"].values()), "weight_decay": 0.0},
    ]


def adamw_options(model: GPT, config: "OptimConfig") -> dict[str, Any]:
    return {
        "lr": config.max_lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": ADAM_EPS,
        "weight_decay": config.weight_decay,
        "fused": not model.wte.weight.is_meta,  # on which state_shapes() takes a step
    }


OPTIMIZERS = {"adamw": make_adamw, "muon": make_muon}  # the choices of --optimizer


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its rates and their schedule."""

    # fmt: off
    optimizer: str = _optim("adamw", "adamw, or muon for the matrices of the blocks",
                            choices=tuple(OPTIMIZERS), on_resume="never")
    max_lr: float = _recipe(1e-3, "peak learning rate, after the warm-up")
    min_lr: float = _recipe(1e-4, "learning rate at the end of the decay")
    schedule: str = _recipe("cosine", "after the warm-up: cosine, constant, or wsd: stable, then a cool-down",
                            choices=tuple(SCHEDULES))
    cooldown: float = _recipe(0.4, "fraction of the steps in wsd's cool-down", at_most=1)
    warmup_steps: int = _recipe(-1, "steps of linear warm-up; -1 = 715, at most a tenth of the run", at_least=-1)
    muon_lr: float = _recipe(0.01, "peak learning rate of Muon, on the same schedule", at_least=1e-20)
    muon_beta2: float = _recipe(0.0, "beta2 of NorMuon; 0 = off", at_most=0.9999)
    weight_decay: float = _recipe(0.1, "weight decay of matrices and embeddings")
    adam_beta1: float = _recipe(0.9, "beta1 of AdamW", at_most=0.9999)
    adam_beta2: float = _recipe(0.95, "beta2 of AdamW", at_most=0.999999)
    grad_clip: float = _recipe(1.0, "maximum gradient norm; 0 = no clipping")
    max_steps: int = option(0, "steps of the run; 0 = num_epochs * steps_per_epoch", group="steps")
    # fmt: on

    @property
    def cools_down(self) -> bool:
        """Whether the schedule ends with a cool-down."""
        return SCHEDULES[self.schedule].cools_down


def make_optimizer(model: GPT, config: OptimConfig, ranks: Ranks, precision: str = "fp32") -> torch.optim.Optimizer:
    """Return the optimizer of a configuration.

    Matrices and embedding tables have weight decay, vectors have none. A group's learning rate is the schedule's times
    its "lr_ratio", which is 1 by default.

    Args:
        ranks: share the work of Muon.
        precision: of the run, see Muon.

    Raises: ValueError unless each parameter is in exactly one group.
    """
    optimizer = OPTIMIZERS[config.optimizer](model, config, ranks, precision)
    names = {parameter: name for name, parameter in model.named_parameters()}
    times = Counter[nn.Parameter]()
    for group in optimizer.param_groups:
        times.update(group["params"])
        group.setdefault("lr_ratio", 1.0)
    wrong = [name for parameter, name in names.items() if times[parameter] != 1]
    if wrong:
        raise ValueError(
            f"{config.optimizer}: expected each parameter in one group of the optimizer, but not so {wrong[0]}"
        )
    return optimizer


@cache
def state_shapes(shape: GPTConfig, optimizer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the optimizer's state, by PARAMETER.KIND, from one step on the meta device.

    Raises: TypeError if the state has anything but fp32 tensors, which is all that checkpoints hold.
    """
    model = sketch_of(shape)
    config = OptimConfig(optimizer, muon_beta2=0.95)
    stepped = make_optimizer(model, config, Ranks(torch.device("meta")))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    stepped.step()
    shapes = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in stepped.state[parameter].items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                raise TypeError(f"{optimizer}: its state {kind} of {name} is no tensor of fp32, as checkpoints need it")
            shapes[f"{name}.{kind}"] = tuple(tensor.shape)
    return shapes


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the groups with "parts", and AdamW for the others.

    After its weight decay, a matrix moves by lr * sqrt(max(1, rows / columns)) times the orthogonal matrix nearest to
    its Nesterov momentum. With "beta2" above 0, normalized() is applied to this matrix first (NorMuon, Li et al. 2025).

    Args:
        groups: Muon's have "parts", the rows of the matrices that each parameter stacks; "momentum"; and "beta2", the
            decay of the neurons' mean squares, 0 for none.
        ranks: share the work; under FSDP they first gather the matrices, at most MAX_GATHERED elements at a time.
        precision: of the run. With bf16, matrices are orthogonalized in bf16, otherwise in fp32.
        options: of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], ranks: Ranks, precision: str, **options: Any):
        super().__init__(groups, **options)
        self.ranks = ranks
        self.dtype = torch.float32
        if precision == "bf16":
            self.dtype = torch.bfloat16

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a step count for every parameter

    def step(self) -> None:  # type: ignore[override]
        self.step_adamw()
        self.step_muon()

    def step_adamw(self) -> None:
        """Update the groups without "parts"."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "parts" not in group]
        super().step()
        self.param_groups = groups

    @torch.no_grad()
    def step_muon(self) -> None:
        """Update the groups with "parts"."""
        for group in self.param_groups:
            if "parts" not in group:
                continue
            stacked: Stacked = []
            elements = 0
            for parameter, parts in zip(group["params"], group["parts"], strict=True):
                if stacked and elements + parameter.numel() > MAX_GATHERED:
                    self._update(stacked, group)
                    stacked = []
                    elements = 0
                stacked.append((parameter, parts))
                elements += parameter.numel()
            self._update(stacked, group)

    def _update(self, stacked: Stacked, group: dict[str, Any]) -> None:
        beta2 = group["beta2"]
        matrices: list[Tensor] = []
        mean_squares: list[Tensor] = []
        for parameter, parts in stacked:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(average, group["momentum"])
            matrices += full_tensor(update.to(self.dtype)).split(parts)
            if beta2:
                neurons = []
                for rows in parts:
                    neurons.append(max(rows, parameter.size(1)))
                if "mean_squares" not in state:
                    state["mean_squares"] = torch.zeros(sum(neurons), device=matrices[-1].device)
                mean_squares += state["mean_squares"].split(neurons)
        updates = iter(orthogonalized(matrices, self.ranks, mean_squares, 1 - beta2))
        for parameter, parts in stacked:
            scaled = []
            for rows, update in zip(parts, updates, strict=False):  # takes one update per part
                scaled.append(update * math.sqrt(max(1, rows / parameter.size(1))))
            local, update = local_parts(parameter, torch.cat(scaled))
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"])


def orthogonalized(
    matrices: list[Tensor], ranks: Ranks, squares: Sequence[Tensor] = (), weight: float = 0.0
) -> list[Tensor]:
    """Return approximately the nearest (semi-)orthogonal matrices, normalized() if there are `squares`.

    Matrices of the same shape, or its transpose, form a batch. Every rank has all matrices, computes its share of each
    batch, and gathers the results of the other ranks.
    """
    results = list(matrices)
    batches: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        batches[tuple(sorted(matrix.shape))].append(index)
    for shape, indices in batches.items():
        share = math.ceil(len(indices) / ranks.world_size)
        batch = matrices[0].new_zeros(share, *shape)
        for row, index in zip(batch, indices[ranks.rank * share :], strict=False):
            matrix = matrices[index]
            if matrix.shape != shape:
                matrix = matrix.mT
            row.copy_(matrix)
        batch = ranks.concatenated(newton_schulz(batch))[: len(indices)]
        if squares:
            batch = normalized(batch, [squares[index] for index in indices], weight)
        for index, result in zip(indices, batch, strict=True):
            if matrices[index].shape != shape:
                result = result.mT
            results[index] = result
    return results


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalize a batch of matrices (N, rows, columns), rows <= columns: singular values become about 1."""
    a, b, c = NEWTON_SCHULZ
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).type_as(x)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def normalized(x: Tensor, mean_squares: list[Tensor], weight: float) -> Tensor:
    """Divide each neuron's update by its running root mean square, and keep the norm of each matrix.

    A neuron is a column of x (N, rows, columns), rows <= columns: the rows of an orthogonal matrix have equal norms.

    Args:
        mean_squares: of each matrix's neurons, (columns,) fp32; updated in place.
        weight: of this step's squares in the running mean.
    """
    squares = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).square() / x.size(1)  # (N, columns)
    means = torch.stack(mean_squares).to(x.device).lerp_(squares, weight)
    for mean, updated in zip(mean_squares, means, strict=True):
        mean.copy_(updated)
    scales = means.clamp_min(TINY).rsqrt()
    norms = squares.sum(1, keepdim=True) / (squares * scales.square()).sum(1, keepdim=True).clamp_min(TINY)
    return x * (scales * norms.sqrt()).unsqueeze(1)
