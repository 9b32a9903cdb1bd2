"""What a run will take: hours, cost and tokens in the plan."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import run_here

import train
from model import GPT
from steadygpt.base.text import duration_text
from steadygpt.config import PRESETS, TrainConfig
from steadygpt.machine.ranks import Ranks
from steadygpt.run import plan as forecasts
from steadygpt.run.plan import work_per_token

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


def forecast(config=CONFIG, step=0, val_rows=0, precision="bf16") -> list[str]:
    plan = SimpleNamespace(
        config=config, ranks=CPU, sketch=MODEL, val_rows=lambda: val_rows,
        history=SimpleNamespace(
            step=step, rows_consumed=step * config.rows_per_step, config=TrainConfig(precision=precision)
        ),
    )  # fmt: skip
    return forecasts.forecast(plan)


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


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_unknown_device_shows_a_well_known_gpu(precision):
    time, cost = forecast(dataclasses.replace(CONFIG, max_steps=20_000), precision=precision)
    start, end = f"time         unknown here; on 1 x {H100} ", "plus 0.0% for evaluation"
    assert re.fullmatch(rf"{start}[\dhmin ]+, at 40% of the peak in {precision}: 20,000 steps, {end}", time)
    assert re.fullmatch(r"cost         [\d.]+: 1 x [\d.]+ h at 2.50 per hour", cost)


def test_plan_of_a_cpu_forecasts_bf16_on_gpus_unless_a_precision_is_given(workdir, monkeypatch, capsys):
    monkeypatch.setattr(forecasts, "choose_precision", lambda *_: "fp32")
    for precision, assumed in (("auto", "bf16"), ("fp32", "fp32")):
        run_here("--dry_run", "--precision", precision, "--max_steps", str(10**11))
        assert f" of the peak in {assumed}: " in capsys.readouterr().out


def test_plan_of_a_small_run_on_a_cpu_has_no_time_of_a_gpu(workdir, capsys):
    run_here("--dry_run", "--gpu_hour_cost", "1")
    plan = capsys.readouterr().out
    assert "\ntime         unknown here: 8 steps, plus 0.0% for evaluation\n" in plan
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
        assert f"\ntime         unknown here: {steps:,} steps, plus 0.0% for evaluation\n" in capsys.readouterr().out
    assert sorted(workdir.rglob("*")) == before


@pytest.mark.pages
@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_evaluations_of_a_preset_cost_at_most_3_percent(preset, tmp_path, monkeypatch, capsys):
    """Of training on one process, on FineWeb-Edu where the preset does not say how long it trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecasts, "estimate_memory", lambda *_: ({}, {}))  # which takes most of the time of a plan
    train.main(["--config", preset, *"--device cpu --precision bf16 --steps_per_epoch 18795 --dry_run".split()])
    share = re.search(r"([\d.]+)% for evaluation", capsys.readouterr().out)[1]
    assert 0.5 <= float(share) <= 3
