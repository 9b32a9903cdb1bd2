"""Training runs: the same results on any number of ranks and with any memory option, evaluation, errors, schedule."""

import gzip
import json
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FSDP, MODERN, folders, in_ranks, load, run_here, scalars, write_data, write_examples
from ground import add_metrics, alter, built, evaluations, metrics, model_of, rows_of, settled, status_of

import train
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.machine.loss import token_losses

DROPOUT = ("--dropout", "0.1")  # makes training depend on the random state


# ---------------------------------------------------------------------------------------------------------------------
# training


def test_the_loss_falls_and_each_step_is_printed(workdir, capsys):
    assert run_here("--max_steps", "60", "--max_lr", "1e-2", "--eval_freq", "30", *folders("a")) == 0
    losses, val_losses = metrics("a", "loss"), metrics("a", "val_loss")
    assert list(losses) == list(range(60))
    assert list(val_losses) == list(metrics("a", "val_bpb")) == [30, 60]
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 257, the loss of a uniform prediction
    assert losses[59] < losses[0] - 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("step 59/60"))
    assert re.fullmatch(
        r"step 59/60 \| loss [\d.]+ \| lr 1\.\d\de-04 \| grad norm [\d.]+ \| [\d,]+ ms \| [\d,]+ tok/s "
        r"(\| \w+ \S+ )*\| 100\.0% \| ETA 0 s",
        line,
    )
    assert status_of("a")["status"] == "finished"


def test_each_step_has_its_own_dropout_masks(workdir):
    write_data(workdir / "same", (65, 65))  # an epoch is a step
    constant = "--data_dir same --shuffle_rows off --max_lr 1e-12 --min_lr 0 --weight_decay 0 --dropout".split()
    for dropout in ("0", "0.5"):
        assert run_here(*constant, dropout, *folders(dropout)) == 0
    without, masked = (set(metrics(f"{dropout}", "loss").values()) for dropout in ("0", "0.5"))
    assert max(without) - min(without) < 1e-5
    assert len(masked) == 8


def test_gradients_are_clipped(workdir):
    assert run_here("--max_steps", "1", "--warmup_steps", "0", "--grad_clip", "0.01") == 0
    [norm] = metrics("checkpoints", "grad_norm").values()
    kept = load("checkpoints/latest.pt")["optimizer"].values()
    moment = math.sqrt(sum(state["exp_avg"].square().sum().item() for state in kept))
    assert moment == pytest.approx((1 - TrainConfig.adam_beta1) * 0.01, rel=1e-3)
    assert norm > 0.1


