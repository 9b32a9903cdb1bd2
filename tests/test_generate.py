"""Text from any tier of checkpoint."""

import sys

import pytest
import torch
from test_checkpoint import content, damage

import generate
from errors import UserError
from model import GPT, GPTConfig


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, context_length=32, num_layers=1, num_heads=1, embd_size=8))
    torch.nn.init.normal_(model.wte.weight[:256], std=1.0)
    checkpoint = content(3) | {"model": model.state_dict(), "model_config": vars(model.config), "tokenizer": "bytes"}
    for name in ("latest.pt", "latest_backup.pt", "best_model.pt", "rolling_step_000003.pt"):
        torch.save(checkpoint, tmp_path / name)
    return tmp_path


@pytest.fixture
def texts(folder, monkeypatch, capsys):
    """Run the command; returns what it prints."""

    def run(*argv: str) -> str:
        options = ["--checkpoint_dir", str(folder), "--device", "cpu", "--max_tokens", "20"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *argv, *options])
        assert generate.main() == 0
        return capsys.readouterr().out

    return run


def test_each_text_begins_with_the_prompt(texts):
    out = texts("--prompt", "def ", "--num_seq", "3")
    parts = out.split("--- ")[1:]
    assert len(parts) == 3 and all(part.split("\n", 1)[1].startswith("def ") for part in parts)
    assert len(set(part.split("\n", 1)[1] for part in parts)) == 3


def test_the_same_seed_writes_the_same_text(texts):
    assert texts("--seed", "1") == texts("--seed", "1") != texts("--seed", "2")


def test_temperature_0_needs_no_seed(texts):
    assert texts("--temperature", "0", "--seed", "1") == texts("--temperature", "0", "--seed", "2")


def test_every_tier_will_do(texts, folder):
    one = texts()
    assert texts("best") == texts(str(folder / "rolling_step_000003.pt")) == one


def test_a_damaged_latest_is_passed_over_aloud(texts, folder, capsys):
    damage(folder / "latest.pt", "truncated")
    assert texts("latest")


@pytest.mark.parametrize(
    "flag", [("--num_seq", "0"), ("--max_tokens", "0"), ("--temperature", "-1"), ("--top_k", "-1")]
)
def test_impossible_values(folder, monkeypatch, flag):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint_dir", str(folder), *flag])
    with pytest.raises(UserError, match="at least"):
        generate.main()
