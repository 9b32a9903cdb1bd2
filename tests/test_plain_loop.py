"""Training beside a plain loop: AdamW, a mean loss of the rows of a step, a clipped norm and a schedule, in PyTorch.

The loop has nothing of the product but the rows, the model's logits and its first weights. So it notices what a
comparison of the product with itself does not: a divisor, a decay, a step of the schedule.
"""

import copy
import math

import pytest
import torch
from conftest import FSDP, folders, load, run_here
from ground import built, launches, metrics, model_of, rows_of, validate, validation_rows_of
from harness import run_to_end
from torch.nn import functional as F

# Without biases: the gradient of those of the keys is zero but for rounding, which AdamW would enlarge.
OPTIONS = "--max_lr 0.02 --min_lr 0.004 --weight_decay 0.3 --grad_clip 0.7 --adam_beta2 0.9 --bias off".split()
WARMUP, STEPS, ROWS = 2, 8, 4


def learning_rate(step: int, decay: str) -> float:
    if step < WARMUP:
        return 0.02 * (step + 1) / WARMUP
    if decay == "cosine":
        return 0.004 + 0.016 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
    first = STEPS - round(0.5 * STEPS)  # of wsd's cool-down
    return 0.02 - 0.016 * max(0, step - first) / (STEPS - first)


class PlainLoop:
    """The losses, norms and last weights of the plain loop."""

    def __init__(self, decay: str = "cosine"):
        run = built("--data_dir", "data", *OPTIONS)
        model = copy.deepcopy(model_of(run))
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        groups = [{"params": others, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.9), eps=1e-8)
        self.losses, self.norms = {}, {}
        for step in range(STEPS):
            rows = torch.from_numpy(rows_of(run, ROWS * step, ROWS))
            logits = model(rows[:, :-1])[..., :257]
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
            for parameter in model.parameters():
                parameter.grad *= min(1.0, 0.7 / norm.item())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, decay)
            optimizer.step()
            self.losses[step], self.norms[step] = loss.item(), norm.item()
        self.weights = model.state_dict()


def assert_as(plain: PlainLoop, folder: str) -> None:
    assert metrics(folder, "loss") == pytest.approx(plain.losses, rel=1e-5)
    assert metrics(folder, "grad_norm") == pytest.approx(plain.norms, rel=1e-4)
    for name, weight in load(f"{folder}/latest.pt")["model"].items():
        assert torch.allclose(weight, plain.weights[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("flags", [
    (), ("--mini_batch_size", "1"), ("--mini_batch_size", "4"),
    ("--loss_chunk_size", "5", "--activation_checkpointing"), FSDP,
], ids=" ".join)  # fmt: skip
def test_a_run_is_a_plain_loop(workdir, flags):
    assert run_here(*OPTIONS, *flags) == 0
    norms = metrics("checkpoints", "grad_norm").values()
    assert min(norms) < 0.7 < max(norms)
    assert_as(PlainLoop(), "checkpoints")


def test_the_schedule_with_a_cool_down_is_a_plain_loop(workdir):
    assert run_here(*OPTIONS, "--schedule", "wsd", "--cooldown", "0.5") == 0
    assert_as(PlainLoop("wsd"), "checkpoints")


@pytest.mark.parametrize("flags", [(), FSDP], ids=" ".join)
def test_a_run_on_two_ranks_is_a_plain_loop(workdir, flags):
    run_to_end(*OPTIONS, "--mini_batch_size", "1", *flags, *folders("two"), ranks=2)
    assert_as(PlainLoop(), "two")


def test_validation_is_a_plain_loop_without_dropout(workdir):
    run = built("--data_dir", "data", "--dropout", "0.5", "--eval_freq", "1")
    rows = torch.from_numpy(validation_rows_of(run))
    model = copy.deepcopy(model_of(run)).eval()
    logits = model(rows[:, :-1])[..., :257]
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert validate(run)["val_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert model_of(run).training


def test_a_run_that_is_resumed_is_a_plain_loop(workdir):
    assert run_here(*OPTIONS, "--checkpoint_freq", "3") == 0
    assert run_here(*OPTIONS, "--resume", "checkpoints/rolling_step_000003.pt") == 0
    assert launches("checkpoints")[-1]["first_step"] == 3
    assert_as(PlainLoop(), "checkpoints")
