"""Multiple-choice tasks: their data sets, and the conversion of rows to examples."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from steadygpt.base.options import UserError
from steadygpt.data.sources import read_split

STYLES = ("build-nanogpt", "lm_eval")


class Example(NamedTuple):
    """A context and the endings to choose from."""

    context: str
    endings: list[str]
    label: int  # index of the right ending
    style: str = "lm_eval"  # how it is tokenized, and what acc_norm divides by


class Task(NamedTuple):
    """A multiple-choice task, with the split that lm-evaluation-harness scores."""

    title: str
    dataset: str  # on the Hub, NAME[:CONFIG]
    split: str
    columns: str  # that `read` needs
    read: Callable[[dict], Example]  # of a row


def label_of(row: dict) -> int:
    """Return the index of the right ending: a number, or a string of digits as on the Hub."""
    return int(str(row["label"]))


def hellaswag(row: dict) -> Example:
    return Example(row["ctx"], row["endings"], label_of(row), "build-nanogpt")


def lm_eval_hellaswag(row: dict) -> Example:
    """Read a row as lm-evaluation-harness does (task hellaswag, version 1).

    Rows without ctx_a and ctx_b have ctx instead, and their last sentence keeps its lower-case letter.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = f"{row.get('ctx_a', row['ctx'])} {row.get('ctx_b', '').capitalize()}"
    endings = [clean(ending) for ending in row["endings"]]
    return Example(clean(f"{row['activity_label']}: {context}"), endings, label_of(row))


def arc(row: dict) -> Example:
    context, choices = "Question: " + row["question"] + "\nAnswer:", row["choices"]
    return Example(context, choices["text"], choices["label"].index(row["answerKey"]))


def piqa(row: dict) -> Example:
    return Example("Question: " + row["goal"] + "\nAnswer:", [row["sol1"], row["sol2"]], label_of(row))


ARC = "test", "question, choices (text, label), answerKey", arc
TASKS = {
    "hellaswag": Task("HellaSwag", "Rowan/hellaswag", "validation", "ctx, endings, label", hellaswag),
    "arc_easy": Task("ARC-Easy", "allenai/ai2_arc:ARC-Easy", *ARC),
    "arc_challenge": Task("ARC-Challenge", "allenai/ai2_arc:ARC-Challenge", *ARC),
    "piqa": Task("PIQA", "baber/piqa", "validation", "goal, sol1, sol2, label", piqa),
}
EXPECTED = f"one or more of {', '.join(TASKS)}, separated by commas; NAME=FILE reads a file instead of the Hub"


def parse_tasks(tasks: str) -> dict[str, str]:
    """Return name -> file, "" for the Hub, of tasks such as "hellaswag,arc_easy=FILE"."""
    files = {}
    for task in tasks.split(","):
        name, _, file = task.strip().partition("=")
        if name not in TASKS:
            raise UserError(f"unknown task {name!r}; expected {EXPECTED}")
        files[name] = file
    return files


def load_examples(name: str, file: str = "", style: str = STYLES[0]) -> list[Example]:
    """Load the examples of a task from the Hub, or from a .jsonl file whose rows have the columns of the Hub.

    Args:
        style: of HellaSwag; the other tasks have lm_eval's only.
    """
    task, examples = TASKS[name], []
    read = lm_eval_hellaswag if (name, style) == ("hellaswag", "lm_eval") else task.read
    for number, row in enumerate(_rows(name, file), start=1):
        try:
            example = read(json.loads(row) if isinstance(row, str) else row)
            endings, label = example.endings, example.label
            texts = [example.context, *endings] if isinstance(endings, list) else []
            if len(texts) < 3 or not all(isinstance(text, str) for text in texts) or not 0 <= label < len(endings):
                raise ValueError(f"{len(endings)} endings, label {label}")
            if not all(endings):  # the loss of no tokens would always be the lowest
                raise ValueError("an empty ending")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{file or task.dataset}:{number}: not an example of {task.title} ({error!r:.200})"
            raise UserError(f"{found}; expected {task.columns}") from error
        examples.append(example)
    return examples


def _rows(name: str, file: str) -> Sequence[Any]:
    """Return the lines of a file, or the rows of the Hub."""
    if not file:
        try:
            return read_split(TASKS[name].dataset, TASKS[name].split)
        except (UserError, OSError) as error:
            raise UserError(f"{error}; or read it from a file: {name}=FILE") from error
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); expected one JSON object per line") from error
    if lines == [""]:
        raise UserError(f"{file}: empty; expected one JSON object per line")
    return lines
