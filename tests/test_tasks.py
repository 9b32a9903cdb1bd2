"""Tests of the multiple-choice tasks other than HellaSwag: they are those of lm-evaluation-harness."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import metrics, run_here

import hellaswag_eval
from config import TrainConfig
from convert_hf import write_folder
from hellaswag_eval import close_calls, ending_losses, evaluate, tokenize
from model import GPT, GPTConfig
from steadygpt.cli import UserError
from steadygpt.distributed import Ranks
from steadygpt.tasks import TASKS, Example, load_examples, parse_tasks
from steadygpt.tokenizer import get_tokenizer

CPU = Ranks(torch.device("cpu"))

# Rows with the columns of the Hub. ARC has 3 to 5 endings, with letters or digits as labels.
ARC = [
    {
        "id": "Mercury_1",
        "question": "Which one gives light?",
        "choices": {"text": ["a lamp", "a stone", "the sea", "one of the trees"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    },
    {
        "id": "NYSEDREGENTS_2",
        "question": "What is ice made of? ",
        "choices": {"text": ["sand", "air and wood", "water"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    {
        "id": "Mercury_3",
        "question": "Which animal flies?",
        "choices": {"text": ["a dog", "a bird", "a fish", "a very old horse", "a cow"], "label": list("ABCDE")},
        "answerKey": "B",
    },
]
PIQA = [
    {"goal": "How do I dry a towel?", "sol1": "Hang it in the sun.", "sol2": "Put it into water.", "label": 0},
    {"goal": "To cut bread,", "sol1": "use a spoon", "sol2": "use a knife with teeth \u2014 a saw", "label": 1},
    {"goal": "When boiling butter, ", "sol1": "Pour it", "sol2": "Pour it onto a plate", "label": 1},
]
ROWS = {"arc_easy": ARC, "arc_challenge": ARC[::-1], "piqa": PIQA}
HELLASWAG = [{"activity_label": "Cooking", "ctx": "A man", "endings": ["sits.", "eats a.", "is", "of."], "label": "1"}]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Task -> .jsonl file."""
    for name, rows in (ROWS | {"hellaswag": HELLASWAG}).items():
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
    state = {"format_version": 1, "step": 7, "rows_consumed": 28, "optimizer": {}, "train_config": {}}
    return state | {"model": model.state_dict(), "model_config": vars(config), "tokenizer": "bytes"}


@pytest.fixture(scope="module")
def model(checkpoint) -> GPT:
    return hellaswag_eval.load_model(checkpoint)


def trees_of(name: str, file: str, context_length: int = 160):
    return tokenize(load_examples(name, file, "lm_eval"), get_tokenizer("bytes"), context_length)


@pytest.mark.parametrize("name", TASKS)
def test_losses_and_scores_equal_those_of_the_harness(checkpoint, model, files, name, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    from benchmarks.lm_eval_agreement import run_harness

    write_folder(checkpoint, tmp_path / "exported")
    theirs = run_harness(tmp_path / "exported", name, files[name])
    trees = trees_of(name, files[name], model.config.context_length)
    ours, scores = ending_losses(model, trees, CPU), evaluate(model, trees, CPU)
    assert (scores.acc, scores.acc_norm) == (theirs["acc,none"], theirs["acc_norm,none"])
    for sample in theirs["samples"]:
        expected = [-log_likelihood for log_likelihood, _ in sample["filtered_resps"]]
        assert ours[sample["doc_id"]][: len(expected)] == pytest.approx(expected, abs=1e-3)
        assert np.isinf(ours[sample["doc_id"]][len(expected) :]).all()
