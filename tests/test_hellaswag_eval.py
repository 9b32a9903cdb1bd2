"""Tests of hellaswag_eval.py: its answers equal those of a plain loop over the texts."""

import dataclasses
import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ground import weights_content
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer_json import both_of_sentence_piece

import hellaswag_eval
from benchmarks.core_speed import write_bundle
from model import GPT, GPTConfig
from steadygpt.data.tasks import Row, Task, load_core
from steadygpt.data.tokenizer import TokenizerRecord, load_tokenizer
from steadygpt.inference.scoring import TOKENS_PER_BATCH, Question, Suite, make_batches, right_answers, score, tokenize
from steadygpt.machine.ranks import Ranks, Stopped

CPU = Ranks(torch.device("cpu"))
BYTES = load_tokenizer(TokenizerRecord("bytes"))
WORDS = "a man in the kitchen takes an egg and then he puts it down on a very long table".split()


def hellaswag(count=24, seed=0) -> Task:
    """Examples of random words and lengths."""
    random = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        picked = torch.randint(0, len(WORDS), (int(torch.randint(1, most, (), generator=random)),), generator=random)
        return " ".join(WORDS[i] for i in picked)

    def row(number: int) -> Row:
        context = words(12)
        return Row([(context, words(9)) for _ in range(4)], number % 4)

    return Task("hellaswag", "hellaswag", [row(number) for number in range(count)])


def questions_of(task: Task, context_length=160) -> list[Question]:
    return [tokenize(task, number, BYTES, context_length) for number in range(len(task.rows))]


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=257, context_length=160, num_layers=2, num_heads=2, embd_size=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def plain(model: GPT, question: Question) -> tuple[list[float], list[float], bool]:
    """Return the summed loss and the loss per token of each answer, one at a time, and whether the first is greedy."""
    sums, means = [], []
    for ids, count in zip(question.answers, question.scored, strict=True):
        tokens = torch.from_numpy(ids)[None].long()
        logits = model(tokens)[0, :-1]
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")[len(logits) - count :]
        sums.append(losses.sum().item())
        means.append(losses.mean().item())
        if len(sums) == 1:
            is_greedy = torch.equal(logits.argmax(1)[len(logits) - count :], tokens[0, len(ids) - count :])
    return sums, means, is_greedy and question.scored[0] > 0


def plain_right(model: GPT, questions: list[Question]) -> list[list[bool]]:
    """Return what right_answers() should. Python's min() takes the first of what is equal, and a NaN that is first."""
    found = []
    for question in questions:
        *losses, is_greedy = plain(model, question)
        chosen = [values.index(min(values)) == question.label for values in losses]
        found.append([is_greedy] * 2 if question.label is None else chosen)
    return [list(of) for of in zip(*found, strict=True)]


@pytest.mark.parametrize("tokens_per_batch", [200, 100000])
def test_answers_and_losses_equal_those_of_a_plain_loop(model, tokens_per_batch, monkeypatch):
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", tokens_per_batch)
    questions = questions_of(hellaswag())
    found = score(model, questions, CPU)
    expected = plain_right(model, questions)
    assert right_answers(questions, found).tolist() == expected
    assert expected[0] != expected[1]
    losses = [loss for question in questions for loss in plain(model, question)[0]]
    assert found[..., 0].ravel().tolist() == pytest.approx(losses, abs=1e-4)


@torch.no_grad()
def continue_greedily(model: GPT, question: Question) -> None:
    [ids], [count] = question.answers, question.scored
    for at in range(len(ids) - count, len(ids)):
        ids[at] = model(torch.from_numpy(ids[:at])[None].long())[0, -1].argmax()


@pytest.mark.parametrize("seed", [0])
def test_answers_to_all_kinds_of_tasks_equal_those_of_a_plain_loop(model, tmp_path, seed):
    """Some are too long, have equal or empty answers, or none that is all of the most likely tokens."""
    write_bundle(tmp_path, rows=12, seed=seed)
    tasks = load_core(str(tmp_path))
    questions = [question for task in tasks for question in questions_of(task)[::3]]
    for question in questions[::2]:
        if question.label is None:
            continue_greedily(model, question)
    _, expected = plain_right(model, questions)
    assert right_answers(questions, score(model, questions, CPU))[1].tolist() == expected
    greedy = [right for right, question in zip(expected, questions, strict=True) if question.label is None]
    assert 0 < sum(greedy) < len(greedy)
    assert any(question.is_cut for question in questions)


