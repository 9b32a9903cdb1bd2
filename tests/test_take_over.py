"""Tests of what the checkpoints of nanoGPT and its descendants become: weights, and runs that train.py resumes."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import in_ranks, load, metrics, run_here, write_data
from test_convert_hf import SMALL, assert_same_weights, checkpoint_of, mistake
from torch import nn
from torch.nn import functional as F

import convert_hf
import train
from config import TrainConfig
from convert_hf import read_run, read_weights, write_folder
from dataloader import RowStream
from generate import generate, sample_texts
from model import GPT
from steadygpt.cli import UserError
from steadygpt.foreign import TABLES
from steadygpt.schedule import learning_rate
from steadygpt.shards import find_shards
from steadygpt.tokenizer import get_tokenizer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 320}  # 257 ids and 63 padding rows
QUIET = "--device cpu --precision fp32 --eval_freq 0 --hellaswag_freq 0 --sample_freq 0 --checkpoint_minutes 0".split()
SAVED, ENDED = 6, 16  # steps

# ---------------------------------------------------------------------------------------------------------------------
# a trainer like theirs


class Elsewhere(nn.Module):
    """A GPT whose modules have the names and the order of nanoGPT's; its softmax includes the padding rows."""

    def __init__(self, bias: bool, gelu: str):
        super().__init__()
        self.heads, self.gelu, width = SHAPE["n_head"], gelu, SHAPE["n_embd"]

        def block() -> nn.ModuleDict:
            ln_1, ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
            attn = {"c_attn": nn.Linear(width, 3 * width, bias), "c_proj": nn.Linear(width, width, bias)}
            mlp = {"c_fc": nn.Linear(width, 4 * width, bias), "c_proj": nn.Linear(4 * width, width, bias)}
            parts = {"ln_1": ln_1, "attn": nn.ModuleDict(attn), "ln_2": ln_2, "mlp": nn.ModuleDict(mlp)}
            return nn.ModuleDict(parts)

        parts = {
            "wte": nn.Embedding(SHAPE["vocab_size"], width),
            "wpe": nn.Embedding(SHAPE["block_size"], width),
            "h": nn.ModuleList(block() for _ in range(SHAPE["n_layer"])),
            "ln_f": nn.LayerNorm(width, bias=bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, SHAPE["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.1)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        parts, (B, T) = self.transformer, idx.shape
        x = parts.wte(idx) + parts.wpe.weight[:T]
        for block in parts.h:
            q, k, v = block.attn.c_attn(block.ln_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
            x = x + block.attn.c_proj(y)
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate=self.gelu))
        return self.lm_head(parts.ln_f(x))


def learning_rate_there(step: int, warm: float, warmup=2, end=ENDED) -> float:
    """Return the learning rate of a loop that reaches the peak 1e-2 after `warm` steps."""
    if step < warmup:
        return 1e-2 * (step + 1) / warm
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) * (1e-2 - 1e-3)


def train_there(name: str, bias: bool = True) -> tuple[dict, list[float], dict]:
    """Train ENDED steps as nanoGPT or build-nanogpt does; return the checkpoint of step SAVED, all losses, the end."""
    nanogpt, state = name == "nanogpt", {}
    torch.manual_seed(0)
    model = Elsewhere(bias, "none" if nanogpt else "tanh")
    decayed, others = ([p for p in model.parameters() if (p.dim() >= 2) == two] for two in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), []
    shards = find_shards(write_data(Path("data/tiny")), "train", None)
    rows = RowStream(shards, 16, 1337, shuffle_shards=nanogpt, shuffle_rows=nanogpt)
    for step in range(ENDED):
        if step == SAVED:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
            state = load("state.pt")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_there(step, 3 if nanogpt else 2)
        found = 0.0
        for micro_step in range(2):
            batch = torch.from_numpy(rows.read(4 * step + 2 * micro_step, 2))
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
            found += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found)
    return state, losses, model.state_dict()