def test_muon_has_a_learning_rate_of_its_own(workdir):
    flags = "--optimizer muon --muon_lr 1e-12 --weight_decay 0 --warmup_steps 0 --max_steps".split()
    for steps in "14":
        assert run_here(*flags, steps, *folders(steps)) == 0
    before, after = (load(f"{steps}/latest.pt")["model"] for steps in "14")
    assert torch.allclose(before["h.0.mlp.c_fc.weight"], after["h.0.mlp.c_fc.weight"], rtol=0, atol=1e-9)
    assert not torch.allclose(before["wte.weight"], after["wte.weight"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("precision", "recipe"), [("bf16", []), ("fp16", []), ("bf16", MODERN)])
def test_reduced_precision_stays_close_to_fp32(workdir, precision, recipe):
    assert run_here(*recipe, *folders("a")) == 0
    assert run_here(*recipe, "--precision", precision, *folders("b")) == 0
    one, other = metrics("a", "loss"), metrics("b", "loss")
    assert one != other
    assert other == pytest.approx(one, abs=0.05)
    scaler = load("b/latest.pt")["scaler"]
    assert (scaler and (scaler["scale"], scaler["_growth_tracker"])) == ((65536, 8) if precision == "fp16" else {})


def test_profile_records_the_requested_steps(workdir, capsys):
    assert run_here("--profile", "2", "--run_name", "traced", *folders("a")) == 0
    path = workdir / "a/tensorboard/rank0.pt.trace.json.gz"
    assert f"trace in {path.relative_to(workdir)}" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    assert run_here("--resume", "--max_steps", "12", *folders("a")) == 0
    assert ".trace.json" not in capsys.readouterr().out
    assert run_here("--max_steps", "2", "--warmup_steps", "1", "--profile", "2", *folders("b")) == 0
    assert "no trace: the run was too short" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# evaluation and initial weights


def test_evaluation_and_samples_do_not_change_training(workdir):
    assert run_here(*DROPOUT, *folders("plain")) == 0
    assert run_here(*DROPOUT, "--eval_freq", "2", "--sample_freq", "3", *folders("evaluated")) == 0
    plain, evaluated = load("plain/latest.pt"), load("evaluated/latest.pt")
    assert all(torch.equal(plain["model"][name], evaluated["model"][name]) for name in plain["model"])


def test_each_sample_has_random_numbers_of_its_own(workdir, capsys):
    assert run_here("--max_lr", "1e-12", "--min_lr", "0", "--weight_decay", "0", "--sample_freq", "4") == 0
    first, second = re.findall(
        r"^step [48]/8 \| sample:\n(.*?)\n(?=step|saved|finished)", capsys.readouterr().out, re.M | re.S
    )
    assert first != second


def test_a_resume_with_a_smaller_limit_of_bad_steps_trains(workdir):
    run_here("--max_steps", "4", *folders("a"))
    before = load("a/latest.pt")
    alter("a/latest.pt", bad_steps=7)
    run_here("--resume", "--max_steps", "6", "--max_bad_steps", "5", *folders("a"))
    after = load("a/latest.pt")
    assert (after["step"], after["bad_steps"]) == (6, 0)
    assert not torch.equal(before["model"]["wte.weight"], after["model"]["wte.weight"])


def test_init_from_takes_only_the_weights(workdir):
    assert run_here(*folders("a")) == 0
    flags = ("--max_lr", "0", "--min_lr", "0", "--weight_decay", "0", "--init_from", "a/latest.pt")
    assert run_here(*flags, *folders("b")) == 0
    first, second = load("a/latest.pt"), load("b/latest.pt")
    assert second["step"] == 8
    assert all(torch.equal(first["model"][n], second["model"][n]) for n in first["model"])


def test_hellaswag_runs_during_training(workdir):
    write_examples(workdir)
    flags = ("--eval_freq", "8", "--hellaswag_freq", "4", "--hellaswag_file", "hs.jsonl")
    assert run_here(*flags, *folders("a")) == 0
    assert metrics("a", "hellaswag_acc")[8] in (0, 0.5)
    names = ("hellaswag_acc", "hellaswag_acc_norm")
    measured = {step: {name: metrics("a", name)[step] for name in names} for step in (4, 8)}
    measured[8] |= {name: metrics("a", name)[8] for name in ("val_loss", "val_bpb")}
    assert evaluations("a") == measured


def test_shards_of_other_tools_need_no_manifest(workdir):
    (workdir / "nano").mkdir()
    for split in ("train", "val"):
        np.resize(np.arange(100, dtype=np.uint16), 400).tofile(workdir / "nano" / f"{split}.bin")
    assert run_here("--data_dir", "nano", "--eval_freq", "8", *folders("a")) == 0
    assert load("a/latest.pt")["tokenizer"] == "gpt2"
    assert load("a/latest.pt")["model_config"]["vocab_size"] == 50257


# ---------------------------------------------------------------------------------------------------------------------
# time and memory


@pytest.mark.parametrize(("flags", "warmup"), [
    ((), 715), (("--max_steps", "100"), 10), (("--max_steps", "5"), 0),
    (("--warmup_steps", "99", "--max_steps", "100"), 99),
    (("--config", "quickstart"), 40), (("--config", "quickstart", "--max_steps", "50"), 40),
])  # fmt: skip
def test_only_the_default_warmup_depends_on_the_length_of_the_run(workdir, flags, warmup, capsys):
    shape = ("--context_length", "16", "--num_heads", "4", "--embd_size", "16", "--num_layers", "1")
    batch = ("--total_batch_size", "64", "--mini_batch_size", "2", "--steps_per_epoch", "2000")
    assert train.main([*flags, *shape, *batch, "--data_dir", "data", "--dry_run"]) == 0
    assert f"; warm-up {warmup} step{'s' * (warmup != 1)}\n" in capsys.readouterr().out


def train_with_a_metric(folder: Path) -> int:
    """Train with a metric of one's own, as docs/hacking.md says: its value is 1 on rank 0 and 2 on rank 1."""
    os.chdir(folder)
    add_metrics(lambda model, rank: {"mine": torch.tensor(1 + rank)})
    return run_here("--max_steps", "3", "--use_tensorboard")


def test_a_metric_of_ones_own_is_in_every_log_as_the_mean_of_the_ranks(workdir):
    in_ranks(2, train_with_a_metric, workdir)
    assert metrics("checkpoints", "mine") == dict.fromkeys(range(3), 1.5)
    assert scalars("checkpoints/tensorboard")["train/mine"] == dict.fromkeys(range(3), 1.5)
    assert Path("checkpoints/log.txt").read_text().count(" | mine 1.5 | ") == 3


def terms_with_z_loss(model, x, targets):
    """GPT.loss_terms with the z-loss of PaLM (Chowdhery et al. 2022, section 5)."""
    logits = model._logits(x)[:, : model.config.vocab_size].float()
    return {
        "loss": torch.nn.functional.cross_entropy(logits, targets, reduction="none"),
        "z_loss": 0.1 * logits.logsumexp(-1).square(),
    }


def mean_losses(run) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of cross-entropy and z-loss over the rows of the first step, computed beside the product."""
    rows = torch.from_numpy(rows_of(run, 0, settled(run).rows_per_step))
    logits = model_of(run)(rows[:, :-1])[..., : model_of(run).config.vocab_size]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return loss, 0.1 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("flags", [(), ("--loss_chunk_size", "10", "--activation_checkpointing"), FSDP, MODERN])
def test_a_second_term_of_the_loss_is_written_once(workdir, inject, flags):
    """It is minimized with the loss, and every log, validation and the line of a step have it under its own name."""
    inject.replace_loss_terms(terms_with_z_loss)
    loss, z_loss = mean_losses(built("--data_dir", "data"))
    assert run_here("--max_steps", "3", "--eval_freq", "2", "--use_tensorboard", *flags) == 0
    if flags != MODERN:  # whose other weights have another loss
        assert metrics("checkpoints", "loss")[0] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics("checkpoints", "z_loss")[0] == pytest.approx(z_loss.item(), rel=1e-5)
    assert list(metrics("checkpoints", "z_loss")) == [0, 1, 2]
    assert metrics("checkpoints", "z_loss") == pytest.approx(scalars("checkpoints/tensorboard")["train/z_loss"])
    assert list(metrics("checkpoints", "val_z_loss")) == [2, 3]
    assert Path("checkpoints/log.txt").read_text().count(" | z_loss 3") == 3


def test_the_gradient_of_a_second_term_is_added(workdir, inject):
    inject.replace_loss_terms(terms_with_z_loss)
    run = built("--data_dir", "data")
    sum(mean_losses(run)).backward()
    squares = [parameter.grad.square().sum().item() for parameter in model_of(run).parameters()]
    assert run_here("--max_steps", "1", "--warmup_steps", "0") == 0
    assert metrics("checkpoints", "grad_norm")[0] == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-5)


def test_a_term_without_a_gradient_may_be_of_evaluations_only(workdir, inject):
    """As docs/hacking.md says, with accuracy as its example."""
    flags = "--max_steps", "3", "--eval_freq", "2"
    assert run_here(*flags, "--checkpoint_dir", "plain") == 0

    def terms(model, x, targets):
        logits = model._logits(x)
        losses = {"loss": token_losses(logits, targets, model.config.vocab_size)}
        if not model.training:
            losses["accuracy"] = (logits[:, : model.config.vocab_size].argmax(1) == targets).float()
        return losses

    inject.replace_loss_terms(terms)
    assert run_here(*flags) == 0
    assert metrics("checkpoints", "accuracy") == {}
    assert all(0 <= share <= 1 for share in metrics("checkpoints", "val_accuracy").values())
    assert list(metrics("checkpoints", "val_accuracy")) == [2, 3]
    for name in ("loss", "val_loss"):
        assert metrics("checkpoints", name) == pytest.approx(metrics("plain", name), rel=1e-5)


@pytest.mark.parametrize("name", ["epoch", "time", "mfu", "lr"])
def test_a_number_with_a_name_that_is_in_use_is_refused(workdir, inject, name):
    inject.replace_loss_terms(terms_with_z_loss)
    inject.add_metrics(lambda model, rank: {name: torch.tensor(1.0)})
    with pytest.raises(ValueError, match=rf"^{name}: "):
        run_here("--max_steps", "3")
    assert metrics("checkpoints", "loss") == {}


def test_a_term_of_the_loss_that_is_no_number_per_token_is_refused(workdir, inject):
    def terms(model, x, targets):
        return {"loss": terms_with_z_loss(model, x, targets)["loss"], "mine": x.mean()}

    inject.replace_loss_terms(terms)
    with pytest.raises(ValueError, match=r" mine .* \(\);.* \(32,\)$"):
        run_here("--max_steps", "3")


def test_a_metric_of_a_sharded_weight_is_that_of_the_whole_one(workdir, inject):
    inject.add_metrics(lambda model, rank: {"norm": model.wte.weight.norm()})
    for name, flags in (("whole", ()), ("sharded", FSDP)):
        assert run_here("--max_steps", "3", *flags, *folders(name)) == 0
    assert metrics("sharded", "norm") == pytest.approx(metrics("whole", "norm"))


def test_step_time_does_not_include_the_evaluation_before_it(workdir, inject):
    inject.before_validation_batch(lambda: time.sleep(0.1))  # 12 rows, 2 in a batch
    assert run_here("--eval_freq", "4", "--max_steps", "5") == 0
    assert metrics("checkpoints", "step_ms")[4] < 500


def test_status_json_says_that_a_run_evaluates(workdir, inject):
    """Also after the last step."""
    doing = set()
    inject.before_validation_batch(lambda: doing.add(status_of("checkpoints")["doing"]))
    assert run_here("--eval_freq", "4", "--max_steps", "5") == 0
    assert doing == {"evaluating"}


def test_with_fsdp_the_whole_model_is_never_in_memory(workdir, inject):
    built = []

    def look(model) -> None:
        built.extend({parameter.device.type for parameter in model.parameters()})
        raise UserError("seen")

    inject.before_sharding(look)
    with pytest.raises(UserError, match="seen"):
        run_here(*FSDP)
    assert built == ["meta"]
