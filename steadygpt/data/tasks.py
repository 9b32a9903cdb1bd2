"""Examples of HellaSwag, and of CORE's tasks in the evaluation bundle of DCLM and nanochat."""

import csv
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from steadygpt.base.options import UserError
from steadygpt.base.typed import Count, parse_json, typed
from steadygpt.network.hub import read_table

HELLASWAG, CORE = "hellaswag", "core"
HUB = "Rowan/hellaswag"
VALIDATION = "data/validation-00000-of-00001.parquet"
ENDINGS = 4  # of each context of HellaSwag
SCHEMA = "schema"  # the answers differ in their contexts
GREEDY = "language_modeling"  # one answer, which is right if each of its tokens is the most likely one


def _checked_list(value: object) -> list:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.50} is not a list")
    return value


# The kinds of task: the columns of a row, and the pairs of context and continuation to choose from.
KINDS: dict[str, tuple[str, Callable[[dict], list[tuple[str, str]]]]] = {
    HELLASWAG: ("ctx, endings, label", lambda row: [(row["ctx"], ending) for ending in _checked_list(row["endings"])]),
    "multiple_choice": (
        "query, choices, gold",
        lambda row: [(row["query"], choice) for choice in _checked_list(row["choices"])],
    ),
    SCHEMA: (
        "context_options, continuation, gold",
        lambda row: [(context, row["continuation"]) for context in _checked_list(row["context_options"])],
    ),
    GREEDY: ("context, continuation", lambda row: [(row["context"].strip(), row["continuation"])]),
}


class Row(NamedTuple):
    """An example of a task."""

    answers: list[tuple[str, str]]  # context and continuation
    label: int  # index of the right answer


class Task(NamedTuple):
    """Examples of one kind."""

    label: str
    kind: str  # of KINDS
    rows: Sequence[Row]
    chance: float = 1 / ENDINGS  # accuracy of guessing
    shots: int = 0  # answered examples before each
    delimiter: str = " "  # between context and continuation

    def shots_of(self, number: int) -> str:
        """Return the answered examples before example `number`, the same as in nanochat's evaluation."""
        picked = random.Random(1234 + number).sample(range(len(self.rows) - 1), self.shots)
        # Skip the example itself: numbers from its own on are one higher.
        shots = (self.rows[n + (n >= number)] for n in picked)
        return "".join(f"{self.delimiter.join(row.answers[row.label])}\n\n" for row in shots)


@dataclass(frozen=True)
class Listed:
    """A task in core.yaml."""

    label: str
    dataset_uri: str  # a path in the folder eval_data
    num_fewshot: tuple[Count]
    icl_task_type: str
    continuation_delimiter: str = " "


@dataclass(frozen=True)
class Listing:
    """The content of core.yaml."""

    icl_tasks: list[Listed]


def load_hellaswag(file: str = "", limit: int | None = None) -> list[Task]:
    """Load the first `limit` examples as one task, from the Hub or from a .jsonl file with the Hub's columns."""
    try:
        lines = _lines(Path(file)) if file else [*enumerate(read_table(HUB, VALIDATION), start=1)]
    except (UserError, OSError) as error:
        raise UserError(f"{error}; --hellaswag_file FILE names a file with the examples") from error
    return [Task(HELLASWAG, HELLASWAG, _read_rows(HELLASWAG, file or HUB, lines[:limit]))]


def load_core(folder: str, limit: int | None = None) -> list[Task]:
    """Load at most `limit` examples of each task of an evaluation bundle, in the order of nanochat."""
    path = Path(folder, "core.yaml")
    baselines_path = Path(folder, "eval_meta_data.csv")
    try:
        content = yaml.safe_load(_read(path))
        baselines = {}
        for line in csv.DictReader(_read(baselines_path).splitlines()):
            baselines[line.get("Eval Task")] = line.get("Random baseline")
    except UserError:
        raise
    except Exception as error:  # on arbitrary bytes PyYAML may raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} or {baselines_path.name}: cannot be read ({reason}); expected those of the bundle"
        ) from None
    listing: Listing = typed(content, Listing, path, "expected the core.yaml of the bundle")
    if len({task.label for task in listing.icl_tasks} or {""}) != len(listing.icl_tasks):
        raise UserError(f"{path}: expected tasks, each with a label of its own")
    kinds_of_core = [kind for kind in KINDS if kind != HELLASWAG]
    tasks = []
    for task in listing.icl_tasks:
        label = task.label
        kind = task.icl_task_type
        [shots] = task.num_fewshot
        chance = math.nan
        with suppress(ValueError):
            chance = float(baselines.get(label) or "") / 100
        if not 0 <= chance <= 0.99:
            raise UserError(f"{baselines_path}: no Random baseline of {label} from 0 to 99 percent; expected one")
        if kind not in kinds_of_core:
            raise UserError(f"{path}: {label} is of the kind {kind!r}; expected one of {', '.join(kinds_of_core)}")
        file = Path(folder, "eval_data", task.dataset_uri)
        lines = _lines(file)
        random.Random(1337).shuffle(lines)
        rows = _read_rows(kind, file, lines[:limit])
        if len(rows) <= shots:
            raise UserError(
                f"{file}: {len(rows)} examples are read; expected more than the {shots} before each one, from the "
                "file and by --limit"
            )
        tasks.append(Task(label, kind, rows, chance, shots, task.continuation_delimiter))
    return tasks


def _read_rows(kind: str, file: object, lines: Iterable[tuple[int, Any]]) -> list[Row]:
    """Read the examples from numbered lines of JSON, or from numbered rows of the Hub."""
    columns, answers_of = KINDS[kind]
    advice = f"expected {columns}"
    rows: list[Row] = []
    for number, line in lines:
        where = f"{file}:{number}"
        row = parse_json(line, dict, where, advice) if isinstance(line, str) else line
        try:
            label = 0
            if kind != GREEDY:
                name = columns.split(", ")[-1]
                value = row.get(name)
                if value is None or value == "":
                    raise UserError(f"{where}: has no {name}; take rows with one, such as those for validation")
                if not re.fullmatch(r"-?\d{1,9}", str(value)):  # the Hub has a string
                    raise UserError(f"{where}: {name} is {value!r:.50}; expected the number of the right answer")
                label = int(str(value))
            answers = answers_of(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{where}: not an example of {kind} ({error!r:.200}); {advice}") from None
        rows.append(Row(typed(answers, list[tuple[str, str]], where, advice), label))
        if kind == HELLASWAG and len(rows[-1].answers) != ENDINGS:
            raise UserError(f"{where}: {len(rows[-1].answers)} endings; expected {ENDINGS}, as of HellaSwag")
        if not 0 <= label < len(rows[-1].answers):
            raise UserError(
                f"{where}: the right one of {len(rows[-1].answers)} answers is said to be {label}; {advice}"
            )
    return rows


def _lines(path: Path) -> list[tuple[int, Any]]:
    """Return the numbered lines of a file that are not blank."""
    text = _read(path).rstrip("\n")
    if not text:
        raise UserError(f"{path}: empty; expected one JSON object per line")
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a path with a NUL
        raise UserError(f"{path}: cannot be read ({error}); expected such a file, see docs/evaluation.md") from error
