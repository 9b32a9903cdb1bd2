"""evaluations.json in a run's folder: the scores of each evaluation.

An evaluation belongs to weights, which are identified by their step and by the launch that took this step. A run that
goes back to an older checkpoint keeps the evaluations of the steps that it undoes, because their files may be kept too.
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
Scores = dict[str, Annotated[float, -100] | None]  # such as val_loss; some may be below 0; None: not finite
Evaluations = dict[LaunchId, dict[int, Scores]]  # launch, see origin() -> step -> scores


def origin(launches: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return the id of the launch that computed the weights of a step: the last one that began before it.

    The weights of the run's first step are those of its first launch. Converted weights have no launches: "".
    """
    if not launches:
        return ""
    began_before = bisect_left(launches, step, key=itemgetter("step"))
    return launches[max(0, began_before - 1)]["id"]


def scores_of_run(evaluations: Evaluations, launches: Sequence[Mapping[str, Any]]) -> dict[int, Scores]:
    """Return step -> scores, ascending, of the steps that led to the last of these launches and of its own steps."""
    steps: set[int] = set()
    for scores_by_step in evaluations.values():
        steps.update(scores_by_step)
    scores_of_steps = {}
    for step in sorted(steps):
        scores = evaluations.get(origin(launches, step), {}).get(step)
        if scores is not None:
            scores_of_steps[step] = scores
    return scores_of_steps


def every_score(evaluations: Evaluations) -> Iterator[tuple[int, Scores]]:
    """Yield the step and the scores of all evaluations."""
    for scores_by_step in evaluations.values():
        yield from scores_by_step.items()


def merged(evaluations: Evaluations, preferred: Evaluations) -> Evaluations:
    """Return all evaluations of the two. Where both have scores of a step, they are those of `preferred`."""
    return {launch: evaluations.get(launch, {}) | preferred.get(launch, {}) for launch in evaluations | preferred}


def content_of(evaluations: Evaluations) -> bytes:
    """Return the content of an evaluations.json."""
    return f"{json.dumps(evaluations, indent=1)}\n".encode()


def parse_evaluations(content: bytes, name: object) -> Evaluations:
    """Return the evaluations in the content of an evaluations.json, or {} with a warning if it is not valid."""
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