CONFIG = {
    "learning_rate": 1e-2, "min_lr": 1e-3, "warmup_iters": 2, "lr_decay_iters": ENDED, "max_iters": ENDED,
    "grad_clip": 0.5, "gradient_accumulation_steps": 2, "batch_size": 2, "block_size": 16, "eval_interval": 2000,
    "decay_lr": True, "dataset": "tiny", "device": "cuda", "dtype": "float32", "compile": True, "wandb_log": False,
}  # fmt: skip


def nanogpt_file(state: dict, bias: bool = True, **changes) -> dict:
    """Return what nanoGPT saves."""
    config = CONFIG | changes
    shape = SHAPE | {"bias": bias, "dropout": 0.0}
    return state | {"model_args": shape, "iter_num": SAVED, "best_val_loss": torch.tensor(4.5), "config": config}


@pytest.fixture
def pickled_config(monkeypatch):
    """Return a function that makes a GPTConfig as the scripts with a pickled one have it."""
    kind = type("GPTConfig", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", kind, raising=False)

    def make(**fields):
        config = kind()
        config.__dict__ |= fields
        return config

    return make


def assert_continues(losses: list[float], end: dict) -> None:
    """Assert that the run here repeated the last steps of the run there."""
    logged, here = metrics("logs", "loss"), load("checkpoints/latest.pt")
    assert (sorted(logged), here["step"]) == (list(range(SAVED, ENDED)), ENDED)
    assert max(abs(logged[step] - losses[step]) for step in logged) < 1e-5
    for name, tensor in end.items():
        difference = (here["model"][name.removeprefix("transformer.")] - tensor).abs()
        if name.endswith(
            "c_attn.bias"
        ):  # softmax ignores the keys' bias, so its gradient is rounding, which Adam scales
            difference[16:32] = 0
        assert difference.max() < 1e-5, name


# ---------------------------------------------------------------------------------------------------------------------
# runs


@pytest.mark.parametrize("bias", [True, False])
def test_ten_further_steps_of_a_nanogpt_run_equal_its_own(bias, workdir, capsys):
    state, losses, end = train_there("nanogpt", bias)
    torch.save(nanogpt_file(state, bias), "out.pt")
    assert convert_hf.main(["out.pt", "checkpoints/latest.pt", "--resume", "--tokenizer", "bytes"]) == 0
    assert "python train.py --resume checkpoints/latest.pt" in capsys.readouterr().out
    assert train.main(["--list_checkpoints"]) == 0
    assert "intact" in capsys.readouterr().out
    assert train.main(["--resume", "latest", *QUIET]) == 0
    assert_continues(losses, end)


FROM_SCRATCH = {"num_layers": 2, "num_heads": 2, "embd_size": 16, "context_length": 16, "vocab_size": 320}


@pytest.mark.parametrize(("shape", "prefix"), [
    (SHAPE, ""), (SHAPE, "module._orig_mod."), (FROM_SCRATCH, "_orig_mod."), (FROM_SCRATCH, "_orig_mod.module."),
])  # fmt: skip
def test_ten_further_steps_of_a_build_nanogpt_run_equal_its_own(shape, prefix, workdir, pickled_config, capsys):
    state, losses, end = train_there("build-nanogpt")
    weights = {prefix + name: tensor for name, tensor in state["model"].items()}
    torch.save(state | {"model": weights, "config": pickled_config(**shape), "step": SAVED, "val_loss": 4.5}, "out.pt")
    flags = ["--resume", "--tokenizer", "bytes", "--total_batch_size", "64"]
    assert convert_hf.main(["out.pt", "checkpoints/latest.pt", *flags]) == 0
    out = capsys.readouterr().out
    assert "the last learning rate was 0.00" in out
    assert "not in the file, so defaults: data_dir" in out
    changes = "--max_lr 1e-2 --min_lr 1e-3 --warmup_steps 2 --grad_clip 0.5 --mini_batch_size 2 --data_dir data/tiny"
    flags = ["--resume", "latest", "--allow_changes", "--max_steps", str(ENDED), *changes.split(), *QUIET]
    assert train.main(flags) == 0
    assert_continues(losses, end)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_continue_the_run(sharding, workdir):
    state, losses, end = train_there("nanogpt")
    torch.save(nanogpt_file(state), "out.pt")
    convert_hf.main(["out.pt", "checkpoints/latest.pt", "--resume", "--tokenizer", "bytes"])
    in_ranks(2, train.main, ["--resume", "latest", "--sharding", sharding, *QUIET])
    assert_continues(losses, end)


def test_the_run_evaluates_samples_and_exports_without_the_padding(workdir, capsys):
    state, _, _ = train_there("nanogpt")
    state["model"]["transformer.wte.weight"][257:] *= 10  # likely tokens, which no tokenizer can decode
    torch.save(nanogpt_file(state), "out.pt")
    convert_hf.main(["out.pt", "checkpoints/latest.pt", "--resume", "--tokenizer", "bytes"])
    example = {"ctx": "A man", "endings": ["sits.", "flies away.", "is a.", "of."], "label": 0}
    Path("hs.jsonl").write_text(json.dumps(example) + "\n")
    freqs = "--eval_freq 8 --sample_freq 8 --hellaswag_freq 8 --hellaswag_file hs.jsonl".split()
    assert train.main(["--resume", "latest", *QUIET, *freqs]) == 0
    assert metrics("logs", "val_loss").keys() == metrics("logs", "hellaswag_acc").keys() == {8, 16}
    assert capsys.readouterr().out.count("sample:") == 2

    trained = load("checkpoints/latest.pt")
    assert (trained["model_config"]["vocab_size"], trained["train_config"]["vocab_size"]) == (320, 320)
    write_folder(trained, Path("exported"))
    assert json.loads(Path("exported/config.json").read_text())["vocab_size"] == 257
    fresh = ["--init_from", "checkpoints/latest.pt", "--checkpoint_dir", "b", "--logdir", "b", "--activation", "gelu"]
    assert run_here(*fresh, "--data_dir", "data/tiny") == 0  # keeps the padding, too


def test_padding_rows_are_never_sampled():
    model = GPT(dataclasses.replace(SMALL, vocab_size=320))
    with torch.no_grad():
        model.lm_head.weight[257:] = 100 * model.lm_head.weight[:63]
    prompt, generator = torch.zeros(4, 1, dtype=torch.int64), torch.Generator().manual_seed(0)
    assert generate(model, prompt, 8, generator=generator).max() >= 257
    assert generate(model, prompt, 8, generator=generator, vocab_size=257).max() < 257
    assert len(sample_texts(model, get_tokenizer("bytes"), "", 8, generator, count=4)) == 4


# ---------------------------------------------------------------------------------------------------------------------
# options and position


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("there"))
        return train_there("nanogpt")[0]


