"""The plan: the memory that a run is expected to need, what to change when it is too much, --mini_batch_size auto."""

import dataclasses
import re
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from conftest import load, run_here
from ground import acting_here, built, options_in, settled, status_of
from injected import do_in_step

import train
from model import GPT
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text
from steadygpt.checkpoint.files import named_tensors
from steadygpt.config import TrainConfig, parse_args
from steadygpt.machine.device import autocast, is_out_of_memory
from steadygpt.machine.ranks import Ranks
from steadygpt.run import plan as plans
from steadygpt.run.memory import COPY, FITS, STATIC, estimate_memory, micro_step_bytes, needed_bytes, with_fitting_rows

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
        "steadygpt.run.memory.micro_step_bytes", lambda config, *_: 2 * (10_000 * config.mini_batch_size,)
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
    "--parallel_residual on --context_length 256 --mini_batch_size 4", "--precision fp32 --dropout 0.1",
])  # fmt: skip
def test_counted_bytes_are_those_that_pytorch_allocates(flags):
    config, _ = parse_args([*SMALL.split(), "--precision", "bf16", *flags.split()])
    counted = sum(micro_step_bytes(config, config.shape(500), CPU))
    assert counted == pytest.approx(allocated_bytes(config), rel=0.03)


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


def test_plan_of_a_known_number_of_steps_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--config", "gpt2-1b", "--precision", "bf16", "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert (
        "data         no shards in data/edu_fineweb10B yet; planned with the vocabulary of --tokenizer gpt2\n"
        "validation   10,485,760 tokens every 250 steps: about "
    ) in plan
    assert "vocabulary 50,257 (gpt2)\n" in plan
    assert "at most 9 in checkpoints: 82.1 GB; " in plan
    assert "x 1 rank x 128 micro-steps); warm-up 2,000 steps\n" in plan
    assert "tokens       104,857,600,000, 137.9 per parameter; about 20 is compute-optimal" in plan
    assert "time         unknown here; on 1 x NVIDIA H100" in plan
    assert ": 100,000 steps, plus 1.4% for evaluation\n" in plan
    assert list(tmp_path.iterdir()) == []


def test_plan_of_a_preset_assumes_the_default_data_until_there_is_some(tmp_path, monkeypatch, capsys):
    """The command of docs/models.md, on a fresh clone."""
    monkeypatch.chdir(tmp_path)
    assert train.main("--config gpt2-xl --context_length 2048 --precision bf16 --dry_run".split()) == 0
    plan = capsys.readouterr().out
    assert "planned with the vocabulary of --tokenizer gpt2 and 18,795 steps per epoch\n" in plan
    assert "steps        93,975, each of " in plan and "; 5.00 epochs (1 epoch = 18,795 steps); " in plan
    with pytest.raises(UserError, match="a mixture of data has no epochs; set the length of the run with --max_steps"):
        train.main("--mix a,b --precision bf16 --dry_run".split())


NO_DATA = "--data_dir nowhere --tokenizer bytes"


@pytest.mark.parametrize(("flags", "planned"), [
    (NO_DATA, "planned with the vocabulary of --tokenizer bytes\n"),
    (f"{NO_DATA} --max_steps 0 --num_epochs 2 --steps_per_epoch 40",
     "steps +80, .*; 2.00 epochs .1 epoch = 40 steps.; "),
    ("--eval_freq 0 --eval_tokens 32", "plus 0.0% for evaluation\n"),
    ("--eval_freq 250 --eval_tokens 32", "\nvalidation   32 of 192 tokens at the end\n"),  # the run is shorter
    ("--eval_freq 4 --eval_tokens 32", "\nvalidation   32 of 192 tokens every "),
    ("--eval_freq 4 --eval_tokens 192", "\nvalidation   192 tokens every "),
    ("--eval_freq 1 --eval_tokens 192 --total_batch_size 32", "plus 200.0% for evaluation\n"),
])  # fmt: skip
def test_plan_says_how_long_the_run_is_and_when_it_validates(workdir, capsys, flags, planned):
    assert run_here("--dry_run", *flags.split()) == 0
    out = capsys.readouterr().out
    assert re.search(planned, out)
    assert ("\nvalidation " in out) == ("--eval_freq" in flags and "--eval_freq 0" not in flags)


