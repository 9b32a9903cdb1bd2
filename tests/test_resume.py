"""Stopping, saving and resuming a run, and the folders that it writes to."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import (
    DEVICE,
    TINY,
    command,
    environment,
    in_ranks,
    load,
    metrics,
    need_gpus,
    options_in,
    run_here,
    write_data,
)
from test_train import fails, folders

import train
from steadygpt.base.options import UserError
from steadygpt.checkpoint.files import trained_with
from steadygpt.machine import device

# ---------------------------------------------------------------------------------------------------------------------
# stopping


def test_ctrl_c_saves_although_stdout_is_a_closed_pipe(workdir):
    """In `train.py | tee log`, Ctrl-C can end tee first."""
    flags = ("--max_steps", "1000000", *folders("a"))
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True, env=environment())
    assert any(re.match("step +3/", line) for line in process.stdout)
    process.stdout.close()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    status = json.loads(open("a/status.json").read())
    assert (status["status"], status["reason"]) == ("stopped", "SIGINT")
    assert load("a/latest.pt")["step"] == status["step"] > 3


def test_run_without_standard_streams_trains_and_resumes(workdir):
    """As daemons and some schedulers start programs."""
    for closed, flags in ((">&- 2>&- <&-", ()), (">&-", ("--resume", "--max_steps", "9"))):
        train_it = shlex.join(command(*flags, *folders("a")))
        assert subprocess.run(["bash", "-c", f"{train_it} {closed}"], env=environment()).returncode == 0
    log = Path("logs-a/log.txt").read_text()
    assert "finished after 8 steps" in log and "finished after 9 steps" in log
    assert load("a/latest.pt")["step"] == 9


@pytest.mark.parametrize(
    ("folder", "variables", "named"),
    [
        (b"a\xff", {}, "'a\\udcff': not valid utf-8"),
        ("é".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0"}, "not valid ascii"),
    ],
)
def test_a_folder_that_cannot_be_written_as_text_is_refused(workdir, folder, variables, named):
    words = [*map(str.encode, command()), b"--checkpoint_dir", folder]
    done = subprocess.run(words, env=environment() | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert named in done.stderr and "LC_ALL=C.UTF-8" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# saving


def test_best_model_has_the_lowest_validation_loss(workdir):
    """Its step is saved for it."""
    flags = ("--max_steps", "30", "--max_lr", "1e-2", "--eval_freq", "5")
    assert run_here(*flags, *folders("a")) == 0
    val_losses = metrics("logs-a", "val_loss")
    best_step = min(val_losses, key=val_losses.get)
    best = load("a/best_model.pt")
    assert best["step"] == best_step
    assert best["val_loss"] == best["best_val_loss"] == val_losses[best_step]


# ---------------------------------------------------------------------------------------------------------------------
# resuming


def test_a_run_is_resumed_in_its_folder_by_any_name_of_it_or_forked(workdir, capsys):
    assert run_here("--max_steps", "4", *folders("a")) == 0
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
    assert run_here("--max_steps", "4", *folders("a")) == 0
    before = os.stat("a/latest.pt").st_mtime_ns
    Path("b").mkdir()
    Path("b/latest.pt").symlink_to("../a/latest.pt")
    assert train.main([*flags, "--logdir", "logs-b", "--max_steps", "6"]) == 0
    assert [load(name)["step"] for name in ("a/latest.pt", "b/latest.pt", "b/latest_backup.pt")] == [4, 6, 4]
    assert not any(path.is_symlink() for path in Path("b").iterdir())
    assert os.stat("a/latest.pt").st_mtime_ns == before


@pytest.mark.parametrize("left", ["best_model.pt", "stable.pt"])
def test_a_folder_with_only_the_best_or_the_stable_model_is_resumed_from_it(workdir, capsys, left):
    assert run_here("--eval_freq", "4", "--schedule", "wsd", *folders("a")) == 0
    step = load(f"a/{left}")["step"]
    for path in Path("a").glob("*.pt"):
        if path.name != left:
            path.unlink()
    capsys.readouterr()
    assert run_here("--resume", "latest", "--max_steps", "10", *folders("a")) == 0
    assert f"resumed      from a/{left} at step {step}" in capsys.readouterr().out
    assert load("a/latest.pt")["step"] == 10


def test_resume_takes_options_from_the_checkpoint_and_reports_changes(workdir, capsys):
    assert run_here("--max_steps", "4", "--use_tensorboard", "--max_lr", "4e-3", *folders("a")) == 0
    changed = ("--max_steps", "6", "--weight_decay", "0.5", "--min_lr", "2e-3")  # below the --max_lr of the run
    assert train.main(["--checkpoint_dir", "a", "--resume", "--allow_changes", *changed]) == 0
    out = capsys.readouterr().out
    assert "changed      max_steps: 4 -> 6" in out
    assert "resumed      from a/latest.pt at step 4" in out
    last = load("a/latest.pt")
    config = trained_with(last["starts"][-1])
    assert (last["step"], config.embd_size, config.weight_decay) == (6, 16, 0.5)
    assert list(metrics("logs-a", "loss")) == list(range(6))


def test_resumed_run_keeps_its_warmup(workdir):
    flags = [flag for flag in TINY if flag != "--warmup_steps"]
    flags.pop(flags.index("--max_steps") + 2)
    assert train.main([*flags, "--data_dir", "data", *folders("a")]) == 0
    assert options_in("a/latest.pt").warmup_steps == 0  # a tenth of 8 steps
    assert train.main(["--resume", "--max_steps", "20", *folders("a")]) == 0
    assert options_in("a/latest.pt").warmup_steps == 0


def with_preset(option: str, value: int, *flags: str) -> list[str]:
    """Return the flags of a tiny run with an option that a preset gives, in place of the flag that it contradicts."""
    Path("mine.toml").write_text(f"{option} = {value}\n")
    at = TINY.index("--total_batch_size" if option == "micro_steps" else f"--{option}")
    return [*TINY[:at], *TINY[at + 2 :], "--data_dir", "data", "--config", "mine.toml", *folders("a"), *flags]


with_micro_steps = partial(with_preset, "micro_steps", 3)
flags_with_rows = partial(with_preset, "mini_batch_size")


def main_in(folder: Path, argv: list[str]) -> int:
    os.chdir(folder)
    return train.main(argv)


def test_micro_steps_of_the_first_start_fix_the_tokens_of_a_step(workdir):
    need_gpus(2)
    in_ranks(2, main_in, workdir, with_micro_steps("--max_steps", "4"))
    first = load("a/latest.pt")
    assert trained_with(first["starts"][-1]).total_batch_size == 2 * 2 * 16 * 3  # ranks x rows x tokens x micro-steps
    assert train.main(with_micro_steps("--resume", "--max_steps", "6")) == 0
    assert train.main(with_micro_steps("--resume", "--max_steps", "7", "--mini_batch_size", "auto")) == 0
    assert train.main(with_micro_steps("--resume", "--max_steps", "8", "--micro_steps", "3")) == 0
    last = load("a/latest.pt")
    assert trained_with(last["starts"][-1]).total_batch_size == 192
    assert (first["rows_consumed"], last["rows_consumed"]) == (4 * 12, 8 * 12)
    with pytest.raises(UserError, match="--micro_steps is 2, but the checkpoint was trained with 3"):
        train.main(with_micro_steps("--resume", "--micro_steps", "2"))


def test_more_ranks_compute_fewer_rows_at_once(workdir, capsys):
    """4 rows at once split the 4 rows of a step on 1 rank but not on 2."""
    need_gpus(2)
    assert train.main(flags_with_rows(4, "--max_steps", "4")) == 0
    in_ranks(2, main_in, workdir, flags_with_rows(4, "--resume", "--max_steps", "6"))
    in_ranks(2, main_in, workdir, flags_with_rows(4, *folders("b")))
    for log in ("logs-a/log.txt", "logs-b/log.txt"):
        lines = Path(log).read_text().splitlines()
        assert (
            "rows         2 per micro-step instead of --mini_batch_size 4: a step has 2 rows on each of 2 ranks"
            in lines
        )
        assert not [line for line in lines if line.startswith("changed      mini_batch_size")]
    assert load("a/latest.pt")["rows_consumed"] == 6 * 4
    at = TINY.index("--mini_batch_size")
    assert train.main([*TINY[:at], *TINY[at + 2 :], "--resume", *folders("a")]) == 0  # on 1 rank again
    assert "(4 rows x 16 tokens x 1 rank x 1 micro-step)" in capsys.readouterr().out


@pytest.mark.skipif(os.environ[DEVICE] != "cpu", reason="precisions are measured only on a CPU")
def test_measured_precision_is_kept_by_a_resume(workdir, monkeypatch, capsys):
    monkeypatch.setattr(device, "native_precision", lambda device: "bf16")
    monkeypatch.setattr(device, "product_rates", lambda *_: (1e9, 2e9))
    assert run_here("--precision", "auto", "--max_steps", "3", *folders("a")) == 0
    assert re.search(
        r"^precision +bf16, chosen by --precision auto: 1 GFLOP/s in fp32 and 2 in bf16, in a test matmul of ",
        capsys.readouterr().out,
        re.M,
    )
    monkeypatch.setattr(device, "product_rates", lambda *_: (2e9, 1e9))
    assert run_here("--precision", "auto", "--resume", "latest", *folders("a")) == 0
    out = capsys.readouterr().out
    assert ", bf16, attention by " in out
    assert "changed      precision" not in out
    assert options_in("a/latest.pt").precision == "bf16"
    assert run_here("--precision", "fp32", "--resume", "latest", "--max_steps", "9", *folders("a")) == 0
    assert "changed      precision: 'bf16' -> 'fp32'" in capsys.readouterr().out


def test_micro_steps_count_rows_as_long_as_those_of_the_initial_weights(workdir, capsys):
    assert run_here(*folders("a")) == 0
    flags = ("--init_from", "a/latest.pt", "--mini_batch_size", "2", "--micro_steps", "2", "--dry_run")
    assert train.main(["--data_dir", "data", *flags]) == 0
    assert " of 64 tokens (2 rows x 16 tokens x 1 rank x 2 micro-steps);" in capsys.readouterr().out


def test_resume_auto_starts_a_new_run_in_an_empty_folder_and_leaves_a_finished_one_alone(workdir, capsys):
    assert run_here(*folders("a"), "--resume", "auto") == 0
    assert load("a/latest.pt")["step"] == 8
    before = os.stat("a/latest.pt").st_mtime_ns
    assert run_here(*folders("a"), "--resume", "auto") == 0
    assert "is finished" in capsys.readouterr().out
    assert os.stat("a/latest.pt").st_mtime_ns == before


def test_cost_and_elapsed_time_add_up_over_resumes(workdir):
    assert run_here("--gpu_hour_cost", "3600", *folders("a")) == 0
    first = load("a/latest.pt")["elapsed_s"]
    assert metrics("logs-a", "cost")[0] == pytest.approx(first, abs=2)  # one device at a cost of 1 per second
    assert run_here("--gpu_hour_cost", "3600", *folders("a"), "--resume", "--max_steps", "9") == 0
    assert metrics("logs-a", "cost")[8] > 2 * first


# ---------------------------------------------------------------------------------------------------------------------
# data and folders


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> Path:
    """A folder with runs in "a" and "b", and with links to nothing and to themselves."""
    folder = write_data(tmp_path_factory.mktemp("runs") / "data").parent
    with contextlib.chdir(folder):
        for name in "ab":
            assert run_here(*folders(name)) == 0
        Path("seed.toml").write_text("seed = 5\n")
        Path("gone").symlink_to("nowhere")
        Path("loop").symlink_to("loop")
        Path("links").mkdir()
        Path("links/latest.pt").symlink_to("../nowhere/latest.pt")
    return folder


LATER = ("--resume", "latest", "--max_steps", "20")
LINK = "cannot write to {}: a file, or a link to nothing"
MISSING = "links: all checkpoints are corrupt: links/latest.pt: no such checkpoint"


@pytest.mark.parametrize(("flags", "words"), [
    ([], "already holds checkpoints"),
    (["--resume", "b/latest.pt"], "already holds checkpoints"),
    ([*LATER, "--config", "seed.toml"], "--seed is 5, but the checkpoint was trained with 1337; drop the option, or "
     "start a new run in another --checkpoint_dir"),
    ([*LATER, "--allow_changes", "--min_lr", "5e-3"], "--min_lr 0.005 is above --max_lr 0.001"),
    (["--checkpoint_dir", "links", "--resume", "latest"], MISSING),
    (["--checkpoint_dir", "links", "--resume", "auto"], MISSING),
    (["--checkpoint_dir", "gone"], LINK.format("gone")),
    (["--checkpoint_dir", "loop"], LINK.format("loop")),
    (["--checkpoint_dir", "new", "--logdir", "loop"], LINK.format("loop")),
    (["--resume", "loop"], "/loop: no such file; expected latest, auto"),
])  # fmt: skip
def test_a_start_in_a_folder_with_a_run_is_refused_and_changes_no_checkpoint(two_runs, monkeypatch, flags, words):
    monkeypatch.chdir(two_runs)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*.pt") if path.exists()}
    assert words in fails(*folders("a"), *flags)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*.pt") if path.exists()} == before
    assert Path("links/latest.pt").is_symlink()


@pytest.mark.parametrize("flags", [[], ["--resume", "auto"]])
def test_micro_steps_need_a_number_of_rows(workdir, flags):
    with pytest.raises(UserError, match="--micro_steps needs a number of rows as --mini_batch_size; or give --total"):
        train.main(with_micro_steps("--mini_batch_size", "auto", *flags))


def test_checkpoints_and_logs_can_share_a_folder(workdir):
    assert run_here("--checkpoint_dir", "a", "--logdir", "a") == 0
    assert run_here("--checkpoint_dir", "a", "--logdir", "a", "--resume", "--max_steps", "9") == 0
    assert len(metrics("a", "loss")) == 9


def test_resume_before_the_best_model_warns_that_it_will_be_replaced(workdir, capsys):
    assert run_here("--eval_freq", "4", "--checkpoint_freq", "2", *folders("a")) == 0
    best = load("a/best_model.pt")["step"]
    assert run_here("--resume", "a/rolling_step_000002.pt", "--logdir", "logs-a") == 0
    warning = f"warning: a/best_model.pt: of step {best}; the next best model replaces it. Copy it to keep it"
    assert warning in capsys.readouterr().err


def test_corrupt_evaluations_are_a_warning_and_are_replaced(workdir, capsys):
    assert run_here("--eval_freq", "4", *folders("a")) == 0
    Path("a/evaluations.json").write_text('{"4": {"val_l')
    assert run_here("--resume", "--eval_freq", "4", "--max_steps", "12", *folders("a")) == 0
    warning = r"^warning: a/evaluations.json: not JSON \(.*; its validation losses are ignored$"
    assert re.search(warning, capsys.readouterr().err, re.MULTILINE)
    assert list(json.loads(Path("a/evaluations.json").read_text())) == ["8", "12"]
