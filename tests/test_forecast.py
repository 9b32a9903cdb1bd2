"""What a run will take: a step measured from shorter ones, hours, cost and tokens in the plan."""

import dataclasses
import re

import pytest
import torch
from conftest import run_here

from config import TrainConfig
from model import GPT
from steadygpt import forecast as forecasts
from steadygpt.distributed import Ranks
from steadygpt.forecast import forecast, measure_step_s
from steadygpt.schedule import Schedule

CONFIG = TrainConfig(mini_batch_size=16, eval_freq=100, hellaswag_freq=0, gpu_hour_cost=2.5)
CPU = Ranks(torch.device("cpu"), world_size=4)
with torch.device("meta"):
    MODEL = GPT(CONFIG.shape(50257), initialize=False)
SCHEDULE = Schedule(512, 10**6, 0, max_steps=2000, warmup_steps=10, stable_steps=None)


class Machine:
    """A machine on which a step takes `update_s`, and `micro_step_s` for each micro-step; the first one compiles."""

    def __init__(self, update_s: float, micro_step_s: float, monkeypatch):
        self.update_s, self.micro_step_s, self.now_s, self.taken = update_s, micro_step_s, 0.0, []
        monkeypatch.setattr(forecasts.time, "perf_counter", lambda: self.now_s)

    def take(self, micro_steps: int) -> float:
        seconds = self.update_s + micro_steps * self.micro_step_s + (0 if self.taken else 60)
        self.now_s += seconds
        self.taken.append(micro_steps)
        return seconds


@pytest.mark.parametrize("micro_steps", [1, 2, 5, 64])
@pytest.mark.parametrize(("update_s", "micro_step_s"), [(0.2, 0.5), (0.01, 0.02), (3.0, 30.0)])
def test_step_is_computed_from_shorter_steps(micro_steps, update_s, micro_step_s, monkeypatch):
    machine = Machine(update_s, micro_step_s, monkeypatch)
    expected_s = update_s + micro_steps * micro_step_s
    assert measure_step_s(machine.take, micro_steps, Ranks(torch.device("cpu"))) == pytest.approx(expected_s)
    assert max(machine.taken) <= micro_steps
    assert machine.now_s < 60 + 200  # also where a micro-step takes half a minute


def test_measured_step_gives_time_and_cost():
    tokens, time, cost = forecast(CONFIG, SCHEDULE, CPU, MODEL, step=1000, val_rows=1024, step_s=3.6)
    assert tokens.startswith("tokens       1,048,576,000, 8.4 per parameter; about 20 ")
    # 1,000 steps of 3.6 s are an hour. A validation has 2 x 512 rows, so every 100 steps 2/3 of a step are added.
    assert time == "time         1 h 00 min: 1,000 steps and 0.7% for evaluations, at 145,636 tokens/s, measured here"
    assert cost == "cost         10.07: 4 x 1.0 h at 2.50 an hour"


def test_evaluations_are_counted_up_to_the_last_step():
    config = dataclasses.replace(CONFIG, eval_freq=1500, hellaswag_freq=2000)
    _, time, _ = forecast(config, SCHEDULE, CPU, MODEL, step=0, val_rows=1024, step_s=1.0)
    share = (2 * 1024 * 1024 + 1_600_000) / 3 / (2000 * 524288)  # two validations, one HellaSwag
    assert f"2,000 steps and {share:.1%} for evaluations" in time


def test_unmeasured_step_is_derived_from_the_peak_of_the_gpu(monkeypatch):
    monkeypatch.setattr(forecasts, "peak_flops", lambda device: 100e12)
    _, time, _ = forecast(CONFIG, SCHEDULE, CPU, MODEL, step=0, val_rows=0)
    seconds = 2000 * 524288 * MODEL.flops_per_token() / (0.4 * 100e12 * 4)
    assert time.startswith(f"time         {seconds // 3600:.0f} h ")
    assert time.endswith("if the GPUs reach 40% of their peak; --dry_run measure measures it")


def test_unknown_device_shows_well_known_gpus():
    _, unknown, *gpus = forecast(CONFIG, SCHEDULE, CPU, MODEL, step=0, val_rows=0)
    assert unknown.endswith("unknown for this device, --dry_run measure measures it")
    assert [
        re.search(r"on one (.*), if the run fits: \d+ \w+ \d+ \w+, cost [\d.]+, at 40%", gpu)[1] for gpu in gpus
    ] == [*forecasts.WELL_KNOWN]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(forecasts, "MEASURE_S", 0.1)


def test_dry_run_measures_real_steps_and_writes_nothing(workdir, quick, capsys):
    assert run_here("--dry_run", "measure", "--max_steps", "1000", "--gpu_hour_cost", "1") == 0
    out = capsys.readouterr().out
    assert re.search(r"time         \d+ \w+.*: 1,000 steps and 0.0% for evaluations, at [\d,]+ tokens/s, measured", out)
    assert "\ncost         " in out
    assert [path.name for path in workdir.iterdir()] == ["data"]


def test_dry_run_of_a_resumed_run_counts_the_steps_that_are_left(workdir, quick, capsys):
    run_here("--max_steps", "3")
    before = sorted(workdir.rglob("*"))
    run_here("--resume", "latest", "--max_steps", "10", "--dry_run", "measure")
    assert ": 7 steps and " in capsys.readouterr().out
    assert sorted(workdir.rglob("*")) == before
