"""The memory that a run is expected to need, what to change when it is too much, --mini_batch_size auto."""

import dataclasses
import re
from functools import partial
from itertools import accumulate

import pytest
import torch
from conftest import load, run_here
from ground import acting_here, built, launch_in, options_in, settled, status_of
from injected import do_in_step

import train
from model import GPT
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text
from steadygpt.config import TrainConfig, parse_args
from steadygpt.machine.device import autocast, is_out_of_memory
from steadygpt.machine.ranks import Ranks
from steadygpt.start import settle as settles
from steadygpt.start.memory import (
    COPY,
    FITS,
    STATIC,
    estimate_memory,
    micro_step_bytes,
    needed_bytes,
    with_fitting_rows,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = TrainConfig(precision="bf16", compile="off", mini_batch_size=16)
with torch.device("meta"):
    MODEL = GPT(CONFIG.shape(50257), CONFIG, initialize=False)
N = sum(p.numel() for p in MODEL.parameters())
BLOCKS = sum(p.numel() for p in MODEL.h.parameters())
SMALL = "--num_layers 4 --num_heads 2 --embd_size 64 --context_length 1024 --mini_batch_size 2 --total_batch_size 4096"
UNSHARDED, GATHERED = "unsharded gradients", "gathered weights"


@pytest.fixture(autouse=True)
def by_rows(monkeypatch):
    """Take a micro-step to need 20 kB for each row: counting takes most of the time of a plan."""
    monkeypatch.setattr(
        "steadygpt.start.memory.micro_step_bytes", lambda config, *_: 2 * (10_000 * config.mini_batch_size,)
    )


def memory(world_size: int = 1, **changes) -> tuple[dict, dict]:
    return estimate_memory(dataclasses.replace(CONFIG, **changes), MODEL, Ranks(GPU, world_size=world_size))


def allocated_bytes(config: TrainConfig) -> int:
    """Return the most bytes that PyTorch's allocator has given to forward and backward of a micro-step."""
    model = GPT(config.shape(500), config, initialize=False)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    rows = torch.zeros(config.mini_batch_size, config.context_length + 1, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profiled:
        with autocast(CPU, config.precision):
            loss = model(rows[:, :-1], rows[:, 1:])["loss"]
        loss.mean().backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("flags", [
    "--loss_chunk_size 512 --activation_checkpointing",
    "--norm rmsnorm --qk_norm --rotary_pct 1 --activation swiglu --bias off --tied_head off",
    "--norm rmsnorm_no_weight --activation relu2 --logit_softcap 15 --num_kv_heads 1 --rotary_pct 1 --num_layers 7",
    "--norm rmsnorm --rotary_pct 1 --activation swiglu --bias off --layer_pattern CCA --attention_gate --num_layers 5",
    "--precision fp32 --dropout 0.1 --parallel_residual on --context_length 256 --mini_batch_size 4",
])  # fmt: skip
def test_counted_bytes_are_those_that_pytorch_allocates(flags):
    config, _ = parse_args([*SMALL.split(), "--precision", "bf16", *flags.split()])
    counted = sum(micro_step_bytes(config, config.shape(500), CPU))
    # On a CPU with AMX, attention in bf16 also takes 0.4 MB to reorder keys and values, which no GPU does.
    rel = 0.05 if torch.cpu._is_amx_tile_supported() else 0.03
    assert counted == pytest.approx(allocated_bytes(config), rel=rel)


def test_blocks_keep_less_with_checkpointing_and_no_casts_of_weights_that_fsdp_gathers_in_bf16():
    def kept(**changes) -> int:
        return micro_step_bytes(dataclasses.replace(CONFIG, **changes), MODEL.config, GPU)[0]

    # The blocks keep their inputs, attention's outputs and, for each head, a number.
    assert kept(activation_checkpointing=True, compile="on") == 12 * 16 * 1024 * (768 * 2 + 768 * 2 + 12 * 4)
    assert kept() - kept(sharding="fsdp") == pytest.approx(2 * BLOCKS, rel=0.01)


@pytest.mark.parametrize(("world_size", "changes", "expected"), [
    (1, {}, {STATIC: 16 * N, GATHERED: 0}),
    (4, {}, {STATIC: 16 * N, GATHERED: 0}),
    # The root and two blocks are gathered; the last micro-step replaces some gradients by shards.
    (4, {"sharding": "fsdp"}, {STATIC: 4 * N, UNSHARDED: 3 * N, GATHERED: 4 * (N - BLOCKS) + 2 * 2 * BLOCKS / 12}),
    (4, {"sharding": "fsdp", "precision": "fp32"}, {GATHERED: 4 * (N - BLOCKS) + 4 * 2 * BLOCKS / 12}),
    (4, {"sharding": "fsdp", "total_batch_size": 4 * 16 * 1024}, {STATIC: 4 * N, UNSHARDED: 0}),  # one micro-step
])  # fmt: skip
def test_memory_of_the_device(world_size, changes, expected):
    device, _ = memory(world_size, **changes)
    assert {use: device.get(use, 0) for use in expected} == pytest.approx(expected, rel=1e-5)


def test_memory_of_the_host():
    assert list(memory(4)[1]) == [COPY]
    assert memory()[1][COPY] == pytest.approx(2.48e9, rel=0.01)  # page-locked: rounded up
    assert estimate_memory(CONFIG, MODEL, Ranks(CPU))[1][COPY] == pytest.approx(12 * N)
    # Muon has one moment of the matrices of 12 blocks, not two: 3 x 768 x 768, 768 x 768, 2 of 4 x 768 x 768.
    less = memory()[1][COPY] - memory(optimizer="muon")[1][COPY]
    assert less == pytest.approx(4 * 12 * (2**21 + 2**20 + 2 * 2**22), rel=2e-3)


def test_out_of_memory_is_one_line_with_flags_to_try(workdir, monkeypatch):
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))

    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("steadygpt.start.memory.memory_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError) as raised, acting_here(partial(do_in_step, 4, run_out)):
        run_here("--checkpoint_dir", "a", "--checkpoint_freq", "2")
    message = str(raised.value)
    assert re.search(r"(?i)\brank 0: 2 .*\b16 .* [\d.]+ [kM]B .*\b600 kB .*\b1 MB .*\bcpu\b", message)
    assert re.search(
        r"--mini_batch_size 1, --activation_checkpointing, --loss_chunk_size 8, --sharding fsdp, .* --resume latest",
        message,
    )
    assert load("a/latest.pt")["step"] == 4
    assert status_of("a")["status"] == "failed"
    assert run_here("--checkpoint_dir", "a", "--resume", "latest", "--mini_batch_size", "1") == 0


# ---------------------------------------------------------------------------------------------------------------------
# --mini_batch_size auto

FLAGS = (
    "--mini_batch_size auto --total_batch_size 192 --context_length 16 --num_layers 2 --num_heads 2 --embd_size 16 "
    "--precision fp32".split()
)
AUTO = dataclasses.replace(parse_args(FLAGS)[0], vocab_size=257)  # 12 rows: 1, 2, 3, 4, 6 or 12 at once
with torch.device("meta"):
    SKETCH = GPT(AUTO.shape(257), AUTO, initialize=False)


def needed(rows: int) -> float:
    return needed_bytes(dataclasses.replace(AUTO, mini_batch_size=rows), SKETCH, Ranks(CPU))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_the_estimate_decides(rows):
    config, line = with_fitting_rows(AUTO, needed(rows) / FITS["cpu"] + 1, Ranks(CPU))
    assert config == dataclasses.replace(AUTO, mini_batch_size=rows)
    used, memory = bytes_text(needed(rows)), bytes_text(needed(rows) / FITS["cpu"] + 1)
    said = f"rows         {rows} per micro-step, chosen by --mini_batch_size auto: {used} (estimated); the limit is "
    assert line == f"{said}{used} of {memory}"


def test_the_memory_of_the_rank_that_has_least_decides(workdir, monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda self, number: [number, needed(3) / FITS["cpu"] + 1])
    assert settled(built("--data_dir", "data", *FLAGS)).mini_batch_size == 3


def test_no_number_fits_or_splits_a_step():
    with pytest.raises(UserError, match=r"(?i)^--mini_batch_size auto: 1 .*\b16\b.*--activation_checkpointing\b"):
        with_fitting_rows(AUTO, 1000, Ranks(CPU))
    with pytest.raises(UserError, match=r"\b192; .*\b80\b.*\b240\b"):
        with_fitting_rows(AUTO, 10**9, Ranks(CPU, world_size=5))


def test_each_launch_chooses_the_number_and_its_record_has_it(workdir, monkeypatch, capsys):
    auto = ("--mini_batch_size", "auto", "--checkpoint_dir", "a")
    monkeypatch.setattr(settles, "memory_bytes", lambda device: 10**9)
    assert run_here(*auto) == 0
    assert re.search(r"auto: [\d.]+ [kM]B \(estimated\); the limit is 600 MB of 1 GB\n", capsys.readouterr().out)
    assert (options_in("a/latest.pt").mini_batch_size, launch_in("a/latest.pt").settings["mini_batch_size"]) == (0, 4)
    resume = ("--data_dir", "data", "--device", "cpu", "--resume", "--checkpoint_dir", "a")
    assert train.main([*resume, "--max_steps", "9"]) == 0
    said = capsys.readouterr().out
    assert "rows         4 per micro-step, chosen by --mini_batch_size auto" in said and "changed      mini" not in said
