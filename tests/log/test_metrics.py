"""metrics.jsonl: segments of several launches, joined."""

import json
import random
import re
import textwrap
from pathlib import Path

import pytest
from conftest import REPO

from steadygpt.log.metrics import METRICS, LineFile, launches_from, read_records


def start_line(step: int, id: str = "1", parent: str = "", run: str = "a run", **more) -> dict:
    """Return the line with which a launch begins its segment."""
    line = {
        "step": step,
        "time": 1.5,
        "first_step": step,
        "run": run,
        "id": id,
        "parent": parent,
        "settings": {},
    }
    return line | more


def steps(first: int, end: int, loss: float = 1.0) -> list[dict]:
    return [{"step": step, "time": 2.5, "loss": loss} for step in range(first, end)]


def write_lines(path: Path, *lines: dict | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return path


# Steps 0 to 5; then a resume at step 3; a return to step 2; and a resume at step 7, of which an earlier log is lost.
RUN = [
    start_line(0), *steps(0, 6), start_line(3), *steps(3, 5, 2.0), start_line(2), *steps(2, 3, 3.0), start_line(7),
    *steps(7, 9, 4.0),
]  # fmt: skip


def test_later_starts_win_from_their_first_step_on(tmp_path):
    found = read_records(write_lines(tmp_path / METRICS, *RUN), "loss")
    assert [(record["step"], record["loss"]) for record in found] == [(0, 1), (1, 1), (2, 3), (7, 4), (8, 4)]


def test_launches_from_an_offset_on_begin_with_the_records_of_a_known_one(tmp_path):
    path = write_lines(tmp_path / METRICS, start_line(0), *steps(0, 4))
    offset = path.stat().st_size
    write_lines(path, *steps(4, 6), start_line(4, id="2"), *steps(4, 5, 2.0))
    found = [
        (launch["id"], [r["step"] for r in records]) for launch, records in launches_from(path, offset, {"id": "1"})
    ]
    assert found == [("1", [4, 5]), ("2", [4])]
    assert [*launches_from(path, 2 * path.stat().st_size, {"id": "1"})] == [({"id": "1"}, [])]  # a log that was deleted


BROKEN = [
    '{"step": 5, "ti', '{"step": 5, "loss": "low"}', '{"step": 5, "time": 1, "first_step": 5, "run": "a',
    '{"step": 5, "time": 1, "first_step": 1, "run": 3}', '{"step": 5, "loss": ' + "9" * 999 + "}",
    '{"step": 5, "loss": ' + "[" * 9_999, "\x00" * 99, "[]", "",
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda text: ascii(text)[:40])
def test_broken_lines_are_skipped(tmp_path, broken):
    path = write_lines(tmp_path / METRICS, broken, start_line(0), *steps(3, 5), broken, *steps(6, 7))
    assert [record["step"] for record in read_records(path)] == [3, 4, 6]


def test_a_start_after_a_broken_line_begins_on_a_line_of_its_own(tmp_path):
    path = write_lines(tmp_path / METRICS, start_line(0))
    with open(path, "a") as file:
        file.write('{"step": 0, "lo')  # as a power cut leaves it
    for line in (start_line(0, id="2"), *steps(0, 1)):
        log = LineFile(path)
        log.write(json.dumps(line))
        log.close()
    assert path.read_text().count("\n") == 4
    assert [record["loss"] for record in read_records(path)] == [1.0]


@pytest.mark.parametrize("seed", range(5))
def test_the_documented_lines_of_pandas_join_as_the_reader_does(seed):
    pd, rng = pytest.importorskip("pandas"), random.Random(seed)
    lines, end = [], 0
    for _ in range(rng.randrange(1, 6)):
        first = rng.randrange(end + 1)
        end = first + rng.randrange(1, 5)
        lines += [start_line(first), *steps(first, end, rng.random())]
    found = read_records(write_lines(Path("checkpoints") / METRICS, *lines))
    text = (REPO / "docs/monitoring.md").read_text()
    [code] = re.findall(r"^    df = pd\.read_json.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    exec(textwrap.dedent(code), names := {"pd": pd})
    joined = zip(names["df"].step, names["df"].loss, strict=True)
    assert [*joined] == [(record["step"], pytest.approx(record["loss"])) for record in found]
