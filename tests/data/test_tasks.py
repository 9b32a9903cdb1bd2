"""Reading examples: of HellaSwag from the Hub or a file, of CORE from an evaluation bundle."""

import io
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.core_speed import TASKS, write_bundle
from steadygpt.base import retry
from steadygpt.base.options import UserError
from steadygpt.data.tasks import Row, Task, load_core, load_hellaswag

EXAMPLE = {"activity_label": "Cooking", "ctx": "A man", "endings": ["sits.", "eats a.", "is", "of."], "label": "1"}
ANSWERS = [("A man", ending) for ending in EXAMPLE["endings"]]


@pytest.fixture
def bundle(tmp_path) -> Path:
    """An evaluation bundle of two tasks."""
    write_bundle(tmp_path, rows=12)
    listed = "icl_tasks:\n" + "".join(
        f"- {{label: {label}, dataset_uri: {kind}/{label}.jsonl, num_fewshot: [{shots}], icl_task_type: {kind}}}\n"
        for label, kind, shots in (("piqa", "multiple_choice", 10), ("winograd", "schema", 0))
    )
    (tmp_path / "core.yaml").write_text(listed)
    return tmp_path


def test_a_bundle_has_tasks_of_all_kinds(tmp_path):
    write_bundle(tmp_path, rows=12)
    tasks = load_core(str(tmp_path))
    found = {task.label: (task.kind, task.shots, task.delimiter, 100 * task.chance) for task in tasks}
    assert found == {label: (*about, pytest.approx(chance)) for label, (*about, chance, _) in TASKS.items()}
    assert {len(task.rows) for task in tasks} == {12}
    assert {len(task.rows) for task in load_core(str(tmp_path), limit=11)} == {11}


def test_rows_are_contexts_with_continuations(bundle):
    lines = {
        "multiple_choice/piqa": {"query": "Q", "choices": ["a", "b"], "gold": 1},
        "schema/winograd": {"context_options": ["It", "He"], "continuation": "is", "gold": 0},
        "language_modeling/coqa": {"context": " C\n", "continuation": "d "},
    }
    for path, row in lines.items():
        (bundle / f"eval_data/{path}.jsonl").write_text(f"{json.dumps(row)}\n" * 11)
    listed = (bundle / "core.yaml").read_text()
    coqa = (
        "{label: coqa, dataset_uri: language_modeling/coqa.jsonl, num_fewshot: [0], icl_task_type: language_modeling}"
    )
    (bundle / "core.yaml").write_text(f"{listed}- {coqa}\n")
    found = [task.rows[0] for task in load_core(str(bundle))]
    expected = [([("Q", "a"), ("Q", "b")], 1), ([("It", "is"), ("He", "is")], 0), ([("C", "d ")], 0)]
    assert found == expected


def test_the_order_and_the_examples_before_an_example_are_those_of_nanochat(bundle):
    """As it draws them: from the shuffled rows without the one that is asked."""
    path = bundle / "eval_data/multiple_choice/piqa.jsonl"
    path.write_text("".join(f'{{"query": "{n}", "choices": ["no", "yes"], "gold": 1}}\n' for n in range(30)))
    task, _ = load_core(str(bundle), limit=20)
    order = [*range(30)]
    random.Random(1337).shuffle(order)
    assert [int(row.answers[0][0]) for row in task.rows] == order[:20]
    for number in (0, 7, 19):
        others = [n for n in range(20) if n != number]
        picked = random.Random(1234 + number).sample(others, 10)
        assert task.shots_of(number) == "".join(f"{order[n]} yes\n\n" for n in picked)


@pytest.mark.parametrize(("kind", "row", "message"), [
    ("piqa", '{"query": "a", "choices": [], "gold": 0}', r"\b0\b.*\b0\b.*query, choices, gold"),
    ("piqa", '{"query": "a", "choices": ["b", "c"], "gold": 2}', r"\b2\b.*\b2\b"),
    ("piqa", '{"query": "a", "choices": ["b", null], "gold": 0}', r"Expected `str`, got `null` - at `\$\[1\]\[1\]`"),
    ("piqa", '{"query": "a", "choices": ["b"], "gold": -1}', r"\b1\b.*-1\b"),
    ("piqa", '{"choices": ["b"], "gold": 0}', r"\bmultiple_choice \(KeyError\('query'\)\)"),
    ("winograd", '{"context_options": 3, "continuation": "b", "gold": 0}', r"\bschema \(TypeError"),
    ("winograd", '{"context', "JSON .*context_options, continuation, gold"),
    ("winograd", "[1]", "Expected `object`, got `array`"),
    ("piqa", '{"query": "a", "choices": ["b", "c"]}', r"(?!.*choices).*\bgold\b"),
    ("piqa", '{"query": "a", "choices": "bc", "gold": 0}', "TypeError.*'bc'"),
])  # fmt: skip
def test_a_broken_row_of_a_bundle_is_named(bundle, kind, row, message):
    [path] = bundle.glob(f"eval_data/*/{kind}.jsonl")
    lines = path.read_text().split("\n")
    lines[4] = row
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"{kind}\.jsonl:5: .*{message}"):
        load_core(str(bundle))