def test_plan_of_checkpoints_that_do_not_fit_on_the_disk_names_the_flags(workdir, monkeypatch, capsys):
    run_here("--checkpoint_dir", "a")
    tensors = named_tensors(load("a/latest.pt")).values()
    size = sum({t.data_ptr(): t.nbytes for t in tensors}.values())  # a tied head counts once

    def planned(files: int, *flags: str) -> str:
        """Return the line about checkpoints on a disk with room for so many files."""
        free = size * (files + 0.5)
        monkeypatch.setattr("steadygpt.run.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        capsys.readouterr()
        run_here("--max_steps", "10000", "--dry_run", *flags)
        return re.search("^checkpoints .*$", capsys.readouterr().out, re.MULTILINE)[0]

    advice = "try a smaller --keep_checkpoints and --keep_epochs 1, or another --checkpoint_dir"
    assert planned(40).endswith(f" -- NOT ENOUGH; {advice}")
    assert "each, at most 555 in checkpoints" in planned(40)
    assert "NOT ENOUGH" not in planned(40, "--keep_epochs", "1")
    assert re.search("each, at most 15 in checkpoints.*NOT ENOUGH", planned(14, "--keep_epochs", "1"))


@pytest.mark.parametrize("available", [10**5, 10**9])
def test_plan_says_if_memory_is_short(workdir, monkeypatch, capsys, available):
    monkeypatch.setattr("steadygpt.run.plan.memory_bytes", lambda device: available)
    monkeypatch.setattr("steadygpt.run.plan.available_memory_bytes", lambda: available)
    run_here("--dry_run")
    lines = capsys.readouterr().out.splitlines()
    for label, advice in (
        ("memory ", "--mini_batch_size auto or a smaller model"),
        ("host memory ", "a larger host or a smaller model"),
    ):
        [line] = [line for line in lines if line.startswith(label)]
        assert (f" -- NOT ENOUGH: 100 kB available; try {advice}" in line) == (available < 10**6)


def test_out_of_memory_is_one_line_with_flags_to_try(workdir, monkeypatch):
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))

    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("steadygpt.run.memory.memory_bytes", lambda device: 1_000_000)
    with pytest.raises(UserError) as raised, acting_here(partial(do_in_step, 4, run_out)):
        run_here("--checkpoint_dir", "a", "--checkpoint_freq", "2")
    message = str(raised.value)
    assert re.match(r"out of memory on rank 0: .*about [\d.]+ [kM]B .*600 kB of the 1 MB of cpu", message)
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
AUTO = parse_args(FLAGS)[0]  # 12 rows: 1, 2, 3, 4, 6 or 12 at once
with torch.device("meta"):
    SKETCH = GPT(AUTO.shape(257), AUTO, initialize=False)


def needed(rows: int) -> float:
    return needed_bytes(dataclasses.replace(AUTO, mini_batch_size=rows), SKETCH, Ranks(CPU))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_the_estimate_decides(rows):
    config, line = with_fitting_rows(AUTO, SKETCH, needed(rows) / FITS["cpu"] + 1, Ranks(CPU))
    assert config == dataclasses.replace(AUTO, mini_batch_size=rows)
    used, memory = bytes_text(needed(rows)), bytes_text(needed(rows) / FITS["cpu"] + 1)
    said = f"rows         {rows} per micro-step, chosen by --mini_batch_size auto: {used} (estimated); the limit is "
    assert line == f"{said}{used} of {memory}"


def test_the_memory_of_the_rank_that_has_least_decides(workdir, monkeypatch):
    monkeypatch.setattr(Ranks, "max", lambda self, number: max(number, -needed(3) / FITS["cpu"] - 1))
    assert settled(built("--data_dir", "data", *FLAGS)).mini_batch_size == 3


def test_no_number_fits_or_splits_a_step():
    with pytest.raises(UserError, match="--mini_batch_size auto: 1 row of 16 tokens: about"):
        with_fitting_rows(AUTO, SKETCH, 1000, Ranks(CPU))
    with pytest.raises(UserError, match=r"192; expected a multiple of .* = 80 tokens, such as 240"):
        with_fitting_rows(AUTO, SKETCH, 10**9, Ranks(CPU, world_size=5))


def test_the_number_is_stored_and_a_resume_takes_it(workdir, monkeypatch, capsys):
    auto = ("--mini_batch_size", "auto", "--checkpoint_dir", "a")
    monkeypatch.setattr(plans, "memory_bytes", lambda device: 10**9)
    assert run_here(*auto) == 0
    said = capsys.readouterr().out
    assert re.search(r"auto: [\d.]+ [kM]B \(estimated\); the limit is 600 MB of 1 GB\n", said)
    assert options_in("a/latest.pt").mini_batch_size == 4
    resume = ("--data_dir", "data", "--device", "cpu", "--resume", "--checkpoint_dir", "a")
    assert train.main([*resume, "--max_steps", "9"]) == 0
    assert "mini_batch_size" not in capsys.readouterr().out
    assert options_in("a/latest.pt").mini_batch_size == 4
