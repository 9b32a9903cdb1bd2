"""Tests of hellaswag_eval.py: its scores equal those of a plain loop over the endings."""

import dataclasses
import io
import json
from dataclasses import dataclass

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from conftest import weights_content

import hellaswag_eval
from hellaswag_eval import (
    ROUNDING,
    TOKENS_PER_BATCH,
    Tree,
    close_calls,
    ending_losses,
    make_batches,
    per_ending,
    score_examples,
    tokenize,
)
from model import GPT, GPTConfig
from steadygpt.base import retry
from steadygpt.data.tasks import Example, lm_eval_hellaswag, load_examples
from steadygpt.data.tokenizer import get_tokenizer
from steadygpt.machine.ranks import Ranks, Stopped

CPU = Ranks(torch.device("cpu"))
WORDS = "a man in the kitchen takes an egg and then he puts it down on a very long table".split()


def examples(count=24, seed=0) -> list[Example]:
    """HellaSwag examples of random words and lengths."""
    random = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        picked = torch.randint(0, len(WORDS), (int(torch.randint(1, most, (), generator=random)),), generator=random)
        return " ".join(WORDS[i] for i in picked)

    return [Example(words(12), [words(9) for _ in range(4)], number % 4, "build-nanogpt") for number in range(count)]


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, context_length=160, num_layers=2, num_heads=2, embd_size=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def row_of(example: Example) -> dict:
    """The row of HellaSwag's file that holds an example."""
    return {"ctx": example.context, "endings": example.endings, "label": example.label}


def trees_of(examples: list[Example], context_length=160):
    return tokenize(examples, get_tokenizer("bytes"), context_length)


@torch.no_grad()
def plain_losses(model: GPT, example: Example) -> list[torch.Tensor]:
    """Compute the losses of each ending's tokens by definition: one ending at a time, with all logits."""
    encode, found = get_tokenizer("bytes").encode, []
    for ending in example.endings:
        context, completion = encode(example.context), encode(" " + ending)
        tokens = torch.tensor([context + completion])
        losses = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:], reduction="none")
        found.append(losses[-len(completion) :])
    return found


BY = {
    "sum": lambda losses, text: losses.sum().item(),
    "mean": lambda losses, text: losses.mean().item(),
    "character": lambda losses, text: losses.sum().item() / len(text),
}


def plain_choices(model: GPT, examples: list[Example], by: str) -> list[int]:
    """Return the ending of each example for which BY[by](its losses, its text) is lowest."""
    choices = []
    for example in examples:
        endings = zip(plain_losses(model, example), example.endings, strict=True)
        values = [BY[by](losses, text) for losses, text in endings]
        choices.append(values.index(min(values)))
    return choices


def plain_score(model: GPT, examples: list[Example], by: str) -> float:
    choices = plain_choices(model, examples, by)
    return sum(choice == example.label for choice, example in zip(choices, examples, strict=True)) / len(examples)


@pytest.mark.parametrize("tokens_per_batch", [200, 100000])
def test_scores_choices_and_losses_equal_those_of_a_plain_loop(model, tokens_per_batch, monkeypatch):
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", tokens_per_batch)
    some = examples()
    scores = score_examples(model, trees_of(some), CPU)
    assert (scores.acc, scores.acc_norm) == (plain_score(model, some, "sum"), plain_score(model, some, "mean"))
    assert scores.acc != scores.acc_norm
    assert scores.num_examples == 24
    for by, kind in (("sum", "acc"), ("mean", "acc_norm")):
        choices = plain_choices(model, some, by)
        right = [example._replace(label=choice) for example, choice in zip(some, choices, strict=True)]
        assert getattr(score_examples(model, trees_of(right), CPU), kind) == 1
    for losses, example in zip(ending_losses(model, trees_of(some), CPU), some, strict=True):
        expected = [part.sum().item() for part in plain_losses(model, example)]
        assert losses.tolist() == pytest.approx(expected, abs=1e-4)


