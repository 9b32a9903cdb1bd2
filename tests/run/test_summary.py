"""The summary at the end of a run: on the screen, in log.txt and in status.json."""

import itertools
import os
import re
import shlex

import monitor_training
import pytest
import torch
from conftest import REPO, in_ranks, run_here
from ground import forget_scores, metrics

from steadygpt.base import text
from steadygpt.log.metrics import read_status


def summary(workdir) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in read_status(workdir / "checkpoints")["summary"])


def test_summary_is_shown_logged_and_in_status_json(workdir, capsys):
    run_here("--eval_freq", "4", "--checkpoint_freq", "4", "--gpu_hour_cost", "3600")
    found, losses, bits = summary(workdir), metrics("checkpoints", "val_loss"), metrics("checkpoints", "val_bpb")
    assert [*found] == ["time", "tokens", "speed", "loss", "memory", "cost", "saves", "next"]
    assert re.fullmatch(r"\d.* s, \d+ s of it training \(8 steps\)", found["time"])
    assert re.fullmatch(r"512, 0\.\d\d per parameter", found["tokens"])
    assert re.fullmatch(r"[\d,]+ tokens/s, [\d.]+ steps/s, fp32", found["speed"])
    best = min(losses, key=losses.get)
    assert found["loss"] == (
        f"{metrics('checkpoints', 'loss')[7]:.4f}, validation {losses[8]:.4f} ({bits[8]:.4f} bits per byte), "
        f"best {losses[best]:.4f} at step {best}"
    )
    assert re.fullmatch(r"peak [\d.]+ [MG]B on rank 0, including Python and PyTorch", found["memory"])
    assert float(found["cost"].replace(",", "")) > 1
    assert re.fullmatch(r"paused training for \d+\.\d s, \d+\.\d\d% of the time", found["saves"])
    assert found["next"] == "python generate.py best, or python convert_hf.py best hf_model"
    for said in (capsys.readouterr().out, (workdir / "checkpoints/log.txt").read_text()):
        assert said.endswith("\n".join(read_status(workdir / "checkpoints")["summary"]) + "\n")


def test_summary_counts_skipped_updates(workdir, inject):
    steps = itertools.count()
    inject.change_grad_norm(lambda norm: torch.tensor(float("nan")) if next(steps) in (2, 5) else norm)
    run_here()
    assert summary(workdir)["next"] == "python generate.py latest, or python convert_hf.py latest hf_model"
    assert summary(workdir)["skipped"] == "2 updates; a warning in log.txt tells why"
    assert "doing" not in read_status(workdir / "checkpoints")  # the run has ended


def test_summary_of_a_resumed_run_has_its_whole_time_and_an_earlier_validation_with_its_bits_if_recorded(workdir):
    run_here("--eval_freq", "8", "--max_steps", "9", "--checkpoint_freq", "9")
    bits = metrics("checkpoints", "val_bpb")[9]
    run_here("--resume", "latest", "--max_steps", "11")
    found = summary(workdir)
    assert re.fullmatch(r"\d.* s in total; since this launch .* s, .* of it training \(2 steps\)", found["time"])
    assert all("since this launch" in found[name] for name in ("speed", "memory", "saves"))
    assert found["tokens"].startswith("704, ") and f" ({bits:.4f} bits per byte), best " in found["loss"]
    forget_scores("checkpoints", "val_bpb")
    run_here("--resume", "checkpoints/rolling_step_000009.pt", "--max_steps", "12")
    assert ", validation " in summary(workdir)["loss"] and "bits" not in summary(workdir)["loss"]


def stop_one_of_two() -> int:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as torchrun does
    return run_here("--max_hours", "1e-9")


def test_the_next_command_resumes_on_as_many_processes(workdir):
    in_ranks(2, stop_one_of_two)
    assert summary(workdir)["next"] == f"NPROC=2 {REPO}/resume_training.sh"


def test_a_command_is_printed_as_it_works_in_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(text, "ROOT", tmp_path / "it's")
    (tmp_path / "it's").mkdir()
    for name in ("generate.py", "resume_training.sh", "scripts/upload_manager.py"):
        there = shlex.quote(f"{tmp_path}/it's/{name}")
        assert text.command(name) == (f"python {there}" if name.endswith(".py") else there)
    monkeypatch.chdir(tmp_path / "it's")
    assert text.command("generate.py") == "python generate.py"
    assert text.command("resume_training.sh") == "./resume_training.sh"
    assert text.command("scripts/upload_manager.py") == "python scripts/upload_manager.py"


def test_the_next_command_keeps_the_mirror_as_the_monitors_does(workdir, url, capsys):
    assert run_here("--max_hours", "1e-9", "--mirror", url) == 0
    assert summary(workdir)["next"] == f"./resume_training.sh --mirror {url}"
    capsys.readouterr()
    monitor_training.main(["--once"])
    assert f"./resume_training.sh --mirror {url}"[:80] in capsys.readouterr().out


@pytest.mark.parametrize("where", ["step", "model"])
def test_exception_is_the_reason_of_a_failed_run(workdir, inject, where):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")

    inject.change_grad_norm(fail) if where == "step" else inject.around_model(before=fail)
    with pytest.raises(RuntimeError):
        run_here()
    status = read_status(workdir / "checkpoints")
    assert status["reason"] == "RuntimeError: CUDA error: an illegal memory access Compile with ..."
    assert status["status"] == "failed"
    assert "doing" not in status
    assert where == "model" or summary(workdir)["loss"] == "none"  # there is no summary before training


def test_summary_of_a_stopped_run_names_the_command_that_resumes_it(workdir):
    run_here("--max_hours", "1e-9", "--checkpoint_dir", "a b")
    assert read_status(workdir / "a b")["summary"][-1].split(maxsplit=1)[1] == (
        "./resume_training.sh --checkpoint_dir 'a b'"
    )