def test_options_and_position_of_nanogpt_are_taken_over(state, workdir):
    torch.save(nanogpt_file(state, dtype="bfloat16", gradient_accumulation_steps=40, batch_size=12), "out.pt")
    checkpoint, lines = read_run(Path("out.pt"), "bytes")
    config = TrainConfig(**checkpoint["train_config"])
    assert (config.max_lr, config.min_lr, config.warmup_steps, config.max_steps) == (1e-2, 1e-3, 2, ENDED)
    assert (config.weight_decay, config.adam_beta1, config.adam_beta2, config.grad_clip) == (0.1, 0.9, 0.95, 0.5)
    assert (config.total_batch_size, config.mini_batch_size, config.eval_freq) == (40 * 12 * 16, 12, 2000)
    assert (config.precision, config.tokenizer, config.activation, config.bias) == ("bf16", "bytes", "gelu", True)
    assert (checkpoint["step"], checkpoint["rows_consumed"]) == (SAVED, SAVED * 40 * 12)
    assert checkpoint["best_val_loss"] == 4.5
    assert len(lines) == 2  # what is in the file and, in a folder without data/tiny, what is not: data_dir
    assert "not in the file, so defaults: data_dir data/edu_fineweb10B;" in lines[-1]


@pytest.mark.parametrize(("changes", "words"), [
    ({}, []),
    ({"warmup_iters": 10}, ["until step 10, the learning rate is 11/10 of nanoGPT's"]),
    ({"lr_decay_iters": 900, "max_iters": 500}, ["lr_decay_iters 900", "max_iters 500"]),
    ({"decay_lr": False, "lr_decay_iters": 9, "max_iters": 500, "warmup_iters": 10}, []),
])  # fmt: skip
def test_the_learning_rate_equals_nanogpts_after_the_warm_up(changes, words, state, workdir):
    torch.save(nanogpt_file(state, **changes), "out.pt")
    checkpoint, lines = read_run(Path("out.pt"), "bytes")
    assert [word for word in words if not any(word in line for line in lines)] == []
    assert len(lines) - 2 == bool(words)
    config, there = TrainConfig(**checkpoint["train_config"]), CONFIG | changes
    for step in range(there["warmup_iters"], config.max_steps):
        expected = learning_rate_there(step, math.inf, there["warmup_iters"], there["lr_decay_iters"])
        if not there["decay_lr"]:
            expected = 1e-2
        assert learning_rate(config, step, config.max_steps) == pytest.approx(expected, rel=1e-12)


