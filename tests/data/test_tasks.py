"""Tests of the multiple-choice tasks other than HellaSwag: they are those of lm-evaluation-harness."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from conftest import metrics, run_here, scalars, weights_content

import hellaswag_eval
from convert_hf import write_folder
from hellaswag_eval import close_calls, ending_losses, score_examples, tokenize
from model import GPT, GPTConfig
from steadygpt.base.options import UserError
from steadygpt.config import TrainConfig
from steadygpt.convert.weights import load_model
from steadygpt.data.tasks import TASKS, Example, load_examples, parse_tasks
from steadygpt.data.tokenizer import get_tokenizer
from steadygpt.machine.ranks import Ranks

CPU = Ranks(torch.device("cpu"))


def arc(question: str, answer: str, labels: str, *endings: str) -> dict:
    """Return a row with the columns of the Hub. ARC has 3 to 5 endings, with letters or digits as labels."""
    return {"question": question, "choices": {"text": [*endings], "label": [*labels]}, "answerKey": answer}


ARC = [
    arc("Which one gives light?", "A", "ABCD", "a lamp", "a stone", "the sea", "one of the trees"),
    arc("What is ice made of? ", "3", "123", "sand", "air and wood", "water"),
    arc("Which animal flies?", "B", "ABCDE", "a dog", "a bird", "a fish", "a very old horse", "a cow"),
]
PIQA = [
    {"goal": "How do I dry a towel?", "sol1": "Hang it in the sun.", "sol2": "Put it into water.", "label": 0},
    {"goal": "To cut bread,", "sol1": "use a spoon", "sol2": "use a knife with teeth \u2014 a saw", "label": 1},
    {"goal": "When boiling butter, ", "sol1": "Pour it", "sol2": "Pour it onto a plate", "label": 1},
]
ROWS = {"arc_easy": ARC, "arc_challenge": ARC[::-1], "piqa": PIQA}
HELLASWAG = [{"activity_label": "Cooking", "ctx": "A man", "endings": ["sits.", "eats a.", "is", "of."], "label": "1"}]
ALL_ROWS = ROWS | {"hellaswag": HELLASWAG}


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Task -> .jsonl file."""
    for name, rows in ALL_ROWS.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {name: str(tmp_path / f"{name}.jsonl") for name in TASKS}


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=257, context_length=58, num_layers=2, num_heads=2, embd_size=16)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return weights_content(model.state_dict(), config, step=7)


@pytest.fixture(scope="module")
def model(checkpoint) -> GPT:
    return load_model(checkpoint)


# A task of the harness on rows of ours, so that nothing is downloaded.
HARNESS_TASK = """
include: {harness}/tasks/{group}/{name}.yaml
task: {name}_file
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {file}}}}}
training_split: null
test_split: null
"""


def run_harness(folder: Path, name: str, file: str) -> dict:
    """Score a Hugging Face folder in fp32 on a task's file; return {"acc,none": ..., "samples": [...], ...}."""
    import lm_eval

    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")]
    if name == "hellaswag":
        rows = [{"ctx_a": row["ctx"], "ctx_b": ""} | row for row in rows]
    asked, harness = folder / "rows.jsonl", Path(lm_eval.__file__).parent
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = HARNESS_TASK.format(harness=harness, group=name.partition("_")[0], name=name, file=asked)
    (folder / "task.yaml").write_text(task)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[f"{name}_file"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=16,
    )
    return found["results"][f"{name}_file"] | {"samples": found["samples"][f"{name}_file"]}


