"""--eval_only: the evaluations of a checkpoint, with the options of its run."""

import re

from conftest import refusal, run_here, write_examples
from ground import metrics
from harness import run_to_end

from steadygpt.base.durable import lock_folder

TRAINED = ("--eval_freq", "4", "--eval_tokens", "64", "--checkpoint_freq", "4")


def test_eval_only_repeats_validations_on_any_number_of_ranks_and_writes_nothing(workdir, capsys):
    run_here(*TRAINED)
    losses, bits = metrics("checkpoints", "val_loss"), metrics("checkpoints", "val_bpb")
    found = {
        step: f" at step {step}:\nstep {step}/8 | val loss {losses[step]:.4f}, {bits[step]:.4f} bits per byte\n"
        for step in (4, 8)
    }
    with lock_folder(workdir / "checkpoints", ""):  # by a run that is still training
        before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
        capsys.readouterr()
        assert run_here("--eval_only", "--eval_freq", "4") == 0
        assert capsys.readouterr().out == f"checkpoints/latest.pt{found[8]}"
        run_here("--eval_only", "--eval_freq", "4", "--resume", "checkpoints/rolling_step_000004.pt")
        assert capsys.readouterr().out.endswith(found[4])
        assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    assert run_to_end("--eval_only", "--eval_freq", "4", ranks=2).endswith(found[8])


def test_eval_only_of_weights_prints_each_evaluation(workdir, capsys):
    run_here(*TRAINED)
    write_examples(workdir)
    capsys.readouterr()
    sampled = ("--sample_freq", "1", "--hellaswag_freq", "1", "--hellaswag_file", "hs.jsonl")
    run_here("--eval_only", "--init_from", "checkpoints/latest.pt", "--eval_freq", "1", *sampled)
    title, val_loss, hellaswag, sample, *text = capsys.readouterr().out.splitlines()
    assert title == "checkpoints/latest.pt at step 0:"
    assert re.fullmatch(r"step 0/8 \| val loss \d\.\d{4}, \d\.\d{4} bits per byte", val_loss)
    assert hellaswag.startswith("step 0/8 | HellaSwag acc ")
    assert sample == "step 0/8 | sample:" and text


def test_eval_only_without_evaluations_or_checkpoints_is_an_error(workdir):
    with refusal(" checkpoints;"):
        run_here("--eval_only")
    run_here()
    with refusal("--eval_only", "--eval_freq", "--hellaswag_freq", "--sample_freq", " 1"):
        run_here("--eval_only")
