"""HellaSwag's scores are those of a plain loop, whatever the batching, padding and sharing."""

import dataclasses
import json
import runpy
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO
from test_checkpoint import content, damage

import hellaswag_eval
from hellaswag_eval import (
    ENDINGS,
    ROUNDING,
    Tree,
    close_calls,
    ending_losses,
    evaluate,
    lm_eval_texts,
    load_examples,
    make_batches,
    per_ending,
    score_batch,
    tokenize,
)
from model import GPT, GPTConfig
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks
from steadygpt.tokenizer import get_tokenizer

CPU = Ranks(torch.device("cpu"))
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


def trees_of(examples: list[dict], context_length=160):
    return tokenize(examples, get_tokenizer("bytes"), context_length)


@torch.no_grad()
def plain_losses(model: GPT, example: dict) -> list[torch.Tensor]:
    """The losses of each ending's tokens, one ending at a time, all logits: the definition."""
    encode, found = get_tokenizer("bytes").encode_ordinary, []
    for ending in example["endings"]:
        context, completion = encode(example["ctx"]), encode(" " + ending)
        tokens = torch.tensor([context + completion])
        losses = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:], reduction="none")
        found.append(losses[-len(completion) :])
    return found


def plain_choices(model: GPT, example: dict) -> tuple[int, int]:
    """The endings of the lowest sum and of the lowest mean."""
    losses = plain_losses(model, example)
    sums, means = [part.sum().item() for part in losses], [part.mean().item() for part in losses]
    return sums.index(min(sums)), means.index(min(means))


def plain_scores(model: GPT, examples: list[dict]) -> tuple[float, float]:
    choices = [plain_choices(model, example) for example in examples]
    labels = [example["label"] for example in examples]
    right = [sum(choice[kind] == label for choice, label in zip(choices, labels, strict=True)) for kind in (0, 1)]
    return right[0] / len(examples), right[1] / len(examples)


@pytest.mark.parametrize("tokens_per_batch", [200, 1000, 100000])
def test_scores_are_those_of_a_plain_loop(model, tokens_per_batch, monkeypatch):
    monkeypatch.setitem(hellaswag_eval.TOKENS_PER_BATCH, "cpu", tokens_per_batch)
    some = examples()
    scores = evaluate(model, trees_of(some), CPU)
    assert (scores.acc, scores.acc_norm) == plain_scores(model, some)
    assert scores.acc != scores.acc_norm and scores.num_examples == 24


@pytest.mark.parametrize("tokens_per_batch", [200, 100000])
def test_each_ending_is_chosen_and_has_the_loss_of_the_plain_loop(model, tokens_per_batch, monkeypatch):
    monkeypatch.setitem(hellaswag_eval.TOKENS_PER_BATCH, "cpu", tokens_per_batch)
    some = examples()
    by_sum = [example | {"label": plain_choices(model, example)[0]} for example in some]
    by_mean = [example | {"label": plain_choices(model, example)[1]} for example in some]
    assert evaluate(model, trees_of(by_sum), CPU).acc == 1 and evaluate(model, trees_of(by_mean), CPU).acc_norm == 1
    expected = [plain_losses(model, example) for example in some]
    for batch in make_batches(trees_of(some), tokens_per_batch):
        for tree, losses in zip(batch, score_batch(model, batch, CPU.device), strict=True):
            assert losses == pytest.approx([part.sum().item() for part in expected[tree.example]], abs=1e-4)
            assert [len(ending) for ending in tree.endings] == [len(part) for part in expected[tree.example]]


