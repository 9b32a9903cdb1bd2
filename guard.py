"""What keeps a training step reliable: stops, seeds, sums over ranks, bad steps and skipped updates.

train_step() in train.py is the step; nothing here needs to change for another loss, optimizer or metric.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataloader import BatchLoader
from model import GPT
from steadygpt.checkpoint.files import TrainState
from steadygpt.config import TrainConfig
from steadygpt.machine import parallel
from steadygpt.machine.device import seed
from steadygpt.machine.loss import mean_terms
from steadygpt.machine.ranks import Ranks, StopSignal
from steadygpt.run.results import StepResult, judge


@dataclass(eq=False)
class Guard:
    """Stands around each step: batches() begins it, and update() ends it.

    The gradients of a step are the mean over its micro-batches on all ranks.
    """

    config: TrainConfig
    ranks: Ranks
    model: GPT  # with the weights
    forward: nn.Module  # the same model after compile and DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of the loss, enabled with fp16 only
    stop: StopSignal
    state: TrainState
    # Of the loss of this step: the names of its terms, and their means on this rank, (terms,) of each micro-batch.
    names: tuple[str, ...] = ()
    means: list[Tensor] = field(default_factory=list)

    def batches(self, batches: BatchLoader) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of this rank's micro-batches of the next step, each (B, T) int64.

        Raises: Stopped on all ranks together; the weights are unchanged.
        """
        micro_steps = self._micro_steps()
        self._zero_gradients()
        self.means = []
        for micro_step in range(micro_steps):
            self.stop.check()
            # Seeded by (seed, step, micro-batch), so a resumed step repeats its dropout masks, also on other ranks.
            micro_batch = self.ranks.rank * micro_steps + micro_step
            seed(self.ranks.device, ((self.config.seed * 1_000_003 + self.state.step) * 65_537 + micro_batch) % 2**63)
            with parallel.gradient_sync(self.forward, last=micro_step == micro_steps - 1):
                yield batches.next()

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        """Add the gradients of the loss of a micro-batch, whose terms are (B * T,) each."""
        means = mean_terms(terms)
        self.names = tuple(terms)
        self.means.append(means.detach())
        # DDP and FSDP average the gradients over the ranks.
        self.scaler.scale(means.sum() / self._micro_steps()).backward()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to a norm, 0 for none, and return the norm before, a scalar of all ranks."""
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm or math.inf)
        self.scaler.update()
        return parallel.full_tensor(norm)

    def update(self, lr: float, grad_norm: Tensor, **metrics: Tensor) -> StepResult:
        """End the step: update the weights, unless loss or gradient forbid it, and count the step.

        Args:
            metrics: scalars of this rank. Their means over the ranks are logged with the step, as the terms of the loss
                are.
        """
        numbers = {"grad_norm": grad_norm}
        for name, means in zip(self.names, torch.stack(self.means, dim=1), strict=True):
            numbers[name] = self.ranks.mean(means)
        for name, metric in metrics.items():
            numbers[name] = self.ranks.mean(parallel.full_tensor(metric.detach()).float().reshape(1))
        if len(numbers) < 1 + len(self.names) + len(metrics):
            names = ", ".join(["grad_norm", *self.names, *metrics])
            raise ValueError(f"a step measures {names}: two of them have the same name; rename one")
        # All numbers are of all ranks, so all ranks make the same decision when one of them has a NaN or a spike.
        values = torch.stack(list(numbers.values())).tolist()  # the host waits for the device, once a step
        measured = dict(zip(numbers, values, strict=True))
        rows = self.config.step_at(self.state.rows_consumed)
        result = judge(
            self.config,
            self.state.recent_losses,
            step=self.state.step,
            rows=rows,
            lr=lr,
            loss=measured.pop("loss"),
            grad_norm=measured.pop("grad_norm"),
            loss_scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            metrics=measured,
        )
        if result.updated:
            self.optimizer.step()  # in place of scaler.step(), which knows only of overflows
        self.state.step += 1
        self.state.rows_consumed = rows.stop
        return result

    def _micro_steps(self) -> int:
        return self.config.grad_accum_steps(self.ranks.world_size)

    def _zero_gradients(self) -> None:
        # Gradients that are views of DDP's buckets are set to zero in place.
        self.optimizer.zero_grad(set_to_none=not isinstance(self.forward, DistributedDataParallel))
