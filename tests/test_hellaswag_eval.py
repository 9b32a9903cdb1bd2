"""HellaSwag's scores are those of a plain loop, whatever the batching, padding and sharing."""

import json
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from test_checkpoint import content

import hellaswag_eval
from distributed import Distributed
from errors import UserError
from hellaswag_eval import ENDINGS, evaluate, load_examples, make_batches, tokenize
from model import GPT, GPTConfig
from tokenizer import get_tokenizer

CPU = Distributed(torch.device("cpu"))
WORDS = "a man in the kitchen takes an egg and then he puts it down on a very long table".split()


def examples(count=24, seed=0) -> list[dict]:
    """Sentences of random words, of all lengths."""
    random = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        picked = torch.randint(0, len(WORDS), (int(torch.randint(1, most, (), generator=random)),), generator=random)
        return " ".join(WORDS[i] for i in picked)

    return [
        {"ctx": words(12), "endings": [words(9) for _ in range(ENDINGS)], "label": number % ENDINGS}
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, context_length=160, num_layers=2, num_heads=2, embd_size=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def rows_of(examples: list[dict], context_length=160):
    return tokenize(examples, get_tokenizer("bytes"), context_length)


@torch.no_grad()
def plain_scores(model: GPT, examples: list[dict]) -> tuple[float, float]:
    """One ending at a time, all logits: the definition."""
    encode = get_tokenizer("bytes").encode_ordinary
    right, right_norm = 0, 0
    for example in examples:
        sums, means = [], []
        for ending in example["endings"]:
            context, completion = encode(example["ctx"]), encode(" " + ending)
            tokens = torch.tensor([context + completion])
            losses = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:], reduction="none")[-len(completion) :]
            sums.append(losses.sum().item())
            means.append(losses.mean().item())
        right += sums.index(min(sums)) == example["label"]
        right_norm += means.index(min(means)) == example["label"]
    return right / len(examples), right_norm / len(examples)


@pytest.mark.parametrize("tokens_per_batch", [200, 1000, 100000])
def test_scores_are_those_of_a_plain_loop(model, tokens_per_batch, monkeypatch):
    monkeypatch.setattr(hellaswag_eval, "TOKENS_PER_BATCH", tokens_per_batch)
    some = examples()
    scores = evaluate(model, rows_of(some), CPU)
    assert (scores.acc, scores.acc_norm) == plain_scores(model, some)
    assert scores.acc != scores.acc_norm and scores.num_examples == 24


def test_ranks_share_the_batches(model, monkeypatch):
    monkeypatch.setattr(hellaswag_eval, "TOKENS_PER_BATCH", 500)
    parts = []

    @dataclass(frozen=True)
    class Rank(Distributed):
        def sum(self, tensor):
            parts.append(tensor)
            return torch.stack(parts).sum(0)

    rows = rows_of(examples())
    evaluate(model, rows, Rank(CPU.device, rank=0, world_size=2))
    both = evaluate(model, rows, Rank(CPU.device, rank=1, world_size=2))
    assert both == evaluate(model, rows, CPU)
    assert not ((parts[0] != 0) & (parts[1] != 0)).any() and ((parts[0] != 0) | (parts[1] != 0)).all()


def test_batches_are_of_like_length_and_hold_each_row_once():
    rows = rows_of(examples())
    batches = make_batches(rows, 600)
    assert sorted(map(id, rows)) == sorted(id(row) for batch in batches for row in batch)
    assert all(len(batch) * max(len(row.tokens) for row in batch) <= 600 for batch in batches)
    padding = sum(len(batch) * len(batch[0].tokens) - sum(len(row.tokens) for row in batch) for batch in batches)
    assert padding < 0.1 * sum(len(row.tokens) for row in rows)


def test_a_row_too_long_keeps_its_ending():
    (row, *_) = rows_of([{"ctx": "x" * 50, "endings": ["abc"] * 4, "label": 0}], context_length=8)
    assert bytes(row.tokens) == b"xxxxx abc" and row.num_ending == 4
    (row, *_) = rows_of([{"ctx": "x" * 50, "endings": ["abcdefghij"] * 4, "label": 0}], context_length=8)
    assert bytes(row.tokens) == b"bcdefghij" and row.num_ending == 8


def test_evaluation_ends_when_asked_to(model):
    assert evaluate(model, rows_of(examples()), CPU, should_stop=lambda: "SIGTERM") is None


def test_mistakes_in_the_file_are_named_with_their_line(tmp_path):
    path = tmp_path / "hs.jsonl"
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot be read"):
        load_examples(str(tmp_path / "missing.jsonl"))
    good = json.dumps(examples(1)[0])
    for bad in (
        "{",
        '{"ctx": "a", "endings": ["b"], "label": 0}',
        '{"ctx": "a"}',
        good.replace('"label": 0', '"label": 9'),
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(UserError, match=r"hs\.jsonl:2: not a HellaSwag example"):
            load_examples(str(path))
    path.write_text("")
    with pytest.raises(UserError, match="empty"):
        load_examples(str(path))


def test_the_command_scores_a_checkpoint(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "hs.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples()))
    checkpoint = content(7) | {"model": model.state_dict(), "model_config": vars(model.config), "tokenizer": "bytes"}
    torch.save(checkpoint, tmp_path / "latest.pt")
    argv = ["hellaswag_eval.py", "--checkpoint_dir", str(tmp_path), "--hellaswag_file", str(tmp_path / "hs.jsonl")]
    monkeypatch.setattr(sys, "argv", [*argv, "--device", "cpu", "--precision", "fp32"])
    assert hellaswag_eval.main() == 0
    acc, acc_norm = plain_scores(model, examples())
    assert f"step 7: HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} (24 examples)" in capsys.readouterr().out