def test_another_number_of_updates_than_steps_is_said(state, workdir):
    torch.save(nanogpt_file(state) | {"iter_num": 9, "best_val_loss": math.nan}, "out.pt")
    checkpoint, lines = read_run(Path("out.pt"), "bytes")
    assert "the file is at step 9, but its optimizer has made 6 updates" in lines
    assert checkpoint["best_val_loss"] is None


# ---------------------------------------------------------------------------------------------------------------------
# mistakes


def refused(content: dict, *flags: str, target="checkpoints/latest.pt") -> str:
    torch.save(content, "out.pt")
    with pytest.raises(UserError) as raised:
        convert_hf.main(["out.pt", target, "--resume", "--tokenizer", "bytes", *flags])
    assert not Path(target).exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_optimizers_that_do_not_fit_are_refused(state, workdir):
    file = nanogpt_file(state)
    groups, moments = state["optimizer"]["param_groups"], state["optimizer"]["state"]

    def with_state(index: int, **changes) -> dict:
        changed = moments | {index: moments[index] | changes}
        return file | {"optimizer": {"param_groups": groups, "state": changed}}

    without = {key: value for key, value in file.items() if key != "optimizer"}
    assert "no optimizer state, so no run to resume. Start from its weights with --init_from out.pt" in refused(without)
    assert "not a state_dict of AdamW" in refused(file | {"optimizer": {"sgd": 1}})
    assert "not a state_dict of AdamW (KeyError(5))" in refused(
        file | {"optimizer": state["optimizer"] | {"state": {i: m for i, m in moments.items() if i != 5}}}
    )
    one_group = [groups[0] | {"params": list(moments)}]
    assert "groups have [28] parameters with weight decay [0.1]; expected [10, 18]" in refused(
        file | {"optimizer": {"state": moments, "param_groups": one_group}}
    )
    decayed = [groups[0], groups[1] | {"weight_decay": 0.1}]
    assert "weight decay [0.1, 0.1]" in refused(file | {"optimizer": {"state": moments, "param_groups": decayed}})
    assert "h.0.attn.c_attn.weight is {'step': (), 'exp_avg': (3,)" in refused(with_state(2, exp_avg=torch.zeros(3)))
    assert "'max_exp_avg_sq'" in refused(with_state(2, max_exp_avg_sq=torch.zeros(48, 16)))
    assert "NaN or infinite values for wte.weight" in refused(with_state(0, exp_avg=torch.full((320, 16), math.nan)))


