"""Forecast of the time and cost of a run, from measured steps or from the GPU's peak throughput."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from model import GPT
from steadygpt.base.text import counted, duration_text, labelled
from steadygpt.config import TrainConfig
from steadygpt.machine.device import PEAK_FLOPS, device_name
from steadygpt.machine.ranks import Ranks
from steadygpt.run.plan import Plan

SHARE_OF_PEAK = 0.4  # that a GPU is assumed to reach, where nothing is measured
WELL_KNOWN = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090")
RATES = {"fp32": 0.5, "fp16": 1.0, "bf16": 1.0, "fp8": 2.0}  # of products, in units of bf16's; fp32 as TF32 (set_up)
WITHOUT_TF32 = {"Tesla T4": 8.1 / 65}  # their rate in fp32, from the source of PEAK_FLOPS
WITH_FP8 = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")
MEASURE_S, ROUNDS = 10.0, 3  # measured time; rounds of it, if a step is not too long
HELLASWAG_TOKENS = 1_600_000  # with GPT-2's tokenizer
TOKENS_PER_PARAMETER = 20
SHOWN_ELSEWHERE_S = 3600.0  # a run that no well-known GPU trains for this long needs no forecast


def measure_step_s(take_step: Callable[[TrainConfig], object], config: TrainConfig, ranks: Ranks) -> float:
    """Return the seconds of a step, extrapolated from steps with one micro-step and steps with several.

    Args:
        take_step: takes a step of a configuration with fewer tokens per step, on all ranks together.
    """

    def seconds_of(micro_steps: int) -> float:
        tokens = micro_steps * config.mini_batch_size * config.context_length * ranks.world_size
        start_s = time.perf_counter()
        take_step(replace(config, total_batch_size=tokens))
        return time.perf_counter() - start_s

    micro_steps = config.grad_accum_steps(ranks.world_size)
    seconds_of(1)  # compiles, and allocates memory
    first_s = ranks.broadcast(seconds_of(1))  # rank 0's clock decides, so that all ranks take the same steps
    many = max(min(2, micro_steps), min(micro_steps, int(MEASURE_S / ROUNDS / first_s)))
    one_s, many_s, start_s = [first_s], list[float](), time.perf_counter()
    while ranks.broadcast(not many_s or time.perf_counter() - start_s < MEASURE_S):
        if many < micro_steps:
            one_s.append(seconds_of(1))
        many_s.append(seconds_of(many))
    return fmean(many_s) + (micro_steps - many) * (fmean(many_s) - fmean(one_s)) / max(1, many - 1)


def work_per_token(config: TrainConfig, model: GPT, gpu: str, precision: str) -> tuple[float, float]:
    """Return the work of a token in training and in evaluation, as the number of bf16 FLOPs that take as long.

    Recomputed parts count again. fp8 applies to the matrices of the blocks; attention and the head stay in bf16.
    """
    everything, head = model.flops_per_token(), 6 * model.config.vocab_size * model.config.embd_size
    matrices = 6 * sum(p.numel() for p in model.parameters_by_role()["matrix"].values())
    rate = WITHOUT_TF32.get(gpu, RATES["fp32"]) if precision == "fp32" else RATES[precision]
    rest_rate = 1.0 if precision == "fp8" else rate
    blocks = matrices / rate + (everything - head - matrices) / rest_rate
    work = blocks + head / rest_rate
    chunked = 0 < config.loss_chunk_size < config.mini_batch_size * config.context_length
    recomputed = blocks * config.activation_checkpointing + head / rest_rate * chunked
    return work + recomputed / 3, work / 3  # a forward pass is a third of the work


def forecast(plan: Plan, step_s: float | None = None) -> list[str]:
    """Return further lines of the plan: tokens, time and cost, from the seconds of a step if these were measured."""
    config, model, asked = plan.config, plan.sketch, plan.history.config.precision
    world_size, name, price = plan.ranks.world_size, device_name(plan.ranks.device), config.gpu_hour_cost
    steps, val_rows = config.max_steps - plan.history.step, sum(rows for rows, _ in plan.val_rows().values())
    kinds = (config.eval_freq, val_rows * config.context_length), (config.hellaswag_freq, HELLASWAG_TOKENS)
    evaluated = sum(size * math.ceil(steps / freq) for freq, size in kinds if freq)  # the last step too
    tokens, trained = config.max_steps * config.total_batch_size, steps * config.total_batch_size

    def seconds_on(gpu: str, precision: str) -> float:
        in_training, in_evaluation = work_per_token(config, model, gpu, precision)
        return (trained * in_training + evaluated * in_evaluation) / (SHARE_OF_PEAK * PEAK_FLOPS[gpu])

    in_training, in_evaluation = work_per_token(config, model, name, config.precision)
    evaluation = evaluated * in_evaluation / (in_training * max(1, trained))
    longer = ", longer than training" * (evaluation > 1)
    work = f"{counted(steps, 'step')}, plus {evaluation:.1%} for evaluation{longer}"
    optimal = f"about {TOKENS_PER_PARAMETER} is compute-optimal (Hoffmann et al. 2022)"
    lines = [("tokens", f"{tokens:,}, {tokens / model.num_parameters():,.1f} per parameter; {optimal}")]
    if step_s is None and name not in PEAK_FLOPS:
        lines.append(("time", f"unknown on this device; run --dry_run measure ({work})"))
        elsewhere_in = "bf16" if asked == "auto" else asked
        gpus = WITH_FP8 if elsewhere_in == "fp8" else WELL_KNOWN
        elsewhere = {gpu: seconds_on(gpu, elsewhere_in) for gpu in gpus}
        for gpu, seconds in elsewhere.items() if max(elsewhere.values()) >= SHOWN_ELSEWHERE_S else ():
            cost = f", cost {seconds / 3600 * price:,.2f}" * bool(price)
            where = f"on one {gpu} in {elsewhere_in}, if the run fits, at {SHARE_OF_PEAK:.0%} of its peak"
            lines.append(("time", f"{duration_text(seconds)}{cost} {where}"))
    else:
        if step_s is not None:
            seconds = steps * step_s * (1 + evaluation)
            how = f"at {config.total_batch_size / step_s:,.0f} tokens/s, measured here"
        else:
            seconds, share = seconds_on(name, config.precision) / world_size, f"{SHARE_OF_PEAK:.0%} of their peak"
            how = f"if the GPUs reach {share} in {config.precision}; run --dry_run measure to time it"
        lines.append(("time", f"{duration_text(seconds)}: {work}, {how}"))
        if price:
            hours = seconds / 3600
            how = f"{world_size} x {hours:,.1f} h at {price:,.2f} per hour"
            lines.append(("cost", f"{world_size * hours * price:,.2f}: {how}"))
    return [labelled(label, text) for label, text in lines]
