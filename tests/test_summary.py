"""The summary at the end of a run: on the screen, in log.txt and in status.json."""

import re

import torch
from conftest import metrics, run_here

import train
from steadygpt.runlog import read_status


def summary(workdir) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in read_status(workdir / "checkpoints")["summary"])


def test_summary_is_shown_logged_and_in_status_json(workdir, capsys):
    run_here("--eval_freq", "4", "--checkpoint_freq", "4", "--gpu_hour_cost", "3600")
    found, losses = summary(workdir), metrics("logs", "val_loss")
    assert list(found) == ["time", "tokens", "loss", "memory", "cost", "saves", "skipped"]
    assert re.fullmatch(r"\d+ s; of this start's \d+ s, \d+ s for 8 steps", found["time"].replace("min ", ""))
    assert re.fullmatch(r"512, 0\.\d\d per parameter, [\d,]+ tokens/s", found["tokens"])
    best = min(losses, key=losses.get)
    assert found["loss"] == (
        f"training {metrics('logs', 'loss')[7]:.4f}, validation {losses[8]:.4f}, "
        f"best validation {losses[best]:.4f} at step {best}"
    )
    assert re.fullmatch(r"peak \d+\.\d\d GB on rank 0", found["memory"])
    assert float(found["cost"].replace(",", "")) > 1
    assert re.fullmatch(r"2 in this start, which paused training for \d+ ms, \d+\.\d\d% of the time", found["saves"])
    assert found["skipped"] == "0 updates"
    for text in (capsys.readouterr().out, (workdir / "logs/log.txt").read_text()):
        assert text.endswith("\n".join(read_status(workdir / "checkpoints")["summary"]) + "\n")


def test_summary_counts_what_was_skipped(workdir, monkeypatch):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def sometimes_nan(*arguments):
        calls.append(clip(*arguments))
        return torch.tensor(float("nan")) if len(calls) in (3, 6) else calls[-1]

    monkeypatch.setattr(train.nn.utils, "clip_grad_norm_", sometimes_nan)
    run_here()
    assert summary(workdir)["skipped"] == "2 updates; 2 without a finite loss and gradient, 0 loss spikes"


def test_summary_of_a_resumed_run_has_its_whole_time_and_the_steps_of_this_start(workdir):
    run_here("--max_steps", "3")
    run_here("--resume", "latest", "--max_steps", "8")
    assert summary(workdir)["time"].endswith(" for 5 steps")
    assert summary(workdir)["tokens"].startswith("512, ")