def test_other_mistakes_are_reported_with_the_field(state, workdir):
    file = nanogpt_file(state)
    assert "its step is None" in refused(file | {"iter_num": None})
    assert "learning_rate is 'fast'; expected float" in refused(nanogpt_file(state, learning_rate="fast"))
    assert "batch_size is 0; expected at least 1" in refused(nanogpt_file(state, batch_size=0))
    assert "vocab_size is 320; expected the 50,257" in refused(file, "--tokenizer", "gpt2")
    assert "not a run of nanoGPT or build-nanogpt" in refused(checkpoint_of(SMALL))
    assert "expected the name of a new folder, or of a checkpoint file" in refused(file, target="exported")
    with pytest.raises(UserError, match="--total_batch_size needs --resume"):
        convert_hf.main(["out.pt", "weights.pt", "--total_batch_size", "64"])
    Path("checkpoints").mkdir()
    Path("checkpoints/rolling_step_000001.pt").touch()
    assert "checkpoints already holds checkpoints (rolling_step_000001.pt" in refused(file)


# ---------------------------------------------------------------------------------------------------------------------
# weights only


def padded_state(checkpoint: dict, rows: int) -> dict:
    """Return weights with nanoGPT's names, and a vocabulary padded with random rows."""
    model = checkpoint["model"]
    table = torch.randn(rows, model["wte.weight"].size(1))
    vocab_size = checkpoint["model_config"]["vocab_size"]
    table[:vocab_size] = model["wte.weight"][:vocab_size]
    tables = {"transformer.wte.weight": table, "lm_head.weight": table}
    return {f"transformer.{name}": t for name, t in model.items() if name not in TABLES} | tables


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_checkpoints_are_read_exactly(bias, tmp_path):
    expected = checkpoint_of(
        dataclasses.replace(SMALL, vocab_size=50257, activation="gelu", bias=bias, dropout=0.2), "gpt2"
    )
    state = {f"_orig_mod.{name}": tensor for name, tensor in padded_state(expected, 50304).items()}
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12)  # the mask, if without flash attention
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": bias, "vocab_size": 50304}
    content = {"model": state, "optimizer": {}, "model_args": shape | {"dropout": 0.2}, "iter_num": 5}
    content |= {"best_val_loss": torch.tensor(1.0), "config": {"dataset": "openwebtext"}}
    torch.save(content, tmp_path / "ckpt.pt")
    found = read_weights(str(tmp_path / "ckpt.pt"))
    found["model_config"]["intermediate_size"] = 0
    assert_same_weights(expected, found)


def test_nanogpt_character_models_keep_their_vocabulary(tmp_path):
    expected = checkpoint_of(dataclasses.replace(SMALL, vocab_size=65, activation="gelu"), "")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": True, "vocab_size": 65, "dropout": 0.0}
    torch.save({"model": padded_state(expected, 65), "model_args": shape}, tmp_path / "ckpt.pt")
    assert_same_weights(expected, read_weights(str(tmp_path / "ckpt.pt")))
    assert "vocab_size is 65" in mistake(tmp_path / "ckpt.pt", "bytes")


def test_build_nanogpt_checkpoints_with_a_pickled_config_are_read_exactly(tmp_path, monkeypatch):
    kind = type("GPTConfig", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", kind, raising=False)
    config = kind()
    config.__dict__ |= {"block_size": 12, "vocab_size": 50304, "n_layer": 2, "n_head": 2, "n_embd": 16}
    expected = checkpoint_of(dataclasses.replace(SMALL, vocab_size=50257), "gpt2")
    state = {"model": padded_state(expected, 50304), "config": config, "step": 19072, "val_loss": 3.07}
    torch.save(state, tmp_path / "model_19072.pt")
    assert_same_weights(expected, read_weights(str(tmp_path / "model_19072.pt")))


def test_mistakes_in_other_checkpoints_are_reported_with_the_field(tmp_path):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 65}
    for content, words in (
        ({"model_args": shape | {"block_size": "12"}}, "block_size is '12'; expected int"),
        ({"model_args": shape | {"n_head": 3}}, "n_head is 3; expected"),
        ({"model_args": shape}, "model is not a dict of tensors"),
        ({"model_args": shape, "model": {}}, "the weight transformer.wte.weight is missing; expected (65, 16)"),
        ({"model_args": [1]}, "not a SteadyGPT checkpoint"),
        ([1], "not a SteadyGPT checkpoint"),
    ):
        torch.save(content, tmp_path / "ckpt.pt")
        assert words in mistake(tmp_path / "ckpt.pt")