@pytest.mark.parametrize(("file", "old", "new", "message"), [
    ("core.yaml", "icl_tasks", "tasks", r"core\.yaml: .*`icl_tasks`"),
    ("core.yaml", "label: winograd", "label: piqa", r"(?i)core\.yaml: .*\blabel\b"),
    ("core.yaml", "icl_task_type: schema", "icl_task_type: hellaswag", "winograd .*'hellaswag'.*multiple_choice"),
    ("core.yaml", "[10]", "2020-99-99", r"core\.yaml .*\(month must be"),
    ("core.yaml", "[10]", "ten", r"core\.yaml: .*`\$.icl_tasks\[0\].num_fewshot`"),
    ("core.yaml", "[10]", "[12]", r"piqa\.jsonl: \D*12\b\D*\b12\b.*--limit\b"),
    ("core.yaml", "- {", "- }", r"core\.yaml .*eval_meta_data\.csv: .*\(while parsing"),
    ("core.yaml", "icl_task_type: schema", "icl_task_type: chat", "winograd .*'chat'.*multiple_choice"),
    ("core.yaml", "schema/", "nowhere/", r"nowhere/winograd\.jsonl: .*\(\[Errno 2\]"),
    ("eval_meta_data.csv", "piqa,50", "piqa,half", r"eval_meta_data\.csv: .*\bpiqa\b.*\b0\b.*\b99\b"),
    ("eval_meta_data.csv", "winograd,", "wino,", r"eval_meta_data\.csv: .*\bwinograd\b.*\b0\b.*\b99\b"),
    ("eval_meta_data.csv", "piqa,50", "piqa,100", r"eval_meta_data\.csv: .*\bpiqa\b.*\b0\b.*\b99\b"),
    ("eval_meta_data.csv", "piqa,50", "piqa,NaN", r"eval_meta_data\.csv: .*\bpiqa\b.*\b0\b.*\b99\b"),
])  # fmt: skip
def test_a_broken_bundle_is_explained(bundle, file, old, new, message):
    path = bundle / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        load_core(str(bundle))


# ---------------------------------------------------------------------------------------------------------------------
# HellaSwag


@pytest.mark.parametrize(("wrong", "expected"), [
    ({"ctx": None}, r"Expected `str`, got `null` - at `\$\[0\]\[0\]`"), ({"endings": "abcd"}, "TypeError.*'abcd'"),
    ({"endings": 3}, "hellaswag .*ctx, endings, label"), ({"label": 9}, r"\b4\b.*\b9\b"),
    ({"label": ""}, r"(?!.*endings)\D*\blabel\b\D*$"),
    ({"endings": ["a", "b", "c"]}, r"\b3\b.*\b4\b"),
    ({"label": 0.7}, r"\blabel .*\b0\.7\b"), ({"label": 10**4000}, r"\blabel .*\b10{40}"),
    ("{", "JSON .*truncated"), ("7", "`object`.*`int`"), ('{"ctx": ' + "[" * 100_000, "JSON .*recursion"),
])  # fmt: skip
def test_a_malformed_row_is_reported_with_its_line(tmp_path, wrong, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(EXAMPLE)}\n{wrong if isinstance(wrong, str) else json.dumps(EXAMPLE | wrong)}\n")
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{expected}"):
        load_hellaswag(str(path))
    assert load_hellaswag(str(path), limit=1)[0].rows == [Row(ANSWERS, 1)]


@pytest.mark.parametrize(("content", "message"), [
    (None, r"\(\[Errno 2\]"), (b"", "JSON"), (b"\xff\xfe", r"\('utf-8' .*\b0xff\b"),
])  # fmt: skip
def test_an_unreadable_file_is_reported(tmp_path, content, message):
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\.jsonl: .*{message}.*--hellaswag_file FILE\b"):
        load_hellaswag(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("character", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_skipped(tmp_path, character):
    row = EXAMPLE | {"ctx": f"one{character}line"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    [task] = load_hellaswag(str(tmp_path / "rows.jsonl"))
    assert task.rows[0] == Row([(row["ctx"], ending) for ending in row["endings"]], 1)


def test_only_the_validation_split_comes_from_the_hub(standin, monkeypatch):
    rows = {name: [value] for name, value in EXAMPLE.items()}
    files = {}
    for split in ("train", "validation", "test"):
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(rows), file)
        files[f"data/{split}-00000-of-00001.parquet"] = file.getvalue()
    standin.put("datasets/Rowan/hellaswag", files)
    monkeypatch.setattr(retry, "sleep", lambda _: None)
    standin.fail("GET .*validation", times=2, status=500)
    expected = [Task("hellaswag", "hellaswag", [Row(ANSWERS, 1)])]
    assert load_hellaswag() == expected
    assert not standin.sent("GET .*(train|test)-")
    standin.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_hellaswag() == expected
    assert not standin.log
