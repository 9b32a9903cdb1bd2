"""The largest number of rows that fits in memory: --mini_batch_size auto."""

import dataclasses
import gc
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from steadygpt.cli import UserError
from steadygpt.device import autocast, is_out_of_memory, memory_bytes, use_fp8
from steadygpt.distributed import Ranks
from steadygpt.plan import FITS, largest_fitting, memory_advice, needed_bytes

if TYPE_CHECKING:
    from config import TrainConfig
    from model import GPT

PROBE_FITS = 0.94  # of a GPU's memory: a measured peak up to here leaves enough for fragments and NCCL's buffers


def with_fitting_rows(config: "TrainConfig", sketch: "GPT", ranks: Ranks) -> tuple["TrainConfig", tuple[str, ...]]:
    """Replace --mini_batch_size auto by the largest number that fits on every rank, and describe it in a line.

    On a GPU, steps are tried out; under FSDP, where they need all ranks, and on other devices the plan's estimate
    decides.

    Args:
        sketch: the model of the run, on the meta device.

    Raises: UserError on all ranks when no number splits a step evenly, or the smallest does not fit on one of them.
    """
    if config.mini_batch_size:
        return config, ()
    device, world_size, total = ranks.device, ranks.world_size, memory_bytes(ranks.device)
    config.grad_accum_steps(world_size)
    candidates: list[int] = config.possible_rows(world_size)
    peaks: dict[int, int | None] = {}

    def estimate(rows: int) -> float:
        return needed_bytes(dataclasses.replace(config, mini_batch_size=rows), sketch, device, world_size)

    limit = FITS[device.type] * total
    guess = largest_fitting(config, sketch, device, world_size, limit)
    rows = guess.mini_batch_size if guess else 0
    if device.type == "cuda" and config.sharding == "ddp":

        def probe(rows: int) -> int | None:
            if ranks.is_main:  # compiling takes up to some minutes
                print(f"--mini_batch_size auto: trying {rows} rows", flush=True)
            peaks[rows] = peak_of_step(config, rows, device, sketch)
            return peaks[rows]

        free, _ = torch.cuda.mem_get_info(device)
        limit = PROBE_FITS * total - (total - free - torch.cuda.memory_reserved(device))  # others hold the rest
        static = 2 * estimate(1) - estimate(2)
        rows = most_rows(candidates, rows or candidates[0], probe, limit, static)
    rows = -ranks.max(-rows)
    found = dataclasses.replace(config, mini_batch_size=rows or candidates[0])
    if not rows:
        raise UserError(f"--mini_batch_size auto: {memory_advice(found, sketch, ranks)}")
    measured = peaks.get(rows)  # or None, if this number is another rank's
    peak, how = measured or estimate(rows), "measured" if measured else "estimated"
    return found, (
        f"mini_batch_size auto: {rows} rows need {peak / 1e9:.2f} GB ({how}); the limit is {limit / 1e9:.2f} of "
        f"{total / 1e9:.2f} GB",
    )


def most_rows(
    candidates: Sequence[int], first: int, probe: Callable[[int], int | None], limit: float, static: float
) -> int:
    """Return the largest candidate that needs at most `limit` bytes, or 0; start at `first`.

    Args:
        candidates: numbers of rows, ascending.
        probe: returns the peak in bytes of a step with that many rows, or None if the device has too little memory.
        static: bytes of a peak that do not depend on the rows. The rest of a peak, divided by its rows, says which
            candidate to probe next, and that larger ones need no probe.
    """
    fits, fails, at = -1, len(candidates), candidates.index(first)  # places among the candidates
    while fits < at < fails:
        peak = probe(candidates[at])
        if peak is not None and peak <= limit:
            fits = at
        else:
            fails = at
        if peak is None:
            at = fails - 1
        else:
            bytes_a_row = max(1, (peak - static) / candidates[at])
            at = bisect_right(candidates, (limit - static) / bytes_a_row) - 1
            at = min(max(at, fits, 0), fails - 1)
    return candidates[fits] if fits >= 0 else 0


def peak_of_step(config: "TrainConfig", rows: int, device: torch.device, sketch: "GPT") -> int | None:
    """Return the peak of the reserved memory of a step on random tokens, or None if the GPU has too little."""
    peak = None
    torch.cuda.reset_peak_memory_stats(device)
    try:
        take_step(config, rows, device, sketch)
        peak = torch.cuda.max_memory_reserved(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if config.compiles(device.type):
        torch._dynamo.reset()  # or the next number of rows is compiled for any number of rows
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return peak


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
