"""Training of another project's model with its optimizer, on our rows and with our validation."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from dataloader import BatchLoader, EvenlySpaced
from steadygpt.config import TrainConfig, parse_args
from steadygpt.machine.device import choose_precision
from steadygpt.run.data import Data
from steadygpt.run.plan import validation_rows

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs, targets -> the mean loss of the tokens
Update = Callable[[int], None]  # sets the schedules of a step, updates the weights and clears their gradients


def arguments(argv: Sequence[str]) -> tuple[Path, float, Path, TrainConfig]:
    """Return the checkout, the factor of the learning rates, the file for the losses, and the options of train.py."""
    config, _ = parse_args(argv[3:])
    return Path(argv[0]), float(argv[1]), Path(argv[2]), config


def device_and_precision(config: TrainConfig) -> tuple[torch.device, str]:
    """Return the GPU, or the CPU without one, and a name of DTYPES."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = config.precision if config.precision in DTYPES else choose_precision("auto", device)
    return device, precision


def train(
    config: TrainConfig, data: Data, loss_of: Loss, weight: float, update: Update, device: torch.device, out: Path
) -> None:
    """Train to the end, print the loss every log_freq steps, and write the validation losses as train.py does.

    Args:
        weight: of a micro-batch's mean loss in the gradient of a step.
    """
    batches = BatchLoader(data.sources[0].rows, config.steps_from(0), config.mini_batch_size, device)
    micro_steps = config.grad_accum_steps(1)
    evaluations = {}  # step -> scores
    for step in range(config.max_steps + 1):
        if step and ((config.eval_freq and step % config.eval_freq == 0) or step == config.max_steps):
            val_loss = validate(config, data, loss_of, device)
            evaluations[step] = {"val_loss": val_loss}
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
    out.write_text(json.dumps({"": evaluations}, indent=1))


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
