"""Training of another project's model with its optimizer, on our rows and with our validation."""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from dataloader import BatchLoader, EvenlySpaced
from evaluation import validation_rows
from steadygpt.config import TrainConfig, parse_args
from steadygpt.machine.device import choose_device
from steadygpt.machine.ranks import Ranks
from steadygpt.start.data import Data, open_data
from steadygpt.start.find import find_start
from steadygpt.start.settle import settle

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs, targets -> the mean loss of the tokens
Update = Callable[[int], None]  # sets the schedules of a step, updates the weights and clears their gradients


def arguments(argv: Sequence[str]) -> tuple[Path, float, Path, TrainConfig, Data, torch.device]:
    """Return the checkout, the factor of the learning rates, the file for the losses, and a new run as train.py has it.

    That is the settled options, the data and the device.
    """
    command, set_by = parse_args(argv[3:])
    ranks = Ranks(choose_device(command.device))
    start, asked, _ = find_start(command, set_by, ranks)
    data = open_data(start, asked, ranks)
    return Path(argv[0]), float(argv[1]), Path(argv[2]), settle(start, asked, data, ranks).of_launch, data, ranks.device


def train(
    config: TrainConfig, data: Data, loss_of: Loss, weight: float, update: Update, device: torch.device, out: Path
) -> None:
    """Train to the end, print the loss every log_freq steps, and write step -> validation loss.

    Args:
        weight: of a micro-batch's mean loss in the gradient of a step.
    """
    size = config.rows_per_step
    steps = (range(row, row + size) for row in itertools.count(0, size))
    batches = BatchLoader(data.sources[0].rows, steps, config.mini_batch_size, device)
    micro_steps = config.grad_accum_steps(1)
    losses = {}
    for step in range(config.max_steps + 1):
        if step and ((config.eval_freq and step % config.eval_freq == 0) or step == config.max_steps):
            val_loss = validate(config, data, loss_of, device)
            losses[step] = val_loss
            print(f"step {step}: val loss {val_loss:.4f}", flush=True)
        if step == config.max_steps:
            break
        for _ in range(micro_steps):
            loss = next_loss(loss_of, batches)
            (loss * weight).backward()
        update(step)
        if (step + 1) % config.log_freq == 0:
            print(f"step {step + 1}/{config.max_steps}: loss {loss.item():.4f}", flush=True)
    batches.close()
    out.write_text(json.dumps(losses, indent=1))


def next_loss(loss_of: Loss, batches: BatchLoader) -> torch.Tensor:
    return loss_of(*(tokens.contiguous() for tokens in batches.next()))


@torch.no_grad()
def validate(config: TrainConfig, data: Data, loss_of: Loss, device: torch.device) -> float:
    """Return the mean loss of the tokens that our validation reads."""
    rows = data.val_sets[0].rows
    count = validation_rows(config, rows)
    batch_rows = math.gcd(count, config.mini_batch_size)  # equal batches, so that the mean of their means is right
    with closing(BatchLoader(EvenlySpaced(rows, count), [range(count)], batch_rows, device)) as batches:
        return statistics.mean(next_loss(loss_of, batches).item() for _ in range(count // batch_rows))
