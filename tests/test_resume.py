"""Stopping, saving and resuming a run, and the folders that it writes to."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import (
    MODERN,
    SLOW,
    TINY,
    command,
    environment,
    folders,
    in_ranks,
    load,
    need_gpus,
    refusal,
    run_here,
    tiny_without,
)
from ground import assert_same_state, best_model, evaluations, metrics, options_in, status_of
from harness import Run, run_to_end
from injected import do_in_step, signal_at

import train
from optim import learning_rate
from steadygpt.config import TrainConfig
from steadygpt.start import settle

A = folders("a")


# ---------------------------------------------------------------------------------------------------------------------
# streams and names of a process


def ctrl_c_in_a_pipe(rank: int) -> None:
    """In `train.py | tee log`, Ctrl-C can end tee first."""
    reader, writer = os.pipe()
    sys.stdout = os.fdopen(writer, "w", buffering=1)
    do_in_step(3, lambda: os.close(reader), rank)
    signal_at(5, rank, signal.SIGINT)


def test_ctrl_c_saves_although_stdout_is_a_closed_pipe(workdir):
    run_to_end(*A, faults=[ctrl_c_in_a_pipe])
    status = status_of("a")
    assert (status["status"], status["reason"]) == ("stopped", "SIGINT")
    assert load("a/latest.pt")["step"] == status["step"] == 5


def close_streams(names: str, rank: int) -> None:
    for name in names.split():
        getattr(sys, name).close()
        setattr(sys, name, None)


def test_run_without_standard_streams_trains_and_resumes(workdir):
    """As daemons and some schedulers start programs."""
    for closed, *flags in ("stdin stdout stderr",), ("stdout", "--resume", "--max_steps", "9"):
        run = Run(*flags, *A, faults=[partial(close_streams, closed)])
        assert run.wait() == [0], run.text()
    log = Path("a/log.txt").read_text()
    assert "finished after 8 steps" in log and "finished after 9 steps" in log
    assert load("a/latest.pt")["step"] == 9


@pytest.mark.storm
def test_a_folder_may_have_a_name_that_the_locale_lacks(workdir):
    words = [*map(str.encode, command()), b"--checkpoint_dir", "\u00e9".encode()]
    variables = environment() | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load("\u00e9/latest.pt")["step"] == 8


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


def test_best_model_has_the_lowest_validation_loss(workdir):
    """Its step is saved for it."""
    flags = ("--max_steps", "30", "--max_lr", "1e-2", "--eval_freq", "5")
    assert run_here(*flags, *A) == 0
    val_losses = metrics("a", "val_loss")
    best_step = min(val_losses, key=val_losses.get)
    assert best_model("a") == (best_step, val_losses[best_step])


def test_a_run_is_resumed_in_its_folder_by_any_name_of_it_or_forked(workdir, capsys):
    assert run_here("--max_steps", "4", *A) == 0
    Path("link").symlink_to("a/latest.pt")
    Path("to-a").symlink_to("a")
    for step, which in enumerate(("a", "link", "to-a/latest.pt", "a/latest.pt"), start=4):
        assert train.main(["--resume", which, "--max_steps", str(step + 1)]) == 0
        assert f"latest.pt at step {step}\n" in capsys.readouterr().out
        assert load("a/latest.pt")["step"] == step + 1
    assert Path("link").is_symlink() and not Path("checkpoints").exists()
    assert train.main(["--resume", "a", "--checkpoint_dir", "b", "--max_steps", "9"]) == 0
    assert (load("a/latest.pt")["step"], load("b/latest.pt")["step"]) == (8, 9)


@pytest.mark.parametrize("flags", [
    ("--resume=True", "--checkpoint_dir", "b"), ("--resume", "b/latest.pt"),
    ("--resume", "b/latest.pt", "--checkpoint_dir", "b"),
])  # fmt: skip
def test_a_link_to_a_checkpoint_of_another_folder_is_replaced_and_its_target_kept(workdir, flags):
    assert run_here("--max_steps", "4", *A) == 0
    before = os.stat("a/latest.pt").st_mtime_ns
    Path("b").mkdir()
    Path("b/latest.pt").symlink_to("../a/latest.pt")
    assert train.main([*flags, "--max_steps", "6"]) == 0
    assert [load(name)["step"] for name in ("a/latest.pt", "b/latest.pt", "b/latest_backup.pt")] == [4, 6, 4]
    assert not any(path.is_symlink() for path in Path("b").iterdir())
    assert os.stat("a/latest.pt").st_mtime_ns == before


@pytest.mark.parametrize("left", ["best_model.pt", "stable.pt"])
def test_a_folder_with_only_the_best_or_the_stable_model_is_resumed_from_it(workdir, capsys, left):
    assert run_here("--eval_freq", "4", "--schedule", "wsd", *A) == 0
    step = load(f"a/{left}")["step"]
    for path in Path("a").glob("*.pt"):
        if path.name != left:
            path.unlink()
    capsys.readouterr()
    assert run_here("--resume", "latest", "--max_steps", "10", *A) == 0
    assert f"resumed      from a/{left} at step {step}" in capsys.readouterr().out
    assert load("a/latest.pt")["step"] == 10


def test_resume_auto_starts_a_new_run_in_an_empty_folder_and_leaves_a_finished_one_alone(workdir, capsys):
    assert run_here(*A, "--resume", "auto") == 0
    assert load("a/latest.pt")["step"] == 8
    before = os.stat("a/latest.pt").st_mtime_ns
    assert run_here(*A, "--resume", "auto") == 0
    assert "is finished" in capsys.readouterr().out
    assert os.stat("a/latest.pt").st_mtime_ns == before


def listed(folder: str, capsys) -> dict[str, list[str]]:
    """Return file -> step, epoch and losses of a row of --list_checkpoints."""
    capsys.readouterr()
    assert run_here("--list_checkpoints", "--checkpoint_dir", folder) == 0
    return {row.split()[0]: row.split()[1:7] for row in capsys.readouterr().out.splitlines()[1:-1]}


def test_going_back_keeps_the_best_model_and_the_losses_of_the_files_that_are_kept(workdir, capsys):
    assert run_here("--eval_freq", "4", "--checkpoint_freq", "2", *SLOW, *A) == 0
    best = load("a/best_model.pt")
    before = listed("a", capsys)
    assert best["step"] == 8
    flags = ("--max_lr", "0", "--min_lr", "0", "--allow_changes", "--eval_freq", "3")
    assert run_here("--resume", "a/rolling_step_000002.pt", "--max_steps", "5", *flags) == 0
    assert_same_state(load("a/best_model.pt"), best)
    after = listed("a", capsys)
    assert after["latest.pt"][0] == "5"
    assert {name for name, row in after.items() if row == before.get(name)} == {
        "best_model.pt", "rolling_step_000002.pt", "rolling_step_000004.pt", "rolling_step_000006.pt",
        "rolling_step_000008.pt",
    }  # fmt: skip
    assert list(evaluations("a")) == [3, 5]


# ---------------------------------------------------------------------------------------------------------------------
# options


def test_resume_takes_options_from_the_checkpoint_and_reports_changes(workdir, capsys):
    assert run_here("--max_steps", "4", "--use_tensorboard", "--max_lr", "4e-3", *A) == 0
    changed = ("--max_steps", "6", "--weight_decay", "0.5", "--min_lr", "2e-3")  # below the --max_lr of the run
    assert train.main(["--checkpoint_dir", "a", "--resume", "--allow_changes", *changed]) == 0
    out = capsys.readouterr().out
    assert "changed      max_steps: 4 -> 6" in out
    assert "resumed      from a/latest.pt at step 4" in out
    config = options_in("a/latest.pt")
    assert (load("a/latest.pt")["step"], config.embd_size, config.weight_decay) == (6, 16, 0.5)
    assert list(metrics("a", "loss")) == list(range(6))


def test_a_resume_keeps_a_number_of_warmup_steps_and_derives_the_default_again(workdir, capsys):
    assert run_here(*A) == 0
    assert run_here(*folders("b"), "--warmup_steps", "-1") == 0
    assert options_in("b/latest.pt").warmup_steps == -1
    assert "; warm-up 0 steps" in capsys.readouterr().out  # a tenth of 8 steps
    for folder, steps in (("a", 2), ("b", 4)):
        assert train.main(["--resume", folder, "--max_steps", "40", "--dry_run"]) == 0
        assert f"; warm-up {steps} steps" in capsys.readouterr().out


def with_preset(option: str, value: int, *flags: str, folder: Path = Path()) -> int:
    """Train in a folder with an option that a preset gives, in place of the flag that it contradicts."""
    os.chdir(folder)
    preset = Path("mine.toml")
    if not preset.exists():  # otherwise a rank could read it while another one writes it again
        preset.write_text(f"{option} = {value}\n")
    others = tiny_without("total_batch_size" if option == "micro_steps" else option)
    return train.main([*others, "--data_dir", "data", "--config", "mine.toml", *A, *flags])


with_micro_steps, with_rows = partial(with_preset, "micro_steps", 3), partial(with_preset, "mini_batch_size", 4)


def test_micro_steps_of_the_first_start_fix_the_tokens_of_a_step(workdir, capsys):
    need_gpus(2)
    for flags in ((), ("--resume", "auto")):
        with refusal("--micro_steps ", "--mini_batch_size", "--total_batch_size"):
            with_micro_steps("--mini_batch_size", "auto", *flags)
    in_ranks(2, partial(with_micro_steps, folder=workdir), "--max_steps", "4")
    first = load("a/latest.pt")
    assert options_in("a/latest.pt").total_batch_size == 2 * 2 * 16 * 3  # ranks x rows x tokens x micro-steps
    for steps, flags in (("6", ()), ("7", ("--mini_batch_size", "auto")), ("8", ("--micro_steps", "3"))):
        assert with_micro_steps("--resume", "--max_steps", steps, *flags) == 0
    assert options_in("a/latest.pt").total_batch_size == 192
    assert (first["rows_consumed"], load("a/latest.pt")["rows_consumed"]) == (4 * 12, 8 * 12)
    capsys.readouterr()
    assert with_micro_steps("--resume", "--micro_steps", "2", "--max_steps", "9") == 0
    assert "ignored      --micro_steps 2; the run has 192 tokens per step" in capsys.readouterr().out
    assert options_in("a/latest.pt").total_batch_size == 192


def test_more_ranks_compute_fewer_rows_at_once(workdir, capsys):
    """4 rows at once split the 4 rows of a step on 1 rank but not on 2."""
    need_gpus(2)
    assert with_rows("--max_steps", "4") == 0
    for flags in (("--resume", "--max_steps", "6"), folders("b")):
        in_ranks(2, partial(with_rows, folder=workdir), *flags)
    fewer = "rows         2 per micro-step instead of --mini_batch_size 4: a step has 2 rows on each of 2 ranks"
    for log in ("a/log.txt", "b/log.txt"):
        lines = Path(log).read_text().splitlines()
        assert fewer in lines
        assert not [line for line in lines if line.startswith("changed      mini_batch_size")]
    assert load("a/latest.pt")["rows_consumed"] == 6 * 4
    at = TINY.index("--mini_batch_size")
    assert train.main([*TINY[:at], *TINY[at + 2 :], "--resume", *A]) == 0  # on 1 rank again
    assert "(4 rows x 16 tokens x 1 rank x 1 micro-step)" in capsys.readouterr().out


def test_the_precision_of_the_first_start_is_kept_by_a_resume_on_another_processor(workdir, monkeypatch, capsys):
    monkeypatch.setattr(settle, "choose_precision", lambda wanted, device: "bf16" if wanted == "auto" else wanted)
    assert run_here("--precision", "auto", "--max_steps", "3", *A) == 0
    monkeypatch.setattr(settle, "choose_precision", lambda wanted, device: "fp32" if wanted == "auto" else wanted)
    capsys.readouterr()
    assert run_here("--precision", "auto", "--resume", "latest", *A) == 0
    out = capsys.readouterr().out
    assert ", bf16, attention by " in out
    assert "changed      precision" not in out
    assert options_in("a/latest.pt").precision == "bf16"
    assert run_here("--precision", "fp32", "--resume", "latest", "--max_steps", "9", *A) == 0
    assert "changed      precision: 'bf16' -> 'fp32'" in capsys.readouterr().out


def test_micro_steps_count_rows_as_long_as_those_of_the_initial_weights(workdir, capsys):
    assert run_here(*A) == 0
    flags = ("--init_from", "a/latest.pt", "--mini_batch_size", "2", "--micro_steps", "2", "--dry_run")
    assert train.main(["--data_dir", "data", *flags]) == 0
    assert " of 64 tokens (2 rows x 16 tokens x 1 rank x 2 micro-steps);" in capsys.readouterr().out


def test_cost_and_elapsed_time_add_up_over_resumes(workdir):
    assert run_here("--gpu_hour_cost", "3600", *A) == 0
    first = load("a/latest.pt")["elapsed_s"]
    assert metrics("a", "cost")[0] == pytest.approx(first, abs=2)  # one device at a cost of 1 per second
    assert run_here("--gpu_hour_cost", "3600", *A, "--resume", "--max_steps", "9") == 0
    assert metrics("a", "cost")[8] > 2 * first


# ---------------------------------------------------------------------------------------------------------------------
# schedules


def test_schedules_without_a_stable_part_or_only_with_one():
    def rates(steps: range, **options) -> list[float]:
        config = TrainConfig(max_lr=1.0, min_lr=0.1, warmup_steps=2, max_steps=10, **options)
        return [learning_rate(config, step) for step in steps]

    assert rates(range(10), schedule="wsd", cooldown=0.0) == rates(range(10), schedule="constant")
    falling = [1 - 0.9 * step / 8 for step in range(9)]
    assert rates(range(2, 11), schedule="wsd", cooldown=1.0) == pytest.approx(falling)
    assert rates(range(50, 51), schedule="wsd") == pytest.approx([0.1])  # after the end


def test_a_cooled_down_run_is_continued_from_stable_or_with_a_note(workdir, capsys):
    assert run_here(*MODERN, "--dry_run") == 0
    advice = "starts at step 5; stable.pt is saved just before. To train longer: --resume stable --max_steps N"
    assert f"cool-down    {advice}" in capsys.readouterr().out
    assert run_here(*MODERN, *A) == 0
    with refusal("--resume ", " 5,", " 6 ", " 4 ", "--max_steps 9"):
        run_here("--resume", "stable", "--max_steps", "6", *A)
    assert run_here("--resume", "latest", "--max_steps", "20", *A) == 0
    said = capsys.readouterr().out
    assert "lr           rises from" in said and "; --resume stable continues" in said
    assert run_here("--resume", "stable", "--max_steps", "20", *A) == 0
    assert "lr           rises from" not in capsys.readouterr().out


def test_weights_that_were_cooled_down_never_replace_stable(workdir, capsys):
    """Extended from latest, stopped and extended again, the run begins further cool-downs."""
    assert run_here(*MODERN, *A) == 0
    before = Path("a/stable.pt").read_bytes()
    for max_steps in ("20", "40"):
        assert run_here("--resume", "latest", "--max_steps", max_steps, *A) == 0
        said = capsys.readouterr().out
        assert re.search(r"^cool-down +starts again at .*: --resume stable --max_steps N$", said, re.MULTILINE)
        assert Path("a/stable.pt").read_bytes() == before
    assert run_here("--resume", "stable", "--max_steps", "20", *A) == 0
    assert load("a/stable.pt")["step"] == 12


def test_a_longer_run_that_warms_up_again_says_so(workdir, capsys):
    assert run_here("--warmup_steps", "-1", "--max_steps", "40", "--checkpoint_freq", "20", *A) == 0
    capsys.readouterr()
    assert train.main(["--resume", "a/rolling_step_000020.pt", "--max_steps", "4000", "--dry_run"]) == 0
    falls = r"^lr +falls from \S+ to \S+ at once, .* 400 steps; .*--warmup_steps 4$"
    assert re.search(falls, capsys.readouterr().out, re.MULTILINE)


def test_a_schedule_without_a_cool_down_has_no_stable_checkpoint(workdir, capsys):
    assert run_here(*MODERN, "--schedule", "cosine", "--checkpoint_freq", "6", *A) == 0
    with refusal("a/stable.pt: ", "--schedule wsd"):
        run_here("--resume", "stable", *A)
    capsys.readouterr()
    shorter = ("--resume", "a/rolling_step_000006.pt", "--max_steps", "7", "--dry_run")
    assert run_here(*shorter, *A) == 0
    assert re.search(r"^lr           falls from \S+ to \S+ at once$", capsys.readouterr().out, re.MULTILINE)
    later = ("--resume", "a/rolling_step_000006.pt", "--schedule", "wsd", "--allow_changes", "--dry_run")
    assert run_here(*later, *A) == 0  # wsd's stable part would have ended before step 6
    said = capsys.readouterr().out
    assert "lr           rises from" in said and "stable" not in said