@pytest.mark.parametrize("name", TASKS)
def test_losses_and_scores_equal_those_of_the_harness(checkpoint, model, files, name, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    write_folder(checkpoint, tmp_path / "exported")
    theirs = run_harness(tmp_path / "exported", name, files[name])
    examples = load_examples(name, files[name], "lm_eval")
    trees = tokenize(examples, get_tokenizer("bytes"), model.config.context_length)
    ours, scores = ending_losses(model, trees, CPU), score_examples(model, trees, CPU)
    assert (scores.acc, scores.acc_norm) == (theirs["acc,none"], theirs["acc_norm,none"])
    for sample in theirs["samples"]:
        expected = [-log_likelihood for log_likelihood, _ in sample["filtered_resps"]]
        assert ours[sample["doc_id"]][: len(expected)] == pytest.approx(expected, abs=1e-3)
        assert np.isinf(ours[sample["doc_id"]][len(expected) :]).all()


def test_examples_are_the_requests_of_the_harness(files):
    """Those of lm-evaluation-harness 0.4.13."""
    assert load_examples("arc_challenge", files["arc_challenge"])[1] == Example(
        "Question: What is ice made of? \nAnswer:", ["sand", "air and wood", "water"], 2, "lm_eval"
    )
    assert load_examples("piqa", files["piqa"])[1] == Example(
        "Question: To cut bread,\nAnswer:", ["use a spoon", "use a knife with teeth \u2014 a saw"], 1, "lm_eval"
    )


@pytest.mark.parametrize("name", ROWS)
def test_scores_equal_those_of_a_plain_loop_over_the_endings(model, files, name):
    encode, chosen = get_tokenizer("bytes").encode, {"acc": [], "acc_norm": []}
    examples = load_examples(name, files[name])
    for example in examples:
        sums = []
        for ending in example.endings:
            tokens = torch.tensor(encode(f"{example.context} {ending}"))[-59:]  # one more than the model's context
            losses = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
            sums.append(losses[-len(encode(f" {ending}")) :].sum().item())
        chosen["acc"].append(int(np.argmin(sums)))
        chosen["acc_norm"].append(int(np.argmin([x / len(y) for x, y in zip(sums, example.endings, strict=True)])))
    for metric, labels in chosen.items():
        right = [example._replace(label=label) for example, label in zip(examples, labels, strict=True)]
        scores = score_examples(model, tokenize(right, get_tokenizer("bytes"), model.config.context_length), CPU)
        assert getattr(scores, metric) == 1
    assert chosen["acc"] != chosen["acc_norm"]


def test_absent_endings_are_never_chosen_and_no_close_calls(model, files):
    trees = tokenize(load_examples("arc_easy", files["arc_easy"]), get_tokenizer("bytes"), model.config.context_length)
    losses = ending_losses(model, trees, CPU)
    assert np.isinf(losses).sum(1).tolist() == [1, 2, 0]
    assert not close_calls(trees, losses).any()
    best, second = losses[1].argsort()[:2]
    losses[1, best] = losses[1, second]
    assert close_calls(trees, losses).tolist() == [False, True, False]


@pytest.mark.parametrize(("name", "wrong", "expected"), [
    ("arc_easy", {"answerKey": "E"}, r"'E' is not in list\W*; expected question, choices \(text, label\), answerKey"),
    ("arc_easy", {"question": None}, "expected question, choices"),
    ("arc_easy", {"choices": {"text": ["a"], "label": ["A"]}}, "1 endings, label 0"),
    ("arc_easy", {"choices": ["a", "b"]}, "expected question, choices"),
    ("piqa", {"label": -1}, r"2 endings, label -1\W*; expected goal, sol1, sol2, label"),  # as in the test split
    ("piqa", {"label": 0.7}, "'0.7'.*expected goal, sol1, sol2, label"),
    ("piqa", {"sol2": 3}, "expected goal, sol1, sol2, label"),
    ("hellaswag", {"ctx": None}, "expected ctx, endings, label"),
    ("hellaswag", {"endings": [1, 2, 3, 4]}, "expected ctx, endings, label"),
    ("hellaswag", {"endings": "abcd"}, "expected ctx, endings, label"),
    ("hellaswag", {"label": 9}, "4 endings, label 9"),
    ("hellaswag", {"label": ""}, "expected ctx, endings, label"),  # as in the test split
    ("hellaswag", "{", "expected ctx, endings, label"),
    ("hellaswag", "[]", "expected ctx, endings, label"),
    ("hellaswag", "7", "expected ctx, endings, label"),
    ("hellaswag", "[" * 100_000, "RecursionError.*expected ctx, endings, label"),
    ("hellaswag", {"endings": ["a", ""]}, "an empty ending"),
    ("hellaswag", {"label": 10**4000}, "4 endings, label 10{100,200}.?; exp"),
    ("piqa", {"sol2": ""}, "an empty ending"),
])  # fmt: skip
def test_a_malformed_row_is_reported_with_its_line(tmp_path, name, wrong, expected):
    (row, *_), path = ALL_ROWS[name], tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n{wrong if isinstance(wrong, str) else json.dumps(row | wrong)}\n")
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: not an example of {TASKS[name].title} \(.*{expected}"):
        load_examples(name, str(path))


def test_an_example_without_its_activity_has_no_style_of_lm_eval(tmp_path):
    row = {name: value for name, value in HELLASWAG[0].items() if name != "activity_label"}
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    assert load_examples("hellaswag", str(tmp_path / "old.jsonl"))
    with pytest.raises(UserError, match=r"old\.jsonl:1: not an example of HellaSwag \(KeyError\('activity_label'\)\)"):
        load_examples("hellaswag", str(tmp_path / "old.jsonl"), "lm_eval")


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot be read"), (b"", "empty; expected one JSON object per line"), (b"\xff\xfe", "cannot be read"),
])  # fmt: skip
def test_an_unreadable_file_is_reported(tmp_path, content, message):
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\.jsonl: {message}"):
        load_examples("hellaswag", str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("character", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_skipped(tmp_path, character):
    row = HELLASWAG[0] | {"ctx": f"one{character}line"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    expected = Example(row["ctx"], row["endings"], 1, "build-nanogpt")
    assert load_examples("hellaswag", str(tmp_path / "rows.jsonl")) == [expected]


def test_tasks_have_names_and_files():
    assert parse_tasks("arc_easy, piqa=a/b.jsonl") == {"arc_easy": "", "piqa": "a/b.jsonl"}
    for wrong in ("arc", "", "piqa,"):
        known = "expected one or more of hellaswag, arc_easy, arc_challenge, piqa"
        with pytest.raises(UserError, match=rf"unknown task '(arc)?'; {known}"):
            parse_tasks(wrong)


CARD = """---
configs:
- config_name: ARC-Challenge
  data_files:
  - {split: test, path: ARC-Challenge/test-*}
- config_name: ARC-Easy
  data_files:
  - {split: train, path: ARC-Easy/train-*}
  - {split: test, path: ARC-Easy/test-*}
---
"""


def test_only_the_test_split_of_arc_easy_comes_from_the_hub(standin):
    stored = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ARC), stored)
    paths = ("ARC-Easy/test", "ARC-Easy/train", "ARC-Challenge/test")
    parquet = {f"{path}-00000-of-00001.parquet": stored.getvalue() for path in paths}
    standin.put("datasets/allenai/ai2_arc", {"README.md": CARD.encode(), **parquet})
    endings = ["a dog", "a bird", "a fish", "a very old horse", "a cow"]
    assert load_examples("arc_easy")[2] == Example("Question: Which animal flies?\nAnswer:", endings, 1, "lm_eval")
    assert standin.sent("GET .*ARC-Easy/test-")
    assert not standin.sent("GET .*(ARC-Challenge/|ARC-Easy/train-)")


def test_training_scores_the_tasks(workdir, files, capsys):
    tasks = f"arc_easy={files['arc_easy']},piqa={files['piqa']},arc_challenge=missing.jsonl"
    flags = ("--hellaswag_freq", "4", "--eval_tasks", tasks)
    assert run_here(*flags, "--use_tensorboard", "--run_name", "tiny") == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning: ") == captured.err.count("warning: no ARC-Challenge in this run: missing.jsonl")
    assert captured.out.count("PIQA acc ") == captured.out.count("ARC-Easy acc ") == 2
    assert "HellaSwag" not in captured.out + captured.err
    stored = json.loads((workdir / "checkpoints/evaluations.json").read_text())
    for name in ("arc_easy_acc", "arc_easy_acc_norm", "piqa_acc", "piqa_acc_norm"):
        assert metrics("logs", name) == {step: stored[str(step)][name] for step in (4, 8)}
    curves = {f"eval/{task}_{kind}" for task in ("arc_easy", "piqa") for kind in ("acc", "acc_norm")}
    assert curves <= scalars("runs/tiny").keys()
    assert run_here("--eval_only", *flags) == 0
    arc, piqa = capsys.readouterr().out.splitlines()[1:]
    assert arc.endswith("(3 examples, 3 of them cut to the model's context)")
    assert arc.startswith(f"step 8/8 | ARC-Easy acc {stored['8']['arc_easy_acc']:.4f} ")
    expected = f"PIQA acc {stored['8']['piqa_acc']:.4f} acc_norm {stored['8']['piqa_acc_norm']:.4f} "
    assert piqa.startswith(f"step 8/8 | {expected}")


def test_tasks_that_would_not_be_scored_are_an_error():
    with pytest.raises(UserError, match="--eval_tasks piqa needs a --hellaswag_freq above 0"):
        TrainConfig(eval_tasks="piqa", hellaswag_freq=0).check_together()
    TrainConfig(hellaswag_freq=0).check_together()


def test_the_command_scores_several_tasks(checkpoint, files, tmp_path, capsys):
    torch.save(checkpoint, tmp_path / "latest.pt")
    tasks = ",".join(f"{name}={file}" for name, file in files.items())
    flags = ["--task", tasks, "--style", "lm_eval", "--limit", "2"]
    assert hellaswag_eval.main(["--checkpoint_dir", str(tmp_path), "--device", "cpu", *flags]) == 0
    for line, (name, task) in zip(capsys.readouterr().out.splitlines(), TASKS.items(), strict=True):
        assert f"latest.pt at step 7: {task.title} acc " in line
        assert f"({min(2, len(ROWS.get(name, HELLASWAG)))} examples" in line
