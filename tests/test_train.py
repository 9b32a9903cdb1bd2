"""Runs as users start them: equal on any number of ranks, stopped and killed at any moment, resumed bit by bit."""

import dataclasses
import gzip
import json
import math
import os
import re
import signal
import subprocess
import time

import pytest
import torch
from conftest import TINY, assert_same_state, command, environment, load, metrics, run, run_here, write_data

import dataloader
import train
from steadygpt import saves
from steadygpt.cli import UserError

DROPOUT = ("--dropout", "0.1")  # its randomness must survive a resume too


def folders(name: str) -> tuple[str, ...]:
    return "--checkpoint_dir", name, "--logdir", f"logs-{name}"


def read_until(process: subprocess.Popen, pattern: str) -> str:
    """Read a run's output up to a line with `pattern`; returns all of it."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return "".join(seen)
    raise AssertionError(f"no {pattern!r} in the output:\n{''.join(seen)}")


# ---------------------------------------------------------------------------------------------------------------------
# learning


def test_it_learns_and_says_so(workdir, capsys):
    assert run_here("--max_steps", "60", "--max_lr", "1e-2", "--eval_freq", "30", *folders("a")) == 0
    losses, val_losses = metrics("logs-a", "loss"), metrics("logs-a", "val_loss")
    assert list(losses) == list(range(60))
    assert list(val_losses) == [30, 60]
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 257: an untrained model knows nothing
    assert losses[59] < losses[0] - 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("step 59/60"))
    assert re.fullmatch(
        r"step 59/60 \| loss [\d.]+ \| lr 1\.\d\de-04 \| grad norm [\d.]+ \| [\d,]+ ms \| [\d,]+ tok/s "
        r"\| 100\.0% \| ETA 0 s",
        line,
    )
    assert json.loads(open("a/status.json").read())["status"] == "finished"


def test_tokens_per_second_are_those_of_all_ranks_per_second(workdir):
    assert run_here(*folders("a")) == 0
    speeds, times_ms = metrics("logs-a", "tokens_per_second"), metrics("logs-a", "step_ms")
    assert all(speeds[step] == pytest.approx(64 / times_ms[step] * 1000) for step in speeds)


def test_two_processes_compute_what_one_does_on_the_same_tokens(workdir):
    flags = ("--eval_freq", "4", "--eval_tokens", "112", "--checkpoint_freq", "4")
    assert run_here(*flags, *folders("one")) == 0
    two = run(*flags, "--use_tensorboard", *folders("two"), processes=2)
    assert two.returncode == 0, two.stderr
    for key in ("loss", "val_loss", "grad_norm"):
        one, other = metrics("logs-one", key), metrics("logs-two", key)
        assert one.keys() == other.keys()
        assert all(abs(one[step] - other[step]) < 1e-5 for step in one), key
    # ... and continued on the other number of processes, it trains on the tokens that are next.
    os.unlink("two/latest.pt")
    back = run(*folders("two"), "--resume", "two/rolling_step_000004.pt")
    assert back.returncode == 0, back.stderr
    one, other = load("one/latest.pt"), load("two/latest.pt")
    assert one["rows_consumed"] == other["rows_consumed"]
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-5) for name in one["model"])
    assert all(abs(metrics("logs-one", "loss")[s] - metrics("logs-two", "loss")[s]) < 1e-5 for s in range(8))


@pytest.mark.parametrize("flags", [(), ("--cpu_offload",)])
def test_fsdp_computes_the_same_and_saves_the_same_kind_of_file(workdir, flags):
    assert run_here(*folders("one")) == 0
    sharded = run("--sharding", "fsdp", *flags, *folders("two"), processes=2)
    assert sharded.returncode == 0, sharded.stderr
    one, other = load("one/latest.pt"), load("two/latest.pt")
    assert one.keys() == other.keys()
    assert one["optimizer"]["state"].keys() == other["optimizer"]["state"].keys()
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-5) for name in one["model"])
    assert other["model"]["wte.weight"].data_ptr() == other["model"]["lm_head.weight"].data_ptr()  # tied: saved once
    alone = ("--sharding", "ddp", "--cpu_offload", "off", "--max_steps", "9")
    assert run_here(*alone, *folders("two"), "--resume", "latest") == 0


def test_micro_steps_add_up_to_one_large_batch(workdir):
    assert run_here("--total_batch_size", "128", "--mini_batch_size", "1", *folders("a")) == 0
    assert run_here("--total_batch_size", "128", "--mini_batch_size", "8", *folders("b")) == 0
    one, other = metrics("logs-a", "loss"), metrics("logs-b", "loss")
    assert all(abs(one[step] - other[step]) < 1e-5 for step in one)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_reduced_precision_follows_fp32(workdir, precision):
    if precision == "fp8":
        pytest.importorskip("torchao")
    assert run_here(*folders("a")) == 0
    assert run_here("--precision", precision, *folders("b")) == 0
    one, other = metrics("logs-a", "loss"), metrics("logs-b", "loss")
    assert one != other
    assert all(abs(one[step] - other[step]) < 0.05 for step in one)
    assert bool(load("b/latest.pt")["scaler"]) == (precision == "fp16")


def test_the_loss_scaler_of_fp16_is_saved_and_restored(workdir):
    flags = ("--precision", "fp16", "--checkpoint_freq", "4")
    assert run_here(*flags, *folders("a")) == 0
    os.unlink("a/latest.pt")
    whole = load("a/rolling_step_000008.pt")
    assert whole["scaler"]["_growth_tracker"] == 8
    assert whole["scaler"]["scale"] == 65536
    assert run_here(*flags, *folders("a"), "--resume", "a/rolling_step_000004.pt") == 0
    resumed = load("a/latest.pt")
    assert_same_state(whole, resumed)
    assert resumed["scaler"] == whole["scaler"]


def test_a_step_whose_scaled_gradients_overflow_is_skipped_and_the_scale_halved(workdir):
    assert run_here("--precision", "fp16", *folders("a")) == 0
    before = load("a/latest.pt")
    torch.save(before | {"scaler": before["scaler"] | {"scale": 2.0**100}}, "a/latest.pt")
    assert run_here("--precision", "fp16", "--max_steps", "9", *folders("a"), "--resume") == 0
    after = load("a/latest.pt")
    assert (after["step"], after["scaler"]["scale"]) == (9, 2.0**99)
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


def test_a_neox_model_on_two_processes_in_chunks_is_that_of_one(workdir):
    """With everything that configs/small_32k.toml turns on."""
    flags = ("--rotary_pct", "0.5", "--parallel_residual", "--tied_head", "off", "--eval_freq", "8")
    assert run_here(*flags, *folders("one")) == 0
    lean = ("--activation_checkpointing", "--loss_chunk_size", "12")
    for sharding in ("ddp", "fsdp"):
        two = run(*flags, *lean, "--sharding", sharding, *folders(sharding), processes=2)
        assert two.returncode == 0, two.stderr
        for key in ("loss", "val_loss", "grad_norm"):
            one, other = metrics("logs-one", key), metrics(f"logs-{sharding}", key)
            assert one.keys() == other.keys(), key
            assert all(abs(one[step] - other[step]) < 1e-5 for step in one), key
        one, other = load("one/latest.pt")["model"], load(f"{sharding}/latest.pt")["model"]
        assert all(torch.allclose(tensor, other[name], atol=1e-5) for name, tensor in one.items())
        assert not torch.equal(other["wte.weight"], other["lm_head.weight"])  # two tensors, both saved


def test_compiled_training_is_the_same_and_leaves_no_trace_in_the_file(workdir):
    flags = ("--max_steps", "4", "--rotary_pct", "0.5", "--activation_checkpointing", "--loss_chunk_size", "12")
    assert run_here(*flags, *folders("a")) == 0
    assert run_here(*flags, "--compile", "on", *folders("b")) == 0
    one, other = load("a/latest.pt"), load("b/latest.pt")
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.allclose(one["model"][name], other["model"][name], atol=1e-5) for name in one["model"])


def test_a_profile_is_a_trace_of_the_steps_asked_for(workdir, capsys):
    assert run_here("--profile", "2", "--run_name", "traced", *folders("a")) == 0
    path = workdir / "runs/traced/rank0.pt.trace.json.gz"
    assert f"trace in {path.relative_to(workdir)}" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    assert load("a/latest.pt")["train_config"]["profile"] == 2  # of that start alone:
    assert run_here("--resume", "--max_steps", "12", *folders("a")) == 0
    assert "trace" not in capsys.readouterr().out
    assert run_here("--max_steps", "2", "--warmup_steps", "1", "--profile", "2", *folders("b")) == 0
    assert "no trace: the run was too short" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# stopped, killed, resumed


def test_ctrl_c_through_a_pipe_whose_reader_is_gone_saves_all_the_same(workdir):
    """`train.py | tee log`, and a Ctrl-C that ends tee first."""
    flags = ("--max_steps", "1000000", *folders("a"))
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, text=True, env=environment())
    read_until(process, "^step +3/")
    process.stdout.close()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    status = json.loads(open("a/status.json").read())
    assert (status["status"], status["reason"]) == ("stopped", "SIGINT")
    assert load("a/latest.pt")["step"] == status["step"] > 3


def test_limits_are_checked_against_the_checkpoints_values(workdir):
    assert run_here("--max_lr", "4e-3", "--min_lr", "1e-5", *folders("a")) == 0
    resume = ("--resume", "latest", "--allow_changes", *folders("a"))
    assert run_here("--max_steps", "9", "--min_lr", "2e-3", *resume) == 0
    assert "--min_lr 0.005 is above --max_lr 0.004" in fails("--min_lr", "5e-3", *resume)


def test_a_failed_resume_leaves_no_trace(workdir):
    assert "no such file" in fails("--resume", "lates")
    assert "no checkpoints in" in fails("--checkpoint_dir", "none", "--resume", "latest")
    assert os.listdir() == ["data"]


def test_stopped_before_the_first_step_ends_it_can_be_resumed_all_the_same(workdir):
    assert run_here("--max_hours", "1e-9", *folders("a")) == 0
    assert load("a/latest.pt")["step"] == 0
    assert run_here("--max_hours", "0", *folders("a"), "--resume", "latest") == 0
    assert run_here(*folders("b")) == 0
    assert_same_state(load("a/latest.pt"), load("b/latest.pt"))


def test_stopped_within_the_last_evaluation_it_is_not_finished(workdir, monkeypatch):
    def stopped(training, val, stop):
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()

    with monkeypatch.context() as patch:
        patch.setattr(train, "validate", stopped)
        assert run_here("--eval_freq", "8", *folders("a")) == 0
    assert json.loads(open("a/status.json").read())["status"] == "stopped"
    assert run_here("--eval_freq", "8", *folders("a"), "--resume", "latest") == 0
    assert metrics("logs-a", "val_loss").keys() == {8}
    assert load("a/best_model.pt")["step"] == 8


def test_resume_takes_its_options_from_the_checkpoint_and_tells_what_changed(workdir, capsys):
    assert run_here("--max_steps", "4", "--use_tensorboard", *folders("a")) == 0
    assert train.main(["--checkpoint_dir", "a", "--resume", "--max_steps", "6"]) == 0
    out = capsys.readouterr().out
    assert "changed max_steps: 4 -> 6" in out
    assert "resumed from a/latest.pt at step 4" in out
    assert load("a/latest.pt")["step"] == 6
    assert load("a/latest.pt")["train_config"]["embd_size"] == 16
    assert list(metrics("logs-a", "loss")) == list(range(6))


def test_a_changed_weight_decay_counts_from_the_resume_on(workdir):
    assert run_here("--max_steps", "4", *folders("a")) == 0
    changed = ("--resume", "latest", "--allow_changes", "--weight_decay", "0.5")
    assert run_here("--max_steps", "5", *changed, *folders("a")) == 0
    assert [group["weight_decay"] for group in load("a/latest.pt")["optimizer"]["param_groups"]] == [0.5, 0]


def test_a_finished_run_is_not_trained_further(workdir, capsys):
    assert run_here(*folders("a")) == 0
    before = os.stat("a/latest.pt").st_mtime_ns
    assert run_here(*folders("a"), "--resume", "auto") == 0
    assert "is finished" in capsys.readouterr().out
    assert os.stat("a/latest.pt").st_mtime_ns == before


def test_resume_auto_starts_afresh_where_there_is_nothing(workdir):
    assert run_here(*folders("a"), "--resume", "auto") == 0
    assert load("a/latest.pt")["step"] == 8


def test_going_back_to_an_older_checkpoint_repeats_the_same_steps(workdir):
    assert run_here("--checkpoint_freq", "2", *DROPOUT, *folders("a")) == 0
    first = load("a/latest.pt")
    losses = metrics("logs-a", "loss")
    assert run_here("--logdir", "logs-a", "--resume", "a/rolling_step_000004.pt", *DROPOUT) == 0
    assert_same_state(first, load("a/latest.pt"))
    assert metrics("logs-a", "loss") == losses


def test_evaluation_and_samples_do_not_disturb_training(workdir):
    assert run_here(*DROPOUT, *folders("plain")) == 0
    assert run_here(*DROPOUT, "--eval_freq", "2", "--sample_freq", "3", *folders("evaluated")) == 0
    plain, evaluated = load("plain/latest.pt"), load("evaluated/latest.pt")
    assert all(torch.equal(plain["model"][name], evaluated["model"][name]) for name in plain["model"])


def test_tiers_of_a_run(workdir):
    """56 rows an epoch... here 73: 4 rows a step, so epoch 1 ends within step 18."""
    assert run_here("--max_steps", "40", "--checkpoint_freq", "5", "--keep_checkpoints", "3", *folders("a")) == 0
    names = sorted(name for name in os.listdir("a") if name.endswith(".pt"))
    rows = 700 // 16 + 500 // 16
    assert rows == 74
    assert names == [
        "epoch_00001.pt", "epoch_00002.pt", "latest.pt", "latest_backup.pt",
        "rolling_step_000030.pt", "rolling_step_000035.pt", "rolling_step_000040.pt",
    ]  # fmt: skip
    assert os.stat("a/latest.pt").st_ino == os.stat("a/rolling_step_000040.pt").st_ino  # one write, two names
    assert load("a/latest_backup.pt")["step"] == 37  # the save before: the end of epoch 2
    epoch = load("a/epoch_00001.pt")
    assert (epoch["step"], epoch["rows_consumed"]) == (19, 76)  # the first step after which all 74 rows were seen
    assert epoch["epoch"] == pytest.approx(76 / 74)


def test_the_best_model_is_that_of_the_lowest_validation_loss(workdir):
    flags = ("--max_steps", "30", "--max_lr", "1e-2", "--eval_freq", "5", "--checkpoint_freq", "10")
    assert run_here(*flags, *folders("a")) == 0
    val_losses = metrics("logs-a", "val_loss")
    best_step = min(val_losses, key=val_losses.get)
    best = load("a/best_model.pt")
    assert best["step"] == best_step
    assert best["val_loss"] == best["best_val_loss"] == val_losses[best_step]


def test_saves_by_the_clock_go_to_latest_and_its_backup_only(workdir, monkeypatch, capsys):
    monkeypatch.setattr(saves, "PAUSE_SHARE", 1e9)  # however long a save pauses training
    assert run_here("--checkpoint_minutes", "1e-9", "--checkpoint_freq", "3", *folders("a")) == 0
    files = sorted(name for name in os.listdir("a") if name.endswith(".pt"))
    assert files == ["latest.pt", "latest_backup.pt", "rolling_step_000003.pt", "rolling_step_000006.pt"]
    said = re.findall(r"^saved step (\d+) as (.*) \(", capsys.readouterr().out, re.MULTILINE)
    assert dict(said)["3"] == "latest.pt, rolling_step_000003.pt"
    assert dict(said)["8"] == "latest.pt"
    assert len(said) > 3  # those by the clock; one that is in flight may keep another from starting


def test_results_that_arrive_one_step_late_change_nothing(workdir, monkeypatch):
    """On CUDA a result is read while the next step runs."""
    flags = ("--max_steps", "12", "--checkpoint_freq", "3", "--eval_freq", "4", *DROPOUT)
    assert run_here(*flags, *folders("a")) == 0
    build = train.build_training
    monkeypatch.setattr(train, "build_training", lambda *args: dataclasses.replace(build(*args), late=1))
    assert run_here(*flags, *folders("b")) == 0
    for key in ("loss", "grad_norm", "val_loss", "lr", "epoch"):
        assert metrics("logs-a", key) == metrics("logs-b", key), key
    for name in ("latest.pt", "best_model.pt", "rolling_step_000003.pt"):
        one, other = load(f"a/{name}"), load(f"b/{name}")
        assert_same_state(one, other)
        assert one["loss"] == other["loss"]
        assert one["recent_losses"] == other["recent_losses"]


def test_late_bad_steps_stop_the_run_at_the_step_before_them(workdir, monkeypatch):
    build, step = train.build_training, train.train_step

    def bad_step(*args):
        result = step(*args)
        return dataclasses.replace(result, loss=math.nan) if result.step >= 5 else result

    monkeypatch.setattr(train, "build_training", lambda *args: dataclasses.replace(build(*args), late=1))
    monkeypatch.setattr(train, "train_step", bad_step)
    assert run_here("--max_steps", "12", "--max_bad_steps", "2", *folders("a")) == 1
    saved = load("a/latest.pt")
    assert saved["step"] == 5
    assert saved["rows_consumed"] == 5 * 4
    assert saved["bad_steps"] == 0


def test_init_from_starts_from_the_weights_alone(workdir):
    assert run_here(*folders("a")) == 0
    flags = ("--max_lr", "0", "--min_lr", "0", "--weight_decay", "0", "--init_from", "a/latest.pt")
    assert run_here(*flags, *folders("b")) == 0
    first, second = load("a/latest.pt"), load("b/latest.pt")
    assert second["step"] == 8
    assert all(torch.equal(first["model"][n], second["model"][n]) for n in first["model"])


def test_hellaswag_and_samples_without_their_data_are_a_warning(workdir, capsys):
    write_data(workdir / "data", tokenizer="no-such-tokenizer")
    flags = ("--hellaswag_freq", "4", "--sample_freq", "4", "--hellaswag_file", "missing.jsonl")
    assert run_here(*flags, *folders("a")) == 0
    assert capsys.readouterr().err.count("warning: ") == 1
    write_data(workdir / "data")
    assert run_here(*flags, *folders("b")) == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning: no HellaSwag in this run") == 1  # said once, not at each step
    assert captured.out.count("sample:") == 2


def test_hellaswag_in_training(workdir):
    example = {"ctx": "A man", "endings": ["sits.", "flies away.", "is a.", "of."], "label": 0}
    (workdir / "hs.jsonl").write_text(json.dumps(example) + "\n" + json.dumps(example | {"label": 3}) + "\n")
    assert run_here("--hellaswag_freq", "4", "--hellaswag_file", "hs.jsonl", *folders("a")) == 0
    assert metrics("logs-a", "hellaswag_acc").keys() == metrics("logs-a", "hellaswag_acc_norm").keys() == {4, 8}
    assert metrics("logs-a", "hellaswag_acc")[8] in (0, 0.5)  # it cannot be right about both


# ---------------------------------------------------------------------------------------------------------------------
# one line, exit status 2, nothing lost


def fails(*flags: str) -> str:
    with pytest.raises(UserError) as raised:
        run_here(*flags)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_mistake_is_one_line_and_exit_status_2(workdir):
    failed = run("--data_dir", "nowhere")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("error: no train shards in nowhere")
    assert "prepare_dataset.py" in failed.stderr


def test_under_torchrun_a_mistake_is_said_once(workdir):
    failed = run("--mini_batch_size", "3", processes=2)
    assert failed.returncode != 0
    assert len([line for line in failed.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_new_run_does_not_write_over_another(workdir):
    assert run_here(*folders("a")) == 0
    before = os.stat("a/latest.pt").st_mtime_ns
    assert "already holds checkpoints" in fails(*folders("a"))
    assert run_here(*folders("b")) == 0
    assert "already holds checkpoints" in fails(*folders("a"), "--resume", "b/latest.pt")
    assert os.stat("a/latest.pt").st_mtime_ns == before


def test_other_data_on_resume_is_refused_and_moved_data_is_not(workdir):
    assert run_here(*folders("a")) == 0
    write_data(workdir / "other", seed=1)
    message = fails("--data_dir", "other", *folders("a"), "--resume", "latest", "--max_steps", "9")
    assert "other" in message
    assert "data" in message
    os.rename("data", "moved")
    assert run_here("--data_dir", "moved", *folders("a"), "--resume", "latest", "--max_steps", "9") == 0


def test_dry_run_prints_the_plan_and_writes_nothing(workdir, capsys):
    assert run_here("--dry_run") == 0
    plan = capsys.readouterr().out
    for words in ("parameters", "training tokens", "steps an epoch", "micro-steps", "memory", "free"):
        assert words in plan
    assert sorted(os.listdir()) == ["data"]


def test_shards_of_other_tools_train_without_a_manifest(workdir):
    import numpy as np

    (workdir / "nano").mkdir()
    for split in ("train", "val"):
        np.resize(np.arange(100, dtype=np.uint16), 400).tofile(workdir / "nano" / f"{split}.bin")
    assert run_here("--data_dir", "nano", "--eval_freq", "8", *folders("a")) == 0
    assert load("a/latest.pt")["tokenizer"] == "gpt2"
    assert load("a/latest.pt")["model_config"]["vocab_size"] == 50257


# ---------------------------------------------------------------------------------------------------------------------
# schedule


@pytest.mark.parametrize(("flags", "warmup"), [
    ((), 715), (("--max_steps", "100"), 10), (("--max_steps", "5"), 0),
    (("--warmup_steps", "99", "--max_steps", "100"), 99),
    (("--config", "quickstart"), 100), (("--config", "quickstart", "--max_steps", "50"), 5),
])  # fmt: skip
def test_warmup_follows_the_length_of_the_run_unless_given(workdir, flags, warmup, capsys):
    shape = ("--context_length", "16", "--num_heads", "4", "--embd_size", "16", "--num_layers", "1")
    batch = ("--total_batch_size", "64", "--mini_batch_size", "2", "--steps_per_epoch", "2000")
    assert train.main([*flags, *shape, *batch, "--data_dir", "data", "--dry_run"]) == 0
    assert f"; {warmup} steps of warm-up" in capsys.readouterr().out


def test_a_given_warmup_longer_than_the_run_is_refused(workdir):
    assert "--warmup_steps 8 is not shorter than the run of 8 steps; try --warmup_steps 0" in fails(
        "--warmup_steps", "8"
    )


def test_a_resumed_run_keeps_its_warmup(workdir):
    flags = [flag for flag in TINY if flag != "--warmup_steps"]
    flags.pop(flags.index("--max_steps") + 2)
    assert train.main([*flags, "--data_dir", "data", *folders("a")]) == 0
    assert load("a/latest.pt")["train_config"]["warmup_steps"] == 0  # a tenth of 8 steps
    assert train.main(["--resume", "--max_steps", "90", *folders("a")]) == 0
    assert load("a/latest.pt")["train_config"]["warmup_steps"] == 0


def test_a_step_counts_the_time_since_the_step_before_but_not_evaluations(workdir, monkeypatch):
    def slow(run, last, evaluate=train.evaluate):
        evaluate(run, last)
        if run.state.step in (2, 4):
            time.sleep(0.3)  # between steps: in the time of step 2, and of step 4

    def slow_validation(*args, validate=train.validate):
        time.sleep(0.5)
        return validate(*args)

    monkeypatch.setattr(train, "evaluate", slow)
    monkeypatch.setattr(train, "validate", slow_validation)
    assert run_here("--eval_freq", "6", *folders("a")) == 0
    times_ms = metrics("logs-a", "step_ms")
    assert [step for step in times_ms if step and times_ms[step] > 250] == [2, 4]


# ---------------------------------------------------------------------------------------------------------------------
# folders and what stands in them


def test_checkpoints_and_logs_may_share_a_folder(workdir):
    assert run_here("--checkpoint_dir", "a", "--logdir", "a") == 0
    assert run_here("--checkpoint_dir", "a", "--logdir", "a", "--resume", "--max_steps", "9") == 0
    assert len(metrics("a", "loss")) == 9


def test_a_checkpoint_says_which_commit_wrote_it(workdir, capsys):
    assert run_here(*folders("a")) == 0
    commit = load("a/latest.pt")["git_commit"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", commit)
    assert f"version      commit {commit[:12]}" in open("logs-a/log.txt").read()


def test_cost_and_elapsed_time_are_wall_clock_over_all_starts(workdir):
    assert run_here("--gpu_hour_cost", "3600", *folders("a")) == 0
    first = load("a/latest.pt")["elapsed_s"]
    assert metrics("logs-a", "cost")[0] == pytest.approx(first, abs=2)  # one device at 1 a second, since the start
    assert run_here("--gpu_hour_cost", "3600", *folders("a"), "--resume", "--max_steps", "9") == 0
    assert metrics("logs-a", "cost")[8] > 2 * first


def test_the_manifest_is_read_once_per_start(workdir, monkeypatch):
    reads = []
    read = dataloader.read_manifest
    monkeypatch.setattr(dataloader, "read_manifest", lambda folder: (reads.append(folder), read(folder))[1])
    assert run_here("--eval_freq", "4", *folders("a")) == 0
    assert len(reads) == 1
    assert run_here("--eval_freq", "4", *folders("a"), "--resume", "--max_steps", "9") == 0
    assert len(reads) == 2


@pytest.mark.parametrize("flags", [(), ("--cpu_offload",)])
def test_fsdp_on_one_process_computes_the_same(workdir, flags):
    assert run_here(*DROPOUT, *folders("a")) == 0
    done = run("--sharding", "fsdp", *flags, *DROPOUT, *folders("b"))
    assert done.returncode == 0, done.stderr
    assert metrics("logs-a", "loss") == metrics("logs-b", "loss")
    assert_same_state(load("a/latest.pt"), load("b/latest.pt"))
