"""The time of a step, measured on short ones."""

import time
from collections.abc import Callable
from statistics import fmean

from steadygpt.config import TrainConfig
from steadygpt.machine.ranks import Ranks

MEASURE_S = 10.0  # of measured steps


def seconds_per_step(config: TrainConfig, ranks: Ranks, take_step: Callable[[TrainConfig], object]) -> float:
    """Return the seconds per step, extrapolated from steps with one micro-step and steps with several.

    Args:
        take_step: takes a step of a configuration.
    """
    micro_steps = config.grad_accum_steps(ranks.world_size)
    few = min(4, micro_steps)
    step_s: dict[int, list[float]] = {1: [], few: []}  # by the number of micro-steps

    def seconds_of(count: int) -> float:
        start_s = time.perf_counter()
        take_step(config.with_micro_steps(count, ranks.world_size))
        return time.perf_counter() - start_s

    seconds_of(1)  # compiles, and allocates memory
    start_s = time.perf_counter()
    while ranks.broadcast(not step_s[few] or time.perf_counter() - start_s < MEASURE_S):  # by the clock of rank 0
        for count, seconds in step_s.items():
            seconds.append(seconds_of(count))
    one_s = fmean(step_s[1])
    few_s = fmean(step_s[few])
    return few_s + (micro_steps - few) * (few_s - one_s) / max(1, few - 1)
