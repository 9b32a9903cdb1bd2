"""evaluations.json in a run's folder: what each evaluation found.

An evaluation belongs to weights, which are known by their step and the launch that took it. A run that goes back to an
older checkpoint keeps the evaluations of the steps that it undoes, because files of those steps may be kept too.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from steadygpt.base.opening import LARGEST_JSON, read_file
from steadygpt.base.options import UserError
from steadygpt.base.progress import say
from steadygpt.base.typed import parse_json

EVALUATIONS = "evaluations.json"
LaunchId = Annotated[str, "[0-9a-f]{16}"]
Scores = dict[str, Annotated[float, -100] | None]  # such as val_loss; CORE may be below 0; None: not finite
Evaluations = dict[LaunchId, dict[int, Scores]]  # see origin(); of each step


def origin(launches: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the id of the launch that computed the weights of a step: the last one that began before it.

    The weights of the run's first step are those of its first launch. Without launches, of converted weights, it is "".
    """
    if not launches:
        return ""
    began_before = bisect_left(launches, step, key=itemgetter("step"))
    return launches[max(0, began_before - 1)]["id"]


def of_run(evaluations: Evaluations, launches: Sequence[Mapping[str, Any]]) -> dict[int, Scores]:
    """Return step -> scores of the steps that led to the last one of these launches, and of its own, ascending."""
    steps = sorted({step for of_start in evaluations.values() for step in of_start})
    found = {}
    for step in steps:
        scores = evaluations.get(origin(launches, step), {}).get(step)
        if scores is not None:
            found[step] = scores
    return found


def every_score(evaluations: Evaluations) -> Iterator[tuple[int, Scores]]:
    """Yield the step and the scores of all evaluations."""
    for of_start in evaluations.values():
        yield from of_start.items()


def merged(evaluations: Evaluations, others: Evaluations) -> Evaluations:
    """Return the evaluations of both; of one that both have, that of `others`."""
    return {start: evaluations.get(start, {}) | others.get(start, {}) for start in evaluations | others}


def content_of(evaluations: Evaluations) -> bytes:
    """Return the content of an evaluations.json."""
    return f"{json.dumps(evaluations, indent=1)}\n".encode()


def parse_evaluations(content: bytes, name: object) -> Evaluations:
    """Return the content of an evaluations.json, or {} with a warning if it does not fit."""
    advice = "its validation losses are ignored"
    try:
        evaluations = parse_json(content, Evaluations, name, advice)
        for step, scores in every_score(evaluations):
            for score, value in scores.items():
                if score.startswith("val_") and value is not None and value < 0:
                    raise UserError(f"{name}: {score} of step {step} is {value}; expected 0 or more; {advice}")
        return evaluations
    except UserError as error:
        say(f"warning: {error}")
        return {}


def read_evaluations(folder: Path) -> Evaluations:
    """Return the evaluations in a folder, {} without the file."""
    path = folder / EVALUATIONS
    return parse_evaluations(read_file(path, LARGEST_JSON), path) if path.exists() else {}
