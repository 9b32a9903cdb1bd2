"""The plan: data, steps, and with --dry_run also saves, memory, time and cost."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import load, run_here

import train
from model import GPTConfig, sketch_of
from optim import OPTIMIZERS
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, duration_text
from steadygpt.checkpoint.files import TrainState, checkpoint_bytes, named_tensors
from steadygpt.config import PRESETS, TrainConfig, parse_args
from steadygpt.machine.ranks import Ranks
from steadygpt.start import plan
from steadygpt.start.find import Start
from steadygpt.start.plan import saves_text, time_text

CONFIG = TrainConfig(precision="bf16", gpu_hour_cost=2.5, max_steps=2000)
FOUR = Ranks(torch.device("cpu"), world_size=4)
MODEL = sketch_of(CONFIG.shape(50257))
SHAPE = {"num_layers": 2, "num_heads": 2, "embd_size": 16, "context_length": 16, "vocab_size": 257}  # of TINY
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("gpus", [4, 1], ids=["H100s here", "none here"])
@pytest.mark.parametrize(("precision", "times"), [("bf16", 1), ("fp16", 1), ("fp32", 2)])
def test_time_and_cost_are_those_of_all_gpus_at_the_peak_of_the_precision(monkeypatch, precision, times, gpus):
    if gpus == 4:
        monkeypatch.setattr(plan, "device_name", lambda device: H100)
    config = replace(CONFIG, precision=precision)
    seconds = times * 1900 * 524288 * MODEL.flops_per_token() / (0.4 * 989e12 * gpus)
    steps = f"1,900 steps take {duration_text(seconds)} on {gpus} x {H100}, at 40% of the peak in {precision}"
    expected = f"{steps}; they cost {gpus * seconds / 3600 * 2.5:,.2f}"
    start = Start(state=TrainState(step=100))
    assert time_text(start, config, MODEL, FOUR).removeprefix("unknown here; ") == expected


@pytest.mark.parametrize(("minutes", "a_day"), [(3, "; latest.pt every 3 min 00 s or less, up to {} a day"), (0, "")])
def test_timed_saves_are_counted_for_a_day(minutes, a_day):
    size = checkpoint_bytes(MODEL, "adamw")
    text = f"{bytes_text(size)} each" + a_day.format(bytes_text(24 * 20 * size))
    assert saves_text(replace(CONFIG, checkpoint_minutes=minutes), MODEL) == text


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_has_the_size_of_the_plan(workdir, optimizer):
    run_here("--optimizer", optimizer, "--muon_beta2", "0.9")
    content = load("checkpoints/latest.pt")
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in named_tensors(content).values()}.values())  # tied: once
    assert checkpoint_bytes(sketch_of(GPTConfig(**content["model_config"])), optimizer) == size


def test_plan_in_a_folder_with_checkpoints_says_what_training_needs(workdir, capsys):
    run_here("--max_steps", "3")
    for flags, says_it in (("--resume", "latest"), False), (("--checkpoint_dir", "new"), False), ((), True):
        capsys.readouterr()
        assert run_here("--dry_run", *flags) == 0
        advice = "already holds checkpoints; to train, use another --checkpoint_dir or --resume latest\n"
        assert (advice in capsys.readouterr().out) == says_it


def test_dry_run_counts_the_steps_that_are_left_and_writes_nothing(workdir, capsys):
    run_here("--max_steps", "3")
    before = sorted(workdir.rglob("*"))
    for steps, flags in ((1000, ("--checkpoint_dir", "new")), (997, ("--resume", "latest"))):
        assert run_here(*flags, "--max_steps", "1000", "--dry_run") == 0
        assert f"\ntime         unknown here; the first of {steps:,} steps show the speed\n" in capsys.readouterr().out
    assert sorted(workdir.rglob("*")) == before


def test_plan_of_a_known_number_of_steps_needs_no_data(tmp_path, capsys):
    assert train.main(["--config", "gpt2-1b", "--precision", "bf16", "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert "no shards in data/edu_fineweb10B yet; planned with the vocabulary of --tokenizer gpt2\n" in plan
    assert "vocabulary 50,257 (gpt2)\n" in plan
    assert "\nsaves        9.1" in plan
    assert "x 1 rank x 128 micro-steps); warm-up 2,000 steps\n" in plan
    assert "tokens       104,857,600,000, 137.9 per parameter; --tokens_per_parameter 20 is about compute" in plan
    assert "time         unknown here; 100,000 steps take " in plan
    assert list(tmp_path.iterdir()) == []


def test_plan_of_a_preset_assumes_the_default_data_until_there_is_some(capsys):
    """The command of docs/models.md, on a fresh clone."""
    assert train.main("--config gpt2-xl --context_length 2048 --precision bf16 --dry_run".split()) == 0
    plan = capsys.readouterr().out
    assert "planned with the vocabulary of --tokenizer gpt2 and 18,795 steps per epoch\n" in plan
    assert "steps        93,975, each of " in plan and "; 5.00 epochs (1 epoch = 18,795 steps); " in plan
    with pytest.raises(UserError, match=r"(?i)\bmixture\b.*--max_steps\b"):
        train.main("--mix a,b --precision bf16 --dry_run".split())


@pytest.mark.parametrize(("flags", "planned"), [
    ("", "planned with the vocabulary of --tokenizer bytes\n"),
    ("--max_steps 0 --num_epochs 2 --steps_per_epoch 40", "steps +80, .*; 2.00 epochs .1 epoch = 40 steps.; "),
])  # fmt: skip
def test_plan_without_data_says_how_long_the_run_is(workdir, capsys, flags, planned):
    assert run_here("--dry_run", *"--data_dir nowhere --tokenizer bytes".split(), *flags.split()) == 0
    assert re.search(planned, capsys.readouterr().out)


@pytest.mark.parametrize("flags", [(), ("--dry_run",)], ids=["a start", "a plan"])
def test_a_start_says_if_the_disk_has_no_room_for_all_checkpoints(workdir, monkeypatch, capsys, flags):
    """Two rolling ones, two epochs, latest, backup, best, and the one that is being written."""
    flags = ("--max_steps", "4", "--checkpoint_freq", "2", "--steps_per_epoch", "2", "--eval_freq", "4", *flags)
    run_here(*flags, "--checkpoint_dir", "other")
    size = checkpoint_bytes(sketch_of(replace(GPTConfig(), **SHAPE)), "adamw")
    for free in (8 * size - 1, 8 * size):
        capsys.readouterr()
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(total=10**12, free=free))
        run_here(*flags, "--checkpoint_dir", f"run{free}")
        said = capsys.readouterr().out
        expected = f"up to 8 checkpoints of {bytes_text(size)}, {bytes_text(8 * size)} -- NOT ENOUGH: "
        assert (expected in said) == (free < 8 * size)


@pytest.mark.parametrize("available", [10**5, 10**9])
def test_plan_says_if_memory_is_short(workdir, monkeypatch, capsys, available):
    monkeypatch.setattr("steadygpt.start.plan.memory_bytes", lambda device: available)
    monkeypatch.setattr("steadygpt.start.plan.available_memory_bytes", lambda: available)
    run_here("--dry_run")
    lines = capsys.readouterr().out.splitlines()
    for label, advice in (
        ("memory ", "--mini_batch_size auto or a smaller model"),
        ("host memory ", "a larger host or a smaller model"),
    ):
        [line] = [line for line in lines if line.startswith(label)]
        assert (f" -- NOT ENOUGH: 100 kB available; try {advice}" in line) == (available < 10**6)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_evaluations_of_a_preset_cost_at_most_3_percent(preset):
    """Of training; a forward pass is a third of the work."""
    config = parse_args(["--config", preset])[0]
    tokens = 0.0  # a step
    if config.eval_freq:
        tokens += config.eval_tokens / config.eval_freq
    if config.hellaswag_freq:
        tokens += 1_600_000 / config.hellaswag_freq  # with GPT-2's tokenizer
    assert 0.002 <= tokens / 3 / config.total_batch_size <= 0.03


@pytest.mark.parametrize(("pattern", "layers", "has_attention"), [
    ("A", "2 layers,", True),
    ("CA", "2 layers (1 with short convolutions),", True),
    ("C", "2 layers (2 with short convolutions),", False),
])  # fmt: skip
def test_the_plan_counts_short_convolutions_and_names_a_kernel_only_for_attention(
    pattern, layers, has_attention, workdir, capsys
):
    assert run_here("--layer_pattern", pattern, "--dry_run") == 0
    out = capsys.readouterr().out
    assert f"M parameters: {layers} 2 heads" in out
    assert ("attention by " in out) == has_attention