def test_close_calls_in_bf16_are_scored_again_in_fp32(model):
    trees = trees_of(examples(count=300))
    exact = ending_losses(model, trees, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ending_losses(model, trees, CPU)
    again = close_calls(trees, exact)
    assert 0 < again.sum() < 150
    assert (found[~again] != exact[~again]).any()
    lengths = per_ending([tree.lengths for tree in trees])
    for by in (1, lengths):
        assert ((found / by).argmin(1) == (exact / by).argmin(1)).all()


def test_every_choice_that_rounding_can_change_is_a_close_call():
    random = np.random.default_rng(0)
    tokens = random.integers(1, 40, (1000, 4))
    trees = [Tree([0], [[0] * n for n in row], (5 * row).tolist(), i, 0) for i, row in enumerate(tokens)]
    exact = random.normal(3, 0.02, tokens.shape) * tokens
    rounded = exact + random.uniform(-1, 1, tokens.shape) * ROUNDING * np.sqrt(tokens)
    close = close_calls(trees, rounded)
    changed = [(rounded / by).argmin(1) != (exact / by).argmin(1) for by in (1, 5 * tokens)]
    assert all(kind.any() for kind in changed)
    assert close[np.logical_or(*changed)].all()
    assert not close.all()


def test_lm_eval_texts_equal_those_of_the_harness():
    """One example of each source: ActivityNet, WikiHow."""
    first = {"activity_label": "Canoeing", "ctx_a": "Two women [in a child] paddle.", "ctx_b": "the Child and a man"}
    assert lm_eval_hellaswag(first | {"ctx": "unused", "endings": ["are  then shown."], "label": "0"}) == Example(
        "Canoeing: Two women paddle. The child and a man", ["are then shown."], 0, "lm_eval"
    )
    second = {"activity_label": "Health", "ctx_a": "[header] How to rest [title] Lie down. [step] Now", "ctx_b": ""}
    assert lm_eval_hellaswag(
        second | {"ctx": "unused", "endings": [" sleep. [substeps] Well."], "label": 0}
    ) == Example("Health: How to rest. Lie down. Now", ["sleep. Well."], 0, "lm_eval")
    without = {"activity_label": "High jump", "ctx": "A boy runs. the boy", "endings": ["runs."], "label": 0}
    assert lm_eval_hellaswag(without) == Example("High jump: A boy runs. the boy", ["runs."], 0, "lm_eval")


def test_lm_eval_normalizes_by_characters(model):
    """The harness's texts, scored by a plain loop."""
    some = [lm_eval_hellaswag(row_of(example) | {"activity_label": "Cooking"}) for example in examples()]
    scores = score_examples(model, trees_of(some), CPU)
    assert (scores.acc, scores.acc_norm) == (plain_score(model, some, "sum"), plain_score(model, some, "character"))
    assert scores.acc_norm != plain_score(model, some, "mean")  # otherwise the comparison above proves nothing


def test_evaluation_turns_dropout_off_and_training_mode_on_again(model):
    dropping = GPT(dataclasses.replace(model.config, dropout=0.5))
    dropping.load_state_dict(model.state_dict())
    assert score_examples(dropping, trees_of(examples()), CPU) == score_examples(model, trees_of(examples()), CPU)
    assert dropping.training


def test_ranks_share_the_batches(model, monkeypatch):
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", 1000)
    parts = []

    @dataclass(frozen=True)
    class Rank(Ranks):
        def sum(self, tensor):
            parts.append(tensor)
            return torch.stack(parts).sum(0)

    trees = trees_of(examples())
    score_examples(model, trees, Rank(CPU.device, rank=0, world_size=2))
    both = score_examples(model, trees, Rank(CPU.device, rank=1, world_size=2))
    assert both == score_examples(model, trees, CPU)
    assert len(make_batches(trees, 1000)) % 2 == 1  # in the last turn one rank has no batch left
    assert ((parts[0] != 0) ^ (parts[1] != 0)).all()  # each ending is scored by one rank


def test_batches_hold_each_tree_once_with_little_padding():
    trees = trees_of(examples(100))
    batches = make_batches(trees, 1500)
    assert sorted(map(id, trees)) == sorted(id(tree) for batch in batches for tree in batch)
    assert all(len(batch) * max(tree.width for tree in batch) <= 1500 for batch in batches)
    padding = sum(len(batch) * batch[0].width - sum(tree.width for tree in batch) for batch in batches)
    assert padding < 0.1 * sum(tree.width for tree in trees)


def test_a_context_is_computed_once_for_its_four_endings():
    (tree,) = trees_of([Example("abc", ["d", "ef", "g", "h"], 0)])
    assert tree.width == 2 + (1 + 1) * 3 + (2 + 1)  # "ab", then in each branch "c" and the ending without its last byte


@pytest.mark.parametrize(("context", "endings", "cut_context", "cut_endings"), [
    ("x" * 50, ["abc"] * 4, b"xxxxx", [b" abc"] * 4),
    ("x" * 50, ["abc", "a"], b"xxxxx", [b" abc", b" a"]),  # the same context beside each ending
    ("x" * 50, ["abcdefghij", "a"], b"x", [b"cdefghij", b" a"]),
    ("x" * 5, ["abc"], b"xxxxx", [b" abc"]),
])  # fmt: skip
def test_a_context_too_long_beside_its_longest_ending_is_cut_at_the_start(context, endings, cut_context, cut_endings):
    (tree,) = trees_of([Example(context, endings, 0)], context_length=8)
    assert (bytes(tree.context), [bytes(ending) for ending in tree.endings]) == (cut_context, cut_endings)


@pytest.mark.parametrize(("style", "lengths"), [("build-nanogpt", [8, 3]), ("lm_eval", [3, 1])])
def test_a_cut_ending_is_divided_by_what_is_left_of_it(model, style, lengths):
    trees = trees_of([Example("x", ["é" * 12, "é"], 0, style), Example("x", ["a", "b"], 0, style)], context_length=8)
    assert [tree.is_cut for tree in trees] == [True, False]
    assert trees[0].lengths == lengths  # tokens, or characters
    assert str(score_examples(model, trees, CPU)).endswith("(2 examples, 1 of them cut to the model's context)")


def test_endings_without_a_context_begin_a_document(model):
    trees = trees_of([Example("", ["abc", "d"], 0)])
    assert trees[0].context == [get_tokenizer("bytes").document_id]
    assert np.isfinite(ending_losses(model, trees, CPU)).all()


def test_a_stop_ends_the_evaluation_and_leaves_the_model_in_training(model):
    def stop():
        raise Stopped("SIGTERM")

    model.train()
    with pytest.raises(Stopped):
        score_examples(model, trees_of(examples()), CPU, check=stop)
    assert model.training


def test_only_the_validation_split_comes_from_the_hub(standin, monkeypatch):
    rows = {"ctx": ["one two"], "endings": [["a", "b", "c", "d"]], "label": ["2"]}
    files = {}
    for split in ("train", "validation", "test"):
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(rows), file)
        files[f"data/{split}-00000-of-00001.parquet"] = file.getvalue()
    standin.put("datasets/Rowan/hellaswag", files)
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    standin.fail("GET .*validation", times=2, status=500)
    expected = [Example("one two", ["a", "b", "c", "d"], 2, "build-nanogpt")]
    assert load_examples("hellaswag") == expected
    assert not standin.sent("GET .*(train|test)-")
    standin.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_examples("hellaswag") == expected
    assert not standin.log


@pytest.fixture
def command(model, tmp_path, capsys):
    """Run the command on a checkpoint in tmp_path; return its standard output and error."""
    (tmp_path / "hs.jsonl").write_text("".join(json.dumps(row_of(example)) + "\n" for example in examples()))
    checkpoint = weights_content(model.state_dict(), model.config, step=7)
    for name in ("latest.pt", "latest_backup.pt"):
        torch.save(checkpoint, tmp_path / name)

    def run(*argv: str) -> tuple[str, str]:
        options = ["--checkpoint_dir", str(tmp_path), "--task", f"hellaswag={tmp_path / 'hs.jsonl'}", "--device", "cpu"]
        assert hellaswag_eval.main([*options, "--precision", "fp32", *argv]) == 0
        return capsys.readouterr()

    return run


@pytest.mark.parametrize(("argv", "count"), [([], 24), (["latest"], 24), (["--limit", "5"], 5)])
def test_the_command_scores_a_checkpoint(command, model, argv, count):
    acc, acc_norm = (plain_score(model, examples()[:count], by) for by in ("sum", "mean"))
    out, err = command(*argv)
    assert out.endswith(f"latest.pt at step 7: HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} ({count} examples)\n")
    assert "warning" not in err