def test_in_bf16_close_calls_are_scored_again_in_fp32(model):
    trees = trees_of(examples(count=300))
    exact = ending_losses(model, trees, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ending_losses(model, trees, CPU)
    again = close_calls(trees, exact)
    assert 0 < again.sum() < 150 and (found[~again] != exact[~again]).any()
    lengths = per_ending(trees, [tree.lengths for tree in trees])
    for by in (1, lengths):
        assert ((found / by).argmin(1) == (exact / by).argmin(1)).all()


def test_no_choice_that_rounding_could_change_is_passed_over():
    random = np.random.default_rng(0)
    tokens = random.integers(1, 40, (1000, ENDINGS))
    trees = [Tree([0], [[0] * n for n in row], (5 * row).tolist(), 0, i, 0) for i, row in enumerate(tokens)]
    exact = random.normal(3, 0.02, tokens.shape) * tokens
    rounded = exact + random.uniform(-1, 1, tokens.shape) * ROUNDING * np.sqrt(tokens)
    close = close_calls(trees, rounded)
    changed = [(rounded / by).argmin(1) != (exact / by).argmin(1) for by in (1, 5 * tokens)]
    assert all(kind.any() for kind in changed) and close[np.logical_or(*changed)].all() and not close.all()


def test_lm_evals_texts_are_those_of_its_task():
    """What EleutherAI's harness asks, for an example of each source: ActivityNet, WikiHow."""
    first = {"activity_label": "Canoeing", "ctx_a": "Two women [in a child] paddle.", "ctx_b": "the Child and a man"}
    assert lm_eval_texts(first | {"ctx": "unused", "endings": ["are  then shown."]}) == (
        "Canoeing: Two women paddle. The child and a man",
        ["are then shown."],
    )
    second = {"activity_label": "Health", "ctx_a": "[header] How to rest [title] Lie down. [step] Now", "ctx_b": ""}
    assert lm_eval_texts(second | {"ctx": "unused", "endings": [" sleep. [substeps] Well."]}) == (
        "Health: How to rest. Lie down. Now",
        ["sleep. Well."],
    )
    without = {"activity_label": "High jump", "ctx": "A boy runs. the boy", "endings": ["runs."]}
    assert lm_eval_texts(without) == ("High jump: A boy runs. the boy", ["runs."])
    with pytest.raises(UserError, match="no activity_label; --style lm_eval needs it"):
        lm_eval_texts({"ctx": "A boy runs.", "endings": ["runs."]})


def test_lm_evals_acc_norm_is_by_the_character(model):
    """Its texts, scored by the plain loop."""
    some = [example | {"activity_label": "Cooking"} for example in examples()]
    right = {"acc": 0, "acc_norm": 0, "by_token": 0}
    for example in some:
        context, endings = lm_eval_texts(example)
        losses = plain_losses(model, {"ctx": context, "endings": endings})
        sums = [part.sum().item() for part in losses]
        by_character = [total / len(ending) for total, ending in zip(sums, endings, strict=True)]
        by_token = [part.mean().item() for part in losses]
        for name, values in zip(right, (sums, by_character, by_token), strict=True):
            right[name] += values.index(min(values)) == example["label"]
    scores = evaluate(model, tokenize(some, get_tokenizer("bytes"), 160, "lm_eval"), CPU)
    assert (scores.acc, scores.acc_norm) == (right["acc"] / 24, right["acc_norm"] / 24)
    assert right["acc_norm"] != right["by_token"]  # else this would show nothing


def test_scores_of_a_model_in_training_have_no_dropout_and_leave_it_in_training(model):
    dropping = GPT(dataclasses.replace(model.config, dropout=0.5))
    dropping.load_state_dict(model.state_dict())
    assert evaluate(dropping, trees_of(examples()), CPU) == evaluate(model, trees_of(examples()), CPU)
    assert dropping.training


def test_ranks_share_the_batches(model, monkeypatch):
    monkeypatch.setitem(hellaswag_eval.TOKENS_PER_BATCH, "cpu", 1000)
    parts = []

    @dataclass(frozen=True)
    class Rank(Ranks):
        def sum(self, tensor):
            parts.append(tensor)
            return torch.stack(parts).sum(0)

    trees = trees_of(examples())
    evaluate(model, trees, Rank(CPU.device, rank=0, world_size=2))
    both = evaluate(model, trees, Rank(CPU.device, rank=1, world_size=2))
    assert both == evaluate(model, trees, CPU)
    assert len(make_batches(trees, 1000)) % 2 == 1  # in the last turn one of them has nothing left
    assert not ((parts[0] != 0) & (parts[1] != 0)).any() and ((parts[0] != 0) | (parts[1] != 0)).all()


def test_batches_are_of_like_width_and_hold_each_tree_once():
    trees = trees_of(examples(100))
    batches = make_batches(trees, 1500)
    assert sorted(map(id, trees)) == sorted(id(tree) for batch in batches for tree in batch)
    assert all(len(batch) * max(tree.width for tree in batch) <= 1500 for batch in batches)
    padding = sum(len(batch) * batch[0].width - sum(tree.width for tree in batch) for batch in batches)
    assert padding < 0.1 * sum(tree.width for tree in trees)


def test_a_context_is_read_once_for_its_four_endings():
    (tree,) = trees_of([{"ctx": "abc", "endings": ["d", "ef", "g", "h"], "label": 0}])
    assert tree.width == 2 + (1 + 1) * 3 + (2 + 1)  # "ab", and in each branch "c" with the ending but its last byte


def test_an_ending_too_long_for_the_context_keeps_all_of_itself_that_it_can(model):
    (tree, *_) = trees_of([{"ctx": "x" * 50, "endings": ["abc"] * 4, "label": 0}], context_length=8)
    assert (bytes(tree.context), [bytes(ending) for ending in tree.endings]) == (b"xxxxx", [b" abc"])
    (tree, *_) = trees_of([{"ctx": "x" * 50, "endings": ["abcdefghij"] * 4, "label": 0}], context_length=8)
    assert (bytes(tree.context), [bytes(ending) for ending in tree.endings]) == (b"b", [b"cdefghij"])
    short_and_long = {"ctx": "x" * 100, "endings": ["abc", "d" * 90, "ef", "g"], "label": 0}
    trees = trees_of([short_and_long])
    assert [tree.first for tree in trees] == [0, 1, 2, 3]  # their contexts are not the same
    together, apart = score_batch(model, trees, CPU.device), [score_batch(model, [tree], CPU.device) for tree in trees]
    assert together == [pytest.approx(one[0], abs=1e-4) for one in apart]


def test_evaluation_ends_when_asked_to(model):
    assert evaluate(model, trees_of(examples()), CPU, should_stop=lambda: "SIGTERM") is None


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
        good.replace('"label": 0', '"label": -1'),
        good.replace('"label": 0', '"label": ""'),  # as in the test split
        "[]",
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(UserError, match=r"hs\.jsonl:2: not a HellaSwag example"):
            load_examples(str(path))
    path.write_text("")
    with pytest.raises(UserError, match="empty"):
        load_examples(str(path))


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    for name in ("", "binary.jsonl"):
        with pytest.raises(UserError, match=r"--hellaswag_file .* cannot be read"):
            load_examples(str(tmp_path / name))


def test_labels_may_be_text_as_on_the_hub(tmp_path):
    (tmp_path / "hs.jsonl").write_text(json.dumps(examples(1)[0] | {"label": "2", "ind": 24}) + "\n")
    assert load_examples(str(tmp_path / "hs.jsonl")) == [examples(1)[0] | {"label": 2, "ind": 24}]


@pytest.mark.parametrize("character", ["\u2028", "\x85"])
def test_a_line_ends_at_a_newline_only(tmp_path, character):
    example = {"ctx": f"one{character}line", "endings": ["a", "b", "c", "d"], "label": 0}
    (tmp_path / "hs.jsonl").write_text(json.dumps(example, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_examples(str(tmp_path / "hs.jsonl")) == [example]


@pytest.mark.parametrize("wrong", [{"ctx": None}, {"endings": [1, 2, 3, 4]}, {"endings": "abcd"}])
def test_what_is_no_text_is_named_with_its_line(tmp_path, wrong):
    (tmp_path / "hs.jsonl").write_text(json.dumps(examples(1)[0] | wrong) + "\n")
    with pytest.raises(UserError, match=r"hs\.jsonl:1: not a HellaSwag example"):
        load_examples(str(tmp_path / "hs.jsonl"))


@pytest.fixture
def command(model, tmp_path, monkeypatch, capsys):
    """Run the command on a checkpoint in tmp_path; returns its exit status and what it prints."""
    (tmp_path / "hs.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples()))
    checkpoint = content(7) | {"model": model.state_dict(), "model_config": vars(model.config), "tokenizer": "bytes"}
    for name in ("latest.pt", "latest_backup.pt"):
        torch.save(checkpoint, tmp_path / name)

    def run(*argv: str) -> tuple[int, str, str]:
        options = ["--checkpoint_dir", str(tmp_path), "--hellaswag_file", str(tmp_path / "hs.jsonl"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["hellaswag_eval.py", *options, "--precision", "fp32", *argv])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REPO / "hellaswag_eval.py"), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_command_scores_a_checkpoint(command, model, tmp_path):
    acc, acc_norm = plain_scores(model, examples())
    expected = f"latest.pt at step 7: HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} (24 examples)\n"
    for argv in ([], ["latest"], [str(tmp_path / "latest.pt")]):
        status, out, err = command(*argv)
        assert status == 0 and out.endswith(expected) and "warning" not in err


def test_the_command_can_score_the_first_examples_only(command, model):
    acc, acc_norm = plain_scores(model, examples()[:5])
    _, out, _ = command("--limit", "5")
    assert out.endswith(f"HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} (5 examples)\n")


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_the_command_wants_an_example_at_least(command, limit):
    status, _, err = command("--limit", limit)
    assert status == 2 and "--limit" in err


def test_the_command_passes_over_a_damaged_checkpoint_aloud(command, tmp_path):
    damage(tmp_path / "latest.pt", "truncated")
    status, out, err = command()
    assert status == 0 and "latest_backup.pt at step 7" in out and "warning: passed over" in err


def test_the_command_tells_a_mistake_in_one_line(command, tmp_path):
    for argv in (["none.pt"], ["--hellaswag_file", str(tmp_path / "none.jsonl")]):
        status, out, err = command(*argv)
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert err.startswith("error: ") and argv[-1] in err
