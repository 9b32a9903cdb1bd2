"""The plan: data, steps, disk, and with --dry_run also memory, hours and cost."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import load, run_here

import train
from model import GPT
from steadygpt.base.options import UserError
from steadygpt.base.text import bytes_text, duration_text
from steadygpt.checkpoint.files import named_tensors
from steadygpt.config import PRESETS, TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.start import plan as forecasts
from steadygpt.start.find import Start
from steadygpt.start.plan import checkpoint_bytes, saves_text, time_lines, work_per_token

CONFIG = TrainConfig(
    precision="bf16", mini_batch_size=16, eval_freq=100, hellaswag_freq=0, gpu_hour_cost=2.5, max_steps=2000
)
CPU = Ranks(torch.device("cpu"), world_size=4)
with torch.device("meta"):
    MODEL = GPT(CONFIG.shape(50257), initialize=False)
H100 = "NVIDIA H100 80GB HBM3"
HEAD = 6 * 50257 * 768
MATRICES = 6 * 12 * 12 * 768 * 768  # of 12 blocks
EVERYTHING = MODEL.flops_per_token()


def forecast(config=CONFIG, val_rows=0) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "val_rows", lambda config, data: val_rows)
        return time_lines(Start(config), config, None, MODEL, CPU)


def test_cost_is_that_of_all_gpus(monkeypatch):
    monkeypatch.setattr(forecasts, "device_name", lambda device: H100)
    _, cost = forecast()
    hours = 2000 * 524288 * EVERYTHING / (0.4 * 989e12 * 4) / 3600
    assert cost == f"cost         {4 * hours * 2.5:,.2f}: 4 x {hours:,.1f} h at 2.50 per hour"


def test_evaluations_are_counted_up_to_the_last_step():
    config = dataclasses.replace(CONFIG, eval_freq=1500, hellaswag_freq=2000)
    time, _ = forecast(config, val_rows=1024)
    share = (2 * 1024 * 1024 + 1_600_000) / 3 / (2000 * 524288)  # two validations, one HellaSwag
    assert f"2,000 steps, plus {share:.1%} for evaluation" in time


def test_timed_saves_are_counted_for_a_day():
    config = dataclasses.replace(CONFIG, checkpoint_minutes=3, checkpoint_freq=0)
    a_day = bytes_text(24 * 20 * checkpoint_bytes(MODEL, "adamw"))
    assert saves_text(config, MODEL) == f"latest.pt every 3 min 00 s or less, up to {a_day} a day"


@pytest.mark.parametrize(("precision", "times"), [("bf16", 1), ("fp16", 1), ("fp32", 2)])
def test_step_is_derived_from_the_peak_of_the_gpu_in_the_precision(precision, times, monkeypatch):
    monkeypatch.setattr(forecasts, "device_name", lambda device: H100)
    config = dataclasses.replace(CONFIG, precision=precision)
    time, _ = forecast(config)
    seconds = times * 2000 * 524288 * EVERYTHING / (0.4 * 989e12 * 4)
    start = (
        f"time         on 4 x {H100} {duration_text(seconds)}, at 40% of the peak in {precision}: 2,000 steps, plus "
    )
    assert time == f"{start}0.0% for evaluation"


@pytest.mark.parametrize(("changes", "recomputed"), [
    ({"activation_checkpointing": True}, (EVERYTHING - HEAD) / 3),  # the blocks' forward pass
    ({"loss_chunk_size": 1024}, HEAD / 3),
    ({"loss_chunk_size": 16 * 1024}, 0),  # all tokens of a micro-step at once
    ({"activation_checkpointing": True, "loss_chunk_size": 1024}, EVERYTHING / 3),
])  # fmt: skip
def test_recomputed_work_is_counted_in_training_but_not_in_evaluation(changes, recomputed):
    training, evaluation = work_per_token(dataclasses.replace(CONFIG, **changes), MODEL)
    assert training == pytest.approx(EVERYTHING + recomputed)
    assert evaluation == pytest.approx(EVERYTHING / 3)


@pytest.mark.parametrize(("precision", "assumed"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16")])
def test_unknown_device_shows_a_well_known_gpu(precision, assumed):
    """A plan that is made on a CPU, whose precision is fp32, is for GPUs."""
    time, cost = forecast(dataclasses.replace(CONFIG, max_steps=20_000, precision=precision))
    start, end = f"time         unknown here; on 1 x {H100} ", "plus 0.0% for evaluation"
    assert re.fullmatch(rf"{start}[\dhmin ]+, at 40% of the peak in {assumed}: 20,000 steps, {end}", time)
    assert re.fullmatch(r"cost         [\d.]+: 1 x [\d.]+ h at 2.50 per hour", cost)


def test_plan_of_a_small_run_on_a_cpu_has_no_time_of_a_gpu(workdir, capsys):
    run_here("--dry_run", "--gpu_hour_cost", "1")
    plan = capsys.readouterr().out
    assert "\ntime         unknown here: 8 steps, plus 0.0% for evaluation; the first steps show the speed\n" in plan
    assert "H100" not in plan and "\ncost " not in plan


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
        assert f"\ntime         unknown here: {steps:,} steps, plus 0.0% for evaluation; " in capsys.readouterr().out
    assert sorted(workdir.rglob("*")) == before


def test_plan_of_a_known_number_of_steps_needs_no_data(tmp_path, capsys):
    assert train.main(["--config", "gpt2-1b", "--precision", "bf16", "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert "no shards in data/edu_fineweb10B yet; planned with the vocabulary of --tokenizer gpt2\n" in plan
    assert "validation   10,485,760 tokens every 250 steps: about " in plan
    assert "vocabulary 50,257 (gpt2)\n" in plan
    assert "at most 9 in checkpoints: 82.1 GB; " in plan
    assert "x 1 rank x 128 micro-steps); warm-up 2,000 steps\n" in plan
    assert "tokens       104,857,600,000, 137.9 per parameter; --tokens_per_parameter 20 is about compute" in plan
    assert "time         unknown here; on 1 x NVIDIA H100" in plan
    assert ": 100,000 steps, plus 1.4% for evaluation\n" in plan
    assert list(tmp_path.iterdir()) == []


def test_plan_of_a_preset_assumes_the_default_data_until_there_is_some(capsys):
    """The command of docs/models.md, on a fresh clone."""
    assert train.main("--config gpt2-xl --context_length 2048 --precision bf16 --dry_run".split()) == 0
    plan = capsys.readouterr().out
    assert "planned with the vocabulary of --tokenizer gpt2 and 18,795 steps per epoch\n" in plan
    assert "steps        93,975, each of " in plan and "; 5.00 epochs (1 epoch = 18,795 steps); " in plan
    with pytest.raises(UserError, match=r"(?i)\bmixture\b.*--max_steps\b"):
        train.main("--mix a,b --precision bf16 --dry_run".split())


NO_DATA = "--data_dir nowhere --tokenizer bytes"


@pytest.mark.parametrize(("flags", "planned"), [
    (NO_DATA, "planned with the vocabulary of --tokenizer bytes\n"),
    (f"{NO_DATA} --max_steps 0 --num_epochs 2 --steps_per_epoch 40",
     "steps +80, .*; 2.00 epochs .1 epoch = 40 steps.; "),
    ("--eval_freq 0 --eval_tokens 32", "plus 0.0% for evaluation; "),
    ("--eval_freq 250 --eval_tokens 32", "\nvalidation   32 of 192 tokens at the end\n"),  # the run is shorter
    ("--eval_freq 4 --eval_tokens 32", "\nvalidation   32 of 192 tokens every "),
    ("--eval_freq 4 --eval_tokens 192", "\nvalidation   192 tokens every "),
    ("--eval_freq 1 --eval_tokens 192 --total_batch_size 32", "plus 200.0% for evaluation; "),
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
        monkeypatch.setattr("steadygpt.start.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
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


@pytest.mark.pages
@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_evaluations_of_a_preset_cost_at_most_3_percent(preset, monkeypatch, capsys):
    """Of training on one process, on FineWeb-Edu where the preset does not say how long it trains."""
    # Most of the time of a plan.
    monkeypatch.setattr("steadygpt.start.memory.estimate_memory", lambda *_: ({}, {}))
    train.main(["--config", preset, *"--device cpu --precision bf16 --steps_per_epoch 18795 --dry_run".split()])
    share = re.search(r"([\d.]+)% for evaluation", capsys.readouterr().out)[1]
    assert 0.5 <= float(share) <= 3
