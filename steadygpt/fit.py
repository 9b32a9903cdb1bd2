"""The number of rows that fits in memory: --mini_batch_size auto."""

import dataclasses
import gc
from typing import TYPE_CHECKING

import torch

from steadygpt.cli import UserError
from steadygpt.device import autocast, is_out_of_memory, memory_bytes, use_fp8
from steadygpt.distributed import Ranks
from steadygpt.plan import FITS, largest_fitting, memory_advice, needed_bytes

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT


def with_fitting_rows(config: "TrainConfig", sketch: "GPT", ranks: Ranks) -> tuple["TrainConfig", tuple[str, ...]]:
    """Replace --mini_batch_size auto by a number of rows that fits on every rank, and describe it in a line.

    The plan's estimate chooses the number. On a GPU a step is tried out, with half the rows after each lack of memory;
    under FSDP, where a step needs all ranks, and on other devices the estimate decides.

    Args:
        sketch: the model of the run, on the meta device.

    Raises: UserError on all ranks when no number splits a step evenly, or the smallest does not fit on one of them.
    """
    if config.mini_batch_size:
        return config, ()
    device, world_size, memory = ranks.device, ranks.world_size, memory_bytes(ranks.device)
    possible = config.possible_rows(world_size)
    smallest = min(possible, default=1)
    limit, tries = FITS[device.type] * memory, device.type == "cuda" and config.sharding == "ddp"
    guess = largest_fitting(config, sketch, device, world_size, memory if tries else limit)
    rows = guess.mini_batch_size if guess else smallest * tries
    while tries and rows and not step_fits(config, rows, ranks, sketch):
        rows = max((fewer for fewer in possible if fewer <= rows / 2), default=0)
    rows = -ranks.max(-rows)
    found = dataclasses.replace(config, mini_batch_size=rows or smallest)
    if not rows:
        raise UserError(f"--mini_batch_size auto: {memory_advice(found, sketch, ranks)}")
    needed, how = needed_bytes(found, sketch, device, world_size), "estimated, and tried out" if tries else "estimated"
    return found, (
        f"mini_batch_size auto: {rows} rows need {needed / 1e9:.2f} GB ({how}); the limit is {limit / 1e9:.2f} of "
        f"{memory / 1e9:.2f} GB",
    )


def step_fits(config: "TrainConfig", rows: int, ranks: Ranks, sketch: "GPT") -> bool:
    """Return whether a step fits in the memory of the GPU, less some for fragments and NCCL's buffers."""
    if ranks.is_main:  # compiling takes up to some minutes
        print(f"--mini_batch_size auto: trying {rows} rows", flush=True)
    torch.cuda.set_per_process_memory_fraction(FITS["cuda"], ranks.device)
    try:
        take_step(config, rows, ranks.device, sketch)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, ranks.device)
        if config.compiles(ranks.device.type):
            torch._dynamo.reset()  # or the next number of rows is compiled for any number of rows
        gc.collect()
        torch.cuda.empty_cache()


def take_step(config: "TrainConfig", rows: int, device: torch.device, sketch: "GPT") -> None:
    """Compute gradients of random tokens beside tensors as large as AdamW's moments and the previous gradients."""
    with device:
        model = type(sketch)(sketch.config, False, config.activation_checkpointing, config.loss_chunk_size)
        tokens = torch.randint(model.config.vocab_size, (rows, config.context_length))
    if config.precision == "fp8":
        use_fp8(model.h, device)
    parameters = list(model.parameters())
    moments = [torch.empty_like(parameter) for parameter in parameters * 2]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    forward = model.compiled() if config.compiles(device.type) else model
    with autocast(device, config.precision):
        loss = forward(tokens, tokens)
    loss.backward()
    del moments