def test_prompts_begin_a_document_after_answered_examples():
    """Scored is what follows the common tokens; what two contexts have in common at the end; the continuation."""
    rows = [Row([("Q", "ab"), ("Q", "ac d")], 1), Row([("R", "x"), ("R", "y")], 0)]
    asked = Task("task", "multiple_choice", rows, shots=1, delimiter=": ")
    question = tokenize(asked, 0, BYTES, 100)
    assert [bytes(ids[1:].tolist()) for ids in question.answers] == [b"R: x\n\nQ: ab", b"R: x\n\nQ: ac d"]
    assert {int(ids[0]) for ids in question.answers} == {BYTES.document_id}
    assert (question.scored, question.label) == ([1, 3], 1)
    contexts = Task("task", "schema", [Row([("It a", "is"), ("He b", "is")], 1)])
    assert tokenize(contexts, 0, BYTES, 100).scored == [3, 3]
    greedy = Task("task", "language_modeling", [Row([("C", "is")], 0)], delimiter="\n")
    question = tokenize(greedy, 0, BYTES, 100)
    assert (bytes(question.answers[0][1:].tolist()), question.scored, question.label) == (b"C\nis", [3], None)


def test_evaluation_turns_dropout_off_and_training_mode_on_again(model):
    dropping, questions = GPT(dataclasses.replace(model.config, dropout=0.5)), questions_of(hellaswag())
    dropping.load_state_dict(model.state_dict())
    assert (score(dropping, questions, CPU) == score(model, questions, CPU)).all()
    assert dropping.training


def test_ranks_share_the_batches(model, monkeypatch):
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", 1000)
    parts = []

    @dataclass(frozen=True)
    class Rank(Ranks):
        def sum(self, tensor):
            parts.append(tensor)
            return torch.stack(parts).sum(0)

    questions = questions_of(hellaswag())
    score(model, questions, Rank(CPU.device, rank=0, world_size=2))
    both = score(model, questions, Rank(CPU.device, rank=1, world_size=2))
    assert (both == score(model, questions, CPU)).all()
    assert (
        len(make_batches([question.width for question in questions], 1000)) % 2 == 1
    )  # in the last turn one rank has no batch left
    assert ((parts[0] != 0) ^ (parts[1] != 0)).all()  # each answer is scored by one rank


def test_batches_hold_each_question_once_with_little_padding():
    widths = [question.width for question in questions_of(hellaswag(100))]
    batches = make_batches(widths, 1500)
    assert sorted(number for batch in batches for number in batch) == [*range(100)]
    assert all(len(batch) * max(widths[number] for number in batch) <= 1500 for batch in batches)
    padding = sum(len(batch) * widths[batch[0]] - sum(widths[number] for number in batch) for batch in batches)
    assert padding < 0.1 * sum(widths)


def ending(context: str, *endings: str) -> Task:
    return Task("hellaswag", "hellaswag", [Row([(context, ending) for ending in endings], 0)])


def test_what_answers_have_in_common_is_computed_once_and_equal_ones_are_not_scored():
    [question] = questions_of(ending("abc", "d", "ef", "d", "h"))
    assert question.width == len("ab") + len("c ") + len("c e") + len("c ") + len("c ")  # each lacks its last token
    assert question.scored == [2, 3, 0, 2]


@pytest.mark.parametrize(("context", "endings", "cut"), [
    ("x" * 50, ["abc", "abd"], [b"xxxxx abc", b"xxxxx abd"]),
    ("x" * 50, ["abc", "a"], [b"xxxxx abc", b"xxxxx a"]),  # the same context beside each ending
    ("x" * 50, ["abcdefghij", "a"], [b"bcdefghij", b"x a"]),
    ("x" * 5, ["abc"], [b"xxxxx abc"]),
])  # fmt: skip
def test_a_context_too_long_beside_its_longest_ending_is_cut_at_the_start(context, endings, cut):
    [question] = questions_of(ending(context, *endings), context_length=8)
    assert [bytes(ids.tolist()) for ids in question.answers] == cut
    assert question.scored == [min(8, 1 + len(ending)) for ending in endings]
    assert question.is_cut == (len(context) > 5)


