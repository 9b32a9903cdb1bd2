"""Text from any tier of checkpoint."""

import runpy
import sys

import pytest
import torch
from conftest import REPO
from test_checkpoint import content, damage

import generate
from model import GPT, GPTConfig


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, context_length=32, num_layers=1, num_heads=1, embd_size=8))
    torch.nn.init.normal_(model.wte.weight[:128], std=1.0)  # ASCII: other bytes would all read alike
    checkpoint = content(3) | {"model": model.state_dict(), "model_config": vars(model.config), "tokenizer": "bytes"}
    for name in ("latest.pt", "latest_backup.pt", "best_model.pt", "rolling_step_000003.pt"):
        torch.save(checkpoint, tmp_path / name)
    return tmp_path


@pytest.fixture
def outputs(folder, monkeypatch, capsys):
    """Run the command; returns what it prints on stdout and on stderr."""

    def run(*argv: str) -> tuple[str, str]:
        options = ["--checkpoint_dir", str(folder), "--device", "cpu", "--max_tokens", "20"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *options, *argv])
        assert generate.main() == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def texts(outputs):
    """Run the command, without a warning; returns what it prints."""

    def run(*argv: str) -> str:
        out, err = outputs(*argv)
        assert not err
        return out

    return run


def test_each_text_begins_with_the_prompt(texts):
    out = texts("--prompt", "def ", "--num_seq", "3")
    parts = out.split("--- ")[1:]
    assert len(parts) == 3
    assert all(part.split("\n", 1)[1].startswith("def ") for part in parts)
    assert len(set(part.split("\n", 1)[1] for part in parts)) == 3


def test_the_same_seed_writes_the_same_text(texts):
    assert texts("--seed", "1") == texts("--seed", "1") != texts("--seed", "2")


def test_temperature_0_needs_no_seed(texts):
    assert texts("--temperature", "0", "--seed", "1") == texts("--temperature", "0", "--seed", "2")


def test_the_likeliest_of_one_is_that_of_temperature_0(texts):
    assert texts("--top_k", "1") == texts("--temperature", "0") != texts("--top_k", "2")


def test_a_text_ends_with_its_document_or_after_max_tokens(texts, folder):
    """A model that writes "aaaaa<|endoftext|><|endoftext|>...", from its positions alone."""
    model = GPT(GPTConfig(vocab_size=257, context_length=32, num_layers=1, num_heads=1, embd_size=8))
    for parameter in (model.wte.weight, model.wpe.weight, *model.h.parameters()):
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.wte.weight[ord("a"), 0] = model.wte.weight[256, 1] = 1
        model.wpe.weight[:5, 0] = model.wpe.weight[5:, 1] = 10
    checkpoint = content(3) | {"model": model.state_dict(), "model_config": vars(model.config), "tokenizer": "bytes"}
    torch.save(checkpoint, folder / "latest.pt")
    assert texts("--temperature", "0") == "aaaaa\n"
    assert texts("--temperature", "0", "--max_tokens", "3") == "aaa\n"


def test_every_tier_will_do(texts, folder):
    one = texts()
    assert texts("best") == texts(str(folder / "rolling_step_000003.pt")) == one


def test_a_damaged_latest_is_passed_over_aloud(outputs, folder):
    whole, _ = outputs("latest")
    damage(folder / "latest.pt", "truncated")
    out, err = outputs("latest")
    assert out == whole
    assert err.startswith("warning: skipped")
    assert "latest.pt: corrupt" in err


@pytest.mark.parametrize(("flag", "words"), [
    (["--num_seq", "0"], "at least 1"), (["--max_tokens", "0"], "at least 1"), (["--temperature", "-1"], "0 or more"),
    (["--top_k", "-1"], "0 or more"), (["--device", "abacus"], "--device abacus"), (["none.pt"], "none.pt: no such"),
])  # fmt: skip
def test_impossible_values_are_told_in_one_line(folder, monkeypatch, capsys, flag, words):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint_dir", str(folder), *flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "generate.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