@pytest.mark.parametrize("tokenizer", [BYTES, both_of_sentence_piece()], ids=["bytes", "a space before each text"])
@given(context=st.text(min_size=1), an_ending=st.text(min_size=1))
@settings(max_examples=30)
def test_one_space_is_between_context_and_ending(tokenizer, context, an_ending):
    context, an_ending = (text.replace("\u2581", "_") for text in (context, an_ending))  # which is decoded as a space
    question = tokenize(ending(context, an_ending), 0, tokenizer, 1000)
    [ids], [count] = question.answers, question.scored
    assert tokenizer.decode(ids.tolist()) == f"{context} {an_ending}"
    assert b"".join(tokenizer.bytes_of[i] for i in ids[len(ids) - count :].tolist()) == f" {an_ending}".encode()


def test_endings_without_a_context_begin_a_document(model):
    questions = questions_of(ending("", "abc", "d"))
    assert {int(ids[0]) for ids in questions[0].answers} == {BYTES.document_id}
    assert np.isfinite(score(model, questions, CPU)).all()


def test_a_stop_ends_the_evaluation_and_leaves_the_model_in_training(model):
    def stop():
        raise Stopped("SIGTERM")

    model.train()
    with pytest.raises(Stopped):
        score(model, questions_of(hellaswag()), CPU, check=stop)
    assert model.training


# ---------------------------------------------------------------------------------------------------------------------
# the command, and a run


@pytest.fixture
def scored(model, folder) -> None:
    """The working directory, with hs.jsonl, a bundle and a checkpoint."""
    rows = [{"ctx": row.answers[0][0], "endings": [text for _, text in row.answers], "label": row.label}
            for row in hellaswag().rows]  # fmt: skip
    (folder / "hs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_bundle(folder / "bundle", rows=12)
    checkpoint = weights_content(model.state_dict(), model.config, step=7)
    for name in ("latest.pt", "latest_backup.pt"):
        torch.save(checkpoint, folder / name)


def command(capsys, *argv: str) -> str:
    """Run the command; return its standard output."""
    assert hellaswag_eval.main(["--checkpoint_dir", ".", "--device", "cpu", "--precision", "fp32", *argv]) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err
    return out


@pytest.mark.parametrize(("argv", "count"), [([], 24), (["latest"], 24), (["--limit", "5"], 5)])
def test_the_command_scores_a_checkpoint_on_hellaswag(scored, capsys, model, argv, count):
    acc, acc_norm = (np.mean(right[:count]) for right in plain_right(model, questions_of(hellaswag())))
    out = command(capsys, "--hellaswag_file", "hs.jsonl", *argv)
    assert out.endswith(f"latest.pt at step 7: HellaSwag acc {acc:.4f} acc_norm {acc_norm:.4f} ({count} examples)\n")


def test_core_is_the_mean_of_accuracies_centred_on_chance(scored, capsys, model):
    tasks, centred = load_core("bundle"), []
    first, title, *lines = command(capsys, "--tasks", "core", "--core_dir", "bundle").splitlines()
    assert title.split() == ["task", "accuracy", "chance", "centred", "examples", "cut"]
    for line, task in zip(lines, tasks, strict=True):
        questions = questions_of(task)
        accuracy = np.mean(plain_right(model, questions)[1])
        centred.append((accuracy - task.chance) / (1 - task.chance))
        numbers = [f"{number:.4f}" for number in (accuracy, task.chance, centred[-1])]
        assert line.split() == [task.label, *numbers, "12", str(sum(question.is_cut for question in questions))]
    assert f"latest.pt at step 7: CORE {np.mean(centred):.4f}, the mean of 22 tasks (264 examples, " in first


def test_ranks_tokenize_a_part_each(tmp_path):
    write_bundle(tmp_path, rows=12)
    parts = []

    @dataclass(frozen=True)
    class Rank(Ranks):
        is_main = True

        def any(self, flag):
            return flag

        def broadcast(self, value):
            return value

        def gather(self, value):
            parts.append(value)
            return [*parts, *[value] * (self.world_size - len(parts))]

    load = partial(Suite.load, "core", str(tmp_path), 11, BYTES, 160)
    *_, last = [load(Rank(CPU.device, rank=n, world_size=3)) for n in range(3)]
    for one, other in zip(last.questions, load(CPU).questions, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one.answers, other.answers, strict=True))
    assert [*map(len, parts)] == [81, 81, 80]
